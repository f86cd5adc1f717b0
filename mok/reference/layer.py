"""The scheduled reference: the kernel's steps and rounding points, on virtual ranks, in torch.

What the kernel computes tile by tile, this computes minibatch by minibatch: the same schedule, the
same ring with the same reuse of slots, the same pulls and pushes between ranks, and the same places
where values round to BF16. Buffers start as NaN, so that reading what was never written shows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mok.config import Shape
from mok.errors import ShapeError
from mok.reference.cases import Case, Experts
from mok.reference.mxfp8 import PRECISIONS, Precision, precision_of
from mok.reference.precision import fma32, ieee_matmul
from mok.reference.schedule import RankSchedule, schedule_reference

LOG2_E = 1.4426950408889634


def swiglu(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """silu(gate)·up of FP32 accumulators, each operation rounded to FP32, the result to BF16.

    silu(g) = g·rcp(1 + ex2(-g·log2 e)), the kernels' formula.
    """
    if limit is not None:
        gate = gate.clamp(max=limit)
        up = up.clamp(-limit, limit)
    sigmoid = 1 / (1 + torch.exp2(gate * -LOG2_E))
    return (gate * sigmoid * up).bfloat16()


def ffn(
    x: Tensor,
    experts: Experts,
    expert: int,
    limit: float | None,
    precision: Precision = PRECISIONS["bf16"],
) -> Tensor:
    """One expert on rows x, BF16 [R, H] → y, BF16 [R, H]; FP32 accumulation, hidden in BF16.

    x and the weights are as the GEMM sees them; hidden goes through ``precision`` here.
    """
    rows = x.float()
    gate = rows @ experts.gate[expert].float().t()
    up = rows @ experts.up[expert].float().t()
    hidden = precision.rows(swiglu(gate, up, limit))
    return (hidden.float() @ experts.down[expert].float().t()).bfloat16()


def token_sum(
    slots: Tensor,
    router_weights: Tensor | None,
    top_experts: Tensor,
    y_shared: Tensor | None,
    shared_scale: Tensor | None = None,
) -> Tensor:
    """Σ_k w_k·y_k in FP32: shared first, k ascending, one fma per term, one rounding to BF16.

    Args:
        slots: BF16 [T·K, H], y of route token·K + k. Slots of dropped routes are not read.
        router_weights: FP32 [T, K]; those of dropped routes are not read. None: plain additions,
            as backward's sum of the routes' gradients of x.
        y_shared: BF16 [T, H] or None.
        shared_scale: FP32 [T]: the sum starts from scale·y_shared, rounded to FP32.

    Returns:
        BF16 [T, H].
    """
    num_tokens, topk = top_experts.shape
    by_k = slots.view(num_tokens, topk, slots.shape[-1])
    total = torch.zeros_like(by_k[:, 0], dtype=torch.float32)
    if y_shared is not None:
        total = y_shared.float()
        if shared_scale is not None:
            total = shared_scale.unsqueeze(1) * total
    for k in range(topk):
        used = (top_experts[:, k] >= 0).unsqueeze(1)
        y = by_k[:, k].float()
        weight = None if router_weights is None else router_weights[:, k : k + 1]
        added = total + y if weight is None else fma32(weight, y, total)
        total = torch.where(used, added, total)
    return total.bfloat16()


class _VirtualRank:
    """One rank's memory: its inputs, its ring, and the slots into which its peers push."""

    def __init__(
        self,
        schedule: RankSchedule,
        experts: Experts,
        x: Tensor,
        top_experts: Tensor,
        router_weights: Tensor,
        ring_rows: int,
    ) -> None:
        self.schedule = schedule
        self.experts = experts
        self.x = x
        self.top_experts = top_experts
        self.router_weights = router_weights
        hidden = x.shape[1]
        self.x_ring = x.new_full((ring_rows, hidden), torch.nan)
        self.y_ring = torch.full_like(self.x_ring, torch.nan)
        self.slots = x.new_full((top_experts.numel(), hidden), torch.nan)


class _Forward:
    """The routed experts of one rank, minibatch by minibatch."""

    def __init__(
        self,
        ranks: list[_VirtualRank],
        me: int,
        minibatch: int,
        macrobatch: int,
        tile: int,
        precision: Precision,
    ) -> None:
        self.ranks = ranks
        self.me = ranks[me]
        self.minibatch = minibatch
        self.macrobatch = macrobatch
        self.precision = precision
        self.topk = self.me.top_experts.shape[1]
        self.row_expert = self.me.schedule.block_expert.repeat_interleave(tile)

    def processing_order(self) -> list[int]:
        """First rows of the minibatches. Macrobatches go from last to first, so that the ring ends
        with the first one in it, which is never partial unless it is the only one."""
        starts = range(0, self.me.schedule.num_tokens, self.minibatch)
        return sorted(starts, key=lambda r: (-(r // self.macrobatch), r))

    def run(self, limit: float | None) -> None:
        order = self.processing_order()
        next_in_slot: dict[int, int] = {}
        last_in_slot: dict[int, int] = {}
        for start in order:
            slot = start % self.macrobatch
            if slot in last_in_slot:
                next_in_slot[last_in_slot[slot]] = start
            else:
                self.dispatch(start)  # a fresh slot waits for nothing
            last_in_slot[slot] = start
        for start in order:
            self.compute(start, limit)
            self.combine(start)
            if start in next_in_slot:
                self.dispatch(next_in_slot[start])

    def rows(self, start: int) -> tuple[Tensor, Tensor]:
        """The real rows of a minibatch, and their places in the ring."""
        real = self.me.schedule.peer_rank[start : start + self.minibatch] >= 0
        rows = start + real.nonzero().flatten()
        return rows, rows % self.macrobatch

    def dispatch(self, start: int) -> None:
        """Pull x from the ranks that hold the tokens. Padding rows keep what was there."""
        rows, places = self.rows(start)
        source = self.me.schedule.peer_rank[rows]
        token = self.me.schedule.peer_token_idx[rows] // self.topk
        for rank, peer in enumerate(self.ranks):
            pulled = source == rank
            self.me.x_ring[places[pulled]] = self.precision.rows(peer.x[token[pulled]])

    def compute(self, start: int, limit: float | None) -> None:
        rows, places = self.rows(start)
        row_expert = self.row_expert[rows]
        for expert in row_expert.unique().tolist():
            here = places[row_expert == expert]
            self.me.y_ring[here] = ffn(
                self.me.x_ring[here], self.me.experts, expert, limit, self.precision
            )

    def combine(self, start: int) -> None:
        """Push y to the private slot of each route on the token's own rank."""
        rows, places = self.rows(start)
        target = self.me.schedule.peer_rank[rows]
        slot = self.me.schedule.peer_token_idx[rows]
        for rank, peer in enumerate(self.ranks):
            pushed = target == rank
            peer.slots[slot[pushed]] = self.me.y_ring[places[pushed]]


def partition(
    case: Case,
    ep_size: int,
    tokens_per_rank: Sequence[int] | None,
    tile: int,
    minibatch: int | None,
    macrobatch: int | None,
) -> tuple[list[int], int, int]:
    """(tokens of each rank, minibatch, macrobatch), with the defaults of ``forward_reference``.

    Raises:
        ShapeError: they do not fit together.
    """
    minibatch = minibatch or tile
    macrobatch = macrobatch or 4 * minibatch
    lengths = list(tokens_per_rank or case.tokens_per_rank(ep_size))
    if len(lengths) != ep_size or sum(lengths) != len(case.x):
        raise ShapeError(
            f"tokens_per_rank must be {ep_size} counts with sum {len(case.x)}", lengths
        )
    if minibatch % tile or macrobatch % minibatch:
        raise ShapeError(
            "minibatch must be a multiple of tile, and macrobatch of minibatch",
            f"tile {tile}, minibatch {minibatch}, macrobatch {macrobatch}",
        )
    return lengths, minibatch, macrobatch


def forward_reference(
    case: Case,
    ep_size: int = 1,
    *,
    tokens_per_rank: Sequence[int] | None = None,
    tile: int = 128,
    minibatch: int | None = None,
    macrobatch: int | None = None,
    precision: str = "bf16",
) -> Tensor:
    """The layer's output as the kernel computes it, on ``ep_size`` virtual ranks.

    Args:
        tokens_per_rank: how the N tokens are split, in order; evenly by default.
        tile: rows to which segments are padded (128 on SM90, 256 on SM100 and SM103).
        minibatch, macrobatch: rows; by default one tile, and a ring of four minibatches.
        precision: of the routed experts' GEMMs. With "mxfp8" x is quantised in dispatch, hidden in the
            epilogue of SwiGLU, weights along their contraction; the shared expert stays BF16.

    Returns:
        BF16 [N, H], the ranks' outputs one after the other.
    """
    lengths, minibatch, macrobatch = partition(
        case, ep_size, tokens_per_rank, tile, minibatch, macrobatch
    )
    num_experts = case.routed.gate.shape[0]
    numerics = precision_of(precision)
    weights_seen = Experts(
        *(numerics.rows(w) for w in (case.routed.gate, case.routed.up, case.routed.down))
    )
    ids = case.top_experts.split(lengths)
    schedules = schedule_reference(ids, num_experts, ep_size, tile)
    placement = Shape(0, 64, 64, num_experts, ids[0].shape[1], ep_size)
    scales = [None] * ep_size if case.shared_scale is None else case.shared_scale.split(lengths)
    ranks = []
    for r, (x, weights) in enumerate(
        zip(case.x.split(lengths), case.router_weights.split(lengths), strict=True)
    ):
        local = placement.experts_on(r)
        experts = weights_seen[local.start : local.stop]
        ranks.append(_VirtualRank(schedules[r], experts, x, ids[r], weights, macrobatch))
    with ieee_matmul():
        for r in range(ep_size):
            _Forward(ranks, r, minibatch, macrobatch, tile, numerics).run(case.swiglu_limit)
        # The device barrier: from here on every slot has been pushed.
        outputs = []
        for rank, scale in zip(ranks, scales, strict=True):
            y_shared = ffn(rank.x, case.shared, 0, case.swiglu_limit) if case.shared else None
            outputs.append(
                token_sum(rank.slots, rank.router_weights, rank.top_experts, y_shared, scale)
            )
    return torch.cat(outputs)
