"""Launches are noted one at a time, and counters while a kernel runs."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch

pytest.importorskip("cutlass")

from mok.backends import choose_backend
from mok.runtime import launch as launching
from mok.tools.bringup import context
from mok.tools.bringup.context import Context, WrongError
from mok.tools.bringup.notes import Notes, read


@pytest.fixture
def notes(tmp_path):
    return Notes(tmp_path / "n.jsonl", tmp_path / "kernels")


def on_gpu(notes, **more):
    """A context that believes in a GPU."""
    backend = dataclasses.replace(choose_backend("sm_100a", emulate=True), kind="kernel")
    return Context(backend, notes, **more)


def kernel(name):
    resources = types.SimpleNamespace(registers=8, spill_bytes=0, smem_bytes=0, tmem_columns=0)
    spec = types.SimpleNamespace(name=name, arch="sm_100a", config=(("a", 1),))
    return types.SimpleNamespace(spec=spec, ptx=f"// {name}", cubin=b"x", resources=resources)


class Stream:
    """Busy for some queries after each launch."""

    def __init__(self, busy):
        self.busy, self.left, self.asked = busy, 0, 0

    def query(self):
        self.asked += 1
        self.left -= 1
        return self.left < 0


def test_a_launch_waits_for_the_one_before(notes, monkeypatch):
    stream = Stream(busy=3)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    order = []

    def run(name):
        order.append((name, stream.left))
        stream.left = stream.busy

    ctx = on_gpu(notes)
    with ctx.watched():
        for name in ("one", "two"):
            found = kernel(name)
            watcher = launching._watcher
            watcher(found)  # as ``launch`` does before the kernel
            run(name)
    assert launching._watcher is None
    assert order[0] == ("one", 0) and order[1][1] < 0  # the first was over
    assert stream.left < 0  # and so was the second when the rung ended
    events = read(notes.path)
    assert [e["event"] for e in events] == ["kernel", "launch", "kernel", "launch"]


def test_counters_are_noted_while_it_runs(notes, monkeypatch):
    stream = Stream(busy=0)
    stream.left = 8
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(context, "COUNTERS_EVERY_S", 1e-4)
    tickets = iter(range(100))
    ctx = on_gpu(notes, counters=lambda: {"ticket": next(tickets)})
    ctx._launched = "forward"
    ctx.wait()
    noted = [e for e in read(notes.path) if e["event"] == "counters"]
    assert len(noted) >= 2 and "forward runs for" in noted[0]["when"]
    assert noted[0]["counters"] == {"ticket": 0}


def test_counters_that_cannot_be_read_stop_nothing(notes):
    def lost():
        raise RuntimeError("the context is gone")

    on_gpu(notes, counters=lost).note_counters("after the failure")
    assert read(notes.path)[-1]["error"] == "the context is gone"


@pytest.mark.emulator
def test_launch_tells_the_watcher():
    from mok.tools.bringup.single import copy_kernel
    from mok.tools.emulator import Emulator

    seen = []
    a, b = torch.arange(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    with Emulator("sm_90a", 2) as emulator:
        emulator.register(a, b)
        before = launching.set_launch_watcher(lambda k: seen.append((k.spec.name, b.sum().item())))
        try:
            launching.launch(copy_kernel("sm_90a"), a.data_ptr(), b.data_ptr(), 2, 0)
        finally:
            assert launching.set_launch_watcher(before) is not None
    assert seen == [("bringup_copy", 0)] and torch.equal(a, b)


def test_what_differs_is_shown(notes):
    ctx = on_gpu(notes)
    want = torch.zeros(4, 6)
    found = want.clone()
    found[1, 2] = found[3, 5] = 2.0
    with pytest.raises(WrongError, match="2 of 24 elements differ"):
        ctx.compare("y", found, want)
    value = read(notes.path)[-1]
    assert value["first"][1] == {"at": [3, 5], "found": 2.0, "expected": 0.0}
    with pytest.raises(WrongError, match="shape"):
        ctx.compare("y", found, want[:2])
    assert ctx.compare("y", want + 1e-9, torch.ones(4, 6) * 1e-9, limit=1e-3) == "0.0e+00"
    with pytest.raises(WrongError, match=r"relative L2 error .*, limit 1\.0e-03"):
        ctx.compare("y", found, torch.ones(4, 6), limit=1e-3)
