"""Routings, and what each rank gets of them."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mok.config import Config, Shape
from mok.errors import DtypeError, MokError, RouteError, ShapeError
from mok.reference.schedule import schedule_reference
from mok.tools.simulator import Scenario, balanced, drawn, load_machine, make_routing, recorded
from mok.tools.simulator.load import critical, loads

SHAPE = Shape(100, 64, 64, 12, 3, 4)


@pytest.mark.parametrize("text", ["balanced", "uniform", "zipf:1.1"])
def test_every_route_goes_somewhere(text):
    routing = make_routing(text, SHAPE)
    assert routing.counts.shape == (4, 12)
    assert (routing.counts.sum(axis=1) == 300).all() and (routing.counts >= 0).all()
    assert routing.name == text
    assert routing.sources(SHAPE).sum() == 1200


def test_balanced_is_even_and_zipf_is_not():
    even = balanced(SHAPE).counts.sum(axis=0)
    assert even.max() - even.min() <= 1
    skewed = drawn(SHAPE, 1.5).counts.sum(axis=0)
    assert skewed.max() > 4 * np.median(skewed)
    assert (drawn(SHAPE, 1.5).counts == drawn(SHAPE, 1.5).counts).all()  # seeded


def test_recorded_ids_are_counted(tmp_path):
    rng = np.random.default_rng(1)
    ids = rng.integers(-1, 12, (4, 50, 3))
    routing = recorded(ids, SHAPE)
    for rank in range(4):
        for expert in range(12):
            assert routing.counts[rank, expert] == (ids[rank] == expert).sum()
    assert (recorded(ids.reshape(200, 3), SHAPE).counts == routing.counts).all()
    path = tmp_path / "ids.npy"
    np.save(path, ids)
    assert (make_routing(str(path), SHAPE).counts == routing.counts).all()


def test_bad_ids_are_refused(tmp_path):
    ids = np.zeros((4, 50, 3), np.int64)
    ids[2, 7, 1] = 12
    with pytest.raises(RouteError, match="12 at rank 2, token 7, k 1"):
        recorded(ids, SHAPE)
    with pytest.raises(RouteError, match="-2"):
        recorded(np.full((4, 1, 3), -2), SHAPE)
    with pytest.raises(DtypeError):
        recorded(np.zeros((4, 50, 3)), SHAPE)
    for shape in ((3, 50, 3), (4, 50, 2), (201, 3), (12,)):
        with pytest.raises(ShapeError):
            recorded(np.zeros(shape, np.int64), SHAPE)
    with pytest.raises(MokError, match="readable"):
        make_routing(str(tmp_path / "none.npy"), SHAPE)
    with pytest.raises(ShapeError, match="exponent"):
        make_routing("zipf:x", SHAPE)
    with pytest.raises(ShapeError):
        make_routing("zipf:-1", SHAPE)
    with pytest.raises(MokError, match="must be balanced"):
        make_routing("even", SHAPE)
    with (tmp_path / "several.npy").open("wb") as file:
        np.savez(file, ids)
    with pytest.raises(MokError, match="several arrays"):
        make_routing(str(tmp_path / "several.npy"), SHAPE)
    (tmp_path / "nothing.npy").write_bytes(b"")
    with pytest.raises(MokError, match="readable"):
        make_routing(str(tmp_path / "nothing.npy"), SHAPE)


@pytest.mark.parametrize("text", ["balanced", "uniform"])
def test_calls_too_large_to_simulate_are_refused(text):
    with pytest.raises(ShapeError, match="tiles a rank"):
        make_routing(text, dataclasses.replace(SHAPE, num_tokens=10**24))
    with pytest.raises(ShapeError, match="tiles a rank"):
        make_routing(text, dataclasses.replace(SHAPE, intermediate_size=64 * 10**15))
    with pytest.raises(ShapeError, match="ranks times experts"):
        make_routing(text, dataclasses.replace(SHAPE, num_experts=10**12))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 5), st.integers(0, 60), st.integers(1, 4), st.randoms())
def test_loads_are_those_of_the_schedule(ep, tokens, topk, rng):
    """Rows, padding and sources of every rank, against the reference schedule."""
    experts = 7 if ep <= 7 else ep
    ids = np.random.default_rng(rng.randrange(2**31)).integers(-1, experts, (ep, tokens, topk))
    shape = Shape(tokens, 64, 64, experts, topk, ep)
    scenario = Scenario(
        shape, Config(2, 2, 256, 512), load_machine("h200"), routing=recorded(ids, shape)
    )
    schedules = schedule_reference([torch.from_numpy(i) for i in ids], experts, ep, 128)
    for load, schedule in zip(loads(scenario, 128), schedules, strict=True):
        assert load.rows == schedule.num_tokens
        assert load.counts.tolist() == schedule.tokens_per_expert.tolist()
        peers = schedule.peer_rank[schedule.peer_rank >= 0]
        assert load.routes == len(peers)
        if len(peers):
            assert load.local == pytest.approx(float((peers == load.rank).float().mean()))
            assert load.local + load.near + load.far == pytest.approx(1)
        first = np.arange(0, load.rows, 32)
        real = (schedule.peer_rank.reshape(-1, 32) >= 0).sum(dim=1)
        assert load.real_rows(first, 32).tolist() == real.tolist()


def test_beyond_the_domain_is_far_and_virtual_is_local():
    shape = Shape(64, 64, 64, 32, 2, 16)
    config = Config(2, 2, 256, 512)
    machine = load_machine("h200")  # 8 GPUs a domain
    found = loads(Scenario(shape, config, machine, routing=balanced(shape)), 128)
    assert found[3].local == pytest.approx(1 / 16)
    assert found[3].near == pytest.approx(7 / 16) and found[3].far == pytest.approx(8 / 16)
    assert found[3].near_mirror == pytest.approx(1) and found[3].far_mirror == pytest.approx(1)
    alone = loads(Scenario(shape, config, machine, routing=balanced(shape), virtual=True), 128)
    assert alone[3].local == 1 and alone[3].near == 0


def test_one_rank_stands_for_all_that_are_alike():
    shape = Shape(256, 64, 64, 16, 2, 8)
    config = Config(2, 2, 256, 512)
    machine = load_machine("h200")
    same = loads(Scenario(shape, config, machine, routing=balanced(shape)), 128)
    assert len(critical(same)) == 1
    skewed = loads(Scenario(shape, config, machine, routing=drawn(shape, 2.0)), 128)
    assert max(skewed, key=lambda load: load.rows).rank in {r.rank for r in critical(skewed)}


def test_a_routing_for_another_group_is_refused():
    with pytest.raises(ShapeError, match="EP, E"):
        Scenario(
            SHAPE, Config(2, 2, 256, 512), load_machine("h200"),
            routing=balanced(Shape(100, 64, 64, 12, 3, 2)),
        )  # fmt: skip
