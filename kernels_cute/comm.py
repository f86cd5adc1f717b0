"""The transfers between ranks: rows pulled into the ring, rows pushed to their token's own rank.

Pulls read peers' buffers that were complete before the kernel; pushes write slots that nobody reads
before the next device barrier. So no flag crosses GPUs here, and virtual ranks run the same code.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from . import ptx
from .sync import select

# Independent 16-byte transfers per lane before the first is used: 4 KB in flight per warp.
IN_FLIGHT = 8


class Rows(NamedTuple):
    """Where a rank's rows come from and go to, and how long they are."""

    peer_rank: cute.Pointer  # int32 [rows]: rank of a row's token, -1 for padding
    peer_token_idx: cute.Pointer  # int32 [rows]: token*K + k on that rank
    rank_stride: Int64  # bytes between two ranks' heaps
    row_bytes: Int64  # 2*H


@cute.jit
def copy_row(target: Int64, source: Int64, row_bytes: Int64):
    """One warp copies a row of ``row_bytes`` (a multiple of 128)."""
    lane = Int64(cute.arch.lane_idx() * 16)
    step = 32 * 16 * IN_FLIGHT
    whole = row_bytes // step
    for i in cutlass.range(Int32(whole), unroll=1):
        at = Int64(i) * step + lane
        values = [ptx.load_16(source + at + Int64(j * 512)) for j in range(IN_FLIGHT)]
        for j in cutlass.range_constexpr(IN_FLIGHT):
            ptx.store_16(target + at + Int64(j * 512), *values[j])
    rest = whole * step + lane
    for _ in cutlass.range(Int32((row_bytes - whole * step + 511) // 512), unroll=1):
        if rest < row_bytes:
            ptx.store_16(target + rest, *ptx.load_16(source + rest))
        rest += Int64(512)


@cute.jit
def copy_two_rows(
    target: Int64, source: Int64, other_target: Int64, other_source: Int64, row_bytes: Int64
):
    """One warp copies two rows at once: twice the bytes are on their way over the link."""
    lane = Int64(cute.arch.lane_idx() * 16)
    step = 32 * 16 * IN_FLIGHT
    whole = row_bytes // step
    for i in cutlass.range(Int32(whole), unroll=1):
        at = Int64(i) * step + lane
        values = [ptx.load_16(source + at + Int64(j * 512)) for j in range(IN_FLIGHT)]
        others = [ptx.load_16(other_source + at + Int64(j * 512)) for j in range(IN_FLIGHT)]
        for j in cutlass.range_constexpr(IN_FLIGHT):
            ptx.store_16(target + at + Int64(j * 512), *values[j])
        for j in cutlass.range_constexpr(IN_FLIGHT):
            ptx.store_16(other_target + at + Int64(j * 512), *others[j])
    rest = whole * step + lane
    for _ in cutlass.range(Int32((row_bytes - whole * step + 511) // 512), unroll=1):
        if rest < row_bytes:
            value, other = ptx.load_16(source + rest), ptx.load_16(other_source + rest)
            ptx.store_16(target + rest, *value)
            ptx.store_16(other_target + rest, *other)
        rest += Int64(512)


@cute.jit
def zero_row(target: Int64, row_bytes: Int64):
    """One warp clears a row."""
    zero = Uint32(0)
    at = Int64(cute.arch.lane_idx() * 16)
    for _ in cutlass.range(Int32((row_bytes + 511) // 512), unroll=1):
        if at < row_bytes:
            ptx.store_16(target + at, zero, zero, zero, zero)
        at += Int64(512)


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
    for i in cutlass.range(2 * warp, count, 2 * warps, unroll=1):
        peer = cute.arch.load(rows.peer_rank + first + i, Int32)
        other_peer = cute.arch.load(rows.peer_rank + first + i + 1, Int32)
        to = target + Int64(i) * rows.row_bytes
        other_to = to + rows.row_bytes
        source = source_row(rows, first + i, peer, source_base, topk)
        other_source = source_row(rows, first + i + 1, other_peer, source_base, topk)
        # Padding follows a segment's last row, so a first row of padding means two.
        if other_peer >= 0:
            copy_two_rows(to, source, other_to, other_source, rows.row_bytes)
        else:
            zero_row(other_to, rows.row_bytes)
            if peer >= 0:
                copy_row(to, source, rows.row_bytes)
            else:
                zero_row(to, rows.row_bytes)


def source_row(rows: Rows, row: Int32, peer: Int32, base: Int64, topk: Int32) -> Int64:
    """Address of a row's token on its own rank (any valid address for padding)."""
    token = cute.arch.load(rows.peer_token_idx + row, Int32) // topk
    valid = peer >= 0
    return (
        base
        + Int64(select(valid, peer, Int32(0))) * rows.rank_stride
        + Int64(select(valid, token, Int32(0))) * rows.row_bytes
    )


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
    for i in cutlass.range(2 * warp, count, 2 * warps, unroll=1):
        peer = cute.arch.load(rows.peer_rank + first + i, Int32)
        other_peer = cute.arch.load(rows.peer_rank + first + i + 1, Int32)
        at = source + Int64(i) * rows.row_bytes
        target = slot_row(rows, first + i, peer, target_base)
        other_target = slot_row(rows, first + i + 1, other_peer, target_base)
        if other_peer >= 0:
            copy_two_rows(target, at, other_target, at + rows.row_bytes, rows.row_bytes)
        elif peer >= 0:
            copy_row(target, at, rows.row_bytes)


def slot_row(rows: Rows, row: Int32, peer: Int32, base: Int64) -> Int64:
    """Address of a row's slot on its token's rank (any valid address for padding)."""
    slot = cute.arch.load(rows.peer_token_idx + row, Int32)
    valid = peer >= 0
    return (
        base
        + Int64(select(valid, peer, Int32(0))) * rows.rank_stride
        + Int64(select(valid, slot, Int32(0))) * rows.row_bytes
    )
