"""One tunable over a range of values, the others at their suggestion."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from mok.config import Config, tile_rows
from mok.errors import MokError

ALIASES = {
    "minibatch": "minibatch_size",
    "macrobatch": "macrobatch_size",
    "capacity": "schedule_capacity_multiplier",
}
TUNABLES = (
    "comm_sms",
    "fwd_num_comm_sms",
    "bwd_num_comm_sms",
    "minibatch_size",
    "macrobatch_size",
    "schedule_capacity_multiplier",
    "pairs",
    "push",
)
"""``comm_sms`` sets those of both directions; ``pairs`` and ``push`` are 0 or 1."""
SWITCHES = ("pairs", "push")

MINIBATCHES = (512, 1024, 1536, 2048, 3072, 4096, 8192, 16384)
COMM_SMS = (2, 4, 8, 12, 16, 24, 32, 48)
RINGS = (1, 2, 4, 8, 16, 32, 64)  # minibatches in a macrobatch
CAPACITIES = (0.1, 0.25, 0.5, 1.0)


def tunable_named(name: str) -> str:
    """The tunable that a name or its short form means; raises MokError that lists them."""
    found = ALIASES.get(name, name)
    if found not in TUNABLES:
        known = ", ".join((*ALIASES, *TUNABLES))
        raise MokError("the tunable must be a known one", repr(name), f"Known: {known}")
    return found


def default_values(tunable: str, base: Config, arch: str, rows: int) -> tuple[Any, ...]:
    """The values that are tried where none are given.

    Args:
        rows: of one rank, so that the last minibatch holds everything at once.
    """
    tile = tile_rows(arch)
    if tunable == "minibatch_size":
        everything = -(-rows // tile) * tile
        return (*(v for v in (tile, *MINIBATCHES) if v % tile == 0 and v < everything), everything)
    if tunable == "macrobatch_size":
        return tuple(n * base.minibatch_size for n in RINGS)
    if tunable == "schedule_capacity_multiplier":
        return CAPACITIES
    return (0, 1) if tunable in SWITCHES else COMM_SMS


def config_with(base: Config, tunable: str, value: Any) -> Config:
    """The configuration with one tunable changed; a ring stays a whole number of minibatches.

    Raises:
        ShapeError, DtypeError: a limit of ``Config``.
    """
    if tunable == "comm_sms":
        return dataclasses.replace(base, fwd_num_comm_sms=value, bwd_num_comm_sms=value)
    if tunable == "minibatch_size":
        ring = max(1, round(base.macrobatch_size / value))
        return dataclasses.replace(base, minibatch_size=value, macrobatch_size=ring * value)
    return dataclasses.replace(base, **{tunable: bool(value) if tunable in SWITCHES else value})


def sweep_configs(base: Config, tunable: str, values: Sequence[Any]) -> list[tuple[str, Config]]:
    """("tunable=value", configuration) for each value."""
    return [(f"{tunable}={value}", config_with(base, tunable, value)) for value in values]
