"""Timelines as files."""

import dataclasses
import itertools
import json

import pytest

from mok.config import Config, Shape
from mok.errors import MissingDependencyError, MokError
from mok.runtime.trace import Event, Trace
from mok.tools.simulator import Scenario, balanced, load_machine, simulate, timeline
from mok.tools.trace import timeline as picture
from mok.tools.trace.perfetto import read_perfetto, to_perfetto, write_perfetto

SHAPE = Shape(256, 512, 256, 8, 2, 2, 128)
SCENARIO = Scenario(
    SHAPE, Config(4, 4, 256, 512), load_machine("h200"), routing=balanced(SHAPE), push=False
)


@pytest.fixture(scope="module")
def traces():
    backward = dataclasses.replace(SCENARIO, direction="backward")
    return [timeline(simulate(s, record=True)) for s in (SCENARIO, backward)]


def test_a_simulated_timeline_has_every_task(traces):
    found = simulate(SCENARIO)
    assert len(traces[0].events) == found.tasks + found.items
    kinds = {e.kind for e in traces[0].events}
    assert kinds == {"shared up", "shared down", "up", "down", "dispatch", "combine"}
    assert {e.sm for e in traces[0].events if e.role == "comm"} <= set(range(4))
    assert min(e.sm for e in traces[0].events if e.role == "compute") >= 4
    assert 0 < traces[0].seconds <= found.kernel_ms * 1e-3
    assert "h200" in traces[0].source and "forward" in traces[0].source
    with pytest.raises(MokError, match="record=True"):
        timeline(found)


def test_perfetto_round_trip(traces, tmp_path):
    path = tmp_path / "t.json"
    write_perfetto(traces, path)
    again = read_perfetto(path)
    assert [t.source for t in again] == [t.source for t in traces]
    for before, after in zip(traces, again, strict=True):
        assert len(before.events) == len(after.events)
        assert after.seconds == pytest.approx(before.seconds, abs=1e-9)
        assert after.totals() == pytest.approx(before.totals(), rel=1e-3)
        for name in ("sm", "ticket", "minibatch", "expert", "block", "n"):
            mine = sorted(getattr(e, name) for e in before.events)
            assert sorted(getattr(e, name) for e in after.events) == mine


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d["traceEvents"][1].pop("dur"),
        lambda d: d["traceEvents"][1].update(dur=-1),
        lambda d: d["traceEvents"][1].update(ts="soon"),
        lambda d: d["traceEvents"][1].update(pid=9),
        lambda d: d["traceEvents"][1].update(pid=-1),
        lambda d: d["traceEvents"][1]["args"].update(sm="first"),
        lambda d: d["traceEvents"][1]["args"].update(colour=3),
        lambda d: d["otherData"].pop("traces"),
        lambda d: d["otherData"]["traces"][0].pop("source"),
        lambda d: d.update(traceEvents=7),
    ],
)
def test_a_damaged_timeline_is_refused(traces, tmp_path, damage):
    document = json.loads(json.dumps(to_perfetto(traces)))
    assert document["traceEvents"][1]["ph"] == "X"
    damage(document)
    (tmp_path / "t.json").write_text(json.dumps(document))
    with pytest.raises(MokError, match="as mok trace wrote it"):
        read_perfetto(tmp_path / "t.json")


def test_perfetto_is_what_viewers_expect(traces):
    document = json.loads(json.dumps(to_perfetto(traces)))
    slices = [e for e in document["traceEvents"] if e["ph"] == "X"]
    assert len(slices) == sum(len(t.events) for t in traces)
    for e in slices:
        assert e["dur"] >= 0 and e["ts"] >= 0 and e["pid"] in (0, 1)
    named = [e for e in document["traceEvents"] if e["ph"] == "M"]
    assert {e["name"] for e in named} == {"process_name", "thread_name"}
    assert any(e["args"]["name"] == "SM 0 comm" for e in named)


def test_slices_of_a_thread_never_overlap():
    """What an SM does at once stands in threads of its own, which a viewer needs."""
    events = [Event("up", "compute", 3, t * 1e-6, (t + 5) * 1e-6, 0, t) for t in range(0, 12, 2)]
    document = to_perfetto([Trace("x", events)])
    slices = [e for e in document["traceEvents"] if e["ph"] == "X"]
    by_thread: dict[int, list] = {}
    for e in slices:
        by_thread.setdefault(e["tid"], []).append((e["ts"], e["ts"] + e["dur"]))
    assert len(by_thread) == 3  # five microseconds long, one every two
    for spans in by_thread.values():
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(sorted(spans)))
    names = [e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"]
    assert names == ["SM 3 compute", "SM 3 compute +1", "SM 3 compute +2"]
    assert {e["args"]["sm"] for e in slices} == {3}


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "x.json"
    with pytest.raises(MokError, match="readable JSON"):
        read_perfetto(path)
    path.write_text("[1]")
    with pytest.raises(MokError, match="format"):
        read_perfetto(path)
    path.write_text('{"traceEvents": []}')
    with pytest.raises(MokError, match="format"):
        read_perfetto(path)


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_pictures(traces, tmp_path, ending):
    path = tmp_path / f"t.{ending}"
    picture.draw(traces, path, dpi=40)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG" if ending == "png" else b"<?xml") and len(data) > 5000


def test_every_kind_has_a_colour(traces):
    gb300 = Scenario(
        SHAPE, Config(4, 4, 256, 512), load_machine("gb300"), program="upstream",
        routing=balanced(SHAPE),
    )  # fmt: skip
    more = [
        timeline(simulate(dataclasses.replace(gb300, direction=d), record=True))
        for d in ("forward", "backward")
    ]
    for trace in [*traces, *more]:
        for e in trace.events:
            assert e.kind.removeprefix("shared ") in picture.COLOURS


def test_an_empty_or_odd_picture(tmp_path):
    picture.draw([Trace("nothing", [])], tmp_path / "e.png", dpi=30)
    picture.draw(
        [Trace("odd", [Event("new kind", "compute", 5, 0.0, 1e-6, 0, 0)])], tmp_path / "o.png"
    )
    with pytest.raises(MokError, match="png, svg"):
        picture.draw([], tmp_path / "x.gif")


def test_without_matplotlib_the_remedy_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"mok-cutedsl\[plot\]"):
        picture.draw([Trace("x", [])], tmp_path / "x.png")
