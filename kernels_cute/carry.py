"""Rows carried from global memory to global memory through a comm CTA's shared memory, by bulk copies.

Whole rows are on their way without a register: each warp has ``Hold.piece`` bytes of shared memory, cut in as many
slots as rows (or pieces of long rows) fit, one for each of its first lanes. A lane loads its row into its slot,
waits for it, stores it, and takes the next one once the slot has been read.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from . import comm, ptx, sync
from .comm import Rows, row_address
from .invariant import Invariant
from .sync import select

BARRIERS = 1024  # bytes in front: an mbarrier for each slot
LANES = 8  # slots of a warp, at most: 8 bytes of barrier each in ``BARRIERS``
PIECE = 16384  # bytes of shared memory for a warp, at most; a longer row is cut


def piece_bytes(free: int, warps: int) -> int:
    """Shared memory of a warp, of ``free`` bytes for ``warps`` warps, the barriers and a piece of zeros.

    Raises:
        ValueError: it is too little, or the barriers do not fit.
    """
    piece = min(PIECE, (free - BARRIERS) // (warps + 1) // 128 * 128)
    if piece < 1024 or 8 * LANES * warps > BARRIERS:
        raise ValueError(f"{free} bytes are too few for {warps} warps")
    return piece


class Hold(Invariant):
    """A comm CTA's shared memory from ``base`` (a multiple of 128) on: barriers, zeros, the warps' pieces."""

    def __init__(self, base: Int32, piece: int, warps: int, row_bytes: Int64):
        self.base, self.piece, self.warps = base, piece, warps
        self.row_bytes = Int32(row_bytes)
        self.pieces = (self.row_bytes + (piece - 1)) // piece  # of a row
        # Slots of a warp: rows of 128 bytes (H = 64) would fit more often than there are barriers.
        self.lanes = cutlass.min(Int32(piece) // self.row_bytes, Int32(LANES))
        self.lanes = select(self.pieces > 1, Int32(1), self.lanes)
        self.zeros = base + BARRIERS

    def barrier(self, warp: Int32, lane: Int32) -> cute.Pointer:
        """A slot's mbarrier."""
        first = cute.make_ptr(Int64, self.base, cute.AddressSpace.smem, assumed_align=8)
        return first + (warp * LANES + lane)

    def slot(self, warp: Int32, lane: Int32) -> Int32:
        """Address of a slot: its warp's piece has equal shares."""
        share = select(self.pieces > 1, Int32(self.piece), self.row_bytes)
        return self.zeros + (warp + 1) * self.piece + lane * share

    @cute.jit
    def init(self):
        """By all threads, once; they must be brought together before the first copy."""
        thread, _, _ = cute.arch.thread_idx()
        if thread < self.warps * LANES:
            cute.arch.mbarrier_init(self.barrier(Int32(0), thread), 1)
        for i in cutlass.range(thread, self.piece // 16, 32 * self.warps, unroll=1):
            ptx.shared_store_16(self.zeros + i * 16, *[Uint32(0)] * 4)
        cute.arch.mbarrier_init_fence()
        cute.arch.fence_proxy("async.shared", space="cta")


class Place(NamedTuple):
    """Where a lane's piece comes from and goes to."""

    source: Int64
    target: Int64
    bytes: Int32
    real: Boolean  # there is a row
    zero: Boolean  # there is none, and zeros are wanted


class Carrier(Invariant):
    """The rows of a comm item, dealt out to the slots of all warps in turn."""

    def __init__(self, hold: Hold, rows: Rows, first: Int32, count: int, warp: Int32):
        self.hold, self.rows, self.warp = hold, rows, warp
        self.lane = cute.arch.lane_idx()
        # Each lane knows a few rows, so that no piece waits for that; lanes beyond the item repeat its last.
        self.each = each = max(2, count // 32)
        mine = first + cutlass.min(each * self.lane, Int32(count - each))
        self.peers = [cute.arch.load(rows.peer_rank + mine + i, Int32) for i in range(each)]
        self.routes = [cute.arch.load(rows.peer_token_idx + mine + i, Int32) for i in range(each)]
        self.units = hold.pieces * count
        self.step = hold.lanes * hold.warps
        self.trips = (self.units + self.step - 1) // self.step

    def unit(self, trip: Int32):
        """This lane's piece in a trip (all lanes of the warp): (row, begin, bytes, peer, route, whether there is one)."""
        hold = self.hold
        number = trip * self.step + self.warp * hold.lanes + self.lane
        inside = (self.lane < hold.lanes) & (number < self.units)
        number = select(inside, number, Int32(0))
        row = number // hold.pieces
        begin = (number - row * hold.pieces) * hold.piece
        peer, route = self.known(self.peers, row), self.known(self.routes, row)
        size = cutlass.min(hold.row_bytes - begin, Int32(hold.piece))
        return row, begin, size, peer, route, inside

    def known(self, values: list[Int32], row: Int32) -> Int32:
        """What the lane that knows a row has of it (all lanes of the warp, each with a row of its own)."""
        lane, which = row // self.each, row % self.each
        found = [cute.arch.shuffle_sync(value, lane) for value in values]
        chosen = found[0]
        for i in range(1, self.each):
            chosen = select(which == i, found[i], chosen)
        return chosen

    @cute.jit
    def move(self, place: Place, phase: Int32) -> Int32:
        """One trip of this warp; returns the phase of the lane's barrier."""
        bar = self.hold.barrier(self.warp, self.lane)
        slot = self.hold.slot(self.warp, self.lane)
        if place.real:
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # the slot has been read
            cute.arch.mbarrier_arrive_and_expect_tx(bar, place.bytes)
            ptx.bulk_load(slot, place.source, place.bytes, bar.toint())
            cute.arch.mbarrier_wait(bar, phase)
            ptx.bulk_store(place.target, slot, place.bytes)
            phase = phase ^ 1
        elif place.zero:
            ptx.bulk_store(place.target, self.hold.zeros, place.bytes)
        cute.arch.cp_async_bulk_commit_group()
        return phase


class Worker(Invariant):
    """A comm CTA's ways to move rows: through ``hold``, its shared memory, or without one through registers.

    ``pull`` and ``push`` return the phase of the barrier of this lane's slot, which begins with 0 and goes into the next
    call. All rows of this thread are in memory then; with ``overlap`` they may still be on their way, and the item is
    *owed*: its counter's address goes into the next call, which tells of it behind its own first copies. Who waits
    for something in between must ``settle`` first: it may be what is owed that others wait for.
    """

    def __init__(
        self,
        hold: Hold | None,
        rows: Rows,
        count: int,
        warp: Int32,
        warps: int,
        overlap: bool = False,
    ):
        self.hold, self.rows, self.count = hold, rows, count
        self.warp, self.warps, self.overlap = warp, warps, overlap

    @cute.jit
    def settle(self, owed: Int64, newer: cutlass.Constexpr[int] = 0):
        """By all threads: once all but their ``newer`` last groups of copies are in memory, count the item owed.

        ``owed``: its counter, the same for all threads; 0 for none.
        """
        if owed != 0:
            cute.arch.cp_async_bulk_wait_group(newer, read=False)
            cute.arch.sync_threads()
            if cute.arch.thread_idx()[0] == 0:
                sync.arrive(sync.int_ptr(owed))

    @cute.jit
    def init(self):
        """By all threads, once; they must be brought together before the first row."""
        if cutlass.const_expr(self.hold is not None):
            self.hold.init()

    @cute.jit
    def pull(
        self,
        first: Int32,
        source_base: Int64,
        topk: Int32,
        target: Int64,
        phase: Int32,
        owed: Int64,
    ):
        """``count`` rows from ``first`` on, from their source ranks' buffer bf16 [tokens, H] to ``target``, bf16
        [count, H]; padding is zero."""
        rows = self.rows
        if cutlass.const_expr(self.hold is None):
            comm.pull_rows(
                rows, first, self.count, source_base, topk, target, self.warp, self.warps
            )
        else:
            carrier = Carrier(self.hold, rows, first, self.count, self.warp)
            cute.arch.fence_proxy("async.global")
            for trip in cutlass.range(carrier.trips, unroll=1):
                row, begin, size, peer, route, inside = carrier.unit(trip)
                source = row_address(rows, peer, route // topk, source_base) + begin
                to = target + Int64(row) * rows.row_bytes + begin
                real = inside & (peer >= 0)
                phase = carrier.move(Place(source, to, size, real, inside & (peer < 0)), phase)
                self.follow(trip, owed)
            self.finish()
        return phase

    @cute.jit
    def push(self, first: Int32, source: Int64, target_base: Int64, phase: Int32, owed: Int64):
        """``count`` rows at ``source``, bf16 [count, H], to their routes' slots, bf16 [tokens*K, H], on the tokens'
        own ranks; padding is skipped."""
        rows = self.rows
        if cutlass.const_expr(self.hold is None):
            comm.push_rows(rows, first, self.count, source, target_base, self.warp, self.warps)
        else:
            carrier = Carrier(self.hold, rows, first, self.count, self.warp)
            cute.arch.fence_proxy("async.global")  # the results' stores, which the caller awaited
            for trip in cutlass.range(carrier.trips, unroll=1):
                row, begin, size, peer, route, inside = carrier.unit(trip)
                at = source + Int64(row) * rows.row_bytes + begin
                to = row_address(rows, peer, route, target_base) + begin
                real = inside & (peer >= 0)
                phase = carrier.move(Place(at, to, size, real, Boolean(False)), phase)
                self.follow(trip, owed)
            self.finish()
        return phase

    @cute.jit
    def follow(self, trip: Int32, owed: Int64):
        """Behind a trip of copies, each thread's one group: behind the first, the last item's are all the others."""
        if cutlass.const_expr(self.overlap):
            if trip == 0:
                self.settle(owed, 1)

    @cute.jit
    def finish(self):
        """Behind an item's last trip."""
        if cutlass.const_expr(not self.overlap):
            cute.arch.cp_async_bulk_wait_group(0, read=False)
