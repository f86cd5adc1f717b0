"""Every peer computes the layer and its gradients, against stand-ins of its library's calls."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist

from mok.reference import Case, Experts, backward_loop, forward_loop, relative_l2
from mok.tools.bench.published import programs
from mok.tools.bench.published.share import Layer, Unavailable, make_share
from mok.tools.bench.published.suite import Place, Settings, run
from tests.tools.bench.published import fakes

CPU = torch.device("cpu")
LIBRARIES = {
    "nccl-torch": (),
    "deepep-torch": ("deep_ep",),
    "deepep-te": ("deep_ep", "te"),
    "hybridep-megatron": ("megatron", "te"),
}


@pytest.fixture
def alone(tmp_path):
    """A process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def grouped(monkeypatch):
    monkeypatch.setattr(torch, "_grouped_mm", fakes.expert_by_expert)


def share_of(group, ep=1, shared=64, experts=4):
    """A share whose ids are all of this rank's experts."""
    layer = Layer("small", 24, 64, 64, experts * ep, 2, shared, ep, experts * ep)
    share = make_share(layer, 0, group, CPU)
    share.ids.remainder_(experts)  # to the experts of this rank
    share.ids[:, 1] = (share.ids[:, 0] + 1) % experts
    return share


def case_of(share):
    shared = Experts(*(w.unsqueeze(0) for w in share.shared)) if share.shared else None
    routed = Experts(share.gate, share.up, share.down)
    return Case("share", share.x, share.ids, share.router, routed, shared)


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
@pytest.mark.parametrize("name", programs.PEERS)
def test_computes_the_layer(name, precision, alone, monkeypatch):
    fakes.install(monkeypatch, *LIBRARIES[name], *(["torchao"] if precision == "mxfp8" else []))
    share = share_of(alone, ep=2 if name.startswith("hybrid") else 1)
    case = case_of(share)
    with programs.peer(name, share, precision) as peer:
        output = peer.forward()
        found = peer.backward()
        again = peer.forward()  # an iteration leaves nothing behind
        peer.backward()
    assert torch.equal(output, again)
    assert relative_l2(output, forward_loop(case)) < 8e-3
    wanted = backward_loop(case, share.dy)
    assert relative_l2(found[0], wanted.x) < 1e-2
    assert relative_l2(found[1], wanted.router_weights) < 1e-2
    parameters = 2 if name.endswith("torch") else 2 * share.layer.local
    assert len(found) == 2 + parameters + 3
    last = torch.stack(found[2 + parameters // 2 : 2 + parameters]).reshape(share.down.shape)
    assert relative_l2(last, wanted.routed.down) < 1e-2
    assert relative_l2(found[-1], wanted.shared.down[0]) < 1e-2


def test_deepep_sends_gradients_along_the_same_ways(alone, monkeypatch):
    fakes.install(monkeypatch, "deep_ep")
    monkeypatch.setattr(fakes.ElasticBuffer, "calls", [])
    with programs.peer("deepep-torch", share_of(alone), "bf16") as peer:
        peer.forward()
        peer.backward()
    assert fakes.ElasticBuffer.calls == ["dispatch", "combine", "dispatch again", "combine"]


def test_hybridep_keeps_no_buffer_of_another_layer(alone, monkeypatch):
    fakes.install(monkeypatch, "megatron", "te")
    monkeypatch.setitem(fakes.STATE, "resets", 0)
    for _ in range(2):
        with programs.peer("hybridep-megatron", share_of(alone, ep=2), "bf16"):
            pass
    assert fakes.STATE["resets"] == 2


@pytest.mark.parametrize("older", [False, True])
def test_transformer_engine_quantises_in_its_autocast(older, alone, monkeypatch):
    fakes.install(monkeypatch, "deep_ep", "te", older=older)
    monkeypatch.setitem(fakes.STATE, "entered", 0)
    with programs.peer("deepep-te", share_of(alone), "mxfp8") as peer:
        peer.forward()
    assert fakes.STATE["entered"] == 1


@pytest.mark.parametrize(
    "name,installed,precision,reason",
    [
        ("deepep-torch", (), "bf16", "DeepEP is not installed"),
        ("deepep-te", ("deep_ep",), "bf16", "Transformer Engine is not installed"),
        ("hybridep-megatron", ("te",), "bf16", "Megatron-Core is not installed"),
        ("nccl-torch", (), "mxfp8", "needs torchao"),
    ],
)
def test_what_is_missing_is_named(name, installed, precision, reason, alone, monkeypatch):
    for package in ("deep_ep", "transformer_engine", "megatron", "torchao"):
        monkeypatch.setitem(sys.modules, package, None)  # not even if it is installed here
    fakes.install(monkeypatch, *installed)
    with (
        pytest.raises(Unavailable, match=reason),
        programs.peer(name, share_of(alone, ep=2), precision),
    ):
        pass


def test_older_libraries_are_named(alone, monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_ep", fakes.module("deep_ep", Buffer=object))
    with (
        pytest.raises(Unavailable, match="version 2 or newer"),
        programs.peer("deepep-torch", share_of(alone), "bf16"),
    ):
        pass
    fakes.install(monkeypatch, "megatron", "te")
    moe = sys.modules["megatron.core.transformer.moe"]
    monkeypatch.setattr(moe.fused_a2a, "hybrid_ep_dispatch", None)
    with (
        pytest.raises(Unavailable, match="hybrid-ep"),
        programs.peer("hybridep-megatron", share_of(alone, ep=2), "bf16"),
    ):
        pass


# ---------------------------------------------------------------- the suite


class SlowOurs(programs.Pipeline):
    """In ours' place where there is no kernel: the same numbers by torch."""

    def __init__(self, shares, precision, group):
        from mok.tools.bench.published.experts import TorchExperts
        from mok.tools.bench.published.transports import Nccl

        super().__init__(shares[0], "bf16", Nccl, TorchExperts)

    def close(self):
        pass

    def tunables(self):
        return {"minibatch_size": 256}


def settings(**more):
    small = Layer("kimi-k2.5", 24, 64, 64, 4, 2, 64, 1, 8)
    return Settings(
        models=("kimi-k2.5",), precisions=("bf16",), warmup=1, iterations=3,
        layers={"kimi-k2.5": small}, **more,
    )  # fmt: skip


def test_the_suite_times_checks_and_names(alone, monkeypatch):
    monkeypatch.setattr(programs, "Ours", SlowOurs)
    for package in ("transformer_engine", "megatron"):
        monkeypatch.setitem(sys.modules, package, None)
    fakes.install(monkeypatch, "deep_ep")
    saved = []
    place = Place(0, 1, CPU, alone, alone, ours="a group")
    found = run(place, settings(), save=lambda document: saved.append(len(document["rows"])))
    assert {(r["program"], r["pass"]) for r in found["rows"]} == {
        (n, p) for n in ("mok", "nccl-torch", "deepep-torch") for p in ("forward", "backward")
    }
    assert all(r["ok"] and r["ms"] > 0 and r["error"] < 1e-2 for r in found["rows"])
    for row in found["rows"]:
        for each in row["accuracy"].values():
            assert 1e-4 < each["error"] < 1e-2 and 0.9999 < each["cosine"] <= 1
    assert {m["program"] for m in found["missing"]} == {
        "deepep-te", "hybridep-megatron", "upstream",
    }  # fmt: skip
    assert saved == [2, 4, 6]
    assert [e["pass"] for e in found["speed_ups"]] == ["forward", "backward"]
    assert found["layers"]["kimi-k2.5"]["asked_E"] == 8
    assert len(found["best"]) == 4


@pytest.mark.parametrize("wrong", ["output", "x"])
def test_ours_must_be_near_fp32(wrong, alone, monkeypatch):
    class Wrong(SlowOurs):
        def forward(self):
            return super().forward() * (1.01 if wrong == "output" else 1)

        def backward(self):
            first, *others = super().backward()
            return first * (1.02 if wrong == "x" else 1), *others

    monkeypatch.setattr(programs, "Ours", Wrong)
    place = Place(0, 1, CPU, alone, alone, ours="a group")
    found = run(place, settings(programs=("mok", "nccl-torch")))
    assert not any(r["ok"] for r in found["rows"] if r["program"] == "mok")
    errors = {name: each["error"] for name, each in found["rows"][0]["accuracy"].items()}
    assert errors.pop(wrong) > 9e-3 and all(error < 8e-3 for error in errors.values())


def test_a_wrong_peer_is_no_peer(alone, monkeypatch):
    monkeypatch.setattr(programs, "Ours", SlowOurs)
    fakes.install(monkeypatch, "deep_ep")
    honest = fakes.ElasticBuffer.combine

    def halves(self, x, handle, topk_weights=None):
        out, *rest = honest(self, x, handle, topk_weights)
        return out / 2, *rest

    monkeypatch.setattr(fakes.ElasticBuffer, "combine", halves)
    place = Place(0, 1, CPU, alone, alone, ours="a group")
    found = run(place, settings(programs=("mok", "deepep-torch")))
    wrong = [r for r in found["rows"] if r["program"] == "deepep-torch"]
    assert wrong and not any(r["ok"] for r in wrong)
    assert all(e["fastest_peer"] is None for e in found["speed_ups"])


@pytest.mark.parametrize("where", ["__init__", "dispatch", "combine"])
@pytest.mark.parametrize("error", [RuntimeError, AssertionError, KeyError, OSError])
def test_a_peer_that_breaks_is_named(where, error, alone, monkeypatch):
    """Whatever it raises: Transformer Engine asserts where a GPU lacks MXFP8."""
    fakes.install(monkeypatch, "deep_ep")

    def broken(self, *args, **more):
        raise error("no more buffers")

    monkeypatch.setattr(fakes.ElasticBuffer, where, broken)
    place = Place(0, 1, CPU, alone, alone)
    found = run(place, settings(programs=("mok", "deepep-torch", "nccl-torch")))
    reasons = {m["program"]: m["reason"] for m in found["missing"]}
    assert reasons["deepep-torch"].startswith(f"failed: {error.__name__}")
    assert "no more buffers" in reasons["deepep-torch"] and "no GPU" in reasons["mok"]
    assert {r["program"] for r in found["rows"]} == {"nccl-torch"}
