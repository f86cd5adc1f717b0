"""Every inline PTX function makes the instruction that its docstring names."""

import inspect

import pytest

pytest.importorskip("cutlass")

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, cute

from mok.kernels_cute import ptx
from tests.helpers import opcodes
from tests.kernels_cute.test_ptx_sm100 import CLUSTER, TENSOR


class OneFunction:
    """A kernel that calls one function on values the compiler cannot know and stores the result."""

    def __init__(self, body):
        self.body = body

    @cute.jit
    def __call__(self, address: Int64, word: Uint32, number: Float32, stream: cuda.CUstream):
        self.kernel(address, word, number).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, address: Int64, word: Uint32, number: Float32):
        result = self.body(address, word, number)
        if cutlass.const_expr(result is not None):
            out = cute.make_ptr(type(result), address, cute.AddressSpace.gmem, assumed_align=4)
            out[cute.arch.thread_idx()[0]] = result


@pytest.fixture
def compiled_ptx(tmp_path):
    """PTX of ``OneFunction``; what the compiler keeps goes to the test's own folder."""

    def build(body, arch):
        options = f"--gpu-arch {arch} --keep-ptx --dump-dir '{tmp_path}'"
        arguments = (Int64(16), Uint32(1), Float32(1.0), cuda.CUstream(0))
        return cute.compile(OneFunction(body), *arguments, options=options).__ptx__

    return build


def drop(value):
    """For instructions that must stay although nobody uses what they load."""


CASES = {
    "mul_rn": (lambda a, w, x: ptx.mul_rn(x, x), "mul.rn.f32"),
    "sub_rn": (lambda a, w, x: ptx.sub_rn(x, x), "sub.rn.f32"),
    "add_rn": (lambda a, w, x: ptx.add_rn(x, x), "add.rn.f32"),
    "fma_rn": (lambda a, w, x: ptx.fma_rn(x, x, Float32(1.0)), "fma.rn.f32"),
    "mad_wide": (
        lambda a, w, x: ptx.store_16(ptx.mad_wide(Int32(w), Int32(w), a), w, w, w, w),
        "mad.wide.u32",
    ),
    "ex2": (lambda a, w, x: ptx.ex2(x), "ex2.approx.ftz.f32"),
    "rcp": (lambda a, w, x: ptx.rcp(x), "rcp.approx.ftz.f32"),
    "min_nan": (lambda a, w, x: ptx.min_nan(x, Float32(1.0)), "min.NaN.f32"),
    "max_nan": (lambda a, w, x: ptx.max_nan(x, Float32(1.0)), "max.NaN.f32"),
    "pack_bf16": (lambda a, w, x: ptx.pack_bf16(x, Float32(2.0)), "cvt.rn.bf16x2.f32"),
    "bf16_low": (lambda a, w, x: ptx.bf16_low(w), "shl.b32"),
    "bf16_high": (lambda a, w, x: ptx.bf16_high(w), "and.b32"),
    "stmatrix_x4": (
        lambda a, w, x: ptx.stmatrix_x4(Int32(w), w, w, w, w),
        "stmatrix.sync.aligned.m8n8.x4.shared.b16",
    ),
    "cp_async_16": (
        lambda a, w, x: ptx.cp_async_16(Int32(w), a, Int32(w)),
        "cp.async.cg.shared.global.L2::128B",
    ),
    "copy_async_16": (
        lambda a, w, x: ptx.copy_async_16(Int32(w), a),
        "cp.async.cg.shared.global.L2::128B",
    ),
    "mul_hi": (lambda a, w, x: ptx.mul_hi(Int32(w), Int32(w)), "mul.hi.u32"),
    "load_16": (lambda a, w, x: ptx.load_16(a)[3], "ld.global.L1::no_allocate.v4.b32"),
    "load_16_if": (
        lambda a, w, x: ptx.load_16_if(a, w > 0)[3],
        "ld.global.L1::no_allocate.v4.b32",
    ),
    "load_if int32": (lambda a, w, x: ptx.load_if(a, w > 0, Int32(-1)), "ld.global.b32"),
    "load_if float32": (lambda a, w, x: ptx.load_if(a, w > 0, x), "ld.global.b32"),
    "load_if int64": (lambda a, w, x: Int32(ptx.load_if(a, w > 0, a)), "ld.global.b64"),
    "load_s16_if": (lambda a, w, x: ptx.load_s16_if(a, w > 0, Int32(w)), "ld.global.s16"),
    "unpack_bf16": (lambda a, w, x: ptx.unpack_bf16(w)[1], "and.b32"),
    "stmatrix_x4_trans": (
        lambda a, w, x: ptx.stmatrix_x4_trans(Int32(w), w, w, w, w),
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16",
    ),
    "load_bf16": (lambda a, w, x: ptx.load_bf16(a), "ld.global.b16"),
    "store_bf16": (lambda a, w, x: ptx.store_bf16(a, x), "st.global.b16"),
    "store_f32": (lambda a, w, x: ptx.store_f32(a, x), "st.global.b32"),
    "ldmatrix_x4": (
        lambda a, w, x: ptx.ldmatrix_x4(Int32(w))[3],
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16",
    ),
    "load_f32": (lambda a, w, x: ptx.load_f32(a), "ld.global.L1::no_allocate.b32"),
    "store_16": (lambda a, w, x: ptx.store_16(a, w, w, w, w), "st.global.v4.b32"),
    "acquire_gpu": (lambda a, w, x: drop(ptx.acquire_gpu(a)), "ld.acquire.gpu.global.b32"),
    "acquire_sys": (lambda a, w, x: drop(ptx.acquire_sys(a)), "ld.acquire.sys.global.b32"),
    "nanosleep": (lambda a, w, x: ptx.nanosleep(100), "nanosleep.u32"),
    "trap": (lambda a, w, x: ptx.trap(), "trap"),
}
FP8 = {
    "max_pairs": (lambda a, w, x: ptx.max_pairs(w, w), "max.bf16x2"),
    "as_f32": (lambda a, w, x: ptx.as_f32(Int32(w)), "mov.b32"),
    "pack_e4m3": (lambda a, w, x: ptx.pack_e4m3(x, x, x, x), "cvt.rn.satfinite.e4m3x2.f32"),
    "unpack_e4m3": (lambda a, w, x: ptx.unpack_e4m3(w)[3], "cvt.rn.f16x2.e4m3x2"),
    "shared_load_16": (lambda a, w, x: ptx.shared_load_16(Int32(w))[1], "ld.shared.v4.b32"),
    "shared_load_4": (lambda a, w, x: ptx.shared_load_4(Int32(w)), "ld.shared.b32"),
    "load_4": (lambda a, w, x: ptx.load_4(a), "ld.global.L1::no_allocate.b32"),
    "bulk_load": (
        lambda a, w, x: ptx.bulk_load(Int32(w), a, Int32(w), Int32(w)),
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes",
    ),
    "bulk_store": (
        lambda a, w, x: ptx.bulk_store(a, Int32(w), Int32(w)),
        "cp.async.bulk.global.shared::cta.bulk_group",
    ),
    "store_8": (lambda a, w, x: ptx.store_8(a, w, w), "st.global.v2.b32"),
    "store_4": (lambda a, w, x: ptx.store_4(a, w), "st.global.b32"),
    "store_1": (lambda a, w, x: ptx.store_1(a, w), "st.global.b8"),
    "load_1_if": (lambda a, w, x: ptx.load_1_if(a, w > 0), "ld.global.L1::no_allocate.u8"),
}


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", CASES)
def test_instruction(name, arch, compiled_ptx):
    body, instruction = CASES[name]
    text = compiled_ptx(body, arch)
    assert opcodes(text)[instruction] == 1
    if name.startswith("load") and "_if" in name:
        (line,) = [line for line in text.splitlines() if instruction in line]
        assert line.lstrip().startswith("@p ")


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", FP8)
def test_fp8_instruction(name, arch, compiled_ptx):
    body, instruction = FP8[name]
    found = opcodes(compiled_ptx(body, arch))[instruction]
    assert found >= 1 if instruction == "mov.b32" else found == (2 if "e4m3" in name else 1)


def test_every_function_is_tested():
    functions = inspect.getmembers(ptx, inspect.isfunction)
    own = {name for name, f in functions if f.__module__ == ptx.__name__ and name[0] != "_"}
    assert {name.split()[0] for name in (*CASES, *FP8, *CLUSTER, *TENSOR)} == own


def test_a_load_that_is_off_keeps_the_other_value(compiled_ptx):
    text = compiled_ptx(lambda a, w, x: ptx.load_if(a, Boolean(False), Int32(77)), "sm_90a")
    (line,) = [line for line in text.splitlines() if "ld.global.b32" in line]
    register = line.split()[2].rstrip(",")
    assert f"mov.b32 \t{register}, 77;" in text
