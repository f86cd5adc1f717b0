"""``mok check``: numbers against the oracle."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mok.models import MODELS

if TYPE_CHECKING:
    from mok.backends import Backend
    from mok.commands.check_cases import CheckCase

NAME = "check"
HELP = "check results against the oracle"

WHAT = ("forward", "all")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=WHAT, help="what to check")
    parser.add_argument("--arch", help="only the kernel of this architecture, such as sm_90a")
    parser.add_argument("--emulate", action="store_true", help="run the kernel in the CPU emulator")
    parser.add_argument("--model", choices=MODELS, help="only this model's shape")
    parser.add_argument("--quick", action="store_true", help="fewer cases")


def run(args: argparse.Namespace, progress: Console) -> dict[str, Any]:
    import torch

    from mok import processes
    from mok.backends import choose_backend
    from mok.commands.check_cases import forward_cases, on_processes

    backend = choose_backend(args.arch, args.emulate)
    ranks = processes.group()
    backend.announce(progress.out)
    if not backend.on_gpu:
        torch.set_num_threads(1)  # small matrices: threads cost more than they give
    cases = []
    with progress.status("Checking …") as status:
        chosen = forward_cases(backend, args.model, args.quick)
        if ranks is not None:
            processes.require_kernel(backend.kind, backend.note)
            chosen = on_processes(chosen, ranks.size)
        for case in chosen:
            status.update(f"Checking {case.name} …")
            cases.append(run_case(case, backend))
    size = 1 if ranks is None else ranks.size
    return {"backend": backend.name, "note": backend.note, "processes": size, "cases": cases}


def run_case(case: CheckCase, backend: Backend) -> dict[str, Any]:
    """One row of the document: the case's error and whether it is within the limit."""
    from mok.backends import run_forward
    from mok.reference import forward_loop, forward_oracle, relative_l2

    inputs = case.make()
    found = run_forward(
        inputs,
        case.ep_size,
        backend,
        config=case.config,
        tokens_per_rank=case.tokens_per_rank,
    )
    # On a GPU the loop would take hours; the integer cases are exact in FP32 as well.
    expected = forward_oracle(inputs) if backend.on_gpu else forward_loop(inputs)
    if case.metric == "mismatches":
        value = float((found != expected.bfloat16()).sum())
    else:
        value = relative_l2(found, expected)
    return {
        "name": case.name,
        "metric": case.metric,
        "value": value,
        "limit": case.limit,
        "ok": value <= case.limit,
    }


def passed(document: dict[str, Any]) -> bool:
    return bool(document["cases"]) and all(case["ok"] for case in document["cases"])


def show(document: dict[str, Any], console: Console) -> None:
    from rich.table import Table

    where = document["backend"]
    if document["processes"] > 1:
        where += f", {document['processes']} processes"
    table = Table(title=f"Forward on {where}", title_justify="left")
    for column in ("case", "metric"):
        table.add_column(column)
    for column in ("value", "limit"):
        table.add_column(column, justify="right")
    table.add_column("")
    for case in document["cases"]:
        table.add_row(
            case["name"],
            case["metric"],
            f"{case['value']:.3g}",
            f"{case['limit']:.3g}",
            "[green]ok[/]" if case["ok"] else "[red]WRONG[/]",
        )
    console.print(table)
    wrong = sum(not case["ok"] for case in document["cases"])
    console.print(f"{len(document['cases'])} cases, {wrong} wrong")
