"""The rungs of many ranks, one per process: the layer over NVLink, exact, and with the bits of one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mok import processes
from mok.config import Shape
from mok.errors import DeviceError
from mok.reference import backward_loop, forward_loop, integer_case, integer_gradient, random_case
from mok.reference import random_gradient as random_dy
from mok.tools.bringup.layer import trained

if TYPE_CHECKING:
    from mok.tools.bringup.context import Context

TOKENS_PER_RANK, EXPERTS_PER_RANK = 24, 2


def layer(ctx: Context) -> str:
    """Integers exactly at EP = all ranks; a random layer with the bits that EP 1 has here."""
    group = processes.group()
    if group is None:
        raise DeviceError("this rung needs several processes", 1, "Start it with torchrun")
    size = group.size
    shape = Shape(
        TOKENS_PER_RANK * size, 192, 128, EXPERTS_PER_RANK * size + 1, 2,
        shared_intermediate_size=64,
    )  # fmt: skip
    case = integer_case(shape, kind="dropped", seed=ctx.seed)
    dy = integer_gradient(case, seed=ctx.seed)
    output, gradients = trained(ctx, case, dy, size)
    ctx.compare("the integer layer", output, forward_loop(case))
    expected = backward_loop(case, dy).named()
    for name, value in gradients.named().items():
        if value.shape == expected[name].shape:  # each rank has its own sum for the shared expert
            ctx.compare(name, value, expected[name])
    case = random_case(shape, kind="skewed", seed=ctx.seed)
    dy = random_dy(case, seed=ctx.seed)
    output, gradients = trained(ctx, case, dy, size)
    alone, wanted = trained(ctx, case, dy, 1)
    ctx.compare("the output's bits against EP 1", output, alone)
    one = wanted.named()
    for name, value in gradients.named().items():
        if not name.startswith("shared "):
            ctx.compare(f"{name}'s bits against EP 1", value, one[name])
    return f"EP {size}: exact on integers, and the bits of one rank"
