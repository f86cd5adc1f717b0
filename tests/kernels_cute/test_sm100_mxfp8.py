"""The block-scaled mainloop's descriptors against those of the DSL's own MMA and copy, and its budgets."""

import re

import pytest

pytest.importorskip("cutlass")

import cuda.bindings.driver as cuda
import cutlass.utils.blackwell_helpers as helpers
import cutlass.utils.blockscaled_layout as layouts
from cutlass import Float8E4M3FN, Float8E8M0FNU, Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.memory import SmemAllocator

from mok.errors import ResourceError
from mok.kernels_cute.gemm import sm100_mxfp8 as ours
from mok.kernels_cute.machine import SMEM_BYTES, check_tile
from tests.forward_runs import forward_kernel
from tests.helpers import opcodes

TWO = tcgen05.CtaGroup.TWO
TILE = (256, 256, 128)


class TheirMma:
    """One K step as the DSL's tiled MMA and its copy of scales do it."""

    @cute.jit
    def __call__(self, stage: Int32, stream: cuda.CUstream):
        self.kernel(stage).launch(
            grid=(2, 1, 1), block=(32, 1, 1), cluster=(2, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, stage: Int32):
        K = OperandMajorMode.K
        mma = helpers.make_blockscaled_trivial_tiled_mma(
            Float8E4M3FN, Float8E4M3FN, K, K, Float8E8M0FNU, 32, TWO, TILE[:2]
        )
        a_layout = helpers.make_smem_layout_a(mma, TILE, Float8E4M3FN, 2)
        b_layout = helpers.make_smem_layout_b(mma, TILE, Float8E4M3FN, 2)
        sa_layout = layouts.make_smem_layout_sfa(mma, TILE, 32, 2)
        sb_layout = layouts.make_smem_layout_sfb(mma, TILE, 32, 2)
        data, scale = Float8E4M3FN, Float8E8M0FNU

        @cute.struct
        class Storage:
            a: cute.struct.Align[cute.struct.MemRange[data, cute.cosize(a_layout)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[data, cute.cosize(b_layout)], 1024]
            sa: cute.struct.Align[cute.struct.MemRange[scale, cute.cosize(sa_layout)], 1024]
            sb: cute.struct.Align[cute.struct.MemRange[scale, cute.cosize(sb_layout)], 1024]
            tmem: cute.struct.MemRange[Int32, 2]

        storage = SmemAllocator().allocate(Storage)
        tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, storage.tmem.data_ptr())
        A = mma.make_fragment_A(storage.a.get_tensor(a_layout.outer, swizzle=a_layout.inner))
        B = mma.make_fragment_B(storage.b.get_tensor(b_layout.outer, swizzle=b_layout.inner))
        C = cute.make_tensor(tmem, mma.make_fragment_C(mma.partition_shape_C(TILE[:2])).layout)
        one = lambda layout: cute.slice_(layout, (None, None, None, 0))  # noqa: E731
        at = lambda column: cute.recast_ptr(tmem + column, dtype=scale)  # noqa: E731
        SA = cute.make_tensor(at(256), layouts.make_tmem_layout_sfa(mma, TILE, 32, one(sa_layout)))
        SB = cute.make_tensor(at(260), layouts.make_tmem_layout_sfb(mma, TILE, 32, one(sb_layout)))
        for source, target in (
            (storage.sa.get_tensor(sa_layout), SA),
            (storage.sb.get_tensor(sb_layout), SB),
        ):
            source, target = cute.filter_zeros(source), cute.filter_zeros(target)
            atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(TWO), scale)
            tiled = tcgen05.make_s2t_copy(atom, target)
            part = tiled.get_slice(0)
            source = tcgen05.get_s2t_smem_desc_tensor(tiled, part.partition_S(source))
            cute.copy(tiled, source[None, None, None, None, stage], part.partition_D(target))
        mma.set(tcgen05.Field.ACCUMULATE, True)
        k = (None, None, None, stage)
        cute.gemm(mma, C, [A[k], SA], [B[k], SB], C)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ptx")
    options = f"--gpu-arch sm_100a --keep-ptx --dump-dir '{folder}'"
    return cute.compile(TheirMma(), Int32(0), cuda.CUstream(0), options=options).__ptx__


def test_descriptors_are_the_dsls(theirs):
    constants = {int(n) for n in re.findall(r"\bor\.b(?:32|64)\b.*, (\d+);", theirs)}
    assert constants == {ours.INSTRUCTION, ours.OPERAND, ours.SCALE}
    found = opcodes(theirs)
    assert found["tcgen05.cp.cta_group::2.32x128b.warpx4"] == 3
    mma = "tcgen05.mma.cta_group::2.kind::mxf8f6f4.block_scale.block32"
    assert sum(n for name, n in found.items() if name.startswith(mma)) == 4
    # Which byte of a column: the two highest bits of a scale's address.
    steps = {int(n) for n in re.findall(r"add\.s32 \t%r\d+, %r\d+, (-?\d+);", theirs)}
    assert {256 + ours.byte_of(b) for b in range(1, 4)} <= steps
    assert {260 + ours.byte_of(b) for b in range(1, 4)} <= steps


def test_ours_issue_as_many():
    found = opcodes(forward_kernel("sm_100a", direct=False, mxfp8=True).ptx)
    assert found["tcgen05.cp.cta_group::2.32x128b.warpx4"] == 3
    assert found["tcgen05.mma.cta_group::2.kind::mxf8f6f4.block_scale.block32"] == 4
    # The shared expert is BF16.
    assert sum(n for name, n in found.items() if "kind::f16" in name) == 4


def test_tensor_memory_holds_both_places_and_the_scales():
    shared = set(range(256)) & set(range(ours.PLACE, ours.PLACE + 256))
    assert shared == set(range(ours.PLACE, ours.PLACE + ours.SHARED))
    assert ours.PLACE + 256 <= ours.SCALES and ours.SCALES + 4 + 8 <= 512


def test_budgets():
    check_tile("sm_100a", 256, 5, scaled=True)
    with pytest.raises(ResourceError, match=r"at most 5 stages"):
        check_tile("sm_100a", 256, 6, scaled=True)
    with pytest.raises(ResourceError, match="256 with block scales"):
        check_tile("sm_100a", 128, 4, scaled=True)
    (used,) = forward_kernel("sm_100a", direct=False, mxfp8=True).resources.kernels
    assert used.smem_bytes <= SMEM_BYTES and used.tmem_columns == 512
