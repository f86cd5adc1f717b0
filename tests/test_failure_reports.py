"""A failing test says why at once: runs on machines lent by the minute are often cut off."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

TESTS = """
import time, pytest

def test_fails():
    print("the cost was 75 us")
    value = 3
    assert value == 4, "too slow: " + "long " * 500

@pytest.fixture
def broken():
    raise RuntimeError("no such device")

def test_cannot_start(broken):
    pass

def test_hangs():
    time.sleep(600)
"""


def test_a_run_that_is_cut_off_has_told_its_failures(tmp_path):
    # A folder of its own, so that no other run collects it, with our conftest's hooks.
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_configure\n")
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\n")
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", str(tmp_path)]
    log = tmp_path / "log"
    with log.open("w") as out:
        run = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, cwd=tmp_path, start_new_session=True
        )
        try:
            deadline = time.monotonic() + 120
            while log.read_text().count("FAILED in") < 2 and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
    text = log.read_text()
    assert "FAILED in call:" in text and "test_some.py:7" in text, text
    assert "too slow: long" in text and "out the cost was 75 us" in text, text
    assert "FAILED in setup:" in text and "E   RuntimeError: no such device" in text, text
    assert max(map(len, text.splitlines())) <= 300
