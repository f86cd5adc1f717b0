"""Everything that docs/scaling.md shows: ``python -m mok.tools.simulator.scaling docs/scaling``.

Writes ``scaling.json`` and its pictures into the folder, and the tables into the page beside it; some minutes
on one core. ``--draw`` makes pictures and tables from the ``scaling.json`` that is there. Nothing here is
measured, except where a picture or a table says so.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mok.config import Config, Shape
from mok.models import MODELS
from mok.tools.simulator.benched import compare_bench, read
from mok.tools.simulator.compare import compare, gains, records
from mok.tools.simulator.constants import calibration
from mok.tools.simulator.machine import Machine, load_machine
from mok.tools.simulator.plan import Search, tunables
from mok.tools.simulator.routing import drawn
from mok.tools.simulator.scaling_tables import fill, tables
from mok.tools.simulator.scenario import Direction, Precision, Scenario
from mok.tools.simulator.simulate import Result, simulate
from mok.tools.simulator.tilecost import ours_calibration

TOKENS = 8192
CASES: tuple[tuple[str, str, int, Precision], ...] = (
    ("h200", "qwen3-30b-a3b", 8, "bf16"),
    ("h200", "qwen3-235b-a22b", 8, "bf16"),
    ("h200", "kimi-k2.5", 8, "bf16"),
    ("gb300", "kimi-k2.5", 64, "bf16"),
    ("gb300", "kimi-k2.5", 64, "mxfp8"),
    ("gb300", "kimi-k2.5", 72, "mxfp8"),
    ("gb300", "glm-5.2", 64, "mxfp8"),
    ("gb300", "qwen3.5-397b", 64, "mxfp8"),
    ("gb300", "deepseek-v4-pro", 64, "mxfp8"),
)
FOUR = ("kimi-k2.5", "glm-5.2", "qwen3.5-397b", "deepseek-v4-pro")

CHANGES: dict[str, dict[str, float]] = {
    "tensor cores": {"clock_hz": 1.25},
    "HBM": {"hbm_bytes_per_s": 1.25},
    "NVLink": {"nvlink_bytes_per_s": 1.25},
    "bytes a comm SM moves": {"sm_pull_bytes_per_s": 1.25, "sm_push_bytes_per_s": 1.25},
    "NVLink latency": {"nvlink_latency_s": 0.8},
    "launches and barriers": {"launch_s": 0.8, "barrier_s": 0.8},
    "signals": {"signal_s": 0.8},
}
"""Constants of a machine and the factor by which each is made better."""

PROGRAM_CHANGES: dict[str, dict[str, float]] = {
    "quantising": {"quantise_elements_per_s": 1.25},
    "an item's overhead": {"item_overhead_s": 0.8, "carry_overhead_s": 0.8},
    "epilogues": {"chunk_s": 0.8, "ddown_chunk_s": 0.8},
}
"""The same for constants of our kernels."""


def main(folder: Path) -> None:
    """Compute, write, draw."""
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for name, make in (
        ("cases", where_time_goes), ("gains", against_upstream), ("tokens", by_tokens),
        ("skew", by_skew), ("racks", racks), ("sweep", published_sweep),
        ("records", own_records), ("unfitted", unfitted),
    ):  # fmt: skip
        found[name] = make()
        print(name, flush=True)
        (folder / "scaling.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    show(found, folder)


def show(found: dict[str, Any], folder: Path) -> None:
    """Pictures, and the tables of the page."""
    draw(found, folder)
    page = folder.parent / f"{folder.name}.md"
    if page.is_file():
        text = page.read_text(encoding="utf-8")
        page.write_text(fill(text, tables(found)), encoding="utf-8")


def _scenario(
    machine: Machine, model: str, ep: int, precision: Precision, tokens: int = TOKENS,
    direction: Direction = "forward", config: Config | None = None, skew: float = 0.0,
) -> Scenario:  # fmt: skip
    shape = Shape.of_model(MODELS[model], tokens, ep)
    return Scenario(
        shape, config or Config.suggest(shape, machine, precision), machine, direction, precision,
        routing=drawn(shape, skew), save_context=direction == "forward",
    )  # fmt: skip


def _row(result: Result) -> dict[str, Any]:
    keep = ("ms", "kernel_ms", "tflops", "bound", "phases", "bounds", "shares", "comm_busy")
    return {name: getattr(result, name) for name in keep}


def where_time_goes() -> list[dict[str, Any]]:
    """Each case with the best of three minibatches, and what a better machine gains."""
    rows = []
    for name, model, ep, precision in CASES:
        machine = load_machine(name)
        shape = Shape.of_model(MODELS[model], TOKENS, ep)
        search = Search(shape, machine, precision, drawn(shape, 0.0))
        start = Config.suggest(shape, machine, precision)
        minibatch = start.minibatch_size
        sizes = {
            max(search.tile, minibatch * k // 2 // search.tile * search.tile) for k in (1, 2, 4)
        }
        rows_of_ring = start.macrobatch_size
        best = min(
            (
                search.trial(
                    dataclasses.replace(
                        start, minibatch_size=m, macrobatch_size=-(-rows_of_ring // m) * m
                    )
                )
                for m in sorted(sizes)
            ),
            key=lambda trial: trial.ms,
        )
        row: dict[str, Any] = {
            "machine": name, "model": model, "ep": ep, "precision": precision,
            "config": tunables(best.config), "suggested_ms": search.trial(start).ms,
        }  # fmt: skip
        for direction, result in (("forward", best.forward), ("backward", best.backward)):
            row[direction] = _row(result) | {"changes": _changes(result.scenario)}
        rows.append(row)
    return rows


def _changes(scenario: Scenario) -> dict[str, float]:
    """Share of the time that each change of ``CHANGES`` saves."""
    before = simulate(scenario).ms
    saved = {}
    for title, factors in CHANGES.items():
        machine = scenario.machine
        better = {name: machine[name] * factor for name, factor in factors.items()}
        after = simulate(dataclasses.replace(scenario, machine=machine.with_constants(**better)))
        saved[title] = 1 - after.ms / before
    table = calibration(ours_calibration(scenario.machine.arch))
    for title, factors in PROGRAM_CHANGES.items():
        overrides = {name: table[name] * factor for name, factor in factors.items()}
        after = simulate(dataclasses.replace(scenario, overrides=overrides))
        saved[title] = 1 - after.ms / before
    if scenario.precision == "mxfp8" and scenario.direction == "forward":
        after = simulate(dataclasses.replace(scenario, mxfp8_wire=True))
        saved["MXFP8 on the wire"] = 1 - after.ms / before
    return saved


def against_upstream() -> list[dict[str, Any]]:
    """The four models of upstream's benchmark at EP 64, 2048 tokens, with upstream's defaults."""
    rows = []
    machine = load_machine("gb300")
    for model in FOUR:
        shape = Shape.of_model(MODELS[model], 2048, 64)
        for precision in ("mxfp8", "bf16"):
            for direction in ("forward", "backward"):
                config = Config(40, 28, 4096, 32 * 4096)
                scenario = Scenario(
                    shape, config, machine, direction, precision,  # type: ignore[arg-type]
                    routing=drawn(shape, 0.0),
                )  # fmt: skip
                rows.append(
                    {"model": model, "precision": precision, "pass": direction,
                     "steps": gains(scenario)}
                )  # fmt: skip
    return rows


def by_tokens() -> list[dict[str, Any]]:
    """TFLOP/s by tokens a rank."""
    rows = []
    for name, model, ep, precision in (CASES[1], CASES[2], CASES[4], CASES[7]):
        machine = load_machine(name)
        for tokens in (512, 1024, 2048, 4096, 8192, 16384):
            for direction in ("forward", "backward"):
                result = simulate(
                    _scenario(machine, model, ep, precision, tokens, direction)  # type: ignore[arg-type]
                )
                rows.append(
                    {"machine": name, "model": model, "ep": ep, "precision": precision,
                     "tokens": tokens, "pass": direction, "ms": result.ms,
                     "tflops": result.tflops}
                )  # fmt: skip
    return rows


def by_skew() -> list[dict[str, Any]]:
    """Forward by the routing's Zipf exponent: time against rows of the fullest rank."""
    rows = []
    for name, model, ep, precision in (CASES[1], CASES[4]):
        machine = load_machine(name)
        for skew in (0.0, 0.2, 0.4, 0.6, 0.8):
            result = simulate(_scenario(machine, model, ep, precision, skew=skew))
            mean = TOKENS * result.scenario.shape.topk
            rows.append(
                {"machine": name, "model": model, "ep": ep, "precision": precision, "zipf": skew,
                 "ms": result.ms, "fullest": result.routes / mean}
            )  # fmt: skip
    return rows


def racks() -> list[dict[str, Any]]:
    """Kimi K2.5 on racks of 72: experts spread over all racks, or a copy in each.

    A copy's weight gradients (BF16) are reduced, and in sharded training its weights gathered, over the
    network: once per step of ``accumulation`` calls. Both move (R-1)/R of a rank's expert bytes.
    """
    machine = load_machine("gb300")
    rows = []
    for count in (1, 2, 4):
        row: dict[str, Any] = {"racks": count}
        for title, ep in (("spread", 72 * count), ("copies", 72)):
            results = [
                simulate(_scenario(machine, "kimi-k2.5", ep, "mxfp8", direction=d))
                for d in ("forward", "backward")  # type: ignore[misc]
            ]
            row[title + "_ms"] = sum(r.ms for r in results)
        shape = Shape.of_model(MODELS["kimi-k2.5"], TOKENS, 72)
        weights = 6.0 * shape.hidden_size * shape.intermediate_size * shape.max_local_experts
        share = (count - 1) / count
        row["network_ms_per_step"] = 2e3 * share * weights / machine["network_bytes_per_s"]
        rows.append(row)
    return rows


def published_sweep() -> list[dict[str, Any]]:
    """The two published sweeps beside the model."""
    rows = []
    for record in records():
        if "sweep" in record.name:
            name, point = record.name.split(", ")
            rows.append(
                {"sweep": name, "point": point, "ms": record.ms, "model_ms": record.predict(),
                 "use": record.use}
            )  # fmt: skip
    return rows


def own_records() -> list[dict[str, Any]]:
    """Times of ours that were recorded on H200s, beside the model; not those of pushed results (``push_ab``)."""
    keep = ("name", "use", "ms", "model_ms", "error", "limit")
    rows = [r for r in compare() if "H200" in r["name"] and "push_ab" not in r["name"]]
    return [{name: r[name] for name in keep} for r in rows]


RECORDED = Path(__file__).resolve().parents[2] / "docs" / "measurements"
UNFITTED = "2026-11-30-h200-unfitted-3.json"


def unfitted() -> list[dict[str, Any]]:
    """The 12 shapes that nothing was fitted on."""
    keep = ("name", "ep", "pass", "ms", "model_ms", "error", "use")
    rows = compare_bench(read(RECORDED / UNFITTED))
    return [{name: r[name] for name in keep} for r in rows]


# ---------------------------------------------------------------------- pictures


def draw(found: dict[str, Any], folder: Path) -> None:
    """The pictures of docs/scaling.md."""
    from mok.tools.trace.timeline import _pyplot

    plt = _pyplot()

    def picture(name: str, width: float, paint: Callable[[Any], None], panels: int = 1) -> None:
        figure, axes = plt.subplots(
            1, panels, figsize=(width, 3.4), layout="constrained", squeeze=False
        )
        for i, axis in enumerate(axes[0]):
            paint(axis) if panels == 1 else paint((i, axis))
        figure.savefig(folder / f"{name}.png", dpi=100)
        plt.close(figure)

    picture("sweeps", 9, lambda each: _sweep(each, found["sweep"]), 2)
    picture("shares", 11, lambda each: _shares(each, found["cases"]), 2)
    picture("changes", 11, lambda each: _change_bars(each, found["cases"]), 2)
    picture("tokens", 9, lambda each: _tokens(each, found["tokens"]), 2)


def _sweep(each: Any, rows: Sequence[dict[str, Any]]) -> None:
    i, axis = each
    name = sorted({r["sweep"] for r in rows})[i]
    mine = [r for r in rows if r["sweep"] == name]
    x = [int("".join(c for c in r["point"] if c.isdigit())) for r in mine]
    axis.plot(x, [r["ms"] for r in mine], "o", color="#D55E00", label="published")
    axis.plot(x, [r["model_ms"] for r in mine], "-", color="#0072B2", label="model")
    fitted = [(a, r["ms"]) for a, r in zip(x, mine, strict=True) if r["use"] == "fit"]
    if fitted:
        axis.plot(
            *zip(*fitted, strict=True), "o", mfc="none", mec="black", ms=10, label="fitted on"
        )
    axis.set_title(name, fontsize=10)
    axis.set_xlabel("minibatch, rows" if "minibatch" in mine[0]["point"] else "comm SMs")
    axis.set_ylabel("ms")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8)


def _label(row: dict[str, Any]) -> str:
    return f"{row['model']}\n{row['machine']} EP {row['ep']} {row['precision']}"


def _shares(each: Any, rows: Sequence[dict[str, Any]]) -> None:
    i, axis = each
    direction = ("forward", "backward")[i]
    names: dict[str, None] = {}
    for row in rows:
        names |= {n: None for n, v in row[direction]["shares"].items() if v > 0.01}
    left = [0.0] * len(rows)
    colours = plt_colours(len(names))
    for name, colour in zip(names, colours, strict=True):
        values = [100 * row[direction]["shares"].get(name, 0.0) for row in rows]
        axis.barh(range(len(rows)), values, left=left, color=colour, label=name)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axis.set_yticks(range(len(rows)), [_label(r) for r in rows] if i == 0 else [""] * len(rows))
    axis.tick_params(axis="y", labelsize=6)
    axis.invert_yaxis()
    axis.set_xlim(0, 100)
    axis.set_xlabel(f"{direction}: compute SMs' time, %")
    axis.legend(fontsize=6, ncols=2, loc="lower left")


def plt_colours(count: int) -> list[str]:
    """Okabe and Ito's colours, again and again."""
    base = ("#009E73", "#E69F00", "#0072B2", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#999999")
    return [base[i % len(base)] for i in range(count)]


def _change_bars(each: Any, rows: Sequence[dict[str, Any]]) -> None:
    i, axis = each
    direction = ("forward", "backward")[i]
    titles = [*CHANGES, *PROGRAM_CHANGES] + (["MXFP8 on the wire"] if i == 0 else [])
    chosen = [
        r for r in rows if (r["machine"], r["model"], r["ep"], r["precision"]) in CASES[1:5:1]
    ]
    for j, (row, colour) in enumerate(zip(chosen, plt_colours(len(chosen)), strict=True)):
        at = [k + 0.2 * j for k in range(len(titles))]
        values = [100 * row[direction]["changes"].get(t, 0.0) for t in titles]
        axis.barh(at, values, height=0.19, color=colour, label=_label(row).replace("\n", ", "))
    axis.set_yticks([k + 0.3 for k in range(len(titles))], titles)
    axis.tick_params(axis="y", labelsize=7)
    axis.invert_yaxis()
    axis.set_xlabel(f"{direction}: time saved by a quarter more of it, %")
    axis.legend(fontsize=6)


def _tokens(each: Any, rows: Sequence[dict[str, Any]]) -> None:
    i, axis = each
    direction = ("forward", "backward")[i]
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["pass"] == direction:
            lines.setdefault(_label(row).replace("\n", ", "), []).append(
                (row["tokens"], row["tflops"])
            )
    for (label, points), colour in zip(lines.items(), plt_colours(len(lines)), strict=True):
        axis.plot(*zip(*points, strict=True), "o-", color=colour, label=label)
    axis.set_xscale("log", base=2)
    axis.set_ylim(bottom=0)
    axis.set_title(direction, fontsize=10)
    axis.set_xlabel("tokens a rank")
    axis.set_ylabel("TFLOP/s a GPU")
    axis.legend(fontsize=6)


if __name__ == "__main__":
    again = "--draw" in sys.argv
    names = [a for a in sys.argv[1:] if a != "--draw"]
    where = Path(names[0] if names else "docs/scaling")
    if again:
        show(json.loads((where / "scaling.json").read_text(encoding="utf-8")), where)
    else:
        main(where)
