from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mok.config import Config, Shape, one_wave_minibatch, tile_rows, two_wave_minibatch
from mok.errors import DeviceError, DtypeError, MokError, ResourceError, ShapeError
from mok.models import MACHINES, MODELS, Machine

GOOD = dict(num_tokens=16, hidden_size=128, intermediate_size=64, num_experts=8, topk=2)
CONFIG = dict(fwd_num_comm_sms=4, bwd_num_comm_sms=4, minibatch_size=256, macrobatch_size=512)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (dict(hidden_size=100), "multiple of 64"),
        (dict(hidden_size=0), "at least 1"),
        (dict(intermediate_size=96), "multiple of 64"),
        (dict(shared_intermediate_size=32), "multiple of 64"),
        (dict(topk=0), "at least 1"),
        (dict(topk=33), "at most 32"),
        (dict(num_experts=0), "at least 1"),
        (dict(ep_size=0), "at least 1"),
        (dict(num_tokens=-1), "at least 0"),
    ],
)
def test_shape_limits(change, rule):
    with pytest.raises(ShapeError, match=rule):
        Shape(**GOOD | change)


@pytest.mark.parametrize("value", [64.0, "64", True, None])
def test_sizes_are_ints(value):
    with pytest.raises(DtypeError, match=r"hidden_size \(H\) must be an int"):
        Shape(**GOOD | dict(hidden_size=value))


def test_numbers_of_numpy_become_pythons():
    shape = Shape(**{name: np.int64(value) for name, value in GOOD.items()})
    assert shape == Shape(**GOOD) and {type(v) for v in vars(shape).values() if v is not None} == {
        int
    }
    config = Config(
        np.int32(4), np.uint8(2), np.int64(512), np.int64(1024), np.float32(0.5), np.int16(9)
    )
    assert config == Config(4, 2, 512, 1024, 0.5, 9) and json.loads(json.dumps(vars(config)))
    for name, value in (("minibatch_size", np.bool_(True)), ("timeout_s", np.bool_(True))):
        with pytest.raises(DtypeError, match=name):
            replace(config, **{name: value})


@pytest.mark.parametrize(
    "change", [dict(num_tokens=0), dict(topk=32), dict(ep_size=72), dict(hidden_size=64 * 7)]
)
def test_shape_accepts_the_corners(change):
    Shape(**GOOD | change)


@given(st.integers(1, 600), st.integers(1, 80))
def test_experts_are_placed_contiguously_and_evenly(num_experts, ep_size):
    shape = Shape(1, 64, 64, num_experts, 1, ep_size)
    ranges = [shape.experts_on(rank) for rank in range(ep_size)]
    assert [e for r in ranges for e in r] == list(range(num_experts))
    counts = [len(r) for r in ranges]
    assert counts == sorted(counts, reverse=True)
    assert max(counts) - min(counts) <= 1
    assert max(counts) == shape.max_local_experts


def test_experts_on_rejects_a_foreign_rank():
    with pytest.raises(ShapeError, match="rank must be in 0…0"):
        Shape(**GOOD).experts_on(1)


def test_two_wave_rule_of_the_example():
    assert two_wave_minibatch(MODELS["kimi-k2.5"], 148) == (2368, 2560)
    assert two_wave_minibatch(MODELS["kimi-k2.5"], 132, tile=128) == (2112, 2176)


@given(st.sampled_from(list(MODELS.values())), st.integers(1, 200), st.sampled_from([128, 256]))
def test_two_wave_rule_is_the_least_that_fills_two_waves(model, num_sms, tile):
    exact, rounded = two_wave_minibatch(model, num_sms, tile)

    def two_waves(rows):
        return all(
            rows / 128 * width / 256 >= 2 * num_sms
            for width in (2 * model.intermediate_size, model.hidden_size)
        )

    assert two_waves(exact) and not two_waves(exact - 1)
    assert rounded % tile == 0 and exact <= rounded < exact + tile


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (dict(fwd_num_comm_sms=0), "fwd_num_comm_sms must be at least 1"),
        (dict(bwd_num_comm_sms=-2), "bwd_num_comm_sms must be at least 1"),
        (dict(minibatch_size=100, macrobatch_size=100), "multiple of 128"),
        (dict(macrobatch_size=640), "multiple of minibatch_size"),
        (dict(macrobatch_size=0), "at least 1"),
        (dict(schedule_capacity_multiplier=0.0), "positive and finite"),
        (dict(schedule_capacity_multiplier=float("inf")), "positive and finite"),
        (dict(timeout_s=float("nan")), "positive and finite"),
        (dict(timeout_s="5"), "must be a number"),
        (dict(timeout_s=1e-9), "0.001 to 1e9"),
        (dict(timeout_s=9.3e9), "0.001 to 1e9"),  # nanoseconds beyond 2^63
        (dict(schedule_capacity_multiplier=1e12), "at most 1000"),
        (dict(launch_control="x"), "True or False"),
        (dict(debug=3), "True or False"),
        (dict(reserved_sms=-1), "at least 0"),
        (dict(pairs=2), "True, False or None"),
        (dict(pairs=1), "True, False or None"),
        (dict(push=0), "push must be True, False or None"),
    ],
)
def test_config_limits(change, rule):
    with pytest.raises((ShapeError, DtypeError), match=rule):
        Config(**CONFIG | change)


def test_config_check_against_the_gpu():
    Config(**CONFIG).check("sm_100a", 6, 4)
    with pytest.raises(ResourceError, match=r"4 comm \+ 2 > 5"):
        Config(**CONFIG).check("sm_100a", 5, 4)
    with pytest.raises(ResourceError, match="reserved"):
        Config(**CONFIG, reserved_sms=3).check("sm_90a", 7, 4)
    Config(**CONFIG, reserved_sms=2).check("sm_90a", 7, 4)
    small = Config(**CONFIG | dict(minibatch_size=128))
    small.check("sm_90a", 132, 4)
    with pytest.raises(ShapeError, match="multiple of 256"):
        small.check("sm_100a", 148, 4)
    with pytest.raises(ShapeError, match="multiple of 2 on sm_100a"):
        Config(**CONFIG).check("sm_100a", 148, 3)
    with pytest.raises(DeviceError, match="sm_80"):
        Config(**CONFIG).check("sm_80", 108, 4)


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda m: m.name)
@pytest.mark.parametrize("machine", ["h200", "b200", "gb300"])
def test_suggest_is_valid_everywhere(model, machine):
    m = MACHINES[machine]
    for num_tokens in (0, 1, 2048):
        config = Config.suggest(Shape.of_model(model, num_tokens, 8), machine)
        config.check(m.arch, m.num_sms, config.fwd_num_comm_sms)
        config.check(m.arch, m.num_sms, config.bwd_num_comm_sms)
        tile = tile_rows(m.arch)
        assert config.minibatch_size == one_wave_minibatch(model, m.num_sms, tile)


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda m: m.name)
@pytest.mark.parametrize("num_sms,tile", [(132, 128), (148, 256)])
def test_one_wave_is_the_most_that_one_wave_holds(model, num_sms, tile):
    rows = one_wave_minibatch(model, num_sms, tile)
    narrow = min(2 * model.intermediate_size, model.hidden_size)

    def tiles(rows):
        return rows // 128 * (narrow / 256)

    assert rows == tile or (rows % tile == 0 and tiles(rows) <= num_sms < tiles(rows + tile))


@pytest.mark.parametrize("model", ["deepseek-v3", "qwen3-30b-a3b", "mixtral-8x7b"])
def test_the_suggested_ring_holds_all_rows_as_far_as_it_may(model):
    """64 waves at most; where all rows are fewer, none is left for a second macrobatch."""
    for num_tokens in (2048, 8192, 65536):
        shape = Shape.of_model(MODELS[model], num_tokens, 8)
        config = Config.suggest(shape, "h200")
        rows = num_tokens * shape.topk + shape.max_local_experts * 128
        most = 32 * two_wave_minibatch(shape, 132, 128)[1]
        assert config.macrobatch_size <= most
        assert config.macrobatch_size >= min(rows, most - config.minibatch_size)


def test_one_rank_gets_one_minibatch():
    shape = Shape(8192, 4096, 14336, 8, 2)
    config = Config.suggest(shape, "h200")
    assert config.minibatch_size == config.macrobatch_size == 8192 * 2 + 8 * 128
    huge = Config.suggest(Shape(65536, 4096, 14336, 8, 2), "h200")
    rows = 65536 * 2 + 8 * 128
    assert huge.minibatch_size <= 65536
    assert rows <= huge.macrobatch_size < rows + 3 * 128  # kept for backward: no more than needed


def test_one_rank_in_mxfp8_passes_the_ring():
    """Its dispatch overlaps only what lies in another minibatch, and needs comm SMs."""
    shape = Shape(8192, 4096, 14336, 8, 2)
    for machine in ("h200", "gb200"):
        m = MACHINES[machine]
        config = Config.suggest(shape, machine, "mxfp8")
        assert config.minibatch_size == two_wave_minibatch(shape, m.num_sms, tile_rows(m.arch))[1]
        assert config.macrobatch_size >= 8192 * 2
        config.check(m.arch, m.num_sms, config.bwd_num_comm_sms)


def test_quantising_takes_comm_sms():
    """Thin experts: dispatch quantises whatever it pulls, on Hopper too."""
    shape = Shape.of_model(MODELS["qwen3-30b-a3b"], 8192, 8)
    for machine in ("h200", "gb200"):
        plain, mxfp8 = (Config.suggest(shape, machine, p) for p in ("bf16", "mxfp8"))
        assert mxfp8.minibatch_size >= 2 * plain.minibatch_size  # two waves and one
        # In one direction at least; the numbers are coarse where a task has few rounds of loads.
        more = [
            getattr(mxfp8, name) - getattr(plain, name)
            for name in ("fwd_num_comm_sms", "bwd_num_comm_sms")
        ]
        assert min(more) >= 0 < max(more), machine


def test_the_ring_fits_the_rank_with_most_experts():
    """72 ranks of 384 experts: 24 of them hold six, the others five."""
    shape = Shape.of_model(MODELS["kimi-k2.5"], 8192, 72)
    config = Config.suggest(shape, "gb300")
    assert config.macrobatch_size >= 8192 * 8 * 72 * 6 / 384
    even = Shape.of_model(MODELS["kimi-k2.5"], 8192, 64)
    assert Config.suggest(even, "gb300").macrobatch_size < config.macrobatch_size


def test_suggest_takes_any_device_description():
    shape = Shape(**GOOD)
    assert Config.suggest(shape, Machine("x", 132, "sm_90a", "")) == Config.suggest(shape, "h200")
    # On a machine that the simulator does not know, the reference system's defaults, scaled.
    kimi = Shape.of_model(MODELS["kimi-k2.5"], 8192, 8)
    config = Config.suggest(kimi, Machine("x", 296, "sm_100a", ""))
    assert (config.fwd_num_comm_sms, config.bwd_num_comm_sms) == (80, 56)
    with pytest.raises(DeviceError, match="needs a GPU"):
        Config.suggest(shape, torch.device("cpu"))
    with pytest.raises(MokError, match="known one"):
        Config.suggest(shape, "v100")


def test_compact_keeps_no_more_than_the_rows_need():
    """Gate, up and the schedule of a call take less than 4·I + 12 bytes a route, as SonicMoE's do."""
    from mok.tools.bench.shapes import DEFAULT_SUITE
    from mok.tools.simulator.memory import memory

    for shape in (entry.shape for entry in DEFAULT_SUITE):
        config = Config.suggest(shape, "h200")
        compact = config.compact(shape)
        routes = shape.num_tokens * shape.topk
        assert routes - 2048 < compact.macrobatch_size < routes
        assert compact.minibatch_size % 256 == 0
        assert compact.compact(shape) == compact
        kept = {}
        for name, c in (("suggested", config), ("compact", compact)):
            needed = memory(shape, c, "sm_90a")
            kept[name] = needed["saved context"] + needed["schedule"]
        assert kept["compact"] < routes * (4 * shape.intermediate_size + 12) < kept["suggested"]


def test_compact_leaves_other_calls_alone():
    config = Config(8, 8, 1024, 4096)
    for shape in (
        Shape(4096, 1024, 512, 8, 2, 4),  # rows pass the ring
        Shape(100, 1024, 512, 8, 2),  # few routes
        Shape(40000, 1024, 512, 8, 2),  # a ring smaller than that
    ):
        assert config.compact(shape) is config
    assert config.compact(Shape(1000, 1024, 512, 8, 2), "mxfp8") is config
    assert config.compact(Shape(1000, 1024, 512, 8, 2)).macrobatch_size == 1536
    for tokens in range(256, 3000, 7):  # always a configuration
        routes = 2 * tokens
        found = Config(8, 8, 256, 8192).compact(Shape(tokens, 1024, 512, 8, 2))
        assert routes // 2 - 256 <= found.macrobatch_size < routes
