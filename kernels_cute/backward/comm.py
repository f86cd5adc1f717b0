"""The comm role of the backward kernel: pull reverse-combine and replay, push reverse-dispatch."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .. import comm_mxfp8, ptx, sync
from ..epilogue.router_grad import sum_groups
from ..machine import CHUNK_N
from ..megakernel import WARPS, MegaKernel
from .load import NAME
from .operands import float_ptr
from .program import DISPATCH, FREE_BASE, ITEM_BASE, OVERLAPS

ROLE = 1  # in sync.ROLES


class CommRoles(MegaKernel):
    """Base of ``BackwardKernel``."""

    @cute.jit
    def tell_of(self, ctx, item):
        """Count an item whose rows are in memory."""
        if item.kind == DISPATCH:
            sync.arrive(ctx.counters.dispatch + item.minibatch)
        else:
            sync.arrive(ctx.counters.push + item.minibatch)

    @cute.jit
    def move_item(self, ctx, prog, item, ring_row, worker, warp, phase, owed):
        """Move an item's rows; returns the phase of this lane's slot."""
        schedule, sizes, buffers = ctx.schedule, ctx.sizes, ctx.buffers
        if item.kind == DISPATCH:
            phase = self.bring_in(
                worker, prog, item, ring_row, schedule, sizes, buffers, warp, phase, owed
            )
        else:
            phase = self.push_out(
                worker, item, ring_row, schedule, sizes, buffers, warp, phase, owed
            )
        return phase

    def ring_row(self, ctx, item) -> Int32:
        """The item's first row in the ring."""
        return item.row % ctx.sizes.macrobatch

    def counter_of(self, ctx, item) -> cute.Pointer:
        """The counter of an item's minibatch that tells of the item."""
        dispatched = (ctx.counters.dispatch + item.minibatch).toint()
        pushed = (ctx.counters.push + item.minibatch).toint()
        return sync.int_ptr(sync.select_i64(item.kind == DISPATCH, dispatched, pushed))

    def first_item(self) -> Int32:
        """``item_of``'s state before the first item: the minibatch in whose stretch the last one lies."""
        return Int32(0)

    @cute.jit
    def item_of(self, ctx, prog, index, minibatch):
        """The item of a number, and the state for the next one: item numbers only grow."""
        return self.decode_item(prog, ctx.schedule, ctx.sizes, index, minibatch)

    @cute.jit
    def item_there(self, ctx, prog, item) -> Int32:
        """1 if what ``wait_item`` waits for is there; one acquiring look."""
        counter, target = self.needs(ctx, prog, item)
        there = Int32(1)
        if target > 0:
            value = ptx.acquire_gpu(counter.toint())
            there = sync.select(value >= target, Int32(1), Int32(0))
        return there

    @cute.jit
    def needs(self, ctx, prog, item):
        """A counter and its target, 0 for nothing: dispatch needs its slot free, a push its minibatch's dx rows."""
        counters, previous = ctx.counters, item.minibatch - prog.ring_mbs
        counter, target = (counters.dx + item.minibatch).toint(), prog.dx_target(item.minibatch)
        if item.kind == DISPATCH:
            target = Int32(0)
            if previous >= 0:
                overlaps = cute.arch.load(
                    ctx.schedule.tables + OVERLAPS * ctx.sizes.table_stride + previous, Int32
                )
                counter = (counters.free + previous).toint()
                target = prog.free_target(previous, overlaps)
        return sync.int_ptr(counter), target

    @cute.jit
    def decode_item(self, prog, schedule, sizes, index, minibatch):
        """The item of a number, and the minibatch in whose stretch it lies."""
        per_block = prog.items_per_block
        at = index // per_block
        within = index - at * per_block
        item = prog.first_item(at, within)
        if cutlass.const_expr(not self.push):  # or there are no others
            if at >= prog.first_blocks:
                bases = schedule.tables + ITEM_BASE * sizes.table_stride
                while at >= cute.arch.load(bases + minibatch + 1, Int32):
                    minibatch += 1
                free = cute.arch.load(
                    schedule.tables + FREE_BASE * sizes.table_stride + minibatch, Int32
                )
                item = prog.item_in(
                    minibatch, at - cute.arch.load(bases + minibatch, Int32), within, free
                )
        return item, minibatch

    @cute.jit
    def wait_item(self, ctx, prog, item, index):
        """Wait for what an item needs."""
        counter, target = self.needs(ctx, prog, item)
        if item.kind == DISPATCH:
            if target > 0:
                sync.wait_at_least(
                    counter, target, ctx.watch, ROLE, NAME["free"], index,
                    item.minibatch - prog.ring_mbs,
                )  # fmt: skip
        else:
            sync.wait_at_least(counter, target, ctx.watch, ROLE, NAME["dx"], index, item.minibatch)

    @cute.jit
    def bring_in(self, worker, prog, item, ring_row, schedule, sizes, buffers, warp, phase, owed):
        """Pull dy rows and router weights; for a macrobatch that is replayed, x rows too.

        In MXFP8 the rows are quantised; their copies along the tokens, for the weight gradients, are made
        from the results.
        """
        rows, count = schedule.rows, self.tile.comm_m
        replayed = prog.is_replayed(item.minibatch)
        scales = buffers.scales
        phase = self.pull(
            worker, rows, item.row, buffers.dy_heap, sizes.topk, buffers.dy_ring, scales.dy, ring_row,
            warp, phase, owed,
        )  # fmt: skip
        if replayed:
            if cutlass.const_expr(self.wire):
                comm_mxfp8.pull_quantised_rows(
                    rows, item.row, count, buffers.x_heap, buffers.x_heap_scales, sizes.topk,
                    buffers.replay_x, scales.replay_x, ring_row, self.hopper, warp, WARPS,
                )  # fmt: skip
            else:
                phase = self.pull(
                    worker, rows, item.row, buffers.x_heap, sizes.topk, buffers.replay_x,
                    scales.replay_x, ring_row, warp, phase, Int64(0),
                )  # fmt: skip
        if cutlass.const_expr(self.mxfp8):
            cute.arch.sync_threads()
            thread = cute.arch.thread_idx()[0]
            x, x_scales = buffers.saved_x, scales.saved_x
            if replayed:
                x, x_scales = buffers.replay_x, scales.replay_x
            for source, codes, target, target_codes in (
                (buffers.dy_ring, scales.dy, buffers.dy_tokens, scales.dy_tokens),
                (x, x_scales, buffers.x_tokens, scales.x_tokens),
            ):
                if cutlass.const_expr(self.scaled):
                    comm_mxfp8.transpose_rows(
                        source, codes, target, target_codes, ring_row, count, sizes.hidden,
                        sizes.macrobatch, thread, 32 * WARPS,
                    )  # fmt: skip
                else:
                    comm_mxfp8.copy_along_rows(
                        source, target, ring_row, count, sizes.hidden, thread, 32 * WARPS
                    )
        if warp == 0:
            for i in cutlass.range(cute.arch.lane_idx(), count, 32, unroll=1):
                weight = Float32(0.0)
                peer = cute.arch.load(rows.peer_rank + item.row + i, Int32)
                if peer >= 0:
                    route = cute.arch.load(rows.peer_token_idx + item.row + i, Int32)
                    source = buffers.weight_heap + Int64(peer) * rows.rank_stride
                    weight = cute.arch.load(float_ptr(source) + route, Float32)
                cute.arch.store(float_ptr(buffers.row_weight) + ring_row + i, weight)
        return phase

    @cute.jit
    def pull(self, worker, rows, first, heap, topk, ring, scales, ring_row, warp, phase, owed):
        """The rows of an item from a heap to a ring; returns the phase of this lane's slot."""
        count = self.tile.comm_m
        if cutlass.const_expr(self.mxfp8):
            comm_mxfp8.pull_rows(
                rows, first, count, heap, topk, ring, scales, ring_row, self.hopper, warp, WARPS
            )
        else:
            target = ring + Int64(ring_row) * rows.row_bytes
            phase = worker.pull(first, heap, topk, target, phase, owed)
        return phase

    @cute.jit
    def push_out(self, worker, item, ring_row, schedule, sizes, buffers, warp, phase, owed):
        """Push dx rows and router-weight gradients to the slots of their routes."""
        rows, count = schedule.rows, self.tile.comm_m
        phase = worker.push(
            item.row,
            buffers.dx_ring + Int64(ring_row) * rows.row_bytes,
            buffers.dx_heap,
            phase,
            owed,
        )
        groups = sizes.intermediate // CHUNK_N
        for i in cutlass.range(warp, count, WARPS, unroll=1):
            peer = cute.arch.load(rows.peer_rank + item.row + i, Int32)
            if peer >= 0:
                partials = float_ptr(buffers.dw_partial) + Int64(ring_row + i) * Int64(groups)
                total = sum_groups(partials, groups)
                if cute.arch.lane_idx() == 0:
                    route = cute.arch.load(rows.peer_token_idx + item.row + i, Int32)
                    target = buffers.dw_heap + Int64(peer) * rows.rank_stride
                    cute.arch.store(float_ptr(target) + route, total)
        return phase
