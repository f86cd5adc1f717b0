"""The schedule in plain torch: which route lies in which row of which rank.

The kernels of ``mok.kernels_cute.schedule`` must reproduce this exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mok.config import MAX_TOPK, Shape
from mok.errors import DtypeError, RouteError, ShapeError

NUM_STREAMS = 64  # consecutive rows come from this many evenly spaced token streams


@dataclass(frozen=True)
class RankSchedule:
    """The rows of one rank: its experts' segments in ascending order, each padded to the tile.

    Attributes:
        peer_rank: int32 [rows], the rank that holds the row's token; -1 marks a padding row.
        peer_token_idx: int32 [rows], token·K + k on that rank; -1 marks a padding row.
        tokens_per_expert: int32 [El], rows of each local expert without padding.
        num_tokens: rows with padding.
        block_expert: int32 [rows/tile], local expert of each tile of rows.
        route_row: int32 [T·K], the row of each of this rank's routes, -1 for a dropped one. Only
            at EP = 1, where a token's rows are all on its own rank; None otherwise.
    """

    peer_rank: Tensor
    peer_token_idx: Tensor
    tokens_per_expert: Tensor
    num_tokens: int
    block_expert: Tensor
    route_row: Tensor | None


def token_order(num_tokens: int, device: torch.device | str = "cpu") -> Tensor:
    """Global token indices g in row order: by (g mod S, g div S) with S = ceil(N/64). int64 [N].

    The order does not mention EP, so that results do not depend on it; and 64 consecutive tokens
    of it are spread evenly over all ranks, so that each of up to 64 peers is read from evenly.
    """
    stride = -(-num_tokens // NUM_STREAMS)
    streams = torch.arange(NUM_STREAMS * stride, device=device).view(NUM_STREAMS, stride)
    order = streams.t().reshape(-1)
    return order[order < num_tokens]


def schedule_reference(
    ids_per_rank: Sequence[Tensor], num_experts: int, ep_size: int, tile: int
) -> list[RankSchedule]:
    """Build the schedules of all ranks from the expert ids of all tokens.

    Args:
        ids_per_rank: one int64 [T_r, K] tensor per rank; -1 drops a route. T_r may differ and be 0.
        num_experts: E, routed experts on all ranks.
        tile: rows to which each expert's segment is padded.

    Returns:
        One RankSchedule per rank, on the ids' device. A rank without experts gets no rows.

    Raises:
        ShapeError, DtypeError: the ids' shapes or types are wrong.
        RouteError: an id is neither -1 nor in 0…E-1.
    """
    _check(ids_per_rank, num_experts, ep_size, tile)
    device = ids_per_rank[0].device
    topk = ids_per_rank[0].shape[1]
    ids = torch.cat(list(ids_per_rank))
    lengths = torch.tensor([len(i) for i in ids_per_rank], device=device)
    rank_start = lengths.cumsum(0) - lengths
    rank_of_token = torch.arange(ep_size, device=device).repeat_interleave(lengths)

    # Visit routes in (token order, k); a stable sort by expert then gives the row order.
    tokens = token_order(len(ids), device)
    expert, visit = ids[tokens].reshape(-1).sort(stable=True)
    dropped = int((expert < 0).sum())
    expert, visit = expert[dropped:], visit[dropped:]
    token = tokens[visit // topk]
    k = visit % topk

    counts = torch.bincount(expert, minlength=num_experts)
    padded = (counts + tile - 1) // tile * tile
    place_in_segment = (
        torch.arange(len(expert), device=device) - (counts.cumsum(0) - counts)[expert]
    )
    segment_start = padded.cumsum(0) - padded  # in rows of all ranks, concatenated
    row = segment_start[expert] + place_in_segment

    total = int(padded.sum())
    peer_rank = torch.full((total,), -1, dtype=torch.int32, device=device)
    peer_token_idx = torch.full_like(peer_rank, -1)
    source = rank_of_token[token]
    peer_rank[row] = source.int()
    peer_token_idx[row] = ((token - rank_start[source]) * topk + k).int()

    route_row = None
    if ep_size == 1:
        route_row = torch.full((ids.numel(),), -1, dtype=torch.int32, device=device)
        route_row[token * topk + k] = row.int()

    shape = Shape(0, 64, 64, num_experts, topk, ep_size)  # for the placement of experts
    schedules = []
    row_end = 0
    for rank in range(ep_size):
        experts = shape.experts_on(rank)
        local_padded = padded[experts.start : experts.stop]
        rows = int(local_padded.sum())
        here = slice(row_end, row_end + rows)
        row_end += rows
        local_ids = torch.arange(len(experts), dtype=torch.int32, device=device)
        schedules.append(
            RankSchedule(
                peer_rank=peer_rank[here],
                peer_token_idx=peer_token_idx[here],
                tokens_per_expert=counts[experts.start : experts.stop].int(),
                num_tokens=rows,
                block_expert=local_ids.repeat_interleave(local_padded // tile),
                route_row=route_row,
            )
        )
    return schedules


def _check(ids_per_rank: Sequence[Tensor], num_experts: int, ep_size: int, tile: int) -> None:
    if len(ids_per_rank) != ep_size or ep_size < 1:
        raise ShapeError(
            "there must be one tensor of ids per rank", f"{len(ids_per_rank)} for EP = {ep_size}"
        )
    if tile < 1:
        raise ShapeError("tile must be at least 1", tile)
    topk = ids_per_rank[0].shape[-1]
    for rank, ids in enumerate(ids_per_rank):
        if ids.dtype != torch.int64:
            raise DtypeError(f"expert ids of rank {rank} must be int64", ids.dtype, "Use .long()")
        if ids.ndim != 2 or ids.shape[1] != topk or not 1 <= topk <= MAX_TOPK:
            raise ShapeError(
                f"expert ids of rank {rank} must be [T, K] with one K in 1…{MAX_TOPK} everywhere",
                tuple(ids.shape),
            )
        wrong = (ids < -1) | (ids >= num_experts)
        if bool(wrong.any()):
            token, k = (int(i) for i in wrong.nonzero()[0])
            raise RouteError(
                f"expert ids must be -1 or in 0…{num_experts - 1}",
                f"{int(ids[token, k])} at rank {rank}, token {token}, k {k}",
                "Use -1 to drop a route",
            )
