"""``mok bench``: this layer and its peers, timed in one run."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mok.errors import MissingDependencyError, MokError

if TYPE_CHECKING:
    from mok.backends import Backend
    from mok.tools.bench.runner import Entry, Settings
    from mok.tools.bench.shapes import BenchShape

NAME = "bench"
HELP = "time this layer and its peers in one run, and print ratios"

PASSES = ("forward", "backward", "both")
SUITES = ("default", "quick", "small", "unfitted", "cpu", "published", "sweep")
SWEEP_EP = 4


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", nargs="?", default="layer", choices=("layer", "links"),
        help="the layer, or the links between GPUs alone (under torchrun)",
    )  # fmt: skip
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--shape",
        action="append",
        metavar="T,H,I,E,K",
        help="a shape; repeatable, instead of a suite",
    )
    what.add_argument(
        "--suite", choices=SUITES,
        help="shapes with a name; by default the full list. published: the published comparison on "
        "all ranks; sweep: minibatch, comm SMs, push against pull",
    )  # fmt: skip
    what.add_argument("--quick", action="store_true", help="two shapes, two rounds, no phases")
    what.add_argument(
        "--ep", type=int, default=1, help="also ours on N virtual ranks, through the ring"
    )
    what.add_argument(
        "--passes", default="", help="of forward,backward,both (default forward,both)"
    )
    what.add_argument(
        "--routing", default="random", choices=("random", "skewed", "half"),
        help="uniform; a power law; one expert with half of all routes",
    )  # fmt: skip
    what.add_argument(
        "--precision", choices=("bf16", "mxfp8"),
        help="mxfp8: ours with experts in MXFP8 beside ours in BF16, and accuracy beside times. With "
        "--suite published or sweep: only this one",
    )  # fmt: skip
    what.add_argument(
        "--compact", action="store_true",
        help="also ours with less kept for backward (Config.compact)",
    )  # fmt: skip
    what.add_argument("--seed", type=int, default=0)
    peers = parser.add_argument_group("peers")
    peers.add_argument(
        "--peers", action="append", metavar="NAME[=PATH],…",
        help="of torch, sonic, flashinfer, upstream, cublas, or none; PATH: a folder to import it "
        "from, or upstream's Python interpreter. With --suite published of nccl-torch, deepep-torch, "
        "deepep-te, hybridep-megatron, upstream=PYTHON",
    )  # fmt: skip
    peers.add_argument(
        "--sonic-tune", action="store_true", help="let SonicMoE's own tuner run (minutes a shape)"
    )
    peers.add_argument(
        "--variants", type=int, default=3, help="known-good variants of a peer that are tried"
    )
    how = parser.add_argument_group("how")
    how.add_argument("--rounds", type=int, help="turns of each program (default 3)")
    how.add_argument("--warm-ms", type=float, help="run before each window (default 400)")
    how.add_argument("--run-ms", type=float, help="length of a window (default 300)")
    how.add_argument("--sets", type=int, default=2, help="input sets that calls take in turn")
    how.add_argument(
        "--budget-s", type=float, help="stop after so many seconds; says what was left out"
    )
    how.add_argument("--workers", type=int, help="processes that compile kernels at the start")
    how.add_argument("--no-phases", action="store_true", help="do not time the parts of our calls")
    sweep = parser.add_argument_group("sweeps")
    sweep.add_argument(
        "--sweep", metavar="TUNABLE",
        help="minibatch, macrobatch, comm_sms, fwd_num_comm_sms, …: each --shape, or a suite's first",
    )  # fmt: skip
    sweep.add_argument("--values", help="comma-separated, instead of the usual ones")
    from mok.tools.bench.published import command as published

    published.configure(parser)
    out = parser.add_argument_group("results")
    out.add_argument(
        "--out", metavar="FOLDER", help="write bench.json after every shape, bench.png last"
    )
    out.add_argument("--chart", metavar="FILE", help="write the bar chart (or sweep) here")
    out.add_argument("--against", metavar="FILE", help="compare with an earlier bench.json")
    out.add_argument(
        "--margin", type=float, default=0.03, help="fail when slower by more than this share"
    )


@dataclass
class Run:
    """A prepared run: where it runs, what it runs, and how it says so."""

    backend: Backend
    settings: Settings
    paths: dict[str, str]
    tunable: str
    say: Callable[[str], None]


def run(args: argparse.Namespace, progress: Console) -> dict[str, Any]:
    begin = time.perf_counter()

    def say(text: str) -> None:
        elapsed = time.perf_counter() - begin
        progress.print(f"[{elapsed:6.1f} s] {text}", markup=False, highlight=False, soft_wrap=True)

    from mok.tools.bench import ranks_command
    from mok.tools.bench.published import command as published

    check_numbers(args)
    if args.suite in published.SUITES:
        return published.run(args, say)
    if args.what == "links" or ranks_command.under_torchrun():
        return ranks_command.run(args, say)
    before = read_document(args.against) if args.against else None
    check_places(args)
    prepared = prepare(args, say)
    document = measure(args, prepared)
    if before is not None:
        document["against"] = against(document, before, args)
    finish(args, document)
    return document


def check_numbers(args: argparse.Namespace) -> None:
    """Raises MokError if an option that is a number is outside its limits."""
    least = {"ep": 1, "sets": 1, "rounds": 1, "variants": 1, "workers": 0}
    for name in (*least, "warm_ms", "run_ms", "budget_s", "margin"):
        value = getattr(args, name)
        # Times and the margin may be anything from 0 on; neither NaN nor infinite.
        if value is not None and not (least.get(name, 0) <= value < math.inf):
            option = f"--{name.replace('_', '-')}"
            raise MokError(f"{option} must be a number from {least.get(name, 0)} on", value)


CHARTS = (".png", ".svg", ".pdf")


def check_places(args: argparse.Namespace) -> None:
    """Raises MokError, before anything is timed, if results cannot be written where they should be."""
    from mok.tools.bench.results import make_folder

    if args.out:
        make_folder(Path(args.out))
    if args.chart:
        chart = Path(args.chart)
        if chart.suffix not in CHARTS:
            raise MokError(f"--chart must end in one of {', '.join(CHARTS)}", args.chart)
        make_folder(chart.parent)


def prepare(args: argparse.Namespace, say: Callable[[str], None]) -> Run:
    """Check the arguments and choose backend, shapes and programs."""
    import torch

    from mok.backends import choose_backend
    from mok.tools.bench.runner import Entry, Settings
    from mok.tools.bench.shapes import SUITES as KNOWN
    from mok.tools.bench.shapes import parse_shape
    from mok.tools.bench.timing import Regime

    backend = choose_backend()
    backend.announce(say)
    if args.shape:
        shapes = [parse_shape(text) for text in args.shape]
    else:
        name = args.suite or ("quick" if args.quick else "default")
        shapes = list(KNOWN[name if backend.on_gpu or args.suite else "cpu"])
    passes = tuple(args.passes.split(",")) if args.passes else ("forward", "both")
    for given in passes:
        if given not in PASSES:
            raise MokError(f"passes are of {', '.join(PASSES)}", repr(given))
    peers, paths = parse_peers(args.peers)
    tunable = ""
    if args.sweep:
        if args.precision == "mxfp8":
            raise MokError(
                "a sweep of one tunable is of the BF16 layer", "--precision mxfp8",
                "Leave it out, or use --suite sweep --precision mxfp8",
            )  # fmt: skip
        from mok.tools.bench.sweep import tunable_named

        tunable = tunable_named(args.sweep)
        if not args.shape:
            shapes = shapes[:1]  # of a suite
        entries = [e for s in shapes for e in sweep_entries(args, tunable, s, backend)]
        if args.peers:
            entries += [Entry(peer) for peer in peers]
    else:
        # The ceiling next to ours: it is what a short budget must not leave out.
        peers.sort(key=lambda name: name != "cublas")
        ours = ["mok"] + (["mok-mxfp8"] if args.precision == "mxfp8" else [])
        compact = ["mok-compact"] if args.compact else []
        on_ranks = [f"{name}-ep{args.ep}" for name in ours] if args.ep > 1 else []
        names = ours + compact + on_ranks + peers
        entries = [Entry(name) for name in names]
    settings = Settings(
        shapes=shapes,
        entries=entries,
        passes=passes,
        rounds=args.rounds or (2 if args.quick else 3),
        regime=Regime(**windows(args)),
        num_sets=args.sets,
        seed=args.seed,
        routing=args.routing,
        budget_s=args.budget_s,
        phases=not (args.no_phases or args.quick or tunable),
    )
    if not backend.on_gpu:
        torch.set_num_threads(1)  # small matrices: threads cost more than they give
    return Run(backend, settings, paths, tunable, say)


def windows(args: argparse.Namespace) -> dict[str, float]:
    """What is said about the length of windows, as keyword arguments."""
    given = {"warm_ms": args.warm_ms, "run_ms": args.run_ms}
    return {name: ms for name, ms in given.items() if ms is not None}


def parse_peers(given: list[str] | None) -> tuple[list[str], dict[str, str]]:
    """Names of peers and the paths of those that have one; cuBLAS is always among them.

    Raises:
        MokError: an unknown name.
    """
    from mok.tools.bench.programs import DEFAULT_PEERS, PROGRAMS

    if not given:
        return list(DEFAULT_PEERS), {}
    names: list[str] = []
    paths: dict[str, str] = {}
    for entry in (part for text in given for part in text.split(",") if part):
        name, _, path = entry.partition("=")
        if name == "none":
            continue
        if name not in PROGRAMS or name.startswith("mok"):
            known = ", ".join(p for p in PROGRAMS if not p.startswith("mok"))
            raise MokError("a peer must be a known one", repr(name), f"Known: {known}, none")
        if name not in names:
            names.append(name)
        if path:
            paths[name] = path
    return names + (["cublas"] if "cublas" not in names else []), paths


def sweep_entries(
    args: argparse.Namespace, tunable: str, bench: BenchShape, backend: Backend
) -> list[Entry]:
    """One entry per value of the tunable, on virtual ranks where it has no meaning at one rank."""
    import dataclasses

    from mok.config import Config, Shape
    from mok.tools.bench.runner import Entry
    from mok.tools.bench.sweep import default_values, sweep_configs

    if backend.info is None or backend.arch is None:
        raise MokError("a sweep needs a GPU with kernels", backend.name, "Run it where one is")
    full = bench.shape
    at_one_rank = tunable in ("schedule_capacity_multiplier", "pairs")
    ep = args.ep if args.ep > 1 or at_one_rank else SWEEP_EP
    tokens = -(-full.num_tokens // ep)
    shape: Shape = dataclasses.replace(full, num_tokens=tokens, ep_size=ep)
    base = Config.suggest(shape, backend.info)
    if args.values:
        values = tuple(float(v) if "." in v else int(v) for v in args.values.split(","))
    else:
        rows = tokens * full.topk + shape.max_local_experts * 128
        values = default_values(tunable, base, backend.arch, rows)
    name = f"mok-ep{ep}" if ep > 1 else "mok"
    return [
        Entry(name, config, text, bench) for text, config in sweep_configs(base, tunable, values)
    ]


def measure(args: argparse.Namespace, prepared: Run) -> dict[str, Any]:
    """Compile, run, and collect the document."""
    from mok.tools.bench import results
    from mok.tools.bench.programs import Options
    from mok.tools.bench.runner import Runner
    from mok.tools.bench.telemetry import open_telemetry
    from mok.tools.bench.timing import CudaClock, Deadline, HostClock
    from mok.tools.bench.versions import gpu_facts, today, versions

    backend, settings, say = prepared.backend, prepared.settings, prepared.say
    deadline = Deadline(settings.budget_s)
    device = backend.device
    clock = CudaClock(device) if backend.on_gpu else HostClock()
    if backend.on_gpu:
        compile_kernels(args, prepared)
    options = Options(
        clock=clock,
        paths=prepared.paths,
        sonic_tune=args.sonic_tune,
        variants=1 if args.quick else args.variants,
        reference=not backend.on_gpu,
        say=say,
    )
    facts = gpu_facts(device)
    document: dict[str, Any] = {
        "device": facts["name"],
        "gpu": facts,
        "backend": backend.name,
        "note": backend.note,
        "date": today(),
        "command": shlex.join(["mok", *sys.argv[1:]]),
        "versions": versions(list(dict.fromkeys(e.name for e in settings.entries))),
        "regime": {
            "warm_ms": settings.regime.warm_ms,
            "run_ms": settings.regime.run_ms,
            "rounds": settings.rounds,
            "sets": settings.num_sets,
            "seed": settings.seed,
            "routing": settings.routing,
        },
    }
    if prepared.tunable:
        document["sweep"] = {"tunable": prepared.tunable}
    with open_telemetry(device) as telemetry:
        document["telemetry"] = telemetry.name

        def save() -> None:
            document.update(
                rows=runner.rows,
                phases=runner.phases,
                missing=runner.missing,
                not_run=runner.not_run,
                bits=runner.bits,
                ratios=results.ratios(runner.rows),
            )
            document["means"] = results.geometric_means(document["ratios"])
            hopper = backend.on_gpu and backend.arch == "sm_90a"
            document["precisions"] = results.precisions(runner.rows, hopper)
            document["telemetry"] = telemetry.name
            if args.out:
                write_document(Path(args.out) / "bench.json", document)

        runner = Runner(
            settings, device, options, clock, telemetry, say=say, save=save, deadline=deadline
        )
        runner.run()
        save()
    return document


def compile_kernels(args: argparse.Namespace, prepared: Run) -> None:
    """Fill the compile cache with several processes at once."""
    from mok.tools.bench.programs.ours import ep_size_of, precision_of
    from mok.tools.bench.warm import Compilation, layer_specs

    assert prepared.backend.arch is not None
    trains = any(p != "forward" for p in prepared.settings.passes)
    shapes = [entry.shape for entry in prepared.settings.shapes]
    sizes = [(shape.hidden_size, shape.intermediate_size) for shape in shapes]
    pairs = {
        entry.config.pairs
        for entry in prepared.settings.entries
        if entry.config is not None and entry.config.pairs is not None
    }
    specs = []
    for name in (e.name for e in prepared.settings.entries if e.name.startswith("mok")):
        mxfp8 = precision_of(name) == "mxfp8"
        direct = ep_size_of(name) == 1 and not mxfp8
        specs += layer_specs(prepared.backend.arch, direct, trains, mxfp8, sizes, pairs)
    compilation = Compilation(list(dict.fromkeys(specs)), args.workers)
    if compilation.processes:
        prepared.say(f"compiling our kernels in {len(compilation.processes)} processes")
        for failure in compilation.wait():
            prepared.say(
                f"  a process failed, its kernels are compiled at their first use: {failure}"
            )
        prepared.say("compiled")


def against(
    document: dict[str, Any], before: dict[str, Any], args: argparse.Namespace
) -> dict[str, Any]:
    """Our rows against an earlier document's."""
    from mok.tools.bench import results

    return {
        "file": str(args.against),
        "date": before.get("date", "date unknown"),
        "device": before.get("device", "device unknown"),
        "margin": args.margin,
        "rows": results.compare(document["rows"], before["rows"], args.margin),
    }


def read_document(path: str) -> dict[str, Any]:
    """An earlier run's document.

    Raises:
        MokError: no such file, or not one of ours.
    """
    try:
        found = json.loads(Path(path).read_text())
        if isinstance(found["rows"], list):
            return dict(found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MokError(
            "--against needs a document that mok bench wrote", f"{path}: {error}",
            "Write one with mok bench --out FOLDER or --json",
        ) from error  # fmt: skip
    raise MokError("--against needs a document that mok bench wrote", f"{path}: rows is no list")


def write_document(path: Path, document: dict[str, Any]) -> None:
    """Write the document whole or not at all."""
    from mok.tools.bench.results import finite

    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".part")
    half.write_text(json.dumps(finite(document), indent=1, allow_nan=False))
    half.replace(path)


def finish(args: argparse.Namespace, document: dict[str, Any]) -> None:
    """Write the chart and the last state of the document."""
    from mok.tools.bench.charts import bar_chart, sweep_chart

    chart = args.chart or (str(Path(args.out) / "bench.png") if args.out else "")
    if chart and document["rows"]:
        draw = sweep_chart if "sweep" in document else bar_chart
        try:
            document["chart"] = str(draw(document, Path(chart)))
        except MissingDependencyError as error:
            if args.chart:  # asked for by name
                raise
            document["chart"] = f"none: {error}"
    if args.out:
        write_document(Path(args.out) / "bench.json", document)


def passed(document: dict[str, Any]) -> bool:
    """Ours ran, is right, has the same bits everywhere, and is no slower than the run before;
    MXFP8, where asked for, ran, and on Hopper has its share of BF16's speed."""
    if "suite" in document:
        from mok.tools.bench.published import command as published

        return published.passed(document)
    if "ranks" in document:
        from mok.tools.bench import ranks_command

        return ranks_command.passed(document)
    ours = [r for r in document["rows"] if r["program"].startswith("mok")]
    right = bool(ours) and all(r["ok"] for r in ours)
    same = all(entry["ok"] for entry in document["bits"])
    earlier = document.get("against")
    fast = earlier is None or (bool(earlier["rows"]) and all(r["ok"] for r in earlier["rows"]))
    near = all(entry["ok"] for entry in document["precisions"])
    near = near and not any(m["program"].startswith("mok-mxfp8") for m in document["missing"])
    return right and same and fast and near


def show(document: dict[str, Any], console: Console) -> None:
    if "suite" in document:
        from mok.tools.bench.published import command as published

        published.show(document, console)
        return
    if "ranks" in document:
        from mok.tools.bench import ranks_command

        ranks_command.show(document, console)
        return
    from mok.tools.bench.tables import document_tables, wide

    wide(console).print(document_tables(document))
