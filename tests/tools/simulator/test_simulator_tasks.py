"""The model's single tasks against those that an H200 recorded of itself (``mok trace``)."""

import json
from pathlib import Path

import pytest

from mok import cli

RECORD = Path(__file__).parents[3] / "docs" / "measurements" / "2026-12-01-h200-tasks.json"


def of_the_model(capsys, tmp_path, call):
    shape = ",".join(map(str, call["shape"]))
    argv = ["--shape", shape, "--ep", str(call["ep"]), "--machine", "h200", "--picture", "none"]
    assert cli.main(["trace", *argv, "--out", str(tmp_path / "t"), "--json"]) == 0
    (trace,) = json.loads(capsys.readouterr().out)["traces"]
    return trace["tasks_us"]


def test_tasks_cost_what_they_did_but_for_the_clock(capsys, tmp_path):
    """The recorded call came before the power limit, the model is fitted to times at it: one factor for all kinds.

    3 %: half of what the model's times of whole calls may be wrong by.
    """
    call = json.loads(RECORD.read_text())["calls"][0]
    hardware, _ = call["traces"]
    found = of_the_model(capsys, tmp_path, call)
    assert {kind: times["tasks"] for kind, times in found.items()} == {
        kind: times["tasks"] for kind, times in hardware["tasks_us"].items()
    }
    factors = {k: found[k]["period"] / t["period"] for k, t in hardware["tasks_us"].items()}
    assert factors["up"] == pytest.approx(factors["down"], rel=0.03)
    assert 1.0 < factors["up"] < 1.98 / 1.5  # clocks without the limit, and at it
