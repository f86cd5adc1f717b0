"""Shapes that commands run: real ones as far as memory allows, small ones without a GPU."""

from __future__ import annotations

import dataclasses

import torch

from mok import processes
from mok.config import DIM_MULTIPLE, Shape
from mok.reference import Case

FORWARD_SHARE = 0.6  # of free memory
TRAINING_SHARE = 0.12
THROUGH_HOST_BYTES = 1 << 30  # a few seconds of drawing, or over gloo


def shrink(shape: Shape, factor: int, max_experts: int = 16) -> Shape:
    """The shape with H and I divided by ``factor`` (in steps of 64) and fewer experts."""

    def smaller(size: int) -> int:
        return max(DIM_MULTIPLE, size // factor // DIM_MULTIPLE * DIM_MULTIPLE)

    shared = shape.shared_intermediate_size
    return dataclasses.replace(
        shape,
        hidden_size=smaller(shape.hidden_size),
        intermediate_size=smaller(shape.intermediate_size),
        num_experts=min(shape.num_experts, max_experts),
        shared_intermediate_size=smaller(shared) if shared else None,
    )


def forward_bytes(shape: Shape) -> int:
    """Rough bytes of one forward pass with its oracle: weights, rows, and FP32 copies."""
    h, i = shape.hidden_size, shape.intermediate_size
    routes = shape.num_tokens * shape.topk
    rows = routes + 128 * shape.num_experts
    weights = 2 * 3 * shape.num_experts * h * i
    return weights + 2 * rows * (2 * h + i) + 16 * shape.num_tokens * h + 4 * 3 * h * i


def fit_to_gpu(
    shape: Shape, device: torch.device, training: bool = False, exact: bool = True
) -> Shape:
    """Halve T, or E where the weights alone are too many, until the pass fits free memory.

    ``training``: beside the weights lie their gradients, the oracle's in FP32, and copies of both.
    ``exact``: there are exact values, too, which every process draws on its host. So within
    ``processes.joined`` (collective: all get one shape) sizes are small then, and with gradients to gather.
    """
    free, _ = torch.cuda.mem_get_info(device)
    limit = int((TRAINING_SHARE if training else FORWARD_SHARE) * free)
    if processes.group() is not None:
        limit = processes.smallest(limit) // processes.on_one_gpu()
        if exact or training:
            limit = min(limit, THROUGH_HOST_BYTES)
    return fit_to_bytes(shape, limit)


def fit_to_bytes(shape: Shape, limit: int) -> Shape:
    """Halve T or E, whichever costs more, until ``forward_bytes`` is at most ``limit``."""
    while forward_bytes(shape) > limit:
        without_tokens = dataclasses.replace(shape, num_tokens=0)
        if 2 * forward_bytes(without_tokens) > limit and shape.num_experts > 1:
            shape = dataclasses.replace(shape, num_experts=shape.num_experts // 2)
        elif shape.num_tokens > 1:
            shape = dataclasses.replace(shape, num_tokens=shape.num_tokens // 2)
        else:
            break
    return shape


def expert_flops(case: Case) -> int:
    """FLOP of a forward pass: 6·R·H·I for R routes, and the same for the shared expert's rows."""
    h = case.shape.hidden_size
    routes = int((case.top_experts >= 0).sum())
    flops = 6 * routes * h * case.shape.intermediate_size
    if case.shared:
        flops += 6 * len(case.x) * h * case.shared.gate.shape[1]
    return flops
