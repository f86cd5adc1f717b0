"""GEMMs of quack-kernels, which run on hardware: exact on integers, and no report."""

import importlib.util
import sys
import types

import pytest

pytest.importorskip("cutlass")
SPEC = importlib.util.find_spec("quack")
if SPEC is None or not SPEC.submodule_search_locations:
    pytest.skip("needs quack-kernels", allow_module_level=True)

import torch  # noqa: E402

pytestmark = [pytest.mark.emulator, pytest.mark.slow]

CASES = [  # arch, (m, n, k), tile, cluster, options
    ("sm_90a", (256, 256, 192), (128, 128), (1, 1, 1), {"pingpong": True}),
    ("sm_90a", (256, 256, 192), (128, 128), (1, 1, 1), {}),
    ("sm_90a", (256, 256, 192), (128, 128), (2, 1, 1), {}),
    ("sm_90a", (512, 512, 128), (128, 192), (2, 1, 1), {}),
    ("sm_100a", (256, 256, 192), (128, 128), (1, 1, 1), {}),
    ("sm_100a", (512, 256, 192), (256, 128), (2, 1, 1), {}),
]


@pytest.fixture
def quack(monkeypatch):
    """The package without its __init__, which imports more than the GEMMs need."""
    package = types.ModuleType("quack")
    package.__path__ = list(SPEC.submodule_search_locations)
    monkeypatch.setitem(sys.modules, "quack", package)
    return pytest.importorskip("quack.gemm_default_epi")


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("arch,shape,tile,cluster,options", CASES)
def test_gemm(quack, arch, shape, tile, cluster, options, seed):
    import cuda.bindings.driver as cuda
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import from_dlpack
    from quack.tile_scheduler import TileSchedulerOptions

    from mok.tools.emulator import Emulator

    m, n, k = shape
    rng = torch.Generator().manual_seed(0)
    a = torch.randint(-3, 4, (1, m, k), generator=rng).bfloat16()
    b = torch.randint(-3, 4, (1, n, k), generator=rng).bfloat16()
    d = torch.zeros(1, m, n, dtype=torch.bfloat16)
    kernel = quack.GemmDefaultSm90 if arch == "sm_90a" else quack.GemmDefaultSm100
    with Emulator(arch, num_sms=4, seed=seed, check=True) as emulator:
        emulator.register(a, b, d)
        args = (
            *(from_dlpack(t, assumed_align=16).mark_layout_dynamic(2) for t in (a, b, d)),
            None, kernel.EpilogueArguments(),
            TileSchedulerOptions(cutlass.Int32(4 // (cluster[0] * cluster[1]))),
            None, cuda.CUstream(0), None, None,
        )  # fmt: skip
        gemm = kernel(cutlass.Float32, cutlass.BFloat16, tile, cluster, **options)
        cute.compile[cute.GPUArch(arch), cute.GenerateLineInfo](gemm, *args)(*args)
    assert torch.equal(d[0], (a[0].float() @ b[0].float().T).bfloat16())
