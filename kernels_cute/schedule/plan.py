"""What the host must know to launch the schedule: limits, scratch sizes, the number of chunks.

Plain Python, so that a memory plan can be made where the kernel language is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass

from mok.errors import ShapeError

WARP = 32
WARPS = 8  # of the count and place kernels
THREADS = WARP * WARPS
STREAMS = 64  # token streams that the row order interleaves
IDS_IN_FLIGHT = 4  # stage and count: loads that a thread issues before it uses the first
TILE_ROUTES = 8192  # count: routes that a CTA holds in shared memory at once, as int16
MAX_TOPK = 32
MAX_CHUNKS = 512  # scan: 32 warps hold 16 chunks each in registers
ROUTES_PER_CHUNK = 1024  # below it, a CTA's fixed cost dominates

MAX_LOCAL_EXPERTS = 5632  # place: 9 words of shared memory for each, 203 of 227 KB
MAX_RANKS = 4096  # place and count: one word of shared memory for each
MAX_ROUTES = 2**30  # of all ranks: their indices, and rows with padding, are int32

RECORD_WORDS = 8
"""An error record, int32 [8]: code, rank, token, k, low and high half of a value, limit, 0.

All zero means no error. The first thread to find one claims the record; later ones are dropped.
"""
ROUTE_OUT_OF_RANGE = 1  # value: the id, limit: E. The route counts as −1
ROWS_OUT_OF_CAPACITY = 2  # value: padded rows, limit: capacity. The schedule is empty instead


@dataclass(frozen=True)
class SchedulePlan:
    """Sizes of one rank's schedule for any call of at most ``max_tokens`` tokens on each rank.

    Attributes:
        num_local: El, this rank's experts.
        capacity: rows that suffice for every routing, padding included; a multiple of the tile.
        num_chunks: CTAs of the count and place kernels. Changes speed only.
        counts_bytes, totals_bytes, local_bytes, rank_starts_bytes: scratch, in the order of
            ``ScheduleKernel``'s arguments; each 4-byte aligned, contents irrelevant.
    """

    num_local: int
    capacity: int
    num_chunks: int
    counts_bytes: int
    totals_bytes: int
    local_bytes: int
    rank_starts_bytes: int


def schedule_plan(
    max_tokens: int, topk: int, num_experts: int, ep_size: int, rank: int, tile: int
) -> SchedulePlan:
    """Plan the schedule of ``rank``.

    Args:
        max_tokens: the most tokens of any rank in any call.
        tile: rows to which a segment is padded; a power of two (128 or 256).

    Raises:
        ShapeError: a limit of the schedule kernels is exceeded.
    """
    base, extra = divmod(num_experts, ep_size)
    num_local = base + (rank < extra)
    max_routes = max_tokens * ep_size * topk
    limits = [
        ("experts on one rank", num_local, MAX_LOCAL_EXPERTS, "Use more ranks"),
        ("ranks", ep_size, MAX_RANKS, "Use a smaller expert-parallel group"),
        ("routes K", topk, MAX_TOPK, "Lower K"),
        ("max_tokens·EP·K", max_routes, MAX_ROUTES, "Lower max_tokens"),
    ]
    for what, value, limit, remedy in limits:
        if value > limit:
            raise ShapeError(f"{what} must be at most {limit}", value, remedy)
    if tile < 1 or tile & (tile - 1):
        raise ShapeError("tile must be a power of two", tile)
    num_chunks = max(1, min(-(-max_routes // ROUTES_PER_CHUNK), MAX_CHUNKS))
    padding = min(num_local, max_routes) * (tile - 1)
    streams = -(-max_tokens * ep_size // STREAMS)
    return SchedulePlan(
        num_local=num_local,
        capacity=(max_routes + padding) // tile * tile,
        num_chunks=num_chunks,
        counts_bytes=num_chunks * num_local * 4,
        totals_bytes=num_local * 4,
        local_bytes=streams * STREAMS * topk * 2,
        rank_starts_bytes=(ep_size + 1) * 4,
    )


def stage_ctas(num_routes: int, num_sms: int) -> int:
    """CTAs of the stage kernel for T·K ids: enough for one pass, at most 8 per SM, at least 1."""
    return max(1, min(-(-num_routes // (THREADS * IDS_IN_FLIGHT)), 8 * num_sms))
