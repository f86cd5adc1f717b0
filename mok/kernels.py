"""The kernels of one layer, as specs: what the launch path asks for and ``mok compile`` lists."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache

from mok.kernels_cute.machine import forward_pushes, machine_of
from mok.runtime.compile import KernelSpec

FORWARD = "mok.kernels_cute.forward:ForwardKernel"
BACKWARD = "mok.kernels_cute.backward.kernel:BackwardKernel"


@cache
def forward_spec(
    arch: str,
    direct: bool,
    save_context: bool = False,
    launch_control: bool = True,
    trace: bool = False,
    mxfp8: bool = False,
    wire: bool = False,
    limited: bool = False,
    pair: bool | None = None,
    push: bool | None = None,
) -> KernelSpec:
    """The forward megakernel; ``direct`` (one rank, BF16) gathers rows in place, without the ring.

    ``trace`` records begin and end of every task; ``mxfp8``: routed experts in MXFP8;
    ``wire``: x travels quantised; ``limited``: SwiGLU clamps at the call's limit; ``pair``: work in pairs
    of CTAs, None where the machine can; ``push``: False where comm workers shall combine results
    though the machine's tasks can send them.
    """
    name = f"forward_{_path(direct)}" + ("_save" if save_context else "")
    config = {"direct": direct, "save_context": save_context}
    if push is False and forward_pushes(arch, direct):
        name, config = f"{name}_combine", config | {"push": False}
    name, config = _variant(name, arch, config, mxfp8, wire, limited, pair)
    return _for_machine(name, arch, FORWARD, launch_control, trace, **config)


@cache
def recompute_spec(
    arch: str,
    direct: bool,
    launch_control: bool = True,
    trace: bool = False,
    mxfp8: bool = False,
    wire: bool = False,
    limited: bool = False,
    pair: bool | None = None,
) -> KernelSpec:
    """The kernel that rebuilds a forward call's saved context."""
    config = {"direct": direct, "save_context": True, "recompute": True}
    name = f"recompute_{_path(direct)}"
    name, config = _variant(name, arch, config, mxfp8, wire, limited, pair)
    return _for_machine(name, arch, FORWARD, launch_control, trace, **config)


@cache
def quantise_rows_spec(arch: str) -> KernelSpec:
    """Quantises a rank's tokens into its heap (MXFP8 on the wire)."""
    return KernelSpec.of("quantise_rows", arch, "mok.kernels_cute.quantise_rows:QuantiseRowsKernel")


@cache
def quantise_spec(
    arch: str, normal: bool, transposed: bool, expanded: bool, tiled: bool = True
) -> KernelSpec:
    """Quantises a stack of weights to MXFP8."""
    return KernelSpec.of(
        "quantise",
        arch,
        "mok.kernels_cute.quantise:QuantiseKernel",
        normal=normal,
        transposed=transposed,
        expanded=expanded,
        tiled=tiled,
    )


@cache
def scheduling_of(arch: str, launch_control: bool) -> str:
    """How a megakernel gets its next task: "clc" or "tickets"."""
    return machine_of(arch).scheduling[0 if launch_control else -1]


@cache
def stage_ids_spec(arch: str, ids_bits: int = 64) -> KernelSpec:
    """Copies a call's expert ids into the symmetric heap as int32."""
    return KernelSpec.of(
        "stage_ids", arch, "mok.kernels_cute.schedule.stage:StageIdsKernel", ids_bits=ids_bits
    )


@cache
def schedule_spec(arch: str) -> KernelSpec:
    """Count, scan and place."""
    return KernelSpec.of("schedule", arch, "mok.kernels_cute.schedule.build:ScheduleKernel")


@cache
def token_sum_spec(
    arch: str,
    direct: bool,
    has_shared: bool,
    ids_bits: int = 64,
    *,
    has_weights: bool = True,
    has_shared_scale: bool = False,
) -> KernelSpec:
    """The fixed-order token sum, of y or (without weights) of d_x.

    ``direct`` finds rows through the schedule's int32 ``route_row``, else in the routes' slots.
    ``has_shared_scale``: the shared expert's result has a factor per token.
    """
    return KernelSpec.of(
        ("token_sum" if has_weights else "dx_sum") + f"_{_path(direct)}",
        arch,
        "mok.kernels_cute.token_sum:TokenSumKernel",
        has_shared=has_shared,
        has_index=direct,
        ids_bits=32 if direct else ids_bits,
        has_weights=has_weights,
        has_shared_scale=has_shared_scale,
    )


@cache
def backward_spec(
    arch: str,
    direct: bool,
    grad_mode: str = "bf16",
    launch_control: bool = True,
    trace: bool = False,
    mxfp8: bool = False,
    wire: bool = False,
    limited: bool = False,
    pair: bool | None = None,
) -> KernelSpec:
    """The backward megakernel; ``grad_mode``: how weight gradients are written, one of "bf16",
    "fp32", "bf16_add" and "fp32_add" (added to what is there). Other arguments as forward's."""
    name = f"backward_{_path(direct)}_{grad_mode}"
    name, more = _variant(name, arch, {}, mxfp8, wire, limited, pair)
    return _for_machine(
        name, arch, BACKWARD, launch_control, trace, direct=direct, grad_mode=grad_mode, **more
    )


@cache
def plan_spec(arch: str) -> KernelSpec:
    """The tables of the backward program, from the schedule."""
    return _for_machine("plan", arch, "mok.kernels_cute.backward.plan_kernel:PlanKernel")


@cache
def router_grad_spec(arch: str, direct: bool, ids_bits: int = 64) -> KernelSpec:
    """Router-weight gradients [T, K] from backward's partials (``direct``), else from the slots."""
    return KernelSpec.of(
        f"router_grad_{_path(direct)}",
        arch,
        "mok.kernels_cute.router_grad:RouterGradKernel",
        has_index=direct,
        ids_bits=32 if direct else ids_bits,
    )


def forward_kernels(arch: str, has_shared: bool) -> list[KernelSpec]:
    """Every kernel that a forward call may launch, at EP = 1 and at EP > 1."""
    kernels = [stage_ids_spec(arch), schedule_spec(arch)]
    for direct in (True, False):
        kernels += [
            forward_spec(arch, direct),
            forward_spec(arch, direct, save_context=True),
            recompute_spec(arch, direct),
            token_sum_spec(arch, direct, has_shared),
        ]
    return kernels


def mxfp8_kernels(arch: str, has_shared: bool, grad_mode: str = "bf16") -> list[KernelSpec]:
    """Every kernel that the weights and calls in MXFP8 may launch; rows always pass the ring."""
    expanded = machine_of(arch).scaled_stages == 0
    kernels = [
        *(quantise_spec(arch, True, transposed, expanded) for transposed in (False, True)),
        quantise_rows_spec(arch),
        stage_ids_spec(arch),
        schedule_spec(arch),
        token_sum_spec(arch, False, has_shared),
        recompute_spec(arch, False, mxfp8=True),
        plan_spec(arch),
        router_grad_spec(arch, False),
        token_sum_spec(arch, False, has_shared, has_weights=False),
    ]
    for wire in (False, True):
        kernels += [
            forward_spec(arch, False, save, mxfp8=True, wire=wire) for save in (False, True)
        ]
        kernels.append(backward_spec(arch, False, grad_mode, mxfp8=True, wire=wire))
    return kernels


def backward_kernels(arch: str, has_shared: bool, grad_mode: str = "bf16") -> list[KernelSpec]:
    """Every kernel that a backward call may launch, at EP = 1 and at EP > 1."""
    kernels = [plan_spec(arch)]
    for direct in (True, False):
        kernels += [
            backward_spec(arch, direct, grad_mode),
            router_grad_spec(arch, direct),
            token_sum_spec(arch, direct, has_shared, has_weights=False),
        ]
    return kernels


def _for_machine(
    name: str,
    arch: str,
    factory: str,
    launch_control: bool = True,
    trace: bool = False,
    **config: Hashable,
) -> KernelSpec:
    if scheduling_of(arch, launch_control) != scheduling_of(arch, True):
        name += "_tickets"
        config["scheduling"] = scheduling_of(arch, launch_control)
    if trace:
        name, config = f"{name}_trace", {**config, "trace": True}
    # The kernel is built for a machine, so the architecture is also part of its configuration.
    return KernelSpec(name, arch, factory, tuple(sorted({"arch": arch, **config}.items())))


def _variant(
    name: str,
    arch: str,
    config: dict[str, bool],
    mxfp8: bool,
    wire: bool,
    limited: bool,
    pair: bool | None,
) -> tuple[str, dict[str, bool]]:
    """A kernel's name and configuration with MXFP8 experts, with MXFP8 on the wire, with a clamp, in pairs."""
    pairs = machine_of(arch).pairs and not mxfp8
    pair = pairs if pair is None else pair
    config = {**config, "limited": limited, "pair": pair}
    if pairs and not pair:
        name = f"{name}_single"
    if limited:
        name = f"{name}_limited"
    if mxfp8:
        name, config = f"{name}_mxfp8", {**config, "mxfp8": True}
    if wire:
        name, config = f"{name}_wire", {**config, "wire": True}
    return name, config


def _path(direct: bool) -> str:
    return "direct" if direct else "ring"
