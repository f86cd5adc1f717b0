"""Finished tiles on their way out: registers → staging buffers in shared memory → TMA stores.

The MMA warps round 64 columns at a time to BF16 into a staging buffer; the store warp writes it with TMA
and frees it. A tile's counter is signalled only once its stores are in memory.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from .. import ptx, sync
from ..gemm.operands import Operand, Stages, Tma, make_tma, partition, sw128_atom
from ..invariant import Invariant
from ..sync import advance, select


class Staging(Invariant):
    """``stages`` buffers of (tile_m, 64) BF16 in the 128-byte swizzle, filled from wgmma accumulators.

    Args:
        tile_m: rows of a tile.
        producer_warps: warps that fill a buffer together (16 rows each).
        stages: buffers.
    """

    CHUNK_N = 64
    PIECES = 1  # calls of ``put`` that fill a buffer
    readers = 1  # warps that free a buffer: the store warp, and others that read some tiles instead

    def __init__(self, tile_m: int, producer_warps: int, stages: int = 2):
        self.tile_m = tile_m
        self.producer_warps = producer_warps
        self.stages = stages

    def setup(self) -> None:
        """Build the layout (host and device code each need their own)."""
        shape = (self.tile_m, self.CHUNK_N, self.stages)
        self.layout = cute.tile_to_shape(sw128_atom(), shape, order=(0, 1, 2))
        # The same bytes for a transposed chunk: two halves of 64 of its tile_m columns.
        wide = (self.CHUNK_N, self.tile_m, self.stages)
        self.wide_layout = cute.tile_to_shape(sw128_atom(), wide, order=(0, 1, 2))

    def init_barriers(self, bars: Stages) -> None:
        """full: one arrival per producer warp; empty: the readers'."""
        for i in range(self.stages):
            cute.arch.mbarrier_init(bars.full + i, self.producer_warps)
            cute.arch.mbarrier_init(bars.empty + i, self.readers)

    def tma_store(self, tensor: cute.Tensor) -> Tma:
        """Stores of (tile_m, 64) chunks to (rows, columns, batch); what lies outside is not written."""
        op = cpasync.CopyBulkTensorTileS2GOp()
        return make_tma(op, tensor, self.layout, (self.tile_m, self.CHUNK_N))

    def tma_store_wide(self, tensor: cute.Tensor) -> Tma:
        """Stores of transposed (64, tile_m) chunks to (rows, columns, batch)."""
        op = cpasync.CopyBulkTensorTileS2GOp()
        return make_tma(op, tensor, self.wide_layout, (self.CHUNK_N, self.tile_m))

    def partition_wide(self, tma: Tma, sD: cute.Tensor) -> Operand:
        """``partition`` for transposed chunks; ``sD`` is the buffers' view in ``wide_layout``."""
        return partition(tma, sD, (self.CHUNK_N, self.tile_m))

    def partition(self, tma: Tma, sD: cute.Tensor) -> Operand:
        """Partition a store target into chunks: global (TMA, row tile, column, batch), shared (TMA, stage)."""
        return partition(tma, sD, (self.tile_m, self.CHUNK_N))

    def put(
        self, values, bars: Stages, sD_row: Int32, row: Int32, chunk: Int32, phase: Int32,
        piece: int = 0,
    ):  # fmt: skip
        """Round FP32 ``values`` in the order of ``write`` to BF16; otherwise as ``put_packed``."""
        packed = [ptx.pack_bf16(values[i], values[i + 1]) for i in range(0, len(values), 2)]
        return self.put_packed(packed, bars, sD_row, row, chunk, phase, piece)

    @cute.jit
    def put_packed(
        self, packed, bars: Stages, sD_row: Int32, row: Int32, chunk: Int32, phase: Int32,
        piece: cutlass.Constexpr[int] = 0,
    ):  # fmt: skip
        """Write piece ``piece`` of 64 columns of this warp's rows into buffer ``chunk``; hand over the last.

        ``packed``: 16 BF16x2 of the thread in the order of ``write``. ``row``: the tile row whose address
        this lane gives; ``sD_row``: its address in buffer 0. Returns the next (chunk, phase).
        """
        if cutlass.const_expr(piece == 0):
            cute.arch.mbarrier_wait(bars.empty + chunk, phase ^ 1)
        self.write(packed, sD_row + chunk * self.chunk_bytes, row, piece)
        if cutlass.const_expr(piece == self.PIECES - 1):
            self.hand_over(bars, chunk)
            chunk, phase = advance(chunk, phase, self.stages)
        return chunk, phase

    @property
    def chunk_bytes(self) -> int:
        """Of a buffer."""
        return self.tile_m * self.CHUNK_N * 2

    @cute.jit
    def hand_over(self, bars: Stages, *chunks: Int32):
        """Give this warp's part of the buffers ``chunks`` to the store warp."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            for chunk in chunks:
                cute.arch.mbarrier_arrive(bars.full + chunk)

    def write(self, packed, address: Int32, row: Int32, piece: int) -> None:
        """64 columns in wgmma's accumulator order (per 8: two of row lane/4, two of row lane/4+8).

        ``row`` is lane%16 of the warp's rows.
        """
        lane = cute.arch.lane_idx()
        for j in range(4):
            column = 2 * j + lane // 16
            ptx.stmatrix_x4(address + ((column ^ (row % 8)) << 4), *packed[4 * j : 4 * j + 4])

    @cute.jit
    def put_transposed(
        self, values, bars: Stages, sD_address: Int32, warp_row: Int32, chunk: Int32, phase: Int32
    ):
        """``put`` of a chunk's transpose: 64 rows of ``tile_m`` columns, of which this warp has 16.

        ``warp_row``: the tile row (here: column) where the warp's 16 begin. Other arguments as ``put``.
        """
        cute.arch.mbarrier_wait(bars.empty + chunk, phase ^ 1)
        lane = cute.arch.lane_idx()
        base = sD_address + chunk * (self.tile_m * self.CHUNK_N * 2) + warp_row // 64 * 8192
        column = warp_row % 64 // 8 + lane // 8 % 2  # 16-byte column of this lane's address
        for j in cutlass.range_constexpr(4):
            packed = [
                ptx.pack_bf16(values[8 * j + 2 * i], values[8 * j + 2 * i + 1]) for i in range(4)
            ]
            row = 16 * j + lane // 16 * 8 + lane % 8
            ptx.stmatrix_x4_trans(base + row * 128 + ((column ^ (row % 8)) << 4), *packed)
        self.hand_over(bars, chunk)
        return advance(chunk, phase, self.stages)

    @cute.jit
    def store(
        self, bars: Stages, target: Operand, row_tile: Int32, column: Int32, batch: Int32,
        chunk: Int32, phase: Int32, first: cutlass.Constexpr[bool], last: cutlass.Constexpr[bool],
    ):  # fmt: skip
        """Store one chunk of a tile (whole store warp).

        A buffer is freed once it has been read, which is looked after one store later, so that two are
        on their way; after the ``last`` chunk of the tile all are free.
        """
        cute.arch.mbarrier_wait(bars.full + chunk, phase)
        # Unlike a TMA load, a store of the DSL does not elect a lane: PTX would issue one per lane.
        with cute.arch.elect_one():
            cute.copy(
                target.atom, target.tXsX[None, chunk], target.tXgX[None, row_tile, column, batch]
            )
            cute.arch.cp_async_bulk_commit_group()
        if cutlass.const_expr(not first):
            cute.arch.cp_async_bulk_wait_group(1, read=True)
            self.free(bars, select(chunk == 0, Int32(self.stages - 1), chunk - 1))
        if cutlass.const_expr(last):
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            self.free(bars, chunk)
        return advance(chunk, phase, self.stages)

    @cute.jit
    def free(self, bars: Stages, *chunks: Int32):
        """Give buffers back to the MMA warps, as far as this warp is concerned."""
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            for chunk in chunks:
                cute.arch.mbarrier_arrive(bars.empty + chunk)

    @cute.jit
    def store_tile(
        self, bars: Stages, targets, row_tile: Int32, n: Int32, count: cutlass.Constexpr[int],
        batch: Int32, chunk: Int32, phase: Int32,
    ):  # fmt: skip
        """Store column tile ``n`` of each target in turn, 64 columns at a time, as the MMA warps put them."""
        chunks = [(c, target) for c in range(count) for target in targets]
        for i in cutlass.range_constexpr(len(chunks)):
            c, target = chunks[i]
            chunk, phase = self.store(
                bars, target, row_tile, n * count + c, batch, chunk, phase,
                i == 0, i == len(chunks) - 1,
            )  # fmt: skip
        return chunk, phase

    def following(self, chunk: Int32, phase: Int32, count: int) -> list[tuple[Int32, Int32]]:
        """(chunk, phase) of ``count`` buffers in a row."""
        places = [(chunk, phase)]
        while len(places) < count:
            places.append(advance(*places[-1], self.stages))
        return places

    @cute.jit
    def store_together(
        self, bars: Stages, targets, row_tile: Int32, n: Int32, count: cutlass.Constexpr[int],
        chunk: Int32, phase: Int32,
    ):  # fmt: skip
        """``store_tile`` of chunks that are handed over at once, one of each target, into as many buffers.

        Every warp hands over and frees buffers in their order, so the last one's barrier speaks for all. Where
        there is a buffer more, the store of the last one may still read when the next are filled.
        """
        size = len(targets)
        keep = 1 if self.stages > size else 0
        kept = chunk
        for c in cutlass.range_constexpr(count):
            places = self.following(chunk, phase, size)
            at = [place for place, _ in places]
            last, last_phase = places[-1]
            cute.arch.mbarrier_wait(bars.full + last, last_phase)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(size):
                    target = targets[i]
                    cute.copy(
                        target.atom,
                        target.tXsX[None, at[i]],
                        target.tXgX[None, row_tile, n * count + c, 0],
                    )
                    if cutlass.const_expr(i >= size - 1 - keep):
                        cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(keep, read=True)
            if cutlass.const_expr(keep and c > 0):
                self.free(bars, kept, *at[:-1])
            elif cutlass.const_expr(keep):
                self.free(bars, *at[:-1])
            else:
                self.free(bars, *at)
            kept = last
            chunk, phase = advance(last, last_phase, self.stages)
        if cutlass.const_expr(keep):
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            self.free(bars, kept)
        return chunk, phase

    @cute.jit
    def store_wide_tile(
        self, bars: Stages, target: Operand, m: Int32, n: Int32, count: cutlass.Constexpr[int],
        batch: Int32, chunk: Int32, phase: Int32,
    ):  # fmt: skip
        """Store the transpose of tile (m, n): ``count`` chunks of 64 rows and ``tile_m`` columns."""
        for c in cutlass.range_constexpr(count):
            chunk, phase = self.store(
                bars, target, n * count + c, m, batch, chunk, phase, c == 0, c == count - 1
            )
        return chunk, phase

    @cute.jit
    def pass_tile(self, bars: Stages, count: Int32 | int, chunk: Int32, phase: Int32):
        """A reading warp's part in ``count`` buffers that another reads: keep step, or a parity says nothing."""
        for _ in cutlass.range(count, unroll=1):
            cute.arch.mbarrier_wait(bars.full + chunk, phase)
            self.free(bars, chunk)
            chunk, phase = advance(chunk, phase, self.stages)
        return chunk, phase

    @cute.jit
    def signal(self, counter: cute.Pointer):
        """Count a tile as done once all stores of the store warp are in memory.

        Their completion implies a proxy fence (PTX, ``cp.async.bulk``). Who reads them with TMA needs its own.
        """
        cute.arch.cp_async_bulk_wait_group(0)
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            sync.arrive(counter)


class RowStaging(Staging):
    """The same buffers filled from tensor memory, where a thread holds columns of one row."""

    PIECES = 2

    def write(self, packed, address: Int32, row: Int32, piece: int) -> None:
        """Columns 32*piece … 32*piece+31 of this thread's row ``row``."""
        for j in range(4):
            self.write_8(packed[4 * j : 4 * j + 4], address, row, 4 * piece + j)

    def write_8(self, packed, address: Int32, row: Int32, column: int) -> None:
        """16-byte column ``column`` of this thread's row ``row``."""
        ptx.shared_store_16(address + ((column ^ (row % 8)) << 4), *packed)

    @cute.jit
    def put_bytes(
        self, words, bars: Stages, sD_row: Int32, row: Int32, chunk: Int32, phase: Int32,
        piece: cutlass.Constexpr[int],
    ):  # fmt: skip
        """``put_packed`` of one-byte values: piece ``piece`` of 4, 32 of a buffer's 128 columns.

        ``words``: 8 words of four values of this thread's row.
        """
        if cutlass.const_expr(piece == 0):
            cute.arch.mbarrier_wait(bars.empty + chunk, phase ^ 1)
        address = sD_row + chunk * self.chunk_bytes
        for j in cutlass.range_constexpr(2):
            self.write_8(words[4 * j : 4 * j + 4], address, row, 2 * piece + j)
        if cutlass.const_expr(piece == 3):
            self.hand_over(bars, chunk)
            chunk, phase = advance(chunk, phase, self.stages)
        return chunk, phase
