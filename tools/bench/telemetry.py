"""SM clock and power of a GPU while windows run: NVML in a thread, or nvidia-smi, or nothing."""

from __future__ import annotations

import contextlib
import importlib
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

INTERVAL_S = 0.025
SMI_INTERVAL_MS = 50


@dataclass(frozen=True)
class Reading:
    """Means over a window; None where nothing was read."""

    clock_mhz: float | None = None
    watts: float | None = None
    samples: int = 0


class Source(Protocol):
    """One way of reading the GPU."""

    name: str

    def samples(self, stop: threading.Event) -> Iterator[tuple[float, float]]:
        """(SM clock in MHz, watts), again and again until ``stop``."""

    def close(self) -> None:
        """Let go of it."""


class NvmlSource:
    """NVML through the package nvidia-ml-py."""

    name = "NVML"

    def __init__(self, uuid: str, index: int, library: Any = None) -> None:
        nvml = library or importlib.import_module("pynvml")
        self._nvml = nvml
        nvml.nvmlInit()
        try:
            self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        except Exception:  # a torch or NVML that spells it otherwise
            self._handle = nvml.nvmlDeviceGetHandleByIndex(index)
        self._watts()

    def _watts(self) -> float:
        n = self._nvml
        # On Hopper the plain reading is a mean over the last second: longer than a window.
        field = getattr(n, "NVML_FI_DEV_POWER_INSTANT", None)
        if field is not None:
            value = n.nvmlDeviceGetFieldValues(self._handle, [field])[0]
            if value.nvmlReturn == 0:
                return float(value.value.uiVal) / 1e3
        return float(n.nvmlDeviceGetPowerUsage(self._handle)) / 1e3

    def samples(self, stop: threading.Event) -> Iterator[tuple[float, float]]:
        n = self._nvml
        while not stop.wait(INTERVAL_S):
            clock = n.nvmlDeviceGetClockInfo(self._handle, n.NVML_CLOCK_SM)
            yield float(clock), self._watts()

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._nvml.nvmlShutdown()


class SmiSource:
    """A running nvidia-smi that prints a line per sample."""

    name = "nvidia-smi"
    FIELDS = ("power.draw.instant", "power.draw")  # the first is missing in old drivers

    def __init__(self, uuid: str, index: int, program: str | None = None) -> None:
        program = program or shutil.which("nvidia-smi")
        if program is None:
            raise FileNotFoundError("nvidia-smi is not on the path")
        chosen = self._choose(program, uuid, index)
        if chosen is None:
            raise OSError("nvidia-smi does not answer")
        self._process = subprocess.Popen(
            [*chosen, "-lms", str(SMI_INTERVAL_MS)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    @classmethod
    def _choose(cls, program: str, uuid: str, index: int) -> list[str] | None:
        for field in cls.FIELDS:
            for which in (uuid, str(index)):
                query = [program, f"--query-gpu=clocks.sm,{field}", "--format=csv,noheader,nounits"]
                query += ["-i", which]
                done = subprocess.run(query, capture_output=True, text=True, timeout=20)
                if done.returncode == 0 and parse_smi(done.stdout) is not None:
                    return query
        return None

    def samples(self, stop: threading.Event) -> Iterator[tuple[float, float]]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if stop.is_set():
                return
            found = parse_smi(line)
            if found is not None:
                yield found

    def close(self) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)


def parse_smi(line: str) -> tuple[float, float] | None:
    """(MHz, watts) of a line "1980, 512.34", or None."""
    parts = line.strip().split(",")
    try:
        return float(parts[0]), float(parts[1])
    except (ValueError, IndexError):
        return None


class Telemetry:
    """Samples a source in a thread; ``between`` gives the means of a window.

    Args:
        source: what to read; None reads nothing.
        reason: why there is no source.
    """

    def __init__(
        self,
        source: Source | None,
        reason: str = "",
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.source = source
        self.reason = reason
        self._now = now
        self._samples: list[tuple[float, float, float]] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if source is not None:
            self._thread = threading.Thread(target=self._collect, daemon=True)
            self._thread.start()

    def _collect(self) -> None:
        assert self.source is not None
        try:
            for clock, watts in self.source.samples(self._stop):
                self._samples.append((self._now(), clock, watts))
        except Exception as error:  # the numbers are a companion: timing goes on without them
            self.reason = f"{self.source.name}: {error}"

    @property
    def name(self) -> str:
        """What is read, or why nothing is."""
        if self.source is None or self.reason:
            return f"none ({self.reason})"
        return self.source.name

    def between(self, begin: float, end: float) -> Reading:
        """Means of the samples in [begin, end] of the same clock as ``now``."""
        inside = [s for s in list(self._samples) if begin <= s[0] <= end]
        if not inside:
            return Reading()
        count = len(inside)
        return Reading(sum(s[1] for s in inside) / count, sum(s[2] for s in inside) / count, count)

    def close(self) -> None:
        self._stop.set()
        if self.source is not None:
            self.source.close()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def mean(readings: list[Reading]) -> Reading:
    """The readings of several windows together, each weighted by its samples."""
    total = sum(r.samples for r in readings)
    if not total:
        return Reading()
    clock = sum((r.clock_mhz or 0) * r.samples for r in readings) / total
    watts = sum((r.watts or 0) * r.samples for r in readings) / total
    return Reading(clock, watts, total)


def open_telemetry(device: Any) -> Telemetry:
    """Telemetry of a torch device; on the CPU, or where nothing answers, one that reads nothing."""
    if device.type != "cuda":
        return Telemetry(None, "no GPU")
    import torch

    index = device.index if device.index is not None else torch.cuda.current_device()
    uuid = f"GPU-{getattr(torch.cuda.get_device_properties(index), 'uuid', '')}"
    reasons = []
    for make in (NvmlSource, SmiSource):
        try:
            return Telemetry(make(uuid, index))
        except Exception as error:  # absent package, absent program, no permission
            reasons.append(f"{make.name}: {type(error).__name__} {error}".strip())
    return Telemetry(None, "; ".join(reasons))
