"""The tables of docs/scaling.md, from ``scaling.json``: between ``<!-- NAME -->`` and ``<!-- end -->``."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mok.errors import MokError

Rows = Sequence[dict[str, Any]]


def tables(found: Mapping[str, Any]) -> dict[str, str]:
    """Each table's name and Markdown."""
    makers = {
        "cases": cases, "skew": skew, "gains": gains, "racks": racks, "sweeps": sweeps,
        "records": recorded, "unfitted": unfitted,
    }  # fmt: skip
    sources = {"sweeps": "sweep"}
    return {
        name: make(found[sources.get(name, name)])
        for name, make in makers.items()
        if sources.get(name, name) in found
    }


def fill(text: str, made: Mapping[str, str]) -> str:
    """``text`` with each table in its place.

    Raises:
        MokError: a table has no place.
    """
    for name, table in made.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.S)
        if not pattern.search(text):
            raise MokError("every table must have a place", f"<!-- {name} --> … <!-- end -->")
        text = pattern.sub(lambda m, table=table: m[1] + table + "\n" + m[2], text)  # type: ignore[misc]
    return text


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _case(row: Mapping[str, Any]) -> str:
    return f"{row['model']}, {row['machine']}, EP {row['ep']}, {row['precision'].upper()}"


def cases(rows: Rows) -> str:
    """Where time goes."""
    head = ("layer", "pass", "ms (TFLOP/s)", "comm SMs", "tensor", "NVLink", "HBM",
            "comm SMs' time", "head and tail", "main loop")  # fmt: skip
    lines = []
    for row in rows:
        for direction, name in (("forward", "fwd_num_comm_sms"), ("backward", "bwd_num_comm_sms")):
            d = row[direction]
            b, phases = d["bounds"], d["phases"]
            ends = phases.get("before routed rows", 0.0) + phases.get("drain", 0.0)
            lines.append(
                (
                    _case(row) if direction == "forward" else "", direction,
                    f"{d['ms']:.2f} ({d['tflops']:.0f})", str(row["config"][name]),
                    *(f"{b.get(n, 0.0):.2f}" for n in ("tensor cores", "NVLink", "HBM", "comm SMs")),
                    f"{ends:.2f}", f"{d['shares']['main loop']:.0%}",
                )
            )  # fmt: skip
    return markdown(head, lines)


def skew(rows: Rows) -> str:
    """Skewed routing."""
    head = ("layer", "Zipf exponent", "rows of the fullest rank / mean", "forward, ms")
    return markdown(
        head, [(_case(r), f"{r['zipf']}", f"{r['fullest']:.2f}", f"{r['ms']:.2f}") for r in rows]
    )


def gains(rows: Rows) -> str:
    """Ours against upstream's program, by cause."""
    head = ("model", "", "pass", "upstream, ms", "fused SwiGLU alone", "two accumulators",
            "prefix search", "grid as a hint", "slot-grain backward", "ours, ms", "in all")  # fmt: skip
    lines = []
    for row in rows:
        steps = {step["program"]: step for step in row["steps"]}
        alone = [f"+ {name.removesuffix(' alone')}" for name in head[4:9]]
        parts = [f"{steps[a]['gain']:.1%}" if a in steps else "–" for a in alone]
        ours = steps["ours"]
        lines.append(
            (row["model"], row["precision"], row["pass"], f"{steps['upstream']['ms']:.3f}", *parts,
             f"{ours['ms']:.3f}", f"{ours['gain']:.1%}")
        )  # fmt: skip
    return markdown(head, lines)


def racks(rows: Rows) -> str:
    """Several racks."""
    head = ("racks", "experts spread over all, ms", "a copy in each, ms", "network per step, ms")
    return markdown(
        head,
        [
            (str(r["racks"]), f"{r['spread_ms']:.1f}", f"{r['copies_ms']:.1f}",
             f"{r['network_ms_per_step']:.1f}")
            for r in rows
        ],
    )  # fmt: skip


def sweeps(rows: Rows) -> str:
    """The published sweeps, point by point."""
    head = ("sweep", "point", "published, ms", "model, ms", "error", "fitted on")
    return markdown(
        head,
        [
            (r["sweep"], r["point"], f"{r['ms']:.3f}", f"{r['model_ms']:.3f}",
             f"{r['model_ms'] / r['ms'] - 1:+.1%}", "yes" if r["use"] == "fit" else "")
            for r in rows
        ],
    )  # fmt: skip


GROUPS = (
    ("one GPU, 2026-11-29, forward", r"^H200 .*(?<!2026-11-30)(?<!in pairs)$"),
    ("one GPU, 2026-11-30", r"^H200 .*(2026-11-30|in pairs)$"),
    ("two GPUs, 2026-11-29, older comm worker left out where it binds", r"^2 x .*(?<!2026-11-30)$"),
    ("two GPUs, comm-SM sweeps of 2026-11-30", r"^2 x (?!.*carried).*2026-11-30$"),
    ("two GPUs, the same with rows carried", r"^2 x .*carried, 2026-11-30$"),
)


def recorded(rows: Rows) -> str:
    """Errors on records of our own, by group."""
    lines = []
    for title, pattern in GROUPS:
        mine = [r for r in rows if re.search(pattern, r["name"]) and r["limit"]]
        for use, word in (("fit", "chosen on"), ("check", "held out")):
            errors = [abs(r["error"]) for r in mine if r["use"] == use]
            if errors:
                lines.append(
                    (f"{title}: {word}", str(len(errors)), f"{statistics.median(errors):.1%}",
                     f"{max(errors):.1%}")
                )  # fmt: skip
    return markdown(("what", "times", "median error", "worst"), lines)


def _error(row: dict[str, Any]) -> str:
    text = f"{row['error']:+.1%}"
    return f"({text}: unsteady)" if row["use"] == "unsteady" else text


def unfitted(rows: Rows) -> str:
    """The 12 shapes that nothing was fitted on."""
    shapes: dict[str, dict[tuple[int, str], dict[str, Any]]] = {}
    for r in rows:
        shapes.setdefault(r["name"], {})[r["ep"], r["pass"]] = r
    keys = list(dict.fromkeys((r["ep"], r["pass"]) for r in rows))
    keys.sort(key=lambda key: (key[0], key[1] != "forward"))
    head = ("layer T,H,I,E,K", *(f"EP {ep} {name}: ms, error" for ep, name in keys))
    lines = [
        (name, *(f"{r['ms']:.3f}, {_error(r)}" for key in keys for r in [cells[key]]))
        for name, cells in shapes.items()
    ]
    errors = [abs(r["error"]) for r in rows if r["use"] == "check"]
    result = (
        f"Median {statistics.median(errors):.1%}, worst {max(errors):.1%} of {len(errors)} times."
    )
    return f"{markdown(head, lines)}\n\n{result}"
