"""``mok plan``: memory, predicted time and tunables for a model on a machine."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from mok.commands import scenarios
from mok.errors import MokError

NAME = "plan"
HELP = "memory, predicted times, and tunables for a model on a machine"


def configure(parser: argparse.ArgumentParser) -> None:
    scenarios.add_shape(parser)
    parser.add_argument("--rounds", type=int, default=2, help="of the search (default 2)")
    parser.add_argument(
        "--measured",
        metavar="FILE",
        help="compare with a file of mok tune --exhaustive instead: of the combinations timed there, how "
        "fast is the one that the model chooses",
    )


def run(args: argparse.Namespace, progress: Console) -> dict[str, Any]:
    from mok.tools.simulator.plan import as_dict, plan

    if args.measured:
        from mok.tools.simulator.measured import REACHED, compare_grid

        rows = compare_grid(args.measured)
        return {"measured": args.measured, "promised": REACHED, "rows": rows}
    if args.rounds < 0:
        raise MokError("--rounds must be at least 0", args.rounds)
    shape, machine = scenarios.shape_of(args), scenarios.machine_of(args)
    routing = scenarios.routing_of(args, shape)
    found = plan(
        shape,
        machine,
        args.precision,
        routing,
        args.rounds,
        args.virtual,
        progress.print,
        args.push,
    )
    document = scenarios.described(shape, machine, routing)
    document |= {"precision": args.precision, "memory_limit": machine["memory_bytes"]}
    best = {"forward": found.best.forward, "backward": found.best.backward}
    document["push"] = {name: result.scenario.pushes for name, result in best.items()}
    return document | as_dict(found)


def passed(document: dict[str, Any]) -> bool:
    if "measured" in document:
        return all(row["reached"] >= document["promised"] for row in document["rows"])
    return bool(document["fits"])


def show(document: dict[str, Any], console: Console) -> None:
    from rich.table import Table

    if "measured" in document:
        from mok.tools.simulator.measured import show_cases

        show_cases(document["rows"], console)
        return
    d = document
    shape = ", ".join(f"{name} {value}" for name, value in d["shape"].items() if value is not None)
    push = scenarios.pushed(name for name, pushes in d["push"].items() if pushes)
    console.print(f"{d['machine_title']}\n{shape}, {d['precision']}, {d['routing']} routing{push}\n",
                  highlight=False, soft_wrap=True)  # fmt: skip
    table = Table(title=f"Tunables, after {d['simulated']} simulations", title_justify="left")
    for column in ("", "minibatch", "macrobatch", "fwd comm", "bwd comm", "forward", "backward"):
        table.add_column(column, justify="right")
    table.add_column("bound")
    for row in d["rows"]:
        c = row["config"]
        table.add_row(
            row["name"], str(c["minibatch_size"]), str(c["macrobatch_size"]),
            str(c["fwd_num_comm_sms"]), str(c["bwd_num_comm_sms"]),
            f"{row['forward']['ms']:.3f}", f"{row['backward']['ms']:.3f}", row["bound"],
        )  # fmt: skip
    console.print(table)
    best = d["rows"][0]
    for name in ("forward", "backward"):
        phases = ", ".join(f"{n} {ms:.3g}" for n, ms in best[name]["phases"].items())
        console.print(f"{name}, ms: {phases}", highlight=False, soft_wrap=True)
    table = Table(title="If one tunable changes", title_justify="left")
    for column in ("tunable", "value", "forward ms", "backward ms"):
        table.add_column(column, justify="left" if column == "tunable" else "right")
    for name, rows in d["sensitivity"].items():
        for row in rows:
            table.add_row(name, str(row["value"]), f"{row['forward_ms']:.3f}",
                          f"{row['backward_ms']:.3f}")  # fmt: skip
    console.print(table)
    console.print("schedule_capacity_multiplier: no effect on the time; it only caps the grid",
                  highlight=False, soft_wrap=True)  # fmt: skip
    table = Table(title="Memory of a rank", title_justify="left")
    table.add_column("for")
    table.add_column("MiB", justify="right")
    for name, size in d["memory"].items():
        table.add_row(name, f"{size / 2**20:.0f}")
    table.add_row("total", f"{d['memory_total'] / 2**20:.0f}")
    console.print(table)
    verdict = "fits" if d["fits"] else "does not fit"
    console.print(f"{verdict} the GPU's {d['memory_limit'] / 2**30:.0f} GiB", highlight=False)
