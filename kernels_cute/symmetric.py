"""Device side of the symmetric heap: addresses of peers, signals to them, bounded waits for them.

For kernels of any kind: a rank's copy of a symmetric tensor lies at ``base + rank * stride``, both from
``SymmetricTensor.base_address`` and ``.rank_stride`` on the host. Everything here has system scope.
docs/symmetric.md has a kernel that uses it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from . import ptx


def peer(base: Int64, stride: Int64, rank: Int32) -> Int64:
    """Address of a rank's copy of what rank 0 has at ``base``."""
    return base + Int64(rank) * stride


def word(address: Int64) -> cute.Pointer:
    """A pointer to an int32 word in global memory."""
    return cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)


def signal(address: Int64, value: Int32) -> None:
    """Set a word, here or on a peer; what this thread did or saw before is visible with it.

    Bulk copies are not: wait for them (``cp_async_bulk_wait_group(0)``) and fence first.
    """
    cute.arch.store(word(address), value, sem="release", scope="sys")


@cute.jit
def copy(target: Int64, source: Int64, nbytes: Int64, thread: Int32, threads: Int32):
    """Move ``nbytes`` between any two ranks' memory (put or get), by ``threads`` threads together.

    Args:
        target, source: addresses, multiples of 16; nbytes: a multiple of 16, below 2^35.
        thread: this thread's number among ``threads``.
    """
    for i in cutlass.range(thread, Int32(nbytes >> 4), threads, unroll=1):
        at = Int64(i) * 16
        ptx.store_16(target + at, *ptx.load_16(source + at))


@cute.jit
def signal_after_block(address: Int64, value: Int32):
    """``signal`` once all threads of the block have come here, with what all of them wrote."""
    cute.arch.fence_acq_rel_sys()
    cute.arch.sync_threads()
    if cute.arch.thread_idx()[0] == 0:
        signal(address, value)


def peek(address: Int64) -> Int32:
    """A word as it is now, without ordering."""
    return cute.arch.load(word(address), Int32, sem="relaxed", scope="sys")


def reached(value: Int32, target: Int32) -> Boolean:
    """Whether a counter that may wrap has come to ``target``: (value - target) >= 0."""
    return value - target >= 0


@cute.jit
def wait_reached(address: Int64, target: Int32, stop: Int64, timeout_ns: Int64) -> Boolean:
    """Wait until a word has ``reached`` the target; False when time is up or ``stop`` is not 0.

    On True, what the signalling thread did before is visible to this thread.

    Args:
        stop: address of a word that ends the wait early when it becomes nonzero.
    """
    came = reached(peek(address), target)
    waiting = Boolean(not came)
    start = cute.arch.globaltimer()
    while waiting:
        ptx.nanosleep(100)
        came = reached(peek(address), target)
        expired = cute.arch.globaltimer() - start > timeout_ns
        waiting = Boolean(not (came or expired or peek(stop) != 0))
    ptx.acquire_sys(address)
    return came


@cute.jit
def meet(
    words: Int64,
    stride: Int64,
    rank: Int32,
    ranks: Int32,
    step: Int32,
    stop: Int64,
    timeout_ns: Int64,
) -> Boolean:
    """A barrier of one block per rank, of at least ``ranks`` threads; False on a thread whose peer is late.

    For kernels that run on all ranks at once (not on virtual ranks, which run one after another).

    Args:
        words: symmetric int32 [ranks], zero at first, used by nothing else.
        step: counts this block's barriers from 1.
        stop: as for ``wait_reached``.
    """
    other = cute.arch.thread_idx()[0]
    came = Boolean(True)
    cute.arch.fence_acq_rel_sys()
    cute.arch.sync_threads()
    if other < ranks:
        signal(peer(words, stride, other) + Int64(rank) * 4, step)
        came = wait_reached(peer(words, stride, rank) + Int64(other) * 4, step, stop, timeout_ns)
    cute.arch.sync_threads()
    return came
