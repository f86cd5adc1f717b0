"""What a GPU is and whether we have kernels for it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mok.errors import DeviceError, MokError
from mok.runtime.driver import bindings, call, init

SUPPORTED = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}
"""Compute capability → the architecture we compile for."""


@dataclass(frozen=True)
class DeviceInfo:
    """One GPU.

    Attributes:
        ordinal: its number among the visible devices.
        cc: compute capability, (9, 0) on Hopper.
        arch: what we compile for it, or None: no kernels for this GPU.
        smem_per_block_optin, l2_bytes, memory_bytes: bytes.
        driver_api: CUDA version of the driver, 1000·major + 10·minor.
        driver_version: the driver package's version ("580.159.03"), "" where unknown.
    """

    ordinal: int
    name: str
    cc: tuple[int, int]
    arch: str | None
    num_sms: int
    smem_per_block_optin: int
    l2_bytes: int
    memory_bytes: int
    driver_api: int
    driver_version: str

    @property
    def reason_unsupported(self) -> str:
        """Why there are no kernels for it; empty if there are."""
        if self.arch is not None:
            return ""
        have = ", ".join(f"{a[:-1]} ({n})" for a, n in zip(SUPPORTED.values(), _NAMES, strict=True))
        return f"{self.name} has compute capability {self.cc[0]}.{self.cc[1]}; we have {have}"


_NAMES = ("Hopper: H100, H200, GH200", "Blackwell: B200, GB200", "Blackwell Ultra: B300, GB300")


def arch_for(cc: tuple[int, int]) -> str | None:
    """The architecture to compile for, or None. Architecture-specific code runs on exactly its own
    compute capability, so there is no nearest match."""
    return SUPPORTED.get(cc)


def ordinal_of(device: Any = None) -> int:
    """The ordinal meant by None (torch's current device), an int, "cuda:1" or a torch.device.

    Raises:
        DeviceError: the device is not a CUDA device.
    """
    if isinstance(device, DeviceInfo):
        return device.ordinal
    if isinstance(device, int):
        return device
    import torch

    if device is None:
        return torch.cuda.current_device() if torch.cuda.is_available() else 0
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(
            "the device must be one that torch knows", repr(device), 'Pass device="cuda".'
        ) from error
    if wanted.type != "cuda":
        raise DeviceError("Kernels run on CUDA devices", str(wanted), 'Pass device="cuda".')
    if wanted.index is not None:
        return wanted.index
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


def device_count() -> int:
    """Number of visible GPUs.

    Raises:
        DriverError: no driver, or one older than 580.
    """
    init()
    return int(call("cuDeviceGetCount"))


def device_info(device: Any = None) -> DeviceInfo:
    """Facts about a visible GPU; `device` as in ``ordinal_of``.

    Raises:
        DriverError: no driver, or one older than 580.
        DeviceError: no such GPU.
    """
    ordinal = ordinal_of(device)
    count = device_count()
    if not 0 <= ordinal < count:
        raise DeviceError(
            f"The device must be one of the {count} visible GPUs",
            f"cuda:{ordinal}",
            "Check CUDA_VISIBLE_DEVICES and nvidia-smi.",
        )
    return _device_info(ordinal)


@functools.cache
def _device_info(ordinal: int) -> DeviceInfo:
    attributes = bindings().CUdevice_attribute
    device = call("cuDeviceGet", ordinal)

    def attribute(name: str) -> int:
        key = getattr(attributes, "CU_DEVICE_ATTRIBUTE_" + name)
        return int(call("cuDeviceGetAttribute", key, device))

    cc = (attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR"))
    name = call("cuDeviceGetName", 256, device)
    return DeviceInfo(
        ordinal=ordinal,
        name=name.split(b"\0")[0].decode() if isinstance(name, bytes) else str(name),
        cc=cc,
        arch=arch_for(cc),
        num_sms=attribute("MULTIPROCESSOR_COUNT"),
        smem_per_block_optin=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        l2_bytes=attribute("L2_CACHE_SIZE"),
        memory_bytes=int(call("cuDeviceTotalMem", device)),
        driver_api=int(call("cuDriverGetVersion")),
        driver_version=driver_package_version(),
    )


def driver_package_version(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Version of the driver package, such as "580.159.03"; "" where the kernel does not say."""
    try:
        words = path.read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return ""
    numbers = [w for w in words if w[0].isdigit() and w.count(".") >= 1 and w[-1].isdigit()]
    return numbers[0] if numbers else ""


@dataclass(frozen=True)
class Backend:
    """Which implementation a machine gets: ``arch`` names kernels, None the scheduled reference.

    ``reason`` says why there is no kernel; ``device`` is the GPU that was looked at, if any.
    """

    arch: str | None
    device: DeviceInfo | None
    reason: str

    def __str__(self) -> str:
        if self.arch is not None and self.device is not None:
            return f"{self.arch} on {self.device.name}"
        return "the scheduled reference" + (f" ({self.reason})" if self.reason else "")


def best_backend(device: Any = None) -> Backend:
    """The kernels of the given (or current) GPU, or the scheduled reference and the reason why.

    Never raises for a missing or unsupported GPU: naming it and falling back is the caller's job.
    """
    try:
        info = device_info(device)
    except MokError as error:
        return Backend(None, None, str(error))
    return Backend(info.arch, info, info.reason_unsupported)


def require_arch(device: Any = None) -> DeviceInfo:
    """The device, checked to have kernels.

    Raises:
        DeviceError: its compute capability is none of ours.
    """
    info = device_info(device)
    if info.arch is None:
        raise DeviceError(
            "Kernels exist for compute capability 9.0, 10.0 and 10.3",
            info.reason_unsupported,
            "Use the reference (mok.reference) on this machine.",
        )
    return info
