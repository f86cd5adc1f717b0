"""The Hopper mainloop: TMA or gathered loads into a ring of shared-memory stages, wgmma out of it.

``A`` is (128, 64) per stage, ``B`` (tile_n, 64), both BF16, K-major, 128-byte swizzle. B arrives as two
halves of tile_n/2 rows, so that gate and up can be one GEMM: its accumulator holds gate in the left and
up in the right half of the columns.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90_helpers
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from ..invariant import Invariant
from ..sync import advance, select
from .gather_sm90 import Bars, Gather
from .operands import Operand, RowSource, Tma, aligned, make_tma, partition, view


class Worker(Invariant):
    """What an MMA warp holds: wgmma descriptors, the accumulator, its lane's row of a staging buffer."""

    def __init__(self, operands: dict, acc: cute.Tensor, row: Int32):
        self.operands = operands  # (A, B) by majors
        self.acc = acc
        self.row = row


class Mainloop(Gather):
    """Shapes, shared-memory layouts and loops of one tile configuration.

    Args:
        tile_n: accumulator columns, a multiple of 64 up to 256.
        stages: shared-memory stages; (128 + tile_n) * 128 bytes each.
        gather_threads: threads that gather rows of A (0: A always comes by TMA).
        pair: two CTAs keep step, and may load B for each other (``..pairs``).
    """

    TILE_M = 128
    CTA_ROWS = 128  # of the tile's rows
    TILE_K = 64
    PIECE = 64  # accumulator columns that ``columns`` returns at a time
    WARPGROUPS = 2  # cooperative: rows 0-63 and 64-127 of one tile

    def __init__(self, tile_n: int, stages: int, gather_threads: int, pair: bool = False):
        self.tile_n = tile_n
        self.half_n = tile_n // 2
        self.stages = stages
        self.gather_threads = gather_threads
        self.a_bytes = self.TILE_M * self.TILE_K * 2
        self.b_bytes = tile_n * self.TILE_K * 2
        self.pair = pair
        self.full_arrivals = 1 + gather_threads // 32  # a gather warp arrives once
        self.empty_arrivals = self.WARPGROUPS * 4

    def setup(self) -> None:
        """Build layouts and the tiled MMA (inside a jit function, where the DSL's context exists)."""
        k_atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        mn_atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, BFloat16)

        def staged(atom, rows: int, count: int, order: tuple[int, int, int]):
            return cute.tile_to_shape(atom, (rows, self.TILE_K, count), order=order)

        # K-major: rows of 128 bytes. MN-major: strips of 64 rows or columns, 64 K steps of 128 bytes each.
        by_row, by_strip = (0, 1, 2), (1, 0, 2)
        self.a_layout = staged(k_atom, self.TILE_M, self.stages, by_row)
        self.b_layout = staged(k_atom, self.tile_n, self.stages, by_row)
        self.b_half_layout = staged(k_atom, self.half_n, 2 * self.stages, by_row)
        self.a_layout_mn = staged(mn_atom, self.TILE_M, self.stages, by_strip)
        self.b_layout_mn = staged(mn_atom, self.tile_n, self.stages, by_strip)
        self.b_half_layout_mn = staged(mn_atom, self.half_n, 2 * self.stages, by_strip)

    def tiled_mma(self, majors: str = "kk") -> cute.TiledMma:
        """The MMA for A and B ``majors``: "k" where the contraction is contiguous, "m" where it is not.

        A new value each time: setting a field changes the object, which must not outlive its branch.
        """
        major = {"k": OperandMajorMode.K, "m": OperandMajorMode.MN}
        return sm90_helpers.make_trivial_tiled_mma(
            BFloat16,
            BFloat16,
            major[majors[0]],
            major[majors[1]],
            Float32,
            (self.WARPGROUPS, 1, 1),
            tiler_mn=(64, self.tile_n),
        )

    def fragments(self, majors: str, sA: cute.Tensor, sB: cute.Tensor, group: Int32):
        """wgmma descriptors of A and B for warpgroup ``group`` (0 or 1): (MMA, 1, k block, stage)."""
        mma = self.tiled_mma(majors)
        thr_mma = mma.get_slice(cute.make_layout(self.WARPGROUPS, stride=128)(group))
        return (
            mma.make_fragment_A(thr_mma.partition_A(sA)),
            mma.make_fragment_B(thr_mma.partition_B(sB)),
        )

    def accumulator(self) -> cute.Tensor:
        """FP32 ((2, 2, tile_n/8), 1, 1): column pair, row half (8 rows apart), group of 8 columns."""
        shape = self.tiled_mma().partition_shape_C((self.TILE_M, self.tile_n))
        return cute.make_rmem_tensor(shape, Float32)

    # ---- shared memory ----

    def storage(self) -> dict[str, object]:
        """Fields of the shared storage."""
        array = cute.struct.MemRange
        return {name: array[Int64, self.stages] for name in Bars._fields}

    def buffers(self) -> dict[str, object]:
        """Aligned fields: sA bf16 (128, 64, stages), sB bf16 (tile_n, 64, stages)."""
        return {
            "sA": aligned(cute.cosize(self.a_layout)),
            "sB": aligned(cute.cosize(self.b_layout)),
        }

    def bars(self, storage) -> Bars:
        """The mbarriers in the shared storage."""
        return Bars(*[getattr(storage, name).data_ptr() for name in Bars._fields])

    def init_barriers(self, bars: Bars) -> None:
        """Arrival counts of the stages' mbarriers (one thread)."""
        for i in range(self.stages):
            cute.arch.mbarrier_init(bars.full + i, self.full_arrivals)
            cute.arch.mbarrier_init(bars.empty + i, self.empty_arrivals)
            cute.arch.mbarrier_init(bars.written + i, self.empty_arrivals)
            cute.arch.mbarrier_init(bars.ready + i, 1)

    # ---- host: descriptors ----

    def tma_a(self, tensor: cute.Tensor) -> Tma:
        """Loads of (128, 64) from (rows, k, batch), k contiguous."""
        return self._tma_load(tensor, self.a_layout, self.TILE_M)

    def tma_b_half(self, tensor: cute.Tensor) -> Tma:
        """Loads of (tile_n/2, 64) from (n, k, expert), k contiguous."""
        return self._tma_load(tensor, self.b_half_layout, self.half_n, self.pair)

    def tma_a_mn(self, tensor: cute.Tensor) -> Tma:
        """Loads of (128, 64) from (rows, k, batch), rows contiguous."""
        return self._tma_load(tensor, self.a_layout_mn, self.TILE_M)

    def tma_b_half_mn(self, tensor: cute.Tensor) -> Tma:
        """Loads of (tile_n/2, 64) from (n, k, expert), n contiguous."""
        return self._tma_load(tensor, self.b_half_layout_mn, self.half_n, self.pair)

    def _tma_load(
        self, tensor: cute.Tensor, staged: cute.ComposedLayout, rows: int, multicast: bool = False
    ) -> Tma:
        op = cpasync.CopyBulkTensorTileG2SOp()
        if multicast:
            op = cpasync.CopyBulkTensorTileG2SMulticastOp()
        return make_tma(op, tensor, staged, (rows, self.TILE_K))

    def row_source(self, address: Int64, rows: Int32, columns: Int32) -> RowSource:
        """A matrix from which ``gather`` takes rows of A."""
        return RowSource(address, Int64(columns) * 2, rows, None)

    # ---- device ----

    def partition(self, tma: Tma, sX: cute.Tensor, rows: int) -> Operand:
        """Partition a TMA source of (rows, 64) tiles for the stages of ``sX``."""
        return partition(tma, sX, (rows, self.TILE_K))

    @cute.jit
    def load_tile(
        self,
        bars: Bars,
        a: Operand,
        a_by_tma: cutlass.Constexpr[bool],
        a_tile: Int32,
        left: Operand,
        left_tile: Int32,
        right: Operand,
        right_tile: Int32,
        batch: Int32,
        k_tiles: Int32,
        stage: Int32,
        phase: Int32,
        shares: Int32,
        k_first: Int32 | int = 0,
    ) -> tuple[Int32, Int32]:
        """Load all K steps of a task (one warp): A tile ``a_tile``, B halves ``left_tile``, ``right_tile``.

        Without ``a_by_tma`` the gather warps fill A. ``shares``: 1 where the other CTA of the pair loads
        the same B now. ``k_first`` is the first K step in the tensors. Returns the next (stage, phase).
        """
        tx_bytes = self.a_bytes * a_by_tma + self.b_bytes
        a_tile, left_tile, right_tile = self.uniform(a_tile, left_tile, right_tile)
        batch, shares, k_first = self.uniform(batch, shares, Int32(k_first))
        tAgA = a.tXgX[None, a_tile, None, 0]
        tBgB_left = left.tXgX[None, left_tile, None, batch]
        tBgB_right = right.tXgX[None, right_tile, None, batch]
        stage, phase, k_tiles = self.uniform(stage, phase, k_tiles)
        for step in cutlass.range(k_tiles, unroll=1):
            k = step + k_first
            cute.arch.mbarrier_wait(bars.empty + stage, phase ^ 1)
            full = bars.full + stage
            self.expect(full, tx_bytes, a_by_tma)
            self.tell(bars, stage)
            if cutlass.const_expr(a_by_tma):
                cute.copy(a.atom, tAgA[None, k], a.tXsX[None, stage], tma_bar_ptr=full)
            left_to, right_to = left.tXsX[None, 2 * stage], right.tXsX[None, 2 * stage + 1]
            if cutlass.const_expr(self.pair):
                # Each loads one half for both, or both halves for itself.
                self.hear(bars, stage, phase)
                rank = cute.arch.block_idx_in_cluster()
                mask = cutlass.Int16(select(shares != 0, Int32(3), Int32(1) << rank))
                if shares == 0 or rank == 0:
                    cute.copy(
                        left.atom, tBgB_left[None, k], left_to, tma_bar_ptr=full, mcast_mask=mask
                    )
                if shares == 0 or rank == 1:
                    cute.copy(
                        right.atom, tBgB_right[None, k], right_to, tma_bar_ptr=full, mcast_mask=mask
                    )
            else:
                cute.copy(left.atom, tBgB_left[None, k], left_to, tma_bar_ptr=full)
                cute.copy(right.atom, tBgB_right[None, k], right_to, tma_bar_ptr=full)
            stage, phase = advance(stage, phase, self.stages)
        return stage, phase

    @cute.jit
    def expect(self, full: cute.Pointer, tx_bytes: int, a_by_tma: cutlass.Constexpr[bool]):
        """The load warp's arrival at a stage; with A by TMA also for the gather warps, which pass such tasks."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, tx_bytes)
            if cutlass.const_expr(a_by_tma and self.full_arrivals > 1):
                cute.arch.mbarrier_arrive(full, arrive_count=self.full_arrivals - 1)

    @cute.jit
    def tell(self, bars: Bars, stage: Int32):
        """In a pair: this CTA's stage is empty, and counts on its next bytes.

        Both have CTA scope, as in ``PipelineTmaAsync``: with cluster scope each step would have a fence of the
        whole GPU and empty L1. No thread's data is handed over, only room for TMA.
        """
        if cutlass.const_expr(self.pair):
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                other = cute.arch.block_idx_in_cluster() ^ 1
                cute.arch.mbarrier_arrive(bars.ready + stage, other)

    def hear(self, bars: Bars, stage: Int32, phase: Int32) -> None:
        """In a pair: return once the other CTA has told the same of its stage.

        Both load warps do so for every stage, shared or not: neither is ever a ring ahead, which ``ready``
        could not tell from no step ahead.
        """
        if self.pair:
            cute.arch.mbarrier_wait(bars.ready + stage, phase)

    @cute.jit
    def load_nothing(self, bars: Bars, steps: Int32, stage: Int32, phase: Int32):
        """The load warp's part of ``steps`` stages that pass unused."""
        stage, phase, steps = self.uniform(stage, phase, steps)
        for _ in cutlass.range(steps, unroll=1):
            cute.arch.mbarrier_wait(bars.empty + stage, phase ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(bars.full + stage, arrive_count=self.full_arrivals)
            self.tell(bars, stage)
            self.hear(bars, stage, phase)
            stage, phase = advance(stage, phase, self.stages)
        return stage, phase

    @cute.jit
    def skip_tile(self, bars: Bars, steps: Int32, stage: Int32, phase: Int32):
        """The MMA warps' part of ``steps`` stages that pass unused."""
        stage, phase, steps = self.uniform(stage, phase, steps)
        for _ in cutlass.range(steps, unroll=1):
            cute.arch.mbarrier_wait(bars.full + stage, phase)
            self.release(bars, stage)
            stage, phase = advance(stage, phase, self.stages)
        return stage, phase

    def finish_loads(self, bars: Bars, stage: Int32, phase: Int32) -> None:
        """After the last task. Nothing arrives from elsewhere, so a CTA may leave as it is."""

    @cute.jit
    def load_chunks(
        self,
        bars: Bars,
        left: Operand,
        right: Operand,
        row_tile: Int32,
        first: Int32,
        count: cutlass.Constexpr[int],
        stage: Int32,
        phase: Int32,
    ) -> tuple[Int32, Int32]:
        """Send (128, 64) chunks of two matrices through the stages: ``left`` in A's place, ``right`` in B's."""
        stage, phase, first = self.uniform(stage, phase, first)
        for c in cutlass.range(count, unroll=1):
            cute.arch.mbarrier_wait(bars.empty + stage, phase ^ 1)
            full = bars.full + stage
            self.expect(full, 2 * self.a_bytes, True)
            self.tell(bars, stage)
            self.hear(bars, stage, phase)
            column = first + c
            cute.copy(
                left.atom,
                left.tXgX[None, row_tile, column, 0],
                left.tXsX[None, stage],
                tma_bar_ptr=full,
            )
            cute.copy(
                right.atom,
                right.tXgX[None, row_tile, column, 0],
                right.tXsX[None, 2 * stage],
                tma_bar_ptr=full,
            )
            stage, phase = advance(stage, phase, self.stages)
        return stage, phase

    # ---- accumulators for the epilogue ----

    def worker(self, warp: Int32, storage) -> Worker:
        """What MMA warp ``warp`` (4 … 11) needs. Lane l gives stmatrix the address of row l%16."""
        group = cute.arch.make_warp_uniform(warp // 4) - 1
        row = warp % 4 * 16 + group * 64 + cute.arch.lane_idx() % 16
        sA, sB = view(storage.sA, self.a_layout), view(storage.sB, self.b_layout)
        sA_mn = view(storage.sA, self.a_layout_mn)
        sB_mn = view(storage.sB, self.b_layout_mn)
        operands = {
            "kk": self.fragments("kk", sA, sB, group),
            "km": self.fragments("km", sA, sB_mn, group),
            "mm": self.fragments("mm", sA_mn, sB_mn, group),
        }
        return Worker(operands, self.accumulator(), row)

    def take(
        self, worker: Worker, bars: Bars, k_tiles: Int32, stage: Int32, phase: Int32,
        majors: str = "kk", halves: Int32 | int = 2,
    ) -> tuple[Int32, Int32]:  # fmt: skip
        """Have the accumulator of the next task: multiply. Returns the next (stage, phase).

        ``halves``: of the tile's rows, how many there are. Of one, the second warpgroup has zeros and multiplies
        nothing.
        """
        return self.mma_half(
            majors, bars, *worker.operands[majors], worker.acc, k_tiles, stage, phase, Int32(halves)
        )

    @cute.jit
    def mma_half(
        self,
        majors: cutlass.Constexpr[str],
        bars: Bars,
        tCrA: cute.Tensor,
        tCrB: cute.Tensor,
        acc: cute.Tensor,
        k_tiles: Int32,
        stage: Int32,
        phase: Int32,
        halves: Int32,
    ) -> tuple[Int32, Int32]:
        """The product for a warpgroup whose rows exist, zeros for the other one."""
        (halves,) = self.uniform(halves)
        mine = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4 <= halves
        acc.fill(0.0)  # added to, so that there is one way to have the accumulator
        steps = select(mine, k_tiles, Int32(0))
        stage, phase = self.mma_add_tile(majors, bars, tCrA, tCrB, acc, steps, stage, phase)
        return self.skip_tile(bars, k_tiles - steps, stage, phase)

    def columns(self, worker: Worker, stage: Int32, *first: int) -> list[list[Float32]]:
        """64 accumulator columns from each of ``first`` on, in the thread's order (``Staging.write``)."""
        return [[worker.acc[4 * (at // 8) + i] for i in range(32)] for at in first]

    def give_back(
        self, worker: Worker, bars: Bars, stage: Int32, phase: Int32
    ) -> tuple[Int32, Int32]:
        """The epilogue has read the accumulator: nothing to say, it lies in its own registers."""
        return stage, phase

    @cute.jit
    def mma_add_tile(
        self,
        majors: cutlass.Constexpr[str],
        bars: Bars,
        tCrA: cute.Tensor,
        tCrB: cute.Tensor,
        acc: cute.Tensor,
        k_tiles: Int32,
        stage: Int32,
        phase: Int32,
    ) -> tuple[Int32, Int32]:
        """acc += A·Bᵀ over ``k_tiles`` ≥ 0 steps, one wgmma group in flight. Returns the next (stage, phase)."""
        stage, phase, k_tiles = self.uniform(stage, phase, k_tiles)
        if k_tiles > 0:
            release = stage
            self.mma_step(majors, bars, tCrA, tCrB, acc, stage, phase)
            stage, phase = advance(stage, phase, self.stages)
            for _ in cutlass.range(1, k_tiles, unroll=1):
                self.mma_step(majors, bars, tCrA, tCrB, acc, stage, phase)
                warpgroup.wait_group(1)
                self.release(bars, release)
                release = stage
                stage, phase = advance(stage, phase, self.stages)
            warpgroup.wait_group(0)
            self.release(bars, release)
        return stage, phase

    @cute.jit
    def mma_step(
        self,
        majors: cutlass.Constexpr[str],
        bars,
        tCrA,
        tCrB,
        acc,
        stage,
        phase,
    ):
        """Start the wgmma group of one stage."""
        cute.arch.mbarrier_wait(bars.full + stage, phase)
        warpgroup.fence()
        tiled_mma = self.tiled_mma(majors)
        for k_block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
            tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
            at = (None, None, k_block, stage)
            cute.gemm(tiled_mma, acc, tCrA[at], tCrB[at], acc)
        warpgroup.commit_group()

    @cute.jit
    def release(self, bars: Bars, stage: Int32):
        """This warp is done reading a stage."""
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(bars.empty + stage)
