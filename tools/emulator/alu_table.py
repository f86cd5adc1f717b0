"""Semantics of every register-to-register operation, as one table, and its compiled form.

An entry is ``name: (result, expression)``.  In the expression ``a0``, ``b0``, ``c0`` are the raw
64-bit registers (32-bit values are kept zero-extended); ``as``/``bs``/``cs`` are 32-bit values
sign-extended; ``af``… FP32; ``ad``… FP64; ``ah``… 16-bit sign-extended; ``x`` is the instruction's
constant.  The result letter says how the value is stored: ``w`` 32-bit, ``q`` 64-bit, ``h``
16-bit, ``f`` FP32, ``d`` FP64, ``p`` predicate.
"""

import importlib.util
import os
import re
import sys
from types import ModuleType

import numpy as np

from mok.tools.emulator.jit import Entry, cache_folder

TABLE: dict[str, tuple[str, str]] = {
    "mov": ("q", "a0"),
    "selp": ("q", "a0 if c0 else b0"),
    "add32": ("w", "a0 + b0"),
    "add64": ("q", "a0 + b0"),
    "add16": ("h", "a0 + b0"),
    "sub32": ("w", "a0 - b0"),
    "sub64": ("q", "a0 - b0"),
    "sub16": ("h", "a0 - b0"),
    "mul_lo16": ("h", "a0 * b0"),
    "mul_lo32": ("w", "a0 * b0"),
    "mul_lo64": ("q", "a0 * b0"),
    "mul_wide_s32": ("q", "as_ * bs"),
    "mul_wide_u32": ("q", "a0 * b0"),
    "mul_wide_s16": ("w", "ah * bh"),
    "mul_wide_u16": ("w", "a0 * b0"),
    "mul_hi_s32": ("w", "(as_ * bs) >> 32"),
    "mul_hi_u32": ("w", "shr_u64(a0 * b0, I(32))"),
    "mul_hi_s64": ("q", "mulhi_s64(a0, b0)"),
    "mul_hi_u64": ("q", "mulhi_u64(a0, b0)"),
    "mad_lo16": ("h", "a0 * b0 + c0"),
    "mad_lo32": ("w", "a0 * b0 + c0"),
    "mad_lo64": ("q", "a0 * b0 + c0"),
    "mad_wide_s32": ("q", "as_ * bs + c0"),
    "mad_wide_u32": ("q", "a0 * b0 + c0"),
    "mad_wide_s16": ("w", "ah * bh + c0"),
    "mad_wide_u16": ("w", "a0 * b0 + c0"),
    "mad_hi_s32": ("w", "((as_ * bs) >> 32) + c0"),
    "mad_hi_u32": ("w", "shr_u64(a0 * b0, I(32)) + c0"),
    "div_s32": ("w", "sdiv(as_, bs)"),
    "div_u32": ("w", "udiv(a0, b0)"),
    "div_s64": ("q", "sdiv(a0, b0)"),
    "div_u64": ("q", "udiv(a0, b0)"),
    "rem_s32": ("w", "as_ - sdiv(as_, bs) * bs"),
    "rem_u32": ("w", "a0 - udiv(a0, b0) * b0"),
    "rem_s64": ("q", "a0 - sdiv(a0, b0) * b0"),
    "rem_u64": ("q", "a0 - udiv(a0, b0) * b0"),
    "min_s32": ("w", "min(as_, bs)"),
    "max_s32": ("w", "max(as_, bs)"),
    "min_u32": ("w", "min(a0, b0)"),
    "max_u32": ("w", "max(a0, b0)"),
    "min_s64": ("q", "min(a0, b0)"),
    "max_s64": ("q", "max(a0, b0)"),
    "min_u64": ("q", "a0 if u64(a0) < u64(b0) else b0"),
    "max_u64": ("q", "a0 if u64(a0) > u64(b0) else b0"),
    "min_s16": ("h", "min(ah, bh)"),
    "max_s16": ("h", "max(ah, bh)"),
    "min_u16": ("h", "min(a0, b0)"),
    "max_u16": ("h", "max(a0, b0)"),
    "neg16": ("h", "-a0"),
    "neg32": ("w", "-a0"),
    "neg64": ("q", "-a0"),
    "abs32": ("w", "abs(as_)"),
    "abs64": ("q", "abs(a0)"),
    "and": ("q", "a0 & b0"),
    "or": ("q", "a0 | b0"),
    "xor": ("q", "a0 ^ b0"),
    "not16": ("h", "~a0"),
    "not32": ("w", "~a0"),
    "not64": ("q", "~a0"),
    "not_pred": ("p", "a0 == 0"),
    "shl16": ("h", "shl64(a0, b0)"),
    "shl32": ("w", "shl64(a0, b0)"),
    "shl64": ("q", "shl64(a0, b0)"),
    "shr_u": ("q", "shr_u64(a0, b0)"),
    "shr_s16": ("h", "shr_s64(ah, b0)"),
    "shr_s32": ("w", "shr_s64(as_, b0)"),
    "shr_s64": ("q", "shr_s64(a0, b0)"),
    "shf_l_wrap": ("w", "funnel(a0, b0, c0, True, False)"),
    "shf_l_clamp": ("w", "funnel(a0, b0, c0, True, True)"),
    "shf_r_wrap": ("w", "funnel(a0, b0, c0, False, False)"),
    "shf_r_clamp": ("w", "funnel(a0, b0, c0, False, True)"),
    "popc": ("w", "popc64(a0)"),
    "clz32": ("w", "clz64(a0) - 32"),
    "clz64": ("w", "clz64(a0)"),
    "brev32": ("w", "shr_u64(brev64(a0), I(32))"),
    "brev64": ("q", "brev64(a0)"),
    "prmt": ("w", "prmt(a0, b0, c0)"),
    "lop3": ("w", "lop3(a0, b0, c0, x)"),
    "bfe_u32": ("w", "bfe(a0, b0, c0, I(32), False)"),
    "bfe_s32": ("w", "bfe(a0, b0, c0, I(32), True)"),
    "bfe_u64": ("q", "bfe(a0, b0, c0, I(64), False)"),
    "bfe_s64": ("q", "bfe(a0, b0, c0, I(64), True)"),
    "bfi32": ("w", "bfi(a0, b0, c0 & 255, c0 >> 8, I(32))"),
    "bfi64": ("q", "bfi(a0, b0, c0 & 255, c0 >> 8, I(64))"),
    "bfind_u32": ("w", "bfind(a0, I(32), False, x != 0)"),
    "bfind_s32": ("w", "bfind(as_, I(32), True, x != 0)"),
    "bfind_u64": ("w", "bfind(a0, I(64), False, x != 0)"),
    # Packing: the second half is b0 shifted by x bits; unpacking: a0 shifted right by x.
    "pack": ("q", "a0 | (b0 << x)"),
    "unpack8": ("q", "shr_u64(a0, x) & 255"),
    "unpack16": ("h", "shr_u64(a0, x)"),
    "unpack32": ("w", "shr_u64(a0, x)"),
    # Integer conversions: sign or zero extension of the source, then the destination's width.
    "sext8_16": ("h", "sext8(a0)"),
    "sext8_32": ("w", "sext8(a0)"),
    "sext8_64": ("q", "sext8(a0)"),
    "sext16_32": ("w", "ah"),
    "sext16_64": ("q", "ah"),
    "sext32_64": ("q", "as_"),
    "zext8": ("q", "a0 & 255"),
    "zext16": ("h", "a0"),
    "zext32": ("w", "a0"),
    # FP32
    "add_f32": ("f", "af + bf"),
    "sub_f32": ("f", "af - bf"),
    "mul_f32": ("f", "af * bf"),
    "fma_f32": ("f", "fma32(af, bf, cf)"),
    "div_f32": ("f", "F(D(af) / D(bf)) if bf != 0 else fdiv0(af, bf)"),
    "min_f32": ("f", "min_f32(af, bf)"),
    "max_f32": ("f", "max_f32(af, bf)"),
    "min_nan_f32": ("f", "bits_f32(I(0x7FFFFFFF)) if isnan(af) or isnan(bf) else min_f32(af, bf)"),
    "max_nan_f32": ("f", "bits_f32(I(0x7FFFFFFF)) if isnan(af) or isnan(bf) else max_f32(af, bf)"),
    "neg_f32": ("w", "a0 ^ 0x80000000"),
    "abs_f32": ("w", "a0 & 0x7FFFFFFF"),
    "rcp_f32": ("f", "F(1.0 / D(af)) if af != 0 else fdiv0(F(1.0), af)"),
    "sqrt_f32": ("f", "F(sqrt(D(af)))"),
    "rsqrt_f32": ("f", "F(1.0 / sqrt(D(af))) if af != 0 else fdiv0(F(1.0), af)"),
    "ex2_f32": ("f", "F(exp2(D(af)))"),
    "lg2_f32": ("f", "F(log2(D(af))) if af != 0 else F(-inf)"),
    "sin_f32": ("f", "F(sin(D(af)))"),
    "cos_f32": ("f", "F(cos(D(af)))"),
    "tanh_f32": ("f", "F(tanh(D(af)))"),
    "copysign_f32": ("w", "(a0 & 0x80000000) | (b0 & 0x7FFFFFFF)"),
    "ftz_f32": ("f", "ftz(af)"),
    "sat_f32": ("f", "F(0.0) if not af > 0 else (F(1.0) if af > 1 else af)"),
    "relu_f32": ("f", "F(0.0) if not af > 0 else af"),
    # FP64
    "add_f64": ("d", "ad + bd"),
    "sub_f64": ("d", "ad - bd"),
    "mul_f64": ("d", "ad * bd"),
    "fma_f64": ("d", "fma64(ad, bd, cd)"),
    "div_f64": ("d", "ad / bd if bd != 0 else ddiv0(ad, bd)"),
    "neg_f64": ("q", "a0 ^ (I(1) << 63)"),
    "abs_f64": ("q", "a0 & 0x7FFFFFFFFFFFFFFF"),
    "min_f64": ("d", "bd if isnan(ad) else (ad if isnan(bd) or ad < bd else bd)"),
    "max_f64": ("d", "bd if isnan(ad) else (ad if isnan(bd) or ad > bd else bd)"),
    "sqrt_f64": ("d", "sqrt(ad)"),
    "rcp_f64": ("d", "1.0 / ad if ad != 0 else ddiv0(1.0, ad)"),
    # Conversions with floating point
    "f32_f64": ("d", "D(af)"),
    "f64_f32": ("f", "F(ad)"),
    "bf16_f32": ("f", "bf16_f32(a0)"),
    "f16_f32": ("f", "f16_f32(a0)"),
    "f32_bf16": ("h", "bf16_rn(af)"),
    "f32_f16": ("h", "f16_rn(af)"),
    "f32_bf16x2": ("w", "bf16_rn(af) << 16 | bf16_rn(bf)"),
    "f32_f16x2": ("w", "f16_rn(af) << 16 | f16_rn(bf)"),
    "f32_e4m3x2": ("h", "e4m3_rn(af) << 8 | e4m3_rn(bf)"),
    "f32_e5m2x2": ("h", "e5m2_rn(af) << 8 | e5m2_rn(bf)"),
    "e4m3x2_f16x2": ("w", "f16_rn(e4m3_f32(a0 >> 8)) << 16 | f16_rn(e4m3_f32(a0))"),
    "e5m2x2_f16x2": ("w", "f16_rn(e5m2_f32(a0 >> 8)) << 16 | f16_rn(e5m2_f32(a0))"),
    "f32_ue8m0x2_rp": ("h", "ue8m0_code(af, True) << 8 | ue8m0_code(bf, True)"),
    "f32_ue8m0x2_rz": ("h", "ue8m0_code(af, False) << 8 | ue8m0_code(bf, False)"),
    "s2f6x2_bf16x2": (  # fixed point, 2 integer bits and 6 of fraction, by scales of b
        "w",
        "bf16_rn(F(sext8(a0 >> 8)) * F(0.015625) * ue8m0_f32(b0 >> 8 & 255)) << 16"
        " | bf16_rn(F(sext8(a0)) * F(0.015625) * ue8m0_f32(b0 & 255))",
    ),
    "ue8m0x2_bf16x2": (
        "w",
        "f32_bits(ue8m0_f32(a0 >> 8 & 255)) & 0xFFFF0000 | f32_bits(ue8m0_f32(a0 & 255)) >> 16",
    ),
    "s32_f32": ("f", "F(as_)"),
    "u32_f32": ("f", "F(a0)"),
    "s64_f32": ("f", "F(a0)"),
    "u64_f32": ("f", "F(u64(a0))"),
    "s32_f64": ("d", "D(as_)"),
    "u32_f64": ("d", "D(a0)"),
    "s64_f64": ("d", "D(a0)"),
    "u64_f64": ("d", "D(u64(a0))"),
    "f32_s32": ("w", "to_int(D(af), x, -2147483648.0, 2147483647.0)"),
    "f32_u32": ("w", "to_int(D(af), x, 0.0, 4294967295.0)"),
    "f32_s64": ("q", "to_int(D(af), x, -9223372036854775808.0, 9223372036854775807.0)"),
    "f32_u64": ("q", "to_int(D(af), x, 0.0, 18446744073709551615.0)"),
    "f64_s32": ("w", "to_int(ad, x, -2147483648.0, 2147483647.0)"),
    "f64_u32": ("w", "to_int(ad, x, 0.0, 4294967295.0)"),
    "f64_s64": ("q", "to_int(ad, x, -9223372036854775808.0, 9223372036854775807.0)"),
    "f64_u64": ("q", "to_int(ad, x, 0.0, 18446744073709551615.0)"),
    "round_f32": ("f", "round_f32(af, x)"),
    # Packed arithmetic; x: 0 fma, 1 add, 2 sub, 3 mul, 4 min, 5 max
    "bf16x2": ("w", "pair_op(x, 0, a0, b0, c0)"),
    "f16x2": ("w", "pair_op(x, 1, a0, b0, c0)"),
    "bf16": ("h", "pair_op(x, 0, a0, b0, c0)"),
    "f16": ("h", "pair_op(x, 1, a0, b0, c0)"),
    "f32x2": ("q", "pair32_op(x, a0, b0, c0)"),
    "testp_nan": ("p", "isnan(af)"),
}

_INT_COMPARES = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
for _name, _op in _INT_COMPARES.items():
    TABLE[f"setp_{_name}_s16"] = ("p", f"ah {_op} bh")
    TABLE[f"setp_{_name}_s32"] = ("p", f"as_ {_op} bs")
    TABLE[f"setp_{_name}_s64"] = ("p", f"a0 {_op} b0")
    TABLE[f"setp_{_name}_u64"] = ("p", f"u64(a0) {_op} u64(b0)")
    _negated = {"ne": "!(a == b)"}.get(_name)
    for _t, _x, _y in (("f32", "af", "bf"), ("f64", "ad", "bd")):
        _nan = f"isnan({_x}) or isnan({_y})"
        TABLE[f"setp_{_name}_{_t}"] = ("p", f"not ({_nan}) and {_x} {_op} {_y}")
        TABLE[f"setp_{_name}u_{_t}"] = ("p", f"{_nan} or {_x} {_op} {_y}")
for _t, _x, _y in (("f32", "af", "bf"), ("f64", "ad", "bd")):
    TABLE[f"setp_num_{_t}"] = ("p", f"not (isnan({_x}) or isnan({_y}))")
    TABLE[f"setp_nan_{_t}"] = ("p", f"isnan({_x}) or isnan({_y})")

NUMBER = {name: i for i, name in enumerate(TABLE)}

_HEADER = '''"""Generated from alu_table.py: a branch per operation, a loop over the lanes."""
from math import copysign, inf, isnan, sqrt
import numpy as np
from numpy import cos, exp2, log2, sin, tanh
from mok.tools.emulator.intrinsics import *
from mok.tools.emulator.jit import Entry, njit
from mok.tools.emulator.numerics import *

I = np.int64
F = np.float32
D = np.float64


@njit(cache=False, inline="always")
def udiv(a, b):
    return I(u64(a) // u64(b)) if b != 0 else I(-1)


@njit(cache=False, inline="always")
def sdiv(a, b):
    if b == 0 or b == -1:
        return -a if b else I(-1)
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


@njit(cache=False, inline="always")
def fdiv0(a, b):
    return F(np.nan) if isnan(a) or a == 0 else F(copysign(inf, a) * copysign(1.0, b))


@njit(cache=False, inline="always")
def ddiv0(a, b):
    return np.nan if isnan(a) or a == 0 else copysign(inf, a) * copysign(1.0, b)


@njit(cache=False, inline="always")
def round_f32(a, mode):
    return F(np.rint(a) if mode == 0 else np.trunc(a) if mode == 1
             else np.floor(a) if mode == 2 else np.ceil(a))

'''

_READ = {
    "0": "ld64({o} + l)",
    "s": "sext32(ld64({o} + l))",
    "h": "sext16(ld64({o} + l))",
    "f": "bits_f32(ld64({o} + l))",
    "d": "bits_f64(ld64({o} + l))",
}
_WRITE = {
    "w": "({e}) & 0xFFFFFFFF",
    "q": "{e}",
    "h": "({e}) & 0xFFFF",
    "f": "f32_bits({e})",
    "d": "f64_bits({e})",
    "p": "I(1) if {e} else I(0)",
}


_GROUP = 16  # operations of one compiled function; a kernel needs only some of them


def _tree(items: list[tuple[int, str]], pad: str) -> str:
    """Binary search over the operation number; the leaves are blocks of code."""
    if len(items) == 1:
        return "".join(f"{pad}{line}\n" for line in items[0][1].splitlines())
    half = len(items) // 2
    return (
        f"{pad}if op < {items[half][0]}:\n{_tree(items[:half], pad + ' ')}"
        f"{pad}else:\n{_tree(items[half:], pad + ' ')}"
    )


def _body(name: str) -> str:
    result, expression = TABLE[name]
    used = sorted(set(re.findall(r"\b([abc])(0|s_?|h|f|d)\b", expression)))
    lines = ["for l in range(0, 256, 8):"]
    lines += [f"    {o}{kind} = {_READ[kind[0]].format(o=o)}" for o, kind in used]
    lines.append(f"    st64(d + l, {_WRITE[result].format(e=expression)})")
    return "\n".join(lines)


def source() -> str:
    """Python source of ``GROUPS``: entries ``(op, d, a, b, c, x)``, whose arguments are row addresses."""
    bodies = [(NUMBER[name], _body(name)) for name in TABLE]
    text, names = _HEADER, []
    for i in range(0, len(bodies), _GROUP):
        tree = _tree(bodies[i : i + _GROUP], "    ")
        text += f"\n\n@Entry\ndef group{i}(op, d, a, b, c, x):\n{tree}    return I(0)\n"
        names.append(f"group{i}")
    return f"{text}\n\nGROUPS = [{', '.join(names)}]\n"


def load() -> ModuleType:
    """Writes the generated module into the cache folder, once, and imports it."""
    name = "mok_emulator_alu"
    if name in sys.modules:
        return sys.modules[name]
    text = source()
    path = cache_folder() / f"{name}.py"
    if not path.exists():
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(text)
        temporary.replace(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def entries(operations: set[int]) -> list[Entry]:
    """What must be compiled to run these operations."""
    groups = load().GROUPS
    return [groups[i] for i in sorted({op // _GROUP for op in operations})]


def addresses(operations: set[int]) -> np.ndarray:
    """Address of the compiled function for each operation number, 0 where it is not needed."""
    groups = load().GROUPS
    table = np.zeros(len(TABLE), dtype=np.int64)
    for op in operations:
        table[op] = groups[op // _GROUP].address
    return table
