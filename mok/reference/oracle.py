"""The mathematics of the layer, without schedule, ring, ranks or rounding points.

``forward_loop`` is one token after the other in FP64, as plain as it can be; it shares no code with
the scheduled reference. ``forward_oracle`` is the same, an expert at a time, for real sizes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mok.reference.cases import Case
from mok.reference.precision import ieee_matmul

BF16_LIMIT = 3.5e-3
"""Relative L2 error that a BF16 layer may have against FP32; its roundings cost about 2.9e-3."""

GRADIENT_LIMIT = 4.5e-3
"""The same for each gradient; their roundings cost 2.6e-3 to 3.6e-3."""

_CHUNK_ROWS = 8192  # bounds the gate and up copies when one expert gets every token
_PART = 1 << 27  # elements whose FP64 copies are made at once


def forward_loop(case: Case) -> Tensor:
    """Token by token in FP64. For small sizes. Returns FP64 [N, H]."""
    limit = math.inf if case.swiglu_limit is None else case.swiglu_limit
    # Taken apart once, so that autograd puts the gradients of slices together once.
    routed = [w.double().unbind() for w in (case.routed.gate, case.routed.up, case.routed.down)]
    shared = None
    if case.shared is not None:
        shared = [w.double()[0] for w in (case.shared.gate, case.shared.up, case.shared.down)]
    scales = torch.ones(len(case.x)) if case.shared_scale is None else case.shared_scale

    def expert(token: Tensor, gate_w: Tensor, up_w: Tensor, down_w: Tensor) -> Tensor:
        gate, up = gate_w @ token, up_w @ token
        gate = torch.where(gate > limit, limit, gate)
        up = torch.where(up > limit, limit, torch.where(up < -limit, -limit, up))
        return down_w @ (torch.nn.functional.silu(gate) * up)

    rows = []
    for token, ids, weights, scale in zip(
        case.x.double(),
        case.top_experts,
        case.router_weights.double(),
        scales.double(),
        strict=True,
    ):
        out = torch.zeros_like(token)
        if shared is not None:
            out = out + scale * expert(token, *shared)
        for e, weight in zip(ids.tolist(), weights, strict=True):
            if e >= 0:
                out = out + weight * expert(token, *(w[e] for w in routed))
        rows.append(out)
    return torch.stack(rows) if rows else case.x.double()


def forward_oracle(case: Case, dtype: torch.dtype = torch.float32) -> Tensor:
    """Expert by expert in ``dtype`` (FP32 without TF32, or FP64), nothing rounded to BF16 between.

    Runs on the case's device. Returns ``dtype`` [N, H]. Repeats may differ in the last bits on a
    GPU where a token uses an expert twice.
    """

    def ffn(x: Tensor, gate_w: Tensor, up_w: Tensor, down_w: Tensor) -> Tensor:
        gate = x @ gate_w.t()
        up = x @ up_w.t()
        if case.swiglu_limit is not None:
            gate = gate.clamp(max=case.swiglu_limit)
            up = up.clamp(-case.swiglu_limit, case.swiglu_limit)
        return (torch.nn.functional.silu(gate) * up) @ down_w.t()

    out = torch.zeros(case.x.shape, dtype=dtype, device=case.x.device)
    with ieee_matmul():
        if case.shared is not None:
            w = [t[0].to(dtype) for t in (case.shared.gate, case.shared.up, case.shared.down)]
            for part in torch.arange(len(out), device=out.device).split(_CHUNK_ROWS):
                out[part] = ffn(case.x[part].to(dtype), *w)
                if case.shared_scale is not None:
                    out[part] *= case.shared_scale[part].to(dtype).unsqueeze(1)
        ids = case.top_experts.flatten()
        order = ids.argsort(stable=True)
        counts = torch.bincount(ids + 1, minlength=1 + case.routed.gate.shape[0]).tolist()
        for e, routes in enumerate(order.split(counts)[1:]):  # the first part is the dropped ones
            if not len(routes):
                continue
            w = [t[e].to(dtype) for t in (case.routed.gate, case.routed.up, case.routed.down)]
            for part in routes.split(_CHUNK_ROWS):
                token = part // case.top_experts.shape[1]
                y = ffn(case.x[token].to(dtype), *w)
                y *= case.router_weights.flatten()[part].to(dtype).unsqueeze(1)
                out.index_add_(0, token, y)
    return out


def cosine(found: Tensor, expected: Tensor) -> float:
    """Of the angle between two tensors, in FP64; 1 if both are zero, 0 if only one is."""
    sums = torch.zeros(3, dtype=torch.float64, device=found.device)
    for part, wanted in zip(*(t.reshape(-1).split(_PART) for t in (found, expected)), strict=True):
        a, b = part.double(), wanted.to(found.device).double()
        sums += torch.stack([a @ b, a @ a, b @ b])
    product, a, b = sums.tolist()
    if a == 0 or b == 0:
        return float(a == b)
    return float(product / math.sqrt(a * b))


def relative_l2(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖ in FP64; 0 if both are zero, infinite if only expected is.

    NaN anywhere gives NaN, which no limit admits.
    """
    differences, sizes = [], []
    # Parts: FP64 copies of a model's weight gradients would not fit beside them.
    for part, wanted in zip(*(t.reshape(-1).split(_PART) for t in (found, expected)), strict=True):
        wanted = wanted.double()
        differences.append(float((part.double() - wanted).norm()))
        sizes.append(float(wanted.norm()))
    difference, size = math.hypot(*differences), math.hypot(*sizes)
    if size == 0:
        return 0.0 if difference == 0 else difference * math.inf
    return difference / size
