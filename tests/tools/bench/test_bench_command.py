from __future__ import annotations

import dataclasses
import json
import types
from pathlib import Path

import pytest
import torch
from rich.console import Console

from mok import backends, cli
from mok.backends import Backend
from mok.commands import bench
from mok.config import Config
from mok.errors import MokError
from mok.runtime import device as runtime_device
from mok.runtime.device import Backend as RuntimeBackend
from mok.tools.bench import charts, results, tables
from mok.tools.bench.runner import Entry, Runner, Settings
from mok.tools.bench.shapes import parse_shape
from mok.tools.bench.sweep import config_with, default_values, sweep_configs, tunable_named

FAST = ("--warm-ms", "0.1", "--run-ms", "0.2", "--rounds", "2", "--shape", "16,64,64,4,2")
PNG = b"\x89PNG"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    none = RuntimeBackend(None, None, "there is no NVIDIA driver")
    monkeypatch.setattr(runtime_device, "best_backend", lambda: none)


def document(capsys, *argv: str) -> tuple[int, dict]:
    code = cli.main(["bench", *argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


# ---------------------------------------------------------------------- a whole run on the CPU


def test_a_run_without_a_gpu(capsys, tmp_path):
    code, found = document(capsys, *FAST, "--out", str(tmp_path))
    assert code == 0
    assert set(found) >= {"device", "versions", "rows", "missing", "not_run", "ratios", "means"}
    assert found["backend"] == "scheduled reference (CPU)"
    assert found["note"] == "there is no NVIDIA driver"
    rows = {(r["program"], r["pass"]): r for r in found["rows"]}
    assert set(rows) == {
        ("mok", "forward"), ("torch", "forward"), ("torch", "both"), ("cublas", "gemm"),
    }  # fmt: skip
    for row in rows.values():
        assert set(row) >= {
            "shape", "pass", "program", "ms", "spread", "tflops", "clock_mhz", "watts",
            "peak_bytes",
        }  # fmt: skip
        assert row["ms"] > 0 and row["ok"]
    reasons = {m["program"]: m["reason"] for m in found["missing"]}
    assert reasons == {"sonic": "needs a GPU", "flashinfer": "needs a GPU"}
    assert found["versions"]["torch"] and "python" in found["versions"]
    assert found["regime"]["rounds"] == 2 and found["telemetry"] == "none (no GPU)"
    assert (tmp_path / "bench.png").read_bytes()[:4] == PNG
    assert json.loads((tmp_path / "bench.json").read_text())["rows"] == found["rows"]
    assert not list(tmp_path.glob("*.part"))


def test_tables_show_everything(capsys, tmp_path):
    assert cli.main(["bench", *FAST, "--peers", "torch,sonic"]) == 0
    out = capsys.readouterr().out
    for text in ("16,64,64,4,2", "forward", "torch", "cublas", "TFLOP/s", "sonic: needs a GPU"):
        assert text in out
    assert "times faster" in out


def test_peers_none_leaves_only_the_ceiling(capsys):
    code, found = document(capsys, *FAST, "--peers", "none")
    assert code == 0 and {r["program"] for r in found["rows"]} == {"mok", "cublas"}


def test_wrong_results_fail(capsys, monkeypatch):
    from mok.tools.bench.programs import ours

    right = ours.forward_reference
    monkeypatch.setattr(ours, "forward_reference", lambda *a, **k: right(*a, **k) * 1.1)
    code, found = document(capsys, *FAST, "--peers", "none")
    assert code == 1 and not found["rows"][0]["ok"]


def test_both_precisions_in_one_run_with_their_accuracy(capsys):
    shape = ("--shape", "16,128,128,4,2")
    fast = ("--warm-ms", "0.1", "--run-ms", "0.2", "--rounds", "2", "--peers", "torch", *shape)
    code, found = document(capsys, *fast, "--precision", "mxfp8")
    assert code == 0
    rows = {(r["program"], r["pass"]): r for r in found["rows"]}
    ours, quantised = rows["mok", "forward"], rows["mok-mxfp8", "forward"]
    assert ours["accuracy"]["output"]["error"] < 8e-3 < quantised["error"] < 7e-2
    assert 0.996 < quantised["accuracy"]["output"]["cosine"] < ours["accuracy"]["output"]["cosine"]
    torch_ = rows["torch", "both"]["accuracy"]
    assert set(torch_) == {"output", "x", "router_weights", "gate", "up", "down"}
    assert all(m["error"] < 1.5e-2 and m["cosine"] > 0.9998 for m in torch_.values())
    (entry,) = found["precisions"]
    assert entry["program"] == "mok-mxfp8" and entry["limit"] is None  # nothing is asked of a CPU
    each = [a / b for a, b in zip(ours["rounds_ms"], quantised["rounds_ms"], strict=True)]
    assert entry["ratio"] == pytest.approx(sum(each) / 2)
    assert cli.main(["bench", *fast, "--precision", "mxfp8"]) == 0
    out = capsys.readouterr().out
    for text in ("Accuracy against FP32", "d router_weights", "in MXFP8 / in BF16"):
        assert text in out
    assert cli.main(["bench", *fast, "--precision", "mxfp8", "--sweep", "minibatch"]) == 2


def test_ours_with_less_kept_beside_ours(capsys):
    code, found = document(capsys, *FAST, "--peers", "none", "--compact")
    assert code == 0 and {r["program"] for r in found["rows"]} == {"mok", "mok-compact", "cublas"}
    assert all(entry["ok"] for entry in found["bits"])


def test_sizes_that_mxfp8_cannot_have_are_named(capsys):
    code, found = document(capsys, *FAST, "--peers", "none", "--precision", "mxfp8")
    assert code == 1 and [m["program"] for m in found["missing"]] == ["mok-mxfp8"]
    assert "128" in found["missing"][0]["reason"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--rounds", "0"),
        ("--rounds", "-1"),
        ("--sets", "0"),
        ("--ep", "0"),
        ("--warm-ms", "-1.0"),
        ("--run-ms", "nan"),
        ("--budget-s", "inf"),
        ("--margin", "nan"),
        ("--workers", "-3"),
    ],
)
def test_numbers_beyond_their_limits_are_named(capsys, option, value):
    code, found = document(capsys, *FAST, "--peers", "none", option, value)
    assert code == 2 and found["error"]["value"] == value
    assert found["error"]["rule"].startswith(f"{option} must be a number from ")


@pytest.mark.parametrize(
    ("option", "name", "rule"),
    [
        ("--out", "file", "the folder for results must be writable"),
        ("--chart", "file/x.png", "the folder for results must be writable"),
        ("--chart", "x.xyz", "--chart must end in one of"),
    ],
)
def test_results_that_could_not_be_written_are_refused_before(
    capsys, monkeypatch, tmp_path, option, name, rule
):
    monkeypatch.setattr(bench, "prepare", lambda *_: pytest.fail("measured"))
    (tmp_path / "file").write_text("")
    code, found = document(capsys, *FAST, option, str(tmp_path / name))
    assert code == 2 and found["error"]["rule"].startswith(rule)


def test_the_budget_is_kept_and_said(capsys):
    code, found = document(
        capsys, *FAST, "--shape", "8,64,64,4,2", "--peers", "none", "--budget-s", "1e-6"
    )
    assert code == 1  # nothing of ours ran
    assert [n["reason"] for n in found["not_run"]] == ["the budget was used up"] * 2


# ---------------------------------------------------------------------- against


def test_against_an_earlier_run(capsys, tmp_path):
    _, before = document(capsys, *FAST, "--peers", "none", "--out", str(tmp_path))
    file = tmp_path / "bench.json"
    code, found = document(
        capsys, *FAST, "--peers", "none", "--against", str(file), "--margin", "0.9999"
    )
    assert code == 0 and found["against"]["rows"][0]["basis"] == "share of cuBLAS"
    for row in before["rows"]:
        if row["program"] == "mok":
            row["of_cublas"] *= 1e6  # it was much faster then
    file.write_text(json.dumps(before))
    code = cli.main(["bench", *FAST, "--peers", "none", "--against", str(file)])
    out = capsys.readouterr().out
    assert code == 1 and "SLOWER" in out and "margin 3 %" in out


def test_against_something_with_nothing_in_common_fails(capsys, tmp_path):
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"rows": [], "date": "2026-01-01", "device": "other"}))
    assert cli.main(["bench", *FAST, "--peers", "none", "--against", str(file)]) == 1
    assert "no row in common" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "{}", '{"rows": 3}', "[1]"])
def test_against_something_else_is_refused_before_anything_runs(capsys, tmp_path, text):
    file = tmp_path / "other.json"
    file.write_text(text)
    assert cli.main(["bench", *FAST, "--against", str(file)]) == 2
    assert "--against needs a document" in capsys.readouterr().err
    assert cli.main(["bench", *FAST, "--against", str(tmp_path / "absent")]) == 2


# ---------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    "argv",
    [
        ("--shape", "1,2"),
        ("--passes", "forward,sideways"),
        ("--peers", "nobody"),
        ("--peers", "mok"),
        ("--ep", "0"),
        ("--sets", "0"),
        ("--sweep", "colour"),
        ("--sweep", "minibatch"),  # no GPU
    ],
)
def test_bad_arguments_are_named(capsys, argv):
    assert cli.main(["bench", *argv]) == 2
    assert "Error: " in capsys.readouterr().err


def test_peers():
    assert bench.parse_peers(None) == (["torch", "sonic", "flashinfer", "cublas"], {})
    assert bench.parse_peers(["sonic=/a,torch", "upstream=/b"]) == (
        ["sonic", "torch", "upstream", "cublas"],
        {"sonic": "/a", "upstream": "/b"},
    )
    assert bench.parse_peers(["none"]) == (["cublas"], {})


# ---------------------------------------------------------------------- sweeps

BASE = Config(8, 6, 2048, 8192)


def test_sweep_values_and_configurations():
    assert tunable_named("minibatch") == "minibatch_size"
    with pytest.raises(MokError, match="Known"):
        tunable_named("colour")
    values = default_values("minibatch_size", BASE, "sm_90a", rows=20000)
    assert values[0] == 128 and values[-1] == 20096  # one tile, and everything at once
    assert 512 in values and 16384 in values
    assert all(v % 256 == 0 for v in default_values("minibatch_size", BASE, "sm_100a", 20000))
    for tunable in ("comm_sms", "macrobatch_size", "schedule_capacity_multiplier"):
        for text, config in sweep_configs(
            BASE, tunable, default_values(tunable, BASE, "sm_90a", 20000)
        ):
            assert text.startswith(f"{tunable}=") and isinstance(config, Config)
    assert config_with(BASE, "comm_sms", 16).bwd_num_comm_sms == 16
    for value in values:
        config = config_with(BASE, "minibatch_size", value)
        assert config.minibatch_size == value and config.macrobatch_size % value == 0


def gpu_backend() -> Backend:
    info = types.SimpleNamespace(name="NVIDIA H200", num_sms=132, arch="sm_90a", ordinal=0)
    device = torch.device("cpu")
    return Backend("kernel", "sm_90a on NVIDIA H200", "sm_90a", device, "", info)  # type: ignore[arg-type]


def prepared(monkeypatch, tmp_path, *argv: str) -> bench.Run:
    monkeypatch.setenv("MOK_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(backends, "choose_backend", gpu_backend)
    args = cli.build_parser().parse_args(["bench", *argv])
    return bench.prepare(args, lambda text: None)


def test_what_runs_on_a_gpu_by_default(monkeypatch, tmp_path):
    found = prepared(monkeypatch, tmp_path, "--ep", "4")
    names = [e.name for e in found.settings.entries]
    assert names == ["mok", "mok-ep4", "cublas", "torch", "sonic", "flashinfer"]
    assert len(found.settings.shapes) == 8 and found.settings.phases
    assert (found.settings.regime.warm_ms, found.settings.regime.run_ms) == (400, 300)
    quick = prepared(monkeypatch, tmp_path, "--quick").settings
    assert (len(quick.shapes), quick.rounds, quick.phases) == (2, 2, False)


def test_a_sweep_runs_ours_through_the_ring_with_each_value(monkeypatch, tmp_path):
    found = prepared(monkeypatch, tmp_path, "--sweep", "minibatch", "--suite", "quick")
    entries = found.settings.entries
    assert {e.name for e in entries} == {"mok-ep4"} and len(found.settings.shapes) == 1
    rows = 4096 * 8 + 32 * 128  # of one rank, with a tile of padding for each expert
    values = [e.config.minibatch_size for e in entries]
    assert values[0] == 128 and values[-1] == rows
    assert [e.setting for e in entries] == [f"minibatch_size={v}" for v in values]
    chosen = prepared(monkeypatch, tmp_path, "--sweep", "comm_sms", "--values", "4,8", "--ep", "2")
    assert [(e.name, e.config.fwd_num_comm_sms) for e in chosen.settings.entries] == [
        ("mok-ep2", 4), ("mok-ep2", 8),
    ]  # fmt: skip
    capacity = prepared(monkeypatch, tmp_path, "--sweep", "capacity", "--peers", "torch")
    names = [e.name for e in capacity.settings.entries]
    assert names == ["mok"] * 4 + ["torch", "cublas"]
    push = prepared(monkeypatch, tmp_path, "--sweep", "push")
    assert [(e.name, e.config.push) for e in push.settings.entries] == [
        ("mok-ep4", False), ("mok-ep4", True),
    ]  # fmt: skip
    pairs = prepared(monkeypatch, tmp_path, "--sweep", "pairs")
    assert [(e.name, e.config.pairs) for e in pairs.settings.entries] == [
        ("mok", False), ("mok", True),
    ]  # fmt: skip


def test_a_sweep_takes_every_shape_that_is_given(monkeypatch, tmp_path):
    """Each with tunables of its own; of a suite only the first."""
    sizes = ("--shape", "16384,2048,768,128,8", "--shape", "8192,7168,2048,32,8")
    found = prepared(monkeypatch, tmp_path, "--sweep", "comm_sms", "--values", "4,8", *sizes)
    shapes, entries = found.settings.shapes, found.settings.entries
    assert [e.shape for e in entries] == [s for s in shapes for _ in range(2)]
    assert entries[0].config.minibatch_size > entries[2].config.minibatch_size
    assert [e.config.bwd_num_comm_sms for e in entries] == [4, 8, 4, 8]


def test_a_program_of_one_shape_is_left_out_of_the_others():
    first, second = (parse_shape(f"{n},64,64,4,2") for n in (64, 128))
    entries = [Entry("mok", None, "a=1", first), Entry("mok", None, "a=2", second), Entry("torch")]
    settings = Settings([first, second], entries)
    found = []
    runner = Runner(settings, torch.device("cpu"), None, None, None)
    runner._prepare = lambda entry, work, oracle: found.append(entry.label)
    runner._rounds = runner._add_rows = runner._measure_phases = lambda *a: None
    runner.run()
    assert found == ["mok a=1", "torch", "mok a=2", "torch"] and not runner.not_run


def test_kernels_of_both_paths_are_compiled_beforehand(monkeypatch, tmp_path):
    from mok.tools.bench import warm

    asked = []
    idle = types.SimpleNamespace(processes=[1], wait=lambda: ["out of disk"])
    monkeypatch.setattr(warm, "Compilation", lambda specs, workers: asked.append(specs) or idle)
    run = prepared(monkeypatch, tmp_path, "--ep", "4", "--passes", "forward")
    said = []
    bench.compile_kernels(
        types.SimpleNamespace(workers=3), dataclasses.replace(run, say=said.append)
    )
    names = {spec.name for spec in asked[0]}
    assert {"forward_direct", "forward_ring"} <= names and len(asked[0]) == len(set(asked[0]))
    assert any("out of disk" in line for line in said)


def fake_document(**more) -> dict:
    shape = {"name": "Qwen3-30B", "T": 16384, "H": 2048, "I": 768, "E": 128, "K": 8}

    def row(program, pass_name, ms, tflops, **extra):
        return {
            "shape": shape, "pass": pass_name, "program": program, "ms": ms, "spread": 0.01,
            "tflops": tflops, "clock_mhz": 1530.0, "watts": 690.0, "peak_bytes": 3 * 2**30,
            "kept_bytes": 2**29, "rounds_ms": [ms, ms], "error": 2.9e-3, "ok": True, **extra,
        }  # fmt: skip

    return {
        "device": "NVIDIA H200",
        "gpu": {"num_sms": 132, "driver": "580.159.03"},
        "date": "2026-12-01T10:00:00+00:00",
        "versions": {"torch": "2.11.0"},
        "regime": {"warm_ms": 150, "run_ms": 300, "rounds": 2},
        "telemetry": "NVML",
        "rows": [
            row("mok", "forward", 2.2, 562, of_cublas=0.80, of_ceiling=0.92, target=0.83),
            row("sonic", "forward", 2.3, 537, of_cublas=0.77),
            row("mok", "both", 6.9, 540, of_cublas=0.84, target=0.82),
            row("sonic", "both", 7.0, 530, ok=False),
            row("cublas", "gemm", 1.57, 700),
        ],
        "phases": [
            {"shape": shape, "program": "mok", "pass": "forward", "note": "",
             "phases": {"schedule": 0.02, "kernel": 2.0, "token sum": 0.18}},
        ],
        "missing": [
            {"program": "flashinfer", "shape": shape, "reason": "not installed"},
            {"program": "flashinfer", "shape": {**shape, "T": 8192}, "reason": "not installed"},
        ],
        "not_run": [{"shape": {**shape, "T": 1, "asked_T": 2}, "reason": "the budget was used up"}],
        "bits": [{"shape": shape, "programs": 2, "different": ["mok-ep4: up"], "ok": False}],
        "precisions": [],
        "means": [{"program": "sonic", "pass": "forward", "mean": 1.05, "least": 1.0, "shapes": 2}],
        **more,
    }  # fmt: skip


def printed(found: dict) -> str:
    console = Console(record=True, width=170, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(tables.document_tables(found))
    return console.export_text()


def test_a_gpu_documents_table():
    out = printed(fake_document())
    for text in (
        "Qwen3-30B 16384,2048,768,128,8", "0.800 < 0.83", "0.840 ✓", "0.920", "1.05×", "1530",
        "690", "3.00", "0.50", "2.9e-03 WRONG", "2.000 (91%)", "driver 580.159.03", "1.050",
        "flashinfer: not installed (2 shapes)", "the budget was used up", "BITS DIFFER",
        "target missed: Qwen3-30B 16384,2048,768,128,8 forward: 0.800 of cuBLAS, 0.83 wanted",
        "T fitted to memory, 2 asked",
    ):  # fmt: skip
        assert text in out, text


def test_bits_that_differ_and_failed_rows_fail_the_run():
    good = fake_document(bits=[])
    assert bench.passed(good)
    assert not bench.passed(fake_document())
    assert not bench.passed({**good, "rows": []})
    slower = {"rows": [{"ok": False}]}
    assert not bench.passed({**good, "against": slower})
    assert not bench.passed({**good, "precisions": [{"ok": False}]})


def test_mxfp8_on_hopper_must_have_a_share_of_bf16s_speed():
    (ours, *_), shape = fake_document()["rows"], fake_document()["rows"][0]["shape"]
    for program in ("mok-mxfp8", "mok-mxfp8-ep4"):
        base = {**ours, "program": program.replace("-mxfp8", ""), "rounds_ms": [2.0, 2.2, 2.1]}
        for ms, ok in ((3.3, True), (3.7, False)):
            rows = [base, {**ours, "program": program, "rounds_ms": [ms, ms, ms]}]
            (entry,) = results.precisions(rows, hopper=True)
            assert entry["shape"] == shape and entry["ok"] is ok and entry["limit"] == 0.6
            assert entry["ratio"] == pytest.approx(2.1 / ms)
            text = printed(fake_document(precisions=[entry]))
            assert ("SLOWER" in text) is not ok and "not speed" in text
            (free,) = results.precisions(rows, hopper=False)
            assert free["ok"] and free["limit"] is None
    assert results.precisions([base], hopper=True) == []


def test_charts(tmp_path):
    found = fake_document()
    assert charts.bar_chart(found, tmp_path / "a" / "bars.png").read_bytes()[:4] == PNG
    rows = [
        {**found["rows"][0], "program": "mok-ep4", "config": f"minibatch_size={n}", "ms": n / 99}
        for n in (512, 1024, 2048)
    ]
    swept = {**found, "rows": rows, "sweep": {"tunable": "minibatch_size"}}
    assert charts.sweep_chart(swept, tmp_path / "sweep.png").read_bytes()[:4] == PNG


def test_a_chart_without_matplotlib(capsys, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, found = document(capsys, *FAST, "--peers", "none", "--out", str(tmp_path))
    assert code == 0 and found["chart"].startswith("none: charts need matplotlib")
    assert cli.main(["bench", *FAST, "--peers", "none", "--chart", str(tmp_path / "x.png")]) == 2
    assert "pip install" in capsys.readouterr().err


def test_the_record_of_measurements_says_how():
    text = (Path(bench.__file__).parents[2] / "docs" / "measurements" / "README.md").read_text()
    for word in ("date", "GPU", "driver", "versions", "command", "spread", "mok bench"):
        assert word in text
