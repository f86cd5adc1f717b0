"""``mok emulate``: run a script's kernels in the emulator, once per seed."""

import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mok.tools.emulator.errors import EmulatorError, Where


def emulate(
    script: str,
    arch: str,
    seeds: int = 1,
    num_sms: int | None = None,
    check: bool = True,
    timeline: str | None = None,
    arguments: Sequence[str] = (),
    console: Any = None,
) -> dict[str, Any]:
    """Runs ``script`` with its compiled kernels emulated.

    ``seeds``: the plain machine for 0, otherwise the adversarial one with seeds 0 … seeds - 1.
    ``timeline``: a Perfetto JSON file of the last run's asynchronous operations.

    Returns:
        {launches: [{run, kernel, grid, steps, seconds}], reports: [{run, kind, warp, ptx_line, source,
        text}]}. A run ends with the launch that is reported, unless the script catches the error. An exception
        of the script's own and an exit code other than 0 are reported, too, and the next seed follows.

    Raises:
        EmulatorError: there is no such script, or ``seeds`` is negative.
    """
    from rich.console import Console
    from rich.progress import Progress

    from mok.tools.emulator.emulator import Emulator

    if not Path(script).is_file():
        raise EmulatorError("the script must exist", script)
    if seeds < 0:
        raise EmulatorError(
            "the number of seeds must not be negative", seeds, "0: the plain machine"
        )
    launches: list[dict[str, Any]] = []
    reports: list[dict[str, Any]] = []
    runs: list[int | None] = list(range(seeds)) if seeds else [None]
    argv = sys.argv
    with Progress(console=console or Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(f"emulating {Path(script).name}", total=len(runs))
        for seed in runs:
            label = "plain" if seed is None else f"seed {seed}"
            emu = Emulator(arch, num_sms, seed=seed, check=check, timeline=timeline is not None)
            sys.argv = [script, *arguments]
            sys.path.insert(
                0, str(Path(script).resolve().parent)
            )  # as for a script that Python runs
            found: list[dict[str, Any]] = []
            try:
                with emu:
                    runpy.run_path(script, run_name="__main__")
                found = caught(emu.report)
            except EmulatorError as error:
                found = entries(error, emu.report)
            except SystemExit as end:
                found = caught(emu.report)
                if end.code not in (None, 0):
                    found.append(entry("the script must end with 0", None, f"exit code {end.code}"))
            except Exception as error:
                found = caught(emu.report)
                text = "".join(traceback.format_exception(error)).rstrip()
                found.append(entry("the script must not fail", None, text))
            finally:
                reports += [{"run": label, **one} for one in found]
                sys.argv = argv
                sys.path.pop(0)
                if timeline is not None:
                    emu.report.write_timeline(timeline)
            launches += [
                {
                    "run": label,
                    "kernel": r.kernel,
                    "grid": list(r.grid),
                    "steps": r.steps,
                    "seconds": r.seconds,
                }
                for r in emu.report.launches
            ]
            progress.advance(bar)
    return {"launches": launches, "reports": reports}


def entry(kind: str, at: Where | None, text: str) -> dict[str, Any]:
    """A report as data."""
    return {
        "kind": kind,
        "warp": f"CTA {at.cta} warp {at.warp}" if at else None,
        "ptx_line": at.ptx_line if at else None,
        "source": (at.source or None) if at else None,
        "text": text,
    }


def entries(error: EmulatorError, report: Any) -> list[dict[str, Any]]:
    """What stopped a run, as data: every finding of the checkers, and the error if it is another one."""
    found = [entry(f.rule, f.at, str(f)) for f in report.findings]
    if not found or not error.rule.startswith("the checkers found"):
        found.append(entry(error.rule, getattr(error, "at", None), str(error)))
    # Of a deadlock, every warp's wait with its place.
    found += [entry("a warp waits", at, text) for at, text in getattr(error, "waits", ())]
    return found


def caught(report: Any) -> list[dict[str, Any]]:
    """What was found in launches whose errors the script caught itself."""
    found = [entry(f.rule, f.at, str(f)) for f in report.findings]
    if not found:
        found = [entry("a kernel must not fault", None, text) for text in report.faults]
    return found
