"""How long the emulator takes for the forward layer of the demo and a GEMM 256³.

    python -m tests.tools.emulator.times [REPEATS]

Prints the rows of docs/measurements/emulator-times.md: seconds of the launches, translation cached, as the
clock and as the process's cores count them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median

import torch

from mok.tools.emulator.emulator import Report
from tests.tools.emulator.hardware import without_init

LAYER_LIMIT, GEMM_LIMIT = 15.0, 1.5  # seconds of two cores
MACHINES = {"plain": (None, False), "plain, checkers": (None, True), "adversarial": (0, True)}
Seconds = tuple[float, float]


def layer(seed: int | None, check: bool) -> Report:
    """EP 2, T 256, H 256, I 256, E 4, K 2."""
    from tests.tools.emulator.test_emulated_forward import run

    return run("sm_90a", 2, seed, check)


def gemm(seed: int | None, check: bool) -> Report:
    """quack's SM90 GEMM, BF16, exact on integers."""
    from tests.tools.emulator import test_emulator_quack as others

    with without_init("quack"):
        from quack.gemm_default_epi import GemmDefaultSm90 as Kernel

        a = (torch.arange(256 * 256).view(1, 256, 256) % 7 - 3).bfloat16()
        b = (torch.arange(256 * 256).view(1, 256, 256) % 5 - 2).bfloat16()
        d = torch.zeros(1, 256, 256, dtype=torch.bfloat16)
        kernel = others.make(Kernel, (128, 128), (1, 1, 1))
        arguments = Kernel.EpilogueArguments()
        report = others.run("sm_90a", kernel, a, b, d, arguments, seed, check=check)
    assert torch.equal(d[0], (a[0].float() @ b[0].float().T).bfloat16())
    return report


def seconds(report: Report) -> Seconds:
    """Of all launches, by the clock and of the process."""
    return (
        sum(r.seconds for r in report.launches),
        sum(r.cpu_seconds for r in report.launches),
    )


def repeated(
    program: Callable[[int | None, bool], Report], machine: str, repeats: int
) -> list[Seconds]:
    """Seconds of each repetition after the first, which translates."""
    seed, check = MACHINES[machine]
    program(seed, check)
    return [seconds(program(seed, check)) for _ in range(repeats)]


def main() -> int:
    from tests.tools.emulator import test_emulator_quack  # noqa: F401  finds quack before it is replaced

    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    slow = False
    print("| program | machine | by the clock, median (slowest) | of one core, median | bar |")
    print("| --- | --- | --- | --- | --- |")
    for name, program, limit in (
        ("forward layer", layer, LAYER_LIMIT),
        ("GEMM 256³", gemm, GEMM_LIMIT),
    ):
        for machine in MACHINES:
            found = repeated(program, machine, repeats)
            wall, cpu = ([s[i] for s in found] for i in (0, 1))
            bar = f"{limit:g} s" if machine == "plain" else ""
            slow |= bool(bar) and max(wall) > limit
            print(
                f"| {name} | {machine} | {median(wall):.2f} s ({max(wall):.2f} s) "
                f"| {median(cpu):.2f} s | {bar} |",
                flush=True,
            )
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
