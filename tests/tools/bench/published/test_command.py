"""The command of the suites: arguments, tables, sweeps, pictures."""

from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console

from mok import cli
from mok.config import Config
from mok.errors import DeviceError, MokError
from mok.tools.bench.published import command, figures, programs, sweeps
from mok.tools.bench.published.accuracy import expected_of_first
from mok.tools.bench.published.share import Layer, make_share

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_without_a_gpu_it_says_so(capsys):
    assert cli.main(["bench", "--suite", "published"]) == 2
    assert "times kernels on GPUs" in capsys.readouterr().err


def test_models_and_peers_are_checked(capsys):
    assert cli.main(["bench", "--suite", "published", "--models", "olmoe"]) == 2
    assert "glm-5.2" in capsys.readouterr().err
    with pytest.raises(MokError, match="deepep-te"):
        command.chosen(["sonic"])
    assert command.chosen(None) == (("mok", *programs.PEERS, "upstream"), None)
    assert command.chosen(["none"]) == (("mok",), None)
    given = command.chosen(["nccl-torch,upstream=/x/python"])
    assert given == (("mok", "nccl-torch", "upstream"), "/x/python")


@pytest.mark.parametrize(
    "given,said",
    [
        (("--tokens", "0"), "--tokens must be at least 1"),
        (("--warmup", "-1"), "--warmup must be at least 0"),
        (("--iterations", "0"), "--iterations must be at least 1"),
        (("--models", ","), "times kernels on GPUs"),  # none named: all
        (("--out", "/proc/mok"), "must be writable"),
    ],
)
@pytest.mark.parametrize("suite", command.SUITES)
def test_impossible_arguments(suite, given, said, capsys):
    assert cli.main(["bench", "--suite", suite, *given]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_each_rank_has_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for name, value in (("RANK", "12"), ("WORLD_SIZE", "16"), ("LOCAL_RANK", "4")):
        monkeypatch.setenv(name, value)
    with pytest.raises(DeviceError, match="--nproc-per-node 4"), command.placed():
        pass


def rows():
    times = {("mok", "forward"): 2.0, ("mok", "backward"): 4.0, ("nccl-torch", "forward"): 5.0}
    return [
        {
            "model": "kimi-k2.5", "precision": "bf16", "pass": p, "program": n, "ms": ms,
            "tflops": 100.0, "error": 0.0, "ok": True, "note": "", "config": None,
            "accuracy": {"output": {"error": 6.6e-2, "cosine": 0.998}},
        }
        for (n, p), ms in times.items()
    ]  # fmt: skip


def document():
    found = {
        "suite": "published", "device": "NVIDIA B200", "ranks": 8, "rank": 0, "rows": rows(),
        "published_with": figures.PUBLISHED_WITH,
        "missing": [
            {"model": m, "precision": "bf16", "program": "deepep-te", "reason": "not installed"}
            for m in figures.MODELS
        ],
    }  # fmt: skip
    found["speed_ups"] = figures.speed_ups(found["rows"])
    return found | {"best": figures.best(found["speed_ups"])}


def text_of(found):
    out = io.StringIO()
    command.show(found, Console(file=out, width=200))
    return out.getvalue()


def test_the_tables_stand_beside_the_published(tmp_path):
    found = document()
    text = text_of(found)
    assert "2.50×" in text and "1.92×" in text and "NCCL + torch" in text
    assert "none ran" in text  # backward has no peer
    assert "6.6e-02 0.99800" in text  # beside the times
    assert text.count("not run: DeepEP + Transformer Engine") == 1  # said once, not per model
    assert command.passed(found)
    lost = {"model": "glm-5.2", "precision": "bf16", "program": "mok", "reason": "failed: …"}
    assert not command.passed(found | {"missing": [lost]})
    found["rows"][2].update(ok=False, error=0.5)
    assert not command.passed(found) and "WRONG" in text_of(found)
    assert text_of(found | {"rank": 1}) == ""
    command.write(found, tmp_path / "a" / "published.json")
    assert json.loads((tmp_path / "a" / "published.json").read_text())["ranks"] == 8


# ------------------------------------------------------------------- sweeps


def test_sweeps_keep_the_rings_rows():
    base = Config(16, 16, 2560, 20480)
    found = sweeps.configs(base, "sm_100a", 148)
    minibatches = [v for name, v, _ in found if name == "minibatch_size"]
    assert minibatches == list(sweeps.MINIBATCHES)
    for name, value, config in found:
        assert config.macrobatch_size % config.minibatch_size == 0
        assert abs(config.macrobatch_size - 20480) <= config.minibatch_size
        if name == "comm_sms":
            assert config.fwd_num_comm_sms == config.bwd_num_comm_sms == value
    assert max(v for n, v, _ in sweeps.configs(base, "sm_90a", 40) if n == "comm_sms") == 16


class Scripted:
    """Ours, whose times are the minibatch's."""

    def __init__(self, shares, precision, group, config):
        if config.minibatch_size == 512:
            raise MokError("too small here")
        self.config = config

    def forward(self):
        pass

    def backward(self):
        pass

    def close(self):
        pass


def test_rows_have_the_prediction_and_the_published_time(monkeypatch, tmp_path):
    from mok.tools.simulator import load_machine
    from mok.tools.simulator.compare import records

    layer = Layer("kimi-k2.5", 2048, 7168, 2048, 384, 8, 2048, 64, 384)
    (share,) = [make_share(Layer("kimi-k2.5", 2, 64, 64, 4, 2, 0, 1, 4), 0, None, CPU)]
    share = type("S", (), {"layer": layer, "device": CPU})()
    monkeypatch.setattr(programs, "Ours", Scripted)
    monkeypatch.setattr(sweeps, "_arch", lambda share: ("sm_100a", 148))
    monkeypatch.setattr(sweeps, "COMM_SMS", (16,))
    monkeypatch.setattr(sweeps, "predicted", lambda *a: 2.5)
    monkeypatch.setattr(Config, "suggest", lambda *a: Config(16, 16, 2560, 20480))
    said = []
    rows = sweeps.run(
        [share], None, lambda v: [v], load_machine("gb300"), "mxfp8", 0, 2, said.append
    )
    assert any("too small here" in text for text in said)
    by = {(r["tunable"], r["value"], r["pass"]): r for r in rows}
    assert by["minibatch_size", 2560, "forward"]["published_ms"] == 3.425
    assert by["minibatch_size", 2560, "backward"]["published_ms"] is None
    assert by["comm_sms", 16, "forward"]["published_ms"] is None
    assert {r["model_ms"] for r in rows} == {2.5}
    assumed = {r.scenario.precision for r in records() if r.name.startswith("GB300 sweep")}
    assert assumed == {"mxfp8"}  # as the published times are put beside
    assert sweeps._published(layer, "minibatch_size", 2560, "forward", "bf16") is None
    paths = sweeps.draw(rows, tmp_path, "GB300")
    assert [p.name for p in paths] == ["sweep-minibatch-size.png", "sweep-comm-sms.png"]
    assert all(p.stat().st_size > 1000 for p in paths)
    found = {
        "suite": "sweep", "device": "d", "ranks": 64, "rank": 0, "ep": 64, "virtual": False,
        "rows": rows,
    }  # fmt: skip
    assert "3.425" in text_of(found) and command.passed(found)


def test_a_sweeps_rows_have_their_accuracy(monkeypatch):
    share = make_share(Layer("kimi-k2.5", 6, 64, 64, 4, 2, 0, 1, 4), 0, None, CPU)
    wanted = expected_of_first([share])

    class Near(Scripted):
        def forward(self):
            return wanted.output * 1.06

        def backward(self):
            return [wanted.x * 0.95], None  # of virtual ranks a list

    monkeypatch.setattr(programs, "Ours", Near)
    monkeypatch.setattr(sweeps, "_arch", lambda share: ("sm_90a", 132))
    monkeypatch.setattr(Config, "suggest", lambda *a: Config(16, 16, 2560, 20480))
    rows = sweeps.run([share], None, lambda v: [v], None, "mxfp8", 0, 1, lambda text: None, wanted)
    assert rows
    for row in rows:
        assert row["accuracy"]["output"]["error"] == pytest.approx(0.06, rel=1e-3)
        assert row["accuracy"]["x"]["error"] == pytest.approx(0.05, rel=1e-3)
    found = {
        "suite": "sweep", "device": "d", "ranks": 1, "rank": 0, "ep": 1, "virtual": True, "rows": rows,
    }  # fmt: skip
    assert "6.0e-02 1.00000" in text_of(found) and "5.0e-02 1.00000" in text_of(found)


def test_predicted_is_the_simulators(monkeypatch):
    from mok.tools.simulator import load_machine

    layer = Layer("qwen3.5-397b", 512, 512, 256, 16, 2, 0, 2, 16)
    config = Config(8, 8, 512, 512)
    alone = sweeps.predicted(load_machine("b200"), layer, config, "forward", "bf16", False)
    virtual = sweeps.predicted(load_machine("b200"), layer, config, "forward", "bf16", True)
    assert 0 < alone < virtual
    assert sweeps.predicted(None, layer, config, "forward", "bf16", False) is None
