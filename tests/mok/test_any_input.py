"""Nothing is dropped, whatever the routing and however small the launch that the multiplier asks for."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mok import functional
from mok.config import Shape
from mok.reference import backward_loop, forward_loop, integer_case, integer_gradient
from tests.helpers_layer import SMALL, Layer, run_layer, with_routes

TINY = dataclasses.replace(SMALL, schedule_capacity_multiplier=0.01)


@pytest.mark.parametrize("kind", ["one_expert", "duplicates"])
def test_everything_to_one_rank_of_64(device, kind):
    """Upstream's capacity at this multiplier holds a 32nd of these rows."""
    tokens = 64 * (3 if device == "cpu" else 128)
    case = integer_case(Shape(tokens, 64, 64, 64, 4), seed=6, device=device)
    target = torch.full_like(case.top_experts, 37)  # every route, so every token four times
    if kind == "duplicates":
        target[:, 2:] = torch.arange(tokens, device=target.device)[:, None] % 2 + 37
    case = with_routes(case, target)
    found = run_layer(case, 64, TINY, device)
    assert torch.equal(found.output, forward_loop(case).bfloat16())


def exact_gradients(case, dy, ep_size, device, lengths=None):
    """Output and gradients of the routed experts on so many ranks are the exact ones; returns them."""
    with Layer(case, ep_size, TINY, device, tokens_per_rank=lengths) as layer:
        given = layer.arguments(case)
        schedule = layer.build_schedule()
        output, context = functional.forward(TINY, layer.workspace, schedule, *given)
        grads = functional.backward(
            TINY, layer.workspace, schedule, context, layer.each(layer.split(dy)), *given
        )
        layer.finish()
    want = backward_loop(case, dy)
    d_x, d_weights, *routed = (torch.cat(part) for part in grads[:5])
    assert torch.equal(torch.cat(output), forward_loop(case).bfloat16())
    assert torch.equal(d_x, want.x.to(d_x.dtype))
    assert torch.equal(d_weights, want.router_weights.to(d_weights.dtype))
    for name, found in zip(("gate", "up", "down"), routed, strict=True):
        assert torch.equal(found, getattr(want.routed, name).to(found.dtype)), name
    return routed


def test_gradients_when_everything_goes_to_one_rank_of_64(device):
    """Exact; ranks without rows write zeros."""
    tokens = 64 * (2 if device == "cpu" else 128)
    case = integer_case(Shape(tokens, 64, 64, 64, 2), seed=6, device=device)
    case = with_routes(case, torch.full_like(case.top_experts, 37))
    for found in exact_gradients(case, integer_gradient(case), 64, device):
        assert found[37].any() and not found[:37].any() and not found[38:].any()


def test_seventy_two_ranks(device):
    """A rack's, with experts for 28 of them twice, and for some no token or one."""
    scale = 1 if device == "cpu" else 100
    lengths = [scale * (rank % 3) for rank in range(72)]
    case = integer_case(Shape(sum(lengths), 64, 64, 100, 2), kind="dropped", seed=3, device=device)
    exact_gradients(case, integer_gradient(case), 72, device, lengths)
