"""The engine: all work once, in order, nothing before what it waits for, nothing beyond the rates."""

from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mok.config import Config, Shape
from mok.errors import MokError
from mok.tools.simulator import Scenario, Switches, drawn, load_machine
from mok.tools.simulator.engine import SLICE_S, Engine, Rates, Shared
from mok.tools.simulator.load import loads
from mok.tools.simulator.simulate import build
from mok.tools.simulator.work import Counters, Pipeline, Tasks, Work, no_items

RATES = Rates(hbm=1e12, link=4e11, network=5e10, signal_s=1e-6)


# ---------------------------------------------------------------------- shared resources


@given(
    st.lists(st.tuples(st.floats(0, 1e-3), st.floats(1, 1e6)), min_size=1, max_size=60),
    st.randoms(use_true_random=False),
)
def test_a_shared_resource_gives_what_it_has(requests, rng):
    rate = 1e9
    shared = Shared(rate)
    rng.shuffle(requests)
    ends = []
    for begin, amount in requests:
        end = shared.reserve(begin, amount)
        assert end >= begin + amount / rate * (1 - 1e-9)
        ends.append(end)
    assert shared.used == pytest.approx(sum(a for _, a in requests))
    # What was given out in slices is what was asked for, and no slice gave more than it has.
    given_out = sum(shared.full - left for left in shared.left)
    assert given_out == pytest.approx(shared.used)
    assert min(shared.left) >= 0
    assert max(ends) >= min(b for b, _ in requests) + shared.used / rate - SLICE_S


def test_two_at_once_take_twice_as_long():
    shared = Shared(1e9)
    assert shared.reserve(0.0, 1e6) == pytest.approx(1e-3, abs=SLICE_S)
    assert shared.reserve(0.0, 1e6) == pytest.approx(2e-3, abs=SLICE_S)
    # A request for an earlier time that is still free is served then.
    late = Shared(1e9)
    late.reserve(5e-3, 1e6)
    assert late.reserve(0.0, 1e6) == pytest.approx(1e-3, abs=SLICE_S)


# ---------------------------------------------------------------------- programs


def small_work(waits, signals, targets) -> Work:
    counters = Counters()
    counters.add("c", targets)
    n = len(waits)
    tasks = Tasks(
        ("task",), [0] * n, [1e-6] * n, [0.0] * n, [0.0] * n, [0.0] * n, waits, signals, [()] * n,
        [0] * n,
    )  # fmt: skip
    return Work(tasks, no_items(), counters, Pipeline(1, 0.0, 0.0, 0.0), 2, 0, 1, 0.0)


def test_a_chain_takes_the_sum_of_its_parts():
    work = small_work([(), (0,), (1,)], [(0,), (1,), ()], [1, 1])
    end = Engine(work, RATES).play().end
    assert end == pytest.approx(3e-6 + 2 * RATES.signal_s)


def test_a_wait_on_later_work_is_refused():
    with pytest.raises(MokError, match="earlier work"):
        Engine(small_work([(0,), ()], [(), (0,)], [1]), RATES).play()


def test_a_wrong_target_is_refused():
    with pytest.raises(MokError, match="target must be what arrives"):
        Engine(small_work([(), ()], [(0,), ()], [2]), RATES).play()


@st.composite
def scenarios(draw):
    upstream = draw(st.booleans())
    machine = load_machine("gb300" if upstream else draw(st.sampled_from(["h200", "gb300"])))
    tile = 128 if machine.arch == "sm_90a" else 256
    ep = draw(st.sampled_from([1, 2, 3, 8]))
    shape = Shape(
        num_tokens=draw(st.integers(1, 600)),
        hidden_size=64 * draw(st.integers(1, 20)),
        intermediate_size=64 * draw(st.integers(1, 12)),
        num_experts=draw(st.integers(ep, 16)),
        topk=draw(st.integers(1, 4)),
        ep_size=ep,
        shared_intermediate_size=64 * draw(st.integers(1, 5)) if draw(st.booleans()) else None,
    )
    minibatch = tile * draw(st.integers(1, 3))
    config = Config(
        2 * draw(st.integers(1, 4)), 2 * draw(st.integers(1, 4)), minibatch,
        minibatch * draw(st.integers(1, 4)),
    )  # fmt: skip
    directions = ["forward", "backward"] + ([] if upstream else ["recompute"])
    switches = Switches(**{name: draw(st.booleans()) for name in Switches.__annotations__})
    return Scenario(
        shape,
        config,
        machine,
        draw(st.sampled_from(directions)),
        draw(st.sampled_from(["bf16", "mxfp8"])),
        "upstream" if upstream else "ours",
        routing=drawn(shape, draw(st.sampled_from([0.0, 1.0])), draw(st.integers(0, 9))),
        virtual=draw(st.booleans()),
        save_context=draw(st.booleans()),
        switches=switches if upstream else Switches(),
        push=not upstream and draw(st.booleans()),
    )


def play(scenario: Scenario, rank: int = 0):
    tile = 256 if scenario.program == "upstream" or scenario.machine.cluster == 2 else 128
    load = loads(scenario, tile)[rank]
    work = build(scenario, load)
    return work, Engine(work, RATES, record=True).play()


@settings(max_examples=60, deadline=None)
@given(scenarios(), st.integers(0, 7))
def test_all_work_once_and_nothing_too_early(scenario, rank):
    work, out = play(scenario, rank % scenario.shape.ep_size)
    tickets = Counter((is_comm, ticket) for is_comm, *_, ticket in out.events)
    assert tickets == Counter(
        [(False, i) for i in range(len(work.tasks))] + [(True, i) for i in range(len(work.items))]
    )
    # When each counter is complete, from the events alone.
    ready: dict[int, float] = defaultdict(float)
    arrivals: Counter = Counter()
    for is_comm, _, _, begin, end, _, ticket in out.events:
        rows = work.items if is_comm else work.tasks
        stored = end if is_comm else end + work.pipeline.store_s
        for i in rows.signals[ticket]:
            ready[i] = max(ready[i], stored + RATES.signal_s)
            arrivals[i] += 1
        if not is_comm:
            for i in work.tasks.early[ticket]:
                done = begin + work.tasks.busy[ticket]
                ready[i] = max(ready[i], done + RATES.signal_s)
                arrivals[i] += 1
    assert all(arrivals[i] == n for i, n in enumerate(work.counters.targets))
    for is_comm, _, _, begin, _, _, ticket in out.events:
        for i in (work.items if is_comm else work.tasks).waits[ticket]:
            assert begin >= ready[i] - 1e-12, (work.counters.classes[i], ticket)
    # A worker does one thing after the other, in program order.
    by_worker = defaultdict(list)
    for is_comm, w, _, begin, end, _, ticket in out.events:
        busy = end - begin if is_comm else work.tasks.busy[ticket]
        by_worker[is_comm, w].append((ticket, begin, begin + busy))
    for found in by_worker.values():
        found.sort()
        for (_, _, end), (_, begin, _) in pairwise(found):
            assert begin >= end - 1e-12
    last = max((e[4] for e in out.events), default=0.0)
    assert out.end >= last


@settings(max_examples=25, deadline=None)
@given(scenarios())
def test_waiting_and_working_fill_the_time(scenario):
    work, out = play(scenario)
    span = (out.compute_end - work.start_s) * work.workers
    assert out.busy + out.tail + sum(out.waits.values()) == pytest.approx(span)


def test_the_pipelines_overlap_as_they_say():
    def chain(accumulators: int, hold: float) -> float:
        counters = Counters()
        n = 4
        tasks = Tasks(
            ("t",), [0] * n, [4e-6] * n, [3e-6] * n, [hold] * n, [0.0] * n, [()] * n, [()] * n,
            [()] * n, [0] * n,
        )  # fmt: skip
        pipeline = Pipeline(accumulators, 1e-6, 0.0, 0.0)
        return Engine(Work(tasks, no_items(), counters, pipeline, 1, 0, 1, 0.0), RATES).play().end

    assert chain(1, 3e-6) == pytest.approx(4 * 7e-6)  # epilogue and main loop in turn
    assert chain(1, 1e-6) == pytest.approx(4 * 5e-6 + 2e-6)  # accumulator free early
    assert chain(2, 3e-6) == pytest.approx(4 * 4e-6 + 3e-6)  # only the last epilogue shows
