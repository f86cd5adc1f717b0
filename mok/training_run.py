"""Forward and backward of a case by whatever runs here, with every gradient of all ranks together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mok.backends import Backend, lay_out, machine
from mok.config import Config
from mok.reference import Case, Experts, Gradients, backward_reference, forward_reference


def run_training(
    case: Case,
    dy: Tensor,
    ep_size: int,
    backend: Backend,
    *,
    config: Config | None = None,
    tokens_per_rank: Sequence[int] | None = None,
    recompute: bool = False,
    precision: str = "bf16",
) -> tuple[Tensor, Gradients]:
    """Forward and backward of the case on ``ep_size`` virtual ranks: BF16 [N, H], and all gradients.

    Within ``processes.joined`` and at its size, on its processes instead (collective).

    Args:
        dy: gradient of the output, BF16 [N, H].
        recompute: backward takes a rebuilt context (activation checkpointing). The reference, which
            keeps everything, does nothing else then.
        Other arguments as ``run_forward``.
    """
    lengths = list(tokens_per_rank or case.tokens_per_rank(ep_size))
    if backend.kind == "reference":
        sizes: dict[str, Any] = {"precision": precision}
        if config is not None:
            sizes |= {"minibatch": config.minibatch_size, "macrobatch": config.macrobatch_size}
        output = forward_reference(case, ep_size, tokens_per_rank=lengths, **sizes)
        return output, backward_reference(case, dy, ep_size, tokens_per_rank=lengths, **sizes)
    with machine(backend):
        layer = lay_out(case, lengths, backend, config, precision)
        schedule = layer.schedule()
        output, context = layer.forward(schedule, save_context=True)
        assert context is not None
        if recompute:
            context = layer.recompute(schedule)
        d_x, d_weights, *parts = layer.backward(schedule, context, dy)
    every, together = layer.place.every, layer.place.together
    shared = None
    if case.shared is not None:
        shared = Experts(*(torch.stack(every(part)) for part in parts[3:6]))
    return together(output), Gradients(
        x=together(d_x),
        router_weights=together(d_weights),
        routed=Experts(*(together(part) for part in parts[:3])),
        shared=shared,
        shared_scale=together(parts[6]) if layer.scale is not None else None,
    )
