"""A run's document as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mok.errors import MissingDependencyError
from mok.tools.bench import results

COLORS = {
    "mok": "#1b6ca8",
    "mok-compact": "#5aa0d8",
    "mok-mxfp8": "#2f9e6e",
    "sonic": "#d1802c",
    "flashinfer": "#4b8b3b",
    "torch": "#8a8a8a",
    "upstream": "#7d4e9f",
}
_OTHERS = ("#5aa0d0", "#9bc4e2", "#c94f4f", "#b8a13a")
_PASSES = ("forward", "both", "backward")
_TITLES = {"forward": "forward", "both": "forward + backward", "backward": "backward"}


def _pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingDependencyError(
            "charts need matplotlib", str(error), "pip install 'mok-cutedsl[bench]'"
        ) from error
    return pyplot


def bar_chart(document: Mapping[str, Any], path: Path) -> Path:
    """TFLOP/s of every program and shape, one panel per pass, cuBLAS as a line over each shape.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    rows = [r for r in results.timed(document["rows"]) if r["program"] != "cublas"]
    passes = [p for p in _PASSES if any(r["pass"] == p for r in rows)] or ["forward"]
    figure, panels = pyplot.subplots(
        len(passes), 1, figsize=(11, 3.6 * len(passes)), squeeze=False, layout="constrained"
    )
    for panel, pass_name in zip(panels[:, 0], passes, strict=True):
        _bars(panel, [r for r in rows if r["pass"] == pass_name], document["rows"])
        panel.set_title(_TITLES[pass_name], loc="left")
    figure.suptitle(
        f"{document['device']}, {document['date'][:10]}: one MoE layer, BF16", x=0.02, ha="left"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def _bars(panel: Any, rows: Sequence[results.Row], every: Sequence[results.Row]) -> None:
    shapes = list(dict.fromkeys(results.shape_key(r) for r in rows))
    labels = [f"{r['program']} {r.get('config', '')}".strip() for r in rows]
    programs = list(dict.fromkeys(labels))
    width = 0.8 / max(len(programs), 1)
    names = {results.shape_key(r): r["shape"] for r in rows}
    for number, program in enumerate(programs):
        chosen = [r for r, label in zip(rows, labels, strict=True) if label == program]
        places = [shapes.index(results.shape_key(r)) - 0.4 + (number + 0.5) * width for r in chosen]
        color = COLORS.get(program, _OTHERS[number % len(_OTHERS)])
        bars = panel.bar(places, [r["tflops"] for r in chosen], width, label=program, color=color)
        panel.bar_label(bars, fmt="%.3g", fontsize=6, padding=1)
    for number, shape in enumerate(shapes):
        top = results.cublas_tflops(every, shape)
        if top:
            label = "cuBLAS, one large product" if number == 0 else None
            panel.hlines(
                top, number - 0.45, number + 0.45, color="black", lw=1, ls="--", label=label
            )
    ticks = [f"{names[s].get('name', '')}\n{','.join(map(str, s))}".strip() for s in shapes]
    panel.set_xticks(range(len(shapes)), ticks, fontsize=6)
    panel.set_ylabel("TFLOP/s")
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(fontsize=7, ncols=3, loc="upper right", frameon=False)
    panel.margins(y=0.25)


def sweep_chart(document: Mapping[str, Any], path: Path) -> Path:
    """Milliseconds over the values of the tunable that was swept, one line per shape and pass.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    tunable = document["sweep"]["tunable"]
    rows = [r for r in results.timed(document["rows"]) if r.get("config")]
    lines: dict[tuple[Any, ...], list[results.Row]] = {}
    for row in rows:
        lines.setdefault((results.shape_key(row), row["pass"]), []).append(row)
    figure, panel = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for (_, pass_name), found in lines.items():
        shape = found[0]["shape"]
        points = sorted(
            (float(r["config"].rpartition("=")[2]), r["ms"], r["spread"]) for r in found
        )
        panel.errorbar(
            [p[0] for p in points],
            [p[1] for p in points],
            yerr=[p[1] * p[2] / 2 for p in points],
            marker="o",
            ms=4,
            capsize=2,
            label=f"{shape.get('name', '')} {_TITLES.get(pass_name, pass_name)}".strip(),
        )
    panel.set_xscale("log", base=2)
    values = sorted({float(r["config"].rpartition("=")[2]) for r in rows})
    panel.set_xticks(values, [f"{v:g}" for v in values], rotation=45)
    panel.set_xlabel(tunable)
    panel.set_ylabel("ms")
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(fontsize=8, frameon=False)
    program = rows[0]["program"] if rows else ""
    panel.set_title(f"{document['device']}, {program}", loc="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]], path: Path, x: str, y: str, title: str
) -> Path:
    """One line per entry of ``series``, points (x, y).

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    figure, panel = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for name, points in series.items():
        panel.plot(*zip(*sorted(points), strict=True), marker="o", ms=4, label=name)
    panel.set_xlabel(x)
    panel.set_ylabel(y)
    panel.set_ylim(bottom=0)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(fontsize=8, frameon=False)
    panel.set_title(title, loc="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path
