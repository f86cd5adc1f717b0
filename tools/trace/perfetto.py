"""Timelines in the JSON that Perfetto and Chrome open, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mok.errors import MokError
from mok.runtime.trace import Event, Trace

FORMAT = "mok-trace-2"


LANES = 8  # threads per SM


def to_perfetto(traces: Sequence[Trace]) -> dict[str, Any]:
    """One process per trace, one slice per task; microseconds.

    Tasks of an SM overlap (the next one loads while the last one's results leave), which slices of a
    thread must not: an SM has as many threads as tasks at once.
    """
    found: list[dict[str, Any]] = []
    for pid, trace in enumerate(traces):
        found.append(_name("process_name", pid, 0, trace.source))
        roles = {e.sm: e.role for e in trace.events}
        lanes: dict[int, list[float]] = {}  # per SM, when each of its threads is free
        for e in trace.events:
            lane = _lane(lanes.setdefault(e.sm, []), e)
            found.append(
                {
                    "ph": "X",
                    "name": e.kind,
                    "cat": e.role,
                    "pid": pid,
                    "tid": e.sm * LANES + lane,
                    "ts": round(e.begin * 1e6, 4),
                    "dur": round((e.end - e.begin) * 1e6, 4),
                    "args": {name: getattr(e, name) for name in ARGUMENTS},
                }
            )
        for sm in sorted(lanes):
            for lane in range(len(lanes[sm])):
                name = f"SM {sm} {roles[sm]}" + (f" +{lane}" if lane else "")
                found.append(_name("thread_name", pid, sm * LANES + lane, name))
    notes = [{"source": t.source, "lost": t.lost, **t.notes} for t in traces]
    return {
        "traceEvents": found,
        "displayTimeUnit": "ns",
        "otherData": {"format": FORMAT, "traces": notes},
    }


ARGUMENTS = ("sm", "minibatch", "ticket", "expert", "block", "n")


def _lane(free: list[float], event: Event) -> int:
    """The first thread of the event's SM that is free when it begins; it then holds the event."""
    for lane, end in enumerate(free):
        if end <= event.begin or lane == LANES - 1:
            free[lane] = max(end, event.end)
            return lane
    free.append(event.end)
    return len(free) - 1


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def write_perfetto(traces: Sequence[Trace], path: Path) -> None:
    """Write ``traces`` side by side into one file."""
    path.write_text(json.dumps(to_perfetto(traces)), encoding="utf-8")


def read_perfetto(path: Path) -> list[Trace]:
    """The traces of a file that ``write_perfetto`` wrote.

    Raises:
        MokError: it is not such a file.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MokError("a timeline must be a readable JSON file", f"{path}: {error}") from error
    other = document.get("otherData") if isinstance(document, dict) else None
    if not isinstance(other, dict) or other.get("format") != FORMAT:
        raise MokError(f"a timeline must be of format {FORMAT}", str(path))
    try:
        return _traces(document, other)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        # Whatever is missing or of another kind: this program writes all of it.
        raise MokError(
            "a timeline must be as mok trace wrote it",
            f"{path}: {type(error).__name__}: {error}",
            "Write it again",
        ) from error


def _traces(document: dict[str, Any], other: dict[str, Any]) -> list[Trace]:
    events: list[list[Event]] = [[] for _ in other["traces"]]
    for e in document["traceEvents"]:
        if e["ph"] == "X":
            begin, places = e["ts"] * 1e-6, e["args"]
            if not (math.isfinite(begin) and 0 <= e["dur"] < math.inf):
                raise ValueError(f"ts {e['ts']}, dur {e['dur']}")
            if not all(type(n) is int for n in (e["pid"], *places.values())) or e["pid"] < 0:
                raise TypeError(f"pid {e['pid']}, args {places}")
            events[e["pid"]].append(
                Event(
                    str(e["name"]),
                    str(e["cat"]),
                    begin=begin,
                    end=begin + e["dur"] * 1e-6,
                    **places,
                )
            )
    traces = []
    for notes, found in zip(other["traces"], events, strict=True):
        notes = dict(notes)
        traces.append(Trace(str(notes.pop("source")), found, int(notes.pop("lost")), notes))
    return traces
