"""Timelines: one event format for hardware, emulator and simulator; reading kernel records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mok.errors import MokError
from mok.kernels_cute import trace as layout

RECORD = np.dtype(
    [
        ("begin", "<i8"),
        ("end", "<i8"),
        ("sm", "<i4"),
        ("kind", "<i4"),
        ("ticket", "<i4"),
        ("minibatch", "<i4"),
    ]
)
"""One record as ``kernels_cute.trace`` lays it out."""


@dataclass(frozen=True)
class Event:
    """One task or item that an SM worked on.

    Attributes:
        kind: the task's kind by name ("up", "dispatch", …).
        role: "compute" or "comm".
        sm: the SM (of a cluster, its first).
        begin, end: seconds from the trace's begin.
        minibatch: -1 where there is none (shared expert).
        ticket: number in program order, per role.
    """

    kind: str
    role: str
    sm: int
    begin: float
    end: float
    minibatch: int
    ticket: int


@dataclass
class Trace:
    """A timeline.

    Attributes:
        source: where it comes from, shown as its title ("simulator, h200, forward").
        events: sorted by begin.
        lost: records that did not fit.
    """

    source: str
    events: list[Event]
    lost: int = 0
    notes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.events.sort(key=lambda e: (e.begin, e.sm))

    @property
    def seconds(self) -> float:
        """From the first begin to the last end."""
        return max((e.end for e in self.events), default=0.0)

    def totals(self) -> dict[str, float]:
        """Seconds of all SMs together, by kind."""
        found: dict[str, float] = {}
        for e in self.events:
            found[e.kind] = found.get(e.kind, 0.0) + e.end - e.begin
        return found


def pack_records(
    program: int, rank: int, workers: Iterable[Iterable[tuple[int, ...]]], capacity: int
) -> bytes:
    """A buffer as a kernel leaves it, from (begin, end, sm, kind, role, ticket, minibatch) per CTA.

    For tests, and for whatever else wants to produce traces (begin and end in nanoseconds).
    """
    per_worker = [list(records) for records in workers]
    header = np.zeros(layout.HEADER_WORDS, "<i4")
    header[: layout.H_CAPACITY + 1] = (
        layout.MAGIC, layout.VERSION, program, rank, len(per_worker), capacity,
    )  # fmt: skip
    counts = np.zeros(layout.count_words(len(per_worker)), "<i4")
    records = np.zeros((len(per_worker), capacity), RECORD)
    for w, found in enumerate(per_worker):
        counts[w] = len(found)
        for i, (begin, end, sm, kind, role, ticket, minibatch) in enumerate(found[:capacity]):
            packed = kind | role << layout.ROLE_SHIFT
            records[w, i] = (begin, end, sm, packed, ticket, minibatch)
    return header.tobytes() + counts.tobytes() + records.tobytes()


def read_records(data: bytes, source: str = "hardware") -> Trace:
    """The trace in a kernel's buffer. Times count from the earliest begin.

    Raises:
        MokError: it is no trace buffer, is cut short, or is of another version of the program.
    """
    words = np.frombuffer(data[: 4 * layout.HEADER_WORDS], "<i4")
    if len(words) < layout.HEADER_WORDS or words[layout.H_MAGIC] != layout.MAGIC:
        raise MokError("a trace must begin with the kernel's header", f"{len(data)} bytes")
    version = int(words[layout.H_VERSION])
    if version != layout.VERSION:
        raise MokError(
            f"a trace must be of version {layout.VERSION} of the program",
            version,
            "Record it again, or read it with the version that made it",
        )
    program, rank = int(words[layout.H_PROGRAM]), int(words[layout.H_RANK])
    workers, capacity = int(words[layout.H_WORKERS]), int(words[layout.H_CAPACITY])
    if program not in layout.NAMES or workers < 0 or capacity < 0:
        raise MokError(
            "the header of a trace must be valid", words[: layout.H_CAPACITY + 1].tolist()
        )
    expected = layout.buffer_bytes(workers, capacity)
    if len(data) != expected:
        raise MokError(f"this trace must have {expected} bytes", len(data))
    offset = 4 * layout.HEADER_WORDS
    counts = np.frombuffer(data, "<i4", workers, offset)
    offset += 4 * layout.count_words(workers)
    records = np.frombuffer(data, RECORD, workers * capacity, offset).reshape(workers, capacity)
    kept = np.concatenate(
        [records[w, : min(int(n), capacity)] for w, n in enumerate(counts)] or [records.reshape(-1)]
    )
    if len(kept) and (kept["end"] < kept["begin"]).any():
        raise MokError("a traced task must end after it begins", source)
    zero = int(kept["begin"].min()) if len(kept) else 0
    events = [_event(program, record, zero) for record in kept]
    lost = int(np.maximum(counts - capacity, 0).sum())
    name = f"{source}, {layout.PROGRAMS[program]}, rank {rank}"
    return Trace(name, events, lost, {"program": layout.PROGRAMS[program], "rank": rank})


def _event(program: int, record: Any, zero: int) -> Event:
    kind = int(record["kind"]) & (1 << layout.ROLE_SHIFT) - 1
    role = int(record["kind"]) >> layout.ROLE_SHIFT
    try:
        name = layout.NAMES[program][role][kind]
    except KeyError:
        raise MokError(
            f"a traced task must be of a kind of the {layout.PROGRAMS[program]} program",
            f"kind {kind}, role {role}",
        ) from None
    return Event(
        name,
        "comm" if role == layout.COMM else "compute",
        int(record["sm"]),
        (int(record["begin"]) - zero) * 1e-9,
        (int(record["end"]) - zero) * 1e-9,
        int(record["minibatch"]),
        int(record["ticket"]),
    )
