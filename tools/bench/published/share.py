"""One rank's share of a published layer: inputs, experts, and how many of them fit."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mok.errors import CapacityError
from mok.models import get_model


class Unavailable(Exception):
    """A peer cannot run here, or not this layer; the message is what is printed."""


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer on ``ep`` ranks of ``tokens`` tokens each.

    Attributes:
        asked_experts: E of the model, before it was cut to fit the memory of few ranks.
    """

    model: str
    tokens: int
    hidden: int
    intermediate: int
    experts: int
    topk: int
    shared: int
    ep: int
    asked_experts: int

    @property
    def local(self) -> int:
        """Experts of a rank."""
        return self.experts // self.ep

    def as_dict(self) -> dict[str, int]:
        """As results name them."""
        return {
            "T": self.tokens, "H": self.hidden, "I": self.intermediate, "E": self.experts,
            "K": self.topk, "shared": self.shared, "EP": self.ep, "asked_E": self.asked_experts,
        }  # fmt: skip

    def weight_bytes(self) -> int:
        """BF16 weights of a rank."""
        return 6 * self.hidden * (self.local * self.intermediate + self.shared)


COPIES = 5
"""Times the weights that a rank may need: ours, a peer's own copy, gradients of one, MXFP8, temporaries."""


def layer_of(model: str, tokens: int, ep: int, free_bytes: int | None) -> Layer:
    """The model's layer over ``ep`` ranks, with fewer experts where their weights would not fit.

    E is rounded down to a multiple of ``ep``, and halved until ``COPIES`` times the weights fit the free
    memory; the routes per token stay.

    Raises:
        CapacityError: not even K experts fit.
    """
    m = get_model(model)
    found = Layer(
        model, tokens, m.hidden_size, m.intermediate_size, m.num_experts // ep * ep, m.topk,
        m.shared_intermediate_size or 0, ep, m.num_experts,
    )  # fmt: skip
    while free_bytes is not None and COPIES * found.weight_bytes() > free_bytes:
        experts = found.experts // 2 // ep * ep
        if experts < max(found.topk, ep):
            raise CapacityError(
                f"{COPIES} times a rank's weights must fit its free memory",
                f"{COPIES * found.weight_bytes() / 2**30:.0f} GiB of {free_bytes / 2**30:.0f}",
                "Use more GPUs",
            )
        found = dataclasses.replace(found, experts=experts)
    return found


@dataclass(frozen=True)
class Share:
    """What one rank has.

    Attributes:
        x, dy: BF16 [T, H]. ids: int64 [T, K] of all experts, distinct. router: FP32 [T, K].
        gate, up, down: its experts, BF16 [El, I, H], [El, I, H], [El, H, I].
        shared: the shared expert's gate, up and down, BF16 [Is, H], [Is, H], [H, Is]; () without one.
        group: a torch process group that exchanges tensors of this device.
        rank: in it.
    """

    layer: Layer
    rank: int
    group: Any
    x: Tensor
    dy: Tensor
    ids: Tensor
    router: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    shared: tuple[Tensor, ...]

    @property
    def device(self) -> torch.device:
        return self.x.device


def make_share(layer: Layer, rank: int, group: Any, device: torch.device, seed: int = 0) -> Share:
    """Random inputs of a rank; the shared expert is the same on all ranks, routing is uniform."""
    own = torch.Generator(device).manual_seed(seed * 1000 + rank)
    same = torch.Generator(device).manual_seed(seed * 1000 + 999)

    def normal(rng: torch.Generator, *size: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(size, generator=rng, device=device, dtype=torch.float32)
        return (values * scale).bfloat16()

    def stack(rng: torch.Generator, count: int, rows: int, columns: int) -> Tensor:
        out = torch.empty(count, rows, columns, dtype=torch.bfloat16, device=device)
        for part in out:  # one at a time: FP32 of all experts would not fit
            part.copy_(normal(rng, rows, columns, scale=columns**-0.5))
        return out

    T, H, I, E = layer.tokens, layer.hidden, layer.intermediate, layer.experts
    scores = torch.rand(T, E, generator=own, device=device)
    weights, ids = scores.topk(layer.topk, dim=1)
    shared: tuple[Tensor, ...] = ()
    if layer.shared:
        sizes = ((layer.shared, H), (layer.shared, H), (H, layer.shared))
        shared = tuple(normal(same, *size, scale=size[1] ** -0.5) for size in sizes)
    return Share(
        layer, rank, group,
        x=normal(own, T, H), dy=normal(own, T, H), ids=ids,
        router=weights / weights.sum(1, keepdim=True),
        gate=stack(own, layer.local, I, H), up=stack(own, layer.local, I, H),
        down=stack(own, layer.local, H, I), shared=shared,
    )  # fmt: skip
