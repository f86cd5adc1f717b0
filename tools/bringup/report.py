"""The head of a bring-up's report: machine, versions, driver, device."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

PACKAGES = (
    "nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu13", "cuda-bindings", "numpy", "numba",
    "nvidia-nccl-cu13",
)  # fmt: skip
FORMAT = 1
VARIABLES = ("CUDA_VISIBLE_DEVICES", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NNODES")


def head(arch: str, emulate: bool) -> dict[str, Any]:
    """Everything about the surroundings that a failure may depend on, and nothing about the user."""
    import torch

    from mok.commands import doctor, doctor_gpu
    from mok.tools.bench.programs.base import installed_versions
    from mok.tools.bench.versions import source_commit, today

    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda of torch": torch.version.cuda or "none",
        **installed_versions(PACKAGES),
        "commit": source_commit() or "not a checkout",
    }
    document: dict[str, Any] = {
        "format": FORMAT,
        "arch": arch,
        "backend": f"{arch} in the emulator",
        "date": today(),
        "command": shlex.join(["mok", *sys.argv[1:]]),
        "host": {
            "machine": platform.machine(),
            "system": platform.platform(),
            "cpus": os.cpu_count(),
            "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        },
        "versions": versions,
        "device": None,
        "doctor": [],
    }
    if emulate:
        return document
    from mok.runtime.device import device_count, device_info

    info = device_info()
    document["backend"] = f"{info.arch} on {info.name}"
    document["device"] = {
        "name": info.name,
        "capability": "{}.{}".format(*info.cc),
        "num_sms": info.num_sms,
        "memory_bytes": info.memory_bytes,
        "smem_per_block": info.smem_per_block_optin,
        "driver": info.driver_version,
        "driver_cuda": info.driver_api,
        "gpus": device_count(),
    }
    document["doctor"] = [doctor.driver(), doctor_gpu.imex(), *doctor_gpu.ask_nvml()]
    return document


def write(document: dict[str, Any], folder: Path) -> Path:
    """``bringup.json`` in ``folder``, whole or not at all."""
    from mok.tools.bench.results import finite

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "bringup.json"
    half = path.with_suffix(".part")
    half.write_text(json.dumps(finite(document), indent=1, allow_nan=False) + "\n")
    half.replace(path)
    return path
