"""Inline PTX: every instruction that the DSL has no spelling for, one function each.

Each function states the instruction it makes; ``tests/kernels_cute/test_ptx.py`` compiles every one
of them and looks for that instruction. Arithmetic is free of side effects, so that equal
expressions merge; memory accesses are not.
"""

from cutlass import Boolean, Float32, Int32, Int64, Numeric, cute
from cutlass._mlir.dialects import llvm

__all__ = [
    "bf16x2_high",
    "bf16x2_low",
    "fma_rn",
    "load_16b_if",
    "load_if",
    "load_s16_if",
    "pack_bf16x2_rn",
    "store_16b",
]


def _pure(result: type[Numeric], constraints: str, code: str, *operands: Numeric) -> Numeric:
    """One value from register operands: may be merged, moved, or dropped when unused."""
    return result(
        llvm.inline_asm(
            result.mlir_type,
            [operand.ir_value() for operand in operands],
            code,
            constraints,
            has_side_effects=False,
        )
    )


def fma_rn(a: Float32, b: Float32, c: Float32) -> Float32:
    """``fma.rn.f32``: a·b + c with one rounding, whatever the compiler would have contracted."""
    return _pure(Float32, "=f,f,f,f", "fma.rn.f32 $0, $1, $2, $3;", a, b, c)


def bf16x2_low(pair: Int32) -> Float32:
    """``shl.b32``: the low BF16 of a pair as FP32 (exact)."""
    code = "{\n\t.reg .b32 t;\n\tshl.b32 t, $1, 16;\n\tmov.b32 $0, t;\n\t}"
    return _pure(Float32, "=f,r", code, pair)


def bf16x2_high(pair: Int32) -> Float32:
    """``and.b32``: the high BF16 of a pair as FP32 (exact)."""
    code = "{\n\t.reg .b32 t;\n\tand.b32 t, $1, 0xffff0000;\n\tmov.b32 $0, t;\n\t}"
    return _pure(Float32, "=f,r", code, pair)


def pack_bf16x2_rn(low: Float32, high: Float32) -> Int32:
    """``cvt.rn.bf16x2.f32``: two FP32 to a BF16 pair, round to nearest even."""
    return _pure(Int32, "=r,f,f", "cvt.rn.bf16x2.f32 $0, $2, $1;", low, high)


def load_if(address: Int64, valid: Boolean, otherwise: Numeric) -> Numeric:
    """``ld.global.b32`` or ``.b64`` where ``valid``; ``otherwise``, and no access, elsewhere.

    The value has the type of ``otherwise``, Int32, Float32 or Int64, and the address is a multiple
    of its size. One predicated instruction instead of a branch: several can be in flight at once.
    """
    kind = type(otherwise)
    register = {Int32: "r", Float32: "f", Int64: "l"}[kind]
    # Operand 3 is tied to the result, which therefore keeps its value when the load is off.
    return kind(
        llvm.inline_asm(
            kind.mlir_type,
            [address.ir_value(), Int32(valid).ir_value(), otherwise.ir_value()],
            "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, $2, 0;\n\t"
            f"@p ld.global.b{kind.width} $0, [$1];\n\t}}",
            f"={register},l,r,0",
            has_side_effects=True,
        )
    )


def load_s16_if(address: Int64, valid: Boolean, otherwise: Int32) -> Int32:
    """``ld.global.s16`` where ``valid``, sign-extended; ``otherwise``, and no access, elsewhere."""
    return Int32(
        llvm.inline_asm(
            Int32.mlir_type,
            [address.ir_value(), Int32(valid).ir_value(), otherwise.ir_value()],
            "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, $2, 0;\n\t@p ld.global.s16 $0, [$1];\n\t}",
            "=r,l,r,0",
            has_side_effects=True,
        )
    )


def load_16b_if(address: Int64, valid: Boolean) -> tuple[Int32, Int32, Int32, Int32]:
    """``ld.global.L1::no_allocate.v4.b32`` where ``valid``; four zeros and no access elsewhere.

    ``address`` must be a multiple of 16. For data read once: it does not displace L1.
    """
    return cute.arch.inline_ptx(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, {$r1}, 0;\n\t"
        "mov.b32 {$w0}, 0;\n\tmov.b32 {$w1}, 0;\n\tmov.b32 {$w2}, 0;\n\tmov.b32 {$w3}, 0;\n\t"
        "@p ld.global.L1::no_allocate.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];\n\t}",
        write_only_types=[Int32, Int32, Int32, Int32],
        read_only_args=[address, Int32(valid)],
    )


def store_16b(address: Int64, a: Int32, b: Int32, c: Int32, d: Int32) -> None:
    """``st.global.v4.b32``; ``address`` must be a multiple of 16."""
    cute.arch.inline_ptx(
        "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, a, b, c, d],
    )
