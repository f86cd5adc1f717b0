"""Raw memory and bit operations for compiled code.  Addresses are plain int64 host addresses."""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mok.tools.emulator.jit import njit

M32 = np.int64(0xFFFFFFFF)


def _loader(bits: int, kind: str):
    llvm = {"i": ir.IntType(bits), "f": ir.FloatType(), "d": ir.DoubleType()}[kind]
    result = {"i": types.int64, "f": types.float32, "d": types.float64}[kind]

    @intrinsic
    def load(typingctx, addr):
        def codegen(context, builder, signature, args):
            value = builder.load(builder.inttoptr(args[0], llvm.as_pointer()), align=1)
            if kind == "i" and bits < 64:
                value = builder.zext(value, ir.IntType(64))
            return value

        return result(types.int64), codegen

    return load


def _storer(bits: int):
    llvm = ir.IntType(bits)

    @intrinsic
    def store(typingctx, addr, value):
        def codegen(context, builder, signature, args):
            data = args[1] if bits == 64 else builder.trunc(args[1], llvm)
            builder.store(data, builder.inttoptr(args[0], llvm.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return store


ld8, ld16, ld32, ld64 = (_loader(b, "i") for b in (8, 16, 32, 64))
st8, st16, st32, st64 = (_storer(b) for b in (8, 16, 32, 64))


def _bitcast(source, target, src_llvm, dst_llvm):
    @intrinsic
    def cast(typingctx, value):
        def codegen(context, builder, signature, args):
            (value,) = args
            if isinstance(src_llvm, ir.IntType) and src_llvm.width == 32:
                value = builder.trunc(value, ir.IntType(32))
            value = builder.bitcast(value, dst_llvm)
            if isinstance(dst_llvm, ir.IntType) and dst_llvm.width == 32:
                value = builder.zext(value, ir.IntType(64))
            return value

        return target(source), codegen

    return cast


bits_f32 = _bitcast(types.int64, types.float32, ir.IntType(32), ir.FloatType())
f32_bits = _bitcast(types.float32, types.int64, ir.FloatType(), ir.IntType(32))
bits_f64 = _bitcast(types.int64, types.float64, ir.IntType(64), ir.DoubleType())
f64_bits = _bitcast(types.float64, types.int64, ir.DoubleType(), ir.IntType(64))


def _fma(target, llvm):
    @intrinsic
    def fma(typingctx, a, b, c):
        def codegen(context, builder, signature, args):
            function = cgutils.get_or_insert_function(
                builder.module,
                ir.FunctionType(llvm, [llvm] * 3),
                "llvm.fma." + ("f32" if isinstance(llvm, ir.FloatType) else "f64"),
            )
            return builder.call(function, args)

        return target(target, target, target), codegen

    return fma


fma32 = _fma(types.float32, ir.FloatType())
fma64 = _fma(types.float64, ir.DoubleType())


@intrinsic
def sext32(typingctx, value):
    """Sign-extends the low 32 bits."""

    def codegen(context, builder, signature, args):
        return builder.sext(builder.trunc(args[0], ir.IntType(32)), ir.IntType(64))

    return types.int64(types.int64), codegen


@intrinsic
def sext16(typingctx, value):
    def codegen(context, builder, signature, args):
        return builder.sext(builder.trunc(args[0], ir.IntType(16)), ir.IntType(64))

    return types.int64(types.int64), codegen


@intrinsic
def sext8(typingctx, value):
    def codegen(context, builder, signature, args):
        return builder.sext(builder.trunc(args[0], ir.IntType(8)), ir.IntType(64))

    return types.int64(types.int64), codegen


@intrinsic
def mulhi_u64(typingctx, a, b):
    def codegen(context, builder, signature, args):
        wide = ir.IntType(128)
        product = builder.mul(builder.zext(args[0], wide), builder.zext(args[1], wide))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), ir.IntType(64))

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def mulhi_s64(typingctx, a, b):
    def codegen(context, builder, signature, args):
        wide = ir.IntType(128)
        product = builder.mul(builder.sext(args[0], wide), builder.sext(args[1], wide))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), ir.IntType(64))

    return types.int64(types.int64, types.int64), codegen


def _bit_function(name: str, zero_arg: bool):
    @intrinsic
    def function(typingctx, value):
        def codegen(context, builder, signature, args):
            i64 = ir.IntType(64)
            params = [i64] + ([ir.IntType(1)] if zero_arg else [])
            fn = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(i64, params), f"llvm.{name}.i64"
            )
            extra = [ir.Constant(ir.IntType(1), 0)] if zero_arg else []
            return builder.call(fn, [args[0], *extra])

        return types.int64(types.int64), codegen

    return function


popc64 = _bit_function("ctpop", False)
clz64 = _bit_function("ctlz", True)
ctz64 = _bit_function("cttz", True)
brev64 = _bit_function("bitreverse", False)


@njit(cache=False, inline="always")
def u64(x):
    """Reads a register as unsigned."""
    return np.uint64(x)


@njit(cache=False, inline="always")
def shl64(x, n):
    return np.int64(0) if u64(n) > 63 else x << n


@njit(cache=False, inline="always")
def shr_u64(x, n):
    return np.int64(0) if u64(n) > 63 else np.int64(u64(x) >> u64(n))


@njit(cache=False, inline="always")
def shr_s64(x, n):
    return x >> (np.int64(63) if u64(n) > 63 else n)
