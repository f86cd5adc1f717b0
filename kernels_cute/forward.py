"""The forward megakernel: dispatch, gate+up+SwiGLU, down and combine in one launch.

Two builds of one kernel. *Direct* (one rank, BF16): A rows are gathered in place from x, y rows stay where
the token sum finds them, and every CTA computes. *Ring* (several ranks): the first clusters to start are
comm workers that pull rows into the ring and push results to their slots; the others compute.

``forward_roles`` says what the warps do, ``megakernel`` which warp does what on which machine.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from . import comm, program, sync, trace, tracing
from .forward_roles import Buffers, Context, ForwardRoles, Schedule, Sizes, Sources, Targets
from .matrix import matrix
from .program import Tile
from .queue import DSL
from .sync import int_ptr


class ForwardKernel(ForwardRoles):
    """The forward kernel.

    Args:
        direct: gather rows in place (one rank, BF16); otherwise rows pass the ring.
        arch: "sm_90a", "sm_100a" or "sm_103a".
        save_context: also store gate and up, rounded to BF16, for backward.
        recompute: only rebuild what save_context stores (activation checkpointing).
        tile_n: accumulator columns, 128 or 256: tile_n/2 columns of I, or tile_n columns of H.
        group_m: row blocks that share a weight tile; None for the machine's default.
        stages: A/B stages in shared memory; None for the machine's default.
        scheduling: "clc" or "tickets"; None for the machine's default.
        trace: record begin and end of every task (``tracing``).
        name: prefix of the kernel's symbol.

    Raises:
        mok.errors.ResourceError: the configuration does not fit the machine.
    """

    def __init__(
        self,
        direct: bool,
        arch: str = "sm_90a",
        save_context: bool = False,
        recompute: bool = False,
        tile_n: int = 256,
        group_m: int | None = None,
        stages: int | None = None,
        scheduling: str | None = None,
        trace: bool = False,
        name: str = "mok_forward",
    ):
        super().__init__(arch, direct, tile_n, stages, scheduling)
        self.save_context = save_context or recompute
        self.recompute = recompute
        self.trace = trace
        self.name = name
        self.tile = Tile(
            m=self.machine.tile_m,
            up_n=tile_n // 2,
            down_n=tile_n,
            group_m=self.machine.group_m if group_m is None else group_m,
            signals=self.ctas,
        )

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
        gate: Int64,  # int32 [1], 0 for none: nonzero, and the launch does nothing
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
        self.setup()
        some_tokens = cutlass.max(tokens, Int32(1))
        shared_i = cutlass.max(shared_intermediate, Int32(64))
        sources = Sources(
            x=self.mainloop.tma_a(matrix(x, some_tokens, hidden_size)),
            x_rows=self.mainloop.row_source(x, some_tokens, hidden_size),
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
        buffers = Buffers(x_ring, y, x_heap, slots_heap, counters)
        watch = sync.Watch(record, timeout_ns, rank, gate)
        self.shared_storage = self.make_storage()
        self.kernel(sources, targets, schedule, sizes, buffers, watch, swiglu_limit).launch(
            **self.launch_options(grid, stream)
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
        self.setup()
        ctx = Context(sources, targets, schedule, sizes, buffers, watch, swiglu_limit)
        storage = SmemAllocator().allocate(self.shared_storage)
        if cutlass.const_expr(self.trace):
            ctx.tracer = tracing.Tracer(storage.trace_words.data_ptr())
            if cute.arch.thread_idx()[0] == 0:
                ctx.tracer.open(watch.record, trace.RECOMPUTE if self.recompute else trace.FORWARD)
        shared = self.enter(storage, ctx.counters.started)
        rows, tokens = cute.arch.load(schedule.num_rows, Int32), sizes.tokens
        if cutlass.const_expr(not self.direct):
            work = sync.goes_on(watch.gate)
            rows, tokens = sync.select(work, rows, Int32(0)), sync.select(work, tokens, Int32(0))
        prog = program.Forward(
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
        )
        if cutlass.const_expr(self.direct):
            self.compute_cta(ctx, prog, shared)
        else:
            if shared.order < sizes.num_comm_ctas // self.ctas:
                self.comm_cta(ctx, prog, shared)
                self.cluster_sync()
            else:
                self.compute_cta(ctx, prog, shared)
