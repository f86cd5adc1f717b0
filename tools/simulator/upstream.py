"""Upstream's kernels as ``Work``: a second task program, which only the simulator has.

Order, tiles, counters and ring rules are those of the system that this project rebuilds, as far as
its public code tells them: gate, up, SwiGLU and down as separate tasks per minibatch, one
accumulator, a scan for each task's expert, one cluster launched per task of the *capacity*, all
pulls of a macrobatch before its pushes. ``Switches`` turn our differences on one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mok.tools.simulator.load import RankLoad
from mok.tools.simulator.scenario import Scenario
from mok.tools.simulator.upstream_comm import CommPlan
from mok.tools.simulator.upstream_costs import UpstreamCosts
from mok.tools.simulator.work import Counters, Ids, Work

Array = NDArray[np.int64]

TILE = 256
GROUP = 8  # row blocks of a raster group

KINDS = (
    "", "gate/up", "swiglu", "down", "dgrad down", "swiglu backward", "dgrad up", "wgrad down",
    "wgrad gate/up", "replay", "replay swiglu",
)  # fmt: skip
(UP, SWIGLU, DOWN, DDOWN, DSWIGLU, DUP, WDOWN, WUP, REPLAY, RSWIGLU) = range(1, 11)


@dataclass
class Phases:
    """Tasks, phase by phase.

    ``depth`` is the contraction, ``block`` -1 where no row block is meant, ``width`` the number of
    128x128 tiles of an elementwise task (0: a GEMM).
    """

    kind: list[int] = field(default_factory=list)
    block: list[int] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)
    width: list[int] = field(default_factory=list)
    minibatch: list[int] = field(default_factory=list)
    waits: list[Ids] = field(default_factory=list)
    signals: list[Ids] = field(default_factory=list)

    def add(
        self,
        kind: int,
        minibatch: int,
        block: list[int],
        depth: int,
        waits: list[Ids],
        signals: list[Ids],
        width: list[int] | None = None,
    ) -> None:
        count = len(block)
        self.kind += [kind] * count
        self.block += block
        self.depth += [depth] * count
        self.width += width or [0] * count
        self.minibatch += [minibatch] * count
        self.waits += waits
        self.signals += signals


def raster(blocks: int, tiles: int) -> tuple[list[int], list[int]]:
    """Row block and column tile of each task of a phase: groups of row blocks, rows fastest."""
    at = np.arange(blocks * tiles, dtype=np.int64)
    which = at // (GROUP * tiles)
    rest = at - which * GROUP * tiles
    height = np.minimum(blocks - which * GROUP, GROUP)
    return (which * GROUP + rest % height).tolist(), (rest // height).tolist()


@dataclass
class Builder:
    """What the phases of both directions have in common."""

    scenario: Scenario
    load: RankLoad
    costs: UpstreamCosts
    counters: Counters
    phases: Phases

    def __post_init__(self) -> None:
        shape, config = self.scenario.shape, self.scenario.config
        self.h, self.i = shape.hidden_size, shape.intermediate_size
        self.shared_i = shape.shared_intermediate_size or 0
        self.mb_blocks = config.minibatch_size // TILE
        self.ring = config.macrobatch_size // config.minibatch_size
        self.blocks = self.load.rows // TILE
        self.minibatches = -(-self.blocks // self.mb_blocks)
        self.n_up, self.n_h = -(-self.i // TILE), -(-self.h // TILE)
        self.shared_n_up = -(-self.shared_i // TILE)
        self.shared_blocks = -(-self.load.tokens // TILE) if self.shared_i else 0

    def rows_in(self, minibatch: int) -> int:
        """Row blocks of a minibatch."""
        return min(self.mb_blocks, self.blocks - minibatch * self.mb_blocks)

    def macrobatches(self) -> list[list[int]]:
        return [
            list(range(m, min(m + self.ring, self.minibatches)))
            for m in range(0, self.minibatches, self.ring)
        ]

    def plan(self) -> CommPlan:
        return CommPlan(self.load, self.costs, self.macrobatches(), self.mb_blocks, self.blocks)

    def elementwise(
        self, kind: int, minibatch: int, first: int, blocks: int, n_up: int, per_task: int,
        tile: int, name: str, also: list[Ids],
    ) -> int:  # fmt: skip
        """SwiGLU tasks of ``per_task`` tiles of 128x128; returns the counters of row blocks.

        They wait for the 256x256 tiles from counter ``tile`` on, and for ``also`` of their block.
        """
        per_row, tiles = 2 * n_up, 4 * blocks * n_up
        waits: list[Ids] = []
        touched: list[list[int]] = []
        width: list[int] = []
        for at in range(0, tiles, per_task):
            covered = range(at, min(at + per_task, tiles))
            wait = {tile + t // per_row // 2 * n_up + t % per_row // 2: 0 for t in covered}
            here = list({t // per_row // 2: 0 for t in covered})
            for b in here:
                wait |= dict.fromkeys(also[b], 0)
            waits.append(tuple(wait))
            touched.append(here)
            width.append(len(covered))
        arrivals = np.zeros(blocks, np.int64)
        for here in touched:
            arrivals[here] += 1
        ready = self.counters.add(name, arrivals)
        self.phases.add(
            kind, minibatch, [first + b[0] for b in touched], 0, waits,
            [tuple(ready + b for b in here) for here in touched], width,
        )  # fmt: skip
        return ready

    def gate_up(
        self, kind: int, minibatch: int, first: int, blocks: int, n_up: int, ready: Ids, name: str
    ) -> int:
        """Gate, up and SwiGLU of row blocks; returns the counters of their hidden rows."""
        p = self.phases
        if self.scenario.switches.fused_swiglu:
            # One GEMM whose tile holds 128 columns of I, as gate and up side by side.
            hidden = self.counters.add(name, [2 * n_up] * blocks)
            block, _ = raster(blocks, 2 * n_up)
            signals: list[Ids] = [(hidden + b,) for b in block]
            p.add(
                kind, minibatch, [first + b for b in block], self.h, [ready] * len(block), signals
            )
            return hidden
        tile = self.counters.add("gate/up tile", [2] * (blocks * n_up))
        block, n = raster(blocks, n_up)
        signals = [(tile + b * n_up + c,) for b, c in zip(block, n, strict=True)]
        for _ in ("gate", "up"):
            p.add(
                kind, minibatch, [first + b for b in block], self.h, [ready] * len(block), signals
            )
        follow = SWIGLU if kind == UP else RSWIGLU
        return self.elementwise(
            follow, minibatch, first, blocks, n_up, 6, tile, name, [()] * blocks
        )

    def work(self, plan: CommPlan | None, launched: int) -> Work:
        scenario, costs = self.scenario, self.costs
        items = plan.items() if plan is not None else CommPlan.none()
        return Work(
            costs.tasks(KINDS, self.phases), items, self.counters, costs.pipeline(), costs.workers,
            scenario.comm_sms, costs.cluster, costs.table["start_s"],
            costs.surplus_s(launched, len(self.phases.kind)), rows=self.load.rows,
        )  # fmt: skip


def forward(scenario: Scenario, load: RankLoad) -> Work:
    """The forward kernel of one rank."""
    b = Builder(scenario, load, UpstreamCosts.of(scenario, load), Counters(), Phases())
    plan = b.plan()
    each = range(b.minibatches)
    x_ready = b.counters.add("rows", [plan.pulls_of(b.rows_in(s)) for s in each])
    y_ready = b.counters.add("results", [b.rows_in(s) * b.n_h for s in each])
    y_free = b.counters.add("slot", plan.push_arrivals())

    def mlp(minibatch: int, first: int, blocks: int, n_up: int, ready: Ids, free: list[Ids],
            done: Ids, depth: int, name: str) -> None:  # fmt: skip
        hidden = b.gate_up(UP, minibatch, first, blocks, n_up, ready, name)
        block, _ = raster(blocks, b.n_h)
        waits: list[Ids] = [(hidden + r, *free[r]) for r in block]
        b.phases.add(DOWN, minibatch, [first + r for r in block], depth, waits, [done] * len(block))

    if b.shared_blocks:
        mlp(-1, 0, b.shared_blocks, b.shared_n_up, (), [()] * b.shared_blocks, (), b.shared_i,
            "shared hidden")  # fmt: skip
    for macro in reversed(b.macrobatches()):
        for s in macro:
            first, count, before = s * b.mb_blocks, b.rows_in(s), s + b.ring
            # Down overwrites y rows of the macrobatch before: combine must have read them.
            old = [before * b.mb_blocks + r for r in range(count)]
            free: list[Ids] = [
                (y_free + 2 * r, y_free + 2 * r + 1) if r < b.blocks else () for r in old
            ]
            mlp(s, first, count, b.n_up, (x_ready + s,), free, (y_ready + s,), b.i, "hidden")
    plan.forward(x_ready, y_ready, y_free, b.ring)
    fused = scenario.switches.fused_swiglu
    swiglu = 0 if fused else -(-4 * b.mb_blocks * b.n_up // 6)
    per_minibatch = b.mb_blocks * (2 * b.n_up + b.n_h) + swiglu
    return b.work(plan, b.costs.launched(per_minibatch, b.phases.minibatch.count(-1)))


def backward(scenario: Scenario, load: RankLoad) -> Work:
    """The backward kernel of one rank."""
    b = Builder(scenario, load, UpstreamCosts.of(scenario, load), Counters(), Phases())
    plan = b.plan()
    each = range(b.minibatches)
    macros = b.macrobatches()
    slots = scenario.switches.slot_backward
    dy_ready = b.counters.add("rows", [plan.pulls_of(b.rows_in(s)) for s in each])
    replays = [plan.pulls_of(b.rows_in(s)) if s >= b.ring else 0 for s in each]
    x_ready = b.counters.add("rows", replays)
    dx_ready = b.counters.add("results", [b.rows_in(s) * b.n_h for s in each])
    groups = _groups(b)
    # What frees a ring slot: everything that reads it, or everything of its macrobatch.
    owner = [s if slots else s // b.ring for s in each]
    name, count = ("slot free", b.minibatches) if slots else ("macrobatch", len(macros))
    free = b.counters.add(name, [0] * count)  # the targets follow below

    if b.shared_blocks:
        _dgrad(b, -1, 0, b.shared_blocks, b.shared_n_up, b.shared_i, (), (), (), ())
        _weights(b, -1, load.tokens, b.shared_n_up, (), ())
    for m, macro in enumerate(macros):
        here = [g for g in groups if g[1] // b.mb_blocks in macro]
        replayed: dict[int, int] = {}
        done: dict[int, int] = {}

        def weights(group: tuple[int, int, int], done: dict[int, int] = done) -> None:
            _, first, end = group
            mbs = range(first // b.mb_blocks, (end - 1) // b.mb_blocks + 1)
            wait = tuple(done[r] for r in range(first, end))
            signal = tuple(dict.fromkeys(free + owner[s] for s in mbs))
            _weights(b, mbs[-1], (end - first) * TILE, b.n_up, wait, signal)

        def replay(s: int, replayed: dict[int, int] = replayed) -> None:
            replayed[s] = b.gate_up(
                REPLAY, s, s * b.mb_blocks, b.rows_in(s), b.n_up, (x_ready + s,), "replay"
            )

        if m and not slots:
            for s in macro:
                replay(s)
        for s in macro:
            if m and slots:
                replay(s)
            rows = range(b.rows_in(s))
            hidden = _dgrad(
                b, s, s * b.mb_blocks, b.rows_in(s), b.n_up, b.i, (dy_ready + s,), (dx_ready + s,),
                (free + owner[s],), tuple(replayed[s] + r for r in rows) if m else (),
            )  # fmt: skip
            done |= {s * b.mb_blocks + r: hidden + r for r in rows}
            if slots:
                for group in here:
                    if (group[2] - 1) // b.mb_blocks == s:
                        weights(group)
        if not slots:
            for group in here:
                weights(group)
    plan.backward(dy_ready, x_ready, dx_ready, free, owner, b.ring)
    for ids in (*b.phases.signals, *(move.signals for _, move in plan.order)):
        for i in ids:
            if free <= i < free + count:
                b.counters.targets[i] += 1
    return b.work(plan, len(b.phases.kind))


def _weights(b: Builder, minibatch: int, depth: int, n_up: int, wait: Ids, signal: Ids) -> None:
    """Weight gradients of an expert: down, gate, up."""
    tiles = b.n_h * n_up
    for kind in (WDOWN, WUP, WUP):
        b.phases.add(kind, minibatch, [-1] * tiles, depth, [wait] * tiles, [signal] * tiles)


def _groups(b: Builder) -> list[tuple[int, int, int]]:
    """(expert, first, end) of each expert's row blocks in each macrobatch."""
    found = []
    ring_blocks = b.ring * b.mb_blocks
    first = 0
    for expert, count in enumerate(b.load.blocks_of_expert.tolist()):
        end = first + count
        while first < end:
            stop = min(end, (first // ring_blocks + 1) * ring_blocks)
            found.append((expert, first, stop))
            first = stop
    return found


def _dgrad(
    b: Builder, minibatch: int, first: int, blocks: int, n_up: int, inner: int, ready: Ids,
    done: Ids, release: Ids, replayed: Ids,
) -> int:  # fmt: skip
    """Dgrad down, SwiGLU backward, dgrad gate+up; returns the counters of finished row blocks."""
    name = "d hidden" if minibatch >= 0 else "shared hidden"
    tile = b.counters.add(name, [1] * (blocks * n_up))
    block, n = raster(blocks, n_up)
    signals: list[Ids] = [(tile + r * n_up + c,) for r, c in zip(block, n, strict=True)]
    b.phases.add(DDOWN, minibatch, [first + r for r in block], b.h, [ready] * len(block), signals)
    also: list[Ids] = [(replayed[r],) if replayed else () for r in range(blocks)]
    hidden = b.elementwise(DSWIGLU, minibatch, first, blocks, n_up, 4, tile, name, also)
    block, _ = raster(blocks, b.n_h)
    waits: list[Ids] = [(hidden + r,) for r in block]
    out = done + release
    b.phases.add(DUP, minibatch, [first + r for r in block], 2 * inner, waits, [out] * len(block))
    return hidden
