"""The one launch path: on the GPU through the object file, in the emulator through its engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from mok.runtime.compile import Kernel


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
