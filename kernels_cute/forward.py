"""The forward megakernel: dispatch, gate+up+SwiGLU, down and combine in one launch.

Two builds of one kernel. *Direct* (one rank, BF16): A rows are gathered in place from x, y rows stay where
the token sum finds them, and every CTA computes. *Ring* (several ranks): the lowest CTAs are comm workers
that pull rows into the ring and push results to their slots; the others compute.

A compute CTA has three warpgroups. Warpgroup 0: the load warp draws tickets, publishes tasks and issues
TMA loads; the store warp writes finished tiles and signals their counters; two gather warps copy A rows
(direct only). Warpgroups 1 and 2 run the MMA and the epilogue of one 128-row tile together.
"""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from . import comm, program, sync
from .epilogue.staging import Staging
from .epilogue.swiglu import swiglu
from .gemm.sm90 import Mainloop, Stages, Tma
from .matrix import matrix
from .program import DOWN, END, SHARED_DOWN, SHARED_UP, UP, Tile
from .queue import DEPTH, DSL, WORDS, Entry, TaskQueue, broadcast, draw, next_slot
from .sync import int_ptr

LOAD_WARP, STORE_WARP, GATHER_WARP = 0, 1, 2
THREADS = 384
WARPS = THREADS // 32


class Sources(NamedTuple):
    """TMA loads: A operands (rows, k) and B operands (n, k, expert)."""

    x: Tma  # the rank's own tokens, for the shared expert
    x_ring: Tma
    hidden: Tma
    shared_hidden: Tma
    gate: Tma
    up: Tma
    down: Tma
    shared_gate: Tma
    shared_up: Tma
    shared_down: Tma


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
    """Addresses that comm workers and gather warps use."""

    x: Int64  # bf16 [T, H] of this rank
    x_ring: Int64  # bf16 [macrobatch, H]
    y_ring: Int64  # bf16 [macrobatch, H]
    x_heap: Int64  # rank 0's bf16 [max tokens, H]; rank r's is r*rank_stride further
    slots_heap: Int64  # rank 0's bf16 [max tokens * K, H]
    counters: Int64  # int32


class ForwardKernel:
    """The forward kernel for sm_90a.

    Args:
        direct: gather rows in place (one rank, BF16); otherwise rows pass the ring.
        save_context: also store gate and up, rounded to BF16, for backward.
        recompute: only rebuild what save_context stores (activation checkpointing).
        tile_n: accumulator columns (a multiple of 128): tile_n/2 columns of I, or tile_n columns of H.
        group_m: row blocks that share a weight tile.
        stages: A/B stages in shared memory.
        name: prefix of the kernel's symbol.
    """

    def __init__(
        self,
        direct: bool,
        save_context: bool = False,
        recompute: bool = False,
        tile_n: int = 256,
        group_m: int = 16,
        stages: int = 4,
        name: str = "mok_forward",
    ):
        self.direct = direct
        self.save_context = save_context or recompute
        self.recompute = recompute
        self.name = name
        self.gather_threads = 64 if direct else 0
        self.mainloop = Mainloop(tile_n, stages, self.gather_threads)
        self.tile = Tile(m=128, up_n=tile_n // 2, down_n=tile_n, group_m=group_m)
        self.consumer_warps = self.mainloop.WARPGROUPS * 4
        self.staging = Staging(self.tile.m, self.consumer_warps)
        self.up_chunks = self.tile.up_n // Staging.CHUNK_N
        self.down_chunks = self.tile.down_n // Staging.CHUNK_N

    # ---------------------------------------------------------------- host

    @cute.jit
    def __call__(
        self,
        x: Int64,  # bf16 [T, H]
        routed_gate: Int64,  # bf16 [El, I, H]
        routed_up: Int64,  # bf16 [El, I, H]
        routed_down: Int64,  # bf16 [El, H, I]
        shared_gate: Int64,  # bf16 [Is, H]
        shared_up: Int64,  # bf16 [Is, H]
        shared_down: Int64,  # bf16 [H, Is]
        peer_rank: Int64,  # int32 [rows]
        peer_token_idx: Int64,  # int32 [rows]
        block_expert: Int64,  # int32 [blocks]
        num_rows: Int64,  # int32 [1]
        x_ring: Int64,  # bf16 [macrobatch, H] (ring)
        hidden: Int64,  # bf16 [macrobatch, I]
        y: Int64,  # bf16 [y_rows, H]: the ring's rows, or all rows (direct)
        shared_hidden: Int64,  # bf16 [T, Is]
        shared_y: Int64,  # bf16 [T, H]
        saved_gate: Int64,  # bf16 [macrobatch, I] (save_context)
        saved_up: Int64,  # bf16 [macrobatch, I] (save_context)
        saved_shared_gate: Int64,  # bf16 [T, Is] (save_context)
        saved_shared_up: Int64,  # bf16 [T, Is] (save_context)
        x_heap: Int64,  # symmetric bf16 [max tokens, H], rank 0's address
        slots_heap: Int64,  # symmetric bf16 [max tokens * K, H], rank 0's address
        rank_stride: Int64,  # bytes
        counters: Int64,  # int32, zeroed
        record: Int64,  # int32 [RECORD_WORDS]
        timeout_ns: Int64,
        tokens: Int32,
        hidden_size: Int32,
        intermediate: Int32,
        shared_intermediate: Int32,
        experts: Int32,
        topk: Int32,
        minibatch: Int32,
        macrobatch: Int32,
        y_rows: Int32,
        max_minibatches: Int32,
        max_blocks: Int32,
        num_comm_ctas: Int32,
        grid: Int32,
        rank: Int32,
        swiglu_limit: Float32,
        stream: cuda.CUstream,
    ):
        """Build the TMA descriptors and launch. All tensors are row-major and 16-byte aligned."""
        self.mainloop.setup()
        self.staging.setup()
        some_tokens = cutlass.max(tokens, Int32(1))
        shared_i = cutlass.max(shared_intermediate, Int32(64))
        sources = Sources(
            x=self.mainloop.tma_a(matrix(x, some_tokens, hidden_size)),
            x_ring=self.mainloop.tma_a(matrix(x_ring, macrobatch, hidden_size)),
            hidden=self.mainloop.tma_a(matrix(hidden, macrobatch, intermediate)),
            shared_hidden=self.mainloop.tma_a(matrix(shared_hidden, some_tokens, shared_i)),
            gate=self.mainloop.tma_b_half(matrix(routed_gate, intermediate, hidden_size, experts)),
            up=self.mainloop.tma_b_half(matrix(routed_up, intermediate, hidden_size, experts)),
            down=self.mainloop.tma_b_half(matrix(routed_down, hidden_size, intermediate, experts)),
            shared_gate=self.mainloop.tma_b_half(matrix(shared_gate, shared_i, hidden_size)),
            shared_up=self.mainloop.tma_b_half(matrix(shared_up, shared_i, hidden_size)),
            shared_down=self.mainloop.tma_b_half(matrix(shared_down, hidden_size, shared_i)),
        )
        targets = Targets(
            hidden=self.staging.tma_store(matrix(hidden, macrobatch, intermediate)),
            y=self.staging.tma_store(matrix(y, y_rows, hidden_size)),
            shared_hidden=self.staging.tma_store(matrix(shared_hidden, some_tokens, shared_i)),
            shared_y=self.staging.tma_store(matrix(shared_y, some_tokens, hidden_size)),
            gate=self.staging.tma_store(matrix(saved_gate, macrobatch, intermediate)),
            up=self.staging.tma_store(matrix(saved_up, macrobatch, intermediate)),
            shared_gate=self.staging.tma_store(matrix(saved_shared_gate, some_tokens, shared_i)),
            shared_up=self.staging.tma_store(matrix(saved_shared_up, some_tokens, shared_i)),
        )
        schedule = Schedule(
            int_ptr(num_rows),
            int_ptr(block_expert),
            comm.Rows(
                int_ptr(peer_rank),
                int_ptr(peer_token_idx),
                rank_stride,
                Int64(hidden_size) * 2,
            ),
        )
        sizes = Sizes(
            tokens,
            hidden_size,
            intermediate,
            shared_intermediate,
            topk,
            minibatch,
            macrobatch,
            max_minibatches,
            max_blocks,
            num_comm_ctas,
        )
        buffers = Buffers(x, x_ring, y, x_heap, slots_heap, counters)
        watch = sync.Watch(record, timeout_ns, rank)

        stages = self.mainloop.stages

        @cute.struct
        class SharedStorage:
            full: cute.struct.MemRange[Int64, stages]
            empty: cute.struct.MemRange[Int64, stages]
            queue_full: cute.struct.MemRange[Int64, DEPTH]
            queue_empty: cute.struct.MemRange[Int64, DEPTH]
            store_full: cute.struct.MemRange[Int64, self.staging.stages]
            store_empty: cute.struct.MemRange[Int64, self.staging.stages]
            queue_words: cute.struct.MemRange[Int32, DEPTH * WORDS]
            comm_item: cute.struct.MemRange[Int32, 2]
            # bf16 (128, 64, stages), (tile_n, 64, stages), (128, 64, store stages)
            sA: cute.struct.Align[
                cute.struct.MemRange[BFloat16, cute.cosize(self.mainloop.a_layout)], 1024
            ]
            sB: cute.struct.Align[
                cute.struct.MemRange[BFloat16, cute.cosize(self.mainloop.b_layout)], 1024
            ]
            sD: cute.struct.Align[
                cute.struct.MemRange[BFloat16, cute.cosize(self.staging.layout)], 1024
            ]

        self.shared_storage = SharedStorage
        self.kernel(
            sources,
            targets,
            schedule,
            sizes,
            buffers,
            watch,
            swiglu_limit,
        ).launch(
            grid=(grid, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(1, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    # -------------------------------------------------------------- device

    @cute.kernel
    def kernel(
        self,
        sources: Sources,
        targets: Targets,
        schedule: Schedule,
        sizes: Sizes,
        buffers: Buffers,
        watch: sync.Watch,
        swiglu_limit: Float32,
    ):
        self.mainloop.setup()
        self.staging.setup()
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta, _, _ = cute.arch.block_idx()
        storage = cutlass.utils.SmemAllocator().allocate(self.shared_storage)
        bars = Stages(storage.full.data_ptr(), storage.empty.data_ptr())
        queue = TaskQueue(
            storage.queue_words.data_ptr(),
            storage.queue_full.data_ptr(),
            storage.queue_empty.data_ptr(),
        )
        stores = Stages(storage.store_full.data_ptr(), storage.store_empty.data_ptr())
        sA = storage.sA.get_tensor(
            self.mainloop.a_layout.outer, swizzle=self.mainloop.a_layout.inner
        )
        sB = storage.sB.get_tensor(
            self.mainloop.b_layout.outer, swizzle=self.mainloop.b_layout.inner
        )
        sD = storage.sD.get_tensor(self.staging.layout.outer, swizzle=self.staging.layout.inner)

        if warp == 0:
            if cute.arch.lane_idx() == 0:
                self.mainloop.init_barriers(bars)
                queue.init(1 + self.gather_threads // 32 + self.consumer_warps)
                self.staging.init_barriers(stores)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        rows = cute.arch.load(schedule.num_rows, Int32)
        prog = program.Forward(
            rows=rows,
            tokens=sizes.tokens,
            hidden=sizes.hidden,
            intermediate=sizes.intermediate,
            shared_intermediate=sizes.shared_intermediate,
            minibatch=sizes.minibatch,
            macrobatch=sizes.macrobatch,
            tile=self.tile,
            ops=DSL,
            recompute=self.recompute,
        )
        if cutlass.const_expr(self.direct):
            self.compute_cta(
                thread, warp, prog, queue, bars, stores, sA, sB, sD,
                sources, targets, schedule, sizes, buffers, watch, swiglu_limit,
            )  # fmt: skip
        else:
            if cta < sizes.num_comm_ctas:
                self.comm_cta(
                    thread,
                    warp,
                    prog,
                    storage.comm_item.data_ptr(),
                    schedule,
                    sizes,
                    buffers,
                    watch,
                )
            else:
                self.compute_cta(
                    thread, warp, prog, queue, bars, stores, sA, sB, sD,
                    sources, targets, schedule, sizes, buffers, watch, swiglu_limit,
                )  # fmt: skip

    @cute.jit
    def compute_cta(
        self, thread, warp, prog, queue, bars, stores, sA, sB, sD,
        sources, targets, schedule, sizes, buffers, watch, swiglu_limit,
    ):  # fmt: skip
        """Warp roles of a compute CTA."""
        if warp < 4:
            cute.arch.setmaxregister_decrease(80)
            if warp == LOAD_WARP:
                self.load_role(prog, queue, bars, sA, sB, sources, schedule, sizes, buffers, watch)
            elif warp == STORE_WARP:
                self.store_role(queue, stores, sD, targets, sizes, buffers)
            else:
                if cutlass.const_expr(self.direct):
                    self.gather_role(thread, queue, bars, sA, schedule, sizes, buffers)
        else:
            cute.arch.setmaxregister_increase(208)
            self.mma_role(thread, warp, queue, bars, stores, sA, sB, sD, swiglu_limit)

    @cute.jit
    def load_role(self, prog, queue, bars, sA, sB, sources, schedule, sizes, buffers, watch):
        """Draw tickets, publish tasks, wait for what they need, load their tiles."""
        main = self.mainloop
        base = int_ptr(buffers.counters)
        counters = program.counter_layout(sizes.max_minibatches, sizes.max_blocks, 0)
        sB_half = cute.make_tensor(sB.iterator, main.b_half_layout.outer)
        x = main.partition(sources.x, sA, main.TILE_M)
        x_ring = main.partition(sources.x_ring, sA, main.TILE_M)
        hidden = main.partition(sources.hidden, sA, main.TILE_M)
        shared_hidden = main.partition(sources.shared_hidden, sA, main.TILE_M)
        gate = main.partition(sources.gate, sB_half, main.half_n)
        up = main.partition(sources.up, sB_half, main.half_n)
        down = main.partition(sources.down, sB_half, main.half_n)
        shared_gate = main.partition(sources.shared_gate, sB_half, main.half_n)
        shared_up = main.partition(sources.shared_up, sB_half, main.half_n)
        shared_down = main.partition(sources.shared_down, sB_half, main.half_n)
        zero = Int32(0)

        stage, phase = Int32(0), Int32(0)
        slot, slot_phase = Int32(0), Int32(0)
        ticket = broadcast(draw(base + counters.ticket))
        kind = Int32(SHARED_UP)
        while kind != END:
            task = prog.task(ticket)
            kind = task.kind
            expert = Int32(0)
            if kind == UP or kind == DOWN:
                expert = cute.arch.load(schedule.block_expert + task.block, Int32)
            k_size = sync.select(
                kind == DOWN,
                sizes.intermediate,
                sync.select(kind == SHARED_DOWN, sizes.shared_intermediate, sizes.hidden),
            )
            k_tiles = k_size // main.TILE_K
            ring_block = task.block % prog.ring_blocks
            entry = Entry(
                kind, task.block, task.n, task.minibatch, expert, k_tiles, ring_block, ticket
            )
            queue.put(entry, slot, slot_phase)
            slot, slot_phase = next_slot(slot, slot_phase)
            following = draw(base + counters.ticket)

            if kind == UP:
                self.wait_up(prog, base, counters, task, ticket, watch)
                stage, phase = main.load_tile(
                    bars, x_ring, not self.direct, ring_block, gate, task.n, up, task.n,
                    expert, k_tiles, stage, phase,
                )  # fmt: skip
            elif kind == DOWN:
                self.wait_down(prog, base, counters, task, ticket, watch)
                stage, phase = main.load_tile(
                    bars, hidden, True, ring_block, down, 2 * task.n, down, 2 * task.n + 1,
                    expert, k_tiles, stage, phase,
                )  # fmt: skip
            elif kind == SHARED_UP:
                stage, phase = main.load_tile(
                    bars, x, True, task.block, shared_gate, task.n, shared_up, task.n,
                    zero, k_tiles, stage, phase,
                )  # fmt: skip
            elif kind == SHARED_DOWN:
                sync.wait_at_least(
                    base + counters.shared_hidden_ready + task.block, prog.shared_n_up, watch,
                    0, 4, ticket, task.block,
                )  # fmt: skip
                cute.arch.fence_proxy("async.global")
                stage, phase = main.load_tile(
                    bars, shared_hidden, True, task.block, shared_down, 2 * task.n,
                    shared_down, 2 * task.n + 1, zero, k_tiles, stage, phase,
                )  # fmt: skip
            ticket = broadcast(following)

    @cute.jit
    def wait_up(self, prog, base, counters, task, ticket, watch):
        """An up task needs its rows in the ring, and its hidden slot free."""
        minibatch = task.minibatch
        if cutlass.const_expr(not self.direct):
            sync.wait_at_least(
                base + counters.x_ready + minibatch, prog.x_ready_target(minibatch), watch,
                0, 0, ticket, minibatch,
            )  # fmt: skip
        previous = prog.previous(minibatch)
        if previous < prog.minibatches:
            sync.wait_at_least(
                base + counters.y_ready + previous, prog.y_ready_target(previous), watch,
                0, 1, ticket, previous,
            )  # fmt: skip
        cute.arch.fence_proxy("async.global")

    @cute.jit
    def wait_down(self, prog, base, counters, task, ticket, watch):
        """A down task needs its block's hidden rows, and in the ring its y slot free."""
        sync.wait_at_least(
            base + counters.hidden_ready + task.block, prog.hidden_ready_target(), watch,
            0, 3, ticket, task.block,
        )  # fmt: skip
        if cutlass.const_expr(not self.direct):
            previous = prog.previous(task.minibatch)
            if previous < prog.minibatches:
                sync.wait_at_least(
                    base + counters.y_free + previous, prog.y_free_target(previous), watch,
                    0, 2, ticket, previous,
                )  # fmt: skip
        cute.arch.fence_proxy("async.global")

    @cute.jit
    def gather_role(self, thread, queue, bars, sA, schedule, sizes, buffers):
        """Copy the A rows of up tasks from x; arrive for the other tasks."""
        main = self.mainloop
        own = thread - GATHER_WARP * 32
        row_step = main.gather_threads // 8
        rows = cute.make_rmem_tensor((main.TILE_M // row_step,), Int32)
        sA_address = sA.iterator.toint()
        row_bytes = Int64(sizes.hidden) * 2
        stage, phase = Int32(0), Int32(0)
        slot, slot_phase = Int32(0), Int32(0)
        kind = Int32(SHARED_UP)
        while kind != END:
            entry = queue.get(slot, slot_phase)
            slot, slot_phase = next_slot(slot, slot_phase)
            kind = entry.kind
            if kind == UP:
                first = schedule.rows.peer_token_idx + entry.block * main.TILE_M + own // 8
                for i in cutlass.range_constexpr(main.TILE_M // row_step):
                    route = cute.arch.load(first + i * row_step, Int32)
                    rows[i] = sync.select(route < 0, Int32(-1), route // sizes.topk)
                stage, phase = main.gather_tile(
                    bars, sA_address, buffers.x, row_bytes, rows, own, entry.k_tiles, stage, phase
                )
            elif kind != END:
                stage, phase = main.pass_tile(bars, entry.k_tiles, stage, phase)

    @cute.jit
    def mma_role(self, thread, warp, queue, bars, stores, sA, sB, sD, swiglu_limit):
        """Multiply, apply the epilogue, hand finished chunks to the store warp."""
        main = self.mainloop
        group = cute.arch.make_warp_uniform(warp // 4) - 1
        tCrA, tCrB = main.fragments("kk", sA, sB, group)
        acc = main.accumulator()
        # Lane l of a warp gives stmatrix the address of row l%16 and of column group l//16.
        lane = cute.arch.lane_idx()
        row = warp % 4 * 16 + group * 64 + lane % 16
        sD_row = sD.iterator.toint() + row * 128
        stage, phase = Int32(0), Int32(0)
        slot, slot_phase = Int32(0), Int32(0)
        chunk, chunk_phase = Int32(0), Int32(0)
        kind = Int32(SHARED_UP)
        while kind != END:
            entry = queue.get(slot, slot_phase)
            slot, slot_phase = next_slot(slot, slot_phase)
            kind = entry.kind
            if kind != END:
                stage, phase = main.mma_tile(
                    "kk", bars, tCrA, tCrB, acc, entry.k_tiles, stage, phase
                )
                if kind == UP or kind == SHARED_UP:
                    chunk, chunk_phase = self.up_epilogue(
                        acc, kind, swiglu_limit, stores, sD_row, row, chunk, chunk_phase
                    )
                else:
                    chunk, chunk_phase = self.down_epilogue(
                        acc, stores, sD_row, row, chunk, chunk_phase
                    )

    @cute.jit
    def up_epilogue(self, acc, kind, limit, stores, sD_row, row, chunk, chunk_phase):
        """hidden = swiglu(gate, up) per 64 columns; with save_context gate and up follow."""
        half = 4 * (self.tile.up_n // 8)
        for c in cutlass.range_constexpr(self.up_chunks):
            values = [swiglu(acc[c * 32 + i], acc[half + c * 32 + i], limit) for i in range(32)]
            chunk, chunk_phase = self.staging.put(values, stores, sD_row, row, chunk, chunk_phase)
            if cutlass.const_expr(self.save_context):
                gates = [acc[c * 32 + i] for i in range(32)]
                chunk, chunk_phase = self.staging.put(
                    gates, stores, sD_row, row, chunk, chunk_phase
                )
                ups = [acc[half + c * 32 + i] for i in range(32)]
                chunk, chunk_phase = self.staging.put(ups, stores, sD_row, row, chunk, chunk_phase)
        return chunk, chunk_phase

    @cute.jit
    def down_epilogue(self, acc, stores, sD_row, row, chunk, chunk_phase):
        """y, rounded to BF16."""
        for c in cutlass.range_constexpr(self.down_chunks):
            values = [acc[c * 32 + i] for i in range(32)]
            chunk, chunk_phase = self.staging.put(values, stores, sD_row, row, chunk, chunk_phase)
        return chunk, chunk_phase

    @cute.jit
    def store_role(self, queue, stores, sD, targets, sizes, buffers):
        """Write finished chunks with TMA; when a tile is in memory, signal its counter."""
        base = int_ptr(buffers.counters)
        counters = program.counter_layout(sizes.max_minibatches, sizes.max_blocks, 0)
        staging, zero = self.staging, Int32(0)
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
                chunk, phase = staging.store_tile(
                    stores, hidden, entry.ring_block, entry.n, self.up_chunks, zero, chunk, phase
                )
                staging.signal(base + counters.hidden_ready + entry.block)
            elif kind == DOWN:
                y_block = entry.block if cutlass.const_expr(self.direct) else entry.ring_block
                chunk, phase = staging.store_tile(
                    stores, y, y_block, entry.n, self.down_chunks, zero, chunk, phase
                )
                staging.signal(base + counters.y_ready + entry.minibatch)
            elif kind == SHARED_UP:
                chunk, phase = staging.store_tile(
                    stores, shared_hidden, entry.block, entry.n, self.up_chunks, zero, chunk, phase
                )
                staging.signal(base + counters.shared_hidden_ready + entry.block)
            elif kind == SHARED_DOWN:
                chunk, phase = staging.store_tile(
                    stores, shared_y, entry.block, entry.n, self.down_chunks, zero, chunk, phase
                )
                staging.drain()

    @cute.jit
    def comm_cta(self, thread, warp, prog, item_word, schedule, sizes, buffers, watch):
        """Take comm items in order: pull rows into the ring, push finished rows to their slots."""
        base = int_ptr(buffers.counters)
        counters = program.counter_layout(sizes.max_minibatches, sizes.max_blocks, 0)
        rows = schedule.rows
        count = self.tile.comm_m
        index = Int32(0)
        while index < prog.items:
            if thread == 0:
                drawn = cute.arch.atomic_add(
                    base + counters.comm_ticket, Int32(1), sem="relaxed", scope="gpu"
                )
                cute.arch.store(item_word, drawn)
            cute.arch.sync_threads()
            index = cute.arch.load(item_word, Int32)
            if index < prog.items:
                item = prog.item(index)
                ring_row = Int64(item.row % sizes.macrobatch)
                if thread == 0:
                    self.wait_item(prog, base, counters, item, index, watch)
                cute.arch.sync_threads()
                if item.kind == program.DISPATCH:
                    comm.pull_rows(
                        rows, item.row, count, buffers.x_heap, sizes.topk,
                        buffers.x_ring + ring_row * rows.row_bytes, warp, WARPS,
                    )  # fmt: skip
                    cute.arch.fence_proxy("async.global")
                else:
                    comm.push_rows(
                        rows, item.row, count, buffers.y_ring + ring_row * rows.row_bytes,
                        buffers.slots_heap, warp, WARPS,
                    )  # fmt: skip
                cute.arch.sync_threads()
                if thread == 0:
                    if item.kind == program.DISPATCH:
                        sync.arrive(base + counters.x_ready + item.minibatch)
                    else:
                        sync.arrive(base + counters.y_free + item.minibatch)
            else:
                cute.arch.sync_threads()

    @cute.jit
    def wait_item(self, prog, base, counters, item, index, watch):
        """Dispatch waits until its slot's previous minibatch is computed, combine for its own."""
        awaited = sync.select(
            item.kind == program.DISPATCH, prog.previous(item.minibatch), item.minibatch
        )
        if awaited < prog.minibatches:
            sync.wait_at_least(
                base + counters.y_ready + awaited, prog.y_ready_target(awaited), watch,
                1, 1, index, awaited,
            )  # fmt: skip
