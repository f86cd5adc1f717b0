"""Without a GPU the demo runs the compiled kernels in the emulator; nothing needs a compiler."""

import json
import os
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("cutlass")

pytestmark = pytest.mark.emulator
SCRIPT = """
import shutil, sys
for name in ("cc", "gcc", "clang", "c++", "g++", "nvcc", "ptxas"):
    assert shutil.which(name) is None, name
from mok import cli
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.fixture
def mok(tmp_path):
    """Runs a command in a process that finds no compiler, and returns its JSON document."""

    def run(*argv):
        assert shutil.which("sh")  # a PATH without anything does not hide a broken lookup
        environment = {**os.environ, "PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, *argv, "--json"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=550,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_the_demo_emulates_without_a_compiler(mok):
    import torch

    if torch.cuda.is_available():
        pytest.skip("the demo uses the GPU here")
    found = mok("demo")
    assert found["kind"] == "emulator" and found["backend"] == "sm_90a in the emulator"
    assert found["shape"]["EP"] == 2 and found["ok"]


def test_emulate_without_a_compiler(mok, tmp_path):
    from tests.tools.emulator.test_emulator_launch import SCRIPT as double

    script = tmp_path / "double_script.py"
    script.write_text(double)
    found = mok("emulate", str(script), "100", "--seeds", "2", "--num-sms", "4")
    assert found["reports"] == [] and len(found["launches"]) == 2
