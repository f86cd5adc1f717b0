"""Hopper kernels built for pairs of CTAs: exact, and without a report on the adversarial machine."""

import pytest

pytest.importorskip("cutlass")

from mok.config import Shape
from mok.reference import integer_case
from tests.backward_cases import Layer, assert_same, exact_run
from tests.backward_cases import emulated as emulated_backward
from tests.forward_runs import exact_on_hopper

pytestmark = pytest.mark.emulator


def forward(ep_size, seed, tokens=300, experts=3, **config):
    """Experts of odd and even numbers of blocks, odd numbers of column tiles, several minibatches."""
    case = integer_case(Shape(tokens, 320, 320, experts, 2, ep_size, 192), seed=1)
    exact_on_hopper(case, ep_size, seed, minibatch=384, macrobatch=768, pair=True, **config)


def test_forward():
    forward(1, 3, limited=False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
@pytest.mark.parametrize("ep_size", [1, 2])
def test_forward_with_many_seeds(ep_size, seed):
    forward(ep_size, seed, save_context=True)


def test_backward():
    layer = Layer(Shape(40, 192, 320, 2, 2, 1, 128), kind="dropped", seed=1)
    run, want = exact_run(layer, "sm_90a", "cpu", grid=4, pair=True, limited=False)
    assert_same(emulated_backward(run, 4, layer.seed), want)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_backward_with_many_seeds(seed):
    for direct in (True, False):
        layer = Layer(
            Shape(300, 64, 192, 3, 3, 1, 64), kind="few_experts", direct=direct,
            ep_size=1 if direct else 2, seed=seed, macrobatch=3,
        )  # fmt: skip
        comm = 0 if direct else 2
        run, want = exact_run(layer, "sm_90a", "cpu", grid=4 + comm, num_comm_ctas=comm, pair=True)
        assert_same(emulated_backward(run, 6, layer.seed), want)
