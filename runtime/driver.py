"""Checked access to the CUDA driver through ``cuda.bindings``, imported on first use.

``cuda.bindings`` returns ``(error, value…)`` tuples; ``call`` returns the value and turns an error
into a ``DriverError`` with the driver's own text.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any

from mok.errors import DriverError, MissingDependencyError

MINIMUM_API = 13000
"""CUDA version of the driver API; 13.0 is driver 580, the oldest that loads our device code."""


@functools.cache
def bindings() -> Any:
    """The module ``cuda.bindings.driver``.

    Raises:
        MissingDependencyError: cuda-python is not installed.
    """
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise MissingDependencyError(
            "GPU work needs cuda-python", str(error), 'pip install "cuda-python>=13,<14" (Linux)'
        ) from error


def call(name: str, *args: Any) -> Any:
    """``cuda.bindings.driver.<name>(*args)``: None, the value, or a tuple of values.

    Raises:
        DriverError: there is no driver, or it refused; ``code`` then holds the CUresult's number.
    """
    driver = bindings()
    try:
        error, *values = getattr(driver, name)(*args)
    except RuntimeError as problem:  # cuda.pathfinder found no libcuda
        raise _no_driver() from problem
    if error != driver.CUresult.CUDA_SUCCESS:
        raise driver_error(name, error)
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


def _no_driver() -> DriverError:
    return DriverError(
        "GPU work needs the NVIDIA driver",
        "no libcuda.so.1 on this machine",
        "Install driver 580 or newer; a container also needs access to it (docker run --gpus all).",
    )


class DriverCallError(DriverError):
    """A driver call failed; ``code`` is the CUresult's number."""

    code: int = 0


def driver_error(name: str, error: Any) -> DriverCallError:
    """The error object for a failed driver call."""
    driver = bindings()
    _, text = driver.cuGetErrorString(error)
    label = getattr(error, "name", str(int(error)))
    shown = text.decode() if isinstance(text, bytes) else str(text)
    result = DriverCallError(f"{name} must succeed", f"{label}: {shown}")
    result.code = int(error)
    return result


@functools.cache
def init() -> None:
    """``cuInit``, and the check that the driver is new enough.

    Raises:
        DriverError: no driver, no usable GPU, or a driver older than 580.
    """
    call("cuInit", 0)
    check_version(call("cuDriverGetVersion"))


def check_version(api: int) -> None:
    """Raise DriverError when a driver API version (1000·major + 10·minor) is below the minimum."""
    if api < MINIMUM_API:
        raise DriverError(
            "The NVIDIA driver must be 580 or newer (CUDA 13.0)",
            f"it provides CUDA {api // 1000}.{api % 1000 // 10}",
            "Update the driver; our device code is CUDA 13's and older drivers cannot load it.",
        )


def current_device() -> int:
    """Ordinal of the device whose context is current on this thread; 0 where there is none yet."""
    driver = bindings()
    try:
        error, device = driver.cuCtxGetDevice()
    except RuntimeError as problem:
        raise _no_driver() from problem
    if error == driver.CUresult.CUDA_SUCCESS:
        return int(device)
    # No context: the CUDA runtime would make device 0 current at its first call, so do the same.
    init()
    use_device(0)
    return 0


@functools.cache
def _primary_context(ordinal: int) -> Any:
    init()
    return call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", ordinal))  # held to process end


def use_device(ordinal: int) -> None:
    """Make a device's primary context (the one that torch uses) current on this thread."""
    call("cuCtxSetCurrent", _primary_context(ordinal))


@contextlib.contextmanager
def device_context(ordinal: int) -> Iterator[None]:
    """Run driver calls on a device without changing the thread's current one."""
    call("cuCtxPushCurrent", _primary_context(ordinal))
    try:
        yield
    finally:
        call("cuCtxPopCurrent")
