"""Launch control: pairs give their SMs away when asked, and only then; the bits stay.

A query that is refused means one of two things. While clusters are left to start, someone else needs the
SMs: the pair retires. When none is left, the pair draws to the end and asks no more.
"""

import functools

import pytest

pytest.importorskip("cutlass")

import torch

from mok.config import Shape
from mok.reference import forward_oracle, random_case, relative_l2
from mok.tools.emulator import Competitor
from mok.tools.emulator.machine import Machine
from tests.forward_runs import ForwardRun, emulated

pytestmark = pytest.mark.emulator
ARCH, SMS = "sm_100a", 6
WAYS = {"ep1": {"ep_size": 1}, "ep2": {"ep_size": 2, "num_comm_ctas": 2}}
EVERY_WAY = pytest.mark.parametrize("way", WAYS)


@functools.cache
def case():
    """12 tasks on one rank, 8 on the first of two."""
    return random_case(Shape(72, 64, 64, 5, 2, 1, 64))


def run(way, *, grid=40, seed=None, preempt=None):
    """The layer after its run, and its output."""
    with emulated(ARCH, SMS, seed, preempt=preempt) as emulator:
        layer = ForwardRun(
            case(), ARCH, minibatch=256, macrobatch=256, grid=grid, num_sms=SMS, **WAYS[way]
        )
        output = layer.run(emulator.register)
    assert not layer.record.any()
    return layer, output, emulator.report


@functools.cache
def expected():
    _, output, _ = run("ep1", grid=6)
    assert relative_l2(output, forward_oracle(case())) < 3.5e-3
    return output


def started(layer):
    """Clusters that started or were cancelled, per launch."""
    return [int(saved["counters"][64]) for saved in layer.saved]


@pytest.fixture
def watch(monkeypatch):
    """Counts of what happened: clusters started, launches cancelled, queries refused."""
    expected()  # not counted
    counts = {"started": 0, "granted": 0, "refused": 0, "probability": 0.0}
    start, cancel = Machine.start_cluster, Machine.cancel_cluster

    def start_cluster(machine, *args):
        counts["started"] += 1
        return start(machine, *args)

    def cancel_cluster(machine):
        refuse = machine.engine.random.random() < counts["probability"]
        number = None if refuse else cancel(machine)
        counts["refused" if number is None else "granted"] += 1
        return number

    monkeypatch.setattr(Machine, "start_cluster", start_cluster)
    monkeypatch.setattr(Machine, "cancel_cluster", cancel_cluster)
    return counts


@EVERY_WAY
def test_a_grid_that_is_used_up_is_no_reason_to_leave(way, watch):
    """As many clusters as fit at once: each is refused once, stays, and does not ask again."""
    layer, output, _ = run(way, grid=SMS)
    assert torch.equal(output, expected())
    clusters = SMS // 2
    launches = layer.ep_size
    assert started(layer) == [clusters] * launches
    comm = layer.num_comm_ctas // 2
    assert watch == {
        "started": clusters * launches,
        "granted": 0,
        "refused": (clusters - comm) * launches,
        "probability": 0.0,
    }


@EVERY_WAY
def test_surplus_clusters_are_cancelled_not_started(way, watch):
    """More clusters than tasks: the first ones cancel all others, then leave."""
    layer, output, _ = run(way, grid=80)
    assert torch.equal(output, expected())
    assert started(layer) == [40] * layer.ep_size
    assert watch["started"] == SMS // 2 * layer.ep_size
    assert watch["granted"] == (40 - SMS // 2) * layer.ep_size


@EVERY_WAY
def test_refused_while_clusters_wait(way, watch):
    """Refusals at random: pairs retire, and the hardware starts the clusters that they left waiting."""
    watch["probability"] = 0.6
    for seed in range(2):
        layer, output, _ = run(way, seed=seed)
        assert torch.equal(output, expected())
        assert started(layer) == [20] * layer.ep_size
    assert watch["started"] > 2 * layer.ep_size * SMS // 2  # beyond those that fit at once
    # Each cluster that ran was refused at most once, and asked no more.
    assert watch["refused"] <= watch["started"]


def give_way(way, sms, seed, at=None):
    """A grid of higher priority with ``sms`` blocks arrives in mid-run."""
    _, output, report = run(way, seed=seed, preempt=Competitor(sms, at=at, kernel="forward"))
    assert torch.equal(output, expected())
    return report.preemptions


@pytest.mark.parametrize(("way", "sms"), [("ep1", 2), ("ep1", SMS), ("ep2", 3)])
def test_a_competing_grid_gets_its_sms(way, sms, monkeypatch):
    """Our clusters leave with work left, the other grid ends before the layer does, the rest is launched
    again and does that work."""
    expected()
    drawn = []  # tickets drawn when a cluster was launched after the other grid had come
    layers = []
    launch, start = ForwardRun.launch, Machine.start_cluster

    def watched_launch(layer, *args):
        layers.append(layer)
        launch(layer, *args)

    def watched_start(machine, *args):
        if machine.rival is not None and machine.rival.record.taken:
            drawn.append(int(layers[-1].saved[-1]["counters"][0]))
        start(machine, *args)

    monkeypatch.setattr(ForwardRun, "launch", watched_launch)
    monkeypatch.setattr(Machine, "start_cluster", watched_start)
    met = [m for seed in range(2) for m in give_way(way, sms, seed, at=40_000)]
    assert all(m.ended is not None for m in met)
    assert any(m.left and m.refused and m.relaunched for m in met)
    tasks = {"ep1": 12, "ep2": 8}[way]
    assert min(drawn) < tasks


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 5))
@pytest.mark.parametrize("sms", range(1, SMS + 1))
@EVERY_WAY
def test_a_competing_grid_of_any_size(way, sms, seed):
    met = [m for m in give_way(way, sms, seed) if m.arrived is not None]
    # It ends, or all of it has begun when the layer ends on other SMs, or nothing of the layer had to go for it.
    assert all(
        m.ended is not None or m.blocks == sms or m.refused == m.relaunched == 0 for m in met
    )
