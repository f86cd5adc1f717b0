"""One rung in a process of its own: ``python -m mok.tools.bringup.child RUNG ...``, for the ladder only.

What happens is written to notes (module ``notes``); the exit code says only whether the end was reached.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mok import processes
from mok.errors import MokError
from mok.tools.bringup.context import Context, NotHere
from mok.tools.bringup.notes import Notes
from mok.tools.bringup.rungs import RUNGS, Rung

if TYPE_CHECKING:
    from mok.backends import Backend


def notes_path(folder: Path, rung: str, emulate: bool, rank: int | None) -> Path:
    """Where a rung's process writes."""
    name = rung + ("-emulated" if emulate else "") + ("" if rank is None else f"-rank{rank}")
    return folder / f"{name}.jsonl"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rung; 0 if it held or does not exist here."""
    parser = argparse.ArgumentParser(prog="mok.tools.bringup.child")
    parser.add_argument("rung", choices=[rung.name for rung in RUNGS])
    parser.add_argument("--arch", required=True)
    parser.add_argument("--emulate", action="store_true")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--fault", default="")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    (rung,) = (r for r in RUNGS if r.name == args.rung)
    rank = int(os.environ["RANK"]) if processes.launched() else None
    path = notes_path(args.folder, rung.name, args.emulate, rank)
    notes = Notes(path, args.folder / "kernels")
    return 0 if climb(rung, args.arch, args.emulate, notes, args.fault, args.seed) else 1


def climb(
    rung: Rung, arch: str, emulate: bool, notes: Notes, fault: str = "", seed: int = 0
) -> bool:
    """Run a rung and note how it ended; whether it held, or need not exist here."""
    begin = time.perf_counter()
    ctx: Context | None = None
    result: dict[str, Any]
    try:
        import torch

        if emulate:
            torch.set_num_threads(1)  # small matrices: threads cost more than they give
        with _ranks(rung):
            ctx = Context(_backend(arch, emulate), notes, fault, seed)
            module, _, function = rung.work.partition(":")
            work = getattr(importlib.import_module(module), function)
            with ctx.watched():
                ctx.begin()
                result = {"state": "ok", "found": work(ctx)}
    except NotHere as reason:
        result = {"state": "not here", "found": str(reason)}
    except Exception as error:  # whatever it is belongs in the report
        if ctx is not None:
            ctx.note_counters("after the failure")
        result = {"state": "failed", "found": str(error), "error": described(error)}
    notes.write("result", seconds=time.perf_counter() - begin, **result)
    return result["state"] != "failed"


def _ranks(rung: Rung) -> contextlib.AbstractContextManager[Any]:
    """The group of all processes, for a rung that has several."""
    return processes.joined() if rung.ranks != "one" else contextlib.nullcontext()


def _backend(arch: str, emulate: bool) -> Backend:
    import torch

    from mok.backends import choose_backend

    if processes.launched() and not emulate and torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        torch.cuda.set_device(local % torch.cuda.device_count())
    return choose_backend(arch, emulate)


def described(error: BaseException) -> dict[str, Any]:
    """An exception as data."""
    found: dict[str, Any] = {"type": type(error).__name__, "text": str(error)}
    if isinstance(error, MokError):
        found |= {"rule": error.rule, "value": str(error.value), "remedy": error.remedy}
    report = getattr(error, "report", None)  # of the emulator's checkers
    if report is not None:
        found["emulator"] = [str(finding) for finding in report.findings[:4]] + report.faults[:4]
    found["traceback"] = traceback.format_exception(error)[-12:]
    return found


if __name__ == "__main__":
    raise SystemExit(main())
