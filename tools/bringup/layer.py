"""The rungs of the layer on one GPU: both kernels, both precisions, and the bits.

Inputs are made on the CPU from a seed and are small, so that the emulator can be given the same ones; on a
GPU a model's shape follows.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mok.backends import lay_out, machine
from mok.config import Config, Shape
from mok.reference import (
    BF16_LIMIT,
    FP32_LIMIT,
    GRADIENT_LIMIT,
    MXFP8_LIMIT,
    Case,
    Gradients,
    backward_loop,
    backward_oracle,
    backward_reference,
    forward_loop,
    forward_oracle,
    forward_reference,
    integer_case,
    integer_gradient,
    random_case,
    random_gradient,
)
from mok.tools.bringup.context import NotHere

if TYPE_CHECKING:
    from mok.laid_out import LaidOut
    from mok.tools.bringup.context import Context

SMALL = Shape(72, 192, 128, 5, 2, shared_intermediate_size=64)
SCALED = Shape(72, 256, 128, 3, 2, shared_intermediate_size=64)
MODEL, MODEL_TOKENS = "qwen3-30b-a3b", 4096  # on a GPU
LAYER_GRADIENT_LIMIT = 8e-2  # of MXFP8 gradients against FP32


def forward(ctx: Context) -> str:
    """Integers exactly; on a GPU also a model's shape."""
    return _forward(ctx, SMALL, "bf16")


def forward_mxfp8(ctx: Context) -> str:
    """The same in MXFP8, random values against the quantised reference."""
    return _forward(ctx, SCALED, "mxfp8")


def backward(ctx: Context) -> str:
    """Every gradient of integers exactly; on a GPU also of a model's shape."""
    case = integer_case(SMALL, kind="dropped", seed=ctx.seed)
    dy = integer_gradient(case, seed=ctx.seed)
    _, found = trained(ctx, case, dy)
    expected = backward_loop(case, dy).named()
    for name, value in found.named().items():
        ctx.compare(name, value, expected[name])
    text = f"{len(expected)} gradients exact"
    if ctx.on_gpu:
        case = _on_gpu(_model_case(ctx), ctx)
        dy = random_gradient(case, seed=ctx.seed)
        _, found = trained(ctx, case, dy)
        expected = backward_oracle(case, dy).named()
        for name, value in found.named().items():
            ctx.compare(f"{name} of {MODEL}", value, expected[name], GRADIENT_LIMIT)
        text += f"; {MODEL} within {GRADIENT_LIMIT:.1e}"
    return text


def backward_mxfp8(ctx: Context) -> str:
    """Every gradient of random values against the quantised reference and against FP32."""
    absent = no_mxfp8_backward(ctx.arch)
    if absent:
        raise NotHere(absent)
    case = random_case(SCALED, seed=ctx.seed)
    dy = random_gradient(case, seed=ctx.seed)
    _, found = trained(ctx, case, dy, precision="mxfp8")
    quantised = backward_reference(case, dy, precision="mxfp8").named()
    exact = backward_loop(case, dy).named()
    for name, value in found.named().items():
        ctx.compare(f"{name} against the quantised", value, quantised[name], MXFP8_LIMIT)
        ctx.compare(f"{name} against FP64", value, exact[name], LAYER_GRADIENT_LIMIT)
    return f"{len(exact)} gradients within {MXFP8_LIMIT:.1e} of the quantised reference"


def bits(ctx: Context) -> str:
    """A random layer with other tunables, in the ring, on virtual ranks: the same bits."""
    tile = 256 if ctx.blackwell else 128
    tokens = 4096 if ctx.on_gpu else tile + 44
    shape = Shape(tokens, 128, 192, 3, 2, shared_intermediate_size=64)
    case = random_case(shape, kind="skewed", swiglu_limit=0.75, seed=ctx.seed)
    dy = random_gradient(case, seed=ctx.seed)
    ways: list[tuple[str, int, Config]] = [
        ("one tile per macrobatch", 1, Config(2, 2, tile, tile)),
        ("EP 2 on virtual ranks", 2, Config(2, 2, tile, 2 * tile)),
    ]
    if ctx.blackwell:
        config = Config(2, 2, tile, tile, launch_control=False)
        ways.append(("without launch control", 1, config))
    output, gradients = trained(ctx, case, dy)
    want = gradients.named()
    for name, ep_size, config in ways:
        found, others = trained(ctx, case, dy, ep_size, config)
        ctx.compare(f"the output, {name}", found, output)
        for gradient, value in others.named().items():
            # Each rank has its own sum for the shared expert.
            if ep_size == 1 or not gradient.startswith("shared "):
                ctx.compare(f"{gradient}, {name}", value, want[gradient])
    return f"{len(ways)} other ways, the same bits"


# ------------------------------------------------------------------ helpers


def no_mxfp8_backward(arch: str) -> str:
    """Why there is no MXFP8 backward pass for an architecture, as its kernel says; "" if there is one."""
    from mok.errors import ResourceError
    from mok.kernels_cute.backward.kernel import BackwardKernel

    try:
        BackwardKernel(direct=False, arch=arch, mxfp8=True)
    except ResourceError as error:
        return f"this version has no backward pass in MXFP8 for {arch}: {error.rule}"
    return ""


def _forward(ctx: Context, shape: Shape, precision: str) -> str:
    case = integer_case(shape, kind="dropped", seed=ctx.seed)
    found, _ = trained(ctx, case, None, precision=precision)
    ctx.compare("the integer layer", found, forward_loop(case))
    text = f"{found.numel()} outputs exact"
    if precision == "mxfp8":
        case = random_case(shape, seed=ctx.seed)
        found, _ = trained(ctx, case, None, precision=precision)
        quantised = forward_reference(case, precision="mxfp8")
        error = ctx.compare("a random layer, quantised", found, quantised, MXFP8_LIMIT)
        text += f"; {error} from the quantised reference"
    if ctx.on_gpu:
        case = _on_gpu(_model_case(ctx), ctx)
        found, _ = trained(ctx, case, None, precision=precision)
        limit = BF16_LIMIT if precision == "bf16" else FP32_LIMIT
        error = ctx.compare(f"{MODEL}", found, forward_oracle(case), limit)
        text += f"; {MODEL}: {error}"
    return text


def _model_case(ctx: Context) -> Case:
    from mok.commands.shapes import fit_to_gpu
    from mok.models import get_model

    shape = fit_to_gpu(Shape.of_model(get_model(MODEL), MODEL_TOKENS), ctx.backend.device)
    return random_case(shape, seed=ctx.seed, device=ctx.backend.device)


def _on_gpu(case: Case, ctx: Context) -> Case:
    """The case's tensors on the rung's device."""

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(ctx.backend.device)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = {f.name: moved(getattr(value, f.name)) for f in dataclasses.fields(value)}
            return dataclasses.replace(value, **parts)
        return value

    found: Case = moved(case)
    return found


@contextlib.contextmanager
def laid_out(
    ctx: Context, case: Case, lengths: list[int], config: Config | None, precision: str
) -> Iterator[LaidOut]:
    """The case on a workspace whose counters the context can read."""
    with machine(ctx.backend):
        layer = lay_out(_on_gpu(case, ctx), lengths, ctx.backend, config, precision)
        workspace = layer.workspace
        ctx.counters = lambda: {
            "forward": workspace.counters(), "backward": workspace.counters("backward"),
        }  # fmt: skip
        ctx.counters()  # what reading needs is made now: later, that might wait for a kernel
        yield layer


def trained(
    ctx: Context,
    case: Case,
    dy: Tensor | None,
    ep_size: int = 1,
    config: Config | None = None,
    precision: str = "bf16",
) -> tuple[Tensor, Gradients]:
    """The output, and with ``dy`` all gradients (without, none that may be used), of all ranks together."""
    from mok.reference import Experts

    lengths = case.tokens_per_rank(ep_size)
    with laid_out(ctx, case, lengths, config, precision) as layer:
        schedule = layer.schedule()
        output, context = layer.forward(schedule, save_context=dy is not None)
        parts: tuple[Any, ...] = ()
        if dy is not None:
            assert context is not None
            parts = layer.backward(schedule, context, dy.to(ctx.backend.device))
        ctx.wait()
        layer.workspace.check()
    every, together = layer.place.every, layer.place.together
    if dy is None:
        none = torch.empty(0)
        return together(output), Gradients(none, none, Experts(none, none, none))
    shared = None
    if case.shared is not None:
        shared = Experts(*(torch.stack(every(part)) for part in parts[5:8]))
    return together(output), Gradients(
        x=together(parts[0]),
        router_weights=together(parts[1]),
        routed=Experts(*(together(part) for part in parts[2:5])),
        shared=shared,
        shared_scale=together(parts[8]) if layer.scale is not None else None,
    )
