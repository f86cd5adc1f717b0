"""The device barrier of a group of processes: one word per source rank, no multicast.

Rank s announces epoch e by writing e into word s of every rank's array; a rank passes when all words
of its own array have reached e. The epoch is counted on the device, so a captured graph replays right.
Words only grow, so nothing is reset and two barriers in a row cannot meet.

A barrier never hangs: on expiry the rank notes who is missing, poisons the whole group and returns. A
poisoned barrier returns at once and closes the gate: a word of this rank that later kernels of its stream
read at entry. They read that and not the poison, which a peer may write while some CTAs have started and
others have not.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass.memory import SmemAllocator

from .records import (
    BARRIER_EPOCH,
    BARRIER_MISSING,
    BARRIER_POISONER,
    BARRIER_STATE,
    EXPIRED,
    MISSING_SHIFT,
    POISONED,
)
from .symmetric import peek, peer, signal, wait_reached, word


class BarrierKernel:
    """One CTA; thread r meets rank r.

    Args:
        threads: at least the number of ranks, a multiple of 32.
    """

    def __init__(self, threads: int = 128):
        self.threads = threads

    @cute.jit
    def __call__(
        self,
        words: Int64,  # symmetric int32 [ranks]: rank 0's address
        poison: Int64,  # symmetric int32 [1]: rank 0's address; see records.poison_value
        epoch: Int64,  # int32 [2], this rank's: the epoch, and the gate of later kernels
        record: Int64,  # int32 [BARRIER_MISSING + ranks], this rank's, host memory
        rank_stride: Int64,  # bytes
        timeout_ns: Int64,
        rank: Int32,
        ranks: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(words, poison, epoch, record, rank_stride, timeout_ns, rank, ranks).launch(
            grid=(1, 1, 1), block=(self.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        words: Int64,
        poison: Int64,
        epoch: Int64,
        record: Int64,
        rank_stride: Int64,
        timeout_ns: Int64,
        rank: Int32,
        ranks: Int32,
    ):
        other, _, _ = cute.arch.thread_idx()
        own_poison = peer(poison, rank_stride, rank)
        seen = SmemAllocator().allocate_array(
            Int32, 2
        )  # what one thread saw, so that all do the same
        if other == 0:
            cute.arch.store(seen, peek(own_poison))
            cute.arch.store(seen + 1, peek(epoch) + 1)
        cute.arch.sync_threads()
        poisoner, now = cute.arch.load(seen, Int32), cute.arch.load(seen + 1, Int32)
        if poisoner == 0:
            if other == 0:
                cute.arch.store(word(epoch), now)
            came = Boolean(True)
            mine = peer(words, rank_stride, rank) + Int64(other) * 4
            if other < ranks:
                # What earlier kernels of this stream wrote, also to peers, comes before the signal.
                cute.arch.fence_acq_rel_sys()
                signal(peer(words, rank_stride, other) + Int64(rank) * 4, now)
                came = wait_reached(mine, now, own_poison, timeout_ns)
                if not came:
                    if peek(own_poison) == 0:
                        cute.arch.store(word(record) + BARRIER_STATE, Int32(EXPIRED))
                        cute.arch.store(word(record) + BARRIER_EPOCH, now)
            cute.arch.sync_threads()  # so that every missing rank is noted before the poison spreads
            if not came:
                cute.arch.store(word(record) + BARRIER_MISSING + other, peek(mine) + 1)
                if peek(record + 4 * BARRIER_STATE) == EXPIRED:
                    poison_all(poison, rank_stride, rank, ranks, other)
            cute.arch.sync_threads()
            poisoner = peek(own_poison)
        if other == 0 and poisoner != 0:
            tell_poisoned(record, poisoner, now)
            cute.arch.store(word(epoch) + 1, poisoner)
        cute.arch.fence_acq_rel_sys()


@cute.jit
def poison_all(poison: Int64, rank_stride: Int64, rank: Int32, ranks: Int32, missing: Int32):
    """End all waits of the group, on every rank, and say who waited for whom (``missing``, or -1)."""
    cute.arch.fence_acq_rel_sys()
    for r in cutlass.range(ranks, unroll=1):
        signal(peer(poison, rank_stride, r), rank + 1 + ((missing + 1) << MISSING_SHIFT))


@cute.jit
def tell_poisoned(record: Int64, poisoner: Int32, now: Int32):
    """Note that another rank gave up, unless this rank's own expiry is noted already."""
    taken = cute.arch.atomic_cas(word(record) + BARRIER_STATE, cmp=Int32(0), val=Int32(POISONED))
    if taken == 0:
        cute.arch.store(word(record) + BARRIER_POISONER, poisoner)
        cute.arch.store(word(record) + BARRIER_EPOCH, now)


class WaitKernel:
    """Hold a stream until a word of this rank has reached a value; on expiry poison the group."""

    @cute.jit
    def __call__(
        self,
        address: Int64,  # int32 [1], this rank's
        poison: Int64,  # symmetric int32 [1]: rank 0's address
        record: Int64,  # int32, as of BarrierKernel
        rank_stride: Int64,
        timeout_ns: Int64,
        target: Int32,
        rank: Int32,
        ranks: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(address, poison, record, rank_stride, timeout_ns, target, rank, ranks).launch(
            grid=(1, 1, 1), block=(32, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        address: Int64,
        poison: Int64,
        record: Int64,
        rank_stride: Int64,
        timeout_ns: Int64,
        target: Int32,
        rank: Int32,
        ranks: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        if thread == 0:
            own_poison = peer(poison, rank_stride, rank)
            poisoner = peek(own_poison)
            if poisoner == 0:
                if not wait_reached(address, target, own_poison, timeout_ns):
                    poisoner = peek(own_poison)
                    if poisoner == 0:
                        cute.arch.store(word(record) + BARRIER_STATE, Int32(EXPIRED))
                        cute.arch.store(word(record) + BARRIER_EPOCH, target)
                        poison_all(poison, rank_stride, rank, ranks, Int32(-1))
            if poisoner != 0:
                tell_poisoned(record, poisoner, target)
        cute.arch.fence_acq_rel_sys()
