"""``mok emulate``: any CuTe DSL script on the CPU, its kernels in the emulator."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from mok.config import TILE_ROWS
from mok.errors import MokError

NAME = "emulate"
HELP = "run a script's CuTe DSL kernels on the CPU, and report races, hangs and stray accesses"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", help="a Python file; it runs as __main__")
    parser.add_argument("--arch", default="sm_90a", choices=TILE_ROWS)
    parser.add_argument("--seeds", type=int, default=1, help="adversarial runs; 0: one plain run")
    parser.add_argument("--num-sms", type=int, help="SMs of the emulated GPU")
    parser.add_argument("--no-check", action="store_true", help="run without the checkers")
    parser.add_argument("--timeline", help="write the last run's Perfetto JSON here")
    parser.add_argument(
        "arguments", nargs="*", help="passed to the script: right after it, before any option"
    )


def run(args: argparse.Namespace, progress: Console) -> dict[str, Any]:
    from mok.tools.emulator.cli import emulate
    from mok.tools.emulator.errors import EmulatorError

    if args.timeline:
        from mok.tools.bench.results import make_folder

        make_folder(Path(args.timeline).parent, "Name another file with --timeline")
    try:
        return emulate(
            args.script,
            args.arch,
            seeds=args.seeds,
            num_sms=args.num_sms,
            check=not args.no_check,
            timeline=args.timeline,
            arguments=args.arguments,
            console=progress,
        )
    except EmulatorError as error:  # of the command line: what scripts do is in the document
        raise MokError(error.rule, error.value, error.remedy) from None


def passed(document: dict[str, Any]) -> bool:
    return not document["reports"]


def show(document: dict[str, Any], console: Console) -> None:
    for launch in document["launches"]:
        console.print(
            f"{launch['run']}: {launch['kernel'][:60]} grid {launch['grid']},"
            f" {launch['steps']} warp instructions, {launch['seconds']:.2f} s",
            highlight=False,
        )
    for report in document["reports"]:
        console.print(f"{report['run']}: {report['text']}", style="red", markup=False)
    if not document["reports"]:
        console.print("No report.")
