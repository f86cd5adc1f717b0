"""Staging where the two MMA warpgroups need not keep step: each fills, and has stored, buffers of its own."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..gemm.operands import Operand, Stages, Tma, make_tma, partition, streamed, sw128_atom
from ..queue import broadcast
from ..sync import advance
from .staging import Staging

HALF = 64  # rows of a warpgroup


class HalfStaging(Staging):
    """``Staging`` in halves of 64 rows: the same bytes, but a full and an empty mbarrier for each half.

    The store warp takes whichever warpgroup's half is ready, so that one warpgroup's epilogue may run
    while the other still multiplies.
    """

    BARRIERS = 2

    def setup(self) -> None:
        """Build the layouts: of half buffers, and of whole ones for what leaves through the stages."""
        super().setup()
        self.tall_layout = self.layout
        shape = (HALF, self.CHUNK_N, 2 * self.stages)
        self.layout = cute.tile_to_shape(sw128_atom(), shape, order=(0, 1, 2))
        self.wide_layout = self.layout

    def init_barriers(self, bars: Stages) -> None:
        """full: one arrival per warp of a warpgroup; empty: the store warp's."""
        for i in range(2 * self.stages):
            cute.arch.mbarrier_init(bars.full + i, self.producer_warps // 2)
            cute.arch.mbarrier_init(bars.empty + i, 1)

    def _tma(self, tensor: cute.Tensor, layout: cute.ComposedLayout, rows: int) -> Tma:
        op = cute.nvgpu.cpasync.CopyBulkTensorTileS2GOp()
        return make_tma(op, tensor, layout, (rows, self.CHUNK_N))

    def tma_store(self, tensor: cute.Tensor) -> Tma:
        """Stores of (64, 64) half chunks to (rows, columns, batch)."""
        return self._tma(tensor, self.layout, HALF)

    def tma_store_wide(self, tensor: cute.Tensor) -> Tma:
        """The same: a transposed half chunk is as large."""
        return self._tma(tensor, self.layout, HALF)

    def tma_store_tall(self, tensor: cute.Tensor) -> Tma:
        """Stores of (tile_m, 64) out of the stages."""
        return self._tma(tensor, self.tall_layout, self.tile_m)

    def partition(self, tma: Tma, sD: cute.Tensor) -> Operand:
        """Partition a store target into half chunks."""
        return partition(tma, sD, (HALF, self.CHUNK_N))

    def partition_wide(self, tma: Tma, sD: cute.Tensor) -> Operand:
        """The same for transposed half chunks."""
        return partition(tma, sD, (HALF, self.CHUNK_N))

    # ---- MMA warps ----

    def barrier_of(self, chunk: Int32) -> Int32:
        """The barrier of this warpgroup's half of a buffer."""
        return 2 * chunk + cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4 - 1

    # ---- the store warp ----

    @cute.jit
    def store_tile(
        self, bars: Stages, targets, row_tile: Int32, n: Int32, count: cutlass.Constexpr[int],
        batch: Int32, chunk: Int32, phase: Int32,
    ):  # fmt: skip
        """``Staging.store_tile``; halves are stored as they become ready."""
        return self._store(bars, targets, False, row_tile, n, count, batch, chunk, phase)

    @cute.jit
    def store_wide_tile(
        self, bars: Stages, target: Operand, m: Int32, n: Int32, count: cutlass.Constexpr[int],
        batch: Int32, chunk: Int32, phase: Int32,
    ):  # fmt: skip
        """``Staging.store_wide_tile``; halves are stored as they become ready."""
        return self._store(bars, (target,), True, m, n, count, batch, chunk, phase)

    @cute.jit
    def _store(
        self, bars: Stages, targets, wide: cutlass.Constexpr[bool], m: Int32, n: Int32,
        count: cutlass.Constexpr[int], batch: Int32, chunk: Int32, phase: Int32,
    ):  # fmt: skip
        each = count * len(targets)  # half chunks of a warpgroup
        done0, chunk0, phase0 = Int32(0), chunk, phase
        done1, chunk1, phase1 = Int32(0), chunk, phase
        pending = Int32(-1)  # the half buffer that the last store reads
        # The first warpgroup leads: sleep until its epilogue, then look at both in turn.
        cute.arch.mbarrier_wait(bars.full + 2 * chunk, phase)
        while done0 + done1 < 2 * each:
            before = done0 + done1
            done0, chunk0, phase0, pending = self._offer(
                bars, targets, wide, 0, m, n, count, batch, done0, chunk0, phase0, pending
            )
            done1, chunk1, phase1, pending = self._offer(
                bars, targets, wide, 1, m, n, count, batch, done1, chunk1, phase1, pending
            )
            if done0 + done1 == before and pending >= 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                self.free(bars, pending)
                pending = Int32(-1)
        if pending >= 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            self.free(bars, pending)
        return chunk0, phase0

    @cute.jit
    def _offer(
        self, bars: Stages, targets, wide: cutlass.Constexpr[bool], half: cutlass.Constexpr[int],
        m: Int32, n: Int32, count: cutlass.Constexpr[int], batch: Int32,
        done: Int32, chunk: Int32, phase: Int32, pending: Int32,
    ):  # fmt: skip
        """Store the next half chunk of warpgroup ``half`` if it is ready."""
        ready = Int32(0)
        at = 2 * chunk + half
        if done < count * len(targets):
            ready = broadcast(Int32(cute.arch.mbarrier_test_wait(bars.full + at, phase)))
        if ready != 0:
            cute.arch.mbarrier_wait(bars.full + at, phase)  # every lane sees it
            column = n * count + done // len(targets)
            which = done % len(targets)
            row = 2 * m + half
            if cutlass.const_expr(wide):
                row, column = column, row
            for i in cutlass.range_constexpr(len(targets)):
                target = targets[i]
                if which == i:
                    with cute.arch.elect_one():
                        cute.copy(
                            target.atom, target.tXsX[None, at],
                            target.tXgX[None, row, column, batch], **streamed(self.hints),
                        )  # fmt: skip
                        cute.arch.cp_async_bulk_commit_group()
            if pending >= 0:
                cute.arch.cp_async_bulk_wait_group(1, read=True)
                self.free(bars, pending)
            pending = at
            done += 1
            chunk, phase = advance(chunk, phase, self.stages)
        return done, chunk, phase, pending
