"""Pairs and single CTAs on a Hopper GPU: exact, whatever the arguments."""

import pytest
import torch

pytest.importorskip("cutlass")

from mok.config import Shape
from mok.reference import forward_loop, integer_case
from tests.backward_cases import LARGE_DIRECT, LARGE_RING, assert_same, exact_run
from tests.forward_runs import ForwardRun

pytestmark = pytest.mark.gpu

VARIANTS = [{"stages": 3}, {"pair": True}, {"pair": True, "limited": False}, {"carry": False}]
LAYERS = [LARGE_DIRECT, LARGE_RING]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_exact_gradients(hopper, layer, variant):
    for grid in (132, 20):
        comm = 0 if layer.direct else 4
        run, want = exact_run(layer, "sm_90a", hopper, grid=grid, num_comm_ctas=comm, **variant)
        assert_same(run.run(), want)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("ep_size", [1, 2])
def test_exact_forward(hopper, ep_size, variant):
    case = integer_case(Shape(3000, 512, 320, 8, 4, ep_size, 192), seed=1, device=hopper)
    want = forward_loop(case).to(torch.bfloat16)
    for grid in (132, 20):
        comm = 0 if ep_size == 1 else 4
        layer = ForwardRun(
            case, "sm_90a", ep_size, minibatch=512, macrobatch=2048, grid=grid,
            num_comm_ctas=comm, num_sms=132, device=hopper, save_context=True, **variant,
        )  # fmt: skip
        assert torch.equal(layer.run(), want)
