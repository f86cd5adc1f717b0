"""Happens-before over memory accesses: vector clocks, shadow memory, the two proxies.

Every warp is an agent with two vector clocks: what happened before it, and which generic writes
among those a proxy fence has made visible to the asynchronous proxy.  Barriers, fences and ordered
accesses carry both from agent to agent.  An asynchronous operation is an agent of its own, so what
it touches is ordered only by the wait that observes its completion.

A generic write has a clock entry of its own beside the warp's, so that an arrival whose scope does
not reach its barrier's CTA can order accesses (it frees a buffer) without handing over written data.

Shadow memory holds one record per 4 bytes: the last write and up to three reads, each as an epoch
(agent << 32 | clock) with the instruction and the bytes touched.
"""

import numpy as np

from mok.tools.emulator.intrinsics import ld32, ld64, st32, st64
from mok.tools.emulator.jit import njit
from mok.tools.emulator.layout import (
    C_CLUSTER,
    C_SMEM,
    C_SMEM_SIZE,
    F_PROXY,
    F_RACE,
    F_REPLY,
    F_UNINIT,
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
    W_CPA_COMMITS,
    W_CPA_COUNT,
    W_CPA_RING,
    W_CTA,
    W_FENCE_SCOPE,
    W_FOREIGN,
    WARP_WORDS,
    X_CHECK,
    X_CROWDED,
    X_GSHADOW,
    X_LAST_RANGE,
    X_NAGENTS,
    X_NRANGES,
    X_NREPORTS,
    X_NWARPS,
    X_OBJECT_MASK,
    X_OBJECTS,
    X_OWNERS,
    X_RANGE_NUMBERS,
    X_RANGES,
    X_REPORTS,
    X_SMEM,
    X_SMEM_END,
    X_VC,
    X_WARPS,
)

_I = np.int64
RECORD = 64  # bytes of a shadow record: write epoch, write info, 3 read epochs, 3 read infos
MAX_REPORTS = 256
REPORT_WORDS = 8
ROWS_PER_WARP = 6  # clock, proxy clock, and both again for release fences and pending acquires
OWNER_WORDS = 3
ROWS_PER_OBJECT = 4  # clock and proxy clock: gathered in this phase, and of completed phases

# Access kinds.
READ, WRITE = 0, 1
STRONG = 2  # ordered, volatile or atomic: does not race with another strong access
ASYNC = 4  # through the asynchronous proxy
COPY = 8  # by cp.async
MMA = 16  # an operand of a matrix operation
CTA_SCOPE = 32  # strong, but only towards its CTA
CLUSTER_SCOPE = 64  # strong, but only towards its cluster
REPLY = 128  # a launch query's reply


@njit
def clock_row(X, row):
    return ld64(X + 8 * X_VC) + 4 * row * ld64(X + 8 * X_NAGENTS)


@njit
def warp_row(X, W, which):
    return clock_row(X, ld64(W + 8 * W_AGENT) * ROWS_PER_WARP + which)


@njit
def join(X, into, other):
    """into = max(into, other), element by element."""
    for i in range(0, 4 * ld64(X + 8 * X_NAGENTS), 4):
        value = ld32(other + i)
        if value > ld32(into + i):
            st32(into + i, value)


@njit
def join_order(X, into, other):
    """As ``join``, but without what warps have written: order, not visibility."""
    low = 8 * ld64(X + 8 * X_NWARPS)
    high = low + 4 * ld64(X + 8 * X_NWARPS)
    for i in range(0, 4 * ld64(X + 8 * X_NAGENTS), 4):
        value = ld32(other + i)
        if (i < low or i >= high) and value > ld32(into + i):
            st32(into + i, value)


@njit
def assign(X, into, other):
    for i in range(0, 4 * ld64(X + 8 * X_NAGENTS), 4):
        st32(into + i, ld32(other + i))


@njit
def clear(X, row):
    for i in range(0, 4 * ld64(X + 8 * X_NAGENTS), 4):
        st32(row + i, _I(0))


@njit
def tick(X, W):
    """Starts a new epoch of the warp: what follows is not covered by what was published."""
    at = warp_row(X, W, 0) + 4 * ld64(W + 8 * W_AGENT)
    st32(at, ld32(at) + 1)
    st32(at + 8 * ld64(X + 8 * X_NWARPS), ld32(at))


@njit
def home(X, key):
    """A number for an address that is the same on every host: the offset in shared memory, or of global
    memory that was just resolved in its tensor; of other memory of ours, which is aligned, the low bits."""
    start = ld64(X + 8 * X_SMEM)
    if start <= key < ld64(X + 8 * X_SMEM_END):
        return key - start + (_I(1) << 40)
    n = ld64(X + 8 * X_NRANGES)
    last = ld64(X + 8 * X_LAST_RANGE)
    if last < n:
        table = ld64(X + 8 * X_RANGES) + 16 * last
        if ld64(table) <= key < ld64(table + 8):
            return key - ld64(table) + (ld64(ld64(X + 8 * X_RANGE_NUMBERS) + 8 * last) << 12)
    return key & 0xFFFF


@njit
def object_row(X, key, create):
    """First clock row of a synchronisation object, found by address; 0 when absent."""
    mask = ld64(X + 8 * X_OBJECT_MASK)
    table = ld64(X + 8 * X_OBJECTS)
    i = (home(X, key) >> 2) * 0x9E3779B1
    i = (i ^ (i >> 19)) & mask
    for _ in range(64):
        found = ld64(table + 8 * i)
        if found == key or (found == 0 and create):
            if found == 0:
                st64(table + 8 * i, key)
            base = ld64(X + 8 * X_NWARPS) * ROWS_PER_WARP
            return clock_row(X, base + i * ROWS_PER_OBJECT)
        if found == 0:
            return _I(0)
        i = (i + 1) & mask
    if create:
        st64(X + 8 * X_CROWDED, _I(1))
    return _I(0)


@njit
def object_owners(X, row):
    """Address of an object's owners, CTAs or clusters whose releases its rows hold, and the number of
    phases that it has completed."""
    base = clock_row(X, ld64(X + 8 * X_NWARPS) * ROWS_PER_WARP)
    return ld64(X + 8 * X_OWNERS) + 8 * OWNER_WORDS * (
        (row - base) // (ROWS_PER_OBJECT * stride(X))
    )


@njit
def stride(X):
    return 4 * ld64(X + 8 * X_NAGENTS)


@njit
def publish(X, W, key, full):
    """Release to a barrier; waiters see it after ``flip``.  Without ``full`` only order is passed on."""
    if ld64(X + 8 * X_CHECK) == 0:
        return
    row = object_row(X, key, True)
    if row == 0:
        return
    if full:
        join(X, row, warp_row(X, W, 0))
    else:
        join_order(X, row, warp_row(X, W, 0))
    join(X, row + stride(X), warp_row(X, W, 1))
    tick(X, W)


@njit
def publish_flag(X, W, key, clock, proxy, scope):
    """Release of these clocks to memory.  Rows 2 and 3 hold what any agent may acquire, rows 0 and 1
    what one CTA or cluster may, as the scope says (0 CTA, 1 cluster, 2 GPU, 3 system)."""
    row = object_row(X, key, True)
    if row == 0:
        return
    owners = object_owners(X, row)
    cta = ld64(W + 8 * W_CTA)
    step = stride(X)
    at = row + 2 * step
    if scope >= 2:
        known = ld64(owners + 8)
        st64(owners + 8, cta if known == 0 or known == cta else _I(-1))
    else:
        owner = cta if scope == 0 else ld64(cta + 8 * C_CLUSTER)
        at = row
        if ld64(owners) != owner:
            st64(owners, owner)
            clear(X, row)
            clear(X, row + step)
    join(X, at, clock)
    join(X, at + step, proxy)


@njit
def acquire_flag(X, W, key, clock, proxy, scope):
    """Adds to these clocks what memory holds for this warp.  True when all of it is its own CTA's."""
    row = object_row(X, key, False)
    if row == 0:
        return True
    owners = object_owners(X, row)
    cta = ld64(W + 8 * W_CTA)
    cluster = ld64(cta + 8 * C_CLUSTER)
    step = stride(X)
    own = ld64(owners + 8) == 0 or ld64(owners + 8) == cta
    near = own or (scope == 1 and ld64(owners + 8) > 0 and cluster == cluster_of(owners))
    if scope >= 2 or near:
        join(X, clock, row + 2 * step)
        join(X, proxy, row + 3 * step)
    if ld64(owners) == cta or (ld64(owners) == cluster and scope >= 1):
        join(X, clock, row)
        join(X, proxy, row + step)
    return own


@njit
def cluster_of(owners):
    return ld64(ld64(owners + 8) + 8 * C_CLUSTER)


@njit
def reset_object(X, key):
    """A barrier is initialised: nothing was published through it yet."""
    if ld64(X + 8 * X_CHECK) != 0:
        row = object_row(X, key, True)
        if row != 0:
            for k in range(ROWS_PER_OBJECT):
                clear(X, row + k * stride(X))
            st64(object_owners(X, row) + 16, _I(0))


@njit
def cpa_observe(X, W, count):
    """The warp has waited for its first ``count`` cp.async operations."""
    at = warp_row(X, W, 0) + 4 * (ld64(X + 8 * X_NWARPS) + ld64(W + 8 * W_AGENT))
    if count > ld32(at):
        st32(at, count)


@njit
def cpa_group(X, W, mode, keep):
    """cp.async.commit_group (0), or wait_group (1) that leaves ``keep`` groups."""
    if ld64(X + 8 * X_CHECK) == 0:
        return
    n = ld64(W + 8 * W_CPA_COMMITS)
    if mode == 0:
        st64(W + 8 * (W_CPA_RING + (n & 7)), ld64(W + 8 * W_CPA_COUNT))
        st64(W + 8 * W_CPA_COMMITS, n + 1)
    elif mode == 2:
        cpa_observe(X, W, ld64(W + 8 * W_CPA_COUNT))
    elif n > keep and keep < 8:
        cpa_observe(X, W, ld64(W + 8 * (W_CPA_RING + ((n - 1 - keep) & 7))))


@njit
def cpa_publish(X, W, key):
    """cp.async.mbarrier.arrive: the arrival covers the warp's earlier cp.async operations."""
    if ld64(X + 8 * X_CHECK) == 0:
        return
    at = warp_row(X, W, 0) + 4 * (ld64(X + 8 * X_NWARPS) + ld64(W + 8 * W_AGENT))
    saved = ld32(at)
    st32(at, ld64(W + 8 * W_CPA_COUNT))
    publish(X, W, key, True)
    st32(at, saved)


@njit
def publish_clock(X, key, clock, proxy):
    """An asynchronous operation with these clocks signals a phased object."""
    row = object_row(X, key, True)
    if row != 0:
        join(X, row, clock)
        join(X, row + stride(X), proxy)


@njit
def flip(X, key):
    """The object's phase completes: what was gathered becomes visible to waiters."""
    if ld64(X + 8 * X_CHECK) == 0:
        return
    row = object_row(X, key, False)
    if row == 0:
        return
    step = stride(X)
    for k in range(2):
        join(X, row + (2 + k) * step, row + k * step)
        clear(X, row + k * step)
    phases = object_owners(X, row) + 16
    st64(phases, ld64(phases) + 1)


@njit
def acquire(X, W, key):
    """A waiter passes: it now happens after everything of the completed phases."""
    if ld64(X + 8 * X_CHECK) == 0:
        return
    row = object_row(X, key, False)
    if row != 0:
        step = stride(X)
        join(X, warp_row(X, W, 0), row + 2 * step)
        join(X, warp_row(X, W, 1), row + 3 * step)


@njit
def ordered(X, W, key, is_read, is_write, acquires, releases, scope):
    """Synchronisation effects of a strong access to one address.

    A relaxed write publishes what the warp's last release fence covers, at the narrower scope; a
    later acquire fence orders after what was published where a relaxed read looked.
    """
    if is_read:
        if acquires:
            acquire_flag(X, W, key, warp_row(X, W, 0), warp_row(X, W, 1), scope)
        elif not acquire_flag(X, W, key, warp_row(X, W, 4), warp_row(X, W, 5), scope):
            st64(W + 8 * W_FOREIGN, _I(1))
    if is_write:
        if releases:
            publish_flag(X, W, key, warp_row(X, W, 0), warp_row(X, W, 1), scope)
            tick(X, W)
        else:
            narrow = min(scope, ld64(W + 8 * W_FENCE_SCOPE))
            publish_flag(X, W, key, warp_row(X, W, 2), warp_row(X, W, 3), narrow)


@njit
def fence(X, W, proxy, scope):
    """fence.proxy.async (proxy = 1), or a memory fence that acquires and releases (0)."""
    if ld64(X + 8 * X_CHECK) == 0:
        return
    if proxy:
        join(X, warp_row(X, W, 1), warp_row(X, W, 0))
    else:
        if scope >= 2 or ld64(W + 8 * W_FOREIGN) == 0:
            join(X, warp_row(X, W, 0), warp_row(X, W, 4))
            join(X, warp_row(X, W, 1), warp_row(X, W, 5))
        assign(X, warp_row(X, W, 2), warp_row(X, W, 0))
        assign(X, warp_row(X, W, 3), warp_row(X, W, 1))
        st64(W + 8 * W_FENCE_SCOPE, scope)
    tick(X, W)


@njit
def start_warp(X, W):
    """A new CTA's warp: nothing but the launch happened before it."""
    agent = ld64(W + 8 * W_AGENT)
    own = warp_row(X, W, 0) + 4 * agent
    keep = ld32(own)
    for k in range(ROWS_PER_WARP):
        clear(X, warp_row(X, W, k))
    st32(own, keep + 1)
    st32(own + 8 * ld64(X + 8 * X_NWARPS), keep + 1)


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
def covered(clock, epoch):
    """Whether an epoch happened before an agent's clock."""
    return ld32(clock + 4 * (epoch >> 32)) >= epoch & 0xFFFFFFFF


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
def check_access(X, W, space, addr, host, size, kind, pc, lane):
    """A warp's access of ``size`` bytes."""
    shadow = shadow_of(X, W, space, addr, host)
    if shadow == 0:
        return
    shared = space == SP_SHARED or (space == SP_GENERIC and addr >> 56 == 1)
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
def check_rows(X, shadow, count, rows, pitch, kind, epoch, clock, proxy, pc, addr, uninit):
    """``check_range`` of ``rows`` ranges, ``pitch`` bytes apart."""
    for r in range(rows):
        at = shadow + RECORD * (r * pitch >> 2)
        check_range(X, at, count, kind, epoch, clock, proxy, pc, addr + r * pitch, uninit)


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
