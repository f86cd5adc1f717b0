"""The ladder on the GPU of this machine: its Hopper variant on an H200."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.spread]


def bringup(folder, *arguments):
    """Exit code and report of ``mok bringup``."""
    command = [sys.executable, "-m", "mok", "bringup", "--out", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    print(done.stdout[-4000:], done.stderr[-4000:])
    return done.returncode, json.loads((folder / "bringup.json").read_text())


@pytest.mark.timeout(1800)
def test_reaches_the_end(tmp_path):
    code, found = bringup(tmp_path)
    assert code == 0 and found["failure"] is None
    states = {check["name"]: check["state"] for check in found["checks"]}
    assert {*states.values()} <= {"ok", "not here"}
    assert found["device"]["driver"] and found["device"]["num_sms"] > 100
    assert {name for name, state in states.items() if state == "not here"} <= {"fabric-handle"}
    for check in found["checks"]:
        assert check["seconds"] < check["limit_s"], check["name"]


SINGLE = ["driver", "copy", "accumulator", "block-scaled", "loop", "loop-competing", "assumptions"]
LAYER = ["forward", "backward", "bits", "forward-mxfp8", "backward-mxfp8", "posix-handle"]


@pytest.mark.parametrize("rung", ["copy", "loop", "forward"])
@pytest.mark.timeout(900)
def test_stops_at_a_wrong_result(rung, tmp_path):
    """The report has the kernel's hash, and the emulator's result for the same inputs and PTX."""
    arguments = ("--from", rung, "--to", rung, "--inject", rung)
    code, found = bringup(tmp_path, *arguments)
    failure = found["failure"]
    assert code == 1 and failure["rung"] == rung and failure["state"] == "failed"
    assert failure["values"][-1]["mismatches"] == 1
    assert len(failure["kernel"]["ptx_sha256"]) == 64
    assert failure["emulated"]["state"] == "ok" and failure["emulated"]["same_ptx"]


@pytest.mark.slow
@pytest.mark.parametrize("rung", [*SINGLE, *LAYER, "tray"])
@pytest.mark.timeout(1800)
def test_every_rung_can_fail(rung, tmp_path):
    code, found = bringup(tmp_path, "--from", rung, "--to", rung, "--inject", rung)
    assert code == 1 and found["failure"]["rung"] == rung


@pytest.mark.timeout(300)
def test_ends_a_kernel_that_hangs(tmp_path):
    """A kernel of a minute, ended after 24 s: the counters of its time are in the report."""
    arguments = ("--from", "copy", "--to", "copy", "--inject", "copy=hang", "--limit-scale", "0.2")
    code, found = bringup(tmp_path, *arguments)
    failure = found["failure"]
    assert code == 1 and failure["state"] == "timed out"
    assert failure["kernel"]["name"] == "bringup_hold"
    assert failure["counters"]
    assert failure["emulated"]["state"] in ("ok", "timed out")


def test_a_process_that_dies(tmp_path):
    code, found = bringup(tmp_path, "--from", "copy", "--to", "copy", "--inject", "copy=crash")
    assert code == 1 and "SIGABRT" in found["failure"]["found"]
