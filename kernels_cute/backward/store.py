"""The store role of the backward kernel: finished tiles to memory, then their counters."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .. import sync
from ..gemm.operands import view
from ..queue import next_slot
from .program import DDOWN, DX, END, REPLAY, SHARED, WDOWN, WGATE
from .push import PushRoles
from .scaled import RESULTS


class StoreRoles(PushRoles):
    """Base of ``BackwardKernel``."""

    @cute.jit
    def store_role(self, ctx, shared):
        """Write what the result warps stage, in their order; signal a tile once it is in memory."""
        staging, stores, zero = self.staging, shared.stores, Int32(0)
        targets, counters = ctx.targets, ctx.counters
        up_chunks = self.tile.up_n // staging.CHUNK_N
        slot, slot_phase = Int32(0), Int32(0)
        chunk, phase = Int32(0), Int32(0)
        stage, written = (
            Int32(0),
            Int32(0),
        )  # Hopper: the load warp's position; ``written``'s phases
        kind = Int32(DX)
        while kind != END:
            entry = shared.queue.get(slot, slot_phase, self.entry)
            slot, slot_phase = next_slot(slot, slot_phase)
            kind, n = entry.kind, entry.n
            rows, ring_rows = self.row_tile(entry.block), self.row_tile(entry.ring_block)
            if kind == REPLAY:
                replayed = self.to(shared, targets.replay_gate, targets.replay_up)
                chunk, phase = staging.store_tile(
                    stores, replayed, ring_rows, n, up_chunks, zero, chunk, phase
                )
                staging.signal(counters.replay + entry.block)
            elif kind == DDOWN:
                if cutlass.const_expr(self.scaled):
                    # The quantising warps read the buffers, and signal.
                    chunk, phase = staging.pass_tile(stores, RESULTS * self.chunks, chunk, phase)
                else:
                    d_hidden = (targets.d_gate, targets.d_up, targets.weighted)
                    if cutlass.const_expr(self.mxfp8):
                        # The epilogue writes what is quantised along the tokens.
                        d_hidden = d_hidden[:2]
                    chunk, phase, written = self.store_d_hidden(
                        shared, d_hidden, ring_rows, entry, stage, chunk, phase, written
                    )
                    staging.signal(counters.ddown + entry.block)
            elif kind == DX:
                if cutlass.const_expr(self.push):
                    chunk, phase = staging.pass_tile(stores, self.chunks, chunk, phase)
                    if n == 0:
                        self.push_router_grads(ctx, entry)
                    cute.arch.sync_warp()
                else:
                    block = rows if cutlass.const_expr(self.direct) else ring_rows
                    chunk, phase = staging.store_tile(
                        stores, self.to(shared, targets.dx), block, n, self.chunks, zero,
                        chunk, phase,
                    )  # fmt: skip
                    staging.signal(counters.dx + entry.minibatch)
                if cute.arch.lane_idx() == 0:
                    sync.arrive(counters.free + entry.minibatch)
            elif kind == SHARED + DDOWN:
                d_hidden = (targets.shared_d_gate, targets.shared_d_up, targets.shared_weighted)
                chunk, phase, written = self.store_d_hidden(
                    shared, d_hidden, rows, entry, stage, chunk, phase, written
                )
                staging.signal(counters.shared + entry.block)
            elif kind == SHARED + DX:
                chunk, phase = staging.store_tile(
                    stores, self.to(shared, targets.shared_dx), rows, n, self.chunks, zero,
                    chunk, phase,
                )  # fmt: skip
            elif self.works(kind):
                if cutlass.const_expr(self.grad_mode == "bf16"):
                    if kind < SHARED and entry.later == 0:
                        gradients = (targets.dw_gate, targets.dw_up, targets.dw_down)
                        chunk, phase = self.store_gradient(
                            shared, gradients, entry, kind, chunk, phase
                        )
                        self.release_rows(ctx, entry)
                    elif kind >= SHARED:
                        gradients = (
                            targets.shared_dw_gate, targets.shared_dw_up, targets.shared_dw_down,
                        )  # fmt: skip
                        chunk, phase = self.store_gradient(
                            shared, gradients, entry, kind - SHARED, chunk, phase
                        )
            if cutlass.const_expr(self.trace):
                if self.works(kind):
                    mine = 1 - self.unstaged(entry)
                    if cutlass.const_expr(self.scaled):
                        mine = sync.select(kind == DDOWN, Int32(0), mine)
                    ctx.tracer.end(mine)
            if cutlass.const_expr(self.chunk_steps > 0):
                steps = entry.k_tiles
                if kind == DDOWN or kind == SHARED + DDOWN:
                    steps += self.chunk_steps
                stage = (stage + steps) % self.mainloop.stages
        if cutlass.const_expr(self.push):
            cute.arch.fence_acq_rel_sys()  # router-weight gradients, as ``push_role``

    def unstaged(self, entry) -> Int32:
        """1 for a weight gradient that the result warps write themselves."""
        if self.grad_mode != "bf16":
            return sync.select(entry.kind % SHARED >= WDOWN, Int32(1), Int32(0))
        return sync.select(entry.later != 0, Int32(1), Int32(0))

    def to(self, shared, *tmas):
        """Store targets of row-major chunks."""
        return tuple(self.staging.partition(tma, shared.sD) for tma in tmas)

    def wide(self, shared, tma):
        """A store target of transposed chunks."""
        return self.staging.partition_wide(tma, view(shared.storage.sD, self.staging.wide_layout))

    # ---- results of dgrad down ----

    @cute.jit
    def store_d_hidden(self, shared, targets, row_tile, entry, stage, chunk, phase, written):
        """d_gate, d_up and w·hidden of a task: from staging buffers, or from the stages behind its operands."""
        if cutlass.const_expr(self.chunk_steps > 0):
            places = (shared.sA, shared.sB_half, shared.sB_half)
            in_place = tuple(
                self.staging.partition(target, place) for target, place in zip(targets, places)
            )
            written = self.store_stages(
                shared.bars, in_place, row_tile, entry.n, stage + entry.k_tiles, written
            )
        else:
            chunk, phase = self.staging.store_together(
                shared.stores,
                self.to(shared, *targets),
                row_tile,
                entry.n,
                self.chunks,
                chunk,
                phase,
            )
        return chunk, phase, written

    @cute.jit
    def store_stages(self, bars, targets, row_tile, n, stage, written):
        """Store the results that the MMA warps put into the stages of a dgrad-down task, and free them.

        Bit s of ``written`` is the phase of stage s's ``written`` barrier; returns it updated. A stage
        holds d_gate in A's place, d_up and w·hidden in B's left and right half.
        """
        for c in cutlass.range_constexpr(self.chunks):
            at = (stage + c) % self.mainloop.stages
            column = n * self.chunks + c
            cute.arch.mbarrier_wait(bars.written + at, (written >> at) & 1)
            written ^= Int32(1) << at
            cute.arch.sync_warp()  # lane 0 may be behind, from freeing a stage; a warp stores once
            for target, slot in zip(targets, (at, 2 * at, 2 * at + 1)):
                cute.copy(
                    target.atom, target.tXsX[None, slot], target.tXgX[None, row_tile, column, 0]
                )
            cute.arch.cp_async_bulk_commit_group()
            if cutlass.const_expr(c > 0):
                cute.arch.cp_async_bulk_wait_group(1, read=True)
                self.free_stage(bars, (stage + c - 1) % self.mainloop.stages)
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        self.free_stage(bars, (stage + self.chunks - 1) % self.mainloop.stages)
        return written

    @cute.jit
    def free_stage(self, bars, stage):
        """Give a stage back to the load warp, for all MMA warps."""
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(bars.empty + stage, arrive_count=self.mainloop.empty_arrivals)

    # ---- weight gradients ----

    @cute.jit
    def store_gradient(self, shared, targets, entry, kind, chunk, phase):
        """A tile of dW_gate, dW_up or dW_down of the entry's expert."""
        gate, up, down = targets
        if kind == WDOWN:
            chunk, phase = self.staging.store_tile(
                shared.stores, self.to(shared, down), self.row_tile(entry.m), entry.n, self.chunks,
                entry.expert, chunk, phase,
            )  # fmt: skip
        elif kind == WGATE:
            chunk, phase = self.store_x_gradient(shared, gate, entry, chunk, phase)
        else:
            chunk, phase = self.store_x_gradient(shared, up, entry, chunk, phase)
        return chunk, phase

    @cute.jit
    def store_x_gradient(self, shared, target, entry, chunk, phase):
        """Rows of I, columns of H: the accumulator's, or its transpose's, 64 by 128 at a time."""
        if cutlass.const_expr(self.d_first):
            chunk, phase = self.staging.store_tile(
                shared.stores, self.to(shared, target), self.row_tile(entry.n), entry.m,
                self.chunks, entry.expert, chunk, phase,
            )  # fmt: skip
        else:
            wide = self.wide(shared, target)
            chunk, phase = self.staging.store_wide_tile(
                shared.stores, wide, entry.m, entry.n, self.chunks, entry.expert, chunk, phase
            )
        return chunk, phase
