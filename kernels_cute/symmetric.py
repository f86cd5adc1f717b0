"""Device side of the symmetric heap: addresses of peers, signals to them, bounded waits for them.

For kernels of any kind: a rank's copy of a symmetric tensor lies at ``base + rank * stride``, both from
``SymmetricTensor.base_address`` and ``.rank_stride`` on the host. Everything here has system scope.
"""

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
