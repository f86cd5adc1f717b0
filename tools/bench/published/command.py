"""``mok bench --suite published`` and ``--suite sweep``: arguments, document, tables."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mok.errors import DeviceError, MissingDependencyError, MokError
from mok.tools.bench.published import figures

SUITES = ("published", "sweep")
SWEEP_VIRTUAL_RANKS = 4
SWEEP_ITERATIONS = (10, 20)  # warm-up, timed


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments that only these suites have."""
    group = parser.add_argument_group("--suite published, --suite sweep")
    group.add_argument("--models", help=f"of {','.join(figures.MODELS)}")
    group.add_argument("--warmup", type=int, help=f"iterations before (default {figures.WARMUP})")
    group.add_argument(
        "--iterations", type=int, help=f"timed iterations (default {figures.ITERATIONS})"
    )
    group.add_argument("--tokens", type=int, default=figures.TOKENS, help="T of a rank")


def run(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure on all ranks; every rank returns the document, rank 0's is shown and written.

    Raises:
        DeviceError: no GPU. MokError: unknown models or programs.
    """
    import torch

    from mok.tools.bench.published import programs
    from mok.tools.bench.results import make_folder
    from mok.tools.bench.versions import gpu_facts, today, versions

    models = tuple(m for m in (args.models or "").split(",") if m) or figures.MODELS
    unknown = [m for m in models if m not in figures.MODELS]
    if unknown:
        raise MokError(f"models are of {', '.join(figures.MODELS)}", ", ".join(unknown))
    names, interpreter = chosen(args.peers)
    for name, least in (("tokens", 1), ("warmup", 0), ("iterations", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise MokError(f"--{name} must be at least {least}", value)
    if args.out and os.environ.get("RANK", "0") == "0":
        make_folder(Path(args.out))
    if not torch.cuda.is_available():
        raise DeviceError(
            "this suite times kernels on GPUs", "torch finds none",
            "mok simulate predicts times on machines that are not here",
        )  # fmt: skip
    with placed() as place:
        tell = say if place.rank == 0 else lambda _: None
        document: dict[str, Any] = {
            "suite": args.suite,
            "device": gpu_facts(place.device)["name"],
            "gpu": gpu_facts(place.device),
            "ranks": place.size,
            "rank": place.rank,
            "date": today(),
            "command": shlex.join(["mok", *sys.argv[1:]]),
            "versions": versions(["mok", "torch"]) | programs.versions(list(names)),
            "published_with": figures.PUBLISHED_WITH,
            "rows": [],
        }

        def save(part: dict[str, Any]) -> None:
            document.update(part)
            if args.out and place.rank == 0:
                write(document, Path(args.out) / f"{args.suite}.json")

        if args.suite == "sweep":
            save(_sweep(args, place, models if args.models else models[:1], tell))
            if args.out and place.rank == 0:
                save({"charts": _charts(document, Path(args.out))})
            return document
        from mok.tools.bench.published.suite import Settings
        from mok.tools.bench.published.suite import run as run_suite

        settings = Settings(
            models=models,
            precisions=(args.precision,) if args.precision else figures.PRECISIONS,
            programs=names,
            tokens=args.tokens,
            warmup=figures.WARMUP if args.warmup is None else args.warmup,
            iterations=args.iterations or figures.ITERATIONS,
            seed=args.seed,
            interpreter=interpreter,
        )
        document["warmup"], document["iterations"] = settings.warmup, settings.iterations
        save(run_suite(place, settings, tell, save))
    return document


def chosen(given: list[str] | None) -> tuple[tuple[str, ...], str | None]:
    """Programs in order, and upstream's interpreter, from --peers.

    Raises:
        MokError: an unknown name.
    """
    from mok.tools.bench.published.programs import PEERS

    known = (*PEERS, "upstream")
    if not given:
        return (figures.OURS, *known), None
    names, interpreter = [figures.OURS], None
    for entry in (part for text in given for part in text.split(",") if part):
        name, _, path = entry.partition("=")
        if name == "none":
            continue
        if name not in known:
            raise MokError("a peer must be a known one", repr(name), f"Known: {', '.join(known)}")
        names.append(name)
        if name == "upstream" and path:
            interpreter = path
    return tuple(dict.fromkeys(names)), interpreter


@contextlib.contextmanager
def placed() -> Iterator[Any]:
    """This process among the ranks: those of torchrun, or alone.

    Raises:
        DeviceError: more ranks than GPUs.
    """
    import torch
    import torch.distributed as dist

    from mok.tools.bench.published.suite import Place
    from mok.tools.bench.published.upstream import free_port
    from mok.tools.bench.ranks import Rank

    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        os.environ["MASTER_PORT"] = str(free_port())
    local, gpus = int(os.environ.get("LOCAL_RANK", os.environ["RANK"])), torch.cuda.device_count()
    if local >= gpus:
        raise DeviceError(
            "each rank of a host needs a GPU of its own", f"{gpus} for rank {local} of this host",
            f"Use --nproc-per-node {gpus}",
        )  # fmt: skip
    rank = Rank()
    try:
        yield Place(
            rank.rank, rank.size, rank.device, rank.nccl, dist.group.WORLD, rank.group, rank
        )  # fmt: skip
    finally:
        rank.close()


def _sweep(
    args: argparse.Namespace, place: Any, models: tuple[str, ...], say: Callable[[str], None]
) -> dict[str, Any]:
    import torch

    from mok.runtime.group import Group
    from mok.tools.bench.published import sweeps
    from mok.tools.bench.published.accuracy import expected, expected_of_first
    from mok.tools.bench.published.share import layer_of, make_share
    from mok.tools.bench.published.suite import everyone

    warmup, iterations = SWEEP_ITERATIONS
    warmup = warmup if args.warmup is None else args.warmup
    alone = place.size == 1
    ep = SWEEP_VIRTUAL_RANKS if alone else place.size
    group = Group.virtual(ep, place.device) if alone else place.ours
    free = min(everyone(place, torch.cuda.mem_get_info(place.device)[0]))
    rows: list[dict[str, Any]] = []
    for model in models:
        layer = layer_of(model, args.tokens, ep, free // ep if alone else free)
        numbers = range(ep) if alone else [place.rank]
        shares = [make_share(layer, r, place.group, place.device, args.seed) for r in numbers]
        wanted = expected_of_first(shares) if alone else expected(shares[0], place.size)
        torch.cuda.empty_cache()
        for precision in (args.precision,) if args.precision else ("bf16",):
            rows += sweeps.run(
                shares, group, lambda value: everyone(place, value), _machine(place), precision,
                warmup, args.iterations or iterations, say, wanted,
            )  # fmt: skip
        del shares
        torch.cuda.empty_cache()
    found: dict[str, Any] = {"rows": rows, "virtual": alone, "ep": ep}
    if not alone:
        from mok.tools.bench.links.command import measure as measure_links

        found["links"] = measure_links(place.bench, say)
    return found


def _machine(place: Any) -> Any:
    """The simulator's machine of this GPU, or None."""
    import dataclasses

    import torch

    from mok.tools.simulator.machine import known_machines, load_machine

    name = torch.cuda.get_device_name(place.device).lower()
    known = [m for m in known_machines() if m in name]
    if not known:
        return None
    count = torch.cuda.get_device_properties(place.device).multi_processor_count
    return dataclasses.replace(load_machine(max(known, key=len)), num_sms=count)


def _charts(document: dict[str, Any], folder: Path) -> list[str]:
    """Pictures of the sweeps and of push against pull; why not, without matplotlib."""
    from mok.tools.bench.published import sweeps

    try:
        paths = sweeps.draw(document["rows"], folder, f"{document['device']}, EP {document['ep']}")
        if "links" in document:
            from mok.tools.bench.links.command import draw as draw_links

            paths.append(draw_links(document["links"], folder / "links.png"))
    except MissingDependencyError as error:
        return [f"none: {error}"]
    return [str(path) for path in paths]


def write(document: dict[str, Any], path: Path) -> None:
    """Write the document whole or not at all."""
    from mok.tools.bench.results import finite

    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".part")
    half.write_text(json.dumps(finite(document), indent=1, allow_nan=False) + "\n")
    half.replace(path)


def passed(document: dict[str, Any]) -> bool:
    """Ours was timed wherever a layer fits, and every program's output agrees with ours."""
    if document["suite"] == "sweep":
        return bool(document["rows"])
    ours = [r for r in document["rows"] if r["program"] == figures.OURS]
    failed = [m for m in document["missing"] if m["program"] == figures.OURS]
    return bool(ours) and not failed and all(r["ok"] for r in document["rows"])


def show(document: dict[str, Any], console: Console) -> None:
    """Rank 0's tables."""
    if document["rank"]:
        return
    console.print(f"{document['ranks']} × {document['device']}", highlight=False)
    if document["suite"] == "sweep":
        _show_sweep(document, console)
        return
    from mok.tools.bench.published.programs import TITLES

    table = Table(title="Milliseconds: median of the slowest rank", title_justify="left")
    for column in ("model", "precision", "pass", "program", "ms", "TFLOP/s", ""):
        table.add_column(column)
    for r in document["rows"]:
        table.add_row(
            r["model"], r["precision"], r["pass"], TITLES[r["program"]], f"{r['ms']:.3f}",
            f"{r['tflops']:.0f}", _verdict(r),
        )  # fmt: skip
    console.print(table)
    _show_accuracy(document, console)
    table = Table(
        title=f"Over the fastest peer (published: {document['published_with']['gpu']}, "
        f"EP {figures.EP}, upstream's kernel)",
        title_justify="left",
    )
    for column in ("model", "precision", "pass", "fastest peer", "here", "published",
                   "this model", "over upstream"):  # fmt: skip
        table.add_column(column)
    for e in document["speed_ups"]:
        table.add_row(
            e["model"], e["precision"], e["pass"],
            TITLES[e["fastest_peer"]] if e["fastest_peer"] else "none ran",
            _times(e["speed_up"]), _times(e["published"]), _times(e["published_model"]),
            _times(e["over_upstream"]),
        )  # fmt: skip
    console.print(table)
    for e in document["best"]:
        console.print(
            f"best {e['precision']} {e['pass']}: {_times(e['speed_up']) or 'no peer ran'}, "
            f"published {_times(e['published'])}"
        )
    said = set()
    for m in document["missing"]:
        title = TITLES.get(m["program"], m["program"])
        line = f"not run: {title} ({m.get('precision', '')}): {m['reason']}"
        if line not in said:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        said.add(line)


def _verdict(row: dict[str, Any]) -> str:
    if row["ok"]:
        return ""
    if row["program"] == figures.OURS:
        return "WRONG: too far from FP32"
    return f"WRONG: {row['error']:.1e} from ours"


def _show_accuracy(document: dict[str, Any], console: Console) -> None:
    from mok.tools.bench.published.programs import TITLES

    table = Table(title="Against FP32, worst rank: relative L2 error, cosine", title_justify="left")
    for column in ("model", "precision", "program", "output", "d_x"):
        table.add_column(column)
    for r in document["rows"]:
        if r["pass"] == figures.PASSES[0]:
            table.add_row(
                r["model"], r["precision"], TITLES[r["program"]], *_far(r["accuracy"])
            )  # fmt: skip
    console.print(table)


def _far(accuracy: dict[str, dict[str, float]] | None) -> list[str]:
    """Error and cosine of the output and of d_x, against FP32."""
    each = [(accuracy or {}).get(name) for name in ("output", "x")]
    return ["" if a is None else f"{a['error']:.1e} {a['cosine']:.5f}" for a in each]


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}×"


def _show_sweep(document: dict[str, Any], console: Console) -> None:
    kind = "virtual ranks, in turn" if document["virtual"] else "ranks"
    table = Table(title=f"EP {document['ep']}, {kind}", title_justify="left")
    for column in (
        "model",
        "precision",
        "tunable",
        "value",
        "pass",
        "ms",
        "predicted",
        "published",
        "output",
        "d_x",
    ):
        table.add_column(column)
    for r in document["rows"]:
        table.add_row(
            r["model"], r["precision"], r["tunable"], str(r["value"]), r["pass"], f"{r['ms']:.3f}",
            "" if r["model_ms"] is None else f"{r['model_ms']:.3f}",
            "" if r["published_ms"] is None else f"{r['published_ms']:.3f}",
            *_far(r["accuracy"]),
        )  # fmt: skip
    console.print(table)
    if "links" in document:
        from mok.tools.bench.links.command import show as show_links

        show_links(document["links"], console)
