from __future__ import annotations

import pytest
import torch

from mok.errors import MokError, ShapeError
from mok.tools.bench.ceiling import HBM_BYTES_PER_S, ceiling_ms
from mok.tools.bench.shapes import (
    DEFAULT_SUITE,
    SUITES,
    fit_tokens,
    memory_bytes,
    parse_shape,
)
from mok.tools.bench.work import bench_routing, make_work

TARGETS = {  # what the comparison was set to reach, as shares of cuBLAS
    "8192,4096,14336,8,2": (0.95, 0.92),
    "8192,7168,2048,32,8": (0.92, 0.90),
    "32768,4096,2048,64,4": (0.91, 0.89),
    "32768,4096,1024,64,4": (0.88, 0.86),
    "16384,2048,1024,64,8": (0.87, 0.85),
    "16384,2048,768,128,8": (0.83, 0.82),
    "8192,2048,768,128,8": (0.78, 0.78),
    "24576,1536,512,64,4": (0.74, 0.73),
}


def test_the_default_suite_and_its_targets():
    assert {s.text: s.targets for s in DEFAULT_SUITE} == TARGETS
    first = DEFAULT_SUITE[0]
    assert (first.target("forward"), first.target("both")) == (0.95, 0.92)
    assert first.target("backward") is None and first.target("gemm") is None
    assert all(SUITES.values())


def test_parse():
    found = parse_shape("32,64,128,4,2")
    assert (found.shape.num_tokens, found.shape.topk, found.text) == (32, 2, "32,64,128,4,2")
    assert found.targets is None
    assert parse_shape("16384,2048,768,128,8").name == "Qwen3-30B"  # a known one keeps its name


@pytest.mark.parametrize(
    "text", ["", "1,2,3", "1,2,3,4,5,6", "a,64,64,4,2", "8,63,64,4,2", "0,64,64,4,2"]
)
def test_parse_says_what_is_wrong(text):
    with pytest.raises(ShapeError):
        parse_shape(text)


def test_flops_follow_the_stated_rule():
    shape = parse_shape("16,64,128,4,2")
    assert shape.flops("forward") == 6 * 32 * 64 * 128
    assert shape.flops("backward") == 12 * 32 * 64 * 128
    assert shape.flops("both", routes=30) == 18 * 30 * 64 * 128


def test_tokens_are_halved_until_they_fit():
    wanted = DEFAULT_SUITE[5]
    programs, passes = ("mok", "torch", "sonic"), ("forward", "both")
    whole = memory_bytes(wanted.shape, programs, passes, 2)
    assert fit_tokens(wanted, int(whole / 0.85) + 1, programs, passes, 2) is wanted
    small = fit_tokens(wanted, int(0.75 * whole), programs, passes, 2)
    assert small.fitted and small.asked_tokens == 16384 and small.targets is None
    assert small.shape.num_tokens in (8192, 4096, 2048, 1024)
    assert memory_bytes(small.shape, programs, passes, 2) <= 0.85 * 0.75 * whole
    assert "fitted to memory, 16384 asked" in small.title
    assert small.as_dict()["asked_T"] == 16384
    with pytest.raises(ShapeError, match="weights must fit"):
        fit_tokens(wanted, 10**9, programs, passes, 2)


def test_every_shape_fits_one_h200():
    programs = ("mok", "mok-ep4", "torch", "sonic", "flashinfer", "cublas")
    for shape in DEFAULT_SUITE:
        needed = memory_bytes(shape.shape, programs, ("forward", "backward", "both"), 2)
        assert needed < 0.85 * 139 * 2**30, shape.title


def test_the_ceilings_of_the_default_suite():
    """Shares of cuBLAS that remain, computed by hand once for each shape of the suite."""
    by_hand = (0.96, 0.94, 0.94, 0.91, 0.91, 0.87, 0.81, 0.82)
    for bench, share in zip(DEFAULT_SUITE, by_hand, strict=True):
        ids = bench_routing("random", bench, 0).flatten()
        counts = torch.bincount(ids, minlength=bench.shape.num_experts).tolist()
        found = bench.flops("forward") / ceiling_ms(bench, "forward", counts, 680) / 1e9 / 680
        assert found == pytest.approx(share, abs=0.02), bench.title


def test_the_ceiling_counts_padding_sums_and_schedule():
    bench = parse_shape("100,64,128,2,1")
    flops = 6 * (128 + 128) * 64 * 128  # 60 and 40 routes, each padded to a tile
    sums = 2 * 64 * (100 + 100) / HBM_BYTES_PER_S * 1e3
    found = ceiling_ms(bench, "forward", [60, 40], 1e-3, schedule_ms=0.5)
    assert found == pytest.approx(flops / 1e6 + sums + 0.5)
    both = ceiling_ms(bench, "both", [60, 40], 1e-3, schedule_ms=0.5)
    assert both == pytest.approx(3 * flops / 1e6 + 2 * sums + 0.5)


def test_inputs_are_the_same_for_a_seed_and_differ_between_sets():
    bench = parse_shape("32,64,128,4,2")
    a, b = (make_work(bench, torch.device("cpu"), num_sets=3, seed=7) for _ in range(2))
    assert torch.equal(a.ids, b.ids) and torch.equal(a.sets[2].x, b.sets[2].x)
    assert not torch.equal(a.sets[0].x, a.sets[1].x)
    assert not torch.equal(a.sets[0].dy, a.sets[1].dy)
    assert a.inputs(4) is a.sets[1]
    assert sum(a.counts()) == 64
    assert float(a.sets[1].router_weights.sum(1).sub(1).abs().max()) < 1e-5


def test_half_of_all_routes_to_one_expert():
    ids = bench_routing("half", parse_shape("512,64,128,16,4"), 0)
    assert 0.5 <= float((ids == 0).float().mean()) < 0.6
    with pytest.raises(MokError, match="Known"):
        bench_routing("nope", parse_shape("512,64,128,16,4"), 0)
