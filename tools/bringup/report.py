"""The head of a bring-up's report: machine, versions, driver, device."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mok.errors import MokError

PACKAGES = (
    "nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu13", "cuda-bindings", "numpy", "numba",
    "nvidia-nccl-cu13",
)  # fmt: skip
FORMAT = 1
VARIABLES = ("CUDA_VISIBLE_DEVICES", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NNODES")


def head(arch: str, emulate: bool) -> dict[str, Any]:
    """Everything about the surroundings that a failure may depend on, and nothing about the user."""
    document = _surroundings(arch)
    document["backend"] = f"{arch} in the emulator"
    if not emulate:
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
        document["doctor"] = _doctor()
    return document


def without_gpu(arch: str, error: MokError) -> dict[str, Any]:
    """The whole report where no rung can begin: it is the first one that does not hold."""
    from mok.tools.bringup.rungs import RUNGS

    rung = RUNGS[0]
    facts = {"name": rung.name, "title": rung.title, "proves": rung.proves, "state": "failed"}
    found = {"found": f"{error.rule}; found {error.value}", "remedy": error.remedy}
    failure = {"rung": rung.name, "state": "failed", "kernel": None, "emulated": None, **found}
    document = _surroundings(arch)
    document |= {"backend": "none", "doctor": _doctor(), "checks": [facts | found | {"ok": False}]}
    return document | {"failure": failure}


def _doctor() -> list[dict[str, Any]]:
    """What ``mok doctor`` sees of driver, IMEX and links. Where a look itself fails, that is what is found."""
    from mok.commands import doctor, doctor_gpu

    looks: dict[str, Callable[[], Any]] = {
        "driver": lambda: [doctor.driver()], "IMEX channels": lambda: [doctor_gpu.imex()],
        "links": doctor_gpu.ask_nvml,
    }  # fmt: skip
    checks: list[dict[str, Any]] = []
    for name, look in looks.items():
        try:
            checks += look()
        except Exception as error:  # the rungs matter more
            text = f"could not be looked at: {type(error).__name__}: {error}"
            checks.append({"name": name, "ok": False, "found": text, "remedy": ""})
    return checks


def _surroundings(arch: str) -> dict[str, Any]:
    import torch

    from mok.tools.bench.programs.base import installed_versions
    from mok.tools.bench.versions import source_commit, today

    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda of torch": torch.version.cuda or "none",
        **installed_versions(PACKAGES),
        "commit": source_commit() or "not a checkout",
    }
    return {
        "format": FORMAT,
        "arch": arch,
        "backend": "",
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


def write(document: dict[str, Any], folder: Path) -> Path:
    """``bringup.json`` in ``folder``, whole or not at all."""
    from mok.tools.bench.results import finite

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "bringup.json"
    half = path.with_suffix(".part")
    half.write_text(json.dumps(finite(document), indent=1, allow_nan=False) + "\n")
    half.replace(path)
    return path
