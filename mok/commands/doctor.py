"""``mok doctor``: what works here, and the remedy for what does not."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import sys
import tempfile
from typing import Any

from rich.console import Console

from mok.commands import doctor_gpu
from mok.errors import MokError

NAME = "doctor"
HELP = "say what works here, and the remedy for what does not"

# As in pyproject.toml; a test compares them.
PYTHON = (3, 11)
TORCH = (2, 10)
DSL = "4.8.1"
CUDA_PYTHON = 13
DRIVER = 580

Check = dict[str, Any]


def configure(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace, progress: Console) -> dict[str, Any]:
    checks = [check() for check in (python, torch, dsl, cuda_python, cache_folder, disassembler)]
    checks.append(driver())
    if checks[-1]["ok"]:
        checks += [gpu(), torch_cuda(), peer_handles(), peers(), doctor_gpu.imex()]
        checks += doctor_gpu.ask_nvml()
    return {"backend": _backend(), "checks": checks}


def passed(document: dict[str, Any]) -> bool:
    return all(check["ok"] for check in document["checks"])


def show(document: dict[str, Any], console: Console) -> None:
    from rich.table import Table

    table = Table(title=f"Runs here: {document['backend']}", title_justify="left")
    for column in ("check", "", "found", "remedy"):
        table.add_column(column)
    for check in document["checks"]:
        mark = "[green]ok[/]" if check["ok"] else "[red]no[/]"
        table.add_row(check["name"], mark, check["found"], check["remedy"])
    console.print(table)


def _check(name: str, ok: bool, found: str, remedy: str) -> Check:
    return {"name": name, "ok": ok, "found": found, "remedy": "" if ok else remedy}


def _backend() -> str:
    try:
        from mok.backends import choose_backend

        return choose_backend().name
    except ImportError as error:
        return f"nothing ({error})"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _at_least(version: str, minimum: tuple[int, int]) -> bool:
    numbers = version.split("+")[0].split(".")
    return tuple(int(n) for n in numbers[:2] if n.isdigit()) >= minimum


def python() -> Check:
    ok = sys.version_info[:2] >= PYTHON
    remedy = f"Install Python {PYTHON[0]}.{PYTHON[1]} or newer"
    return _check("Python", ok, platform.python_version(), remedy)


def torch() -> Check:
    version = _version("torch")
    ok = version is not None and _at_least(version, TORCH)
    return _check("torch", ok, version or "absent", f'pip install "torch>={TORCH[0]}.{TORCH[1]}"')


def dsl() -> Check:
    version = _version("nvidia-cutlass-dsl")
    remedy = f'pip install "nvidia-cutlass-dsl[cu13]=={DSL}"'
    if sys.platform != "linux":
        remedy = "Kernels need Linux; the reference and mok wave work without"
    return _check("CuTe DSL", version == DSL, version or "absent", remedy)


def cuda_python() -> Check:
    version = _version("cuda-bindings")
    ok = version is not None and version.split(".")[0] == str(CUDA_PYTHON)
    remedy = f'pip install "cuda-python>={CUDA_PYTHON},<{CUDA_PYTHON + 1}"'
    if sys.platform != "linux":
        remedy = "Kernels need Linux; the reference and mok wave work without"
    return _check("cuda-python", ok, version or "absent", remedy)


def cache_folder() -> Check:
    from mok.runtime.cache import default_folder

    folder = default_folder()
    remedy = "Make it writable, or name another in MOK_CACHE_DIR; until then each start compiles"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        return _check("compile cache", False, f"{folder}: {error.strerror}", remedy)
    return _check("compile cache", True, f"{folder} is writable", remedy)


def disassembler() -> Check:
    from mok.runtime.resources import find_nvdisasm

    path = find_nvdisasm()
    remedy = "pip install nvidia-cuda-nvdisasm (only mok compile and tests use it)"
    return _check("nvdisasm", path is not None, path or "absent", remedy)


def driver() -> Check:
    from mok.runtime.device import driver_package_version
    from mok.runtime.driver import init

    remedy = f"Install an NVIDIA driver {DRIVER} or newer; without one the reference runs"
    try:
        init()
    except MokError as error:
        return _check("driver", False, str(error.value) or error.rule, remedy)
    return _check("driver", True, driver_package_version() or "new enough", remedy)


def gpu() -> Check:
    from mok.backends import KERNEL_ARCHS
    from mok.runtime.device import device_info

    remedy = f"Kernels exist for {', '.join(KERNEL_ARCHS)}; elsewhere the reference runs"
    try:
        info = device_info()
    except MokError as error:
        return _check("GPU", False, str(error), remedy)
    if info.arch is not None and info.arch not in KERNEL_ARCHS:
        remedy = f"The kernels for {info.arch} have not run on hardware yet: begin with mok bringup"
    arch = info.arch or "compute capability {}.{}".format(*info.cc)
    found = f"{info.name}, {info.num_sms} SMs, {arch}"
    return _check("GPU", info.arch in KERNEL_ARCHS, found, remedy)


def torch_cuda() -> Check:
    remedy = "Install a build of torch for CUDA 13"
    if importlib.util.find_spec("torch") is None:
        return _check("torch on the GPU", False, "torch is absent", remedy)
    import torch

    ok = torch.cuda.is_available()
    return _check("torch on the GPU", ok, f"CUDA {torch.version.cuda or 'not built in'}", remedy)


def peer_handles() -> Check:
    """How memory can be handed to other processes: by allocating, since attributes may promise
    what an allocation then refuses."""
    from mok.runtime.device import ordinal_of
    from mok.runtime.memory import CudaMemory

    return probe_handles(CudaMemory(ordinal_of()))


def peers() -> Check:
    """Whether the visible GPUs can map each other's memory."""
    from mok.runtime.device import device_count
    from mok.runtime.memory import CudaMemory

    return doctor_gpu.peers([CudaMemory(i) for i in range(device_count())])


def probe_handles(memory: Any) -> Check:
    """Try each kind of handle on a ``mok.runtime.memory.Memory``."""
    kinds = {
        "posix_fd": "file descriptors, for one host",
        "fabric": "fabric handles, for several hosts",
    }
    found = []
    for kind, name in kinds.items():
        try:
            handle = memory.create(memory.granularity, kind)
            try:
                token = memory.export(handle, kind)
            finally:
                memory.release(handle)
        except MokError as error:
            found.append((False, f"{name}: no ({error.value})"))
        else:
            if isinstance(token, int):
                os.close(token)
            found.append((True, f"{name}: yes"))
    remedy = "Ranks in several processes cannot work here; virtual ranks of one process do"
    text = "; ".join(text for _, text in found)
    return _check("shareable memory", any(ok for ok, _ in found), text, remedy)
