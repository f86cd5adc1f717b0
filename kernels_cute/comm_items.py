"""Comm items in turn, and overlapping: one begins while the last one's rows are on their way.

What a worker does for an item stands in a row: a ticket's number, a look at the counter, where the rows go, the copies,
their way to memory, the arrival. Here the number is drawn an item ahead, and the arrival comes behind the next
item's first copies; it is *owed* until then (``carry.Worker``). A trace's item ends when its copies are on their way.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from . import trace


class CommItems:
    """Mixed into ``MegaKernel``, whose kernels say what an item is, needs, moves and counts."""

    @cute.jit
    def comm_cta(self, ctx, shared):
        """Take comm items in order: bring rows into the ring, send finished rows to their slots."""
        prog = self.program(ctx)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        worker = self.make_worker(shared, ctx.schedule.rows, warp)
        worker.init()
        if cutlass.const_expr(self.overlap):
            self.overlapping_items(ctx, prog, shared, worker)
        else:
            self.items_in_turn(ctx, prog, shared, worker)

    @cute.jit
    def items_in_turn(self, ctx, prog, shared, worker):
        """Take comm items in order, one after the other."""
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        word = shared.comm_item
        phase = Int32(0)  # of the barrier of this lane's slot
        state, index = self.first_item(), Int32(0)
        while index < prog.items:
            if thread == 0:
                cute.arch.store(word, self.draw_item(ctx))
            cute.arch.sync_threads()
            index = cute.arch.load(word, Int32)
            if index < prog.items:
                item, state = self.item_of(ctx, prog, index, state)
                ring_row = self.ring_row(ctx, item)
                if thread == 0:
                    self.wait_item(ctx, prog, item, index)
                    if cutlass.const_expr(self.trace):
                        ctx.tracer.begin(
                            trace.COMM, item.kind, index, item.minibatch, -1, item.row, -1
                        )
                cute.arch.sync_threads()
                phase = self.move_item(ctx, prog, item, ring_row, worker, warp, phase, Int64(0))
                cute.arch.sync_threads()
                if thread == 0:
                    self.tell_of(ctx, item)
                    if cutlass.const_expr(self.trace):
                        ctx.tracer.end()

    @cute.jit
    def overlapping_items(self, ctx, prog, shared, worker):
        """Take comm items in order, each begun while the last one's rows are on their way (``overlap``)."""
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        word, there_word = shared.comm_item, shared.comm_item + 1
        phase = Int32(0)  # of the barrier of this lane's slot
        owed = Int64(0)  # counter of the last item
        state = self.first_item()
        drawn, index = Int32(0), Int32(0)
        if thread == 0:
            drawn = self.draw_item(ctx)
        while index < prog.items:
            if thread == 0:
                cute.arch.store(word, drawn)
            cute.arch.sync_threads()
            index = cute.arch.load(word, Int32)
            if index < prog.items:
                item, state = self.item_of(ctx, prog, index, state)
                if thread == 0:
                    drawn = self.draw_item(
                        ctx
                    )  # the next one's number comes while this one's rows do
                    cute.arch.store(there_word, self.item_there(ctx, prog, item))
                cute.arch.sync_threads()
                if cute.arch.load(there_word, Int32) == 0:
                    # What it waits for may need what is owed.
                    worker.settle(owed)
                    owed = Int64(0)
                    if thread == 0:
                        self.wait_item(ctx, prog, item, index)
                    cute.arch.sync_threads()
                if cutlass.const_expr(self.trace):
                    if thread == 0:
                        ctx.tracer.begin(
                            trace.COMM, item.kind, index, item.minibatch, -1, item.row, -1
                        )
                ring_row = self.ring_row(ctx, item)
                phase = self.move_item(ctx, prog, item, ring_row, worker, warp, phase, owed)
                owed = self.counter_of(ctx, item).toint()
                if cutlass.const_expr(self.trace):
                    if thread == 0:
                        ctx.tracer.end()
        worker.settle(owed)

    def draw_item(self, ctx) -> Int32:
        """The number of the next comm item."""
        return cute.arch.atomic_add(ctx.counters.comm_ticket, Int32(1), sem="relaxed", scope="gpu")
