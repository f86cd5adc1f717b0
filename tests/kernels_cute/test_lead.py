"""Kernels whose first warpgroup runs ahead: exact, and without a report on the adversarial machine."""

import pytest

pytest.importorskip("cutlass")

from mok.config import Shape
from mok.reference import integer_case
from tests.backward_cases import Layer, assert_same, exact_run
from tests.backward_cases import emulated as emulated_backward
from tests.forward_runs import exact_on_hopper

pytestmark = pytest.mark.emulator


def forward(ep_size, seed, hidden=320, **config):
    case = integer_case(Shape(200, hidden, 256, 4, 2, ep_size, 192), seed=1)
    exact_on_hopper(case, ep_size, seed, minibatch=256, macrobatch=512, **config)


def test_forward():
    # H = 64: tiles with fewer K steps than the lead.
    forward(1, 3, hidden=64, save_context=True, lead=2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
@pytest.mark.parametrize("lead", [1, 2])
@pytest.mark.parametrize("ep_size", [1, 2])
def test_forward_with_many_seeds(ep_size, lead, seed):
    forward(ep_size, seed, save_context=True, lead=lead)


def test_backward():
    layer = Layer(Shape(40, 192, 320, 2, 2, 1, 128), kind="dropped", seed=1)
    run, want = exact_run(layer, "sm_90a", "cpu", grid=2, lead=2)
    assert_same(emulated_backward(run, 4, layer.seed), want)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
@pytest.mark.parametrize("lead", [1, 2])
def test_backward_with_many_seeds(lead, seed):
    for direct in (True, False):
        layer = Layer(
            Shape(150, 64, 128, 3, 3, 1, 64), kind="few_experts", direct=direct,
            ep_size=1 if direct else 2, seed=seed,
        )  # fmt: skip
        comm = 0 if direct else 2
        run, want = exact_run(layer, "sm_90a", "cpu", grid=2 + comm, num_comm_ctas=comm, lead=lead)
        assert_same(emulated_backward(run, 4, layer.seed), want)
