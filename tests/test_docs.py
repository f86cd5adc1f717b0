"""What the README says can be done, is done here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
CI = ROOT / ".ci" / "run"
INSTALL = "python -m venv .venv && . .venv/bin/activate && pip install -e '.[test]' && "


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


COMMANDS = [
    line.split("#")[0].strip() for block in blocks("bash") for line in block.splitlines() if line
]
TESTS = next(c for c in COMMANDS if c.startswith("pytest"))


def shell(command: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=500,
    )


def test_the_first_two_commands_are_setup_and_tests():
    assert COMMANDS[0] == INSTALL + "mok demo"
    assert COMMANDS[1] == TESTS


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_works(command):
    # The environment is the one that runs this test; .ci/run makes a fresh one and installs.
    here = command.removeprefix(INSTALL)
    program, _, rest = here.partition(" ")
    assert program in ("mok", "pytest"), f"do not know how to test {here!r}"
    if program == "pytest":
        rest += " --collect-only -q"  # running it here would run this test again
    done = shell(f"{sys.executable} -m {program} {rest}")
    allowed = (0, 1) if here == "mok doctor" else (0,)  # its exit code says whether all works
    assert done.returncode in allowed, done.stdout + done.stderr
    assert done.stdout


EXAMPLES = [
    pytest.param(code, marks=[pytest.mark.gpu] if "cuda" in code else [])
    for code in blocks("python")
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_every_example_runs(code):
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert len(code.splitlines()) <= 12


def test_ci_runs_the_readmes_commands_in_a_fresh_environment():
    lines = CI.read_text().splitlines()
    assert TESTS in lines
    assert "pip install -e '.[test]'" in lines
    assert "set -euo pipefail" in lines
    assert os.access(CI, os.X_OK)


def test_named_files_exist():
    for folder in ("mok", "kernels_cute", "runtime", "tools", "tests", "docs"):
        assert f"`{folder}/`" in README and (ROOT / folder).is_dir()
    for name in ("architecture.md", "decisions.md"):
        assert name in README and (ROOT / "docs" / name).is_file()
    assert "```mermaid" in (ROOT / "docs" / "architecture.md").read_text()


def test_the_example_prints_what_it_says():
    (code,) = [c for c in blocks("python") if "2.9e-3" in c]
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert f"{float(done.stdout):.1e}" == "2.9e-03"
