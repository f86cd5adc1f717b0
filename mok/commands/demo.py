"""``mok demo``: the main job, on the best backend present, checked against the oracle."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    import torch

    from mok.backends import Backend
    from mok.reference import Case

NAME = "demo"
HELP = "run a Qwen3-30B-A3B layer on the best backend present and check it"

MODEL = "qwen3-30b-a3b"
GPU_TOKENS = 16384
EMULATED_TOKENS = 32


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="seed of the random inputs")
    parser.add_argument(
        "--backend",
        choices=("auto", "emulator", "reference"),
        default="auto",
        help="auto: the GPU's kernel, else the same kernel in the CPU emulator",
    )


def run(args: argparse.Namespace, progress: Console) -> dict[str, Any]:
    import torch

    from mok.backends import demo_backend, measure_ms, prepare_forward
    from mok.commands.shapes import expert_flops, fit_to_gpu, shrink
    from mok.config import Shape
    from mok.models import get_model
    from mok.reference import (
        BF16_LIMIT,
        forward_loop,
        forward_oracle,
        random_case,
        relative_l2,
    )

    backend = demo_backend(args.backend)
    model = get_model(MODEL)
    if backend.on_gpu:
        shape, ep_size = fit_to_gpu(Shape.of_model(model, GPU_TOKENS), backend.device), 1
    elif backend.kind == "emulator":
        shape, ep_size = shrink(Shape.of_model(model, EMULATED_TOKENS), 8, max_experts=8), 2
    else:
        # Four virtual ranks show the whole protocol where there is no speed to show.
        shape, ep_size = shrink(Shape.of_model(model, 64), 4), 4
    backend.announce(progress.out)
    if not backend.on_gpu:
        torch.set_num_threads(1)  # small matrices: threads cost more than they give

    case = random_case(shape, seed=args.seed, device=backend.device)
    if backend.kind == "emulator":
        output, ms = emulated_run(case, ep_size, backend, progress)
    else:
        forward = prepare_forward(case, ep_size, backend)
        output = forward()
        ms = measure_ms(forward, backend)
    expected = forward_oracle(case) if backend.on_gpu else forward_loop(case)
    error = relative_l2(output, expected)
    return {
        "backend": backend.name,
        "note": backend.note,
        "device": backend.info.name if backend.info else str(backend.device),
        "model": MODEL,
        "kind": backend.kind,
        "scaled_down": shape.hidden_size < model.hidden_size,
        "shape": {
            "T": shape.num_tokens,
            "H": shape.hidden_size,
            "I": shape.intermediate_size,
            "E": shape.num_experts,
            "K": shape.topk,
            "EP": ep_size,
        },
        "oracle": "FP32, expert by expert" if backend.on_gpu else "FP64, token by token",
        "error": error,
        "limit": BF16_LIMIT,
        "ms": ms,
        "tflops": expert_flops(case) / ms / 1e9,
        "ok": error <= BF16_LIMIT,
    }


def emulated_run(
    case: Case, ep_size: int, backend: Backend, console: Console
) -> tuple[torch.Tensor, float]:
    """The output of one emulated pass and its milliseconds, with a bar that names the running kernel."""
    import time

    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from mok.backends import prepare_forward

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("compiling and emulating", total=None)

        def told(kernel: str, steps: int) -> None:
            name = kernel.split("_0")[0]
            bar.update(task, description=f"emulating {name}: {steps:,} warp instructions")

        begin = time.perf_counter()
        output = prepare_forward(case, ep_size, backend, progress=told)()
        return output, 1e3 * (time.perf_counter() - begin)


def passed(document: dict[str, Any]) -> bool:
    return bool(document["ok"])


def show(document: dict[str, Any], console: Console) -> None:
    from rich.table import Table

    scaled = ", scaled down" if document["scaled_down"] else ""
    table = Table(title=f"One MoE layer, {document['model']}{scaled}", title_justify="left")
    table.add_column("what")
    table.add_column("found")
    table.add_row("backend", document["backend"])
    if document["note"]:
        missing = "GPU" if document["kind"] == "emulator" else "kernel"
        table.add_row(f"no {missing} because", document["note"])
    table.add_row("shape", ", ".join(f"{k} {v}" for k, v in document["shape"].items()))
    verdict = "ok" if document["ok"] else "WRONG"
    table.add_row(
        "relative L2 error",
        f"{document['error']:.2e} (limit {document['limit']:.1e}): {verdict}",
    )
    table.add_row("against", document["oracle"])
    if document["kind"] == "emulator":
        table.add_row("time", f"{document['ms'] / 1e3:.1f} s, emulated, compilation included")
    else:
        table.add_row(
            "time, schedule included", f"{document['ms']:.3f} ms, {document['tflops']:.3g} TFLOP/s"
        )
    console.print(table)
