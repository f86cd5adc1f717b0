"""The store role of the backward kernel: finished tiles to memory, then their counters."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .. import sync
from ..queue import next_slot
from ..sync import int_ptr
from .operands import Entry, counter_layout
from .program import DDOWN, DX, END, REPLAY, SHARED, WDOWN, WGATE


class StoreRoles:
    """Mixin of ``BackwardKernel``."""

    @cute.jit
    def store_role(self, prog, queue, bars, stores, smem, targets, sizes, buffers):
        """Write what the MMA warps stage, in their order; signal a tile once it is in memory."""
        staging, zero = self.staging, Int32(0)
        base = int_ptr(buffers.counters)
        counters = counter_layout(sizes.max_minibatches, sizes.max_blocks, sizes.max_groups, 0)

        def to(*tmas):
            return tuple(staging.partition(tma, smem.sD) for tma in tmas)

        replayed = to(targets.replay_gate, targets.replay_up)
        d_hidden = self.in_place(smem, targets.d_gate, targets.d_up, targets.weighted)
        shared_d_hidden = self.in_place(
            smem, targets.shared_d_gate, targets.shared_d_up, targets.shared_weighted
        )
        dx, shared_dx = to(targets.dx), to(targets.shared_dx)
        wide = staging.partition_wide
        dw = (
            wide(targets.dw_gate, smem.sD_wide),
            wide(targets.dw_up, smem.sD_wide),
            *to(targets.dw_down),
        )
        shared_dw = (
            wide(targets.shared_dw_gate, smem.sD_wide),
            wide(targets.shared_dw_up, smem.sD_wide),
            *to(targets.shared_dw_down),
        )
        up_chunks = self.tile.up_n // staging.CHUNK_N
        slot, slot_phase = Int32(0), Int32(0)
        chunk, phase = Int32(0), Int32(0)
        stage, written = Int32(0), Int32(0)  # the load warp's position; phases of bars.written
        kind = Int32(DX)
        while kind != END:
            entry = queue.get(slot, slot_phase, Entry)
            slot, slot_phase = next_slot(slot, slot_phase)
            kind, n = entry.kind, entry.n
            if kind == REPLAY:
                chunk, phase = staging.store_tile(
                    stores, replayed, entry.ring_block, n, up_chunks, zero, chunk, phase
                )
                staging.signal(base + counters.replay + entry.block)
            elif kind == DDOWN:
                written = self.store_stages(
                    bars, d_hidden, entry.ring_block, n, stage + entry.k_tiles, written
                )
                staging.signal(base + counters.ddown + entry.block)
            elif kind == DX:
                block = entry.block if cutlass.const_expr(self.direct) else entry.ring_block
                chunk, phase = staging.store_tile(
                    stores, dx, block, n, self.chunks, zero, chunk, phase
                )
                staging.signal(base + counters.dx + entry.minibatch)
                if cute.arch.lane_idx() == 0:
                    sync.arrive(base + counters.free + entry.minibatch)
            elif kind == SHARED + DDOWN:
                written = self.store_stages(
                    bars, shared_d_hidden, entry.block, n, stage + entry.k_tiles, written
                )
                staging.signal(base + counters.shared + entry.block)
            elif kind == SHARED + DX:
                chunk, phase = staging.store_tile(
                    stores, shared_dx, entry.block, n, self.chunks, zero, chunk, phase
                )
            elif kind != END:
                if cutlass.const_expr(self.grad_mode == "bf16"):
                    if kind < SHARED and entry.later == 0:
                        chunk, phase = self.store_gradient(stores, dw, entry, kind, chunk, phase)
                        self.release_rows(prog, base + counters.free, entry)
                    elif kind >= SHARED:
                        chunk, phase = self.store_gradient(
                            stores, shared_dw, entry, kind - SHARED, chunk, phase
                        )
            steps = entry.k_tiles
            if kind == DDOWN or kind == SHARED + DDOWN:
                steps += self.chunks
            stage = (stage + steps) % self.mainloop.stages
        staging.drain()

    @cute.jit
    def release_rows(self, prog, free, entry):
        """Count a weight-gradient task (whole warp) for every minibatch that its group overlaps.

        Its rows have been read: the warp has seen the end of the task's loads, or of its MMA.
        """
        first = entry.first // prog.mb_blocks
        last = (entry.end - 1) // prog.mb_blocks
        if entry.end > entry.first:
            for minibatch in cutlass.range(first + cute.arch.lane_idx(), last + 1, 32, unroll=1):
                sync.arrive(free + minibatch)

    def in_place(self, smem, d_gate, d_up, weighted):
        """Store targets whose source is a stage: A's place, B's left and right half."""
        return (
            self.staging.partition(d_gate, smem.sA),
            self.staging.partition(d_up, smem.sB_half),
            self.staging.partition(weighted, smem.sB_half),
        )

    @cute.jit
    def store_stages(self, bars, targets, row_tile, n, stage, written):
        """Store the results that the MMA warps put into the stages of a dgrad-down task, and free them.

        Bit s of ``written`` is the phase of stage s's ``written`` barrier; returns it updated.
        """
        d_gate, d_up, weighted = targets
        for c in cutlass.range_constexpr(self.chunks):
            at = (stage + c) % self.mainloop.stages
            column = n * self.chunks + c
            cute.arch.mbarrier_wait(bars.written + at, (written >> at) & 1)
            written ^= Int32(1) << at
            for target, slot in ((d_gate, at), (d_up, 2 * at), (weighted, 2 * at + 1)):
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
            cute.arch.mbarrier_arrive(bars.empty + stage, arrive_count=self.consumer_warps)

    @cute.jit
    def store_gradient(self, stores, outputs, entry, kind, chunk, phase):
        """A tile of dW_gate or dW_up (transposed), or of dW_down, of the entry's expert."""
        gate, up, down = outputs
        if kind == WDOWN:
            chunk, phase = self.staging.store_tile(
                stores, (down,), entry.m, entry.n, self.chunks, entry.expert, chunk, phase
            )
        elif kind == WGATE:
            chunk, phase = self.store_transposed(stores, gate, entry, chunk, phase)
        else:
            chunk, phase = self.store_transposed(stores, up, entry, chunk, phase)
        return chunk, phase

    @cute.jit
    def store_transposed(self, stores, target, entry, chunk, phase):
        """Rows are the tile's columns of I, 64 at a time; columns its 128 of H."""
        for c in cutlass.range_constexpr(self.chunks):
            chunk, phase = self.staging.store(
                stores, target, entry.n * self.chunks + c, entry.m, entry.expert, chunk, phase,
                c == 0, c == self.chunks - 1,
            )  # fmt: skip
        return chunk, phase
