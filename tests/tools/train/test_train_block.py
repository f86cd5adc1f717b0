"""The step benchmark with torch's layer on a CPU."""

import json

import pytest
import torch

from mok.config import Shape
from mok.errors import DeviceError
from mok.reference import GRADIENT_LIMIT, backward_oracle, random_case, random_gradient, relative_l2
from mok.tools import train_block

TINY = {
    "hidden": 64, "intermediate": 64, "experts": 4, "topk": 2, "heads": 4, "kv-heads": 2,
    "head-size": 16, "blocks": 2, "batch": 1, "context": 32,
}  # fmt: skip


def test_the_document(tmp_path, capsys):
    sizes = [f"--{name}={value}" for name, value in TINY.items()]
    argv = ["--layers", "torch", "--rounds", "3", "--warm", "1", "--out", str(tmp_path), *sizes]
    assert train_block.main(argv) == 0
    found = json.loads((tmp_path / "step.json").read_text())
    (row,) = found["rows"]
    assert row["program"] == "torch" and row["step_ratio"] == row["layer_ratio"] == 1
    assert row["step_ms"] > 0 and row["moe_ms"] > 0
    assert row["tokens_per_s"] == pytest.approx(32e3 / row["step_ms"])
    assert "tokens/s" in capsys.readouterr().out


def test_ratios_are_those_of_times(monkeypatch):
    class Fake:
        def __init__(self, name, step, layer):
            self.name, self.ms = name, {"step": step, "layers": layer}

        def step(self):
            return "step"

        def layers(self):
            return "layers"

    monkeypatch.setattr(train_block, "milliseconds", lambda work, device: work.__self__.ms[work()])
    programs = [Fake("mok", 10.0, 4.0), Fake("torch", 14.0, 8.0)]
    size = train_block.Size(batch=1, context=1000)
    ours, theirs = train_block.measure(programs, size, torch.device("cpu"), 3, 1)
    assert ours["layer_ratio"] == 2 and ours["step_ratio"] == 1.4
    assert ours["moe_share"] == 0.4 and ours["tokens_per_s"] == 1e5
    assert theirs["step_ratio"] == 1


def test_torchs_layer_is_the_layer():
    case = random_case(Shape(40, 64, 64, 4, 2))
    layer = train_block.GroupedMoELayer(64, 64, 4, 2)
    with torch.no_grad():
        for name in ("gate", "up", "down"):
            getattr(layer, f"routed_{name}").copy_(getattr(case.routed, name))
    x = case.x.clone().requires_grad_()
    dy = random_gradient(case)
    layer(x, case.router_weights, case.top_experts).backward(dy)
    want = backward_oracle(case, dy)
    # It rounds to BF16 after every operation and adds up in BF16.
    assert relative_l2(x.grad, want.x) < 4 * GRADIENT_LIMIT
    assert relative_l2(layer.routed_up.grad, want.routed.up) < 4 * GRADIENT_LIMIT


def test_mok_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="GPU"):
        train_block.main([])
