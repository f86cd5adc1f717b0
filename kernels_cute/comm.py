"""The transfers between ranks: rows pulled into the ring, rows pushed to their token's own rank.

Pulls read peers' buffers that were complete before the kernel; pushes write slots that nobody reads
before the next device barrier. So no flag crosses GPUs here, and virtual ranks run the same code. Here rows
pass through registers; ``carry`` moves them by bulk copies, ``comm_mxfp8`` quantises them on their way.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from . import ptx
from .invariant import Invariant
from .sync import select

# Independent 16-byte transfers of each of two rows per lane before the first is used: 8 KB per warp.
IN_FLIGHT = 8
PIECE = 32 * 16 * IN_FLIGHT  # bytes of a row that a warp has in flight


class Rows(NamedTuple):
    """Where a rank's rows come from and go to, and how long they are."""

    peer_rank: cute.Pointer  # int32 [rows]: rank of a row's token, -1 for padding
    peer_token_idx: cute.Pointer  # int32 [rows]: token*K + k on that rank
    rank_stride: Int64  # bytes between two ranks' heaps
    row_bytes: Int64  # 2*H


@cute.jit
def copy_piece(target: Int64, source: Int64, begin: Int32, row_bytes: Int32):
    """One warp copies up to ``PIECE`` bytes of a row from byte ``begin`` on."""
    lane = begin + cute.arch.lane_idx() * 16
    inside = [lane + 512 * j < row_bytes for j in range(IN_FLIGHT)]
    # Past the end the row's first bytes are loaded, and not used.
    ats = [Int64(select(inside[j], lane + 512 * j, Int32(0))) for j in range(IN_FLIGHT)]
    values = [ptx.load_16(source + at) for at in ats]
    for j in cutlass.range_constexpr(IN_FLIGHT):
        if inside[j]:
            ptx.store_16(target + ats[j], *values[j])


@cute.jit
def copy_two_pieces(
    target: Int64,
    source: Int64,
    other_target: Int64,
    other_source: Int64,
    begin: Int32,
    row_bytes: Int32,
):
    """The same of two rows at once: twice the bytes are on their way over the link."""
    lane = begin + cute.arch.lane_idx() * 16
    if begin + PIECE <= row_bytes:
        at = Int64(lane)
        values = [ptx.load_16(source + at + Int64(512 * j)) for j in range(IN_FLIGHT)]
        others = [ptx.load_16(other_source + at + Int64(512 * j)) for j in range(IN_FLIGHT)]
        for j in cutlass.range_constexpr(IN_FLIGHT):
            ptx.store_16(target + at + Int64(512 * j), *values[j])
        for j in cutlass.range_constexpr(IN_FLIGHT):
            ptx.store_16(other_target + at + Int64(512 * j), *others[j])
    else:  # a half at a time, whose bounds take registers too; most ends are no longer than one
        half: cutlass.Constexpr[int] = IN_FLIGHT // 2
        for h in cutlass.range_constexpr(2):
            if begin + 512 * half * h < row_bytes:
                offsets = [lane + 512 * (half * h + j) for j in range(half)]
                inside = [offset < row_bytes for offset in offsets]
                # Past the end the row's first bytes are loaded, and not used.
                ats = [Int64(select(inside[j], offsets[j], Int32(0))) for j in range(half)]
                values = [ptx.load_16(source + at) for at in ats]
                others = [ptx.load_16(other_source + at) for at in ats]
                for j in cutlass.range_constexpr(half):
                    if inside[j]:
                        ptx.store_16(target + ats[j], *values[j])
                        ptx.store_16(other_target + ats[j], *others[j])


@cute.jit
def zero_piece(target: Int64, begin: Int32, row_bytes: Int32):
    """One warp clears up to ``PIECE`` bytes of a row from byte ``begin`` on."""
    zero = Uint32(0)
    lane = begin + cute.arch.lane_idx() * 16
    for j in cutlass.range_constexpr(IN_FLIGHT):
        if lane + 512 * j < row_bytes:
            ptx.store_16(target + Int64(lane + 512 * j), zero, zero, zero, zero)


class Pairs(Invariant):
    """The pairs of rows of a comm item, cut in pieces; the item's warps take pieces in turn.

    Lane l holds where rows 2l and 2l+1 go, so that no piece waits for that to be loaded. All rows' first
    pieces go before the second ones: a row's last piece may be short, and every warp gets some of those.
    """

    def __init__(self, rows: Rows, first: Int32, count: int):
        if count > 64:
            raise ValueError(f"a comm item has at most 64 rows, two for each lane: {count}")
        # Lanes beyond the item repeat its last pair.
        mine = first + cutlass.min(2 * cute.arch.lane_idx(), Int32(count - 2))
        self.peers = [cute.arch.load(rows.peer_rank + mine + i, Int32) for i in range(2)]
        self.routes = [cute.arch.load(rows.peer_token_idx + mine + i, Int32) for i in range(2)]
        self.row_bytes = Int32(rows.row_bytes)
        self.count = count // 2
        self.units = (self.row_bytes + (PIECE - 1)) // PIECE * self.count

    def unit(self, number: Int32) -> tuple[Int32, Int32, list[Int32], list[Int32]]:
        """Of a piece: its pair of rows, its first byte, the rows' peers (-1: padding) and routes."""
        pair = number % self.count
        begin = number // self.count * PIECE
        peers = [cute.arch.shuffle_sync(value, pair) for value in self.peers]
        routes = [cute.arch.shuffle_sync(value, pair) for value in self.routes]
        return pair, begin, peers, routes


@cute.jit
def pull_rows(
    rows: Rows,
    first: Int32,
    count: cutlass.Constexpr[int],
    source_base: Int64,
    topk: Int32,
    target: Int64,
    warp: Int32,
    warps: cutlass.Constexpr[int],
):
    """Rows ``first … first+count`` from their source ranks' buffer [tokens, H] to ``target``; padding is zero."""
    pairs = Pairs(rows, first, count)
    for number in cutlass.range(warp, pairs.units, warps, unroll=1):
        pair, begin, peers, routes = pairs.unit(number)
        to = target + Int64(2 * pair) * rows.row_bytes
        other_to = to + rows.row_bytes
        source, other_source = [
            row_address(rows, peers[i], routes[i] // topk, source_base) for i in range(2)
        ]
        # Padding follows a segment's last row, so a first row of padding means two.
        if peers[1] >= 0:
            copy_two_pieces(to, source, other_to, other_source, begin, pairs.row_bytes)
        else:
            zero_piece(other_to, begin, pairs.row_bytes)
            if peers[0] >= 0:
                copy_piece(to, source, begin, pairs.row_bytes)
            else:
                zero_piece(to, begin, pairs.row_bytes)


def row_address(rows: Rows, peer: Int32, index: Int32, base: Int64) -> Int64:
    """Address of row ``index`` of a rank's buffer (any valid address for padding)."""
    valid = peer >= 0
    return (
        base
        + Int64(select(valid, peer, Int32(0))) * rows.rank_stride
        + Int64(select(valid, index, Int32(0))) * rows.row_bytes
    )


def source_row(rows: Rows, row: Int32, peer: Int32, base: Int64, topk: Int32) -> Int64:
    """Address of a row's token on its own rank (any valid address for padding)."""
    token = cute.arch.load(rows.peer_token_idx + row, Int32) // topk
    return row_address(rows, peer, token, base)


@cute.jit
def push_rows(
    rows: Rows,
    first: Int32,
    count: cutlass.Constexpr[int],
    source: Int64,
    target_base: Int64,
    warp: Int32,
    warps: cutlass.Constexpr[int],
):
    """Rows at ``source`` to their routes' slots [tokens*K, H] on the tokens' own ranks; padding is skipped."""
    pairs = Pairs(rows, first, count)
    for number in cutlass.range(warp, pairs.units, warps, unroll=1):
        pair, begin, peers, routes = pairs.unit(number)
        at = source + Int64(2 * pair) * rows.row_bytes
        target, other_target = [
            row_address(rows, peers[i], routes[i], target_base) for i in range(2)
        ]
        if peers[1] >= 0:
            copy_two_pieces(target, at, other_target, at + rows.row_bytes, begin, pairs.row_bytes)
        elif peers[0] >= 0:
            copy_piece(target, at, begin, pairs.row_bytes)
