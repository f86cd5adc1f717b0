"""Every inline PTX of the project, one small function each.

``tests/kernels_cute/test_ptx.py`` compiles each function and asserts the instruction it makes. Arithmetic
stands here because the DSL contracts ``a*b+c`` differently from place to place: explicitly rounded
instructions give one result everywhere. ``inline_ptx`` is treated as having side effects, so none of
these is hoisted out of a loop or merged.
"""

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Numeric, Uint32
from cutlass._mlir.dialects import llvm

LOG2_E = 1.4426950408889634

# ---- arithmetic, each with one rounding ----


def mul_rn(a: Float32, b: Float32) -> Float32:
    """a*b, round to nearest even, never contracted."""
    return cute.arch.inline_ptx(
        "mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


def add_rn(a: Float32, b: Float32) -> Float32:
    """a+b, round to nearest even, never contracted."""
    return cute.arch.inline_ptx(
        "add.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


def fma_rn(a: Float32, b: Float32, c: Float32) -> Float32:
    """a*b+c with one rounding."""
    return cute.arch.inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[a, b, c],
    )


def ex2(a: Float32) -> Float32:
    """2**a; relative error below 2**-22 (PTX ISA, ex2.approx.ftz)."""
    return cute.arch.inline_ptx(
        "ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[a]
    )


def rcp(a: Float32) -> Float32:
    """1/a within 1 ulp (PTX ISA, rcp.approx.ftz); 1/inf = 0."""
    return cute.arch.inline_ptx(
        "rcp.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[a]
    )


def min_nan(a: Float32, b: Float32) -> Float32:
    """Minimum that propagates NaN."""
    return cute.arch.inline_ptx(
        "min.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


def max_nan(a: Float32, b: Float32) -> Float32:
    """Maximum that propagates NaN."""
    return cute.arch.inline_ptx(
        "max.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


def pack_bf16(lo: Float32, hi: Float32) -> Uint32:
    """Two FP32 values as BF16x2, each rounded to nearest even; ``lo`` in the low half."""
    return cute.arch.inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Uint32],
        read_only_args=[hi, lo],
    )


def bf16_low(pair: Uint32) -> Float32:
    """The low half of a BF16x2 as FP32, exact."""
    return cute.arch.inline_ptx(
        "{\n\t.reg .b32 t;\n\tshl.b32 t, {$r0}, 16;\n\tmov.b32 {$w0}, t;\n\t}",
        write_only_types=[Float32],
        read_only_args=[pair],
    )


def bf16_high(pair: Uint32) -> Float32:
    """The high half of a BF16x2 as FP32, exact."""
    return cute.arch.inline_ptx(
        "{\n\t.reg .b32 t;\n\tand.b32 t, {$r0}, 0xffff0000;\n\tmov.b32 {$w0}, t;\n\t}",
        write_only_types=[Float32],
        read_only_args=[pair],
    )


def unpack_bf16(pair: Uint32) -> tuple[Float32, Float32]:
    """The low and the high half of a BF16x2 as FP32, exact."""
    return bf16_low(pair), bf16_high(pair)


# ---- data movement ----


def stmatrix_x4(address: Int32, r0: Uint32, r1: Uint32, r2: Uint32, r3: Uint32) -> None:
    """Four 8×8 16-bit matrices of a warp to shared memory; lane l gives the row address of row l."""
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, r0, r1, r2, r3],
    )


def stmatrix_x4_trans(address: Int32, r0: Uint32, r1: Uint32, r2: Uint32, r3: Uint32) -> None:
    """``stmatrix_x4`` of the transposed matrices: lane l gives the address of column l."""
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, r0, r1, r2, r3],
    )


def ldmatrix_x4(address: Int32) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """Four 8×8 16-bit matrices of a warp from shared memory; addresses as for ``stmatrix_x4``."""
    return cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32, Uint32, Uint32, Uint32],
        read_only_args=[address],
    )


def cp_async_16(shared_address: Int32, global_address: Int64, source_bytes: Int32) -> None:
    """16 bytes global → shared, of which ``source_bytes`` (0 or 16) are read and the rest zero-filled."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global.L2::128B [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[shared_address, global_address, source_bytes],
    )


def mad_wide(a: Int32, b: Int32, c: Int64) -> Int64:
    """a*b + c with a 64-bit product of two unsigned numbers: one instruction for a row's address."""
    return cute.arch.inline_ptx(
        "mad.wide.u32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Int64],
        read_only_args=[a, b, c],
    )


def load_16(address: Int64) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """16 bytes from global memory past L1: the rows of a ring are rewritten during the kernel."""
    return cute.arch.inline_ptx(
        "ld.global.L1::no_allocate.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32, Uint32, Uint32, Uint32],
        read_only_args=[address],
    )


def store_16(address: Int64, r0: Uint32, r1: Uint32, r2: Uint32, r3: Uint32) -> None:
    """16 bytes to global memory."""
    cute.arch.inline_ptx(
        "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, r0, r1, r2, r3],
    )


def load_if(address: Int64, valid: Boolean, otherwise: Numeric) -> Numeric:
    """32 or 64 bits from global memory where ``valid``; ``otherwise``, and no access, elsewhere.

    The value has the type of ``otherwise``: Int32, Float32 or Int64. One predicated instruction
    instead of a branch, so several loads can be in flight together.
    """
    kind = type(otherwise)
    register = {Int32: "r", Float32: "f", Int64: "l"}[kind]
    return _load_if(address, valid, otherwise, f"b{kind.width}", register)


def load_s16_if(address: Int64, valid: Boolean, otherwise: Int32) -> Int32:
    """A signed 16-bit integer from global memory, extended; as ``load_if``."""
    return _load_if(address, valid, otherwise, "s16", "r")


def _load_if(address: Int64, valid: Boolean, otherwise: Numeric, width: str, register: str):
    # ``otherwise`` is tied to the result, which therefore keeps its value where the load is off.
    kind = type(otherwise)
    return kind(
        llvm.inline_asm(
            kind.mlir_type,
            [address.ir_value(), Int32(valid).ir_value(), otherwise.ir_value()],
            f"{{\n\t.reg .pred p;\n\tsetp.ne.b32 p, $2, 0;\n\t@p ld.global.{width} $0, [$1];\n\t}}",
            f"={register},l,r,0",
            has_side_effects=True,
        )
    )


def load_16_if(address: Int64, valid: Boolean) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """``load_16`` where ``valid``; four zeros, and no access, elsewhere."""
    return cute.arch.inline_ptx(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, {$r1}, 0;\n\t"
        "mov.b32 {$w0}, 0;\n\tmov.b32 {$w1}, 0;\n\tmov.b32 {$w2}, 0;\n\tmov.b32 {$w3}, 0;\n\t"
        "@p ld.global.L1::no_allocate.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];\n\t}",
        write_only_types=[Uint32, Uint32, Uint32, Uint32],
        read_only_args=[address, Int32(valid)],
    )


def load_f32(address: Int64) -> Float32:
    """One FP32 from global memory past L1: another CTA of this kernel may have written it."""
    return cute.arch.inline_ptx(
        "ld.global.L1::no_allocate.b32 {$w0}, [{$r0}];",
        write_only_types=[Float32],
        read_only_args=[address],
    )


def load_bf16(address: Int64) -> Float32:
    """One BF16 from global memory as FP32, exact."""
    return cute.arch.inline_ptx(
        "{\n\t.reg .b16 h;\n\tld.global.b16 h, [{$r0}];\n\tcvt.f32.bf16 {$w0}, h;\n\t}",
        write_only_types=[Float32],
        read_only_args=[address],
    )


def store_bf16(address: Int64, value: Float32) -> None:
    """One FP32 rounded to nearest even as BF16 to global memory."""
    cute.arch.inline_ptx(
        "{\n\t.reg .b16 h;\n\tcvt.rn.bf16.f32 h, {$r1};\n\tst.global.b16 [{$r0}], h;\n\t}",
        read_only_args=[address, value],
    )


def store_f32(address: Int64, value: Float32) -> None:
    """One FP32 to global memory."""
    cute.arch.inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[address, value])


# ---- waiting and failing ----


def acquire_gpu(address: Int64) -> Int32:
    """A word with acquire semantics in this GPU. Unlike ``cute.arch.load(sem="acquire")``, which the
    compiler may drop when the value is unused, it stays: put it after a relaxed poll has succeeded.
    """
    return cute.arch.inline_ptx(
        "ld.acquire.gpu.global.b32 {$w0}, [{$r0}];",
        write_only_types=[Int32],
        read_only_args=[address],
    )


def acquire_sys(address: Int64) -> Int32:
    """``acquire_gpu`` for signals from other GPUs."""
    return cute.arch.inline_ptx(
        "ld.acquire.sys.global.b32 {$w0}, [{$r0}];",
        write_only_types=[Int32],
        read_only_args=[address],
    )


def nanosleep(ns: int) -> None:
    """Suspend the thread for about ``ns`` nanoseconds."""
    cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[Int32(ns)])


def trap() -> None:
    """Abort the grid: the host sees a launch failure."""
    cute.arch.inline_ptx("trap;")
