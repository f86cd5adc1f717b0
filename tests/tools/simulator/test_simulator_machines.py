"""Machines and constants as data, and what is refused."""

import pytest

from mok.errors import MokError
from mok.models import MACHINES
from mok.tools.simulator import known_machines, load_machine
from mok.tools.simulator.constants import HERE, KINDS, calibration, read_table
from mok.tools.simulator.machine import NAMES

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


def test_nvlink_explains_what_was_measured():
    """Saturated copies between two H200s: payload, from wire bytes and one raw rate."""
    m = load_machine("h200")
    pull = m.nvlink / (m["pull_data_wire"] + m["pull_request_wire"])
    push = m.nvlink / (m["push_data_wire"] + m["push_ack_wire"])
    assert pull == pytest.approx(332e9, rel=0.02)  # each way when both GPUs pull
    assert push == pytest.approx(357e9, rel=0.02)
    assert m.nvlink / m["push_data_wire"] == pytest.approx(362e9, rel=0.02)  # one way
    # One way, requests do not share the direction of the data: the model is 5 % high.
    assert m.nvlink / m["pull_data_wire"] == pytest.approx(368e9, rel=0.06)


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
        ("value = 0.968", "value = 1.2", "must not exceed 1"),
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


def test_power_lets_fewer_sms_run_faster_up_to_a_limit():
    m = load_machine("h200")
    rates = [m.tensor_rate("128x256", "bf16", n) for n in (132, 100, 60, 1)]
    assert rates == sorted(rates)
    assert rates[-1] / rates[0] == pytest.approx(m["clock_headroom"])
    chip = [n * m.tensor_rate("128x256", "bf16", n) for n in (60, 100, 132)]
    assert chip == sorted(chip)  # fewer SMs never compute more
