"""The mathematics of the layer's gradients, without schedule, ring, ranks or rounding points.

``backward_loop`` differentiates ``forward_loop`` in FP64; it shares no formula of a derivative with
the scheduled reference. ``backward_oracle`` is written out, an expert at a time, for real sizes.

With a clamp the derivative jumps at the limit, so the oracles see another one than the kernel where
rounding to BF16 carries a pre-activation across. A limit half-way between two BF16 values, as
1 + 2^-8, keeps every value on its side.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from mok.reference.backward import Gradients
from mok.reference.cases import Case, Experts
from mok.reference.oracle import _CHUNK_ROWS, forward_loop
from mok.reference.precision import ieee_matmul


def backward_loop(case: Case, dy: Tensor) -> Gradients:
    """Autograd through the FP64 loop over tokens. For small sizes. Everything FP64.

    Args:
        dy: [N, H], the gradient of the output.
    """

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().double().requires_grad_()

    def leaves(experts: Experts) -> Experts:
        return Experts(leaf(experts.gate), leaf(experts.up), leaf(experts.down))

    inputs = dataclasses.replace(
        case,
        x=leaf(case.x),
        router_weights=leaf(case.router_weights),
        routed=leaves(case.routed),
        shared=leaves(case.shared) if case.shared else None,
        shared_scale=None if case.shared_scale is None else leaf(case.shared_scale),
    )
    forward_loop(inputs).backward(dy.double())

    def grad(tensor: Tensor) -> Tensor:
        return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad

    def grads(experts: Experts) -> Experts:
        return Experts(grad(experts.gate), grad(experts.up), grad(experts.down))

    return Gradients(
        x=grad(inputs.x),
        router_weights=grad(inputs.router_weights),
        routed=grads(inputs.routed),
        shared=grads(inputs.shared) if inputs.shared else None,
        shared_scale=None if inputs.shared_scale is None else grad(inputs.shared_scale),
    )


def backward_oracle(case: Case, dy: Tensor, dtype: torch.dtype = torch.float32) -> Gradients:
    """Expert by expert in ``dtype`` (FP32 without TF32, or FP64), nothing rounded to BF16 between.

    Runs on the case's device. Repeats may differ in the last bits on a GPU where a token uses an
    expert twice. Memory: the weight gradients, as large in FP32 as twice the BF16 weights.
    """
    d_x = torch.zeros(case.x.shape, dtype=dtype, device=case.x.device)
    d_w = torch.zeros(case.top_experts.numel(), dtype=dtype, device=case.x.device)
    routed = _zeros(case.routed, dtype)
    shared = _zeros(case.shared, dtype) if case.shared else None
    d_scale = None
    with ieee_matmul():
        if case.shared is not None and shared is not None:
            scale = case.shared_scale
            tokens = torch.arange(len(d_x), device=d_x.device)
            d_factor = torch.zeros(len(d_x), dtype=dtype, device=d_x.device)
            _expert(case, dy, case.shared, shared, 0, tokens, tokens, scale, d_x, d_factor)
            d_scale = None if scale is None else d_factor
        ids = case.top_experts.flatten()
        order = ids.argsort(stable=True)
        counts = torch.bincount(ids + 1, minlength=1 + case.routed.gate.shape[0]).tolist()
        weights = case.router_weights.flatten()
        for e, routes in enumerate(order.split(counts)[1:]):  # the first part is the dropped ones
            token = routes // case.top_experts.shape[1]
            _expert(case, dy, case.routed, routed, e, token, routes, weights, d_x, d_w)
    return Gradients(d_x, d_w.view(case.top_experts.shape), routed, shared, d_scale)


def _zeros(experts: Experts, dtype: torch.dtype) -> Experts:
    return Experts(
        *(torch.zeros_like(w, dtype=dtype) for w in (experts.gate, experts.up, experts.down))
    )


def _expert(
    case: Case,
    dy: Tensor,
    experts: Experts,
    grads: Experts,
    e: int,
    tokens: Tensor,
    factor_at: Tensor,
    factors: Tensor | None,
    d_x: Tensor,
    d_factor: Tensor,
) -> None:
    """Add one expert's part of all gradients: rows of ``tokens``, each times its factor (or 1)."""
    dtype = d_x.dtype
    gate_w, up_w, down_w = (w[e].to(dtype) for w in (experts.gate, experts.up, experts.down))
    limit = torch.inf if case.swiglu_limit is None else case.swiglu_limit
    for token, at in zip(tokens.split(_CHUNK_ROWS), factor_at.split(_CHUNK_ROWS), strict=True):
        x, d_y = case.x[token].to(dtype), dy[token].to(dtype)
        gate_in, up_in = x @ gate_w.t(), x @ up_w.t()
        gate, up = gate_in.clamp(max=limit), up_in.clamp(-limit, limit)
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        d_hidden = d_y @ down_w
        d_factor[at] = (d_hidden * silu * up).sum(1)
        if factors is not None:
            d_y = d_y * factors[at].to(dtype).unsqueeze(1)
            d_hidden = d_hidden * factors[at].to(dtype).unsqueeze(1)
        d_gate = d_hidden * up * sigmoid * (1 + gate * (1 - sigmoid)) * (gate_in <= limit)
        d_up = d_hidden * silu * (up_in.abs() <= limit)
        d_x.index_add_(0, token, d_gate @ gate_w + d_up @ up_w)
        grads.gate[e].addmm_(d_gate.t(), x)
        grads.up[e].addmm_(d_up.t(), x)
        grads.down[e].addmm_(d_y.t(), silu * up)
