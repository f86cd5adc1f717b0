"""The Blackwell backward kernel in the emulator, on virtual ranks, against the reference.

The unmarked tests are a sample that fits CI; ``slow`` ones are the full matrix.
"""

import dataclasses
import functools

import pytest
import torch

pytest.importorskip("cutlass")

from mok.config import Shape
from mok.reference import GRADIENT_LIMIT, backward_oracle, relative_l2
from tests.backward_cases import Layer, assert_same, emulated, exact_run

ARCH = "sm_100a"
SMS = 8
pytestmark = pytest.mark.emulator

# 300 rows of one expert are two tiles: in a ring of one, its accumulators are handed on.
SMALL = Shape(300, 64, 64, 3, 2, 1, 64)
EIGHT = dataclasses.replace(SMALL, num_experts=8)
DIRECT = Layer(SMALL, kind="few_experts", macrobatch=1, gated=True, limit=128.0)
PAIR = Layer(SMALL, kind="few_experts", ep_size=2, direct=False, macrobatch=1, gated=True)
QUAD = Layer(SMALL, ep_size=4, direct=False, lengths=(150, 0, 40, 110))
LAYERS = {"ep1": DIRECT, "ep2": PAIR, "ep4": QUAD}


def launch(layer, grid=None, comm=2):
    comm = 0 if layer.direct else comm
    return {"grid": grid or 4 + comm, "num_comm_ctas": comm}


def exact(layer, grad_mode="bf16", seed=None, num_sms=SMS, **options):
    run, want = exact_run(layer, ARCH, "cpu", grad_mode, **(launch(layer) | options))
    assert_same(emulated(run, num_sms, seed), want)


# ------------------------------------------------------------------ a sample for CI


@pytest.mark.parametrize("name", LAYERS)
def test_exact_on_integers(name):
    exact(LAYERS[name])


def test_no_tokens():
    """Every weight gradient is a zero that some warp must write."""
    exact(Layer(Shape(0, 64, 64, 2, 2, 1, 64), gated=True))


def test_adversarial_order():
    """One expert in three macrobatches, so that a buffer of accumulators is written twice; one empty."""
    exact(Layer(Shape(520, 64, 64, 2, 1, 1, 64), kind="one_expert", macrobatch=1), seed=1)


# ------------------------------------------------------------------ the full matrix

SHAPES = {
    "tails": Shape(40, 192, 320, 2, 2, 1, 128),
    "wide": Shape(130, 640, 64, 2, 1, 1, 128),
    "deep": Shape(140, 64, 512, 2, 2, 1, 320),
    "many experts": Shape(200, 128, 64, 11, 3),
    "one token": Shape(1, 128, 128, 4, 2, 1, 64),
    "top all": Shape(90, 64, 128, 5, 5, 1, 64),
    "whole tiles": Shape(512, 256, 256, 2, 1, 1, 256),
    "shared is wider": Shape(150, 128, 64, 4, 2, 1, 448),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_shapes(name, ep_size):
    exact(Layer(SHAPES[name], ep_size=ep_size, direct=ep_size == 1, macrobatch=1), seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("how", LAYERS)
@pytest.mark.parametrize(
    "kind", ["random", "skewed", "one_expert", "few_experts", "dropped", "duplicates"]
)
def test_routings(kind, how):
    exact(dataclasses.replace(LAYERS[how], kind=kind), seed=2)


@pytest.mark.slow
@pytest.mark.parametrize("how", LAYERS)
@pytest.mark.parametrize("kind", ["balanced", "all to one rank"])
def test_even_routings(kind, how):
    """As many rows for each expert, of all ranks or of one; with EP 4 that one has no tokens."""
    exact(dataclasses.replace(LAYERS[how], shape=EIGHT, kind=kind), seed=2)


@pytest.mark.slow  # each mode is a kernel of its own
@pytest.mark.parametrize("how", ["ep1", "ep2"])
@pytest.mark.parametrize("grad_mode", ["fp32", "bf16_add", "fp32_add"])
def test_grad_modes(grad_mode, how):
    exact(LAYERS[how], grad_mode)
    exact(Layer(SHAPES["tails"], direct=how == "ep1", ep_size=int(how[2:])), grad_mode)


@pytest.mark.slow
@pytest.mark.parametrize("how", LAYERS)
@pytest.mark.parametrize("seed", range(20))
def test_twenty_seeds(seed, how):
    exact(LAYERS[how], seed=seed)


@functools.cache
def random_inputs():
    # The limit lies between two BF16 values: rounding gate and up does not move them across it.
    return dataclasses.replace(DIRECT, limit=1 + 2.0**-8).inputs(False, "cpu")


def bits(seed=None, num_sms=SMS, layer=DIRECT, **options):
    """Gradients of a random case. Those of the shared expert are each rank's own sum."""
    run = layer.make_run(*random_inputs(), ARCH, **(launch(layer) | options))
    found = emulated(run, num_sms, seed).named()
    return {n: t for n, t in found.items() if layer.direct or not n.startswith("shared ")}


@pytest.mark.slow
def test_random_gradients_are_near_the_oracle():
    case, dy = random_inputs()
    want = backward_oracle(case, dy).named()
    for name, value in bits().items():
        assert relative_l2(value, want[name]) < GRADIENT_LIMIT, name


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"layer": dataclasses.replace(DIRECT, macrobatch=5)},
        {"layer": dataclasses.replace(DIRECT, minibatch=2, macrobatch=2), "seed": 1},
        {"grid": 60, "seed": 2},  # most clusters are cancelled, some retire
        {"grid": 4, "num_sms": 4, "scheduling": "tickets", "seed": 3},
        {"group_m": 1, "stages": 3, "seed": 4},
        {"layer": PAIR, "grid": 4, "num_sms": 4, "seed": 5},  # comm workers and one pair
        {"layer": dataclasses.replace(QUAD, kind="few_experts"), "comm": 4, "grid": 40, "seed": 6},
    ],
    ids=str,
)
def test_same_bits_whatever_the_launch(options):
    """EP, ring, macrobatches, comm workers, grid, SMs, scheduling, stages, interleaving."""
    options = dict(options)
    comm = options.pop("comm", 2)
    layer = options.get("layer", DIRECT)
    expected = bits()
    for name, value in bits(**launch(layer, comm=comm) | options).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ep1", "ep2"])
def test_giving_way(how, monkeypatch):
    """Queries refused at random while clusters wait: pairs retire, the rest is launched later."""
    from mok.tools.emulator.machine import Machine

    refused = 0
    cancel = Machine.cancel_cluster

    def sometimes(machine):
        nonlocal refused
        if machine.engine.random.random() < 0.5:
            refused += 1
            return None
        return cancel(machine)

    monkeypatch.setattr(Machine, "cancel_cluster", sometimes)
    for seed in range(2):
        exact(LAYERS[how], seed=seed, grid=40, num_sms=6)
    assert refused > 4


# ------------------------------------------------------------------ GPU


@pytest.mark.gpu
@pytest.mark.parametrize("grad_mode", ["bf16", "fp32", "bf16_add", "fp32_add"])
@pytest.mark.parametrize(
    "layer",
    [
        *LAYERS.values(),
        Layer(Shape(3000, 512, 320, 8, 4, 1, 192), kind="skewed", macrobatch=2, gated=True),
    ],
    ids=str,
)
def test_exact_on_a_gpu(layer, grad_mode):
    if torch.cuda.get_device_capability() not in ((10, 0), (10, 3)):
        pytest.skip("this is for Blackwell")
    arch = {0: "sm_100a", 3: "sm_103a"}[torch.cuda.get_device_capability()[1]]
    run, want = exact_run(layer, arch, "cuda", grad_mode, **launch(layer, grid=148))
    assert_same(run.run(), want)
