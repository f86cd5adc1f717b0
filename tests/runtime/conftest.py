import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # toy_kernels, for factories by name


@pytest.fixture(autouse=True)
def _private_cache(tmp_path, monkeypatch):
    """Every test has its own compile cache, and no kernels from other tests."""
    monkeypatch.setenv("MOK_CACHE_DIR", str(tmp_path / "mok-cache"))
    from mok.runtime import compile as compiler

    compiler.clear_memory_cache()
    yield
    compiler.clear_memory_cache()


@pytest.fixture
def dsl():
    """Skips where the kernel language is not installed (macOS)."""
    if importlib.util.find_spec("cutlass") is None:
        pytest.skip("needs nvidia-cutlass-dsl")
