"""Deterministic expert-parallel mixture-of-experts layers, one kernel per direction.

The folders ``kernels_cute``, ``runtime`` and ``tools`` of the repository are the subpackages
``mok.kernels_cute``, ``mok.runtime`` and ``mok.tools``: installed copies get this from setuptools'
package-dir, a run from the repository root from the path entry below.
"""

from pathlib import Path as _Path

_root = _Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "kernels_cute").is_dir():
    __path__.append(str(_root))

__version__ = "0.1.0"
