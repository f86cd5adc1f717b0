"""Which phase of an mbarrier an arrival or a wait belongs to, with the clocks of clocks.py."""

import numpy as np

from mok.tools.emulator.clocks import object_owners, object_row, stride, warp_row
from mok.tools.emulator.intrinsics import ld32, ld64, st64
from mok.tools.emulator.jit import njit
from mok.tools.emulator.layout import (
    F_EARLY,
    F_MISSED,
    W_AGENT,
    W_LOOSE,
    W_MISS_HOST,
    W_MISS_PARITY,
    W_MISS_PHASE,
    X_CHECK,
    X_NAGENTS,
    X_NWARPS,
)
from mok.tools.emulator.race import report

_I = np.int64


@njit
def early(X, key, clock):
    """An agent whose arrival in a completed phase did not happen before this clock: its epoch, or 0.

    What was written does not count: an arrival may free a buffer without handing anything over.
    """
    row = object_row(X, key, False)
    if row == 0:
        return _I(0)
    done = row + 2 * stride(X)
    n = ld64(X + 8 * X_NWARPS)
    for i in range(ld64(X + 8 * X_NAGENTS)):
        if (i < 2 * n or i >= 3 * n) and ld32(done + 4 * i) > ld32(clock + 4 * i):
            return _I(i) << 32 | ld32(done + 4 * i)
    return _I(0)


@njit
def check_phase(X, W, key, pc, lane):
    """A warp arrives at an mbarrier, or expects bytes: reports that it may do so a phase too early."""
    if ld64(X + 8 * X_CHECK) == 0 or ld64(W + 8 * W_LOOSE) != 0:
        return
    clock = warp_row(X, W, 0)
    other = early(X, key, clock)
    if other != 0:
        agent = ld64(W + 8 * W_AGENT)
        epoch = agent << 32 | ld32(clock + 4 * agent)
        report(X, F_EARLY, epoch, pc, lane, key, other, _I(-1))


@njit
def check_wait(X, W, key, parity, passed, pc, lane):
    """A warp looks at an mbarrier: reports that it has missed the phase that it waits for."""
    if ld64(X + 8 * X_CHECK) == 0:
        return
    row = object_row(X, key, False)
    if row == 0:
        return
    phases = ld64(object_owners(X, row) + 16)
    again = ld64(W + 8 * W_MISS_HOST) == key and ld64(W + 8 * W_MISS_PARITY) == parity
    if again and phases >= ld64(W + 8 * W_MISS_PHASE) + 2:
        agent = ld64(W + 8 * W_AGENT)
        epoch = agent << 32 | ld32(warp_row(X, W, 0) + 4 * agent)
        report(X, F_MISSED, epoch, pc, lane, key, _I(0), _I(0))
    if passed or not again:
        st64(W + 8 * W_MISS_HOST, _I(0) if passed else key)
        st64(W + 8 * W_MISS_PARITY, parity)
        st64(W + 8 * W_MISS_PHASE, phases)
