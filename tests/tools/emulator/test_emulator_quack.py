"""GEMMs of quack-kernels, which run on hardware: exact on integers, and no report."""

import importlib.util
import sys
import types

import pytest

pytest.importorskip("cutlass")
SPEC = importlib.util.find_spec("quack")
if SPEC is None or not SPEC.submodule_search_locations:
    pytest.skip("needs quack-kernels", allow_module_level=True)

import cuda.bindings.driver as cuda  # noqa: E402
import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
import torch  # noqa: E402
from cutlass.cute.runtime import from_dlpack  # noqa: E402

from mok.tools.emulator import Emulator  # noqa: E402

pytestmark = pytest.mark.emulator
SMS = 4


@pytest.fixture(scope="module")
def quack():
    """The package without its __init__, which imports more than the GEMMs need."""
    package = types.ModuleType("quack")
    package.__path__ = list(SPEC.submodule_search_locations)
    patch = pytest.MonkeyPatch()
    patch.setitem(sys.modules, "quack", package)
    yield importlib.import_module("quack.gemm_default_epi")
    patch.undo()


def integers(*shape, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=rng).bfloat16()


def dynamic(tensor):
    leading = tensor.stride().index(1)
    return from_dlpack(tensor, assumed_align=16).mark_layout_dynamic(leading)


def run(arch, gemm, a, b, d, epilogue, seed, varlen=None, more=(), check=True):
    """Compiles and runs a kernel with a cluster per tile; the checkers must be silent."""
    from cutlass.cute.runtime import make_fake_compact_tensor
    from quack.tile_scheduler import TileSchedulerOptions

    kind = a
    if a.dim() == 2:  # cp.async wants the pointer's address space, which a CPU tensor lacks
        shape = (cute.sym_int(), cute.sym_int(divisibility=8))
        kind = make_fake_compact_tensor(
            cutlass.BFloat16, shape, stride_order=(1, 0), assumed_align=16
        )
    with Emulator(arch, num_sms=SMS, seed=seed, check=check) as emulator:
        emulator.register(a, b, d, *more)
        args = (
            dynamic(a),
            dynamic(b),
            dynamic(d),
            None,
            epilogue,
            TileSchedulerOptions(cutlass.Int32(SMS // gemm.clusters)),
            varlen,
            cuda.CUstream(0),
            None,
            None,
        )
        first = args[0] if kind is a else kind
        compiled = cute.compile[cute.GPUArch(arch), cute.GenerateLineInfo](gemm, first, *args[1:])
        compiled(*args)
    assert not emulator.report.findings
    return emulator.report


def make(kernel, tile, cluster, **options):
    gemm = kernel(cutlass.Float32, cutlass.BFloat16, tile, cluster, **options)
    gemm.clusters = cluster[0] * cluster[1]
    return gemm


DENSE = [  # arch, (m, n, k), tile, cluster, options
    ("sm_90a", (256, 256, 192), (128, 128), (1, 1, 1), {"pingpong": True}),
    ("sm_90a", (256, 256, 192), (128, 128), (2, 1, 1), {}),
    ("sm_90a", (512, 512, 128), (128, 192), (2, 1, 1), {}),
    ("sm_100a", (256, 256, 192), (128, 128), (1, 1, 1), {}),
    ("sm_100a", (512, 256, 192), (256, 128), (2, 1, 1), {}),
]
SEEDS = (None, *(pytest.param(s, marks=pytest.mark.slow) for s in range(5)))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("arch,shape,tile,cluster,options", DENSE)
def test_dense(quack, arch, shape, tile, cluster, options, seed):
    m, n, k = shape
    a, b = integers(1, m, k), integers(1, n, k, seed=1)
    d = torch.zeros(1, m, n, dtype=torch.bfloat16)
    kernel = quack.GemmDefaultSm90 if arch == "sm_90a" else quack.GemmDefaultSm100
    run(arch, make(kernel, tile, cluster, **options), a, b, d, kernel.EpilogueArguments(), seed)
    assert torch.equal(d[0], (a[0].float() @ b[0].float().T).bfloat16())


def test_speed(quack):
    """A GEMM 256³ takes 1.5 s of one core at most, translation included, once the parts are compiled."""
    a, b = integers(1, 256, 256), integers(1, 256, 256, seed=1)
    d = torch.zeros(1, 256, 256, dtype=torch.bfloat16)
    kernel = quack.GemmDefaultSm90
    gemm = make(kernel, (128, 128), (1, 1, 1))
    report = run("sm_90a", gemm, a, b, d, kernel.EpilogueArguments(), None, check=False)
    assert torch.equal(d[0], (a[0].float() @ b[0].float().T).bfloat16())
    assert sum(r.cpu_seconds for r in report.launches) <= 1.5


VARLEN = [  # arch, rows per expert, (n, k), gather, tile, cluster
    ("sm_90a", [130, 0, 62], (128, 128), False, (128, 128), (1, 1, 1)),
    ("sm_90a", [130, 0, 62], (128, 128), True, (128, 128), (1, 1, 1)),
    ("sm_100a", [130, 0, 62], (128, 128), False, (128, 128), (1, 1, 1)),
    ("sm_100a", [200, 100], (128, 128), False, (256, 128), (2, 1, 1)),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("arch,rows,sizes,gather,tile,cluster", VARLEN)
def test_varlen(quack, arch, rows, sizes, gather, tile, cluster, seed):
    from quack.varlen_utils import VarlenArguments

    n, k = sizes
    total, experts = sum(rows), len(rows)
    a, b = integers(total, k), integers(experts, n, k, seed=1)
    d = torch.zeros(total, n, dtype=torch.bfloat16)
    starts = torch.tensor([0, *rows]).cumsum(0).int()
    order = torch.randperm(total, generator=torch.Generator().manual_seed(2)).int()
    kernel = quack.GemmDefaultSm90 if arch == "sm_90a" else quack.GemmDefaultSm100
    gemm = make(kernel, tile, cluster, gather_A=gather)
    varlen = VarlenArguments(
        mCuSeqlensM=from_dlpack(starts, assumed_align=4).mark_layout_dynamic(0),
        mAIdx=from_dlpack(order, assumed_align=4).mark_layout_dynamic(0) if gather else None,
    )
    run(arch, gemm, a, b, d, kernel.EpilogueArguments(), seed, varlen, (starts, order))
    source = a[order.long()] if gather else a
    for e in range(experts):
        span = slice(int(starts[e]), int(starts[e + 1]))
        assert torch.equal(d[span], (source[span].float() @ b[e].float().T).bfloat16())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_gated_epilogue(quack, arch, seed):
    """relu(gate) * up of interleaved columns, beside the plain result."""
    from quack.epilogue.library import linear_act_mod
    from quack.rounding import RoundingMode

    m, n, k = 256, 256, 128
    mod = linear_act_mod("reglu", gated=True, has_c=False, has_rowvec=False, has_colvec=False)
    family = 9 if arch == "sm_90a" else 10
    kernel = mod._mint((), family, True, False, (), RoundingMode.RN, (), False)
    a, b = integers(1, m, k), integers(1, n, k, seed=1)
    d = torch.zeros(1, m, n, dtype=torch.bfloat16)
    gated = torch.zeros(1, m, n // 2, dtype=torch.float32).bfloat16()
    gemm = make(kernel, (128, 128), (1, 1, 1))
    epilogue = kernel.EpilogueArguments(mAuxOut=dynamic(gated))
    run(arch, gemm, a, b, d, epilogue, seed, more=(gated,))
    product = a[0].float() @ b[0].float().T
    assert torch.equal(d[0], product.bfloat16())
    want = product[:, 0::2].clamp(min=0) * product[:, 1::2]
    assert torch.equal(gated[0], want.bfloat16())
