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
        shared_scale: FP32 [N], a factor for each token's shared result (a gated shared expert), or
            None for 1.
        swiglu_limit: L: gate at most L, up in [-L, L]; None for no clamp.
    """

    name: str
    x: Tensor
    top_experts: Tensor
    router_weights: Tensor
    routed: Experts
    shared: Experts | None = None
    swiglu_limit: float | None = None
    shared_scale: Tensor | None = None

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
        draws = torch.multinomial(popularity, max(1, n * k), replacement=True, generator=rng)
        return draws[: n * k].view(n, k)
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
    gated: bool = False,
) -> Case:
    """Normal values: x of variance 1, weights scaled so that gate, up and y stay near 1.

    ``shape.num_tokens`` is N, the tokens of all ranks. Router weights are positive with sum 1.
    ``gated``: the shared expert has factors between 0 and 1.
    """
    if not -(2**63) <= seed < 2**64:
        raise ShapeError("seed must be a number of 64 bits, -2**63…2**64-1", seed)
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
        shared_scale=torch.rand(n, generator=rng, device=device) if gated and shared else None,
    )


def random_gradient(case: Case, *, seed: int = 0) -> Tensor:
    """A gradient of the output, BF16 [N, H], normal with variance 1, on the case's device."""
    rng = torch.Generator(device=case.x.device).manual_seed(seed)
    return torch.randn(case.x.shape, generator=rng, dtype=torch.bfloat16, device=case.x.device)


# The exact cases. silu(g) = g·rcp(1 + ex2(-g·log2 e)) is exactly 0, 0 or g for g = 0, ≤ -128, ≥ 128
# in FP32, because ex2 is then 1, infinite or less than half an ulp of 1. Its derivative is ½, 0, 1.
GATE_UNIT = 128.0
UP_UNIT = 128.0  # as large as the gate's, so that one clamp limit reaches both
DOWN_UNIT = 2.0**-14  # brings y back to small integers
_DOT_TERMS = 2  # non-zeros of a gate or up row; x is in {-1, 0, 1}
_MAX_HIDDEN = _DOT_TERMS * _DOT_TERMS  # of |silu(gate)·up|, in units of 2^14
_BF16_INTEGERS = 256  # BF16 holds every integer up to this
# |w·up·silu'| and |w·silu| are at most this many times their smallest non-zero value. (Half as many
# within a row of a gradient of x, which has one w: room for sums over rows.)
_GRADIENT_STEPS = 8


def integer_case(
    shape: Shape,
    *,
    kind: str = "random",
    seed: int = 0,
    device: torch.device | str = "cpu",
    swiglu_limit: float | None = None,
    gated: bool = False,
) -> Case:
    """A layer whose every intermediate value is exact, so that a mismatch is a bug, not rounding.

    Gate pre-activations are in {0, ±128, ±256}, up in the same set, hidden, y and the output are
    small integers times a power of two, router weights and the shared expert's factors are ±1, ±½
    (K ≤ 30) and a few zeros. Weight rows have one or two non-zeros in different halves of the
    contraction, which keeps sums small at any H and I while each element of x and hidden is used
    somewhere; the non-zeros of a half are spread evenly over its columns, which keeps gradients
    small (``integer_gradient``). The seed fixes the values on every device.

    Args:
        swiglu_limit: None or a multiple of 128.
        gated: the shared expert has factors.

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
        column = torch.rand(count, terms, part, generator=rng).argsort(dim=2)
        position = column[:, :, torch.arange(rows) % part].transpose(1, 2).contiguous()
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

    def powers(*size: int) -> Tensor:
        values = torch.tensor(magnitudes)[torch.randint(len(magnitudes), size, generator=rng)]
        values *= torch.randint(2, size, generator=rng) * 2 - 1
        values[torch.rand(*size, generator=rng) < 1 / 16] = 0.0
        return values.to(device)

    x = torch.randint(-1, 2, (n, h), generator=rng, dtype=torch.int8)
    shared = shape.shared_intermediate_size
    return Case(
        name=f"integer {kind}",
        x=x.to(device).bfloat16(),
        top_experts=routing(kind, n, shape.num_experts, k, seed).to(device),
        router_weights=powers(n, k),
        routed=experts(shape.num_experts, shape.intermediate_size),
        shared=experts(1, shared) if shared else None,
        swiglu_limit=swiglu_limit,
        shared_scale=powers(n) if gated and shared else None,
    )


def integer_gradient(case: Case, *, seed: int = 0) -> Tensor:
    """A gradient of an ``integer_case``'s output for which backward is exact, too: BF16 [N, H].

    Elements are in {0, ±1}. At every rounding point of backward the exact value is one that BF16
    holds (d_gate, d_up, w·hidden, each route's and the shared expert's gradient of x), or a sum
    that FP32 holds (router weights; gradients of x and of weights before their rounding), as long
    as an expert has at most 131,072 rows. The seed fixes the values on every device.

    dy·W_down of a route, in steps of 2^-14, is at most the number of rows of W_down that share a
    column (every ``part``-th row) and meet a non-zero of dy: ``most``. With a tall W_down, each
    token's non-zeros therefore lie in a window of ``most`` times ``part``, placed at random. A
    gradient of x is the sum of at most ``rows_per_column`` products from each of gate and up.

    Raises:
        ShapeError: I or the shared I is more than 8·H.
    """
    n, hidden = case.x.shape
    topk = case.top_experts.shape[1]
    widths = [experts.gate.shape[1] for experts in (case.routed, case.shared) if experts]
    part = min(widths) // _exact_budget(topk)[0]
    rows_per_column = -(-max(widths) // (hidden // _DOT_TERMS))
    most = _BF16_INTEGERS // (2 * rows_per_column * _GRADIENT_STEPS)
    if most < 1:
        raise ShapeError("I of an exact backward case must be at most 8·H", (max(widths), hidden))
    rng = torch.Generator().manual_seed(seed)
    dy = torch.randint(-1, 2, (n, hidden), generator=rng, dtype=torch.int8)
    window = most * part
    if window < hidden:
        first = torch.randint(hidden, (n, 1), generator=rng) - window // 2
        column = torch.arange(hidden)
        dy *= (column >= first) & (column < first + window)
    return dy.to(case.x.device).bfloat16()


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
