"""The usual expert-parallel layer: all-to-all of rows, ``torch._grouped_mm``, all-to-all back.

Not a ``Program`` of the single-process bench: it belongs to a process group, see ``mok.tools.bench.ranks``.
Rows travel with ``all_to_all_single`` of exact sizes, which the host must know: one exchange of counts and
one wait for them a call, as in every layer of this kind.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import silu


class _Exchange(torch.autograd.Function):
    """Rows to other ranks; gradients the way back."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any
    ) -> Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        return exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        sent, received = ctx.sizes
        return exchange(grads[0].contiguous(), received, sent, ctx.group), None, None, None


def exchange(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    """``rows`` in order of their ranks, ``sent[r]`` of them to rank r; what came, in the same order."""
    found = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(found, rows, received, sent, group=group)
    return found


class NcclTorch:
    """One rank's share of the layer.

    Args:
        gate, up, down: this rank's experts, [El, I, H], [El, I, H], [El, H, I].
        experts: number of experts of all ranks; each rank holds the same number.
        group: a process group that can exchange tensors of this device.
    """

    name = "nccl-torch"

    def __init__(self, gate: Tensor, up: Tensor, down: Tensor, experts: int, group: Any) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.local = len(gate)
        if self.local * self.size != experts:
            raise ValueError(f"{experts} experts on {self.size} ranks: each must hold as many")
        self.gate_up = torch.cat((gate, up), dim=1).requires_grad_()
        self.down = down.detach().requires_grad_()
        self.bounds = torch.arange(self.local, device=gate.device)

    def __call__(self, x: Tensor, router_weights: Tensor, ids: Tensor) -> Tensor:
        """[T, H] for x [T, H], router_weights FP32 [T, K], ids [T, K] of all experts, none -1."""
        sorted_ids, order = ids.flatten().sort(stable=True)
        token = order // ids.shape[1]
        counts = torch.bincount(sorted_ids // self.local, minlength=self.size)
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts, group=self.group)
        sent, received = torch.stack((counts, incoming)).tolist()  # the host waits here
        rows = _Exchange.apply(x.index_select(0, token), sent, received, self.group)
        here = exchange(sorted_ids % self.local, sent, received, self.group)
        local_ids, local_order = here.sort(stable=True)
        ends = torch.searchsorted(local_ids, self.bounds, right=True, out_int32=True)
        rows = rows.index_select(0, local_order)
        gate, up = torch._grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        y = torch._grouped_mm(silu(gate) * up, self.down.transpose(1, 2), offs=ends)
        back = torch.empty_like(local_order).scatter_(
            0, local_order, torch.arange(len(local_order), device=x.device)
        )
        y = _Exchange.apply(y.index_select(0, back), received, sent, self.group)
        weights = router_weights.flatten().index_select(0, order).to(y.dtype)
        return torch.zeros_like(x).index_add(0, token, y * weights.unsqueeze(1))
