"""Asynchronous operations: queued when issued, completed at a moment that the seed chooses.

Without a seed every operation completes when it is issued.  With one, each waits in a queue and
the scheduler completes queued operations between the warps' turns, in any order that the model
allows: loads in any order; the groups of one thread's stores in order of their phases (first the
source is read, later the destination is written); one warp's MMAs in their order.
"""

import ctypes
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mok.tools.emulator import layout as L
from mok.tools.emulator.checkers import use
from mok.tools.emulator.errors import EmulatorError, KernelFault
from mok.tools.emulator.interp import trace
from mok.tools.emulator.places import locate

if TYPE_CHECKING:
    from mok.tools.emulator.machine import Machine
    from mok.tools.emulator.resident import Cluster, Cta, Warp


@dataclass
class Pending:
    """One queued operation.  ``steps`` run in order, one per completion event."""

    what: str
    warp: "Warp"
    pc: int
    steps: list[Callable[[], None]]
    done: int = 0
    queue: Any = None  # operations of one queue run in order
    start: int = 0  # step of its issue
    agent: Any = None  # the checkers' view of it
    read_epoch: int = 0  # the agent's epoch of the first phase
    idle: bool = False  # comes only when nothing else can go on

    @property
    def finished(self) -> bool:
        return self.done == len(self.steps)


@dataclass(frozen=True)
class TimelineEvent:
    """One asynchronous operation from issue to completion, in warp instructions."""

    what: str
    cta: tuple[int, int, int]
    warp: int
    start: int
    end: int
    place: str


@dataclass
class BulkGroups:
    """Bulk groups of one thread: an open one and the committed ones, oldest first."""

    open: list[Pending] = field(default_factory=list)
    committed: list[list[Pending]] = field(default_factory=list)


class AsyncEngine:
    """Queue of pending operations of one machine."""

    def __init__(self, machine: "Machine", seed: int | None) -> None:
        self.machine = machine
        self.immediate = seed is None
        self.random = random.Random(seed)
        self.pending: list[Pending] = []
        self.timeline: list[TimelineEvent] | None = None
        self.running: Pending | None = None

    def submit(
        self, what: str, w: "Warp", steps: list[Callable[[], None]], queue: Any = None
    ) -> Pending:
        op = Pending(what, w, int(w.state[L.W_PC]), steps, queue=queue)
        op.start = int(self.machine.x[L.X_STEPS])
        checker = self.machine.checker
        if checker is not None:
            op.agent = checker.begin(w, op.pc)
            op.read_epoch = op.agent.epoch
            checker.own(op.agent, op)
        if not self.immediate:
            self.pending.append(op)
            return op
        while not op.finished:
            self.step(op)
        return op

    def follow(self, run: Callable[[], None]) -> None:
        """A message that the running operation sends: it arrives at any later moment.

        One in four stays away until every warp waits: how long a message may take, only those
        that wait for it limit.
        """
        sender = self.running
        assert sender is not None
        op = Pending(sender.what, sender.warp, sender.pc, [run], agent=sender.agent)
        op.start = int(self.machine.x[L.X_STEPS])
        if self.immediate:
            self.step(op)
        else:
            op.idle = self.random.random() < 0.25
            self.pending.append(op)

    def step(self, op: Pending) -> None:
        checker = self.machine.checker
        if op.agent is not None and op.done:
            checker.advance(op.agent)
        trace(
            self.machine.x.ctypes.data, np.int64(op.warp.index), np.int64(op.pc), np.int64(op.done)
        )
        before, outer = use(checker, op.agent), self.running
        self.running = op
        try:
            op.steps[op.done]()
        except EmulatorError as exc:
            if isinstance(exc, KernelFault):
                raise
            at = self.machine.where(op.warp, op.pc)
            raise KernelFault(exc.rule, f"{exc.value}; {at}", exc.remedy, at=at) from exc
        finally:
            use(checker, before)
            self.running = outer
        op.done += 1
        if op.finished and not self.immediate:
            self.pending.remove(op)
        if op.finished and self.timeline is not None:
            w, m = op.warp, self.machine
            self.timeline.append(
                TimelineEvent(
                    op.what,
                    w.cta.coords,
                    int(w.state[L.W_INDEX]),
                    op.start,
                    int(m.x[L.X_STEPS]),
                    m.where(w, op.pc).instruction,
                )
            )
        self.machine.sync_event()

    def advance(self, idle: bool = True) -> bool:
        """Completes one step of a random operation that is allowed to go next; ``idle``: every warp waits."""
        ready = [op for op in self.pending if not op.idle]
        if not ready and idle:
            ready = self.pending
        if not ready:
            return False
        op = self.random.choice(ready)
        if op.queue is not None:
            op = next(p for p in self.pending if p.queue is op.queue)
        self.step(op)
        return True

    def drain(self) -> None:
        while self.advance():
            pass

    def leave_cluster(self, cluster: "Cluster") -> None:
        """Completes what an exited cluster left behind, before its slot is used again.

        A launch query or a store that still has to read shared memory is an error: the memory it
        needs is gone.
        """
        for op in [p for p in self.pending if p.warp.cta.cluster is cluster]:
            if op.what.startswith("clusterlaunch") or (op.what == "bulk store" and not op.done):
                raise KernelFault(
                    "a CTA may not exit while an operation needs its shared memory",
                    f"{op.what} of {self.machine.where(op.warp, op.pc)}",
                )
            while not op.finished:
                self.step(op)

    def run_queue(self, queue: Any, keep: int = 0) -> None:
        """Completes the operations of one ordered queue, oldest first."""
        mine = [p for p in self.pending if p.queue is queue]
        for op in mine[: len(mine) - keep]:
            while not op.finished:
                self.step(op)


def complete_tx(
    machine: "Machine", cluster: "Cluster", rank: int, offset: int, size: int, arrivals: int = 0
) -> None:
    """Transaction bytes arrive at the mbarrier at ``offset`` of CTA ``rank``."""
    from mok.tools.emulator.mbarrier import mb_phase, mb_update, mb_valid

    cta = cluster.ctas[rank]
    host = int(cta.state[L.C_SMEM]) + offset
    if cta.state[L.C_INDEX] < 0:
        raise EmulatorError(
            "an asynchronous operation may not signal a CTA that has exited", f"CTA {cta.coords}"
        )
    if offset & 7 or offset + 8 > cta.smem.size or not mb_valid(host):
        raise EmulatorError(
            "an asynchronous operation must signal an initialised mbarrier",
            f"offset {offset:#x} of CTA {cta.coords}",
        )
    checker = machine.checker
    if checker is not None and checker.agent is not None:
        checker.signal(checker.agent, host)
    before = mb_phase(signed_word(host))
    wrong = mb_update(host, np.int64(arrivals), np.int64(-size))
    if wrong:
        rule = L.FAULT_TEXT[L.F_MBAR_OVERFLOW if wrong == 1 else L.F_MBAR_COUNT]
        raise EmulatorError(rule, f"offset {offset:#x} of CTA {cta.coords}")
    if mb_phase(signed_word(host)) != before:
        cluster.state[L.L_PHASES] = 1
        if checker is not None:
            checker.flip(host)
    machine.sync_event()


def signed_word(host: int) -> np.int64:
    """The 64-bit word at a host address."""
    return np.int64(ctypes.c_int64.from_address(host).value)


class BulkOps:
    """Bulk copies of a machine; mixed into Machine."""

    engine: AsyncEngine

    def submit_load(
        self: Any,
        w: "Warp",
        rank: int,
        offset: int,
        size: int,
        read: Callable[[], np.ndarray],
        swizzle: int,
        barrier: tuple[int, int],
        kind: int = 0,
    ) -> None:
        """A copy into CTA ``rank``'s shared memory that signals ``barrier`` (rank, offset).

        ``kind``: more flags of the checkers' for its write.
        """
        from mok.tools.emulator.tma import write_smem

        cluster = w.cta.cluster
        cta: Cta = cluster.ctas[rank]

        def run() -> None:
            data = read()
            if self.checker is not None:
                self.checker.smem(cta, offset, size, True, kind)
            write_smem(cta, offset, data, swizzle)
            complete_tx(self, cluster, barrier[0], barrier[1], size)

        self.engine.submit("bulk load", w, [run])

    def submit_store(
        self: Any,
        w: "Warp",
        lanes: list[int],
        src: int,
        size: int,
        swizzle: int,
        write: Callable[[np.ndarray], None],
    ) -> None:
        """A copy out of shared memory, in two steps: read the source, write the destination."""
        from mok.tools.emulator.tma import read_smem

        cta = w.cta.cluster.ctas[src >> L.RANK_SHIFT]
        data: list[np.ndarray] = []

        def read() -> None:
            if self.checker is not None:
                self.checker.smem(cta, src & ((1 << L.RANK_SHIFT) - 1), size, False)
            data.append(read_smem(cta, src & ((1 << L.RANK_SHIFT) - 1), size, swizzle).copy())

        def put() -> None:
            write(data.pop())
            self.x[L.X_EV_MEM] += 1

        op = self.engine.submit("bulk store", w, [read, put])
        for lane in lanes:
            self._groups(w, lane).open.append(op)

    def _groups(self: Any, w: "Warp", lane: int) -> BulkGroups:
        table = w.cta.extra.setdefault("bulk", {})
        key = (w.index, lane)
        if key not in table:
            table[key] = BulkGroups()
        groups: BulkGroups = table[key]
        return groups

    def bulk_commit(self: Any, w: "Warp") -> None:
        if self.engine.immediate and self.checker is None:
            return
        for lane in w.lanes():
            g = self._groups(w, lane)
            g.committed.append(g.open)
            g.open = []

    def bulk_wait(self: Any, w: "Warp", keep: int, read_only: bool) -> Any:
        """Waits until at most ``keep`` of each lane's newest groups are incomplete."""
        from mok.tools.emulator.resident import WAIT

        if self.engine.immediate and self.checker is None:
            return None
        seen: list[Pending] = []
        for lane in w.lanes():
            g = self._groups(w, lane)
            old = g.committed[: max(0, len(g.committed) - keep)]
            for group in old:
                if any(p.done < (1 if read_only else 2) for p in group):
                    return WAIT
                seen.extend(p for p in group if not any(p is q for q in seen))
        for lane in w.lanes():
            g = self._groups(w, lane)
            while len(g.committed) > 32 and all(p.finished for p in g.committed[0]):
                g.committed.pop(0)
            if not read_only:
                del g.committed[: max(0, len(g.committed) - keep)]
        if self.checker is not None:
            for p in seen:
                self.checker.observe(w, p.agent, p.read_epoch if read_only else None)
        return None

    def check_global(self: Any, address: int, size: int) -> None:
        """Raises when a range is not inside one registered tensor, once any is registered."""
        n = int(self.x[L.X_NRANGES])
        if n == 0:
            if address < 4096:
                raise EmulatorError("an address must not be null", hex(address))
            return
        i = int(np.searchsorted(self.ranges[:n, 0], address, side="right")) - 1
        if i < 0 or address + size > self.ranges[i, 1]:
            raise EmulatorError(
                "a bulk copy must stay inside registered memory",
                f"{locate(self, address)}, {size} bytes",
            )
