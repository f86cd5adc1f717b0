"""A whole call: the kernel on the ranks that matter, what surrounds it, and what bounds it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mok.tools.simulator import ours, ours_backward, upstream
from mok.tools.simulator.engine import Engine, Outcome, Rates
from mok.tools.simulator.load import RankLoad, critical, loads
from mok.tools.simulator.pairs import paired
from mok.tools.simulator.scenario import Scenario
from mok.tools.simulator.tilecost import Costs
from mok.tools.simulator.work import Work


@dataclass
class Result:
    """What the model says about a call. Times in milliseconds.

    Attributes:
        ms: the whole call; ``kernel_ms``: the megakernel of the slowest rank.
        phases: the call's parts in order; they add up to ``ms``. "before routed rows" is the
            shared expert, or waiting, until the first task on routed rows begins; "drain" begins
            when the last task ends.
        bounds: least kernel time that each resource allows; ``bound`` names what the time goes to.
        shares: share of the compute SMs' time by use ("main loop", "epilogue", waits by class).
        comm_busy: share of the communicating SMs' time spent moving data.
        rank, rows, routes, tasks, items: of the slowest rank.
        flops: useful operations of that rank, 6·R·H·I forward and 12·R·H·I backward, with the
            shared expert's rows.
    """

    scenario: Scenario
    ms: float
    kernel_ms: float
    phases: dict[str, float]
    bounds: dict[str, float]
    bound: str
    shares: dict[str, float]
    comm_busy: float
    rank: int
    rows: int
    routes: int
    tasks: int
    items: int
    flops: float
    outcome: Outcome = field(repr=False)
    work: Work = field(repr=False)

    @property
    def tflops(self) -> float:
        """Useful TFLOP/s of the whole call."""
        return self.flops / self.ms / 1e9

    def as_dict(self) -> dict[str, Any]:
        names = ("ms", "kernel_ms", "tflops", "bound", "phases", "bounds", "shares", "comm_busy",
                 "rank", "rows", "routes", "tasks", "items")  # fmt: skip
        return {name: getattr(self, name) for name in names}


def simulate(scenario: Scenario, record: bool = False, start_gain: float = 1.0) -> Result:
    """Simulate one call; ``record`` keeps every task's times in ``Result.outcome.events``.

    ``start_gain``: the ``Machine.gain`` of a call like this one; nearer the truth is sooner found.

    Raises:
        MokError: the scenario is impossible.
    """
    tile_m = 256 if scenario.program == "upstream" else Costs.ours(scenario).tile.m
    candidates = critical(loads(scenario, tile_m))

    def play(now: Scenario) -> tuple[float, float, Result]:
        best: tuple[float, RankLoad, Work, Outcome] | None = None
        for load in candidates:
            work, outcome = play_rank(now, load, record)
            if best is None or outcome.end > best[0]:
                best = (outcome.end, load, work, outcome)
        assert best is not None
        found = _result(now, *best[1:])
        return found.ms / 1e3, found.flops, found

    return at_power_limit(scenario, play, start_gain)


def play_rank(scenario: Scenario, load: RankLoad, record: bool = False) -> tuple[Work, Outcome]:
    """The kernel of one rank; played again where the first times say how its local copies crowd."""
    m = scenario.machine
    rates = Rates(m["hbm_bytes_per_s"], m.nvlink, m["network_bytes_per_s"], m["signal_s"])
    work = build(scenario, load)
    outcome = Engine(work, rates, record).play()
    if scenario.program == "ours" and load.local == 1.0 and len(work.items):
        costs, alone = Costs.ours(scenario), work.items.busy
        for _ in range(CROWD_ROUNDS if costs.carried else 0):
            used = outcome.usage["hbm"] / (rates.hbm * outcome.end)
            more = costs.crowded_s(work.items.hbm, used)
            work.items.busy = [a + b for a, b in zip(alone, more, strict=True)]
            outcome = Engine(work, rates, record).play()
    return work, outcome


CROWD_ROUNDS = 2  # within 0.3 % of more

T = TypeVar("T")
ROUNDS = 5
SETTLED = 0.003  # of the clock


def at_power_limit(
    scenario: Scenario, play: Callable[[Scenario], tuple[float, float, T]], start: float = 1.0
) -> T:
    """What ``play`` gives at the clock that the power limit allows for the rate that it finds.

    Args:
        play: scenario → (seconds, useful FLOP, result).
        start: a guess of the clock over ``clock_hz``.
    """
    machine = scenario.machine
    saved = Costs.ours(scenario).table["pair_power"] if scenario.in_pairs else 0.0
    compute = machine.num_sms - scenario.comm_sms - scenario.config.reserved_sms
    gain = min(start, machine["clock_headroom"])
    tried: list[
        tuple[float, float]
    ] = []  # logarithms: of the clock, and of how far it is from its limit
    while True:
        seconds, flops, found = play(dataclasses.replace(scenario, machine=machine.at(gain)))
        wanted = machine.clock_gain(flops / seconds, compute, saved)
        off = math.log(wanted / gain)
        if abs(off) < SETTLED or len(tried) == ROUNDS:
            return found
        tried.append((math.log(gain), off))
        slope = -1.5  # a higher clock gives a higher rate, which allows a lower clock
        if len(tried) > 1:
            (x0, y0), (x1, y1) = tried[-2:]
            slope = min(-1.0, (y1 - y0) / (x1 - x0))
        gain = min(gain * math.exp(-off / slope), machine["clock_headroom"])


def build(scenario: Scenario, load: RankLoad) -> Work:
    """The kernel's work on one rank."""
    backward = scenario.direction == "backward"
    if scenario.program == "upstream":
        return upstream.backward(scenario, load) if backward else upstream.forward(scenario, load)
    work = ours_backward.backward(scenario, load) if backward else ours.forward(scenario, load)
    return paired(work) if scenario.in_pairs else work


def surroundings(scenario: Scenario, load: RankLoad) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of what comes before and after the kernel, by name."""
    m, shape = scenario.machine, scenario.shape
    launch, hbm = m["launch_s"], m["hbm_bytes_per_s"]
    barrier = 0.0 if shape.ep_size == 1 or scenario.virtual else m["barrier_s"] + launch
    row = 2.0 * shape.hidden_size
    tokens, topk = load.tokens, shape.topk
    has_shared = shape.shared_intermediate_size is not None
    ids = 4.0 * topk * float(scenario.routes.tokens.sum())
    before: dict[str, float] = {}
    if scenario.direction == "forward":
        before["schedule"] = 2 * (launch + barrier) + 3 * ids / hbm + m["schedule_s"]
    copies = 0 if scenario.direct else 2 if scenario.direction == "backward" else 1
    if copies:
        before["copy to heap"] = copies * (launch + 2 * tokens * row / hbm)
    # Counters are cleared; backward plans its weight gradients.
    before["launches"] = (2 if scenario.direction != "backward" else 3) * launch
    if barrier:
        before["barrier before"] = barrier
    after: dict[str, float] = {}
    if scenario.direction != "recompute":
        if barrier:
            after["barrier after"] = barrier
        rows = topk + 1 + has_shared
        sums = 2 if scenario.direction == "backward" else 1  # and router-weight gradients
        after["token sum"] = sums * launch + tokens * rows * row / hbm
    return before, after


def _result(scenario: Scenario, load: RankLoad, work: Work, outcome: Outcome) -> Result:
    before, after = surroundings(scenario, load)
    kernel = {
        "start": work.start_s,
        "before routed rows": max(0.0, outcome.first_routed - work.start_s),
        "routed rows": 0.0,
        "drain": max(0.0, outcome.comm_end - outcome.compute_end),
        "surplus clusters": work.surplus_s,
    }
    kernel["routed rows"] = outcome.end - sum(kernel.values())
    phases = {n: s * 1e3 for n, s in {**before, **kernel, **after}.items() if s > 0}
    span = outcome.compute_end - work.start_s
    all_compute = max(1e-12, span * work.workers)
    shares = {"main loop": outcome.busy / all_compute, "epilogue": outcome.tail / all_compute}
    shares |= {name: seconds / all_compute for name, seconds in outcome.waits.items()}
    bounds = {name: s * 1e3 for name, s in lower_bounds(scenario, work).items()}
    waiting = {n: s for n, s in shares.items() if n not in ("main loop", "epilogue", "end")}
    bound = max(bounds, key=lambda name: bounds[name], default="launches")
    worst = max(waiting, key=lambda name: waiting[name], default="")
    if worst and waiting[worst] > 0.25:
        bound += f", waiting for {worst}"
    return Result(
        scenario=scenario,
        ms=sum(phases.values()),
        kernel_ms=outcome.end * 1e3,
        phases=phases,
        bounds=bounds,
        bound=bound,
        shares=shares,
        comm_busy=outcome.comm_busy / max(1e-12, outcome.end * max(1, work.comm_workers)),
        rank=load.rank,
        rows=load.rows,
        routes=load.routes,
        tasks=int(work.notes.get("tasks", len(work.tasks))),
        items=len(work.items),
        flops=flops_of(scenario, load),
        outcome=outcome,
        work=work,
    )


def flops_of(scenario: Scenario, load: RankLoad) -> float:
    """Useful operations of a rank, by the rule of ``Result.flops``."""
    shape = scenario.shape
    inner = load.routes * shape.intermediate_size
    inner += load.tokens * (shape.shared_intermediate_size or 0)
    per = {"forward": 6, "backward": 12, "recompute": 4}[scenario.direction]
    return float(per * inner * shape.hidden_size)


def lower_bounds(scenario: Scenario, work: Work) -> dict[str, float]:
    """Least seconds that the kernel takes for each of its resources alone."""
    m, items = scenario.machine, work.items
    found = {
        "tensor cores": sum(work.tasks.busy) / work.workers,
        "HBM": (sum(work.tasks.hbm) + sum(items.hbm)) / m["hbm_bytes_per_s"],
    }
    if len(items):
        pushed = [sum(column) for column in zip(*work.tasks.sent, strict=True)] or [0.0] * 3
        rx, tx, net = (
            sum(c) + p for c, p in zip((items.rx, items.tx, items.net), pushed, strict=True)
        )
        found["NVLink"] = max(rx, tx) / m.nvlink
        found["network"] = net / m["network_bytes_per_s"]
        found["comm SMs"] = sum(items.busy) / work.comm_workers
    return {name: seconds for name, seconds in found.items() if seconds > 0}
