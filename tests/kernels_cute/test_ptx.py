"""Every inline PTX function makes the instruction that its docstring names."""

import cuda.bindings.driver as cuda
import cutlass
import pytest
from cutlass import Boolean, Float32, Int32, Int64, cute

from mok.kernels_cute import ptx
from tests.helpers import opcodes


class OneFunction:
    """A kernel that calls one function on values the compiler cannot know and stores the result."""

    def __init__(self, body):
        self.body = body

    @cute.jit
    def __call__(self, address: Int64, word: Int32, number: Float32, stream: cuda.CUstream):
        self.kernel(address, word, number).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, address: Int64, word: Int32, number: Float32):
        result = self.body(address, word, number)
        if cutlass.const_expr(result is not None):
            out = cute.make_ptr(type(result), address, cute.AddressSpace.gmem, assumed_align=4)
            out[cute.arch.thread_idx()[0]] = result


def compiled_ptx(body, arch):
    arguments = (Int64(16), Int32(1), Float32(1.0), cuda.CUstream(0))
    kernel = OneFunction(body)
    return cute.compile[cute.KeepPTX, cute.GPUArch(arch)](kernel, *arguments).__ptx__


CASES = {
    "fma_rn": (lambda a, w, x: ptx.fma_rn(x, x, Float32(1.0)), "fma.rn.f32"),
    "bf16x2_low": (lambda a, w, x: ptx.bf16x2_low(w), "shl.b32"),
    "bf16x2_high": (lambda a, w, x: ptx.bf16x2_high(w), "and.b32"),
    "pack_bf16x2_rn": (lambda a, w, x: ptx.pack_bf16x2_rn(x, Float32(2.0)), "cvt.rn.bf16x2.f32"),
    "load_if int32": (lambda a, w, x: ptx.load_if(a, w > 0, Int32(-1)), "ld.global.b32"),
    "load_if float32": (lambda a, w, x: ptx.load_if(a, w > 0, x), "ld.global.b32"),
    "load_if int64": (lambda a, w, x: Int32(ptx.load_if(a, w > 0, a)), "ld.global.b64"),
    "load_s16_if": (lambda a, w, x: ptx.load_s16_if(a, w > 0, w), "ld.global.s16"),
    "load_16b_if": (
        lambda a, w, x: ptx.load_16b_if(a, w > 0)[3],
        "ld.global.L1::no_allocate.v4.b32",
    ),
    "store_16b": (lambda a, w, x: ptx.store_16b(a, w, w, w, w), "st.global.v4.b32"),
}


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", CASES)
def test_instruction(name, arch):
    body, instruction = CASES[name]
    text = compiled_ptx(body, arch)
    assert opcodes(text)[instruction] == 1
    if name.startswith("load") and "_if" in name:
        (line,) = [line for line in text.splitlines() if instruction in line]
        assert line.lstrip().startswith("@p ")


def test_every_function_is_tested():
    assert {name.split()[0] for name in CASES} == set(ptx.__all__)


def test_a_load_that_is_off_keeps_the_other_value():
    text = compiled_ptx(lambda a, w, x: ptx.load_if(a, Boolean(False), Int32(77)), "sm_90a")
    (line,) = [line for line in text.splitlines() if "ld.global.b32" in line]
    register = line.split()[2].rstrip(",")
    assert f"mov.b32 \t{register}, 77;" in text
