"""A run's document as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from mok.tools.bench import results

WIDTH = 150  # where the output is no terminal, which says no width


def wide(console: Console) -> Console:
    """The console, wide enough for the tables where it cannot know its width."""
    return console if console.is_terminal else Console(file=console.file, width=WIDTH)


def title_of(shape: Mapping[str, Any]) -> str:
    sizes = ",".join(str(shape[name]) for name in ("T", "H", "I", "E", "K"))
    fitted = f" (T fitted to memory, {shape['asked_T']} asked)" if "asked_T" in shape else ""
    return f"{shape.get('name', '')} {sizes}{fitted}".strip()


def document_tables(document: Mapping[str, Any]) -> RenderableType:
    """Everything that a run found."""
    parts: list[RenderableType] = [_header(document), rows_table(document["rows"])]
    parts.append(accuracy_table(document["rows"]))
    if document.get("precisions"):
        parts.append(precisions_table(document["precisions"]))
    if document.get("phases"):
        parts.append(phases_table(document["phases"]))
    if document.get("means"):
        parts.append(means_table(document["means"]))
    if document.get("against"):
        parts.append(against_table(document["against"]))
    parts.extend(_notes(document))
    return Group(*parts)


def _header(document: Mapping[str, Any]) -> Text:
    gpu = document["gpu"]
    facts = [document["device"]]
    facts += [f"{gpu['num_sms']} SMs"] if "num_sms" in gpu else []
    facts += [f"driver {gpu['driver']}"] if gpu.get("driver") else []
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    regime = document["regime"]
    return Text(
        f"{document['date']}: {', '.join(facts)}\n{versions}\n"
        f"windows of {regime['run_ms']:g} ms after {regime['warm_ms']:g} ms of warm-up, "
        f"{regime['rounds']} rounds; clock and power: {document['telemetry']}"
    )


def rows_table(rows: Sequence[results.Row]) -> Table:
    """One line per program and pass, grouped by shape."""
    table = Table(
        title="Whole layer, medians", title_justify="left", box=box.SIMPLE, pad_edge=False
    )
    table.add_column("pass")
    table.add_column("program", overflow="fold")
    columns = ("ms", "±%", "TFLOP/s", "of cuBLAS", "of ceiling", "ours is", "MHz", "W")
    for column in (*columns, "peak GiB", "kept GiB", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    faster = {
        (results.shape_key(r), r["pass"], r["program"]): r["ratio"] for r in results.ratios(rows)
    }
    shape: Any = None
    for row in rows:
        if results.shape_key(row) != shape:
            shape = results.shape_key(row)
            table.add_section()
            table.add_row(Text(title_of(row["shape"]), style="bold"))
        table.add_row(*_row(row, faster.get((shape, row["pass"], row["program"]))))
    return table


def _row(row: results.Row, ratio: float | None) -> list[str | Text]:
    of_cublas = _number(row.get("of_cublas"), ".3f")
    if row.get("target") and row.get("of_cublas"):
        of_cublas += " ✓" if row["of_cublas"] >= row["target"] else f" < {row['target']:.2f}"
    error = _number(row.get("error"), ".1e")
    return [
        row["pass"],
        f"{row['program']} {row.get('config', '')}".strip(),
        _number(row["ms"], ".3f"),
        _number(100 * row["spread"], ".1f"),
        _number(row["tflops"], ".4g"),
        of_cublas,
        _number(row.get("of_ceiling"), ".3f"),
        "" if ratio is None else f"{ratio:.2f}×",
        _number(row.get("clock_mhz"), ".0f"),
        _number(row.get("watts"), ".0f"),
        _number(_gib(row.get("peak_bytes")), ".2f"),
        _number(_gib(row.get("kept_bytes")), ".2f"),
        error if row.get("ok", True) else Text(f"{error} WRONG", style="red"),
    ]


def accuracy_table(rows: Sequence[results.Row]) -> Table:
    """What the timed programs compute against FP32: relative L2 error and cosine of each result."""
    names: list[str] = []
    best: dict[tuple[Any, ...], results.Row] = {}
    for row in rows:
        found = row.get("accuracy") or {}
        names += [name for name in found if name not in names]
        label = f"{row['program']} {row.get('config', '')}".strip()
        key = (results.shape_key(row), label)
        if found and len(found) >= len(best.get(key, {}).get("accuracy", ())):
            best[key] = row
    table = Table(
        title="Accuracy against FP32: relative L2 error, cosine",
        title_justify="left",
        box=box.SIMPLE,
        pad_edge=False,
    )
    table.add_column("shape", no_wrap=True)
    table.add_column("program")
    for name in names:
        table.add_column(name if name == "output" else f"d {name}", justify="right", no_wrap=True)
    for (_, label), row in best.items():
        cells = [row["accuracy"].get(name) for name in names]
        texts = ["" if c is None else f"{c['error']:.1e} {c['cosine']:.5f}" for c in cells]
        table.add_row(title_of(row["shape"]), label, *texts)
    return table


def precisions_table(entries: Sequence[Mapping[str, Any]]) -> Table:
    """Ours in MXFP8 against ours in BF16."""
    table = Table(
        title="Speed of ours in MXFP8 / in BF16",
        title_justify="left",
        box=box.SIMPLE,
        pad_edge=False,
    )
    for column in ("shape", "program, pass"):
        table.add_column(column)
    for column in ("ratio", "of rounds", "at least", ""):
        table.add_column(column, justify="right")
    for entry in entries:
        table.add_row(
            title_of(entry["shape"]),
            f"{entry['program']} {entry['pass']}",
            f"{entry['ratio']:.3f}",
            f"{entry['low']:.3f}-{entry['high']:.3f}",
            _number(entry["limit"], ".2f"),
            Text("ok") if entry["ok"] else Text("SLOWER", style="red"),
        )
    return table


def phases_table(entries: Sequence[Mapping[str, Any]]) -> Table:
    """Where the time inside our calls goes."""
    names: list[str] = []
    for entry in entries:
        names += [name for name in entry["phases"] if name not in names]
    table = Table(
        title="Inside our calls, ms (and share)",
        title_justify="left",
        box=box.SIMPLE,
        pad_edge=False,
    )
    table.add_column("shape", no_wrap=True)
    table.add_column("program, pass")
    for name in names:
        table.add_column(name, justify="right")
    for entry in entries:
        whole = sum(entry["phases"].values()) or 1.0
        cells = [
            f"{entry['phases'][n]:.3f} ({100 * entry['phases'][n] / whole:.0f}%)"
            if n in entry["phases"]
            else ""
            for n in names
        ]
        table.add_row(title_of(entry["shape"]), f"{entry['program']} {entry['pass']}", *cells)
    return table


def means_table(means: Sequence[Mapping[str, Any]]) -> Table:
    """Geometric means of how many times faster ours is."""
    table = Table(
        title="Ours against, geometric means over shapes",
        title_justify="left",
        box=box.SIMPLE,
        pad_edge=False,
    )
    for column in ("program", "pass"):
        table.add_column(column)
    for column in ("times faster", "least", "shapes"):
        table.add_column(column, justify="right")
    for entry in means:
        table.add_row(
            entry["program"],
            entry["pass"],
            f"{entry['mean']:.3f}",
            f"{entry['least']:.3f}",
            str(entry["shapes"]),
        )
    return table


def against_table(against: Mapping[str, Any]) -> Table:
    """Ours against an earlier run."""
    title = f"Against {against['file']} ({against['date']}, {against['device']}), margin "
    table = Table(
        title=f"{title}{100 * against['margin']:g} %",
        title_justify="left",
        box=box.SIMPLE,
        pad_edge=False,
    )
    for column in ("shape", "pass", "program", "basis"):
        table.add_column(column)
    table.add_column("speed now / then", justify="right")
    table.add_column("")
    for entry in against["rows"]:
        verdict = Text("ok") if entry["ok"] else Text("SLOWER", style="red")
        table.add_row(
            title_of(entry["shape"]),
            entry["pass"],
            entry["program"],
            entry["basis"],
            f"{entry['ratio']:.3f}",
            verdict,
        )
    return table


def _notes(document: Mapping[str, Any]) -> list[Text]:
    found = []
    for entry in _merged(document.get("missing", ())):
        found.append(Text(f"not measured: {entry}"))
    for entry in document.get("not_run", ()):
        found.append(Text(f"shape not run: {title_of(entry['shape'])}: {entry['reason']}"))
    for entry in document.get("bits", ()):
        if not entry["ok"]:
            different = ", ".join(entry["different"])
            found.append(Text(f"BITS DIFFER: {title_of(entry['shape'])}: {different}", style="red"))
    for row in results.missed_targets(document["rows"]):
        found.append(
            Text(
                f"target missed: {title_of(row['shape'])} {row['pass']}: "
                f"{row['of_cublas']:.3f} of cuBLAS, {row['target']:.2f} wanted"
            )
        )
    against = document.get("against")
    if against and not against["rows"]:
        found.append(Text(f"{against['file']} has no row in common with this run", style="red"))
    if any(entry["limit"] for entry in document.get("precisions", ())):
        found.append(Text(results.MXFP8_ON_HOPPER))
    if document.get("chart"):
        found.append(Text(f"chart: {document['chart']}"))
    return found


def _merged(missing: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line per program, pass and reason, with the shapes it concerns."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for entry in missing:
        key = (entry["program"], entry.get("pass", ""), entry["reason"])
        groups.setdefault(key, []).append(title_of(entry["shape"]))
    return [
        f"{program}{' ' + pass_name if pass_name else ''}: {reason} ({len(shapes)} shapes)"
        if len(shapes) > 1
        else f"{program}{' ' + pass_name if pass_name else ''}: {reason} ({shapes[0]})"
        for (program, pass_name, reason), shapes in groups.items()
    ]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _gib(value: int | None) -> float | None:
    return None if value is None else value / 2**30
