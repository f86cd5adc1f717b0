"""Errors of the emulator: what rule was broken, where, with which value, and what to do."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Where:
    """A warp and an instruction of it."""

    cta: tuple[int, int, int]
    warp: int  # in its CTA
    ptx_line: int
    text: str  # of the instruction
    source: str  # file:line of the DSL, empty when the PTX does not say

    @property
    def instruction(self) -> str:
        place = f"PTX line {self.ptx_line}: {self.text}"
        return f"{place} ({self.source})" if self.source else place

    def __str__(self) -> str:
        return f"CTA {self.cta} warp {self.warp}, {self.instruction}"


class EmulatorError(RuntimeError):
    """Base class.  ``rule``, ``value`` and ``remedy`` say what went wrong and how to go on."""

    def __init__(self, rule: str, value: object, remedy: str = "") -> None:
        self.rule = rule
        self.value = value
        self.remedy = remedy
        text = f"{rule}: {value}"
        super().__init__(f"{text}. {remedy}" if remedy else text)


class UnsupportedInstruction(EmulatorError):
    """An instruction, or a form of one, that the emulator does not implement."""


class LaunchError(EmulatorError):
    """A launch that the emulated architecture cannot run."""


class KernelFault(EmulatorError):
    """A checker stopped the kernel.  ``report`` holds every finding as data, ``at`` is where it stopped; of a
    deadlock ``waits`` has each warp's place and what it waits for."""

    def __init__(
        self,
        rule: str,
        value: object,
        remedy: str = "",
        report: object = None,
        at: Where | None = None,
        waits: Sequence[tuple[Where, str]] = (),
    ) -> None:
        super().__init__(rule, value, remedy)
        self.report, self.at, self.waits = report, at, waits
