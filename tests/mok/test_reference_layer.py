from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mok.config import Shape
from mok.errors import ShapeError
from mok.reference import (
    BF16_LIMIT,
    ROUTINGS,
    forward_loop,
    forward_oracle,
    forward_reference,
    integer_case,
    random_case,
    relative_l2,
    swiglu,
    token_sum,
)
from mok.reference import oracle as oracle_module

SHAPE = Shape(48, 128, 192, 6, 3, shared_intermediate_size=64)


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("limit", [None, 1.0])
def test_scheduled_reference_agrees_with_the_loop(kind, limit):
    case = random_case(SHAPE, kind=kind, seed=1, swiglu_limit=limit)
    assert relative_l2(forward_reference(case, 3, tile=16), forward_loop(case)) < BF16_LIMIT


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(list(ROUTINGS)),
    ep_size=st.sampled_from([1, 2, 3, 4, 6, 8, 64]),
    minibatch=st.sampled_from([1, 2, 3]),
    ring=st.sampled_from([1, 2, 5]),
    shared=st.sampled_from([None, 64, 192]),
    topk=st.integers(1, 6),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_nothing_but_the_inputs_decides_the_bits(
    kind, ep_size, minibatch, ring, shared, topk, seed, data
):
    shape = Shape(40, 64, 128, 5, topk, shared_intermediate_size=shared)
    case = integer_case(shape, kind=kind, seed=seed)
    cuts = data.draw(st.lists(st.integers(0, 40), min_size=ep_size - 1, max_size=ep_size - 1))
    edges = [0, *sorted(cuts), 40]
    lengths = [b - a for a, b in itertools.pairwise(edges)]
    found = forward_reference(
        case,
        ep_size,
        tokens_per_rank=lengths,
        tile=8,
        minibatch=8 * minibatch,
        macrobatch=8 * minibatch * ring,
    )
    assert torch.equal(found, forward_loop(case).bfloat16())


def test_the_ring_wraps_in_these_tests():
    # One expert, 120 rows, a ring of 16: the ring is refilled at least three times.
    case = integer_case(Shape(40, 64, 64, 1, 3), seed=2)
    found = forward_reference(case, 1, tile=8, minibatch=8, macrobatch=16)
    assert torch.equal(found, forward_loop(case).bfloat16())


@pytest.mark.parametrize("ep_size", [1, 3])
def test_no_tokens(ep_size):
    case = random_case(dataclasses.replace(SHAPE, num_tokens=0))
    assert forward_reference(case, ep_size).shape == (0, 128)
    assert forward_loop(case).shape == forward_oracle(case).shape == (0, 128)


def test_all_routes_dropped_leaves_the_shared_expert():
    case = random_case(SHAPE)
    dropped = dataclasses.replace(
        case,
        top_experts=torch.full_like(case.top_experts, -1),
        router_weights=torch.full_like(case.router_weights, torch.nan),
    )
    out = forward_reference(dropped)
    assert relative_l2(out, forward_loop(dropped)) < BF16_LIMIT
    assert relative_l2(out, forward_oracle(dropped)) < BF16_LIMIT
    alone = forward_reference(dataclasses.replace(dropped, shared=None))
    assert torch.equal(alone, torch.zeros_like(alone))


def test_nan_router_weights_reach_their_token_only():
    case = random_case(SHAPE)
    case.router_weights[5, 1] = torch.nan
    out = forward_reference(case, 2)
    assert out[5].isnan().all()
    assert not out[:5].isnan().any() and not out[6:].isnan().any()


@pytest.mark.parametrize("limit", [None, 0.7])
def test_oracle_is_the_loop(limit, monkeypatch):
    monkeypatch.setattr(oracle_module, "_CHUNK_ROWS", 7)
    for kind in ROUTINGS:
        case = random_case(SHAPE, kind=kind, swiglu_limit=limit)
        expected = forward_loop(case)
        assert relative_l2(forward_oracle(case, torch.float64), expected) < 1e-14
        assert relative_l2(forward_oracle(case), expected) < 1e-5


def test_gated_shared_expert():
    case = random_case(SHAPE, gated=True)
    expected = forward_loop(case)
    assert relative_l2(forward_reference(case, 3, tile=16), expected) < BF16_LIMIT
    assert relative_l2(forward_oracle(case, torch.float64), expected) < 1e-14
    assert relative_l2(forward_loop(dataclasses.replace(case, shared_scale=None)), expected) > 0.1
    case = integer_case(SHAPE, gated=True)
    assert (case.shared_scale < 0).any()
    assert torch.equal(forward_reference(case, 3, tile=16), forward_loop(case).bfloat16())


def test_swiglu_clamp_and_infinities():
    gate = torch.tensor([-300.0, -128.0, 0.0, 2.0, 128.0, 300.0, 5.0])
    up = torch.tensor([1.0, 1.0, 1.0, -9.0, 1.0, 1.0, 9.0])
    silu4 = (torch.tensor(4.0) * torch.sigmoid(torch.tensor(4.0))).item()
    silu2 = (torch.tensor(2.0) * torch.sigmoid(torch.tensor(2.0))).item()
    expected = torch.tensor([0, 0, 0, silu2 * -4, silu4, silu4, silu4 * 4]).bfloat16()
    assert torch.equal(swiglu(gate, up, 4.0), expected)
    exact = swiglu(gate, torch.ones(7), None)
    assert torch.equal(exact[[0, 1, 2, 4, 5]].float(), torch.tensor([0.0, 0, 0, 128, 300]))


def test_token_sum_adds_shared_first_then_k_ascending():
    # 2^24 + 1 rounds to 2^24 in FP32, so the sum shows the order of its terms.
    big = 2.0**24
    y = torch.tensor([[1.0], [big], [-big]]).bfloat16()
    ones = torch.ones(1, 3)
    ids = torch.zeros(1, 3, dtype=torch.int64)
    assert token_sum(y, ones, ids, None).item() == 0.0  # descending k would give 1
    assert token_sum(y.flip(0), ones, ids, None).item() == 1.0
    shared = torch.tensor([[big]]).bfloat16()
    y_last = torch.tensor([[1.0], [-big], [0.0]]).bfloat16()
    assert token_sum(y_last, ones, ids, shared).item() == 0.0  # 1 if shared came last
    # A dropped route's slot and weight may hold anything.
    y[2], ones[0, 2], ids[0, 2] = torch.nan, torch.nan, -1
    assert token_sum(y, ones, ids, None).item() == big


def test_relative_l2():
    one = torch.ones(4)
    assert relative_l2(one, one) == 0
    assert relative_l2(one * 1.5, one) == 0.5
    assert relative_l2(one * 0, one * 0) == 0
    assert relative_l2(one, one * 0) == float("inf")
    assert not relative_l2(one * torch.nan, one) <= 1e9


def test_bad_partitions_are_refused():
    case = random_case(SHAPE)
    with pytest.raises(ShapeError, match="2 counts with sum 48"):
        forward_reference(case, 2, tokens_per_rank=[40, 9])
    with pytest.raises(ShapeError, match="multiple of tile"):
        forward_reference(case, tile=128, minibatch=64)
    with pytest.raises(ShapeError, match="macrobatch of minibatch"):
        forward_reference(case, tile=16, minibatch=32, macrobatch=48)
