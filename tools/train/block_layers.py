"""The MoE layers of the step benchmark that are not ours: torch's usual pipeline, and SonicMoE."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from mok.layer import MoELayer
from mok.tools.bench.programs import sonic, sonic_configs
from mok.tools.bench.programs.base import Unavailable, interleaved
from mok.tools.bench.timing import CudaClock, HostClock, reason_of

VARIANTS = 3  # SonicMoE's known-good tile configurations that are tried for each shape


class GroupedMoELayer(MoELayer):
    """``MoELayer`` of one rank, without a shared expert, as the usual torch: sort, ``_grouped_mm``, index_add."""

    def _compute(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        x, topk = x.to(torch.bfloat16), self.spec.topk
        weights, ids = weights.reshape(-1, topk), ids.reshape(-1, topk)
        sorted_ids, order = ids.flatten().sort(stable=True)
        experts = torch.arange(self.spec.num_experts, device=x.device)
        ends = torch.searchsorted(sorted_ids, experts, right=True, out_int32=True)
        token = order // topk
        rows = x.index_select(0, token)
        gate = torch._grouped_mm(rows, self.routed_gate.transpose(1, 2), offs=ends)
        up = torch._grouped_mm(rows, self.routed_up.transpose(1, 2), offs=ends)
        y = torch._grouped_mm(silu(gate) * up, self.routed_down.transpose(1, 2), offs=ends)
        scale = weights.flatten().index_select(0, order).to(y.dtype)
        return torch.zeros_like(x).index_add(0, token, y * scale.unsqueeze(1))


class SonicMoELayer(MoELayer):
    """``MoELayer`` of one rank, without a shared expert, on SonicMoE's kernels.

    Same router and initial values; gate and up are one parameter [E, 2I, H] with interleaved rows, as its
    documentation asks.

    Raises:
        Unavailable: it is not installed, or not the release that this was written for.
    """

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.library = sonic.load(None, False)
        on_gpu = self.routed_down.is_cuda
        chooser(CudaClock(self.routed_down.device) if on_gpu else HostClock())
        both = interleaved(self.routed_gate.detach(), self.routed_up.detach(), 1)
        del self.routed_gate, self.routed_up
        self.routed_both = nn.Parameter(both)

    def _compute(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        topk = self.spec.topk
        w1, w2 = self.routed_both.permute(1, 2, 0), self.routed_down.permute(1, 2, 0)
        return sonic.layer(
            self.library, x.to(torch.bfloat16), w1, w2, ids.reshape(-1, topk).int(),
            weights.reshape(-1, topk).float(), self.spec.num_experts, inference=False,
        )  # fmt: skip


_chooser: sonic_configs.Chooser | None = None


def chooser(clock: Any) -> None:
    """Put the chooser of tile configurations in place, once: it stands for all layers."""
    global _chooser
    if _chooser is None:
        try:
            _chooser = sonic_configs.install(clock, VARIANTS)
        except (ImportError, AttributeError, TypeError) as error:
            raise Unavailable(reason_of(error)) from error


def close() -> None:
    """Put SonicMoE's own entry points back."""
    global _chooser
    if _chooser is not None:
        _chooser.uninstall()
        _chooser = None
