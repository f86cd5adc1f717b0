"""Where a training call's time goes: each half of each call in order, and per kind of task or kernel.

    python -m mok.tools.bench.anatomy --shape 8192,7168,2048,32,8 --peers sonic

For whoever tunes the kernels. ``mok bench`` compares medians; this shows what lies behind one. All runs are in the
steady regime: calls of the same kind go before.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
from collections.abc import Callable, Iterable
from typing import Any

import torch

from mok.kernels_cute import trace as layout
from mok.runtime.trace import Event, read_records
from mok.tools.bench.programs import Options, Program, Unavailable, make_program
from mok.tools.bench.shapes import BenchShape, parse_shape
from mok.tools.bench.timing import CudaClock, reason_of
from mok.tools.bench.work import make_work

CALLS = 30
TOP = 8  # kernels of a peer that are shown


def by_kind(events: Iterable[Event]) -> dict[str, dict[str, float]]:
    """Of each kind of task: ms of all SMs together over their number, tasks, first begin and last end in ms."""
    found: dict[str, list[Event]] = collections.defaultdict(list)
    for event in events:
        found[event.kind].append(event)
    sms = len({e.sm for es in found.values() for e in es})
    return {
        kind: {
            "ms": 1e3 * sum(e.end - e.begin for e in es) / sms,
            "tasks": len(es),
            "begin_ms": 1e3 * min(e.begin for e in es),
            "end_ms": 1e3 * max(e.end for e in es),
        }
        for kind, es in found.items()
    }


def halves(program: Program, calls: int) -> dict[str, list[float]]:
    """Milliseconds of forward (with its context) and backward of each call, in order; as many go before."""
    clock = CudaClock()
    marks: list[tuple[Any, Any, Any]] = []
    for number in range(2 * calls):
        if number == calls:
            clock.wait()
            marks = []
        begin = clock.mark()
        _, saved = program.forward_training(number)
        middle = clock.mark()
        program.backward(number, saved)
        marks.append((begin, middle, clock.mark()))
    clock.wait()
    return {
        "forward_ms": [clock.ms(a, b) for a, b, _ in marks],
        "backward_ms": [clock.ms(b, c) for _, b, c in marks],
    }


def kernels(call: Callable[[], Any], calls: int) -> dict[str, float]:
    """Milliseconds of a call's kernels by name, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(calls):
        call()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    total: collections.Counter[str] = collections.Counter()
    for event in found.events() or []:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            total[event.name[:80]] += event.device_time
    return {name: us / calls / 1e3 for name, us in total.most_common(TOP)}


def tasks(program: Any, calls: int) -> dict[str, Any]:
    """Per kind of task, of the last of some calls of ours with the trace on: forward, then backward."""
    plain = program.config
    program.config = dataclasses.replace(plain, trace=True)
    try:
        for number in range(calls):
            _, saved = program.forward_training(number)
            program.backward(number, saved)
        torch.cuda.synchronize()
        recorded = sorted(program.workspace.recorder.data().items())  # by program and rank
        return {
            layout.PROGRAMS[number]: by_kind(read_records(data, "hardware").events)
            for (number, _), data in recorded
        }
    finally:
        program.config = plain


def anatomy(bench: BenchShape, peers: list[str], calls: int) -> dict[str, Any]:
    """Of ours and of each peer at a shape; a peer that is missing is named with the reason."""
    work = make_work(bench, torch.device("cuda", torch.cuda.current_device()))
    document: dict[str, Any] = {"shape": bench.as_dict(), "programs": {}}
    for name in ("mok", *peers):
        try:
            program = make_program(name, work, Options(CudaClock()))
        except Unavailable as error:
            document["programs"][name] = {"missing": reason_of(error)}
            continue
        found: dict[str, Any] = dict(halves(program, calls))
        if name == "mok":
            found["tasks"] = tasks(program, calls)
        else:
            _, saved = program.forward_training(0)
            found["backward_kernels_ms"] = kernels(
                lambda p=program, s=saved: p.backward(0, s, keep=True),  # type: ignore[misc]
                calls,
            )
        program.close()
        document["programs"][name] = found
    return document


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mok.tools.bench.anatomy", description=__doc__)
    parser.add_argument("--shape", type=parse_shape, required=True, metavar="T,H,I,E,K")
    parser.add_argument("--peers", default="", metavar="NAME,…")
    parser.add_argument("--calls", type=int, default=CALLS, help="timed calls of each program")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("this needs a GPU")
    peers = [name for name in args.peers.split(",") if name]
    print(json.dumps(anatomy(args.shape, peers, args.calls), indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
