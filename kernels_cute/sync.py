"""Counters in global memory: arriving, waiting with a time limit, and the record a failed wait leaves.

Signals inside the kernel are local to the GPU. Arrive: ``red.release.gpu`` add. Wait: poll relaxed, then
one acquire. Data written by the async proxy is waited for (bulk wait_group 0) before the arrive; after a
wait whose data the async proxy will read stands ``fence.proxy.async``.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, select_

from . import ptx

# The record of a wait that expired, int32 words. Its second word is claimed by compare-and-swap, so that the
# record is one thread's, never a mixture; the first is written last, so that it is never seen half done.
RECORD_FIELDS = (
    "state", "kind", "rank", "sm", "role", "task", "counter", "index", "value", "awaited",
)  # fmt: skip
RECORD_WORDS = 16
RECORD_CLAIM = 1
RECORD_TIMEOUT = 1
ROLES = ("load", "comm", "scheduler")
COUNTERS = ("x_ready", "y_ready", "y_free", "hidden_ready", "shared_hidden_ready")


class Watch(NamedTuple):
    """What a bounded wait needs: record address, time limit in nanoseconds, who is waiting.

    ``gate``: address of the word that ``goes_on`` reads.
    """

    record: Int64
    timeout_ns: Int64
    rank: Int32
    gate: Int64


def int_ptr(address: Int64) -> cute.Pointer:
    """A pointer to int32 words in global memory."""
    return cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)


def goes_on(gate: Int64) -> Boolean:
    """Whether the group was whole at this stream's last device barrier; ``gate`` 0: it always is.

    Only barrier kernels write the word, earlier in the stream, so all CTAs of a launch see the same.
    """
    return ptx.load_if(gate, gate != 0, Int32(0)) == 0


def arrive(counter: cute.Pointer) -> None:
    """Add one; everything this thread has seen or written before becomes visible to waiters."""
    cute.arch.red(counter, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")


@cute.jit
def wait_at_least(
    counter: cute.Pointer,
    target: Int32,
    watch: Watch,
    role: int,
    name: int,
    task: Int32,
    index: Int32,
):
    """Return once ``counter >= target``, with acquire semantics; trap after the time limit.

    ``role`` and ``name`` index ``ROLES`` and ``COUNTERS`` for the record.
    """
    # Most waits find their counter complete: one acquiring load then does. Inline, because a load whose
    # value is unused would be dropped, and the acquire with it.
    value = ptx.acquire_gpu(counter.toint())
    if value < target:
        start = cute.arch.globaltimer()
        while value < target:
            ptx.nanosleep(20)
            value = cute.arch.load(counter, Int32, sem="relaxed", scope="gpu")
            if cute.arch.globaltimer() - start > watch.timeout_ns:
                fail(watch, role, name, task, index, value, target)
        ptx.acquire_gpu(counter.toint())


@cute.jit
def fail(
    watch: Watch, role: int, name: int, task: Int32, index: Int32, value: Int32, target: Int32
):
    """Write the record, unless another thread has, and trap: a trap ends the record's writer, too."""
    record = int_ptr(watch.record)
    taken = cute.arch.atomic_cas(record + RECORD_CLAIM, cmp=Int32(0), val=Int32(RECORD_TIMEOUT))
    if taken == 0:
        cute.arch.store(record + 2, watch.rank)
        cute.arch.store(record + 3, cute.arch.smid())
        cute.arch.store(record + 4, Int32(role))
        cute.arch.store(record + 5, task)
        cute.arch.store(record + 6, Int32(name))
        cute.arch.store(record + 7, index)
        cute.arch.store(record + 8, value)
        cute.arch.store(record + 9, target)
        cute.arch.fence_acq_rel_sys()
        cute.arch.store(record, Int32(RECORD_TIMEOUT), sem="release", scope="sys")
        cute.arch.fence_acq_rel_sys()
    else:
        patience = Int32(1000)
        while patience > 0:
            ptx.nanosleep(1000)
            written = cute.arch.load(record, Int32, sem="relaxed", scope="sys")
            patience = select(written != 0, Int32(0), patience - 1)
    ptx.trap()


def select(condition: Boolean, yes: Int32, no: Int32) -> Int32:
    """``yes`` where ``condition`` holds, else ``no``: both are evaluated, nothing branches."""
    return Int32(select_(condition, Int32(yes), Int32(no)))


def select_f32(condition: Boolean, yes: Float32, no: Float32) -> Float32:
    """``select`` on FP32 values."""
    return Float32(select_(condition, Float32(yes), Float32(no)))


def select_i64(condition: Boolean, yes: Int64, no: Int64) -> Int64:
    """``select`` on addresses."""
    return Int64(select_(condition, Int64(yes), Int64(no)))


def divider(divisor: Int32) -> Int64:
    """The multiplier with which ``divide`` divides by ``divisor`` in 1…32."""
    return (Int64(1 << 36) + Int64(divisor) - 1) // Int64(divisor)


def divide(value: Int32, multiplier: Int64) -> Int32:
    """value // divisor for 0 ≤ value < 2^31, in a multiplication.

    With M = ceil(2^36/d), M*d = 2^36 + e and e < d ≤ 32, so value*e < 2^36: the quotient is exact.
    """
    return Int32((Int64(value) * multiplier) >> 36)


def advance(index: Int32, phase: Int32, stages: int) -> tuple[Int32, Int32]:
    """The next (index, phase) in a ring of ``stages`` mbarriers; the phase flips when it wraps."""
    step = index + 1
    wrapped = step == stages
    return select(wrapped, Int32(0), step), select(wrapped, phase ^ 1, phase)
