"""docs/authoring.md works as it stands: its patches apply, and its programs run in the emulator."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "authoring.md").read_text()
FOLDERS = ["mok", "kernels_cute", "runtime", "tests"]
# The emulator is taken from here: a copy would be compiled anew, which takes longer than all the rest.
# Processor time, since another process may have the core: of each compilation, and of all emulation.
SITE = f"""
import mok

mok.__path__.append({str(ROOT)!r})
"""
STOPWATCH = """
import atexit
import json
import time

from mok.runtime import compile as compiling
from mok.tools.emulator import emulator as emulating

spent = {"compile": [], "emulate": 0.0}
prepare = emulating.prepare  # once per checkout, and not counted
compile_kernel, run_ptx = compiling._compile, emulating.Emulator.run_ptx

def timed_compile(spec):
    begin = time.process_time()
    built = compile_kernel(spec)
    spent["compile"].append(time.process_time() - begin)
    return built

def timed_run(emulator, *args):
    begin = time.process_time()
    try:
        run_ptx(emulator, *args)
    finally:
        spent["emulate"] += time.process_time() - begin

def untimed_prepare(*args):
    begin = time.process_time()
    prepare(*args)
    spent["emulate"] -= time.process_time() - begin

emulating.prepare = untimed_prepare
compiling._compile, emulating.Emulator.run_ptx = timed_compile, timed_run
atexit.register(lambda: print("SPENT " + json.dumps(spent)))
"""
LIMITS = {"compile": 5, "emulate": 30}  # seconds: one kernel, and a small run
pytestmark = pytest.mark.emulator


@dataclass
class Section:
    title: str
    patches: list[str] = field(default_factory=list)
    programs: list[tuple[str, str]] = field(default_factory=list)  # environment, code


def sections() -> list[Section]:
    found: list[Section] = []
    block = re.compile(
        r"^## (?P<title>[^\n]+)$"
        r"|^<!-- patch -->\n```diff\n(?P<patch>.*?)^```$"
        r"|^<!-- run(?:: (?P<env>.*))? -->\n```python\n(?P<code>.*?)^```$",
        re.MULTILINE | re.DOTALL,
    )
    for match in block.finditer(PAGE):
        if match["title"]:
            found.append(Section(match["title"]))
        elif match["patch"]:
            found[-1].patches.append(match["patch"])
        else:
            found[-1].programs.append((match["env"] or "", match["code"]))
    return [s for s in found if s.programs]


def changed_lines(patch: str) -> int:
    removed = len(re.findall(r"^-(?!--)", patch, re.MULTILINE))
    return max(removed, len(re.findall(r"^\+(?!\+\+)", patch, re.MULTILINE)))


def test_the_page_has_the_four_sections():
    titles = [s.title for s in sections()]
    assert len(titles) == 4
    assert [len(s.patches) for s in sections()] == [0, 1, 1, 1]
    assert changed_lines(sections()[1].patches[0]) <= 20  # the activation


@pytest.mark.parametrize("section", sections(), ids=lambda s: s.title)
def test_section(section, tmp_path):
    for folder in FOLDERS:
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "sitecustomize.py").write_text(SITE)
    (tmp_path / "stopwatch.py").write_text(STOPWATCH)
    for patch in section.patches:
        done = subprocess.run(
            ["patch", "-p1"], input=patch, text=True, cwd=tmp_path, capture_output=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
    for extra, code in section.programs:
        program = tmp_path / "program.py"
        program.write_text("import stopwatch\n" + code)
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        environment |= dict(pair.split("=") for pair in extra.split())
        done = subprocess.run(
            [sys.executable, "program.py"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.strip()
        print(f"{section.title}:\n{done.stdout}")
        spent = json.loads(done.stdout.partition("SPENT ")[2])
        assert len(spent["compile"]) == 1
        assert spent["compile"][0] <= LIMITS["compile"]
        assert 0 < spent["emulate"] <= LIMITS["emulate"]
