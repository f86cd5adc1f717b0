"""The gather warps of the Hopper mainloop: rows of x and dy by cp.async, as A or as columns of A."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from .. import ptx
from ..invariant import Invariant
from ..sync import advance, divide, select
from .operands import RowSource


class Bars(NamedTuple):
    """The mbarriers of the stages.

    ``written``: the MMA warps have put results into a stage; ``issued``: the first warpgroup has started
    its product (only with a ``lead``); ``ready``: the pair's other CTA is ready for this stage's B.
    """

    full: cute.Pointer
    empty: cute.Pointer
    written: cute.Pointer
    issued: cute.Pointer
    ready: cute.Pointer


class Gather(Invariant):
    """Base of ``sm90.Mainloop``, whose stages it fills.

    Thread t copies 16-byte chunk t%8 of rows t//8, t//8 + row_step, …; a chunk lands at its place in the
    128-byte swizzle (chunk xor row mod 8).
    """

    @property
    def row_step(self) -> int:
        """Rows between two of a thread's."""
        return self.gather_threads // 8

    def place(self, thread: Int32, sA_address: Int32) -> tuple[Int32, Int32, Int32]:
        """A thread's chunk, its first row, and where that goes in stage 0."""
        chunk, first = thread % 8, thread // 8
        return chunk, first, sA_address + first * 128 + ((chunk ^ (first % 8)) << 4)

    def load_routes(self, coming: cute.Tensor, routes: cute.Pointer):
        """The thread's routes of a K step into ``coming``, int32 [TILE_K / row_step] in registers."""
        for i in range(self.TILE_K // self.row_step):
            coming[i] = cute.arch.load(routes + i * self.row_step, Int32)

    @cute.jit
    def gather_tile(
        self,
        bars: Bars,
        sA_address: Int32,
        x_address: Int64,
        row_bytes: Int64,
        rows: cute.Tensor,
        thread: Int32,
        k_tiles: Int32,
        stage: Int32,
        phase: Int32,
    ) -> tuple[Int32, Int32]:
        """Gather all K steps of A by cp.async; ``rows`` int32 [128 / row_step]: source rows, -1 for zeros."""
        row_step = self.row_step
        chunk, _, target = self.place(thread, sA_address)
        source = x_address + Int64(chunk * 16)
        pitch = Int32(row_bytes)
        for _ in cutlass.range(k_tiles, unroll=1):
            cute.arch.mbarrier_wait(bars.empty + stage, phase ^ 1)
            stage_target = target + stage * self.a_bytes
            for i in cutlass.range_constexpr(self.TILE_M // row_step):
                row = rows[i]
                ptx.cp_async_16(
                    stage_target + i * row_step * 128,
                    ptx.mad_wide(cutlass.max(row, Int32(0)), pitch, source),
                    Int32(row >= 0) * 16,
                )
            cute.arch.cp_async_mbarrier_arrive_noinc(bars.full + stage)
            source += Int64(self.TILE_K * 2)
            stage, phase = advance(stage, phase, self.stages)
        return stage, phase

    @cute.jit
    def gather(
        self,
        bars: Bars,
        sA_address: Int32,
        source: RowSource,
        routes: cute.Pointer,
        by_topk: Int64,
        thread: Int32,
        k_tiles: Int32,
        stage: Int32,
        phase: Int32,
    ) -> tuple[Int32, Int32]:
        """Gather all K steps of A: the rows of x of the 128 ``routes`` (token*K + k, -1 for zeros).

        ``by_topk`` divides by K.
        """
        row_step = self.row_step
        rows = cute.make_rmem_tensor((self.TILE_M // row_step,), Int32)
        first = routes + thread // 8
        for i in cutlass.range_constexpr(self.TILE_M // row_step):
            route = cute.arch.load(first + i * row_step, Int32)
            rows[i] = select(route < 0, Int32(-1), divide(route, by_topk))
        return self.gather_tile(
            bars, sA_address, source.address, source.row_bytes, rows, thread, k_tiles, stage, phase
        )

    @cute.jit
    def gather_columns(
        self,
        bars: Bars,
        sA_address: Int32,
        source: RowSource,
        first_column: Int32,
        routes: cute.Pointer,
        by_topk: Int64,
        thread: Int32,
        k_tiles: Int32,
        stage: Int32,
        phase: Int32,
    ) -> tuple[Int32, Int32]:
        """Gather A for a contraction over rows: K runs over ``routes``, 128 columns of x per tile.

        Other arguments as ``gather``. Columns outside the matrix are zeros. A thread copies its chunk of both
        strips of 64 columns. Two warps must keep up with the MMA here, so an address is one multiplication,
        and routes are loaded a step ahead.
        """
        row_step = self.row_step
        per_thread = self.TILE_K // row_step
        chunk, first, target = self.place(thread, sA_address)
        pitch, columns = Int32(source.row_bytes), Int32(source.row_bytes // 2)
        first_byte = source.address + Int64(first_column + chunk * 8) * 2
        inside = [Int32(first_column + s * 64 < columns) * 16 for s in range(self.TILE_M // 64)]
        mine = routes + first
        ids = cute.make_rmem_tensor((per_thread,), Int32)
        coming = cute.make_rmem_tensor((per_thread,), Int32)
        if k_tiles > 0:
            self.load_routes(coming, mine)
        for k in cutlass.range(k_tiles, unroll=1):
            for i in cutlass.range_constexpr(per_thread):
                ids[i] = coming[i]
            # The last step loads its own routes again, rather than any that do not exist.
            ahead = mine + cutlass.min(k + 1, k_tiles - 1) * self.TILE_K
            self.load_routes(coming, ahead)
            cute.arch.mbarrier_wait(bars.empty + stage, phase ^ 1)
            stage_target = target + stage * self.a_bytes
            for i in cutlass.range_constexpr(per_thread):
                valid = ids[i] >= 0
                token = divide(cutlass.max(ids[i], Int32(0)), by_topk)
                row = ptx.mad_wide(token, pitch, first_byte)
                for s in cutlass.range_constexpr(self.TILE_M // 64):
                    # Where nothing is copied, the address is not used.
                    ptx.cp_async_16(
                        stage_target + s * 8192 + i * row_step * 128,
                        row + Int64(s * 128),
                        Int32(valid) * inside[s],
                    )
            cute.arch.cp_async_mbarrier_arrive_noinc(bars.full + stage)
            stage, phase = advance(stage, phase, self.stages)
        return stage, phase

    @cute.jit
    def pass_tile(
        self, bars: Bars, k_tiles: Int32, stage: Int32, phase: Int32
    ) -> tuple[Int32, Int32]:
        """The gather threads' part of a task whose A comes by TMA: arrive, so that counts match."""
        for _ in cutlass.range(k_tiles, unroll=1):
            cute.arch.mbarrier_wait(bars.empty + stage, phase ^ 1)
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:  # for the warp: arrivals at one address take turns
                cute.arch.mbarrier_arrive(bars.full + stage, arrive_count=32)
            stage, phase = advance(stage, phase, self.stages)
        return stage, phase
