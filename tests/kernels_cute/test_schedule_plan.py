"""Limits and sizes of the schedule, in plain Python."""

import pytest
import torch

from mok.errors import ShapeError
from mok.kernels_cute.schedule.plan import MAX_CHUNKS, MAX_LOCAL_EXPERTS, schedule_plan
from mok.reference import schedule_reference


@pytest.mark.parametrize("num_experts,ep_size", [(1, 1), (5, 2), (3, 4), (128, 1)])
@pytest.mark.parametrize("tile", [128, 256])
def test_capacity_holds_the_worst_routing(num_experts, ep_size, tile):
    max_tokens, topk = 40, 4
    routings = [torch.full((max_tokens, topk), e) for e in range(num_experts)]
    routings.append(torch.arange(max_tokens * topk).view(max_tokens, topk) % num_experts)
    for ids in routings:
        ranks = schedule_reference([ids] * ep_size, num_experts, ep_size, tile)
        for rank, schedule in enumerate(ranks):
            plan = schedule_plan(max_tokens, topk, num_experts, ep_size, rank, tile)
            assert schedule.num_tokens <= plan.capacity
            assert plan.capacity % tile == 0
            assert plan.num_local == len(schedule.tokens_per_expert)


def test_sizes_of_a_large_group_stay_moderate():
    plan = schedule_plan(16384, 8, 384, 64, 0, 128)
    assert plan.num_chunks == MAX_CHUNKS
    assert plan.local_bytes == 16384 * 64 * 8 * 2
    assert plan.counts_bytes == MAX_CHUNKS * 6 * 4


@pytest.mark.parametrize(
    "arguments,rule",
    [
        ((8, 2, MAX_LOCAL_EXPERTS + 1, 1, 0, 128), "experts on one rank"),
        ((8, 33, 8, 1, 0, 128), "K"),
        ((2**20, 32, 64, 64, 0, 128), "max_tokens"),
        ((8, 2, 8, 5000, 0, 128), "ranks"),
        ((8, 2, 8, 1, 0, 192), "power of two"),
    ],
)
def test_limits_are_named(arguments, rule):
    with pytest.raises(ShapeError, match=rule):
        schedule_plan(*arguments)
