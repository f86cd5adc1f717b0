"""Device functions that the schedule's kernels share: order, warp scan, search, error record.

The row order, which no kernel of the schedule may disagree on: with N tokens of all ranks, token g
(rank offset + local index) belongs to *stream* ``b = g div S`` at *step* ``a = g mod S``,
``S = ceil(N / 64)``. Routes are taken in the order (a, b, k). That enumeration, ``q = 64·a + b`` and
``j = q·K + k``, has at most 63 holes (tokens g ≥ N), and all kernels walk it by ``j``. A *chunk* is a
range of steps, the work of one CTA; inside a chunk each stream is a run of consecutive tokens.
"""

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from mok.kernels_cute.schedule.plan import RECORD_WORDS, STREAMS


@cute.jit
def words(address: Int64) -> cute.Pointer:
    """Pointer to int32 in global memory."""
    return cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)


@cute.jit
def ceil_div(a: Int32, b: Int32) -> Int32:
    """⌈a / b⌉ for a ≥ 0, b ≥ 1."""
    return Int32((Uint32(a) + Uint32(b) - 1) // Uint32(b))


@cute.jit
def warp_inclusive_sum(value: Int32, lane: Int32) -> Int32:
    """Sum of ``value`` over lanes 0 … lane; all 32 lanes take part."""
    total = value
    for log in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(total, 1 << log)
        if lane >= (1 << log):
            total = total + below
    return total


@cute.jit
def count_one(counter: cute.Pointer):
    """Add 1 to an int32 counter in shared memory."""
    # Unsigned, for which there is an instruction that merges the lanes of a warp.
    cute.arch.red(counter, Uint32(1), op="add", dtype=Uint32, sem="relaxed", scope="cta")


@cute.jit
def steps_of(num_tokens: Int32, chunk: Int32, num_chunks: Int32):
    """(S, first step, end step) of a chunk; the chunks partition steps 0 … S − 1 in order."""
    steps = (num_tokens + (STREAMS - 1)) >> 6
    per_chunk = ceil_div(steps, num_chunks)
    first = cutlass.min(chunk * per_chunk, steps)
    return steps, first, cutlass.min(first + per_chunk, steps)


@cute.jit
def find_segment(starts: cute.Pointer, count: Int32, position: Int32) -> Int32:
    """The last i < count with starts[i] ≤ position: the segment that holds ``position``.

    ``starts``: int32 [count + 1], ascending from 0; empty segments are stepped over.
    """
    low = Int32(0)
    high = count
    while high - low > 1:
        middle = (low + high) >> 1
        if starts[middle] <= position:
            low = middle
        else:
            high = middle
    return low


@cute.jit
def record_error(
    record_addr: Int64, code: int, rank: Int32, token: Int32, k: Int32, value: Int64, limit: Int32
):
    """Fill the error record if it is still free; its first word last, as the host may look at any time."""
    record = words(record_addr)
    previous = cute.arch.atomic_cas(
        record + (RECORD_WORDS - 1), cmp=Int32(0), val=Int32(1), sem="relaxed", scope="gpu"
    )
    if previous == 0:
        record[1] = rank
        record[2] = token
        record[3] = k
        record[4] = Int32(value)
        record[5] = Int32(value >> 32)
        record[6] = limit
        cute.arch.store(record, Int32(code), sem="release", scope="sys")
