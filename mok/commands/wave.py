"""``mok wave``: the two-wave rule for the minibatch, with the figures worked out."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from mok.config import CTA_TILE_M, GEMM_TILE_N, tile_rows, two_wave_minibatch
from mok.models import MACHINES, MODELS, get_machine, get_model

NAME = "wave"
HELP = "the two-wave rule for the minibatch of a model on a machine"

TILE_ELEMENTS = CTA_TILE_M * GEMM_TILE_N


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="kimi-k2.5", choices=MODELS)
    parser.add_argument("--machine", default="b200", choices=MACHINES)


def run(args: argparse.Namespace, progress: Console) -> dict[str, Any]:
    model, machine = get_model(args.model), get_machine(args.machine)
    tile = tile_rows(machine.arch)
    up_width, down_width = 2 * model.intermediate_size, model.hidden_size
    narrow = min(up_width, down_width)
    exact, rounded = two_wave_minibatch(model, machine.num_sms, tile)

    def row(minibatch: int) -> dict[str, Any]:
        waves = {
            phase: minibatch / CTA_TILE_M * width / GEMM_TILE_N / machine.num_sms
            for phase, width in (("gate_up", up_width), ("down", down_width))
        }
        bound = min(waves, key=lambda phase: waves[phase])
        config = {"minibatch_size": minibatch}
        return {"config": config, "ms": None, "bound": bound, "waves": waves}

    sizes = sorted({exact, rounded, 4096})
    return {
        "model": model.name,
        "machine": machine.name,
        "num_sms": machine.num_sms,
        "sms_from": machine.note,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "narrow": narrow,
        "tile": tile,
        "rows_per_sm_and_wave": TILE_ELEMENTS / narrow,
        "exact": exact,
        "rounded": rounded,
        "rows": [row(size) for size in sizes],
        "simpler": _simpler(TILE_ELEMENTS / narrow, machine.num_sms),
    }


def _simpler(rows_per_sm: float, num_sms: int) -> list[dict[str, Any]]:
    """What "SMs × r rows × 2" gives, with r whole: the next ones at and above the rule's r."""
    near = int(rows_per_sm)
    found = []
    for r in (near, near + 1):
        for sms in sorted({num_sms, 132, 148}):
            minibatch = sms * r * 2
            found.append({"num_sms": sms, "rows_per_sm_and_wave": r, "minibatch": minibatch})
    return found


def passed(document: dict[str, Any]) -> bool:
    return True


def show(document: dict[str, Any], console: Console) -> None:
    from rich.table import Table

    d = document
    c, h, i, narrow = d["num_sms"], d["hidden_size"], d["intermediate_size"], d["narrow"]
    per_sm = d["rows_per_sm_and_wave"]
    console.print(
        f"{d['model']} (H {h}, I {i}) on {d['machine']} ({c} SMs: {d['sms_from']})\n\n"
        "Two full waves of 128×256 tiles, in gate+up and in down:\n"
        "  minibatch ≥ 2·C·128·256 / min(2I, H)\n"
        f"            = 2·{c}·{TILE_ELEMENTS} / min({2 * i}, {h})\n"
        f"            = 2·{c}·{TILE_ELEMENTS} / {narrow} = {d['exact']}, "
        f"rounded up to tiles of {d['tile']} rows: {d['rounded']}\n",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(title="Waves of output tiles", title_justify="left")
    for column in ("minibatch", "gate+up", "down", "fewest in"):
        table.add_column(column, justify="right")
    for row in d["rows"]:
        waves = row["waves"]
        table.add_row(
            str(row["config"]["minibatch_size"]),
            f"{waves['gate_up']:.2f}",
            f"{waves['down']:.2f}",
            "gate+up" if row["bound"] == "gate_up" else "down",
        )
    console.print(table)
    console.print(
        f"\nPer SM and wave that is 128·256 / {narrow} = {per_sm:g} rows. Simpler formulas of the "
        "form SMs × rows × 2\nare this rule with that figure rounded to a whole number:",
        highlight=False,
        soft_wrap=True,
    )
    for s in d["simpler"]:
        r, sms, found = s["rows_per_sm_and_wave"], s["num_sms"], s["minibatch"]
        same = "the rule itself" if r == per_sm else f"{r / per_sm - 1:+.0%} rows per SM"
        at = "" if sms == c else ", for another GPU"
        console.print(
            f"  {sms} SMs × {r} × 2 = {found}  ({same}{at})", highlight=False, soft_wrap=True
        )
    if h == 7168 and i == 2048:
        console.print(
            "So 132 × 9 × 2 = 2376 is near 148 × 8 × 2 = 2368 by accident: it has too few SMs and "
            "one row too many.\nFor 132 SMs the rule gives 132 × 8 × 2 = 2112.",
            highlight=False,
            soft_wrap=True,
        )
