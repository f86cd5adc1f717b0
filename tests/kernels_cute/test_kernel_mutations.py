"""Damage to the megakernels is noticed: a sample of ``tests.kernel_mutations``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("numba", reason="the emulator needs numba")

from mok.tools.emulator.mutations import INVISIBLE
from tests.kernel_mutations import (
    Records,
    Run,
    judge,
    named_mutations,
    packed,
    table,
    tries_of,
    undamaged,
)
from tests.mutation_builds import BUILDS, Build

pytestmark = pytest.mark.emulator
KINDS = [
    "relax acquire 1",
    "delete barrier 1",
    "delete release 0",
    "relax release 0",
    "skip wait 0",
    "flip parity 0",
    "delete arrive 0",
    "drop expected bytes 0",
    "delete expect arrive 0",
    "delete cluster arrive 1",
    "delete fence.proxy 0",
    "weaken scope 1",
]


def test_a_sample_is_reported():
    """One of most kinds, on the plain machine with its checkers."""
    build = BUILDS["ring"]
    ptx = build.ptx()
    named = named_mutations(ptx)
    clean = undamaged(build, 0, None) | {"ptx": ""}
    lines = Records([clean]).lines[0, None]
    for kind in KINDS:
        (mutation,) = [m for name, m in named.items() if name.startswith(kind + ":")]
        assert mutation.line in lines and mutation.kind not in INVISIBLE
        found = judge(build, build.damage(ptx, mutation), 0, None, clean["bits"])
        assert found["result"] == "reported", kind


def test_most_mutations_can_be_seen():
    for name in ("ring", "direct"):
        named = named_mutations(BUILDS[name].ptx())
        visible = [m for m in named.values() if m.kind not in INVISIBLE]
        assert len(named) > 150 and len(visible) > 0.95 * len(named)


def entry(name, result, case, seed, **more):
    return {
        "name": name,
        "line": 7,
        "ptx": "0",
        "result": result,
        "case": case,
        "seed": seed,
    } | more


def test_the_plain_machine_comes_first():
    tries = tries_of(3)
    assert tries[:5] == [(0, None), (1, None), (2, None), (0, 0), (1, 1)] and len(tries) == 23


def test_a_run_goes_on_where_files_end():
    """Tries that do not come to the line are passed over; a file's order does not matter."""
    runs = [
        entry("undamaged", "clean", *at, bits="1", lines=packed({6, 7} if at == (1, 1) else {6}))
        for at in tries_of(2)
    ]
    assert Records(runs).left("a", 7) == [(1, 1)] and Records(runs).all_tried()
    tried = [entry("a", "survived", *at) for at in ((1, 1), (1, None))]
    for order in (tried, tried[::-1]):
        assert Records(order + runs).left("a", 6)[0] == (0, 2)
        assert Records(order + runs).left("a", 7) == []
    noticed = Records([*runs, entry("a", "wrong", 0, None), *tried])
    assert noticed.last["a"]["result"] == "wrong" and noticed.left("a", 6) == []
    with pytest.raises(AssertionError, match="other bits"):
        noticed.add(entry("undamaged", "clean", 1, 3, bits="2", lines=""))


def test_old_files_name_a_case_in_undamaged_tries_only():
    runs = [
        entry(f"undamaged {s or 0}", "clean", 0, s, bits="1", lines=packed({7})) for s in (None, 1)
    ]
    tried = [entry("a", "survived", 0, None)]
    for old in runs + tried:
        del old["case"]
    assert Records(tried + runs).left("a", 7) == [(1, 1)]


class Fragile(Build):
    """Its process dies without the barrier, and nothing else is noticed."""

    cases = (0, 1)

    def ptx(self):
        return "\nbar.sync 0;\nfence.acq_rel.gpu;\n"

    def run(self, case, rewrite, seed):
        if rewrite and "bar" not in rewrite(self.ptx()):
            os.kill(os.getpid(), signal.SIGKILL)
        return [torch.zeros(2)], {2, 3}


def test_a_run_survives_the_death_of_its_processes(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(BUILDS, "fragile", Fragile())
    file = tmp_path / "found.jsonl"
    for _ in range(2):  # the second run tries again what the first does not know
        Run("fragile", file, 2, 60, []).all(None)
        found = Records(map(json.loads, file.read_text().splitlines())).last
        results = {name.split(":")[0]: entry["result"] for name, entry in found.items()}
        assert results.pop("delete barrier 0") == "crashed"
        assert results == {"delete memory fence 0": "survived", "weaken scope 0": "survived"}
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    crashes = [e for e in lines if e["result"] == "crashed"]
    assert [(e["line"], e["detail"]) for e in crashes] == [(2, "exit code -9")] * 2
    table([file])
    assert "0 of 3 noticed (0.0%), 2 survived all tries, 0 still open, 1 not known" in (
        capsys.readouterr().out
    )


def test_damage_runs_for_a_while(tmp_path):
    """What is run on machines with many cores, on two, with a few mutations of one build."""
    done = subprocess.run(
        ["bash", "tests/damage.sh", "2", "400", "direct"],
        env={**os.environ, "OUT": str(tmp_path), "SAMPLE": "6", "KNOWN": ""},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    log = (tmp_path / "direct.log").read_text() if (tmp_path / "direct.log").exists() else ""
    assert done.returncode == 0, done.stdout + done.stderr + log
    assert done.stdout.startswith("clean\ndirect: rc 0, "), done.stdout
    lines = [json.loads(t) for t in (tmp_path / "mutations-direct.jsonl").read_text().splitlines()]
    clean = [e for e in lines if e["result"] == "clean"]
    damaged = [e for e in lines if not e["name"].startswith("undamaged")]
    assert len(clean) == len(tries_of(len(BUILDS["direct"].cases)))
    assert len({e["name"] for e in damaged}) == 6
    assert "reported" in {e["result"] for e in damaged}
    assert "crashed" not in {e["result"] for e in damaged}
    assert "26 undamaged runs clean, 6 mutations" in (tmp_path / "table.txt").read_text()
