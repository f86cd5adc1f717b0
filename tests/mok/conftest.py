"""What tests of the layer share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.emulator, id="emulator"),
        pytest.param("cuda", marks=pytest.mark.gpu, id="gpu"),
    ]
)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where a test's kernels run: "cuda", or "cpu" inside the emulator."""
    if request.param == "cuda":
        yield "cuda"
        return
    pytest.importorskip("cutlass", reason="kernels need the CuTe DSL")
    emulator = pytest.importorskip("mok.tools.emulator", reason="the emulator needs numba")
    with emulator.Emulator("sm_90a", num_sms=6):
        yield "cpu"
