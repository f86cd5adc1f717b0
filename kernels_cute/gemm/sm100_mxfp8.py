"""The Blackwell mainloop with block scales: E4M3 operands, one E8M0 scale per 32 along K.

The data lie in the stages of ``sm100`` byte for byte: a K step is 128 bytes of a row, now 128 E4M3 values
(TMA sees pairs of them as BF16). Beside them a stage holds the scales in the hardware's tiles of 128 rows
by four blocks, 512 bytes: one tile of A per CTA, and in each CTA both tiles of B. Before a stage's MMAs the
MMA thread copies them to tensor memory, in both CTAs at once; copies and MMAs of one thread run in the
order of their issue, so one place for scales is enough. MMA b of the four takes byte b of each row's word.

Tensor memory, 512 columns:

    0 … 255     accumulator, even tasks
    240 … 495   accumulator, odd tasks
    496 … 507   scales: 4 of A, 8 of B

Two accumulators and the scales do not fit, so the accumulators share 16 columns. The epilogue keeps the
shared columns of its task in registers first, and then gives the accumulator up: the next task's MMAs
write the other place while the rest is read. So there is one phase for both places, and ``acc_full`` and
``acc_empty`` (module ``sm100``) have one mbarrier each.

The shared expert's tasks are BF16 and use the same stages, accumulators and barriers.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, tcgen05

from .. import mxfp8, ptx
from ..matrix import matrix
from ..sync import advance, select, select_f32
from . import sm100
from .operands import Operand, Tma, aligned_bytes, make_tma, partition
from .sm100 import BOTH, TWO, Bars

PLACE = 240  # columns from the one accumulator to the other
SHARED = 16  # columns that they share
SCALES = 496  # first column of the scales
SCALE_ELEMENTS = mxfp8.TILE_BYTES // 2  # of a tile, as BF16

# PTX ISA, "Instruction descriptor", kind mxf8f6f4: N/8 from bit 17, E8M0 scales bit 23, M/128 from bit 27;
# E4M3 operands, K-major, are zeros. Which byte of the scales: A from bit 29, B from bit 4.
INSTRUCTION = (256 // 8) << 17 | 1 << 23 | (256 // 128) << 27
# "Shared memory descriptor": address/16; a leading offset that nothing here uses from bit 16; stride
# between groups of 8 rows/16 from bit 32; version 1 at bit 46; from bit 61 swizzle, 2 for 128 bytes.
# ``tests/kernels_cute/test_sm100_mxfp8.py`` compares all three with what the DSL's own MMA makes.
OPERAND = 1 << 16 | (1024 // 16) << 32 | 1 << 46 | 2 << 61
SCALE = 1 << 16 | (128 // 16) << 32 | 1 << 46


class Worker(sm100.Worker):
    """With the registers that keep the shared columns."""

    def __init__(self, tmem: Int32, row: Int32):
        super().__init__(tmem, row)
        self.kept = cute.make_rmem_tensor((SHARED,), Float32)


class Mainloop(sm100.Mainloop):
    """``sm100.Mainloop`` for tile_n = 256 with block scales for some tasks."""

    SCALED_K = 128

    def __init__(self, tile_n: int, stages: int):
        super().__init__(tile_n, stages, 0)
        self.acc_stages = 1
        self.scale_bytes = 3 * mxfp8.TILE_BYTES

    def setup(self) -> None:
        """As the base class."""
        super().setup()

        def staged(count: int) -> cute.Layout:
            shape, stride = (1, SCALE_ELEMENTS, count), (SCALE_ELEMENTS, 1, SCALE_ELEMENTS)
            return cute.make_layout(shape, stride=stride)

        self.a_scale_layout = staged(self.stages)
        self.b_scale_layout = staged(2 * self.stages)

    def buffers(self) -> dict[str, object]:
        """With sSA 512 bytes and sSB 2·512 bytes per stage."""
        return super().buffers() | {
            "sSA": aligned_bytes(mxfp8.TILE_BYTES * self.stages),
            "sSB": aligned_bytes(2 * mxfp8.TILE_BYTES * self.stages),
        }

    # ---- host: descriptors ----

    def tma_scales(
        self, address: Int64, rows: Int32, columns: Int32, batch: Int32 | None = None
    ) -> Tma:
        """Loads of one tile of scales [batch, rows/128, columns/128, 512]: (row tile, k tile, batch)."""
        tiles = matrix(address, rows // 128, columns // 128 * SCALE_ELEMENTS, batch)
        op = cpasync.CopyBulkTensorTileG2SOp(TWO)
        return make_tma(op, tiles, self.a_scale_layout, (1, SCALE_ELEMENTS))

    # ---- loads ----

    def partition_scales(self, storage, a: Tma, left: Tma, right: Tma) -> list[Operand]:
        """Partition the scales of A and of B's halves for their stages."""
        sA = storage.sSA.get_tensor(self.a_scale_layout)
        sB = storage.sSB.get_tensor(self.b_scale_layout)
        tile = (1, SCALE_ELEMENTS)
        return [partition(a, sA, tile), partition(left, sB, tile), partition(right, sB, tile)]

    @cute.jit
    def load_scaled_tile(
        self,
        bars: Bars,
        a: Operand,
        block: Int32,
        left: Operand,
        left_tile: Int32,
        right: Operand,
        right_tile: Int32,
        scales,
        batch: Int32,
        k_tiles: Int32,
        stage: Int32,
        phase: Int32,
        k_first: Int32 | int = 0,
    ) -> tuple[Int32, Int32]:
        """``load_tile`` with scales: this CTA's tile of A, both tiles of B."""
        rank = cute.arch.block_idx_in_cluster()
        tAgA = a.tXgX[None, 2 * block + rank, None, 0]
        tBgB_left = left.tXgX[None, left_tile, None, batch]
        tBgB_right = right.tXgX[None, right_tile, None, batch]
        of_a, of_left, of_right = scales
        tSgA = of_a.tXgX[None, 2 * block + rank, None, 0]
        tSgB_left = of_left.tXgX[None, left_tile, None, batch]
        tSgB_right = of_right.tXgX[None, right_tile, None, batch]
        bytes_ = self.a_bytes + self.b_bytes + self.scale_bytes
        for step in cutlass.range(k_tiles, unroll=1):
            k = step + k_first
            cute.arch.mbarrier_wait(bars.empty + stage, phase ^ 1)
            full = bars.full + stage
            if rank == 0:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * bytes_)
            cute.copy(a.atom, tAgA[None, k], a.tXsX[None, stage], tma_bar_ptr=full)
            cute.copy(of_a.atom, tSgA[None, k], of_a.tXsX[None, stage], tma_bar_ptr=full)
            cute.copy(
                of_left.atom, tSgB_left[None, k], of_left.tXsX[None, 2 * stage], tma_bar_ptr=full
            )
            cute.copy(
                of_right.atom, tSgB_right[None, k], of_right.tXsX[None, 2 * stage + 1],
                tma_bar_ptr=full,
            )  # fmt: skip
            if rank == 0:
                cute.copy(left.atom, tBgB_left[None, k], left.tXsX[None, stage], tma_bar_ptr=full)
            else:
                cute.copy(
                    right.atom, tBgB_right[None, k], right.tXsX[None, stage], tma_bar_ptr=full
                )
            stage, phase = advance(stage, phase, self.stages)
        return stage, phase

    # ---- multiply ----

    def fragments(self, storage, tmem: cute.Pointer, majors: str = "kk"):
        """As the base class; the accumulators overlap."""
        mma = self.tiled_mma(majors)
        one = mma.make_fragment_C(mma.partition_shape_C((self.TILE_M, self.tile_n))).layout
        a, b, _ = super().fragments(storage, tmem, majors)
        return a, b, cute.make_tensor(tmem, cute.append(one, cute.make_layout(2, stride=PLACE)))

    def place(self, acc: Int32, acc_phase: Int32) -> Int32:
        """Places take turns, as phases do."""
        return acc_phase

    @cute.jit
    def mma_scaled_tile(
        self,
        bars: Bars,
        storage,
        tmem: Int32,
        k_tiles: Int32,
        stage: Int32,
        phase: Int32,
        acc: Int32,
        acc_phase: Int32,
        is_set: Boolean | bool = False,
        set_phase: Int32 | int = 0,
    ) -> tuple[Int32, Int32]:
        """``mma_tile`` of a task with scales; ``tmem``: the base of tensor memory."""
        ptx.cluster_wait((bars.acc_empty + acc).toint(), acc_phase ^ 1)
        if cutlass.const_expr(not isinstance(is_set, bool)):
            if is_set:
                ptx.cluster_wait(bars.acc_set.toint(), set_phase)
        ptx.tcgen05_after_sync()
        target = tmem + acc_phase * PLACE
        scales_a, scales_b = tmem + SCALES, tmem + SCALES + 4
        sA, sB = storage.sA.data_ptr().toint(), storage.sB.data_ptr().toint()
        sSA, sSB = storage.sSA.data_ptr().toint(), storage.sSB.data_ptr().toint()
        tile = mxfp8.TILE_BYTES
        for k in cutlass.range(k_tiles, unroll=1):
            cute.arch.mbarrier_wait(bars.full + stage, phase)
            ptx.tcgen05_after_sync()
            with cute.arch.elect_one():
                ptx.copy_scales(scales_a, descriptor(SCALE, sSA + stage * tile))
                for half in cutlass.range_constexpr(2):
                    at = sSB + (2 * stage + half) * tile
                    ptx.copy_scales(scales_b + 4 * half, descriptor(SCALE, at))
                for block in cutlass.range_constexpr(4):
                    at = 32 * block
                    accumulate = Int32(1)
                    if cutlass.const_expr(block == 0):
                        accumulate = select((k > 0) | is_set, Int32(1), Int32(0))
                    ptx.mma_mxfp8(
                        target,
                        descriptor(OPERAND, sA + stage * self.a_bytes + at),
                        descriptor(OPERAND, sB + stage * self.b_bytes + at),
                        Int32(INSTRUCTION | block << 29 | block << 4),
                        scales_a + byte_of(block),
                        scales_b + byte_of(block),
                        accumulate,
                    )
                tcgen05.commit(bars.empty + stage, BOTH, TWO)
            stage, phase = advance(stage, phase, self.stages)
        with cute.arch.elect_one():
            tcgen05.commit(bars.acc_full + acc, BOTH, TWO)
        return stage, phase

    # ---- accumulators for the epilogue ----

    def worker(self, warp: Int32, tmem: Int32) -> Worker:
        """As the base class."""
        plain = super().worker(warp, tmem)
        return Worker(plain.tmem, plain.row)

    @cute.jit
    def take(
        self, worker: Worker, bars: Bars, k_tiles: Int32, acc: Int32, phase: Int32,
        majors: str = "kk", halves: Int32 | int = 2,
    ) -> tuple[Int32, Int32]:  # fmt: skip
        """Have the accumulator of the next task, keep its shared columns, and let the next one begin.

        Returns the place and the phase. ``halves``: of no use here, as in ``sm100``.
        """
        cute.arch.mbarrier_wait(bars.acc_full, phase)
        ptx.tcgen05_after_sync()
        (columns,) = ptx.tmem_load(worker.tmem + PLACE, width=SHARED)
        for i in cutlass.range_constexpr(SHARED):
            worker.kept[i] = columns[i]
        ptx.tcgen05_before_sync()
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            empty = ptx.cluster_address(bars.acc_empty.toint(), Int32(0))
            ptx.cluster_arrive(empty)
        return phase, phase

    def columns(
        self, worker: Worker, place: Int32, *first: int | Int32, width: int = 32
    ) -> list[list[Float32]]:
        """``width`` (16 or 32) accumulator columns of this lane's row from each of ``first`` on.

        A ``first`` known at run time only is a multiple of 32. The shared columns come as kept: those are
        the last 16 of place 0, the first of place 1.
        """
        base = worker.tmem + place * PLACE
        addresses, kept = [], []
        for at in first:
            for step in range(0, width, SHARED):
                # Where these 16 are the shared ones, the load goes to their neighbours: another task may
                # be writing them by now.
                part, shared, aside = at + step, None, 0
                if isinstance(at, int):
                    if part in (0, PLACE):
                        shared, aside = place == (1 if part == 0 else 0), (1 if part == 0 else -1)
                elif step == 0:
                    shared, aside = (part == 0) & (place == 1), 1
                else:
                    shared, aside = (part == PLACE) & (place == 0), -1
                address = base + part
                if shared is not None:
                    address = address + select(shared, Int32(aside * SHARED), Int32(0))
                addresses.append(address)
                kept.append(shared)
        values = []
        for loaded, shared in zip(ptx.tmem_load(*addresses, width=SHARED), kept):
            if shared is not None:
                pairs = zip(loaded, range(SHARED))
                loaded = [select_f32(shared, worker.kept[i], value) for value, i in pairs]
            values += loaded
        return [values[i : i + width] for i in range(0, len(values), width)]

    def set_first(self, worker: Worker, place: Int32, first: int, values: list[Float32]) -> None:
        """As the base class. The shared columns are free: their task before was taken, hence kept."""
        ptx.tmem_store(worker.tmem + place * PLACE + first, values)

    @cute.jit
    def give_back(
        self, worker: Worker, bars: Bars, place: Int32, phase: Int32
    ) -> tuple[Int32, Int32]:
        """The epilogue has read the accumulator. Returns the next place and phase."""
        return phase ^ 1, phase ^ 1


def byte_of(block: int) -> int:
    """The byte of a column as the two highest bits of its address, as a signed number."""
    return (block << 30) - ((block >> 1) << 32)


def descriptor(fields: int, address: Int32) -> Int64:
    """A shared-memory descriptor."""
    if fields >= 1 << 63:
        fields -= 1 << 64
    return Int64(fields) | Int64((address >> 4) & 0x3FFF)
