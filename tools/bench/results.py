"""Rows of a run, and what follows from them: ratios, shares, means, regressions. Plain data."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mok.errors import MokError

Row = dict[str, Any]
OURS = "mok"
MXFP8 = "mok-mxfp8"
MXFP8_ON_HOPPER = "MXFP8 on Hopper gives the same numbers as on Blackwell, not speed."
HOPPER_SHARE = 0.6
"""Of the BF16 layer's speed, which MXFP8 must reach on Hopper: there it is for equal numbers."""


def finite(value: Any) -> Any:
    """The value with NaN and infinities, which JSON has not, as None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def make_folder(path: Path, remedy: str = "Name another one with --out") -> None:
    """Make the folder for results, and try it before there are any.

    Raises:
        MokError: nothing can be written there.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise MokError(
            "the folder for results must be writable", f"{path}: {error.strerror}", remedy,
        ) from error  # fmt: skip


def row_key(row: Row) -> tuple[Any, ...]:
    """What makes rows of two runs comparable."""
    s = row["shape"]
    sizes = tuple(s[name] for name in ("T", "H", "I", "E", "K"))
    return (*sizes, row["pass"], row["program"], row.get("config", ""))


def shape_key(row: Row) -> tuple[Any, ...]:
    return row_key(row)[:5]


def timed(rows: Sequence[Row]) -> list[Row]:
    """Rows that hold a time (a failed one has none)."""
    return [r for r in rows if r.get("ms")]


def cublas_tflops(rows: Sequence[Row], shape: tuple[Any, ...]) -> float | None:
    """cuBLAS' TFLOP/s in the rounds of a shape."""
    for row in timed(rows):
        if row["program"] == "cublas" and shape_key(row) == shape:
            return float(row["tflops"])
    return None


def add_shares(rows: Sequence[Row]) -> None:
    """Add ``of_cublas``, and ``of_ceiling`` where the ceiling is known."""
    for row in timed(rows):
        top = cublas_tflops(rows, shape_key(row))
        if top and row["program"] != "cublas":
            row["of_cublas"] = row["tflops"] / top
        if row.get("ceiling_ms"):
            row["of_ceiling"] = row["ceiling_ms"] / row["ms"]


def ratios(rows: Sequence[Row], ours: str = OURS) -> list[dict[str, Any]]:
    """How many times faster ours is than each other program, per shape and pass.

    Programs of a run take turns in rounds, so the ratio is taken within each round: drift of the
    clock cancels. ``low`` and ``high`` are the least and greatest of the rounds.
    """
    found = []
    mine = {
        (shape_key(r), r["pass"]): r
        for r in timed(rows)
        if r["program"] == ours and not r.get("config")
    }
    for row in timed(rows):
        own = mine.get((shape_key(row), row["pass"]))
        if own is None or row["program"] in (ours, "cublas"):
            continue
        each = [
            theirs / ours_ms
            for theirs, ours_ms in zip(row["rounds_ms"], own["rounds_ms"], strict=False)
        ]
        found.append(
            {
                "shape": row["shape"],
                "pass": row["pass"],
                "program": row["program"],
                "ratio": statistics.median(each),
                "low": min(each),
                "high": max(each),
            }
        )
    return found


def precisions(rows: Sequence[Row], hopper: bool) -> list[dict[str, Any]]:
    """Speed of ours in MXFP8 over ours in BF16, on the same ranks, per shape and pass.

    Taken within each round, as ``ratios``. ``hopper``: at least ``HOPPER_SHARE`` is asked for.
    """
    mine = {(shape_key(r), r["pass"], r["program"]): r for r in timed(rows) if not r.get("config")}
    found = []
    for (shape, pass_name, program), row in mine.items():
        base = mine.get((shape, pass_name, program.replace(MXFP8, OURS, 1)))
        if not program.startswith(MXFP8) or base is None:
            continue
        each = [a / b for a, b in zip(base["rounds_ms"], row["rounds_ms"], strict=False)]
        ratio = statistics.median(each)
        found.append(
            {
                "shape": row["shape"],
                "pass": pass_name,
                "program": program,
                "ratio": ratio,
                "low": min(each),
                "high": max(each),
                "limit": HOPPER_SHARE if hopper else None,
                "ok": not hopper or ratio >= HOPPER_SHARE,
            }
        )
    return found


def geometric_means(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per program and pass: geometric mean of the ratios, the least one, and how many shapes."""
    groups: dict[tuple[str, str], list[float]] = {}
    for entry in found:
        groups.setdefault((entry["program"], entry["pass"]), []).append(entry["ratio"])
    return [
        {
            "program": program,
            "pass": pass_name,
            "mean": math.exp(statistics.fmean(math.log(v) for v in values)),
            "least": min(values),
            "shapes": len(values),
        }
        for (program, pass_name), values in sorted(groups.items())
    ]


def compare(
    rows: Sequence[Row], before: Sequence[Row], margin: float, ours: str = OURS
) -> list[dict[str, Any]]:
    """Our rows against an earlier run's, each relative to its own cuBLAS where both have it.

    Two runs differ in clock and machine; the share of cuBLAS does so less than milliseconds.

    Returns:
        Per row that both have: {shape, pass, program, ratio, basis, ok}; ratio above 1 is faster
        now, ok is whether it is above 1 − margin.
    """
    earlier = {row_key(r): r for r in timed(before)}
    found = []
    for row in timed(rows):
        old = earlier.get(row_key(row))
        if old is None or not row["program"].startswith(ours):
            continue
        if row.get("of_cublas") and old.get("of_cublas"):
            basis, ratio = "share of cuBLAS", row["of_cublas"] / old["of_cublas"]
        else:
            basis, ratio = "milliseconds", old["ms"] / row["ms"]
        found.append(
            {
                "shape": row["shape"],
                "pass": row["pass"],
                "program": row["program"],
                "ratio": ratio,
                "basis": basis,
                "ok": ratio >= 1 - margin,
            }
        )
    return found


def missed_targets(rows: Sequence[Row]) -> list[Row]:
    """Our rows whose share of cuBLAS is below the target that was set."""
    return [
        r
        for r in timed(rows)
        if r.get("target") and r.get("of_cublas") and r["of_cublas"] < r["target"]
    ]
