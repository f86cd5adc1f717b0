"""Nothing is dropped, whatever the routing and however small the launch that the multiplier asks for."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mok.config import Shape
from mok.reference import forward_loop, integer_case
from tests.helpers_layer import SMALL, run_layer, with_routes

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
