"""Happens-before: vector clocks of warps, and of the barriers and flags that they meet at.

Every warp is an agent with two vector clocks: what happened before it, and which generic writes
among those a proxy fence has made visible to the asynchronous proxy.  Barriers, fences and ordered
accesses carry both from agent to agent.  An asynchronous operation is an agent of its own, so what
it touches is ordered only by the wait that observes its completion.

A generic write has a clock entry of its own beside the warp's, so that an arrival whose scope does
not reach its barrier's CTA can order accesses (it frees a buffer) without handing over written data.
"""

import numpy as np

from mok.tools.emulator.intrinsics import ld32, ld64, st32, st64
from mok.tools.emulator.jit import njit
from mok.tools.emulator.layout import (
    C_CLUSTER,
    W_AGENT,
    W_CPA_COMMITS,
    W_CPA_COUNT,
    W_CPA_RING,
    W_CTA,
    W_FENCE_SCOPE,
    W_FOREIGN,
    X_CHECK,
    X_CROWDED,
    X_LAST_RANGE,
    X_NAGENTS,
    X_NRANGES,
    X_NWARPS,
    X_OBJECT_MASK,
    X_OBJECTS,
    X_OWNERS,
    X_RANGE_NUMBERS,
    X_RANGES,
    X_SMEM,
    X_SMEM_END,
    X_VC,
)

_I = np.int64
ROWS_PER_WARP = 6  # clock, proxy clock, and both again for release fences and pending acquires
OWNER_WORDS = 3
ROWS_PER_OBJECT = 4  # clock and proxy clock: gathered in this phase, and of completed phases


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
def covered(clock, epoch):
    """Whether an epoch happened before an agent's clock."""
    return ld32(clock + 4 * (epoch >> 32)) >= epoch & 0xFFFFFFFF
