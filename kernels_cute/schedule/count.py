"""Count: read every rank's ids once, keep this rank's experts, count them per chunk."""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int16, Int32, Int64, Uint32, cute

from mok.kernels_cute import ptx
from mok.kernels_cute.schedule.common import (
    count_one,
    find_segment,
    record_error,
    steps_of,
    warp_inclusive_sum,
    words,
)
from mok.kernels_cute.schedule.plan import (
    IDS_IN_FLIGHT,
    ROUTE_OUT_OF_RANGE,
    STREAMS,
    THREADS,
    TILE_ROUTES,
    WARP,
)
from mok.kernels_cute.sync import goes_on, select


class CountKernel:
    """Per chunk, histogram of this rank's experts, and the ids in row order for the place kernel.

    Peers' ids are read here only, in runs of consecutive tokens. Each becomes an int16 local expert
    (−1: dropped, or another rank's) at its place in the (a, b, k) order.
    """

    @cute.jit
    def __call__(
        self,
        ids_addr: Int64,
        num_tokens_addr: Int64,
        rank_stride: Int64,
        counts_addr: Int64,
        local_addr: Int64,
        rank_starts_addr: Int64,
        record_addr: Int64,
        gate_addr: Int64,
        ep_size: Int32,
        num_experts: Int32,
        first_expert: Int32,
        num_local: Int32,
        topk: Int32,
        num_chunks: Int32,
        stream: cuda.CUstream,
    ):
        """Rank r's ids, int32 [T_r, K], and token count, int32 [1], are at the given addresses plus
        r·rank_stride bytes. Outputs: counts int32 [num_chunks, El]; local int16 [64·S·K] (room for
        64·⌈N/64⌉·K); rank_starts int32 [EP + 1], the ranks' first global token and N.
        """
        smem_bytes = TILE_ROUTES * 2 + (num_local + ep_size + 1) * 4
        self.kernel(
            ids_addr,
            num_tokens_addr,
            rank_stride,
            counts_addr,
            local_addr,
            rank_starts_addr,
            record_addr,
            gate_addr,
            ep_size,
            num_experts,
            first_expert,
            num_local,
            topk,
            num_chunks,
        ).launch(grid=(num_chunks, 1, 1), block=(THREADS, 1, 1), smem=smem_bytes, stream=stream)

    @cute.kernel
    def kernel(
        self,
        ids_addr: Int64,
        num_tokens_addr: Int64,
        rank_stride: Int64,
        counts_addr: Int64,
        local_addr: Int64,
        rank_starts_addr: Int64,
        record_addr: Int64,
        gate_addr: Int64,
        ep_size: Int32,
        num_experts: Int32,
        first_expert: Int32,
        num_local: Int32,
        topk: Int32,
        num_chunks: Int32,
    ):
        tid = cute.arch.thread_idx()[0]
        chunk = cute.arch.block_idx()[0]
        tile = cute.arch.get_dyn_smem(Int32, alignment=16)  # pairs of int16
        histogram = tile + TILE_ROUTES // 2
        rank_starts = histogram + num_local

        expert = tid
        while expert < num_local:
            histogram[expert] = Int32(0)
            expert += THREADS
        if tid < WARP:
            ranks = select(goes_on(gate_addr), ep_size, Int32(0))
            self.sum_tokens(rank_starts, num_tokens_addr, rank_stride, (ep_size, ranks), tid)
        cute.arch.sync_threads()

        num_tokens = rank_starts[ep_size]
        steps, step, end_step = steps_of(num_tokens, chunk, num_chunks)
        tile_steps = Int32(Uint32(TILE_ROUTES // STREAMS) // Uint32(topk))
        local = words(local_addr)
        while step < end_step:
            run = cutlass.min(tile_steps, end_step - step) * topk  # routes of one stream
            for first in cutlass.range(tid, run * STREAMS, THREADS * IDS_IN_FLIGHT, unroll=1):
                self.fetch(
                    tile,
                    rank_starts,
                    ids_addr,
                    rank_stride,
                    record_addr,
                    (first, run, run * STREAMS),
                    (steps, step, num_tokens),
                    (ep_size, num_experts, first_expert, num_local, topk),
                )
            cute.arch.sync_threads()
            base = step * (topk * (STREAMS // 2))
            for pair in cutlass.range(tid, run * (STREAMS // 2), THREADS):
                experts = tile[pair]
                local[base + pair] = experts
                low = (experts << 16) >> 16
                high = experts >> 16
                if low >= 0:
                    count_one(histogram + low)
                if high >= 0:
                    count_one(histogram + high)
            cute.arch.sync_threads()
            step += tile_steps

        counts = words(counts_addr) + chunk * num_local
        expert = tid
        while expert < num_local:
            counts[expert] = histogram[expert]
            expert += THREADS
        if chunk == 0:
            starts_out = words(rank_starts_addr)
            rank = tid
            while rank <= ep_size:
                starts_out[rank] = rank_starts[rank]
                rank += THREADS

    @cute.jit
    def sum_tokens(
        self,
        rank_starts: cute.Pointer,
        num_tokens_addr: Int64,
        rank_stride: Int64,
        sizes,
        lane: Int32,
    ):
        """Exclusive prefix of the token counts of ``sizes[0]`` ranks, by one warp; those past
        ``sizes[1]`` are not read and count 0."""
        ep_size, present = sizes
        before = Int32(0)
        base = Int32(0)
        while base < ep_size:
            rank = base + lane
            tokens = ptx.load_if(
                num_tokens_addr + Int64(rank) * rank_stride, rank < present, Int32(0)
            )
            through = warp_inclusive_sum(tokens, lane)
            if rank < ep_size:
                rank_starts[rank] = before + through - tokens
            before += cute.arch.shuffle_sync(through, WARP - 1)
            base += WARP
        if lane == 0:
            rank_starts[ep_size] = before

    @cute.jit
    def fetch(
        self,
        tile: cute.Pointer,
        rank_starts: cute.Pointer,
        ids_addr: Int64,
        rank_stride: Int64,
        record_addr: Int64,
        tile_extent,
        position,
        shape,
    ):
        """Up to IDS_IN_FLIGHT ids of this thread: global memory to their place in the tile.

        The tile is read stream by stream, so consecutive threads read consecutive ids.
        """
        first, run, tile_routes = tile_extent
        steps, step, num_tokens = position
        ep_size, num_experts, first_expert, num_local, topk = shape
        tile16 = cute.recast_ptr(tile, dtype=Int16)
        values = []
        places = []
        sources = []
        for u in cutlass.range_constexpr(IDS_IN_FLIGHT):
            i = first + u * THREADS
            stream = Int32(Uint32(i) // Uint32(run))
            within = i - stream * run
            ahead = Int32(Uint32(within) // Uint32(topk))
            k = within - ahead * topk
            token = stream * steps + step + ahead
            exists = i < tile_routes and token < num_tokens
            rank = find_segment(rank_starts, ep_size, token)
            token -= rank_starts[rank]
            address = ids_addr + Int64(rank) * rank_stride + Int64(token * topk + k) * 4
            values.append(ptx.load_if(address, exists, Int32(-1)))
            places.append((ahead * STREAMS + stream) * topk + k)
            sources.append((rank, token, k))
        for u in cutlass.range_constexpr(IDS_IN_FLIGHT):
            value = values[u]
            if value < -1 or value >= num_experts:
                rank, token, k = sources[u]
                record_error(
                    record_addr, ROUTE_OUT_OF_RANGE, rank, token, k, Int64(value), num_experts
                )
            expert = value - first_expert
            if expert < 0 or expert >= num_local or value >= num_experts:
                expert = Int32(-1)
            if first + u * THREADS < tile_routes:
                tile16[places[u]] = Int16(expert)


# Part of ScheduleKernel, which names no device symbols of its own.
CountKernel.kernel.set_name_prefix(
    "schedule_count", remove_cutlass_symbol=True, keep_mangled_name=False
)
