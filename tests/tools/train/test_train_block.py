"""The step benchmark with torch's layer on a CPU."""

import json
import sys

import pytest
import torch

from mok.config import Shape
from mok.errors import DeviceError
from mok.reference import GRADIENT_LIMIT, backward_oracle, random_case, random_gradient, relative_l2
from mok.tools import train_block
from mok.tools.bench.programs import sonic
from mok.tools.train import block_layers
from tests.tools.bench.fake_sonic import FakeSonic

TINY = {
    "hidden": 64, "intermediate": 64, "experts": 4, "topk": 2, "heads": 4, "kv-heads": 2,
    "head-size": 16, "blocks": 2, "batch": 1, "context": 32,
}  # fmt: skip

SMALL = {name.replace("-", "_"): value for name, value in TINY.items()}


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


@pytest.fixture
def fake_sonic(monkeypatch):
    FakeSonic().install(monkeypatch)
    monkeypatch.setattr(sonic, "_library", None)
    monkeypatch.setenv("QUACK_CACHE_ENABLED", "0")  # as loading sets it, but undone
    yield
    block_layers.close()


def ran(tmp_path, *argv):
    sizes = [f"--{name}={value}" for name, value in TINY.items()]
    code = train_block.main([*argv, "--rounds", "2", "--warm", "1", "--out", str(tmp_path), *sizes])
    return code, json.loads((tmp_path / "step.json").read_text())


def test_sonic_in_the_same_run(tmp_path, capsys, fake_sonic):
    code, found = ran(tmp_path, "--layers", "torch", "sonic")
    assert code == 0 and found["missing"] == []
    torch_, sonic_ = found["rows"]
    assert sonic_["program"] == "sonic" and torch_["output_error"] == 0
    assert sonic_["layer_ratio"] == pytest.approx(torch_["moe_ms"] / sonic_["moe_ms"])
    assert 0 < sonic_["output_error"] < 1e-2  # another order of roundings, the same layer
    assert "tokens/s/GPU" in capsys.readouterr().out


def test_sonics_layer_learns_what_torchs_does(fake_sonic):
    size = train_block.Size(64, 64, 4, 2, 4, 2, 16, 1, 1, 32)
    mine, other = (
        train_block.Program(name, size, torch.device("cpu")) for name in ("sonic", "torch")
    )
    for program in (mine, other):
        program.moes[0](program.x).backward(program.target)
    both = mine.moes[0].routed_both.grad
    for found, name in ((both[:, 0::2], "gate"), (both[:, 1::2], "up")):
        assert relative_l2(found, other.moes[0].get_parameter(f"routed_{name}").grad) < 2e-2
    for name in ("routed_down", "router.weight"):
        grads = [p.moes[0].get_parameter(name).grad for p in (mine, other)]
        assert relative_l2(*grads) < 2e-2, name


def test_a_peer_that_is_missing_or_fails_is_named(tmp_path, capsys, monkeypatch, fake_sonic):
    def fails(*_, **__):
        raise RuntimeError("no such kernel")

    with monkeypatch.context() as broken:
        broken.setattr(sonic, "layer", fails)
        code, found = ran(tmp_path, "--layers", "torch", "sonic")
        want = [{"program": "sonic", "reason": "RuntimeError: no such kernel"}]
        assert code == 0 and found["missing"] == want and len(found["rows"]) == 1
        assert "not measured: sonic: RuntimeError: no such kernel" in capsys.readouterr().out
    monkeypatch.setattr(sonic, "_library", None)
    monkeypatch.setitem(sys.modules, "sonicmoe.functional", None)
    code, found = ran(tmp_path, "--layers", "sonic", "torch")
    assert code == 0 and "sonicmoe" in found["missing"][0]["reason"]
    monkeypatch.setattr(train_block, "OURS", ("torch",))  # what must not fail
    monkeypatch.setattr(train_block.GroupedMoELayer, "_compute", fails)
    with pytest.raises(RuntimeError, match="no such kernel"):
        train_block.programs_of(["torch"], train_block.Size(**SMALL), torch.device("cpu"), print)


@pytest.mark.slow  # its kernels are compiled and run by tests/mok/test_mxfp8.py, too
@pytest.mark.emulator
@pytest.mark.timeout(900)
def test_our_layers_in_the_emulator():
    pytest.importorskip("cutlass")
    pytest.importorskip("numba")
    from mok.tools.emulator import Emulator

    size = train_block.Size(128, 128, 2, 1, 4, 2, 32, 1, 1, 32)
    with Emulator("sm_90a", num_sms=6):
        programs, away, missing = train_block.programs_of(
            ["mok", "mxfp8", "torch"], size, torch.device("cpu"), print
        )
    assert [p.name for p in programs] == ["mok", "mxfp8", "torch"] and not missing
    assert away["torch"] == 0 and 0 < away["mok"] < 1e-2 < away["mxfp8"] < 7e-2


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
