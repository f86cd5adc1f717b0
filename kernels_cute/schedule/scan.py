"""Scan: per expert, from counts per chunk to the number of routes in earlier chunks."""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, Int64, cute

from mok.kernels_cute import ptx
from mok.kernels_cute.schedule.common import words
from mok.kernels_cute.schedule.plan import MAX_CHUNKS, WARP

WARPS = 32
PER_WARP = MAX_CHUNKS // WARPS  # chunks that one thread holds in registers


class ScanKernel:
    """Exclusive prefix over chunks, in place, and each expert's total. A CTA has 32 experts."""

    @cute.jit
    def __call__(
        self,
        counts_addr: Int64,
        totals_addr: Int64,
        num_local: Int32,
        num_chunks: Int32,
        stream: cuda.CUstream,
    ):
        """counts: int32 [num_chunks ≤ MAX_CHUNKS, El], replaced; totals: int32 [El]."""
        # One CTA more than needed when El is a multiple of 32, so that El = 0 launches too.
        self.kernel(counts_addr, totals_addr, num_local, num_chunks).launch(
            grid=((num_local >> 5) + 1, 1, 1),
            block=(WARP * WARPS, 1, 1),
            smem=WARPS * WARP * 4,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, counts_addr: Int64, totals_addr: Int64, num_local: Int32, num_chunks: Int32):
        tid = cute.arch.thread_idx()[0]
        lane = tid % WARP
        warp = tid // WARP
        expert = cute.arch.block_idx()[0] * WARP + lane
        sums = cute.arch.get_dyn_smem(Int32, alignment=16)  # [warp, lane]

        values = []
        for i in cutlass.range_constexpr(PER_WARP):
            chunk = warp * PER_WARP + i
            exists = chunk < num_chunks and expert < num_local
            address = counts_addr + (Int64(chunk) * num_local + expert) * 4
            values.append(ptx.load_if(address, exists, Int32(0)))
        mine = Int32(0)
        for i in cutlass.range_constexpr(PER_WARP):
            mine += values[i]
        sums[tid] = mine
        cute.arch.sync_threads()

        before = Int32(0)
        total = Int32(0)
        for other in cutlass.range_constexpr(WARPS):
            value = sums[other * WARP + lane]
            if other < warp:
                before += value
            total += value
        counts = words(counts_addr)
        for i in cutlass.range_constexpr(PER_WARP):
            chunk = warp * PER_WARP + i
            if chunk < num_chunks and expert < num_local:
                counts[chunk * num_local + expert] = before
            before += values[i]
        if warp == 0 and expert < num_local:
            words(totals_addr)[expert] = total


# Part of ScheduleKernel, which names no device symbols of its own.
ScanKernel.kernel.set_name_prefix(
    "schedule_scan", remove_cutlass_symbol=True, keep_mangled_name=False
)
