"""A case laid out over ranks, in a workspace that is made once: what checks and captures call the layer with."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mok import processes
from mok.config import Config
from mok.reference import Case

if TYPE_CHECKING:
    from mok.saved import ForwardContext, Schedule


class LaidOut:
    """The arguments of ``mok.functional`` for each local rank, and its calls.

    Args:
        case: inputs of all ranks.
        lengths: tokens of each rank; their number is EP.
        device: where the case's tensors lie.
        machine: what ``Config.suggest`` takes, where ``config`` is None.
        precision: of the routed experts, "bf16" or "mxfp8" (quantised here).

    Raises:
        MokError: what ``functional.create_workspace`` raises.
    """

    def __init__(
        self,
        case: Case,
        lengths: list[int],
        device: torch.device,
        machine: Any,
        config: Config | None = None,
        precision: str = "bf16",
    ) -> None:
        from mok import functional
        from mok.mxfp8 import mxfp8_quantize

        self.case, self.lengths = case, lengths
        ranks = len(lengths)
        shape = dataclasses.replace(case.shape, num_tokens=max(lengths, default=0), ep_size=ranks)
        self.config = config or Config.suggest(shape, machine, precision)
        self.place = processes.Place(ranks, device)
        each = self.place.each
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
            precision=precision,
        )
        self.placement = [shape.experts_on(r) for r in range(ranks)]
        parts = [case.routed[p.start : p.stop] for p in self.placement]
        routed: list[list[Any]] = [[part.gate, part.up, part.down] for part in parts]
        if precision == "mxfp8":
            routed = [[mxfp8_quantize(w) for w in part] for part in routed]
        self.routed = [each([weights[i] for weights in routed]) for i in range(3)]
        shared = case.shared
        self.shared = [shared.gate[0], shared.up[0], shared.down[0]] if shared else [None] * 3
        self.x = each(case.x.split(lengths))
        self.weights = each(case.router_weights.split(lengths))
        scale = case.shared_scale
        self.scale = None if scale is None else each(scale.split(lengths))

    def schedule(self) -> Schedule:
        """``build_schedule`` of the case's ids."""
        from mok import functional

        each = self.place.each
        return functional.build_schedule(
            self.workspace,
            self.config,
            each(self.case.top_experts.split(self.lengths)),
            num_local_experts=each([len(p) for p in self.placement]),
        )

    def forward(self, schedule: Schedule, save_context: bool) -> tuple[Any, ForwardContext | None]:
        """``forward``: (BF16 [T, H] per local rank, context)."""
        from mok import functional

        return functional.forward(
            self.config,
            self.workspace,
            schedule,
            *self._arguments(),
            save_context=save_context,
            shared_scale=self.scale,
        )

    def recompute(self, schedule: Schedule) -> ForwardContext:
        """``recompute_forward_context``."""
        from mok import functional

        return functional.recompute_forward_context(
            self.config,
            self.workspace,
            schedule,
            *(self.x, *self.shared[:2], *self.routed[:2], self.case.swiglu_limit),
        )

    def backward(self, schedule: Schedule, context: ForwardContext, dy: Tensor) -> tuple[Any, ...]:
        """``backward`` for the gradient ``dy`` of all ranks' outputs, BF16 [N, H]."""
        from mok import functional

        return functional.backward(
            self.config,
            self.workspace,
            schedule,
            context,
            self.place.each(dy.split(self.lengths)),
            *self._arguments(),
            shared_scale=self.scale,
        )

    def _arguments(self) -> tuple[Any, ...]:
        """From x to the limit, as forward and backward take them."""
        return (self.x, self.weights, *self.shared, *self.routed, self.case.swiglu_limit)
