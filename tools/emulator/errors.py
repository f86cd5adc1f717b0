"""Errors of the emulator: what rule was broken, with which value, and what to do."""


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
    """A checker stopped the kernel.  ``report`` holds every finding as data."""

    def __init__(self, rule: str, value: object, remedy: str = "", report: object = None) -> None:
        super().__init__(rule, value, remedy)
        self.report = report
