"""The roles of the forward kernel: what each warp does with a task, and comm workers with an item."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from . import comm, comm_mxfp8, mxfp8, program, ptx, sync, trace
from .epilogue import quantise
from .epilogue.swiglu import swiglu
from .gemm.operands import RowSource, Tma
from .invariant import Invariant
from .machine import CHUNK_N
from .megakernel import WARPS, MegaKernel
from .program import DOWN, END, IDLE, SHARED_DOWN, SHARED_UP, UP
from .push import PushRole
from .queue import DSL, Entry, next_slot
from .sync import int_ptr
from .tracing import Tracer


class Sources(NamedTuple):
    """TMA loads: A operands (rows, k) and B operands (n, k, expert)."""

    x: Tma  # the rank's own tokens, for the shared expert
    x_rows: RowSource  # the same, gathered
    x_ring: Tma
    hidden: Tma
    shared_hidden: Tma
    gate: Tma
    up: Tma
    down: Tma
    shared_gate: Tma
    shared_up: Tma
    shared_down: Tma


class Scales(NamedTuple):
    """TMA loads of scales, where the MMA takes them."""

    x_ring: Tma
    hidden: Tma
    gate: Tma
    up: Tma
    down: Tma


class Targets(NamedTuple):
    """TMA stores of (128, 64) chunks."""

    hidden: Tma
    y: Tma
    shared_hidden: Tma
    shared_y: Tma
    gate: Tma  # saved pre-activations: only with save_context
    up: Tma
    shared_gate: Tma
    shared_up: Tma


class Schedule(NamedTuple):
    """The schedule's device arrays."""

    num_rows: cute.Pointer  # int32 [1]: padded rows of this rank
    expert_offset: cute.Pointer  # int32 [El + 1]: first row of each expert
    block_expert: cute.Pointer  # int32 [blocks]: local expert of a row block
    rows: comm.Rows


class Sizes(NamedTuple):
    """Run-time sizes."""

    tokens: Int32
    hidden: Int32
    intermediate: Int32
    shared_intermediate: Int32
    topk: Int32
    minibatch: Int32
    macrobatch: Int32
    max_minibatches: Int32  # of the counter array
    max_blocks: Int32
    num_comm_ctas: Int32


class Buffers(NamedTuple):
    """Addresses that comm workers use."""

    x_ring: Int64  # bf16 [macrobatch, H]; e4m3 where the MMA takes scales
    x_scales: Int64  # E8M0 of the x ring in tiles (MXFP8 where the MMA takes scales)
    hidden_scales: Int64  # the same of hidden
    y_ring: Int64  # bf16 [macrobatch, H]
    x_heap: Int64  # rank 0's bf16 [max tokens, H]; rank r's is r*rank_stride further
    x_heap_scales: Int64  # rank 0's E8M0 [max tokens, H/32] (wire, where x_heap is e4m3)
    slots_heap: Int64  # rank 0's bf16 [max tokens * K, H]
    counters: Int64  # int32


class Context(Invariant):
    """The kernel's arguments, as its roles see them."""

    def __init__(self, sources, scales, targets, schedule, sizes, buffers, watch, swiglu_limit):
        self.sources: Sources = sources
        self.scales: Scales | None = scales
        self.targets: Targets = targets
        self.schedule: Schedule = schedule
        self.sizes: Sizes = sizes
        self.buffers: Buffers = buffers
        self.watch: sync.Watch = watch
        self.swiglu_limit: Float32 | None = swiglu_limit
        layout = program.counter_layout(sizes.max_minibatches, sizes.max_blocks, 0)
        self.tracer: Tracer | None = None  # of a kernel built with ``trace``
        base = int_ptr(buffers.counters)
        self.counters = program.Counters(*[base + at for at in layout])  # pointers, not offsets


class ForwardRoles(PushRole, MegaKernel):
    """Base of ``ForwardKernel``."""

    entry = Entry
    pushes = DOWN

    def push_slots(self, ctx):
        """The combine slots."""
        return ctx.buffers.slots_heap

    def passed_chunks(self, entry) -> Int32:
        """Of gate+up, and of the shared expert's tasks."""
        is_up = (entry.kind == UP) | (entry.kind == SHARED_UP)
        up_chunks = self.tile.up_n // CHUNK_N * (3 if self.save_context else 1)
        other = sync.select(entry.kind == SHARED_DOWN, Int32(self.tile.down_n // CHUNK_N), Int32(0))
        return sync.select(is_up, Int32(up_chunks), other)

    def program(self, ctx) -> program.Forward:
        """The task program; each role that needs it makes its own, so that no other role keeps its numbers.

        A launch that the gate stops has no rows and no tokens.
        """
        sizes = ctx.sizes
        rows, tokens = cute.arch.load(ctx.schedule.num_rows, Int32), sizes.tokens
        if not self.direct:
            work = sync.goes_on(ctx.watch.gate)
            rows, tokens = sync.select(work, rows, Int32(0)), sync.select(work, tokens, Int32(0))
        return program.Forward(
            rows=rows,
            tokens=tokens,
            hidden=sizes.hidden,
            intermediate=sizes.intermediate,
            shared_intermediate=sizes.shared_intermediate,
            minibatch=sizes.minibatch,
            macrobatch=sizes.macrobatch,
            tile=self.tile,
            ops=DSL,
            recompute=self.recompute,
            ahead=program.tasks_ahead(self.direct, self.mxfp8, self.ahead),
            push=self.push,
        )

    @cute.jit
    def decode(self, ctx, prog, ticket, cursor):
        """The queue entry of a ticket. Tasks without K steps pass loads, MMA and epilogue by."""
        task = prog.task(ticket)
        kind, sizes = task.kind, ctx.sizes
        expert, halves = Int32(0), Int32(2)
        if kind == UP or kind == DOWN:
            expert = cute.arch.load(ctx.schedule.block_expert + task.block, Int32)
            halves = self.halves(ctx, task.block)
        k_size = sync.select(
            kind == DOWN,
            sizes.intermediate,
            sync.select(kind == SHARED_DOWN, sizes.shared_intermediate, sizes.hidden),
        )
        k_tiles = k_size // self.mainloop.TILE_K
        if cutlass.const_expr(self.scaled):
            routed = (kind == UP) | (kind == DOWN)
            k_tiles = sync.select(routed, k_size // self.mainloop.SCALED_K, k_tiles)
        k_tiles = sync.select(kind == END, Int32(0), k_tiles)
        ring_block = task.block % prog.ring_blocks
        entry = Entry(
            kind, task.block, task.n, task.minibatch, expert, k_tiles, ring_block, ticket, halves
        )
        return entry, cursor

    @cute.jit
    def wait_for(self, ctx, prog, entry):
        """Return once a task can run: what it reads is there, what it overwrites has been read."""
        counters, watch, ticket, role = ctx.counters, ctx.watch, entry.ticket, self.wait_role
        minibatch, block = entry.minibatch, entry.block
        previous = prog.previous(minibatch)  # of the minibatch's ring slot
        if entry.kind == UP:
            if cutlass.const_expr(not self.direct):
                sync.wait_at_least(
                    counters.x_ready + minibatch, prog.x_ready_target(minibatch), watch,
                    role, 0, ticket, minibatch,
                )  # fmt: skip
            elif previous < prog.minibatches:  # in the ring the dispatch of x has waited for it
                sync.wait_at_least(
                    counters.y_ready + previous, prog.y_ready_target(previous), watch,
                    role, 1, ticket, previous,
                )  # fmt: skip
        elif entry.kind == DOWN:
            sync.wait_at_least(
                counters.hidden_ready + block, prog.hidden_ready_target(), watch,
                role, 3, ticket, block,
            )  # fmt: skip
            if cutlass.const_expr(not self.direct and not self.push):
                if previous < prog.minibatches:
                    sync.wait_at_least(
                        counters.y_free + previous, prog.y_free_target(previous), watch,
                        role, 2, ticket, previous,
                    )  # fmt: skip
        elif entry.kind == SHARED_DOWN:
            sync.wait_at_least(
                counters.shared_hidden_ready + block, prog.shared_hidden_ready_target(), watch,
                role, 4, ticket, block,
            )  # fmt: skip

    @cute.jit
    def load_role(self, ctx, shared):
        """Load the tiles of tasks that can run."""
        prog = self.program(ctx)
        main, bars, sources, direct = self.mainloop, shared.bars, ctx.sources, self.direct
        sA, sB, rows = shared.sA, shared.sB_half, main.CTA_ROWS
        x = main.partition(sources.x, sA, rows)
        x_ring = main.partition(sources.x_ring, sA, rows)
        hidden = main.partition(sources.hidden, sA, rows)
        shared_hidden = main.partition(sources.shared_hidden, sA, rows)
        gate = main.partition(sources.gate, sB, main.half_n)
        up = main.partition(sources.up, sB, main.half_n)
        down = main.partition(sources.down, sB, main.half_n)
        shared_gate = main.partition(sources.shared_gate, sB, main.half_n)
        shared_up = main.partition(sources.shared_up, sB, main.half_n)
        shared_down = main.partition(sources.shared_down, sB, main.half_n)
        zero = Int32(0)
        up_scales = down_scales = ()
        if cutlass.const_expr(self.scaled):
            of = ctx.scales
            up_scales = main.partition_scales(shared.storage, of.x_ring, of.gate, of.up)
            down_scales = main.partition_scales(shared.storage, of.hidden, of.down, of.down)

        stage, phase = Int32(0), Int32(0)
        feed = self.first_task(ctx, prog)
        kind = Int32(SHARED_UP)
        while kind != END:
            entry, feed = self.next_task(ctx, prog, shared, feed)
            kind, shares = entry.kind, self.shares(feed)
            if cutlass.const_expr(self.trace):
                if self.works(kind):
                    ctx.tracer.begin(
                        trace.COMPUTE, kind, entry.ticket, entry.minibatch, entry.expert,
                        entry.block, entry.n,
                    )  # fmt: skip
            # What was waited for reached memory by way of other threads; TMA reads past them. This one
            # fence stands for all of them: it lies behind their writes and before every load.
            cute.arch.fence_proxy("async.global")
            if kind == UP:
                if cutlass.const_expr(self.scaled):
                    stage, phase = main.load_scaled_tile(
                        bars, x_ring, entry.ring_block, gate, entry.n, up, entry.n, up_scales,
                        entry.expert, entry.k_tiles, stage, phase,
                    )  # fmt: skip
                else:
                    stage, phase = main.load_tile(
                        bars, x_ring, not direct, entry.ring_block, gate, entry.n, up, entry.n,
                        entry.expert, entry.k_tiles, stage, phase, shares,
                    )  # fmt: skip
            elif kind == DOWN:
                if cutlass.const_expr(self.scaled):
                    stage, phase = main.load_scaled_tile(
                        bars, hidden, entry.ring_block, down, 2 * entry.n, down, 2 * entry.n + 1,
                        down_scales, entry.expert, entry.k_tiles, stage, phase,
                    )  # fmt: skip
                else:
                    stage, phase = main.load_tile(
                        bars, hidden, True, entry.ring_block, down, 2 * entry.n,
                        down, 2 * entry.n + 1, entry.expert, entry.k_tiles, stage, phase,
                        shares,
                    )  # fmt: skip
            elif kind == SHARED_UP:
                stage, phase = main.load_tile(
                    bars, x, True, entry.block, shared_gate, entry.n, shared_up, entry.n,
                    zero, entry.k_tiles, stage, phase, shares,
                )  # fmt: skip
            elif kind == SHARED_DOWN:
                stage, phase = main.load_tile(
                    bars, shared_hidden, True, entry.block, shared_down, 2 * entry.n,
                    shared_down, 2 * entry.n + 1, zero, entry.k_tiles, stage, phase, shares,
                )  # fmt: skip
            if cutlass.const_expr(self.pair):
                if kind == IDLE:
                    stage, phase = main.load_nothing(bars, entry.k_tiles, stage, phase)
        main.finish_loads(bars, stage, phase)

    @cute.jit
    def multiply(self, shared, fragments, tmem, entry, stage, phase, acc, acc_phase):
        """One task of the MMA role: routed ones with scales in MXFP8."""
        main = self.mainloop
        if cutlass.const_expr(self.scaled):
            if entry.kind == UP or entry.kind == DOWN:
                stage, phase = main.mma_scaled_tile(
                    shared.bars, shared.storage, tmem.toint(), entry.k_tiles, stage, phase,
                    acc, acc_phase,
                )  # fmt: skip
            else:
                stage, phase = main.mma_tile(
                    shared.bars, *fragments, entry.k_tiles, stage, phase, acc, acc_phase
                )
        else:
            stage, phase = main.mma_tile(
                shared.bars, *fragments, entry.k_tiles, stage, phase, acc, acc_phase
            )
        return stage, phase

    @cute.jit
    def gather_role(self, ctx, shared):
        """Copy the A rows of up tasks from x; keep step in the other tasks."""
        main, bars, queue = self.mainloop, shared.bars, shared.queue
        thread = cute.arch.thread_idx()[0] - self.first_gather_warp * 32
        sA_address = shared.sA.iterator.toint()
        by_topk = sync.divider(ctx.sizes.topk)
        stage, phase = Int32(0), Int32(0)
        slot, slot_phase = Int32(0), Int32(0)
        kind = Int32(SHARED_UP)
        while kind != END:
            entry = self.agreed(queue.get(slot, slot_phase))
            slot, slot_phase = next_slot(slot, slot_phase)
            kind = entry.kind
            if kind == UP:
                first = self.row_tile(entry.block) * main.CTA_ROWS
                stage, phase = main.gather(
                    bars, sA_address, ctx.sources.x_rows,
                    ctx.schedule.rows.peer_token_idx + first, by_topk, thread,
                    entry.k_tiles, stage, phase,
                )  # fmt: skip
            else:
                stage, phase = main.pass_tile(bars, entry.k_tiles, stage, phase)

    @cute.jit
    def result_role(self, ctx, shared, worker):
        """Take finished accumulators, apply the epilogue, hand finished chunks to the store warp."""
        main, bars, queue = self.mainloop, shared.bars, shared.queue
        at, phase = Int32(0), Int32(0)  # Hopper: the stage; Blackwell: the accumulator
        slot, slot_phase = Int32(0), Int32(0)
        chunk, chunk_phase = Int32(0), Int32(0)
        kind = Int32(SHARED_UP)
        while kind != END:
            entry = self.agreed(queue.get(slot, slot_phase))
            slot, slot_phase = next_slot(slot, slot_phase)
            kind = entry.kind
            if cutlass.const_expr(self.pair):
                if kind == IDLE:
                    at, phase = main.skip_tile(bars, entry.k_tiles, at, phase)
            # A number, so that no jump table over kinds is made, behind which nothing would be uniform.
            some = sync.select((entry.k_tiles > 0) & self.works(kind), Int32(1), Int32(0))
            (some,) = self.common(some)
            if some != 0:
                at, phase = main.take(worker, bars, entry.k_tiles, at, phase, halves=entry.halves)
                chunk, chunk_phase = self.common(chunk, chunk_phase)
                if kind == UP or kind == SHARED_UP:
                    chunk, chunk_phase = self.hidden_epilogue(
                        ctx, shared, worker, entry, at, chunk, chunk_phase
                    )
                else:
                    chunk, chunk_phase = self.down_epilogue(shared, worker, at, chunk, chunk_phase)
                at, phase = main.give_back(worker, bars, at, phase)

    @property
    def unrolled(self) -> bool:
        """Whether accumulators need indices at compile time: registers, and columns kept in them."""
        return self.hopper or self.scaled

    @cute.jit
    def hidden_epilogue(self, ctx, shared, worker, entry, at, chunk, phase):
        """The epilogue of up tasks: one for both kinds unless routed experts are quantised."""
        if cutlass.const_expr(not self.mxfp8):
            chunk, phase = self.up_epilogue(ctx, shared, worker, at, chunk, phase, False)
        elif entry.kind == SHARED_UP:
            chunk, phase = self.up_epilogue(ctx, shared, worker, at, chunk, phase, False)
        else:
            if cutlass.const_expr(self.scaled):
                chunk, phase = self.scaled_epilogue(ctx, shared, worker, entry, at, chunk, phase)
            else:
                chunk, phase = self.up_epilogue(ctx, shared, worker, at, chunk, phase, True)
        return chunk, phase

    @cute.jit
    def up_epilogue(
        self, ctx, shared, worker, at, chunk, phase, quantised: cutlass.Constexpr[bool]
    ):
        """hidden = swiglu(gate, up) per 64 columns; with save_context gate and up follow."""
        chunks = self.tile.up_n // CHUNK_N
        if cutlass.const_expr(self.unrolled):
            for c in cutlass.range_constexpr(chunks):
                chunk, phase = self.up_chunk(
                    ctx, shared, worker, at, c * CHUNK_N, chunk, phase, quantised
                )
        else:
            for c in cutlass.range(chunks, unroll=1):
                chunk, phase = self.up_chunk(
                    ctx, shared, worker, at, c * CHUNK_N, chunk, phase, quantised
                )
        return chunk, phase

    def up_chunk(self, ctx, shared, worker, at, gate, chunk, phase, quantised):
        """64 columns of gate from column ``gate`` on, and the same of up."""
        up = gate + self.tile.up_n
        chunk, phase = self.put_chunk(
            shared, worker, at, (gate, up), chunk, phase,
            lambda gate, up: swiglu(gate, up, ctx.swiglu_limit),
            quantise.wgmma_columns if quantised else None,
        )  # fmt: skip
        if self.save_context:
            for column in (gate, up):
                chunk, phase = self.put_chunk(shared, worker, at, (column,), chunk, phase)
        return chunk, phase

    @cute.jit
    def scaled_epilogue(self, ctx, shared, worker, entry, at, chunk, phase):
        """hidden = swiglu(gate, up) of the whole tile as E4M3; a thread holds the blocks of one row."""
        main, staging, up_n = self.mainloop, self.staging, self.tile.up_n
        sD_row = shared.sD.iterator.toint() + worker.row * (2 * CHUNK_N)
        codes = Uint32(0)
        for piece in cutlass.range_constexpr(up_n // mxfp8.BLOCK):
            packed = []
            for first in (32 * piece, 32 * piece + 16):  # half a block: fewer registers
                gate, up = main.columns(worker, at, first, first + up_n, width=16)
                values = [swiglu(*pair, ctx.swiglu_limit) for pair in zip(gate, up)]
                packed += [ptx.pack_bf16(values[i], values[i + 1]) for i in range(0, 16, 2)]
            code = mxfp8.scale_code(mxfp8.magnitude(packed))
            codes = codes | (Uint32(code) << Uint32(8 * piece))
            if cutlass.const_expr(piece == up_n // mxfp8.BLOCK - 1):
                row = self.row_tile(entry.ring_block) * main.CTA_ROWS + worker.row
                offset = mxfp8.scale_offset(row, 4 * entry.n, ctx.sizes.intermediate // 32)
                ptx.store_4(ctx.buffers.hidden_scales + offset, codes)
                # TMA reads them. The store warp signals for this write, too: it waits for the chunk.
                cute.arch.fence_proxy("async.global")
            words = mxfp8.quantise(packed, mxfp8.reciprocal(code))
            chunk, phase = staging.put_bytes(
                words, shared.stores, sD_row, worker.row, chunk, phase, piece
            )
        if cutlass.const_expr(self.save_context):
            for c in cutlass.range_constexpr(up_n // CHUNK_N):
                for column in (c * CHUNK_N, c * CHUNK_N + up_n):
                    chunk, phase = self.put_chunk(shared, worker, at, (column,), chunk, phase)
        return chunk, phase

    @cute.jit
    def down_epilogue(self, shared, worker, at, chunk, phase):
        """y, rounded to BF16."""
        chunks = self.tile.down_n // CHUNK_N
        if cutlass.const_expr(self.unrolled):
            for c in cutlass.range_constexpr(chunks):
                chunk, phase = self.put_chunk(shared, worker, at, (c * CHUNK_N,), chunk, phase)
        else:
            for c in cutlass.range(chunks, unroll=1):
                chunk, phase = self.put_chunk(shared, worker, at, (c * CHUNK_N,), chunk, phase)
        return chunk, phase

    @cute.jit
    def store_role(self, ctx, shared):
        """Write finished chunks with TMA; when a tile is in memory, signal its counter."""
        staging, stores, queue = self.staging, shared.stores, shared.queue
        targets, counters, sD, zero = ctx.targets, ctx.counters, shared.sD, Int32(0)
        up_chunks, down_chunks = self.tile.up_n // CHUNK_N, self.tile.down_n // CHUNK_N
        hidden = (staging.partition(targets.hidden, sD),)
        y = (staging.partition(targets.y, sD),)
        shared_hidden = (staging.partition(targets.shared_hidden, sD),)
        shared_y = (staging.partition(targets.shared_y, sD),)
        if cutlass.const_expr(self.save_context):
            hidden += (staging.partition(targets.gate, sD), staging.partition(targets.up, sD))
            shared_hidden += (
                staging.partition(targets.shared_gate, sD),
                staging.partition(targets.shared_up, sD),
            )
        slot, slot_phase = Int32(0), Int32(0)
        chunk, phase = Int32(0), Int32(0)
        kind = Int32(SHARED_UP)
        while kind != END:
            entry = queue.get(slot, slot_phase)
            slot, slot_phase = next_slot(slot, slot_phase)
            kind = entry.kind
            if kind == UP:
                rows = self.row_tile(entry.ring_block)
                if cutlass.const_expr(self.scaled):
                    chunk, phase = staging.store_tile(
                        stores, hidden[:1], rows, entry.n, 1, zero, chunk, phase
                    )
                    if cutlass.const_expr(self.save_context):
                        chunk, phase = staging.store_tile(
                            stores, hidden[1:], rows, entry.n, up_chunks, zero, chunk, phase
                        )
                else:
                    chunk, phase = staging.store_tile(
                        stores, hidden, rows, entry.n, up_chunks, zero, chunk, phase
                    )
                staging.signal(counters.hidden_ready + entry.block)
            elif kind == DOWN:
                if cutlass.const_expr(self.push):
                    chunk, phase = staging.pass_tile(stores, down_chunks, chunk, phase)
                else:
                    y_block = entry.block if cutlass.const_expr(self.direct) else entry.ring_block
                    chunk, phase = staging.store_tile(
                        stores, y, self.row_tile(y_block), entry.n, down_chunks, zero, chunk, phase
                    )
                staging.signal(counters.y_ready + entry.minibatch)
            elif kind == SHARED_UP:
                rows = self.row_tile(entry.block)
                chunk, phase = staging.store_tile(
                    stores, shared_hidden, rows, entry.n, up_chunks, zero, chunk, phase
                )
                staging.signal(counters.shared_hidden_ready + entry.block)
            elif kind == SHARED_DOWN:
                rows = self.row_tile(entry.block)
                chunk, phase = staging.store_tile(
                    stores, shared_y, rows, entry.n, down_chunks, zero, chunk, phase
                )
            if cutlass.const_expr(self.trace):
                if self.works(kind):
                    ctx.tracer.end()

    @cute.jit
    def tell_of(self, ctx, item):
        """Count an item whose rows are in memory."""
        if item.kind == program.DISPATCH:
            sync.arrive(ctx.counters.x_ready + item.minibatch)
        else:
            sync.arrive(ctx.counters.y_free + item.minibatch)

    @cute.jit
    def move_item(self, ctx, prog, item, ring_row, worker, warp, phase, owed):
        """Move an item's rows; returns the phase of this lane's slot."""
        rows, sizes, buffers = ctx.schedule.rows, ctx.sizes, ctx.buffers
        count = self.tile.comm_m
        if cutlass.const_expr(self.push) or item.kind == program.DISPATCH:
            if cutlass.const_expr(self.wire):
                comm_mxfp8.pull_quantised_rows(
                    rows, item.row, count, buffers.x_heap, buffers.x_heap_scales, sizes.topk,
                    buffers.x_ring, buffers.x_scales, Int32(ring_row), self.hopper, warp, WARPS,
                )  # fmt: skip
            elif cutlass.const_expr(self.mxfp8):
                comm_mxfp8.pull_rows(
                    rows, item.row, count, buffers.x_heap, sizes.topk, buffers.x_ring,
                    buffers.x_scales, Int32(ring_row), self.hopper, warp, WARPS,
                )  # fmt: skip
            else:
                phase = worker.pull(
                    item.row, buffers.x_heap, sizes.topk,
                    buffers.x_ring + ring_row * rows.row_bytes, phase, owed,
                )  # fmt: skip
        else:
            phase = worker.push(
                item.row, buffers.y_ring + ring_row * rows.row_bytes, buffers.slots_heap, phase,
                owed,
            )  # fmt: skip
        return phase

    def counter_of(self, ctx, item) -> cute.Pointer:
        """The counter of an item's minibatch that tells of the item."""
        counters = ctx.counters
        dispatched = (counters.x_ready + item.minibatch).toint()
        combined = (counters.y_free + item.minibatch).toint()
        return sync.int_ptr(sync.select_i64(item.kind == program.DISPATCH, dispatched, combined))

    def ring_row(self, ctx, item) -> Int64:
        """The item's first row in the ring."""
        return Int64(item.row % ctx.sizes.macrobatch)

    def first_item(self) -> Int32:
        """``item_of``'s state before the first item: none."""
        return Int32(0)

    def item_of(self, ctx, prog, index, state):
        """The item of a number, and the state for the next one."""
        return prog.item(index), state

    @cute.jit
    def item_there(self, ctx, prog, item) -> Int32:
        """1 if what ``wait_item`` waits for is there; one acquiring look."""
        awaited = self.awaited(prog, item)
        there = Int32(1)
        if awaited < prog.minibatches:
            value = ptx.acquire_gpu((ctx.counters.y_ready + awaited).toint())
            there = sync.select(value >= prog.y_ready_target(awaited), Int32(1), Int32(0))
        return there

    def awaited(self, prog, item) -> Int32:
        """Dispatch needs its slot's previous minibatch computed, combine its own; past the last: none."""
        return sync.select(
            item.kind == program.DISPATCH, prog.previous(item.minibatch), item.minibatch
        )

    @cute.jit
    def wait_item(self, ctx, prog, item, index):
        """Wait for what an item needs."""
        awaited = self.awaited(prog, item)
        if awaited < prog.minibatches:
            sync.wait_at_least(
                ctx.counters.y_ready + awaited, prog.y_ready_target(awaited), ctx.watch,
                1, 1, index, awaited,
            )  # fmt: skip
