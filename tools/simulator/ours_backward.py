"""Our backward kernel as ``Work``: the order and the waits of ``kernels_cute.backward.program``."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from mok.kernels_cute.backward import program as bw
from mok.tools.simulator.load import RankLoad, spread
from mok.tools.simulator.scenario import Scenario
from mok.tools.simulator.tilecost import Costs
from mok.tools.simulator.work import Counters, Ids, NumpyOps, Sent, Tasks, Work, no_items

Array = NDArray[np.int64]
Floats = NDArray[np.float64]

KINDS = (
    "end", "replay", "dgrad down", "dgrad up", "wgrad down", "wgrad gate", "wgrad up", "",
    "", "", "shared dgrad down", "shared dgrad up", "shared wgrad down", "shared wgrad gate",
    "shared wgrad up",
)  # fmt: skip
ITEMS = ("", "dispatch", "push")

# The memory of an accumulator that goes from group to group, in FP32, written and read.
ACCUMULATOR_S = 1.0e-6


@dataclasses.dataclass
class _Decoded:
    """All tasks in ticket order."""

    kind: Array
    block: Array
    m: Array
    n: Array
    minibatch: Array
    group: Array


def backward(scenario: Scenario, load: RankLoad) -> Work:
    """The backward kernel of one rank."""
    shape, config = scenario.shape, scenario.config
    costs = Costs.ours(scenario)
    arguments = dict(
        rows=load.rows,
        tokens=load.tokens,
        hidden=shape.hidden_size,
        intermediate=shape.intermediate_size,
        shared_intermediate=shape.shared_intermediate_size or 0,
        experts=len(load.counts),
        minibatch=config.minibatch_size,
        macrobatch=config.macrobatch_size,
        tile=costs.tile,
        ahead=costs.ahead,
        push=scenario.pushes,
    )
    p = bw.Backward(**arguments, ops=bw.PY)
    decoder = bw.Backward(**arguments, ops=NumpyOps)
    plan = bw.make_plan(p, load.blocks_of_expert.tolist())
    ring = not scenario.direct
    combines = ring and not scenario.pushes  # results pass the ring of dx and comm workers
    tasks = _decode(p, decoder, plan)

    counters = Counters()
    each = np.arange(p.minibatches, dtype=np.int64)
    blocks_in = np.minimum(p.mb_blocks, p.blocks - each * p.mb_blocks)
    overlaps = np.array(plan.tables[bw.OVERLAPS][: p.minibatches], np.int64)
    replayed = max(0, p.blocks - p.ring_blocks)
    arrivals = blocks_in * p.items_per_block if ring else blocks_in * 0
    dispatch = counters.add("rows", arrivals)
    push = counters.add("slot pushed", arrivals if combines else blocks_in * 0)
    dx = counters.add("results", blocks_in * p.n_dx if combines else blocks_in * 0)
    free = counters.add("slot free", blocks_in * p.n_dx + overlaps * p.group_tasks)
    replay = counters.add("replay", [0] * (p.blocks - replayed) + [p.n_up] * replayed)
    ddown = counters.add("d hidden", [p.n_ddown] * p.blocks)
    sizes = [end - first for _, first, end, _, _ in plan.groups]
    # A group's weight gradients wait for all its blocks: one counter instead of a range of them.
    rows_done = counters.add("d hidden of group", [n * p.n_ddown for n in sizes])
    group = counters.add("accumulator", [p.group_tasks] * len(plan.groups))
    shared = counters.add("d hidden", [p.shared_n_ddown] * p.shared_blocks)
    shared_all = counters.add("d hidden of group", [p.shared_blocks * p.shared_n_ddown])

    group_of_block = np.zeros(max(1, p.blocks), np.int64)
    covers: list[Ids] = []
    for g, (_, first, end, _, _) in enumerate(plan.groups):
        group_of_block[first:end] = g
        last = (end - 1) // p.mb_blocks
        covers.append(tuple(free + s for s in range(first // p.mb_blocks, last + 1) if end))

    waits: list[Ids] = []
    signals: list[Ids] = []
    early: list[Ids] = []
    cache: dict[tuple[int, ...], tuple[Ids, Ids, Ids]] = {}
    for kind, block, g in zip(
        tasks.kind.tolist(), tasks.block.tolist(), tasks.group.tolist(), strict=True
    ):
        key = (kind, block, g)
        found = cache.get(key)
        if found is None:
            s = block // p.mb_blocks
            before = s - p.ring_mbs
            back = before >= 0
            if kind == bw.REPLAY:
                found = ((dispatch + s, free + before) if ring else (free + before,),
                         (replay + block,), ())  # fmt: skip
            elif kind == bw.DDOWN:
                wait: Ids = (dispatch + s,) if ring else ()
                if back:
                    wait += (replay + block,) + ((push + before,) if combines else ())
                found = (wait, (ddown + block, rows_done + int(group_of_block[block])), ())
            elif kind == bw.DX:
                wait = (ddown + block,) + ((push + before,) if back and combines else ())
                found = (wait, (dx + s,) if combines else (), (free + s,))
            elif kind <= bw.WUP:
                earlier = plan.groups[g][3]
                wait = (rows_done + g,) + ((group + g - 1,) if earlier else ())
                found = (wait, (group + g,), covers[g])
            elif kind == bw.SHARED + bw.DDOWN:
                found = ((), (shared + block, shared_all), ())
            elif kind == bw.SHARED + bw.DX:
                found = ((shared + block,), (), ())
            else:
                found = ((shared_all,), (), ())
            cache[key] = found
        waits.append(found[0])
        signals.append(found[1])
        early.append(found[2])

    busy, tail, hbm, sent = _costs(scenario, load, costs, p, plan, tasks)
    routed = tasks.kind < bw.SHARED
    out = Tasks(
        KINDS,
        tasks.kind.tolist(),
        busy.tolist(),
        tail.tolist(),
        costs.hold(tail).tolist(),
        hbm.tolist(),
        waits,
        signals,
        early,
        np.where(routed, tasks.minibatch, -1).tolist(),
        tasks.group.tolist(),
        sent=sent,
    )
    items = no_items()
    if ring:
        kinds, rows = _items(p, plan, combines)
        pull = kinds == bw.DISPATCH
        minibatch = rows // (p.mb_blocks * costs.tile.m)
        before = minibatch - p.ring_mbs
        wait_ids = np.where(pull, np.where(before >= 0, free + before, -1), dx + minibatch)
        signal = np.where(pull, dispatch, push) + minibatch
        # Beyond the saved macrobatch x is pulled along with dy.
        matrices = np.where(pull & (before >= 0), 2, 1)
        items = costs.items(
            ITEMS, kinds, pull, rows, minibatch, wait_ids, signal, load, matrices, sums=True
        )
    return Work(
        out, items, counters, costs.pipeline(), costs.workers, costs.comm_sms, costs.cluster,
        costs.table["start_s"], rows=load.rows,
    )  # fmt: skip


def _decode(p: bw.Backward, decoder: bw.Backward, plan: bw.Plan) -> _Decoded:
    def whole(parts: list[tuple[Array, ...]]) -> _Decoded:
        return _Decoded(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def fill(task: tuple[Array, ...], like: Array) -> tuple[Array, ...]:
        return tuple(np.broadcast_to(np.asarray(a, np.int64), like.shape) for a in task)

    tickets = np.arange(p.shared_tasks, dtype=np.int64)
    parts = [fill(decoder.shared_task(tickets), tickets)]
    for s in range(p.minibatches):
        base, end = plan.tables[bw.TASK_BASE][s : s + 2]
        offsets = np.arange(end - base, dtype=np.int64)
        placed = decoder.place(s, offsets, *plan.tables[bw.AHEAD_OF][s : s + 2])
        task = fill(decoder.routed_task(*placed, plan.tables[bw.GROUP_BASE][s]), offsets)
        # A weight gradient's block is its group's first.
        weight = task[0] >= bw.WDOWN
        first = np.array([g[1] for g in plan.groups] or [0], np.int64)
        block = np.where(weight, first[np.clip(task[5], 0, len(first) - 1)], task[1])
        parts.append((task[0], block, *task[2:]))
    placed = plan.tables[bw.GROUP_BASE][p.minibatches]
    empty = np.arange((len(plan.groups) - placed) * p.group_tasks, dtype=np.int64)
    kind, m, n, group = fill(decoder.weight_task(empty), empty)
    parts.append((kind, 0 * kind, m, n, 0 * kind, group + placed))
    return whole(parts)


def _items(p: bw.Backward, plan: bw.Plan, combines: bool) -> tuple[Array, Array]:
    """Kind and first row of every item; without ``combines`` there are only dispatches, block by block."""
    first = p.first_blocks
    kinds, blocks = [np.full(first, bw.DISPATCH)], [np.arange(first)]
    for s in range(p.minibatches if combines else 0):
        base, end = plan.tables[bw.ITEM_BASE][s : s + 2]
        here = p.blocks_in(s)
        pushes = s * p.mb_blocks + np.arange(here)
        refill = (plan.tables[bw.FREE_BASE][s] + p.ring_mbs) * p.mb_blocks
        pulls = refill + np.arange(end - base - here)
        kinds += [np.full(here, bw.PUSH), np.full(len(pulls), bw.DISPATCH)]
        blocks += [pushes, pulls]
    per_block = p.items_per_block
    block = np.repeat(np.concatenate(blocks).astype(np.int64), per_block)
    within = np.tile(np.arange(per_block), len(block) // per_block)
    kind = np.repeat(np.concatenate(kinds).astype(np.int64), per_block)
    return kind, block * p.tile.m + within * p.tile.comm_m


def _costs(
    scenario: Scenario, load: RankLoad, costs: Costs, p: bw.Backward, plan: bw.Plan, d: _Decoded
) -> tuple[Floats, Floats, Floats, list[Sent]]:
    shape, table, tile = scenario.shape, costs.table, costs.tile
    h, i = shape.hidden_size, shape.intermediate_size
    shared_i = shape.shared_intermediate_size or 0
    precise = d.kind >= bw.SHARED
    step = d.kind % bw.SHARED
    inner = np.where(precise, shared_i, i)
    sizes = np.array([end - first for _, first, end, _, _ in plan.groups] or [0], np.int64)
    later = np.array([g[4] for g in plan.groups] or [0], np.int64)
    group = np.clip(d.group, 0, len(sizes) - 1)
    weight = step >= bw.WDOWN
    depth = np.select(
        [weight & precise, weight, step == bw.DX],
        [load.tokens, sizes[group] * tile.m, 2 * inner],
        h,
    )
    steps = costs.steps(depth)
    busy = costs.busy(steps, precise)
    if scenario.direct:
        # Weight gradients gather dy or x in place, column by column.
        gather = steps * table["gather_step_s"]
        busy = np.where(weight & ~precise, np.maximum(busy, gather), busy)
    chunks = np.where(step == bw.REPLAY, 2 * (tile.up_n // 64), tile.down_n // 64)
    chunk_s = np.where(step == bw.DDOWN, table["ddown_chunk_s"], table["chunk_s"])
    tail = chunks * chunk_s
    tail = tail + np.where(weight & ~precise & (later[group] > 0), ACCUMULATOR_S, 0.0)

    expert = spread(load.blocks_of_expert)
    near = np.append(costs.neighbours(expert, p.mb_blocks), 1.0)
    sharing = np.where(precise, tile.group_m, near[np.minimum(d.block, len(near) - 1)])
    sharing = np.where(weight, p.w_m, sharing)
    n_tiles = np.select(
        [step == bw.REPLAY, (step == bw.DDOWN) | weight], [p.n_up, p.n_ddown], p.n_dx
    )
    hbm = costs.operand_bytes(depth, np.minimum(sharing, tile.group_m), n_tiles, precise)
    outputs = np.select([step == bw.REPLAY, step == bw.DDOWN], [2 * tile.up_n, 5 * tile.down_n],
                        tile.down_n)  # fmt: skip
    results = 2.0 * tile.m * outputs
    sent: list[Sent] = []
    if scenario.pushes:
        # As in forward. The router-weight gradients, which the store warp adds up, cost nothing here.
        pushed = d.kind == bw.DX
        payload, least, sent = costs.sends(pushed, d.block, d.n, load)
        results, tail = np.where(pushed, payload, results), np.maximum(tail, least)
    return busy, tail, hbm + results, sent
