"""What tests of the layer share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An emulator that runs nothing."""
    from mok.runtime import compile as compiler
    from mok.runtime.launch import set_active_emulator
    from tests.helpers_bad_input import Idle

    monkeypatch.setattr(compiler, "_kernels", {})  # what is compiled here serves nobody else
    before = set_active_emulator(Idle())
    yield
    set_active_emulator(before)


@pytest.fixture
def idle(standin: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, and nothing is compiled either: arguments are refused before that."""
    from mok.runtime import compile as compiler

    def refuse(spec: Any) -> None:
        raise AssertionError(f"{spec.name} was compiled in spite of a wrong argument")

    monkeypatch.setattr(compiler, "_compile_only", refuse)
