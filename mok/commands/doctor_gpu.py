"""What ``mok doctor`` finds out about GPUs and the links between them, by trying and by asking NVML."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mok.errors import MokError

Check = dict[str, Any]
NVLINKS = 18  # of a Hopper or Blackwell GPU


def check(name: str, ok: bool, found: str, remedy: str) -> Check:
    return {"name": name, "ok": ok, "found": found, "remedy": "" if ok else remedy}


def peers(memories: Sequence[Any]) -> Check:
    """Whether each GPU can map the others' memory: done with a handle, as ranks do.

    Args:
        memories: one ``mok.runtime.memory.Memory`` for each GPU.
    """
    name, count = "memory of peers", len(memories)
    remedy = (
        "Ranks on these GPUs cannot reach each other: see nvidia-smi topo -p2p rw; in a virtual machine "
        "or container pass all GPUs of the host through"
    )
    if count < 2:
        return check(name, True, "one GPU: ranks share it", remedy)
    failed = []
    for i, owner in enumerate(memories):
        for j, reader in enumerate(memories):
            if i != j and (reason := _map(owner, reader)):
                failed.append(f"{j} cannot map {i}: {reason}")
    found = f"{count} GPUs map each other" if not failed else "; ".join(failed[:3])
    return check(name, not failed, found, remedy)


def _map(owner: Any, reader: Any) -> str:
    """Why ``reader`` cannot map ``owner``'s memory; empty if it can."""
    size = max(owner.granularity, reader.granularity)
    try:
        with contextlib.ExitStack() as undo:
            handle = owner.create(size, "posix_fd")
            undo.callback(owner.release, handle)
            token = owner.export(handle, "posix_fd")
            undo.callback(os.close, token)
            theirs = reader.import_handle(token, "posix_fd")
            undo.callback(reader.release, theirs)
            base = reader.reserve(size)
            undo.callback(reader.unreserve, base, size)
            reader.map(base, size, theirs)
            undo.callback(reader.unmap, base, size)
            reader.fill(base, 0, size, None)
    except MokError as error:
        return str(error.value) or error.rule
    return ""


def imex(folder: Path = Path("/dev/nvidia-caps-imex-channels")) -> Check:
    """IMEX channels, without which memory is not shared between hosts. One host needs none."""
    try:
        channels = sorted(path.name for path in folder.iterdir())
    except OSError:
        channels = []
    found = ", ".join(channels[:4]) or "none: ranks on one host only"
    return check("IMEX channels", True, found, "")


def topology(nvml: Any) -> Check:
    """How many GPUs with how many NVLinks, and whether they are a tray of an NVLink rack."""
    count = nvml.nvmlDeviceGetCount()
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
    links = [_links(nvml, handle) for handle in handles]
    clique = next(filter(None, (_clique(nvml, handle) for handle in handles)), "")
    each = f"{links[0]} NVLinks each" if len(set(links)) == 1 else f"{links} NVLinks"
    kind = f"a tray of an NVLink rack (fabric {clique})" if clique else "one host"
    down = count > 1 and min(links, default=0) == 0
    remedy = "GPUs without NVLink are slow: see nvidia-smi nvlink -s, and the fabric manager's log"
    return check("links", not down, f"{count} GPUs, {each}, {kind}", remedy)


def _links(nvml: Any, handle: Any) -> int:
    active = 0
    for link in range(NVLINKS):
        with contextlib.suppress(nvml.NVMLError):
            active += int(nvml.nvmlDeviceGetNvLinkState(handle, link) == 1)
    return active


def _clique(nvml: Any, handle: Any) -> str:
    """Cluster and clique of a GPU whose fabric is up; empty without one."""
    read: Callable[[Any, Any], Any] | None = getattr(nvml, "nvmlDeviceGetGpuFabricInfo", None)
    if read is None:
        return ""
    info = nvml.c_nvmlGpuFabricInfo_t()
    try:
        read(handle, ctypes.byref(info))
    except nvml.NVMLError:
        return ""
    cluster = bytes(info.clusterUuid)
    if info.state != 3 or not any(cluster):  # NVML_GPU_FABRIC_STATE_COMPLETED
        return ""
    return f"{cluster.hex()[:8]}.{info.cliqueId}"


def clocks(nvml: Any) -> Check:
    """SM clock now and at most, and what holds it back."""
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    now = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
    most = nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)
    reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    # Hardware slowdown, thermal slowdown by software and by hardware, power brake.
    hot = reasons & (0x08 | 0x20 | 0x40 | 0x80)
    found = f"{now} of {most} MHz" + (f", slowed down ({reasons:#x})" if hot else "")
    remedy = "The GPU is too hot or short of power: see nvidia-smi -q -d PERFORMANCE"
    return check("clocks", not hot, found, remedy)


def ask_nvml() -> list[Check]:
    """``topology`` and ``clocks``, as far as NVML answers."""
    try:
        import pynvml as nvml
    except ImportError:
        return [check("links", True, "not looked at: pip install nvidia-ml-py", "")]
    checks = []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return [check("links", True, f"NVML does not answer: {error}", "")]
    try:
        for probe in (topology, clocks):
            try:
                with contextlib.suppress(nvml.NVMLError):
                    checks.append(probe(nvml))
            except (AttributeError, TypeError) as error:  # the binding changes with its version
                checks.append(check("links", True, f"nvidia-ml-py answers otherwise: {error}", ""))
    finally:
        nvml.nvmlShutdown()
    return checks
