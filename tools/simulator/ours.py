"""Our kernels as ``Work``: the order and the waits of ``kernels_cute``'s programs, with costs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mok.kernels_cute import program as fw
from mok.tools.simulator.load import RankLoad, spread
from mok.tools.simulator.scenario import Scenario
from mok.tools.simulator.tilecost import Costs
from mok.tools.simulator.work import (
    Counters,
    NumpyOps,
    Tasks,
    Work,
    no_items,
    pairs,
)

Array = NDArray[np.int64]

FORWARD_KINDS = ("end", "shared up", "shared down", "up", "down")
FORWARD_ITEMS = ("", "dispatch", "combine")


def forward(scenario: Scenario, load: RankLoad) -> Work:
    """The forward kernel, or the one that rebuilds its context."""
    shape, config = scenario.shape, scenario.config
    costs = Costs.ours(scenario)
    recompute = scenario.direction == "recompute"
    arguments = dict(
        rows=load.rows,
        tokens=load.tokens,
        hidden=shape.hidden_size,
        intermediate=shape.intermediate_size,
        shared_intermediate=shape.shared_intermediate_size or 0,
        minibatch=config.minibatch_size,
        macrobatch=config.macrobatch_size,
        tile=costs.tile,
        recompute=recompute,
    )
    p = fw.Forward(**arguments, ops=fw.PY)
    decoder = fw.Forward(**arguments, ops=NumpyOps)
    ring = not scenario.direct
    tickets = np.arange(p.tasks, dtype=np.int64)
    kind, block, _, minibatch = (np.broadcast_to(a, tickets.shape) for a in decoder.task(tickets))

    counters = Counters()
    each = np.arange(p.minibatches, dtype=np.int64)
    blocks_in = np.minimum(p.mb_blocks, p.blocks - each * p.mb_blocks)
    x_ready = counters.add("rows", blocks_in * p.items_per_block) if ring else 0
    hidden = counters.add("hidden", [0 if recompute else p.n_up] * p.blocks)
    y_ready = counters.add("results", blocks_in * p.n_down)
    has_combine = ring and not recompute
    y_free = counters.add("slot", blocks_in * p.items_per_block) if has_combine else 0
    shared = counters.add("shared hidden", [0 if recompute else p.shared_n_up] * p.shared_blocks)

    up, down = kind == fw.UP, kind == fw.DOWN
    shared_up, shared_down = kind == fw.SHARED_UP, kind == fw.SHARED_DOWN
    previous = minibatch + p.ring_mbs
    has_previous = (previous < p.minibatches) & (not recompute)
    first = np.full(p.tasks, -1, np.int64)
    second = first.copy()
    signal = first.copy()
    if ring:
        first[up] = x_ready + minibatch[up]
        reuse = down & has_previous
        second[reuse] = y_free + previous[reuse]
    reuse = up & has_previous
    second[reuse] = y_ready + previous[reuse]
    first[down] = hidden + block[down]
    first[shared_down] = shared + block[shared_down]
    if not recompute:
        signal[up] = hidden + block[up]
        signal[shared_up] = shared + block[shared_up]
    signal[down] = y_ready + minibatch[down]

    expert = spread(load.blocks_of_expert)
    saves = scenario.save_context or recompute
    saved = saves & (shared_up | (up & (block < p.ring_blocks)))
    is_up = up | shared_up
    steps = np.select(
        [is_up, down, shared_down],
        [costs.steps(shape.hidden_size), costs.steps(shape.intermediate_size),
         costs.steps(shape.shared_intermediate_size or 64)],
    )  # fmt: skip
    precise = shared_up | shared_down  # the shared expert is always BF16
    busy = costs.busy(steps, precise)
    chunks = np.where(is_up, costs.tile.up_n // 64, costs.tile.down_n // 64)
    chunks = np.where(saved, 3 * chunks, chunks)
    a_columns = np.select(
        [is_up, down], [shape.hidden_size, shape.intermediate_size],
        shape.shared_intermediate_size or 64,
    )  # fmt: skip
    sharing = np.ones(p.tasks)
    sharing[up] = costs.neighbours(expert, p.mb_blocks)[block[up]]
    sharing[down] = costs.neighbours(expert, p.mb_blocks)[block[down]]
    sharing[precise] = costs.tile.group_m
    n_tiles = np.select([is_up & up, shared_up], [p.n_up, max(1, p.shared_n_up)], max(1, p.n_down))
    hbm = costs.operand_bytes(a_columns, sharing, n_tiles, precise)
    written = np.where(is_up, costs.tile.up_n * np.where(saved, 3, 1), costs.tile.down_n)
    hbm = hbm + 2 * costs.tile.m * written

    tail = chunks * costs.table["chunk_s"]
    tasks = Tasks(
        FORWARD_KINDS,
        kind.tolist(),
        busy.tolist(),
        tail.tolist(),
        costs.hold(tail).tolist(),
        hbm.tolist(),
        costs.flops(steps, precise).tolist(),
        pairs(first, second),
        pairs(signal, np.full(p.tasks, -1)),
        [()] * p.tasks,
        np.where(precise, -1, minibatch).tolist(),
    )
    items = no_items()
    if ring:
        index = np.arange(p.items, dtype=np.int64)
        item_kind, row, item_mb = (np.broadcast_to(a, index.shape) for a in decoder.item(index))
        pull = item_kind == fw.DISPATCH
        previous = item_mb + p.ring_mbs
        wait = np.where(pull, np.where(previous < p.minibatches, y_ready + previous, -1),
                        y_ready + item_mb)  # fmt: skip
        signal = np.where(pull, x_ready, y_free) + item_mb
        items = costs.items(FORWARD_ITEMS, item_kind, pull, row, item_mb, wait, signal, load)
    return Work(
        tasks, items, counters, costs.pipeline(), costs.workers, costs.comm_sms, costs.cluster,
        costs.table["start_s"], rows=load.rows,
    )  # fmt: skip
