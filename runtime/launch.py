"""The one launch path: on the GPU through the object file, in the emulator through its engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from mok.runtime.compile import Kernel

if TYPE_CHECKING:
    from mok.runtime.hostcall import Repeated


class Emulator(Protocol):
    """What the emulator registers with ``set_active_emulator``."""

    def launch(self, compiled: Any, args: tuple[Any, ...]) -> None:
        """Run ``compiled`` (what ``cute.compile`` returned) on CPU addresses, to completion."""


_emulator: Emulator | None = None


def active_emulator() -> Emulator | None:
    """The emulator that this process runs kernels in, or None: a GPU does."""
    return _emulator


def set_active_emulator(emulator: Emulator | None) -> Emulator | None:
    """Install (or, with None, remove) the emulator; returns the one before, to restore it.

    Kernels of the GPU path stay valid: the memory cache keeps the two apart.
    """
    global _emulator
    before, _emulator = _emulator, emulator
    return before


_watcher: Callable[[Kernel], None] | None = None


def set_launch_watcher(
    watcher: Callable[[Kernel], None] | None,
) -> Callable[[Kernel], None] | None:
    """Call ``watcher`` with each kernel before it is launched; returns the one before, to restore it."""
    global _watcher
    before, _watcher = _watcher, watcher
    return before


def launch(kernel: Kernel, *args: Any) -> None:
    """Launch a kernel; arguments as in its host function, the stream (int or CUstream) last."""
    if _watcher is not None:
        _watcher(kernel)
    if _emulator is None:
        (kernel.host or kernel.load())(*args)
    else:
        _emulator.launch(kernel.jit, args)


class Prepared:
    """A launch to be made again and again: only its first arguments and the stream change.

    Costs the host a third of ``launch``, since everything else is converted once.

    Args:
        kernel: what to launch.
        leading: how many arguments change, all of them Int64.
        rest: the others, without the stream.
        device: ordinal of the device that is current at every launch; unused in the emulator.
    """

    def __init__(self, kernel: Kernel, leading: int, rest: tuple[Any, ...], device: int) -> None:
        self.kernel = kernel
        self._arguments = leading, rest, device
        self._repeated: Repeated | None = None

    def __call__(self, stream: int, *leading: int) -> None:
        if _watcher is not None:
            _watcher(self.kernel)
        if _emulator is not None:
            _emulator.launch(self.kernel.jit, (*leading, *self._arguments[1], stream))
            return
        repeated = self._repeated
        if repeated is None:
            host = self.kernel.host or self.kernel.load()
            repeated = self._repeated = host.repeated(*self._arguments)
        repeated(stream, leading)
