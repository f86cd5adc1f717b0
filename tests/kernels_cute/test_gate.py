"""What kernels do behind a barrier that failed: nothing, so that no process waits or reads a dead peer."""

import pytest

pytest.importorskip("cutlass")

import torch

from mok.config import Shape
from mok.reference import integer_case, integer_gradient
from tests.backward_runs import BackwardRun, _Rank
from tests.forward_runs import ForwardRun, emulated
from tests.helpers import run_schedule, run_token_sum

pytestmark = pytest.mark.emulator
CASE = integer_case(Shape(90, 64, 64, 4, 2, 1, 64))
CLOSED = torch.ones(1, dtype=torch.int32)


@pytest.fixture
def emulator():
    with emulated("sm_90a", 6) as machine:
        yield machine


def test_the_schedule_is_empty_and_reads_no_peer(emulator):
    ids = [CASE.top_experts[:50], CASE.top_experts[50:]]
    for schedule in run_schedule(ids, 4, 2, "cpu", arch="sm_90a", gate=CLOSED):
        assert schedule.num_tokens == 0 and not schedule.tokens_per_expert.any()
        assert not schedule.error.any()


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_forward_does_nothing(arch):
    with emulated(arch, 6):
        run = ForwardRun(CASE, arch, 2, minibatch=256, macrobatch=256, grid=6, num_comm_ctas=2)
        before = run.heap.clone()
        run.gate = CLOSED.data_ptr()
        run.launch(0)
    made = run.saved[0]
    assert torch.equal(run.heap.nan_to_num(7), before.nan_to_num(7))
    assert all(made[name].isnan().all() for name in ("x_ring", "hidden", "y", "shared_y"))
    assert not run.record.any()


def test_backward_does_nothing(emulator):
    run = BackwardRun(
        CASE, integer_gradient(CASE), 2, direct=False, minibatch=128, macrobatch=256, grid=6,
        num_comm_ctas=2,
    )  # fmt: skip
    run.gate = CLOSED.data_ptr()
    emulator.register(CLOSED)
    rank = _Rank(run, 0)
    before = run.heap.clone()
    rank.backward()
    assert torch.equal(run.heap, before)
    assert all(out.isnan().all() for out in (rank.dx, rank.shared_dx, *rank.outputs.values()))
    assert not run.record.any()


def test_a_sum_of_results_that_never_came_is_nan(emulator):
    ids, weights = CASE.top_experts, CASE.router_weights
    y = torch.ones(180, 64, dtype=torch.bfloat16)
    on = {"num_experts": 4, "top_experts": ids, "router_weights": weights, "arch": "sm_90a"}
    assert not run_token_sum(y, gate=torch.zeros_like(CLOSED), **on).isnan().any()
    assert run_token_sum(y, gate=CLOSED, **on).isnan().all()
