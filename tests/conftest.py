from __future__ import annotations

import functools
import importlib.util

import pytest
import torch

# The matrices of tests are small: threads cost more than they give, above all under xdist.
torch.set_num_threads(1)


@functools.cache
def gpus() -> tuple[int, str]:
    """How many GPUs have kernels, and why the first has none; "" if it has."""
    from mok.backends import choose_backend

    found = choose_backend()
    if not found.on_gpu:
        return 0, found.note or "there is no GPU"
    from mok.runtime.device import device_info

    archs = [device_info(i).arch for i in range(torch.cuda.device_count())]
    return archs.count(found.arch), ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot run, and say why."""
    if item.get_closest_marker("emulator") and importlib.util.find_spec("numba") is None:
        pytest.skip("the emulator needs numba")
    if item.get_closest_marker("gpu") or item.get_closest_marker("multi_gpu"):
        count, reason = gpus()
        if count == 0:
            pytest.skip(f"needs a supported GPU: {reason}")
        if item.get_closest_marker("multi_gpu") and count < 2:
            pytest.skip("needs two supported GPUs: there is one")


@pytest.fixture(scope="session", autouse=True)
def _backend(request: pytest.FixtureRequest) -> None:
    """Print what kernels run on, even under output capture."""
    from mok.backends import choose_backend

    lines: list[str] = []
    choose_backend().announce(lines.append)
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("\n" + "\n".join(lines))
