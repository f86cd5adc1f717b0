"""``mok bench --suite sweep``: minibatch and comm SMs, measured beside predicted, and push against pull.

Under torchrun over the real links; in one process with virtual ranks, which run one after another (the
prediction then is of that, too).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from mok.config import Config, tile_rows
from mok.errors import MokError
from mok.tools.bench.published import figures, programs
from mok.tools.bench.published.accuracy import Expected, everyones_worst
from mok.tools.bench.published.iterations import measure
from mok.tools.bench.published.share import Layer, Share

MINIBATCHES = (512, 1024, 1536, 2048, 2560, 3072, 3584, 4096)
COMM_SMS = (4, 8, 16, 24, 36, 52)
PUBLISHED_MS = dict(
    zip(MINIBATCHES, (5.981, 4.669, 3.981, 3.666, 3.425, 3.447, 3.524, 3.473), strict=True)
)
"""Upstream's forward pass of Kimi K2.5 by minibatch, GB300, EP 64, as its authors published it."""


def configs(base: Config, arch: str, num_sms: int) -> list[tuple[str, int, Config]]:
    """(tunable, value, configuration) of both sweeps; the ring keeps its rows as near as it can."""
    found = []
    tile = tile_rows(arch)
    for value in MINIBATCHES:
        if value % tile == 0:
            ring = max(1, round(base.macrobatch_size / value)) * value
            found.append(
                ("minibatch_size", value,
                 dataclasses.replace(base, minibatch_size=value, macrobatch_size=ring))
            )  # fmt: skip
    for value in COMM_SMS:
        if value <= num_sms // 2:
            changed = dataclasses.replace(base, fwd_num_comm_sms=value, bwd_num_comm_sms=value)
            found.append(("comm_sms", value, changed))
    return found


def run(
    shares: Sequence[Share],
    group: Any,
    gather: Callable[[Any], list[Any]],
    machine: Any,
    precision: str,
    warmup: int,
    iterations: int,
    say: Callable[[str], None],
    wanted: Expected | None = None,
) -> list[dict[str, Any]]:
    """Rows of both sweeps: tunable, value, pass, ms, spread, accuracy, and the simulator's "model_ms".

    Args:
        shares: of this process' ranks: one, or all virtual ones.
        gather: a value of every process.
        machine: of the simulator, or None where the GPU is none that it knows.
        wanted: what the first of ``shares`` should give; None: rows have no accuracy.
    """
    first = shares[0]
    shape = programs.shape_of(first.layer)
    arch, num_sms = _arch(first)
    rows = []
    base = Config.suggest(shape, first.device, precision)
    for tunable, value, config in configs(base, arch, num_sms):
        text = f"{first.layer.model} {precision} {tunable} {value}"
        try:
            program = programs.Ours(list(shares), precision, group, config)
        except MokError as error:
            say(f"{text}: {error}")
            continue
        try:
            far = None
            if wanted is not None:
                found = program.forward(), program.backward()[0]
                d_x = found[1] if isinstance(found[1], Tensor) else found[1][0]
                far = everyones_worst(gather(wanted.matches(found[0], d_x)))
            times = gather(measure(program, warmup, iterations, first.device))
        finally:
            program.close()
        for pass_name in figures.PASSES:
            summary = figures.summary([t[pass_name] for t in times])
            rows.append(
                {
                    "model": first.layer.model, "precision": precision, "tunable": tunable,
                    "value": value, "pass": pass_name, "accuracy": far, **summary,
                    "model_ms": predicted(
                        machine, first.layer, config, pass_name, precision, len(shares) > 1
                    ),
                    "published_ms": _published(first.layer, tunable, value, pass_name, precision),
                    "config": dataclasses.asdict(config),
                }
            )  # fmt: skip
            say(f"{text} {pass_name}: {rows[-1]['ms']:.3f} ms, predicted {rows[-1]['model_ms']}")
    return rows


def _arch(share: Share) -> tuple[str, int]:
    from mok.runtime.device import device_info

    info = device_info(share.device)
    return str(info.arch), info.num_sms


def _published(
    layer: Layer, tunable: str, value: int, pass_name: str, precision: str
) -> float | None:
    """Upstream's published time; what T, EP and precision it is of, they do not say.

    MXFP8 as the simulator's record of that sweep assumes (``records.toml``), with which its times are explained.
    """
    same = (layer.model, tunable, pass_name, precision) == (
        "kimi-k2.5", "minibatch_size", "forward", "mxfp8",
    )  # fmt: skip
    return PUBLISHED_MS.get(value) if same else None


def predicted(
    machine: Any, layer: Layer, config: Config, pass_name: str, precision: str, virtual: bool
) -> float | None:
    """The simulator's milliseconds, None where it knows no such machine or cannot run it there."""
    if machine is None:
        return None
    from mok.tools.simulator import Scenario, simulate
    from mok.tools.simulator.benched import virtual_ms

    try:
        scenario = Scenario(
            programs.shape_of(layer), config, machine, pass_name, precision,  # type: ignore[arg-type]
            virtual=virtual, save_context=pass_name == "forward",
        )  # fmt: skip
        return virtual_ms(scenario) if virtual else float(simulate(scenario).ms)
    except MokError:
        return None


def draw(rows: Sequence[dict[str, Any]], folder: Path, title: str) -> list[Path]:
    """One picture per tunable: measured and predicted milliseconds over its values.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    from mok.tools.bench.charts import lines

    paths = []
    for tunable in dict.fromkeys(r["tunable"] for r in rows):
        series: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if row["tunable"] != tunable:
                continue
            name = f"{row['model']} {row['precision']} {row['pass']}"
            for key, suffix in (("ms", ""), ("model_ms", ", predicted"),
                                ("published_ms", ", published")):  # fmt: skip
                if row[key] is not None:
                    series.setdefault(name + suffix, []).append((row["value"], row[key]))
        path = folder / f"sweep-{tunable.replace('_', '-')}.png"
        paths.append(lines(series, path, x=tunable, y="ms", title=title))
    return paths
