"""What the backward kernel sends to the slots of routes itself: rows of dx, and their router-weight gradients.

The comm workers' part of ``push`` is then only to bring rows in. The rows' partials of the router-weight gradient are in
memory before dgrad gate+up of their block begins; the store warp, which has nothing to store there, adds them up
behind the block's first tile. Only then that tile counts as done: ``free`` protects the partials, too.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..epilogue.router_grad import sum_groups_of_rows
from ..machine import CHUNK_N
from ..megakernel import MegaKernel
from ..push import PushRole
from ..sync import select, select_f32
from .operands import float_ptr
from .program import DX, REPLAY, SHARED, WDOWN, WUP

AT_ONCE = 8  # rows whose partials a lane has in registers


class PushRoles(PushRole, MegaKernel):
    """Base of ``BackwardKernel``."""

    pushes = DX

    def push_slots(self, ctx) -> Int64:
        """The dx slots."""
        return ctx.buffers.dx_heap

    def passed_chunks(self, entry) -> Int32:
        """All but dgrad down, whose results leave from stages, and weight gradients that do not pass the store warp."""
        kind, step = entry.kind, entry.kind % SHARED
        is_gradient = (step >= WDOWN) & (step <= WUP) & (self.unstaged(entry) == 0)
        whole = select(is_gradient | (kind == SHARED + DX), Int32(self.chunks), Int32(0))
        return select(kind == REPLAY, Int32(2 * self.tile.up_n // CHUNK_N), whole)

    @cute.jit
    def push_router_grads(self, ctx, entry):
        """The router-weight gradients of a block's rows to their slots (whole store warp)."""
        rows, buffers = ctx.schedule.rows, ctx.buffers
        groups = ctx.sizes.intermediate // CHUNK_N
        lane = cute.arch.lane_idx()
        first, ring_first = entry.block * self.tile.m, entry.ring_block * self.tile.m
        for part in cutlass.range(self.tile.m // 32, unroll=1):
            total = Float32(0.0)  # of row 32*part + lane
            for step in cutlass.range(32 // AT_ONCE, unroll=1):
                row = part * 32 + step * AT_ONCE
                partials = buffers.dw_partial + Int64(ring_first + row) * Int64(groups * 4)
                totals = sum_groups_of_rows(float_ptr(partials), groups, AT_ONCE)
                for i in cutlass.range_constexpr(AT_ONCE):
                    total = select_f32(lane == step * AT_ONCE + i, totals[i], total)
            mine = first + part * 32 + lane
            peer = cute.arch.load(rows.peer_rank + mine, Int32)
            route = cute.arch.load(rows.peer_token_idx + mine, Int32)
            if peer >= 0:
                target = buffers.dw_heap + Int64(peer) * rows.rank_stride
                cute.arch.store(float_ptr(target) + route, total)
