"""The kernels of one layer, as specs: what the launch path asks for and ``mok compile`` lists."""

from __future__ import annotations

from mok.runtime.compile import KernelSpec

BACKWARD_ARCHS = ("sm_90a",)
"""Architectures with a backward kernel."""


def forward_spec(arch: str, direct: bool) -> KernelSpec:
    """The forward megakernel; ``direct`` (one rank) gathers rows in place, without the ring."""
    return KernelSpec.of(
        f"forward_{_path(direct)}",
        arch,
        "mok.kernels_cute.forward:ForwardKernel",
        direct=direct,
    )


def stage_ids_spec(arch: str) -> KernelSpec:
    """Copies a call's expert ids (int64) into the symmetric heap."""
    return KernelSpec.of("stage_ids", arch, "mok.kernels_cute.schedule.stage:StageIdsKernel")


def schedule_spec(arch: str) -> KernelSpec:
    """Count, scan and place."""
    return KernelSpec.of("schedule", arch, "mok.kernels_cute.schedule.build:ScheduleKernel")


def token_sum_spec(arch: str, direct: bool, has_shared: bool, gated: bool = False) -> KernelSpec:
    """The fixed-order token sum; ``direct`` finds y through the schedule's ``route_row``, else in
    the slots that combine fills. ``gated``: the shared expert's result has a factor per token."""
    return _token_sum(
        f"token_sum_{_path(direct)}", arch, direct, has_shared, has_shared_scale=gated
    )


def backward_spec(arch: str, direct: bool, grad_mode: str = "bf16") -> KernelSpec:
    """The backward megakernel; ``grad_mode``: how weight gradients are written, one of "bf16",
    "fp32", "bf16_add" and "fp32_add" (added to what is there)."""
    return KernelSpec.of(
        f"backward_{_path(direct)}",
        arch,
        "mok.kernels_cute.backward.kernel:BackwardKernel",
        direct=direct,
        grad_mode=grad_mode,
    )


def plan_spec(arch: str) -> KernelSpec:
    """The tables of the backward program, from the schedule."""
    return KernelSpec.of("plan", arch, "mok.kernels_cute.backward.plan_kernel:PlanKernel")


def router_grad_spec(arch: str, direct: bool) -> KernelSpec:
    """Router-weight gradients [T, K] from backward's partials (``direct``), else from the slots."""
    return KernelSpec.of(
        f"router_grad_{_path(direct)}",
        arch,
        "mok.kernels_cute.router_grad:RouterGradKernel",
        has_index=direct,
    )


def dx_sum_spec(arch: str, direct: bool, has_shared: bool) -> KernelSpec:
    """The token sum of backward: gradients of x, which carry their router weights already."""
    return _token_sum(f"dx_sum_{_path(direct)}", arch, direct, has_shared, has_weights=False)


def forward_kernels(arch: str, has_shared: bool) -> list[KernelSpec]:
    """Every kernel that a forward call may launch, at EP = 1 and at EP > 1."""
    return [
        stage_ids_spec(arch),
        schedule_spec(arch),
        forward_spec(arch, direct=True),
        token_sum_spec(arch, True, has_shared),
        forward_spec(arch, direct=False),
        token_sum_spec(arch, False, has_shared),
    ]


def backward_kernels(arch: str, has_shared: bool, grad_mode: str = "bf16") -> list[KernelSpec]:
    """Every kernel that a backward call may launch; none where backward does not exist yet."""
    if arch not in BACKWARD_ARCHS:
        return []
    return [
        plan_spec(arch),
        backward_spec(arch, True, grad_mode),
        router_grad_spec(arch, True),
        dx_sum_spec(arch, True, has_shared),
        backward_spec(arch, False, grad_mode),
        router_grad_spec(arch, False),
        dx_sum_spec(arch, False, has_shared),
    ]


def _token_sum(name: str, arch: str, direct: bool, has_shared: bool, **flags: bool) -> KernelSpec:
    return KernelSpec.of(
        name,
        arch,
        "mok.kernels_cute.token_sum:TokenSumKernel",
        has_shared=has_shared,
        has_index=direct,
        **flags,
    )


def _path(direct: bool) -> str:
    return "direct" if direct else "ring"
