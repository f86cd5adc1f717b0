"""The load and gather roles of the backward kernel: tickets, waits, and the operands of every task."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .. import sync, trace
from ..gemm.operands import Operand, view
from ..megakernel import MegaKernel
from ..queue import next_slot
from ..sync import divider, select
from .operands import COUNTERS, Entry
from .program import (
    AHEAD_OF,
    DDOWN,
    DX,
    END,
    GROUP_BASE,
    GROUP_WORDS,
    IDLE,
    OVERLAPS,
    REPLAY,
    SHARED,
    TASK_BASE,
    WDOWN,
    WGATE,
    WUP,
)

NAME = {name: len(sync.COUNTERS) + i for i, name in enumerate(COUNTERS)}


class Cursor(NamedTuple):
    """What decoding a ticket needs and the ticket before has found."""

    minibatch: Int32  # of the last routed ticket
    tasks_end: Int32  # tickets before those of experts without rows
    placed: Int32  # groups with rows
    total: Int32  # tickets


class LoadRoles(MegaKernel):
    """Base of ``BackwardKernel``."""

    def first_cursor(self, ctx, prog) -> Cursor:
        """The program's totals."""
        schedule = ctx.schedule
        placed = cute.arch.load(schedule.counts + 1, Int32)
        ends = schedule.tables + TASK_BASE * ctx.sizes.table_stride + prog.minibatches
        tasks_end = cute.arch.load(ends, Int32)
        total = prog.total_tasks(tasks_end, cute.arch.load(schedule.counts, Int32) - placed)
        return Cursor(Int32(0), tasks_end, placed, total)

    def last_ticket(self, prog, cursor) -> Int32:
        """A ticket that decodes to ``END``."""
        return cursor.total

    @cute.jit
    def decode(self, ctx, prog, ticket, cursor):
        """The entry of a ticket, and the cursor for the next."""
        schedule, sizes = ctx.schedule, ctx.sizes
        minibatch, tasks_end, placed, total = cursor
        zero = Int32(0)
        tables, stride = schedule.tables, sizes.table_stride
        task_base = tables + TASK_BASE * stride
        kind, block, m, n, group = Int32(END), zero, zero, zero, zero
        if ticket < prog.shared_tasks:
            task = prog.shared_task(ticket)
            kind, block, m, n = task.kind, task.block, task.m, task.n
        elif ticket < tasks_end:
            while ticket >= cute.arch.load(task_base + minibatch + 1, Int32):
                minibatch += 1
            ahead = tables + AHEAD_OF * stride + minibatch
            gone, following = cute.arch.load(ahead, Int32), cute.arch.load(ahead + 1, Int32)
            offset = ticket - cute.arch.load(task_base + minibatch, Int32)
            own, offset = prog.place(minibatch, offset, gone, following)
            groups = cute.arch.load(tables + GROUP_BASE * stride + minibatch, Int32)
            task = prog.routed_task(own, offset, groups)
            kind, block, m, n, group = task.kind, task.block, task.m, task.n, task.group
        elif ticket < total:
            kind, m, n, group = prog.weight_task(ticket - tasks_end)
            group += placed
        expert, first, end, earlier, later = zero, zero, zero, zero, zero
        halves = Int32(2)
        k_size = sizes.hidden  # elements of the contraction
        if kind >= WDOWN and kind <= WUP:
            words = schedule.groups + group * GROUP_WORDS
            expert = cute.arch.load(words, Int32)
            first = cute.arch.load(words + 1, Int32)
            end = cute.arch.load(words + 2, Int32)
            earlier = cute.arch.load(words + 3, Int32)
            later = cute.arch.load(words + 4, Int32)
            block = first
            k_size = (end - first) * self.tile.m
            if end > first:
                k_size -= self.padding(ctx, end)
        elif kind == REPLAY or kind == DDOWN or kind == DX:
            expert = cute.arch.load(schedule.block_expert + block, Int32)
            halves = self.halves(ctx, block)
            k_size = select(kind == DX, 2 * sizes.intermediate, k_size)
        elif kind > SHARED + DX:
            k_size = sizes.tokens
        elif kind == SHARED + DX:
            k_size = 2 * sizes.shared_intermediate
        k_tiles = (k_size + self.mainloop.TILE_K - 1) // self.mainloop.TILE_K
        if cutlass.const_expr(self.scaled):
            k_tiles = select(kind < SHARED, k_size // self.mainloop.SCALED_K, k_tiles)
        entry = Entry(
            kind, block, block % prog.ring_blocks, m, n, block // prog.mb_blocks, expert,
            k_tiles, group, first, end, earlier, later, ticket, halves,
        )  # fmt: skip
        return entry, Cursor(minibatch, tasks_end, placed, total)

    def padding(self, ctx, end) -> Int32:
        """Rows that K steps need not take: whole steps of padding, which is what a segment ends with.

        Zeros that are not added change no bit.
        """
        unit = self.mainloop.SCALED_K if self.scaled else self.mainloop.TILE_K
        routes = ctx.schedule.rows.peer_token_idx + end * self.tile.m
        unused = Int32(0)
        for i in range(1, self.tile.m // unit):
            unused += select(cute.arch.load(routes - i * unit, Int32) < 0, Int32(unit), Int32(0))
        return unused

    # ---- waits: each on work that comes earlier in the program ----

    @cute.jit
    def wait_for(self, ctx, prog, entry):
        """Wait for everything a task reads or overwrites (whole warp)."""
        counters, schedule, sizes = ctx.counters, ctx.schedule, ctx.sizes
        kind, minibatch = entry.kind, entry.minibatch
        zero = Int32(0)
        previous = minibatch - prog.ring_mbs
        if kind == REPLAY or kind == DDOWN:
            if cutlass.const_expr(not self.direct):
                self.wait_on(
                    ctx, counters.dispatch, minibatch, prog.dispatch_target(minibatch),
                    "dispatch", entry,
                )  # fmt: skip
        if kind == REPLAY:
            overlaps = cute.arch.load(
                schedule.tables + OVERLAPS * sizes.table_stride + previous, Int32
            )
            target = prog.free_target(previous, overlaps)
            self.wait_on(ctx, counters.free, previous, target, "free", entry)
        if previous >= 0:
            if kind == DDOWN:
                self.wait_on(
                    ctx, counters.replay, entry.block, prog.replay_target(), "replay", entry
                )
            if cutlass.const_expr(not self.direct and not self.push):
                if kind == DDOWN or kind == DX:
                    self.wait_on(
                        ctx, counters.push, previous, prog.dispatch_target(previous),
                        "push", entry,
                    )  # fmt: skip
        if kind == DX:
            self.wait_on(ctx, counters.ddown, entry.block, prog.ddown_target(), "ddown", entry)
        elif kind == SHARED + DX:
            self.wait_on(ctx, counters.shared, entry.block, prog.shared_target(), "shared", entry)
        elif kind >= WDOWN and kind <= WUP:
            self.wait_range(
                ctx, counters.ddown, entry.first, entry.end, prog.ddown_target(), "ddown", entry
            )
            if entry.earlier != 0:
                target = prog.group_target(self.result_warps)
                self.wait_on(ctx, counters.group, entry.group - 1, target, "group", entry)
            if entry.later != 0:
                # The buffer is the one of two, four, … macrobatches before: its last reader must be through.
                reader, reads = zero, zero
                macrobatch = entry.first // prog.ring_blocks - 1
                while reads == 0 and macrobatch >= 1:
                    base = GROUP_BASE * sizes.table_stride + macrobatch * prog.ring_mbs
                    reader = cute.arch.load(schedule.tables + base, Int32)
                    reads = cute.arch.load(schedule.groups + reader * GROUP_WORDS + 3, Int32)
                    macrobatch -= 2
                if reads != 0:
                    target = prog.group_target(self.result_warps)
                    self.wait_on(ctx, counters.group, reader, target, "group", entry)
        elif kind > SHARED + DX:
            self.wait_range(
                ctx, counters.shared, Int32(0), prog.shared_blocks, prog.shared_target(),
                "shared", entry,
            )  # fmt: skip
        cute.arch.sync_warp()

    @cute.jit
    def wait_on(self, ctx, counters, index, target, name: str, entry):
        """One counter; every lane polls it."""
        sync.wait_at_least(
            counters + index, target, ctx.watch, self.wait_role, NAME[name], entry.ticket, index
        )

    @cute.jit
    def wait_range(self, ctx, counters, first, end, target, name: cutlass.Constexpr[str], entry):
        """All counters of a range, one lane each."""
        for index in cutlass.range(first + cute.arch.lane_idx(), end, 32, unroll=1):
            sync.wait_at_least(
                counters + index, target, ctx.watch, self.wait_role, NAME[name], entry.ticket,
                index,
            )  # fmt: skip

    # ---- loads ----

    def steps(self, entry) -> Int32:
        """Stages that a task takes: those of a dgrad down's results, too."""
        is_ddown = (entry.kind == DDOWN) | (entry.kind == SHARED + DDOWN)
        return entry.k_tiles + select(is_ddown, Int32(self.chunk_steps), Int32(0))

    @cute.jit
    def load_role(self, ctx, shared):
        """Load the tiles of tasks that can run."""
        prog = self.program(ctx)
        stage, phase = Int32(0), Int32(0)
        feed = self.first_task(ctx, prog)
        kind = Int32(DX)
        while kind != END:
            entry, feed = self.next_task(ctx, prog, shared, feed)
            kind = entry.kind
            # What was waited for reached memory by way of other threads; TMA reads past them. This one
            # fence stands for all of them: it lies behind their writes and before every load.
            cute.arch.fence_proxy("async.global")
            if cutlass.const_expr(self.pair):
                if kind == IDLE:
                    stage, phase = self.mainloop.load_nothing(
                        shared.bars, entry.k_tiles, stage, phase
                    )
            if self.works(kind):
                if cutlass.const_expr(self.trace):
                    # A weight gradient's block is its tile of rows.
                    ctx.tracer.begin(
                        trace.COMPUTE, kind, entry.ticket, entry.minibatch, entry.expert,
                        select(kind % SHARED >= WDOWN, entry.m, entry.block), entry.n,
                    )  # fmt: skip
                shares = self.shares(feed)
                if cutlass.const_expr(self.scaled):
                    if kind < SHARED:
                        stage, phase = self.load_scaled_task(ctx, shared, entry, stage, phase)
                    else:
                        stage, phase = self.load_shared_task(
                            ctx, shared, entry, shares, stage, phase
                        )
                else:
                    stage, phase = self.load_task(ctx, shared, entry, shares, stage, phase)
        self.mainloop.finish_loads(shared.bars, stage, phase)

    @cute.jit
    def load_task(self, ctx, shared, entry, shares, stage, phase):
        """All TMA loads of a task, in the order in which the MMA warps use them."""
        main, bars, sources, sizes = self.mainloop, shared.bars, ctx.sources, ctx.sizes
        kind, n, expert = entry.kind, entry.n, entry.expert
        block, ring_block, k_tiles = entry.block, entry.ring_block, entry.k_tiles
        half = k_tiles // 2
        zero = Int32(0)
        in_place = self.direct
        saved = entry.minibatch * sizes.minibatch < sizes.macrobatch
        if kind == REPLAY:
            stage, phase = main.load_tile(
                bars, self.a(shared, sources.x_ring), not in_place, ring_block,
                self.b(shared, sources.gate), n, self.b(shared, sources.up), n,
                expert, k_tiles, stage, phase, shares,
            )  # fmt: skip
        elif kind == DDOWN:
            down = self.bt(shared, sources.down_t)
            stage, phase = main.load_tile(
                bars, self.a(shared, sources.dy_ring), not in_place, ring_block,
                down, 2 * n, down, 2 * n + 1, expert, k_tiles, stage, phase, shares,
            )  # fmt: skip
            if cutlass.const_expr(self.chunk_steps > 0):
                if saved:
                    stage, phase = main.load_chunks(
                        bars, self.a(shared, sources.saved_gate),
                        self.chunk(shared, sources.saved_up),
                        ring_block, n * self.chunks, self.chunks, stage, phase,
                    )  # fmt: skip
                else:
                    stage, phase = main.load_chunks(
                        bars, self.a(shared, sources.replay_gate),
                        self.chunk(shared, sources.replay_up),
                        ring_block, n * self.chunks, self.chunks, stage, phase,
                    )  # fmt: skip
        elif kind == DX:
            gate, up = self.bt(shared, sources.gate_t), self.bt(shared, sources.up_t)
            stage, phase = main.load_tile(
                bars, self.a(shared, sources.d_gate), True, ring_block,
                gate, 2 * n, gate, 2 * n + 1, expert, half, stage, phase, shares,
            )  # fmt: skip
            stage, phase = main.load_tile(
                bars, self.a(shared, sources.d_up), True, ring_block,
                up, 2 * n, up, 2 * n + 1, expert, half, stage, phase, shares,
            )  # fmt: skip
        elif kind == WDOWN:
            stage, phase = self.load_weight(
                shared, sources.dy_ring_t, not in_place, sources.weighted_t, False,
                entry, shares, stage, phase,
            )  # fmt: skip
        elif kind == WGATE:
            stage, phase = self.load_x_weight(
                shared, sources, sources.d_gate_t, entry, saved, shares, stage, phase
            )
        elif kind == WUP:
            stage, phase = self.load_x_weight(
                shared, sources, sources.d_up_t, entry, saved, shares, stage, phase
            )
        else:
            stage, phase = self.load_shared_task(ctx, shared, entry, shares, stage, phase)
        return stage, phase

    @cute.jit
    def load_shared_task(self, ctx, shared, entry, shares, stage, phase):
        """``load_task`` of the shared expert."""
        main, bars, sources = self.mainloop, shared.bars, ctx.sources
        kind, n, block, k_tiles = entry.kind, entry.n, entry.block, entry.k_tiles
        half = k_tiles // 2
        zero = Int32(0)
        if kind == SHARED + DDOWN:
            down = self.bt(shared, sources.shared_down_t)
            stage, phase = main.load_tile(
                bars, self.a(shared, sources.dy), True, block,
                down, 2 * n, down, 2 * n + 1, zero, k_tiles, stage, phase, shares,
            )  # fmt: skip
            if cutlass.const_expr(self.chunk_steps > 0):
                stage, phase = main.load_chunks(
                    bars, self.a(shared, sources.shared_gate_pre),
                    self.chunk(shared, sources.shared_up_pre),
                    block, n * self.chunks, self.chunks, stage, phase,
                )  # fmt: skip
        elif kind == SHARED + DX:
            gate = self.bt(shared, sources.shared_gate_t)
            up = self.bt(shared, sources.shared_up_t)
            stage, phase = main.load_tile(
                bars, self.a(shared, sources.shared_d_gate), True, block,
                gate, 2 * n, gate, 2 * n + 1, zero, half, stage, phase, shares,
            )  # fmt: skip
            stage, phase = main.load_tile(
                bars, self.a(shared, sources.shared_d_up), True, block,
                up, 2 * n, up, 2 * n + 1, zero, half, stage, phase, shares,
            )  # fmt: skip
        elif kind == SHARED + WDOWN:
            stage, phase = self.load_weight(
                shared,
                sources.dy_t,
                True,
                sources.shared_weighted_t,
                False,
                entry,
                shares,
                stage,
                phase,
            )
        elif kind == SHARED + WGATE:
            stage, phase = self.load_weight(
                shared,
                sources.x_t,
                True,
                sources.shared_d_gate_t,
                True,
                entry,
                shares,
                stage,
                phase,
            )
        else:
            stage, phase = self.load_weight(
                shared, sources.x_t, True, sources.shared_d_up_t, True, entry, shares, stage, phase
            )
        return stage, phase

    @cute.jit
    def load_x_weight(self, shared, sources, d, entry, saved, shares, stage, phase):
        """dW_gate or dW_up: x (gathered, saved or replayed) and d_gate or d_up."""
        if cutlass.const_expr(self.direct):
            stage, phase = self.load_weight(
                shared, sources.x_t, False, d, True, entry, shares, stage, phase
            )
        else:
            if saved:
                stage, phase = self.load_weight(
                    shared, sources.saved_x_t, True, d, True, entry, shares, stage, phase
                )
            else:
                stage, phase = self.load_weight(
                    shared, sources.replay_x_t, True, d, True, entry, shares, stage, phase
                )
        return stage, phase

    @cute.jit
    def load_weight(
        self, shared, rows, rows_by_tma: cutlass.Constexpr[bool], d, with_x: cutlass.Constexpr[bool],
        entry, shares, stage, phase,
    ):  # fmt: skip
        """A weight gradient: ``rows`` (of dy or x, tile m of H) against ``d`` (tile n of I).

        ``with_x``: the gradient of gate or up, whose rows are I: on Blackwell ``d`` is its A.
        """
        main, bars, zero = self.mainloop, shared.bars, Int32(0)
        m, n, k_tiles = entry.m, entry.n, entry.k_tiles
        k_first = entry.ring_block * (self.tile.m // main.TILE_K)  # rows are K
        if cutlass.const_expr(with_x and self.d_first):
            right = self.bt(shared, rows)
            stage, phase = main.load_tile(
                bars, self.at(shared, d), True, n, right, 2 * m, right, 2 * m + 1, zero,
                k_tiles, stage, phase, shares, k_first, rows_by_tma,
            )  # fmt: skip
        else:
            right = self.bt(shared, d)
            stage, phase = main.load_tile(
                bars, self.at(shared, rows), rows_by_tma, m, right, 2 * n, right, 2 * n + 1, zero,
                k_tiles, stage, phase, shares, k_first,
            )  # fmt: skip
        return stage, phase

    def a(self, shared, tma) -> Operand:
        """An A operand, K-major."""
        return self.mainloop.partition(tma, shared.sA, self.mainloop.CTA_ROWS)

    def at(self, shared, tma) -> Operand:
        """An A operand, rows contiguous."""
        sA = view(shared.storage.sA, self.mainloop.a_layout_mn)
        return self.mainloop.partition(tma, sA, self.mainloop.CTA_ROWS)

    def b(self, shared, tma) -> Operand:
        """A half of B, K-major."""
        return self.mainloop.partition(tma, shared.sB_half, self.mainloop.half_n)

    def bt(self, shared, tma) -> Operand:
        """A half of B, columns contiguous."""
        sB = view(shared.storage.sB, self.mainloop.b_half_layout_mn)
        return self.mainloop.partition(tma, sB, self.mainloop.half_n)

    def chunk(self, shared, tma) -> Operand:
        """A (128, 64) matrix chunk in B's place."""
        return self.mainloop.partition(tma, shared.sB_half, self.mainloop.CTA_ROWS)

    @cute.jit
    def gather_role(self, ctx, shared):
        """Rows of x and dy in place (direct): as A of replay and dgrad down, as K of weight gradients."""
        main, bars, queue, sources = self.mainloop, shared.bars, shared.queue, ctx.sources
        thread = cute.arch.thread_idx()[0] - self.first_gather_warp * 32
        sA = shared.sA.iterator.toint()
        # Where weight gradients have x.
        sX = shared.sB.iterator.toint() if cutlass.const_expr(self.d_first) else sA
        routes = ctx.schedule.rows.peer_token_idx
        by_topk = divider(ctx.sizes.topk)
        stage, phase = Int32(0), Int32(0)
        slot, slot_phase = Int32(0), Int32(0)
        kind = Int32(DX)
        while kind != END:
            entry = self.agreed(queue.get(slot, slot_phase, self.entry))
            slot, slot_phase = next_slot(slot, slot_phase)
            kind, k_tiles = entry.kind, entry.k_tiles
            own_rows = routes + self.row_tile(entry.block) * main.CTA_ROWS
            group_rows = routes + entry.first * self.tile.m
            column = self.row_tile(entry.m) * main.CTA_ROWS
            if kind == REPLAY:
                stage, phase = main.gather(
                    bars, sA, sources.x_rows, own_rows, by_topk, thread, k_tiles, stage, phase
                )
            elif kind == DDOWN:
                stage, phase = main.gather(
                    bars, sA, sources.dy_rows, own_rows, by_topk, thread, k_tiles, stage, phase
                )
            elif kind == WDOWN:
                stage, phase = main.gather_columns(
                    bars, sA, sources.dy_rows, column, group_rows, by_topk, thread,
                    k_tiles, stage, phase,
                )  # fmt: skip
            elif kind == WGATE or kind == WUP:
                stage, phase = main.gather_columns(
                    bars, sX, sources.x_rows, column, group_rows, by_topk, thread,
                    k_tiles, stage, phase,
                )  # fmt: skip
            elif kind != END:
                stage, phase = main.pass_tile(bars, k_tiles, stage, phase)
            if cutlass.const_expr(self.chunk_steps > 0):
                if kind == DDOWN or kind == SHARED + DDOWN:
                    stage, phase = main.pass_tile(bars, Int32(self.chunk_steps), stage, phase)
