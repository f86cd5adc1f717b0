"""The load and gather roles of the backward kernel: tickets, waits, and the operands of every task."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from .. import sync
from ..gemm.operands import Operand
from ..queue import broadcast, draw, next_slot
from ..sync import divide, divider, int_ptr, select
from .operands import COUNTERS, GATHER_WARP, Entry, counter_layout
from .program import (
    DDOWN,
    DX,
    END,
    GROUP_BASE,
    GROUP_WORDS,
    OVERLAPS,
    REPLAY,
    SHARED,
    TASK_BASE,
    WDOWN,
    WGATE,
    WUP,
)

ROLE = 0  # in sync.ROLES
NAME = {name: len(sync.COUNTERS) + i for i, name in enumerate(COUNTERS)}


class LoadRoles:
    """Mixin of ``BackwardKernel``; uses its ``mainloop``, ``tile`` and ``direct``."""

    @cute.jit
    def load_role(self, prog, queue, bars, smem, sources, schedule, sizes, buffers, watch):
        """Draw tickets, publish tasks, wait for what they need, load their tiles."""
        main = self.mainloop
        base = int_ptr(buffers.counters)
        counters = counter_layout(sizes.max_minibatches, sizes.max_blocks, sizes.max_groups, 0)
        tables, stride = schedule.tables, sizes.table_stride
        count = prog.minibatches
        placed = cute.arch.load(schedule.counts + 1, Int32)
        tasks_end = cute.arch.load(tables + TASK_BASE * stride + count, Int32)
        total = prog.total_tasks(tasks_end, cute.arch.load(schedule.counts, Int32) - placed)
        zero = Int32(0)
        minibatch = Int32(0)  # of the last routed ticket: tickets only grow
        stage, phase = Int32(0), Int32(0)
        slot, slot_phase = Int32(0), Int32(0)
        ticket = broadcast(draw(base + counters.ticket))
        kind = Int32(DX)
        while kind != END:
            entry, minibatch = self.decode(
                prog, schedule, sizes, ticket, total, tasks_end, placed, minibatch
            )
            kind = entry.kind
            queue.put(entry, slot, slot_phase)
            slot, slot_phase = next_slot(slot, slot_phase)
            following = draw(base + counters.ticket)
            if kind != END:
                self.wait(prog, base, counters, schedule, sizes, entry, watch)
                stage, phase = self.load_task(main, bars, smem, sources, sizes, entry, stage, phase)
            ticket = broadcast(following)

    @cute.jit
    def decode(self, prog, schedule, sizes, ticket, total, tasks_end, placed, minibatch):
        """The entry of a ticket, and the minibatch it lies in."""
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
            task = prog.routed_task(
                minibatch,
                ticket - cute.arch.load(task_base + minibatch, Int32),
                cute.arch.load(tables + GROUP_BASE * stride + minibatch, Int32),
            )
            kind, block, m, n, group = task.kind, task.block, task.m, task.n, task.group
        elif ticket < total:
            kind, m, n, group = prog.weight_task(ticket - tasks_end)
            group += placed
        expert, first, end, earlier, later = zero, zero, zero, zero, zero
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
        elif kind == REPLAY or kind == DDOWN or kind == DX:
            expert = cute.arch.load(schedule.block_expert + block, Int32)
            k_size = select(kind == DX, 2 * sizes.intermediate, k_size)
        elif kind > SHARED + DX:
            k_size = sizes.tokens
        elif kind == SHARED + DX:
            k_size = 2 * sizes.shared_intermediate
        k_tiles = (k_size + self.mainloop.TILE_K - 1) // self.mainloop.TILE_K
        entry = Entry(
            kind, block, block % prog.ring_blocks, m, n, block // prog.mb_blocks, expert,
            k_tiles, group, first, end, earlier, later, ticket,
        )  # fmt: skip
        return entry, minibatch

    # ---- waits: each on work that comes earlier in the program ----

    @cute.jit
    def wait(self, prog, base, counters, schedule, sizes, entry, watch):
        """Wait for everything a task reads or overwrites (whole warp)."""
        kind, minibatch = entry.kind, entry.minibatch
        previous = minibatch - prog.ring_mbs
        if kind == REPLAY or kind == DDOWN:
            if cutlass.const_expr(not self.direct):
                self.wait_on(
                    base + counters.dispatch, minibatch, prog.dispatch_target(minibatch),
                    "dispatch", entry, watch,
                )  # fmt: skip
        if kind == REPLAY:
            overlaps = cute.arch.load(
                schedule.tables + OVERLAPS * sizes.table_stride + previous, Int32
            )
            target = prog.free_target(previous, overlaps)
            self.wait_on(base + counters.free, previous, target, "free", entry, watch)
        if previous >= 0:
            if kind == DDOWN:
                self.wait_on(base + counters.replay, entry.block, prog.n_up, "replay", entry, watch)
            if cutlass.const_expr(not self.direct):
                if kind == DDOWN or kind == DX:
                    self.wait_on(
                        base + counters.push, previous, prog.dispatch_target(previous),
                        "push", entry, watch,
                    )  # fmt: skip
        if kind == DX:
            self.wait_on(base + counters.ddown, entry.block, prog.n_ddown, "ddown", entry, watch)
        elif kind == SHARED + DX:
            self.wait_on(
                base + counters.shared, entry.block, prog.shared_n_ddown, "shared", entry, watch
            )
        elif kind >= WDOWN and kind <= WUP:
            self.wait_range(
                base + counters.ddown, entry.first, entry.end, prog.n_ddown, "ddown", entry, watch
            )
            if entry.earlier != 0:
                target = self.consumer_warps * prog.group_tasks
                self.wait_on(base + counters.group, entry.group - 1, target, "group", entry, watch)
        elif kind > SHARED + DX:
            self.wait_range(
                base + counters.shared, Int32(0), prog.shared_blocks, prog.shared_n_ddown,
                "shared", entry, watch,
            )  # fmt: skip
        cute.arch.fence_proxy("async.global")
        cute.arch.sync_warp()

    def wait_on(self, counters, index, target, name: str, entry, watch):
        """One counter; every lane polls it."""
        sync.wait_at_least(counters + index, target, watch, ROLE, NAME[name], entry.ticket, index)

    @cute.jit
    def wait_range(self, counters, first, end, target, name: cutlass.Constexpr[str], entry, watch):
        """All counters of a range, one lane each."""
        for index in cutlass.range(first + cute.arch.lane_idx(), end, 32, unroll=1):
            sync.wait_at_least(
                counters + index, target, watch, ROLE, NAME[name], entry.ticket, index
            )

    # ---- loads ----

    @cute.jit
    def load_task(self, main, bars, smem, sources, sizes, entry, stage, phase):
        """All TMA loads of a task, in the order in which the MMA warps use them."""
        kind, n, m, expert = entry.kind, entry.n, entry.m, entry.expert
        block, ring_block, k_tiles = entry.block, entry.ring_block, entry.k_tiles
        half = k_tiles // 2
        zero = Int32(0)
        in_place = self.direct
        k_first = ring_block * (self.tile.m // main.TILE_K)  # weight gradients: rows are K
        saved = entry.minibatch * sizes.minibatch < sizes.macrobatch
        if kind == REPLAY:
            stage, phase = main.load_tile(
                bars, self.a(smem, sources.x_ring), not in_place, ring_block,
                self.b(smem, sources.gate), n, self.b(smem, sources.up), n,
                expert, k_tiles, stage, phase,
            )  # fmt: skip
        elif kind == DDOWN:
            down = self.bt(smem, sources.down_t)
            stage, phase = main.load_tile(
                bars, self.a(smem, sources.dy_ring), not in_place, ring_block,
                down, 2 * n, down, 2 * n + 1, expert, k_tiles, stage, phase,
            )  # fmt: skip
            if saved:
                stage, phase = main.load_chunks(
                    bars, self.a(smem, sources.saved_gate), self.chunk(smem, sources.saved_up),
                    ring_block, n * self.chunks, self.chunks, stage, phase,
                )  # fmt: skip
            else:
                stage, phase = main.load_chunks(
                    bars, self.a(smem, sources.replay_gate), self.chunk(smem, sources.replay_up),
                    ring_block, n * self.chunks, self.chunks, stage, phase,
                )  # fmt: skip
        elif kind == DX:
            gate, up = self.bt(smem, sources.gate_t), self.bt(smem, sources.up_t)
            stage, phase = main.load_tile(
                bars, self.a(smem, sources.d_gate), True, ring_block,
                gate, 2 * n, gate, 2 * n + 1, expert, half, stage, phase,
            )  # fmt: skip
            stage, phase = main.load_tile(
                bars, self.a(smem, sources.d_up), True, ring_block,
                up, 2 * n, up, 2 * n + 1, expert, half, stage, phase,
            )  # fmt: skip
        elif kind == WDOWN:
            weighted = self.bt(smem, sources.weighted_t)
            stage, phase = main.load_tile(
                bars, self.at(smem, sources.dy_ring_t), not in_place, m,
                weighted, 2 * n, weighted, 2 * n + 1, zero, k_tiles, stage, phase,
                k_first,
            )  # fmt: skip
        elif kind == WGATE:
            stage, phase = self.load_x_weight(
                main, bars, smem, sources, sources.d_gate_t, entry, saved, k_first, stage, phase
            )
        elif kind == WUP:
            stage, phase = self.load_x_weight(
                main, bars, smem, sources, sources.d_up_t, entry, saved, k_first, stage, phase
            )
        elif kind == SHARED + DDOWN:
            down = self.bt(smem, sources.shared_down_t)
            stage, phase = main.load_tile(
                bars, self.a(smem, sources.dy), True, block,
                down, 2 * n, down, 2 * n + 1, zero, k_tiles, stage, phase,
            )  # fmt: skip
            stage, phase = main.load_chunks(
                bars, self.a(smem, sources.shared_gate_pre),
                self.chunk(smem, sources.shared_up_pre),
                block, n * self.chunks, self.chunks, stage, phase,
            )  # fmt: skip
        elif kind == SHARED + DX:
            gate = self.bt(smem, sources.shared_gate_t)
            up = self.bt(smem, sources.shared_up_t)
            stage, phase = main.load_tile(
                bars, self.a(smem, sources.shared_d_gate), True, block,
                gate, 2 * n, gate, 2 * n + 1, zero, half, stage, phase,
            )  # fmt: skip
            stage, phase = main.load_tile(
                bars, self.a(smem, sources.shared_d_up), True, block,
                up, 2 * n, up, 2 * n + 1, zero, half, stage, phase,
            )  # fmt: skip
        elif kind == SHARED + WDOWN:
            weighted = self.bt(smem, sources.shared_weighted_t)
            stage, phase = main.load_tile(
                bars, self.at(smem, sources.dy_t), True, m,
                weighted, 2 * n, weighted, 2 * n + 1, zero, k_tiles, stage, phase,
            )  # fmt: skip
        elif kind == SHARED + WGATE:
            d_gate = self.bt(smem, sources.shared_d_gate_t)
            stage, phase = main.load_tile(
                bars, self.at(smem, sources.x_t), True, m,
                d_gate, 2 * n, d_gate, 2 * n + 1, zero, k_tiles, stage, phase,
            )  # fmt: skip
        else:
            d_up = self.bt(smem, sources.shared_d_up_t)
            stage, phase = main.load_tile(
                bars, self.at(smem, sources.x_t), True, m,
                d_up, 2 * n, d_up, 2 * n + 1, zero, k_tiles, stage, phase,
            )  # fmt: skip
        return stage, phase

    @cute.jit
    def load_x_weight(self, main, bars, smem, sources, source, entry, saved, k_first, stage, phase):
        """dW_gateᵀ or dW_upᵀ: xᵀ (gathered, saved or replayed) times d_gate or d_up."""
        n, m, k_tiles, zero = entry.n, entry.m, entry.k_tiles, Int32(0)
        b = self.bt(smem, source)
        if cutlass.const_expr(self.direct):
            stage, phase = main.load_tile(
                bars, self.at(smem, sources.x_t), False, m, b, 2 * n, b, 2 * n + 1, zero, k_tiles,
                stage, phase, k_first,
            )  # fmt: skip
        else:
            if saved:
                stage, phase = main.load_tile(
                    bars, self.at(smem, sources.saved_x_t), True, m, b, 2 * n, b, 2 * n + 1, zero,
                    k_tiles, stage, phase, k_first,
                )  # fmt: skip
            else:
                stage, phase = main.load_tile(
                    bars, self.at(smem, sources.replay_x_t), True, m, b, 2 * n, b, 2 * n + 1, zero,
                    k_tiles, stage, phase, k_first,
                )  # fmt: skip
        return stage, phase

    def a(self, smem, tma) -> Operand:
        """An A operand, K-major."""
        return self.mainloop.partition(tma, smem.sA, self.mainloop.TILE_M)

    def at(self, smem, tma) -> Operand:
        """An A operand, rows contiguous."""
        return self.mainloop.partition(tma, smem.sA_mn, self.mainloop.TILE_M)

    def b(self, smem, tma) -> Operand:
        """A half of B, K-major."""
        return self.mainloop.partition(tma, smem.sB_half, self.mainloop.half_n)

    def bt(self, smem, tma) -> Operand:
        """A half of B, columns contiguous."""
        return self.mainloop.partition(tma, smem.sB_half_mn, self.mainloop.half_n)

    def chunk(self, smem, tma) -> Operand:
        """A (128, 64) matrix chunk in B's place."""
        return self.mainloop.partition(tma, smem.sB_half, self.mainloop.TILE_M)

    @cute.jit
    def gather_role(self, thread, queue, bars, smem, schedule, sizes, buffers):
        """Rows of x and dy in place (direct): as A of replay and dgrad down, as K of weight gradients."""
        main = self.mainloop
        own = thread - GATHER_WARP * 32
        row_step = main.gather_threads // 8
        rows = cute.make_rmem_tensor((main.TILE_M // row_step,), Int32)
        sA = smem.sA.iterator.toint()
        row_bytes = Int64(sizes.hidden) * 2
        routes = schedule.rows.peer_token_idx
        by_topk = divider(sizes.topk)
        stage, phase = Int32(0), Int32(0)
        slot, slot_phase = Int32(0), Int32(0)
        kind = Int32(DX)
        while kind != END:
            entry = queue.get(slot, slot_phase, Entry)
            slot, slot_phase = next_slot(slot, slot_phase)
            kind, k_tiles = entry.kind, entry.k_tiles
            group_routes = routes + entry.first * main.TILE_M
            if kind == REPLAY or kind == DDOWN:
                first = routes + entry.block * main.TILE_M + own // 8
                for i in cutlass.range_constexpr(main.TILE_M // row_step):
                    route = cute.arch.load(first + i * row_step, Int32)
                    rows[i] = select(route < 0, Int32(-1), divide(route, by_topk))
                source = buffers.dy
                if kind == REPLAY:
                    source = buffers.x
                stage, phase = main.gather_tile(
                    bars, sA, source, row_bytes, rows, own, k_tiles, stage, phase
                )
            elif kind == WDOWN or kind == WGATE or kind == WUP:
                source = buffers.x
                if kind == WDOWN:
                    source = buffers.dy
                stage, phase = main.gather_columns(
                    bars, sA, source, sizes.hidden, entry.m * main.TILE_M, group_routes,
                    by_topk, own, k_tiles, stage, phase,
                )  # fmt: skip
            elif kind != END:
                stage, phase = main.pass_tile(bars, k_tiles, stage, phase)
            if kind == DDOWN or kind == SHARED + DDOWN:
                stage, phase = main.pass_tile(bars, Int32(self.chunks), stage, phase)
