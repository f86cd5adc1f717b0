"""What a measurement was made with."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mok.tools.bench.programs import program_class
from mok.tools.bench.programs.base import installed_versions


def versions(programs: Sequence[str]) -> dict[str, str]:
    """Versions of Python, torch, the kernel language, every program measured, and this code."""
    import torch

    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        **installed_versions(("nvidia-cutlass-dsl", "triton", "cuda-bindings")),
    }
    for name in programs:
        found.update(program_class(name).versions())
    if commit := source_commit():
        found["commit"] = commit
    return found


def source_commit() -> str:
    """This checkout's commit, "+" where files differ from it; "" outside a checkout."""
    root = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        return commit + ("+" if commit and git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def gpu_facts(device: Any) -> dict[str, Any]:
    """Name, SMs, memory and driver of a torch device."""
    if device.type != "cuda":
        return {"name": platform.processor() or platform.machine() or "CPU"}
    import torch

    from mok.runtime.device import driver_package_version

    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "num_sms": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "driver": driver_package_version(),
    }


def today() -> str:
    """The date and time, in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
