"""The router: scores, top-k and weights, in plain torch. The kernels take what it returns."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mok.errors import ShapeError

Score = Literal["softmax", "sigmoid"]


class LinearFP32(torch.autograd.Function):
    """x · weightᵀ in FP32, of which only x and weight as they are, not FP32 copies, are kept.

    Args: x [T, H] and weight [n, H], of any floating dtype. Returns FP32 [T, n]. Gradients have the
    dtypes of x and weight.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.float() @ weight.float().t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return (grad @ weight.float()).to(x.dtype), (grad.t() @ x.float()).to(weight.dtype)


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """``LinearFP32``, whatever autocast says."""
    with torch.autocast(x.device.type, enabled=False):
        return LinearFP32.apply(x, weight)


class Router(nn.Module):
    """Chooses each token's experts and weights.

    scores = softmax or sigmoid of x·weightᵀ. The K experts with the highest scores (plus the expert
    bias, if any) are chosen; their weights are their scores, bias left out, divided by their sum if
    ``normalize``, times ``scale``. With groups, only the experts of the ``topk_groups`` best groups
    can be chosen, a group's rank being the sum of its two best experts (DeepSeek-V3,
    arXiv 2412.19437, section 2.1.2).

    Args:
        hidden_size, num_experts, topk: H, E, K; K ≤ E.
        score: what turns logits into scores.
        normalize: whether a token's weights sum to ``scale``.
        expert_bias: keep an FP32 [E] buffer that is added to the scores for the choice only, and
            count routes, for ``update_expert_bias``.
        num_groups, topk_groups: E is split into equal groups.
        fp32: compute logits in FP32; else in x's dtype.

    ``forward(x [T, H])`` returns (logits FP32 [T, E], weights FP32 [T, K], ids int64 [T, K]).

    Raises:
        ShapeError: sizes that do not fit together.
    """

    expert_bias: Tensor | None
    routed: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        topk: int,
        *,
        score: Score = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        expert_bias: bool = False,
        num_groups: int = 1,
        topk_groups: int = 1,
        fp32: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if score not in ("softmax", "sigmoid"):
            raise ShapeError("score must be 'softmax' or 'sigmoid'", repr(score))
        if num_experts % num_groups or not 1 <= topk_groups <= num_groups:
            raise ShapeError(
                f"groups must divide the {num_experts} experts, and topk_groups be at most that",
                f"num_groups {num_groups}, topk_groups {topk_groups}",
            )
        if not 1 <= topk <= topk_groups * (num_experts // num_groups):
            raise ShapeError("topk must be at most the number of experts to choose from", topk)
        self.hidden_size, self.num_experts, self.topk = hidden_size, num_experts, topk
        self.score, self.normalize, self.scale, self.fp32 = score, normalize, scale, fp32
        self.num_groups, self.topk_groups = num_groups, topk_groups
        self.weight = nn.Parameter(
            torch.empty(num_experts, hidden_size, device=device, dtype=dtype)
        )
        bias = torch.zeros(num_experts, device=device) if expert_bias else None
        count = torch.zeros(num_experts, dtype=torch.int64, device=device) if expert_bias else None
        self.register_buffer("expert_bias", bias)
        self.register_buffer("routed", count, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in ±1/sqrt(H), as nn.Linear."""
        if not self.weight.is_meta:
            nn.init.uniform_(self.weight, -(self.hidden_size**-0.5), self.hidden_size**-0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.fp32:
            logits = linear_fp32(x, self.weight)
        else:
            logits = nn.functional.linear(x, self.weight.to(x.dtype)).float()
        scores = logits.softmax(dim=1) if self.score == "softmax" else logits.sigmoid()
        ids = self.choose(scores.detach())
        weights = scores.gather(1, ids)
        if self.normalize:
            # Sigmoid scores may all be 0; the weights are then 0, not NaN.
            weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
        if self.scale != 1:
            weights = weights * self.scale
        if self.routed is not None and self.training:
            with torch.no_grad():
                self.routed.add_(count_routes(ids, self.num_experts))
        return logits, weights, ids

    def choose(self, scores: Tensor) -> Tensor:
        """Ids int64 [T, K] from scores [T, E]."""
        if self.expert_bias is not None:
            scores = scores + self.expert_bias
        if self.topk_groups < self.num_groups:
            groups = scores.unflatten(1, (self.num_groups, -1))
            rank = groups.topk(min(2, groups.shape[2]), dim=2).values.sum(dim=2)
            best = rank.topk(self.topk_groups, dim=1, sorted=False).indices
            outside = torch.ones_like(rank, dtype=torch.bool).scatter(1, best, False)
            scores = groups.masked_fill(outside[:, :, None], -math.inf).flatten(1)
        return scores.topk(self.topk, dim=1).indices

    @torch.no_grad()
    def update_expert_bias(self, rate: float = 1e-3, process_group: Any = None) -> None:
        """Raise the bias of experts with fewer routes than the mean by ``rate``, lower the others'.

        Auxiliary-loss-free load balancing (arXiv 2408.15664). Call it after each optimizer step; it
        uses the routes of training forwards since the last call (a checkpointed forward counts
        twice, all experts alike).

        Args:
            process_group: the torch.distributed group over which tokens are split; routes are
                summed over it.
        """
        if self.expert_bias is None or self.routed is None:
            raise ShapeError("update_expert_bias needs a router with expert_bias", "none")
        if process_group is not None:
            torch.distributed.all_reduce(self.routed, group=process_group)
        mean = self.routed.double().mean()
        self.expert_bias.add_(torch.sign(mean - self.routed).to(self.expert_bias), alpha=rate)
        self.routed.zero_()

    def extra_repr(self) -> str:
        return (
            f"{self.hidden_size}, experts={self.num_experts}, topk={self.topk}, {self.score}, "
            f"normalize={self.normalize}, scale={self.scale}"
        )


def count_routes(ids: Tensor, num_experts: int) -> Tensor:
    """Routes of each expert, int64 [E], without waiting for the GPU. Ids are in 0…E-1."""
    # Unlike bincount this needs no size from the device; integers add up exactly in any order.
    flat = ids.reshape(-1)
    return flat.new_zeros(num_experts).index_add_(0, flat, torch.ones_like(flat))
