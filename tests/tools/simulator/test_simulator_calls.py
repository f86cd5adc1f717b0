"""Whole calls: bounds, monotonicity, symmetry, scaling, speed, and what is refused."""

import dataclasses
import time

import numpy as np
import pytest

from mok.config import Config, Shape
from mok.errors import MokError, ResourceError, ShapeError
from mok.models import MODELS
from mok.tools.simulator import Scenario, Switches, balanced, drawn, load_machine, simulate
from mok.tools.simulator.engine import Engine, Rates
from mok.tools.simulator.load import loads
from mok.tools.simulator.simulate import build

QWEN = Shape.of_model(MODELS["qwen3-30b-a3b"], 4096, 8)
CONFIG = Config(24, 24, 2048, 16384)
NOISE = 0.02


def scenario(machine="h200", shape=QWEN, config=CONFIG, **changes) -> Scenario:
    changes.setdefault("routing", balanced(shape))
    return Scenario(shape, config, load_machine(machine), **changes)


@pytest.mark.parametrize("direction", ["forward", "backward", "recompute"])
@pytest.mark.parametrize("machine", ["h200", "gb300"])
def test_no_kernel_is_faster_than_its_bounds(machine, direction):
    for comm in (4, 24):
        for ep in (1, 8):
            shape = dataclasses.replace(QWEN, ep_size=ep, num_tokens=4096 if ep > 1 else 16384)
            config = Config(comm, comm, 2048, 16384)
            found = simulate(scenario(machine, shape, config, direction=direction))
            for name, least in found.bounds.items():
                assert found.kernel_ms >= least * (1 - 1e-9), name
            assert found.ms == pytest.approx(sum(found.phases.values()))
            assert found.ms >= found.kernel_ms
            assert all(v >= 0 for v in found.phases.values())
            assert sum(found.shares.values()) == pytest.approx(1)
            assert found.bound


@pytest.mark.parametrize(
    ("constant", "resource", "ep"),
    [("hbm_bytes_per_s", "HBM", 1), ("hbm_bytes_per_s", "HBM", 8),
     ("nvlink_bytes_per_s", "NVLink", 8)],
)  # fmt: skip
def test_a_starved_kernel_takes_what_its_resource_needs(constant, resource, ep):
    base = scenario(shape=dataclasses.replace(QWEN, ep_size=ep))
    starved = base.machine.with_constants(**{constant: base.machine[constant] / 30})
    for direction in ("forward", "backward"):
        found = simulate(dataclasses.replace(base, machine=starved, direction=direction))
        assert found.bound.startswith(resource)
        least = found.bounds[resource]
        assert least * (1 - 1e-9) <= found.kernel_ms <= 1.3 * least


def test_few_comm_sms_bound_a_call_and_many_do_not():
    few = simulate(scenario(config=Config(2, 2, 2048, 16384)))
    many = simulate(scenario(config=Config(32, 32, 2048, 16384)))
    assert few.bound.startswith("comm SMs") and few.kernel_ms > 2 * many.kernel_ms
    assert few.comm_busy > 0.9 and few.shares["rows"] > 0.5


# ---------------------------------------------------------------------- monotonicity

FASTER = {
    "hbm_bytes_per_s": 2.0,
    "nvlink_bytes_per_s": 2.0,
    "sm_pull_bytes_per_s": 2.0,
    "sm_push_bytes_per_s": 2.0,
    "sm_bytes_per_s": 2.0,
    "l2_bytes_per_s": 2.0,
    "clock_hz": 1.5,
    "nvlink_latency_s": 0.5,
    "local_latency_s": 0.5,
    "signal_s": 0.5,
    "launch_s": 0.5,
    "barrier_s": 0.5,
    "network_bytes_per_s": 2.0,
}


@pytest.mark.parametrize("constant", FASTER)
@pytest.mark.parametrize("program", ["ours", "upstream"])
def test_a_faster_machine_is_never_slower(constant, program):
    machine = "gb300" if program == "upstream" else "h200"
    for direction in ("forward", "backward"):
        for comm in (6, 32):
            base = scenario(
                machine, config=Config(comm, comm, 2048, 16384), program=program,
                direction=direction,
            )  # fmt: skip
            better = base.machine.with_constants(
                **{constant: base.machine[constant] * FASTER[constant]}
            )
            before = simulate(base).ms
            after = simulate(dataclasses.replace(base, machine=better)).ms
            assert after <= before * (1 + NOISE)


def test_what_binds_helps_when_it_gets_faster():
    base = scenario(shape=dataclasses.replace(QWEN, num_tokens=8192), config=CONFIG)
    wide = base.machine.with_constants(nvlink_bytes_per_s=2 * base.machine["nvlink_bytes_per_s"])
    slow = base.machine.with_constants(nvlink_bytes_per_s=0.2 * base.machine["nvlink_bytes_per_s"])
    times = [simulate(dataclasses.replace(base, machine=m)).ms for m in (wide, base.machine, slow)]
    assert times[2] > 3 * times[1] > 2.9 * times[0]


def test_time_grows_with_the_work():
    times = [
        simulate(scenario(shape=dataclasses.replace(QWEN, num_tokens=t))).ms
        for t in (0, 1, 512, 1024, 4096, 8192)
    ]
    assert times == sorted(times) and times[0] > 0
    skew = [
        simulate(scenario(routing=drawn(QWEN, z))).ms for z in (0.0, 0.5, 1.0)
    ]  # the slowest rank gets more
    assert skew == sorted(skew)


# ---------------------------------------------------------------------- symmetry


def test_balanced_ranks_take_the_same_time():
    s = scenario(shape=dataclasses.replace(QWEN, num_tokens=1024), config=Config(8, 8, 1024, 4096))
    rates = Rates(1e12, 4e11, 5e10, 1e-6)
    ends = [Engine(build(s, load), rates).play().end for load in loads(s, 128)]
    assert max(ends) == pytest.approx(min(ends), rel=1e-6)


def test_the_slowest_rank_is_the_one_reported():
    shape = Shape(512, 1024, 256, 16, 2, 8)
    s = scenario(shape=shape, config=Config(8, 8, 512, 2048), routing=drawn(shape, 1.2))
    found = simulate(s)
    rates = Rates(
        s.machine["hbm_bytes_per_s"], s.machine.nvlink, s.machine["network_bytes_per_s"],
        s.machine["signal_s"],
    )  # fmt: skip
    at = found.scenario  # at the clock that was found
    ends = [Engine(build(at, load), rates).play().end for load in loads(s, 128)]
    assert found.kernel_ms == pytest.approx(max(ends) * 1e3, rel=0.01)
    assert found.rank == int(np.argmax(ends))


def test_reserved_sms_cost_their_share():
    one = dataclasses.replace(QWEN, ep_size=1, num_tokens=16384)
    machine = load_machine("h200").with_constants(power_exponent=0.0)
    # One minibatch of all rows: no wave of a minibatch ends with SMs to spare.
    whole = dataclasses.replace(CONFIG, minibatch_size=1 << 17, macrobatch_size=1 << 17)
    times = [
        simulate(
            Scenario(
                one, dataclasses.replace(whole, reserved_sms=n), machine, routing=balanced(one)
            )
        ).kernel_ms
        for n in (0, 66)
    ]
    assert times[1] / times[0] == pytest.approx(2, rel=0.03)


def test_virtual_ranks_use_no_link():
    found = simulate(scenario(virtual=True))
    assert "NVLink" not in found.bounds and "barrier before" not in found.phases
    assert simulate(scenario()).bounds["NVLink"] > 0


def test_beyond_the_rack_the_network_binds():
    shape = dataclasses.replace(QWEN, ep_size=16)
    inside = simulate(scenario("gb300", shape, routing=balanced(shape)))
    across = simulate(scenario("h200", shape, routing=balanced(shape)))
    assert "network" not in inside.bounds
    assert across.bound.startswith("network") and across.ms > 3 * inside.ms


def test_a_small_ring_costs_replay_in_backward():
    small, large = Config(24, 24, 2048, 6144), Config(24, 24, 2048, 65536)
    times = [simulate(scenario(config=c, direction="backward")).ms for c in (small, large)]
    assert times[0] > 1.2 * times[1]


# ---------------------------------------------------------------------- speed


@pytest.mark.parametrize("routing", ["balanced", "zipf"])
def test_a_rack_is_simulated_in_seconds(routing):
    """EP 64, 8192 tokens a rank, forward: at most 10 s of one core."""
    shape = Shape.of_model(MODELS["kimi-k2.5"], 8192, 64)
    made = balanced(shape) if routing == "balanced" else drawn(shape, 0.6)
    config = Config.suggest(shape, "gb300")
    begin = time.process_time()
    s = Scenario(shape, config, load_machine("gb300"), routing=made)
    found = simulate(s)
    assert time.process_time() - begin < 10
    assert found.tasks + found.items > 10_000


# ---------------------------------------------------------------------- programs


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("model", ["kimi-k2.5", "glm-5.2", "qwen3.5-397b", "deepseek-v4-pro"])
def test_our_program_is_at_least_as_fast_as_upstreams(model, direction, precision):
    """On one machine file: with upstream's own defaults, and with what its authors found best."""
    shape = Shape.of_model(MODELS[model], 2048, 64)
    gb300, suggested = load_machine("gb300"), Config.suggest(shape, "gb300", precision)
    defaults = Config(40, 28, 4096, 131072)
    tuned = dataclasses.replace(suggested, fwd_num_comm_sms=36, bwd_num_comm_sms=36)
    for config in (defaults, tuned):
        s = Scenario(shape, config, gb300, direction, precision, routing=balanced(shape))
        theirs = simulate(dataclasses.replace(s, program="upstream")).ms
        assert simulate(s).ms <= theirs  # with the very same tunables
        assert simulate(dataclasses.replace(s, config=suggested)).ms <= theirs * 1.01


def test_each_switch_helps_where_it_should():
    shape = Shape.of_model(MODELS["kimi-k2.5"], 4096, 64)
    s = Scenario(
        shape, Config(36, 36, 2560, 10240), load_machine("gb300"), "backward", program="upstream",
        routing=balanced(shape),
    )  # fmt: skip

    def gain(direction: str, name: str) -> float:
        plain = dataclasses.replace(s, direction=direction)
        switched = dataclasses.replace(plain, switches=Switches(**{name: True}))
        return 1 - simulate(switched).ms / simulate(plain).ms

    assert gain("forward", "fused_swiglu") > 0.03
    assert gain("forward", "two_accumulators") > 0.01
    assert gain("forward", "grid_hint") > 0.02
    assert gain("backward", "slot_backward") > 0.02
    assert abs(gain("forward", "slot_backward")) < 1e-9
    many = Shape.of_model(MODELS["qwen3.5-397b"], 4096, 8)  # 64 experts to scan
    t = dataclasses.replace(s, shape=many, routing=balanced(many), direction="forward")
    searched = dataclasses.replace(t, switches=Switches(prefix_search=True))
    assert simulate(searched).ms < simulate(t).ms


# ---------------------------------------------------------------------- refusals


def test_impossible_scenarios_are_refused():
    with pytest.raises(ResourceError, match="must fit the usable SMs"):
        scenario(config=Config(132, 4, 2048, 16384))
    with pytest.raises(ShapeError, match="multiple of 256"):
        scenario("gb300", config=Config(4, 4, 128, 128))
    with pytest.raises(MokError, match="Blackwell only"):
        scenario(program="upstream")
    with pytest.raises(MokError, match="not modelled"):
        scenario("gb300", program="upstream", direction="recompute")
    with pytest.raises(MokError, match="direction must be one of"):
        scenario(direction="sideways")
    with pytest.raises(MokError, match="must define"):
        simulate(scenario(overrides={"nonsense": 1.0}))
