"""``mok bringup``: from the driver to the rack one rung at a time, and a report of where it stops."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from mok.errors import DeviceError, MokError

NAME = "bringup"
HELP = (
    "climb from the driver to a whole rack, rung by rung; stops at the first failure, with a report"
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", help="the kernels' architecture; by default the GPU's")
    parser.add_argument(
        "--emulate", action="store_true", help="a rehearsal: every rung in the CPU emulator"
    )
    parser.add_argument("--from", dest="first", metavar="RUNG", help="begin at this rung")
    parser.add_argument("--to", dest="last", metavar="RUNG", help="end with this rung")
    parser.add_argument("--list", action="store_true", help="say what the rungs are, run none")
    parser.add_argument("--out", default="mok-bringup", metavar="FOLDER", help="for the report")
    parser.add_argument("--seed", type=int, default=0, help="of all inputs")
    parser.add_argument(
        "--limit-scale", type=float, default=1.0, help="multiplies the rungs' time limits"
    )
    # RUNG=KIND makes a rung fail on purpose: for the tests of this command.
    parser.add_argument("--inject", action="append", default=[], help=argparse.SUPPRESS)


def run(args: argparse.Namespace, progress: Console) -> dict[str, Any]:
    from mok.processes import launched
    from mok.tools.bench.results import make_folder
    from mok.tools.bringup import report
    from mok.tools.bringup.ladder import Climb
    from mok.tools.bringup.rungs import ladder, part

    injected = faults(args.inject)
    if not (math.isfinite(args.limit_scale) and args.limit_scale > 0):
        raise MokError("--limit-scale must be a number above 0", args.limit_scale)
    folder = Path(args.out)
    if launched():
        folder /= f"rank{os.environ['RANK']}"
    try:
        arch = _arch(args)
    except DeviceError as error:
        if not (args.list or args.emulate):
            make_folder(folder)
            path = report.write(report.without_gpu(args.arch or "", error), folder)
            progress.print(f"report: {path}", markup=False, highlight=False, soft_wrap=True)
        raise
    rungs = part(ladder(arch, launched()), args.first, args.last)
    if args.list:
        checks = [{"name": r.name, "ok": True, "found": r.title, "remedy": "", "proves": r.proves,
                   "state": "listed"} for r in rungs]  # fmt: skip
        return {"arch": arch, "checks": checks, "failure": None, "report": None}
    make_folder(folder)
    num_gpus = 1
    if not args.emulate:
        from mok.runtime.device import device_count

        num_gpus = device_count()

    def say(text: str) -> None:
        progress.print(text, markup=False, highlight=False, soft_wrap=True)

    document = report.head(arch, args.emulate)
    climb = Climb(
        rungs, arch, args.emulate, folder.resolve(), num_gpus, injected,
        args.limit_scale, args.seed, say=say,
    )  # fmt: skip
    document["checks"], document["failure"] = climb.checks, None
    try:
        with _sigterm_raises():
            climb.run()
    finally:
        document["failure"] = climb.failure
        document["report"] = str(report.write(document, folder))
    return document


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM as an exception: where one rank fails, torchrun and Slurm end the others by it, and their rungs'
    processes must end, too, and their reports be written."""

    def stop(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the report must be written first
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def faults(given: list[str]) -> dict[str, str]:
    """Faults by rung, from RUNG=KIND (KIND "wrong" by default).

    Raises:
        MokError: no such kind, or no such rung.
    """
    from mok.tools.bringup.context import FAULTS
    from mok.tools.bringup.rungs import RUNGS

    found = {}
    for text in given:
        rung, _, kind = text.partition("=")
        if (kind or "wrong") not in FAULTS:
            raise MokError(f"a fault must be one of {', '.join(FAULTS)}", repr(kind))
        if rung not in [r.name for r in RUNGS]:
            raise MokError("a fault must be in a known rung", repr(rung))
        found[rung] = kind or "wrong"
    return found


def _arch(args: argparse.Namespace) -> str:
    """What to compile for, checked against the GPU."""
    from mok.backends import require_kernel

    if args.arch is not None:
        require_kernel(args.arch)
    if args.emulate or args.list:
        return args.arch or "sm_100a"
    from mok.runtime.device import best_backend

    found = best_backend()
    if found.device is None or found.arch is None:
        raise DeviceError(
            "bring-up needs a Blackwell or Hopper GPU", found.reason,
            "Add --emulate to rehearse it on the CPU",
        )  # fmt: skip
    if args.arch is not None and args.arch != found.arch:
        raise DeviceError(
            f"a ladder for {args.arch} needs a GPU of that architecture",
            f"{found.device.name} ({found.arch})",
            "Leave --arch out, or add --emulate",
        )
    return found.arch


def passed(document: dict[str, Any]) -> bool:
    return document["failure"] is None and all(check["ok"] for check in document["checks"])


def show(document: dict[str, Any], console: Console) -> None:
    from rich.table import Table

    if document["report"] is None:
        for check in document["checks"]:
            line = f"{check['name']:15} {check['found']}: {check['proves']}"
            console.print(line, highlight=False, soft_wrap=True)
        return
    table = Table(title=f"Bring-up, {document['backend']}", title_justify="left")
    for column in ("rung", "", "s", "found"):
        table.add_column(column)
    colours = {"ok": "green", "not here": "yellow", "not run": "dim"}
    for check in document["checks"]:
        colour = colours.get(check["state"], "red")
        table.add_row(
            check["name"],
            f"[{colour}]{check['state']}[/]",
            f"{check['seconds']:.0f}" if check["seconds"] else "",
            check["found"],
        )
    console.print(table)
    failure = document["failure"]
    if failure is not None:
        kernel = failure["kernel"]
        if kernel:
            console.print(f"kernel {kernel['name']}, PTX sha256 {kernel['ptx_sha256']}")
        if failure["emulated"]:
            found = failure["emulated"]
            console.print(f"in the emulator, same inputs: {found['state']}. {found['found']}")
        remedy = next(c["remedy"] for c in document["checks"] if c["name"] == failure["rung"])
        console.print(remedy)
    console.print(f"report: {document['report']}")
