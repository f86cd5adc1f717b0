"""One tcgen05 tile: C = A·Bᵀ in FP32, by the layer's own Blackwell mainloop.

Warps of a CTA: 0-3 read the accumulator out of tensor memory, 4 loads, 5 multiplies. The tile of one CTA
(``cta_group::1``), which no kernel of the layer uses, tells a failure of tcgen05 from one of CTA pairs.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100_helpers
from cutlass import BFloat16, Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.memory import SmemAllocator

from .. import ptx
from ..gemm import sm100, sm100_mxfp8
from ..gemm.operands import make_tma, view
from ..matrix import matrix
from ..sync import advance

LOAD_WARP, MMA_WARP, WARPS = 4, 5, 6
STAGES = 3
TMEM_COLUMNS = 512


class OneCta(sm100.Mainloop):
    """The mainloop with ``cta_group::1``: the CTA has all of B, and nobody else's barriers."""

    TILE_M = 128

    def __init__(self, tile_n: int, stages: int):
        super().__init__(tile_n, stages, 0)
        self.half_n = tile_n
        self.b_bytes = tile_n * self.TILE_K * 2

    def tiled_mma(self, majors: str = "kk") -> cute.TiledMma:
        """As the base class, for one CTA and K-major operands."""
        K = OperandMajorMode.K
        group = tcgen05.CtaGroup.ONE
        return sm100_helpers.make_trivial_tiled_mma(
            BFloat16, BFloat16, K, K, Float32, group, (self.TILE_M, self.tile_n)
        )

    def init_barriers(self, bars) -> None:
        """As the base class, with the epilogue warps of one CTA."""
        for i in range(self.stages):
            cute.arch.mbarrier_init(bars.full + i, 1)
            cute.arch.mbarrier_init(bars.empty + i, 1)
        for i in range(self.acc_stages):
            cute.arch.mbarrier_init(bars.acc_full + i, 1)
            cute.arch.mbarrier_init(bars.acc_empty + i, self.EPILOGUE_WARPS)
        cute.arch.mbarrier_init(bars.acc_set, self.EPILOGUE_WARPS)

    def _tma_load(self, tensor, staged, rows: int):
        op = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
        return make_tma(op, tensor, staged, (rows, self.TILE_K))

    @cute.jit
    def load_tile(self, bars, a, b, k_tiles: Int32, stage: Int32, phase: Int32, k_first: Int32):
        """All K steps of A and B from step ``k_first`` on."""
        for step in cutlass.range(k_tiles, unroll=1):
            k = step + k_first
            cute.arch.mbarrier_wait(bars.empty + stage, phase ^ 1)
            full = bars.full + stage
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, self.a_bytes + self.b_bytes)
            cute.copy(a.atom, a.tXgX[None, 0, k, 0], a.tXsX[None, stage], tma_bar_ptr=full)
            cute.copy(b.atom, b.tXgX[None, 0, k, 0], b.tXsX[None, stage], tma_bar_ptr=full)
            stage, phase = advance(stage, phase, self.stages)
        return stage, phase

    @cute.jit
    def mma_tile(
        self, bars, tCrA, tCrB, tCtAcc, k_tiles: Int32, stage: Int32, phase: Int32,
        acc: Int32, acc_phase: Int32, is_set: cutlass.Constexpr[bool], set_phase: Int32,
    ):  # fmt: skip
        """As the base class."""
        ptx.cluster_wait((bars.acc_empty + acc).toint(), acc_phase ^ 1)
        if cutlass.const_expr(is_set):
            ptx.cluster_wait(bars.acc_set.toint(), set_phase)
        ptx.tcgen05_after_sync()
        target = tCtAcc[None, None, None, acc]
        for k in cutlass.range(k_tiles, unroll=1):
            cute.arch.mbarrier_wait(bars.full + stage, phase)
            ptx.tcgen05_after_sync()
            mma = self.tiled_mma()
            for k_block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                add = True if is_set or k_block else Boolean(k > 0)
                mma.set(tcgen05.Field.ACCUMULATE, add)
                at = (None, None, k_block, stage)
                cute.gemm(mma, target, tCrA[at], tCrB[at], target)
            with cute.arch.elect_one():
                tcgen05.commit(bars.empty + stage)
            stage, phase = advance(stage, phase, self.stages)
        with cute.arch.elect_one():
            tcgen05.commit(bars.acc_full + acc)
        return stage, phase


class TileKernel:
    """C [128·ctas, tile_n] FP32 = A [128·ctas, K] · B [tile_n, K]ᵀ, both BF16.

    Config:
        ctas: 1 or 2, the MMA's cta_group.
        tile_n: 128 or 256 columns.
        parts: the accumulator is stored to C and reloaded into tensor memory ``parts`` - 1 times along K.
        scaled: A and B are E4M3 with E8M0 scales in the hardware's tiles (two CTAs, 256 columns).
    """

    def __init__(self, ctas: int, tile_n: int, parts: int = 1, scaled: bool = False):
        self.ctas, self.tile_n, self.parts, self.scaled = ctas, tile_n, parts, scaled
        if scaled:
            self.mainloop = sm100_mxfp8.Mainloop(tile_n, STAGES)
        elif ctas == 2:
            self.mainloop = sm100.Mainloop(tile_n, STAGES, 0)
        else:
            self.mainloop = OneCta(tile_n, STAGES)

    @cute.jit
    def __call__(
        self,
        a: Int64,
        b: Int64,
        a_scales: Int64,
        b_scales: Int64,
        c: Int64,
        k: Int32,
        stream: cuda.CUstream,
    ):
        """K is a multiple of 64·parts, with ``scaled`` of 128."""
        main = self.mainloop
        main.setup()
        rows = Int32(128 * self.ctas)
        width = k // 2 if self.scaled else k  # TMA moves pairs of E4M3 as BF16
        tma_a = main.tma_a(matrix(a, rows, width))
        tma_b = main.tma_b_half(matrix(b, Int32(self.tile_n), width))
        scales = None
        if cutlass.const_expr(self.scaled):
            scales = (
                main.tma_scales(a_scales, rows, k),
                main.tma_scales(b_scales, Int32(self.tile_n), k),
            )
        array = cute.struct.MemRange
        fields = {**main.storage(), "tmem": array[Int32, 2], **main.buffers()}
        self.storage = cute.struct(type("Storage", (), {"__annotations__": fields}))
        self.kernel(tma_a, tma_b, scales, c, width // 64).launch(
            grid=(self.ctas, 1, 1),
            block=(32 * WARPS, 1, 1),
            cluster=(self.ctas, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, tma_a, tma_b, scales, c: Int64, k_tiles: Int32):
        main = self.mainloop
        main.setup()
        storage = SmemAllocator().allocate(self.storage)
        bars = main.bars(storage)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        word = storage.tmem.data_ptr()
        if warp == LOAD_WARP:
            if cute.arch.lane_idx() == 0:
                main.init_barriers(bars)
            cute.arch.mbarrier_init_fence()
        if warp == MMA_WARP:
            cute.arch.alloc_tmem(TMEM_COLUMNS, word, is_two_cta=self.ctas == 2)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=self.ctas == 2)
            ptx.tcgen05_before_sync()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        ptx.tcgen05_after_sync()
        tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, word)
        steps = k_tiles // self.parts
        if warp == LOAD_WARP:
            self.load(storage, bars, tma_a, tma_b, scales, steps)
        elif warp == MMA_WARP:
            if cute.arch.block_idx()[0] == 0:
                self.multiply(storage, bars, tmem, steps)
        else:
            self.read(bars, main.worker(warp, tmem.toint()), c, steps)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if warp == MMA_WARP:
            cute.arch.dealloc_tmem(tmem, TMEM_COLUMNS, is_two_cta=self.ctas == 2)

    @cute.jit
    def load(self, storage, bars, tma_a, tma_b, scales, steps: Int32):
        """All stages of all parts."""
        main = self.mainloop
        a = main.partition(tma_a, view(storage.sA, main.a_layout), main.CTA_ROWS)
        b = main.partition(tma_b, view(storage.sB, main.b_half_layout), main.half_n)
        stage, phase = Int32(0), Int32(0)
        zero, one = Int32(0), Int32(1)
        for part in cutlass.range_constexpr(self.parts):
            first = steps * part
            if cutlass.const_expr(self.scaled):
                of = main.partition_scales(storage, scales[0], scales[1], scales[1])
                stage, phase = main.load_scaled_tile(
                    bars, a, zero, b, zero, b, one, of, zero, steps, stage, phase
                )
            elif cutlass.const_expr(self.ctas == 2):
                stage, phase = main.load_tile(
                    bars,
                    a,
                    True,
                    zero,
                    b,
                    zero,
                    b,
                    one,
                    zero,
                    steps,
                    stage,
                    phase,
                    shares=zero,
                    k_first=first,
                )
            else:
                stage, phase = main.load_tile(bars, a, b, steps, stage, phase, first)
        main.finish_loads(bars, stage, phase)

    @cute.jit
    def multiply(self, storage, bars, tmem, steps: Int32):
        """Each part into the next accumulator; from the second on, onto what the epilogue reloaded."""
        main = self.mainloop
        stage, phase = Int32(0), Int32(0)
        acc, acc_phase = Int32(0), Int32(0)
        for part in cutlass.range_constexpr(self.parts):
            if cutlass.const_expr(self.scaled):
                stage, phase = main.mma_scaled_tile(
                    bars, storage, tmem.toint(), steps, stage, phase, acc, acc_phase
                )
            else:
                fragments = main.fragments(storage, tmem)
                set_phase = Int32((part + 1) % 2)
                is_set = Boolean(True) if part and self.ctas == 2 else part > 0
                stage, phase = main.mma_tile(
                    bars, *fragments, steps, stage, phase, acc, acc_phase, is_set, set_phase
                )
            acc, acc_phase = advance(acc, acc_phase, main.acc_stages)

    @cute.jit
    def read(self, bars, worker, c: Int64, steps: Int32):
        """Store each part's accumulator to C, and reload it for the next part."""
        main = self.mainloop
        row = cute.arch.block_idx()[0] * 128 + worker.row
        target = c + Int64(row) * (4 * self.tile_n)
        acc, phase = Int32(0), Int32(0)
        for part in cutlass.range_constexpr(self.parts):
            if cutlass.const_expr(part > 0):
                for first in cutlass.range_constexpr(0, self.tile_n, 32):
                    values = []
                    for i in cutlass.range_constexpr(8):
                        values += [*ptx.load_f32_4(target + 4 * first + 16 * i)]
                    main.set_first(worker, acc, first, values)
                main.hand_first(bars)
            at, phase = main.take(worker, bars, steps, acc, phase)
            for first in cutlass.range_constexpr(0, self.tile_n, 32):
                (values,) = main.columns(worker, at, first)
                for i in cutlass.range_constexpr(8):
                    ptx.store_f32_4(target + 4 * first + 16 * i, values[4 * i : 4 * i + 4])
            acc, phase = main.give_back(worker, bars, at, phase)
