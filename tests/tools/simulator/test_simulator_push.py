"""Tasks that send their rows themselves: which work that is, what links allow, and what was measured."""

import dataclasses
import json
import statistics
from pathlib import Path

import numpy as np
import pytest

from mok.config import Config, Shape
from mok.errors import MokError
from mok.tools.simulator import (
    Scenario,
    balanced,
    drawn,
    load_machine,
    recorded,
    simulate,
    timeline,
)
from mok.tools.simulator.benched import LIMITS, compare_bench, read
from mok.tools.simulator.compare import gains, records
from mok.tools.simulator.engine import SLICE_S, Engine, Rates
from mok.tools.simulator.load import loads
from mok.tools.simulator.plan import Search
from mok.tools.simulator.simulate import build
from mok.tools.simulator.suggest import NAMES as SUGGESTED
from mok.tools.simulator.suggest import with_comm_sms
from mok.tools.simulator.work import Counters, Items, Pipeline, Tasks, Work, no_items

H200 = load_machine("h200")
MEASUREMENTS = Path(__file__).parents[3] / "docs" / "measurements"
RECORDED = MEASUREMENTS / "2026-11-30-2xh200-push.json"
VIRTUAL = MEASUREMENTS / "2026-12-01-h200-push-virtual.json"


def both(shape: Shape, config: Config, machine=H200, **changes) -> tuple[Scenario, Scenario]:
    """Without and with push."""
    changes.setdefault("routing", balanced(shape))
    base = Scenario(shape, config, machine, push=False, **changes)
    return base, dataclasses.replace(base, push=True)


# ---------------------------------------------------------------------- what was measured


def test_six_times_that_nothing_was_fitted_on():
    """The recorded run, both kinds of it, within what is promised on shapes that were not fitted.

    No constant was chosen on it. That tasks and items ask for the links in order of time (``Engine.in_turns``) was
    decided with these times in sight: with all items first, Qwen3-30B with 20 comm SMs was 11.8 % too slow.
    """
    found = {r.name: r for r in records() if "push_ab" in r.name}
    errors = []
    for row in json.loads(RECORDED.read_text())["rows"]:
        kind, comm_sms = row["variant"].split(":")
        sizes = tuple(row["shape"])
        model = {7168: "DeepSeek-V3", 2048: "Qwen3-30B"}[sizes[1]]
        how = {"base": "combined", "push": "pushed"}[kind]
        record = found.pop(
            f"2 x H200 {model} forward, {comm_sms} comm SMs, {how} (push_ab), 2026-11-30"
        )
        s = record.scenario
        assert (record.use, record.limit) == ("check", 0.15)
        assert record.ms == pytest.approx(row["ms"], abs=1e-3) and row["same_bits"]
        assert s.shape == Shape(*sizes, 2) and s.pushes == (kind == "push")
        # As the program took them: the rows' tunables, in pairs, with a ring for all rows.
        assert s.comm_sms == int(comm_sms) and s.config.minibatch_size == row["minibatch"]
        assert s.config.macrobatch_size == Config.suggest(s.shape, "h200").macrobatch_size
        assert s.in_pairs and not s.save_context
        errors.append(abs(record.predict() / record.ms - 1))
    assert not found and len(errors) == 6
    assert statistics.median(errors) <= LIMITS["median"] and max(errors) <= LIMITS["worst"]


def test_sweeps_of_virtual_ranks():
    """Combined and pushed, 2 to 20 comm SMs: what is promised of shapes that were not fitted, pushed no worse.

    One constant was chosen on them, ``local_crowd``: with any from 0.8 to 1.5 the promise holds.
    """
    document = read(VIRTUAL)
    rows = compare_bench(document)
    assert len(rows) == len(document["rows"]) == 2 * (2 * 5 + 2 * 4)
    found = {False: [], True: []}
    for row, recorded_row in zip(rows, document["rows"], strict=True):
        found["pushed" in recorded_row["note"]].append(abs(row["error"]))
    worst, median = ({p: f(e) for p, e in found.items()} for f in (max, statistics.median))
    for push in found:
        assert median[push] <= LIMITS["median"] and worst[push] <= LIMITS["worst"]
    assert median[True] <= median[False] and worst[True] <= worst[False]


def test_what_is_suggested_is_among_the_best():
    """Qwen3-30B within 1 % of the sweep's best; DeepSeek-V3 within 3 %: there neither the model nor windows that
    differ by 4 to 8 % within themselves tell 4 comm SMs from 12.
    """
    times = {}
    for row in read(VIRTUAL)["rows"]:
        if "pushed" in row["note"]:
            number = int(row["config"].removeprefix("comm_sms="))
            sizes = tuple(row["shape"][name] for name in "THIEK")
            times.setdefault(sizes, {}).setdefault(number, []).append(row["ms"])
    assert {sizes[1]: sorted(found) for sizes, found in times.items()} == {
        2048: [4, 8, 12, 16, 20], 7168: [2, 4, 8, 12],
    }  # fmt: skip
    for (tokens, *sizes), found in times.items():
        ms = {number: statistics.mean(windows) for number, windows in found.items()}
        shape = Shape(tokens // 4, *sizes, 4)
        best, least = Config.suggest(shape, "h200").fwd_num_comm_sms, min(ms.values())
        if sizes[0] == 2048:
            assert ms[best] <= 1.01 * least
        else:
            around = [n for n in ms if n <= best][-1:] + [n for n in ms if n >= best][:1]
            assert all(ms[n] <= 1.03 * least for n in around)
            assert ms[2] > 1.2 * least  # so it is not whatever is suggested


# ---------------------------------------------------------------------- which work it is


def test_what_pushes_by_default():
    """Forward of Hopper's rings, as its kernels; what is given counts, where there is something to push."""
    shape, config = Shape(1024, 1024, 512, 16, 4, 2), Config(4, 4, 1024, 4096)
    gb300 = load_machine("gb300")

    def pushes(machine=H200, ep=2, push=None, **changes) -> bool:
        of_ranks = dataclasses.replace(shape, ep_size=ep)
        return Scenario(of_ranks, config, machine, push=push, **changes).pushes

    assert pushes() and pushes(virtual=True) and pushes(precision="mxfp8", ep=1)
    assert not pushes(push=False) and not pushes(gb300) and not pushes(ep=1)
    assert not pushes(direction="backward") and not pushes(direction="recompute")
    assert pushes(direction="backward", push=True) and pushes(gb300, push=True)
    assert not pushes(gb300, program="upstream")
    pytest.importorskip("cutlass", reason="kernels need the CuTe DSL")
    from mok.kernels_cute.forward import ForwardKernel

    for arch, machine in (("sm_90a", H200), ("sm_103a", gb300)):
        assert ForwardKernel(False, arch).push == pushes(machine)
        assert ForwardKernel(True, arch).push == pushes(machine, ep=1)


NAMES = {"forward": ("down", "combine", "slot"), "backward": ("dgrad up", "push", "slot pushed")}


@pytest.mark.parametrize("direction", NAMES)
@pytest.mark.parametrize("machine", ["h200", "gb300"])
@pytest.mark.parametrize("ep", [3, 16])  # 16 ranks of H200s are two hosts
def test_bytes_move_from_items_to_tasks(machine, ep, direction):
    """Padding, a column tile beyond H, skew: the same bytes on the links; in memory, y is not there."""
    shape = Shape(700, 320, 192, 48, 3, ep, 128)
    config = Config(4, 4, 512, 1024)
    base, push = both(
        shape, config, load_machine(machine), routing=drawn(shape, 1.0), pairs=False,
        direction=direction,
    )  # fmt: skip
    tile_m = 128 * base.machine.cluster
    for load in loads(base, tile_m)[:4]:
        before, after = build(base, load), build(push, load)
        down = before.tasks.names.index(NAMES[direction][0])
        combine = before.items.names.index(NAMES[direction][1])
        combined = [i for i, kind in enumerate(before.items.kind) if kind == combine]
        assert combined and combine not in after.items.kind
        # What is left are the dispatches, in their order, with the same costs.
        rest = [i for i, kind in enumerate(before.items.kind) if kind != combine]
        for name in ("busy", "rx", "tx", "net", "hbm", "minibatch"):
            values = getattr(before.items, name)
            assert getattr(after.items, name) == [values[i] for i in rest], name
        for column, name in enumerate(("rx", "tx", "net")):
            moved = sum(getattr(before.items, name)[i] for i in combined)
            assert sum(s[column] for s in after.tasks.sent) == pytest.approx(moved)
        assert sum(s[1] for s in after.tasks.sent) > 0
        for kind, sent in zip(after.tasks.kind, after.tasks.sent, strict=True):
            assert kind == down or not any(sent)
        # y written, and read by combines.
        tasks = before.tasks.kind.count(down)
        payload = sum(before.items.hbm[i] for i in combined) / 2
        assert payload == pytest.approx(2 * load.routes * shape.hidden_size)
        saved = sum(before.tasks.hbm) + sum(before.items.hbm)
        saved -= sum(after.tasks.hbm) + sum(after.items.hbm)
        assert saved == pytest.approx(tasks * 2 * tile_m * 256 + payload)
        # The other tasks are what they were, and wait for whatever is still there.
        gone = {i for i, name in enumerate(before.counters.classes) if name == NAMES[direction][2]}
        before.tasks.waits = [tuple(i for i in ids if i not in gone) for ids in before.tasks.waits]
        others = [i for i, kind in enumerate(before.tasks.kind) if kind != down]
        for name in ("kind", "busy", "tail", "hbm", "waits", "signals", "minibatch"):
            old, new = getattr(before.tasks, name), getattr(after.tasks, name)
            assert [old[i] for i in others] == [new[i] for i in others], name
        assert before.tasks.busy == after.tasks.busy and before.tasks.kind == after.tasks.kind


@pytest.mark.parametrize("direction", NAMES)
def test_nobody_waits_for_a_slot(direction):
    shape = Shape(2048, 1024, 512, 16, 4, 2)
    base, push = both(shape, Config(4, 4, 1024, 2048), direction=direction)
    waited = {}
    for scenario in (base, push):
        work = build(scenario, loads(scenario, 128)[0])
        ids = [i for ids in [*work.tasks.waits, *work.items.waits] for i in ids]
        waited[scenario.push] = {work.counters.classes[i] for i in ids}
    gone = {NAMES[direction][2]} | ({"results"} if direction == "backward" else set())
    assert waited[False] - waited[True] == gone and waited[True] < waited[False]


def test_pairs_push_what_their_tasks_do():
    shape = Shape(4096, 2048, 768, 64, 8, 2)
    one = both(shape, Config(8, 8, 2048, 65536), pairs=False)[1]
    two = dataclasses.replace(one, pairs=None)
    assert two.in_pairs
    load = loads(one, 128)[0]
    single, double = build(one, load).tasks, build(two, load).tasks
    assert len(double.sent) == len(double) < len(single.sent) == len(single)
    for column in range(3):
        total = sum(s[column] for s in single.sent)
        assert sum(s[column] for s in double.sent) == pytest.approx(total)
    for tickets, sent in zip(double.tickets, double.sent, strict=True):
        assert sent[1] == pytest.approx(sum(single.sent[i][1] for i in tickets))


@pytest.mark.parametrize(
    ("ep", "direction"), [(1, "forward"), (1, "backward"), (2, "recompute")], ids=str
)
def test_where_nothing_is_pushed_nothing_changes(ep, direction):
    shape = Shape(1024, 1024, 512, 16, 4, ep)
    base, push = both(shape, Config(4, 4, 1024, 4096), direction=direction)
    assert push.push and not push.pushes
    assert simulate(base).as_dict() == simulate(push).as_dict()


@pytest.mark.parametrize("direction", NAMES)
def test_a_rank_without_rows(direction):
    shape = Shape(300, 256, 128, 4, 2, 2, 128)
    routing = recorded(np.zeros((2, 300, 2), np.int64), shape)  # all to an expert of rank 0
    push = both(shape, Config(4, 4, 256, 512), routing=routing, direction=direction)[1]
    found = [build(push, load) for load in loads(push, 128)]
    assert len(found[0].items) and not len(found[1].items) and len(found[1].tasks)
    assert not any(any(sent) for sent in found[1].tasks.sent)
    assert simulate(push).rank == 0


def test_upstreams_program_has_no_push():
    shape = Shape(1024, 1024, 512, 16, 4, 2)
    with pytest.raises(MokError, match="only our program pushes"):
        both(shape, Config(4, 4, 1024, 4096), load_machine("gb300"), program="upstream")
    rows = gains(both(shape, Config(4, 4, 1024, 4096), load_machine("gb300"))[1])
    assert [rows[0]["program"], rows[-1]["program"]] == ["upstream", "ours"]


# ---------------------------------------------------------------------- links

US = 1e-6
RATES = Rates(hbm=1e12, link=1e12, network=1e12, signal_s=0.0)


def chain(sent, *, workers=1, staged=0.5, accumulators=1, items=None) -> Engine:
    """Tasks of 10 us, their epilogues, and what these send; nobody waits for anything."""
    n, tail = len(sent), 1 * US
    tasks = Tasks(
        ("t",), [0] * n, [10 * US] * n, [tail] * n, [tail] * n, [0.0] * n, [()] * n, [()] * n,
        [()] * n, [0] * n, sent=sent,
    )  # fmt: skip
    pipeline = Pipeline(accumulators, 10 * US, 0.0, 0.0, staged=staged)
    work = Work(tasks, items or no_items(), Counters(), pipeline, workers, 2, 1, 0.0)
    return Engine(work, RATES, record=True)


def test_a_worker_goes_on_once_its_rows_fit_the_staging_buffers():
    # Each task sends for 8 us of the port's time.
    some = [(0.0, 8e6, 0.0)]

    def ends(**options) -> list[float]:
        return [e[4] / US for e in chain(some * 3, **options).play().events]

    near = {"abs": SLICE_S / US}
    assert ends() == pytest.approx([14, 28, 42], **near)
    assert ends(staged=0.0) == pytest.approx([18, 36, 54], **near)
    assert ends(staged=1.0) == pytest.approx([11, 22, 33], **near)
    assert ends(accumulators=2) == pytest.approx([14, 24, 34], **near)
    # A task that pushes nothing fills the same buffers: not before 30 us of rows have left them.
    other = [e[4] / US for e in chain([(0.0, 30e6, 0.0), (0.0, 0.0, 0.0)]).play().events]
    assert other == pytest.approx([25, 40], **near)
    found = chain(some * 3).play()
    assert found.waits["link"] == pytest.approx(2 * 3 * US, abs=SLICE_S)  # the last one is the end
    assert found.tail == pytest.approx(2 * US)
    # The kernel lasts until the last rows are gone.
    last = chain([(0.0, 30e6, 0.0)], staged=1.0).play()
    assert last.events[0][4] == pytest.approx(11 * US)
    assert last.end == pytest.approx(40 * US, abs=SLICE_S)


def test_workers_that_push_at_once_share_the_link():
    """8 workers whose epilogues end together send eight times as long; none gets ahead of the link."""
    sent = [(0.0, 4e6, 0.0)] * 32
    found = chain(sent, workers=8).play()
    assert found.end >= (10 + 32 * 4) * US - SLICE_S
    assert found.end <= (10 + 32 * 4 + 10) * US
    assert found.usage["tx"] == pytest.approx(32 * 4e6)
    # Received and sent bytes have a port's direction each; the slower one decides.
    both_ways = chain([(4e6, 1e6, 0.0)] * 32, workers=8).play()
    assert both_ways.end == pytest.approx(found.end, abs=SLICE_S)


def test_items_and_pushes_reach_the_link_in_order_of_time():
    """Items that wait for nothing and fill the link twice over do not take it long before their time."""
    n, amount = 100, 4e6  # 4 us of the link
    items = Items(
        ("", "dispatch"), [1] * n, [4 * US] * n, [0.0] * n, [amount] * n, [0.0] * n, [0.0] * n,
        [()] * n, [()] * n, [0] * n,
    )  # fmt: skip
    tasks = [(0.0, 2e6, 0.0)] * 10
    found = chain(tasks, items=items).play()
    assert found.usage["tx"] == pytest.approx(n * amount + 10 * 2e6)
    # A task is held up by the items under way, one of each worker, not by all.
    alone = chain(tasks).play().compute_end
    assert alone + 4 * US < found.compute_end < alone + 10 * 3 * 4 * US < n * 4 * US
    assert found.comm_end == pytest.approx((n * 4 + 10 * 2) * US, abs=SLICE_S)


def test_compute_does_not_push_faster_than_the_link():
    shape = Shape(8192, 2048, 768, 128, 8, 8)
    config = Config(12, 12, 2816, 76032)
    slow = H200.with_constants(nvlink_bytes_per_s=H200["nvlink_bytes_per_s"] / 30)
    found = simulate(both(shape, config, slow)[1])
    assert found.bound.startswith("NVLink")
    assert found.bounds["NVLink"] <= found.kernel_ms <= 1.3 * found.bounds["NVLink"]
    free = simulate(both(shape, config)[1])
    assert free.kernel_ms < found.kernel_ms / 5
    assert found.shares["link"] + found.shares.get("rows", 0.0) > 0.5 > free.shares["link"]
    # Down alone, its rows on the link after dispatch is through: more comm SMs do not help.
    assert found.shares["link"] > 0.1


@pytest.mark.parametrize("constant", ["nvlink_bytes_per_s", "sm_push_bytes_per_s"])
def test_a_faster_link_is_never_slower(constant):
    shape = Shape(4096, 2048, 768, 128, 8, 8)
    for comm in (12, 20):
        push = both(shape, Config(comm, comm, 2816, 45056))[1]
        times = [
            simulate(
                dataclasses.replace(
                    push, machine=H200.with_constants(**{constant: H200[constant] * factor})
                )
            ).ms
            for factor in (0.25, 1, 2)
        ]
        assert times[0] > times[1] * 0.98 and times[1] > times[2] * 0.98
        assert times[0] > 1.02 * times[2]


# ---------------------------------------------------------------------- tunables


def test_comm_sms_with_push():
    """Fewer where combines took half of them; by default forward's with push, backward's without."""
    for sizes, most in (((8192, 7168, 2048, 64, 8), 6), ((8192, 2048, 768, 128, 8), 12)):
        shape = Shape(*sizes, 2)
        plain, push, kernels = (Config.suggest(shape, "h200", push=p) for p in (False, True, None))
        assert kernels == Config.suggest(shape, "h200")
        assert plain.push is False and push.push is kernels.push is None  # what the layer then runs
        assert with_comm_sms(plain, shape, "sm_90a", 132) == plain  # the config's word counts
        plain = dataclasses.replace(plain, push=None)
        assert push.fwd_num_comm_sms <= most < plain.fwd_num_comm_sms
        assert push.bwd_num_comm_sms <= plain.bwd_num_comm_sms
        assert kernels == dataclasses.replace(plain, fwd_num_comm_sms=push.fwd_num_comm_sms)
        assert dataclasses.replace(kernels, bwd_num_comm_sms=push.bwd_num_comm_sms) == push
        assert with_comm_sms(plain, shape, "sm_90a", 132, push=True) == push
        assert with_comm_sms(plain, shape, "sm_90a", 132) == kernels
        if sizes[1] > 2048:
            continue
        # Within 3 % of the best numbers for the whole call.
        search = Search(shape, H200, routing=balanced(shape), push=True)
        for direction, name in SUGGESTED:
            times = [
                search.run(dataclasses.replace(push, **{name: n}), direction).ms
                for n in search.comm_sms()
                if n <= 20
            ]
            assert min(times) / search.run(push, direction).ms >= 0.97
    blackwell = [Config.suggest(shape, "gb300", push=p) for p in (None, False)]
    assert blackwell[0] == dataclasses.replace(blackwell[1], push=None)


def test_a_timeline_names_it():
    shape = Shape(512, 512, 256, 16, 2, 2)
    for scenario in both(shape, Config(4, 4, 512, 2048)):
        found = timeline(simulate(scenario, record=True))
        kinds = {e.kind for e in found.events}
        assert ("ours with push, forward" in found.source) == scenario.push
        assert ("combine" in kinds) != scenario.push and {"dispatch", "down"} <= kinds
