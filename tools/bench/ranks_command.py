"""``mok bench`` under torchrun: the layer over real links beside its peers, and the links alone."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mok.errors import GroupError, MokError

COMM_SMS = (6, 8, 12, 16, 24, 32)
MINIBATCHES = (1024, 2048, 4096, 8192, 16384)
Runs = list[tuple[tuple[int, ...], tuple[str, ...], dict[str, Any]]]
"""Sizes, programs, and options of ``ranks.measure``."""


def under_torchrun() -> bool:
    """Whether this process is one of several that torchrun started."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def run(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure on all ranks; every rank returns a document, only rank 0's is shown.

    Raises:
        GroupError: not under torchrun, or with another number of ranks than --ep names.
    """
    if not under_torchrun():
        raise GroupError(
            "Links and several GPUs are measured by one process per GPU",
            f"WORLD_SIZE {os.environ.get('WORLD_SIZE', 'not set')}",
            "Run: torchrun --nproc-per-node 2 -m mok bench …",
        )
    size = int(os.environ["WORLD_SIZE"])
    if args.ep not in (1, size):
        raise GroupError(
            "--ep names the number of ranks that torchrun started", f"{args.ep}, {size}"
        )
    if args.precision == "mxfp8":
        raise MokError(
            "the layer over real links is timed in BF16 here", "--precision mxfp8",
            "Use --suite published --precision mxfp8",
        )  # fmt: skip
    from mok.tools.bench.ranks import Rank

    rank = Rank()
    tell = say if rank.rank == 0 else lambda _: None
    try:
        document = _header(args, rank)
        if args.what == "links":
            from mok.tools.bench.links.command import measure as measure_links

            document["links"] = measure_links(rank, tell)
        else:
            _layer(args, rank, document, tell)
        if rank.rank == 0 and args.out:
            _write(document, Path(args.out))
    finally:
        rank.close()
    return document


def _header(args: argparse.Namespace, rank: Any) -> dict[str, Any]:
    import shlex
    import sys

    from mok.tools.bench.versions import gpu_facts, today, versions

    facts = gpu_facts(rank.device)
    return {
        "device": facts["name"],
        "gpu": facts,
        "ranks": rank.size,
        "rank": rank.rank,
        "date": today(),
        "command": shlex.join(["torchrun", "-m", "mok", *sys.argv[1:]]),
        "versions": versions(["mok", "torch"]),
        "rows": [],
    }


def _layer(
    args: argparse.Namespace, rank: Any, document: dict[str, Any], say: Callable[[str], None]
) -> None:
    """Bits, then the shapes with all programs, then skew and an idle rank with ours alone; or a sweep."""
    from mok.commands.bench import windows
    from mok.tools.bench import ranks
    from mok.tools.bench.timing import Regime

    rounds, regime = args.rounds or 2, Regime(**windows(args))
    document["regime"] = {"warm_ms": regime.warm_ms, "run_ms": regime.run_ms, "rounds": rounds}
    known = ranks.shapes(rank.size)
    if args.shape:
        known = {text: _sizes(text) for text in args.shape}
    first = next(iter(known.values()))
    if args.sweep:
        runs: Runs = sweep_runs(args, list(known.values()) if args.shape else [first])
    else:
        document["bits"] = ranks.bits(rank)
        say(f"same bits as EP = 1: {document['bits']}")
        runs = [(sizes, ranks.PROGRAMS, {}) for sizes in known.values()]
        if not args.quick:
            runs += [(first, ("mok",), {"kind": "skewed"}), (first, ("mok",), {"idle": True})]
    for sizes, programs, options in runs:
        options = dict(options)
        changes = options.pop("changes", {})
        rows = ranks.measure(
            rank, sizes, programs, rounds=rounds, regime=regime, **options, **changes
        )
        document["rows"] += rows
        for row in rows:
            say(
                f"{row['shape']} {row['program']} {row['pass']}: {row['ms']:.3f} ms, {row['tflops']:.0f}"
            )
        if len(programs) > 1:
            document.setdefault("exposed", {})[str(list(sizes))] = ranks.exposed(rows)
        if rank.rank == 0 and args.out:
            _write(document, Path(args.out))


def sweep_runs(args: argparse.Namespace, shapes: list[tuple[int, ...]]) -> Runs:
    """Ours alone on each shape with each value of --sweep."""
    names, values = _swept(args)
    return [
        (sizes, ("mok",), {"changes": dict.fromkeys(names, value)})
        for sizes in shapes
        for value in values
    ]


def _sizes(text: str) -> tuple[int, ...]:
    from mok.tools.bench.shapes import parse_shape

    s = parse_shape(text).shape
    return s.num_tokens, s.hidden_size, s.intermediate_size, s.num_experts, s.topk


def _swept(args: argparse.Namespace) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """(tunables that take a value together, values) of --sweep and --values."""
    known = {
        "comm_sms": (("fwd_num_comm_sms", "bwd_num_comm_sms"), COMM_SMS),
        "fwd_num_comm_sms": (("fwd_num_comm_sms",), COMM_SMS),
        "bwd_num_comm_sms": (("bwd_num_comm_sms",), COMM_SMS),
        "minibatch": (("minibatch_size",), MINIBATCHES),
    }
    if args.sweep not in known:
        raise MokError(
            "a sweep over ranks must be a known one", repr(args.sweep), f"Known: {', '.join(known)}"
        )
    names, values = known[args.sweep]
    return names, tuple(int(v) for v in args.values.split(",")) if args.values else values


def _write(document: dict[str, Any], folder: Path) -> None:
    from mok.tools.bench.results import finite

    folder.mkdir(parents=True, exist_ok=True)
    name = "links.json" if "links" in document else "ranks.json"
    (folder / name).write_text(json.dumps(finite(document), indent=1) + "\n")
    if "links" in document:
        from mok.tools.bench.links.command import draw

        draw(document["links"], folder / "links.png")


def passed(document: dict[str, Any]) -> bool:
    """All bits are those of EP = 1 (where they were compared), and something was measured."""
    same = all(all(found.values()) for found in document.get("bits", {}).values())
    return same and bool(document["rows"] or document.get("links"))


def show(document: dict[str, Any], console: Console) -> None:
    """Rank 0's tables."""
    if document["rank"]:
        return
    console.print(f"{document['ranks']} x {document['device']}")
    if "links" in document:
        from mok.tools.bench.links.command import show as show_links

        show_links(document["links"], console)
        return
    regime = document["regime"]
    console.print(
        f"windows of {regime['run_ms']:g} ms after {regime['warm_ms']:g} ms of warm-up, "
        f"{regime['rounds']} rounds"
    )
    for name, found in document.get("bits", {}).items():
        console.print(f"same bits as EP = 1, {name}: {found}")
    table = Table(title="Per GPU, slowest rank")
    for column in (
        "T, H, I, E, K",
        "routing",
        "program",
        "pass",
        "ms",
        "TFLOP/s",
        "of NCCL + torch",
    ):
        table.add_column(column)
    peer = {
        (str(r["shape"]), r["pass"]): r["ms"]
        for r in document["rows"]
        if r["program"] == "nccl-torch"
    }
    for r in document["rows"]:
        other = peer.get((str(r["shape"]), r["pass"]))
        table.add_row(
            ", ".join(map(str, r["shape"])),
            r["routing"] + (", one idle rank" if r["idle_rank"] else ""),
            r["program"], r["pass"], f"{r['ms']:.3f}", f"{r['tflops']:.0f}",
            f"{other / r['ms']:.2f}×" if other else "",
        )  # fmt: skip
    console.print(table)
    for shape, shares in document.get("exposed", {}).items():
        text = ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items())
        console.print(f"exposed communication, {shape}: {text}")
