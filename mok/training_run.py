"""Forward and backward of a case by whatever runs here, with every gradient of all ranks together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mok.backends import Backend, emulated_machine, machine
from mok.config import Config, Shape
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
        sizes: dict[str, Any] = {}
        if config is not None:
            sizes = {"minibatch": config.minibatch_size, "macrobatch": config.macrobatch_size}
        output = forward_reference(case, ep_size, tokens_per_rank=lengths, **sizes)
        return output, backward_reference(case, dy, ep_size, tokens_per_rank=lengths, **sizes)
    with machine(backend):
        return _KernelLayer(case, lengths, backend, config).training(dy, recompute)


class _KernelLayer:
    """A case laid out over virtual ranks, in a workspace that is made once."""

    def __init__(
        self, case: Case, lengths: list[int], backend: Backend, config: Config | None
    ) -> None:
        from mok import functional, processes

        self.case, self.lengths, self.ep_size = case, lengths, len(lengths)
        full = case.shape
        shape = Shape(
            max(lengths, default=0),
            full.hidden_size,
            full.intermediate_size,
            full.num_experts,
            full.topk,
            self.ep_size,
            full.shared_intermediate_size,
        )
        self.config = config or Config.suggest(
            shape, backend.info or emulated_machine(backend.arch)
        )
        device = backend.device
        self.place = processes.Place(self.ep_size, device)
        self.each, self.together = self.place.each, self.place.together
        self.workspace = functional.create_workspace(
            self.config,
            self.place.group,
            device=device,
            max_tokens=max(shape.num_tokens, 1),
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_experts=shape.num_experts,
            topk=shape.topk,
            shared_intermediate_size=shape.shared_intermediate_size,
        )
        self.placement = [shape.experts_on(r) for r in range(self.ep_size)]
        routed = [case.routed[p.start : p.stop] for p in self.placement]
        self.routed: tuple[Any, Any, Any] = (
            self.each([r.gate for r in routed]),
            self.each([r.up for r in routed]),
            self.each([r.down for r in routed]),
        )
        shared = case.shared
        self.shared: tuple[Any, Any, Any] = (
            (shared.gate[0], shared.up[0], shared.down[0]) if shared else (None, None, None)
        )
        self.x = self.each(case.x.split(lengths))
        self.weights = self.each(case.router_weights.split(lengths))
        self.scale = None
        if case.shared_scale is not None:
            self.scale = self.each(case.shared_scale.split(lengths))

    def schedule(self) -> Any:
        from mok import functional

        return functional.build_schedule(
            self.workspace,
            self.config,
            self.each(self.case.top_experts.split(self.lengths)),
            num_local_experts=self.each([len(p) for p in self.placement]),
        )

    def training(self, dy: Tensor, recompute: bool) -> tuple[Tensor, Gradients]:
        """The output and all gradients."""
        from mok import functional

        schedule, limit = self.schedule(), self.case.swiglu_limit
        output, context = functional.forward(
            self.config,
            self.workspace,
            schedule,
            self.x,
            self.weights,
            *self.shared,
            *self.routed,
            swiglu_limit=limit,
            shared_scale=self.scale,
        )
        assert context is not None
        if recompute:
            context = functional.recompute_forward_context(
                self.config,
                self.workspace,
                schedule,
                self.x,
                *self.shared[:2],
                *self.routed[:2],
                swiglu_limit=limit,
            )
        found = functional.backward(
            self.config,
            self.workspace,
            schedule,
            context,
            self.each(dy.split(self.lengths)),
            self.x,
            self.weights,
            *self.shared,
            *self.routed,
            swiglu_limit=limit,
            shared_scale=self.scale,
        )
        d_x, d_weights, *parts = found
        shared = None
        if self.case.shared is not None:
            shared = Experts(*(torch.stack(self.place.every(part)) for part in parts[3:6]))
        return self.together(output), Gradients(
            x=self.together(d_x),
            router_weights=self.together(d_weights),
            routed=Experts(*(self.together(part) for part in parts[:3])),
            shared=shared,
            shared_scale=self.together(parts[6]) if self.scale is not None else None,
        )
