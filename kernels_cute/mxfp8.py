"""MXFP8 on the device: each formula once. ``mok.reference.mxfp8`` is the same in torch, bit for bit.

Everything that is quantised was BF16 before, so the scale of a block is integer arithmetic on the bits of
its largest magnitude, the same on every architecture: amax/448 rounded up to a power of two.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from . import ptx
from .sync import select

BLOCK = 32  # elements that share a scale
TILE = 128  # rows and columns of a tile of the hardware's scale layout
TILE_BYTES = 512
MAGNITUDE = 0x7FFF7FFF  # clears the signs of a BF16x2


def magnitude(pairs) -> Uint32:
    """The largest magnitudes of some BF16x2, low halves and high halves apart; NaN does not count."""
    most = Uint32(0)
    for pair in pairs:
        most = ptx.max_pairs(most, pair & Uint32(MAGNITUDE))
    return most


def magnitude_of_lanes(most: Uint32, lanes: int) -> Uint32:
    """``magnitude`` over ``lanes`` neighbouring lanes (a power of two); every lane gets it."""
    step = lanes // 2
    while step > 0:
        most = ptx.max_pairs(most, cute.arch.shuffle_sync_bfly(most, offset=step))
        step //= 2
    return most


def scale_code(most: Uint32) -> Int32:
    """The E8M0 code of a block with these largest magnitudes.

    With a magnitude (1 + m/128)·2^(e-127), amax/448 is at most 2^(e-8-127) exactly where m <= 96. Inf
    gives 254, whose reciprocal is 0: the block's Inf becomes NaN.
    """
    low, high = Int32(most & Uint32(0xFFFF)), Int32(most >> 16)
    bits = select(low > high, low, high)
    # Adding 31 carries into the exponent where m > 96.
    code = ((bits + 31) >> 7) - 8
    return select(bits >= 0x7F80, Int32(254), select(code < 0, Int32(0), code))


def reciprocal(code: Int32) -> Float32:
    """2^(127 - code), 0 for code 254."""
    return ptx.as_f32((254 - code) << 23)


def power(code: Int32) -> Float32:
    """2^(code - 127); the subnormal 2^-127 for code 0."""
    return ptx.as_f32(select(code == 0, Int32(0x400000), code << 23))


def quantise(pairs, factor: Float32) -> list[Uint32]:
    """BF16x2 (an even number of them) times ``reciprocal`` as E4M3, four to a word."""
    values = [value for pair in pairs for value in ptx.unpack_bf16(pair)]
    scaled = [ptx.mul_rn(value, factor) for value in values]
    return [ptx.pack_e4m3(*scaled[i : i + 4]) for i in range(0, len(scaled), 4)]


def expand(words, factor: Float32) -> list[Uint32]:
    """E4M3 words times ``power`` as BF16x2: exact, but for BF16's subnormals."""
    pairs = []
    for word in words:
        a, b, c, d = (ptx.mul_rn(value, factor) for value in ptx.unpack_e4m3(word))
        pairs += [ptx.pack_bf16(a, b), ptx.pack_bf16(c, d)]
    return pairs


def through(pairs, code: Int32) -> list[Uint32]:
    """BF16x2 of a block with scale ``code``, quantised and expanded again."""
    return expand(quantise(pairs, reciprocal(code)), power(code))


def scale_offset(row: Int32, block: Int32, row_blocks: Int32) -> Int64:
    """Byte of the scale of (row, block) in tiles [rows/128, row_blocks/4, 32, 16]."""
    tile = Int64(row // TILE) * Int64(row_blocks // 4) + Int64(block // 4)
    return tile * TILE_BYTES + Int64(row % 32 * 16 + row % TILE // 32 * 4 + block % 4)


def quantise_columns(pairs) -> list[tuple[Int32, list[Uint32]]]:
    """Two neighbouring columns of 32 rows, a BF16x2 per row: each column's code and its 8 words of E4M3."""
    most = magnitude(pairs)
    codes = scale_code(most & Uint32(0xFFFF)), scale_code(most & Uint32(0xFFFF0000))
    columns = []
    for half, code in zip((ptx.bf16_low, ptx.bf16_high), codes):
        scaled = [ptx.mul_rn(half(pair), reciprocal(code)) for pair in pairs]
        words = [ptx.pack_e4m3(*scaled[i : i + 4]) for i in range(0, BLOCK, 4)]
        columns.append((code, words))
    return columns


def store_columns(pairs, target, scales, column, row, rows) -> None:
    """``quantise_columns`` to e4m3 [columns, rows] and its scales in tiles: a block of 32 ``rows`` from ``row``."""
    for i, (code, words) in enumerate(quantise_columns(pairs)):
        to = target + Int64(column + i) * Int64(rows) + Int64(row)
        for half in range(2):
            ptx.store_16(to + 16 * half, *words[4 * half : 4 * half + 4])
        ptx.store_1(scales + scale_offset(column + i, row // BLOCK, rows // BLOCK), Uint32(code))


def through_columns(first: Uint32, second: Uint32, codes: tuple[Int32, Int32]) -> list[Uint32]:
    """Two neighbouring columns of two rows, a BF16x2 per row, quantised with a scale per column and expanded."""
    down = [reciprocal(code) for code in codes] * 2
    up = [power(code) for code in codes] * 2
    values = [*ptx.unpack_bf16(first), *ptx.unpack_bf16(second)]
    word = ptx.pack_e4m3(*(ptx.mul_rn(v, f) for v, f in zip(values, down)))
    a, b, c, d = (ptx.mul_rn(v, f) for v, f in zip(ptx.unpack_e4m3(word), up))
    return [ptx.pack_bf16(a, b), ptx.pack_bf16(c, d)]


@cute.jit
def through_rows(
    load: cutlass.Constexpr, store: cutlass.Constexpr, at_once: cutlass.Constexpr[int]
):
    """Blocks of 32 rows in two neighbouring columns, quantised along the rows and expanded again.

    ``load(row)`` gives a row's BF16x2, ``store(row, pair)`` takes the result. ``at_once`` rows, an even number, are
    on their way together; the rows are read twice, so that no more registers are needed. With all 32 they are
    read once.
    """
    most = Uint32(0)
    held = []
    if cutlass.const_expr(at_once == BLOCK):
        held = [load(row) for row in range(BLOCK)]
        for pair in held:
            most = ptx.max_pairs(most, pair & Uint32(MAGNITUDE))
    else:
        for base in cutlass.range(0, BLOCK, at_once, unroll=1):
            for pair in [load(base + i) for i in range(at_once)]:
                most = ptx.max_pairs(most, pair & Uint32(MAGNITUDE))
    codes = (scale_code(most & Uint32(0xFFFF)), scale_code(most & Uint32(0xFFFF0000)))
    if cutlass.const_expr(at_once == BLOCK):
        store_through(0, held, codes, store)
    else:
        for base in cutlass.range(0, BLOCK, at_once, unroll=1):
            store_through(base, [load(base + i) for i in range(at_once)], codes, store)


def store_through(base, pairs, codes, store) -> None:
    """Rows from ``base`` on, quantised with a scale per column and expanded."""
    for i in range(0, len(pairs), 2):
        for j, pair in enumerate(through_columns(pairs[i], pairs[i + 1], codes)):
            store(base + i + j, pair)
