"""Deterministic expert-parallel mixture-of-experts layers, one kernel per direction.

The folders ``kernels_cute``, ``runtime`` and ``tools`` of the repository are the subpackages
``mok.kernels_cute``, ``mok.runtime`` and ``mok.tools``: installed copies get this from setuptools'
package-dir, a run from the repository root from the path entry below.

Importing this package imports neither torch nor the kernel language: names load on first use.
"""

import importlib as _importlib
import sys as _sys
from pathlib import Path as _Path
from typing import Any as _Any

_root = _Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "kernels_cute").is_dir():
    __path__.append(str(_root))

__version__ = "0.1.0"

_LAZY = {
    "Config": "mok.config",
    "Group": "mok.runtime.group",
    "MoELayer": "mok.layer",
    "Mxfp8Weight": "mok.mxfp8",
    "Shape": "mok.config",
    "capture": "",
    "functional": "",
    "mxfp8_quantize": "mok.mxfp8",
    "parallel": "",
    "reference": "",
    "replace_moe": "mok.hf",
}


def __getattr__(name: str) -> _Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'mok' has no attribute {name!r}")
    if not _LAZY[name]:
        return _importlib.import_module(f"mok.{name}")
    return getattr(_importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


def _refuse_foreign_package() -> None:
    """Raise if another project's ``mok`` is importable too: one of the two would hide the other."""
    from mok.errors import MissingDependencyError

    for entry in _sys.path:
        for found in (_Path(entry or ".") / "mok" / "__init__.py", _Path(entry or ".") / "mok.py"):
            try:
                # Another copy of ours, such as a second checkout, is not foreign.
                if "kernels_cute" in found.read_text(errors="replace"):
                    continue
            except OSError:
                continue
            raise MissingDependencyError(
                "no other package named mok may be importable beside mok-cutedsl",
                str(found),
                "Uninstall it (pip uninstall mok), or use a virtual environment of its own",
            )


_refuse_foreign_package()
