"""A functional emulator for the PTX that CuTe DSL compiles, on the CPU."""

from mok.tools.emulator.errors import (
    EmulatorError,
    KernelFault,
    LaunchError,
    UnsupportedInstruction,
)


def __getattr__(name: str) -> object:
    if name == "Emulator":
        from mok.tools.emulator.emulator import Emulator

        return Emulator
    if name == "Competitor":
        from mok.tools.emulator.residency import Competitor

        return Competitor
    raise AttributeError(name)


__all__ = [
    "Competitor",
    "Emulator",
    "EmulatorError",
    "KernelFault",
    "LaunchError",
    "UnsupportedInstruction",
]
