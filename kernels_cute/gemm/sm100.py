"""The Blackwell mainloop: two CTAs load into stages, one thread of the pair multiplies with tcgen05.

A task is 256 rows by tile_n columns. CTA r of the pair holds rows 128r … of A and half r of B's rows per
stage, both (…, 64) BF16, K-major, 128-byte swizzle. ``tcgen05.mma.cta_group::2`` reads both CTAs' shared
memory and leaves rows 128r … of the accumulator, all tile_n columns, in CTA r's tensor memory: row i of the
CTA in lane i, column j in column j. Since CTA 0 loads the left half of B and CTA 1 the right, gate+up is one
GEMM whose gate column j and up column tile_n/2 + j lie in one lane. Two accumulators take turns.

Mbarriers. "First" is CTA 0, where the pair's counts are kept; its MMA warp works for both.

    barrier        in     count  arrivals
    full[s]        first  1      first's load warp, expecting both CTAs' A and B bytes; TMA of both CTAs
    empty[s]       each   1+G    tcgen05.commit after the stage's MMAs, multicast to both; the CTA's G gather warps
    acc_full[a]    each   1      tcgen05.commit after a task's MMAs, multicast to both
    acc_empty[a]   first  8      one lane of each epilogue warp of both CTAs
    acc_set        first  8      the same, where a task continues an accumulator that the epilogue wrote

Phases. A load for use n of a stage waits, in its own CTA, for phase n-1 of ``empty``, which completes after
the MMAs that read use n-1, hence after phase n-1 of ``full``: no byte is counted in an earlier phase. Gather
warps arrive on ``empty`` in every use, gathered or not, so that they are never two phases away, where a
parity says nothing. Before a CTA leaves, its load warp has seen all stages empty and its epilogue warps the last
accumulator full: no commit arrives at a CTA that is gone. The other arrivals, on ``acc_empty``, come before the
cluster barrier at the end of the roles.

The operands of a contraction over rows are MN-major: (…, 64) of 64 rows each, as strips of 64 columns whose
rows are 128 bytes. A box of 128 by 64 then is two strips; both majors use the same bytes of a stage.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100_helpers
from cutlass import BFloat16, Boolean, Float32, Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import cute_nvgpu
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05

from .. import ptx
from ..invariant import Invariant
from ..machine import BLACKWELL
from ..matrix import matrix
from ..sync import advance, divide, select
from .operands import (
    Operand,
    RowSource,
    Tma,
    aligned,
    make_tma,
    partition,
    strip_atom,
    sw128_atom,
    view,
)

TWO = tcgen05.CtaGroup.TWO
BOTH = 0b11  # CTAs of the pair
# Clears the bit of a shared-memory address that tells the CTAs of a pair apart.
FIRST_CTA = ~(1 << 24)


class Bars(NamedTuple):
    """The mbarriers of the module's table."""

    full: cute.Pointer
    empty: cute.Pointer
    acc_full: cute.Pointer
    acc_empty: cute.Pointer
    acc_set: cute.Pointer


class Worker(Invariant):
    """What an epilogue warp holds: its lanes' tensor memory, its lane's row of a staging buffer."""

    def __init__(self, tmem: Int32, row: Int32):
        self.tmem = tmem
        self.row = row


class Mainloop(Invariant):
    """Shapes, shared-memory layouts and loops of one tile configuration.

    Args:
        tile_n: accumulator columns, 128 or 256.
        stages: shared-memory stages; (128 + tile_n/2) * 128 bytes each.
        gather_warps: warps that gather rows of A: 0 or 4.
    """

    TILE_M = BLACKWELL.tile_m
    CTA_ROWS = 128
    TILE_K = 64
    PIECE = 32
    EPILOGUE_WARPS = 4

    def __init__(self, tile_n: int, stages: int, gather_warps: int):
        self.tile_n = tile_n
        self.half_n = tile_n // 2
        self.stages = stages
        self.acc_stages = BLACKWELL.acc_stages
        self.gather_warps = gather_warps
        self.a_bytes = self.CTA_ROWS * self.TILE_K * 2
        self.b_bytes = self.half_n * self.TILE_K * 2
        self.tile = (self.TILE_M, tile_n, self.TILE_K)

    def setup(self) -> None:
        """Build layouts (inside a jit function, where the DSL's context exists)."""

        def staged(atom, rows: int, order: tuple[int, int, int]) -> cute.ComposedLayout:
            return cute.tile_to_shape(atom, (rows, self.TILE_K, self.stages), order=order)

        by_row, by_strip = (0, 1, 2), (1, 0, 2)
        self.a_layout = staged(sw128_atom(), self.CTA_ROWS, by_row)
        self.b_layout = staged(sw128_atom(), self.half_n, by_row)
        self.b_half_layout = self.b_layout
        self.a_layout_mn = staged(strip_atom(), self.CTA_ROWS, by_strip)
        self.b_half_layout_mn = staged(strip_atom(), self.half_n, by_strip)

    def tiled_mma(self, majors: str = "kk") -> cute.TiledMma:
        """The pair's MMA for A and B ``majors``: "k" where the contraction is contiguous, "m" where not.

        A new value each time: setting a field changes the object.
        """
        major = {"k": OperandMajorMode.K, "m": OperandMajorMode.MN}
        return sm100_helpers.make_trivial_tiled_mma(
            BFloat16,
            BFloat16,
            *(major[m] for m in majors),
            Float32,
            TWO,
            (self.TILE_M, self.tile_n),
        )

    # ---- shared memory ----

    def storage(self) -> dict[str, object]:
        """Fields of the shared storage."""
        array = cute.struct.MemRange
        return {
            "full": array[Int64, self.stages],
            "empty": array[Int64, self.stages],
            "acc_full": array[Int64, self.acc_stages],
            "acc_empty": array[Int64, self.acc_stages],
            "acc_set": array[Int64, 1],
        }

    def buffers(self) -> dict[str, object]:
        """Aligned fields: sA bf16 (128, 64, stages), sB bf16 (tile_n/2, 64, stages)."""
        return {
            "sA": aligned(cute.cosize(self.a_layout)),
            "sB": aligned(cute.cosize(self.b_layout)),
        }

    def bars(self, storage) -> Bars:
        """The mbarriers in the shared storage."""
        return Bars(
            storage.full.data_ptr(),
            storage.empty.data_ptr(),
            storage.acc_full.data_ptr(),
            storage.acc_empty.data_ptr(),
            storage.acc_set.data_ptr(),
        )

    def init_barriers(self, bars: Bars) -> None:
        """The counts of the module's table (one thread of each CTA)."""
        for i in range(self.stages):
            cute.arch.mbarrier_init(bars.full + i, 1)
            cute.arch.mbarrier_init(bars.empty + i, 1 + self.gather_warps)
        for i in range(self.acc_stages):
            cute.arch.mbarrier_init(bars.acc_full + i, 1)
            cute.arch.mbarrier_init(bars.acc_empty + i, 2 * self.EPILOGUE_WARPS)
        cute.arch.mbarrier_init(bars.acc_set, 2 * self.EPILOGUE_WARPS)

    # ---- host: descriptors ----

    def tma_a(self, tensor: cute.Tensor) -> Tma:
        """Loads of (128, 64) from (rows, k, batch), k contiguous."""
        return self._tma_load(tensor, self.a_layout, self.CTA_ROWS)

    def tma_b_half(self, tensor: cute.Tensor) -> Tma:
        """Loads of (tile_n/2, 64) from (n, k, expert), k contiguous."""
        return self._tma_load(tensor, self.b_half_layout, self.half_n)

    def tma_a_mn(self, tensor: cute.Tensor) -> Tma:
        """Loads of (128, 64) from (rows, k, batch), rows contiguous."""
        return self._tma_load(tensor, self.a_layout_mn, self.CTA_ROWS)

    def tma_b_half_mn(self, tensor: cute.Tensor) -> Tma:
        """Loads of (tile_n/2, 64) from (n, k, expert), n contiguous."""
        return self._tma_load(tensor, self.b_half_layout_mn, self.half_n)

    def _tma_load(self, tensor: cute.Tensor, staged: cute.ComposedLayout, rows: int) -> Tma:
        op = cpasync.CopyBulkTensorTileG2SOp(TWO)
        return make_tma(op, tensor, staged, (rows, self.TILE_K))

    def row_source(self, address: Int64, rows: Int32, columns: Int32) -> RowSource:
        """A matrix from which ``gather`` and ``gather_columns`` take rows."""
        full = matrix(address, rows, columns)
        plane = cute.make_tensor(full.iterator, cute.select(full.layout, mode=[0, 1]))
        one_row = cute.make_composed_layout(
            cute.make_swizzle(3, 4, 3), 0, cute.make_layout((1, self.TILE_K), stride=(64, 1))
        )
        op = cpasync.CopyBulkTensorTileG2SOp(TWO)
        tma = Tma(*cpasync.make_tiled_tma_atom(op, plane, one_row, (1, self.TILE_K)))
        return RowSource(address, Int64(columns) * 2, rows, tma)

    # ---- loads ----

    def partition(self, tma: Tma, sX: cute.Tensor, rows: int) -> Operand:
        """Partition a TMA source of (rows, 64) tiles for the stages of ``sX``."""
        return partition(tma, sX, (rows, self.TILE_K))

    @cute.jit
    def load_tile(
        self,
        bars: Bars,
        a: Operand,
        a_by_tma: cutlass.Constexpr[bool],
        block: Int32,
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
        b_by_tma: cutlass.Constexpr[bool] = True,
    ) -> tuple[Int32, Int32]:
        """Load this CTA's part of all K steps of a task (one warp): its rows of A, its half of B.

        ``shares`` is Hopper's. ``block`` counts tasks' row blocks, ``k_first`` is the first K step in the tensors. Without
        ``a_by_tma`` or ``b_by_tma`` the gather warps fill A or B. Returns the next (stage, phase).
        """
        rank = cute.arch.block_idx_in_cluster()
        tAgA = a.tXgX[None, 2 * block + rank, None, 0]
        tBgB_left = left.tXgX[None, left_tile, None, batch]
        tBgB_right = right.tXgX[None, right_tile, None, batch]
        for step in cutlass.range(k_tiles, unroll=1):
            k = step + k_first
            cute.arch.mbarrier_wait(bars.empty + stage, phase ^ 1)
            # The copies below count on the first CTA's barrier.
            full = bars.full + stage
            if rank == 0:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * (self.a_bytes + self.b_bytes))
            if cutlass.const_expr(a_by_tma):
                cute.copy(a.atom, tAgA[None, k], a.tXsX[None, stage], tma_bar_ptr=full)
            if cutlass.const_expr(b_by_tma):
                if rank == 0:
                    cute.copy(
                        left.atom, tBgB_left[None, k], left.tXsX[None, stage], tma_bar_ptr=full
                    )
                else:
                    cute.copy(
                        right.atom, tBgB_right[None, k], right.tXsX[None, stage], tma_bar_ptr=full
                    )
            stage, phase = advance(stage, phase, self.stages)
        return stage, phase

    @cute.jit
    def finish_loads(self, bars: Bars, stage: Int32, phase: Int32):
        """Wait until every stage is empty: the last commits have arrived in this CTA."""
        for _ in cutlass.range(self.stages, unroll=1):
            cute.arch.mbarrier_wait(bars.empty + stage, phase ^ 1)
            stage, phase = advance(stage, phase, self.stages)

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
        """Gather all K steps of A: the rows of x of the CTA's 128 ``routes`` (token*K + k, -1 for zeros).

        ``by_topk`` divides by K. Warp g of the gather warps takes rows 32g … 32g+31, four at a time.
        """
        group = cute.arch.make_warp_uniform(thread // 32)
        route = cute.arch.load(routes + thread, Int32)
        own = select(route < 0, source.rows, divide(route, by_topk))
        rows = [cute.arch.shuffle_sync(own, i) for i in range(32)]
        descriptor = descriptor_address(source.tma.atom)
        target = sA_address + group * (32 * 128)
        for k in cutlass.range(k_tiles, unroll=1):
            cute.arch.mbarrier_wait(bars.empty + stage, phase ^ 1)
            full = (bars.full + stage).toint() & FIRST_CTA
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(8):
                    ptx.tma_gather_4(
                        target + stage * self.a_bytes + i * (4 * 128),
                        descriptor,
                        k * self.TILE_K,
                        rows[4 * i : 4 * i + 4],
                        full,
                    )
                cute.arch.mbarrier_arrive(bars.empty + stage)
            stage, phase = advance(stage, phase, self.stages)
        return stage, phase

    @cute.jit
    def gather_columns(
        self,
        bars: Bars,
        target_address: Int32,
        source: RowSource,
        first_column: Int32,
        routes: cute.Pointer,
        by_topk: Int64,
        thread: Int32,
        k_tiles: Int32,
        stage: Int32,
        phase: Int32,
    ) -> tuple[Int32, Int32]:
        """Gather an operand whose contraction runs over rows: K runs over ``routes``, 128 columns per CTA.

        ``target_address``: of A or B in stage 0, which are equally large. Warp g of the gather warps takes
        rows 16g … 16g+15 of each K step, four at a time, in two strips of 64 columns. Other arguments as
        ``gather``; columns outside the matrix are zeros.
        """
        lane = thread % 32
        group = cute.arch.make_warp_uniform(thread // 32)
        at = routes + group * 16 + lane % 16
        route = Int32(-1)
        if k_tiles > 0:
            route = cute.arch.load(at, Int32)
        descriptor = descriptor_address(source.tma.atom)
        target = target_address + group * (16 * 128)
        for k in cutlass.range(k_tiles, unroll=1):
            own = select(route < 0, source.rows, divide(route, by_topk))
            rows = [cute.arch.shuffle_sync(own, i) for i in range(16)]
            if k + 1 < k_tiles:  # the next step's routes travel meanwhile
                route = cute.arch.load(at + (k + 1) * self.TILE_K, Int32)
            cute.arch.mbarrier_wait(bars.empty + stage, phase ^ 1)
            full = (bars.full + stage).toint() & FIRST_CTA
            with cute.arch.elect_one():
                for strip in cutlass.range_constexpr(2):
                    for i in cutlass.range_constexpr(4):
                        ptx.tma_gather_4(
                            target + stage * self.a_bytes + strip * 8192 + i * (4 * 128),
                            descriptor,
                            first_column + strip * 64,
                            rows[4 * i : 4 * i + 4],
                            full,
                        )
                cute.arch.mbarrier_arrive(bars.empty + stage)
            stage, phase = advance(stage, phase, self.stages)
        return stage, phase

    @cute.jit
    def pass_tile(
        self, bars: Bars, k_tiles: Int32, stage: Int32, phase: Int32
    ) -> tuple[Int32, Int32]:
        """A gather warp's part of a task whose A comes by TMA: keep step."""
        for _ in cutlass.range(k_tiles, unroll=1):
            cute.arch.mbarrier_wait(bars.empty + stage, phase ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(bars.empty + stage)
            stage, phase = advance(stage, phase, self.stages)
        return stage, phase

    # ---- multiply (the first CTA's MMA warp) ----

    def fragments(
        self, storage, tmem: cute.Pointer, majors: str = "kk"
    ) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
        """Descriptors of A and B (MMA, 1, k block, stage), accumulators (MMA, 1, 1, accumulator)."""
        mma = self.tiled_mma(majors)
        shape = cute.append(mma.partition_shape_C((self.TILE_M, self.tile_n)), self.acc_stages)
        # The stages' bytes as the MMA sees them: ((rows, 16), 1, 4, stages).
        a = sm100_helpers.make_smem_layout_a(mma, self.tile, BFloat16, self.stages)
        b = sm100_helpers.make_smem_layout_b(mma, self.tile, BFloat16, self.stages)
        return (
            mma.make_fragment_A(view(storage.sA, a)),
            mma.make_fragment_B(view(storage.sB, b)),
            cute.make_tensor(tmem, mma.make_fragment_C(shape).layout),
        )

    @cute.jit
    def mma_tile(
        self,
        bars: Bars,
        tCrA: cute.Tensor,
        tCrB: cute.Tensor,
        tCtAcc: cute.Tensor,
        k_tiles: Int32,
        stage: Int32,
        phase: Int32,
        acc: Int32,
        acc_phase: Int32,
        is_set: Boolean | bool = False,
        set_phase: Int32 | int = 0,
        majors: cutlass.Constexpr[str] = "kk",
    ) -> tuple[Int32, Int32]:
        """Accumulator ``acc`` = A·Bᵀ over ``k_tiles`` steps. Returns the next (stage, phase).

        With ``is_set`` the epilogue has written a first value of the accumulator (``set_first``), to which
        the products are added; without it there must be at least one step.
        """
        ptx.cluster_wait((bars.acc_empty + acc).toint(), acc_phase ^ 1)
        if cutlass.const_expr(not isinstance(is_set, bool)):
            if is_set:
                ptx.cluster_wait(bars.acc_set.toint(), set_phase)
        ptx.tcgen05_after_sync()
        target = tCtAcc[None, None, None, self.place(acc, acc_phase)]
        for k in cutlass.range(k_tiles, unroll=1):
            cute.arch.mbarrier_wait(bars.full + stage, phase)
            ptx.tcgen05_after_sync()
            mma = self.tiled_mma(majors)
            for k_block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                add = Boolean((k > 0) | is_set) if k_block == 0 else True
                mma.set(tcgen05.Field.ACCUMULATE, add)
                at = (None, None, k_block, stage)
                cute.gemm(mma, target, tCrA[at], tCrB[at], target)
            with cute.arch.elect_one():
                tcgen05.commit(bars.empty + stage, BOTH, TWO)
            stage, phase = advance(stage, phase, self.stages)
        with cute.arch.elect_one():
            tcgen05.commit(bars.acc_full + acc, BOTH, TWO)
        return stage, phase

    def place(self, acc: Int32, acc_phase: Int32) -> Int32:
        """Which of the places in tensor memory an accumulator takes."""
        return acc

    # ---- accumulators for the epilogue ----

    def worker(self, warp: Int32, tmem: Int32) -> Worker:
        """What epilogue warp ``warp`` needs: a warp reaches the lanes 32*(warp%4) …"""
        first = warp % 4 * 32
        return Worker(tmem + (first << 16), first + cute.arch.lane_idx())

    def take(
        self, worker: Worker, bars: Bars, k_tiles: Int32, acc: Int32, phase: Int32,
        majors: str = "kk", halves: Int32 | int = 2,
    ) -> tuple[Int32, Int32]:  # fmt: skip
        """Have the accumulator of the next task. Returns which, and its phase.

        ``halves``: as on Hopper, of no use here: one MMA multiplies all rows.
        """
        cute.arch.mbarrier_wait(bars.acc_full + acc, phase)
        ptx.tcgen05_after_sync()
        return acc, phase

    def columns(
        self, worker: Worker, acc: Int32, *first: int, width: int = 32
    ) -> list[list[Float32]]:
        """``width`` (16 or 32) accumulator columns of this lane's row from each of ``first`` on."""
        base = worker.tmem + acc * self.tile_n
        return ptx.tmem_load(*[base + at for at in first], width=width)

    def set_first(self, worker: Worker, acc: Int32, first: int, values: list[Float32]) -> None:
        """Write 32 columns of this lane's row from ``first`` on; ``hand_first`` passes them to the MMA."""
        ptx.tmem_store(worker.tmem + acc * self.tile_n + first, values)

    @cute.jit
    def hand_first(self, bars: Bars):
        """This warp has written the first value of the next accumulator."""
        ptx.tmem_store_wait()
        ptx.tcgen05_before_sync()
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            ptx.cluster_arrive(ptx.cluster_address(bars.acc_set.toint(), Int32(0)))

    @cute.jit
    def give_back(
        self, worker: Worker, bars: Bars, acc: Int32, phase: Int32
    ) -> tuple[Int32, Int32]:
        """The epilogue has read the accumulator. Returns the next one and its phase."""
        ptx.tcgen05_before_sync()
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            empty = ptx.cluster_address((bars.acc_empty + acc).toint(), Int32(0))
            ptx.cluster_arrive(empty)
        return advance(acc, phase, self.acc_stages)


def descriptor_address(atom: cute.CopyAtom) -> Int64:
    """Where the tensor map of a TMA atom lies."""
    kind = ir.Type.parse("!cute.ptr<!cute_nvgpu.tma_descriptor_tiled, generic, align<128>>")
    pointer = cute_nvgpu.get_tma_desc_addr(kind, cute_nvgpu.atom_make_exec_tma(atom._trait.value))
    return pointer.toint()
