"""Staging: the caller's expert ids into this rank's segment of the symmetric heap."""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, Int64, cute

from mok.kernels_cute import ptx
from mok.kernels_cute.schedule.common import record_error, words
from mok.kernels_cute.schedule.plan import IDS_IN_FLIGHT, ROUTE_OUT_OF_RANGE, THREADS


class StageIdsKernel:
    """Copy ids [T, K] to int32 heap memory and write this rank's token count.

    An id outside [0, E) other than −1 becomes −1 and an error record. Peers read the result after
    the next device barrier; nothing here is remote.

    Config:
        ids_bits: 64 or 32, the width of the caller's ids.
    """

    def __init__(self, ids_bits: int = 64):
        if ids_bits not in (32, 64):
            raise ValueError(f"ids_bits is 32 or 64, not {ids_bits}")
        self.id_type = Int64 if ids_bits == 64 else Int32

    @cute.jit
    def __call__(
        self,
        src_addr: Int64,
        ids_addr: Int64,
        count_addr: Int64,
        record_addr: Int64,
        num_tokens: Int32,
        topk: Int32,
        num_experts: Int32,
        rank: Int32,
        num_ctas: Int32,
        stream: cuda.CUstream,
    ):
        """src: ids [T, K], contiguous; ids: int32 [T, K] and count: int32 [1], both this rank's;
        record: see ``plan.RECORD_WORDS``. T may be 0 (src is then not read); T·K < 2^31."""
        self.kernel(
            src_addr, ids_addr, count_addr, record_addr, num_tokens, topk, num_experts, rank
        ).launch(grid=(num_ctas, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(
        self,
        src_addr: Int64,
        ids_addr: Int64,
        count_addr: Int64,
        record_addr: Int64,
        num_tokens: Int32,
        topk: Int32,
        num_experts: Int32,
        rank: Int32,
    ):
        ids = words(ids_addr)
        tid = cute.arch.thread_idx()[0]
        cta = cute.arch.block_idx()[0]
        if cta == 0 and tid == 0:
            words(count_addr)[0] = num_tokens
        num_routes = num_tokens * topk
        step = cute.arch.grid_dim()[0] * (THREADS * IDS_IN_FLIGHT)
        first = cta * (THREADS * IDS_IN_FLIGHT) + tid
        while first < num_routes:
            values = []
            for u in cutlass.range_constexpr(IDS_IN_FLIGHT):
                route = first + u * THREADS
                address = src_addr + Int64(route) * (self.id_type.width // 8)
                values.append(ptx.load_if(address, route < num_routes, self.id_type(-1)))
            for u in cutlass.range_constexpr(IDS_IN_FLIGHT):
                route = first + u * THREADS
                if route < num_routes:
                    ids[route] = self.checked(
                        Int64(values[u]), route, topk, num_experts, rank, record_addr
                    )
            first += step

    @cute.jit
    def checked(
        self,
        value: Int64,
        route: Int32,
        topk: Int32,
        num_experts: Int32,
        rank: Int32,
        record_addr: Int64,
    ) -> Int32:
        """The id as int32; −1, and a record, where it names no expert."""
        expert = Int32(value)
        if value < -1 or value >= Int64(num_experts):
            token = route // topk
            record_error(
                record_addr,
                ROUTE_OUT_OF_RANGE,
                rank,
                token,
                route - token * topk,
                value,
                num_experts,
            )
            expert = Int32(-1)
        return expert
