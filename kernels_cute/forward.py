"""The forward megakernel: dispatch, gate+up+SwiGLU, down and combine in one launch.

Two builds of one kernel. *Direct* (one rank, BF16): A rows are gathered in place from x, y rows stay where
the token sum finds them, and every CTA computes. *Ring* (several ranks, or MXFP8): the first clusters to start
are comm workers that pull rows into the ring and, unless tasks do so themselves (``push``), push results to their
slots; the others compute.

``forward_roles`` says what the warps do, ``megakernel`` which warp does what on which machine.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from mok.errors import ResourceError

from . import comm, sync, trace, tracing
from .forward_roles import (
    Buffers,
    Context,
    ForwardRoles,
    Scales,
    Schedule,
    Sizes,
    Sources,
    Targets,
)
from .machine import forward_pushes
from .matrix import matrix
from .program import AHEAD, Tile
from .sync import int_ptr


class ForwardKernel(ForwardRoles):
    """The forward kernel.

    Args:
        direct: gather rows in place (one rank, BF16); otherwise rows pass the ring.
        arch: "sm_90a", "sm_100a" or "sm_103a".
        save_context: also store gate and up, rounded to BF16, for backward.
        recompute: only rebuild what save_context stores (activation checkpointing).
        mxfp8: routed experts in MXFP8; dispatch and the SwiGLU epilogue quantise. Not with ``direct``.
        wire: with mxfp8, x_heap is quantised already. Changes no bit of any result.
        tile_n: accumulator columns, 128 or 256: tile_n/2 columns of I, or tile_n columns of H.
        group_m: row blocks that share a weight tile; None for the machine's default.
        stages: A/B stages in shared memory; None for the machine's default.
        scheduling: "clc" or "tickets"; None for the machine's default.
        trace: record begin and end of every task (``tracing``).
        name: prefix of the kernel's symbol.
        pair: clusters of two CTAs that share B, on Hopper. Changes no bit.
        limited: clamp at ``swiglu_limit``; without, it is taken as infinite.
        carry: comm workers use bulk copies. Changes no bit.
        ahead: tasks of the next minibatch's up before a minibatch's down, in BF16 ring builds. Changes no bit.
        comm_m: rows of a comm item, 64, or 128 where they are carried in BF16. Changes no bit.
        overlap: comm workers begin an item while the last one's rows are on their way, where rows are carried in
            BF16. Changes no bit.
        push: down's tiles go from shared memory straight to their routes' slots, and comm workers only dispatch
            (``push``); by default where that exists: not direct, not recomputing, on Hopper. Changes no bit.

    Raises:
        mok.errors.ResourceError: the configuration does not fit the machine.
    """

    def __init__(
        self,
        direct: bool,
        arch: str = "sm_90a",
        save_context: bool = False,
        recompute: bool = False,
        mxfp8: bool = False,
        wire: bool = False,
        tile_n: int = 256,
        group_m: int | None = None,
        stages: int | None = None,
        scheduling: str | None = None,
        trace: bool = False,
        name: str = "mok_forward",
        pair: bool = False,
        limited: bool = True,
        carry: bool | None = None,
        ahead: int = AHEAD,
        comm_m: int = 64,
        overlap: bool = False,
        push: bool | None = None,
    ):
        if mxfp8 and direct:
            raise ResourceError("MXFP8 rows pass the ring: dispatch quantises them", "direct")
        if wire and not mxfp8:
            raise ResourceError("only MXFP8 can be on the wire", "wire without mxfp8")
        super().__init__(
            arch, direct, tile_n, stages, scheduling, mxfp8, pair=pair, carry=carry, overlap=overlap,
            push=forward_pushes(arch, direct or recompute, push),
        )  # fmt: skip
        self.wire = wire
        self.save_context = save_context or recompute
        self.recompute = recompute
        self.trace = trace
        self.limited = limited
        self.ahead = ahead
        self.name = name
        self.tile = Tile(
            m=self.machine.tile_m,
            up_n=tile_n // 2,
            down_n=tile_n,
            group_m=self.machine.group_m if group_m is None else group_m,
            comm_m=self.check_comm_rows(comm_m),
            signals=self.machine.ctas,
        )

    @cute.jit
    def __call__(
        self,
        x: Int64,  # bf16 [T, H]
        routed_gate: Int64,  # bf16 [El, I, H]; e4m3 with mxfp8 on Blackwell
        routed_up: Int64,  # bf16 [El, I, H]; e4m3 with mxfp8 on Blackwell
        routed_down: Int64,  # bf16 [El, H, I]; e4m3 with mxfp8 on Blackwell
        shared_gate: Int64,  # bf16 [Is, H]
        shared_up: Int64,  # bf16 [Is, H]
        shared_down: Int64,  # bf16 [H, Is]
        peer_rank: Int64,  # int32 [rows]
        peer_token_idx: Int64,  # int32 [rows]
        block_expert: Int64,  # int32 [blocks]
        num_rows: Int64,  # int32 [1]
        expert_offset: Int64,  # int32 [El + 1]
        x_ring: Int64,  # bf16 [macrobatch, H] (ring); e4m3 with mxfp8 on Blackwell
        hidden: Int64,  # bf16 [macrobatch, I]; e4m3 with mxfp8 on Blackwell
        y: Int64,  # bf16 [y_rows, H]: the ring's rows, or all rows (direct)
        shared_hidden: Int64,  # bf16 [T, Is]
        shared_y: Int64,  # bf16 [T, H]
        saved_gate: Int64,  # bf16 [macrobatch, I] (save_context)
        saved_up: Int64,  # bf16 [macrobatch, I] (save_context)
        saved_shared_gate: Int64,  # bf16 [T, Is] (save_context)
        saved_shared_up: Int64,  # bf16 [T, Is] (save_context)
        gate_scales: Int64,  # uint8 [El, I/128, H/128, 512] (mxfp8 on Blackwell, as the next four)
        up_scales: Int64,  # uint8 [El, I/128, H/128, 512]
        down_scales: Int64,  # uint8 [El, H/128, I/128, 512]
        x_scales: Int64,  # uint8 [macrobatch/128, H/128, 512]
        hidden_scales: Int64,  # uint8 [macrobatch/128, I/128, 512]
        x_heap: Int64,  # symmetric bf16 [max tokens, H], rank 0's address; e4m3 with wire
        x_heap_scales: Int64,  # symmetric uint8 [max tokens, H/32], rank 0's address (wire)
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
        # TMA moves pairs of E4M3 as BF16.
        H, I = hidden_size, intermediate
        if cutlass.const_expr(self.scaled):
            H, I = hidden_size // 2, intermediate // 2
        sources = Sources(
            x=self.mainloop.tma_a(matrix(x, some_tokens, hidden_size)),
            x_rows=self.mainloop.row_source(x, some_tokens, hidden_size),
            x_ring=self.mainloop.tma_a(matrix(x_ring, macrobatch, H)),
            hidden=self.mainloop.tma_a(matrix(hidden, macrobatch, I)),
            shared_hidden=self.mainloop.tma_a(matrix(shared_hidden, some_tokens, shared_i)),
            gate=self.mainloop.tma_b_half(matrix(routed_gate, intermediate, H, experts)),
            up=self.mainloop.tma_b_half(matrix(routed_up, intermediate, H, experts)),
            down=self.mainloop.tma_b_half(matrix(routed_down, hidden_size, I, experts)),
            shared_gate=self.mainloop.tma_b_half(matrix(shared_gate, shared_i, hidden_size)),
            shared_up=self.mainloop.tma_b_half(matrix(shared_up, shared_i, hidden_size)),
            shared_down=self.mainloop.tma_b_half(matrix(shared_down, hidden_size, shared_i)),
        )
        scales = None
        if cutlass.const_expr(self.scaled):
            tiles = self.mainloop.tma_scales
            scales = Scales(
                x_ring=tiles(x_scales, macrobatch, hidden_size),
                hidden=tiles(hidden_scales, macrobatch, intermediate),
                gate=tiles(gate_scales, intermediate, hidden_size, experts),
                up=tiles(up_scales, intermediate, hidden_size, experts),
                down=tiles(down_scales, hidden_size, intermediate, experts),
            )
        targets = Targets(
            hidden=self.staging.tma_store(matrix(hidden, macrobatch, I)),
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
            int_ptr(expert_offset),
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
        buffers = Buffers(
            x_ring, x_scales, hidden_scales, y, x_heap, x_heap_scales, slots_heap, counters
        )
        watch = sync.Watch(record, timeout_ns, rank, gate)
        self.shared_storage = self.make_storage()
        self.kernel(sources, scales, targets, schedule, sizes, buffers, watch, swiglu_limit).launch(
            **self.launch_options(grid, stream)
        )

    # -------------------------------------------------------------- device

    @cute.kernel
    def kernel(
        self,
        sources: Sources,
        scales: Scales | None,
        targets: Targets,
        schedule: Schedule,
        sizes: Sizes,
        buffers: Buffers,
        watch: sync.Watch,
        swiglu_limit: Float32,
    ):
        self.setup()
        swiglu_limit = swiglu_limit if self.limited else None
        ctx = Context(sources, scales, targets, schedule, sizes, buffers, watch, swiglu_limit)
        storage = SmemAllocator().allocate(self.shared_storage)
        if cutlass.const_expr(self.trace):
            ctx.tracer = tracing.Tracer(storage.trace_words.data_ptr())
            if cute.arch.thread_idx()[0] == 0:
                ctx.tracer.open(watch.record, trace.RECOMPUTE if self.recompute else trace.FORWARD)
        shared = self.enter(storage, ctx.counters.started)
        if cutlass.const_expr(self.direct):
            self.compute_cta(ctx, shared)
        else:
            if shared.order < sizes.num_comm_ctas // self.ctas:
                self.comm_cta(ctx, shared)
                self.cluster_sync()
            else:
                self.compute_cta(ctx, shared)
