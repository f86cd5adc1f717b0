"""``mok check``: numbers against the oracle."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mok.models import MODELS

if TYPE_CHECKING:
    from torch import Tensor

    from mok.backends import Backend
    from mok.commands.check_cases import CheckCase

NAME = "check"
HELP = "check results against the oracle"

MXFP8_ON_HOPPER = " MXFP8 on Hopper gives the same numbers as on Blackwell, not speed."
WHAT = ("forward", "backward", "bits", "mxfp8", "all")


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
    from mok.commands import check_training
    from mok.commands.check_cases import forward_cases, mxfp8_cases, on_processes

    backend = choose_backend(args.arch, args.emulate)
    ranks = processes.group()
    backend.announce(progress.out)
    if not backend.on_gpu:
        torch.set_num_threads(1)  # small matrices: threads cost more than they give
    cases: list[dict[str, Any]] = []
    with progress.status("Checking …") as status:
        if ranks is not None:
            processes.require_kernel(backend.kind, backend.note)
        run_backward, run_bits = check_training.run_backward_case, check_training.run_bits_case
        checks: list[tuple[str, Any, Any]] = [
            ("forward", forward_cases, run_case),
            ("backward", check_training.backward_cases, run_backward),
            ("bits", check_training.bits_cases, run_bits),
            ("mxfp8", mxfp8_cases, run_case),
            ("mxfp8", check_training.mxfp8_backward_cases, run_backward),
            ("mxfp8", check_training.mxfp8_bits_cases, run_bits),
        ]
        for what, make, check in checks:
            if args.what not in (what, "all"):
                continue
            chosen = list(make(backend, args.model, args.quick))
            if ranks is not None:
                chosen = list(on_processes(iter(chosen), ranks.size))
            begin, found = time.perf_counter(), []
            for number, case in enumerate(chosen, 1):
                status.update(f"Checking {what} {number} of {len(chosen)}, {case.name} …")
                found += check(case, backend)
            if processes.is_leader():  # in a log, too, and of a run that is cut off
                wrong = sum(not row["ok"] for row in found)
                seconds = time.perf_counter() - begin
                progress.print(f"{what}: {len(found)} results, {wrong} wrong, {seconds:.0f} s")
            cases += found
    size = 1 if ranks is None else ranks.size
    note = backend.note
    if args.what in ("mxfp8", "all") and backend.arch == "sm_90a":
        note += MXFP8_ON_HOPPER
    return {
        "backend": backend.name,
        "note": note,
        "what": args.what,
        "processes": size,
        "cases": cases,
    }


def run_case(case: CheckCase, backend: Backend) -> list[dict[str, Any]]:
    """Rows of the document: the case's error and whether it is within the limit.

    In MXFP8 random values have three rows: error and cosine against FP32, and against the quantised
    reference.
    """
    from mok.backends import run_forward
    from mok.reference import (
        MXFP8_LIMIT,
        forward_loop,
        forward_oracle,
        forward_reference,
        relative_l2,
    )

    inputs = case.make()
    found = run_forward(
        inputs,
        case.ep_size,
        backend,
        config=case.config,
        tokens_per_rank=case.tokens_per_rank,
        precision=case.precision,
    )
    # On a GPU the loop would take hours; the integer cases are exact in FP32 as well.
    expected = forward_oracle(inputs) if backend.on_gpu else forward_loop(inputs)
    if case.metric == "mismatches":
        wrong = float((found != expected.bfloat16()).sum())
        return [row(case.name, case.metric, wrong, case.limit)]
    rows = [row(case.name, case.metric, relative_l2(found, expected), case.limit)]
    if case.precision == "mxfp8":
        quantised = forward_reference(inputs, case.ep_size, precision="mxfp8")
        error = relative_l2(found, quantised)
        rows.append(cosine_row(case.name, found, expected))
        rows.append(row(f"{case.name}, against the quantised", case.metric, error, MXFP8_LIMIT))
    return rows


def row(name: str, metric: str, value: float, limit: float) -> dict[str, Any]:
    """One case of the document."""
    return {"name": name, "metric": metric, "value": value, "limit": limit, "ok": value <= limit}


def cosine_row(name: str, found: Tensor, expected: Tensor) -> dict[str, Any]:
    """The distance of a cosine from 1."""
    from mok.reference import FP32_COSINE_LIMIT, cosine

    value = 1 - cosine(found, expected)
    return row(name, "1 - cosine", value, 1 - FP32_COSINE_LIMIT)


def passed(document: dict[str, Any]) -> bool:
    return bool(document["cases"]) and all(case["ok"] for case in document["cases"])


def show(document: dict[str, Any], console: Console) -> None:
    from rich.table import Table

    where = document["backend"]
    if document["processes"] > 1:
        where += f", {document['processes']} processes"
    table = Table(title=f"{document['what'].capitalize()} on {where}", title_justify="left")
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
