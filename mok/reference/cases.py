"""Inputs of one layer call: routings, random values, and values that stay exact throughout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mok.config import Shape
from mok.errors import MokError, ShapeError


@dataclass(frozen=True)
class Experts:
    """Weights of El stacked experts: gate and up BF16 [El, I, H], down BF16 [El, H, I].

    The shared expert is the same with El = 1.
    """

    gate: Tensor
    up: Tensor
    down: Tensor

    def __getitem__(self, part: slice) -> Experts:
        return Experts(self.gate[part], self.up[part], self.down[part])


@dataclass(frozen=True)
class Case:
    """One layer call on the tokens of all ranks together.

    Attributes:
        x: BF16 [N, H].
        top_experts: int64 [N, K], -1 for a dropped route.
        router_weights: FP32 [N, K].
        routed: the E routed experts.
        shared: the shared expert (El = 1), or None.
        swiglu_limit: L: gate at most L, up in [-L, L]; None for no clamp.
    """

    name: str
    x: Tensor
    top_experts: Tensor
    router_weights: Tensor
    routed: Experts
    shared: Experts | None = None
    swiglu_limit: float | None = None

    @property
    def shape(self) -> Shape:
        """Sizes, with all tokens on one rank."""
        num_experts, intermediate, hidden = self.routed.gate.shape
        shared = self.shared.gate.shape[1] if self.shared else None
        topk = self.top_experts.shape[1]
        return Shape(len(self.x), hidden, intermediate, num_experts, topk, 1, shared)

    def tokens_per_rank(self, ep_size: int) -> list[int]:
        """An even split of the tokens: the first N mod EP ranks hold one more."""
        base, extra = divmod(len(self.x), ep_size)
        return [base + (rank < extra) for rank in range(ep_size)]


def _random_routing(n: int, e: int, k: int, rng: torch.Generator) -> Tensor:
    if k > e:
        return torch.randint(e, (n, k), generator=rng)
    return torch.rand(n, e, generator=rng).topk(k, dim=1).indices


def _skewed_routing(n: int, e: int, k: int, rng: torch.Generator) -> Tensor:
    popularity = torch.arange(1, e + 1)[torch.randperm(e, generator=rng)].double().pow(-1.2)
    if k > e:
        return torch.multinomial(popularity, n * k, replacement=True, generator=rng).view(n, k)
    # Gumbel top-k draws without replacement in proportion to the popularity.
    gumbel = -torch.log(-torch.log(torch.rand(n, e, generator=rng, dtype=torch.float64)))
    return (popularity.log() + gumbel).topk(k, dim=1).indices


def _one_expert_routing(n: int, e: int, k: int, rng: torch.Generator) -> Tensor:
    return torch.full((n, k), int(torch.randint(e, (), generator=rng)))


def _few_experts_routing(n: int, e: int, k: int, rng: torch.Generator) -> Tensor:
    used = torch.randperm(e, generator=rng)[: max(1, e // 8)]
    return used[torch.randint(len(used), (n, k), generator=rng)]


def _dropped_routing(n: int, e: int, k: int, rng: torch.Generator) -> Tensor:
    ids = _random_routing(n, e, k, rng)
    ids[torch.rand(n, k, generator=rng) < 0.25] = -1
    ids[torch.rand(n, generator=rng) < 0.1] = -1
    return ids


def _duplicate_routing(n: int, e: int, k: int, rng: torch.Generator) -> Tensor:
    ids = torch.randint(e, (n, k), generator=rng)
    ids[:, -1] = ids[:, 0]
    return ids


ROUTINGS: dict[str, Callable[[int, int, int, torch.Generator], Tensor]] = {
    "random": _random_routing,
    "skewed": _skewed_routing,
    "one_expert": _one_expert_routing,
    "few_experts": _few_experts_routing,
    "dropped": _dropped_routing,
    "duplicates": _duplicate_routing,
}


def routing(kind: str, num_tokens: int, num_experts: int, topk: int, seed: int = 0) -> Tensor:
    """Expert ids, int64 [N, K] on the CPU, the same for a seed everywhere.

    Kinds: ``random`` (distinct experts, uniform), ``skewed`` (a power law), ``one_expert``,
    ``few_experts`` (most get none), ``dropped`` (a quarter of the routes, and all routes of some
    tokens, are -1), ``duplicates`` (a token may use an expert twice).
    """
    if kind not in ROUTINGS:
        raise MokError("the routing must be a known one", repr(kind), f"Known: {list(ROUTINGS)}")
    rng = torch.Generator().manual_seed(seed)
    return ROUTINGS[kind](num_tokens, num_experts, topk, rng)


def random_case(
    shape: Shape,
    *,
    kind: str = "random",
    seed: int = 0,
    device: torch.device | str = "cpu",
    swiglu_limit: float | None = None,
) -> Case:
    """Normal values: x of variance 1, weights scaled so that gate, up and y stay near 1.

    ``shape.num_tokens`` is N, the tokens of all ranks. Router weights are positive with sum 1.
    """
    rng = torch.Generator(device=device).manual_seed(seed)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        # In BF16 from the start: an FP32 copy of all experts may not fit.
        return torch.randn(size, generator=rng, dtype=torch.bfloat16, device=device).mul_(scale)

    def experts(count: int, width: int) -> Experts:
        h = shape.hidden_size
        return Experts(
            gate=normal(count, width, h, scale=h**-0.5),
            up=normal(count, width, h, scale=h**-0.5),
            down=normal(count, h, width, scale=width**-0.5),
        )

    n, k = shape.num_tokens, shape.topk
    shared = shape.shared_intermediate_size
    return Case(
        name=kind,
        x=normal(n, shape.hidden_size),
        top_experts=routing(kind, n, shape.num_experts, k, seed).to(device),
        router_weights=torch.rand(n, k, generator=rng, device=device).softmax(dim=1),
        routed=experts(shape.num_experts, shape.intermediate_size),
        shared=experts(1, shared) if shared else None,
        swiglu_limit=swiglu_limit,
    )


# The exact cases. silu(g) = g·rcp(1 + ex2(-g·log2 e)) is exactly 0, 0 or g for g = 0, ≤ -128, ≥ 128
# in FP32, because ex2 is then 1, infinite or less than half an ulp of 1.
GATE_UNIT = 128.0
UP_UNIT = 128.0  # as large as the gate's, so that one clamp limit reaches both
DOWN_UNIT = 2.0**-14  # brings y back to small integers
_DOT_TERMS = 2  # non-zeros of a gate or up row; x is in {-1, 0, 1}
_MAX_HIDDEN = _DOT_TERMS * _DOT_TERMS  # of |silu(gate)·up|, in units of 2^14
_BF16_INTEGERS = 256  # BF16 holds every integer up to this


def integer_case(
    shape: Shape,
    *,
    kind: str = "random",
    seed: int = 0,
    device: torch.device | str = "cpu",
    swiglu_limit: float | None = None,
) -> Case:
    """A layer whose every intermediate value is exact, so that a mismatch is a bug, not rounding.

    Gate pre-activations are in {0, ±128, ±256}, up in the same set, hidden, y and the output are
    small integers times a power of two, router weights are ±1, ±½ (K ≤ 30) and a few zeros. Weight
    rows have one or two non-zeros in different halves of the contraction, which keeps sums small
    at any H and I while each element of x and hidden is used somewhere. The seed fixes the values
    on every device.

    Args:
        swiglu_limit: None or a multiple of 128.

    Raises:
        ShapeError: another limit.
    """
    if swiglu_limit is not None and (swiglu_limit <= 0 or swiglu_limit % GATE_UNIT):
        raise ShapeError("the limit of an exact case must be a multiple of 128", swiglu_limit)
    rng = torch.Generator().manual_seed(seed)
    n, k, h = shape.num_tokens, shape.topk, shape.hidden_size
    down_terms, magnitudes = _exact_budget(k)

    def sparse(count: int, rows: int, columns: int, terms: int, unit: float) -> Tensor:
        part = columns // terms
        position = torch.randint(part, (count, rows, terms), generator=rng)
        position += torch.arange(terms) * part
        sign = torch.randint(2, (count, rows, terms), generator=rng) * 2 - 1
        weight = torch.zeros(count, rows, columns, dtype=torch.bfloat16, device=device)
        for e in range(count):  # one expert at a time: the stack may pass 2^31 elements
            weight[e].scatter_(1, position[e].to(device), (sign[e] * unit).to(weight))
        return weight

    def experts(count: int, width: int) -> Experts:
        return Experts(
            gate=sparse(count, width, h, _DOT_TERMS, GATE_UNIT),
            up=sparse(count, width, h, _DOT_TERMS, UP_UNIT),
            down=sparse(count, h, width, down_terms, DOWN_UNIT),
        )

    x = torch.randint(-1, 2, (n, h), generator=rng, dtype=torch.int8)
    weights = torch.tensor(magnitudes)[torch.randint(len(magnitudes), (n, k), generator=rng)]
    weights *= torch.randint(2, (n, k), generator=rng) * 2 - 1
    weights[torch.rand(n, k, generator=rng) < 1 / 16] = 0.0
    shared = shape.shared_intermediate_size
    return Case(
        name=f"integer {kind}",
        x=x.to(device).bfloat16(),
        top_experts=routing(kind, n, shape.num_experts, k, seed).to(device),
        router_weights=weights.to(device),
        routed=experts(shape.num_experts, shape.intermediate_size),
        shared=experts(1, shared) if shared else None,
        swiglu_limit=swiglu_limit,
    )


def _exact_budget(topk: int) -> tuple[int, tuple[float, ...]]:
    """Non-zeros per down row, and router weights, such that every output fits BF16's integers.

    |output| ≤ (K·max|w| + 1)·terms·4, counted in steps of min|w|. One choice fits any K ≤ 32.
    """
    choices = [(2, (0.5, 1.0)), (1, (0.5, 1.0)), (1, (1.0,))]
    for terms, magnitudes in choices:
        bound = (topk * max(magnitudes) + 1) * terms * _MAX_HIDDEN / min(magnitudes)
        if bound <= _BF16_INTEGERS:
            return terms, magnitudes
    raise ShapeError("topk (K) must be at most 32", topk)
