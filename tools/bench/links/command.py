"""``mok bench links``: bandwidth of our transfers, signals, and push against pull, over real links.

    torchrun --nproc-per-node 2 -m mok bench links --out FOLDER

Pull is what the layer does: no flag crosses GPUs. Push is the protocol that it avoids, with a fence and a
flag per peer, measured beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mok.tools.bench.links.measure import ROUTINGS, Links, median_of_ranks
from mok.tools.bench.links.wire import Traffic

ROW_BYTES = (4096, 14336)
SMS = (2, 4, 8, 12, 16, 24, 32)
ROUTING_SMS = 16
KINDS = {
    "pull": (False, False),
    "push": (True, False),
    "carried pull": (False, True),
    "carried push": (True, True),
}
"""(push, carry) of ``kernels.TransferKernel``: rows pass through registers, or through shared memory."""


def measure(rank: Any, say: Callable[[str], None], sms: tuple[int, ...] = SMS) -> dict[str, Any]:
    """Everything, as one JSON-ready document; the same on every rank but for rank 0's link counters."""
    links = Links(rank)
    bandwidth, routing = [], []
    try:
        for row_bytes in ROW_BYTES:
            for count in sms:
                for kind, (push, carry) in KINDS.items():
                    for one_way in (True, False):
                        got = links.transfer(push, count, row_bytes, one_way=one_way, carry=carry)
                        bandwidth.append(
                            {
                                "kind": kind, "row_bytes": row_bytes,
                                "sms": count, "one_way": one_way, "ms": got.ms,
                                "gbytes_per_s": got.gbytes_per_s,
                            }
                        )  # fmt: skip
            say(f"bandwidth of {row_bytes}-byte rows done")
        for name in ROUTINGS:
            for push in (False, True):
                times = [
                    links.transfer(push, ROUTING_SMS, ROW_BYTES[0], name, signals=told)
                    for told in (False, True)
                ]
                routing.append(
                    {
                        "routing": name, "kind": "push" if push else "pull", "sms": ROUTING_SMS,
                        "ms": times[0].ms, "ms_with_signals": times[1].ms,
                        "gbytes_per_s": times[0].gbytes_per_s,
                    }
                )  # fmt: skip
        say("routings done")
        signals: dict[str, Any] = {
            "ready_counter_us": links.ping_local(),
            "device_barrier_us": links.barrier_us(),
        }
        signals["peer_flag_us"], signals["clock_difference_us"] = links.ping_peer()
        signals["pull_usable_us"] = median_of_ranks(
            links.usable_us(False, ROUTING_SMS, ROW_BYTES[0])
        )
        if rank.size == 2:
            signals["push_usable_us"] = median_of_ranks(
                links.usable_us(True, ROUTING_SMS, ROW_BYTES[0])
            )
        say("signals done")
        wire: dict[str, Any] = {}
        for push in (False, True):
            traffic = links.tile_traffic(push)
            wire["push" if push else "pull"] = (
                vars(traffic) if isinstance(traffic, Traffic) else {"refused": traffic}
            )
    finally:
        links.close()
    return {
        "ranks": rank.size,
        "bandwidth": bandwidth,
        "routing": routing,
        "signals": signals,
        "wire": wire,
    }


def show(document: dict[str, Any], console: Console) -> None:
    """The document as tables."""
    table = Table(title="Rows over the links, GB/s of payload (one way / each way of both)")
    table.add_column("SMs", justify="right")
    measured = {r["kind"] for r in document["bandwidth"]}
    columns = [(kind, row) for row in ROW_BYTES for kind in KINDS if kind in measured]
    for kind, row in columns:
        table.add_column(f"{kind}, {row} B", justify="right")
    rows = {(r["kind"], r["row_bytes"], r["sms"], r["one_way"]): r for r in document["bandwidth"]}
    for count in sorted({r["sms"] for r in document["bandwidth"]}):
        cells = [
            " / ".join(f"{rows[k, row, count, way]['gbytes_per_s']:.0f}" for way in (True, False))
            for k, row in columns
        ]
        table.add_row(str(count), *cells)
    console.print(table)
    table = Table(title=f"Routings, {ROUTING_SMS} SMs, {ROW_BYTES[0]}-byte rows")
    for name in ("routing", "kind", "ms", "ms with signals", "GB/s"):
        table.add_column(name)
    for r in document["routing"]:
        table.add_row(
            r["routing"], r["kind"], f"{r['ms']:.3f}", f"{r['ms_with_signals']:.3f}",
            f"{r['gbytes_per_s']:.0f}",
        )  # fmt: skip
    console.print(table)
    for name, value in document["signals"].items():
        console.print(f"{name.removesuffix('_us').replace('_', ' ')}: {value:.2f} µs")
    for kind, found in document["wire"].items():
        if "refused" in found:
            console.print(f"bytes on the wire, {kind}: not known ({found['refused']})")
        else:
            text = ", ".join(f"{name} {value / 1e3:.1f} KB" for name, value in found.items())
            console.print(f"bytes on the wire of a 256×256 BF16 tile, {kind}: {text}")


def draw(document: dict[str, Any], path: Path) -> Path:
    """Bandwidth against comm SMs, as a picture."""
    from mok.tools.bench.charts import lines

    series = {}
    for row in ROW_BYTES:
        for kind in KINDS:
            points = [
                (r["sms"], r["gbytes_per_s"])
                for r in document["bandwidth"]
                if r["kind"] == kind and r["row_bytes"] == row and not r["one_way"]
            ]
            if points:
                series[f"{kind}, {row}-byte rows"] = points
    return lines(series, path, x="comm SMs", y="GB/s each way", title="Rows over NVLink")


def write(document: dict[str, Any], folder: Path) -> list[Path]:
    """links.json and links.png."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "links.json"
    data.write_text(json.dumps(document, indent=1) + "\n")
    return [data, draw(document, folder / "links.png")]
