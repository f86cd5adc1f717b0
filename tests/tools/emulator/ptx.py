"""Run hand-written PTX in the emulator."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mok.tools.emulator.emulator import Report

HEAD = ".version 9.0\n.target {arch}\n.address_size 64\n"


def kernel(body: str, params: str = ".param .u64 p0", shared: int = 0) -> str:
    """A kernel ``k`` around a body; ``smem`` is ``shared`` bytes of shared memory."""
    space = f".shared .align 1024 .b8 smem[{shared}];\n" if shared else ""
    return (
        f".visible .entry k({params})\n{{\n.reg .pred %p<16>;\n.reg .b16 %h<16>;\n"
        f".reg .b32 %r<64>;\n.reg .b64 %d<64>;\n{space}{body}\nret;\n}}\n"
    )


def run(
    text: str,
    *arrays: np.ndarray,
    threads: int = 32,
    grid: int = 1,
    cluster: int = 1,
    arch: str = "sm_90a",
    num_sms: int = 4,
    **options: object,
) -> Report:
    """Launches ``k`` with the arrays' addresses as 64-bit parameters."""
    from mok.tools.emulator import Emulator  # what only writes PTX needs no numba
    from mok.tools.emulator.intercept import LaunchRequest

    emu = Emulator(arch, num_sms, **options)  # type: ignore[arg-type]
    emu.register(*arrays)
    values = [ctypes.c_uint64(a.ctypes.data) for a in arrays]
    pointers = (ctypes.c_uint64 * max(1, len(values)))(*(ctypes.addressof(v) for v in values))
    request = LaunchRequest(
        "k", (grid, 1, 1), (threads, 1, 1), (cluster, 1, 1), 0, ctypes.addressof(pointers), None
    )
    emu.run_ptx(HEAD.format(arch=arch) + text, request)
    return emu.report
