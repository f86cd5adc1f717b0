"""``mok capture``: run a step and store it, for ``mok replay`` here or elsewhere."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

NAME = "capture"
HELP = "run one step of random values and store it: inputs, hashes of the results, versions"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="where to store it")
    parser.add_argument(
        "--shape", default="64,128,64,8,2", metavar="T,H,I,E,K", help="sizes, T of all ranks"
    )
    parser.add_argument("--ep", type=int, default=1, help="virtual ranks")
    parser.add_argument("--seed", type=int, default=0, help="seed of the values")
    parser.add_argument("--forward", action="store_true", help="no backward")
    parser.add_argument("--precision", default="bf16", choices=("bf16", "mxfp8"))
    parser.add_argument("--arch", help="only the kernel of this architecture, such as sm_90a")
    parser.add_argument("--emulate", action="store_true", help="run the kernel in the CPU emulator")


def run(args: argparse.Namespace, progress: Console) -> dict[str, Any]:
    from mok import capture
    from mok.backends import choose_backend, run_step
    from mok.config import Shape
    from mok.errors import ShapeError
    from mok.processes import require_kernel
    from mok.reference import random_case, random_gradient
    from mok.tools.bench.results import make_folder

    try:
        sizes = [int(n) for n in args.shape.split(",")]
        tokens, hidden, inner, experts, topk = sizes
    except ValueError:
        raise ShapeError("--shape is five numbers T,H,I,E,K", args.shape) from None
    if args.ep < 1:
        raise ShapeError("--ep must be at least 1", args.ep)
    make_folder(args.file.parent, "Name another file")
    backend = choose_backend(args.arch, args.emulate)
    backend.announce(progress.out)
    require_kernel(backend.kind, backend.note)
    case = random_case(
        Shape(tokens, hidden, inner, experts, topk), seed=args.seed, device=backend.device
    )
    dy = None if args.forward else random_gradient(case, seed=args.seed)
    with capture.watch(args.file.parent, on_nan=False) as observer:
        run_step(case, dy, args.ep, backend, args.precision)
        step = observer.last
    assert step is not None
    capture.save(step, args.file)
    hashes = {name: [capture.digest(t) for t in v] for name, v in step.results.items()}
    return {"backend": backend.name, "file": str(args.file), "hashes": hashes, "ok": True}


def passed(document: dict[str, Any]) -> bool:
    return bool(document["ok"])


def show(document: dict[str, Any], console: Console) -> None:
    console.print(f"{document['file']}: a step of {document['backend']}", markup=False)
    for name, hashes in document["hashes"].items():
        console.print(f"  {name}: {' '.join(h[:12] for h in hashes)}", markup=False)
