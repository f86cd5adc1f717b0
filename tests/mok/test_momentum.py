"""Sixty-four momentum updates of the layer's weights against those that torch's autograd gives in FP32.

Both sides keep FP32 weights of their own, rounded to BF16 where a step computes; inputs, gradients and
routes are new in every step. The whole change of each weight is compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from mok import functional
from mok.config import Config, Shape
from mok.layer import MoELayer
from mok.reference import random_case, routing
from mok.reference.precision import ieee_matmul
from tests.module_helpers import SMALL, assert_gradient, torch_layer

STEPS = 64
KINDS = ("balanced", "few_experts", "skewed", "one_expert")
"""``few_experts`` leaves half of the experts empty; ``one_expert`` gets all routes."""


def routes(kind: str, shape: Shape, step: int) -> Tensor:
    """Expert ids, int64 [T, K]; ``balanced`` has equally many for every expert."""
    size = (shape.num_tokens, shape.topk)
    if kind == "balanced":
        order = torch.randperm(size[0], generator=torch.Generator().manual_seed(step))
        return (order[:, None] * shape.topk + torch.arange(shape.topk)) % shape.num_experts
    if kind == "one_expert":
        return torch.full(size, shape.num_experts // 2)
    if kind == "few_experts":  # the first half of them, always
        return routing("random", size[0], max(shape.num_experts // 2, size[1]), size[1], step)
    return routing(kind, size[0], shape.num_experts, size[1], step)


def check_updates(
    shape: Shape, kinds: Sequence[str], device: str, config: Config | None = None
) -> dict[str, Tensor]:
    """Train for ``STEPS`` with one kind of routing after the other; returns each weight's change."""
    torch.manual_seed(0)
    layer = MoELayer(
        shape.hidden_size, shape.intermediate_size, shape.num_experts, shape.topk,
        shared_intermediate_size=shape.shared_intermediate_size, config=config, device=device,
        dtype=torch.float32,
    )  # fmt: skip
    names = [f"{part}_{name}" for part in ("routed", "shared") for name in ("gate", "up", "down")]
    mine = [layer.get_parameter(name) for name in names]
    start = [p.detach().clone() for p in mine]
    theirs = [p.clone().requires_grad_() for p in start]
    optimizers = None
    for step in range(STEPS):
        kind = kinds[step * len(kinds) // STEPS]
        case = random_case(shape, seed=step, device=device)
        ids, weights = routes(kind, shape, step).to(device), case.router_weights
        dy = random_case(shape, seed=1000 + step, device=device).x
        layer.zero_grad()
        layer(case.x, weights, ids).backward(dy)
        leaves = [p.detach().bfloat16().float().requires_grad_() for p in theirs]
        with ieee_matmul():
            out = torch_layer(case.x.float(), weights, ids, leaves[:3], leaves[3:])
            grads = torch.autograd.grad(out, leaves, dy.float())
        for p, grad in zip(theirs, grads, strict=True):
            p.grad = grad
        if optimizers is None:
            # Steps that change weights by tens of percent in all, so that later gradients differ.
            rate = 0.004 * min(
                float(p.norm() / g.norm()) for p, g in zip(start, grads, strict=True)
            )
            optimizers = [torch.optim.SGD(ps, lr=rate, momentum=0.9) for ps in (mine, theirs)]
        for optimizer in optimizers:
            optimizer.step()
    changes, moved = {}, []
    for name, first, found, expected in zip(names, start, mine, theirs, strict=True):
        changes[name] = found.detach() - first
        assert_gradient(name, changes[name], expected.detach() - first)
        moved.append(float(changes[name].norm() / first.norm()))
    assert max(moved) > 0.05, moved  # later gradients are those of other weights
    return changes


def check_experts(kind: str, changes: dict[str, Tensor]) -> None:
    """Experts that never had a token are as they were, and there are such where there must be."""
    still = [not bool(change.any()) for change in changes["routed_up"]]
    assert any(still) == (kind in ("few_experts", "one_expert")), still
    for name in ("routed_gate", "routed_down"):
        assert [not bool(change.any()) for change in changes[name]] == still


@pytest.fixture(scope="module")
def emulator() -> Iterator[None]:
    pytest.importorskip("numba")
    from mok.tools.emulator import Emulator

    with Emulator("sm_90a", num_sms=6):
        yield
        functional.clear_workspace_cache()


@pytest.mark.emulator
def test_one_routing_after_the_other(emulator: None) -> None:
    check_updates(Shape(24, 64, 64, 4, 1, 1, 64), KINDS, "cpu", SMALL)


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.parametrize("kind", KINDS)
def test_each_routing(emulator: None, kind: str) -> None:
    changes = check_updates(Shape(40, 64, 128, 5, 2, 1, 64), [kind], "cpu", SMALL)
    check_experts(kind, changes)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu(kind: str) -> None:
    try:
        changes = check_updates(Shape(1024, 512, 256, 16, 4, 1, 256), [kind], "cuda")
        check_experts(kind, changes)
    finally:
        functional.clear_workspace_cache()
