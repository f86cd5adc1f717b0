"""NCCL's way on real process groups, and upstream in an interpreter of its own."""

from __future__ import annotations

import os
import sys

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mok.reference import Case, Experts, backward_loop, forward_loop, relative_l2
from mok.tools.bench.published import accuracy, programs, upstream
from mok.tools.bench.published.share import Layer, Unavailable, layer_of, make_share
from mok.tools.bench.published.suite import Place, Settings, run
from tests.tools.bench.published.fakes import expert_by_expert

CPU = torch.device("cpu")
LAYER = Layer("kimi-k2.5", 24, 64, 64, 6, 2, 0, 2, 6)


def whole_case():
    """Both ranks' shares as one case."""
    shares = [make_share(LAYER, rank, None, CPU) for rank in range(2)]
    together = [torch.cat([getattr(s, n) for s in shares]) for n in ("x", "ids", "router", "dy")]
    routed = Experts(*(torch.cat([getattr(s, n) for s in shares]) for n in ("gate", "up", "down")))
    x, ids, router, dy = together
    return Case("both", x, ids, router, routed), dy


def worker(rank: int, port: int, queue) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch._grouped_mm = expert_by_expert
    share = make_share(LAYER, rank, dist.group.WORLD, CPU)
    with programs.peer("nccl-torch", share, "bf16") as peer:
        output, gradients = peer.forward(), peer.backward()
    place = Place(rank, 2, CPU, dist.group.WORLD, dist.group.WORLD)
    settings = Settings(
        models=("kimi-k2.5",), precisions=("bf16",), programs=("mok", "nccl-torch"), warmup=1,
        iterations=4, layers={"kimi-k2.5": LAYER},
    )  # fmt: skip
    document = run(place, settings)
    wanted = accuracy.expected(share, 2)
    queue.put(
        (rank, output.float().numpy(), [g.float().numpy() for g in gradients], document,
         (wanted.output.numpy(), wanted.x.numpy()))
    )  # fmt: skip
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_compute_and_time_the_layer():
    context = mp.get_context("spawn")
    queue = context.Queue()
    port = upstream.free_port()
    processes = [context.Process(target=worker, args=(r, port, queue)) for r in range(2)]
    for p in processes:
        p.start()
    found = {r: more for r, *more in (queue.get(timeout=120) for _ in processes)}
    for p in processes:
        p.join(60)
        assert p.exitcode == 0
    case, dy = whole_case()
    output = torch.cat([torch.from_numpy(found[r][0]) for r in range(2)])
    assert relative_l2(output, forward_loop(case)) < 8e-3
    wanted = backward_loop(case, dy)
    for i, want in ((0, wanted.x), (1, wanted.router_weights), (3, wanted.routed.down)):
        gradient = torch.cat([torch.from_numpy(found[r][1][i]) for r in range(2)])
        assert relative_l2(gradient, want) < 1e-2
    for i, want in ((0, forward_loop(case)), (1, wanted.x)):
        fp32 = torch.cat([torch.from_numpy(found[r][3][i]) for r in range(2)])
        assert relative_l2(fp32, want) < 1e-5
    matches = found[0][2]["rows"][0]["accuracy"]
    assert {*matches} == {"output", "x"} and all(1e-4 < m["error"] < 1e-2 for m in matches.values())
    # Both ranks have the same document: the slowest of both in each iteration.
    assert found[0][2]["rows"] == found[1][2]["rows"] and len(found[0][2]["rows"]) == 2
    assert found[0][2]["missing"][0]["program"] == "mok"


# ------------------------------------------------------------------ layers


def test_experts_are_cut_to_fit_few_gpus():
    whole = layer_of("kimi-k2.5", 2048, 64, None)
    assert (whole.experts, whole.local, whole.asked_experts) == (384, 6, 384)
    cut = layer_of("kimi-k2.5", 2048, 2, 64 << 30)
    assert cut.experts == 192 and cut.asked_experts == 384
    assert 5 * cut.weight_bytes() <= 64 << 30 < 5 * layer_of("kimi-k2.5", 8, 2, None).weight_bytes()
    assert layer_of("glm-5.2", 2048, 72, None).experts == 216  # 256 over 72 ranks: three each
    with pytest.raises(RuntimeError, match="Use more GPUs"):
        layer_of("deepseek-v4-pro", 2048, 1, 1 << 30)


# ---------------------------------------------------------------- upstream

FAKE = """
import torch
import torch.distributed as dist

class MoKConfig:
    pass

def create_workspace(config, group, *, device, num_local_tokens, hidden_size, topk):
    assert dist.get_world_size(group) == 1
    return num_local_tokens, hidden_size, topk

def build_schedule(workspace, config, ids, *, num_local_experts):
    return ids, num_local_experts

def layer(ids, x, router, sg, su, sd, gate, up, down):
    def mlp(x, g, u, d):
        return (torch.nn.functional.silu(x @ g.float().T) * (x @ u.float().T)) @ d.float().T
    out = mlp(x.float(), sg, su, sd)
    for e in range(len(gate)):
        weight = torch.where(ids == e, router, 0).sum(1, keepdim=True)
        out = out + weight * mlp(x.float(), gate[e], up[e], down[e])
    return out

def forward(config, workspace, schedule, x, router, *weights):
    plain = [w if isinstance(w, torch.Tensor) else w[0] for w in weights]
    assert all(isinstance(w, torch.Tensor) for w in weights[:3])
    return layer(schedule[0], x, router, *plain).bfloat16(), [len(weights[3])]

def backward(config, workspace, schedule, context, dy, x, router, *weights):
    assert context.pop() == len(weights[3]) or len(weights[3]) == 4  # used once
    if not isinstance(weights[3], torch.Tensor):
        assert [len(w) for w in weights[3:]] == [4, 4, 2]
    return (x,) * 8
"""
OPS = """
def mxfp8_quantize(weight, normal, transposed):
    return weight, "scales", weight, "transposed scales"
"""


@pytest.fixture
def interpreter(tmp_path):
    """An interpreter whose only ``mok`` is a stand-in."""
    package = tmp_path / "site" / "mok"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "functional.py").write_text(FAKE)
    (package / "ops.py").write_text(OPS)
    script = tmp_path / "python"
    path = f"{tmp_path / 'site'}"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)


def wide_share(experts=2, **more):
    sizes = dict(tokens=512, hidden=256, intermediate=256, shared=256, ep=1) | more
    layer = Layer("m", sizes["tokens"], sizes["hidden"], sizes["intermediate"], experts, 2,
                  sizes["shared"], sizes["ep"], experts)  # fmt: skip
    return make_share(layer, 0, None, CPU)


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_upstream_runs_in_its_own_interpreter(precision, interpreter):
    share = wide_share()
    times, output, version = upstream.times(share, precision, 1, 3, interpreter, "127.0.0.1")
    assert {p: len(t) for p, t in times.items()} == {"forward": 3, "backward": 3}
    shared = Experts(*(w.unsqueeze(0) for w in share.shared))
    routed = Experts(share.gate, share.up, share.down)
    case = Case("c", share.x, share.ids, share.router, routed, shared)
    assert relative_l2(output, forward_loop(case)) < 8e-3
    assert version == "version unknown"


@pytest.mark.parametrize(
    "more,reason",
    [
        ({"ep": 2}, "it has kernels for EP 1, 4, 8"),
        ({"hidden": 192}, "multiples of 256"),
        ({"tokens": 256}, "T at least 512"),
        ({"shared": 64}, "one shared expert as wide"),
    ],
)
def test_what_upstream_cannot_do(more, reason):
    assert reason in upstream.why_not(wide_share(**more), "python")
    assert "--peers upstream=PYTHON" in upstream.why_not(wide_share(), None)


def test_an_interpreter_without_it_is_named(tmp_path):
    with pytest.raises(Unavailable, match=r"No such file|no-such"):
        upstream.times(wide_share(), "bf16", 0, 1, str(tmp_path / "no-such"), "127.0.0.1")
    # One that has neither name: this process' own, without this checkout.
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH= exec {sys.executable} -S "$@"\n')
    script.chmod(0o755)
    with pytest.raises(Unavailable):
        upstream.times(wide_share(), "bf16", 0, 1, str(script), "127.0.0.1")
