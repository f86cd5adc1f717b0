"""The kernels of one layer, as specs: what the launch path asks for and ``mok compile`` lists."""

from __future__ import annotations

from mok.runtime.compile import KernelSpec


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


def token_sum_spec(arch: str, direct: bool, has_shared: bool) -> KernelSpec:
    """The fixed-order token sum; ``direct`` finds y through the schedule's ``route_row``, else in
    the slots that combine fills."""
    return KernelSpec.of(
        f"token_sum_{_path(direct)}",
        arch,
        "mok.kernels_cute.token_sum:TokenSumKernel",
        has_shared=has_shared,
        has_index=direct,
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
