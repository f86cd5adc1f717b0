"""Searching the tunables of a shape on a device, and remembering what was found.

Tunables never change a bit of any result, so a remembered setting is only ever a matter of speed.
Results lie in ``tune.json`` in the cache folder (``MOK_CACHE_DIR``, else ``~/.cache/mok``), one per
device and shape; ``Config.suggest`` uses them for a real device. Importing this needs no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import secrets
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mok.config import Config, Shape, tile_rows
from mok.errors import MokError

TUNABLES = (
    "fwd_num_comm_sms",
    "bwd_num_comm_sms",
    "minibatch_size",
    "macrobatch_size",
    "schedule_capacity_multiplier",
    "pairs",  # the choice of tiles: Hopper's two CTAs together on 256 rows, or each alone on 128
)
FORMAT = 1
GAIN = 0.005
"""A candidate replaces the incumbent only if it is faster by more than this share."""

# ---------------------------------------------------------------------- the search


@dataclass(frozen=True)
class Trial:
    """One candidate.

    Attributes:
        ms: its time; None where it cannot run, and ``note`` says why.
        ratio: the same relative to the incumbent of the moment: below 1 is faster.
    """

    config: Config
    ms: float | None
    ratio: float
    note: str = ""


@dataclass
class Search:
    """What a search found.

    Attributes:
        start: where it began.
        best: the fastest configuration.
        ratio: its time relative to the start's, the product of the steps that led there.
        trials: every candidate in order.
        finished: False if the budget ended it.
    """

    start: Config
    best: Config
    ratio: float = 1.0
    trials: list[Trial] = field(default_factory=list)
    finished: bool = False


Evaluate = Callable[[Config, Config], tuple[float, float]]
"""(candidate, incumbent) → milliseconds of both, measured in turns."""


def candidates(
    tunable: str, config: Config, shape: Shape, num_sms: int, arch: str
) -> Iterator[Config]:
    """Neighbours of a configuration along one tunable, near ones first.

    Communicating SMs matter only where ranks communicate, pairs only on Hopper.
    """
    tile = tile_rows(arch)
    change = dataclasses.replace
    if tunable in ("fwd_num_comm_sms", "bwd_num_comm_sms"):
        if shape.ep_size == 1:
            return
        now = getattr(config, tunable)
        for factor in (0.75, 1.25, 0.5, 1.5, 2.0, 0.25):
            value = max(2, 2 * round(now * factor / 2))
            if value != now and value <= num_sms // 2:
                yield change(config, **{tunable: value})
    elif tunable == "minibatch_size":
        ring = config.macrobatch_size
        for factor in (0.75, 1.5, 0.5, 2.0, 0.25, 4.0):
            value = max(tile, round(config.minibatch_size * factor / tile) * tile)
            if value != config.minibatch_size:
                slots = max(1, -(-ring // value))
                yield change(config, minibatch_size=value, macrobatch_size=slots * value)
    elif tunable == "macrobatch_size":
        slots = config.macrobatch_size // config.minibatch_size
        for wanted in (slots // 2, 2 * slots, slots // 4, 4 * slots):
            if wanted >= 1 and wanted != slots:
                yield change(config, macrobatch_size=wanted * config.minibatch_size)
    elif tunable == "schedule_capacity_multiplier":
        for value in (0.25, 0.5, 1.0):
            if value != config.schedule_capacity_multiplier:
                yield change(config, schedule_capacity_multiplier=value)
    elif tunable == "pairs":
        from mok.kernels_cute.machine import pays_backward, works_in_pairs

        def builds(pairs: bool | None) -> list[bool]:  # of forward and backward
            able = [
                works_in_pairs(arch, num_sms, config.reserved_sms, comm if shape.ep_size > 1 else 0)
                for comm in (config.fwd_num_comm_sms, config.bwd_num_comm_sms)
            ]
            pays = [True, pays_backward(shape.hidden_size, shape.intermediate_size)]
            return [a and (p if pairs is None else pairs) for a, p in zip(able, pays, strict=True)]

        for together in (True, False):  # one value for both directions
            if builds(together) != builds(config.pairs):
                yield change(config, pairs=together)
    else:
        raise MokError("the tunable must be a known one", repr(tunable), f"Known: {TUNABLES}")


def search(
    start: Config,
    shape: Shape,
    num_sms: int,
    arch: str,
    evaluate: Evaluate,
    *,
    over: Callable[[], bool] = lambda: False,
    on_trial: Callable[[Search], None] = lambda _: None,
    tunables: Sequence[str] = TUNABLES,
) -> Search:
    """Coordinate descent: along each tunable take the fastest neighbour, until none is faster.

    Args:
        evaluate: may raise MokError where a candidate is impossible.
        over: whether the budget is used up; asked before each trial.
        on_trial: called after each trial.
    """
    found = Search(start, start)
    seen = {start}
    moved = True
    while moved:
        moved = False
        for tunable in tunables:
            step, step_ratio = None, 1 - GAIN
            for candidate in candidates(tunable, found.best, shape, num_sms, arch):
                if candidate in seen:
                    continue
                if over():
                    return _take(found, step, step_ratio)
                seen.add(candidate)
                trial = _try(candidate, found.best, evaluate)
                found.trials.append(trial)
                if trial.ratio < step_ratio:
                    step, step_ratio = candidate, trial.ratio
                on_trial(found)
            if step is not None:
                _take(found, step, step_ratio)
                moved = True
    found.finished = True
    return found


def _try(candidate: Config, incumbent: Config, evaluate: Evaluate) -> Trial:
    try:
        ms, incumbent_ms = evaluate(candidate, incumbent)
        return Trial(candidate, ms, ms / incumbent_ms)
    except BitsDiffer:
        raise
    except MokError as error:  # does not fit this shape or this GPU
        return Trial(candidate, None, math.inf, str(error))


def _take(found: Search, step: Config | None, ratio: float) -> Search:
    if step is not None:
        found.best = step
        found.ratio *= ratio
    return found


class BitsDiffer(MokError):
    """Two settings of the tunables gave different results: a bug, never a matter of tuning."""


# ---------------------------------------------------------------------- the memory


@dataclass(frozen=True)
class Device:
    """What a result holds for.

    Attributes:
        name: of the GPU.
        virtual: ranks share the GPU, so that their communication is local: not the same question as
            ranks on GPUs of their own, whose results ``Config.suggest`` looks for.
    """

    name: str
    num_sms: int
    arch: str
    virtual: bool = False


def key_of(shape: Shape, device: Device) -> str:
    """What a result is remembered under."""
    from mok.kernels_cute.machine import forward_pushes

    sizes = {
        "T": shape.num_tokens,
        "H": shape.hidden_size,
        "I": shape.intermediate_size,
        "E": shape.num_experts,
        "K": shape.topk,
        "EP": shape.ep_size,
        "shared": shape.shared_intermediate_size or 0,
    }
    parts = [device.name, f"{device.num_sms} SMs", device.arch]
    if device.virtual and shape.ep_size > 1:
        parts.append("virtual ranks")
    if forward_pushes(device.arch, shape.ep_size == 1):
        parts.append("forward pushes")  # what was found before it did, wanted more comm SMs
    return "; ".join([*parts, *(f"{name} {size}" for name, size in sizes.items())])


def cache_path() -> Path:
    """Where results are kept."""
    from mok.runtime.cache import default_folder

    return default_folder() / "tune.json"


def lookup(shape: Shape, device: Device, path: Path | None = None) -> dict[str, Any] | None:
    """The tunables remembered for a shape on a device, or None. A damaged file counts as empty."""
    entry = _read(path or cache_path()).get(key_of(shape, device))
    if not isinstance(entry, dict) or not isinstance(entry.get("config"), dict):
        return None
    return {name: value for name, value in entry["config"].items() if name in TUNABLES}


def apply(base: Config, shape: Shape, device: Device, path: Path | None = None) -> Config:
    """``base`` with the remembered tunables, or ``base`` where there are none that still hold."""
    found = lookup(shape, device, path)
    if not found:
        return base
    try:
        return dataclasses.replace(base, **found)
    except (MokError, TypeError):
        return base


def record(
    shape: Shape, device: Device, config: Config, facts: dict[str, Any], path: Path | None = None
) -> Path | None:
    """Remember a configuration; None (and a warning) where the file cannot be written.

    Args:
        facts: what else to keep, such as date and milliseconds.
    """
    path = path or cache_path()
    entries = _read(path)
    values = {name: getattr(config, name) for name in TUNABLES}
    entries[key_of(shape, device)] = {**facts, "config": values}
    half = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        half.write_text(json.dumps({"format": FORMAT, "entries": entries}, indent=1))
        half.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            half.unlink()
        warnings.warn(f"tuning results are not kept: {error}", RuntimeWarning, stacklevel=2)
        return None
    return path


def forget(shape: Shape, device: Device, path: Path | None = None) -> bool:
    """Forget the result of a shape; whether there was one."""
    path = path or cache_path()
    entries = _read(path)
    if entries.pop(key_of(shape, device), None) is None:
        return False
    path.write_text(json.dumps({"format": FORMAT, "entries": entries}, indent=1))
    return True


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
        if found["format"] == FORMAT and isinstance(found["entries"], dict):
            return dict(found["entries"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # absent, damaged, or of another format
    return {}
