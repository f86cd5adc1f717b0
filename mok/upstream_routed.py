"""The reference system's calls without a shared expert, as a Megatron-LM adapter makes them.

``jupiterepoch/Megatron-LM`` (97cbd073c60a) keeps its own shared expert and calls these of the copy of the
reference system that it brings along. They are the plain calls with None for the shared expert.
"""

from __future__ import annotations

from torch import Tensor

from mok import upstream
from mok.upstream import MoKConfig, MoKForwardContext, MoKSchedule, MoKWorkspace, RoutedWeight


def forward_routed(
    config: MoKConfig,
    workspace: MoKWorkspace,
    schedule: MoKSchedule,
    x: Tensor,
    router_weights: Tensor,
    routed_gate_weights: RoutedWeight,
    routed_up_weights: RoutedWeight,
    routed_down_weights: RoutedWeight,
    swiglu_limit: float | None = None,
) -> tuple[Tensor, MoKForwardContext]:
    """``forward`` of the routed experts alone (collective)."""
    return upstream.forward(
        config, workspace, schedule, x, router_weights, None, None, None, routed_gate_weights,
        routed_up_weights, routed_down_weights, swiglu_limit,
    )  # fmt: skip


def recompute_forward_context_routed(
    config: MoKConfig,
    workspace: MoKWorkspace,
    schedule: MoKSchedule,
    x: Tensor,
    routed_gate_weights: RoutedWeight,
    routed_up_weights: RoutedWeight,
    swiglu_limit: float | None = None,
) -> MoKForwardContext:
    """``recompute_forward_context`` of the routed experts alone (collective)."""
    return upstream.recompute_forward_context(
        config, workspace, schedule, x, None, None, routed_gate_weights, routed_up_weights,
        swiglu_limit,
    )  # fmt: skip


def backward_routed(
    config: MoKConfig,
    workspace: MoKWorkspace,
    schedule: MoKSchedule,
    forward_context: MoKForwardContext,
    grad_output: Tensor,
    x: Tensor,
    router_weights: Tensor,
    routed_gate_weights: RoutedWeight,
    routed_up_weights: RoutedWeight,
    routed_down_weights: RoutedWeight,
    swiglu_limit: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(d_x, d_router_weights, d_routed gate, up, down) (collective)."""
    found = upstream.backward(
        config, workspace, schedule, forward_context, grad_output, x, router_weights, None, None,
        None, routed_gate_weights, routed_up_weights, routed_down_weights, swiglu_limit,
    )  # fmt: skip
    return found[0], found[1], found[2], found[3], found[4]
