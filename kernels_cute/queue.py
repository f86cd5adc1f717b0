"""Tickets: how a CTA gets its next compute task and tells its warps about it.

The number of a task comes from an atomic counter in global memory, drawn one ahead by the load warp. The
decoded task travels through a small queue in shared memory to the warps that work on it.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .sync import advance, select

# Words of a queue entry in shared memory: room for every kind of entry.
WORDS = 16
DEPTH = 2


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


class TaskQueue(NamedTuple):
    """``DEPTH`` entries in shared memory with a full and an empty mbarrier each."""

    words: cute.Pointer  # int32 [DEPTH * WORDS]
    full: cute.Pointer  # mbarrier [DEPTH]: one arrival, the load warp's
    empty: cute.Pointer  # mbarrier [DEPTH]: one arrival per reading warp

    def init(self, readers: int) -> None:
        """Arrival counts: the load warp fills, ``readers`` warps free a slot (one thread)."""
        for i in range(DEPTH):
            cute.arch.mbarrier_init(self.full + i, 1)
            cute.arch.mbarrier_init(self.empty + i, readers)

    @cute.jit
    def put(self, entry: NamedTuple, index: Int32, phase: Int32):
        """Publish an entry of up to ``WORDS`` int32 (whole warp; lane 0 writes)."""
        cute.arch.mbarrier_wait(self.empty + index, phase ^ 1)
        if cute.arch.lane_idx() == 0:
            slot = self.words + index * WORDS
            for i in cutlass.range_constexpr(len(entry)):
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
