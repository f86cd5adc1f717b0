"""Some or all of up ahead of the down before it: small rings, filled again, on the adversarial machine."""

from itertools import pairwise

import pytest
import torch

pytest.importorskip("cutlass")

from mok.config import Shape
from mok.kernels_cute.machine import machine_of
from mok.kernels_cute.program import MIN_AHEAD, Forward, Tile
from mok.reference import forward_reference, integer_case
from tests.forward_runs import ForwardRun, emulated

SMS = 6


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("arch", "slots", "options"),
    [
        ("sm_90a", 3, {"grid": 6, "num_comm_ctas": 2, "ahead": 3}),
        ("sm_90a", 4, {"grid": 2, "num_comm_ctas": 1}),  # a single compute CTA
        ("sm_90a", 3, {"grid": 4, "num_comm_ctas": 2, "pair": True, "ahead": 3}),
        ("sm_100a", 3, {"grid": 12, "num_comm_ctas": 2}),
    ],
    ids=["hopper", "hopper-least", "hopper-pairs", "blackwell"],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_forward(arch, slots, options, seed):
    """The head's last minibatch lacks blocks, or is the only one of its macrobatch."""
    tile = machine_of(arch).tile_m
    assert slots >= MIN_AHEAD
    # Of rank 0 and 1: two macrobatches and a rest.
    case = integer_case(Shape(10 * tile, 128, 192, 4, 2, 1, 64), seed=seed)
    with emulated(arch, SMS, seed) as emulator:
        run = ForwardRun(
            case, arch, 2, minibatch=2 * tile, macrobatch=slots * 2 * tile, num_sms=SMS, **options
        )
        assert all(s.num_tokens > slots * 2 * tile for s in run.schedules)
        found = run.run(emulator.register)
        assert not emulator.report.findings
    assert not run.record.any()
    assert torch.equal(found, forward_reference(case, 2, tile=tile))


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_only_rings_with_a_slot_to_spare(slots):
    """With two, up would wait for the refill of the slot that the down before it has yet to read."""
    p = Forward(128 * 9, 0, 64, 64, 0, 128, 128 * slots, Tile(), ahead=1)
    kinds = [(task.kind, task.minibatch) for task in map(p.task, range(p.tasks))]
    order = [p.minibatch_at(i) for i in range(p.minibatches)]
    first = {pair: kinds.index(pair) for pair in kinds}
    up, down = sorted({kind for kind, _ in kinds})
    ahead = [first[up, later] < first[down, s] for s, later in pairwise(order)]
    assert ahead == [slots >= MIN_AHEAD] * (len(order) - 1)
