"""Machines and constants as data, and what is refused."""

import dataclasses
import json
import statistics
from pathlib import Path

import numpy as np
import pytest

from mok.config import Config, Shape
from mok.errors import MokError
from mok.models import MACHINES
from mok.tools.simulator import Scenario, balanced, known_machines, load_machine
from mok.tools.simulator.constants import HERE, KINDS, calibration, read_table
from mok.tools.simulator.load import loads
from mok.tools.simulator.machine import NAMES
from mok.tools.simulator.tilecost import Costs

RECORDED = Path(__file__).parents[3] / "docs" / "measurements"
CALIBRATIONS = sorted(p.stem for p in (HERE / "calibration").glob("*.toml"))


@pytest.mark.parametrize("name", known_machines())
def test_every_machine_loads_and_agrees_with_the_models(name):
    machine = load_machine(name)
    assert machine.name == name
    known = MACHINES[name]
    assert (machine.num_sms, machine.arch) == (known.num_sms, known.arch)
    assert set(machine.constants) == set(NAMES)
    for constant in [*machine.constants.as_list(), *machine.tiles.as_list()]:
        assert constant["kind"] in KINDS and len(constant["source"]) > 5


def test_the_known_machines():
    assert set(known_machines()) == {"h100", "h200", "b200", "b300", "gb200", "gb300"}
    assert load_machine("H200").name == "h200"
    assert load_machine("gb300").domain == 72 and load_machine("h200").domain == 8


@pytest.mark.parametrize("name", CALIBRATIONS)
def test_every_calibration_says_its_sources(name):
    table = calibration(name)
    assert len(table) > 10
    assert all(c["kind"] in KINDS and len(c["source"]) > 5 for c in table.as_list())


def test_measured_is_not_published():
    kinds = {c["name"]: c["kind"] for c in load_machine("h200").constants.as_list()}
    assert kinds["clock_hz"] == kinds["sm_pull_bytes_per_s"] == "measured"
    assert kinds["nvlink_bytes_per_s"] == kinds["pull_data_wire"] == "published"
    assert "measured" not in {c["kind"] for c in load_machine("gb300").constants.as_list()}


def bandwidths(name: str) -> list[dict]:
    return json.loads((RECORDED / f"2026-11-30-2xh200-{name}.json").read_text())["links"][
        "bandwidth"
    ]


LINKS = bandwidths("links")
CARRIED = [r for r in bandwidths("links-carried") if r["kind"].startswith("carried ")]


def link_rate(row) -> float:
    """GB/s that the model gives our comm workers alone, moving rows to or from one peer."""
    m, table = load_machine("h200"), calibration("ours_sm90")
    carried, pull = row["kind"].startswith("carried "), row["kind"].endswith("pull")
    shape = Shape(8192, row["row_bytes"] // 2, 64, 4, 2, 2)
    s = Scenario(
        shape, Config(row["sms"], row["sms"], 256, 512), m, routing=balanced(shape),
        overrides={"comm_load": 1.0, "carry_load": 1.0},  # nothing else runs
    )  # fmt: skip
    costs = Costs.ours(s)
    rows = costs.tile.comm_m
    if carried:
        load = dataclasses.replace(loads(s, costs.tile.m)[0], local=0.0, near=1.0)
        (item,) = costs.item_s(np.array([pull]), np.array([rows]), load)
    else:
        latency = m["nvlink_latency_s" if pull else "local_latency_s"]
        item = costs.copy_rounds() * latency + table["item_overhead_s"]
    alone = row["sms"] * rows * row["row_bytes"] / item
    data, reply = (
        ("pull_data_wire", "pull_request_wire") if pull else ("push_data_wire", "push_ack_wire")
    )
    wire = m[data] + (0.0 if row["one_way"] else m[reply])
    return min(alone, m.nvlink / wire) / 1e9


def test_links_alone():
    """Two latencies and one overhead explain both row sizes; the rates with 2 SMs are theirs, the others not.

    Near saturation the model has a sharp corner and the port a soft one.
    """
    errors = {
        (r["kind"], r["row_bytes"], r["sms"], r["one_way"]): link_rate(r) / r["gbytes_per_s"] - 1
        for r in LINKS
    }
    free = [e for (_, _, sms, _), e in errors.items() if sms <= 8]
    assert len(free) == 24 and max(map(abs, free)) < 0.18
    assert statistics.median(map(abs, free)) < 0.06
    full = [e for (_, size, sms, _), e in errors.items() if sms == 32 and size == 4096]
    assert len(full) == 4 and max(map(abs, full)) < 0.02
    assert max(map(abs, errors.values())) < 0.29


def test_carried_links_alone():
    """One rate each way and one overhead; pulls with 8 SMs fall short of it before the port is full."""
    errors = {
        (r["kind"].split()[1], r["row_bytes"], r["sms"], r["one_way"]): link_rate(r)
        / r["gbytes_per_s"]
        - 1
        for r in CARRIED
    }
    free = {key: e for key, e in errors.items() if key[2] <= 4}
    assert len(free) == 16 and max(map(abs, free.values())) < 0.1
    assert statistics.median(map(abs, free.values())) < 0.05
    pushes = [e for (kind, *_), e in errors.items() if kind == "push"]
    assert len(pushes) == 28 and max(map(abs, pushes)) < 0.08
    full = [e for (_, size, sms, _), e in errors.items() if sms == 32 and size == 4096]
    assert len(full) == 4 and max(map(abs, full)) < 0.02
    assert max(map(abs, errors.values())) < 0.35


@pytest.mark.parametrize(
    ("dealt", "rounds"),
    [
        # 14 KB rows: 128 units, of which the last 32 are half pieces.
        (1, {2048: 3, 4096: 6, 6144: 8, 7168: 11, 1536: 6, 2880: 6}),
        # Every fourth piece is short, and always the same warps get it: 11 of two turns each.
        (0, {2048: 3, 4096: 6, 6144: 8, 7168: 22, 1536: 6, 2880: 12}),
    ],
)
def test_rounds_of_a_comm_item(dealt, rounds):
    """Pieces dealt to 12 warps; the end of a row takes a turn for each half piece, or two."""
    for hidden, want in rounds.items():
        shape = Shape(64, hidden, 64, 4, 2, 2)
        s = Scenario(
            shape, Config(4, 4, 128, 256), load_machine("h200"), routing=balanced(shape),
            overrides={"comm_dealt": dealt, "comm_carried": 0},
        )  # fmt: skip
        assert Costs.ours(s).copy_rounds() == want


def test_the_calibration_is_of_todays_comm_worker():
    pytest.importorskip("cutlass")
    from mok.kernels_cute import comm, program
    from mok.kernels_cute.machine import BLACKWELL, HOPPER
    from mok.kernels_cute.megakernel import WARPS

    for name in ("ours_sm90", "ours_sm100"):
        table = calibration(name)
        assert table["comm_piece_bytes"] == comm.PIECE and table["comm_warps"] == WARPS
        assert table["comm_carried"] == (HOPPER if name == "ours_sm90" else BLACKWELL).carry
        assert table["ahead"] == program.AHEAD


def edit(tmp_path, old, new):
    text = (HERE / "machines" / "h200.toml").read_text()
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new, 1))
    return path


def test_a_machine_of_ones_own(tmp_path):
    machine = load_machine(edit(tmp_path, "num_sms = 132", "num_sms = 114"))
    assert machine.num_sms == 114


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("num_sms = 132", "num_sms = 1", "more SMs than one cluster"),
        ("num_sms = 132", "num_sms = 0", "positive int"),
        ("domain = 8", "domain = 1.5", "positive int"),
        ('"sm_90a"', '"sm_80"', "supported"),
        ("value = 4.2e12", "value = 0", "must be positive"),
        ("value = 4.2e12", "value = -1", "not negative"),
        ("value = 4.2e12", "value = nan", "finite"),
        ("value = 4.2e12", 'value = "fast"', "must be a number"),
        ("value = 0.925", "value = 1.2", "nvlink_efficiency of machine h200 must be in 0.01…1"),
        ("value = 0.827", "value = 1.2", "tile 128x256 of machine h200 must be in 0.01…1"),
        ("value = 0.827", "value = 0", "must be in 0.01…1"),
        ("value = 1.53e9", "value = 1e-300", "clock_hz of machine h200 must be in 1e"),
        ("value = 4.2e12", "value = 1", "hbm_bytes_per_s of machine h200 must be in 1e"),
        ("value = 1.42e-6", "value = 1e300", "signal_s of machine h200 must be in 0…1"),
        ("value = 0.5", "value = 1e9", "power_exponent of machine h200 must be in 0…4"),
        ('name = "h200"', "name = 3", "name of a machine must be text"),
        ('arch = "sm_90a"', 'arch = ["sm_90a"]', "arch of a machine must be text"),
        ('kind = "measured"', 'kind = "guessed"', "kind of"),
        ("hbm_bytes_per_s", "hbm_bytes", "exactly the known constants"),
        ("domain = 8\n", "", "exactly"),
        ("[tiles]", "[tiles", "valid TOML"),
    ],
)
def test_impossible_machines_are_refused(tmp_path, old, new, rule):
    with pytest.raises(MokError, match=rule):
        load_machine(edit(tmp_path, old, new))


def test_unknown_machines_and_files():
    with pytest.raises(MokError, match="Known: b200"):
        load_machine("v100")
    with pytest.raises(MokError, match="readable"):
        load_machine("/nowhere/x.toml")


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(MokError, match="valid TOML"):
        load_machine(tmp_path / "x.toml")


def test_tables_are_strict():
    with pytest.raises(MokError, match="exactly value, kind and source"):
        read_table("x", {"a": {"value": 1, "kind": "assumed"}})
    with pytest.raises(MokError, match="must say its source"):
        read_table("x", {"a": {"value": 1, "kind": "assumed", "source": ""}})
    table = read_table("x", {"a": {"value": 1, "kind": "assumed", "source": "because"}})
    with pytest.raises(MokError, match="x must define b"):
        table["b"]
    with pytest.raises(MokError, match="must define b"):
        table.replace(b=2.0)
    assert table.replace(a=2.0)["a"] == 2.0 and table["a"] == 1.0


def test_power_lets_a_gpu_that_computes_less_clock_higher():
    m = load_machine("h200")
    assert m.clock_gain(m["power_flops"], 132) == pytest.approx(1)
    gains = [m.clock_gain(f, 132) for f in (7e14, 5e14, 3e14, 1e14)]
    assert gains == sorted(gains) and gains[-1] == m["clock_headroom"]
    assert m.clock_gain(5e14, 100) > m.clock_gain(5e14, 132)  # SMs that do not multiply
    assert m.clock_gain(5e14, 132, saved=0.04) == pytest.approx(m.clock_gain(5e14, 132) / 0.96**0.5)
    assert m.at(1.2).tensor_rate("128x256", "bf16") == pytest.approx(
        1.2 * m.tensor_rate("128x256", "bf16")
    )
    assert load_machine("gb300").clock_gain(1e10, 1) == 1  # not known, so not modelled


def test_clocks_at_the_power_limit():
    """NVML clocks of the windows that the power law was fitted on: ours, torch and cuBLAS."""
    m = load_machine("h200")
    document = json.loads((RECORDED / "2026-11-29-h200-bench.json").read_text())
    errors = []
    for row in document["rows"]:
        fitted = row["program"] in ("mok", "torch", "cublas") and row["clock_mhz"]
        if not fitted or row["clock_mhz"] > 1930:  # not at the limit
            continue
        clock = m["clock_hz"] * m.clock_gain(1e12 * row["tflops"], 132) / 1e6
        errors.append(abs(clock / row["clock_mhz"] - 1))
    assert len(errors) > 20 and statistics.median(errors) < 0.05 and max(errors) < 0.12
