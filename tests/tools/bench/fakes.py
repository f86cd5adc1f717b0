"""A scripted clock, and programs that take scripted times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from mok.tools.bench.programs.base import Options, Program, Unavailable
from mok.tools.bench.telemetry import Telemetry


class FakeClock:
    """Time passes only when ``spend`` is called."""

    def __init__(self) -> None:
        self.time_ms = 0.0
        self.waits = 0

    def spend(self, ms: float) -> None:
        self.time_ms += ms

    def now(self) -> float:
        return self.time_ms / 1e3

    def mark(self) -> float:
        return self.time_ms

    def wait(self) -> None:
        self.waits += 1

    def ms(self, start: float, end: float) -> float:
        return end - start


class ScriptedProgram(Program):
    """Gives the right answers (from torch's pipeline) after a scripted time.

    Attributes:
        script: name → what to change: ms, forward (a hook on outputs), fails (a message), passes.
        log: (name, pass) of every timed call, over all programs.
    """

    script: ClassVar[dict[str, dict[str, Any]]] = {}
    log: ClassVar[list[tuple[str, str]]] = []

    def __init__(self, name: str, work: Any, options: Options) -> None:
        from mok.tools.bench.programs.torch_grouped import TorchProgram

        super().__init__(name, work, options)
        self.mine = self.script.get(name, {})
        if "missing" in self.mine:
            raise Unavailable(self.mine["missing"])
        self.passes = self.mine.get("passes", ("forward", "backward", "both"))
        self.inner = TorchProgram(name, work, options)
        self.closed = False
        self.note = self.mine.get("note", "")

    def _spend(self, pass_name: str) -> None:
        self.log.append((self.name, pass_name))
        self.options.clock.spend(self.mine.get("ms", {}).get(pass_name, 1.0))  # type: ignore[attr-defined]

    def forward(self, index: int) -> Any:
        if "fails" in self.mine:
            raise RuntimeError(self.mine["fails"])
        self._spend("forward")
        change: Callable[[Any], Any] = self.mine.get("change", lambda out: out)
        return change(self.inner.forward(index))

    def forward_training(self, index: int) -> tuple[Any, Any]:
        self._spend("forward")
        return self.inner.forward_training(index)

    def backward(self, index: int, saved: Any, keep: bool = False) -> Any:
        if "backward_fails" in self.mine:
            raise RuntimeError(self.mine["backward_fails"])
        self._spend("backward")
        return self.inner.backward(index, saved, keep=True)

    def gradients(self, raw: Any) -> Any:
        return self.inner.gradients(raw)

    def flops(self, pass_name: str) -> int:
        return 10**9 if pass_name == "gemm" else super().flops(pass_name)

    def check(self) -> None:
        if "check" in self.mine:
            raise RuntimeError(self.mine["check"])

    def close(self) -> None:
        self.closed = True


class FakeTelemetry(Telemetry):
    """1500 MHz and 690 W, always."""

    def __init__(self) -> None:
        super().__init__(None, "scripted")

    def between(self, begin: float, end: float) -> Any:
        from mok.tools.bench.telemetry import Reading

        return Reading(1500.0, 690.0, 4)


CPU = torch.device("cpu")
