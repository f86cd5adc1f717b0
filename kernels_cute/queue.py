"""Tickets: how a CTA or a pair of CTAs gets its next compute task and tells its warps about it.

The number of a task comes from an atomic counter in global memory, drawn one ahead. The decoded task
travels through a small queue in shared memory to the warps that work on it. On Hopper each CTA draws for
itself; on Blackwell the scheduler warp of a pair's first CTA draws for both, and waits for what a task
needs before it publishes it.

Cluster Launch Control gives the right to draw, never a task: a cluster that was launched, or whose launch
was cancelled in favour of a running one, is worth one ticket. So the order of grants does not matter, and
the grid is a hint. A counter of clusters that started or were cancelled (``Starts``) tells the two meanings
of a refusal apart: as long as clusters are left to start, someone else wants the SMs, and the pair retires
(the hardware starts the rest later); once none is left, the pair draws to the end without asking.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from . import ptx
from .invariant import Invariant
from .sync import advance, select

WORDS = 16  # int32 of a queue entry
DEPTH = 2
# After a refusal, clusters launched at the same time may not have counted themselves yet.
GRACE_POLLS, GRACE_NS = 8, 500


class DSL:
    """The integer operations of ``program`` on the kernel language's integers."""

    select = staticmethod(select)

    @staticmethod
    def minimum(a: Int32, b: Int32) -> Int32:
        return Int32(cutlass.min(Int32(a), Int32(b)))

    @staticmethod
    def maximum(a: Int32, b: Int32) -> Int32:
        return Int32(cutlass.max(Int32(a), Int32(b)))


class Entry(NamedTuple):
    """A decoded task as the warps of a CTA see it."""

    kind: Int32
    block: Int32  # row block in the rank's rows (shared tasks: in its tokens)
    n: Int32  # column tile
    minibatch: Int32
    expert: Int32  # local expert
    k_tiles: Int32  # steps along the contraction
    ring_block: Int32  # row block in the ring
    ticket: Int32
    halves: Int32  # of the row block that have rows: 1 or 2 (Hopper, else 2)


class TaskQueue(Invariant):
    """``DEPTH`` entries in shared memory with a full and an empty mbarrier each.

    Args:
        words: int32 [DEPTH * WORDS], 16-byte aligned.
        full: mbarrier [DEPTH]: one arrival, the producer's.
        empty: mbarrier [DEPTH]: one arrival per reading warp.
    """

    def __init__(self, words: cute.Pointer, full: cute.Pointer, empty: cute.Pointer):
        self.words = words
        self.full = full
        self.empty = empty

    def init(self, readers: int) -> None:
        """Arrival counts: the producer fills, ``readers`` warps free a slot (one thread)."""
        for i in range(DEPTH):
            cute.arch.mbarrier_init(self.full + i, 1)
            cute.arch.mbarrier_init(self.empty + i, readers)

    def wait_free(self, index: Int32, phase: Int32) -> None:
        """Return once slot ``index`` is free (the producer's whole warp)."""
        cute.arch.mbarrier_wait(self.empty + index, phase ^ 1)
        cute.arch.sync_warp()

    @cute.jit
    def put(self, entry: NamedTuple, index: Int32):
        """Publish an entry of up to ``WORDS`` int32 in a free slot (whole warp; lane 0 writes)."""
        if cute.arch.lane_idx() == 0:
            self.fill(entry, index)

    def fill(self, entry: NamedTuple, index: Int32) -> None:
        """Write this CTA's slot and hand it to the readers (one thread)."""
        slot = self.words + index * WORDS
        for i in range(len(entry)):
            cute.arch.store(slot + i, Int32(entry[i]))
        cute.arch.mbarrier_arrive(self.full + index)

    @cute.jit
    def get(self, index: Int32, phase: Int32, entry: cutlass.Constexpr = Entry):
        """Read the next entry, of NamedTuple type ``entry`` (whole warp), and free its slot."""
        cute.arch.mbarrier_wait(self.full + index, phase)
        slot = self.words + index * WORDS
        words = tuple(cute.arch.load(slot + i, Int32) for i in range(len(entry._fields)))
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(self.empty + index)
        return entry(*words)


class PairQueue(TaskQueue):
    """The queues of a pair of CTAs, filled by one warp of the first CTA.

    Each CTA's readers see their own queue, with CTA scope. Between the CTAs stand the producer and, in
    the second CTA, the relay warp: it hands entries that arrived to the readers, and free slots back.

    Args:
        arrived: mbarrier [DEPTH] in the second CTA: one arrival, the producer's: its slot is written.
        freed: mbarrier [DEPTH] in the first CTA: one arrival, the relay's: the second CTA's slot is free.
    """

    def __init__(self, words, full, empty, arrived: cute.Pointer, freed: cute.Pointer):
        super().__init__(words, full, empty)
        self.arrived = arrived
        self.freed = freed

    def init(self, readers: int) -> None:
        """Arrival counts (one thread)."""
        super().init(readers)
        for i in range(DEPTH):
            cute.arch.mbarrier_init(self.arrived + i, 1)
            cute.arch.mbarrier_init(self.freed + i, 1)

    def wait_free(self, index: Int32, phase: Int32) -> None:
        """Return once slot ``index`` is free in both CTAs (the producer's whole warp)."""
        cute.arch.mbarrier_wait(self.empty + index, phase ^ 1)
        ptx.cluster_wait((self.freed + index).toint(), phase ^ 1)
        cute.arch.sync_warp()

    @cute.jit
    def put(self, entry: NamedTuple, index: Int32):
        """Publish an entry to both CTAs, in a slot free in both (the producer's whole warp)."""
        lane = cute.arch.lane_idx()
        if lane == 0:
            self.fill(entry, index)
        if lane == 1:
            slot = (self.words + index * WORDS).toint()
            target = ptx.cluster_address(slot, Int32(1))
            words = [*entry, *[Int32(0)] * (-len(entry) % 4)]
            for i in cutlass.range_constexpr(0, len(words), 4):
                ptx.cluster_store_16(target + 4 * i, *words[i : i + 4])
            arrived = (self.arrived + index).toint()
            ptx.cluster_arrive(ptx.cluster_address(arrived, Int32(1)))

    @cute.jit
    def relay(self, end: cutlass.Constexpr[int]):
        """The second CTA's relay warp, until an entry of kind ``end``.

        Entry i goes to the readers before slot i-1 goes back, so both slots can be in use.
        """
        index, phase = Int32(0), Int32(0)
        last, last_phase = Int32(0), Int32(0)
        first = Int32(1)
        kind = Int32(end + 1)
        while kind != end:
            ptx.cluster_wait((self.arrived + index).toint(), phase)
            kind = cute.arch.load(self.words + index * WORDS, Int32)
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive(self.full + index)
            if first == 0:
                cute.arch.mbarrier_wait(self.empty + last, last_phase)
                cute.arch.sync_warp()
                if cute.arch.lane_idx() == 0:
                    freed = (self.freed + last).toint()
                    ptx.cluster_arrive(ptx.cluster_address(freed, Int32(0)))
            first = Int32(0)
            last, last_phase = index, phase
            index, phase = next_slot(index, phase)


def next_slot(index: Int32, phase: Int32) -> tuple[Int32, Int32]:
    """The queue position after ``(index, phase)``."""
    return advance(index, phase, DEPTH)


@cute.jit
def draw(counter: cute.Pointer) -> Int32:
    """Draw the next ticket: lane 0 holds it, other lanes hold 0. Broadcast with ``broadcast`` when needed,
    so that the atomic's latency hides behind the work in between."""
    ticket = Int32(0)
    if cute.arch.lane_idx() == 0:
        ticket = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")
    return ticket


def broadcast(ticket: Int32) -> Int32:
    """Lane 0's value in every lane."""
    return cute.arch.make_warp_uniform(ticket)


class Starts(Invariant):
    """Clusters that started, or whose launch was cancelled, against the clusters of the grid."""

    def __init__(self, counter: cute.Pointer, clusters: Int32):
        self.counter = counter
        self.clusters = clusters

    def add(self) -> Int32:
        """Count one more (one thread). Returns how many came before it."""
        return cute.arch.atomic_add(self.counter, Int32(1), sem="relaxed", scope="gpu")

    @cute.jit
    def all_started(self) -> Int32:
        """1 once no cluster of the grid is left to start; 0 if some still are after a moment's grace.

        Whoever counts the last cluster sees the full count afterwards, so one pair always goes on.
        """
        started = cute.arch.load(self.counter, Int32, sem="relaxed", scope="gpu")
        polls = Int32(0)
        while started < self.clusters and polls < GRACE_POLLS:
            ptx.nanosleep(GRACE_NS)
            started = cute.arch.load(self.counter, Int32, sem="relaxed", scope="gpu")
            polls += 1
        # One answer for the warp: each lane polled for itself.
        return broadcast(select(started >= self.clusters, Int32(1), Int32(0)))


class LaunchControl(Invariant):
    """Queries of one warp: one in flight at most, and awaited before the warp leaves.

    Args:
        reply: 16 bytes of shared memory, 16-byte aligned.
        arrived: mbarrier, one arrival and 16 transaction bytes per query.
    """

    def __init__(self, reply: cute.Pointer, arrived: cute.Pointer):
        self.reply = reply
        self.arrived = arrived

    def init(self) -> None:
        """Arrival count (one thread)."""
        cute.arch.mbarrier_init(self.arrived, 1)

    @cute.jit
    def ask(self):
        """Ask that the launch of a cluster that has not started be cancelled. Not after a refusal."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.arrived, 16)
            cute.arch.issue_clc_query(self.arrived, self.reply, multicast=False)

    @cute.jit
    def answer(self, phase: Int32) -> Int32:
        """1 if a launch was cancelled for us, 0 for a refusal (whole warp)."""
        cute.arch.mbarrier_wait(self.arrived, phase)
        _, _, _, granted = cute.arch.clc_response(self.reply)
        # The next query writes the reply through the async proxy.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        return granted
