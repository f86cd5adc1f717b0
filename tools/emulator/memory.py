"""Address resolution and scalar accesses for compiled code: generic, global, shared, local."""

import numpy as np

from mok.tools.emulator.intrinsics import ld8, ld16, ld32, ld64, st8, st16, st32, st64
from mok.tools.emulator.jit import njit
from mok.tools.emulator.layout import (
    C_CLUSTER,
    C_INDEX,
    C_SMEM_SIZE,
    F_BAD_SPACE,
    F_EXITED,
    F_MISALIGNED,
    F_NULL,
    F_OOB_GLOBAL,
    F_OOB_LOCAL,
    F_OOB_SHARED,
    F_SCOPE,
    L_CTA,
    L_SIZE,
    L_SMEM,
    LATE_STORES,
    LOCAL_BASE,
    RANK_SHIFT,
    SHARED_BASE,
    SP_GENERIC,
    SP_GLOBAL,
    SP_LOCAL,
    SP_RAW,
    SP_SHARED,
    W_CTA,
    W_FAULT,
    W_FAULT_ADDR,
    W_FAULT_AUX,
    W_FAULT_LANE,
    W_LOCAL,
    W_LOCAL_BYTES,
    X_GPU,
    X_LAST_RANGE,
    X_LATE,
    X_NRANGES,
    X_RANGE_GPUS,
    X_RANGES,
)

_I = np.int64
_OFFSET = (1 << RANK_SHIFT) - 1


@njit
def fault(W, code, addr, lane, aux):
    """Records a fault in the warp's state; the caller returns at once."""
    st64(W + 8 * W_FAULT, _I(code))
    st64(W + 8 * W_FAULT_ADDR, addr)
    st64(W + 8 * W_FAULT_LANE, _I(lane))
    st64(W + 8 * W_FAULT_AUX, _I(aux))
    return _I(0)


@njit
def in_ranges(X, addr, size):
    """Whether [addr, addr + size) lies inside one registered range."""
    n = ld64(X + 8 * X_NRANGES)
    table = ld64(X + 8 * X_RANGES)
    last = ld64(X + 8 * X_LAST_RANGE)
    if last < n and ld64(table + 16 * last) <= addr and addr + size <= ld64(table + 16 * last + 8):
        return True
    lo, hi = _I(0), n
    while lo < hi:
        mid = (lo + hi) >> 1
        if ld64(table + 16 * mid) <= addr:
            lo = mid + 1
        else:
            hi = mid
    if lo == 0:
        return False
    st64(X + 8 * X_LAST_RANGE, lo - 1)
    return addr + size <= ld64(table + 16 * (lo - 1) + 8)


@njit
def resolve(X, W, space, addr, size, lane):
    """Host address of an access, or 0 after recording a fault."""
    if (addr & (size - 1)) != 0:
        return fault(W, F_MISALIGNED, addr, lane, size)
    if space == SP_RAW:
        return addr
    if space == SP_GENERIC:
        window = addr >> 56
        if window == 0:
            space = _I(SP_GLOBAL)
        elif window == 1:
            space = _I(SP_SHARED)
            addr -= SHARED_BASE
        elif window == 2:
            space = _I(SP_LOCAL)
        else:
            return fault(W, F_BAD_SPACE, addr, lane, size)
    if space == SP_SHARED:
        addr &= 0xFFFFFFFF  # shared addresses are 32-bit: base plus offset wraps
        cta = ld64(W + 8 * W_CTA)
        cluster = ld64(cta + 8 * C_CLUSTER)
        rank = addr >> RANK_SHIFT
        offset = addr & _OFFSET
        if (
            rank < 0
            or rank >= ld64(cluster + 8 * L_SIZE)
            or offset + size > ld64(cta + 8 * C_SMEM_SIZE)
        ):
            return fault(W, F_OOB_SHARED, addr, lane, size)
        if ld64(ld64(cluster + 8 * (L_CTA + rank)) + 8 * C_INDEX) < 0:
            return fault(W, F_EXITED, addr, lane, size)
        return ld64(cluster + 8 * (L_SMEM + rank)) + offset
    if space == SP_LOCAL:
        offset = addr & 0xFFFFFFFF
        limit = ld64(W + 8 * W_LOCAL_BYTES)
        if offset + size > limit:
            return fault(W, F_OOB_LOCAL, addr, lane, size)
        return ld64(W + 8 * W_LOCAL) + lane * limit + offset
    if addr >> 56 != 0 or addr < 4096:
        return fault(W, F_NULL if addr >= 0 and addr < 4096 else F_BAD_SPACE, addr, lane, size)
    if ld64(X + 8 * X_NRANGES) > 0 and not in_ranges(X, addr, size):
        return fault(W, F_OOB_GLOBAL, addr, lane, size)
    return addr


@njit
def load(host, size):
    """Zero-extended value of 1, 2, 4 or 8 bytes."""
    if size == 4:
        return ld32(host)
    if size == 8:
        return ld64(host)
    if size == 2:
        return ld16(host)
    return ld8(host)


@njit
def store(host, size, value):
    if size == 4:
        st32(host, value)
    elif size == 8:
        st64(host, value)
    elif size == 2:
        st16(host, value)
    else:
        st8(host, value)


@njit
def is_peers(X, host):
    """Whether an address that was just resolved lies in another GPU's memory."""
    gpus = ld64(X + 8 * X_RANGE_GPUS)
    if gpus == 0:
        return False
    last = ld64(X + 8 * X_LAST_RANGE)
    table = ld64(X + 8 * X_RANGES)
    if host < ld64(table + 16 * last) or host >= ld64(table + 16 * last + 8):
        return False  # not global memory
    return ld64(gpus + 8 * last) != ld64(X + 8 * X_GPU)


@njit
def reaches(X, W, host, scope, lane):
    """Whether an ordered access's scope reaches the memory it touches; False records a fault."""
    if scope >= 3 or not is_peers(X, host):
        return True
    fault(W, F_SCOPE, host, lane, scope)
    return False


@njit
def flush_late(X):
    """Other GPUs now see every store that was kept back, in their order."""
    late = ld64(X + 8 * X_LATE)
    if late == 0:
        return
    for i in range(ld64(late)):
        entry = late + 8 * (1 + 3 * i)
        store(ld64(entry), ld64(entry + 8), ld64(entry + 16))
    st64(late, _I(0))


@njit
def store_late(X, host, size, value):
    """Keeps a store to another GPU's memory back."""
    late = ld64(X + 8 * X_LATE)
    if ld64(late) >= LATE_STORES:
        flush_late(X)
    n = ld64(late)
    entry = late + 8 * (1 + 3 * n)
    st64(entry, host)
    st64(entry + 8, size)
    st64(entry + 16, value)
    st64(late, n + 1)


assert LOCAL_BASE >> 56 == 2
