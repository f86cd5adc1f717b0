"""Programs whose interleavings and reports must be the same on every host, and the record of them.

    python -m tests.tools.emulator.determinism            # compares this host with the record
    python -m tests.tools.emulator.determinism --write    # makes the record

Most programs are PTX of our own, some with a fault, so that reports are compared, too; two are GEMMs of
others.  No input is random.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mok.tools.emulator import Competitor, Emulator, KernelFault
from mok.tools.emulator.emulator import Report
from mok.tools.emulator.intercept import LaunchRequest
from tests.tools.emulator import ptx, tensor_maps
from tests.tools.emulator.mutated import CHUNKS, handover, pipeline, tile_loop

RECORD = Path(__file__).parents[2] / "data" / "emulator-interleavings.json"
SEEDS = (0, 1, 2)
Program = Callable[[int], Report]


def words(count: int) -> np.ndarray:
    return np.zeros(count, dtype=np.uint32)


def plain(text: str, arrays: Callable[[], list[np.ndarray]], **options: Any) -> Program:
    """A kernel of our own on fresh arrays."""

    def run(seed: int) -> Report:
        return ptx.run(text, *arrays(), seed=seed, check=True, max_steps=200_000, **options)

    return run


def ring(damage: tuple[str, str] = ("", "")) -> Program:
    text = pipeline().replace(*damage) if damage[0] else pipeline()
    source = np.arange(32 * CHUNKS, dtype=np.uint32)
    return plain(text, lambda: [source, np.zeros_like(source)], threads=64)


def pairs(damage: tuple[str, str] = ("", "")) -> Program:
    text = handover().replace(*damage) if damage[0] else handover()
    options = {"threads": 64, "grid": 4, "cluster": 2}
    return plain(text, lambda: [words(128), words(32), words(64)], **options)


def tiles(**options: Any) -> Program:
    more = {"threads": 64, "grid": 12, "num_sms": 2, "arch": "sm_100a"} | options
    return plain(tile_loop(), lambda: [words(12)], **more)


def edited_map(acquire: str) -> Program:
    text = tensor_maps.copying(tensor_maps.COPIES["swizzle 2"], acquire=acquire)

    def arrays() -> list[np.ndarray]:
        raw = np.zeros(256, dtype=np.uint8)
        shift = -raw.ctypes.data % 128
        return [tensor_maps.source(), raw[shift : shift + 128], words(512)]

    return plain(text, arrays)


def arrivals() -> Program:
    """Two warps arrive at one mbarrier; one of them does not wait for the other."""
    from tests.tools.emulator.test_emulator_checkers import MBARRIER_USES, two_roles

    first, second, _ = MBARRIER_USES["one does not wait"]
    return plain(two_roles(first, second), lambda: [words(64)], threads=64)


def commits() -> Program:
    """A CTA of a pair may exit before a commit has arrived there."""
    from tests.tools.emulator.test_emulator_tcgen05 import commits as program
    from tests.tools.emulator.test_emulator_tcgen05 import wait_for

    pair = {"arch": "sm_100a", "grid": 2, "cluster": 2}
    return plain(program(wait_for(8)), lambda: [words(4)], **pair)


def outside() -> Program:
    """Every warp but the first stores behind its tensor."""
    body = (
        "mov.u32 %r0, %tid.x;\nld.param.u64 %d0, [p0];\nmul.wide.u32 %d1, %r0, 4;\n"
        "add.s64 %d0, %d0, %d1;\nst.global.b32 [%d0], %r0;"
    )
    return plain(ptx.kernel(body), lambda: [words(32)], threads=96)


def two_gpus(seed: int) -> Report:
    """A message between GPUs whose relaxed signal may overtake it."""
    from tests.tools.emulator.test_emulator_gpus import RECEIVE, RELAXED, send

    box, result = words(64), words(32)
    emulator = Emulator("sm_90a", 2, num_gpus=2, seed=seed, check=True)
    emulator.register(box, result, gpu=1)
    values = [ctypes.c_uint64(a.ctypes.data) for a in (box, result)]
    pointers = (ctypes.c_uint64 * 2)(*map(ctypes.addressof, values))
    one = (1, 1, 1)
    request = LaunchRequest("k", one, (32, 1, 1), one, 0, ctypes.addressof(pointers), None)
    with emulator.concurrent():
        for gpu, body in ((0, send(RELAXED)), (1, RECEIVE)):
            text = ptx.HEAD.format(arch="sm_90a")
            with emulator.device(gpu):
                emulator.run_ptx(text + ptx.kernel(body, ".param .u64 p0, .param .u64 p1"), request)
    return emulator.report


def operators_gemm(seed: int) -> Report:
    import cutlass
    import torch

    from tests.tools.emulator import test_emulator_operators as others

    a = (torch.arange(256 * 192).view(1, 256, 192) % 7 - 3).bfloat16()
    b = (torch.arange(256 * 192).view(1, 256, 192) % 5 - 2).bfloat16().transpose(1, 2)
    c = torch.zeros(1, 256, 256)
    kernel = others.sm90_static_persistent_impl.Sm90StaticPersistentGemmKernel(
        cutlass.Float32, (128, 128), (1, 1)
    )
    tensors = [others.dynamic(t) for t in (a, b, c)]
    return others.run("sm_90a", kernel, (*tensors, 4, others.STREAM), (a, b, c), seed)


def grouped_gemm(seed: int) -> Report:
    import cutlass
    import torch

    from tests.tools.emulator import test_emulator_operators as others

    rows, n, k = [130, 0, 62], 128, 128
    a = (torch.arange(sum(rows) * k).view(-1, k) % 7 - 3).bfloat16()
    b = (torch.arange(3 * n * k).view(3, n, k) % 5 - 2).bfloat16().transpose(1, 2)
    c, ends = torch.zeros(sum(rows), n), torch.tensor(rows).cumsum(0).int()
    module = others.sm100_contiguous_offset_2d3d_dense_gemm_impl
    kernel = module.ContiguousOffset2D3DGemmDenseKernel(cutlass.Float32, False, (128, 128), (1, 1))
    args = (*(others.dynamic(t) for t in (a, b, c, ends)), 1, others.STREAM)
    return others.run("sm_100a", kernel, args, (a, b, c, ends), seed)


PROGRAMS: dict[str, tuple[Program, str]] = {  # and the package that it needs
    "ring of bulk copies": (ring(), ""),
    "ring without a proxy fence": (ring(("fence.proxy.async.shared::cta;", "")), ""),
    "ring that expects too much": (ring(("mov.u32 %r6, 128;", "mov.u32 %r6, 144;")), ""),
    "hand-over": (pairs(), ""),
    "hand-over without a barrier": (pairs(("bar.sync 1, 64;\n@%p0 bra", "@%p0 bra")), ""),
    "launch control": (tiles(), ""),
    "launch control beside another grid": (
        tiles(num_sms=4, preempt=Competitor(sms=2, at=200, steps=400)),
        "",
    ),
    "arrivals out of turn": (arrivals(), ""),
    "commits to a CTA that leaves": (commits(), ""),
    "stores out of bounds": (outside(), ""),
    "an edited tensor map": (edited_map(tensor_maps.ACQUIRE), ""),
    "an edited tensor map, not acquired": (edited_map(""), ""),
    "two GPUs": (two_gpus, ""),
    "GEMM of nvidia-cutlass-operators, sm_90a": (operators_gemm, "cutlass.operators"),
    "grouped GEMM of nvidia-cutlass-operators, sm_100a": (grouped_gemm, "cutlass.operators"),
}


FAULTY = (
    "ring without a proxy fence",
    "ring that expects too much",
    "hand-over without a barrier",
    "arrivals out of turn",
    "stores out of bounds",
    "an edited tensor map, not acquired",
)


def available(package: str) -> bool:
    if not package:
        return True
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def transcript(program: Program, seed: int) -> str:
    """What a run has done and reported, with source files named without their folders."""
    try:
        report = program(seed)
    except KernelFault as fault:
        assert isinstance(fault.report, Report)
        report = fault.report
    found = {
        "interleavings": report.interleavings,
        "launches": [[r.kernel, r.grid, r.steps, r.python_calls] for r in report.launches],
        "findings": [str(f) for f in report.findings],
        "faults": report.faults,
        "warnings": report.warnings,
        "lines": sorted(report.lines),
        "preemptions": [str(p) for p in report.preemptions],
    }
    return re.sub(r"\((?:[^\s():]*/)?([^\s():/]+:\d+)\)", r"(\1)", json.dumps(found, indent=0))


def hashes() -> dict[str, dict[str, str]]:
    """Hash of each program's run with each seed; programs whose package is missing are left out."""
    out: dict[str, dict[str, str]] = {}
    for name, (program, package) in PROGRAMS.items():
        if available(package):
            out[name] = {
                str(seed): hashlib.sha256(transcript(program, seed).encode()).hexdigest()[:16]
                for seed in SEEDS
            }
    return out


def host() -> str:
    import numba

    versions = (
        f"Python {platform.python_version()}, numpy {np.__version__}, numba {numba.__version__}"
    )
    return f"{platform.machine()}, {versions}"


def main() -> int:
    found = hashes()
    if "--write" in sys.argv:
        RECORD.write_text(json.dumps({"host": host(), "programs": found}, indent=1) + "\n")
        print(f"{len(found)} programs with {len(SEEDS)} seeds each in {RECORD}")
        return 0
    record = json.loads(RECORD.read_text())
    print(f"this host: {host()}\nthe record: {record['host']}")
    wrong = 0
    for name, want in record["programs"].items():
        same = name in found and found[name] == want
        wrong += name in found and not same
        print(f"{'same' if same else 'DIFFERENT' if name in found else 'left out'}: {name}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
