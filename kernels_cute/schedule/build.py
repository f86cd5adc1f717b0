"""The schedule of one rank: count, scan and place, launched together."""

import cuda.bindings.driver as cuda
from cutlass import Int32, Int64, cute

from mok.kernels_cute.schedule.count import CountKernel
from mok.kernels_cute.schedule.place import PlaceKernel
from mok.kernels_cute.schedule.scan import ScanKernel


class ScheduleKernel:
    """From all ranks' expert ids to this rank's schedule: three launches, no host synchronisation.

    One compiled function serves every T, K, E, EP, rank and tile. All numbers are integers and
    every row is written once, so the result is exact and the same in every run.
    """

    def __init__(self):
        self.count = CountKernel()
        self.scan = ScanKernel()
        self.place = PlaceKernel()

    @cute.jit
    def __call__(
        self,
        ids_addr: Int64,
        num_tokens_addr: Int64,
        rank_stride: Int64,
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
        gate_addr: Int64,
        ep_size: Int32,
        num_experts: Int32,
        topk: Int32,
        rank: Int32,
        tile: Int32,
        capacity: Int32,
        num_chunks: Int32,
        stream: cuda.CUstream,
    ):
        """All arrays are int32 unless said otherwise.

        Input: rank r's ids [T_r, K] at ids_addr + r·rank_stride and its token count [1] at
        num_tokens_addr + r·rank_stride; rank_stride in bytes. Any T_r ≥ 0; Σ T_r·K ≤ MAX_ROUTES.
        Scratch, sizes from ``schedule_plan``: counts, totals, local (int16), rank_starts.

        Output: peer_rank [capacity] and peer_token_idx [capacity] (−1 in padding rows; entries
        past the padded total are left alone), num_rows [1] (the padded total; upstream calls it
        num_tokens), tokens_per_expert [El], expert_offset [El + 1] (padded), block_expert
        [capacity / tile], and, unless its address is 0, route_row [T, K] (EP = 1 only: the row of
        each route, −1 for a dropped one). record [8]: see ``plan.RECORD_WORDS``. gate [1], or
        address 0: if not 0, no rank's ids are read and the schedule is empty.

        tile is a power of two; 1 ≤ num_chunks ≤ MAX_CHUNKS changes speed only.
        """
        base = num_experts // ep_size
        extra = num_experts - base * ep_size
        num_local = base
        first_expert = rank * base + extra
        if rank < extra:
            num_local = base + 1
            first_expert = rank * (base + 1)
        self.count(
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
            stream,
        )
        self.scan(counts_addr, totals_addr, num_local, num_chunks, stream)
        self.place(
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
            stream,
        )
