"""How peers bring tokens to experts and back: NCCL, DeepEP and HybridEP, each differentiable.

A transport gives rows in the order of the rank's experts, each expert's rows padded with zeros to a multiple
of ``align``: what grouped GEMMs take. Facts about the other libraries' calls: DeepEP 2 (``ElasticBuffer``),
Megatron-Core's ``fused_a2a`` over HybridEP.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mok.tools.bench.programs.nccl_torch import _Exchange, exchange
from mok.tools.bench.published.share import Share, Unavailable


class Arrived(NamedTuple):
    """Rows at their experts.

    Attributes:
        rows: BF16 [R, H].
        weights: FP32 [R], where the experts' side applies the router's weights; else None.
        splits: rows of each local expert, padded.
        handle: for the way back.
    """

    rows: Tensor
    weights: Tensor | None
    splits: list[int]
    handle: Any


class Nccl:
    """``all_to_all_single`` of exact sizes; the host waits once for the counts."""

    packages = ("nvidia-nccl-cu13",)

    def __init__(self, share: Share, align: int) -> None:
        self.layer, self.group, self.align = share.layer, share.group, align

    def send(self, x: Tensor, router: Tensor, ids: Tensor) -> Arrived:
        local, size, align = self.layer.local, self.layer.ep, self.align
        sorted_ids, order = ids.flatten().sort(stable=True)
        token = order // ids.shape[1]
        counts = torch.bincount(sorted_ids, minlength=local * size)
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts, group=self.group)
        by_rank = torch.stack((counts.view(size, local).sum(1), incoming.view(size, local).sum(1)))
        numbers = torch.cat((by_rank.flatten(), incoming.view(size, local).sum(0))).tolist()
        sent, received, mine = numbers[:size], numbers[size : 2 * size], numbers[2 * size :]
        rows = _Exchange.apply(x.index_select(0, token), sent, received, self.group)
        here = exchange(sorted_ids % local, sent, received, self.group)
        order_here = here.argsort(stable=True)
        splits = [-(-n // align) * align for n in mine]
        place, start, first = torch.empty_like(order_here), 0, 0
        for n, padded in zip(mine, splits, strict=True):
            place[start : start + n] = torch.arange(first, first + n, device=place.device)
            start, first = start + n, first + padded
        # Row i of what arrived goes to slot[i]; other slots are padding.
        slot = torch.empty_like(place).scatter_(0, order_here, place)
        padded_rows = rows.new_zeros(first, rows.shape[1]).index_copy(0, slot, rows)
        return Arrived(padded_rows, None, splits, (slot, order, token, sent, received, router, x))

    def back(self, y: Tensor, handle: Any) -> Tensor:
        slot, order, token, sent, received, router, x = handle
        y = _Exchange.apply(y.index_select(0, slot), received, sent, self.group)
        weights = router.flatten().index_select(0, order).to(y.dtype)
        return torch.zeros_like(x).index_add(0, token, y * weights.unsqueeze(1))


# -------------------------------------------------------------------- DeepEP


class _DeepSend(torch.autograd.Function):
    """Dispatch into expert order; its gradient is a combine."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, router: Tensor, ids: Tensor, deep: DeepEp) -> Any:  # type: ignore[override]
        layer = deep.layer
        rows, _, weights, handle, _ = deep.buffer.dispatch(
            x, topk_idx=ids, topk_weights=router, num_experts=layer.experts,
            expert_alignment=deep.align, do_expand=True, do_zero_padding=True,
        )  # fmt: skip
        ctx.deep, ctx.handle = deep, handle
        deep.handle = handle
        return rows, weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # type: ignore[override]
        rows, weights = grads
        x, router, _ = ctx.deep.buffer.combine(
            rows.contiguous(), handle=ctx.handle, topk_weights=weights.float().contiguous()
        )
        return x, router, None, None


class _DeepBack(torch.autograd.Function):
    """Combine; its gradient is a dispatch along the same ways."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, deep: DeepEp, handle: Any) -> Tensor:  # type: ignore[override]
        ctx.deep, ctx.handle = deep, handle
        found: Tensor = deep.buffer.combine(y, handle=handle)[0]
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # type: ignore[override]
        rows = ctx.deep.buffer.dispatch(
            grads[0].contiguous(), handle=ctx.handle, do_expand=True, do_zero_padding=True
        )[0]
        return rows, None, None


class DeepEp:
    """DeepEP's ``ElasticBuffer`` with rows expanded to expert order on arrival."""

    packages = ("deep_ep", "deep-ep")

    def __init__(self, share: Share, align: int) -> None:
        try:
            import deep_ep
        except ImportError as error:
            raise Unavailable(f"DeepEP is not installed ({error})") from error
        if not hasattr(deep_ep, "ElasticBuffer"):
            raise Unavailable("this DeepEP has no ElasticBuffer: version 2 or newer is needed")
        self.layer, self.align, self.handle = share.layer, align, None
        self.buffer = deep_ep.ElasticBuffer(
            share.group, num_max_tokens_per_rank=share.layer.tokens, hidden=share.layer.hidden,
            num_topk=share.layer.topk,
        )  # fmt: skip

    def send(self, x: Tensor, router: Tensor, ids: Tensor) -> Arrived:
        rows, weights = _DeepSend.apply(x, router, ids, self)
        handle: Any = self.handle
        counts = handle.num_recv_tokens_per_expert_list
        splits = [-(-int(n) // self.align) * self.align for n in counts]
        if sum(splits) != rows.shape[0]:
            raise RuntimeError(f"DeepEP gave {rows.shape[0]} rows for experts of {splits}")
        return Arrived(rows, weights, splits, handle)

    def back(self, y: Tensor, handle: Any) -> Tensor:
        found: Tensor = _DeepBack.apply(y, self, handle)
        return found


# ------------------------------------------------------------------ HybridEP


class HybridEp:
    """HybridEP as Megatron-Core calls it; dispatch and combine are differentiable there."""

    packages = ("megatron-core", "deep_ep", "deep-ep")

    def __init__(self, share: Share, align: int) -> None:
        try:
            from megatron.core.transformer.moe import fused_a2a
        except ImportError as error:
            raise Unavailable(f"Megatron-Core is not installed ({error})") from error
        if getattr(fused_a2a, "hybrid_ep_dispatch", None) is None:
            raise Unavailable("this DeepEP has no HybridEP (the branch hybrid-ep has it)")
        if share.layer.ep < 2:
            raise Unavailable("HybridEP needs two ranks or more")
        if hasattr(fused_a2a, "reset_hybrid_ep_buffer"):  # one for all layers: of another's sizes
            fused_a2a.reset_hybrid_ep_buffer()
        self.calls, self.layer, self.group = fused_a2a, share.layer, share.group
        self.pad = align if align > 1 else None

    def send(self, x: Tensor, router: Tensor, ids: Tensor) -> Arrived:
        zeros = router.new_zeros(len(ids), self.layer.experts)
        probabilities = zeros.scatter(1, ids, router)
        chosen = torch.zeros_like(zeros, dtype=torch.bool).scatter_(1, ids, True)
        rows, weights, _, counts, handle = self.calls.hybrid_ep_dispatch(
            x=x, routing_map=chosen, probs=probabilities, group=self.group,
            num_local_experts=self.layer.local, pad_multiple=self.pad,
        )  # fmt: skip
        splits = counts.tolist() if isinstance(counts, Tensor) else list(counts)
        return Arrived(rows, weights, splits, handle)

    def back(self, y: Tensor, handle: Any) -> Tensor:
        found: Tensor = self.calls.hybrid_ep_combine(
            x=y, handle=handle, num_permuted_tokens=y.shape[0], pad_multiple=self.pad
        )
        return found
