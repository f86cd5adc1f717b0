"""The inline PTX that only MXFP8 needs; ``ptx`` holds the rest and its rules."""

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32


def max_pairs(a: Uint32, b: Uint32) -> Uint32:
    """The larger of two BF16x2, half by half; of a NaN and a number the number."""
    # Through a register: packed instructions take no constants.
    return cute.arch.inline_ptx(
        "{\n\t.reg .b32 t;\n\tmov.b32 t, {$r0};\n\tmax.bf16x2 {$w0}, t, {$r1};\n\t}",
        write_only_types=[Uint32],
        read_only_args=[a, b],
    )


def as_f32(bits: Int32) -> Float32:
    """The FP32 value with these bits."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits]
    )


def pack_e4m3(a: Float32, b: Float32, c: Float32, d: Float32) -> Uint32:
    """Four FP32 as E4M3, round to nearest even, saturating at ±448; NaN is 0x7F; ``a`` in the low byte."""
    return cute.arch.inline_ptx(
        "{\n\t.reg .b16 lo, hi;\n\t"
        "cvt.rn.satfinite.e4m3x2.f32 lo, {$r1}, {$r0};\n\t"
        "cvt.rn.satfinite.e4m3x2.f32 hi, {$r3}, {$r2};\n\t"
        "mov.b32 {$w0}, {lo, hi};\n\t}",
        write_only_types=[Uint32],
        read_only_args=[a, b, c, d],
    )


def unpack_e4m3(word: Uint32) -> tuple[Float32, Float32, Float32, Float32]:
    """Four E4M3 as FP32, exact, the low byte first."""
    return cute.arch.inline_ptx(
        "{\n\t.reg .b16 lo, hi, a, b, c, d;\n\t.reg .b32 p, q;\n\t"
        "mov.b32 {lo, hi}, {$r0};\n\t"
        "cvt.rn.f16x2.e4m3x2 p, lo;\n\tcvt.rn.f16x2.e4m3x2 q, hi;\n\t"
        "mov.b32 {a, b}, p;\n\tmov.b32 {c, d}, q;\n\t"
        "cvt.f32.f16 {$w0}, a;\n\tcvt.f32.f16 {$w1}, b;\n\t"
        "cvt.f32.f16 {$w2}, c;\n\tcvt.f32.f16 {$w3}, d;\n\t}",
        write_only_types=[Float32] * 4,
        read_only_args=[word],
    )


def shared_load_16(address: Int32) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """16 bytes of this CTA's shared memory."""
    return cute.arch.inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


def shared_load_4(address: Int32) -> Uint32:
    """Four bytes of this CTA's shared memory."""
    return cute.arch.inline_ptx(
        "ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address]
    )


def load_4(address: Int64) -> Uint32:
    """Four bytes from global memory past L1."""
    return cute.arch.inline_ptx(
        "ld.global.L1::no_allocate.b32 {$w0}, [{$r0}];",
        write_only_types=[Uint32],
        read_only_args=[address],
    )


def store_8(address: Int64, r0: Uint32, r1: Uint32) -> None:
    """8 bytes to global memory."""
    cute.arch.inline_ptx(
        "st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, r0, r1]
    )


def store_4(address: Int64, word: Uint32) -> None:
    """Four bytes to global memory."""
    cute.arch.inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[address, word])


def store_1(address: Int64, word: Uint32) -> None:
    """The low byte of a word to global memory."""
    cute.arch.inline_ptx("st.global.b8 [{$r0}], {$r1};", read_only_args=[address, word])


def load_1_if(address: Int64, valid: Boolean) -> Int32:
    """A byte from global memory past L1 where ``valid``; 0, and no access, elsewhere."""
    return cute.arch.inline_ptx(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, {$r1}, 0;\n\tmov.b32 {$w0}, 0;\n\t"
        "@p ld.global.L1::no_allocate.u8 {$w0}, [{$r0}];\n\t}",
        write_only_types=[Int32],
        read_only_args=[address, Int32(valid)],
    )
