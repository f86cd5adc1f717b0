"""Tunables for a model on a machine: a search with the simulator, and what each is worth."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from mok.config import Config, Shape, tile_rows
from mok.errors import MokError
from mok.tools.simulator.machine import Machine
from mok.tools.simulator.memory import memory
from mok.tools.simulator.routing import Routing
from mok.tools.simulator.scenario import Direction, Precision, Scenario
from mok.tools.simulator.simulate import Result, simulate
from mok.tools.simulator.suggest import NAMES, off_the_edge

RING_SHARE = 0.25  # of the GPU's memory that a ring may take at most


@dataclass(frozen=True)
class Trial:
    """A configuration and what it takes."""

    config: Config
    forward: Result
    backward: Result

    @property
    def ms(self) -> float:
        return self.forward.ms + self.backward.ms


@dataclass(frozen=True)
class Plan:
    """Recommended tunables and what they are worth.

    Attributes:
        best: the recommendation; ``start``: ``Config.suggest``.
        sensitivity: per tunable (value, forward ms, backward ms) with all others as in ``best``.
        memory: bytes by purpose; ``fits``: whether they are less than the GPU's memory.
        simulated: configurations tried.
    """

    best: Trial
    start: Trial
    sensitivity: dict[str, list[tuple[int, float, float]]]
    memory: dict[str, int]
    fits: bool
    simulated: int


class Search:
    """Coordinate descent over the tunables, with every configuration simulated once."""

    def __init__(
        self,
        shape: Shape,
        machine: Machine,
        precision: Precision = "bf16",
        routing: Routing | None = None,
        virtual: bool = False,
        push: bool | None = None,
    ) -> None:
        self.shape, self.machine, self.routing = shape, machine, routing
        self.precision, self.virtual, self.push = precision, virtual, push
        self.tile = tile_rows(machine.arch)
        self.known: dict[tuple[Config, Direction], Result] = {}
        self.gains: dict[Direction, float] = {}  # the clock of the last call

    def run(self, config: Config, direction: Direction) -> Result:
        """One simulation; what does not concern a direction does not make a new one."""
        other = "bwd_num_comm_sms" if direction == "forward" else "fwd_num_comm_sms"
        key = (_with(config, other, 2), direction)
        if key not in self.known:
            scenario = Scenario(
                self.shape, config, self.machine, direction, self.precision, "ours",
                routing=self.routing, virtual=self.virtual, save_context=direction == "forward",
                push=self.push,
            )  # fmt: skip
            self.known[key] = simulate(scenario, start_gain=self.gains.get(direction, 1.0))
            self.gains[direction] = self.known[key].scenario.machine.gain
        return self.known[key]

    def trial(self, config: Config) -> Trial:
        return Trial(config, self.run(config, "forward"), self.run(config, "backward"))

    # ---- candidates ----

    def rows(self) -> int:
        """Padded rows that a rank expects."""
        return self.shape.num_tokens * self.shape.topk + self.shape.max_local_experts * self.tile

    def comm_sms(self) -> list[int]:
        most = self.machine.num_sms - 2 * self.machine.cluster
        return [
            n for n in (4, 6, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 60, 68) if n <= most
        ]

    def minibatches(self) -> list[int]:
        """From a few blocks to all rows, by about a quarter from one to the next."""
        found, size = [], 2.0 * self.tile
        while size < min(self.rows(), 65536):
            found.append(int(size) // self.tile * self.tile)
            size *= 1.26
        found.append(min(-(-self.rows() // self.tile) * self.tile, 65536))
        return sorted(set(found))

    def rings(self, minibatch: int) -> list[int]:
        """Minibatches of a ring: up to all rows, as far as memory allows."""
        needed = max(1, -(-self.rows() // minibatch))
        found = sorted({min(needed, n) for n in (2, 4, 8, 16, 32, 64, needed)})
        return [n for n in found if self._ring_fits(minibatch, n)] or found[:1]

    def _ring_fits(self, minibatch: int, ring: int) -> bool:
        row = 2 * (5 * self.shape.hidden_size + 7 * self.shape.intermediate_size)
        return minibatch * ring * row <= RING_SHARE * self.machine["memory_bytes"]

    # ---- search ----

    def best_of(self, configs: Iterable[Config], measure: Callable[[Config], float]) -> Config:
        return min(configs, key=measure)

    def descend(
        self, start: Config, rounds: int = 2, report: Callable[[str], Any] = lambda text: None
    ) -> Trial:
        """Improve one tunable after the other; of near equals (0.2 %) the start's value stays."""
        best = start

        def total(config: Config) -> float:
            return self.trial(config).ms * (1.0 if config != best else 0.998)

        for _ in range(rounds):
            before = best
            if not self.trial(best).forward.scenario.direct:
                for name in ("fwd_num_comm_sms", "bwd_num_comm_sms"):
                    tries = [_with(best, name, n) for n in self.comm_sms()]
                    best = self.best_of([best, *tries], total)
            ring = best.macrobatch_size // best.minibatch_size
            rows = best.macrobatch_size
            tries = [
                dataclasses.replace(best, minibatch_size=m, macrobatch_size=m * n)
                for m in self.minibatches()
                for n in {
                    min(ring, self.rings(m)[-1]),
                    max(1, min(-(-rows // m), self.rings(m)[-1])),
                }
            ]
            best = self.best_of([best, *tries], total)
            m = best.minibatch_size
            tries = [dataclasses.replace(best, macrobatch_size=m * n) for n in self.rings(m)]
            best = self.best_of([best, *tries], total)
            report(f"{self.trial(best).ms:.3f} ms after {len(self.known)} simulations")
            if best == before:
                break
        if not self.trial(best).forward.scenario.direct:
            for direction, name in NAMES:
                best = self._off_the_edge(best, direction, name)
        # Off its edges the found one may be slower than the start, which is off its own.
        return min(self.trial(start), self.trial(best), key=lambda trial: trial.ms)

    def _off_the_edge(self, config: Config, direction: Direction, name: str) -> Config:
        number = getattr(config, name)
        steps = sorted({*self.comm_sms(), number})
        safe = off_the_edge(number, steps, lambda n: self.run(_with(config, name, n), direction).ms)
        return _with(config, name, safe)

    def sensitivity(self, best: Config) -> dict[str, list[tuple[int, float, float]]]:
        """Times around ``best``, one tunable at a time.

        ``schedule_capacity_multiplier`` is not among them: it caps the grid at the tasks of so many rows,
        and costs nothing as long as these fill the GPU.
        """
        found: dict[str, list[tuple[int, float, float]]] = {}

        def add(name: str, value: int, config: Config) -> None:
            trial = self.trial(config)
            found.setdefault(name, []).append((value, trial.forward.ms, trial.backward.ms))

        if not self.trial(best).forward.scenario.direct:
            for name in ("fwd_num_comm_sms", "bwd_num_comm_sms"):
                around = _around(self.comm_sms(), getattr(best, name))
                for n in around:
                    add(name, n, _with(best, name, n))
        ring = best.macrobatch_size // best.minibatch_size
        for m in _around(self.minibatches(), best.minibatch_size):
            add(
                "minibatch_size",
                m,
                dataclasses.replace(best, minibatch_size=m, macrobatch_size=m * ring),
            )
        for n in _around(self.rings(best.minibatch_size), ring):
            size = n * best.minibatch_size
            add("macrobatch_size", size, dataclasses.replace(best, macrobatch_size=size))
        return found


def _with(config: Config, name: str, value: int) -> Config:
    changes: dict[str, Any] = {name: value}
    return dataclasses.replace(config, **changes)


def _around(values: list[int], centre: int, each: int = 2) -> list[int]:
    """``centre`` and the values next to it, ``each`` on either side."""
    below = [v for v in values if v < centre][-each:]
    above = [v for v in values if v > centre][:each]
    return [*below, centre, *above]


def plan(
    shape: Shape,
    machine: Machine,
    precision: Precision = "bf16",
    routing: Routing | None = None,
    rounds: int = 2,
    virtual: bool = False,
    report: Callable[[str], Any] = lambda text: None,
    push: bool | None = None,
) -> Plan:
    """Find tunables for a forward and a backward call of ``shape`` on ``machine``.

    ``push``: for kernels whose tasks send their rows themselves, or do not; None: as they do by default.

    Raises:
        MokError: the scenario is impossible, such as no token at all.
    """
    if shape.num_tokens < 1:
        raise MokError("a plan needs at least one token", shape.num_tokens)
    search = Search(shape, machine, precision, routing, virtual, push)
    start = search.trial(Config.suggest(shape, machine, precision, push))
    best = search.descend(start.config, rounds, report)
    sensitivity = search.sensitivity(best.config)
    needed = memory(shape, best.config, machine.arch, precision)
    fits = sum(needed.values()) <= machine["memory_bytes"]
    return Plan(best, start, sensitivity, needed, fits, len(search.known))


def as_dict(found: Plan) -> dict[str, Any]:
    """The plan as ``mok plan --json`` prints it, with design's ``rows``."""

    def row(name: str, trial: Trial) -> dict[str, Any]:
        return {
            "name": name,
            "config": tunables(trial.config),
            "ms": trial.ms,
            "bound": f"forward: {trial.forward.bound}; backward: {trial.backward.bound}",
            "forward": trial.forward.as_dict(),
            "backward": trial.backward.as_dict(),
        }

    return {
        "rows": [row("recommended", found.best), row("Config.suggest", found.start)],
        "sensitivity": {
            name: [{"value": v, "forward_ms": f, "backward_ms": b} for v, f, b in rows]
            for name, rows in found.sensitivity.items()
        },
        "memory": found.memory,
        "memory_total": sum(found.memory.values()),
        "fits": found.fits,
        "simulated": found.simulated,
    }


def tunables(config: Config) -> dict[str, Any]:
    """The five tunables; the choice of tiles is left to the shape."""
    names = ("fwd_num_comm_sms", "bwd_num_comm_sms", "minibatch_size", "macrobatch_size",
             "schedule_capacity_multiplier")  # fmt: skip
    return {name: getattr(config, name) for name in names}
