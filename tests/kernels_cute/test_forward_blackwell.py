"""The Blackwell forward kernel in the emulator, on virtual ranks, against the reference.

The unmarked tests are a sample that fits CI; ``slow`` ones are the full matrix.
"""

import functools

import pytest

pytest.importorskip("cutlass")

import torch

from mok.config import Shape
from mok.reference import (
    BF16_LIMIT,
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
}
# Ways to run a case: EP, tokens per rank, minibatch and macrobatch in tiles, CTAs, SMs, more.
DIRECT = {"ep_size": 1, "grid": 8}
PAIR = {"ep_size": 2, "grid": 8, "num_comm_ctas": 2}
QUAD = {"ep_size": 4, "grid": 8, "num_comm_ctas": 4}


@functools.cache
def make_case(name, kind="random", integer=False, limit=None):
    tokens, hidden, intermediate, experts, topk, shared = SHAPES[name]
    shape = Shape(tokens, hidden, intermediate, experts, topk, 1, shared)
    if integer:
        return integer_case(shape, kind=kind)
    return random_case(shape, kind=kind, swiglu_limit=limit)


def run(case, ep_size, *, seed=None, minibatch=1, macrobatch=1, num_sms=SMS, **options):
    """Output of one run; with a seed on the adversarial machine, whose checkers must be silent."""
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
        output = layer.run(emulator.register)
        assert not emulator.report.findings
    assert not layer.record.any()
    return output


def assert_right(case, output):
    assert relative_l2(output, forward_oracle(case)) < BF16_LIMIT


# ------------------------------------------------------------------ a sample for CI


@pytest.mark.parametrize("how", [DIRECT, PAIR, QUAD], ids=["ep1", "ep2", "ep4"])
def test_exact_on_integers(how):
    case = make_case("small", integer=True)
    expected = forward_reference(case, how["ep_size"], tile=TILE)
    assert torch.equal(run(case, **how), expected)


@pytest.mark.parametrize("name", ["no shared expert", "wide", "one token"])
def test_tails(name):
    case = make_case(name)
    assert_right(case, run(case, **DIRECT))


def test_same_bits_whatever_the_launch():
    """EP, ring, comm workers, grid, SMs, scheduling, tile, interleaving: none changes a bit."""
    case = make_case("small", limit=0.75)
    expected = run(case, **DIRECT)
    assert_right(case, expected)
    for seed, how in enumerate(
        [
            {**DIRECT, "grid": 60, "macrobatch": 2},  # most clusters are cancelled, some retire
            {**DIRECT, "grid": 4, "num_sms": 4, "scheduling": "tickets"},
            {**DIRECT, "tile_n": 128, "stages": 3, "group_m": 1},
            {**PAIR, "grid": 4, "num_sms": 4},  # the minimum: comm workers and one pair
            {**QUAD, "grid": 40, "tokens_per_rank": [110, 0, 150, 40]},
        ]
    ):
        assert torch.equal(run(case, seed=seed, **how), expected), how


@pytest.mark.parametrize("how", [DIRECT, PAIR], ids=["ep1", "ep2"])
def test_giving_way(how, monkeypatch):
    """Queries refused at random while clusters wait: pairs retire, the rest is launched later."""
    from mok.tools.emulator.machine import Machine

    case = make_case("small")
    expected = run(case, **how)
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
        assert torch.equal(run(case, seed=seed, **{**how, "grid": 40, "num_sms": 6}), expected)
    assert refused > 4


# ------------------------------------------------------------------ the full matrix

ROUTINGS = ["random", "skewed", "one_expert", "few_experts", "dropped", "duplicates"]


@pytest.mark.slow
@pytest.mark.parametrize("how", [DIRECT, PAIR, QUAD], ids=["ep1", "ep2", "ep4"])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name, how):
    """The ring holds one minibatch of one tile, so it wraps as often as there are tiles."""
    case = make_case(name)
    output = run(case, seed=1, **how)
    assert_right(case, output)
    integers = make_case(name, integer=True)
    expected = forward_reference(integers, how["ep_size"], tile=TILE)
    assert torch.equal(run(integers, seed=2, **how), expected)


@pytest.mark.slow
@pytest.mark.parametrize("how", [DIRECT, PAIR, QUAD], ids=["ep1", "ep2", "ep4"])
@pytest.mark.parametrize("kind", ROUTINGS)
def test_routings(kind, how):
    case = make_case("small", kind=kind)
    assert_right(case, run(case, seed=3, **how))


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [[300, 0], [0, 300], [1, 299]])
def test_uneven_ranks(tokens):
    case = make_case("small")
    assert torch.equal(run(case, seed=4, tokens_per_rank=tokens, **PAIR), run(case, **DIRECT))


@pytest.mark.slow
@pytest.mark.parametrize("how", [DIRECT, PAIR, QUAD], ids=["ep1", "ep2", "ep4"])
def test_twenty_seeds(how):
    case = make_case("small")
    expected = run(case, **DIRECT)
    for seed in range(20):
        assert torch.equal(run(case, seed=seed, **how), expected)


@pytest.mark.slow
@pytest.mark.parametrize("grid", [4, 6, 10, 16, 24, 100, 300])
@pytest.mark.parametrize("how", [DIRECT, PAIR], ids=["ep1", "ep2"])
def test_any_grid(how, grid):
    """What schedule_capacity_multiplier from 0.01 to 3 makes of the launch."""
    case = make_case("small")
    assert torch.equal(run(case, seed=grid, **{**how, "grid": grid}), run(case, **DIRECT))
