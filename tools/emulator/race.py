"""Races: accesses to memory, checked against their history by the clocks of clocks.py.

Shadow memory holds one record per 4 bytes: the last write and up to three reads, each as an epoch
(agent << 32 | clock) with the instruction and the bytes touched.
"""

import numpy as np

from mok.tools.emulator.clocks import covered, warp_row
from mok.tools.emulator.intrinsics import ld8, ld32, ld64, st8, st64
from mok.tools.emulator.jit import njit
from mok.tools.emulator.layout import (
    C_CLUSTER,
    C_SMEM,
    C_SMEM_SIZE,
    F_PROXY,
    F_RACE,
    F_REPLY,
    F_UNINIT,
    F_UNWRITTEN,
    L_SHADOW,
    LOCAL_BASE,
    RANK_SHIFT,
    SHARED_BASE,
    SP_GENERIC,
    SP_GLOBAL,
    SP_LOCAL,
    SP_RAW,
    SP_SHARED,
    W_AGENT,
    W_CPA_COUNT,
    W_CTA,
    WARP_WORDS,
    X_GSHADOW,
    X_LAST_RANGE,
    X_NREPORTS,
    X_NWARPS,
    X_RANGES,
    X_REPORTS,
    X_WARPS,
    X_WRITTEN,
)

_I = np.int64
RECORD = 64  # bytes of a shadow record: write epoch, write info, 3 read epochs, 3 read infos
MAX_REPORTS = 256
REPORT_WORDS = 8

# Access kinds.
READ, WRITE = 0, 1
STRONG = 2  # ordered, volatile or atomic: does not race with another strong access
ASYNC = 4  # through the asynchronous proxy
COPY = 8  # by cp.async
MMA = 16  # an operand of a matrix operation
CTA_SCOPE = 32  # strong, but only towards its CTA
CLUSTER_SCOPE = 64  # strong, but only towards its cluster
REPLY = 128  # a launch query's reply
UPDATE = 256  # a write that reads what it replaces; not kept in the history


@njit
def report(X, kind, epoch, pc, lane, addr, other, other_pc):
    """Adds a finding, once per pair of instructions.  ``epoch`` and ``other`` are the two sides'."""
    n = ld64(X + 8 * X_NREPORTS)
    base = ld64(X + 8 * X_REPORTS)
    for i in range(n):
        r = base + 8 * REPORT_WORDS * i
        if ld64(r) == kind and ld64(r + 16) == pc and ld64(r + 48) == other_pc:
            return
    if n >= MAX_REPORTS:
        return
    r = base + 8 * REPORT_WORDS * n
    st64(r, _I(kind))
    st64(r + 8, epoch)
    st64(r + 16, pc)
    st64(r + 24, _I(lane))
    st64(r + 32, addr)
    st64(r + 40, other)
    st64(r + 48, other_pc)
    st64(X + 8 * X_NREPORTS, n + 1)


@njit
def pc_of(info):
    """The instruction of a read: the top byte of the last read's word is the written bytes' mask."""
    return info >> 16 & 0xFFFFFFFF


@njit
def strong_kind(scope):
    """Access kind of an ordered access: 0 CTA, 1 cluster, 2 GPU, 3 system."""
    return _I(STRONG) | (CTA_SCOPE if scope == 0 else CLUSTER_SCOPE if scope == 1 else 0)


@njit
def both_strong(X, kind, agent, other, other_agent):
    """Whether two accesses do not race because both are strong and each scope reaches the other."""
    if kind & other & STRONG == 0:
        return False
    near = (kind | other) & (CTA_SCOPE | CLUSTER_SCOPE)
    if near == 0:
        return True
    n = ld64(X + 8 * X_NWARPS)
    warps = ld64(X + 8 * X_WARPS)
    cta = ld64(warps + 8 * (WARP_WORDS * (agent % n) + W_CTA))
    other_cta = ld64(warps + 8 * (WARP_WORDS * (other_agent % n) + W_CTA))
    if cta == other_cta:
        return True
    return near & CTA_SCOPE == 0 and ld64(cta + 8 * C_CLUSTER) == ld64(other_cta + 8 * C_CLUSTER)


@njit
def freed(X, clock, epoch, kind, addr):
    """Whether an asynchronous write may take the place of a warp's generic write to its own CTA's shared memory.

    Order is enough: the memory is that CTA's, where the write was done when its warps said so.
    """
    n = ld64(X + 8 * X_NWARPS)
    warp = (epoch >> 32) - 2 * n
    if kind & (ASYNC | WRITE) != ASYNC | WRITE or warp < 0 or warp >= n:
        return False
    cta = ld64(ld64(X + 8 * X_WARPS) + 8 * (WARP_WORDS * warp + W_CTA))
    at = addr - ld64(cta + 8 * C_SMEM)
    inside = at >= 0 and at < ld64(cta + 8 * C_SMEM_SIZE)
    return inside and covered(clock, warp << 32 | (epoch & 0xFFFFFFFF))


@njit
def touch(X, shadow, mask, kind, epoch, clock, proxy, pc, lane, addr, uninit):
    """Checks one access to one record against its history, then records it."""
    agent = epoch >> 32
    info = pc << 16 | kind << 8 | mask
    written = ld64(shadow)
    winfo = ld64(shadow + 8)
    if (
        written != 0
        and (winfo & mask & 255) != 0
        and not both_strong(X, kind, agent, winfo >> 8 & 255, written >> 32)
    ):
        if not covered(clock, written):
            if not freed(X, clock, written, kind, addr):
                report(X, F_RACE, epoch, pc, lane, addr, written, winfo >> 16)
        elif (
            kind & ASYNC
            and not kind & WRITE
            and not winfo >> 8 & ASYNC
            and not (kind & MMA and winfo >> 8 & COPY)  # accepted: see the idioms in the docs
            and not covered(proxy, written)
        ):
            report(X, F_PROXY, epoch, pc, lane, addr, written, winfo >> 16)
    if kind & WRITE:
        for k in range(2, 5):
            e = ld64(shadow + 8 * k)
            if e != 0:
                rinfo = ld64(shadow + 8 * k + 24)
                if (rinfo & mask & 255) != 0:
                    if not covered(clock, e):
                        if not both_strong(X, kind, agent, rinfo >> 8 & 255, e >> 32):
                            report(X, F_RACE, epoch, pc, lane, addr, e, pc_of(rinfo))
                    elif kind & REPLY and not rinfo >> 8 & ASYNC and not covered(proxy, e):
                        report(X, F_REPLY, epoch, pc, lane, addr, e, pc_of(rinfo))
                st64(shadow + 8 * k, _I(0))
        old = winfo & 255 if written >> 32 == agent else _I(0)
        st64(shadow, epoch)
        st64(shadow + 8, info | old)
        st64(shadow + 56, ld64(shadow + 56) | mask << 56)
        return
    if uninit and (ld64(shadow + 56) >> 56 & mask & 255) != mask:
        report(X, F_UNINIT, epoch, pc, lane, addr, _I(0), _I(0))
    slot = _I(2) + (pc + agent) % 3
    for k in range(2, 5):
        e = ld64(shadow + 8 * k)
        if e == 0 or e >> 32 == agent or covered(clock, e):
            slot = _I(k)
            break
    keep = ld64(shadow + 8 * slot + 24) & (_I(255) << 56)
    if ld64(shadow + 8 * slot) >> 32 == agent:
        before = ld64(shadow + 8 * slot + 24)
        info |= before & 255
        if ld64(shadow + 8 * slot) == epoch:  # as weak and as near as the weaker and the nearer one
            info |= before & (CTA_SCOPE | CLUSTER_SCOPE) << 8
            info &= ~(_I(STRONG) << 8) | before
    st64(shadow + 8 * slot, epoch)
    st64(shadow + 8 * slot + 24, (info & ~(_I(255) << 56)) | keep)


@njit
def byte_mask(addr, size):
    return (((_I(1) << size) - 1) << (addr & 3)) & 15 if size < 4 else _I(15)


@njit
def shadow_of(X, W, space, addr, host):
    """Shadow record of a resolved access, or 0 when the memory is not tracked."""
    if space == SP_GENERIC:
        window = addr >> 56
        space = _I(SP_GLOBAL) if window == 0 else _I(SP_SHARED) if window == 1 else _I(SP_LOCAL)
        if window == 1:
            addr -= SHARED_BASE
    if space == SP_SHARED:
        addr &= 0xFFFFFFFF
        cluster = ld64(ld64(W + 8 * W_CTA) + 8 * C_CLUSTER)
        base = ld64(cluster + 8 * (L_SHADOW + (addr >> RANK_SHIFT)))
        return base + RECORD * ((addr & ((1 << RANK_SHIFT) - 1)) >> 2)
    if space in (SP_LOCAL, SP_RAW):
        return _I(0)
    table = ld64(X + 8 * X_GSHADOW)
    if table == 0:
        return _I(0)
    last = ld64(X + 8 * X_LAST_RANGE)
    base = ld64(table + 8 * last)
    start = ld64(ld64(X + 8 * X_RANGES) + 16 * last)
    return base + RECORD * ((host >> 2) - (start >> 2)) if base != 0 else _I(0)


@njit
def check_written(X, written, count, mask, kind, epoch, pc, lane, addr):
    """Global memory of which it is known what has been written: a byte per word, its bits the word's bytes."""
    for i in range(count):
        have = ld8(written + i)
        if have & mask == mask:
            continue
        if kind & WRITE == 0 or kind & UPDATE:
            report(X, F_UNWRITTEN, epoch, pc, lane, addr + 4 * i, _I(0), _I(0))
        if kind & WRITE:
            st8(written + i, have | mask)


@njit
def check_access(X, W, space, addr, host, size, kind, pc, lane):
    """A warp's access of ``size`` bytes."""
    shadow = shadow_of(X, W, space, addr, host)
    if shadow == 0:
        return
    shared = space == SP_SHARED or (space == SP_GENERIC and addr >> 56 == 1)
    update = kind & UPDATE
    kind &= ~_I(UPDATE)
    agent = ld64(W + 8 * W_AGENT)
    clock, proxy = warp_row(X, W, 0), warp_row(X, W, 1)
    epoch = agent << 32 | ld32(clock + 4 * agent)
    if kind & WRITE:
        epoch += (2 * ld64(X + 8 * X_NWARPS)) << 32
    if kind & COPY:  # cp.async: an agent of its own, ordered by its waits
        epoch = (ld64(X + 8 * X_NWARPS) + agent) << 32 | (ld64(W + 8 * W_CPA_COUNT) + 1)
    mask = byte_mask(addr, size)
    for i in range((size + 3) >> 2):
        touch(
            X, shadow + RECORD * i, mask, kind, epoch, clock, proxy, pc, lane, host + 4 * i, shared
        )
    if not shared and ld64(X + 8 * X_WRITTEN) != 0:
        last = ld64(X + 8 * X_LAST_RANGE)
        written = ld64(ld64(X + 8 * X_WRITTEN) + 8 * last)
        if written != 0:
            written += (host >> 2) - (ld64(ld64(X + 8 * X_RANGES) + 16 * last) >> 2)
            count = (size + 3) >> 2
            check_written(X, written, count, mask, kind | update, epoch, pc, lane, host)


@njit
def check_range(X, shadow, count, kind, epoch, clock, proxy, pc, addr, uninit):
    """An asynchronous access to ``count`` consecutive records."""
    for i in range(count):
        touch(
            X,
            shadow + RECORD * i,
            _I(15),
            kind,
            epoch,
            clock,
            proxy,
            pc,
            _I(-1),
            addr + 4 * i,
            uninit,
        )


@njit
def check_rows(X, shadow, count, rows, pitch, kind, epoch, clock, proxy, pc, addr, uninit, written):
    """``check_range`` of ``rows`` ranges, ``pitch`` bytes apart.  ``written``: of ``check_written``, or 0."""
    plain = kind & ~_I(UPDATE)
    for r in range(rows):
        at, word = addr + r * pitch, r * pitch >> 2
        check_range(X, shadow + RECORD * word, count, plain, epoch, clock, proxy, pc, at, uninit)
        if written != 0:
            check_written(X, written + word, count, _I(15), kind, epoch, pc, _I(-1), at)


@njit
def check_chunks(X, shadow, chunks, count, kind, epoch, clock, proxy, pc, addr):
    """An asynchronous access to 16-byte chunks of one CTA's shared memory, by index."""
    for j in range(count):
        at = ld64(chunks + 8 * j) << 2
        for i in range(4):
            touch(
                X,
                shadow + RECORD * (at + i),
                _I(15),
                kind,
                epoch,
                clock,
                proxy,
                pc,
                _I(-1),
                addr + 4 * (at + i),
                True,
            )


assert READ == 0 and LOCAL_BASE
