"""The layer against torch's own operators, in one run on one GPU."""

from __future__ import annotations

import gc
import statistics

import pytest
import torch

from mok import functional
from mok.config import Config, Shape
from mok.reference import random_case, relative_l2
from tests.helpers_layer import Layer

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

SHAPES = [  # T, H, I, E, K, and the least TFLOP/s
    (16384, 2048, 768, 128, 8, 0),
    (16384, 2048, 1024, 64, 8, 0),
    (8192, 4096, 14336, 8, 2, 550),
    (8192, 7168, 2048, 32, 8, 0),
]
ROUNDS = 10


@pytest.fixture(autouse=True)
def _memory_back():
    yield
    gc.collect()
    torch.cuda.empty_cache()


def torch_layer(case):
    """sort, gather, _grouped_mm, SwiGLU, _grouped_mm, index_add; weights stacked beforehand."""
    gate_up = torch.cat([case.routed.gate, case.routed.up], dim=1).transpose(1, 2)
    down = case.routed.down.transpose(1, 2)
    num_experts, topk = gate_up.shape[0], case.top_experts.shape[1]

    def run() -> torch.Tensor:
        ids = case.top_experts.flatten()
        order = ids.argsort()
        ends = torch.bincount(ids, minlength=num_experts).cumsum(0).to(torch.int32)
        token = order // topk
        gate, up = torch._grouped_mm(case.x[token], gate_up, offs=ends).chunk(2, dim=1)
        y = torch._grouped_mm(torch.nn.functional.silu(gate) * up, down, offs=ends)
        y = y * case.router_weights.flatten()[order].bfloat16().unsqueeze(1)
        return torch.zeros_like(case.x).index_add_(0, token, y)

    return run


def milliseconds(run) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s[:5])))
def test_faster_than_torch(shape):
    tokens, hidden, inner, experts, topk, least = shape
    case = random_case(Shape(tokens, hidden, inner, experts, topk), device="cuda")
    config = Config.suggest(case.shape, "cuda")
    theirs = torch_layer(case)
    with Layer(case, 1, config, "cuda") as layer:
        given = layer.arguments(case)

        def ours() -> torch.Tensor:
            schedule = functional.build_schedule(layer.workspace, config, case.top_experts)
            return functional.forward(
                config, layer.workspace, schedule, *given, save_context=False
            )[0]

        assert relative_l2(ours(), theirs()) < 2e-2
        for _ in range(3):
            ours()
            theirs()
        times = [(milliseconds(ours), milliseconds(theirs)) for _ in range(ROUNDS)]
        layer.finish()
    mine, other = (statistics.median(t) for t in zip(*times, strict=True))
    rate = 6 * tokens * topk * hidden * inner / mine / 1e9
    print(
        f"{shape[:5]}: {mine:.3f} ms, torch {other:.3f} ms, ratio {other / mine:.2f}, "
        f"{rate:.0f} TFLOP/s"
    )
    assert mine < other
    assert rate >= least
