"""Place: give every route of this rank's experts its row, and write the schedule."""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, Int64, Uint32, cute

from mok.kernels_cute import ptx
from mok.kernels_cute.schedule.common import (
    count_one,
    find_segment,
    record_error,
    steps_of,
    warp_inclusive_sum,
    words,
)
from mok.kernels_cute.schedule.plan import ROWS_OUT_OF_CAPACITY, STREAMS, THREADS, WARP, WARPS

ROUTES_IN_FLIGHT = 4


class PlaceKernel:
    """Rows from counts: segment start + routes in earlier chunks, warps, iterations and lanes.

    Every CTA computes the segment starts from the totals (at most a few thousand numbers), so no
    launch is spent on them.
    """

    @cute.jit
    def __call__(
        self,
        counts_addr: Int64,
        totals_addr: Int64,
        local_addr: Int64,
        rank_starts_addr: Int64,
        peer_rank_addr: Int64,
        peer_token_idx_addr: Int64,
        num_rows_addr: Int64,
        tokens_per_expert_addr: Int64,
        expert_offset_addr: Int64,
        block_expert_addr: Int64,
        route_row_addr: Int64,
        record_addr: Int64,
        ep_size: Int32,
        rank: Int32,
        num_local: Int32,
        topk: Int32,
        tile: Int32,
        capacity: Int32,
        num_chunks: Int32,
        stream: cuda.CUstream,
    ):
        """The first four are what count and scan left; the outputs are those of ScheduleKernel."""
        smem_bytes = ((WARPS + 1) * num_local + ep_size + 2 + WARPS) * 4
        self.kernel(
            counts_addr,
            totals_addr,
            local_addr,
            rank_starts_addr,
            peer_rank_addr,
            peer_token_idx_addr,
            num_rows_addr,
            tokens_per_expert_addr,
            expert_offset_addr,
            block_expert_addr,
            route_row_addr,
            record_addr,
            ep_size,
            rank,
            num_local,
            topk,
            tile,
            capacity,
            num_chunks,
        ).launch(grid=(num_chunks, 1, 1), block=(THREADS, 1, 1), smem=smem_bytes, stream=stream)

    @cute.kernel
    def kernel(
        self,
        counts_addr: Int64,
        totals_addr: Int64,
        local_addr: Int64,
        rank_starts_addr: Int64,
        peer_rank_addr: Int64,
        peer_token_idx_addr: Int64,
        num_rows_addr: Int64,
        tokens_per_expert_addr: Int64,
        expert_offset_addr: Int64,
        block_expert_addr: Int64,
        route_row_addr: Int64,
        record_addr: Int64,
        ep_size: Int32,
        rank: Int32,
        num_local: Int32,
        topk: Int32,
        tile: Int32,
        capacity: Int32,
        num_chunks: Int32,
    ):
        tid = cute.arch.thread_idx()[0]
        lane = tid % WARP
        warp = cute.arch.make_warp_uniform(tid // WARP)
        chunk = cute.arch.block_idx()[0]
        totals = words(totals_addr)
        offsets = cute.arch.get_dyn_smem(Int32, alignment=16)  # [El + 1] padded segment starts
        next_rows = offsets + num_local + 1  # [warp, El]: counts at first, then rows
        rank_starts = next_rows + WARPS * num_local  # [EP + 1]
        warp_sums = rank_starts + ep_size + 1

        i = tid
        while i <= ep_size:
            rank_starts[i] = words(rank_starts_addr)[i]
            i += THREADS
        i = tid
        while i < WARPS * num_local:
            next_rows[i] = Int32(0)
            i += THREADS
        self.prefix(offsets, totals, warp_sums, num_local, tile, tid)

        num_rows = offsets[num_local]
        fits = num_rows <= capacity
        num_tokens = rank_starts[ep_size]
        steps, first_step, end_step = steps_of(num_tokens, chunk, num_chunks)
        # A warp's routes are contiguous, so warps, iterations and lanes are in row order.
        end = end_step * (topk * STREAMS)
        begin = first_step * (topk * STREAMS)
        per_warp = ((end - begin + (THREADS - 1)) // THREADS) * WARP
        begin = begin + warp * per_warp
        end = cutlass.min(begin + per_warp, end)
        mine = next_rows + warp * num_local
        for base in cutlass.range(begin, end, WARP * ROUTES_IN_FLIGHT, unroll=1):
            experts = self.fetch(local_addr, base + lane, end)
            for u in cutlass.range_constexpr(ROUTES_IN_FLIGHT):
                if experts[u] >= 0:
                    count_one(mine + experts[u])
        cute.arch.sync_threads()
        self.start_rows(next_rows, offsets, words(counts_addr) + chunk * num_local, num_local, tid)
        cute.arch.sync_threads()

        for base in cutlass.range(begin, end, WARP * ROUTES_IN_FLIGHT, unroll=1):
            experts = self.fetch(local_addr, base + lane, end)
            rows = [self.take_row(mine, experts[u]) for u in range(ROUTES_IN_FLIGHT)]
            for u in cutlass.range_constexpr(ROUTES_IN_FLIGHT):
                j = base + u * WARP + lane
                row = rows[u]
                if not fits:
                    row = Int32(-1)
                if j < end and (row >= 0 or route_row_addr != 0):
                    position = Int32(Uint32(j) // Uint32(topk))
                    k = j - position * topk
                    token = (position & (STREAMS - 1)) * steps + (position >> 6)
                    if row >= 0:
                        source = find_segment(rank_starts, ep_size, token)
                        index = (token - rank_starts[source]) * topk + k
                        words(peer_rank_addr)[row] = source
                        words(peer_token_idx_addr)[row] = index
                    if route_row_addr != 0 and token < num_tokens:
                        words(route_row_addr)[token * topk + k] = row

        self.pad(offsets, totals, peer_rank_addr, peer_token_idx_addr, num_local, fits, num_chunks)
        self.summarise(
            offsets,
            totals,
            (num_rows_addr, tokens_per_expert_addr, expert_offset_addr, block_expert_addr),
            (num_local, tile, fits, num_chunks),
        )
        if not fits and chunk == 0 and tid == 0:
            record_error(
                record_addr,
                ROWS_OUT_OF_CAPACITY,
                rank,
                Int32(0),
                Int32(0),
                Int64(num_rows),
                capacity,
            )

    @cute.jit
    def fetch(self, local_addr: Int64, first: Int32, end: Int32):
        """Local experts of routes first, first + 32, …; −1 from ``end`` on."""
        experts = []
        for u in cutlass.range_constexpr(ROUTES_IN_FLIGHT):
            j = first + u * WARP
            experts.append(ptx.load_s16_if(local_addr + Int64(j) * 2, j < end, Int32(-1)))
        return experts

    @cute.jit
    def prefix(
        self,
        offsets: cute.Pointer,
        totals: cute.Pointer,
        warp_sums: cute.Pointer,
        num_local: Int32,
        tile: Int32,
        tid: Int32,
    ):
        """offsets = exclusive prefix of the totals, each rounded up to the tile. Ends in sync."""
        lane = tid % WARP
        warp = tid // WARP
        before = Int32(0)
        base = Int32(0)
        while base < num_local:
            expert = base + tid
            padded = Int32(0)
            if expert < num_local:
                padded = (totals[expert] + tile - 1) & -tile
            through = warp_inclusive_sum(padded, lane)
            if lane == WARP - 1:
                warp_sums[warp] = through
            cute.arch.sync_threads()
            total = Int32(0)
            for other in cutlass.range_constexpr(WARPS):
                value = warp_sums[other]
                if other < warp:
                    through += value
                total += value
            if expert < num_local:
                offsets[expert] = before + through - padded
            before += total
            base += THREADS
            cute.arch.sync_threads()
        if tid == 0:
            offsets[num_local] = before
        cute.arch.sync_threads()

    @cute.jit
    def start_rows(
        self,
        next_rows: cute.Pointer,
        offsets: cute.Pointer,
        earlier: cute.Pointer,
        num_local: Int32,
        tid: Int32,
    ):
        """From each warp's counts to the first row that it gives out, per expert."""
        expert = tid
        while expert < num_local:
            row = offsets[expert] + earlier[expert]
            counts = [next_rows[warp * num_local + expert] for warp in range(WARPS)]
            for warp in cutlass.range_constexpr(WARPS):
                next_rows[warp * num_local + expert] = row
                row += counts[warp]
            expert += THREADS

    @cute.jit
    def take_row(self, next_rows: cute.Pointer, expert: Int32) -> Int32:
        """The warp's next rows of the lanes' experts, in lane order; −1 for expert −1."""
        same = cute.arch.match_sync(0xFFFFFFFF, expert)
        below = Int32(cute.arch.popc(same & cute.arch.lanemask_lt()))
        count = Int32(cute.arch.popc(same))
        row = Int32(-1)
        if expert >= 0:
            row = next_rows[expert] + below
        cute.arch.sync_warp()
        if expert >= 0 and below == count - 1:
            next_rows[expert] = row + 1
        cute.arch.sync_warp()
        return row

    @cute.jit
    def pad(
        self,
        offsets: cute.Pointer,
        totals: cute.Pointer,
        peer_rank_addr: Int64,
        peer_token_idx_addr: Int64,
        num_local: Int32,
        fits,
        num_chunks: Int32,
    ):
        """−1 in the rows between an expert's last route and its segment's end; a warp an expert."""
        tid = cute.arch.thread_idx()[0]
        expert = cute.arch.block_idx()[0] * WARPS + tid // WARP
        while expert < num_local and fits:
            row = offsets[expert] + totals[expert] + tid % WARP
            while row < offsets[expert + 1]:
                words(peer_rank_addr)[row] = Int32(-1)
                words(peer_token_idx_addr)[row] = Int32(-1)
                row += WARP
            expert += num_chunks * WARPS

    @cute.jit
    def summarise(self, offsets: cute.Pointer, totals: cute.Pointer, outputs, shape):
        """Counts, segment starts, and the expert of each block of rows; all empty if not fits."""
        num_rows_addr, tokens_per_expert_addr, expert_offset_addr, block_expert_addr = outputs
        num_local, tile, fits, num_chunks = shape
        first = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        step = num_chunks * THREADS
        num_blocks = Int32(Uint32(offsets[num_local]) // Uint32(tile))
        block = first
        while block < num_blocks and fits:
            words(block_expert_addr)[block] = find_segment(offsets, num_local, block * tile)
            block += step
        expert = first
        while expert <= num_local:
            offset = Int32(0)
            if fits:
                offset = offsets[expert]
            words(expert_offset_addr)[expert] = offset
            if expert < num_local:
                count = Int32(0)
                if fits:
                    count = totals[expert]
                words(tokens_per_expert_addr)[expert] = count
            else:
                words(num_rows_addr)[0] = offset
            expert += step


# Part of ScheduleKernel, which names no device symbols of its own.
PlaceKernel.kernel.set_name_prefix(
    "schedule_place", remove_cutlass_symbol=True, keep_mangled_name=False
)
