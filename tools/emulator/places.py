"""Where memory is, in words and numbers that are the same on every host.

Global addresses are those of this process, which differ from run to run.  Reports therefore name the
tensor by the order in which tensors were registered, and the offset in it.
"""

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mok.tools.emulator import layout as L

if TYPE_CHECKING:
    from mok.tools.emulator.machine import Machine

_OFFSET = (1 << L.RANK_SHIFT) - 1
_NEAR = 1 << 20  # an address at most so far behind a tensor is named after it


class Range(NamedTuple):
    """Global memory that kernels may access."""

    start: int
    end: int
    gpu: int
    number: int  # its place in the order of registration
    name: str


def aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Zeros at a multiple of 64 KiB, so that the low bits of addresses are the same everywhere."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + (1 << 16), dtype=np.uint8)
    shift = -raw.ctypes.data % (1 << 16)
    return raw[shift : shift + size].view(dtype).reshape(shape)


def word_at(address: int, size: int = 8) -> int:
    """Unsigned value in host memory that the emulator owns."""
    return int.from_bytes(ctypes.string_at(address, size), "little")


def locate(machine: "Machine", address: int) -> str:
    """Names an address: shared memory of a CTA, or global."""
    for cta in machine.ctas:
        base = cta.smem.ctypes.data
        if base <= address < base + cta.smem.nbytes:
            return f"shared {address - base:#x} of CTA {cta.coords}"
    if address >> 56 == 1:
        return shared_place(address & 0xFFFFFFFF)
    before = [r for r in machine.memory if r.start <= address < r.end + _NEAR]
    if before:
        r = max(before)
        if address < r.end:
            return f"{r.name} + {address - r.start:#x}"
        return f"global memory, {address - r.end:#x} behind the end of {r.name}"
    return f"global {address:#x}"


def shared_place(address: int) -> str:
    """Names an address of the shared window."""
    return f"shared {address & _OFFSET:#x} of the CTA of rank {address >> L.RANK_SHIFT}"


def fault_place(machine: "Machine", code: int, address: int) -> str:
    """What a fault says of its address, which for some is something else."""
    if code == L.F_BARRIER:
        return f"barrier {address}"
    if code in (L.F_CLUSTER, L.F_CONVERGENCE, L.F_TRAP):
        return "no address"
    if code in (L.F_OOB_SHARED, L.F_EXITED):
        return shared_place(address)
    if code == L.F_OOB_LOCAL:
        return f"local {address:#x}"
    return locate(machine, address)
