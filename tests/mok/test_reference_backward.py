from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mok.config import Shape
from mok.errors import MokError, ShapeError
from mok.reference import (
    GRADIENT_LIMIT,
    ROUTINGS,
    Case,
    Experts,
    Gradients,
    backward_loop,
    backward_oracle,
    backward_reference,
    forward_loop,
    integer_case,
    integer_gradient,
    random_case,
    random_gradient,
    relative_l2,
    swiglu_backward,
)
from mok.reference import gradients as gradients_module
from mok.reference.cases import _exact_budget
from mok.reference.router_grad import row_partials, sum_groups

SHAPE = Shape(48, 128, 192, 6, 3, shared_intermediate_size=64)


def tokens_of(case: Case, tokens: slice) -> Case:
    return dataclasses.replace(
        case,
        x=case.x[tokens],
        top_experts=case.top_experts[tokens],
        router_weights=case.router_weights[tokens],
        shared_scale=None if case.shared_scale is None else case.shared_scale[tokens],
    )


def assert_exact(found: Gradients, case: Case, dy: torch.Tensor, lengths=None) -> None:
    """Every gradient is the oracle's, rounded to its dtype; shared weights rank by rank."""
    want = backward_loop(case, dy).named()
    got = found.named()
    assert got.keys() == want.keys()
    for name, value in got.items():
        if not name.startswith("shared ") or lengths is None:
            assert torch.equal(value, want[name].to(value.dtype)), name
    if case.shared is not None and lengths is not None:
        edges = itertools.pairwise(itertools.accumulate(lengths, initial=0))
        for rank, (start, end) in enumerate(edges):
            here = slice(start, end)
            alone = backward_loop(tokens_of(case, here), dy[here]).named()
            for name, value in got.items():
                if name.startswith("shared "):
                    assert torch.equal(value[rank], alone[name][0].to(value.dtype)), name


# ------------------------------------------------------------------ formulas


def test_swiglu_backward_is_the_derivative():
    rng = torch.Generator().manual_seed(0)
    gate, up, d = (torch.randn(50, 64, generator=rng).mul_(3) for _ in range(3))
    weight = torch.randn(50, generator=rng)
    leaves = [t.double().requires_grad_() for t in (gate, up)]
    hidden = torch.nn.functional.silu(leaves[0].clamp(max=2.0)) * leaves[1].clamp(-2.0, 2.0)
    (hidden * weight.double().unsqueeze(1) * d.double()).sum().backward()
    found = swiglu_backward(gate, up, d, weight, 2.0)
    assert relative_l2(found.d_gate, leaves[0].grad) < 1e-6
    assert relative_l2(found.d_up, leaves[1].grad) < 1e-6
    assert relative_l2(found.hidden, hidden.detach()) < 1e-6
    assert relative_l2(found.weighted, hidden.detach() * weight.double().unsqueeze(1)) < 1e-6


def test_swiglu_backward_is_exact_at_the_points_of_integer_cases():
    gate = torch.tensor([[-256.0, -128.0, 0.0, 128.0, 256.0]])
    up, d = torch.full_like(gate, -128.0), torch.full_like(gate, 3.0)
    found = swiglu_backward(gate, up, d, torch.tensor([-0.5]), None)
    slope = torch.tensor([[0.0, 0.0, 0.5, 1.0, 1.0]])
    assert torch.equal(found.d_gate, slope * 128 * 1.5)
    assert torch.equal(found.d_up, gate.clamp(min=0) * -1.5)
    assert torch.equal(found.hidden, gate.clamp(min=0) * -128)
    clamped = swiglu_backward(gate, up * 2, d, torch.tensor([1.0]), 128.0)
    assert torch.equal(clamped.d_gate, slope * -128 * 3 * torch.tensor([[1.0, 1, 1, 1, 0]]))
    assert not clamped.d_up.any()


def test_router_gradients_add_in_the_kernels_order():
    # 2^24 + 1 rounds to 2^24, so the sum shows which terms meet first.
    ones = torch.ones(1, 64)

    def partial(**columns):
        d = torch.zeros(1, 64)
        for column, value in columns.items():
            d[0, int(column[1:])] = value
        return row_partials(d, ones).item()

    big = 2.0**24
    assert partial(_0=big, _1=1, _8=-big) == 0  # one thread, ascending
    assert partial(_0=big, _8=-big, _9=1) == 1
    assert partial(_0=big, _4=-big, _2=1) == 1  # threads 0 and 2 meet first
    assert partial(_0=big, _2=-big, _4=1) == 0
    partials = torch.zeros(1, 40)
    partials[0, [0, 32, 16]] = torch.tensor([big, 1.0, -big])  # one lane first
    assert sum_groups(partials).item() == 0
    partials[0, [0, 32, 16]] = torch.tensor([big, -big, 1.0])
    assert sum_groups(partials).item() == 1


# ------------------------------------------------------------------ against the oracles


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("limit", [None, 1 + 2.0**-8])
def test_scheduled_reference_agrees_with_autograd(kind, limit):
    case = random_case(SHAPE, kind=kind, seed=1, swiglu_limit=limit, gated=True)
    dy = random_gradient(case)
    want = backward_loop(case, dy).named()
    found = backward_reference(case, dy, 3, tile=16, minibatch=16, macrobatch=32)
    for name, value in found.named().items():
        if name.startswith("shared "):
            value = value.double().sum(0, keepdim=True)
        assert relative_l2(value, want[name]) < GRADIENT_LIMIT, name
        assert value.isfinite().all()


@pytest.mark.parametrize("limit", [None, 0.7])
def test_oracle_is_the_loop(limit, monkeypatch):
    monkeypatch.setattr(gradients_module, "_CHUNK_ROWS", 7)
    for kind, gated in zip(ROUTINGS, itertools.cycle([True, False])):
        case = random_case(SHAPE, kind=kind, swiglu_limit=limit, gated=gated)
        dy = random_gradient(case)
        want = backward_loop(case, dy).named()
        exact, found = backward_oracle(case, dy, torch.float64).named(), backward_oracle(case, dy)
        assert exact.keys() == want.keys()
        for name, value in found.named().items():
            assert relative_l2(exact[name], want[name]) < 1e-14
            # In FP32 a pre-activation may lie on the other side of the clamp.
            assert relative_l2(value, want[name]) < (1e-5 if limit is None else 1e-3)
            assert value.dtype == torch.float32


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(list(ROUTINGS)),
    ep_size=st.sampled_from([1, 2, 3, 4, 6, 8, 64]),
    minibatch=st.sampled_from([1, 2, 3]),
    ring=st.sampled_from([1, 2, 5]),
    shared=st.sampled_from([None, 64, 192]),
    topk=st.integers(1, 6),
    limit=st.sampled_from([None, 128.0]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_nothing_but_the_inputs_decides_the_bits(
    kind, ep_size, minibatch, ring, shared, topk, limit, seed, data
):
    shape = Shape(40, 64, 128, 5, topk, shared_intermediate_size=shared)
    case = integer_case(shape, kind=kind, seed=seed, swiglu_limit=limit, gated=seed % 2 == 0)
    dy = integer_gradient(case, seed=seed)
    cuts = data.draw(st.lists(st.integers(0, 40), min_size=ep_size - 1, max_size=ep_size - 1))
    lengths = [b - a for a, b in itertools.pairwise([0, *sorted(cuts), 40])]
    found = backward_reference(
        case,
        dy,
        ep_size,
        tokens_per_rank=lengths,
        tile=8,
        minibatch=8 * minibatch,
        macrobatch=8 * minibatch * ring,
    )
    assert_exact(found, case, dy, lengths)


# ------------------------------------------------------------------ exact cases


def check_every_rounding_point(case: Case, dy: torch.Tensor) -> None:
    """In FP64, with silu and its derivative at their exact values."""
    limit = case.swiglu_limit or torch.inf
    x, dy = case.x.double(), dy.double()
    weights = case.router_weights.double()

    def bf16(values):
        assert torch.equal(values.bfloat16().double(), values)
        return values

    def check(rows, e, experts, weight):
        xs, ds = x[rows], dy[rows]
        gate_w, up_w, down_w = (w[e].double() for w in (experts.gate, experts.up, experts.down))
        gate_in, up_in = bf16(xs @ gate_w.t()), bf16(xs @ up_w.t())
        gate, up = gate_in.clamp(max=limit), up_in.clamp(-limit, limit)
        slope = torch.where(gate > 0, 1.0, torch.where(gate < 0, 0.0, 0.5)) * (gate_in <= limit)
        d = bf16(ds @ down_w)  # FP32 would do
        hidden = gate.clamp(min=0) * up
        weight = weight.unsqueeze(1)
        d_gate = bf16(weight * d * up * slope)
        d_up = bf16(weight * d * gate.clamp(min=0) * (up_in.abs() <= limit))
        weighted = bf16(weight * hidden)
        bf16(d_gate @ gate_w + d_up @ up_w)
        # Sums that round only once are exact in any order while they are below 2^24 steps.
        sums = [
            (d.abs() @ hidden.abs().t()).diagonal() / 1.0,
            (d_gate.abs().t() @ xs.abs()) / 2.0**-9,
            (d_up.abs().t() @ xs.abs()) / 2.0**-9,
            (ds.abs().t() @ weighted.abs()) / 2.0**13,
        ]
        for size in sums:
            assert torch.equal(size, size.round()) and (size <= 2**24).all()

    if case.shared is not None:
        scale = case.shared_scale
        scale = torch.ones(len(x)) if scale is None else scale
        check(slice(None), 0, case.shared, scale.double())
    for k in range(case.top_experts.shape[1]):
        for e in case.top_experts[:, k].unique().tolist():
            if e >= 0:
                here = case.top_experts[:, k] == e
                check(here, e, case.routed, weights[here, k])


@pytest.mark.parametrize("limit", [None, 128.0])
@pytest.mark.parametrize(
    ("topk", "hidden", "intermediate", "shared"),
    [
        (1, 192, 320, 128),
        (2, 320, 64, 192),
        (8, 1280, 64, None),  # tall W_down: windows
        (14, 64, 512, 64),  # wide W_down
        (15, 64, 64, 512),
        (30, 640, 128, 64),
        (31, 64, 192, None),
        (32, 128, 64, 64),
    ],
)
def test_integer_cases_are_exact_at_every_rounding_point(topk, hidden, intermediate, shared, limit):
    shape = Shape(32, hidden, intermediate, 5, topk, shared_intermediate_size=shared)
    case = integer_case(
        shape, kind="duplicates", seed=topk, swiglu_limit=limit, gated=topk % 2 == 1
    )
    dy = integer_gradient(case, seed=topk)
    check_every_rounding_point(case, dy)
    found = backward_reference(case, dy, 2, tile=16)
    assert_exact(found, case, dy, [16, 16])
    oracle = backward_oracle(case, dy).named()
    for name, value in backward_loop(case, dy).named().items():
        assert torch.equal(oracle[name].double(), value.float().double()), name
    # Exact because it works, not because it is 0.
    used = case.top_experts[case.top_experts >= 0].unique()
    for name, value in found.named().items():
        value = value[used] if name.startswith("routed") else value
        assert value.count_nonzero() > value.numel() / 10, name


@pytest.mark.parametrize(("hidden", "intermediate"), [(64, 64), (2560, 64), (64, 512), (704, 192)])
@pytest.mark.parametrize("topk", [1, 8, 15, 31])
def test_the_worst_case_is_exact_too(topk, hidden, intermediate):
    # Values the generators may draw but hardly ever do: nearly every term of every sum at its
    # maximum, and a few that are not, so that the sums need all their bits.
    case = integer_case(Shape(8, hidden, intermediate, 1, topk, 1, 64), kind="one_expert")
    rng = torch.Generator().manual_seed(0)
    dy = integer_gradient(case).abs()
    for row in dy:
        inside = row.nonzero()
        row[int(inside.min()) : int(inside.max()) + 1] = 1
    for values in (case.x.fill_(1), dy):
        values[torch.rand(values.shape, generator=rng) < 0.05] = 0
    _, magnitudes = _exact_budget(topk)
    case.router_weights.fill_(max(magnitudes))
    case.router_weights[:, 0] = min(magnitudes)
    for experts in (case.routed, case.shared):
        experts.up.copy_(experts.gate.roll(1, dims=1))  # they meet in the gradient of x
        for weight in (experts.gate, experts.up, experts.down):
            weight.abs_()
        for weight in (experts.gate, experts.up):  # half or none of a row's terms
            weight[torch.rand(weight.shape, generator=rng) < 0.4] = 0
    check_every_rounding_point(case, dy)
    assert_exact(backward_reference(case, dy), case, dy)


def test_too_wide_a_layer_has_no_exact_backward_case():
    case = integer_case(Shape(4, 64, 640, 2, 2))
    with pytest.raises(ShapeError, match="8·H"):
        integer_gradient(case)


def test_gradients_of_integer_cases_use_every_column():
    for hidden, intermediate in ((256, 256), (1280, 64)):
        case = integer_case(Shape(64, hidden, intermediate, 2, 2))
        dy = integer_gradient(case)
        assert (dy != 0).any(dim=0).all()
        assert (case.routed.down != 0).any(dim=1).all()
        assert torch.equal(dy, integer_gradient(case)) and dy.dtype == torch.bfloat16
        assert not torch.equal(dy, integer_gradient(case, seed=1))


@pytest.mark.parametrize(
    "side", ["dy", "x", "gate", "up", "down", "router_weights", "top_experts", "shared_scale"]
)
def test_gradients_notice_one_changed_element(side):
    shape = Shape(64, 128, 128, 2, 2, shared_intermediate_size=64)
    case = integer_case(shape, kind="duplicates", seed=9, gated=True)
    dy = integer_gradient(case)
    before = backward_reference(case, dy, tile=16).named()
    tensor = dy if side == "dy" else getattr(case, side, None)
    if tensor is None:
        tensor = getattr(case.routed, side)
    index = tuple(tensor.nonzero()[len(tensor.nonzero()) // 2].tolist())
    tensor[index] = -tensor[index] if side != "top_experts" else 0
    after = backward_reference(case, dy, tile=16).named()
    assert any(not torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hidden", "intermediate"), [(7168, 2048), (4096, 14336), (64 * 111, 64 * 223)]
)
def test_integer_cases_scale_to_real_dimensions(hidden, intermediate):
    case = integer_case(Shape(2, hidden, intermediate, 1, 2), kind="duplicates")
    dy = integer_gradient(case)
    check_every_rounding_point(case, dy)
    assert_exact(backward_reference(case, dy), case, dy)


# ------------------------------------------------------------------ edges and options


@pytest.mark.parametrize("ep_size", [1, 3])
def test_no_tokens(ep_size):
    case = random_case(dataclasses.replace(SHAPE, num_tokens=0), gated=True)
    dy = random_gradient(case)
    found = backward_reference(case, dy, ep_size).named()
    for other in (backward_loop(case, dy), backward_oracle(case, dy)):
        for name, value in other.named().items():
            shape = list(value.shape)
            if name.startswith("shared "):
                shape[0] = ep_size
            assert list(found[name].shape) == shape
            assert not found[name].any() and not value.any()


def test_dropped_routes_have_gradient_zero_and_are_not_read():
    case = integer_case(SHAPE, kind="dropped", seed=3)
    dy = integer_gradient(case)
    dropped = case.top_experts < 0
    case.router_weights[dropped] = torch.nan
    found = backward_reference(case, dy, 2, tile=16)
    assert dropped.any() and not found.router_weights[dropped].any()
    assert_exact(found, case, dy, [24, 24])


def test_an_expert_larger_than_the_ring_adds_up():
    # 120 rows of one expert through a ring of 16: eight groups.
    case = integer_case(Shape(40, 64, 64, 2, 3), kind="one_expert", seed=2)
    dy = integer_gradient(case)
    found = backward_reference(case, dy, tile=8, minibatch=8, macrobatch=16)
    assert_exact(found, case, dy)
    # FP32 between the groups: random values round once, too.
    case = random_case(Shape(40, 64, 64, 2, 3), kind="one_expert", seed=2)
    dy = random_gradient(case)
    parted = backward_reference(
        case, dy, tile=8, minibatch=8, macrobatch=16, grad_mode="fp32"
    ).routed.gate
    whole = backward_reference(case, dy, grad_mode="fp32").routed.gate
    assert relative_l2(parted, whole) < 1e-6


def test_grad_modes():
    case = random_case(SHAPE)
    dy = random_gradient(case)
    sums = backward_reference(case, dy, grad_mode="fp32")
    rounded = backward_reference(case, dy)
    assert sums.routed.gate.dtype == torch.float32
    assert torch.equal(sums.routed.gate.bfloat16(), rounded.routed.gate)
    assert torch.equal(sums.shared.down.bfloat16(), rounded.shared.down)
    more = backward_reference(case, dy, grad_mode="fp32_add", into=sums)
    assert torch.equal(more.routed.up, sums.routed.up + sums.routed.up)
    more = backward_reference(case, dy, grad_mode="bf16_add", into=rounded)
    want = (rounded.routed.down.float() + sums.routed.down).bfloat16()
    assert torch.equal(more.routed.down, want) and want.dtype == torch.bfloat16
    with pytest.raises(MokError, match="Known"):
        backward_reference(case, dy, grad_mode="fp16")
    for mode, into in (("bf16_add", None), ("fp32", sums)):
        with pytest.raises(MokError, match="into"):
            backward_reference(case, dy, grad_mode=mode, into=into)


def test_bad_partitions_are_refused():
    case = random_case(SHAPE)
    with pytest.raises(ShapeError, match="2 counts with sum 48"):
        backward_reference(case, random_gradient(case), 2, tokens_per_rank=[40, 9])


@pytest.mark.parametrize("limit", [None, 0.75])
def test_finite_differences(limit):
    """The FP64 gradients, along random directions of every input at once."""
    case = random_case(
        Shape(12, 64, 64, 3, 2, 1, 64), kind="dropped", swiglu_limit=limit, gated=True
    )
    dy = random_gradient(case).double()
    rng = torch.Generator().manual_seed(5)

    def direction(value):
        return torch.randn(value.shape, generator=rng, dtype=torch.float64)

    want = backward_loop(case, dy)
    for _ in range(3):
        d_x, d_w, d_s = (direction(t) for t in (case.x, case.router_weights, case.shared_scale))
        d_routed = [direction(getattr(case.routed, n)) for n in ("gate", "up", "down")]
        d_shared = [direction(getattr(case.shared, n)) for n in ("gate", "up", "down")]
        slope = (want.x * d_x).sum() + (want.router_weights * d_w).sum()
        slope += (want.shared_scale * d_s).sum()
        for grads, moves in ((want.routed, d_routed), (want.shared, d_shared)):
            for name, move in zip(("gate", "up", "down"), moves, strict=True):
                slope += (getattr(grads, name).double() * move).sum()

        def loss(step):
            def moved(experts, moves):
                parts = (experts.gate, experts.up, experts.down)
                return Experts(*(p.double() + step * m for p, m in zip(parts, moves, strict=True)))

            there = dataclasses.replace(
                case,
                x=case.x.double() + step * d_x,
                router_weights=case.router_weights.double() + step * d_w,
                shared_scale=case.shared_scale.double() + step * d_s,
                routed=moved(case.routed, d_routed),
                shared=moved(case.shared, d_shared),
            )
            return (forward_loop(there).double() * dy).sum()

        step = 1e-6
        numeric = (loss(step) - loss(-step)) / (2 * step)
        # The clamp has corners; a direction crosses few of them within 2e-6.
        assert abs(numeric - slope) < 1e-4 * abs(slope) + 1e-3
