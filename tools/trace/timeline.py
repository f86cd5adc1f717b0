"""Timelines as pictures: SMs down, time across, colour by kind of task. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mok.errors import MissingDependencyError, MokError
from mok.runtime.trace import Trace

FORMATS = ("png", "svg")

# Okabe and Ito's colours, which colour-blind readers can tell apart; the shared expert's are paler.
COLOURS = {
    "dispatch": "#0072B2",
    "pull": "#0072B2",
    "combine": "#56B4E9",
    "push": "#56B4E9",
    "up": "#E69F00",
    "gate/up": "#E69F00",
    "swiglu": "#F0E442",
    "swiglu backward": "#F0E442",
    "down": "#D55E00",
    "replay": "#999999",
    "replay swiglu": "#BBBBBB",
    "dgrad down": "#E69F00",
    "dgrad up": "#D55E00",
    "wgrad down": "#009E73",
    "wgrad gate": "#CC79A7",
    "wgrad up": "#CC79A7",
    "wgrad gate/up": "#CC79A7",
}
SHARED_ALPHA = 0.45


def draw(traces: Sequence[Trace], path: Path, dpi: int = 150) -> None:
    """Draw ``traces`` one below the other on one time axis.

    Tasks of an SM overlap: the next one's loads run while the last one's results leave. A bar shows a task
    from where the one before has ended, so that a row reads as what the SM was finishing.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        MokError: the file's ending names no known format.
    """
    if path.suffix.removeprefix(".") not in FORMATS:
        raise MokError(f"a picture must be one of {', '.join(FORMATS)}", path.name)
    plt = _pyplot()
    height = max(2.4, 1.0 + 1.6 * len(traces))
    figure, axes = plt.subplots(
        len(traces), 1, figsize=(11, height + 1.2), sharex=True, squeeze=False, layout="constrained"
    )
    seen: dict[str, Any] = {}
    for axis, trace in zip(axes[:, 0], traces, strict=True):
        _one(axis, trace, seen)
    axes[-1, 0].set_xlabel("milliseconds")
    if seen:
        figure.legend(
            seen.values(),
            seen.keys(),
            loc="outside lower center",
            ncols=min(7, len(seen)),
            fontsize=8,
        )
    figure.savefig(path, dpi=dpi)
    plt.close(figure)


def _one(axis: Any, trace: Trace, seen: dict[str, Any]) -> None:
    bars: dict[str, dict[int, list[tuple[float, float]]]] = {}
    over: dict[int, float] = {}  # when the last task of an SM ended
    for e in trace.events:
        begin = max(e.begin, over.get(e.sm, 0.0))
        over[e.sm] = max(e.end, begin)
        rows = bars.setdefault(e.kind, {})
        rows.setdefault(e.sm, []).append((begin * 1e3, (over[e.sm] - begin) * 1e3))
    order = sorted({e.sm for e in trace.events})
    row = {sm: i for i, sm in enumerate(order)}
    for kind, rows in bars.items():
        base = kind.removeprefix("shared ")
        alpha = SHARED_ALPHA if base != kind else 1.0
        for sm, spans in rows.items():
            handle = axis.broken_barh(
                spans, (row[sm], 0.9), facecolor=COLOURS.get(base, "#444444"), alpha=alpha,
                linewidth=0, rasterized=True,
            )  # fmt: skip
            seen.setdefault(kind, handle)
    axis.set_ylim(max(1, len(order)), 0)
    axis.set_ylabel("SM")
    axis.set_yticks([0.5, len(order) - 0.5] if len(order) > 1 else [0.5])
    axis.set_yticklabels(
        [str(order[0]), str(order[-1])] if len(order) > 1 else [str(o) for o in order]
    )
    axis.set_title(
        trace.source + (f" ({trace.lost} records lost)" if trace.lost else ""), fontsize=9
    )


def _pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise MissingDependencyError(
            "pictures need matplotlib", str(error), "pip install 'mok-cutedsl[plot]'"
        ) from error
    return plt
