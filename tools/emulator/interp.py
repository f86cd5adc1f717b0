"""The compiled interpreter: runs warps over encoded instructions, schedules them.

A diverged warp is a set of groups, each a program counter and its lanes.  The group with the
lowest counter that need not wait runs first, which makes groups meet again where paths join; a
group that waits, spins or uses up its quantum lets the others run.
"""

import numpy as np

from mok.tools.emulator.clocks import cpa_group, fence
from mok.tools.emulator.intrinsics import ld32, ld64, popc64, st8, st64
from mok.tools.emulator.jit import Entry, caller, njit
from mok.tools.emulator.layout import (
    ALU_END,
    C_FIRST_WARP,
    C_NUM_WARPS,
    C_RANK,
    F_CONVERGENCE,
    F_TRAP,
    I_A,
    I_B,
    I_C,
    I_D,
    I_E,
    I_GNEG,
    I_GUARD,
    I_OP,
    I_SYNC,
    I_TARGET,
    I_X,
    I_Y,
    OP_ACTIVEMASK,
    OP_ATOM,
    OP_BAR,
    OP_BRA,
    OP_CLOCK,
    OP_CLUSTER_ARRIVE,
    OP_CLUSTER_WAIT,
    OP_CP_ASYNC,
    OP_CPA,
    OP_ELECT,
    OP_EXIT,
    OP_FENCE,
    OP_ISSPACE,
    OP_LD,
    OP_LDMATRIX,
    OP_MAPA,
    OP_MATCH,
    OP_MBAR_ARRIVE,
    OP_MBAR_WAIT,
    OP_NANOSLEEP,
    OP_NOP,
    OP_PY,
    OP_REDUX,
    OP_SHFL,
    OP_ST,
    OP_STMATRIX,
    OP_SYNCWARP,
    OP_TRAP,
    OP_VOTE,
    R_BLOCKED,
    R_CTA_DONE,
    R_EXIT,
    R_FAULT,
    R_IDLE,
    R_PAUSE,
    R_PY,
    R_QUANTUM,
    SLEEP_NO,
    SLEEP_WORD,
    STATE_DONE,
    STATE_RUN,
    W_ALIVE,
    W_COUNT,
    W_CTA,
    W_GBLK,
    W_GMASK,
    W_GPC,
    W_GUARD,
    W_MASK,
    W_NG,
    W_PC,
    W_REGS,
    W_SLEEP,
    W_SLEEP_EV,
    W_STATE,
    W_WAIT_ADDR,
    W_WAIT_KIND,
    W_WAIT_MASK,
    W_WAIT_PC,
    W_WAIT_SIZE,
    W_WAIT_VALUE,
    WAIT_CONVERGE,
    WARP_WORDS,
    X_ADVERSARIAL,
    X_ALU,
    X_CLOCK,
    X_CODE,
    X_COVER,
    X_CURRENT,
    X_CURSOR,
    X_EV_MEM,
    X_EV_SYNC,
    X_LIVE,
    X_NWARPS,
    X_QUANTUM,
    X_RNG,
    X_SCRATCH,
    X_STEP_MEMORY,
    X_STEP_SYNC,
    X_STEPS,
    X_TRACE,
    X_WARPS,
)
from mok.tools.emulator.memops import memory_event, op_atomic, op_cp_async, op_load, op_store
from mok.tools.emulator.memory import fault, flush_late, load
from mok.tools.emulator.syncops import (
    FULL,
    cluster_arrive,
    cluster_wait,
    ldmatrix,
    lowest,
    match,
    mbar_op,
    mbar_wait,
    named_barrier,
    redux,
    shfl,
    stmatrix,
    threads_exit,
    vote,
)

call6 = caller(6)
call7 = caller(7)
_I = np.int64
NONE = 0x7FFFFFFF


@njit
def write_lanes(row, m, value):
    for l in range(32):
        if (m >> l) & 1:
            st64(row + 8 * l, value)


@njit
def guard_mask(R, row, negate, mask):
    out = _I(0)
    for l in range(32):
        if (mask >> l) & 1 and (ld64(R + row + 8 * l) != 0) != (negate != 0):
            out |= _I(1) << l
    return out


@njit
def add_group(W, pc, mask, blocked):
    n = ld64(W + 8 * W_NG)
    st64(W + 8 * (W_GPC + n), pc)
    st64(W + 8 * (W_GMASK + n), mask)
    st64(W + 8 * (W_GBLK + n), _I(blocked))
    st64(W + 8 * W_NG, n + 1)


@njit
def drop_group(W, i):
    n = ld64(W + 8 * W_NG) - 1
    st64(W + 8 * (W_GPC + i), ld64(W + 8 * (W_GPC + n)))
    st64(W + 8 * (W_GMASK + i), ld64(W + 8 * (W_GMASK + n)))
    st64(W + 8 * (W_GBLK + i), ld64(W + 8 * (W_GBLK + n)))
    st64(W + 8 * W_NG, n)


@njit
def take_group(W):
    """Makes the runnable group with the lowest pc current.  False when every group waits."""
    best = _I(-1)
    best_pc = _I(0)
    for i in range(ld64(W + 8 * W_NG)):
        pc = ld64(W + 8 * (W_GPC + i))
        if ld64(W + 8 * (W_GBLK + i)) == 0 and (best < 0 or pc < best_pc):
            best, best_pc = _I(i), pc
    if best < 0:
        return False
    st64(W + 8 * W_PC, best_pc)
    st64(W + 8 * W_MASK, ld64(W + 8 * (W_GMASK + best)))
    drop_group(W, best)
    return True


@njit
def unblock(W):
    for i in range(ld64(W + 8 * W_NG)):
        st64(W + 8 * (W_GBLK + i), _I(0))


@njit
def regroup(W, pc, mask):
    """Merges groups at the same pc; switches to a runnable group that is further behind."""
    i = _I(0)
    while i < ld64(W + 8 * W_NG):
        if ld64(W + 8 * (W_GPC + i)) == pc:
            mask |= ld64(W + 8 * (W_GMASK + i))
            drop_group(W, i)
        else:
            i += 1
    add_group(W, pc, mask, 0)
    take_group(W)


@njit
def needed_lanes(W, R, c):
    """Lanes that a .sync instruction's member mask (row I_E of the record) names and that live."""
    row = ld32(c + 4 * I_TARGET)
    alive = ld64(W + 8 * W_ALIVE)
    if row == NONE:
        return alive
    return ld64(R + row + 8 * lowest(ld64(W + 8 * W_MASK))) & alive


@Entry
def step_memory(X, W, c, R, m, pc, op):
    """Memory operations.  0 go on, 1 wait after it, 2 fault, 3 wait and retry."""
    if op == OP_LD:
        return op_load(X, W, c, R, m, pc)
    if op == OP_ST:
        return op_store(X, W, c, R, m, pc)
    if op == OP_ATOM:
        return op_atomic(X, W, c, R, m, pc)
    return op_cp_async(X, W, c, R, m, pc)


@Entry
def step_sync(X, W, c, R, m, pc, op):
    """Operations of several threads that may wait or fault: results as of ``step_memory``."""
    if op == OP_MBAR_ARRIVE:
        return 0 if mbar_op(X, W, c, R, m, pc) else 2
    if op == OP_MBAR_WAIT:
        return mbar_wait(X, W, c, R, m, pc)
    if op == OP_BAR:
        if named_barrier(X, W, c, R, m, pc):
            return 0
        return 2 if ld64(W + 8 * W_SLEEP) == SLEEP_NO else 3
    if op == OP_LDMATRIX:
        return 0 if ldmatrix(X, W, c, R, m, pc) else 2
    if op == OP_STMATRIX:
        memory_event(X, W)
        return 0 if stmatrix(X, W, c, R, m, pc) else 2
    if op == OP_CLUSTER_ARRIVE:
        return 0 if cluster_arrive(X, W, m, ld32(c + 4 * I_X)) else 2
    if op == OP_CLUSTER_WAIT:
        return cluster_wait(X, W, m, pc)
    return 2


@njit
def step_warp(X, W, c, R, m, op):
    """Operations on registers of the whole warp, which never wait."""
    if op == OP_SHFL:
        shfl(c, R, m)
    elif op == OP_VOTE:
        vote(c, R, m)
    elif op == OP_MATCH:
        match(c, R, m)
    elif op == OP_REDUX:
        redux(c, R, m)
    elif op == OP_ELECT:
        leader = lowest(m)
        d, p = ld32(c + 4 * I_D), ld32(c + 4 * I_E)
        for l in range(32):
            if (m >> l) & 1:
                if d != NONE:
                    st64(R + d + 8 * l, leader)
                if p != NONE:
                    st64(R + p + 8 * l, _I(1) if l == leader else _I(0))
    elif op == OP_ACTIVEMASK:
        write_lanes(R + ld32(c + 4 * I_D), m, m)
    elif op == OP_CLOCK:
        now = ld64(X + 8 * X_CLOCK) + ld64(X + 8 * X_STEPS)
        x = ld32(c + 4 * I_X)
        if x == 1:
            now &= 0xFFFFFFFF
        elif x == 3:
            now = now >> 32
        write_lanes(R + ld32(c + 4 * I_D), m, now)
    elif op == OP_MAPA:
        d, a, b = R + ld32(c + 4 * I_D), R + ld32(c + 4 * I_A), R + ld32(c + 4 * I_B)
        keep = _I(-1) - (_I(0xFF) << 24)
        for l in range(32):
            if (m >> l) & 1:
                st64(d + 8 * l, (ld64(a + 8 * l) & keep) | (ld64(b + 8 * l) & 0xFF) << 24)
    elif op == OP_ISSPACE:
        d, a = R + ld32(c + 4 * I_D), R + ld32(c + 4 * I_A)
        want = ld32(c + 4 * I_X)
        own = ld64(ld64(W + 8 * W_CTA) + 8 * C_RANK)
        for l in range(32):
            if (m >> l) & 1:
                value = ld64(a + 8 * l)
                hit = (value >> 56) == want
                if ld32(c + 4 * I_B) == 1:
                    hit = hit and ((value >> 24) & 0xFF) == own
                st64(d + 8 * l, _I(1) if hit else _I(0))


@njit
def run_warp(X, W, quantum):
    """Runs one warp until it waits, exits, faults, needs Python, or the quantum ends."""
    R = ld64(W + 8 * W_REGS)
    code = ld64(X + 8 * X_CODE)
    scratch = ld64(X + 8 * X_SCRATCH)
    alu = ld64(X + 8 * X_ALU)
    st64(W + 8 * W_SLEEP, _I(SLEEP_NO))
    pc = ld64(W + 8 * W_PC)
    mask = ld64(W + 8 * W_MASK)
    if ld64(W + 8 * W_NG) > 0:
        regroup(W, pc, mask)
        pc, mask = ld64(W + 8 * W_PC), ld64(W + 8 * W_MASK)
    cover = ld64(X + 8 * X_COVER)
    count = _I(0)
    result = _I(R_QUANTUM)
    while count < quantum:
        count += 1
        c = code + 64 * pc
        if cover != 0:
            st8(cover + pc, _I(1))
        op = ld32(c + 4 * I_OP)
        g = ld32(c + 4 * I_GUARD)
        m = mask
        if g != NONE:
            m = guard_mask(R, g, ld32(c + 4 * I_GNEG), mask)
        wait = 0  # 1: the group must wait, at the pc then current
        if op < ALU_END:
            if m != 0:
                out = R + ld32(c + 4 * I_D)
                call6(
                    ld64(alu + 8 * op),
                    (
                        op,
                        out if m == FULL else scratch,
                        R + ld32(c + 4 * I_A),
                        R + ld32(c + 4 * I_B),
                        R + ld32(c + 4 * I_C),
                        ld32(c + 4 * I_X),
                    ),
                )
                if m != FULL:
                    for l in range(32):
                        if (m >> l) & 1:
                            st64(out + 8 * l, ld64(scratch + 8 * l))
            pc += 1
        elif op == OP_BRA:
            target = ld32(c + 4 * I_TARGET)
            if m == mask:
                pc = target
            elif m == 0:
                pc += 1
            else:
                add_group(W, pc + 1, mask & ~m, 0)
                pc, mask = target, m
        elif m == 0 or op == OP_NOP:
            pc += 1
        elif op == OP_EXIT:
            threads_exit(X, W, m)
            st64(W + 8 * W_ALIVE, ld64(W + 8 * W_ALIVE) & ~m)
            mask &= ~m
            pc += 1
            if mask == 0:
                if ld64(W + 8 * W_NG) == 0:
                    st64(W + 8 * W_STATE, _I(STATE_DONE))
                    result = _I(R_EXIT)
                    break
                if not take_group(W):
                    unblock(W)
                    take_group(W)
                pc, mask = ld64(W + 8 * W_PC), ld64(W + 8 * W_MASK)
        elif op == OP_TRAP:
            fault(W, F_TRAP, _I(0), lowest(m), 0)
            result = _I(R_FAULT)
            break
        else:
            retry = False
            if ld32(c + 4 * I_SYNC) != 0 and ld64(W + 8 * W_NG) > 0:
                # A .sync instruction: wait for the lanes that its mask names.
                st64(W + 8 * W_MASK, mask)
                need = needed_lanes(W, R, c)
                if g == NONE and (mask & need) != need:
                    wait, retry = 1, True
                    st64(W + 8 * W_WAIT_KIND, _I(WAIT_CONVERGE))
                    st64(W + 8 * W_WAIT_PC, pc)
            if retry:
                pass
            elif op == OP_PY:
                st64(W + 8 * W_GUARD, m)
                result = _I(R_PY)
                break
            elif op == OP_NANOSLEEP:
                pc += 1
                quantum = count
            elif op == OP_SYNCWARP:
                pc += 1
            elif op == OP_FENCE:
                kind = ld32(c + 4 * I_X)
                if kind == 0 and ld32(c + 4 * I_Y) >= 3:
                    flush_late(X, W)
                if kind < 2:
                    fence(X, W, kind, ld32(c + 4 * I_Y))
                pc += 1
            elif op == OP_CPA:
                cpa_group(X, W, ld32(c + 4 * I_X), ld32(c + 4 * I_Y))
                pc += 1
            elif op in (
                OP_SHFL,
                OP_VOTE,
                OP_MATCH,
                OP_REDUX,
                OP_ELECT,
                OP_ACTIVEMASK,
                OP_CLOCK,
                OP_MAPA,
                OP_ISSPACE,
            ):
                step_warp(X, W, c, R, m, op)
                pc += 1
            else:
                step = X_STEP_MEMORY if op <= OP_CP_ASYNC else X_STEP_SYNC
                r = call7(ld64(X + 8 * step), (X, W, c, R, m, pc, op))
                if r == 2:
                    result = _I(R_FAULT)
                    break
                if r != 3:
                    pc += 1
                if r != 0:
                    wait = 1
        if ld64(W + 8 * W_NG) > 0:
            if wait or count >= quantum:
                add_group(W, pc, mask, 1)
                if take_group(W):
                    if wait:
                        st64(W + 8 * W_SLEEP, _I(SLEEP_NO))
                    pc, mask = ld64(W + 8 * W_PC), ld64(W + 8 * W_MASK)
                    continue
                unblock(W)
                take_group(W)
                pc, mask = ld64(W + 8 * W_PC), ld64(W + 8 * W_MASK)
                if wait:
                    # Several groups wait for different things: look again after any event.
                    st64(W + 8 * W_SLEEP, _I(2))
                    st64(W + 8 * W_SLEEP_EV, ld64(X + 8 * X_EV_MEM) + ld64(X + 8 * X_EV_SYNC))
                    result = _I(R_BLOCKED)
                    break
            else:
                regroup(W, pc, mask)
                pc, mask = ld64(W + 8 * W_PC), ld64(W + 8 * W_MASK)
        elif wait:
            if ld64(W + 8 * W_WAIT_KIND) == WAIT_CONVERGE and ld64(W + 8 * W_SLEEP) == SLEEP_NO:
                fault(W, F_CONVERGENCE, pc, lowest(mask), 0)
                result = _I(R_FAULT)
            else:
                result = _I(R_BLOCKED)
            break
    st64(W + 8 * W_PC, pc)
    st64(W + 8 * W_MASK, mask)
    st64(W + 8 * W_COUNT, ld64(W + 8 * W_COUNT) + count)
    st64(X + 8 * X_STEPS, ld64(X + 8 * X_STEPS) + count)
    return result


@njit
def awake(X, W):
    if ld64(W + 8 * W_STATE) != STATE_RUN:
        return False
    sleep = ld64(W + 8 * W_SLEEP)
    if sleep == SLEEP_NO:
        return True
    if sleep == SLEEP_WORD:
        word = load(ld64(W + 8 * W_WAIT_ADDR), ld64(W + 8 * W_WAIT_SIZE))
        return (word & ld64(W + 8 * W_WAIT_MASK)) != ld64(W + 8 * W_WAIT_VALUE)
    return ld64(X + 8 * X_EV_MEM) + ld64(X + 8 * X_EV_SYNC) != ld64(W + 8 * W_SLEEP_EV)


@njit
def random(X):
    s = ld64(X + 8 * X_RNG)
    s ^= s << 13
    s ^= (s >> 7) & 0x1FFFFFFFFFFFFFF
    s ^= s << 17
    st64(X + 8 * X_RNG, s)
    return (s >> 20) & 0x7FFFFFFF


@njit
def trace(X, a, b, c):
    """Adds one event to the hash of the interleaving."""
    h = ld64(X + 8 * X_TRACE)
    for value in (a, b, c):
        h = (h ^ value) * 0x100000001B3
        h ^= (h >> 29) & 0x7FFFFFFFF
    st64(X + 8 * X_TRACE, h)


@Entry
def run_grid(X, limit):
    """Schedules warps until Python is needed; the warp concerned is in X_CURRENT."""
    n = ld64(X + 8 * X_NWARPS)
    warps = ld64(X + 8 * X_WARPS)
    adversarial = ld64(X + 8 * X_ADVERSARIAL)
    cursor = ld64(X + 8 * X_CURSOR)
    idle = _I(0)
    end = ld64(X + 8 * X_STEPS) + limit
    while idle <= n:
        if ld64(X + 8 * X_STEPS) >= end:
            st64(X + 8 * X_CURSOR, cursor)
            return _I(R_PAUSE)
        W = warps + 8 * WARP_WORDS * cursor
        if not awake(X, W):
            idle += 1
            cursor = cursor + 1 if cursor + 1 < n else _I(0)
            continue
        idle = _I(0)
        quantum = ld64(X + 8 * X_QUANTUM)
        if adversarial:
            quantum = 1 + random(X) % quantum
        result = run_warp(X, W, quantum)
        trace(X, cursor, ld64(W + 8 * W_COUNT), ld64(W + 8 * W_PC))
        if result in (R_PY, R_FAULT):
            st64(X + 8 * X_CURSOR, cursor)
            st64(X + 8 * X_CURRENT, cursor)
            return result
        if result == R_EXIT:
            cta = ld64(W + 8 * W_CTA)
            first = ld64(cta + 8 * C_FIRST_WARP)
            done = True
            for i in range(first, first + ld64(cta + 8 * C_NUM_WARPS)):
                if ld64(warps + 8 * WARP_WORDS * i + 8 * W_STATE) == STATE_RUN:
                    done = False
            if done:
                st64(X + 8 * X_CURSOR, cursor)
                st64(X + 8 * X_CURRENT, cursor)
                return _I(R_CTA_DONE)
        if adversarial:
            cursor = random(X) % n
            end -= 1
        else:
            cursor = cursor + 1 if cursor + 1 < n else _I(0)
    st64(X + 8 * X_CURSOR, cursor)
    return _I(R_IDLE)


assert X_LIVE and popc64 and I_B and I_C and I_A and I_X
