"""``mok demo``: the main job, on the best backend present, checked against the oracle."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from mok.backends import Backend
    from mok.reference import Case

NAME = "demo"
HELP = "run a Qwen3-30B-A3B layer on the best backend present and check it"

MODEL = "qwen3-30b-a3b"
GPU_TOKENS = 16384
EMULATED_TOKENS, EMULATED_EXPERTS = 32, 8
STEPS_PER_TASK = 20_000  # warp instructions, about: for the progress bar


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="seed of the random inputs")
    parser.add_argument(
        "--arch", help="the kernel of this architecture, in the emulator where there is no such GPU"
    )
    parser.add_argument(
        "--reference", action="store_true", help="without a GPU: the plain torch reference"
    )


def backend_for(arch: str | None, reference: bool = False) -> Backend:
    """A GPU, of ``arch`` if it is given, else the emulator; the reference if asked for, or needed."""
    from mok import processes
    from mok.backends import choose_backend, emulated_instead
    from mok.errors import DeviceError

    if arch is None:
        found = choose_backend()
        if found.kind != "reference" or reference or processes.group() is not None:
            return found
        return emulated_instead(found)
    emulator = choose_backend(arch, emulate=True)  # refuses an unknown architecture
    try:
        return choose_backend(arch)
    except DeviceError:
        return emulator


@contextlib.contextmanager
def emulation_bar(
    case: Case, ep_size: int, arch: str, console: Console
) -> Iterator[Callable[[int], None]]:
    """A progress bar over the warp instructions of a forward pass; yields what the emulator tells."""
    from rich.progress import Progress

    from mok.config import tile_rows
    from mok.reference import schedule_reference

    shape, tile = case.shape, tile_rows(arch)
    ids = case.top_experts.split(case.tokens_per_rank(ep_size))
    schedules = schedule_reference(ids, shape.num_experts, ep_size, tile)
    blocks = sum(s.num_tokens for s in schedules) // tile
    tasks = blocks * (-(-2 * shape.intermediate_size // 256) + -(-shape.hidden_size // 256))
    before, last = 0, 0  # of earlier launches, of the running one
    with Progress(console=console) as progress:
        bar = progress.add_task(f"Emulating {tasks} tasks of {arch}", total=tasks * STEPS_PER_TASK)

        def advance(steps: int) -> None:
            nonlocal before, last
            before += last if steps < last else 0
            last = steps
            progress.update(bar, completed=min(before + steps, tasks * STEPS_PER_TASK))

        yield advance
        progress.update(bar, completed=tasks * STEPS_PER_TASK)


def run(args: argparse.Namespace, progress: Console) -> dict[str, Any]:
    import torch

    from mok import processes
    from mok.backends import measure_ms, prepare_forward
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

    backend = backend_for(args.arch, args.reference)
    model = get_model(MODEL)
    if backend.on_gpu:
        real = Shape.of_model(model, GPU_TOKENS)
        shape, ep_size = fit_to_gpu(real, backend.device, exact=False), 1
    elif backend.kind == "emulator":
        shape, ep_size = shrink(Shape.of_model(model, EMULATED_TOKENS), 8, EMULATED_EXPERTS), 2
    else:
        # Four virtual ranks show the whole protocol where there is no speed to show.
        shape, ep_size = shrink(Shape.of_model(model, 64), 4), 4
    if (ranks := processes.group()) is not None:
        processes.require_kernel(backend.kind, backend.note)
        ep_size = ranks.size
    backend.announce(progress.out)
    if not backend.on_gpu:
        torch.set_num_threads(1)  # small matrices: threads cost more than they give

    case = random_case(shape, seed=args.seed, device=backend.device)
    if backend.kind == "emulator":
        with emulation_bar(case, ep_size, str(backend.arch), progress) as advance:
            forward = prepare_forward(case, ep_size, backend, progress=advance)
            begin = time.perf_counter()
            output = forward()
            ms = 1e3 * (time.perf_counter() - begin)
    else:
        forward = prepare_forward(case, ep_size, backend)
        output = forward()
        ms = measure_ms(forward, backend)
    expected = forward_oracle(case) if backend.on_gpu else forward_loop(case)
    error = relative_l2(output, expected)
    return {
        "backend": backend.name,
        "kind": backend.kind,
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
        missing = "GPU" if document["kind"] == "emulator" else "kernel"
        table.add_row(f"no {missing} because", document["note"])
    table.add_row("shape", ", ".join(f"{k} {v}" for k, v in document["shape"].items()))
    verdict = "ok" if document["ok"] else "WRONG"
    table.add_row(
        "relative L2 error",
        f"{document['error']:.2e} (limit {document['limit']:.1e}): {verdict}",
    )
    table.add_row("against", document["oracle"])
    if "emulator" in document["backend"]:
        table.add_row("time to emulate it", f"{document['ms'] / 1e3:.0f} s")
    else:
        table.add_row(
            "time, schedule included", f"{document['ms']:.3f} ms, {document['tflops']:.3g} TFLOP/s"
        )
    console.print(table)
