"""``mok simulate``: what the model of the machine says a call takes, and why."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

from rich.console import Console

from mok.commands import scenarios
from mok.errors import MokError

NAME = "simulate"
HELP = "predict a call's time on a machine that need not be here"


def configure(parser: argparse.ArgumentParser) -> None:
    scenarios.add_shape(parser)
    scenarios.add_config(parser)
    parser.add_argument("--pass", dest="direction", default="forward", help="or backward, all, …")
    parser.add_argument("--program", default="ours", choices=("ours", "upstream", "both"))
    parser.add_argument(
        "--gains", action="store_true", help="what each difference from upstream's program gains"
    )
    parser.add_argument(
        "--push-pull", action="store_true", help="signalling and link use of pushing and pulling"
    )
    parser.add_argument(
        "--compare", action="store_true", help="predict all recorded measurements instead"
    )
    parser.add_argument(
        "--bench", metavar="FILE", help="predict the times of ours in a bench.json of mok bench"
    )
    parser.add_argument("--constants", action="store_true", help="show every constant's source")


def run(args: argparse.Namespace, progress: Console) -> dict[str, Any]:
    from mok.tools.simulator import simulate
    from mok.tools.simulator.compare import compare, gains
    from mok.tools.simulator.sources import constants_of

    if args.compare:
        return {"rows": [], "comparisons": compare(progress.print)}
    if args.bench:
        from mok.tools.simulator.benched import compare_bench, read, summary

        benched = compare_bench(read(args.bench))
        return {"rows": [], "benched": benched, "summary": summary(benched)}
    if args.push and args.program == "upstream":
        raise MokError("--push is of our program", f"--program {args.program}")
    shape, machine = scenarios.shape_of(args), scenarios.machine_of(args)
    routing = scenarios.routing_of(args, shape)
    configs = scenarios.configs_of(args, shape, machine)
    programs = ("ours", "upstream") if args.program == "both" else (args.program,)
    rows: list[dict[str, Any]] = []
    first = None
    for config in configs:
        for direction in scenarios.passes_of(args.direction):
            for program in programs:
                if program == "upstream" and direction == "recompute":
                    continue
                found = simulate(
                    scenarios.scenario(args, shape, config, machine, routing, direction, program)
                )
                first = first or found
                from mok.tools.simulator.plan import tunables

                row = {"config": tunables(config), "pass": direction, "program": program}
                rows.append(row | {"push": found.scenario.pushes} | found.as_dict())
    assert first is not None
    document = scenarios.described(shape, machine, routing)
    document |= {"precision": args.precision, "virtual": args.virtual, "rows": rows}
    if args.gains:
        document["gains"] = gains(first.scenario)
    if args.push_pull:
        document["push_pull"] = _push_pull(first.scenario)
    constants = constants_of(first.scenario, programs)
    document["constants"] = constants
    document["constants_by_kind"] = dict(Counter(c["kind"] for c in constants))
    document["show_constants"] = args.constants
    return document


HOT = (1.0, 1.1, 1.2, 1.3, 1.5, 2.0, 3.0)
LINK_RANKS = 8


def _push_pull(scenario: Any) -> dict[str, Any]:
    import dataclasses

    from mok.tools.simulator.links import imbalance_gain, signalling

    machine = scenario.machine
    upstream = dataclasses.replace(scenario, program="upstream", direction="forward", push=False)
    return {
        "signalling_us": {name: s * 1e6 for name, s in signalling(upstream).items()},
        "ranks": LINK_RANKS,
        "pull_gain": [
            {"hot": hot, "gain": imbalance_gain(machine, LINK_RANKS, hot)} for hot in HOT
        ],
    }


def passed(document: dict[str, Any]) -> bool:
    benched = document.get("summary", {"ok": True})
    return bool(benched["ok"]) and all(c["ok"] for c in document.get("comparisons", []))


def show(document: dict[str, Any], console: Console) -> None:
    from rich.table import Table

    if "comparisons" in document:
        _show_comparisons(document["comparisons"], console)
        return
    if "benched" in document:
        _show_benched(document, console)
        return
    d = document
    shape = ", ".join(f"{name} {value}" for name, value in d["shape"].items() if value is not None)
    push = scenarios.pushed(row["pass"] for row in d["rows"] if row["push"])
    console.print(f"{d['machine_title']}\n{shape}, {d['precision']}, {d['routing']} routing{push}\n",
                  highlight=False, soft_wrap=True)  # fmt: skip
    table = Table(title="Predicted", title_justify="left")
    for column in ("pass", "program", "minibatch", "ring", "comm SMs", "ms", "kernel", "TFLOP/s"):
        table.add_column(column, justify="right")
    table.add_column("bound")
    for row in d["rows"]:
        c = row["config"]
        comm = c["bwd_num_comm_sms" if row["pass"] == "backward" else "fwd_num_comm_sms"]
        table.add_row(
            row["pass"], row["program"], str(c["minibatch_size"]), str(c["macrobatch_size"]),
            str(comm), f"{row['ms']:.3f}", f"{row['kernel_ms']:.3f}", f"{row['tflops']:.0f}",
            row["bound"],
        )  # fmt: skip
    console.print(table)
    row = d["rows"][0]
    for title, values, unit in (
        ("phases", row["phases"], "ms"),
        ("least kernel time by resource", row["bounds"], "ms"),
        ("compute SMs", {k: 100 * v for k, v in row["shares"].items() if v > 0.002}, "%"),
    ):
        parts = ", ".join(f"{name} {value:.3g} {unit}" for name, value in values.items())
        console.print(f"{title}: {parts}", highlight=False, soft_wrap=True)
    if d.get("gains"):
        _show_gains(d["gains"], console)
    if d.get("push_pull"):
        found = d["push_pull"]
        us = ", ".join(f"{name} {value:.1f} us" for name, value in found["signalling_us"].items())
        gains = ", ".join(f"{g['hot']:g}: {g['gain']:+.1%}" for g in found["pull_gain"])
        console.print(f"signalling: {us}", highlight=False, soft_wrap=True)
        console.print(
            f"link use of pull over push, {found['ranks']} ranks, by the share of the fullest: {gains}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    kinds = ", ".join(f"{n} {kind}" for kind, n in d["constants_by_kind"].items())
    console.print(f"constants: {kinds} (--constants lists them)", highlight=False, soft_wrap=True)
    if d["show_constants"]:
        _show_constants(d["constants"], console)


def _show_comparisons(rows: list[dict[str, Any]], console: Console) -> None:
    from rich.table import Table

    table = Table(title="Recorded times and the model's", title_justify="left")
    for column in ("record", "known by", "ms", "model", "error", "limit", "use"):
        table.add_column(column, justify="left" if column in ("record", "use") else "right")
    for row in rows:
        style = None if row["ok"] else "red"
        limit = f"{row['limit']:.0%}" if row["limit"] else ""
        table.add_row(
            row["name"], row["kind"], f"{row['ms']:.3f}", f"{row['model_ms']:.3f}",
            f"{row['error']:+.1%}", limit, row["use"], style=style,
        )  # fmt: skip
    console.print(table)


def _show_benched(document: dict[str, Any], console: Console) -> None:
    from rich.table import Table

    table = Table(title="Measured times of ours and the model's", title_justify="left")
    for column in ("shape", "EP", "pass", "ms", "model", "error", "use"):
        table.add_column(column, justify="left" if column in ("shape", "use") else "right")
    for row in document["benched"]:
        table.add_row(
            row["name"], str(row["ep"]), row["pass"], f"{row['ms']:.3f}",
            f"{row['model_ms']:.3f}", f"{row['error']:+.1%}", row["use"],
        )  # fmt: skip
    console.print(table)
    s = document["summary"]
    if s["times"]:
        console.print(
            f"not fitted: {s['times']} times of {s['shapes']} shapes, median error "
            f"{s['median']:.1%}, worst {s['worst']:.1%}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    if s["unsteady"]:
        console.print(
            f"left out: {s['unsteady']} unsteady (calls of one window differ by more than half of their median)",
            highlight=False, soft_wrap=True,
        )  # fmt: skip


def _show_gains(rows: list[dict[str, Any]], console: Console) -> None:
    from rich.table import Table

    table = Table(title="From upstream's program to ours", title_justify="left")
    for column in ("program", "ms", "faster than upstream"):
        table.add_column(column, justify="left" if column == "program" else "right")
    for row in rows:
        table.add_row(row["program"], f"{row['ms']:.3f}", f"{row['gain']:.1%}")
    console.print(table)


def _show_constants(rows: list[dict[str, Any]], console: Console) -> None:
    from rich.table import Table

    table = Table(title="Constants", title_justify="left")
    for column in ("of", "name", "value", "known by", "source"):
        table.add_column(column)
    for c in rows:
        table.add_row(c["of"], c["name"], f"{c['value']:g}", c["kind"], c["source"])
    console.print(table)
