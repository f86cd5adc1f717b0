"""Results on their way from shared memory to their routes' slots, past ring and comm workers (Hopper).

Two warps, which the ring leaves idle, read the staging buffers beside the store warp: of a task of kind ``pushes`` each
writes its 64 rows, 128 bytes of a row at a time, to the slots on the tokens' own ranks. Nobody reads these before
the next device barrier, so a task is signalled as soon as it is computed: that only says that its inputs' slots in
the ring are free.
"""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from . import ptx
from .comm import row_address
from .machine import CHUNK_N
from .program import END
from .queue import next_slot
from .sync import advance, select_i64

PUSH_WARPS, FIRST_PUSH_WARP = 2, 2
ROWS = 64  # of a push warp: two for each lane
AT_ONCE = 8  # 16-byte pieces of a lane in registers


class PushRole:
    """Mixed into kernels, which say what they push and what else is staged."""

    pushes: int  # the kind of task whose rows are pushed: tiles of ``tile.down_n`` columns of H
    # (ctx): rank 0's address of the slots, bf16 [max tokens * K, H] on every rank
    push_slots: Callable[..., Int64]
    # (entry): staging buffers that another kind of task fills; 0 for ``END``
    passed_chunks: Callable[..., Int32]

    @cute.jit
    def push_role(self, ctx, shared):
        """Send the rows of ``pushes``; keep step with the buffers of all other tasks."""
        staging, stores, queue = self.staging, shared.stores, shared.queue
        first = (cute.arch.make_warp_uniform(cute.arch.warp_idx()) - FIRST_PUSH_WARP) * ROWS
        slot, slot_phase = Int32(0), Int32(0)
        chunk, phase = Int32(0), Int32(0)
        kind = Int32(END + 1)
        while kind != END:
            entry = queue.get(slot, slot_phase, self.entry)
            slot, slot_phase = next_slot(slot, slot_phase)
            kind = entry.kind
            if kind == self.pushes:
                chunk, phase = self.push_tile(ctx, shared, entry, first, chunk, phase)
            else:
                chunk, phase = staging.pass_tile(stores, self.passed_chunks(entry), chunk, phase)
        # In the slots before the kernel ends, whatever its end may promise about peers' memory.
        cute.arch.fence_acq_rel_sys()

    @cute.jit
    def push_tile(self, ctx, shared, entry, first, chunk, phase):
        """Rows ``first … first+64`` of a task to their slots; padding and what lies beyond H are not written."""
        rows, stores = ctx.schedule.rows, shared.stores
        lane = cute.arch.lane_idx()
        # Lane l knows where rows l and l+32 go, 0 for nowhere.
        mine = entry.block * self.tile.m + first + lane
        peers = [cute.arch.load(rows.peer_rank + mine + 32 * i, Int32) for i in range(2)]
        routes = [cute.arch.load(rows.peer_token_idx + mine + 32 * i, Int32) for i in range(2)]
        begin = Int64(entry.n) * (2 * self.tile.down_n)  # bytes
        bases = [
            select_i64(
                peers[i] >= 0,
                row_address(rows, peers[i], routes[i], self.push_slots(ctx)) + begin,
                Int64(0),
            )
            for i in range(2)
        ]
        # Eight lanes have a row's 128 bytes; the swizzle is undone.
        row, column = lane // 8, lane % 8
        source = shared.sD.iterator.toint() + (first + row) * (2 * CHUNK_N)
        for c in cutlass.range(self.tile.down_n // CHUNK_N, unroll=1):
            cute.arch.mbarrier_wait(stores.full + chunk, phase)
            inside = entry.n * self.tile.down_n + c * CHUNK_N < ctx.sizes.hidden
            at = Int64(c * (2 * CHUNK_N) + column * 16)
            for half in cutlass.range_constexpr(2):
                values = []
                for i in cutlass.range_constexpr(AT_ONCE):
                    swizzled = column ^ (row + 4 * (i % 2))
                    offset = chunk * self.staging.chunk_bytes + (swizzled << 4)
                    step = (32 * half + 4 * i) * (2 * CHUNK_N)
                    values.append(ptx.shared_load_16(source + offset + step))
                if cutlass.const_expr(half == 1):
                    self.staging.free(stores, chunk)
                for i in cutlass.range_constexpr(AT_ONCE):
                    self.push_piece(bases[half], 4 * i + row, at, inside, values[i])
            chunk, phase = advance(chunk, phase, self.staging.stages)
        return chunk, phase

    @cute.jit
    def push_piece(self, base: Int64, owner: Int32, at: Int64, inside: Boolean, values):
        """16 bytes at byte ``at`` of the row that lane ``owner`` knows (all lanes of the warp)."""
        low = cute.arch.shuffle_sync(Int32(base & 0xFFFFFFFF), owner)
        high = cute.arch.shuffle_sync(Int32(base >> 32), owner)
        target = (Int64(high) << 32) | (Int64(low) & 0xFFFFFFFF)
        if inside & (target != 0):
            ptx.store_16(target + at, *values)
