"""Which buffers a workspace has, and how large: the one place that sizes them. Plain Python."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from mok.config import Config, Shape, tile_rows
from mok.errors import CapacityError, DtypeError, ShapeError
from mok.kernels_cute.machine import machine_of
from mok.kernels_cute.program import Counters, counter_layout
from mok.kernels_cute.schedule.plan import SchedulePlan, schedule_plan

ITEM_BYTES = {"bfloat16": 2, "int32": 4, "int16": 2, "float32": 4, "uint8": 1}

PRECISIONS = ("bf16", "mxfp8")

Place = Literal["symmetric", "local", "schedule"]


@dataclass(frozen=True)
class Buffer:
    """One buffer of a workspace.

    Attributes:
        place: "symmetric" (mapped by all ranks), "local" (scratch of one launch, shared by the
            virtual ranks of a process), "schedule" (one per rank).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    place: Place
    what: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class WorkspacePlan:
    """Sizes and buffers of a workspace; ``str`` of it is a table.

    Attributes:
        capacity: rows that suffice for every routing of at most ``max_tokens`` tokens per rank.
        max_minibatches, max_blocks, shared_blocks: what the counters are laid out for.
        counters: offsets of the counters, in int32 words.
        schedule: sizes of the schedule kernels' scratch.
        direct: rows are gathered in place (EP = 1, BF16): no ring for x, y for all rows.
        scaled: MXFP8 where the MMA takes block scales: x and hidden are E4M3 with scales.
        wire: x in the heap is quantised.
        ring: rows of the ring: the macrobatch, or less where no routing can fill it.
        y_rows: rows of y.
        buffers: everything that is allocated.
    """

    max_tokens: int
    tile: int
    capacity: int
    max_minibatches: int
    max_blocks: int
    shared_blocks: int
    counters: Counters
    schedule: SchedulePlan
    direct: bool
    scaled: bool
    wire: bool
    ring: int
    y_rows: int
    buffers: tuple[Buffer, ...]

    def __iter__(self) -> Iterator[Buffer]:
        return iter(self.buffers)

    @property
    def ring_dtype(self) -> Any:
        """torch dtype of the x ring."""
        import torch

        return torch.uint8 if self.scaled else torch.bfloat16

    def bytes_of(self, place: Place) -> int:
        """Bytes of one rank's buffers of a kind."""
        return sum(b.nbytes for b in self.buffers if b.place == place)

    @property
    def nbytes(self) -> int:
        """Bytes per rank in a process of its own."""
        return sum(b.nbytes for b in self.buffers)

    def __str__(self) -> str:
        from mok.runtime.watchdog import table

        rows: list[list[object]] = [["buffer", "place", "dtype", "shape", "MiB", "what"]]
        for b in self.buffers:
            shape = " x ".join(map(str, b.shape))
            rows.append([b.name, b.place, b.dtype, shape, f"{b.nbytes / 2**20:.2f}", b.what])
        rows.append(["total", "", "", "", f"{self.nbytes / 2**20:.2f}", ""])
        return table(rows)


def plan_workspace(
    shape: Shape,
    config: Config,
    max_tokens: int,
    arch: str = "sm_90a",
    precision: str = "bf16",
) -> WorkspacePlan:
    """Plan the workspace of any rank; virtual ranks share what is not per rank.

    The row capacity is that of rank 0, which has the most experts:
    EP·max_tokens·K routes, and a tile less one row of padding for every expert.

    Args:
        shape: ``num_tokens`` is not used.
        max_tokens: the most tokens of any rank in any call, at least 1.
        precision: of the routed experts, "bf16" or "mxfp8".

    Raises:
        ShapeError: a limit is exceeded. DtypeError: no such precision.
    """
    check_precision(precision, shape)
    if max_tokens < 1:
        raise ShapeError("max_tokens must be at least 1", max_tokens)
    ep, hidden, inner, topk = shape.ep_size, shape.hidden_size, shape.intermediate_size, shape.topk
    shared = shape.shared_intermediate_size or 0
    tile = tile_rows(arch)
    schedule = schedule_plan(max_tokens, topk, shape.num_experts, ep, 0, tile)
    capacity = max(schedule.capacity, tile)
    if capacity * max(hidden, inner) >= 2**42:
        raise CapacityError("rows times columns must stay below 2^42", capacity)
    minibatch = config.minibatch_size
    max_minibatches = -(-capacity // minibatch)
    ring = min(config.macrobatch_size, max_minibatches * minibatch)
    max_blocks = capacity // tile
    shared_blocks = -(-max_tokens // tile) if shared else 0
    counters = counter_layout(max_minibatches, max_blocks, shared_blocks)
    direct = ep == 1 and precision == "bf16"
    scaled = precision == "mxfp8" and machine_of(arch).scaled_stages > 0
    wire = precision == "mxfp8" and config.mxfp8_wire
    values = "uint8" if scaled else "bfloat16"
    y_rows = capacity if direct else ring

    buffers = [
        # Two copies in turn: peers may still read one call's ids while the next are staged.
        Buffer("ids", (2, max_tokens, topk), "int32", "symmetric", "expert ids, two calls in turn"),
        Buffer("num_tokens", (2, 32), "int32", "symmetric", "token counts, two calls in turn"),
    ]
    if not direct:
        buffers += [
            Buffer(
                "x",
                (max_tokens, hidden),
                "uint8" if wire else "bfloat16",
                "symmetric",
                "tokens, pulled by peers",
            ),
            Buffer(
                "slots", (max_tokens * topk, hidden), "bfloat16", "symmetric", "results, from peers"
            ),
            Buffer("x_ring", (ring, hidden), values, "local", "dispatched rows"),
        ]
    if wire:
        buffers.append(
            Buffer("x_wire_scales", (max_tokens, hidden // 32), "uint8", "symmetric", "of x")
        )
    if scaled:
        buffers += [
            Buffer("x_scales", (ring * hidden // 32,), "uint8", "local", "of x_ring, in tiles"),
            Buffer("hidden_scales", (ring * inner // 32,), "uint8", "local", "of hidden"),
        ]
    buffers += [
        Buffer("hidden", (ring, inner), values, "local", "SwiGLU of gate and up"),
        Buffer("y", (y_rows, hidden), "bfloat16", "local", "results by row, d_x of backward"),
        Buffer(
            "counter_sets",
            (3, -(-counters.size // 32) * 32),
            "int32",
            "local",
            "tickets and arrivals",
        ),
    ]
    if shared:
        buffers += [
            Buffer("shared_hidden", (max_tokens, shared), "bfloat16", "local", "shared expert"),
        ]
    buffers += [
        Buffer("counts", (schedule.counts_bytes // 4,), "int32", "local", "schedule scratch"),
        Buffer("totals", (schedule.totals_bytes // 4,), "int32", "local", "schedule scratch"),
        Buffer("local_ids", (schedule.local_bytes // 2,), "int16", "local", "schedule scratch"),
        Buffer("rank_starts", (ep + 1,), "int32", "local", "schedule scratch"),
        *schedule_buffers(schedule, capacity, tile, max_tokens, topk, direct),
    ]
    return WorkspacePlan(
        max_tokens=max_tokens,
        tile=tile,
        capacity=capacity,
        max_minibatches=max_minibatches,
        max_blocks=max_blocks,
        shared_blocks=shared_blocks,
        counters=counters,
        schedule=schedule,
        direct=direct,
        scaled=scaled,
        wire=wire,
        ring=ring,
        y_rows=y_rows,
        buffers=tuple(buffers),
    )


def check_precision(precision: str, shape: Shape) -> None:
    """Refuse an unknown precision, and sizes that MXFP8 cannot have.

    Raises:
        DtypeError, ShapeError.
    """
    if precision not in PRECISIONS:
        raise DtypeError("precision must be bf16 or mxfp8", repr(precision))
    for name, size in (("H", shape.hidden_size), ("I", shape.intermediate_size)):
        if precision == "mxfp8" and size % 128:
            raise ShapeError(
                f"{name} must be a multiple of 128 for MXFP8: scales come in tiles of 128",
                size,
                "Use precision bf16, or pad the weights with zeros",
            )


def schedule_buffers(
    schedule: SchedulePlan, capacity: int, tile: int, max_tokens: int, topk: int, direct: bool
) -> list[Buffer]:
    """The outputs of the schedule kernels, as in ``mok.reference.RankSchedule``."""
    experts = schedule.num_local
    rows = [
        Buffer("peer_rank", (capacity,), "int32", "schedule", "rank of a row's token"),
        Buffer("peer_token_idx", (capacity,), "int32", "schedule", "token * K + k there"),
        Buffer("num_rows", (1,), "int32", "schedule", "padded rows"),
        Buffer("tokens_per_expert", (experts,), "int32", "schedule", "routes of an expert"),
        Buffer("expert_offset", (experts + 1,), "int32", "schedule", "padded segment starts"),
        Buffer("block_expert", (capacity // tile,), "int32", "schedule", "expert of a row block"),
    ]
    if direct:
        rows.append(
            Buffer("route_row", (max_tokens * topk,), "int32", "schedule", "row of a route")
        )
    return rows
