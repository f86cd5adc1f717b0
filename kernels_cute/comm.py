"""The transfers between ranks: rows pulled into the ring, rows pushed to their token's own rank.

Pulls read peers' buffers that were complete before the kernel; pushes write slots that nobody reads
before the next device barrier. So no flag crosses GPUs here, and virtual ranks run the same code.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from . import ptx

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
    for i in cutlass.range(warp, count, warps, unroll=1):
        peer = cute.arch.load(rows.peer_rank + first + i, Int32)
        to = target + Int64(i) * rows.row_bytes
        if peer >= 0:
            token = cute.arch.load(rows.peer_token_idx + first + i, Int32) // topk
            source = source_base + Int64(peer) * rows.rank_stride + Int64(token) * rows.row_bytes
            copy_row(to, source, rows.row_bytes)
        else:
            zero_row(to, rows.row_bytes)


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
    for i in cutlass.range(warp, count, warps, unroll=1):
        peer = cute.arch.load(rows.peer_rank + first + i, Int32)
        if peer >= 0:
            slot = cute.arch.load(rows.peer_token_idx + first + i, Int32)
            target = target_base + Int64(peer) * rows.rank_stride + Int64(slot) * rows.row_bytes
            copy_row(target, source + Int64(i) * rows.row_bytes, rows.row_bytes)
