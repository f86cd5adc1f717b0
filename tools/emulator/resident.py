"""What is resident on the emulated device, as Python sees it: warps, CTAs, clusters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mok.tools.emulator import layout as L


class Warp:
    """Python's view of one resident warp."""

    def __init__(self, index: int, state: np.ndarray, regs: np.ndarray) -> None:
        self.index = index
        self.state = state
        self.regs = regs
        self.cta: Cta = None  # type: ignore[assignment]
        self.open_ops: list[Any] = []  # asynchronous MMAs since the last commit
        self.groups: list[list[Any]] = []  # committed ones, oldest first
        self.wait = ""  # what a handler that returned WAIT waits for

    @property
    def mask(self) -> int:
        """Lanes that execute the current Python instruction."""
        return int(self.state[L.W_GUARD])

    def lanes(self) -> list[int]:
        mask = self.mask
        return [i for i in range(32) if mask >> i & 1]

    def value(self, row: int, lane: int) -> int:
        return int(self.regs[row, lane])

    def signed(self, row: int, lane: int) -> int:
        v = int(self.regs[row, lane]) & 0xFFFFFFFF
        return v - (1 << 32) if v >> 31 else v

    def write(self, row: int | None, value: int | np.ndarray) -> None:
        """Writes the active lanes of a register row."""
        if row is None:
            return
        mask = self.mask
        if mask == 0xFFFFFFFF:
            self.regs[row] = value
        else:
            lanes = self.lanes()
            self.regs[row, lanes] = value[lanes] if isinstance(value, np.ndarray) else value


@dataclass
class Cta:
    """A resident thread block."""

    index: int  # slot
    state: np.ndarray
    smem: np.ndarray  # uint8
    warps: list[Warp]
    cluster: Cluster = None  # type: ignore[assignment]
    rank: int = 0
    coords: tuple[int, int, int] = (0, 0, 0)
    on_read: Callable[..., None] | None = None  # told of the chunks that an MMA reads
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Cluster:
    slot: int
    state: np.ndarray
    ctas: list[Cta]
    number: int = -1
    live: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


WAIT = object()  # a handler returns this when its warp must retry the instruction later
