"""The tables of docs/tuning.md: ``python -m mok.tools.bench.tuning docs/tuning.md FILE …``.

Each FILE is a ``bench.json`` of ``mok bench --sweep TUNABLE --passes forward,backward``. A table stands between
``<!-- TUNABLE -->`` and ``<!-- end -->``; files of one tunable go into one table. Nothing else of the page changes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mok.errors import MokError
from mok.tools.bench.results import timed
from mok.tools.simulator.benched import read
from mok.tools.simulator.scaling_tables import fill, markdown

HEAD = (
    "layer T,H,I,E,K",
    "setting",
    "comm SMs",
    "compute SMs",
    "peak MiB",
    "forward, ms",
    "backward, ms",
)
MIB = 1 << 20


def tables(documents: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Markdown by tunable.

    Raises:
        MokError: a document is no sweep, or has another GPU than the first.
    """
    rows: dict[str, list[tuple[str, ...]]] = {}
    for document in documents:
        if "sweep" not in document:
            raise MokError("a table is of a sweep", str(document.get("command", "")))
        if document["device"] != documents[0]["device"]:
            raise MokError("a table is of one GPU", document["device"])
        found = rows.setdefault(document["sweep"]["tunable"], [])
        found += _rows(document)
    return {tunable: markdown(HEAD, found) for tunable, found in rows.items()}


def _rows(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    settings: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for row in timed(document["rows"]):
        if row.get("config"):
            sizes = ",".join(str(row["shape"][name]) for name in "THIEK")
            title = f"{row['shape'].get('name', '')} {sizes}".strip()
            settings.setdefault((title, row["config"].partition("=")[2]), {})[row["pass"]] = row
    sms = int(document["gpu"]["num_sms"])
    return [(*key, *_cells(passes, sms)) for key, passes in settings.items()]


def _cells(passes: Mapping[str, Mapping[str, Any]], sms: int) -> tuple[str, ...]:
    """Comm SMs and compute SMs (forward/backward), the larger peak, and both times."""
    note = next(iter(passes.values()))["note"]
    comm = re.search(r"comm SMs (\d+)/(\d+)", note)
    counts = [int(n) for n in comm.groups()] if comm else [0, 0]
    peak = max(row["peak_bytes"] for row in passes.values())
    times = [
        f"{passes[name]['ms']:.3f}" if name in passes else "–" for name in ("forward", "backward")
    ]
    return (
        "/".join(map(str, counts)), "/".join(str(sms - n) for n in counts), f"{peak / MIB:.0f}", *times,
    )  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Fill the page.

    Raises:
        MokError: no files, an unreadable one, or no place for a table.
    """
    if len(argv) < 2:
        raise MokError("it needs the page and a bench.json", " ".join(argv) or "nothing")
    page = Path(argv[0])
    text = page.read_text(encoding="utf-8")
    page.write_text(fill(text, tables([read(name) for name in argv[1:]])), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
