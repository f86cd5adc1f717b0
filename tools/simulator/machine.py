"""Machines as data: one TOML file each, in ``machines/`` or anywhere."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mok.config import CLUSTER_CTAS, TILE_ROWS
from mok.errors import DeviceError, MokError
from mok.tools.simulator.constants import HERE, Table, read_table, read_toml

NAMES = (
    "clock_hz",
    "bf16_flop_per_clock",
    "fp8_flop_per_clock",
    "hbm_bytes_per_s",
    "memory_bytes",
    "l2_bytes",
    "l2_bytes_per_s",
    "sm_bytes_per_s",
    "sm_pull_bytes_per_s",
    "sm_push_bytes_per_s",
    "nvlink_bytes_per_s",
    "nvlink_efficiency",
    "pull_data_wire",
    "pull_request_wire",
    "push_data_wire",
    "push_ack_wire",
    "nvlink_latency_s",
    "local_latency_s",
    "signal_s",
    "launch_s",
    "schedule_s",
    "barrier_s",
    "network_bytes_per_s",
    "network_latency_s",
    "power_exponent",
    "power_flops",
    "power_base_flops",
    "clock_headroom",
)
"""Constants of a machine; ``docs/scaling.md`` explains each."""


def _bounds(name: str) -> tuple[float, float]:
    """What a constant can be: time is played in slices, so it must neither stand still nor overflow."""
    if name in ("nvlink_efficiency", "power_exponent", "clock_headroom"):
        return {"nvlink_efficiency": (0.01, 1), "power_exponent": (0, 4)}.get(name, (1, 10))
    if name.endswith(("_bytes_per_s", "_hz")):
        return 1e8, 1e18
    if name.endswith("_s"):
        return 0, 1
    return (1 if name.endswith("_per_clock") else 0), 1e18


@dataclass(frozen=True)
class Machine:
    """One GPU of a machine, and how it reaches the others.

    Attributes:
        arch: "sm_90a", "sm_100a" or "sm_103a".
        domain: GPUs that reach each other over NVLink; ranks beyond it are over the network.
        constants: see ``NAMES``; rates are per GPU and per direction, unless the name says ``sm``.
        tiles: share of the tensor cores' peak at ``clock_hz`` that the main loop sustains, by tile
            ("128x256": rows and accumulator columns of a cluster's tile), prefixed by "fp8_" where
            it is not BF16.
        gain: the clock over ``clock_hz``, see ``clock_gain``.
    """

    name: str
    title: str
    arch: str
    num_sms: int
    domain: int
    constants: Table = field(repr=False)
    tiles: Table = field(repr=False)
    gain: float = 1.0

    def __post_init__(self) -> None:
        for name, text in (("name", self.name), ("title", self.title), ("arch", self.arch)):
            if not isinstance(text, str) or not text:
                raise DeviceError(f"{name} of a machine must be text", repr(text))
        if self.arch not in TILE_ROWS:
            raise DeviceError("arch must be a supported one", self.arch, ", ".join(TILE_ROWS))
        for name, value in (("num_sms", self.num_sms), ("domain", self.domain)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise DeviceError(f"{name} of machine {self.name} must be a positive int", value)
        if self.num_sms <= self.cluster:
            raise DeviceError("a machine needs more SMs than one cluster", self.num_sms)
        unknown, missing = set(self.constants) - set(NAMES), set(NAMES) - set(self.constants)
        if unknown or missing:
            raise MokError(
                f"machine {self.name} must define exactly the known constants",
                f"unknown: {sorted(unknown)}, missing: {sorted(missing)}",
            )
        zero = [n for n, v in self.constants.items() if v == 0 and n != "power_exponent"]
        if zero:
            raise MokError(f"constants of machine {self.name} must be positive", ", ".join(zero))
        for name, value in self.constants.items():
            low, high = _bounds(name)
            if not low <= value <= high:
                raise MokError(
                    f"{name} of machine {self.name} must be in {low:g}…{high:g}", value,
                    "Rates are in bytes a second, times in seconds",
                )  # fmt: skip
        for name, share in self.tiles.items():
            if not 0.01 <= share <= 1:
                raise MokError(f"tile {name} of machine {self.name} must be in 0.01…1", share)

    def __getitem__(self, name: str) -> float:
        return self.constants[name]

    @property
    def cluster(self) -> int:
        """CTAs of a compute cluster, one per SM."""
        return CLUSTER_CTAS[self.arch]

    @property
    def nvlink(self) -> float:
        """Bytes a second that one direction of the GPU's NVLink port carries, headers included."""
        return self["nvlink_bytes_per_s"] * self["nvlink_efficiency"]

    def tensor_rate(self, tile: str, precision: str) -> float:
        """FLOP/s of one SM in the main loop of ``tile``, at the clock of ``gain``."""
        fp8 = precision == "mxfp8"
        peak = self["fp8_flop_per_clock" if fp8 else "bf16_flop_per_clock"] * self["clock_hz"]
        return peak * self.gain * self.tiles[("fp8_" if fp8 else "") + tile]

    def clock_gain(self, flops: float, compute_sms: int, saved: float = 0.0) -> float:
        """The clock at the power limit, over ``clock_hz``, of a GPU that sustains ``flops`` FLOP/s.

        Dynamic power is (F + F0)·V², with F0 what everything but the tensor cores takes, as FLOP/s, and V
        proportional to the clock f. So at the limit f grows as (F + F0)^(-1/2) (``power_exponent``), from
        ``clock_hz`` at ``power_flops``, up to ``clock_headroom``. SMs that do not multiply take no F0.

        Args:
            saved: share of the power that this kernel does not take.
        """
        base = self["power_base_flops"]
        taken = (flops + base * compute_sms / self.num_sms) * (1.0 - saved)
        limit = self["power_flops"] + base
        return min((taken / limit) ** -self["power_exponent"], self["clock_headroom"])

    def at(self, gain: float) -> Machine:
        """The machine at another clock."""
        return replace(self, gain=gain)

    def with_constants(self, **values: float) -> Machine:
        """The machine with other constants."""
        return replace(self, constants=self.constants.replace(**values))


def known_machines() -> list[str]:
    """Names of the machines that come with the simulator."""
    return sorted(p.stem for p in (HERE / "machines").glob("*.toml"))


def load_machine(name: str | Path) -> Machine:
    """A machine by name ("h200") or from a TOML file.

    Raises:
        MokError: no such machine, or its file breaks a rule.
    """
    path = Path(name)
    if path.suffix != ".toml":
        path = HERE / "machines" / f"{str(name).lower()}.toml"
        if not path.is_file():
            known = ", ".join(known_machines())
            raise MokError(
                "the machine must be a known one or a .toml file", str(name), f"Known: {known}"
            )
    return _parse(read_toml(path), str(path.name))


def _parse(document: dict[str, Any], origin: str) -> Machine:
    keys = {"name", "title", "arch", "num_sms", "domain", "constants", "tiles"}
    if set(document) != keys:
        raise MokError(
            f"{origin} must define exactly {', '.join(sorted(keys))}", sorted(set(document) ^ keys)
        )
    name = document["name"]
    return Machine(
        name,
        document["title"],
        document["arch"],
        document["num_sms"],
        document["domain"],
        read_table(f"machine {name}", document["constants"]),
        read_table(f"tiles of machine {name}", document["tiles"]),
    )
