"""Dispatch in MXFP8: rows pulled in BF16, quantised on their way into the ring.

Four neighbouring lanes hold a block of 32 columns. Where the MMA takes scales, the ring holds E4M3 and the
scales lie beside it in the hardware's tiles; on Hopper it holds the same values as BF16.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from . import mxfp8, ptx, ptx_fp8
from .comm import IN_FLIGHT, Rows, source_row

LANES = 4  # that share a block: 8 columns each
STEP = 512  # bytes that a warp loads at once: 8 blocks


@cute.jit
def pull_rows(
    rows: Rows,
    first: Int32,
    count: cutlass.Constexpr[int],
    source_base: Int64,
    topk: Int32,
    ring: Int64,
    scales: Int64,
    ring_row: Int32,
    expanded: cutlass.Constexpr[bool],
    warp: Int32,
    warps: cutlass.Constexpr[int],
):
    """Rows ``first … first+count`` from their source ranks' buffer bf16 [tokens, H] to the ring; padding is zero.

    ``ring``: e4m3 [macrobatch, H] with ``scales`` in tiles, or bf16 [macrobatch, H] (``expanded``).
    ``ring_row``: where ``first`` goes.
    """
    for i in cutlass.range(2 * warp, count, 2 * warps, unroll=1):
        peers = [cute.arch.load(rows.peer_rank + first + i + j, Int32) for j in range(2)]
        sources = [source_row(rows, first + i + j, peers[j], source_base, topk) for j in range(2)]
        quantise_rows(
            ring, scales, ring_row + i, sources, [peer >= 0 for peer in peers],
            rows.row_bytes, expanded,
        )  # fmt: skip


@cute.jit
def quantise_rows(ring, scales, row, sources, valid, row_bytes, expanded: cutlass.Constexpr[bool]):
    """One warp quantises neighbouring rows at once; zeros where not ``valid``."""
    lane = Int64(cute.arch.lane_idx() * 16)
    whole = IN_FLIGHT // 2 * STEP
    for i in cutlass.range(Int32((row_bytes + (whole - 1)) // whole), unroll=1):
        at = [Int64(i) * whole + lane + Int64(j * STEP) for j in range(IN_FLIGHT // 2)]
        data = [
            [ptx.load_16_if(source + a, Int32(ok) * Int32(a < row_bytes) > 0) for a in at]
            for source, ok in zip(sources, valid)
        ]
        for j in cutlass.range_constexpr(IN_FLIGHT // 2):
            for r in cutlass.range_constexpr(len(sources)):
                put(ring, scales, row + r, at[j], data[r][j], row_bytes, expanded)


@cute.jit
def put(ring, scales, row, at, pairs, row_bytes, expanded: cutlass.Constexpr[bool]):
    """Quantise the 8 columns of each lane (whole warp) and store those inside the row."""
    most = mxfp8.magnitude_of_lanes(mxfp8.magnitude(pairs), LANES)
    code = mxfp8.scale_code(most)
    inside = at < row_bytes
    if cutlass.const_expr(expanded):
        values = mxfp8.through(pairs, code)
        if inside:
            ptx.store_16(ring + Int64(row) * row_bytes + at, *values)
    else:
        words = mxfp8.quantise(pairs, mxfp8.reciprocal(code))
        group = cute.arch.lane_idx() // LANES % 4
        four = Uint32(code) << Uint32(8 * group)
        four = four | cute.arch.shuffle_sync_bfly(four, offset=4)
        four = four | cute.arch.shuffle_sync_bfly(four, offset=8)
        if inside:
            ptx_fp8.store_8(ring + (Int64(row) * row_bytes + at) // 2, *words)
            if cute.arch.lane_idx() % 16 == 0:
                blocks = Int32(row_bytes // (2 * mxfp8.BLOCK))
                block = Int32(at // (2 * mxfp8.BLOCK))
                ptx_fp8.store_4(scales + mxfp8.scale_offset(row, block, blocks), four)
