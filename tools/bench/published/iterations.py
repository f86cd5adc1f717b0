"""The timed loop: one forward and one backward pass an iteration, each between events of the stream.

Needs torch only: the worker of upstream loads this file by its path.
"""

from __future__ import annotations

import time
from typing import Any

import torch


def measure(
    program: Any, warmup: int, iterations: int, device: torch.device | str
) -> dict[str, list[float]]:
    """Milliseconds of every timed iteration by pass.

    Ranks are not brought together before an iteration: the passes themselves wait for each other, and the
    caller takes the slowest rank of each iteration.
    """
    on_gpu = torch.device(device).type == "cuda"
    for _ in range(warmup):
        program.forward()
        program.backward()
    marks: list[list[Any]] = []
    for _ in range(iterations):
        marks.append([_mark(on_gpu)])
        program.forward()
        marks[-1].append(_mark(on_gpu))
        program.backward()
        marks[-1].append(_mark(on_gpu))
    if on_gpu:
        torch.cuda.synchronize(device)
    return {
        name: [_between(m[i], m[i + 1]) for m in marks]
        for i, name in enumerate(("forward", "backward"))
    }


def _mark(on_gpu: bool) -> Any:
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(start: Any, end: Any) -> float:
    """Milliseconds."""
    if isinstance(start, float):
        return 1e3 * float(end - start)
    return float(start.elapsed_time(end))
