"""The kernels of one layer, as specs: what the launch path asks for and ``mok compile`` lists."""

from __future__ import annotations

from mok.runtime.compile import KernelSpec


def forward_spec(arch: str, direct: bool) -> KernelSpec:
    """The forward megakernel; ``direct`` (one rank) gathers rows in place, without the ring."""
    name = "forward_direct" if direct else "forward_ring"
    return KernelSpec.of(name, arch, "mok.kernels_cute.forward:ForwardKernel", direct=direct)


def stage_ids_spec(arch: str) -> KernelSpec:
    """Copies a call's expert ids (int64) into the symmetric heap."""
    return KernelSpec.of("stage_ids", arch, "mok.kernels_cute.schedule.stage:StageIdsKernel")


def schedule_spec(arch: str) -> KernelSpec:
    """Count, scan and place."""
    return KernelSpec.of("schedule", arch, "mok.kernels_cute.schedule.build:ScheduleKernel")


def token_sum_spec(arch: str, has_shared: bool, has_index: bool) -> KernelSpec:
    """The fixed-order token sum; ``has_index`` reads y through ``route_row`` (one rank)."""
    return KernelSpec.of(
        "token_sum",
        arch,
        "mok.kernels_cute.token_sum:TokenSumKernel",
        has_shared=has_shared,
        has_index=has_index,
    )


def forward_kernels(arch: str, has_shared: bool) -> list[KernelSpec]:
    """Every kernel that a forward call may launch, at EP = 1 and at EP > 1."""
    return [
        stage_ids_spec(arch),
        schedule_spec(arch),
        forward_spec(arch, direct=True),
        token_sum_spec(arch, has_shared, has_index=True),
        forward_spec(arch, direct=False),
        token_sum_spec(arch, has_shared, has_index=False),
    ]
