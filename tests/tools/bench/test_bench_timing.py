from __future__ import annotations

import pytest

from mok.tools.bench.timing import (
    Deadline,
    HostClock,
    Regime,
    Window,
    best_of,
    measure,
    reason_of,
    summarize,
)
from tests.tools.bench.fakes import FakeClock


def timed_step(clock: FakeClock, cost):
    calls = []

    def step(index):
        calls.append(index)
        clock.spend(cost(index) if callable(cost) else cost)

    return step, calls


@pytest.mark.parametrize("ms", [0.01, 0.4, 1.0, 7.0, 33.0, 500.0])
def test_a_window_is_warmed_and_long_enough(ms):
    clock = FakeClock()
    step, calls = timed_step(clock, ms)
    window = measure(step, clock, Regime(150, 300))
    assert calls == list(range(len(calls)))  # inputs take turns without a gap
    warm_ms = window.begin * 1e3
    assert 150 <= warm_ms <= 300 + 2 * ms
    assert window.end * 1e3 - warm_ms >= 300 - 1e-6
    assert window.calls >= 3
    assert window.median == pytest.approx(ms)


def test_a_slow_first_call_is_not_in_the_window():
    clock = FakeClock()
    step, _ = timed_step(clock, lambda i: 9000.0 if i == 0 else 2.0)
    window = measure(step, clock, Regime(150, 300))
    assert max(window.calls_ms) == pytest.approx(2.0)


def test_the_host_waits_only_between_warm_up_and_window():
    clock = FakeClock()
    step, _ = timed_step(clock, 1.0)
    before = None

    def counting(index):
        nonlocal before
        step(index)

    measure(counting, clock, Regime(150, 300))
    assert clock.waits <= 12  # a few for the warm-up's batches, one for the window


def test_short_calls_share_marks_and_calls_are_bounded():
    clock = FakeClock()
    step, _ = timed_step(clock, 0.001)
    window = measure(step, clock, Regime(1, 1e9, max_calls=4000))
    assert window.calls == 4000
    assert len(window.calls_ms) == 4000 // 500
    assert window.median == pytest.approx(0.001)


def test_the_median_ignores_an_outlier():
    clock = FakeClock()
    step, _ = timed_step(clock, lambda i: 50.0 if i % 10 == 0 else 3.0)
    assert measure(step, clock, Regime(150, 300)).median == pytest.approx(3.0)


def test_host_clock():
    clock = HostClock()
    window = measure(lambda _: sum(range(1000)), clock, Regime(1, 2))
    assert window.median > 0 and window.end > window.begin


def windows(*values):
    return [Window(list(v), len(v), 0, 1) for v in values]


def test_summary_is_of_rounds():
    found = summarize(windows([1, 2, 3], [2, 2, 9], [4, 4, 4]))
    assert found.rounds_ms == (2, 2, 4) and found.ms == 2 and found.spread == 1.0
    assert found.calls == 9 and found.p10 == 1 and found.p90 == 9


def test_the_spread_of_one_round_is_that_of_its_calls():
    found = summarize(windows([5.0]))
    assert (found.ms, found.spread, found.p10, found.p90) == (5.0, 0.0, 5.0, 5.0)
    assert summarize(windows([4, 5, 5, 5, 7])).spread == pytest.approx(0.6)


def test_best_of_takes_the_fastest_and_names_what_fails():
    clock = FakeClock()

    def broken():
        raise ValueError("no such tile\nmore text")

    number, failed = best_of(
        [lambda: clock.spend(3), broken, lambda: clock.spend(2), lambda: clock.spend(4)], clock
    )
    assert number == 2 and failed == {1: "ValueError: no such tile"}
    with pytest.raises(RuntimeError, match="no such tile"):
        best_of([broken], clock)


def test_reason_of():
    assert reason_of(RuntimeError("\n  first \nsecond")) == "RuntimeError: first"
    assert reason_of(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert len(reason_of(RuntimeError("x" * 1000))) < 300


def test_deadline_and_its_parts():
    clock = FakeClock()
    whole = Deadline(10, clock.now)
    part = whole.part(0.5)
    clock.spend(6000)
    assert part.over and not whole.over and whole.left == pytest.approx(4)
    assert whole.part(0.25).left == pytest.approx(1)
    clock.spend(5000)
    assert whole.over and whole.part(0.5).over
    endless = Deadline(None, clock.now)
    assert not endless.over and not endless.part(0.1).over
