"""Dispatch in MXFP8: rows pulled in BF16, quantised on their way into the ring.

Four neighbouring lanes hold a block of 32 columns. Where the MMA takes scales, the ring holds E4M3 and the
scales lie beside it in the hardware's tiles; on Hopper it holds the same values as BF16. With MXFP8 on the
wire the rows were quantised on their own rank, by the same functions.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from . import mxfp8, ptx
from .comm import IN_FLIGHT, Rows, source_row
from .sync import select

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
def copy_along_rows(
    source: Int64,
    target: Int64,
    first: Int32,
    count: cutlass.Constexpr[int],
    columns: Int32,
    thread: Int32,
    threads: cutlass.Constexpr[int],
):
    """Rows ``first … first+count`` of bf16 [macrobatch, H], quantised in blocks of 32 rows, expanded again.

    The rows are whole blocks of an expert's segment, and in memory for all threads of the CTA.
    """
    row_bytes = Int64(columns) * 2
    pairs = columns // 2
    for task in cutlass.range(thread, count // mxfp8.BLOCK * pairs, threads, unroll=1):
        block = task // pairs
        at = Int64(first + block * mxfp8.BLOCK) * row_bytes + Int64((task - block * pairs) * 4)
        mxfp8.through_rows(
            lambda row: ptx.load_4(source + at + Int64(row) * row_bytes),
            lambda row, pair: ptx.store_4(target + at + Int64(row) * row_bytes, pair),
            mxfp8.BLOCK,
        )


@cute.jit
def transpose_rows(
    source: Int64,
    source_scales: Int64,
    target: Int64,
    target_scales: Int64,
    first: Int32,
    count: cutlass.Constexpr[int],
    columns: Int32,
    ring_rows: Int32,
    thread: Int32,
    threads: cutlass.Constexpr[int],
):
    """``copy_along_rows`` of e4m3 [macrobatch, H] with scales in tiles, to e4m3 [H, macrobatch] with the same.

    A thread takes four columns of 32 rows.
    """
    groups = columns // 4
    for task in cutlass.range(thread, count // mxfp8.BLOCK * groups, threads, unroll=1):
        block = task // groups
        column, row = (task - block * groups) * 4, first + block * mxfp8.BLOCK
        at = source + Int64(row) * Int64(columns) + Int64(column)
        # Those of 32 rows lie 16 bytes apart.
        codes = source_scales + mxfp8.scale_offset(
            row, column // mxfp8.BLOCK, columns // mxfp8.BLOCK
        )
        words = [ptx.load_4(at + Int64(columns) * i) for i in range(mxfp8.BLOCK)]
        rows = [ptx.load_1_if(codes + 16 * i, Boolean(True)) for i in range(mxfp8.BLOCK)]
        sides = [[], []]
        for word, code in zip(words, rows):
            for side, pair in zip(sides, mxfp8.expand([word], mxfp8.power(code))):
                side.append(pair)
        for i in cutlass.range_constexpr(2):
            mxfp8.store_columns(sides[i], target, target_scales, column + 2 * i, row, ring_rows)


@cute.jit
def pull_quantised_rows(
    rows: Rows,
    first: Int32,
    count: cutlass.Constexpr[int],
    source_base: Int64,
    source_scales: Int64,
    topk: Int32,
    ring: Int64,
    scales: Int64,
    ring_row: Int32,
    expanded: cutlass.Constexpr[bool],
    warp: Int32,
    warps: cutlass.Constexpr[int],
):
    """``pull_rows`` from buffers that hold e4m3 [tokens, H] and plain scales [tokens, H/32]: same bits, half the
    bytes over the link."""
    columns = Int32(rows.row_bytes // 2)
    for i in cutlass.range(warp, count, warps, unroll=1):
        peer = cute.arch.load(rows.peer_rank + first + i, Int32)
        valid = peer >= 0
        token = cute.arch.load(rows.peer_token_idx + first + i, Int32) // topk
        at = Int64(select(valid, peer, Int32(0))) * rows.rank_stride
        token = Int64(select(valid, token, Int32(0)))
        source = source_base + at + token * columns
        codes = source_scales + at + token * (columns // 32)
        if cutlass.const_expr(expanded):
            expand_row(ring, ring_row + i, source, codes, valid, columns)
        else:
            copy_quantised_row(ring, scales, ring_row + i, source, codes, valid, columns)


@cute.jit
def expand_row(ring, row, source, codes, valid, columns):
    """One warp expands a row to BF16, 16 columns per lane at a time; zeros where not ``valid``."""
    target = ring + Int64(row) * Int64(columns) * 2
    first = cute.arch.lane_idx() * 16
    for i in cutlass.range((columns + 2047) // 2048, unroll=1):
        at = [i * 2048 + j * 512 + first for j in range(4)]
        inside = [Int32(valid) * Int32(a < columns) > 0 for a in at]
        data = [ptx.load_16_if(source + Int64(a), ok) for a, ok in zip(at, inside)]
        scale = [ptx.load_1_if(codes + Int64(a // 32), ok) for a, ok in zip(at, inside)]
        for j in cutlass.range_constexpr(4):
            values = mxfp8.expand(data[j], mxfp8.power(scale[j]))
            if at[j] < columns:
                for half in cutlass.range_constexpr(2):
                    to = target + Int64(at[j]) * 2 + 16 * half
                    ptx.store_16(to, *values[4 * half : 4 * half + 4])


@cute.jit
def copy_quantised_row(ring, scales, row, source, codes, valid, columns):
    """One warp copies a row and brings its scales to their tiles; zeros where not ``valid``."""
    target = ring + Int64(row) * Int64(columns)
    first = cute.arch.lane_idx() * 16
    for i in cutlass.range((columns + 2047) // 2048, unroll=1):
        at = [i * 2048 + j * 512 + first for j in range(4)]
        inside = [Int32(valid) * Int32(a < columns) > 0 for a in at]
        data = [ptx.load_16_if(source + Int64(a), ok) for a, ok in zip(at, inside)]
        for j in cutlass.range_constexpr(4):
            if at[j] < columns:
                ptx.store_16(target + Int64(at[j]), *data[j])
    # Four scales at a time: a row's word in one tile.
    for word in cutlass.range(cute.arch.lane_idx(), columns // 128, 32, unroll=1):
        four = ptx.load_if(codes + Int64(4 * word), valid, Int32(0))
        offset = mxfp8.scale_offset(row, 4 * word, columns // 32)
        ptx.store_4(scales + offset, Uint32(four))


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
            ptx.store_8(ring + (Int64(row) * row_bytes + at) // 2, *words)
            if cute.arch.lane_idx() % 16 == 0:
                blocks = Int32(row_bytes // (2 * mxfp8.BLOCK))
                block = Int32(at // (2 * mxfp8.BLOCK))
                ptx.store_4(scales + mxfp8.scale_offset(row, block, blocks), four)
