"""The usual layer in torch: sort, gather, grouped matrix products, SwiGLU, index_add."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from mok.tools.bench.programs.base import Options, Program, Unavailable
from mok.tools.bench.work import Work


class TorchProgram(Program):
    """``torch._grouped_mm`` over tokens sorted by expert; backward is autograd's.

    Nothing waits for the GPU: group ends come from a search in the sorted ids, not from bincount.
    """

    packages = ("torch",)

    def __init__(self, name: str, work: Work, options: Options) -> None:
        super().__init__(name, work, options)
        if not hasattr(torch, "_grouped_mm"):
            raise Unavailable(f"torch {torch.__version__} has no _grouped_mm")
        self.gate_up = torch.cat((work.gate, work.up), dim=1).requires_grad_()
        # A view with its own gradient: the weights themselves stay plain for the other programs.
        self.down = work.down.detach().requires_grad_()
        self.inputs = [
            (s.x.detach().requires_grad_(), s.router_weights.detach().requires_grad_(), s.dy)
            for s in work.sets
        ]
        self.experts = torch.arange(work.bench.shape.num_experts, device=work.device)

    def _layer(self, x: Tensor, router_weights: Tensor) -> Tensor:
        ids = self.work.ids
        sorted_ids, order = ids.flatten().sort(stable=True)
        ends = torch.searchsorted(sorted_ids, self.experts, right=True, out_int32=True)
        token = order // ids.shape[1]
        # index_select, not x[token]: its gradient is an index_add instead of a sort.
        rows = x.index_select(0, token)
        both = torch._grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends)
        gate, up = both.chunk(2, dim=-1)
        y = torch._grouped_mm(silu(gate) * up, self.down.transpose(1, 2), offs=ends)
        weights = router_weights.flatten().index_select(0, order).to(y.dtype)
        return torch.zeros_like(x).index_add(0, token, y * weights.unsqueeze(1))

    def forward(self, index: int) -> Tensor:
        x, router_weights, _ = self.inputs[index % len(self.inputs)]
        with torch.no_grad():
            return self._layer(x, router_weights)

    def forward_training(self, index: int) -> tuple[Tensor, Any]:
        x, router_weights, _ = self.inputs[index % len(self.inputs)]
        output = self._layer(x, router_weights)
        return output, output

    def backward(self, index: int, saved: Any, keep: bool = False) -> tuple[Tensor, ...]:
        x, router_weights, dy = self.inputs[index % len(self.inputs)]
        return torch.autograd.grad(
            saved, (x, router_weights, self.gate_up, self.down), dy, retain_graph=keep
        )

    def gradients(self, raw: Any) -> dict[str, Tensor]:
        d_x, d_weights, d_gate_up, d_down = raw
        gate, up = d_gate_up.chunk(2, dim=1)
        return {"x": d_x, "router_weights": d_weights, "gate": gate, "up": up, "down": d_down}
