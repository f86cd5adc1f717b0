"""The kernels' trace records: layout, reader, and what is refused."""

import numpy as np
import pytest

from mok.errors import MokError
from mok.kernels_cute import program as forward
from mok.kernels_cute import trace as layout
from mok.kernels_cute.backward import program as backward
from mok.runtime.trace import RECORD, Event, Trace, pack_records, read_records

# fmt: off
RECORDS = [
    # begin, end, sm, kind, role, ticket, minibatch, expert, block, n
    [(1000, 3000, 0, forward.DISPATCH, layout.COMM, 0, 0, -1, 64)],
    [(2000, 5000, 7, forward.UP, layout.COMPUTE, 4, 0, 2, 1, 3), (5000, 9000, 7, 4, 0, 9, 1)],
    [],
]
# fmt: on


def test_records_are_laid_out_as_the_kernels_write_them():
    assert RECORD.itemsize == layout.RECORD_BYTES == 48
    assert [RECORD.fields[n][1] for n in ("begin", "end", "sm", "n")] == [0, 8, 16, 40]
    for workers in (0, 1, 3, 4, 132):
        start = 4 * (layout.HEADER_WORDS + layout.count_words(workers))
        assert start % 16 == 0  # records are aligned
        assert layout.buffer_bytes(workers, 5) == start + 240 * workers


def test_what_is_written_is_read():
    data = pack_records(layout.FORWARD, 3, RECORDS, 4)
    assert len(data) == layout.buffer_bytes(3, 4)
    trace = read_records(data, "emulator")
    assert trace.source == "emulator, forward, rank 3" and trace.lost == 0
    assert trace.notes == {"program": "forward", "rank": 3}
    assert [(e.kind, e.role, e.sm, e.ticket, e.minibatch) for e in trace.events] == [
        ("dispatch", "comm", 0, 0, 0),
        ("up", "compute", 7, 4, 0),
        ("down", "compute", 7, 9, 1),
    ]
    assert [(e.expert, e.block, e.n) for e in trace.events] == [(-1, 64, -1), (2, 1, 3), (-1,) * 3]
    assert [round(e.begin * 1e9) for e in trace.events] == [0, 1000, 4000]
    assert trace.seconds == pytest.approx(8e-6)
    assert trace.totals()["down"] == pytest.approx(4e-6)


def test_a_cluster_counts_once():
    """Both CTAs of a pair record their tasks; items are each CTA's own. Shared tasks have no expert."""
    up = (2000, 5000, 6, forward.UP, layout.COMPUTE, 4, 0, 2, 1, 3)
    shared = (5000, 6000, 6, forward.SHARED_UP, layout.COMPUTE, 5, 3, 0, 1, 0)
    item = (1000, 3000, 0, forward.COMBINE, layout.COMM, 0, 0, -1, 64)
    twin = [(begin + 7, end, sm + 1, *rest) for begin, end, sm, *rest in (up, shared)]
    workers = [[item], [(*item[:2], 1, *item[3:])], [up, shared], twin]
    found = read_records(pack_records(layout.FORWARD, 0, workers, 4, cluster=2)).events
    assert [(e.kind, e.sm) for e in found] == [
        ("combine", 0), ("combine", 1), ("up", 6), ("shared up", 6),
    ]  # fmt: skip
    assert (found[-1].minibatch, found[-1].expert, found[-1].block) == (-1, -1, 1)
    alone = read_records(pack_records(layout.FORWARD, 0, workers, 4)).events
    assert len(alone) == 6


def test_times_of_single_tasks():
    """Tasks overlap on an SM; what one costs is the time since the SM's last end."""
    spans = [("up", 0, 2), ("up", 1, 5), ("down", 4, 6), ("up", 5, 9)]
    events = [
        Event(kind, "compute", 0, begin * 1e-6, end * 1e-6, 0, ticket)
        for ticket, (kind, begin, end) in enumerate(spans)
    ]
    events.append(Event("dispatch", "comm", 0, 0.0, 7e-6, 0, 0))  # another worker of the SM
    found = Trace("made", events).tasks()
    assert [(kind, times.tasks) for kind, times in found.items()] == [
        ("dispatch", 1), ("down", 1), ("up", 3),
    ]  # fmt: skip
    assert found["up"].median == pytest.approx(4e-6)
    assert found["up"].p10 == pytest.approx(2.4e-6) and found["up"].p90 == pytest.approx(4e-6)
    assert found["up"].period == pytest.approx(3e-6)
    assert found["down"].period == pytest.approx(1e-6) and found["dispatch"].period is None
    assert Trace("none", []).tasks() == {}


def test_kinds_are_those_of_the_programs():
    names = layout.NAMES[layout.FORWARD]
    for name in ("SHARED_UP", "SHARED_DOWN", "UP", "DOWN"):
        found = names[layout.COMPUTE][getattr(forward, name)]
        assert found == name.lower().replace("_", " ")
    assert names[layout.COMM] == {forward.DISPATCH: "dispatch", forward.COMBINE: "combine"}
    names = layout.NAMES[layout.BACKWARD]
    for name, found in (
        ("REPLAY", "replay"),
        ("DDOWN", "dgrad down"),
        ("DX", "dgrad up"),
        ("WDOWN", "wgrad down"),
        ("WGATE", "wgrad gate"),
        ("WUP", "wgrad up"),
    ):
        kind = getattr(backward, name)
        assert names[layout.COMPUTE][kind] == found
        if name != "REPLAY":
            assert names[layout.COMPUTE][backward.SHARED + kind] == f"shared {found}"
    assert names[layout.COMM] == {backward.DISPATCH: "dispatch", backward.PUSH: "push"}


def test_lost_records_are_counted():
    data = pack_records(layout.FORWARD, 0, RECORDS, 1)
    trace = read_records(data)
    assert trace.lost == 1 and len(trace.events) == 2


def test_no_records_is_an_empty_trace():
    for workers in ([], [[]]):
        trace = read_records(pack_records(layout.BACKWARD, 0, workers, 2))
        assert trace.events == [] and trace.seconds == 0


def damaged(word: int, value: int) -> bytes:
    data = bytearray(pack_records(layout.FORWARD, 0, RECORDS, 4))
    data[4 * word : 4 * word + 4] = np.int32(value).tobytes()
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        (b"", "begin with the kernel's header"),
        (b"x" * 100, "begin with the kernel's header"),
        (damaged(layout.H_VERSION, layout.VERSION + 1), "version"),
        (damaged(layout.H_PROGRAM, 9), "header of a trace must be valid"),
        (damaged(layout.H_CAPACITY, -1), "header of a trace must be valid"),
        (damaged(layout.H_CLUSTER, 0), "header of a trace must be valid"),
        (damaged(layout.H_WORKERS, 4), "must have"),
        (pack_records(layout.FORWARD, 0, RECORDS, 4)[:-1], "must have"),
        (pack_records(layout.FORWARD, 0, [[(5, 4, 0, 3, 0, 0, 0)]], 1), "end after it begins"),
        (pack_records(layout.FORWARD, 0, [[(5, 6, 0, 99, 0, 0, 0)]], 1), "kind 99"),
    ],
)
def test_what_is_no_trace_is_refused(data, rule):
    with pytest.raises(MokError, match=rule):
        read_records(data)


def test_events_are_sorted():
    late = Event("up", "compute", 1, 2.0, 3.0, 0, 1)
    early = Event("up", "compute", 0, 1.0, 3.0, 0, 0)
    assert Trace("x", [late, early]).events == [early, late]
