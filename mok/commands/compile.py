"""``mok compile``: compile the kernels of a layer and show what they use. Needs no GPU."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from mok.models import MODELS, get_model

NAME = "compile"
HELP = "compile a layer's kernels and show their resources; needs no GPU"

# ptxas notes that cost speed: setmaxnreg ignored, wgmma serialised.
FORBIDDEN = ("C7507", "C7508", "C7510", "C7511")
SHOWN = (
    "HGMMA",
    "UTCHMMA",
    "UTCQMMA",
    "UTCCP",
    "UTMALDG",
    "UTMASTG",
    "LDGSTS",
    "UBLKCP",
    "USETMAXREG",
    "SYNCS",
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", default="sm_90a", help="such as sm_90a")
    parser.add_argument("--model", default="qwen3-30b-a3b", choices=MODELS)
    parser.add_argument("--precision", default="bf16", choices=("bf16", "mxfp8"))


def run(args: argparse.Namespace, progress: Console) -> dict[str, Any]:
    from mok.backends import require_kernel
    from mok.kernels import backward_kernels, forward_kernels, mxfp8_kernels
    from mok.runtime.compile import get_kernel

    require_kernel(args.arch)
    has_shared = get_model(args.model).shared_intermediate_size is not None
    kernels = []
    specs = forward_kernels(args.arch, has_shared) + backward_kernels(args.arch, has_shared)
    if args.precision == "mxfp8":
        specs = mxfp8_kernels(args.arch, has_shared)
    for spec in specs:
        kernel = get_kernel(spec)
        resources = kernel.resources
        kernels.append(
            {
                "name": spec.name,
                "registers": resources.registers,
                "spill_bytes": resources.spill_bytes,
                "smem_bytes": resources.smem_bytes,
                "tmem_columns": resources.tmem_columns,
                "warnings": list(resources.warnings),
                "compile_s": kernel.compile_s,
                "from_cache": kernel.from_cache,
                "instructions": kernel.instructions(),
            }
        )
    return {
        "arch": args.arch,
        "model": args.model,
        "precision": args.precision,
        "kernels": kernels,
    }


def passed(document: dict[str, Any]) -> bool:
    """No spill, and no ptxas note that a kernel was serialised or its register budget ignored."""
    return all(
        k["spill_bytes"] == 0 and not set(k["warnings"]) & set(FORBIDDEN)
        for k in document["kernels"]
    )


def show(document: dict[str, Any], console: Console) -> None:
    from rich.table import Table

    title = f"Kernels of a {document['model']} layer for {document['arch']}"
    table = Table(title=title, title_justify="left")
    table.add_column("kernel")
    for column in ("registers", "spill B", "smem B", "tmem", "compile s"):
        table.add_column(column, justify="right")
    for k in document["kernels"]:
        table.add_row(
            k["name"],
            str(k["registers"]),
            str(k["spill_bytes"]),
            str(k["smem_bytes"]),
            str(k["tmem_columns"]),
            f"{k['compile_s']:.1f}" + (" (cached)" if k["from_cache"] else ""),
        )
    console.print(table)
    for k in document["kernels"]:
        counts = k["instructions"]
        parts = [f"{counts[name]} {name}" for name in SHOWN if name in counts]
        parts.append(f"{sum(counts.values())} instructions in all")
        notes = f"; ptxas notes {', '.join(k['warnings'])}" if k["warnings"] else ""
        line = f"{k['name']}: {', '.join(parts)}{notes}"
        console.print(line, highlight=False, soft_wrap=True)
