"""What the kernels' GPU tests need."""

import pytest
import torch


@pytest.fixture(scope="module")
def hopper():
    """The GPU, where it is one of Hopper's."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("this is for Hopper")
    return torch.device("cuda")
