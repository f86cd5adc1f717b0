"""Compilation of the interpreter: numba, cached in a folder named by a hash of its sources.

numba's cache notices a change of the file that defines a function, but not of the functions it
calls; the folder's name does.
"""

import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core import config

_COMPILED = (
    "alu_table",
    "interp",
    "intrinsics",
    "jit",
    "layout",
    "mbarrier",
    "memops",
    "memory",
    "numerics",
    "race",
    "syncops",
)


@functools.cache
def cache_folder() -> Path:
    """Private folder for generated and compiled code, one per version of the sources."""
    digest = hashlib.sha256()
    for name in _COMPILED:
        path = Path(__file__).with_name(f"{name}.py")
        if path.exists():
            digest.update(path.read_bytes())
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "mok-emulator" / digest.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def njit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """``numba.njit`` with our cache folder; division by zero does not raise."""

    def wrap(fn: Callable[..., Any]) -> Any:
        saved = getattr(config, "CACHE_DIR", "")
        setattr(config, "CACHE_DIR", str(cache_folder()))  # noqa: B010 (numba sets it at run time)
        try:
            settings = {"cache": True, "error_model": "numpy", **options}
            return numba.njit(**settings)(fn)
        finally:
            setattr(config, "CACHE_DIR", saved)  # noqa: B010

    return wrap if function is None else wrap(function)
