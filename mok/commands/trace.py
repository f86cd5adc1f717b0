"""``mok trace``: timelines as Perfetto JSON and as a picture."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from mok.commands import scenarios

NAME = "trace"
HELP = "a timeline of a call, simulated, emulated or run, as Perfetto JSON and PNG or SVG"
PLACES = ("simulator", "emulator", "hardware")


def configure(parser: argparse.ArgumentParser) -> None:
    scenarios.add_shape(parser)
    scenarios.add_config(parser)
    parser.add_argument("--pass", dest="direction", default="forward")
    parser.add_argument("--program", default="ours", choices=("ours", "upstream", "both"))
    parser.add_argument(
        "--on", nargs="+", choices=PLACES, default=[], metavar="PLACE",
        help="simulator (the default), emulator, hardware: one call, laid side by side",
    )  # fmt: skip
    parser.add_argument(
        "--emulated-sms", type=int, default=8, help="SMs of the emulated GPU (default 8)"
    )
    parser.add_argument(
        "--records", type=Path, nargs="+", default=[], metavar="FILE",
        help="show what kernels recorded, or earlier timelines (.json), instead of a simulation",
    )  # fmt: skip
    parser.add_argument(
        "--simulate", action="store_true", help="beside others, simulate too (--on simulator)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("mok_trace"), help="file name without ending"
    )
    parser.add_argument("--picture", default="png", choices=("png", "svg", "none"))


def run(args: argparse.Namespace, progress: Console) -> dict[str, Any]:
    from mok.errors import MokError
    from mok.runtime.trace import Trace, read_records
    from mok.tools.bench.results import make_folder
    from mok.tools.trace.perfetto import read_perfetto, write_perfetto

    if not args.out.name:
        raise MokError("--out must be a file name without its ending", repr(str(args.out)))
    make_folder(args.out.parent)
    traces: list[Trace] = []
    for path in args.records:
        if path.suffix == ".json":
            traces += read_perfetto(path)
            continue
        try:
            data = path.read_bytes()
        except OSError as error:
            raise MokError("records must be readable", f"{path}: {error.strerror}") from error
        traces.append(read_records(data, path.stem))
    places = set(args.on) | ({"simulator"} if args.simulate else set())
    traces += _of_a_call(args, places or ({"simulator"} if not traces else set()))
    files = [args.out.with_name(args.out.name + ".json")]
    try:
        write_perfetto(traces, files[0])
        if args.picture != "none":
            from mok.tools.trace.timeline import draw

            files.append(args.out.with_name(f"{args.out.name}.{args.picture}"))
            draw(traces, files[1])
    except OSError as error:
        raise MokError(
            "timelines must be writable", f"{files[-1]}: {error.strerror}",
            "Name another file with --out",
        ) from error  # fmt: skip
    return {
        "files": [str(f) for f in files],
        "traces": [
            {
                "source": t.source,
                "events": len(t.events),
                "lost": t.lost,
                "ms": t.seconds * 1e3,
                "sm_ms_by_kind": {kind: s * 1e3 for kind, s in sorted(t.totals().items())},
                "tasks_us": {
                    kind: {
                        name: value * 1e6 if isinstance(value, float) else value
                        for name, value in times._asdict().items()
                    }
                    for kind, times in t.tasks().items()
                },
            }
            for t in traces
        ],
    }


def _of_a_call(args: argparse.Namespace, places: set[str]) -> list[Any]:
    """Timelines of one call in each place, with the same tunables and the same ids."""
    import dataclasses

    from mok.commands.trace_run import ids_for, traced
    from mok.errors import MokError
    from mok.tools.simulator import recorded, simulate, timeline

    if not places:
        return []
    shape, machine = scenarios.shape_of(args), scenarios.machine_of(args)
    if args.direction == "all":
        raise MokError(
            "a timeline is of one pass", "--pass all", f"One of {', '.join(scenarios.PASSES)}"
        )
    (direction,) = scenarios.passes_of(args.direction)
    runs = places & {"emulator", "hardware"}
    if runs and args.precision != "bf16":
        raise MokError("a call that runs is traced in bf16", f"--precision {args.precision}")
    if "simulator" not in places and args.program != "ours":
        raise MokError(
            "only the simulator has upstream's program", f"--program {args.program}",
            "Add simulator to --on",
        )  # fmt: skip
    if (args.push is not None and runs) or (args.push and args.program == "upstream"):
        raise MokError(
            "--push is of our program, and of the simulator alone",
            f"--on {' '.join(sorted(places))}, --program {args.program}",
        )
    if "emulator" in places:
        # All of them on a GPU of that size, so that SM stands beside SM.
        machine = dataclasses.replace(machine, num_sms=args.emulated_sms)
    config = scenarios.configs_of(args, shape, machine)[0]
    found: list[Any] = []
    routing = None
    if runs:
        ids = ids_for(args.routing, shape)
        routing = recorded(ids, shape, args.routing)
        for place in PLACES[1:]:
            if place in places:
                found += traced(shape, config, machine, direction, place, ids)
    if "simulator" in places:
        if routing is None:
            routing = scenarios.routing_of(args, shape)
        else:
            args.virtual = True  # what runs here are ranks that share a GPU
        programs = ("ours", "upstream") if args.program == "both" else (args.program,)
        for program in programs:
            one = scenarios.scenario(args, shape, config, machine, routing, direction, program)
            found.append(timeline(simulate(one, record=True)))
    return found


def passed(document: dict[str, Any]) -> bool:
    return not any(t["lost"] for t in document["traces"])


def show(document: dict[str, Any], console: Console) -> None:
    for t in document["traces"]:
        lost = f", {t['lost']} records lost" if t["lost"] else ""
        console.print(
            f"{t['source']}: {t['events']} tasks, {t['ms']:.3f} ms{lost}", highlight=False
        )
        for kind, times in t["tasks_us"].items():
            period = times["period"]
            every = f", one in {period:.2f} µs of an SM" if period is not None else ""
            console.print(
                f"  {kind}: {times['tasks']}, begin to end {times['median']:.2f} µs "
                f"({times['p10']:.2f} to {times['p90']:.2f}){every}",
                highlight=False, soft_wrap=True,
            )  # fmt: skip
    for name in document["files"]:
        console.print(f"wrote {name}", highlight=False, soft_wrap=True)
