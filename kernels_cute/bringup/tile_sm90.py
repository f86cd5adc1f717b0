"""One wgmma tile: C = A·Bᵀ in FP32, by the layer's own Hopper mainloop.

Warp 0 loads; warps 4 to 11 multiply and store. ``parts`` is the Hopper form of an accumulator that is
stored and reloaded: it lies in registers, not in tensor memory.
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.memory import SmemAllocator

from .. import ptx
from ..gemm import sm90
from ..gemm.operands import view
from ..matrix import matrix

THREADS = 384
STAGES = 3


class TileKernel:
    """C [128, tile_n] FP32 = A [128, K] · B [tile_n, K]ᵀ, both BF16.

    Config:
        tile_n: 128 or 256 columns.
        parts: the accumulator is stored to C and reloaded ``parts`` - 1 times along K.
    """

    def __init__(self, tile_n: int, parts: int = 1):
        self.tile_n, self.parts = tile_n, parts
        self.mainloop = sm90.Mainloop(tile_n, STAGES, 0)

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
        """K is a multiple of 64·parts. There are no scales: Hopper's MMA takes none."""
        main = self.mainloop
        main.setup()
        tma_a = main.tma_a(matrix(a, Int32(128), k))
        tma_b = main.tma_b_half(matrix(b, Int32(self.tile_n), k))
        fields = {**main.storage(), **main.buffers()}
        self.storage = cute.struct(type("Storage", (), {"__annotations__": fields}))
        self.kernel(tma_a, tma_b, c, k // 64).launch(
            grid=(1, 1, 1), block=(THREADS, 1, 1), min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(self, tma_a, tma_b, c: Int64, k_tiles: Int32):
        main = self.mainloop
        main.setup()
        storage = SmemAllocator().allocate(self.storage)
        bars = main.bars(storage)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            if cute.arch.lane_idx() == 0:
                main.init_barriers(bars)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        steps = k_tiles // self.parts
        if warp == 0:
            self.load(storage, bars, tma_a, tma_b, k_tiles)
        elif warp >= 4:
            self.multiply(storage, bars, warp, c, steps)

    @cute.jit
    def load(self, storage, bars, tma_a, tma_b, k_tiles: Int32):
        """All K steps."""
        main = self.mainloop
        a = main.partition(tma_a, view(storage.sA, main.a_layout), main.TILE_M)
        b = main.partition(tma_b, view(storage.sB, main.b_half_layout), main.half_n)
        zero, one = Int32(0), Int32(1)
        main.load_tile(bars, a, True, zero, b, zero, b, one, zero, k_tiles, zero, zero, shares=zero)

    @cute.jit
    def multiply(self, storage, bars, warp, c: Int64, steps: Int32):
        """Each part onto what the part before it stored."""
        main = self.mainloop
        worker = main.worker(warp, storage)
        lane = cute.arch.lane_idx()
        row = (warp // 4 - 1) * 64 + warp % 4 * 16 + lane // 4
        stage, phase = Int32(0), Int32(0)
        for part in cutlass.range_constexpr(self.parts):
            if cutlass.const_expr(part == 0):
                stage, phase = main.take(worker, bars, steps, stage, phase)
            else:
                for i in cutlass.range_constexpr(self.tile_n // 2):
                    worker.acc[i] = ptx.load_f32(self.place(c, row, lane, i))
                stage, phase = main.mma_add_tile(
                    "kk", bars, *worker.operands["kk"], worker.acc, steps, stage, phase
                )
            for i in cutlass.range_constexpr(self.tile_n // 2):
                ptx.store_f32(self.place(c, row, lane, i), Float32(worker.acc[i]))

    def place(self, c: Int64, row: Int32, lane: Int32, i: int) -> Int64:
        """Address of accumulator element ``i`` of a thread: per 8 columns two of its row, two 8 rows below."""
        column = 8 * (i // 4) + i % 2
        return c + Int64((row + i // 2 % 2 * 8) * self.tile_n + lane % 4 * 2 + column) * 4
