"""No rung of the ladder needs a compiler of C, or any other program on the PATH."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("cutlass")

# What a shell, a build of torch's, or a JIT would call.
COMPILERS = ("cc", "gcc", "clang", "c++", "g++", "clang++", "nvcc", "ptxas", "ninja", "make", "ld")
SCRIPT = f"""
import shutil, sys
for name in {COMPILERS}:
    assert shutil.which(name) is None, name
from mok import cli
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("first", "last"),
    [
        ("driver", "tile-2cta"),
        pytest.param("accumulator", "tray", marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
def test_the_ladder_needs_no_compiler(first, last, tmp_path):
    assert shutil.which("sh")  # a PATH without anything does not hide a broken lookup
    (tmp_path / "bin").mkdir()
    nowhere = str(tmp_path / "bin" / "cc")
    environment = {**os.environ, "PATH": str(tmp_path / "bin"), "CC": nowhere, "CXX": nowhere}
    arguments = ["bringup", "--emulate", "--arch", "sm_100a", "--from", first, "--to", last]
    done = subprocess.run(
        # An empty cache: no kernel was compiled where there is a compiler.
        [sys.executable, "-c", SCRIPT, *arguments, "--out", str(tmp_path / "out"), "--json"],
        env={**environment, "MOK_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    states = {check["name"]: check["state"] for check in json.loads(done.stdout)["checks"]}
    assert {first, last} <= {*states}
    assert {*states.values()} <= {"ok", "not here"} and states[last] == "ok", states
