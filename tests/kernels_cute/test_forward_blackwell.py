"""The Blackwell forward kernel in the emulator, on virtual ranks, against the reference.

The unmarked tests are a sample that fits CI; ``slow`` ones are the full matrix
(docs/measurements/blackwell-emulated.md).
"""

from __future__ import annotations

import dataclasses
import functools

import pytest

pytest.importorskip("cutlass")

import torch

from mok.config import Config, Shape
from mok.reference import (
    BF16_LIMIT,
    ROUTINGS,
    forward_oracle,
    forward_reference,
    integer_case,
    random_case,
    relative_l2,
)
from tests.forward_runs import ForwardRun, emulated

pytestmark = pytest.mark.emulator
ARCH, TILE = "sm_100a", 256
SMS = 8

# T (of all ranks), H, I, E, K, shared I: tails in every direction, odd counts.
SHAPES = {
    "small": (300, 128, 192, 4, 2, 64),
    "no shared expert": (257, 192, 128, 3, 2, None),
    "wide": (130, 640, 64, 2, 1, 128),
    "deep": (140, 64, 640, 2, 2, 320),
    "many experts": (200, 128, 64, 11, 3, None),
    "one token": (1, 128, 128, 4, 2, 64),
    "one expert": (260, 128, 128, 1, 1, None),
    "top all": (90, 64, 128, 5, 5, 64),
    "whole tiles": (512, 256, 256, 2, 1, 256),
    "shared is wider": (150, 128, 64, 4, 2, 448),
    # Four row blocks on every rank of one, two and four: a ring of one block is filled four times.
    "wraps 1": (40, 128, 64, 4, 2, 64),
    "wraps 2": (40, 128, 64, 8, 2, 64),
    "wraps 4": (40, 128, 64, 16, 2, 64),
}
# Ways to run a case: EP, CTAs, comm CTAs; a ring of one tile unless said otherwise.
DIRECT = {"ep_size": 1, "grid": 8}
PAIR = {"ep_size": 2, "grid": 8, "num_comm_ctas": 2}
QUAD = {"ep_size": 4, "grid": 8, "num_comm_ctas": 4}
EVERY_EP = pytest.mark.parametrize("how", [DIRECT, PAIR, QUAD], ids=["ep1", "ep2", "ep4"])


@functools.cache
def make_case(name, kind="random", integer=False, limit=None):
    tokens, hidden, intermediate, experts, topk, shared = SHAPES[name]
    shape = Shape(tokens, hidden, intermediate, experts, topk, 1, shared)
    if integer:
        return integer_case(shape, kind=kind)
    return random_case(shape, kind=kind, swiglu_limit=limit)


def run(
    case, ep_size, *, seed=None, minibatch=1, macrobatch=1, num_sms=SMS, wraps=0, **options
):  # fmt: skip
    """Output of one run; with a seed on the adversarial machine, whose checkers must be silent.

    ``wraps``: how often every rank's ring must be filled anew.
    """
    with emulated(ARCH, num_sms, seed) as emulator:
        layer = ForwardRun(
            case,
            ARCH,
            ep_size,
            minibatch=minibatch * TILE,
            macrobatch=macrobatch * TILE,
            num_sms=num_sms,
            **options,
        )
        fills = [s.num_tokens // (macrobatch * TILE) for s in layer.schedules]
        assert min(fills) > wraps or not wraps
        output = layer.run(emulator.register)
        assert not emulator.report.findings
    assert not layer.record.any()
    return output


def assert_right(case, output):
    assert relative_l2(output, forward_oracle(case)) < BF16_LIMIT


def routed(name, kind="random"):
    """A random case with a routing of ``mok.reference``, or one of two more."""
    if kind in ROUTINGS:
        return make_case(name, kind)
    case = make_case(name)
    shape = case.shape
    slots = torch.arange(shape.num_tokens * shape.topk).view(-1, shape.topk)
    experts = {"balanced": shape.num_experts, "all to rank 0": shape.num_experts // 4}[kind]
    return dataclasses.replace(case, top_experts=slots % experts)


@functools.cache
def expected_bits(name, kind="random"):
    """The output at EP 1, which has been held to the oracle."""
    case = routed(name, kind)
    output = run(case, **DIRECT)
    assert_right(case, output)
    return output


# ------------------------------------------------------------------ a sample for CI


@EVERY_EP
def test_exact_on_integers(how):
    case = make_case(f"wraps {how['ep_size']}", integer=True)
    expected = forward_reference(case, how["ep_size"], tile=TILE)
    assert torch.equal(run(case, wraps=3, **how), expected)


@pytest.mark.parametrize("name", ["no shared expert", "wide", "one token"])
def test_tails(name):
    case = make_case(name)
    assert_right(case, run(case, **DIRECT))


LAUNCHES = [
    {**DIRECT, "grid": 60, "macrobatch": 2},  # most clusters are cancelled, some retire
    {**DIRECT, "grid": 4, "num_sms": 4, "scheduling": "tickets"},
    {**DIRECT, "tile_n": 128, "stages": 3, "group_m": 1},
    {**PAIR, "grid": 4, "num_sms": 4},  # the minimum: comm workers and one pair
    {**QUAD, "grid": 40, "tokens_per_rank": [110, 0, 150, 40]},
]


@pytest.mark.parametrize("seed", range(len(LAUNCHES)))
def test_same_bits_whatever_the_launch(seed):
    """EP, ring, comm workers, grid, SMs, scheduling, tile, interleaving: none changes a bit."""
    assert torch.equal(run(make_case("small"), seed=seed, **LAUNCHES[seed]), expected_bits("small"))


def layer_output(name, ep_size, **tunables):
    """A call through the layer's own launch path, schedule kernels included."""
    from mok.backends import choose_backend, run_forward

    config = Config(2, 2, minibatch_size=TILE, macrobatch_size=TILE, debug=True)
    config = dataclasses.replace(config, **tunables)
    return run_forward(make_case(name), ep_size, choose_backend(ARCH, True), config=config)


@pytest.mark.parametrize(
    "tunables", [{"schedule_capacity_multiplier": 0.01}, {"launch_control": False}], ids=str
)
def test_layer_has_the_same_bits(tunables):
    assert torch.equal(layer_output("small", 2, **tunables), expected_bits("small"))


# ------------------------------------------------------------------ the full matrix


@pytest.mark.slow
@EVERY_EP
@pytest.mark.parametrize("name", [name for name in SHAPES if not name.startswith("wraps")])
def test_shapes(name, how):
    """Bits of EP 1 at every EP, and exact on integers."""
    assert torch.equal(run(make_case(name), seed=1, **how), expected_bits(name))
    integers = make_case(name, integer=True)
    expected = forward_reference(integers, how["ep_size"], tile=TILE)
    assert torch.equal(run(integers, seed=2, **how), expected)


@pytest.mark.slow
@EVERY_EP
@pytest.mark.parametrize("kind", [*ROUTINGS, "balanced", "all to rank 0"])
def test_routings(kind, how):
    name = "wraps 4"
    output = run(routed(name, kind), seed=3, **how)
    assert torch.equal(output, expected_bits(name, kind))


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [[300, 0], [0, 300], [1, 299]], ids=str)
def test_uneven_ranks(tokens):
    output = run(make_case("small"), seed=4, tokens_per_rank=tokens, **PAIR)
    assert torch.equal(output, expected_bits("small"))


@pytest.mark.slow
@EVERY_EP
@pytest.mark.parametrize("seed", range(20))
def test_twenty_seeds(seed, how):
    name = f"wraps {how['ep_size']}"
    output = run(make_case(name), seed=seed, wraps=3, **how)
    assert torch.equal(output, expected_bits(name))


TUNABLES = {
    "minibatch": [{"minibatch": 1, "macrobatch": 4}, {"minibatch": 2, "macrobatch": 4}],
    "macrobatch": [{"macrobatch": 2}, {"macrobatch": 8}],
    "comm": [{"num_comm_ctas": 4}, {"num_comm_ctas": 6}],
    "SMs": [{"num_sms": 4, "grid": 40}, {"num_sms": 12, "grid": 12}],
    "kernel": [{"tile_n": 128}, {"stages": 2}, {"group_m": 2}, {"scheduling": "tickets"}],
    "context": [{"save_context": True}],
}


@pytest.mark.slow
@pytest.mark.parametrize("change", [c for all_of in TUNABLES.values() for c in all_of], ids=str)
def test_tunables(change):
    assert torch.equal(run(make_case("wraps 2"), seed=6, **PAIR | change), expected_bits("wraps 2"))


@pytest.mark.slow
@pytest.mark.parametrize("multiplier", [0.01, 0.1, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_schedule_capacity_multiplier(ep_size, multiplier):
    output = layer_output("small", ep_size, schedule_capacity_multiplier=multiplier)
    assert torch.equal(output, expected_bits("small"))


@pytest.mark.slow
@pytest.mark.parametrize("grid", [4, 6, 10, 16, 24, 100, 300])
@pytest.mark.parametrize("how", [DIRECT, PAIR], ids=["ep1", "ep2"])
def test_any_grid(how, grid):
    output = run(make_case("wraps 2"), seed=grid, **{**how, "grid": grid})
    assert torch.equal(output, expected_bits("wraps 2"))
