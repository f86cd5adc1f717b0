"""What atomic operations make of a value, for compiled code."""

import numpy as np

from mok.tools.emulator.intrinsics import bits_f32, bits_f64, f32_bits, f64_bits, sext32, u64
from mok.tools.emulator.jit import njit
from mok.tools.emulator.numerics import max_f32, min_f32, pair_op

_I = np.int64

# Atomic kinds (low byte of I_E) and types (next byte).
A_ADD, A_MIN, A_MAX, A_AND, A_OR, A_XOR, A_EXCH, A_CAS, A_INC, A_DEC = range(10)
T_U, T_S, T_F32, T_F64, T_BF16X2, T_F16X2, T_BF16, T_F16 = range(8)


@njit
def combine(kind, kind_type, size, old, value, compare):
    """New memory value of an atomic operation."""
    if kind == A_EXCH:
        return value
    if kind == A_CAS:
        return value if old == compare else old
    if kind == A_AND:
        return old & value
    if kind == A_OR:
        return old | value
    if kind == A_XOR:
        return old ^ value
    if kind == A_INC:
        return _I(0) if u64(old) >= u64(value) else old + 1
    if kind == A_DEC:
        return value if old == 0 or u64(old) > u64(value) else old - 1
    if kind_type == T_F32:
        x, y = bits_f32(old), bits_f32(value)
        if kind == A_ADD:
            return f32_bits(x + y)
        return f32_bits(min_f32(x, y) if kind == A_MIN else max_f32(x, y))
    if kind_type == T_F64:
        return f64_bits(bits_f64(old) + bits_f64(value))
    if kind_type >= T_BF16X2:
        code = 1 if kind == A_ADD else (4 if kind == A_MIN else 5)
        half = 0 if kind_type in (T_BF16X2, T_BF16) else 1
        return pair_op(code, half, old, value, _I(0))
    if kind == A_ADD:
        return old + value
    if kind_type == T_S:
        x = sext32(old) if size == 4 else old
        y = sext32(value) if size == 4 else value
        return min(x, y) if kind == A_MIN else max(x, y)
    if kind == A_MIN:
        return old if u64(old) < u64(value) else value
    return old if u64(old) > u64(value) else value
