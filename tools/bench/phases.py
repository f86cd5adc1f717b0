"""Where the time inside our own calls goes: marks around their parts, without changing them."""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from mok.tools.bench.timing import Clock

REST = "barriers, copies, gaps"


def _places() -> list[tuple[str, Any, str]]:
    """(phase, owner, attribute) of each part of a forward or backward call."""
    from mok import functional
    from mok.backward_call import BackwardCall
    from mok.call import Call
    from mok.steady import Steady

    return [
        ("schedule", functional, "build_schedule"),
        ("kernel", Call, "run_forward"),
        ("token sum", Call, "sum_forward"),
        ("kernel", Steady, "run_kernel"),
        ("token sum", Steady, "run_sum"),
        ("backward kernel", BackwardCall, "run_backward"),
        ("backward sums", BackwardCall, "sum_backward"),
    ]


class PhaseMarks:
    """Marks taken while calls run; read them with ``means`` once the clock was waited for."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.marks: list[tuple[str, Any, Any]] = []

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Within it, every part of a call is marked."""
        undo: list[tuple[Any, str, Any]] = []
        try:
            for phase, owner, attribute in _places():
                original = getattr(owner, attribute)
                setattr(owner, attribute, self._marked(phase, original))
                undo.append((owner, attribute, original))
            yield
        finally:
            for owner, attribute, original in undo:
                setattr(owner, attribute, original)

    def _marked(self, phase: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            start = self.clock.mark()
            result = original(*args, **more)
            self.marks.append((phase, start, self.clock.mark()))
            return result

        return call

    def times(self) -> dict[str, list[float]]:
        """Milliseconds of every marked part, by phase."""
        found: dict[str, list[float]] = defaultdict(list)
        for phase, start, end in self.marks:
            found[phase].append(self.clock.ms(start, end))
        return dict(found)


def measure_phases(
    step: Callable[[int], Any], clock: Clock, calls: int, warm_calls: int
) -> dict[str, float]:
    """Milliseconds per call of each phase and of the rest, from back-to-back calls.

    Parts that a call has several times (virtual ranks) are added up.
    """
    for index in range(warm_calls):
        step(index)
    marks = PhaseMarks(clock)
    with marks.installed():
        points = [clock.mark()]
        for index in range(calls):
            step(index)
            points.append(clock.mark())
        clock.wait()
    whole = statistics.median(clock.ms(a, b) for a, b in itertools.pairwise(points))
    phases = {
        phase: statistics.median(times) * len(times) / calls
        for phase, times in marks.times().items()
    }
    phases[REST] = max(whole - sum(phases.values()), 0.0)
    return phases
