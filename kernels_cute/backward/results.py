"""The result role of the backward kernel: finished accumulators, their epilogues, the weight gradients.

What depends on where a machine keeps accumulators is in ``results_sm90`` and ``results_sm100``.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .. import ptx, sync, tracing
from ..machine import CHUNK_N
from ..megakernel import FIRST_RESULT_WARP, MegaKernel
from ..queue import next_slot
from ..sync import select
from .operands import float_ptr
from .program import DDOWN, DX, END, IDLE, REPLAY, SHARED, WDOWN, WUP


class ResultRoles(MegaKernel):
    """Base of ``BackwardKernel``; uses its ``results``, the machine's part."""

    @cute.jit
    def mma_role(self, shared, tmem):
        """Multiply for both CTAs, into one accumulator after the other (Blackwell)."""
        main, bars, queue = self.mainloop, shared.bars, shared.queue
        kk = None
        if cutlass.const_expr(not self.scaled):
            kk = main.fragments(shared.storage, tmem, "kk")
        km = main.fragments(shared.storage, tmem, "km")
        mm = main.fragments(shared.storage, tmem, "mm")
        stage, phase = Int32(0), Int32(0)
        acc, acc_phase, set_phase = Int32(0), Int32(0), Int32(0)
        slot, slot_phase = Int32(0), Int32(0)
        kind = Int32(DX)
        while kind != END:
            entry = queue.get(slot, slot_phase, self.entry)
            slot, slot_phase = next_slot(slot, slot_phase)
            kind, k_tiles = entry.kind, entry.k_tiles
            if kind != END:
                is_set = (entry.earlier != 0) | (k_tiles == 0)  # of weight gradients
                if cutlass.const_expr(self.scaled):
                    if kind < SHARED:
                        stage, phase = main.mma_scaled_tile(
                            bars, shared.storage, tmem.toint(), k_tiles, stage, phase,
                            acc, acc_phase, is_set, set_phase,
                        )  # fmt: skip
                    elif kind < SHARED + WDOWN:
                        stage, phase = main.mma_tile(
                            bars, *km, k_tiles, stage, phase, acc, acc_phase, majors="km"
                        )
                    else:
                        stage, phase = main.mma_tile(
                            bars, *mm, k_tiles, stage, phase, acc, acc_phase, is_set, set_phase,
                            "mm",
                        )  # fmt: skip
                    if is_set:
                        set_phase ^= 1
                elif kind == REPLAY:
                    stage, phase = main.mma_tile(bars, *kk, k_tiles, stage, phase, acc, acc_phase)
                elif kind % SHARED < WDOWN:
                    stage, phase = main.mma_tile(
                        bars, *km, k_tiles, stage, phase, acc, acc_phase, majors="km"
                    )
                else:
                    stage, phase = main.mma_tile(
                        bars, *mm, k_tiles, stage, phase, acc, acc_phase, is_set, set_phase, "mm"
                    )
                    if is_set:
                        set_phase ^= 1
                acc, acc_phase = sync.advance(acc, acc_phase, main.acc_stages)

    @cute.jit
    def result_role(self, ctx, shared, worker):
        """Take finished accumulators, apply the epilogue, hand finished chunks to the store warp."""
        main, bars, queue = self.mainloop, shared.bars, shared.queue
        at, phase = Int32(0), Int32(0)  # Hopper: the stage; Blackwell: the accumulator
        slot, slot_phase = Int32(0), Int32(0)
        chunk, chunk_phase = Int32(0), Int32(0)
        kind = Int32(DX)
        while kind != END:
            entry = queue.get(slot, slot_phase, self.entry)
            slot, slot_phase = next_slot(slot, slot_phase)
            kind = entry.kind
            step = kind % SHARED
            if cutlass.const_expr(self.pair):
                if kind == IDLE:
                    at, phase = main.skip_tile(bars, entry.k_tiles, at, phase)
                    step = Int32(END)
            if kind == REPLAY:
                at, phase = main.take(
                    worker, bars, entry.k_tiles, at, phase, "kk", halves=entry.halves
                )
                chunk, chunk_phase = self.replay_epilogue(shared, worker, at, chunk, chunk_phase)
                at, phase = main.give_back(worker, bars, at, phase)
            elif step == DDOWN:
                at, phase, chunk, chunk_phase = self.results.ddown(
                    ctx, shared, worker, entry, at, phase, chunk, chunk_phase
                )
            elif step == DX:
                at, phase = main.take(
                    worker, bars, entry.k_tiles, at, phase, "km", halves=entry.halves
                )
                chunk, chunk_phase = self.plain_epilogue(shared, worker, at, chunk, chunk_phase)
                at, phase = main.give_back(worker, bars, at, phase)
            elif step >= WDOWN:
                at, phase, chunk, chunk_phase = self.weight_gradient(
                    ctx, shared, worker, entry, at, phase, chunk, chunk_phase
                )
            if cutlass.const_expr(self.trace):
                if self.works(kind) and cute.arch.warp_idx() == FIRST_RESULT_WARP:
                    ctx.tracer.end(self.unstaged(entry), tracing.RESULTED)

    @cute.jit
    def replay_epilogue(self, shared, worker, at, chunk, phase):
        """gate and up, rounded to BF16, as forward saves them."""
        up_n = self.tile.up_n
        for c in cutlass.range_constexpr(up_n // CHUNK_N):
            for column in (c * CHUNK_N, c * CHUNK_N + up_n):
                chunk, phase = self.put_chunk(shared, worker, at, (column,), chunk, phase)
        return chunk, phase

    @cute.jit
    def plain_epilogue(self, shared, worker, at, chunk, phase):
        """The accumulator, rounded to BF16."""
        for c in cutlass.range_constexpr(self.chunks):
            chunk, phase = self.put_chunk(shared, worker, at, (c * CHUNK_N,), chunk, phase)
        return chunk, phase

    # ---- dgrad down ----

    @cute.jit
    def row_weight(self, ctx, entry, routed, row):
        """Router weight of row ``row`` of a task (0 for padding); the shared expert's scale, or 1."""
        buffers = ctx.buffers
        at = entry.block * self.tile.m + row
        weight = Float32(1.0)
        if routed:
            if cutlass.const_expr(self.direct):
                route = cute.arch.load(ctx.schedule.rows.peer_token_idx + at, Int32)
                weight = Float32(0.0)
                if route >= 0:
                    weight = cute.arch.load(float_ptr(buffers.router_weights) + route, Float32)
            else:
                ring_row = entry.ring_block * self.tile.m + row
                weight = cute.arch.load(float_ptr(buffers.row_weight) + ring_row, Float32)
        else:
            if buffers.shared_scale != 0:
                weight = Float32(0.0)
                if at < ctx.sizes.tokens:
                    weight = cute.arch.load(float_ptr(buffers.shared_scale) + at, Float32)
        return weight

    def partials(self, ctx, entry, routed, row):
        """Where row ``row`` of a task has its router-gradient partials: (row, columns) of their matrix."""
        sizes, buffers = ctx.sizes, ctx.buffers
        block = entry.block if self.direct else select(routed, entry.ring_block, entry.block)
        groups = select(routed, sizes.intermediate, sizes.shared_intermediate) // CHUNK_N
        return block * self.tile.m + row, groups

    @cute.jit
    def store_partial(self, ctx, routed, row, groups, column, value):
        """A row's router-gradient partial of 64 columns, unless it lies outside the matrix.

        Routed rows are padded to whole tiles; the shared expert's end with the tokens.
        """
        base = ctx.buffers.shared_dw_partial
        if routed:
            base = ctx.buffers.dw_partial
        if column < groups and (routed or row < ctx.sizes.tokens):
            cute.arch.store(float_ptr(base) + Int64(row) * Int64(groups) + column, value)

    # ---- weight gradients ----

    @cute.jit
    def weight_gradient(self, ctx, shared, worker, entry, at, phase, chunk, chunk_phase):
        """Multiply on from zero or from the expert's group before; write, or keep for the group after."""
        results = self.results
        routed = entry.kind < SHARED
        step = entry.kind % SHARED
        prog = self.program(ctx)
        kept = self.accumulator_address(ctx, prog, entry, results.thread(worker))
        macrobatch = entry.first // prog.ring_blocks
        at, phase = results.accumulate(
            shared, worker, entry, kept + self.accumulator_buffer(prog, macrobatch - 1), at, phase
        )
        # Tiles that leave through the store warp are counted there, off this path.
        unstaged = entry.later != 0
        if cutlass.const_expr(self.grad_mode != "bf16"):
            unstaged = routed
        if unstaged and cute.arch.warp_idx() == FIRST_RESULT_WARP:
            self.release_rows(ctx, entry)
        if entry.later != 0:
            results.keep(worker, at, kept + self.accumulator_buffer(prog, macrobatch))
        elif cutlass.const_expr(self.grad_mode != "bf16"):
            results.write_gradient(ctx, entry, worker, at)
        elif step == WDOWN:
            chunk, chunk_phase = self.plain_epilogue(shared, worker, at, chunk, chunk_phase)
        else:
            chunk, chunk_phase = results.put_x_gradient(shared, worker, at, chunk, chunk_phase)
        at, phase = self.mainloop.give_back(worker, shared.bars, at, phase)
        # The next group reads what was kept; a later one may overwrite what was read.
        if entry.later + entry.earlier != 0:
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                sync.arrive(ctx.counters.group + entry.group)
        return at, phase, chunk, chunk_phase

    def accumulator_address(self, ctx, prog, entry, thread):
        """Where a thread's part of a task's FP32 accumulator lies in buffer 0.

        Layout [2][group tasks][values of a thread][256 threads]: element i of a thread is 1 KB after i-1.
        """
        step = entry.kind % SHARED
        task = (step - WDOWN) * prog.w_tasks + entry.m * prog.w_n + entry.n
        values = self.tile.m * self.mainloop.tile_n
        return ctx.buffers.accumulators + Int64(task) * (4 * values) + Int64(thread * 4)

    def accumulator_buffer(self, prog, macrobatch):
        """Byte offset of the buffer that macrobatch ``macrobatch`` hands on."""
        size = 4 * self.tile.m * self.mainloop.tile_n
        return Int64(macrobatch % 2) * Int64(prog.group_tasks) * size

    @cute.jit
    def release_rows(self, ctx, entry):
        """Count a weight-gradient task (whole warp) for every minibatch that its group overlaps.

        Its rows have been read: the warp has seen the end of the task's loads, or of its MMA.
        """
        mb_blocks = ctx.sizes.minibatch // self.tile.m
        first = entry.first // mb_blocks
        last = (entry.end - 1) // mb_blocks
        if entry.end > entry.first:
            for minibatch in cutlass.range(first + cute.arch.lane_idx(), last + 1, 32, unroll=1):
                sync.arrive(ctx.counters.free + minibatch)

    @cute.jit
    def gradient_output(self, ctx, entry):
        """Address of the task's expert's weight gradient, and the columns of I that it has."""
        outputs, sizes = ctx.outputs, ctx.sizes
        step = entry.kind % SHARED
        base, inner = Int64(0), Int32(0)
        if entry.kind < SHARED:
            inner = sizes.intermediate
            base = outputs.dw_gate
            if step == WDOWN:
                base = outputs.dw_down
            elif step == WUP:
                base = outputs.dw_up
        else:
            inner = sizes.shared_intermediate
            base = outputs.shared_dw_gate
            if step == WDOWN:
                base = outputs.shared_dw_down
            elif step == WUP:
                base = outputs.shared_dw_up
        plane = Int64(entry.expert) * Int64(sizes.hidden) * Int64(inner)
        return base + plane * self.grad_bytes, inner

    @cute.jit
    def write_element(self, address: Int64, value: Float32):
        """One element in the output's dtype, added to what is there in the adding modes.

        Adding rounds once: FP32 accumulator + old value in FP32, then the output's dtype.
        """
        if cutlass.const_expr(self.grad_mode == "fp32_add"):
            value = ptx.add_rn(ptx.load_f32(address), value)
        elif cutlass.const_expr(self.grad_mode == "bf16_add"):
            value = ptx.add_rn(ptx.load_bf16(address), value)
        if cutlass.const_expr(self.grad_mode.startswith("fp32")):
            ptx.store_f32(address, value)
        else:
            ptx.store_bf16(address, value)
