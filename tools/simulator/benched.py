"""The model against a ``bench.json`` of ``mok bench``: every time of ours, on one GPU.

The whole comparison with 12 shapes that no constant was chosen on is measured by one command, about three
minutes on an H200:

    mok bench --suite unfitted --ep 4 --peers none --passes forward,backward --rounds 1 --no-phases \\
        --budget-s 200 --out out

and read by ``mok simulate --bench out/bench.json``.
"""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
from functools import cache
from pathlib import Path
from typing import Any

from mok.config import Config, Shape
from mok.errors import MokError
from mok.kernels_cute.program import AHEAD
from mok.tools.simulator.compare import records
from mok.tools.simulator.load import loads
from mok.tools.simulator.machine import Machine, known_machines, load_machine
from mok.tools.simulator.routing import Routing, recorded
from mok.tools.simulator.scenario import Direction, Scenario
from mok.tools.simulator.simulate import (
    at_power_limit,
    flops_of,
    play_rank,
    simulate,
    surroundings,
)
from mok.tools.simulator.tilecost import Costs

LIMITS = {"median": 0.06, "worst": 0.15}
"""Relative errors promised on shapes that were not fitted."""

UNSTEADY = 0.5
"""Calls between their 10th and 90th percentile, over the median: a window beyond this alternates between two
states (a GPU that now and then waits for a busy host), and its median is the time of neither."""


@cache
def fitted_shapes() -> frozenset[tuple[int, ...]]:
    """(T, H, I, E, K) of one GPU's calls that constants were chosen on."""
    return frozenset(
        _sizes(r.scenario.shape)
        for r in records()
        if r.use == "fit" and r.kind == "measured" and r.scenario.shape.ep_size == 1
    )


def _sizes(s: Shape) -> tuple[int, ...]:
    return (s.num_tokens, s.hidden_size, s.intermediate_size, s.num_experts, s.topk)


def virtual_ms(scenario: Scenario) -> float:
    """Milliseconds of a call whose ranks run one after another on one GPU."""
    all_loads = loads(scenario, Costs.ours(scenario).tile.m)
    flops = sum(flops_of(scenario, load) for load in all_loads)

    def play(now: Scenario) -> tuple[float, float, float]:
        total = 0.0
        for load in all_loads:
            before, after = surroundings(now, load)
            total += sum(before.values()) + sum(after.values()) + play_rank(now, load)[1].end
        return total, flops, total

    return 1e3 * at_power_limit(scenario, play)


def read(path: str | Path) -> dict[str, Any]:
    """A bench.json.

    Raises:
        MokError: it cannot be read, or is none.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MokError("a bench.json must be readable", f"{path}: {error}") from error
    if not isinstance(document, dict) or not {"rows", "gpu", "regime"} <= set(document):
        raise MokError("it must be a bench.json of mok bench", str(path))
    return document


def compare_bench(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Every row of ours beside the model's prediction.

    ``use``: "fit" where constants were chosen on the shape, "unsteady" (see ``UNSTEADY``), else "check".
    """
    machine = _machine(document)
    rows = []
    for row in document["rows"]:
        if row["program"].split("-")[0] != "mok" or not row["ok"]:
            continue
        sizes = tuple(row["shape"][name] for name in "THIEK")
        ep, config, pairs, push, kernels = _config(row["note"])
        model = _predict(
            machine,
            sizes,
            ep,
            config,
            row["pass"],
            document["regime"],
            pairs,
            push,
            kernels,
        )
        rows.append(
            {
                "name": f"{row['shape']['name']} {','.join(map(str, sizes))}",
                "sizes": sizes,
                "ep": ep,
                "pass": row["pass"],
                "ms": row["ms"],
                "model_ms": model,
                "error": model / row["ms"] - 1,
                "use": _use(sizes, row),
            }
        )
    return rows


def _use(sizes: tuple[int, ...], row: dict[str, Any]) -> str:
    if "p90_ms" in row and row["p90_ms"] - row["p10_ms"] > UNSTEADY * row["ms"]:
        return "unsteady"
    return "fit" if sizes in fitted_shapes() else "check"


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors on the shapes that were not fitted, against the promise."""
    errors = [abs(r["error"]) for r in rows if r["use"] == "check"]
    unsteady = sum(r["use"] == "unsteady" for r in rows)
    if not errors:
        nothing = {"times": 0, "shapes": 0, "median": None, "worst": None, "ok": not unsteady}
        return nothing | {"unsteady": unsteady}
    median, worst = statistics.median(errors), max(errors)
    return {
        "times": len(errors),
        "shapes": len({r["sizes"] for r in rows if r["use"] == "check"}),
        "unsteady": unsteady,
        "median": median,
        "worst": worst,
        "ok": median <= LIMITS["median"] and worst <= LIMITS["worst"],
    }


def _machine(document: dict[str, Any]) -> Machine:
    name = str(document["gpu"].get("name", "")).lower()
    for known in known_machines():
        if known in name:
            machine = load_machine(known)
            return dataclasses.replace(machine, num_sms=int(document["gpu"]["num_sms"]))
    raise MokError("the GPU of a bench.json must be a known machine", name)


def _config(note: str) -> tuple[int, Config, bool, bool, dict[str, float]]:
    """EP, tunables, whether CTAs worked in pairs, whether forward pushed its results, and which kernels it was,
    as ``MokProgram`` notes them.
    """
    found = re.fullmatch(
        r"EP (\d+), minibatch (\d+), macrobatch (\d+)(?:, comm SMs (\d+)/(\d+))?"
        r"(, pairs)?(, carried)?(, ahead)?(, pushed)?",
        note,
    )
    if found is None:
        raise MokError("a row's note must tell EP and tunables", repr(note))
    *sizes, pairs, carried, ahead, push = found.groups()
    ep, minibatch, macrobatch, forward, backward = (int(g) if g else 8 for g in sizes)
    kernels = {"comm_carried": float(carried is not None), "ahead": AHEAD if ahead else 0}
    config = Config(forward, backward, minibatch, macrobatch)
    return ep, config, pairs is not None, push is not None, kernels


@cache
def _routing(sizes: tuple[int, ...], ep: int, kind: str, seed: int) -> Routing:
    """The very ids that were timed."""
    from mok.tools.bench.shapes import BenchShape
    from mok.tools.bench.work import bench_routing

    tokens, hidden, inner, experts, topk = sizes
    ids = bench_routing(kind, BenchShape(Shape(*sizes)), seed).numpy()
    each = Shape(tokens // ep, hidden, inner, experts, topk, ep)
    return recorded(ids[: ep * each.num_tokens], each, kind)


def _predict(
    machine: Machine, sizes: tuple[int, ...], ep: int, config: Config, name: str,
    regime: dict[str, Any], pairs: bool, push: bool, kernels: dict[str, float],
) -> float:  # fmt: skip
    tokens, hidden, inner, experts, topk = sizes
    if tokens % ep:
        raise MokError("virtual ranks must share the tokens evenly", f"{tokens} over {ep}")
    shape = Shape(tokens // ep, hidden, inner, experts, topk, ep)
    routing = _routing(sizes, ep, regime["routing"], regime["seed"])
    total = 0.0
    passes: tuple[Direction, ...] = ("forward", "backward")
    for direction in passes:
        if name not in (direction, "both"):
            continue
        scenario = Scenario(
            shape, config, machine, direction, routing=routing, virtual=ep > 1,
            save_context=name == "both", pairs=pairs, overrides=kernels,
            push=push and direction == "forward",
        )  # fmt: skip
        total += virtual_ms(scenario) if ep > 1 else simulate(scenario).ms
    return total
