"""Recording begin and end of each task from inside a kernel built with ``trace=True``.

The load warp notes when a task begins and the store warp when it has ended (a result warp, where no store
warp has part in it); a comm worker does both. Each writes its own words of the CTA's next record
(``trace`` says how it is laid out), so nothing is passed from warp to warp. Without ``trace=True`` none of this is in the kernel.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from . import records, trace
from .invariant import Invariant
from .sync import int_ptr

# A tracer's int64 words in shared memory.
ROWS, COUNT, CAPACITY, BEGUN, ENDED, RESULTED, QUANTISED = range(7)
WORDS = 7


def long_ptr(address: Int64) -> cute.Pointer:
    """A pointer to int64 words in global memory."""
    return cute.make_ptr(Int64, address, cute.AddressSpace.gmem, assumed_align=8)


class Tracer(Invariant):
    """The records of one CTA.

    Args:
        words: int64 [WORDS] in shared memory.
    """

    def __init__(self, words: cute.Pointer):
        self.words = words

    @cute.jit
    def open(self, record: Int64, program: int):
        """Find this CTA's records (one thread, before a CTA-wide barrier).

        ``record``: address of the rank's words; those from ``records.TRACE`` on hold the address of the
        buffer of ``program``. Without one, or without room for this CTA, nothing is recorded.
        """
        words = self.words
        rows, count, capacity = Int64(0), Int64(0), Int64(0)
        buffer = cute.arch.load(long_ptr(record + 4 * records.TRACE) + program, Int64)
        if buffer != 0:
            worker = cute.arch.block_idx()[0]
            header = int_ptr(buffer)
            workers = cute.arch.load(header + trace.H_WORKERS, Int32)
            if worker < workers:
                capacity = Int64(cute.arch.load(header + trace.H_CAPACITY, Int32))
                count = buffer + 4 * (trace.HEADER_WORDS + Int64(worker))
                rows = buffer + 4 * (trace.HEADER_WORDS + Int64((workers + 3) // 4 * 4))
                rows += Int64(worker) * capacity * trace.RECORD_BYTES
        for at, value in ((ROWS, rows), (COUNT, count), (CAPACITY, capacity)):
            cute.arch.store(words + at, value)
        for at in (BEGUN, ENDED, RESULTED, QUANTISED):
            cute.arch.store(words + at, Int64(0))

    @cute.jit
    def begin(self, role: int, kind, ticket, minibatch, expert, block, n):
        """The CTA's next task begins (one warp, or one thread; lane 0 works): all but its end."""
        words = self.words
        if cute.arch.lane_idx() == 0:
            number = cute.arch.load(words + BEGUN, Int64)
            cute.arch.store(words + BEGUN, number + 1)
            if number < cute.arch.load(words + CAPACITY, Int64):
                at = cute.arch.load(words + ROWS, Int64) + number * trace.RECORD_BYTES
                cute.arch.store(long_ptr(at), cute.arch.globaltimer())
                fields = (
                    cute.arch.smid(), kind | role << trace.ROLE_SHIFT, ticket, minibatch, expert,
                    block, n, 0,
                )  # fmt: skip
                for i, value in enumerate(fields):
                    cute.arch.store(int_ptr(at + 16) + i, Int32(value))

    @cute.jit
    def end(self, mine: Int32 = 1, counter: cutlass.Constexpr[int] = ENDED):
        """The task of the CTA's next record has ended (one warp, or one thread; lane 0 works).

        Where either of two warps may see a task's end, both call this for every task, each with a
        ``counter`` of its own, and ``mine`` says whose record it is.
        """
        words = self.words
        if cute.arch.lane_idx() == 0:
            number = cute.arch.load(words + counter, Int64)
            cute.arch.store(words + counter, number + 1)
            capacity = cute.arch.load(words + CAPACITY, Int64)
            if capacity > 0 and mine != 0:
                count = int_ptr(cute.arch.load(words + COUNT, Int64))
                made = Int32(number + 1)
                cute.arch.red(count, made, op="max", dtype="s32", sem="relaxed", scope="gpu")
                if number < capacity:
                    at = cute.arch.load(words + ROWS, Int64) + number * trace.RECORD_BYTES
                    cute.arch.store(long_ptr(at + 8), cute.arch.globaltimer())
