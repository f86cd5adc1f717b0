"""The host side: devices, compiled kernels, symmetric memory, groups of ranks, workspaces."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Barrier": "barrier",
    "Group": "group",
    "Heap": "heap",
    "HeapOptions": "heap",
    "Kernel": "compile",
    "KernelSpec": "compile",
    "SymmetricTensor": "heap",
    "Workspace": "workspace",
    "best_backend": "device",
    "clear_workspace_cache": "workspace",
    "device_info": "device",
    "get_kernel": "compile",
    "get_workspace": "workspace",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Names are imported on first use: importing this package costs nothing."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
