"""The task program covers all work once, and every wait is on earlier work."""

import random
from collections import Counter
from itertools import zip_longest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mok.kernels_cute.program import (
    COMBINE,
    DISPATCH,
    DOWN,
    END,
    SHARED_DOWN,
    SHARED_UP,
    UP,
    Forward,
    Tile,
    side_by_side,
)


@st.composite
def programs(draw):
    tile = Tile(
        m=draw(st.sampled_from([128, 256])),
        group_m=draw(st.integers(1, 20)),
        signals=draw(st.integers(1, 2)),
    )
    experts = draw(st.lists(st.sampled_from([0, 0, 1, 2, 3, 7, 20]), max_size=6))
    minibatch = tile.m * draw(st.integers(1, 5))
    ring_mbs = draw(st.integers(1, 5))
    return Forward(
        rows=tile.m * sum(experts),
        tokens=draw(st.integers(0, 700)),
        hidden=64 * draw(st.integers(1, 12)),
        intermediate=64 * draw(st.integers(1, 12)),
        shared_intermediate=64 * draw(st.integers(0, 5)),
        minibatch=minibatch,
        macrobatch=minibatch * ring_mbs,
        tile=tile,
        ahead=draw(st.integers(0, 40)),
    )


def ordered(p: Forward):
    """The total order of the module's docstring, written out naively."""
    seq = [("shared_up", b, n) for b in range(p.shared_blocks) for n in range(p.shared_n_up)]
    seq += [("shared_down", b, n) for b in range(p.shared_blocks) for n in range(p.n_down)]
    macros = [
        [s for s in range(m * p.ring_mbs, (m + 1) * p.ring_mbs) if s < p.minibatches]
        for m in range(p.macrobatches)
    ]
    # The last macrobatch, then the others from the slot on that it left free, round and round.
    head = len(macros[-1]) if macros else 0
    processing = list(macros[-1]) if macros else []
    for macro in reversed(macros[:-1]):
        processing += macro[head % p.ring_mbs :] + macro[: head % p.ring_mbs]

    def blocks(s):
        return range(s * p.mb_blocks, s * p.mb_blocks + p.blocks_in(s))

    for s in processing:
        if p.previous(s) >= p.minibatches:
            seq += [("dispatch", b, 0) for b in blocks(s)]

    def up(s):
        return [("up", b, n) for b in blocks(s) for n in range(p.n_up)]

    seq += up(processing[0])[: p.ahead] if processing else []
    for s, later in zip_longest(processing, processing[1:]):
        seq += up(s)[p.ahead :]
        seq += up(later)[: p.ahead] if later is not None else []
        seq += [("down", b, n) for b in blocks(s) for n in range(p.n_down)]
        seq += [("combine", b, 0) for b in blocks(s)]
        if s - p.ring_mbs >= 0:
            seq += [("dispatch", b, 0) for b in blocks(s - p.ring_mbs)]
    return seq


NAMES_OF_ITEMS = {DISPATCH: "dispatch", COMBINE: "combine"}
NAMES = {SHARED_UP: "shared_up", SHARED_DOWN: "shared_down", UP: "up", DOWN: "down"}


@settings(max_examples=300, deadline=None)
@given(programs())
def test_decoders_follow_the_total_order(p):
    seq = ordered(p)
    phase = Counter()  # position of a phase in the naive order, by (kind, minibatch, whether ahead)
    done = Counter()

    def key(name, block):
        """Of the next task or item of this kind: up comes in two parts."""
        s = block // p.mb_blocks if not name.startswith("shared") else 0
        done[name, s] += 1
        return name, s, name == "up" and done[name, s] <= p.ahead

    for i, (name, b, _) in enumerate(seq):
        phase.setdefault(key(name, b), i)
    done.clear()
    tasks = [p.task(t) for t in range(p.tasks)]
    assert p.task(p.tasks).kind == END and p.task(p.tasks + 5).kind == END
    got = Counter((NAMES[t.kind], t.block, t.n) for t in tasks)
    assert got == Counter(x for x in seq if x[0] not in ("dispatch", "combine"))
    where = [phase[key(NAMES[t.kind], t.block)] for t in tasks]
    assert where == sorted(where)
    for t in tasks:
        if t.kind in (UP, DOWN):
            assert t.minibatch == t.block // p.mb_blocks
    items = [p.item(i) for i in range(p.items)]
    want = Counter()
    for name, b, _ in seq:
        if name in ("dispatch", "combine"):
            for i in range(p.items_per_block):
                want[name, b * p.tile.m + i * p.tile.comm_m] += 1
    assert Counter((NAMES_OF_ITEMS[i.kind], i.row) for i in items) == want
    where = [phase[key(NAMES_OF_ITEMS[i.kind], i.row // p.tile.m)] for i in items]
    assert where == sorted(where)


def run_to_the_end(p, compute, comm, pairs, rng):
    """A greedy machine with in-order workers finishes, for any order in which workers move.

    With ``pairs`` a compute worker's ticket is two tasks: side by side both must be able to run at once.
    """
    done: Counter = Counter()

    def ready(kind, block, s):
        previous = p.previous(s)
        has_previous = previous < p.minibatches
        if kind == "up":
            return done["x", s] >= p.x_ready_target(s) and (
                not has_previous or done["y", previous] >= p.y_ready_target(previous)
            )
        if kind == "down":
            return done["hidden", block] >= p.hidden_ready_target() and (
                not has_previous or done["free", previous] >= p.y_free_target(previous)
            )
        if kind == "combine":
            return done["y", s] >= p.y_ready_target(s)
        if kind == "dispatch":
            return not has_previous or done["y", previous] >= p.y_ready_target(previous)
        if kind == "shared_down":
            return done["shared", block] >= p.shared_hidden_ready_target()
        return True

    signal = {
        "up": "hidden",
        "down": "y",
        "combine": "free",
        "dispatch": "x",
        "shared_up": "shared",
    }
    tickets = {"compute": 0, "comm": 0}
    held = {("compute", i): None for i in range(compute)} | {("comm", i): None for i in range(comm)}

    def draw(role):
        n = tickets[role]
        tickets[role] += 1
        if role == "compute":
            tasks = [p.task(n)] if not pairs else [p.task(2 * n), p.task(2 * n + 1)]
            beside = not pairs or side_by_side(*tasks)
            named = [(NAMES[t.kind], t.block, t.minibatch) for t in tasks if t.kind != END]
            if not named:
                return None
            return [named] if beside else [[task] for task in named]
        if n >= p.items:
            return None
        i = p.item(n)
        kind = "dispatch" if i.kind == DISPATCH else "combine"
        return [[(kind, i.row // p.tile.m, i.minibatch)]]

    for worker in held:
        held[worker] = draw(worker[0])
    while any(held.values()):
        able = [w for w, turns in held.items() if turns and all(ready(*t) for t in turns[0])]
        assert able, f"deadlock: {held}"
        worker = rng.choice(able)
        turn, *later = held[worker]
        for kind, block, s in turn:
            if kind in signal:
                signals = p.tile.signals if worker[0] == "compute" else 1
                done[signal[kind], block if kind in ("up", "shared_up") else s] += signals
        held[worker] = later or draw(worker[0])


@settings(max_examples=60, deadline=None)
@given(
    programs(),
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_runs_to_the_end_with_few_workers(p, compute, comm, pairs, rng):
    run_to_the_end(p, compute, comm, pairs, rng)


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_small_rings_run_with_one_worker(slots, pairs):
    """Whatever the random ones above happen to hold."""
    for ahead in (1, 2, 100):
        p = Forward(128 * 5, 0, 64, 64 * 4, 0, 128, 128 * slots, Tile(), ahead=ahead)
        run_to_the_end(p, 1, 1, pairs, random.Random(0))


@settings(max_examples=60, deadline=None)
@given(programs())
def test_targets_are_the_signals_of_all_tasks(p):
    arrivals: Counter = Counter()
    for t in map(p.task, range(p.tasks)):
        key = t.minibatch if t.kind == DOWN else t.block
        arrivals[t.kind, key] += p.tile.signals
    for i in map(p.item, range(p.items)):
        arrivals[NAMES_OF_ITEMS[i.kind], i.minibatch] += 1
    for block in range(p.blocks):
        assert p.hidden_ready_target() == arrivals[UP, block]
    for block in range(p.shared_blocks):
        assert p.shared_hidden_ready_target() == arrivals[SHARED_UP, block]
    for s in range(p.minibatches):
        assert p.y_ready_target(s) == arrivals[DOWN, s]
        assert p.x_ready_target(s) == arrivals["dispatch", s]
        assert p.y_free_target(s) == arrivals["combine", s]


@pytest.mark.parametrize("rows", [1280, 1408, 1536, 2688])
def test_no_refill_is_needed_before_all_fresh_slots_are_used(rows):
    """Else compute waits until every fresh slot is filled: communication goes in order too."""
    p = Forward(rows, 0, 64, 64, 0, 256, 1280, Tile())
    fresh = [p.previous(p.minibatch_at(i)) >= p.minibatches for i in range(p.minibatches)]
    assert fresh == sorted(fresh, reverse=True) and sum(fresh) == min(p.ring_mbs, p.minibatches)
    slots = [p.minibatch_at(i) % p.ring_mbs for i in range(p.minibatches)]
    assert slots == [i % p.ring_mbs for i in range(p.minibatches)]


@pytest.mark.parametrize("rows", [128, 1280, 1408])
def test_wraps_reuse_slots_in_processing_order(rows):
    p = Forward(rows, 0, 64, 64, 0, 256, 512, Tile())
    order = [p.minibatch_at(i) for i in range(p.minibatches)]
    for s in order:
        if p.previous(s) < p.minibatches:
            assert order.index(p.previous(s)) < order.index(s)
