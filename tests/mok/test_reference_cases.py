from __future__ import annotations

import pytest
import torch

from mok.config import Shape
from mok.errors import MokError, ShapeError
from mok.reference import (
    ROUTINGS,
    forward_loop,
    forward_oracle,
    forward_reference,
    integer_case,
    random_case,
    routing,
)
from mok.reference.cases import _exact_budget


def is_exact(values: torch.Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(values.to(dtype).double(), values)


def check_every_intermediate(case):
    """In FP64, with silu at its exact values: all rounding points of the design hold exactly."""
    bf16, fp32 = torch.bfloat16, torch.float32
    limit = case.swiglu_limit or torch.inf
    totals = torch.zeros(case.x.shape, dtype=torch.float64)

    def expert(x, experts, e):
        gate = x @ experts.gate[e].double().t()
        up = x @ experts.up[e].double().t()
        assert set(gate.unique().tolist()) <= {0.0, 128.0, -128.0, 256.0, -256.0}
        assert is_exact(gate, bf16) and is_exact(up, bf16)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        hidden = gate.clamp(min=0) * up
        assert is_exact(hidden, bf16)
        y = hidden @ experts.down[e].double().t()
        assert is_exact(y, bf16)
        return y

    if case.shared:
        totals += expert(case.x.double(), case.shared, 0)
    for k in range(case.top_experts.shape[1]):
        for e in case.top_experts[:, k].unique().tolist():
            if e < 0:
                continue
            here = case.top_experts[:, k] == e
            y = expert(case.x[here].double(), case.routed, e)
            weighted = case.router_weights[here, k, None].double() * y
            assert is_exact(weighted, fp32)
            totals[here] += weighted
        assert is_exact(totals, fp32)
    assert is_exact(totals, bf16)
    return totals


@pytest.mark.parametrize("limit", [None, 128.0])
@pytest.mark.parametrize("topk", [1, 2, 8, 14, 15, 30, 31, 32])
def test_integer_cases_are_exact_at_every_rounding_point(topk, limit):
    shape = Shape(64, 192, 320, 7, topk, shared_intermediate_size=128)
    case = integer_case(shape, kind="duplicates", seed=topk, swiglu_limit=limit)
    exact = check_every_intermediate(case)
    assert torch.equal(forward_loop(case).bfloat16().double(), exact)
    assert torch.equal(forward_oracle(case).double(), exact)
    found = forward_reference(case, 2, tile=16)
    assert torch.equal(found.double(), exact)
    assert exact.count_nonzero() > exact.numel() / 4  # exact because it works, not because it is 0


@pytest.mark.parametrize("topk", [1, 8, 14, 15, 30, 31, 32])
def test_the_worst_case_is_exact_too(topk):
    # Values the generator may draw but hardly ever does: every term of every sum at its maximum.
    case = integer_case(Shape(1, 64, 64, 1, topk, 1, 64), kind="one_expert")
    _, magnitudes = _exact_budget(topk)
    case.x.fill_(1)
    case.router_weights.fill_(max(magnitudes))
    case.router_weights[0, 0] = min(magnitudes)
    for experts in (case.routed, case.shared):
        for weight in (experts.gate, experts.up, experts.down):
            weight.abs_()
    exact = check_every_intermediate(case)
    assert exact.max() <= 256 * min(magnitudes)
    assert torch.equal(forward_reference(case).double(), exact)


def test_clamped_integer_case_is_a_different_one():
    shape = Shape(32, 64, 64, 4, 2)
    free, clamped = (integer_case(shape, swiglu_limit=limit) for limit in (None, 128.0))
    assert not torch.equal(forward_loop(free), forward_loop(clamped))
    with pytest.raises(ShapeError, match="multiple of 128"):
        integer_case(shape, swiglu_limit=10.0)


@pytest.mark.parametrize("side", ["x", "gate", "up", "down", "router_weights", "top_experts"])
def test_integer_cases_notice_one_changed_element(side):
    shape = Shape(64, 128, 128, 2, 2)
    case = integer_case(shape, kind="duplicates", seed=11)
    before = forward_reference(case, tile=16)
    tensor = getattr(case, side, None)
    if tensor is None:
        tensor = getattr(case.routed, side)
    index = tuple(tensor.nonzero()[len(tensor.nonzero()) // 2].tolist())
    tensor[index] = -tensor[index] if side != "top_experts" else 0
    assert not torch.equal(forward_reference(case, tile=16), before)


def test_every_input_column_is_used():
    case = integer_case(Shape(4, 256, 256, 8, 2, shared_intermediate_size=256))
    for weight in (case.routed.gate, case.routed.up):
        assert (weight != 0).any(dim=1).float().mean() > 0.8
        assert (weight != 0).any(dim=0).any(dim=0).all()
    assert (case.routed.down != 0).any(dim=2).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hidden", "intermediate"), [(7168, 2048), (4096, 14336), (64 * 111, 64 * 223)]
)
def test_integer_cases_scale_to_real_dimensions(hidden, intermediate):
    shape = Shape(2, hidden, intermediate, 1, 2)
    case = integer_case(shape, kind="duplicates")
    exact = check_every_intermediate(case)
    assert torch.equal(forward_reference(case).double(), exact)
    assert torch.equal(forward_loop(case).bfloat16().double(), exact)


@pytest.mark.parametrize("make", [random_case, integer_case])
def test_cases_repeat_for_a_seed(make):
    shape = Shape(9, 64, 64, 4, 2, shared_intermediate_size=64)
    one, same, other = (make(shape, seed=s) for s in (1, 1, 2))
    assert torch.equal(one.x, same.x) and torch.equal(one.routed.down, same.routed.down)
    assert not torch.equal(one.x, other.x)
    assert one.shape == shape
    assert one.tokens_per_rank(4) == [3, 2, 2, 2]


def test_random_case_keeps_magnitudes_near_one():
    case = random_case(Shape(256, 512, 256, 4, 2))
    out = forward_oracle(case)
    assert 0.1 < out.std() < 1
    assert torch.allclose(case.router_weights.sum(1), torch.ones(256))


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize(("num_experts", "topk"), [(16, 4), (3, 8), (1, 1)])
def test_routings(kind, num_experts, topk):
    ids = routing(kind, 400, num_experts, topk, seed=5)
    assert ids.shape == (400, topk) and ids.dtype == torch.int64
    assert ids.min() >= -1 and ids.max() < num_experts
    assert torch.equal(ids, routing(kind, 400, num_experts, topk, seed=5))
    used = ids[ids >= 0].unique()
    if kind == "one_expert":
        assert len(used) == 1
    if kind == "few_experts":
        assert len(used) == max(1, num_experts // 8)
    if kind == "dropped":
        assert (ids == -1).all(dim=1).any() and (ids >= 0).any()
    else:
        assert ids.min() >= 0
    if kind == "duplicates":
        assert torch.equal(ids[:, 0], ids[:, -1])
    if kind in ("random", "skewed") and topk <= num_experts:
        assert all(len(set(row)) == topk for row in ids.tolist())
    if kind == "skewed" and num_experts == 16:
        counts = torch.bincount(ids.flatten(), minlength=16).float()
        assert counts.max() > 2 * counts.mean()


def test_unknown_routing():
    with pytest.raises(MokError, match="Known"):
        routing("nope", 1, 1, 1)


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_seeds_have_64_bits(seed):
    with pytest.raises(ShapeError, match="64 bits"):
        random_case(Shape(2, 64, 64, 2, 1), seed=seed)
