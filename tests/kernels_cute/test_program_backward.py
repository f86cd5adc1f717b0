"""The backward program covers all work once; every wait is on earlier work, so nothing can deadlock."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from mok.kernels_cute.backward import program as pb
from mok.kernels_cute.backward.program import Backward, make_plan
from mok.kernels_cute.program import Tile


@st.composite
def cases(draw):
    tile = Tile(m=128, group_m=draw(st.integers(1, 18)))
    minibatch = tile.m * draw(st.integers(1, 4))
    experts = draw(st.lists(st.sampled_from([0, 0, 1, 2, 3, 7, 20]), min_size=1, max_size=8))
    p = Backward(
        rows=tile.m * sum(experts),
        tokens=draw(st.integers(0, 500)),
        hidden=64 * draw(st.integers(1, 9)),
        intermediate=64 * draw(st.integers(1, 9)),
        shared_intermediate=64 * draw(st.integers(0, 5)),
        experts=len(experts),
        minibatch=minibatch,
        macrobatch=minibatch * draw(st.integers(1, 6)),
        tile=tile,
        ahead=draw(st.integers(0, 12)),
        push=draw(st.booleans()),
    )
    return p, experts, make_plan(p, experts)


def task(p, plan, ticket):
    bases = plan.tables[pb.TASK_BASE]
    if ticket < p.shared_tasks:
        return p.shared_task(ticket)
    if ticket >= bases[p.minibatches]:
        placed = plan.tables[pb.GROUP_BASE][p.minibatches]
        kind, m, n, group = p.weight_task(ticket - bases[p.minibatches])
        return pb.Task(kind, 0, m, n, p.minibatches, placed + group)
    s = max(i for i in range(p.minibatches) if bases[i] <= ticket)
    placed = p.place(s, ticket - bases[s], *plan.tables[pb.AHEAD_OF][s : s + 2])
    return p.routed_task(*placed, plan.tables[pb.GROUP_BASE][s])


def item(p, plan, index):
    at, within = divmod(index, p.items_per_block)
    bases = plan.tables[pb.ITEM_BASE]
    if at < p.first_blocks:
        return p.first_item(at, within)
    s = max(i for i in range(p.minibatches) if bases[i] <= at)
    return p.item_in(s, at - bases[s], within, plan.tables[pb.FREE_BASE][s])


@settings(max_examples=200, deadline=None)
@given(cases())
def test_all_work_once(case):
    p, experts, plan = case
    empties = experts.count(0)
    total = p.total_tasks(plan.tables[pb.TASK_BASE][p.minibatches], empties)
    tasks = [task(p, plan, t) for t in range(total)]
    got = Counter((t.kind, t.block, t.n) for t in tasks if t.kind in (pb.REPLAY, pb.DDOWN, pb.DX))
    want = Counter()
    for b in range(p.blocks):
        if b // p.mb_blocks >= p.ring_mbs:
            want.update((pb.REPLAY, b, n) for n in range(p.n_up))
        want.update((pb.DDOWN, b, n) for n in range(p.n_ddown))
        want.update((pb.DX, b, n) for n in range(p.n_dx))
    assert got == want
    weights = Counter((t.kind, t.m, t.n, t.group) for t in tasks if pb.WDOWN <= t.kind <= pb.WUP)
    want = Counter()
    for g in range(len(plan.groups)):
        for kind in (pb.WDOWN, pb.WGATE, pb.WUP):
            want.update((kind, m, n, g) for m in range(p.w_m) for n in range(p.w_n))
    assert weights == want
    assert sum(g[2] - g[1] for g in plan.groups) == p.blocks
    shared = Counter((t.kind - pb.SHARED, t.block, t.m, t.n) for t in tasks if t.kind > pb.SHARED)
    assert max(shared.values(), default=1) == 1 and sum(shared.values()) == p.shared_tasks
    items = Counter(item(p, plan, i)[:2] for i in range(p.items))
    want = Counter()
    for row in range(0, p.blocks * p.tile.m, p.tile.comm_m):
        want.update([(pb.DISPATCH, row)] if p.push else [(pb.DISPATCH, row), (pb.PUSH, row)])
    assert items == want


def buffer_reader(p, plan, first):
    """As the load warp finds it: the last group that reads the buffer that one from ``first`` on keeps.

    Macrobatch m keeps in buffer m mod 2 for the first group of macrobatch m + 1.
    """
    for macrobatch in range(first // p.ring_blocks - 1, 0, -2):
        found = plan.tables[pb.GROUP_BASE][macrobatch * p.ring_mbs]
        if plan.groups[found][3]:
            return [found]
    return []


@settings(max_examples=200, deadline=None)
@given(cases())
def test_kept_accumulators_are_read_before_they_are_overwritten(case):
    p, _, plan = case
    for group, (_, first, _, _, later) in enumerate(plan.groups):
        buffer = first // p.ring_blocks % 2
        readers = [
            g
            for g in range(group)
            if plan.groups[g][3] and (plan.groups[g][1] // p.ring_blocks - 1) % 2 == buffer
        ]
        if later:
            # Earlier readers were awaited by whoever wrote for the last one.
            assert buffer_reader(p, plan, first) == readers[-1:]


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(1, 3), st.integers(1, 3), st.randoms(use_true_random=False))
def test_runs_to_the_end_with_few_workers(case, compute, comm, rng):
    p, experts, plan = case
    done = Counter()
    total = p.total_tasks(plan.tables[pb.TASK_BASE][p.minibatches], experts.count(0))

    def free(s):
        return s < 0 or done["free", s] >= p.free_target(s, plan.tables[pb.OVERLAPS][s])

    def ready(t):
        if isinstance(t, pb.Item):
            previous = t.minibatch - p.ring_mbs
            if t.kind == pb.DISPATCH:
                return free(previous)
            return done["dx", t.minibatch] >= p.dx_target(t.minibatch)
        previous = t.minibatch - p.ring_mbs
        pushed = previous < 0 or p.push or done["push", previous] >= p.dispatch_target(previous)
        arrived = done["dispatch", t.minibatch] >= p.dispatch_target(t.minibatch)
        if t.kind == pb.REPLAY:
            return arrived and free(previous)
        if t.kind == pb.DDOWN:
            replayed = previous < 0 or done["replay", t.block] >= p.n_up
            return arrived and replayed and pushed
        if t.kind == pb.DX:
            return pushed and done["ddown", t.block] >= p.n_ddown
        if pb.WDOWN <= t.kind <= pb.WUP:
            _, first, end, earlier, later = plan.groups[t.group]
            awaited = [t.group - 1] if earlier else []
            if later:
                awaited += buffer_reader(p, plan, first)
            return all(done["ddown", b] >= p.n_ddown for b in range(first, end)) and all(
                done["group", g] >= p.group_tasks for g in awaited
            )
        if t.kind == pb.SHARED + pb.DX:
            return done["shared", t.block] >= p.shared_n_ddown
        if t.kind > pb.SHARED + pb.DX:
            return all(done["shared", b] >= p.shared_n_ddown for b in range(p.shared_blocks))
        return True

    def finish(t):
        if isinstance(t, pb.Item):
            done["dispatch" if t.kind == pb.DISPATCH else "push", t.minibatch] += 1
        elif t.kind == pb.REPLAY:
            done["replay", t.block] += 1
        elif t.kind == pb.DDOWN:
            done["ddown", t.block] += 1
        elif t.kind == pb.DX:
            done["dx", t.minibatch] += 1
            done["free", t.minibatch] += 1
        elif t.kind == pb.SHARED + pb.DDOWN:
            done["shared", t.block] += 1
        elif pb.WDOWN <= t.kind <= pb.WUP:
            done["group", t.group] += 1
            _, first, end, _, _ = plan.groups[t.group]
            for s in range(first // p.mb_blocks, (end - 1) // p.mb_blocks + 1 if end else 0):
                done["free", s] += 1

    drawn = {"compute": 0, "comm": 0}
    limit = {"compute": total, "comm": p.items}

    def draw(role):
        n = drawn[role]
        drawn[role] += 1
        if n >= limit[role]:
            return None
        return task(p, plan, n) if role == "compute" else item(p, plan, n)

    held = {("compute", i): draw("compute") for i in range(compute)}
    held |= {("comm", i): draw("comm") for i in range(comm)}
    while any(held.values()):
        able = [w for w, t in held.items() if t and ready(t)]
        assert able, f"deadlock: {held}"
        worker = rng.choice(able)
        finish(held[worker])
        held[worker] = draw(worker[0])


def order_of(slots, expert_blocks, ahead=3):
    """(kind, minibatch) of all tasks, minibatches of one block and six tasks a kind."""
    p = Backward(
        128 * sum(expert_blocks), 0, 64 * 4, 64 * 4, 0, len(expert_blocks), 128, 128 * slots, Tile(),
        ahead=ahead,
    )  # fmt: skip
    plan = make_plan(p, expert_blocks)
    total = plan.tables[pb.TASK_BASE][p.minibatches]
    return [(t.kind, t.minibatch) for t in (task(p, plan, n) for n in range(total))]


def test_dgrad_down_goes_ahead_where_its_slot_is_free():
    """One of its tiles is there; within a ring of six slots all go ahead, and beyond it where the slot was left."""
    for ahead in (0, 1):
        order = order_of(6, [1] * 12, ahead)
        for s in range(11):
            first = order.index((pb.REPLAY if s + 1 >= 6 else pb.DDOWN, s + 1))
            assert (first < order.index((pb.DX, s))) == bool(ahead)
    # An expert of the ring's size frees its slots at its end.
    order = order_of(6, [6, 6], 1)
    assert order.index((pb.REPLAY, 6)) > max(i for i, t in enumerate(order) if t == (pb.DX, 5))
    assert order_of(3, [1] * 12, 1) == order_of(3, [1] * 12, 0)  # too few slots
