from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]


def run(
    code: str, *, cwd: Path = ROOT, path: list[Path] | None = None
) -> subprocess.CompletedProcess:
    program = f"import sys; sys.path[:0] = {[str(p) for p in path or [ROOT]]!r}\n{code}"
    return subprocess.run(
        [sys.executable, "-c", program], cwd=cwd, capture_output=True, text=True, timeout=120
    )


def test_folders_are_subpackages_when_run_from_the_root():
    code = (
        "import mok, mok.runtime, mok.kernels_cute, mok.tools\n"
        "print(mok.runtime.__path__[0], mok.kernels_cute.__path__[0], mok.tools.__path__[0])"
    )
    done = run(code)
    assert done.stdout.split() == [str(ROOT / f) for f in ("runtime", "kernels_cute", "tools")]


def test_every_package_is_listed():
    folders = SETUPTOOLS["package-dir"]
    found = set()
    for top in ("mok", "kernels_cute", "runtime", "tools"):
        name = "mok" if top == "mok" else f"mok.{top}"
        assert folders[name] == top
        for init in (ROOT / top).rglob("__init__.py"):
            inside = init.parent.relative_to(ROOT / top).parts
            found.add(".".join((name, *inside)))
    assert found == set(SETUPTOOLS["packages"])


@pytest.mark.parametrize("module", ["mok", "mok.cli", "mok.config", "mok.models"])
def test_light_imports(module):
    done = run(
        f"import {module}; print([m for m in ('torch', 'cutlass', 'cuda') if m in sys.modules])"
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    "module", ["mok.reference", "mok.backends", "mok.kernels", "mok.runtime.device"]
)
def test_host_code_does_not_import_the_kernel_language(module):
    # torch may import cuda.bindings itself: only what comes on top of it counts.
    done = run(
        f"import torch; before = set(sys.modules); import {module}\n"
        "new = {m.split('.')[0] for m in set(sys.modules) - before}\n"
        "print(new & {'cutlass', 'cuda'} or 'none')"
    )
    assert done.stdout.strip() == "none", done.stderr


def test_lazy_names():
    done = run("import mok; print(mok.Config.__module__, mok.Shape, mok.reference, dir(mok))")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("mok.config") and "MoELayer" in done.stdout
    assert "has no attribute 'nonsense'" in run("import mok; mok.nonsense").stderr


@pytest.mark.parametrize("name", ["mok/__init__.py", "mok.py"])
def test_a_foreign_mok_is_refused(tmp_path, name):
    foreign = tmp_path / name
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("# somebody else's\n")
    done = run("import mok", path=[ROOT, tmp_path], cwd=tmp_path.parent)
    assert done.returncode != 0
    assert "MissingDependencyError" in done.stderr
    assert str(foreign) in done.stderr and "pip uninstall mok" in done.stderr


def test_a_second_copy_of_ours_is_not_foreign(tmp_path):
    (tmp_path / "mok").mkdir()
    (tmp_path / "mok" / "__init__.py").write_text((ROOT / "mok" / "__init__.py").read_text())
    assert run("import mok", path=[ROOT, tmp_path]).returncode == 0
