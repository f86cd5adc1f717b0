from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mok.config import Shape
from mok.errors import DtypeError, RouteError, ShapeError
from mok.reference import routing, schedule_reference, token_order

EP_SIZES = [1, 2, 3, 4, 6, 8, 64]


def by_hand(ids_per_rank, num_experts, ep_size, tile):
    """The rule of the design, route by route: rows as (rank, token·K + k), or None for padding."""
    offsets = [sum(len(i) for i in ids_per_rank[:r]) for r in range(ep_size)]
    n = sum(len(i) for i in ids_per_rank)
    stride = -(-n // 64)
    routes = {e: [] for e in range(num_experts)}
    for rank, ids in enumerate(ids_per_rank):
        for token, row in enumerate(ids.tolist()):
            g = offsets[rank] + token
            for k, e in enumerate(row):
                if e >= 0:
                    key = (g % stride, g // stride, k)
                    routes[e].append((key, (rank, token * len(row) + k)))
    result = []
    for rank in range(ep_size):
        rows, counts, blocks = [], [], []
        experts = Shape(0, 64, 64, num_experts, 1, ep_size).experts_on(rank)
        for local, e in enumerate(experts):
            segment = [place for _, place in sorted(routes[e])]
            padding = -len(segment) % tile
            counts.append(len(segment))
            blocks += [local] * ((len(segment) + padding) // tile)
            rows += segment + [None] * padding
        result.append((rows, counts, blocks))
    return result


def assert_matches(ids_per_rank, num_experts, ep_size, tile):
    found = schedule_reference(ids_per_rank, num_experts, ep_size, tile)
    expected = by_hand(ids_per_rank, num_experts, ep_size, tile)
    for s, (rows, counts, blocks) in zip(found, expected, strict=True):
        assert s.num_tokens == len(rows)
        assert s.peer_rank.tolist() == [-1 if r is None else r[0] for r in rows]
        assert s.peer_token_idx.tolist() == [-1 if r is None else r[1] for r in rows]
        assert s.tokens_per_expert.tolist() == counts
        assert s.block_expert.tolist() == blocks
        for tensor in (s.peer_rank, s.peer_token_idx, s.tokens_per_expert, s.block_expert):
            assert tensor.dtype == torch.int32
        if ep_size == 1:
            place = {r[1]: i for i, r in enumerate(rows) if r is not None}
            routes = ids_per_rank[0].numel()
            assert s.route_row.tolist() == [place.get(i, -1) for i in range(routes)]
            assert s.route_row.dtype == torch.int32
        else:
            assert s.route_row is None


@st.composite
def routings(draw):
    ep_size = draw(st.sampled_from(EP_SIZES))
    num_experts = draw(st.integers(1, 20))
    topk = draw(st.integers(1, 5))
    # Ids from a random subset leave experts empty; -1 and repeats come by themselves.
    allowed = draw(st.lists(st.integers(-1, num_experts - 1), min_size=1, max_size=num_experts))
    lengths = draw(st.lists(st.integers(0, 40), min_size=ep_size, max_size=ep_size))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    pool = torch.tensor(allowed)
    ids = [pool[torch.randint(len(pool), (n, topk), generator=rng)] for n in lengths]
    return ids, num_experts, ep_size, draw(st.sampled_from([1, 4, 128, 256]))


@settings(max_examples=60, deadline=None)
@given(routings())
def test_any_routing_matches_the_rule(case):
    assert_matches(*case)


@pytest.mark.parametrize("ep_size", EP_SIZES)
@pytest.mark.parametrize(
    "kind", ["random", "skewed", "one_expert", "few_experts", "dropped", "duplicates"]
)
def test_named_routings_match_the_rule(kind, ep_size):
    ids = routing(kind, 300, 10, 4, seed=ep_size)
    lengths = torch.tensor([r % 3 for r in range(ep_size)]) * (150 // ep_size)
    lengths[-1] = 300 - int(lengths[:-1].sum())
    assert_matches(list(ids.split(lengths.tolist())), 10, ep_size, 16)


@pytest.mark.parametrize("ep_size", EP_SIZES)
def test_no_tokens_at_all(ep_size):
    empty = [torch.empty(0, 3, dtype=torch.int64)] * ep_size
    assert_matches(empty, 5, ep_size, 128)


def test_all_routes_dropped():
    assert_matches([torch.full((7, 2), -1)], 3, 1, 128)


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 128, 1000])
def test_token_order_is_the_sort_of_the_design(n):
    stride = -(-n // 64)
    order = sorted(range(n), key=lambda g: (g % stride, g // stride))
    assert token_order(n).tolist() == order


@pytest.mark.parametrize("ep_size", [2, 4, 8, 64])
def test_consecutive_rows_pull_from_all_ranks_evenly(ep_size):
    n = 1024
    ids = torch.zeros(n, 1, dtype=torch.int64)
    (s, *_) = schedule_reference(ids.split(n // ep_size), ep_size, ep_size, 128)
    for window in s.peer_rank.split(64):
        assert torch.bincount(window, minlength=ep_size).tolist() == [64 // ep_size] * ep_size


def test_row_order_does_not_depend_on_ep():
    ids = routing("random", 500, 12, 4)

    def routes_of_each_expert(lengths):
        ep_size = len(lengths)
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        found = []
        for s in schedule_reference(ids.split(lengths), 12, ep_size, 32):
            expert = s.block_expert.repeat_interleave(32)
            for local in range(len(s.tokens_per_expert)):
                real = (expert == local) & (s.peer_rank >= 0)
                found.append((offsets[s.peer_rank[real]] * 4 + s.peer_token_idx[real]).tolist())
        return found

    alone = routes_of_each_expert([500])
    assert alone == routes_of_each_expert([250, 250])
    assert alone == routes_of_each_expert([0, 13, 400, 87, 0])
    assert alone == routes_of_each_expert([125] * 4)


def test_large_schedules_are_quick():
    ids = [routing("random", 16384, 128, 8)]
    schedule_reference(ids, 128, 1, 128)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        schedule_reference(ids, 128, 1, 128)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.7


def test_bad_ids_are_named():
    good = torch.zeros(4, 2, dtype=torch.int64)
    bad = good.clone()
    bad[3, 1] = 5
    with pytest.raises(RouteError, match=r"0…4; found 5 at rank 1, token 3, k 1"):
        schedule_reference([good, bad], 5, 2, 128)
    bad[3, 1] = -2
    with pytest.raises(RouteError, match="found -2"):
        schedule_reference([bad], 5, 1, 128)
    with pytest.raises(DtypeError, match="int64"):
        schedule_reference([good.int()], 5, 1, 128)
    with pytest.raises(ShapeError, match="one K"):
        schedule_reference([good, good[:, :1]], 5, 2, 128)
    with pytest.raises(ShapeError, match="one K"):
        schedule_reference([torch.zeros(4, 33, dtype=torch.int64)], 5, 1, 128)
    with pytest.raises(ShapeError, match="one tensor of ids per rank"):
        schedule_reference([good], 5, 2, 128)
