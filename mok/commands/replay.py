"""``mok replay``: run a captured step on one rank, and compare its bits."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

NAME = "replay"
HELP = "run a captured step on one rank, and compare the bits of its results"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", type=Path, nargs="+", help="the files of all ranks, or their folder"
    )
    parser.add_argument("--arch", help="only the kernel of this architecture, such as sm_90a")
    parser.add_argument("--emulate", action="store_true", help="run the kernel in the CPU emulator")


def run(args: argparse.Namespace, progress: Console) -> dict[str, Any]:
    from mok import capture
    from mok.backends import choose_backend, machine
    from mok.processes import require_kernel

    backend = choose_backend(args.arch, args.emulate)
    backend.announce(progress.out)
    require_kernel(backend.kind, backend.note)
    with machine(backend):
        document = capture.replay(args.files, backend.device)
    return {"backend": backend.name, **document}


def passed(document: dict[str, Any]) -> bool:
    return bool(document["ok"])


def show(document: dict[str, Any], console: Console) -> None:
    from rich.table import Table

    title = f"A step of {document['ep_size']} ranks ({document['why']}) on {document['backend']}"
    table = Table(title=title, title_justify="left")
    for column in ("result", "hash", ""):
        table.add_column(column)
    for name, hashes in document["hashes"].items():
        verdict = "[red]DIFFERS[/]" if name in document["differ"] else "[green]same bits[/]"
        table.add_row(name, " ".join(h[:12] for h in hashes), verdict)
    console.print(table)
