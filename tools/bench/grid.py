"""Every combination of the tunables on a grid, timed on this GPU, beside what ``mok plan`` recommends.

Six public layers, at one rank and on a ring of two virtual ranks. Forward (with its context) and backward are
timed for each ring and number of comm SMs; they share only the ring, so the best of all combinations is the
best ring with the best forward and the best backward on it. Each finished time is one line of a file, so that
a run that is cut off keeps what it has. ``mok plan --measured FILE`` reads it.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from mok.config import Config, Shape, tile_rows
from mok.errors import MokError
from mok.tools.bench.bits import digest
from mok.tools.bench.programs import Options, Unavailable, make_program
from mok.tools.bench.programs.ours import layer_pushes
from mok.tools.bench.shapes import SUITES, BenchShape
from mok.tools.bench.timing import Clock, Deadline, Regime, measure
from mok.tools.bench.work import Work, bench_routing, make_work

SUITE = "planned"
EP_SIZES = (1, 2)
PARTS = (1, 4, 8, 16, 32)  # minibatches that all rows make
COMM_SMS = (4, 8, 12, 16, 24, 32, 48)
SHORT = Regime(10.0, 40.0, min_calls=3)  # of the grid
LONG = Regime(40.0, 80.0, min_calls=4)  # of the comparison with the plan
FINALISTS = 3
ROUNDS = 3
CONFIRM_SHARE = 0.3  # of a case's time


def rings(shape: Shape, arch: str) -> list[tuple[int, int]]:
    """(minibatch, macrobatch) of the grid, the rings that hold all rows first."""
    tile = tile_rows(arch)
    share = -(-shape.num_tokens * shape.topk * shape.ep_size // shape.num_experts)
    rows = shape.max_local_experts * (share + tile)
    whole, halves = [], []
    for part in PARTS:
        minibatch = max(1, -(-rows // (part * tile))) * tile
        count = -(-rows // minibatch)
        whole.append((minibatch, count * minibatch))
        if count > 1:
            halves.append((minibatch, -(-count // 2) * minibatch))
    return list(dict.fromkeys([*whole, *halves]))


def comm_sms(shape: Shape, num_sms: int) -> tuple[int, ...]:
    """Comm SMs of the grid; one number where nobody communicates."""
    return tuple(n for n in COMM_SMS if n <= num_sms // 2) if shape.ep_size > 1 else COMM_SMS[1:2]


def per_rank(bench: BenchShape, ep: int) -> Shape:
    """The shape as a rank sees it."""
    return dataclasses.replace(bench.shape, num_tokens=-(-bench.shape.num_tokens // ep), ep_size=ep)


def planned(
    bench: BenchShape, ep: int, machine: str, seed: int = 0, push: bool | None = None
) -> dict[str, int]:
    """What ``mok plan`` recommends for this very routing on virtual ranks; ``push``: see its ``Scenario``."""
    from mok.tools.simulator.machine import load_machine
    from mok.tools.simulator.plan import Search, tunables
    from mok.tools.simulator.routing import recorded

    shape = per_rank(bench, ep)
    ids = bench_routing("random", bench, seed).numpy()
    search = Search(
        shape, load_machine(machine), routing=recorded(ids, shape), virtual=ep > 1, push=push
    )
    return tunables(search.descend(Config.suggest(shape, machine, push=push)).config)


class Plans:
    """The plans of all cases, made in other processes while the GPU is busy."""

    def __init__(self, cases: Iterable[tuple[BenchShape, int]], machine: str, workers: int) -> None:
        self.pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
        self.found: dict[tuple[str, int], Future[dict[str, int]]] = {
            (bench.text, ep): self.pool.submit(planned, bench, ep, machine) for bench, ep in cases
        }

    def of(self, bench: BenchShape, ep: int) -> Config:
        return config_of(self.found[bench.text, ep].result())

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)


def config_of(values: dict[str, Any]) -> Config:
    """A configuration from its tunables."""
    return Config(**values)


class Grid:
    """One case: a layer on ``ep`` virtual ranks.

    Args:
        write: takes each finished time as a JSON-able row.
    """

    def __init__(
        self, work: Work, ep: int, num_sms: int, arch: str, clock: Clock,
        write: Callable[[dict[str, Any]], None],
    ) -> None:  # fmt: skip
        self.work, self.ep, self.clock, self.write = work, ep, clock, write
        self.shape = per_rank(work.bench, ep)
        self.rings, self.comm = rings(self.shape, arch), comm_sms(self.shape, num_sms)
        self.push = layer_pushes(arch, ep == 1)
        self.times: dict[tuple[str, int, int, int], float] = {}
        self.bits: dict[str, int] = {}

    # ---- the grid ----

    def measure(self, deadline: Deadline) -> bool:
        """Time everything; False if the deadline ended it."""
        for minibatch, macrobatch in self.rings:
            if deadline.over:
                return False
            config = Config(self.comm[0], self.comm[0], minibatch, macrobatch)
            try:
                program = self.set_up(config)
            except Unavailable as reason:
                self.write(self._row("skipped", "both", config, 0.0, note=str(reason)))
                continue
            try:
                self._ring(program)
            finally:
                program.close()
        return True

    def _ring(self, program: Any) -> None:
        base = program.config
        for n in self.comm:
            program.config = dataclasses.replace(base, fwd_num_comm_sms=n, bwd_num_comm_sms=n)
            for name, step in self.steps(program):
                ms = measure(step, self.clock, SHORT).median
                key = (name, n, base.minibatch_size, base.macrobatch_size)
                self.times[key] = ms
                self.write(self._row("grid", name, program.config, ms))
        program.config = base

    def steps(self, program: Any) -> Iterator[tuple[str, Callable[[int], Any]]]:
        yield "forward", program.forward_training
        saved = [program.forward_training(index)[1] for index in range(len(self.work.sets))]
        yield (
            "backward",
            lambda index: program.backward(index, saved[index % len(saved)], keep=True),
        )

    def set_up(self, config: Config) -> Any:
        """A program whose results are compared with the others', bit by bit, and a warm GPU.

        Raises:
            MokError: it does not fit, or gives other bits.
        """
        name = f"mok-ep{self.ep}" if self.ep > 1 else "mok"
        program = make_program(name, self.work, Options(self.clock, config=config))
        output, saved = program.forward_training(0)
        gradients = program.gradients(program.backward(0, saved))
        found = {"output": program.output(output), **gradients}
        program.check()
        for name, value in found.items():
            if self.bits.setdefault(name, number := digest(value)) != number:
                program.close()
                raise MokError("tunables must not change a bit", f"{name} differs under {config}")
        measure(program.forward_training, self.clock, Regime(80.0, 1.0, min_calls=1))
        return program

    # ---- the comparison ----

    def finalists(self, count: int = FINALISTS) -> list[Config]:
        """The fastest combinations, one a ring."""
        found: list[tuple[float, int, Config]] = []
        for minibatch, macrobatch in self.rings:
            forward, backward = (
                min(
                    (self.times[key], n)
                    for n in self.comm
                    if (key := (name, n, minibatch, macrobatch)) in self.times
                )
                if (name, self.comm[0], minibatch, macrobatch) in self.times
                else None
                for name in ("forward", "backward")
            )
            if forward and backward:
                config = Config(forward[1], backward[1], minibatch, macrobatch)
                found.append((forward[0] + backward[0], len(found), config))
        return [config for _, _, config in sorted(found)[:count]]

    def confirm(self, plan: Config) -> dict[str, Any]:
        """Milliseconds of forward and backward together, in turns: the plan's and the finalists'."""
        wanted = {"plan": plan, **{f"best {i}": c for i, c in enumerate(self.finalists())}}
        programs = {name: self.set_up(config) for name, config in wanted.items()}
        rounds: dict[str, list[float]] = {name: [] for name in programs}
        try:
            for _ in range(ROUNDS):
                for name, program in programs.items():
                    rounds[name].append(measure(self._both(program), self.clock, LONG).median)
        finally:
            for program in programs.values():
                program.close()
        ms = {name: statistics.median(values) for name, values in rounds.items()}
        for name, value in ms.items():
            self.write(self._row(name, "both", wanted[name], value, rounds_ms=rounds[name]))
        best = min(ms.values())
        return {
            "shape": self.work.bench.as_dict(),
            "ep": self.ep,
            "plan": tunables_of(plan),
            "best": tunables_of(wanted[min(ms, key=ms.__getitem__)]),
            "plan_ms": ms["plan"],
            "best_ms": best,
            "reached": best / ms["plan"],
        }

    def _both(self, program: Any) -> Callable[[int], Any]:
        def call(index: int) -> Any:
            return program.backward(index, program.forward_training(index)[1])

        return call

    def _row(self, what: str, name: str, config: Config, ms: float, **more: Any) -> dict[str, Any]:
        sizes = [int(size) for size in self.work.bench.text.split(",")]
        row = {"what": what, "sizes": sizes, "ep": self.ep, "pass": name, "ms": ms}
        return row | {"push": self.push} | tunables_of(config) | more


def tunables_of(config: Config) -> dict[str, int]:
    """The tunables that the grid varies."""
    names = ("fwd_num_comm_sms", "bwd_num_comm_sms", "minibatch_size", "macrobatch_size")
    return {name: getattr(config, name) for name in names}


def run_grid(
    device: Any, num_sms: int, arch: str, clock: Clock, plans: Any, budget_s: float, path: Path,
    say: Callable[[str], None], cases: Iterable[tuple[BenchShape, int]] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """All cases within ``budget_s`` seconds; rows go to ``path``, one line each."""
    todo = list(cases if cases is not None else all_cases())
    deadline = Deadline(budget_s)
    found: list[dict[str, Any]] = []
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as lines:

        def write(row: dict[str, Any]) -> None:
            lines.write(json.dumps(row) + "\n")
            lines.flush()

        work: Work | None = None
        for number, (bench, ep) in enumerate(todo):
            if deadline.over:
                say(f"the budget ended before {bench.title}, EP {ep}")
                break
            if work is None or work.bench is not bench:
                work = None  # frees the last one's weights
                work = make_work(bench, device)
            # A ring has seven times the combinations of one rank, but as many programs to set up.
            weights = [1.0 if e == 1 else 2.0 for _, e in todo[number:]]
            mine = deadline.part(weights[0] / sum(weights))
            grid = Grid(work, ep, num_sms, arch, clock, write)
            finished = grid.measure(mine.part(1 - CONFIRM_SHARE))
            case = grid.confirm(plans.of(bench, ep)) | {"finished": finished}
            write({"what": "case", **case})
            found.append(case)
            say(
                f"{bench.title}, EP {ep}: plan {case['plan_ms']:.3f} ms, best "
                f"{case['best_ms']:.3f} of {len(grid.times)} times: {case['reached']:.3f}"
                + ("" if finished else " (grid not finished)")
            )
    return found


def all_cases() -> list[tuple[BenchShape, int]]:
    return [(bench, ep) for bench in SUITES[SUITE] for ep in EP_SIZES]
