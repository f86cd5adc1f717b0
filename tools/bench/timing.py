"""Timing in the steady regime: warm up until clock and power settle, then measure back to back.

Uses only the standard library and, for a GPU, torch: the worker of a peer that lives in another
interpreter loads this file by its path.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Step = Callable[[int], Any]
"""One call of a program on input set number i (modulo the number of sets)."""

_STRIDE_MS = 0.5  # calls shorter than this share a pair of marks, which cost host time


class Clock(Protocol):
    """Where time is read: the GPU's, or in tests a scripted one."""

    def now(self) -> float:
        """Host seconds, for matching telemetry with windows."""

    def mark(self) -> Any:
        """Note the present point of the stream."""

    def wait(self) -> None:
        """Wait until everything before the last mark has happened."""

    def ms(self, start: Any, end: Any) -> float:
        """Milliseconds between two marks that have happened."""


class CudaClock:
    """CUDA events on torch's current stream."""

    def __init__(self, device: Any = None) -> None:
        import torch

        self._torch = torch
        self._device = device

    def now(self) -> float:
        return time.perf_counter()

    def mark(self) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        self._torch.cuda.synchronize(self._device)

    def ms(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end))


class HostClock:
    """The host's clock, for programs that run on the CPU."""

    def now(self) -> float:
        return time.perf_counter()

    def mark(self) -> float:
        return time.perf_counter()

    def wait(self) -> None:
        pass

    def ms(self, start: float, end: float) -> float:
        return 1e3 * (end - start)


@dataclass(frozen=True)
class Regime:
    """How long a window is.

    Attributes:
        warm_ms: run before the window, so that clock and power settle. An H200's power limit strikes after about
            100 ms of load, for another 200 (docs/measurements/h200.md).
        run_ms: length of the window.
        min_calls, max_calls: bounds of the calls in a window.
    """

    warm_ms: float = 400.0
    run_ms: float = 300.0
    min_calls: int = 3
    max_calls: int = 200_000


@dataclass
class Window:
    """One window of back-to-back calls.

    Attributes:
        calls_ms: milliseconds of each call (or the mean of a few, where calls are very short).
        calls: how many calls there were.
        begin, end: host seconds of the window, for telemetry.
    """

    calls_ms: list[float]
    calls: int
    begin: float
    end: float

    @property
    def median(self) -> float:
        return statistics.median(self.calls_ms)


def measure(step: Step, clock: Clock, regime: Regime) -> Window:
    """Warm up, then time a window of back-to-back calls; the host waits only at its end."""
    index, warmed, estimate = 0, 0.0, math.inf
    batch = 1
    while warmed < regime.warm_ms or math.isinf(estimate):
        start = clock.mark()
        for _ in range(batch):
            step(index)
            index += 1
        end = clock.mark()
        clock.wait()
        elapsed = max(clock.ms(start, end), 1e-6)
        warmed += elapsed
        estimate = elapsed / batch
        remaining = max(regime.warm_ms - warmed, 0.0)
        batch = int(min(max(remaining / estimate, 1), 2 * batch, regime.max_calls))
    calls = int(min(max(math.ceil(regime.run_ms / estimate), regime.min_calls), regime.max_calls))
    stride = max(1, min(int(_STRIDE_MS / estimate), calls // max(regime.min_calls, 1)))
    begin = clock.now()
    marks, counts = [clock.mark()], []
    done = 0
    while done < calls:
        count = min(stride, calls - done)
        for _ in range(count):
            step(index)
            index += 1
        done += count
        counts.append(count)
        marks.append(clock.mark())
    clock.wait()
    end_time = clock.now()
    pairs = zip(itertools.pairwise(marks), counts, strict=True)
    times = [clock.ms(*pair) / count for pair, count in pairs]
    return Window(times, calls, begin, end_time)


@dataclass(frozen=True)
class Summary:
    """Windows of several rounds together.

    Attributes:
        ms: median over the rounds of each round's median.
        spread: (slowest − fastest round) / ms; a difference below it is noise. Of a single round,
            (p90 − p10) / ms of its calls.
        p10, p90: of all calls.
        rounds_ms: each round's median, in order; rounds of different programs correspond.
        calls: in all windows.
    """

    ms: float
    spread: float
    p10: float
    p90: float
    rounds_ms: tuple[float, ...]
    calls: int


def summarize(windows: Sequence[Window]) -> Summary:
    """Median and spread of one program's windows (at least one)."""
    rounds = tuple(w.median for w in windows)
    every = sorted(ms for w in windows for ms in w.calls_ms)
    middle = statistics.median(rounds)
    p10 = every[int(0.1 * (len(every) - 1))]
    p90 = every[math.ceil(0.9 * (len(every) - 1))]
    width = max(rounds) - min(rounds) if len(rounds) > 1 else p90 - p10
    return Summary(
        ms=middle,
        spread=width / middle if middle else 0.0,
        p10=p10,
        p90=p90,
        rounds_ms=rounds,
        calls=sum(w.calls for w in windows),
    )


def best_of(
    candidates: Sequence[Callable[[], Any]], clock: Clock, repeats: int = 7
) -> tuple[int, dict[int, str]]:
    """Number of the fastest candidate, and why others could not run.

    Each is called twice first (it may compile), then ``repeats`` times between marks. For choosing
    among variants of one step; results are timed with ``measure``.

    Raises:
        RuntimeError: none runs.
    """
    times: dict[int, float] = {}
    failed: dict[int, str] = {}
    for number, call in enumerate(candidates):
        try:
            for _ in range(2):
                call()
            start = clock.mark()
            for _ in range(repeats):
                call()
            end = clock.mark()
            clock.wait()
            times[number] = clock.ms(start, end)
        except Exception as error:  # a variant that does not fit this shape
            failed[number] = reason_of(error)
    if not times:
        raise RuntimeError(f"no variant runs: {failed}")
    return min(times, key=lambda n: times[n]), failed


def reason_of(error: BaseException) -> str:
    """One line that says what went wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    return f"{type(error).__name__}: {text[:240]}" if text else type(error).__name__


@dataclass
class Deadline:
    """A budget of host seconds; ``seconds`` None never ends."""

    seconds: float | None
    now: Callable[[], float] = time.perf_counter
    begin: float = field(init=False)

    def __post_init__(self) -> None:
        self.begin = self.now()

    @property
    def left(self) -> float:
        return math.inf if self.seconds is None else self.begin + self.seconds - self.now()

    @property
    def over(self) -> bool:
        return self.left <= 0

    def part(self, share: float) -> Deadline:
        """A deadline for a share of what is left."""
        return Deadline(None if self.seconds is None else max(self.left, 0) * share, self.now)
