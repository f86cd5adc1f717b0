"""Every inline PTX of the project, one small function each.

``tests/kernels_cute/test_ptx.py`` and ``test_ptx_sm100.py`` compile each function and assert the instruction
it makes. Arithmetic stands here because the DSL contracts ``a*b+c`` differently from place to place: explicitly
rounded instructions give one result everywhere. ``inline_ptx`` is treated as having side effects, so none of
these is hoisted out of a loop or merged.
"""

from collections.abc import Sequence

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


def sub_rn(a: Float32, b: Float32) -> Float32:
    """a-b, round to nearest even, never contracted."""
    return cute.arch.inline_ptx(
        "sub.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
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


def copy_async_16(shared_address: Int32, global_address: Int64) -> None:
    """16 bytes global → shared."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global.L2::128B [{$r0}], [{$r1}], 16;",
        read_only_args=[shared_address, global_address],
    )


def mul_hi(a: Int32, b: Int32) -> Int32:
    """The high word of the unsigned product a*b."""
    return cute.arch.inline_ptx(
        "mul.hi.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, b]
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


# ---- clusters and Blackwell ----
#
# Cluster hand-over: a thread writes into the other CTA's shared memory and arrives on its mbarrier with
# cluster scope, and the reader waits with cluster scope. The DSL's own arrive and wait have CTA scope.


# ---- a cluster's shared memory and mbarriers ----


def cluster_address(address: Int32, cta: Int32) -> Int32:
    """Where CTA ``cta`` of the cluster holds what this CTA holds at a shared-memory address."""
    return cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Int32],
        read_only_args=[address, cta],
    )


def cluster_store_16(address: Int32, r0: Uint32, r1: Uint32, r2: Uint32, r3: Uint32) -> None:
    """16 bytes to a ``cluster_address``."""
    cute.arch.inline_ptx(
        "st.shared::cluster.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, r0, r1, r2, r3],
    )


def cluster_load(address: Int32) -> Int32:
    """An int32 from a ``cluster_address``."""
    return cute.arch.inline_ptx(
        "ld.shared::cluster.b32 {$w0}, [{$r0}];",
        write_only_types=[Int32],
        read_only_args=[address],
    )


def cluster_arrive(address: Int32) -> None:
    """Arrive on the mbarrier at a ``cluster_address``; releases what this thread did before it."""
    cute.arch.inline_ptx(
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [{$r0}];",
        read_only_args=[address],
    )


def cluster_wait(address: Int32, parity: Int32) -> None:
    """Wait for a phase of an own mbarrier on which other CTAs arrive; acquires what they released."""
    cute.arch.inline_ptx(
        "{\n\t.reg .pred done;\n\tAGAIN:\n\t"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [{$r0}], {$r1}, 10000000;\n\t"
        "@done bra.uni DONE;\n\tbra.uni AGAIN;\n\tDONE:\n\t}",
        read_only_args=[address, parity],
    )


# ---- tensor memory ----


def tmem_load(*addresses: Int32, width: int = 32) -> list[list[Float32]]:
    """32 (or ``width``: 16) columns of this lane's row from each tensor-memory address.

    An address is lane · 65536 + column.
    """
    count = len(addresses)
    loads = []
    for i in range(count):
        registers = ", ".join(f"{{$w{width * i + j}}}" for j in range(width))
        loads.append(f"tcgen05.ld.sync.aligned.32x32b.x{width}.b32 {{{registers}}}, [{{$r{i}}}];")
    # One block with its wait, so that nothing reads the registers before they are loaded.
    values = cute.arch.inline_ptx(
        "\n\t".join([*loads, "tcgen05.wait::ld.sync.aligned;"]),
        write_only_types=[Float32] * (width * count),
        read_only_args=list(addresses),
    )
    return [list(values[width * i : width * i + width]) for i in range(count)]


def copy_scales(target: Int32, descriptor: Int64) -> None:
    """512 bytes of scales (32 rows of 16) from shared to tensor memory, four columns, once per warp's
    lanes; in both CTAs, each from its own shared memory (one thread)."""
    cute.arch.inline_ptx(
        "tcgen05.cp.cta_group::2.32x128b.warpx4 [{$r0}], {$r1};",
        read_only_args=[target, descriptor],
    )


def mma_mxfp8(
    accumulator: Int32,
    a: Int64,
    b: Int64,
    instruction: Int32,
    a_scales: Int32,
    b_scales: Int32,
    accumulate: Int32,
) -> None:
    """One block-scaled MMA of 32 K for a pair of CTAs: addresses, descriptors (one thread)."""
    cute.arch.inline_ptx(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, {$r6}, 0;\n\t"
        "tcgen05.mma.cta_group::2.kind::mxf8f6f4.block_scale.block32 [{$r0}], {$r1}, {$r2}, {$r3}, "
        "[{$r4}], [{$r5}], p;\n\t}",
        read_only_args=[accumulator, a, b, instruction, a_scales, b_scales, accumulate],
    )


def tmem_store(address: Int32, values: Sequence[Float32]) -> None:
    """32 columns of this lane's row to a tensor-memory address; before others read: ``tmem_store_wait``."""
    registers = ", ".join(f"{{$r{1 + i}}}" for i in range(32))
    cute.arch.inline_ptx(
        f"tcgen05.st.sync.aligned.32x32b.x32.b32 [{{$r0}}], {{{registers}}};",
        read_only_args=[address, *values],
    )


def tmem_store_wait() -> None:
    """Wait until this thread's ``tmem_store``s are done."""
    cute.arch.inline_ptx("tcgen05.wait::st.sync.aligned;")


def tcgen05_before_sync() -> None:
    """Order this thread's earlier tcgen05 operations before the synchronisation that follows."""
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")


def tcgen05_after_sync() -> None:
    """Order this thread's later tcgen05 operations after the synchronisation before it."""
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")


# ---- TMA ----


def tma_gather_4(
    target: Int32, descriptor: Int64, column: Int32, rows: Sequence[Int32], mbarrier: Int32
) -> None:
    """Four rows of a 2-D tensor from ``column`` on; a row outside the tensor arrives as zeros.

    The descriptor's box is one row. ``mbarrier`` may be either CTA's of the pair.
    """
    cute.arch.inline_ptx(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes"
        ".cta_group::2 [{$r0}], [{$r1}, {{$r2}, {$r3}, {$r4}, {$r5}, {$r6}}], [{$r7}];",
        read_only_args=[target, descriptor, column, *rows, mbarrier],
    )


def bulk_load(target: Int32, source: Int64, count: Int32, mbarrier: Int32) -> None:
    """``count`` bytes, a multiple of 16, from global to this CTA's shared memory; the mbarrier gets them as its bytes."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[target, source, count, mbarrier],
    )


def bulk_store(target: Int64, source: Int32, count: Int32) -> None:
    """``count`` bytes, a multiple of 16, from this CTA's shared to global memory, in this thread's bulk group."""
    cute.arch.inline_ptx(
        "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
        read_only_args=[target, source, count],
    )


# ---- wide global accesses ----


def load_32_if(address: Int64, valid: Boolean) -> list[Uint32]:
    """32 bytes from global memory, past L1, where ``valid``; zeros, and no access, elsewhere."""
    zeros = "".join(f"mov.b32 {{$w{i}}}, 0;\n\t" for i in range(8))
    registers = ", ".join(f"{{$w{i}}}" for i in range(8))
    return list(
        cute.arch.inline_ptx(
            f"{{\n\t.reg .pred p;\n\tsetp.ne.b32 p, {{$r1}}, 0;\n\t{zeros}"
            f"@p ld.global.L1::no_allocate.v8.b32 {{{registers}}}, [{{$r0}}];\n\t}}",
            write_only_types=[Uint32] * 8,
            read_only_args=[address, Int32(valid)],
        )
    )


def load_f32_4(address: Int64) -> tuple[Float32, ...]:
    """Four FP32 from global memory."""
    return cute.arch.inline_ptx(
        "ld.global.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Float32] * 4,
        read_only_args=[address],
    )


def store_f32_4(address: Int64, values: Sequence[Float32]) -> None:
    """Four FP32 to global memory."""
    cute.arch.inline_ptx(
        "st.global.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *values],
    )


def shared_store_16(address: Int32, r0: Uint32, r1: Uint32, r2: Uint32, r3: Uint32) -> None:
    """16 bytes to this CTA's shared memory."""
    cute.arch.inline_ptx(
        "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, r0, r1, r2, r3],
    )


# ---- MXFP8 ----


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
