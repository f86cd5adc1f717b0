"""NVIDIA's grouped GEMM examples, which edit tensor maps in shared or global memory, on integers.

They come with no package, so they are run by hand and recorded in docs/measurements/emulator-others.md.
The Hopper example edits global memory in both modes, unless GROUPED_GEMM_ENABLE_TRUE_SMEM_TMAP is 1: then
it edits maps in shared memory that it has never initialised, and the emulator says so.

    python -m tests.tools.emulator.grouped_examples CUTLASS/examples/python/CuTeDSL [SEEDS]
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import utils
from cutlass.cute.runtime import from_dlpack

from mok.tools.emulator import Emulator

SMS = 4
SIZES = [(130, 128, 64), (64, 264, 192), (256, 128, 128)]  # m, n, k of each group
EXAMPLES = {"sm_90a": "hopper", "sm_100a": "blackwell"}


def load(folder: Path, arch: str) -> ModuleType:
    path = folder / "cute" / EXAMPLES[arch] / "kernel" / "grouped_gemm" / "grouped_gemm.py"
    spec = importlib.util.spec_from_file_location(f"grouped_{arch}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make(module: ModuleType, arch: str, mode: Any, two: bool) -> tuple[Any, tuple[int, int]]:
    """The kernel object and its cluster's tile."""
    if arch == "sm_90a":
        kernel = module.HopperGroupedGemmPersistentKernel(
            cutlass.Float32,
            (128, 128),
            (1, 1),
            swizzle_size=1,
            raster_along_m=True,
            tensormap_update_mode=mode,
        )
        return kernel, (128, 128)
    tile = (256, 128) if two else (128, 128)
    cluster = (2, 1) if two else (1, 1)
    return module.GroupedGemmKernel(cutlass.Float32, two, tile, cluster, mode), tile


def run(folder: Path, arch: str, mode: Any, two: bool, seed: int | None) -> Any:
    """Runs one configuration; every group's product must equal torch's exactly."""
    rng = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(-3, 4, shape, generator=rng).to(torch.float16)

    module = load(folder, arch)
    kernel, tile = make(module, arch, mode, two)
    groups = [(draw(m, k), draw(n, k), torch.zeros(m, n).half()) for m, n, k in SIZES]
    first = [torch.zeros(8, 8, 1, dtype=torch.float16) for _ in range(3)]
    dims = torch.tensor([(m, n, k, 1) for m, n, k in SIZES], dtype=torch.int32)
    strides = torch.tensor([[t.stride() for t in g] for g in groups], dtype=torch.int32)
    pointers = torch.tensor([[t.data_ptr() for t in g] for g in groups], dtype=torch.int64)
    maps = torch.zeros(SMS * kernel.num_tensormaps * 16 + 16, dtype=torch.int64)
    maps = maps[-(maps.data_ptr() // 8) % 16 :][: SMS * kernel.num_tensormaps * 16]
    maps = maps.view(SMS, kernel.num_tensormaps, 16)
    clusters = sum(-(-m // tile[0]) * -(-n // tile[1]) for m, n, _ in SIZES)
    stream = cuda.CUstream(0)
    templates = [from_dlpack(t, assumed_align=16).mark_layout_dynamic(leading_dim=1) for t in first]
    tables = [from_dlpack(t, assumed_align=16) for t in (dims, strides, pointers)]
    space = from_dlpack(maps, assumed_align=128)
    active = SMS // (2 if two else 1)
    with Emulator(arch, num_sms=SMS, seed=seed, check=True) as emulator:
        emulator.register(*first, dims, strides, pointers, maps, *itertools.chain(*groups))
        arguments = (*templates, len(SIZES), *tables, clusters, space, active, stream)
        compiled = cute.compile[cute.GPUArch(arch), cute.GenerateLineInfo](kernel, *arguments)
        text = getattr(compiled, "__ptx__", "") or ""
        compiled(*templates, *tables, space, stream)
    assert "tensormap.replace" in text
    for a, b, c in groups:
        assert torch.equal(c, (a.float() @ b.float().T).half())
    assert not emulator.report.findings
    return emulator.report


def main() -> int:
    folder, seeds = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 5
    modes = utils.TensorMapUpdateMode
    failed = 0
    for arch, mode, two in [
        ("sm_90a", modes.GMEM, False),
        ("sm_90a", modes.SMEM, False),
        ("sm_100a", modes.GMEM, False),
        ("sm_100a", modes.SMEM, False),
        ("sm_100a", modes.SMEM, True),
    ]:
        name = f"{arch} {mode.name}{' 2 CTAs' if two else ''}"
        for seed in (None, *range(seeds)):
            start = time.perf_counter()
            try:
                run(folder, arch, mode, two, seed)
                outcome = "exact, no report"
            except Exception as error:
                failed += 1
                outcome = f"{type(error).__name__}: {error}"
            print(
                f"{name}, seed {seed}: {outcome} ({time.perf_counter() - start:.1f} s)", flush=True
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
