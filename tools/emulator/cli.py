"""``mok emulate``: run a script's kernels in the emulator, once per seed."""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mok.tools.emulator.errors import EmulatorError


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
        {launches: [{run, kernel, grid, steps, seconds}], reports: [{run, kind, text, …}]}; a run ends
        at its first report.
    """
    from rich.console import Console
    from rich.progress import Progress

    from mok.tools.emulator.emulator import Emulator

    if not Path(script).is_file():
        raise EmulatorError("the script must exist", script)
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
            try:
                with emu:
                    runpy.run_path(script, run_name="__main__")
            except EmulatorError as error:
                report = getattr(error, "report", None)
                known = dict(vars(report)) if hasattr(report, "__dict__") else {}
                reports.append(
                    {"run": label, "kind": type(error).__name__, "text": str(error)}
                    | {name: str(value) for name, value in known.items() if name != "text"}
                )
            finally:
                sys.argv = argv
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
