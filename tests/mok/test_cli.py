from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from mok import cli
from mok.commands import check, check_cases, doctor
from mok.commands import compile as compile_command
from mok.commands.shapes import expert_flops, fit_to_bytes, forward_bytes, shrink
from mok.config import Shape
from mok.errors import DeviceError, MokError, ResourceError
from mok.models import MACHINES, MODELS
from mok.reference import random_case
from mok.runtime import device as runtime_device
from mok.runtime.compile import clear_memory_cache
from mok.runtime.device import Backend as RuntimeBackend

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    none = RuntimeBackend(None, None, "there is no NVIDIA driver")
    monkeypatch.setattr(runtime_device, "best_backend", lambda: none)


def document(capsys, *argv: str) -> tuple[int, dict]:
    code = cli.main([*argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def text(capsys, *argv: str) -> str:
    assert cli.main(list(argv)) == 0
    return capsys.readouterr().out


# ---------------------------------------------------------------------- wave


def test_wave_prints_the_rule_and_explains_simpler_figures(capsys):
    out = text(capsys, "wave", "--model", "kimi-k2.5", "--machine", "b200")
    assert "= 2368, rounded up to tiles of 256 rows: 2560" in out
    assert "132 × 9 × 2 = 2376 is near 148 × 8 × 2 = 2368 by accident" in out
    assert "148 SMs × 8 × 2 = 2368  (the rule itself)" in out


def test_wave_document(capsys):
    code, found = document(capsys, "wave", "--model", "kimi-k2.5", "--machine", "h200")
    assert code == 0
    assert (found["exact"], found["rounded"], found["num_sms"]) == (2112, 2176, 132)
    for row in found["rows"]:
        assert set(row) >= {"config", "ms", "bound"}
    assert found["rows"][0]["waves"] == {"gate_up": 2.0, "down": 3.5}
    assert {s["minibatch"] for s in found["simpler"]} >= {2376, 2112}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("model", MODELS)
def test_wave_runs_for_everything(capsys, model, machine):
    code, found = document(capsys, "wave", "--model", model, "--machine", machine)
    assert code == 0
    for row in found["rows"]:
        if row["config"]["minibatch_size"] >= found["exact"]:
            assert min(row["waves"].values()) >= 2


# ---------------------------------------------------------------------- demo


def test_demo_document(capsys):
    code, found = document(capsys, "demo", "--reference")
    assert code == 0 and found["ok"]
    assert set(found) >= {"backend", "device", "shape", "error", "ms", "tflops", "ok"}
    assert found["backend"] == "scheduled reference (CPU)"
    assert found["note"] == "there is no NVIDIA driver"
    assert found["error"] < 3.5e-3


def test_demo_prints_the_backend(capsys):
    out = text(capsys, "demo", "--seed", "3", "--reference")
    assert "scheduled reference (CPU)" in out and "no NVIDIA driver" in out
    assert "scaled down" in out


def test_demo_without_the_emulator_says_so(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    out = " ".join(text(capsys, "demo").split())
    assert "scheduled reference (CPU)" in out and "No emulator either" in out


def test_demo_fails_when_the_result_is_wrong(capsys, monkeypatch):
    from mok import backends

    right = backends.forward_reference

    def wrong(*args, **kwargs):
        return right(*args, **kwargs) * 1.01

    monkeypatch.setattr(backends, "forward_reference", wrong)
    code, found = document(capsys, "demo", "--reference")
    assert code == 1 and not found["ok"]


# ---------------------------------------------------------------------- check


def test_check_quick_document(capsys):
    code, found = document(capsys, "check", "forward", "--quick")
    assert code == 0 and found["backend"] == "scheduled reference (CPU)"
    assert {c["metric"] for c in found["cases"]} == {"relative_l2", "mismatches"}
    for case in found["cases"]:
        assert set(case) == {"name", "metric", "value", "limit", "ok"}
        assert case["ok"]


def test_check_one_model(capsys):
    code, found = document(capsys, "check", "all", "--model", "olmoe")
    assert code == 0
    assert all("olmoe" in case["name"] for case in found["cases"])


def test_check_covers_every_model_and_the_sizes_that_break_things():
    from mok.backends import choose_backend

    cases = list(check_cases.forward_cases(choose_backend(), None, quick=False))
    names = "\n".join(c.name for c in cases)
    for model in MODELS:
        assert model in names
    for tokens in (0, 1, 7, 255):
        assert re.search(rf"T {tokens} ", names)
    assert {c.ep_size for c in cases} >= {1, 2, 3, 4, 8, 64}
    assert "ring wraps" in names and "no token" in names and "K 32" in names
    assert len({c.name for c in cases}) == len(cases)


@pytest.mark.parametrize("metric", ["relative_l2", "mismatches"])
@pytest.mark.parametrize("damage", [lambda out: out * 1.1, lambda out: out * float("nan")])
def test_check_fails_when_a_result_is_wrong(capsys, monkeypatch, damage, metric):
    from mok import backends

    right = backends.run_forward
    monkeypatch.setattr(backends, "run_forward", lambda *a, **k: damage(right(*a, **k)))
    code, found = document(capsys, "check", "forward", "--model", "olmoe")
    assert code == 1
    assert not any(c["ok"] for c in found["cases"] if c["metric"] == metric)


@pytest.mark.parametrize("what", ["backward", "bits"])
def test_check_of_training(capsys, what):
    code, found = document(capsys, "check", what, "--quick")
    assert code == 0 and found["what"] == what
    assert all(case["ok"] for case in found["cases"])
    assert any(case["metric"] == "mismatches" for case in found["cases"])


def test_check_of_mxfp8_covers_both_directions(capsys, monkeypatch):
    """Error and cosine of the output and of every gradient, against FP32; a wrong one fails."""
    code, found = document(capsys, "check", "mxfp8", "--quick")
    assert code == 0
    kinds = {(c["name"].rpartition(", ")[2], c["metric"]) for c in found["cases"]}
    gradients = ("d x", "d router_weights", "d routed gate", "d routed up", "d routed down")
    for name in ("random", *gradients):
        assert {(name, "relative_l2"), (name, "1 - cosine")} <= kinds, name
    limits = {c["name"].rpartition(", ")[2]: c["limit"] for c in found["cases"]
              if c["metric"] == "relative_l2"}  # fmt: skip
    assert limits["d x"] == limits["random"] == 7e-2 and limits["d routed up"] == 8e-2
    from mok import training_run

    right = training_run.backward_reference

    def wrong(*args, **kwargs):
        found = right(*args, **kwargs)
        found.routed.up.mul_(-1)
        return found

    monkeypatch.setattr(training_run, "backward_reference", wrong)
    code, found = document(capsys, "check", "mxfp8", "--quick")
    failed = {(c["name"].rpartition(", ")[2], c["metric"]) for c in found["cases"] if not c["ok"]}
    assert code == 1 and {("d routed up", "relative_l2"), ("d routed up", "1 - cosine")} <= failed


def test_check_of_training_fails_when_a_gradient_is_wrong(capsys, monkeypatch):
    from mok import training_run

    right = training_run.backward_reference

    def wrong(*args, **kwargs):
        found = right(*args, **kwargs)
        found.router_weights[-1, -1] += 1
        return found

    monkeypatch.setattr(training_run, "backward_reference", wrong)
    code, found = document(capsys, "check", "backward", "--model", "olmoe")
    assert code == 1 and not any(case["ok"] for case in found["cases"])


def test_check_of_nothing_is_no_success():
    assert not check.passed({"cases": []})


def test_an_explicit_kernel_without_a_gpu_is_an_error(capsys):
    code, found = document(capsys, "check", "forward", "--arch", "sm_90a")
    assert code == 2
    assert found["error"]["type"] == DeviceError.__name__
    assert found["error"]["remedy"]
    assert cli.main(["check", "forward", "--arch", "sm_90a"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "DeviceError" in captured.err


# ---------------------------------------------------------------------- compile


def test_compile_document(capsys):
    pytest.importorskip("cutlass", reason="the DSL exists for Linux only")
    code, found = document(capsys, "compile", "--arch", "sm_90a", "--model", "qwen3-30b-a3b")
    kernels = {k["name"]: k for k in found["kernels"]}
    assert code == 0
    expected = {"stage_ids", "schedule", "plan"}
    for path in ("direct", "ring"):
        expected |= {f"{name}_{path}" for name in ("forward", "recompute", "token_sum")}
        expected |= {f"forward_{path}_save", f"backward_{path}_bf16"}
        expected |= {f"router_grad_{path}", f"dx_sum_{path}"}
    assert set(kernels) == expected
    for k in found["kernels"]:
        assert k["spill_bytes"] == 0, k["name"]
        assert k["registers"] > 0 and k["instructions"] and "C7511" not in k["warnings"]
    for name in ("forward_direct", "backward_direct_bf16", "backward_ring_bf16"):
        assert kernels[name]["instructions"]["HGMMA"] > 0
        assert kernels[name]["instructions"]["USETMAXREG"] > 0
    clear_memory_cache()
    assert cli.main(["compile", "--arch", "sm_90a"]) == 0
    out = capsys.readouterr().out
    assert "forward_direct" in out and "cached" in out


def test_compile_refuses_an_architecture_without_kernels(capsys):
    code, found = document(capsys, "compile", "--arch", "sm_80")
    assert code == 2 and "sm_80" in found["error"]["value"]


@pytest.mark.parametrize(
    "damage", [{"spill_bytes": 4}, {"warnings": ["C7511"]}, {"warnings": ["C7507"]}]
)
def test_compile_fails_on_spills_and_ignored_requests(damage):
    good = {"spill_bytes": 0, "warnings": ["C7517"]}
    assert compile_command.passed({"kernels": [good]})
    assert not compile_command.passed({"kernels": [good, good | damage]})


# ---------------------------------------------------------------------- doctor


def test_doctor_document(capsys):
    code, found = document(capsys, "doctor")
    assert {c["name"] for c in found["checks"]} >= {"Python", "torch", "CuTe DSL", "driver"}
    for check_ in found["checks"]:
        assert set(check_) == {"name", "ok", "found", "remedy"}
        assert check_["found"]
        assert bool(check_["remedy"]) != check_["ok"]
    assert code == (0 if all(c["ok"] for c in found["checks"]) else 1)
    assert found["backend"] == "scheduled reference (CPU)"


def test_doctor_knows_the_requirements():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = "\n".join(project["dependencies"])
    assert f"nvidia-cutlass-dsl[cu13]=={doctor.DSL};" in needed
    assert f"cuda-python>={doctor.CUDA_PYTHON},<{doctor.CUDA_PYTHON + 1};" in needed
    assert "torch>={}.{}".format(*doctor.TORCH) in needed
    assert project["requires-python"] == ">={}.{}".format(*doctor.PYTHON)


@pytest.mark.parametrize(
    ("versions", "check_", "ok"),
    [
        ({}, doctor.torch, False),
        ({"torch": "2.9.1"}, doctor.torch, False),
        ({"torch": "2.10.0+cpu"}, doctor.torch, True),
        ({"torch": "3.0.0"}, doctor.torch, True),
        ({"nvidia-cutlass-dsl": "4.8.0"}, doctor.dsl, False),
        ({"nvidia-cutlass-dsl": "4.8.1"}, doctor.dsl, True),
        ({"cuda-bindings": "12.9.1"}, doctor.cuda_python, False),
        ({"cuda-bindings": "13.4.4"}, doctor.cuda_python, True),
        ({}, doctor.cuda_python, False),
    ],
)
def test_doctor_versions(monkeypatch, versions, check_, ok):
    monkeypatch.setattr(doctor, "_version", versions.get)
    assert check_()["ok"] is ok


def test_doctor_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("MOK_CACHE_DIR", str(tmp_path / "new"))
    assert doctor.cache_folder()["ok"]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOK_CACHE_DIR", str(tmp_path / "file" / "below"))
    found = doctor.cache_folder()
    assert not found["ok"] and "MOK_CACHE_DIR" in found["remedy"]


class Probe:
    """Memory that grants some kinds of handle."""

    granularity = 4096

    def __init__(self, *granted: str) -> None:
        self.granted = granted
        self.live = 0

    def create(self, size, kind):
        if kind not in self.granted:
            raise ResourceError("handles must work", "refused")
        self.live += 1
        return object()

    def export(self, handle, kind):
        return b"fabric"

    def release(self, handle):
        self.live -= 1


@pytest.mark.parametrize(
    ("granted", "ok"),
    [((), False), (("posix_fd",), True), (("fabric",), True), (("posix_fd", "fabric"), True)],
)
def test_doctor_probes_handles_by_allocating(granted, ok):
    memory = Probe(*granted)
    found = doctor.probe_handles(memory)
    assert found["ok"] is ok and memory.live == 0
    assert found["found"].count("yes") == len(granted)
    assert found["found"].count("no (refused)") == 2 - len(granted)


# ---------------------------------------------------------------------- shapes, errors


def test_fit_to_bytes():
    kimi = Shape.of_model(MODELS["kimi-k2.5"], 4096)
    assert fit_to_bytes(kimi, 10**12) == kimi
    small = fit_to_bytes(kimi, 20 * 2**30)
    assert forward_bytes(small) <= 20 * 2**30 and small.hidden_size == kimi.hidden_size
    assert small.num_experts < 384
    assert fit_to_bytes(kimi, 1).num_experts == 1  # the least there is


def test_shrink_keeps_the_limits():
    for model in MODELS.values():
        small = shrink(Shape.of_model(model, 32), 32)
        assert small.hidden_size >= 64 and small.topk == model.topk


def test_expert_flops():
    case = random_case(Shape(8, 64, 128, 4, 2, 1, 192))
    case.top_experts[0, 0] = -1
    assert expert_flops(case) == 6 * 15 * 64 * 128 + 6 * 8 * 64 * 192


def test_not_a_number_becomes_null_in_json(capsys, monkeypatch):
    from mok.commands import wave

    monkeypatch.setattr(
        wave, "run", lambda *_: {"value": float("nan"), "rows": [float("inf"), 1.5]}
    )
    assert cli.main(["wave", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"value": None, "rows": [None, 1.5]}


def test_nothing_else_reaches_standard_output(capsys, monkeypatch):
    from mok.commands import wave

    def noisy(*_):
        print("noise")
        return {}

    monkeypatch.setattr(wave, "run", noisy)
    assert cli.main(["wave", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "{}\n" and "noise" in captured.err


def test_errors_are_printed_whole(capsys, monkeypatch):
    from mok.commands import wave

    def fails(*_):
        raise MokError("a rule [must] hold", "7", "Do this")

    monkeypatch.setattr(wave, "run", fails)
    assert cli.main(["wave"]) == 2
    assert "MokError: a rule [must] hold; found 7. Do this" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["nope"], ["check"], ["check", "sideways"]])
def test_usage_errors(argv, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(argv)
    assert exit_.value.code == 2


@pytest.mark.parametrize(
    "argv", [["wave", "--machine", "nope"], ["nope"], ["simulate", "--ep", "x"]]
)
def test_usage_errors_are_documents(argv, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main([*argv, "--json"])
    captured = capsys.readouterr()
    assert exit_.value.code == 2 and "usage: mok" in captured.err
    found = json.loads(captured.out)["error"]
    assert found["type"] == "UsageError" and "invalid" in found["value"]
    assert found["remedy"].endswith("--help")


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("argv", [["nope"], ["wave", "--machine", "nope"]])
@pytest.mark.parametrize("as_json", [True, False])
def test_one_process_of_several_reports_usage_errors(monkeypatch, capsys, rank, argv, as_json):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as exit_:
        cli.main([*argv, "--json"] if as_json else argv)
    captured = capsys.readouterr()
    assert exit_.value.code == 2
    if rank == "1":
        assert not captured.out and not captured.err
        return
    assert "usage: mok" in captured.err
    assert not as_json or json.loads(captured.out)["error"]["type"] == "UsageError"


def test_the_leader_s_document_is_the_only_one(monkeypatch, capsys):
    def fail(args, progress):
        raise MokError("a rule must hold", 7)

    monkeypatch.setattr(cli.wave, "run", fail)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert cli.main(["wave", "--json"]) == 2
        captured = capsys.readouterr()
        document, other = (captured.out, captured.err)[:: 1 if rank == "0" else -1]
        assert json.loads(document)["error"]["rule"] == "a rule must hold"
        assert rank == "0" or not other
