"""Number formats: conversions with PTX rounding, scalar code for compiled callers."""

import math

import numpy as np

from mok.tools.emulator.intrinsics import bits_f32, f32_bits, fma32
from mok.tools.emulator.jit import njit

_I = np.int64


@njit
def bf16_rn(x):
    """FP32 to BF16 bits, round to nearest even; NaN becomes 0x7FFF."""
    b = f32_bits(x)
    if (b & 0x7FFFFFFF) > 0x7F800000:
        return _I(0x7FFF)
    return (b + 0x7FFF + ((b >> 16) & 1)) >> 16 & 0xFFFF


@njit
def bf16_f32(b):
    return bits_f32((b & 0xFFFF) << 16)


@njit
def f16_f32(h):
    """FP16 bits to FP32."""
    sign = (h >> 15) & 1
    e = (h >> 10) & 31
    m = h & 1023
    if e == 31:
        r = math.inf if m == 0 else math.nan
    elif e == 0:
        r = m * 2.0**-24
    else:
        r = (1024 + m) * 2.0 ** (e - 25)
    return np.float32(-r if sign else r)


@njit
def small_float(x, ebits, mbits, bias, has_inf, has_nan_only_top, saturate, rz):
    """FP64 value to a small binary format, round to nearest even (or toward zero).

    ``has_inf``: IEEE specials.  Otherwise the top code is NaN (E4M3).  ``saturate`` clamps
    overflow to the largest finite value instead of producing a special.
    """
    neg = math.copysign(1.0, x) < 0
    sign = _I(1) << (ebits + mbits) if neg else _I(0)
    emax = (_I(1) << ebits) - 1
    nan = (emax << mbits) | ((_I(1) << mbits) - 1)
    if math.isnan(x):
        if has_inf:
            return nan
        return nan | (sign if has_nan_only_top else _I(0))
    a = abs(x)
    if has_inf:
        top = ((emax - 1) << mbits) | ((_I(1) << mbits) - 1)
    else:
        top = nan - 1 if has_nan_only_top else nan
    if math.isinf(x):
        return sign | (top if saturate else (emax << mbits if has_inf else nan))
    if a == 0.0:
        return sign
    e = _I(math.floor(math.log2(a)))
    if 2.0**e > a:
        e -= 1
    elif 2.0 ** (e + 1) <= a:
        e += 1
    if e < 1 - bias:
        e = _I(1 - bias)
    q = a / 2.0 ** (e - mbits)  # exact: scaling by a power of two
    f = math.floor(q)
    r = q - f
    n = _I(f)
    if not rz and (r > 0.5 or (r == 0.5 and (n & 1))):
        n += 1
    # At the lowest exponent n is the code itself: subnormals run into the first normal number.
    code = n if e == 1 - bias else ((e + bias - 1) << mbits) + n
    if code > top:
        code = top if saturate else (emax << mbits if has_inf else nan)
    return sign | code


@njit
def f16_rn(x):
    """FP32 to FP16 bits, round to nearest even."""
    return small_float(np.float64(x), 5, 10, 15, True, False, False, False)


@njit
def e4m3_rn(x):
    """FP32 to E4M3 with saturation to ±448; NaN becomes 0x7F."""
    if math.isnan(x):
        return _I(0x7F)
    return small_float(np.float64(x), 4, 3, 7, False, True, True, False)


@njit
def e5m2_rn(x):
    if math.isnan(x):
        return _I(0x7F)
    return small_float(np.float64(x), 5, 2, 15, True, False, True, False)


@njit
def e4m3_f32(c):
    s = -1.0 if c & 0x80 else 1.0
    e = (c >> 3) & 15
    m = c & 7
    if e == 15 and m == 7:
        return np.float32(math.nan)
    if e == 0:
        return np.float32(s * m * 2.0**-9)
    return np.float32(s * (8 + m) * 2.0 ** (e - 10))


@njit
def e5m2_f32(c):
    return f16_f32((c & 0xFF) << 8)


@njit
def ue8m0_code(x, up):
    """|FP32| to a power-of-two exponent code: rounds up or toward zero, saturating."""
    if math.isnan(x):
        return _I(255)
    b = f32_bits(np.float32(abs(x)))
    e = b >> 23
    m = b & 0x7FFFFF
    if e == 255:
        return _I(254)
    if up:
        if e == 0:
            return _I(0) if m <= 0x400000 else _I(1)
        if m:
            e += 1
    return e if e < 255 else _I(254)


@njit
def ue8m0_f32(c):
    return bits_f32(_I(0x7F800001) if c == 255 else (_I(0x400000) if c == 0 else c << 23))


@njit
def ftz(x):
    """Flushes FP32 subnormals to zero of the same sign."""
    b = f32_bits(x)
    return bits_f32(b & 0x80000000) if (b & 0x7F800000) == 0 else x


@njit
def pair_op(kind, half, a, b, c):
    """fma, add, sub, mul, min, max on two packed BF16 (half = 0) or FP16 (half = 1) values."""
    out = _I(0)
    for s in range(0, 32, 16):
        if half == 0:
            x, y, z = bf16_f32(a >> s), bf16_f32(b >> s), bf16_f32(c >> s)
        else:
            x, y, z = f16_f32(a >> s), f16_f32(b >> s), f16_f32(c >> s)
        r = scalar_op(kind, x, y, z)
        out |= (bf16_rn(r) if half == 0 else f16_rn(r)) << s
    return out


@njit
def scalar_op(kind, x, y, z):
    if kind == 0:
        return np.float32(np.float64(x) * np.float64(y) + np.float64(z))
    if kind == 1:
        return np.float32(x + y)
    if kind == 2:
        return np.float32(x - y)
    if kind == 3:
        return np.float32(x * y)
    if kind == 4:
        return min_f32(x, y)
    return max_f32(x, y)


@njit
def pair32_op(kind, a, b, c):
    """fma, add, sub, mul on two packed FP32 values in a 64-bit register."""
    out = _I(0)
    for s in range(0, 64, 32):
        x, y, z = bits_f32(a >> s), bits_f32(b >> s), bits_f32(c >> s)
        if kind == 0:
            r = fma32(x, y, z)
        elif kind == 1:
            r = np.float32(x + y)
        elif kind == 2:
            r = np.float32(x - y)
        else:
            r = np.float32(x * y)
        out |= f32_bits(r) << s
    return out


@njit
def min_f32(x, y):
    """PTX min: a NaN operand is ignored, -0 is below +0."""
    if math.isnan(x):
        return bits_f32(_I(0x7FFFFFFF)) if math.isnan(y) else y
    if math.isnan(y) or x < y:
        return x
    if x == y:
        return x if f32_bits(x) & 0x80000000 else y
    return y


@njit
def max_f32(x, y):
    if math.isnan(x):
        return bits_f32(_I(0x7FFFFFFF)) if math.isnan(y) else y
    if math.isnan(y) or x > y:
        return x
    if x == y:
        return y if f32_bits(x) & 0x80000000 else x
    return y


@njit
def to_int(x, rounding, low, high):
    """FP64 to integer with PTX rounding (0 nearest even, 1 zero, 2 down, 3 up) and saturation."""
    if math.isnan(x):
        return _I(0)
    if rounding == 0:
        r = np.rint(x)
    elif rounding == 1:
        r = np.trunc(x)
    elif rounding == 2:
        r = np.floor(x)
    else:
        r = np.ceil(x)
    if r < low:
        r = low
    if r > high:
        r = high
    if r >= 9223372036854775808.0:
        if high > 1e19:  # unsigned 64
            return _I(-1) if r >= 18446744073709551615.0 else np.int64(np.uint64(r))
        return _I(0x7FFFFFFFFFFFFFFF)
    return _I(r)


@njit
def prmt(a, b, selector):
    """Byte permute, default mode."""
    out = _I(0)
    both = (b & 0xFFFFFFFF) << 32 | (a & 0xFFFFFFFF)
    for i in range(4):
        s = (selector >> (4 * i)) & 15
        byte = (both >> (8 * (s & 7))) & 255
        if s & 8:
            byte = _I(255) if byte & 128 else _I(0)
        out |= byte << (8 * i)
    return out


@njit
def lop3(a, b, c, table):
    out = _I(0)
    for i in range(8):
        if (table >> i) & 1:
            t = a if i & 4 else ~a
            t &= b if i & 2 else ~b
            t &= c if i & 1 else ~c
            out |= t
    return out & 0xFFFFFFFF


@njit
def bfe(a, pos, length, width, signed):
    pos, length = pos & 255, length & 255
    if length == 0:
        return _I(0)
    msb = width - 1
    top = pos + length - 1
    sign = (a >> (top if top < msb else msb)) & 1 if signed else _I(0)
    out = _I(0)
    for i in range(width):
        bit = (a >> (pos + i)) & 1 if i < length and pos + i <= msb else sign
        out |= bit << i
    return out


@njit
def bfi(a, b, pos, length, width):
    pos, length = pos & 255, length & 255
    out = b
    for i in range(length):
        if pos + i < width:
            one = _I(1) << (pos + i)
            out = (out & ~one) | (((a >> i) & 1) << (pos + i))
    return out


@njit
def funnel(lo, hi, n, left, clamp):
    n = n & 0xFFFFFFFF
    n = (32 if n > 32 else n) if clamp else n & 31
    both = hi << 32 | lo
    if left:
        return np.int64(np.uint64(both) >> np.uint64(32 - n)) & 0xFFFFFFFF
    return np.int64(np.uint64(both) >> np.uint64(n)) & 0xFFFFFFFF if n < 32 else hi & 0xFFFFFFFF


@njit
def bfind(a, width, signed, shift):
    if signed and (a >> (width - 1)) & 1:
        a = ~a
    if width == 32:
        a &= 0xFFFFFFFF
    for i in range(width - 1, -1, -1):
        if (a >> i) & 1:
            return _I(width - 1 - i) if shift else _I(i)
    return _I(0xFFFFFFFF)
