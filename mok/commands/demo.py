"""``mok demo``: the main job, on the best backend present, checked against the oracle."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

NAME = "demo"
HELP = "run a Qwen3-30B-A3B layer on the best backend present and check it"

MODEL = "qwen3-30b-a3b"
GPU_TOKENS = 16384


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="seed of the random inputs")


def run(args: argparse.Namespace, progress: Console) -> dict[str, Any]:
    import torch

    from mok import processes
    from mok.backends import choose_backend, measure_ms, prepare_forward
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

    backend = choose_backend()
    model = get_model(MODEL)
    if backend.on_gpu:
        ranks = processes.group()
        shape = fit_to_gpu(Shape.of_model(model, GPU_TOKENS), backend.device)
        ep_size = 1 if ranks is None else ranks.size
    else:
        # Four virtual ranks show the whole protocol where there is no speed to show.
        shape, ep_size = shrink(Shape.of_model(model, 64), 4), 4
    backend.announce(progress.out)
    if not backend.on_gpu:
        torch.set_num_threads(1)  # small matrices: threads cost more than they give

    case = random_case(shape, seed=args.seed, device=backend.device)
    forward = prepare_forward(case, ep_size, backend)
    output = forward()
    expected = forward_oracle(case) if backend.on_gpu else forward_loop(case)
    error = relative_l2(output, expected)
    ms = measure_ms(forward, backend)
    return {
        "backend": backend.name,
        "note": backend.note,
        "device": backend.info.name if backend.info else str(backend.device),
        "model": MODEL,
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
        table.add_row("no kernel because", document["note"])
    table.add_row("shape", ", ".join(f"{k} {v}" for k, v in document["shape"].items()))
    verdict = "ok" if document["ok"] else "WRONG"
    table.add_row(
        "relative L2 error",
        f"{document['error']:.2e} (limit {document['limit']:.1e}): {verdict}",
    )
    table.add_row("against", document["oracle"])
    table.add_row(
        "time, schedule included", f"{document['ms']:.3f} ms, {document['tflops']:.3g} TFLOP/s"
    )
    console.print(table)
