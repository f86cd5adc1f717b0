"""What a warp waits for, in words."""

from typing import TYPE_CHECKING

import numpy as np

from mok.tools.emulator import layout as L
from mok.tools.emulator.places import locate, word_at

if TYPE_CHECKING:
    from mok.tools.emulator.machine import Machine
    from mok.tools.emulator.resident import Warp


def describe_mbarrier(word: int) -> str:
    """Phase, arrivals and bytes that an mbarrier still waits for."""
    from mok.tools.emulator.mbarrier import mb_expected, mb_pending, mb_phase, mb_tx

    signed = int(np.array(word, dtype=np.uint64).astype(np.int64))
    return (
        f"phase {mb_phase(signed)}, {mb_pending(signed)} of {mb_expected(signed)} arrivals and "
        f"{mb_tx(signed)} bytes outstanding"
    )


def describe_wait(machine: "Machine", w: "Warp") -> str:
    """One line: the warp's place and its wait."""
    s = w.state
    kind = int(s[L.W_WAIT_KIND])
    pc = int(s[L.W_WAIT_PC]) if kind else int(s[L.W_PC])
    address, value = int(s[L.W_WAIT_ADDR]), int(s[L.W_WAIT_VALUE])
    if kind == L.WAIT_MBAR:
        what = (
            f"mbarrier at {locate(machine, address)} to leave phase {value >> 62 & 1}: "
            + describe_mbarrier(word_at(address))
        )
    elif kind == L.WAIT_BAR:
        base = address - 16
        number = (base - int(s[L.W_CTA])) // 8 - L.C_BAR
        what = (
            f"named barrier {number // 4}: {word_at(base)} of {word_at(base + 8)} threads arrived"
        )
    elif kind == L.WAIT_CLUSTER:
        cluster = w.cta.cluster.state
        what = (
            f"cluster barrier: {int(cluster[L.L_ARRIVED])} of {int(cluster[L.L_ALIVE])} "
            "threads arrived"
        )
    elif kind == L.WAIT_POLL:
        size = int(s[L.W_WAIT_SIZE]) or 4
        what = f"{locate(machine, address)} to change from {word_at(address, size)}"
    elif kind == L.WAIT_CONVERGE:
        what = "other lanes of the warp"
    elif kind == L.WAIT_PY:
        what = w.wait or "an asynchronous operation"
    else:
        what = "nothing"
    return f"{machine.where(w, pc)} waits for {what}"
