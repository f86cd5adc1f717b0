"""``mok emulate``: run a script's kernels in the emulator, once per seed."""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from mok.tools.emulator.errors import EmulatorError


def emulate(
    script: str,
    arch: str,
    seeds: int = 1,
    num_sms: int | None = None,
    check: bool = True,
    timeline: str | None = None,
    arguments: Sequence[str] = (),
) -> int:
    """Runs ``script`` with its compiled kernels emulated; the exit code is 1 after any report.

    ``seeds``: the plain machine for 0, otherwise the adversarial one with seeds 0 … seeds - 1.
    ``timeline``: a Perfetto JSON file of the last run's asynchronous operations.
    """
    from rich.console import Console
    from rich.progress import Progress

    from mok.tools.emulator.emulator import Emulator

    console = Console(stderr=True)
    if not Path(script).is_file():
        raise EmulatorError("the script must exist", script)
    failures = 0
    runs: list[int | None] = list(range(seeds)) if seeds else [None]
    argv = sys.argv
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task(f"emulating {Path(script).name}", total=len(runs))
        for seed in runs:
            label = "plain" if seed is None else f"seed {seed}"
            emu = Emulator(arch, num_sms, seed=seed, check=check, timeline=timeline is not None)
            sys.argv = [script, *arguments]
            try:
                with emu:
                    runpy.run_path(script, run_name="__main__")
            except EmulatorError as exc:
                failures += 1
                console.print(f"[red]{label}[/red]: {exc}", highlight=False, soft_wrap=True)
            else:
                steps = sum(r.steps for r in emu.report.launches)
                seconds = sum(r.seconds for r in emu.report.launches)
                console.print(
                    f"{label}: {len(emu.report.launches)} launches, {steps} warp instructions, "
                    f"{seconds:.2f} s, no report",
                    highlight=False,
                )
            finally:
                sys.argv = argv
                if timeline is not None:
                    emu.report.write_timeline(timeline)
            progress.advance(bar)
    return 1 if failures else 0
