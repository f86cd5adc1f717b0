"""What only changes when data are read: runs that end with their expert, and what L2 is told. Same bits."""

import pytest

pytest.importorskip("cutlass")

from mok.config import Shape
from mok.kernels_cute.gemm.operands import EVICT_FIRST
from mok.reference import integer_case
from mok.runtime.compile import get_kernel
from tests.backward_cases import LARGE_DIRECT, LARGE_RING, Layer, assert_same, exact_run
from tests.backward_cases import emulated as emulated_backward
from tests.forward_runs import exact_on_hopper, forward_kernel

FORWARD = {"by_expert": True, "expert_m": 2, "hints": True, "lean": True, "limited": False}
BACKWARD = FORWARD | {"weight_m": 3}


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("ep_size", "pair"),
    [(1, True), pytest.param(1, False, marks=pytest.mark.slow), (2, False),
     pytest.param(2, True, marks=pytest.mark.slow)],
)  # fmt: skip
def test_forward(ep_size, pair):
    """Experts of several runs, several minibatches, the ring refilled."""
    case = integer_case(Shape(300, 320, 320, 3, 2, ep_size, 192), seed=1)
    exact_on_hopper(case, ep_size, 3, minibatch=384, macrobatch=768, pair=pair, **FORWARD)


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("direct", "pair"),
    [(True, True), pytest.param(True, False, marks=pytest.mark.slow),
     pytest.param(False, False, marks=pytest.mark.slow),
     pytest.param(False, True, marks=pytest.mark.slow)],
)  # fmt: skip
def test_backward(direct, pair):
    layer = Layer(
        Shape(300, 320, 192, 3, 3, 1, 64), kind="few_experts", direct=direct,
        ep_size=1 if direct else 2, seed=1, macrobatch=3,
    )  # fmt: skip
    comm = 0 if direct else 2
    run, want = exact_run(
        layer, "sm_90a", "cpu", grid=4 + comm, num_comm_ctas=comm, pair=pair, **BACKWARD
    )
    assert_same(emulated_backward(run, 6, layer.seed), want)


def test_weights_and_results_are_given_up_first():
    """The policy of loads and stores; without hints none has another than the usual one."""
    first = f"{EVICT_FIRST}"
    plain = forward_kernel("sm_90a", direct=True, pair=True).ptx
    hinted = forward_kernel("sm_90a", direct=True, pair=True, **FORWARD).ptx
    assert first not in plain and first in hinted
    (used,) = forward_kernel("sm_90a", direct=True, pair=True, **FORWARD).resources.kernels
    assert used.spill_bytes == 0 and not used.warnings


@pytest.mark.parametrize("direct", [True, False])
def test_backward_does_not_spill(direct):
    layer = Layer(Shape(8, 64, 64, 2, 1), direct=direct)
    run, _ = exact_run(layer, "sm_90a", "cpu", grid=4, pair=True, **BACKWARD)
    (used,) = get_kernel(run.spec).resources.kernels
    assert used.spill_bytes == 0 and not used.warnings


@pytest.mark.gpu
@pytest.mark.parametrize("pair", [True, False])
@pytest.mark.parametrize("layer", [LARGE_DIRECT, LARGE_RING], ids=str)
def test_exact_gradients(hopper, layer, pair):
    comm = 0 if layer.direct else 4
    run, want = exact_run(
        layer, "sm_90a", hopper, grid=132, num_comm_ctas=comm, pair=pair,
        **{**BACKWARD, "limited": True},
    )  # fmt: skip
    assert_same(run.run(), want)
