"""What tests of wrong arguments share: right ones, with nothing behind them that runs."""

from __future__ import annotations

from typing import Any

import torch

from mok import functional
from mok.call import schedule_sizes
from mok.config import Config
from mok.errors import (
    DeviceError,
    DtypeError,
    ShapeError,
)
from mok.runtime.group import Group
from tests.helpers_layer import SMALL

T, H, I, E, K, SHARED = 12, 128, 64, 4, 2, 192
BF16, FP32 = torch.bfloat16, torch.float32
KINDS = [{}, None, "x", 3]  # of objects that are nothing of ours


class Idle:
    """Stands in for the emulator and launches nothing: arguments are refused before that."""

    arch = "sm_90a"
    num_sms = 6

    def launch(self, compiled: Any, args: Any) -> None:
        raise AssertionError("launched in spite of a wrong argument")


def workspace(ep_size: int = 1, config: Config = SMALL, **changes: Any):
    sizes = {
        "max_tokens": T,
        "hidden_size": H,
        "intermediate_size": I,
        "num_experts": E,
        "topk": K,
        "shared_intermediate_size": SHARED,
    }
    group = Group.virtual(ep_size, torch.device("cpu"))
    return functional.create_workspace(config, group, **{**sizes, **changes})


def ids(count: int = T) -> torch.Tensor:
    return torch.arange(count * K).view(count, K) % E


def schedule_of(made) -> functional.Schedule:
    """A schedule as ``build_schedule`` returns it, without running anything."""
    ranks = made.group.local_ranks
    buffers = [made.new_schedule(r) for r in ranks]
    return functional.Schedule(buffers, [ids() for _ in ranks], schedule_sizes(made))


def arguments(ep_size: int = 1) -> dict[str, Any]:
    experts = E // ep_size

    def each(*size: int, dtype: torch.dtype = BF16) -> Any:
        tensors = [torch.zeros(size, dtype=dtype) for _ in range(ep_size)]
        return tensors if ep_size > 1 else tensors[0]

    return {
        "x": each(T, H),
        "router_weights": each(T, K, dtype=FP32),
        "shared_gate": torch.zeros(SHARED, H, dtype=BF16),
        "shared_up": torch.zeros(SHARED, H, dtype=BF16),
        "shared_down": torch.zeros(H, SHARED, dtype=BF16),
        "routed_gate": each(experts, I, H),
        "routed_up": each(experts, I, H),
        "routed_down": each(experts, H, I),
    }


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    storage = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
    return storage[1:].view(tensor.shape)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)[
        ..., : tensor.shape[-1]
    ]


WRONG = {
    "float16": (lambda t: t.half(), DtypeError, "float16"),
    "float64": (lambda t: t.double(), DtypeError, "float64"),
    "int32": (lambda t: t.int(), DtypeError, "int32"),
    "elsewhere": (lambda t: t.to("meta"), DeviceError, "meta"),
    "strided": (strided, ShapeError, "contiguous"),
    "transposed": (lambda t: t.transpose(-1, -2), ShapeError, "["),
    "short": (lambda t: t[1:], ShapeError, "["),
    "long": (lambda t: torch.cat([t, t[:1]]), ShapeError, "["),
    "narrow": (lambda t: t[..., :-1].contiguous(), ShapeError, "["),
    "flat": (lambda t: t.flatten(), ShapeError, "["),
    "deep": (lambda t: t[None], ShapeError, "["),
}


def context_of(made, ring: int | None = None) -> functional.ForwardContext:
    """A context as ``forward`` returns it with ``save_context``, without running anything."""
    ring = made.sizes.ring if ring is None else ring
    ranks = len(made.group.local_ranks)

    def each(*size: int) -> list[torch.Tensor]:
        return [torch.zeros(size, dtype=BF16) for _ in range(ranks)]

    return functional.ForwardContext(
        x_routed=[None] * ranks if made.sizes.direct else each(ring, H),
        gate_routed=each(ring, I),
        up_routed=each(ring, I),
        gate_shared=each(T, SHARED),
        up_shared=each(T, SHARED),
    )


def gradient_buffers(dtype: torch.dtype = BF16) -> list[Any]:
    given = arguments()
    names = ("routed_gate", "routed_up", "routed_down", "shared_gate", "shared_up", "shared_down")
    return [torch.zeros_like(given[n], dtype=dtype) for n in names]


def backward(made, *, context=None, grad_output=None, **options: Any) -> None:
    ranks = len(made.group.local_ranks)
    dy = torch.zeros(T, H, dtype=BF16) if grad_output is None else grad_output
    functional.backward(
        SMALL, made, schedule_of(made), context_of(made) if context is None else context,
        [dy] * ranks if ranks > 1 else dy, *arguments(ranks).values(), **options,
    )  # fmt: skip
