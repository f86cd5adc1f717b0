"""``mok plan``'s choice against every combination of the tunables that was timed on a GPU.

The times are those of ``mok tune --exhaustive FILE`` on an H200, a line each: forward and backward of six
layers for each ring and number of comm SMs. They share only the ring. So the best of all combinations, and
the time of whichever the model chooses among them, follow from the lines without another run, for this
version of the model as for later ones.
"""

from __future__ import annotations

import json
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console

from mok.config import Config, Shape
from mok.errors import MokError
from mok.tools.simulator.machine import load_machine
from mok.tools.simulator.plan import Search
from mok.tools.simulator.routing import recorded
from mok.tools.simulator.scenario import Direction
from mok.tools.simulator.suggest import NAMES, off_the_edge

REACHED = 0.97
"""Promised: time of the best combination over the time of the plan's."""

Ring = tuple[int, int]  # minibatch, macrobatch
Times = dict[tuple[str, int, int, int], float]  # pass, comm SMs, minibatch, macrobatch → ms


def read_grid(path: str | Path) -> dict[tuple[tuple[int, ...], int], Times]:
    """The times by (T, H, I, E, K) and EP.

    Raises:
        MokError: the file cannot be read, or holds no times.
    """
    found: dict[tuple[tuple[int, ...], int], Times] = defaultdict(dict)
    try:
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["what"] == "grid":
                n = row["fwd_num_comm_sms"]
                key = (row["pass"], n, row["minibatch_size"], row["macrobatch_size"])
                found[tuple(row["sizes"]), row["ep"]][key] = row["ms"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MokError(
            "the file must be one of mok tune --exhaustive", f"{path}: {error}"
        ) from error
    if not found:
        raise MokError("the file must hold times of a grid", str(path))
    return dict(found)


def best_of(times: Times) -> tuple[float, Config]:
    """Forward and backward milliseconds of the best combination, and the combination."""
    found = []
    for minibatch, macrobatch in rings_of(times):
        each = [
            min((ms, key[1]) for key, ms in times.items() if key[0] == name and key[2:] == ring)
            for name in ("forward", "backward")
            for ring in [(minibatch, macrobatch)]
        ]
        config = Config(each[0][1], each[1][1], minibatch, macrobatch)
        found.append((each[0][0] + each[1][0], config))
    return min(found, key=lambda pair: pair[0])


def rings_of(times: Times) -> list[Ring]:
    """Rings of which both passes were timed."""
    each = [{key[2:] for key in times if key[0] == name} for name in ("forward", "backward")]
    return sorted(each[0] & each[1])


def pushed(path: str | Path) -> bool | None:
    """How ``Scenario.push`` must be for a file's kernels: forward's did not push before lines said so."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    rows = (json.loads(line) for line in lines)
    return None if any(row.get("push") for row in rows) else False


def chosen(
    sizes: tuple[int, ...], ep: int, times: Times, machine: str = "h200", push: bool | None = None
) -> Config:
    """The combination of the grid that the model thinks the fastest; ``push``: see ``Scenario``."""
    tokens, hidden, inner, experts, topk = sizes
    shape = Shape(-(-tokens // ep), hidden, inner, experts, topk, ep)
    search = Search(
        shape,
        load_machine(machine),
        routing=recorded(_ids(sizes), shape),
        virtual=ep > 1,
        push=push,
    )
    numbers = sorted({key[1] for key in times})
    found = []
    for minibatch, macrobatch in rings_of(times):
        best = []
        for direction, _ in NAMES:

            def ms(
                n: int, ring: Ring = (minibatch, macrobatch), name: Direction = direction
            ) -> float:
                return search.run(Config(n, n, *ring), name).ms

            number = off_the_edge(min(numbers, key=ms), numbers, ms)
            best.append((ms(number), number))
        config = Config(best[0][1], best[1][1], minibatch, macrobatch)
        found.append((best[0][0] + best[1][0], -minibatch, config))
    return min(found, key=lambda entry: entry[:2])[2]


@cache
def _ids(sizes: tuple[int, ...]) -> Any:
    from mok.tools.bench.shapes import BenchShape
    from mok.tools.bench.work import bench_routing

    return bench_routing("random", BenchShape(Shape(*sizes)), 0).numpy()


def measured_ms(times: Times, config: Config) -> float:
    """What was timed for a combination, forward and backward."""
    ring = (config.minibatch_size, config.macrobatch_size)
    return (
        times["forward", config.fwd_num_comm_sms, *ring]
        + times["backward", config.bwd_num_comm_sms, *ring]
    )


def compare_grid(path: str | Path) -> list[dict[str, Any]]:
    """For each layer and EP: the model's choice on the grid, and how much of the best it reaches."""
    rows, grids = [], read_grid(path)
    push = pushed(path)
    for (sizes, ep), times in grids.items():
        best_ms, best = best_of(times)
        choice = chosen(sizes, ep, times, push=push)
        ms = measured_ms(times, choice)
        rows.append(
            {
                "shape": dict(zip("THIEK", sizes, strict=True)),
                "ep": ep,
                "plan": _tunables(choice),
                "best": _tunables(best),
                "plan_ms": ms,
                "best_ms": best_ms,
                "reached": best_ms / ms,
                "times": len(times),
            }
        )
    return rows


def _tunables(config: Config) -> dict[str, int]:
    names = ("fwd_num_comm_sms", "bwd_num_comm_sms", "minibatch_size", "macrobatch_size")
    return {name: getattr(config, name) for name in names}


def show_cases(rows: list[dict[str, Any]], console: Console) -> None:
    """A table of the comparison."""
    from rich.table import Table

    table = Table(title="The plan against the best of all combinations", title_justify="left")
    for column in ("T,H,I,E,K", "EP", "plan ms", "best ms", "reached", "plan", "best"):
        table.add_column(column, justify="left" if column == "T,H,I,E,K" else "right")
    for row in rows:
        sizes = ",".join(str(row["shape"][name]) for name in "THIEK")
        texts = ["/".join(map(str, row[name].values())) for name in ("plan", "best")]
        table.add_row(
            sizes, str(row["ep"]), f"{row['plan_ms']:.3f}", f"{row['best_ms']:.3f}",
            f"{row['reached']:.3f}", *texts,
        )  # fmt: skip
    console.print(table)
    console.print(f"comm SMs forward/backward/minibatch/macrobatch; {REACHED} is promised")
