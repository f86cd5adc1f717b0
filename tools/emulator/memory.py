"""Address resolution and scalar accesses for compiled code: generic, global, shared, local."""

import numpy as np

from mok.tools.emulator.atomics import combine
from mok.tools.emulator.clocks import covered, warp_row
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
    LATE_WORDS,
    LOCAL_BASE,
    RANK_SHIFT,
    SHARED_BASE,
    SP_GENERIC,
    SP_GLOBAL,
    SP_LOCAL,
    SP_RAW,
    SP_SHARED,
    W_AGENT,
    W_CTA,
    W_FAULT,
    W_FAULT_ADDR,
    W_FAULT_AUX,
    W_FAULT_LANE,
    W_LOCAL,
    W_LOCAL_BYTES,
    X_CHECK,
    X_GPU,
    X_LAST_RANGE,
    X_LATE,
    X_NRANGES,
    X_NWARPS,
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


LATE_STORE, LATE_BLOCK = -1, -2  # operations of an entry; others are atomics: kind | type << 8


@njit
def apply_late(X, i):
    """Makes entry ``i`` of the stores kept back visible, and removes it."""
    late = ld64(X + 8 * X_LATE)
    entry = late + 8 * (1 + LATE_WORDS * i)
    host, size, value = ld64(entry), ld64(entry + 8), ld64(entry + 16)
    op = ld64(entry + 24)
    if op == LATE_BLOCK:
        for k in range(size):
            st8(host + k, ld8(value + k))
    elif op == LATE_STORE:
        store(host, size, value)
    else:
        new = combine(op & 255, op >> 8, size, load(host, size), value, _I(0))
        store(host, size, new)
    n = ld64(late) - 1
    st64(late, n)
    for k in range(LATE_WORDS * (n - i)):
        st64(entry + 8 * k, ld64(entry + 8 * (LATE_WORDS + k)))


@njit
def first_overlap(X, host, size):
    """The oldest store kept back that touches a range, or -1."""
    late = ld64(X + 8 * X_LATE)
    for i in range(ld64(late)):
        entry = late + 8 * (1 + LATE_WORDS * i)
        if ld64(entry) < host + size and host < ld64(entry) + ld64(entry + 8):
            return _I(i)
    return _I(-1)


@njit
def deliver_late(X, i):
    """Makes entry ``i`` visible, after those that must come first because they overlap."""
    late = ld64(X + 8 * X_LATE)
    while True:
        chosen = i
        while True:
            entry = late + 8 * (1 + LATE_WORDS * chosen)
            first = first_overlap(X, ld64(entry), ld64(entry + 8))
            if first == chosen:
                break
            chosen = first
        apply_late(X, chosen)
        if chosen == i:
            return
        i -= 1


@njit
def flush_range(X, host, size):
    """Other GPUs, and this one, now see every store to a range."""
    while True:
        i = first_overlap(X, host, size)
        if i < 0:
            return
        deliver_late(X, i)


@njit
def flush_late(X, W):
    """Other GPUs now see every store that happened before this point of the warp, as far as known:
    without the checkers' clocks all that were kept back."""
    late = ld64(X + 8 * X_LATE)
    if late == 0:
        return
    check = ld64(X + 8 * X_CHECK) != 0
    i = _I(0)
    while i < ld64(late):
        epoch = ld64(late + 8 * (1 + LATE_WORDS * i + 4))
        if check and not covered(warp_row(X, W, 0), epoch):
            i += 1
            continue
        count = ld64(late)
        deliver_late(X, i)
        i -= count - ld64(late) - 1  # older ones that went with it


@njit
def keep_entry(X, host, size, value, op, epoch):
    """Keeps a store to another GPU's memory back."""
    late = ld64(X + 8 * X_LATE)
    while ld64(late) >= LATE_STORES:
        apply_late(X, _I(0))
    n = ld64(late)
    entry = late + 8 * (1 + LATE_WORDS * n)
    st64(entry, host)
    st64(entry + 8, size)
    st64(entry + 16, value)
    st64(entry + 24, op)
    st64(entry + 32, epoch)
    st64(late, n + 1)


@njit
def keep_back(X, W, host, size, value, op):
    """Keeps a warp's store to another GPU's memory back."""
    epoch = _I(0)
    if ld64(X + 8 * X_CHECK) != 0:
        agent = ld64(W + 8 * W_AGENT)
        clock = ld32(warp_row(X, W, 0) + 4 * agent)
        epoch = (agent + 2 * ld64(X + 8 * X_NWARPS)) << 32 | clock
    keep_entry(X, host, size, value, op, epoch)


assert LOCAL_BASE >> 56 == 2
