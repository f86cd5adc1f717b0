"""The kernels of one layer, as specs: what the launch path asks for and ``mok compile`` lists."""

from __future__ import annotations

from mok.runtime.compile import KernelSpec


def forward_spec(arch: str, direct: bool, save_context: bool = False) -> KernelSpec:
    """The forward megakernel; ``direct`` (one rank) gathers rows in place, without the ring."""
    return KernelSpec.of(
        f"forward_{_path(direct)}" + ("_save" if save_context else ""),
        arch,
        "mok.kernels_cute.forward:ForwardKernel",
        direct=direct,
        save_context=save_context,
    )


def recompute_spec(arch: str, direct: bool) -> KernelSpec:
    """The kernel that rebuilds a forward call's saved context."""
    return KernelSpec.of(
        f"recompute_{_path(direct)}",
        arch,
        "mok.kernels_cute.forward:ForwardKernel",
        direct=direct,
        save_context=True,
        recompute=True,
    )


def stage_ids_spec(arch: str, ids_bits: int = 64) -> KernelSpec:
    """Copies a call's expert ids into the symmetric heap as int32."""
    return KernelSpec.of(
        "stage_ids", arch, "mok.kernels_cute.schedule.stage:StageIdsKernel", ids_bits=ids_bits
    )


def schedule_spec(arch: str) -> KernelSpec:
    """Count, scan and place."""
    return KernelSpec.of("schedule", arch, "mok.kernels_cute.schedule.build:ScheduleKernel")


def token_sum_spec(
    arch: str,
    direct: bool,
    has_shared: bool,
    ids_bits: int = 32,
    *,
    has_weights: bool = True,
    has_shared_scale: bool = False,
) -> KernelSpec:
    """The fixed-order token sum; ``direct`` finds y through the schedule's ``route_row``, else in
    the slots that combine fills."""
    return KernelSpec.of(
        f"token_sum_{_path(direct)}",
        arch,
        "mok.kernels_cute.token_sum:TokenSumKernel",
        has_shared=has_shared,
        has_index=direct,
        ids_bits=ids_bits,
        **({} if has_weights else {"has_weights": False}),
        **({"has_shared_scale": True} if has_shared_scale else {}),
    )


def backward_spec(arch: str, direct: bool, grad_mode: str = "bf16") -> KernelSpec:
    """The backward megakernel; ``grad_mode`` as ``BackwardKernel``."""
    return KernelSpec.of(
        f"backward_{_path(direct)}_{grad_mode}",
        arch,
        "mok.kernels_cute.backward.kernel:BackwardKernel",
        direct=direct,
        grad_mode=grad_mode,
    )


def plan_spec(arch: str) -> KernelSpec:
    """The routing-dependent tables of the backward program."""
    return KernelSpec.of("plan", arch, "mok.kernels_cute.backward.plan_kernel:PlanKernel")


def router_grad_spec(arch: str, direct: bool, ids_bits: int = 32) -> KernelSpec:
    """Gradients of the router weights from their partials (direct) or slots."""
    return KernelSpec.of(
        f"router_grad_{_path(direct)}",
        arch,
        "mok.kernels_cute.router_grad:RouterGradKernel",
        has_index=direct,
        ids_bits=ids_bits,
    )


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


def _path(direct: bool) -> str:
    return "direct" if direct else "ring"
