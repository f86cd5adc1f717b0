"""GEMMs of nvidia-cutlass-operators, which run on hardware: exact on integers, and no report."""

import pytest

pytest.importorskip("cutlass")
pytest.importorskip("cutlass.operators")

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.runtime import from_dlpack, make_ptr
from cutlass.operators.providers.cutedsl.gemm.implementations import (
    operator_helpers,
    sm90_static_persistent_impl,
    sm100_contiguous_offset_2d3d_dense_gemm_impl,
    sm100_dense_blockscaled_static_persistent_impl,
    sm100_mixed_input_impl,
    sm100_persistent_impl,
)

from mok.tools.emulator import Emulator, KernelFault

pytestmark = pytest.mark.emulator
SMS = 4
SEEDS = (None, *(pytest.param(s, marks=pytest.mark.slow) for s in range(5)))
STREAM = cuda.CUstream(0)


def integers(*shape, seed=0, low=-3, high=4):
    """Small integers, which every type here holds and whose dot products are exact."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=rng).float()


def dynamic(tensor):
    """A tensor with sizes that are only known at run time."""
    view = tensor.view(torch.uint8) if tensor.dtype in FP8 else tensor
    made = from_dlpack(view, assumed_align=16)
    if tensor.dtype in FP8:
        made.element_type = FP8[tensor.dtype]
    return made.mark_layout_dynamic(leading_dim=tensor.stride().index(1))


FP8 = {torch.float8_e4m3fn: cutlass.Float8E4M3FN, torch.float8_e5m2: cutlass.Float8E5M2}


def run(arch, kernel, args, tensors, seed):
    """Compiles and runs a kernel; the checkers must be silent."""
    with Emulator(arch, num_sms=SMS, seed=seed, check=True) as emulator:
        emulator.register(*tensors)
        compiled = cute.compile[cute.GPUArch(arch), cute.GenerateLineInfo](kernel, *args)
        values = inspect_runtime(kernel, args)
        compiled(*values)
    assert not emulator.report.findings
    return emulator.report


def inspect_runtime(kernel, args):
    """The arguments without those that compilation has fixed."""
    import inspect

    names = list(inspect.signature(kernel.__call__).parameters.values())
    return [a for p, a in zip(names, args, strict=False) if "Constexpr" not in str(p.annotation)]


def check_dense(arch, kernel, shape, dtype, args, seed, b_major="k", batch=1):
    m, n, k = shape
    a = integers(batch, m, k).to(dtype)
    b = integers(batch, k, n, seed=1).to(dtype)
    if b_major == "k":
        b = b.transpose(1, 2).contiguous().transpose(1, 2)
    c = torch.zeros(batch, m, n, dtype=torch.float32)
    run(arch, kernel, (dynamic(a), dynamic(b), dynamic(c), *args), (a, b, c), seed)
    assert torch.equal(c, a.float() @ b.float())


HOPPER = [  # (m, n, k), tile, cluster, dtype, major of B, batch
    ((256, 256, 192), (128, 128), (1, 1), torch.bfloat16, "k", 1),
    ((200, 264, 136), (64, 128), (1, 1), torch.float16, "n", 2),
    ((256, 512, 128), (128, 256), (2, 1), torch.bfloat16, "k", 1),
    ((256, 256, 256), (128, 128), (1, 2), torch.float8_e4m3fn, "k", 1),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape,tile,cluster,dtype,major,batch", HOPPER)
def test_sm90_static_persistent(shape, tile, cluster, dtype, major, batch, seed):
    kernel = sm90_static_persistent_impl.Sm90StaticPersistentGemmKernel(
        cutlass.Float32, tile, cluster
    )
    clusters = SMS // (cluster[0] * cluster[1])
    check_dense("sm_90a", kernel, shape, dtype, (clusters, STREAM), seed, major, batch)


BLACKWELL = [  # (m, n, k), 2 CTAs, tile, cluster, TMA store, CLC
    ((256, 256, 192), False, (128, 128), (1, 1), True, True),
    ((512, 256, 128), True, (256, 128), (2, 1), True, True),
    ((256, 512, 128), True, (256, 256), (2, 2), True, False),
    ((256, 128, 128), False, (128, 64), (1, 2), False, True),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape,two,tile,cluster,store,clc", BLACKWELL)
def test_sm100_persistent(shape, two, tile, cluster, store, clc, seed):
    kinds = operator_helpers.PersistentTileSchedulerType
    kind = kinds.CLC if clc else kinds.STATIC_PERSISTENT
    kernel = sm100_persistent_impl.PersistentDenseGemmKernel(
        cutlass.Float32, two, tile, cluster, store, kind, lambda x: x
    )
    clusters = SMS // (cluster[0] * cluster[1])
    args = (STREAM, None if clc else clusters)
    check_dense("sm_100a", kernel, shape, torch.bfloat16, args, seed)


def swizzled(scale):
    """E8M0 scales [rows, blocks] in the order that the MMA wants: 32 x 4 x 4 atoms."""
    rows, blocks = scale.shape
    padded = torch.zeros(-(-rows // 128) * 128, -(-blocks // 4) * 4, dtype=scale.dtype)
    padded[:rows, :blocks] = scale
    m, k = padded.shape
    return padded.view(m // 128, 4, 32, k // 4, 4).permute(0, 3, 2, 1, 4).contiguous().view(-1)


BLOCK_SCALED = [  # (m, n, k), tile, cluster
    ((128, 128, 256), (128, 128), (1, 1)),
    ((256, 192, 384), (128, 192), (1, 1)),
    ((512, 256, 256), (256, 128), (2, 1)),
    ((256, 128, 256), (128, 64), (1, 2)),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape,tile,cluster", BLOCK_SCALED)
def test_sm100_block_scaled_mxfp8(shape, tile, cluster, seed):
    m, n, k = shape
    a = integers(m, k).to(torch.float8_e4m3fn)
    b = integers(n, k, seed=1).to(torch.float8_e4m3fn)
    # Every row and block has its own scale, 1/4 to 4, so that a wrong one is seen.
    sa, sb = (integers(r, k // 32, seed=s, low=-2, high=3) + 127 for r, s in ((m, 2), (n, 3)))
    sfa, sfb = swizzled(sa.byte()), swizzled(sb.byte())
    c = torch.zeros(m, n, dtype=torch.float32)
    kernel = sm100_dense_blockscaled_static_persistent_impl.PersistentDenseBlockScaledGemmKernel(
        32, tile, cluster
    )

    def pointer(tensor, kind, align):
        return make_ptr(kind, tensor.data_ptr(), cutlass.AddressSpace.gmem, assumed_align=align)

    args = (
        pointer(a, cutlass.Float8E4M3FN, 16),
        pointer(b, cutlass.Float8E4M3FN, 16),
        pointer(sfa, cutlass.Float8E8M0FNU, 32),
        pointer(sfb, cutlass.Float8E8M0FNU, 32),
        pointer(c, cutlass.Float32, 16),
        (OperandMajorMode.K, OperandMajorMode.K, cutlass.tensor_utils.LayoutEnum.ROW_MAJOR),
        tuple(cutlass.Int32(x) for x in (m, n, k, 1)),
        SMS // (cluster[0] * cluster[1]),
        STREAM,
    )
    run("sm_100a", kernel, args, (a, b, sfa, sfb, c), seed)
    wide_a = a.float() * torch.exp2(sa - 127).repeat_interleave(32, 1)
    wide_b = b.float() * torch.exp2(sb - 127).repeat_interleave(32, 1)
    assert torch.equal(c, (wide_a.double() @ wide_b.double().T).float())


def test_a_known_bug_is_reported():
    """With tile N 256 one thread of each warp releases the accumulator, and 128 are expected."""
    with pytest.raises(KernelFault, match=r"deadlock(.|\n)*of 128 arrivals"):
        test_sm100_block_scaled_mxfp8((128, 256, 128), (128, 256), (1, 1), None)


GROUPED = [  # rows per expert, n, k, 2 CTAs, tile, cluster
    ([130, 0, 126, 64], 256, 128, False, (128, 128), (1, 1)),
    ([256, 100], 128, 192, True, (256, 128), (2, 1)),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rows,n,k,two,tile,cluster", GROUPED)
def test_sm100_contiguous_offset_grouped(rows, n, k, two, tile, cluster, seed):
    module = sm100_contiguous_offset_2d3d_dense_gemm_impl
    kernel = module.ContiguousOffset2D3DGemmDenseKernel(cutlass.Float32, two, tile, cluster)
    total, experts = sum(rows), len(rows)
    a = integers(total, k).bfloat16()
    b = integers(experts, n, k, seed=1).bfloat16().transpose(1, 2)
    c = torch.zeros(total, n, dtype=torch.float32)
    ends = torch.tensor(rows).cumsum(0).int()
    args = (dynamic(a), dynamic(b), dynamic(c), dynamic(ends), SMS // len(rows), STREAM)
    run("sm_100a", kernel, args, (a, b, c, ends), seed)
    starts = [0, *ends.tolist()]
    for e in range(experts):
        span = slice(starts[e], starts[e + 1])
        assert torch.equal(c[span], a[span].float() @ b[e].float())


MIXED = [  # (m, n, k), scales per k (0: none), 2 CTAs, tile, cluster
    ((128, 128, 256), 0, False, (128, 128, 64), (1, 1)),
    ((256, 128, 256), 128, True, (256, 128, 64), (2, 1)),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape,per_k,two,tile,cluster", MIXED)
def test_sm100_mixed_input(shape, per_k, two, tile, cluster, seed):
    m, n, k = shape
    kernel = sm100_mixed_input_impl.MixedInputGemmKernel(
        1 if per_k else 0, per_k, cutlass.Float32, two, tile, cluster, True, False, cutlass.Int8
    )
    a = integers(1, m, k).to(torch.int8)
    b = integers(1, n, k, seed=1).bfloat16().transpose(1, 2)
    c = torch.zeros(1, m, n, dtype=torch.bfloat16)
    tensors, scale, wide = [a, b, c], None, a.float()
    if per_k:
        scale = torch.exp2(integers(1, k // per_k, m, seed=2, low=-1, high=2)).bfloat16()
        tensors.append(scale)
        scale = scale.transpose(1, 2)
        wide = wide * scale.float().repeat_interleave(per_k, 2)
    args = (
        dynamic(a),
        None if scale is None else dynamic(scale),
        dynamic(b),
        dynamic(c),
        SMS // (cluster[0] * cluster[1]),
        STREAM,
    )
    run("sm_100a", kernel, args, tensors, seed)
    assert torch.equal(c, (wide @ b.float()).bfloat16())
