"""The scheduled reference of the backward pass: the kernel's steps and rounding points, in torch.

As ``layer`` does for forward: minibatches in the kernel's order through a ring of macrobatch rows,
on virtual ranks. Everything starts as NaN, and a minibatch's place in the ring becomes NaN when the
last weight gradient that reads it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mok.config import Shape
from mok.errors import MokError
from mok.reference.cases import Case, Experts
from mok.reference.layer import LOG2_E, partition, token_sum
from mok.reference.mxfp8 import PRECISIONS, Precision, precision_of
from mok.reference.precision import fma32, ieee_matmul
from mok.reference.router_grad import row_partials, sum_groups
from mok.reference.schedule import RankSchedule, schedule_reference

GRAD_MODES = ("bf16", "fp32", "bf16_add", "fp32_add")


@dataclass(frozen=True)
class Gradients:
    """Gradients of one layer call on the tokens of all ranks.

    Attributes:
        x: [N, H].
        router_weights: [N, K], exactly 0 for dropped routes.
        routed: of the E routed experts.
        shared: of the shared expert, [EP, Is, H] and [EP, H, Is]: each rank's sum over its own
            tokens. One entry where ranks do not exist. None without a shared expert.
        shared_scale: [N], or None.
    """

    x: Tensor
    router_weights: Tensor
    routed: Experts
    shared: Experts | None = None
    shared_scale: Tensor | None = None

    def named(self) -> dict[str, Tensor]:
        """All that are there, by name: "x", "router_weights", "routed gate" …"""
        found = {"x": self.x, "router_weights": self.router_weights}
        for kind, experts in (("routed", self.routed), ("shared", self.shared)):
            if experts is not None:
                parts = zip(("gate", "up", "down"), _parts(experts), strict=True)
                found |= {f"{kind} {name}": part for name, part in parts}
        if self.shared_scale is not None:
            found["shared_scale"] = self.shared_scale
        return found


class Activation(NamedTuple):
    """What backward makes of a row's pre-activations; FP32 [rows, I]."""

    d_gate: Tensor  # times the weight
    d_up: Tensor
    hidden: Tensor
    weighted: Tensor  # the weight times hidden


def swiglu_backward(
    gate: Tensor, up: Tensor, d: Tensor, weight: Tensor, limit: float | None
) -> Activation:
    """Gradients of weight·silu(gate)·up for d = dy·W_down, each operation rounded to FP32.

    Args:
        gate, up, d: FP32 [rows, I]; gate and up as saved, that is, values that BF16 holds.
        weight: FP32 [rows].

    silu'(g) = s + silu(g)·(1 − s) with s the sigmoid, one fma. 0 where the clamp was active, as the
    saved values show it: a gate just above the limit that rounds to it counts as not clamped.
    """
    weight = weight.unsqueeze(1)
    inside = (torch.ones_like(gate, dtype=torch.bool),) * 2
    if limit is not None:
        inside = (~(gate > limit), ~((up > limit) | (up < -limit)))
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    sigmoid = 1 / (1 + torch.exp2(gate * -LOG2_E))
    silu = gate * sigmoid
    hidden = silu * up
    scaled = weight * d
    slope = fma32(silu, 1 - sigmoid, sigmoid)
    zero = torch.zeros_like(d)
    return Activation(
        d_gate=torch.where(inside[0], scaled * up * slope, zero),
        d_up=torch.where(inside[1], scaled * silu, zero),
        hidden=hidden,
        weighted=weight * hidden,
    )


class _Weights(NamedTuple):
    """Experts as the three kinds of GEMM see them, quantised along the contraction in MXFP8."""

    forward: Experts  # gate and up along H
    dgrad: Experts  # gate and up along I, down along H

    @staticmethod
    def of(experts: Experts, precision: Precision) -> _Weights:
        gate, up, down = _parts(experts)
        return _Weights(
            Experts(precision.rows(gate), precision.rows(up), down),
            Experts(*(precision.along(w, 1) for w in (gate, up, down))),
        )


_BF16 = PRECISIONS["bf16"]


class _Rows(NamedTuple):
    """Rows of one expert between the steps of backward, BF16."""

    x: Tensor
    dy: Tensor
    gate: Tensor
    up: Tensor
    d_gate: Tensor
    d_up: Tensor
    weighted: Tensor

    @staticmethod
    def empty(rows: int, hidden: int, intermediate: int, like: Tensor) -> _Rows:
        def nan(columns: int) -> Tensor:
            return like.new_full((rows, columns), torch.nan, dtype=torch.bfloat16)

        return _Rows(*(nan(hidden) for _ in range(2)), *(nan(intermediate) for _ in range(5)))


def _pre_activations(rows: _Rows, at: Tensor, experts: Experts, expert: int) -> None:
    """gate and up, rounded to BF16, as forward saves them."""
    x = rows.x[at].float()
    rows.gate[at] = (x @ experts.gate[expert].float().t()).bfloat16()
    rows.up[at] = (x @ experts.up[expert].float().t()).bfloat16()


def _data_gradients(
    rows: _Rows,
    at: Tensor,
    experts: Experts,
    expert: int,
    weight: Tensor,
    limit: float | None,
    precision: Precision = _BF16,
) -> tuple[Tensor, Tensor]:
    """dx BF16 [len(at), H] and d_w FP32 [len(at)] of one expert's rows; fills what the weight
    gradients need."""
    d = rows.dy[at].float() @ experts.down[expert].float()
    act = swiglu_backward(rows.gate[at].float(), rows.up[at].float(), d, weight, limit)
    rows.d_gate[at] = act.d_gate.bfloat16()
    rows.d_up[at] = act.d_up.bfloat16()
    rows.weighted[at] = act.weighted.bfloat16()
    dx = precision.rows(rows.d_gate[at]).float() @ experts.gate[expert].float()
    dx += precision.rows(rows.d_up[at]).float() @ experts.up[expert].float()
    return dx.bfloat16(), sum_groups(row_partials(d, act.hidden))


def _weight_gradients(rows: _Rows, at: Tensor, precision: Precision = _BF16) -> Experts:
    """FP32 sums over rows of one expert: gate, up [1, I, H], down [1, H, I].

    In MXFP8 ``at`` holds whole blocks of 32 rows, padding (zeros) included.
    """
    x, dy, d_gate, d_up, weighted = (
        precision.along(part[at], 0).float()
        for part in (rows.x, rows.dy, rows.d_gate, rows.d_up, rows.weighted)
    )
    return Experts(
        gate=(d_gate.t() @ x).unsqueeze(0),
        up=(d_up.t() @ x).unsqueeze(0),
        down=(dy.t() @ weighted).unsqueeze(0),
    )


class _VirtualRank:
    """One rank's inputs, and the slots into which its peers push."""

    def __init__(
        self, schedule: RankSchedule, experts: _Weights, x: Tensor, dy: Tensor, weights: Tensor
    ) -> None:
        self.schedule = schedule
        self.experts = experts
        self.x = x
        self.dy = dy
        self.weights = weights
        self.dx_slots = x.new_full((weights.numel(), x.shape[1]), torch.nan)
        self.dw_slots = weights.new_full((weights.numel(),), torch.nan)


class _Backward:
    """The routed experts of one rank."""

    def __init__(
        self,
        ranks: list[_VirtualRank],
        me: int,
        minibatch: int,
        macrobatch: int,
        tile: int,
        limit: float | None,
        precision: Precision,
    ) -> None:
        self.precision = precision
        self.ranks = ranks
        self.me = ranks[me]
        self.minibatch = minibatch
        self.macrobatch = macrobatch
        self.limit = limit
        self.topk = self.me.weights.shape[1]
        self.row_expert = self.me.schedule.block_expert.repeat_interleave(tile)
        self.num_rows = self.me.schedule.num_tokens
        gate = self.me.experts.forward.gate
        self.ring = _Rows.empty(macrobatch, gate.shape[2], gate.shape[1], gate)
        self.row_weight = self.me.weights.new_full((macrobatch,), torch.nan)

    def run(self) -> Experts:
        """All minibatches, ascending; FP32 weight gradients of this rank's experts."""
        experts = self.me.experts.forward
        sums = Experts(*(torch.zeros_like(w, dtype=torch.float32) for w in _parts(experts)))
        starts = range(0, self.num_rows, self.minibatch)
        for start in starts:
            if start < self.macrobatch:
                self.dispatch(start)
        freed = 0  # rows
        for start in starts:
            if start >= self.macrobatch:
                self.each_expert(start, self.replay)
            self.each_expert(start, self.gradients_and_push)
            for expert, first, end in self.groups_ending_in(start):
                rows = self.real(first, end)
                if self.precision is not _BF16:
                    rows = torch.arange(first, end, device=rows.device)
                parts = _weight_gradients(self.ring, rows % self.macrobatch, self.precision)
                for total, part in zip(_parts(sums), _parts(parts), strict=True):
                    total[expert] += part[0]
                # Groups lie in row order: what ends before this one's end has been read.
                while min(freed + self.minibatch, self.num_rows) <= end and freed < end:
                    self.release(freed)
                    freed += self.minibatch
        return sums

    def groups_ending_in(self, start: int) -> list[tuple[int, int, int]]:
        """(expert, first row, end row) of each expert's rows in one macrobatch that end here."""
        groups = []
        stop = min(start + self.minibatch, self.num_rows)
        for expert in self.row_expert[start:stop].unique().tolist():
            rows = (self.row_expert == expert).nonzero().flatten()
            base = start // self.macrobatch * self.macrobatch
            first = max(int(rows[0]), base)
            end = min(int(rows[-1]) + 1, base + self.macrobatch)
            if end <= stop:
                groups.append((expert, first, end))
        return groups

    def real(self, first: int, end: int) -> Tensor:
        """The rows of a range that are not padding."""
        return first + (self.me.schedule.peer_rank[first:end] >= 0).nonzero().flatten()

    def each_expert(self, start: int, step: Callable[[int, Tensor], None]) -> None:
        """``step(expert, rows)`` for the real rows of a minibatch, expert by expert."""
        rows = self.real(start, min(start + self.minibatch, self.num_rows))
        expert_of = self.row_expert[rows]
        for expert in expert_of.unique().tolist():
            step(expert, rows[expert_of == expert])

    def release(self, start: int) -> None:
        """A minibatch's place is free: bring in the one that comes there next."""
        place = start % self.macrobatch
        for buffer in (*self.ring, self.row_weight):
            buffer[place : place + self.minibatch] = torch.nan
        if start + self.macrobatch < self.num_rows:
            self.dispatch(start + self.macrobatch)

    def dispatch(self, start: int) -> None:
        """Pull dy, router weights and x. Of macrobatch 0, forward saved x, gate and up."""
        end = min(start + self.minibatch, self.num_rows)
        rows = self.real(start, end)
        if self.precision is not _BF16:  # padding shares blocks with real rows
            places = torch.arange(start, end, device=rows.device) % self.macrobatch
            for buffer in self.ring:
                buffer[places] = 0
        source = self.me.schedule.peer_rank[rows]
        route = self.me.schedule.peer_token_idx[rows].long()
        for rank, peer in enumerate(self.ranks):
            here = source == rank
            place, routes = rows[here] % self.macrobatch, route[here]
            self.ring.x[place] = self.precision.rows(peer.x[routes // self.topk])
            self.ring.dy[place] = self.precision.rows(peer.dy[routes // self.topk])
            self.row_weight[place] = peer.weights.flatten()[routes]
        if start < self.macrobatch:
            self.each_expert(start, self.replay)

    def replay(self, expert: int, rows: Tensor) -> None:
        _pre_activations(self.ring, rows % self.macrobatch, self.me.experts.forward, expert)

    def gradients_and_push(self, expert: int, rows: Tensor) -> None:
        """dx and d_w of one expert's rows, to the slots of their routes."""
        at = rows % self.macrobatch
        dx, d_w = _data_gradients(
            self.ring, at, self.me.experts.dgrad, expert, self.row_weight[at], self.limit,
            self.precision,
        )  # fmt: skip
        target = self.me.schedule.peer_rank[rows]
        route = self.me.schedule.peer_token_idx[rows].long()
        for rank, peer in enumerate(self.ranks):
            here = target == rank
            peer.dx_slots[route[here]] = dx[here]
            peer.dw_slots[route[here]] = d_w[here]


def _parts(experts: Experts) -> tuple[Tensor, Tensor, Tensor]:
    return experts.gate, experts.up, experts.down


def _finish(sums: Experts, mode: str, into: Experts | None) -> Experts:
    """FP32 sums in the form that the mode asks for; adding rounds once."""
    parts = []
    for i, total in enumerate(_parts(sums)):
        if into is not None:
            total = _parts(into)[i].float() + total
        parts.append(total.bfloat16() if mode.startswith("bf16") else total)
    return Experts(*parts)


def backward_reference(
    case: Case,
    dy: Tensor,
    ep_size: int = 1,
    *,
    tokens_per_rank: Sequence[int] | None = None,
    tile: int = 128,
    minibatch: int | None = None,
    macrobatch: int | None = None,
    grad_mode: str = "bf16",
    into: Gradients | None = None,
    precision: str = "bf16",
) -> Gradients:
    """The layer's gradients as the kernel computes them, on ``ep_size`` virtual ranks.

    Rounding points: gate and up as saved (BF16); d = dy·W_down, unweighted, hidden and
    d_w = Σ d·hidden in FP32; d_gate, d_up and w·hidden to BF16; each route's gradient of x to BF16;
    their sum in FP32, shared first, k ascending, rounded once; weight gradients from BF16 operands
    in FP32, rounded once.

    Args:
        case: what forward was called with.
        dy: BF16 [N, H], the gradient of its output.
        tokens_per_rank, tile, minibatch, macrobatch: as for ``forward_reference``.
        grad_mode: weight gradients as "bf16" or "fp32"; or "bf16_add" or "fp32_add": added in FP32
            to those of ``into``, which have that dtype.
        precision: of the routed experts' GEMMs. With "mxfp8" x and dy are quantised along H when they
            are pulled, and their token-axis copies are made from the results; d_gate and d_up along I
            and, like w·hidden, along the tokens; weights along the contraction of each GEMM. Blocks
            along the tokens are of 32 rows of a padded segment.

    Returns:
        x BF16, router weights and shared scale FP32, weights by ``grad_mode``.

    Raises:
        ShapeError, MokError: sizes do not fit; unknown mode, or ``into`` missing or too much.
    """
    if grad_mode not in GRAD_MODES:
        raise MokError("grad_mode must be a known one", repr(grad_mode), f"Known: {GRAD_MODES}")
    if grad_mode.endswith("_add") != (into is not None):
        raise MokError("the adding modes, and only they, need into", grad_mode)
    lengths, minibatch, macrobatch = partition(
        case, ep_size, tokens_per_rank, tile, minibatch, macrobatch
    )
    num_experts, (_, topk) = case.routed.gate.shape[0], case.top_experts.shape
    ids = case.top_experts.split(lengths)
    schedules = schedule_reference(ids, num_experts, ep_size, tile)
    placement = Shape(0, 64, 64, num_experts, topk, ep_size)
    numerics = precision_of(precision)
    ranks = [
        _VirtualRank(
            schedule,
            _Weights.of(case.routed[local.start : local.stop], numerics),
            x,
            d,
            weights,
        )
        for schedule, local, x, d, weights in zip(
            schedules,
            (placement.experts_on(r) for r in range(ep_size)),
            case.x.split(lengths),
            dy.split(lengths),
            case.router_weights.split(lengths),
            strict=True,
        )
    ]
    scales = _scales(case).split(lengths)
    with ieee_matmul():
        routed = [
            _Backward(ranks, r, minibatch, macrobatch, tile, case.swiglu_limit, numerics).run()
            for r in range(ep_size)
        ]
        # The device barrier: from here on every slot has been pushed.
        shared = [
            _shared(rank, case.shared, scale, case.swiglu_limit) if case.shared else None
            for rank, scale in zip(ranks, scales, strict=True)
        ]
    d_x = [
        token_sum(rank.dx_slots, None, ids[r], part.x if (part := shared[r]) else None)
        for r, rank in enumerate(ranks)
    ]
    d_w = torch.cat([rank.dw_slots for rank in ranks]).view(-1, topk)
    of_shared = [part for part in shared if part]
    return Gradients(
        x=torch.cat(d_x),
        router_weights=torch.where(case.top_experts >= 0, d_w, 0.0),
        routed=_finish(_concatenated(routed), grad_mode, into.routed if into else None),
        shared=_finish(
            _concatenated([part.weights for part in of_shared]),
            grad_mode,
            into.shared if into else None,
        )
        if of_shared
        else None,
        shared_scale=torch.cat([part.scale for part in of_shared])
        if of_shared and case.shared_scale is not None
        else None,
    )


class _SharedGradients(NamedTuple):
    x: Tensor
    weights: Experts
    scale: Tensor


def _shared(
    rank: _VirtualRank, experts: Experts, scale: Tensor, limit: float | None
) -> _SharedGradients:
    """The shared expert on a rank's own tokens: the same steps, with the scale as weight."""
    _, intermediate, hidden = experts.gate.shape
    rows = _Rows.empty(len(rank.x), hidden, intermediate, rank.x)
    rows.x.copy_(rank.x)
    rows.dy.copy_(rank.dy)
    every = torch.arange(len(rank.x), device=rank.x.device)
    _pre_activations(rows, every, experts, 0)
    dx, d_scale = _data_gradients(rows, every, experts, 0, scale, limit)
    return _SharedGradients(dx, _weight_gradients(rows, every), d_scale)


def _scales(case: Case) -> Tensor:
    if case.shared_scale is not None:
        return case.shared_scale
    return torch.ones(len(case.x), device=case.x.device)


def _concatenated(parts: Sequence[Experts]) -> Experts:
    return Experts(*(torch.cat(tensors) for tensors in zip(*map(_parts, parts), strict=True)))
