"""Timelines in the JSON that Perfetto and Chrome open, and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mok.errors import MokError
from mok.runtime.trace import Event, Trace

FORMAT = "mok-trace-1"


def to_perfetto(traces: Sequence[Trace]) -> dict[str, Any]:
    """One process per trace, one thread per SM, one slice per task; microseconds."""
    found: list[dict[str, Any]] = []
    for pid, trace in enumerate(traces):
        found.append(_name("process_name", pid, 0, trace.source))
        roles = {e.sm: e.role for e in trace.events}
        found += [_name("thread_name", pid, sm, f"SM {sm} {roles[sm]}") for sm in sorted(roles)]
        for e in trace.events:
            found.append(
                {
                    "ph": "X",
                    "name": e.kind,
                    "cat": e.role,
                    "pid": pid,
                    "tid": e.sm,
                    "ts": round(e.begin * 1e6, 4),
                    "dur": round((e.end - e.begin) * 1e6, 4),
                    "args": {"minibatch": e.minibatch, "ticket": e.ticket},
                }
            )
    notes = [{"source": t.source, "lost": t.lost, **t.notes} for t in traces]
    return {
        "traceEvents": found,
        "displayTimeUnit": "ns",
        "otherData": {"format": FORMAT, "traces": notes},
    }


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
    events: list[list[Event]] = [[] for _ in other["traces"]]
    for e in document["traceEvents"]:
        if e["ph"] == "X":
            begin = e["ts"] * 1e-6
            events[e["pid"]].append(
                Event(e["name"], e["cat"], e["tid"], begin, begin + e["dur"] * 1e-6, **e["args"])
            )
    traces = []
    for notes, found in zip(other["traces"], events, strict=True):
        notes = dict(notes)
        traces.append(Trace(notes.pop("source"), found, notes.pop("lost"), notes))
    return traces
