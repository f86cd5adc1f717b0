"""Tests that start many processes on one GPU: how many at once, and where in a run."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import conftest
from tests.conftest import in_parallel, one_of, spread
from tests.warm import specs

ROOT = Path(__file__).resolve().parents[1]

HOLD = """
import sys, time
from tests.conftest import one_of
name, seconds = sys.argv[1:]
print("asks", flush=True)
before = time.process_time()
with one_of(2, name):
    used = time.process_time() - before
    print("in", flush=True)
    begin = time.monotonic()
    time.sleep(float(seconds))
    end = time.monotonic()
print(begin, end, used)
"""


def holder(name: str, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD, name, str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def test_a_place_is_held_by_one_process_at_a_time():
    name = f"test-{os.getpid()}"
    started = [holder(name, 1.5) for _ in range(5)]
    spans = []
    for process in started:
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        begin, end, _ = map(float, out.split()[2:])
        spans.append((begin, end))
    for begin, _ in spans:
        assert sum(a <= begin < b for a, b in spans) <= 2
    # Two at once, not one after the other.
    assert any(a < begin < b for begin, _ in spans for a, b in spans)


def test_waiting_uses_no_processor_and_dead_processes_hold_nothing():
    name = f"test-dead-{os.getpid()}"
    dies = holder(name, 600.0)
    assert dies.stdout is not None
    assert [dies.stdout.readline() for _ in range(2)] == ["asks\n", "in\n"]
    with one_of(2, name) as mine:
        assert mine == 1  # the other one is taken
        waits = holder(name, 0.0)
        assert waits.stdout is not None and waits.stdout.readline() == "asks\n"
        time.sleep(2.0)
        assert waits.poll() is None
        dies.send_signal(signal.SIGKILL)
        out, _ = waits.communicate(timeout=60)
    dies.wait()
    assert out.split()[0] == "in"
    assert float(out.split()[-1]) < 0.2  # seconds of processor time in two of waiting


@pytest.mark.parametrize(("some", "others"), [(0, 5), (3, 0), (1, 1), (3, 8), (20, 601), (9, 4)])
def test_spread_is_even_and_keeps_the_order(some, others):
    crowd = [("crowd", i) for i in range(some)]
    rest = [("other", i) for i in range(others)]
    found = spread([*rest[: others // 2], *crowd, *rest[others // 2 :]], lambda x: x[0] == "crowd")
    assert [x for x in found if x[0] == "crowd"] == crowd
    assert [x for x in found if x[0] == "other"] == rest
    if some:
        places = [-1, *(i for i, x in enumerate(found) if x[0] == "crowd"), len(found)]
        gaps = [b - a - 1 for a, b in itertools.pairwise(places[1:-1])]
        assert all(others // some <= gap <= -(-others // some) for gap in gaps)
        for gap in (places[1] - places[0] - 1, places[-1] - places[-2] - 1):
            assert others // (2 * some) <= gap <= -(-others // (2 * some))


@pytest.mark.parametrize(
    ("few", "long", "short"), [(0, 0, 7), (3, 0, 2), (4, 6, 60), (1, 5, 0), (0, 3, 9)]
)
def test_what_wants_a_gpu_alone_comes_before_what_takes_long(few, long, short):
    counts = {"alone": few, "crowd": long, "spread": long, "gpu": short}
    given = [(mark, i) for i in range(max(counts.values())) for mark in counts if i < counts[mark]]
    found = in_parallel(given, lambda item: {item[0], "gpu"})
    assert sorted(found) == sorted(given)
    places = {mark: [i for i, item in enumerate(found) if item[0] == mark] for mark in counts}
    if long:  # what takes longest begins first
        assert max(places["spread"]) < min(places["crowd"])
    if few and long:
        assert max(places["alone"]) < min(places["crowd"] + places["spread"])
    if few and short > 3 * few:
        assert max(places["alone"]) < 4 * few  # within the first of the run, others between them
    if long and short > 3 * few + 4 * long:
        assert max(places["gpu"]) > max(
            places["crowd"]
        )  # and none of the long ones waits for the end
    for mark in counts:
        kept = [item for item in found if item[0] == mark]
        assert kept == sorted(kept)


TESTS = """
import pytest

@pytest.mark.crowd
@pytest.mark.parametrize("i", range(3))
def test_many(i, record_property):
    record_property("tells", f"{i} is enough")

@pytest.mark.parametrize("i", range(12))
def test_one(i):
    pass
"""


def test_a_run_with_several_workers_is_spread_and_tells(tmp_path):
    # A folder of its own, with our conftest's hooks.
    hooks = "pytest_collection_modifyitems, pytest_configure"
    (tmp_path / "conftest.py").write_text(f"from tests.conftest import {hooks}\n")
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\nmarkers = crowd\n")
    (tmp_path / "test_some.py").write_text(TESTS)
    orders = {}
    for workers in (0, 2):
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "-n"]
        run = subprocess.run(
            [*command, str(workers), str(tmp_path)], capture_output=True, text=True, cwd=tmp_path
        )
        assert run.returncode == 0, run.stdout + run.stderr  # all workers had one order
        for i in range(3):
            assert f"test_some.py::test_many[{i}]: {i} is enough" in run.stdout, run.stdout
        passed = [line.rpartition("::")[2] for line in run.stdout.splitlines() if "PASSED" in line]
        orders[workers] = ["many" in name for name in passed]
    assert orders[0] == [True] * 3 + [False] * 12
    assert orders[2][:3] != [True] * 3 and sum(orders[2]) == 3


@pytest.mark.parametrize(
    ("expression", "workers", "collects", "wanted"),
    [
        ("gpu and not slow", 14, False, True),
        ("(gpu or multi_gpu) and not slow", 24, False, True),
        ("not gpu and not multi_gpu", 2, False, False),
        ("", 2, False, False),
        ("gpu", None, False, False),
        ("gpu", 2, True, False),
    ],
)
def test_kernels_are_compiled_before_a_run_on_a_gpu(
    monkeypatch, expression, workers, collects, wanted
):
    ran: list[list[str]] = []
    monkeypatch.setattr(conftest.subprocess, "run", lambda command, **_: ran.append(command))
    option = SimpleNamespace(markexpr=expression, numprocesses=workers, collectonly=collects)
    conftest.pytest_sessionstart(SimpleNamespace(config=SimpleNamespace(option=option)))
    assert [command[1:] for command in ran] == [["-m", "tests.warm"]] * wanted


def test_what_is_compiled_before_is_what_layers_launch():
    """Each once, all for this GPU; among them what layers launch, traced ones and those for training."""
    found = specs("sm_90a")
    assert len(found) == len(set(found)) and {spec.arch for spec in found} == {"sm_90a"}
    names = {spec.name for spec in found}
    assert names >= {"forward_direct_save", "backward_ring_bf16", "forward_ring_trace", "schedule"}
