"""Timelines: one event format for hardware, emulator and simulator; what kernels record of themselves."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mok.errors import MokError
from mok.kernels_cute import records as record_words
from mok.kernels_cute import trace as layout

if TYPE_CHECKING:
    import torch

    from mok.runtime.workspace import Workspace

CAPACITY = 4096
"""Records of a CTA: a Kimi K2.5 call of 65536 rows takes a few hundred."""

RECORD = np.dtype(
    [
        ("begin", "<i8"),
        ("end", "<i8"),
        ("sm", "<i4"),
        ("kind", "<i4"),
        ("ticket", "<i4"),
        ("minibatch", "<i4"),
        ("expert", "<i4"),
        ("block", "<i4"),
        ("n", "<i4"),
        ("zero", "<i4"),
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
        expert: local expert, block: row block of a task or first row of an item, n: column tile; -1 where
            there is none, or it is not known.
    """

    kind: str
    role: str
    sm: int
    begin: float
    end: float
    minibatch: int
    ticket: int
    expert: int = -1
    block: int = -1
    n: int = -1


class TaskTimes(NamedTuple):
    """Times of a kind of task, in seconds.

    Attributes:
        tasks: how many.
        p10, median, p90: from begin to end. An SM begins to load a task while it computes the one before, so
            these overlap.
        period: median time between the end of what the SM did before and the task's end: what a task costs.
            None where no SM did anything before.
    """

    tasks: int
    p10: float
    median: float
    p90: float
    period: float | None


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

    def tasks(self) -> dict[str, TaskTimes]:
        """Times of single tasks, by kind."""
        spans: dict[str, list[float]] = {}
        periods: dict[str, list[float]] = {}
        last: dict[tuple[str, int], float] = {}
        for e in sorted(self.events, key=lambda e: (e.end, e.ticket)):
            spans.setdefault(e.kind, []).append(e.end - e.begin)
            before = last.get((e.role, e.sm))
            last[e.role, e.sm] = e.end
            if before is not None:
                periods.setdefault(e.kind, []).append(e.end - before)
        times = {}
        for kind, found in sorted(spans.items()):
            low, middle, high = (float(q) for q in np.quantile(found, (0.1, 0.5, 0.9)))
            period = float(np.median(periods[kind])) if kind in periods else None
            times[kind] = TaskTimes(len(found), low, middle, high, period)
        return times


def pack_header(program: int, rank: int, workers: int, capacity: int, cluster: int = 1) -> bytes:
    """The header of a buffer, as the host writes it before the launch."""
    header = np.zeros(layout.HEADER_WORDS, "<i4")
    header[: layout.H_CLUSTER + 1] = (
        layout.MAGIC, layout.VERSION, program, rank, workers, capacity, cluster,
    )  # fmt: skip
    return header.tobytes()


def pack_records(
    program: int,
    rank: int,
    workers: Iterable[Iterable[tuple[int, ...]]],
    capacity: int,
    cluster: int = 1,
) -> bytes:
    """A buffer as a kernel leaves it, from (begin, end, sm, kind, role, ticket, minibatch, expert,
    block, n) per CTA; the last three may be left out.

    For tests, and for whatever else wants to produce traces (begin and end in nanoseconds).
    """
    per_worker = [list(records) for records in workers]
    header = pack_header(program, rank, len(per_worker), capacity, cluster)
    counts = np.zeros(layout.count_words(len(per_worker)), "<i4")
    records = np.zeros((len(per_worker), capacity), RECORD)
    for w, found in enumerate(per_worker):
        counts[w] = len(found)
        for i, (begin, end, sm, kind, role, *rest) in enumerate(found[:capacity]):
            place = (*rest[2:], -1, -1, -1)[:3]
            records[w, i] = (begin, end, sm, kind | role << layout.ROLE_SHIFT, *rest[:2], *place, 0)
    return header + counts.tobytes() + records.tobytes()


def read_records(data: bytes, source: str = "hardware") -> Trace:
    """The trace in a kernel's buffer. Times count from the earliest begin.

    Raises:
        MokError: it is no trace buffer, is cut short, or is of another version of the program.
    """
    head = data[: 4 * layout.HEADER_WORDS]
    words = (
        np.frombuffer(head, "<i4") if len(head) == 4 * layout.HEADER_WORDS else np.zeros(1, "<i4")
    )
    if words[layout.H_MAGIC] != layout.MAGIC:
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
    cluster = int(words[layout.H_CLUSTER])
    if program not in layout.NAMES or workers < 0 or capacity < 0 or cluster < 1:
        raise MokError(
            "the header of a trace must be valid", words[: layout.H_CLUSTER + 1].tolist()
        )
    expected = layout.buffer_bytes(workers, capacity)
    if len(data) != expected:
        raise MokError(f"this trace must have {expected} bytes", len(data))
    offset = 4 * layout.HEADER_WORDS
    counts = np.frombuffer(data, "<i4", workers, offset)
    offset += 4 * layout.count_words(workers)
    records = np.frombuffer(data, RECORD, workers * capacity, offset).reshape(workers, capacity)
    kept = np.concatenate(
        [
            # Every CTA of a cluster records their tasks: the first one's stand for all.
            made[made["kind"] >> layout.ROLE_SHIFT == layout.COMM] if w % cluster else made
            for w, n in enumerate(counts)
            for made in (records[w, : min(int(n), capacity)],)
        ]
        or [records.reshape(-1)]
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
    shared = name.startswith("shared ")
    return Event(
        name,
        "comm" if role == layout.COMM else "compute",
        int(record["sm"]),
        (int(record["begin"]) - zero) * 1e-9,
        (int(record["end"]) - zero) * 1e-9,
        -1 if shared else int(record["minibatch"]),
        int(record["ticket"]),
        -1 if shared else int(record["expert"]),
        int(record["block"]),
        int(record["n"]),
    )


class Recorder:
    """The trace buffers of a workspace's local ranks, one per rank and program.

    Made at the first call with ``Config(trace=True)``; calls of one program overwrite one another.
    """

    def __init__(self, workspace: Workspace, capacity: int = CAPACITY) -> None:
        self.workspace = workspace
        self.capacity = capacity
        self.buffers: dict[tuple[int, int], torch.Tensor] = {}  # by (program, rank)

    def arm(self, program: int, num_sms: int, stream: Any) -> None:
        """Queue empty buffers for the next launch of ``program`` on every local rank."""
        w = self.workspace
        for rank in w.group.local_ranks:
            buffer = self.buffers.get((program, rank))
            if buffer is None:
                buffer = self._make(program, rank, num_sms)
                self.buffers[program, rank] = buffer
            w.heap.memory.fill(
                buffer.data_ptr() + 4 * layout.HEADER_WORDS, 0,
                4 * layout.count_words(self._workers(buffer)), stream,
            )  # fmt: skip
            # Always the same address for a program: kernels that run meanwhile may read it.
            pointer = w.records.wait_address(rank) + 4 * record_words.TRACE + 8 * program
            ctypes.c_int64.from_address(pointer).value = buffer.data_ptr()

    def _workers(self, buffer: torch.Tensor) -> int:
        row = layout.RECORD_BYTES * self.capacity
        return (buffer.numel() - 4 * layout.HEADER_WORDS) // row

    def _make(self, program: int, rank: int, workers: int) -> torch.Tensor:
        import torch

        from mok.config import CLUSTER_CTAS

        w = self.workspace
        size = layout.buffer_bytes(workers, self.capacity)
        buffer = torch.empty(size, dtype=torch.uint8, device=w.device)
        cluster = CLUSTER_CTAS[w.arch]
        header = bytearray(pack_header(program, rank, workers, self.capacity, cluster))
        buffer[: len(header)].copy_(torch.frombuffer(header, dtype=torch.uint8))
        return buffer

    def data(self) -> dict[tuple[int, int], bytes]:
        """The buffers as they are once the work queued so far has ended, by (program, rank)."""
        return {key: buffer.cpu().numpy().tobytes() for key, buffer in self.buffers.items()}

    def traces(self, source: str = "hardware") -> list[Trace]:
        """The last call of each program that was traced, per local rank."""
        return [read_records(data, source) for _, data in sorted(self.data().items())]
