"""A differentiable MoE layer in plain torch, and comparisons, for tests of the layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mok.config import Config
from mok.layer import MoELayer
from mok.reference import relative_l2

GRAD_LIMIT = 5e-3  # relative L2 of a gradient against FP32
COSINE_LIMIT = 0.9999
SMALL = Config(2, 2, 128, 256)  # for the emulator: two minibatches in the ring


def small_layer(experts: int = 2, topk: int = 1, **options: object) -> MoELayer:
    """H = I = 64, weights from seed 0."""
    torch.manual_seed(0)
    return MoELayer(64, 64, experts, topk, config=SMALL, **options)  # type: ignore[arg-type]


def ffn(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, limit: float | None) -> Tensor:
    g, u = x @ gate.t(), x @ up.t()
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return (nn.functional.silu(g) * u) @ down.t()


def torch_layer(
    x: Tensor,
    router_weights: Tensor,
    top_experts: Tensor,
    routed: list[Tensor],
    shared: list[Tensor] | None = None,
    shared_scale: Tensor | None = None,
    limit: float | None = None,
) -> Tensor:
    """The layer's mathematics in the dtype of its arguments; x [T, H]."""
    out = torch.zeros_like(x)
    if shared:
        y = ffn(x, shared[0], shared[1], shared[2], limit)
        out = y if shared_scale is None else torch.sigmoid(x @ shared_scale)[:, None] * y
    for e in range(len(routed[0])):
        token, k = (top_experts == e).nonzero(as_tuple=True)
        if len(token):
            y = ffn(x[token], *(w[e] for w in routed), limit=limit)
            out = out.index_add(0, token, router_weights[token, k][:, None] * y)
    return out


def torch_of(layer: MoELayer, x: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, list]:
    """(output, [x, weights, *parameters but the router's]) in FP32 with autograd, on copies."""
    names = [n for n, _ in layer.named_parameters() if not n.startswith("router")]
    values = [x, weights, *(layer.get_parameter(n) for n in names)]
    leaves = [v.detach().float().clone().requires_grad_() for v in values]
    p = dict(zip(names, leaves[2:], strict=True))
    routed = [p[f"routed_{n}"] for n in ("gate", "up", "down")]
    shared = [p[f"shared_{n}"] for n in ("gate", "up", "down") if f"shared_{n}" in p]
    out = torch_layer(
        leaves[0], leaves[1], ids, routed, shared, p.get("shared_scale"), layer.swiglu_limit
    )
    return out, leaves


def assert_gradient(name: str, found: Tensor | None, expected: Tensor) -> None:
    """Within the limits of BF16, and exactly 0 where that is expected everywhere."""
    assert found is not None, name
    assert relative_l2(found, expected) <= GRAD_LIMIT, (name, relative_l2(found, expected))
    if expected.any():
        a, b = found.double().flatten(), expected.double().flatten()
        assert float(a @ b / (a.norm() * b.norm())) >= COSINE_LIMIT, name


def take_grads(layer: nn.Module, *inputs: Tensor) -> dict[str, Tensor | None]:
    """All gradients by name; they are cleared."""
    tensors = dict(layer.named_parameters()) | {f"input {i}": t for i, t in enumerate(inputs)}
    grads = {name: None if t.grad is None else t.grad.clone() for name, t in tensors.items()}
    for t in tensors.values():
        t.grad = None
    return grads


def assert_same(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    """The same gradients, bit for bit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        other = found[name]
        if value is None or other is None:
            assert value is other, name
        else:
            assert torch.equal(other, value), name
