"""Every inline PTX function for clusters and Blackwell makes the instruction that it names."""

import pytest

pytest.importorskip("cutlass")

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from mok.kernels_cute import ptx
from tests.helpers import opcodes


class OneFunction:
    """A kernel that calls one function on values the compiler cannot know and stores the result."""

    def __init__(self, body):
        self.body = body

    @cute.jit
    def __call__(self, address: Int64, word: Int32, stream: cuda.CUstream):
        self.kernel(address, word).launch(
            grid=(2, 1, 1), block=(32, 1, 1), cluster=(2, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, address: Int64, word: Int32):
        result = self.body(address, word)
        if cutlass.const_expr(result is not None):
            out = cute.make_ptr(type(result), address, cute.AddressSpace.gmem, assumed_align=4)
            out[cute.arch.thread_idx()[0]] = result


@pytest.fixture
def compiled_ptx(tmp_path):
    """PTX of ``OneFunction``; what the compiler keeps goes to the test's own folder."""

    def build(body, arch):
        options = f"--gpu-arch {arch} --keep-ptx --dump-dir '{tmp_path}'"
        arguments = (Int64(16), Int32(1), cuda.CUstream(0))
        return cute.compile(OneFunction(body), *arguments, options=options).__ptx__

    return build


def two_loads(address, word):
    (a, b) = ptx.tmem_load(word, word + 32)
    total = Float32(0.0)
    for value in (*a, *b):
        total = total + value
    return total


CLUSTER = {
    "cluster_address": (lambda a, w: ptx.cluster_address(w, w), "mapa.shared::cluster.u32"),
    "cluster_store_16": (
        lambda a, w: ptx.cluster_store_16(w, *[Uint32(w)] * 4),
        "st.shared::cluster.v4.b32",
    ),
    "cluster_load": (lambda a, w: ptx.cluster_load(w), "ld.shared::cluster.b32"),
    "cluster_arrive": (
        lambda a, w: ptx.cluster_arrive(w),
        "mbarrier.arrive.release.cluster.shared::cluster.b64",
    ),
    "cluster_wait": (
        lambda a, w: ptx.cluster_wait(w, w),
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64",
    ),
    "shared_store_16": (
        lambda a, w: ptx.shared_store_16(w, *[Uint32(w)] * 4),
        "st.shared.v4.b32",
    ),
    "load_f32_4": (lambda a, w: ptx.load_f32_4(a)[0], "ld.global.v4.f32"),
    "store_f32_4": (lambda a, w: ptx.store_f32_4(a, [Float32(w)] * 4), "st.global.v4.f32"),
}
TENSOR = {
    "load_32_if": (
        lambda a, w: ptx.load_32_if(a, w != 0)[0],
        "ld.global.L1::no_allocate.v8.b32",
    ),
    "tmem_store": (
        lambda a, w: ptx.tmem_store(w, [Float32(w)] * 32),
        "tcgen05.st.sync.aligned.32x32b.x32.b32",
    ),
    "tmem_store_wait": (lambda a, w: ptx.tmem_store_wait(), "tcgen05.wait::st.sync.aligned"),
    "tmem_load": (two_loads, "tcgen05.ld.sync.aligned.32x32b.x32.b32"),
    "copy_scales": (
        lambda a, w: ptx.copy_scales(w, a),
        "tcgen05.cp.cta_group::2.32x128b.warpx4",
    ),
    "mma_mxfp8": (
        lambda a, w: ptx.mma_mxfp8(w, a, a, w, w, w, w),
        "tcgen05.mma.cta_group::2.kind::mxf8f6f4.block_scale.block32",
    ),
    "tcgen05_before_sync": (
        lambda a, w: ptx.tcgen05_before_sync(),
        "tcgen05.fence::before_thread_sync",
    ),
    "tcgen05_after_sync": (
        lambda a, w: ptx.tcgen05_after_sync(),
        "tcgen05.fence::after_thread_sync",
    ),
    "tma_gather_4": (
        lambda a, w: ptx.tma_gather_4(w, a, w, [w] * 4, w),
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4"
        ".mbarrier::complete_tx::bytes.cta_group::2",
    ),
}


@pytest.mark.parametrize("name", CLUSTER)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_cluster_instruction(name, arch, compiled_ptx):
    body, instruction = CLUSTER[name]
    assert opcodes(compiled_ptx(body, arch))[instruction] == 1


@pytest.mark.parametrize("name", TENSOR)
@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_tensor_instruction(name, arch, compiled_ptx):
    body, instruction = TENSOR[name]
    assert opcodes(compiled_ptx(body, arch))[instruction] == (2 if name == "tmem_load" else 1)


def test_loads_wait_in_the_same_block(compiled_ptx):
    text = compiled_ptx(two_loads, "sm_100a")
    (block,) = [b for b in text.split("// begin inline asm") if "tcgen05.ld" in b]
    inside = block.split("// end inline asm")[0]
    assert inside.count("tcgen05.ld") == 2
    assert inside.index("tcgen05.wait::ld.sync.aligned") > inside.rindex("tcgen05.ld")
