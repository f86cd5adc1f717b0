"""Quantise a rank's tokens into its heap, for MXFP8 on the wire: E4M3 and plain scales, row by row."""

import cuda.bindings.driver as cuda
from cutlass import Int32, Int64, Uint32, cute

from . import mxfp8, ptx

THREADS = 256
COLUMNS = 8  # of a thread; four threads share a block


def quantise_rows_ctas(tokens: int, hidden: int, num_sms: int) -> int:
    """CTAs to launch: at most 16 per SM, each in a grid-stride loop."""
    return max(1, min(-(-tokens * hidden // (THREADS * COLUMNS)), 16 * num_sms))


class QuantiseRowsKernel:
    """x [T, H] to E4M3 [T, H] and scales [T, H/32], blocks along H."""

    @cute.jit
    def __call__(
        self,
        x: Int64,  # bf16 [T, H]
        data: Int64,  # e4m3 [T, H]
        scales: Int64,  # uint8 [T, H/32]
        elements: Int64,  # T*H, a multiple of 128
        num_ctas: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(x, data, scales, elements).launch(
            grid=(num_ctas, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, x: Int64, data: Int64, scales: Int64, elements: Int64):
        thread = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        step = Int64(cute.arch.grid_dim()[0] * THREADS * COLUMNS)
        # All lanes of a warp take the same number of trips: they exchange magnitudes.
        first = Int64(thread // 32 * 32) * COLUMNS
        lane = Int64(cute.arch.lane_idx() * COLUMNS)
        while first < elements:
            at = first + lane
            pairs = ptx.load_16_if(x + 2 * at, at < elements)
            code = mxfp8.scale_code(mxfp8.magnitude_of_lanes(mxfp8.magnitude(pairs), 4))
            if at < elements:
                ptx.store_8(data + at, *mxfp8.quantise(pairs, mxfp8.reciprocal(code)))
                if cute.arch.lane_idx() % 4 == 0:
                    ptx.store_1(scales + at // mxfp8.BLOCK, Uint32(code))
            first += step
