"""The gather warps of the Hopper mainloop: rows of x and dy by cp.async, as A or as columns of A.

Two warps feed eight that multiply. So positions that all lanes share are said to be uniform; the gather warps fence
what they wrote, once, instead of eight MMA warps at each step of every task; and where all rows of a step exist, no
copy has a predicate. This took forward from 1.00 to 1.04; fewer instructions than now bring no more (docs/decisions.md).
"""

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

    ``written``: the MMA warps have put results into a stage; ``ready``: the pair's other CTA is ready for this
    stage's B.
    """

    full: cute.Pointer
    empty: cute.Pointer
    written: cute.Pointer
    ready: cute.Pointer


FEW_TOKENS = 1 << 22  # of a rank: with K <= 32, routes are below 2^27


def high_divider(multiplier: Int64) -> Int32:
    """From M = ceil(2^36/d) of ``sync.divider`` to m with v // d = v*m >> 32 for v < 2^27. 0: there is none.

    m = ceil(2^32/d) < 2^32 for d > 1: m*d = 2^32 + e with e < d <= 32, so v*e < 2^32.
    """
    return Int32((multiplier + 15) >> 4)


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

    def uniform(self, *values: Int32) -> tuple[Int32, ...]:
        """The same values, equal in all lanes."""
        return tuple(cute.arch.make_warp_uniform(value) for value in values)

    @cute.jit
    def landed(self, bars: Bars, stage: Int32, pending: cutlass.Constexpr[int]):
        """Hand over a stage that this warp has filled, all but its last ``pending`` groups of copies."""
        cute.arch.cp_async_wait_group(pending)
        # cp.async wrote through the generic proxy; wgmma reads through the async one.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(bars.full + stage)

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
        """Gather all K steps of A by cp.async; ``rows`` int32 [128 / row_step]: source rows, -1 for zeros.

        A stage is handed over when the next one's copies are on their way.
        """
        stage, phase, k_tiles = self.uniform(stage, phase, k_tiles)
        row_step = self.row_step
        count = self.TILE_M // row_step
        chunk, _, target = self.place(thread, sA_address)
        source = x_address + Int64(chunk * 16)
        pitch = Int32(row_bytes)
        sources = cute.make_rmem_tensor((count,), Int64)
        exist = Int32(0)  # a bit per row
        for i in cutlass.range_constexpr(count):
            sources[i] = ptx.mad_wide(cutlass.max(rows[i], Int32(0)), pitch, source)
            exist |= Int32(rows[i] >= 0) << i
        whole = cute.arch.vote_all_sync(exist == (1 << count) - 1)
        before = stage
        for k in cutlass.range(k_tiles, unroll=1):
            cute.arch.mbarrier_wait(bars.empty + stage, phase ^ 1)
            stage_target = target + stage * self.a_bytes
            if whole:
                for i in cutlass.range_constexpr(count):
                    ptx.copy_async_16(stage_target + i * row_step * 128, sources[i])
            else:
                for i in cutlass.range_constexpr(count):
                    ptx.cp_async_16(
                        stage_target + i * row_step * 128, sources[i], ((exist >> i) & 1) * 16
                    )
            cute.arch.cp_async_commit_group()
            for i in cutlass.range_constexpr(count):
                sources[i] = sources[i] + Int64(self.TILE_K * 2)
            if k > 0:
                self.landed(bars, before, 1)
            before = stage
            stage, phase = advance(stage, phase, self.stages)
        if k_tiles > 0:
            self.landed(bars, before, 0)
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
        and routes are loaded a step ahead. Handed over as in ``gather_tile``.
        """
        stage, phase, k_tiles = self.uniform(stage, phase, k_tiles)
        row_step = self.row_step
        per_thread = self.TILE_K // row_step
        chunk, first, target = self.place(thread, sA_address)
        pitch, columns = Int32(source.row_bytes), Int32(source.row_bytes // 2)
        first_byte = source.address + Int64(first_column + chunk * 8) * 2
        both = first_column + 64 < columns
        multiplier = high_divider(by_topk)
        simple = both & (multiplier != 0) & (source.rows <= FEW_TOKENS)
        mine = routes + first
        rows = cute.make_rmem_tensor((per_thread,), Int64)
        coming = cute.make_rmem_tensor((per_thread,), Int32)
        if k_tiles > 0:
            self.load_routes(coming, mine)
        before = stage
        for k in cutlass.range(k_tiles, unroll=1):
            exist = Int32(0)  # a bit per row
            least = coming[0]
            for i in cutlass.range_constexpr(per_thread):
                least = cutlass.min(least, coming[i])
            whole = cute.arch.vote_all_sync((least >= 0) & simple)
            if whole:
                for i in cutlass.range_constexpr(per_thread):
                    token = ptx.mul_hi(coming[i], multiplier)
                    rows[i] = ptx.mad_wide(token, pitch, first_byte)
            else:
                for i in cutlass.range_constexpr(per_thread):
                    exist |= Int32(coming[i] >= 0) << i
                    token = divide(cutlass.max(coming[i], Int32(0)), by_topk)
                    rows[i] = ptx.mad_wide(token, pitch, first_byte)
            # The last step loads its own routes again, rather than any that do not exist.
            ahead = mine + cutlass.min(k + 1, k_tiles - 1) * self.TILE_K
            self.load_routes(coming, ahead)
            cute.arch.mbarrier_wait(bars.empty + stage, phase ^ 1)
            stage_target = target + stage * self.a_bytes
            if whole:
                for i in cutlass.range_constexpr(per_thread):
                    at = stage_target + i * row_step * 128
                    ptx.copy_async_16(at, rows[i])
                    ptx.copy_async_16(at + 8192, rows[i] + Int64(128))
            else:
                for i in cutlass.range_constexpr(per_thread):
                    size = ((exist >> i) & 1) * 16
                    at = stage_target + i * row_step * 128
                    ptx.cp_async_16(at, rows[i], size)
                    # Where nothing is copied, the address is not used.
                    ptx.cp_async_16(at + 8192, rows[i] + Int64(128), size * Int32(both))
            cute.arch.cp_async_commit_group()
            if k > 0:
                self.landed(bars, before, 1)
            before = stage
            stage, phase = advance(stage, phase, self.stages)
        if k_tiles > 0:
            self.landed(bars, before, 0)
        return stage, phase

    def pass_tile(
        self, bars: Bars, k_tiles: Int32, stage: Int32, phase: Int32
    ) -> tuple[Int32, Int32]:
        """The gather warps' part of a task whose A comes by TMA: none, the load warp arrives for them.

        They do not run a ring ahead: a task is published once all loads of the one before it are issued.
        """
        at = stage + k_tiles
        return at % self.stages, phase ^ ((at // self.stages) & 1)
