"""A copy, and a kernel that holds SMs: no tensor cores, no TMA."""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, Int64, cute
from cutlass.memory import SmemAllocator

from .. import ptx

THREADS = 128
HELD_BYTES = 200 * 1024  # with so much shared memory, a block has its SM for itself


class CopyKernel:
    """target[i] = source[i], 16 bytes a thread."""

    @cute.jit
    def __call__(self, source: Int64, target: Int64, chunks: Int32, stream: cuda.CUstream):
        """``chunks``: of 16 bytes."""
        self.kernel(source, target, chunks).launch(
            grid=((chunks + THREADS - 1) // THREADS, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, source: Int64, target: Int64, chunks: Int32):
        i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        if i < chunks:
            offset = Int64(i) * 16
            ptx.store_16(target + offset, *ptx.load_16(source + offset))


class HoldKernel:
    """Keep one SM per block for about ``naps`` microseconds, and count the blocks that ran."""

    @cute.jit
    def __call__(self, count: Int64, blocks: Int32, naps: Int32, stream: cuda.CUstream):
        """``count``: int32 [1]."""
        self.kernel(count, naps).launch(grid=(blocks, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, count: Int64, naps: Int32):
        held = SmemAllocator().allocate_tensor(Int32, cute.make_layout(HELD_BYTES // 4), 128)
        held[cute.arch.thread_idx()[0]] = Int32(0)
        for _ in cutlass.range(naps, unroll=1):
            ptx.nanosleep(1000)
        if cute.arch.thread_idx()[0] == 0:
            counter = cute.make_ptr(Int32, count, cute.AddressSpace.gmem, assumed_align=4)
            cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")
