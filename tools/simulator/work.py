"""What a rank has to do, as the engine sees it: tasks and items in program order, with costs.

A program (``ours``, ``upstream``) fills these arrays; the engine knows nothing else about it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mok.errors import MokError


class NumpyOps:
    """The integer operations of ``kernels_cute.program`` on arrays: all tickets decoded at once."""

    select = staticmethod(np.where)
    minimum = staticmethod(np.minimum)
    maximum = staticmethod(np.maximum)


class Counters:
    """Names, targets and ids of the counters that order the work.

    A wait is on a counter's *target*: the number of arrivals after which it is complete. Every
    counter's target equals its arrivals, which the engine checks at the end.
    """

    def __init__(self) -> None:
        self.classes: list[str] = []  # class of each counter, for reports
        self.targets: list[int] = []

    def add(self, name: str, targets: Iterable[int] | NDArray[np.int64]) -> int:
        """A family of counters, one per entry of ``targets``; returns the first one's id."""
        first = len(self.targets)
        self.targets.extend(int(t) for t in targets)
        self.classes.extend([name] * (len(self.targets) - first))
        return first


Ids = tuple[int, ...]
Sent = tuple[float, float, float]


@dataclass
class Tasks:
    """Compute tasks in ticket order; all lists have one entry per task.

    Attributes:
        kind: index into ``names``.
        busy: seconds in the main loop.
        tail: seconds of the epilogue after it.
        hold: seconds of it for which the accumulator stays occupied.
        hbm: bytes read from and written to HBM.
        waits, signals, early: counter ids. ``signals`` come when results are in memory, ``early``
            when the main loop ends.
        minibatch: for reports, and for which tasks a pair of CTAs works on at once.
        group: the latter, in backward; empty where there is none.
        tickets: where pairs of CTAs work (``pairs``), the tasks of each entry; else empty.
        sent: bytes that the epilogue pushes, on the rank's own ports (``Items.rx``, ``tx``, ``net``);
            empty where nothing is pushed.
    """

    names: tuple[str, ...]
    kind: list[int]
    busy: list[float]
    tail: list[float]
    hold: list[float]
    hbm: list[float]
    waits: list[Ids]
    signals: list[Ids]
    early: list[Ids]
    minibatch: list[int]
    group: list[int] = field(default_factory=list)
    tickets: list[tuple[int, ...]] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.kind)


@dataclass
class Items:
    """Communication items in order.

    Attributes:
        busy: seconds that the item keeps its worker, if links are free.
        rx, tx: bytes on the rank's own NVLink port, with headers and the peers' mirrored traffic.
        net: bytes in each direction of its network port.
        hbm: bytes to and from HBM, the peers' included.
        step: with static assignment, worker ``step mod workers`` does the item.
    """

    names: tuple[str, ...]
    kind: list[int]
    busy: list[float]
    rx: list[float]
    tx: list[float]
    net: list[float]
    hbm: list[float]
    waits: list[Ids]
    signals: list[Ids]
    minibatch: list[int]
    step: list[int] | None = None

    def __len__(self) -> int:
        return len(self.kind)


@dataclass
class Pipeline:
    """How a compute worker overlaps consecutive tasks.

    Attributes:
        accumulators: 1 or 2.
        lead_s: seconds of loads that run ahead of the main loop.
        fill_s: from a load's issue to the first multiplication.
        store_s: from the end of the epilogue until results are in memory.
        draws_late: a ticket is drawn only when the epilogue of the task before the current one has
            ended (one response buffer, as with CLC), not as soon as its loads begin.
        staged: share of a task's pushed bytes that wait in shared memory while the worker goes on.
    """

    accumulators: int
    lead_s: float
    fill_s: float
    store_s: float
    draws_late: bool = False
    staged: float = 0.0


@dataclass
class Work:
    """Everything one rank does in one kernel.

    Attributes:
        workers: compute clusters; ``cluster`` SMs each.
        comm_workers: SMs that communicate; 0 where nothing does.
        surplus_s: seconds until all launched clusters without work are gone (0: none launched).
    """

    tasks: Tasks
    items: Items
    counters: Counters
    pipeline: Pipeline
    workers: int
    comm_workers: int
    cluster: int
    start_s: float
    surplus_s: float = 0.0
    rows: int = 0
    notes: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise MokError("at least one compute cluster must remain", self.workers)
        if len(self.items) and self.comm_workers < 1:
            raise MokError("communication needs at least one SM", self.comm_workers)


def no_items() -> Items:
    """Items of a rank that does not communicate."""
    return Items((), [], [], [], [], [], [], [], [], [])


def singles(ids: NDArray[np.int64]) -> list[Ids]:
    """One-counter tuples; negative ids mean none. Equal tuples are one object."""
    known = {int(i): ((int(i),) if i >= 0 else ()) for i in np.unique(ids)}
    return [known[i] for i in ids.tolist()]


def pairs(first: NDArray[np.int64], second: NDArray[np.int64]) -> list[Ids]:
    """Tuples of up to two counters; negative ids mean none."""
    cache: dict[tuple[int, int], Ids] = {}
    out = []
    for pair in zip(first.tolist(), second.tolist(), strict=True):
        found = cache.get(pair)
        if found is None:
            found = cache[pair] = tuple(i for i in pair if i >= 0)
        out.append(found)
    return out
