"""Loads, stores, atomics and cp.async for compiled code, lane by lane."""

import numpy as np

from mok.tools.emulator.atomics import A_EXCH, combine
from mok.tools.emulator.clocks import ordered
from mok.tools.emulator.intrinsics import ld32, ld64, sext8, sext16, sext32, st8, st64
from mok.tools.emulator.jit import njit
from mok.tools.emulator.layout import (
    I_A,
    I_B,
    I_C,
    I_D,
    I_E,
    I_EXT,
    I_N,
    I_X,
    I_Y,
    I_Z,
    SLEEP_EVENT,
    SP_LOCAL,
    W_CPA_COUNT,
    W_POLL_HASH,
    W_POLL_PC,
    W_SLEEP,
    W_SLEEP_EV,
    W_WAIT_ADDR,
    W_WAIT_KIND,
    W_WAIT_PC,
    WAIT_POLL,
    X_CHECK,
    X_EV_MEM,
    X_EXT,
    X_LATE,
)
from mok.tools.emulator.memory import (
    LATE_STORE,
    flush_late,
    flush_range,
    is_peers,
    keep_back,
    load,
    reaches,
    resolve,
    store,
)
from mok.tools.emulator.race import COPY, UPDATE, check_access, strong_kind
from mok.tools.emulator.syncops import sleep_on

_I = np.int64

# X of a load or store: bits 0-2 space, 3-6 log2 element bytes, 8 sign extension,
# 9-12 log2 bytes of the destination register, 16 ordered or volatile, 17 acquire or release.
# Of an atomic: 17 acquire, 18 release.  20 and up: scope (0 CTA, 1 cluster, 2 GPU, 3 system).


@njit
def memory_event(X, W):
    st64(X + 8 * X_EV_MEM, ld64(X + 8 * X_EV_MEM) + 1)
    st64(W + 8 * W_POLL_PC, _I(-1))


@njit
def op_load(X, W, c, R, m, pc):
    """Returns 0 to go on, 1 when a poll saw nothing new, 2 on fault."""
    x = ld32(c + 4 * I_X)
    space = x & 7
    size = _I(1) << ((x >> 3) & 15)
    signed = (x >> 8) & 1
    poll = (x >> 16) & 1
    n = ld32(c + 4 * I_N)
    ext = ld64(X + 8 * X_EXT) + 4 * ld32(c + 4 * I_EXT)
    a = R + ld32(c + 4 * I_A)
    offset = np.int32(ld32(c + 4 * I_Y))
    mask = _I(-1)
    if ((x >> 9) & 15) == 2:
        mask = _I(0xFFFFFFFF)
    elif ((x >> 9) & 15) == 1:
        mask = _I(0xFFFF)
    digest = _I(0)
    first = _I(0)
    same = True
    check = ld64(X + 8 * X_CHECK)
    for l in range(32):
        if not (m >> l) & 1:
            continue
        host = resolve(X, W, _I(space), ld64(a + 8 * l) + offset, size * n, l)
        if ld64(X + 8 * X_LATE) != 0 and host != 0 and is_peers(X, host):
            flush_range(X, host, size * n)  # a GPU sees its own stores
        if host == 0 or (poll and not reaches(X, W, host, x >> 20, l)):
            return 2
        if check:
            how = strong_kind(x >> 20) if poll else _I(0)
            check_access(X, W, space, ld64(a + 8 * l) + offset, host, size * n, how, pc, l)
            if poll:
                ordered(X, W, host, True, False, (x >> 17) & 1, 0, _I(x >> 20))
        for i in range(n):
            value = load(host + size * i, size)
            if signed:
                value = (
                    sext8(value) if size == 1 else sext16(value) if size == 2 else sext32(value)
                ) & mask
            row = ld32(ext + 4 * i)
            if row != 0x7FFFFFFF:
                st64(R + row + 8 * l, value)
            if poll:
                digest = digest * 6364136223846793005 + value + host
        if poll:
            if first == 0:
                first = host
            elif first != host:
                same = False
    if poll and n == 1:
        if ld64(W + 8 * W_POLL_PC) == pc and ld64(W + 8 * W_POLL_HASH) == digest:
            if same:
                sleep_on(W, WAIT_POLL, pc, first, size, _I(-1), load(first, size))
            else:
                st64(W + 8 * W_SLEEP, _I(SLEEP_EVENT))
                st64(W + 8 * W_SLEEP_EV, ld64(X + 8 * X_EV_MEM))
                st64(W + 8 * W_WAIT_KIND, _I(WAIT_POLL))
                st64(W + 8 * W_WAIT_PC, pc)
                st64(W + 8 * W_WAIT_ADDR, first)
            return 1
        st64(W + 8 * W_POLL_PC, pc)
        st64(W + 8 * W_POLL_HASH, digest)
    return 0


@njit
def op_store(X, W, c, R, m, pc):
    x = ld32(c + 4 * I_X)
    space = x & 7
    strong = (x >> 16) & 1
    check = ld64(X + 8 * X_CHECK)
    size = _I(1) << ((x >> 3) & 15)
    n = ld32(c + 4 * I_N)
    ext = ld64(X + 8 * X_EXT) + 4 * ld32(c + 4 * I_EXT)
    a = R + ld32(c + 4 * I_A)
    offset = np.int32(ld32(c + 4 * I_Y))
    for l in range(32):
        if not (m >> l) & 1:
            continue
        host = resolve(X, W, _I(space), ld64(a + 8 * l) + offset, size * n, l)
        if host == 0 or (strong and not reaches(X, W, host, x >> 20, l)):
            return 2
        if check:
            addr = ld64(a + 8 * l) + offset
            how = strong_kind(x >> 20) if strong else _I(0)
            check_access(X, W, space, addr, host, size * n, 1 | how, pc, l)
            if strong:
                ordered(X, W, host, False, True, 0, (x >> 17) & 1, x >> 20)
        late = ld64(X + 8 * X_LATE) != 0
        if late and strong and (x >> 17) & 1 and x >> 20 >= 3:
            flush_late(X, W)
        late = late and is_peers(X, host)
        for i in range(n):
            value = ld64(R + ld32(ext + 4 * i) + 8 * l)
            if late:
                keep_back(X, W, host + size * i, size, value, _I(LATE_STORE))
            else:
                store(host + size * i, size, value)
    if space != SP_LOCAL and m != 0:
        memory_event(X, W)
    return 0


@njit
def op_atomic(X, W, c, R, m, pc):
    """atom and red: the lanes take effect in lane order.  I_D is absent for red."""
    x = ld32(c + 4 * I_X)
    space = x & 7
    size = _I(1) << ((x >> 3) & 15)
    kind = ld32(c + 4 * I_E) & 255
    kind_type = ld32(c + 4 * I_E) >> 8 & 255
    n = ld32(c + 4 * I_N)
    ext = ld64(X + 8 * X_EXT) + 4 * ld32(c + 4 * I_EXT)
    a = R + ld32(c + 4 * I_A)
    d = ld32(c + 4 * I_D)
    k = ld32(c + 4 * I_C)
    offset = np.int32(ld32(c + 4 * I_Y))
    changed = False
    digest = _I(0)
    host = _I(0)
    check = ld64(X + 8 * X_CHECK)
    for l in range(32):
        if not (m >> l) & 1:
            continue
        host = resolve(X, W, _I(space), ld64(a + 8 * l) + offset, size * n, l)
        if host == 0 or not reaches(X, W, host, x >> 20, l):
            return 2
        if check:
            addr = ld64(a + 8 * l) + offset
            how = 1 | strong_kind(x >> 20) | (UPDATE if d != 0x7FFFFFFF or kind != A_EXCH else 0)
            check_access(X, W, space, addr, host, size * n, how, pc, l)
            ordered(X, W, host, True, True, (x >> 17) & 1, (x >> 18) & 1, x >> 20)
        late = ld64(X + 8 * X_LATE) != 0
        if late and (x >> 18) & 1 and x >> 20 >= 3:
            flush_late(X, W)
        late = late and is_peers(X, host)
        if late and d != 0x7FFFFFFF:
            flush_range(X, host, size * n)
            late = False
        for i in range(n):
            if late:
                value = ld64(R + ld32(ext + 4 * i) + 8 * l)
                keep_back(X, W, host + size * i, size, value, _I(kind | kind_type << 8))
                changed = True
                continue
            old = load(host + size * i, size)
            value = ld64(R + ld32(ext + 4 * i) + 8 * l)
            compare = ld64(R + k + 8 * l) if k != 0x7FFFFFFF else _I(0)
            new = combine(kind, kind_type, size, old, value, compare)
            if size == 4:
                new &= 0xFFFFFFFF
            elif size == 2:
                new &= 0xFFFF
            if new != old:
                changed = True
                store(host + size * i, size, new)
            if d != 0x7FFFFFFF:
                out = R + d if n == 1 else R + ld32(ext + 4 * (n + i))
                st64(out + 8 * l, old)
            digest = digest * 6364136223846793005 + old + host
    if changed:
        memory_event(X, W)
    elif d != 0x7FFFFFFF and m != 0:
        if ld64(W + 8 * W_POLL_PC) == pc and ld64(W + 8 * W_POLL_HASH) == digest:
            sleep_on(W, WAIT_POLL, pc, host, size, _I(-1), load(host, size))
            return 1
        st64(W + 8 * W_POLL_PC, pc)
        st64(W + 8 * W_POLL_HASH, digest)
    return 0


@njit
def op_cp_async(X, W, c, R, m, pc):
    """cp.async: copies at once.  X: bytes; B: source address; C: source size row or none."""
    size = ld32(c + 4 * I_X)
    check = ld64(X + 8 * X_CHECK)
    for l in range(32):
        if not (m >> l) & 1:
            continue
        count = _I(size)
        if ld32(c + 4 * I_C) != 0x7FFFFFFF:
            count = min(count, ld64(R + ld32(c + 4 * I_C) + 8 * l) & 0xFFFFFFFF)
        addr = ld64(R + ld32(c + 4 * I_A) + 8 * l) + np.int32(ld32(c + 4 * I_Y))
        dst = resolve(X, W, _I(2), addr, size, l)
        if dst == 0:
            return 2
        if check:
            check_access(X, W, _I(2), addr, dst, _I(size), 1 | COPY, pc, l)
        src = _I(0)
        if count > 0:
            addr = ld64(R + ld32(c + 4 * I_B) + 8 * l) + np.int32(ld32(c + 4 * I_Z))
            src = resolve(X, W, _I(1), addr, size, l)
            if src == 0:
                return 2
            if check:
                check_access(X, W, _I(1), addr, src, _I(size), COPY, pc, l)
        for i in range(size):
            st8(dst + i, load(src + i, 1) if i < count else _I(0))
    st64(W + 8 * W_CPA_COUNT, ld64(W + 8 * W_CPA_COUNT) + 1)
    memory_event(X, W)
    return 0
