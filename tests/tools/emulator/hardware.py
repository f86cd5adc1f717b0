"""Programs of sm_90a that run alike on an H200 and in the emulator, and the record of their outputs.

On a GPU one command writes ``tests/data/h200.json``, with the arrays that are compared within a
tolerance beside it:

    python -m tests.tools.emulator.hardware [PROGRAM …]

Programs whose package is missing there are left out and named.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import sys
import types
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from mok.config import Shape
from mok.reference import Case, Experts, integer_case, integer_gradient

RECORD = Path(__file__).parents[2] / "data" / "h200.json"
ARCH = "sm_90a"
Outputs = dict[str, Tensor]
Program = Callable[[str], Outputs]  # of the device's name, "cuda" or "cpu"


def uniform_case(shape: Shape, seed: int) -> Case:
    """Values of eight bits, near ±1, from integers: normal ones differ by device and version of torch."""
    rng = torch.Generator().manual_seed(seed)

    def draw(like: Tensor, scale: float) -> Tensor:
        values = torch.randint(-128, 128, like.shape, generator=rng)
        return (values * (scale / 64)).to(like.dtype)

    case = integer_case(shape, seed=seed)
    inverse = 1 / 16  # about the root of 128, exactly a power of two
    routed = [draw(w, inverse) for w in (case.routed.gate, case.routed.up, case.routed.down)]
    weights = draw(case.router_weights, 0.5).abs()
    return dataclasses.replace(
        case, x=draw(case.x, 1.0), router_weights=weights, routed=Experts(*routed)
    )


def forward(ep_size: int, exact: bool = True, **shape) -> Program:
    """The forward layer on virtual ranks, and the rows that it saves for backward."""

    def run(device: str) -> Outputs:
        from tests.forward_runs import ForwardRun
        from tests.helpers_layer import to_device

        make = integer_case if exact else uniform_case
        case = to_device(make(Shape(96, 128, 128, 4, 2, ep_size, **shape), seed=1), device)
        comm = 0 if ep_size == 1 else 2
        sizes = {"minibatch": 256, "macrobatch": 512, "grid": 8, "num_comm_ctas": comm}
        layer = ForwardRun(case, ARCH, ep_size, device=device, **sizes)
        return {"output": layer.run()}

    return run


def backward(ep_size: int) -> Program:
    """Every gradient of the layer."""

    def run(device: str) -> Outputs:
        from tests.backward_runs import BackwardRun

        case = integer_case(Shape(40, 64, 128, 3, 2, 1, 64), seed=1, device=device)
        dy = integer_gradient(case, seed=1)
        direct, comm = ep_size == 1, 0 if ep_size == 1 else 1
        sizes = {"minibatch": 128, "macrobatch": 256, "grid": 2 + comm, "num_comm_ctas": comm}
        return BackwardRun(case, dy, ep_size, direct=direct, **sizes).run().named()

    return run


def sums() -> Program:
    """Token sums of random BF16 rows in slots, with weights."""

    def run(device: str) -> Outputs:
        from tests.helpers import run_token_sum

        rng = torch.Generator().manual_seed(3)
        tokens, topk, hidden = 21, 4, 320
        y = torch.randn(tokens * topk, hidden, generator=rng).bfloat16().to(device)
        ids = torch.randint(-1, 8, (tokens, topk), generator=rng).to(device)
        weights = torch.rand(tokens, topk, generator=rng).to(device)
        total = run_token_sum(y, weights, num_experts=8, top_experts=ids, arch=ARCH)
        return {"sum": total}

    return run


@contextlib.contextmanager
def without_init(name: str) -> Iterator[None]:
    """A package without its __init__, which imports more than is needed."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.submodule_search_locations is not None
    before, package = sys.modules.get(name), types.ModuleType(name)
    package.__path__, package.__spec__ = list(spec.submodule_search_locations), spec
    sys.modules[name] = package
    try:
        yield
    finally:
        sys.modules.pop(name)
        if before is not None:
            sys.modules[name] = before


def quack_gemm(cluster: tuple[int, int, int], **options) -> Program:
    """A dense GEMM of quack-kernels on integers."""

    @without_init("quack")
    def run(device: str) -> Outputs:
        import cuda.bindings.driver as cuda
        import cutlass
        import cutlass.cute as cute
        from quack.gemm_default_epi import GemmDefaultSm90
        from quack.tile_scheduler import TileSchedulerOptions

        from tests.tools.emulator.test_emulator_quack import dynamic, integers

        a, b = (integers(1, 256, 192, seed=s).to(device) for s in (0, 1))
        d = torch.zeros(1, 256, 256, dtype=torch.bfloat16, device=device)
        gemm = GemmDefaultSm90(cutlass.Float32, cutlass.BFloat16, (128, 128), cluster, **options)
        stream = torch.cuda.current_stream().cuda_stream if device == "cuda" else 0
        args = (
            *(dynamic(t) for t in (a, b, d)),
            None,
            GemmDefaultSm90.EpilogueArguments(),
            TileSchedulerOptions(cutlass.Int32(4 // (cluster[0] * cluster[1]))),
            None,
            cuda.CUstream(stream),
            None,
            None,
        )
        cute.compile[cute.GPUArch(ARCH)](gemm, *args)(*args)
        return {"d": d}

    return run


def operators_gemm(dtype: torch.dtype, tile: tuple[int, int]) -> Program:
    """The SM90 static persistent GEMM of nvidia-cutlass-operators on integers, FP32 out."""

    def run(device: str) -> Outputs:
        import cuda.bindings.driver as cuda
        import cutlass
        import cutlass.cute as cute

        from tests.tools.emulator.test_emulator_operators import (
            dynamic,
            integers,
            sm90_static_persistent_impl,
        )

        a = integers(1, 256, 128).to(dtype).to(device)
        b = integers(1, 256, 128, seed=1).to(dtype).to(device).transpose(1, 2)
        c = torch.zeros(1, 256, 256, device=device)
        kernel = sm90_static_persistent_impl.Sm90StaticPersistentGemmKernel(
            cutlass.Float32, tile, (1, 1)
        )
        stream = torch.cuda.current_stream().cuda_stream if device == "cuda" else 0
        tensors = [dynamic(t) for t in (a, b, c)]
        compiled = cute.compile[cute.GPUArch(ARCH)](kernel, *tensors, 4, cuda.CUstream(stream))
        compiled(*tensors, cuda.CUstream(stream))
        return {"c": c}

    return run


# Name: the program, the package that it needs, and whether its bits must be the same.
PROGRAMS: dict[str, tuple[Program, str, bool]] = {
    "forward, integers, EP 1": (forward(1), "cutlass", True),
    "forward, integers, EP 2": (forward(2), "cutlass", True),
    "forward, integers, EP 4": (forward(4), "cutlass", True),
    "forward, integers, shared expert": (
        forward(1, shared_intermediate_size=64),
        "cutlass",
        True,
    ),
    "forward, random, EP 1": (forward(1, exact=False), "cutlass", False),
    "forward, random, EP 2": (forward(2, exact=False), "cutlass", False),
    "backward, integers, EP 1": (backward(1), "cutlass", True),
    "backward, integers, EP 2": (backward(2), "cutlass", True),
    "token sum": (sums(), "cutlass", True),
    "quack GEMM, pingpong": (quack_gemm((1, 1, 1), pingpong=True), "quack", True),
    "quack GEMM, cluster of two": (quack_gemm((2, 1, 1)), "quack", True),
    "operators GEMM, BF16": (operators_gemm(torch.bfloat16, (128, 128)), "cutlass.operators", True),
    "operators GEMM, E4M3": (
        operators_gemm(torch.float8_e4m3fn, (128, 128)),
        "cutlass.operators",
        True,
    ),
}


def available(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False
    except ValueError:  # it is imported, by a test that leaves out its __init__
        return True


def digest(tensor: Tensor) -> str:
    """Hash of a tensor's type, shape and bits."""
    flat = tensor.detach().cpu().contiguous()
    head = f"{flat.dtype} {tuple(flat.shape)}".encode()
    raw = flat.reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(head + raw).hexdigest()


def packed(tensor: Tensor) -> str:
    """FP32 values as text, for outputs that are compared within a tolerance."""
    raw = tensor.detach().float().cpu().contiguous().numpy().tobytes()
    return base64.b64encode(zlib.compress(raw, 9)).decode()


def unpacked(text: str, like: Tensor) -> Tensor:
    raw = bytearray(zlib.decompress(base64.b64decode(text)))
    return torch.frombuffer(raw, dtype=torch.float32).view(like.shape)


def record(
    device: str, names: Sequence[str] = ()
) -> Iterator[tuple[str, dict[str, object] | None]]:
    """Each program's name, and its outputs as the record holds them; None where it cannot run."""
    for name, (program, package, exact) in PROGRAMS.items():
        if names and name not in names:
            continue
        if not available(package):
            yield name, None
            continue
        outputs = program(device)
        entry: dict[str, object] = {"hashes": {k: digest(v) for k, v in outputs.items()}}
        if not exact:
            entry["values"] = {k: packed(v) for k, v in outputs.items()}
        yield name, entry


def main() -> int:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("This records what a Hopper GPU computes, and there is none.", file=sys.stderr)
        return 2
    found: dict[str, object] = {}
    names = sys.argv[1:]  # these alone, beside what was recorded before
    if names and RECORD.exists():
        found = json.loads(RECORD.read_text())["programs"]
    for name, entry in record("cuda", names):
        print(f"{name}: {'recorded' if entry else 'left out, its package is missing'}", flush=True)
        if entry:
            found[name] = entry
    document = {"device": torch.cuda.get_device_name(), "torch": torch.__version__} | {
        "programs": found
    }
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{len(found)} programs in {RECORD}")
    return 0 if len(found) >= 8 else 1


if __name__ == "__main__":
    sys.exit(main())
