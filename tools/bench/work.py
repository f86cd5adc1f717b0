"""The inputs of one shape: the same for every program, several sets in turn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mok.errors import MokError
from mok.reference import Case, Experts, random_case, routing
from mok.tools.bench.shapes import BenchShape

ROUTINGS = ("random", "skewed", "half")
"""Uniform distinct experts; a power law; one expert with half of all routes."""


@dataclass(frozen=True)
class InputSet:
    """x and dy BF16 [T, H], router_weights FP32 [T, K]."""

    x: Tensor
    router_weights: Tensor
    dy: Tensor


@dataclass(frozen=True)
class Work:
    """What every program gets.

    Attributes:
        bench: the shape.
        ids: int64 [T, K]: one routing for all sets and programs.
        gate, up: BF16 [E, I, H]. down: BF16 [E, H, I].
        sets: inputs that calls take in turn, so that no call finds its own in the L2 cache.
    """

    bench: BenchShape
    device: torch.device
    ids: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    sets: tuple[InputSet, ...]

    def inputs(self, index: int) -> InputSet:
        return self.sets[index % len(self.sets)]

    def case(self, index: int = 0) -> Case:
        """One set as the oracle wants it."""
        chosen = self.inputs(index)
        experts = Experts(self.gate, self.up, self.down)
        return Case("bench", chosen.x, self.ids, chosen.router_weights, experts)

    def counts(self) -> list[int]:
        """Routes of each expert."""
        ids = self.ids.flatten()
        return torch.bincount(ids + 1, minlength=1 + self.bench.shape.num_experts)[1:].tolist()


def make_work(
    bench: BenchShape,
    device: torch.device,
    *,
    num_sets: int = 2,
    seed: int = 0,
    kind: str = "random",
) -> Work:
    """Random inputs on the device: normal values, weights scaled so that all stays near 1.

    Args:
        kind: one of ``ROUTINGS``.
    """
    shape = bench.shape
    first = random_case(shape, seed=seed, device=device)
    rng = torch.Generator(device=device).manual_seed(seed + 1)

    def normal() -> Tensor:
        size = (shape.num_tokens, shape.hidden_size)
        return torch.randn(size, generator=rng, dtype=torch.bfloat16, device=device)

    sets = [InputSet(first.x, first.router_weights, normal())]
    for _ in range(num_sets - 1):
        weights = torch.rand(first.router_weights.shape, generator=rng, device=device)
        sets.append(InputSet(normal(), weights.softmax(dim=1), normal()))
    return Work(
        bench,
        device,
        bench_routing(kind, bench, seed).to(device),
        first.routed.gate,
        first.routed.up,
        first.routed.down,
        tuple(sets),
    )


def bench_routing(kind: str, bench: BenchShape, seed: int) -> Tensor:
    """Expert ids, int64 [T, K] on the CPU, the same for a seed everywhere."""
    s = bench.shape
    if kind not in ROUTINGS:
        raise MokError("the routing must be a known one", repr(kind), f"Known: {list(ROUTINGS)}")
    if kind != "half":
        return routing(kind, s.num_tokens, s.num_experts, s.topk, seed)
    ids = routing("random", s.num_tokens, s.num_experts, s.topk, seed).flatten()
    rng = torch.Generator().manual_seed(seed + 2)
    chosen = torch.randperm(len(ids), generator=rng)[: len(ids) // 2]
    ids[chosen] = 0
    return ids.view(s.num_tokens, s.topk)
