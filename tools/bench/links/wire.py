"""Bytes on the NVLinks of a GPU, from the driver's own counters (nvidia-smi nvlink)."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

LINE = re.compile(r"(Data|Raw) (Tx|Rx): (\d+) KiB")


class CountersRefused(Exception):
    """The driver or the tool does not give counters; the message says what it said."""


@dataclass(frozen=True)
class Traffic:
    """Sums over all links of a GPU, in bytes: payload (data) and with protocol (raw)."""

    data_tx: int
    data_rx: int
    raw_tx: int
    raw_rx: int

    def __sub__(self, before: Traffic) -> Traffic:
        return Traffic(
            self.data_tx - before.data_tx,
            self.data_rx - before.data_rx,
            self.raw_tx - before.raw_tx,
            self.raw_rx - before.raw_rx,
        )


def _smi(arguments: list[str]) -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", "nvlink", *arguments], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CountersRefused(f"nvidia-smi nvlink: {error}") from error
    if done.returncode:
        said = (done.stdout + done.stderr).strip().replace("\n", "; ")
        raise CountersRefused(f"nvidia-smi nvlink exited with {done.returncode}: {said}")
    return done.stdout


def read_traffic(gpu: str, ask: Callable[[list[str]], str] = _smi) -> Traffic:
    """Counters of a GPU (its index or UUID) as they are now.

    Raises:
        CountersRefused: there are none, or they are not supported.
    """
    sums: dict[tuple[str, str], int] = {}
    for option in ("d", "r"):
        text = ask(["-gt", option, "-i", gpu])
        found = LINE.findall(text)
        if not found:
            raise CountersRefused(f"nvidia-smi nvlink -gt {option} printed no counter: {text!r}")
        for kind, way, value in found:
            sums[kind, way] = sums.get((kind, way), 0) + 1024 * int(value)
    try:
        return Traffic(sums["Data", "Tx"], sums["Data", "Rx"], sums["Raw", "Tx"], sums["Raw", "Rx"])
    except KeyError as error:
        raise CountersRefused(f"nvidia-smi nvlink has no counter for {error}") from error
