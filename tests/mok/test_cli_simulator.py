"""``mok simulate``, ``mok plan`` and ``mok trace``."""

import json
import re

import numpy as np
import pytest

from mok import cli
from mok.kernels_cute import trace as layout
from mok.runtime.trace import pack_records
from mok.tools.simulator import compare
from mok.tools.simulator.constants import HERE
from mok.tools.trace.perfetto import FORMAT

TILES_OF_KIMI = str(99_999_999_999 * 8 // 128 * 44 + 44)
SMALL = ["--shape", "512,1024,256,16,2,256", "--ep", "4"]


def document(capsys, *argv: str) -> tuple[int, dict]:
    code = cli.main([*argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def text(capsys, *argv: str) -> str:
    assert cli.main(list(argv)) == 0
    return capsys.readouterr().out


def test_simulate_document(capsys):
    code, found = document(
        capsys, "simulate", "--machine", "gb300", *SMALL, "--pass", "all", "--program", "both",
        "--minibatch", "256", "512", "--comm-sms", "8",
    )  # fmt: skip
    assert code == 0
    assert found["machine"] == "gb300" and found["routing"] == "uniform"
    assert found["shape"]["ep"] == 4 and found["shape"]["shared_intermediate"] == 256
    # Two minibatches; forward and backward of both programs, recompute of ours.
    assert len(found["rows"]) == 2 * (2 + 2 + 1)
    for row in found["rows"]:
        assert set(row) >= {"config", "ms", "bound", "phases", "bounds", "pass", "program"}
        assert row["ms"] > 0 and row["config"]["fwd_num_comm_sms"] == 8
    kinds = {c["kind"] for c in found["constants"]}
    assert {"published", "assumed", "fitted"} <= kinds
    assert sum(found["constants_by_kind"].values()) == len(found["constants"])


def test_simulate_prints_where_time_goes_and_sources(capsys):
    out = text(capsys, "simulate", "--machine", "h200", *SMALL, "--constants")
    assert "HGX H200" in out and "phases:" in out and "least kernel time" in out
    assert "main loop" in out and "measured" in out


def test_simulate_lists_gains(capsys):
    code, found = document(capsys, "simulate", "--machine", "gb300", *SMALL, "--gains")
    assert code == 0 and found["gains"][0]["program"] == "upstream"
    assert "fused SwiGLU" in text(capsys, "simulate", "--machine", "gb300", *SMALL, "--gains")


def test_recorded_ids_are_simulated(capsys, tmp_path):
    path = tmp_path / "ids.npy"
    np.save(path, np.random.default_rng(0).integers(0, 16, (4, 512, 2)))
    code, found = document(
        capsys, "simulate", "--machine", "h200", *SMALL, "--routing", str(path), "--virtual"
    )
    assert code == 0 and found["routing"] == "ids.npy" and found["virtual"]


@pytest.mark.parametrize(
    ("argv", "error", "rule"),
    [
        (["--machine", "v100"], "MokError", "known one"),
        (["--shape", "1,2,3"], "ShapeError", "T,H,I,E,K"),
        (["--shape", "8,100,64,4,2"], "ShapeError", "multiple of 64"),
        (["--routing", "odd"], "MokError", "balanced"),
        (["--program", "upstream"], "MokError", "Blackwell"),
        (["--program", "upstream", "--push"], "MokError", "of our program"),
        (["--pass", "up"], "MokError", "pass must be"),
        (["--comm-sms", "200"], "ResourceError", "usable SMs"),
        (["--minibatch", "100"], "ShapeError", "multiple of 128"),
        (["--minibatch", "0"], "ShapeError", "at least 1"),
        (["--macrobatch", "1000"], "ShapeError", "multiple of"),
    ],
)
def test_bad_input_is_named(capsys, argv, error, rule):
    code, found = document(capsys, "simulate", *SMALL, *argv)
    assert code == 2
    assert found["error"]["type"] == error and rule in found["error"]["rule"]


def test_plan_document(capsys):
    argv = ("plan", "--machine", "h200", *SMALL, "--routing", "balanced", "--rounds", "1")
    code, found = document(capsys, *argv)
    assert code == 0 and found["fits"]
    names = [row["name"] for row in found["rows"]]
    assert names == ["recommended", "Config.suggest"]
    assert found["rows"][0]["ms"] <= found["rows"][1]["ms"]
    assert found["sensitivity"]["minibatch_size"] and found["memory_total"] > 0
    out = text(capsys, *argv)
    assert "If one tunable changes" in out and "Memory of a rank" in out


def test_a_plan_that_does_not_fit_fails(capsys, tmp_path):
    machine = tmp_path / "small.toml"
    known = (HERE / "machines" / "h200.toml").read_text()
    assert "value = 141e9" in known
    machine.write_text(known.replace("value = 141e9", "value = 20e6"))
    code, found = document(capsys, "plan", "--machine", str(machine), *SMALL, "--rounds", "1")
    assert code == 1 and not found["fits"]
    assert found["memory_total"] > found["memory_limit"] == 20e6


def test_trace_writes_files(capsys, tmp_path):
    out = tmp_path / "run"
    argv = ["trace", "--machine", "gb300", *SMALL, "--program", "both", "--out", str(out)]
    code, found = document(capsys, *argv, "--picture", "svg")
    assert code == 0
    assert found["files"] == [f"{out}.json", f"{out}.svg"]
    assert (tmp_path / "run.svg").stat().st_size > 1000
    assert [t["lost"] for t in found["traces"]] == [0, 0]
    assert found["traces"][0]["sm_ms_by_kind"]["up"] > 0
    for trace in found["traces"]:
        kinds = trace["tasks_us"]
        assert sum(times["tasks"] for times in kinds.values()) == trace["events"]
        assert all(t["p10"] <= t["median"] <= t["p90"] for t in kinds.values())
        assert any(times["period"] for times in kinds.values())
    assert "begin to end" in text(capsys, *argv, "--picture", "none")


def test_push_is_named_wherever_it_is_simulated(capsys, tmp_path):
    """Ours alone has it, where there is a combine; GB300's kernels only if asked for."""
    argv = ("--machine", "gb300", *SMALL, "--program", "both", "--comm-sms", "8")
    rows = {}
    for push in ((), ("--push",)):
        code, found = document(capsys, "simulate", *argv, "--pass", "all", "--gains", *push)
        assert code == 0
        rows[push] = {(r["pass"], r["program"]): r for r in found["rows"]}
    plain, pushed = rows.values()
    mine = {("forward", "ours"), ("backward", "ours")}
    assert {key for key, row in pushed.items() if row["push"]} == mine
    assert not any(row["push"] for row in plain.values())
    assert {key for key in plain if plain[key] != pushed[key]} == mine
    assert all(pushed[key]["items"] < plain[key]["items"] for key in mine)
    titled = "results of forward pushed by tasks of ours"
    assert titled in text(capsys, "simulate", *argv, "--push")
    assert "push" not in text(capsys, "simulate", *argv)
    both = text(capsys, "simulate", *argv, "--push", "--pass", "all")
    assert "results of forward and backward pushed by tasks of ours" in both
    hopper = ("--machine", "h200", *SMALL)
    assert titled in text(capsys, "simulate", *hopper, "--pass", "all")
    assert "push" not in text(capsys, "simulate", *hopper, "--pass", "all", "--no-push")
    assert "push" not in text(capsys, "simulate", *hopper, "--pass", "backward")
    out = ("--out", str(tmp_path / "run"), "--picture", "none")
    code, found = document(capsys, "trace", *argv, "--push", *out)
    ours, theirs = (t["source"] for t in found["traces"])
    assert ours.startswith("simulator: ours with push, forward") and "push" not in theirs
    assert "combine" not in found["traces"][0]["sm_ms_by_kind"]
    for push in ((), ("--no-push",)):
        _, found = document(capsys, "trace", *hopper, *push, *out)
        assert ("combine" in found["traces"][0]["sm_ms_by_kind"]) == bool(push)


def test_plan_with_push(capsys):
    argv = ("plan", "--machine", "h200", *SMALL, "--routing", "balanced", "--rounds", "0")
    (_, plain), (code, pushed) = (document(capsys, *argv, f"--{no}push") for no in ("no-", ""))
    kernels = document(capsys, *argv)[1]
    assert code == 0
    assert [list(found["push"].values()) for found in (plain, kernels, pushed)] == [
        [False, False], [True, False], [True, True],
    ]  # fmt: skip
    mixed = kernels["rows"][1]
    assert mixed["forward"]["ms"] < plain["rows"][1]["forward"]["ms"]
    times = [{row["name"]: row for row in found["rows"]} for found in (plain, pushed)]
    before, after = (t["Config.suggest"] for t in times)
    for name in ("forward", "backward"):
        assert after[name]["items"] < before[name]["items"]
    assert "results of forward and backward pushed" in text(capsys, *argv, "--push")
    assert "results of forward pushed" in text(capsys, *argv)
    assert "pushed" not in text(capsys, *argv, "--no-push")


def test_trace_lays_records_beside_the_simulation(capsys, tmp_path):
    kernel = tmp_path / "kernel.bin"
    kernel.write_bytes(
        pack_records(layout.FORWARD, 0, [[(0, 10_000, 3, 3, layout.COMPUTE, 0, 0)]], 2)
    )
    out = tmp_path / "both"
    code, found = document(
        capsys, "trace", *SMALL, "--records", str(kernel), "--simulate", "--out", str(out),
        "--picture", "none",
    )  # fmt: skip
    assert code == 0 and len(found["traces"]) == 2
    assert found["traces"][0]["source"] == "kernel, forward, rank 0"
    # What was written can be shown again, beside others.
    again = ["trace", "--records", f"{out}.json", "--out", str(tmp_path / "x"), "--picture", "none"]
    assert len(document(capsys, *again)[1]["traces"]) == 2
    assert "kernel, forward, rank 0: 1 tasks" in text(capsys, *again)


def test_trace_refuses_other_files(capsys, tmp_path):
    code, found = document(capsys, "trace", "--records", str(tmp_path / "none.bin"))
    assert code == 2 and "readable" in found["error"]["rule"]
    (tmp_path / "x.bin").write_bytes(b"nothing")
    code, found = document(capsys, "trace", "--records", str(tmp_path / "x.bin"))
    assert code == 2 and "header" in found["error"]["rule"]


@pytest.mark.emulator
def test_trace_lays_emulator_and_simulator_side_by_side(capsys, tmp_path):
    """One call, the same ids and tunables, on the same number of SMs: the same tasks."""
    pytest.importorskip("numba")
    pytest.importorskip("cutlass")
    ids = tmp_path / "ids.npy"
    np.save(ids, np.random.default_rng(0).integers(-1, 4, (2, 96, 2)))
    out = tmp_path / "both"
    code, found = document(
        capsys, "trace", "--on", "emulator", "simulator", "--shape", "96,128,128,4,2,64",
        "--ep", "2", "--routing", str(ids), "--minibatch", "128", "--macrobatch", "256",
        "--comm-sms", "2", "--emulated-sms", "4", "--out", str(out), "--picture", "svg",
    )  # fmt: skip
    assert code == 0 and [f[-4:] for f in found["files"]] == ["json", ".svg"]
    *emulated, simulated = found["traces"]
    assert [t["source"] for t in emulated] == [f"emulator, forward, rank {r}" for r in (0, 1)]
    assert simulated["source"].startswith("simulator: ours with push, forward on h200")
    kinds = set(emulated[0]["sm_ms_by_kind"])
    assert kinds == {"shared up", "shared down", "up", "down", "dispatch"}
    assert set(simulated["sm_ms_by_kind"]) == kinds
    assert simulated["events"] in [t["events"] for t in emulated]
    assert not any(t["lost"] for t in found["traces"])


@pytest.mark.gpu
def test_trace_lays_hardware_beside_both_others(capsys, tmp_path):
    pytest.importorskip("numba")
    out = tmp_path / "three"
    code, found = document(
        capsys, "trace", "--on", "hardware", "emulator", "simulator", "--shape", "96,128,128,4,2,64",
        "--ep", "2", "--minibatch", "128", "--macrobatch", "256", "--comm-sms", "2",
        "--emulated-sms", "4", "--machine", "h200", "--out", str(out),
    )  # fmt: skip
    assert code == 0 and [f[-4:] for f in found["files"]] == ["json", ".png"]
    places = [t["source"].partition(", ")[0].partition(":")[0] for t in found["traces"]]
    assert places == ["emulator"] * 2 + ["hardware"] * 2 + ["simulator"]
    tasks = {t["source"]: t["events"] for t in found["traces"]}
    for rank in range(2):  # the same call has the same tasks wherever it runs
        assert tasks[f"emulator, forward, rank {rank}"] == tasks[f"hardware, forward, rank {rank}"]
    assert not any(t["lost"] for t in found["traces"])


@pytest.mark.parametrize(
    ("argv", "rule"),
    [
        (["--on", "emulator", "--shape", "65536,4096,4096,8,2"], "must be small"),
        (["--on", "emulator", *SMALL, "--routing", "balanced"], "uniform routing or a .npy"),
        (["--on", "hardware", *SMALL, "--machine", "gb300"], "needs a GPU of sm_103a"),
    ],
)
def test_what_cannot_be_traced_is_named(capsys, argv, rule):
    code, found = document(capsys, "trace", *argv)
    assert code == 2 and rule in found["error"]["rule"]


@pytest.mark.parametrize(
    ("argv", "rule"),
    [
        (["--pass", "all"], "a timeline is of one pass"),
        (["--on", "emulator", "--precision", "mxfp8"], "traced in bf16"),
        (["--on", "emulator", "--push"], "of the simulator alone"),
        (["--on", "emulator", "--no-push"], "of the simulator alone"),
        (["--program", "upstream", "--machine", "gb300", "--push"], "of our program"),
        (["--on", "emulator", "--program", "upstream"], "only the simulator"),
        (["--on", "emulator", "--routing", "IDS"], r"must be \[EP, T, K\] = \[4, 512, 2\]"),
        (["--out", "."], "--out must be a file name"),
        (["--out", "IDS/x"], "folder for results must be writable"),
        (["--records", "DAMAGED"], "as mok trace wrote it"),
    ],
)
def test_what_cannot_be_drawn_is_named(capsys, tmp_path, argv, rule):
    ids = tmp_path / "ids.npy"
    np.save(ids, np.zeros((2, 3, 2), np.int64))
    damaged = tmp_path / "damaged.json"
    damaged.write_text(json.dumps({"traceEvents": [], "otherData": {"format": FORMAT}}))
    argv = [a.replace("IDS", str(ids)).replace("DAMAGED", str(damaged)) for a in argv]
    code, found = document(capsys, "trace", *SMALL, "--out", str(tmp_path / "o"), *argv)
    assert code == 2 and re.search(rule, found["error"]["rule"])


def test_a_folder_for_timelines_is_made(capsys, tmp_path):
    out = tmp_path / "new" / "run"
    assert document(capsys, "trace", *SMALL, "--out", str(out), "--picture", "none")[0] == 0
    assert out.with_name("run.json").is_file()


@pytest.mark.parametrize(
    "argv",
    [
        ("simulate", "--comm-sms", "0"),
        ("simulate", "--multiplier", "0"),
        ("plan", "--rounds", "-1"),
        ("simulate", "--tokens", "99999999999"),
    ],
)
def test_numbers_out_of_range_are_refused(capsys, argv):
    shape = [] if "--tokens" in argv else SMALL
    code, found = document(capsys, *argv, *shape)
    assert code == 2 and found["error"]["value"] in (argv[-1], f"{float(argv[-1])}", TILES_OF_KIMI)


def test_comparisons_are_a_document(capsys, monkeypatch):
    """Also where a time is one of numpy's numbers."""
    first = next(iter(compare.records()))
    monkeypatch.setattr(compare, "records", lambda: [first])
    monkeypatch.setattr(compare.Record, "predict", lambda record: np.float64(record.ms))
    code, found = document(capsys, "simulate", "--compare")
    assert code == 0 and [c["ok"] for c in found["comparisons"]] == [True]


def test_lost_records_fail(capsys, tmp_path):
    path = tmp_path / "k.bin"
    records = [(0, 1, 0, 3, 0, i, 0) for i in range(3)]
    path.write_bytes(pack_records(layout.FORWARD, 0, [records], 2))
    code, found = document(
        capsys, "trace", "--records", str(path), "--out", str(tmp_path / "o"), "--picture", "none"
    )
    assert code == 1 and found["traces"][0]["lost"] == 1
