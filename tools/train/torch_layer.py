"""The layer in plain torch, with the parameters and the router of ``MoELayer``: what runs are compared with."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from mok.layer import MoELayer
from mok.router import linear_fp32


class TorchMoELayer(MoELayer):
    """``MoELayer`` of one rank with experts as torch matrix products in BF16, one expert after another.

    Same arguments, parameters and initial values; runs wherever torch does. Repeats may differ in the
    last bits on a GPU: tokens are added up by atomics.
    """

    def _compute(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        scale = None
        if self.shared_scale is not None:
            scale = linear_fp32(x, self.shared_scale[None])[:, 0].sigmoid()
        x, topk = x.to(torch.bfloat16), self.spec.topk
        weights, ids = weights.reshape(-1, topk).float(), ids.reshape(-1, topk)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        if self.shared_gate is not None:
            assert self.shared_up is not None and self.shared_down is not None
            y = self._ffn(x, self.shared_gate, self.shared_up, self.shared_down).float()
            out = out + (y if scale is None else y * scale[:, None])
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat.clamp(min=-1) + 1, minlength=1 + self.spec.num_experts)
        for expert, routes in enumerate(order.split(counts.tolist())[1:]):  # the first are dropped
            token = routes // topk
            y = self._ffn(
                x[token],
                self.routed_gate[expert],
                self.routed_up[expert],
                self.routed_down[expert],
            )
            out = out.index_add(0, token, y.float() * weights.flatten()[routes, None])
        return out.to(torch.bfloat16)

    def _ffn(self, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        gate, up, down = (w.to(torch.bfloat16) for w in (gate, up, down))
        with torch.autocast(x.device.type, enabled=False):
            g, u = (x @ gate.t()).float(), (x @ up.t()).float()
            if self.swiglu_limit is not None:
                g = g.clamp(max=self.swiglu_limit)
                u = u.clamp(-self.swiglu_limit, self.swiglu_limit)
            return (silu(g) * u).to(torch.bfloat16) @ down.t()
