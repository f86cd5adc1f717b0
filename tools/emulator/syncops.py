"""Warp-wide operations and barriers for compiled code."""

import numpy as np

from mok.tools.emulator.clocks import acquire, cpa_publish, flip, publish, reset_object
from mok.tools.emulator.intrinsics import ld16, ld32, ld64, popc64, st8, st16, st64
from mok.tools.emulator.jit import njit
from mok.tools.emulator.layout import (
    C_ALIVE,
    C_BAR,
    C_CLUSTER,
    C_SMEM,
    C_SMEM_SIZE,
    C_THREADS,
    F_BARRIER,
    F_CLUSTER,
    F_MBAR_BAD,
    F_MBAR_COUNT,
    F_MBAR_OVERFLOW,
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
    L_ALIVE,
    L_ARRIVED,
    L_GEN,
    L_LOOSE,
    L_PHASES,
    L_RELAXED,
    MB_PHASE,
    MB_TX_LIMIT,
    SLEEP_WORD,
    W_BARGEN,
    W_CLGEN,
    W_CTA,
    W_FAULT,
    W_LOOSE,
    W_SLEEP,
    W_WAIT_ADDR,
    W_WAIT_KIND,
    W_WAIT_MASK,
    W_WAIT_PC,
    W_WAIT_SIZE,
    W_WAIT_VALUE,
    WAIT_BAR,
    WAIT_CLUSTER,
    WAIT_MBAR,
    X_CHECK,
    X_EV_SYNC,
    X_EXT,
)
from mok.tools.emulator.mbarrier import mb_init, mb_phase, mb_update, mb_valid
from mok.tools.emulator.memory import fault, resolve
from mok.tools.emulator.phases import check_phase, check_wait
from mok.tools.emulator.race import check_access

_I = np.int64
FULL = _I(0xFFFFFFFF)


@njit
def lowest(mask):
    for i in range(32):
        if (mask >> i) & 1:
            return _I(i)
    return _I(0)


@njit
def event(X):
    st64(X + 8 * X_EV_SYNC, ld64(X + 8 * X_EV_SYNC) + 1)


@njit
def sleep_on(W, kind, pc, addr, size, mask, value):
    """Puts the warp to sleep until the word changes."""
    st64(W + 8 * W_SLEEP, _I(SLEEP_WORD))
    st64(W + 8 * W_WAIT_KIND, _I(kind))
    st64(W + 8 * W_WAIT_PC, pc)
    st64(W + 8 * W_WAIT_ADDR, addr)
    st64(W + 8 * W_WAIT_SIZE, _I(size))
    st64(W + 8 * W_WAIT_MASK, mask)
    st64(W + 8 * W_WAIT_VALUE, value)


@njit
def shfl(c, R, m):
    """shfl.sync: X is the mode (0 idx, 1 up, 2 down, 3 bfly)."""
    mode = ld32(c + 4 * I_X)
    d = ld32(c + 4 * I_D)
    a = R + ld32(c + 4 * I_A)
    b = R + ld32(c + 4 * I_B)
    k = R + ld32(c + 4 * I_C)
    p = ld32(c + 4 * I_E)
    values = np.empty(32, np.int64)
    for l in range(32):
        values[l] = ld64(a + 8 * l)
    for l in range(32):
        if not (m >> l) & 1:
            continue
        bval = ld64(b + 8 * l) & 31
        cval = ld64(k + 8 * l) & 31
        seg = (ld64(k + 8 * l) >> 8) & 31
        high = (l & seg) | (cval & ~seg)
        low = l & seg
        if mode == 1:
            j = l - bval
            ok = j >= high
        elif mode == 2:
            j = l + bval
            ok = j <= high
        elif mode == 3:
            j = l ^ bval
            ok = j <= high
        else:
            j = low | (bval & ~seg)
            ok = j <= high
        if not ok:
            j = _I(l)
        if d != 0x7FFFFFFF:
            st64(R + d + 8 * l, values[j])
        if p != 0x7FFFFFFF:
            st64(R + p + 8 * l, _I(1) if ok else _I(0))


@njit
def vote(c, R, m):
    """vote.sync: X is the mode (0 any, 1 all, 2 uni, 3 ballot); E is set to negate."""
    mode = ld32(c + 4 * I_X)
    d = R + ld32(c + 4 * I_D)
    a = R + ld32(c + 4 * I_A)
    negate = ld32(c + 4 * I_E)
    ballot = _I(0)
    for l in range(32):
        if (m >> l) & 1 and (ld64(a + 8 * l) != 0) != (negate != 0):
            ballot |= _I(1) << l
    if mode == 0:
        result = _I(1) if ballot != 0 else _I(0)
    elif mode == 1:
        result = _I(1) if ballot == m else _I(0)
    elif mode == 2:
        result = _I(1) if ballot == m or ballot == 0 else _I(0)
    else:
        result = ballot
    for l in range(32):
        if (m >> l) & 1:
            st64(d + 8 * l, result)


@njit
def match(c, R, m):
    """match.sync: X is 0 for any, 1 for all (E then receives the predicate)."""
    d = R + ld32(c + 4 * I_D)
    a = R + ld32(c + 4 * I_A)
    p = ld32(c + 4 * I_E)
    every = ld32(c + 4 * I_X)
    values = np.empty(32, np.int64)
    for l in range(32):
        values[l] = ld64(a + 8 * l)
    for l in range(32):
        if (m >> l) & 1:
            same = _I(0)
            for j in range(32):
                if (m >> j) & 1 and values[j] == values[l]:
                    same |= _I(1) << j
            if every:
                ok = same == m
                same = m if ok else _I(0)
                if p != 0x7FFFFFFF:
                    st64(R + p + 8 * l, _I(1) if ok else _I(0))
            st64(d + 8 * l, same)


@njit
def redux(c, R, m):
    """redux.sync on 32-bit integers: X is 0 add, 1 min, 2 max, 3 and, 4 or, 5 xor; Z: signed."""
    d = R + ld32(c + 4 * I_D)
    a = R + ld32(c + 4 * I_A)
    mode = ld32(c + 4 * I_X)
    signed = ld32(c + 4 * I_Z)
    first = True
    out = _I(0)
    for l in range(32):
        if (m >> l) & 1:
            v = ld64(a + 8 * l)
            if signed:
                v = (v ^ 0x80000000) - 0x80000000
            if first:
                out = v
                first = False
            elif mode == 0:
                out += v
            elif mode == 1:
                out = min(out, v)
            elif mode == 2:
                out = max(out, v)
            elif mode == 3:
                out &= v
            elif mode == 4:
                out |= v
            else:
                out ^= v
    for l in range(32):
        if (m >> l) & 1:
            st64(d + 8 * l, out & 0xFFFFFFFF)


@njit
def named_barrier(X, W, c, R, m, pc):
    """bar.sync / bar.arrive / bar.red: returns True when the lanes may go on.

    X: 0 sync, 1 arrive, 2 red.popc, 3 red.and, 4 red.or.  A barrier counts threads.
    """
    mode = ld32(c + 4 * I_X)
    cta = ld64(W + 8 * W_CTA)
    lane = lowest(m)
    number = ld64(R + ld32(c + 4 * I_A) + 8 * lane)
    count_row = ld32(c + 4 * I_B)
    if number < 0 or number > 15:
        fault(W, F_BARRIER, number, lane, 0)
        return False
    count = ld64(cta + 8 * C_THREADS)
    if count_row != 0x7FFFFFFF:
        count = ld64(R + count_row + 8 * lane)
        if count <= 0 or count & 31:
            fault(W, F_BARRIER, number, lane, count)
            return False
    bar = cta + 8 * (C_BAR + 4 * number)
    generation = ld64(bar + 16)
    fresh = _I(0)
    done = True
    for l in range(32):
        if (m >> l) & 1:
            g = ld64(W + 8 * (W_BARGEN + l))
            if g == 0 or mode == 1:
                fresh |= _I(1) << l
            elif g == generation + 1:
                done = False
    if fresh != 0:
        threads = popc64(fresh)
        if ld64(bar) == 0:
            st64(bar + 8, count)
            st64(bar + 24, _I(0))
        elif ld64(bar + 8) != count:
            fault(W, F_BARRIER, number, lane, count)
            return False
        if mode >= 2:
            p = R + ld32(c + 4 * I_C)
            for l in range(32):
                if (fresh >> l) & 1 and (ld64(p + 8 * l) != 0) != (ld32(c + 4 * I_E) != 0):
                    st64(bar + 24, ld64(bar + 24) + 1)
        if ld64(bar) + threads > count:
            fault(W, F_BARRIER, number, lane, count)
            return False
        publish(X, W, bar, True)
        if ld64(bar) + threads == count:
            flip(X, bar)
            st64(bar, _I(0))
            st64(bar + 16, generation + 1)
            done = True
        else:
            st64(bar, ld64(bar) + threads)
            done = mode == 1
        if mode != 1:
            for l in range(32):
                if (fresh >> l) & 1:
                    st64(W + 8 * (W_BARGEN + l), generation + 1)
        event(X)
    if not done:
        sleep_on(W, WAIT_BAR, pc, bar + 16, 8, _I(-1), generation)
        return False
    if mode != 1:
        acquire(X, W, bar)
    for l in range(32):
        if (m >> l) & 1:
            st64(W + 8 * (W_BARGEN + l), _I(0))
            if mode >= 2:
                total = ld64(bar + 24)
                if mode == 3:
                    total = _I(1) if total == count else _I(0)
                elif mode == 4:
                    total = _I(1) if total != 0 else _I(0)
                st64(R + ld32(c + 4 * I_D) + 8 * l, total)
    return True


@njit
def cluster_complete(X, cluster):
    if ld64(cluster + 8 * L_ARRIVED) >= ld64(cluster + 8 * L_ALIVE):
        flip(X, cluster)
        loose = ld64(cluster + 8 * L_RELAXED) & ld64(cluster + 8 * L_PHASES)
        st64(cluster + 8 * L_LOOSE, loose)
        st64(cluster + 8 * L_RELAXED, _I(0))
        st64(cluster + 8 * L_ARRIVED, _I(0))
        st64(cluster + 8 * L_GEN, ld64(cluster + 8 * L_GEN) + 1)
        event(X)


@njit
def cluster_arrive(X, W, m, relaxed):
    """False after a fault: a thread arrives once before it waits."""
    cluster = ld64(ld64(W + 8 * W_CTA) + 8 * C_CLUSTER)
    generation = ld64(cluster + 8 * L_GEN)
    for l in range(32):
        if (m >> l) & 1:
            if ld64(W + 8 * (W_CLGEN + l)) != 0:
                fault(W, F_CLUSTER, cluster, l, 2)
                return False
            st64(W + 8 * (W_CLGEN + l), generation + 1)
    st64(cluster + 8 * L_ARRIVED, ld64(cluster + 8 * L_ARRIVED) + popc64(m))
    event(X)
    if relaxed:
        st64(cluster + 8 * L_RELAXED, _I(1))
    else:
        publish(X, W, cluster, True)
    cluster_complete(X, cluster)
    return True


@njit
def cluster_wait(X, W, m, pc):
    """0 go on, 2 fault, 3 wait."""
    cluster = ld64(ld64(W + 8 * W_CTA) + 8 * C_CLUSTER)
    generation = ld64(cluster + 8 * L_GEN)
    for l in range(32):
        if (m >> l) & 1:
            arrived = ld64(W + 8 * (W_CLGEN + l))
            if arrived == 0:
                fault(W, F_CLUSTER, cluster, l, 0)
                return 2
            if arrived == generation + 1:
                sleep_on(W, WAIT_CLUSTER, pc, cluster + 8 * L_GEN, 8, _I(-1), generation)
                return 3
    for l in range(32):
        if (m >> l) & 1:
            st64(W + 8 * (W_CLGEN + l), _I(0))
    if ld64(cluster + 8 * L_LOOSE) != 0:
        st64(W + 8 * W_LOOSE, _I(1))
    acquire(X, W, cluster)
    return 0


@njit
def threads_exit(X, W, m):
    """Exited threads no longer count at cluster barriers."""
    cta = ld64(W + 8 * W_CTA)
    cluster = ld64(cta + 8 * C_CLUSTER)
    n = popc64(m)
    st64(cta + 8 * C_ALIVE, ld64(cta + 8 * C_ALIVE) - n)
    st64(cluster + 8 * L_ALIVE, ld64(cluster + 8 * L_ALIVE) - n)
    if ld64(cluster + 8 * L_ALIVE) > 0:
        cluster_complete(X, cluster)


@njit
def mbar_address(X, W, c, R, lane):
    addr = ld64(R + ld32(c + 4 * I_A) + 8 * lane) + np.int32(ld32(c + 4 * I_Y))
    return resolve(X, W, _I(ld32(c + 4 * I_Z)), addr, 8, lane)


@njit
def own_shared(X, W, host):
    """Whether a host address lies in the shared memory of the warp's own CTA."""
    cta = ld64(W + 8 * W_CTA)
    base = ld64(cta + 8 * C_SMEM)
    return base <= host < base + ld64(cta + 8 * C_SMEM_SIZE)


@njit
def mbar_op(X, W, c, R, m, pc):
    """init (X = 0), inval (1), arrive (2), expect_tx (3), arrive.expect_tx (4), complete_tx (5).

    Returns False after a fault.  B is the count or byte row, D the state token's row.
    """
    mode = ld32(c + 4 * I_X)
    d = ld32(c + 4 * I_D)
    b = ld32(c + 4 * I_B)
    for l in range(32):
        if not (m >> l) & 1:
            continue
        host = mbar_address(X, W, c, R, l)
        if host == 0:
            return False
        value = ld64(R + b + 8 * l) if b != 0x7FFFFFFF else _I(1)
        if mode == 0:
            if value <= 0 or value > MB_TX_LIMIT:
                fault(W, F_MBAR_COUNT, host, l, value)
                return False
            mb_init(host, value)
            reset_object(X, host)
            continue
        if not mb_valid(host):
            fault(W, F_MBAR_BAD, host, l, mode)
            return False
        if mode == 1:
            st64(host, _I(0))
            continue
        if d != 0x7FFFFFFF:
            st64(R + d + 8 * l, ld64(host))
        arrivals = _I(0)
        tx = _I(0)
        if mode == 2:
            arrivals = value
        elif mode == 3:
            tx = value
        elif mode == 4:
            arrivals, tx = _I(1), value
        else:
            tx = -value
        check_phase(X, W, host, pc, l)
        if arrivals != 0:
            if ld32(c + 4 * I_E) & 4:
                cpa_publish(X, W, host)
            elif not ld32(c + 4 * I_E) & 2:
                publish(X, W, host, not ld32(c + 4 * I_E) & 8 or own_shared(X, W, host))
        before = mb_phase(ld64(host))
        wrong = mb_update(host, arrivals, tx)
        if wrong != 0:
            fault(W, F_MBAR_OVERFLOW if wrong == 1 else F_MBAR_COUNT, host, l, arrivals + tx)
            return False
        if mb_phase(ld64(host)) != before:
            flip(X, host)
            st64(ld64(ld64(W + 8 * W_CTA) + 8 * C_CLUSTER) + 8 * L_PHASES, _I(1))
    event(X)
    return True


@njit
def mbar_wait(X, W, c, R, m, pc):
    """test_wait / try_wait: writes the predicate; a lane that must wait makes the warp sleep.

    X: 0 parity, 1 state token.  Returns 0 when all lanes passed, 1 when one must wait, 2 on fault.
    """
    d = ld32(c + 4 * I_D)
    waiting = 0
    for l in range(32):
        if not (m >> l) & 1:
            continue
        host = mbar_address(X, W, c, R, l)
        if host == 0:
            return 2
        if not mb_valid(host):
            fault(W, F_MBAR_BAD, host, l, 6)
            return 2
        value = ld64(R + ld32(c + 4 * I_B) + 8 * l)
        parity = (value & 1) if ld32(c + 4 * I_X) == 0 else mb_phase(value)
        passed = mb_phase(ld64(host)) != parity
        if d != 0x7FFFFFFF:
            st64(R + d + 8 * l, _I(1) if passed else _I(0))
        check_wait(X, W, host, parity, passed, pc, l)
        if passed and not ld32(c + 4 * I_E) & 2:
            acquire(X, W, host)
        elif passed:
            st64(W + 8 * W_LOOSE, _I(1))
        if not passed and waiting == 0:
            waiting = 1
            sleep_on(W, WAIT_MBAR, pc, host, 8, _I(MB_PHASE), ld64(host) & MB_PHASE)
    return waiting


@njit
def ldmatrix(X, W, c, R, m, pc):
    """ldmatrix b16 8x8: X bit 0 transposes; N matrices, destination rows in the ext table."""
    n = ld32(c + 4 * I_N)
    ext = ld64(X + 8 * X_EXT) + 4 * ld32(c + 4 * I_EXT)
    trans = ld32(c + 4 * I_X) & 1
    hosts = np.empty(32, np.int64)
    for l in range(8 * n):
        addr = ld64(R + ld32(c + 4 * I_A) + 8 * l) + np.int32(ld32(c + 4 * I_Y))
        hosts[l] = resolve(X, W, _I(ld32(c + 4 * I_Z)), addr, 16, l)
        if hosts[l] == 0:
            return False
        if ld64(X + 8 * X_CHECK) != 0:
            check_access(X, W, _I(ld32(c + 4 * I_Z)), addr, hosts[l], _I(16), 0, pc, l)
    for i in range(n):
        row = R + ld32(ext + 4 * i)
        for l in range(32):
            r, k = l >> 2, 2 * (l & 3)
            if trans:
                lo = ld16(hosts[8 * i + k] + 2 * r)
                hi = ld16(hosts[8 * i + k + 1] + 2 * r)
            else:
                lo = ld16(hosts[8 * i + r] + 2 * k)
                hi = ld16(hosts[8 * i + r] + 2 * k + 2)
            st64(row + 8 * l, lo | hi << 16)
    return True


@njit
def stmatrix(X, W, c, R, m, pc):
    n = ld32(c + 4 * I_N)
    ext = ld64(X + 8 * X_EXT) + 4 * ld32(c + 4 * I_EXT)
    mode = ld32(c + 4 * I_X)
    trans = mode & 1
    hosts = np.empty(32, np.int64)
    for l in range(8 * n):
        addr = ld64(R + ld32(c + 4 * I_A) + 8 * l) + np.int32(ld32(c + 4 * I_Y))
        hosts[l] = resolve(X, W, _I(ld32(c + 4 * I_Z)), addr, 16, l)
        if hosts[l] == 0:
            return False
        if ld64(X + 8 * X_CHECK) != 0:
            check_access(X, W, _I(ld32(c + 4 * I_Z)), addr, hosts[l], _I(16), 1, pc, l)
    for i in range(n):
        row = R + ld32(ext + 4 * i)
        for l in range(32):
            value = ld64(row + 8 * l)
            r, k = l >> 2, 2 * (l & 3)
            if mode & 2:  # b8, 16x8 transposed
                for q in range(4):
                    st8(hosts[8 * i + (k + (q & 1)) % 8] + r + 8 * (q >> 1), value >> (8 * q))
            elif trans:
                st16(hosts[8 * i + k] + 2 * r, value)
                st16(hosts[8 * i + k + 1] + 2 * r, value >> 16)
            else:
                st16(hosts[8 * i + r] + 2 * k, value)
                st16(hosts[8 * i + r] + 2 * k + 2, value >> 16)
    return True


assert W_FAULT
