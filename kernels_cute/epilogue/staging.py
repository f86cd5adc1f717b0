"""Finished tiles on their way out: registers → staging buffers in shared memory → TMA stores.

The MMA warps round 64 columns at a time to BF16 into a staging buffer; the store warp writes it with TMA
and frees it. A tile's counter is signalled only once its stores are in memory.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32
from cutlass.cute.nvgpu import cpasync, warpgroup

from .. import ptx, sync
from ..gemm.sm90 import Operand, Stages, Tma
from ..invariant import Invariant
from ..sync import advance


class Staging(Invariant):
    """``stages`` buffers of (tile_m, 64) BF16 in the 128-byte swizzle.

    Args:
        tile_m: rows of a tile.
        producer_warps: warps that fill a buffer together (16 rows each).
        stages: buffers.
    """

    CHUNK_N = 64

    def __init__(self, tile_m: int, producer_warps: int, stages: int = 2):
        self.tile_m = tile_m
        self.producer_warps = producer_warps
        self.stages = stages

    def setup(self) -> None:
        """Build the layout (host and device code each need their own)."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        self.layout = cute.tile_to_shape(
            atom, (self.tile_m, self.CHUNK_N, self.stages), order=(0, 1, 2)
        )

    def init_barriers(self, bars: Stages) -> None:
        """full: one arrival per producer warp; empty: the store warp's."""
        for i in range(self.stages):
            cute.arch.mbarrier_init(bars.full + i, self.producer_warps)
            cute.arch.mbarrier_init(bars.empty + i, 1)

    def tma_store(self, tensor: cute.Tensor) -> Tma:
        """Stores of (tile_m, 64) chunks to (rows, columns, batch); what lies outside is not written."""
        layout = cute.slice_(self.layout, (None, None, 0))
        return Tma(
            *cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileS2GOp(), tensor, layout, (self.tile_m, self.CHUNK_N)
            )
        )

    def partition(self, tma: Tma, sD: cute.Tensor) -> Operand:
        """Partition a store target into chunks: global (TMA, row tile, column, batch), shared (TMA, stage)."""
        gD = cute.local_tile(tma.tensor, (self.tile_m, self.CHUNK_N), (None, None, None))
        tDsD, tDgD = cpasync.tma_partition(
            tma.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(sD, 0, 2),
            cute.group_modes(gD, 0, 2),
        )
        return Operand(tma.atom, tDgD, tDsD)

    def put(self, values, bars: Stages, sD_row: Int32, row: Int32, chunk: Int32, phase: Int32):
        """Round 64 columns of this warp's 16 rows to BF16 into buffer ``chunk`` and hand it over.

        ``values``: 32 FP32 of the thread in wgmma's accumulator order (per 8 columns: two of row lane/4,
        two of row lane/4+8). Other arguments and result as ``put_packed``.
        """
        packed = [ptx.pack_bf16(values[2 * i], values[2 * i + 1]) for i in range(16)]
        return self.put_packed(packed, bars, sD_row, row, chunk, phase)

    @cute.jit
    def put_packed(
        self, packed, bars: Stages, sD_row: Int32, row: Int32, chunk: Int32, phase: Int32
    ):
        """Write 64 columns of this warp's 16 rows into buffer ``chunk`` and hand it over.

        ``packed``: 16 BF16x2 of the thread in accumulator order. ``row``: the tile row whose address this
        lane gives stmatrix (lane%16 of the warp's rows); ``sD_row``: its address in buffer 0. Returns the
        next (chunk, phase).
        """
        cute.arch.mbarrier_wait(bars.empty + chunk, phase ^ 1)
        base = sD_row + chunk * (self.tile_m * self.CHUNK_N * 2)
        lane = cute.arch.lane_idx()
        for j in cutlass.range_constexpr(4):
            column = 2 * j + lane // 16
            ptx.stmatrix_x4(base + ((column ^ (row % 8)) << 4), *packed[4 * j : 4 * j + 4])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(bars.full + chunk)
        return advance(chunk, phase, self.stages)

    @cute.jit
    def store(
        self, bars: Stages, target: Operand, row_tile: Int32, column: Int32, batch: Int32,
        chunk: Int32, phase: Int32,
    ):  # fmt: skip
        """Store one chunk (whole store warp) and free its buffer once it has been read."""
        cute.arch.mbarrier_wait(bars.full + chunk, phase)
        cute.copy(target.atom, target.tXsX[None, chunk], target.tXgX[None, row_tile, column, batch])
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(bars.empty + chunk)
        return advance(chunk, phase, self.stages)

    @cute.jit
    def store_tile(
        self, bars: Stages, targets, row_tile: Int32, n: Int32, count: cutlass.Constexpr[int],
        batch: Int32, chunk: Int32, phase: Int32,
    ):  # fmt: skip
        """Store column tile ``n`` of each target in turn, 64 columns at a time, as the MMA warps put them."""
        for c in cutlass.range_constexpr(count):
            for target in targets:
                chunk, phase = self.store(
                    bars, target, row_tile, n * count + c, batch, chunk, phase
                )
        return chunk, phase

    @cute.jit
    def signal(self, counter: cute.Pointer):
        """Count a tile as done once all stores of the store warp are in memory."""
        self.drain()
        if cute.arch.lane_idx() == 0:
            sync.arrive(counter)

    @cute.jit
    def drain(self):
        """Wait until all stores of the store warp are in memory."""
        cute.arch.cp_async_bulk_wait_group(0)
        cute.arch.fence_proxy("async.global")
        cute.arch.sync_warp()
