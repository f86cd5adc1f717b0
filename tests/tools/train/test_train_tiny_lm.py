"""The training script on a CPU, with torch's layer and a model of one block."""

import dataclasses
import json

import pytest
import torch

from mok.config import Shape
from mok.reference import (
    BF16_LIMIT,
    GRADIENT_LIMIT,
    backward_oracle,
    forward_oracle,
    random_case,
    random_gradient,
    relative_l2,
)
from mok.tools import train_tiny_lm as lm
from mok.tools.train.model import Size, corpus
from mok.tools.train.torch_layer import TorchMoELayer

TINY = Size(hidden=64, intermediate=64, experts=4, topk=2, blocks=1, heads=2, context=32, batch=4)
CPU = torch.device("cpu")


def train(run, folder):
    told = []
    losses = lm.train(run, CPU, folder, lambda step, loss: told.append((step, loss)))
    return losses, told


def test_the_text_is_real_and_the_same_everywhere():
    text = corpus()
    assert len(text) > 200_000
    assert b"The :keyword:" in bytes(text.tolist()) or b'The "' in bytes(text.tolist())


# The limit lies between two BF16 values, so that rounding gate and up does not move them across it.
@pytest.mark.parametrize("limit", [None, 1 + 2.0**-8])
def test_the_torch_layer_is_the_oracle(limit):
    shape = Shape(40, 64, 64, 4, 2, 1, 64)
    case = random_case(shape, kind="dropped", swiglu_limit=limit, gated=False)
    layer = TorchMoELayer(64, 64, 4, 2, shared_intermediate_size=64, swiglu_limit=limit)
    with torch.no_grad():
        for name in ("gate", "up", "down"):
            getattr(layer, f"routed_{name}").copy_(getattr(case.routed, name))
            getattr(layer, f"shared_{name}").copy_(getattr(case.shared, name)[0])
    x = case.x.clone().requires_grad_()
    weights = case.router_weights.clone().requires_grad_()
    out = layer(x, weights, case.top_experts)
    # Torch rounds gate, up and every gradient between; hence twice the kernel's limits.
    assert relative_l2(out.detach(), forward_oracle(case)) < 2 * BF16_LIMIT
    dy = random_gradient(case)
    out.backward(dy)
    want = backward_oracle(case, dy)
    for found, expected in (
        (x.grad, want.x),
        (weights.grad, want.router_weights),
        (layer.routed_gate.grad, want.routed.gate),
        (layer.routed_down.grad, want.routed.down),
        (layer.shared_up.grad, want.shared.up[0]),
    ):
        assert relative_l2(found, expected) < 2 * GRADIENT_LIMIT


def test_a_run_learns_repeats_and_resumes(tmp_path):
    run = lm.Run("torch", 1, 12, TINY, rate=3e-3)
    losses, told = train(run, tmp_path / "a")
    assert [step for step, _ in told] == list(range(1, 13))
    assert losses[0] == pytest.approx(5.6, abs=0.4) and losses[-1] < losses[0] - 0.3
    assert train(run, tmp_path / "b")[0] == losses
    train(dataclasses.replace(run, steps=5), tmp_path / "c")
    resumed, told = train(run, tmp_path / "c")
    assert resumed == losses and told[0][0] == 6
    other, told = train(dataclasses.replace(run, rate=1e-3), tmp_path / "c")
    assert len(told) == 12 and other != losses  # a checkpoint of another run is not taken


def test_frozen_experts_stay(tmp_path):
    run = lm.Run("frozen", 1, 3, TINY)
    train(run, tmp_path)
    torch.manual_seed(1)
    before = lm.ByteLM(TINY, "frozen", CPU).state_dict()
    after = torch.load(tmp_path / "frozen-1.pt", weights_only=True)["model"]
    assert torch.equal(before["blocks.0.moe.routed_up"], after["blocks.0.moe.routed_up"])
    assert not torch.equal(before["blocks.0.qkv.weight"], after["blocks.0.qkv.weight"])


def ran(layer, seed, losses, repeat=0):
    return lm.Run(layer, seed, len(losses), repeat=repeat), losses


def test_comparisons_can_fail():
    runs = [ran("torch", 0, [2.0] * 60), ran("torch", 1, [2.1] * 60), ran("mok", 0, [2.04] * 60)]
    (near,) = lm.compare(runs)
    assert near["ok"] and near["limit"] == pytest.approx(0.1)
    assert not lm.compare([*runs[:2], ran("mok", 0, [2.3] * 60)])[0]["ok"]
    assert lm.compare([*runs[:2], ran("frozen", 0, [2.2] * 60)])[0]["ok"]
    assert not lm.compare([*runs[:2], ran("frozen", 0, [2.1] * 60)])[0]["ok"]
    again = lm.compare([*runs, ran("mok", 0, [2.04] * 59 + [2.0401], repeat=1)])
    assert again[-1]["value"] == 1 and not again[-1]["ok"]


def test_the_document(tmp_path, capsys):
    sizes = [f"--{k}={v}" for k, v in dataclasses.asdict(TINY).items()]
    argv = ["--layers", "torch", "--seeds", "0", "--steps", "2", "--repeat", "--out", str(tmp_path)]
    assert lm.main([*argv, *sizes]) == 0
    found = json.loads((tmp_path / "curves.json").read_text())
    assert [len(run["losses"]) for run in found["runs"]] == [2, 2]
    assert found["checks"][0]["ok"] and found["device"] == "CPU"
    assert (tmp_path / "curves.png").stat().st_size > 5000


def test_mok_needs_a_gpu(tmp_path, monkeypatch):
    from mok.errors import DeviceError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="GPU"):
        lm.main(["--out", str(tmp_path)])
