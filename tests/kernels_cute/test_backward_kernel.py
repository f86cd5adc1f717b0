"""The Hopper backward kernel and those around it against the reference: exact cases bit for bit."""

import dataclasses

import pytest

pytest.importorskip("cutlass")

from mok.config import Shape
from mok.reference import (
    GRADIENT_LIMIT,
    backward_oracle,
    relative_l2,
)
from mok.tools.emulator import Emulator, KernelFault
from tests.backward_cases import (
    LARGE_DIRECT,
    LARGE_RING,
    Layer,
    assert_same,
    emulated,
    exact_run,
)

ARCH = "sm_90a"

# ------------------------------------------------------------------ emulator

DIRECT = [
    Layer(Shape(40, 64, 64, 2, 2, 1, 64), limit=128.0, gated=True, seed=1),
    Layer(Shape(40, 192, 320, 2, 2, 1, 128), kind="dropped"),
    # 150 tokens to one expert: it crosses macrobatches, and others have no rows.
    Layer(Shape(150, 64, 64, 3, 3), kind="few_experts", macrobatch=1, seed=2),
    Layer(Shape(0, 64, 64, 2, 2, 1, 64), gated=True),
]
RING = [
    Layer(Shape(40, 64, 128, 3, 2, 1, 64), kind="duplicates", ep_size=2, direct=False, gated=True),
    # A rank without tokens, ranks without rows, an expert larger than the ring.
    Layer(
        Shape(60, 64, 64, 3, 3, 1, 64),
        kind="one_expert",
        ep_size=3,
        direct=False,
        macrobatch=1,
        lengths=(40, 0, 20),
        seed=3,
    ),
]


def exact_in_the_emulator(layer, grad_mode="bf16"):
    comm = 0 if layer.direct else 2
    run, want = exact_run(layer, ARCH, "cpu", grad_mode, grid=2 + comm, num_comm_ctas=comm)
    assert_same(emulated(run, 4, layer.seed), want)


@pytest.mark.emulator
@pytest.mark.parametrize("layer", [*DIRECT, *RING], ids=str)
def test_exact_gradients_in_the_emulator(layer):
    exact_in_the_emulator(layer)


@pytest.mark.emulator
def test_a_context_that_no_forward_has_written_is_reported(monkeypatch):
    monkeypatch.setattr("tests.backward_runs._Rank.forward", lambda rank: None)
    run, _ = exact_run(DIRECT[0], ARCH, "cpu", grid=2)
    with (
        Emulator(ARCH, num_sms=4, check=True) as emulator,
        pytest.raises(KernelFault, match="read of global memory that nothing has written"),
    ):
        run.launch()
    assert all(f.rule.startswith("read of global") for f in emulator.report.findings)


@pytest.mark.emulator
@pytest.mark.slow  # each mode is a kernel of its own
@pytest.mark.parametrize("grad_mode", ["fp32", "bf16_add", "fp32_add"])
def test_grad_modes_in_the_emulator(grad_mode):
    exact_in_the_emulator(DIRECT[0], grad_mode)
    exact_in_the_emulator(DIRECT[2], grad_mode)


# ------------------------------------------------------------------ GPU

LARGE = [*DIRECT, *RING, LARGE_DIRECT, dataclasses.replace(LARGE_RING, limit=128.0)]


@pytest.mark.gpu
@pytest.mark.parametrize("grad_mode", ["bf16", "fp32", "bf16_add", "fp32_add"])
@pytest.mark.parametrize("layer", LARGE, ids=str)
def test_exact_gradients(hopper, layer, grad_mode):
    for grid in (132, 20):
        comm = 0 if layer.direct else 4
        run, want = exact_run(layer, ARCH, hopper, grad_mode, grid=grid, num_comm_ctas=comm)
        assert_same(run.run(), want)


@pytest.mark.gpu
@pytest.mark.parametrize("limit", [None, 1 + 2.0**-8])
def test_random_gradients_are_near_the_oracle(hopper, limit):
    layer = Layer(
        Shape(4096, 2048, 768, 16, 8, 1, 512), minibatch=8, macrobatch=64, limit=limit, gated=True
    )
    case, dy = layer.inputs(False, hopper)
    want = backward_oracle(case, dy).named()
    for name, value in layer.make_run(case, dy, ARCH, grid=132).run().named().items():
        assert relative_l2(value, want[name]) < GRADIENT_LIMIT, name
