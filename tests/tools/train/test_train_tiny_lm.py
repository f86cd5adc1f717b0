"""The training script on a CPU, with torch's layer and a model of one block."""

import dataclasses
import json

import pytest
import torch

from mok.config import Shape
from mok.errors import DeviceError, MokError
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
from mok.tools.train.model import OURS, Size, corpus
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
    assert lm.compare([*runs[:2], ran("frozen", 0, [2.07] * 60)])[0]["ok"]  # against its own seed
    assert not lm.compare([*runs[:2], ran("frozen", 0, [2.05] * 60)])[0]["ok"]
    for loss, ok in ((2.07, True), (2.01, True), (2.09, False), (1.99, False)):
        *_, check = lm.compare([*runs, ran("mok", 1, [9.0] * 60), ran("mxfp8", 0, [loss] * 60)])
        assert check["name"].startswith("MXFP8") and check["ok"] is ok and check["limit"] == 0.02
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


def test_runs_side_by_side_are_the_same(tmp_path, capsys):
    """Two processes train, the call that started them reads their losses."""
    sizes = [f"--{k}={v}" for k, v in dataclasses.asdict(TINY).items()]
    argv = ["--layers", "torch", "--seeds", "0", "1", "--steps", "2", *sizes]
    beside, alone = tmp_path / "beside", tmp_path / "alone"
    lm.main([*argv, "--jobs", "2", "--out", str(beside)])
    assert capsys.readouterr().out.count(": done") == 2
    lm.main([*argv, "--out", str(alone)])
    found, want = (json.loads((f / "curves.json").read_text())["runs"] for f in (beside, alone))
    assert found == want and [r["seed"] for r in found] == [0, 1]
    with pytest.raises(MokError, match="name of a run"):
        lm.main([*argv, "--only", "torch-7", "--out", str(alone)])


def test_ours_are_run_twice():
    args = lm.parse(["--repeat", "--seeds", "3", "4", "--out", "x"])
    names = [run.name for run in lm.runs_of(args)]
    ours = ["mok-3", "mok-4", "mxfp8-3", "mxfp8-4"]
    assert names == ["torch-3", "torch-4", "frozen-3", *ours, "mok-3-again1", "mxfp8-3-again1"]
    size = lm.runs_of(args)[0].size  # the same for all: what MXFP8 can have
    assert size.hidden % 128 == 0 and size.intermediate % 128 == 0


@pytest.mark.emulator
@pytest.mark.timeout(900)
def test_our_layers_train_in_the_emulator(tmp_path):
    """Both precisions: nearly torch's losses, the same bits again, weights quantised once a step."""
    pytest.importorskip("cutlass")
    pytest.importorskip("numba")
    from mok.tools.emulator import Emulator

    size = Size(128, 128, experts=2, topk=1, blocks=1, heads=2, context=16, batch=2)
    steps = 3
    run = lm.Run("torch", 0, steps, size, rate=0.05)
    want, _ = train(run, tmp_path / "torch")
    with Emulator("sm_90a", num_sms=6) as emulator:
        for layer in OURS:
            launched = len(emulator.report.launches)
            ours = dataclasses.replace(run, layer=layer)
            losses, _ = train(ours, tmp_path / layer)
            assert losses == pytest.approx(want, rel=0.004) and losses != want
            names = [launch.kernel for launch in emulator.report.launches[launched:]]
            weights = sum("quantise" in name for name in names)
            assert weights == (3 * steps if layer == "mxfp8" else 0)
            again, _ = train(dataclasses.replace(ours, repeat=1), tmp_path / layer)
            assert again == losses
    assert want[0] - want[-1] > 0.02 * want[0]  # the steps change more than that


def test_mok_needs_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="GPU"):
        lm.main(["--out", str(tmp_path)])
