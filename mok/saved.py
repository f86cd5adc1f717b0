"""What a call leaves for the calls that follow it: its schedule, and what backward needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from mok.arguments import version_of

if TYPE_CHECKING:
    from mok.runtime.workspace import ScheduleBuffers


@dataclass
class Schedule:
    """Which row of which expert each route is, for the local ranks; used by forward and backward.

    A pure function of the ids of all ranks. The properties give the first local rank's arrays (int32, on
    the device, sized for the worst routing; entries past ``num_tokens`` are undefined).
    """

    ranks: list[ScheduleBuffers]
    top_experts: list[Tensor]  # int64 or int32 [T, K] per local rank, as given
    sizes: tuple[int, ...] = ()  # (E, K, EP, tile, max_tokens) of its workspace; () where not known

    @property
    def peer_rank(self) -> Tensor:
        """[rows]: rank of a row's token, -1 for padding."""
        return self.ranks[0].peer_rank

    @property
    def peer_token_idx(self) -> Tensor:
        """[rows]: token*K + k on that rank, -1 for padding."""
        return self.ranks[0].peer_token_idx

    @property
    def num_tokens(self) -> Tensor:
        """[1]: rows of this rank, padding included."""
        return self.ranks[0].num_rows

    @property
    def tokens_per_expert(self) -> Tensor:
        """[El]: routes of each local expert, without padding."""
        return self.ranks[0].tokens_per_expert


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.dtype == b.dtype


def _versions(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple([version_of(t) for t in tensors])


@dataclass
class ForwardContext:
    """What backward needs of a forward call, per local rank (BF16; rows of macrobatch 0 only).

    x_routed [ring, H] (None at one rank: rows are gathered from x), gate_routed and up_routed [ring, I],
    gate_shared and up_shared [T, Is] (None without a shared expert), shared_y [T, H] where a later step
    needs it. In MXFP8 with block-scaled MMAs x_routed holds E4M3 bytes, x_scales (uint8 [ring·H/32])
    its scales in tiles.
    """

    x_routed: list[Tensor | None] = field(default_factory=list)
    gate_routed: list[Tensor] = field(default_factory=list)
    up_routed: list[Tensor] = field(default_factory=list)
    gate_shared: list[Tensor | None] = field(default_factory=list)
    up_shared: list[Tensor | None] = field(default_factory=list)
    x_scales: list[Tensor] = field(default_factory=list)
    used: bool = False  # by a backward call that did not keep it
    schedule: Schedule | None = None  # of the call that saved it, where known
    versions: tuple[int, ...] = ()  # of that schedule's ids

    @staticmethod
    def of(schedule: Schedule) -> ForwardContext:
        """An empty context for a call with this schedule."""
        return ForwardContext(schedule=schedule, versions=_versions(schedule.top_experts))

    def belongs_to(self, schedule: Schedule) -> bool:
        """Whether its rows are where this schedule says: it is the one of the call that saved it, or was
        built from the same ids again."""
        before = self.schedule
        if before is None or before is schedule:
            return True
        ids, others = schedule.top_experts, before.top_experts
        return (
            len(ids) == len(others)
            and all(_same_memory(a, b) for a, b in zip(ids, others, strict=True))
            and _versions(ids) == self.versions
        )

    def tensors(self) -> list[Tensor]:
        """All tensors, for autograd's saved-tensor hooks."""
        parts = (
            self.x_routed, self.gate_routed, self.up_routed, self.gate_shared, self.up_shared,
            self.x_scales,
        )  # fmt: skip
        return [t for part in parts for t in part if t is not None]
