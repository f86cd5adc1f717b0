"""Our forward kernel as ``Work``: order and waits of ``kernels_cute.program``, with costs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mok.kernels_cute import program as fw
from mok.tools.simulator.load import RankLoad, spread
from mok.tools.simulator.scenario import Scenario
from mok.tools.simulator.tilecost import Costs
from mok.tools.simulator.work import (
    Counters,
    Items,
    NumpyOps,
    Sent,
    Tasks,
    Work,
    no_items,
    pairs,
)

Array = NDArray[np.int64]
Mask = NDArray[np.bool_]

KINDS = ("end", "shared up", "shared down", "up", "down")
ITEMS = ("", "dispatch", "combine")


class ForwardWork:
    """Builds the work of one rank's forward kernel, or of the one that rebuilds its context."""

    def __init__(self, scenario: Scenario, load: RankLoad) -> None:
        self.scenario, self.load = scenario, load
        self.costs = Costs.ours(scenario)
        self.ring = not scenario.direct
        self.recompute = scenario.direction == "recompute"
        self.push = scenario.pushes
        self.p = self._program(fw.PY)
        self.decoder = self._program(NumpyOps)
        self.counters = Counters()
        p, add = self.p, self.counters.add
        minibatches = range(p.minibatches)
        # What nobody arrives at has target 0.
        moved = [p.x_ready_target(s) if self.ring else 0 for s in minibatches]
        combined = [0 if self.recompute or self.push else n for n in moved]
        used = 0 if self.recompute else 1
        self.x_ready = add("rows", moved)
        self.y_free = add("slot", combined)
        self.y_ready = add("results", [p.y_ready_target(s) * used for s in minibatches])
        self.hidden = add("hidden", [p.hidden_ready_target() * used] * p.blocks)
        shared = p.shared_hidden_ready_target() * used
        self.shared_hidden = add("shared hidden", [shared] * p.shared_blocks)

    def _program(self, ops: object) -> fw.Forward:
        shape, config = self.scenario.shape, self.scenario.config
        return fw.Forward(
            rows=self.load.rows,
            tokens=self.load.tokens,
            hidden=shape.hidden_size,
            intermediate=shape.intermediate_size,
            shared_intermediate=shape.shared_intermediate_size or 0,
            minibatch=config.minibatch_size,
            macrobatch=config.macrobatch_size,
            tile=self.costs.tile,
            ops=ops,
            recompute=self.recompute,
            ahead=self.costs.ahead,
            push=self.push,
        )

    def work(self) -> Work:
        costs = self.costs
        return Work(
            self.tasks(),
            self.items() if self.ring else no_items(),
            self.counters,
            costs.pipeline(),
            costs.workers,
            costs.comm_sms,
            costs.cluster,
            costs.table["start_s"],
            rows=self.load.rows,
        )

    def tasks(self) -> Tasks:
        """All compute tasks in ticket order."""
        p, costs = self.p, self.costs
        tickets = np.arange(p.tasks, dtype=np.int64)
        task = self.decoder.task(tickets)
        kind, block, n, minibatch = (np.broadcast_to(a, tickets.shape) for a in task)
        up, down = kind == fw.UP, kind == fw.DOWN
        shared_up, shared_down = kind == fw.SHARED_UP, kind == fw.SHARED_DOWN
        first, second, signal = (np.full(p.tasks, -1, np.int64) for _ in range(3))
        reuses = minibatch + p.ring_mbs < p.minibatches
        previous = minibatch + p.ring_mbs
        # As the load role of the kernel waits: ``wait_up`` and ``wait_down``.
        if self.ring:
            first[up] = self.x_ready + minibatch[up]
        if self.ring and not self.push:
            second[down & reuses] = self.y_free + previous[down & reuses]
        second[up & reuses] = self.y_ready + previous[up & reuses]
        first[down] = self.hidden + block[down]
        first[shared_down] = self.shared_hidden + block[shared_down]
        if not self.recompute:
            signal[up] = self.hidden + block[up]
            signal[shared_up] = self.shared_hidden + block[shared_up]
        signal[down] = self.y_ready + minibatch[down]

        saving = self.scenario.save_context or self.recompute
        saved = saving & (shared_up | (up & (block < p.ring_blocks)))
        shared, is_up = shared_up | shared_down, up | shared_up
        shape, tile = self.scenario.shape, costs.tile
        shared_i = shape.shared_intermediate_size or 64
        depth = np.select([is_up, down], [shape.hidden_size, shape.intermediate_size], shared_i)
        steps = costs.steps(depth)
        copies = np.where(saved, 3, 1)  # gate and up beside hidden
        chunks = np.where(is_up, tile.up_n // 64 * copies, tile.down_n // 64)
        tail = chunks * costs.table["chunk_s"]

        near = costs.neighbours(spread(self.load.blocks_of_expert), p.mb_blocks)
        sharing = np.full(p.tasks, float(tile.group_m))
        sharing[~shared] = near[block[~shared]]
        n_tiles = np.select([up, shared_up], [p.n_up, p.shared_n_up], p.n_down)
        hbm = costs.operand_bytes(depth, sharing, n_tiles, shared)
        results = 2.0 * tile.m * np.where(is_up, tile.up_n * copies, tile.down_n)
        sent: list[Sent] = []
        if self.push:
            # Peers' rows come into this rank's memory as its own go into theirs.
            payload, least, sent = costs.sends(down, block, n, self.load)
            results, tail = np.where(down, payload, results), np.maximum(tail, least)
        hbm = hbm + results
        return Tasks(
            KINDS,
            kind.tolist(),
            costs.busy(steps, shared).tolist(),
            tail.tolist(),
            costs.hold(tail).tolist(),
            hbm.tolist(),
            pairs(first, second),
            pairs(signal, np.full(p.tasks, -1)),
            [()] * p.tasks,
            np.where(shared, -1, minibatch).tolist(),
            sent=sent,
        )

    def items(self) -> Items:
        """All comm items in their order."""
        p = self.p
        index = np.arange(p.items, dtype=np.int64)
        kind, row, minibatch = (np.broadcast_to(a, index.shape) for a in self.decoder.item(index))
        pull: Mask = kind == fw.DISPATCH
        previous = minibatch + p.ring_mbs
        reused = np.where(previous < p.minibatches, self.y_ready + previous, -1)
        wait = np.where(pull, reused, self.y_ready + minibatch)
        signal = np.where(pull, self.x_ready, self.y_free) + minibatch
        return self.costs.items(ITEMS, kind, pull, row, minibatch, wait, signal, self.load)


def forward(scenario: Scenario, load: RankLoad) -> Work:
    """The forward kernel of one rank, or the one that rebuilds its context."""
    return ForwardWork(scenario, load).work()
