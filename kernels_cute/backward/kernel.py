"""The backward megakernel: all gradients of the layer in one launch.

Builds, roles and machines as in ``forward`` and ``megakernel``: direct builds gather rows in place, ring
builds have comm workers. With d = dy·W_down still unweighted, the epilogue of dgrad down forms hidden from
the saved pre-activations, the router gradient Σ d·hidden, and the weighted d_gate, d_up and w·hidden: no
division by a weight.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from mok.errors import ResourceError

from .. import comm, sync, trace, tracing
from ..machine import CHUNK_N, HOPPER, machine_of
from ..matrix import matrix, transposed
from ..queue import DSL
from ..sync import int_ptr
from . import results_sm90, results_sm100
from .comm import CommRoles
from .load import LoadRoles
from .operands import (
    Buffers,
    Context,
    Entry,
    Outputs,
    ScaleBuffers,
    Scales,
    Schedule,
    Sizes,
    Sources,
    Targets,
)
from .program import Backward, backward_tile
from .results import ResultRoles
from .scaled import QUANTISERS, ScaledRoles
from .store import StoreRoles

GRAD_MODES = ("bf16", "fp32", "bf16_add", "fp32_add")
TILE_N = 256  # accumulator columns
BLACKWELL_STAGES = 5


class BackwardKernel(LoadRoles, ScaledRoles, ResultRoles, StoreRoles, CommRoles):
    """The backward kernel.

    Args:
        direct: gather rows in place (one rank, BF16); otherwise rows pass the ring.
        arch: "sm_90a", "sm_100a" or "sm_103a".
        grad_mode: weight gradients as "bf16" or "fp32", or added ("bf16_add", "fp32_add") to what is there.
        group_m: row tiles that share a weight tile; None for the machine's default.
        stages: A/B stages in shared memory; None for the machine's default.
        scheduling: "clc" or "tickets"; None for the machine's default.
        mxfp8: routed experts in MXFP8 (on Hopper expanded to BF16); not with ``direct``.
        wire: with mxfp8, x_heap is quantised already (dy_heap never is). Changes no bit of any result.
        trace: record begin and end of every task (``tracing``).
        pair: clusters of two CTAs that share B, on Hopper. Changes no bit.
        limited: clamp at ``swiglu_limit``; without, it is taken as infinite.
        carry, comm_m, overlap: as ``ForwardKernel``'s. Change no bit.
        push: dgrad gate+up's tiles go from shared memory straight to their routes' slots, and comm workers only bring
            rows in (``push``). Where that does not exist, direct or not on Hopper, it is off. Changes no bit.

    Raises:
        mok.errors.ResourceError: the configuration does not fit the machine.
    """

    entry = Entry

    def __init__(
        self,
        direct: bool,
        arch: str = "sm_90a",
        grad_mode: str = "bf16",
        group_m: int | None = None,
        stages: int | None = None,
        scheduling: str | None = None,
        trace: bool = False,
        mxfp8: bool = False,
        wire: bool = False,
        pair: bool = False,
        limited: bool = True,
        carry: bool | None = None,
        comm_m: int = 64,
        overlap: bool = False,
        push: bool = False,
    ):
        if wire and not mxfp8:
            raise ResourceError("only MXFP8 can be on the wire", "wire without mxfp8")
        if mxfp8 and direct:
            raise ResourceError("MXFP8 rows pass the ring: dispatch quantises them", "direct")
        if grad_mode not in GRAD_MODES:
            raise ValueError(f"grad_mode must be one of {GRAD_MODES}, got {grad_mode!r}")
        hopper = machine_of(arch) is HOPPER
        # Blackwell: the results of dgrad down leave through three staging buffers at once.
        if stages is None and not hopper:
            stages = BLACKWELL_STAGES
        # With block scales a stage is larger; there all three must have been read.
        store_stages = 2 if hopper else 3 if mxfp8 else 4
        super().__init__(
            arch, direct, TILE_N, stages, scheduling, mxfp8, store_stages, pair, carry, overlap,
            push and not direct and hopper,
        )  # fmt: skip
        if self.scaled:
            # They, not the store warp, read what dgrad down of routed experts stages.
            self.quantises = True
            self.readers += QUANTISERS
            self.staging.readers += QUANTISERS
        self.wire = wire
        self.trace = trace
        self.limited = limited
        self.grad_mode = grad_mode
        self.grad_bytes = 4 if grad_mode.startswith("fp32") else 2
        self.tile = backward_tile(self.machine, group_m, self.check_comm_rows(comm_m))
        self.chunks = self.tile.down_n // CHUNK_N
        # Hopper: stages behind a dgrad down's operands, in which gate and up arrive and results leave.
        self.chunk_steps = self.chunks if hopper else 0
        # Hopper multiplies xᵀ·d_gate, so that what is gathered is A, the smaller operand, and stores the
        # transpose; in a pair of CTAs, A and B are equally large: d_gateᵀ·x.
        self.d_first = not hopper
        self.result_warps = 8  # of all the task's CTAs
        self.results = (results_sm90 if hopper else results_sm100).Results(self)

    def program(self, ctx) -> Backward:
        """The task program."""
        sizes = ctx.sizes
        return Backward(
            rows=cute.arch.load(ctx.schedule.num_rows, Int32),
            tokens=sizes.tokens,
            hidden=sizes.hidden,
            intermediate=sizes.intermediate,
            shared_intermediate=sizes.shared_intermediate,
            experts=sizes.experts,
            minibatch=sizes.minibatch,
            macrobatch=sizes.macrobatch,
            tile=self.tile,
            ops=DSL,
            push=self.push,
        )

    def over_rows(self, side: str, address, rows, columns, batch=None):
        """A routed operand, ``side`` "a" or "b", of bf16 [batch, rows, columns] whose rows are the contraction.

        With block scales it is stored transposed, as e4m3 [batch, columns, rows].
        """
        main = self.mainloop
        if self.scaled:
            load = main.tma_a if side == "a" else main.tma_b_half
            return load(matrix(address, columns, rows // 2, batch))
        load = main.tma_a_mn if side == "a" else main.tma_b_half_mn
        return load(transposed(address, rows, columns, batch))

    @cute.jit
    def __call__(
        self,
        x: Int64,  # bf16 [T, H]
        dy: Int64,  # bf16 [T, H]
        router_weights: Int64,  # fp32 [T, K] (direct)
        shared_scale: Int64,  # fp32 [T], 0 for none
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
        expert_offset: Int64,  # int32 [El + 1]
        tables: Int64,  # int32 [TABLES][table_stride]
        groups: Int64,  # int32 [max_groups][GROUP_WORDS]
        counts: Int64,  # int32 [2]
        saved_x: Int64,  # bf16 [macrobatch, H] (ring)
        saved_gate: Int64,  # bf16 [macrobatch, I]
        saved_up: Int64,  # bf16 [macrobatch, I]
        saved_shared_gate: Int64,  # bf16 [T, Is]
        saved_shared_up: Int64,  # bf16 [T, Is]
        replay_x: Int64,  # bf16 [macrobatch, H] (ring)
        replay_gate: Int64,  # bf16 [macrobatch, I]
        replay_up: Int64,  # bf16 [macrobatch, I]
        dy_ring: Int64,  # bf16 [macrobatch, H] (ring)
        row_weight: Int64,  # fp32 [macrobatch] (ring)
        d_gate: Int64,  # bf16 [macrobatch, I]
        d_up: Int64,  # bf16 [macrobatch, I]
        weighted: Int64,  # bf16 [macrobatch, I]: w * hidden; in MXFP8 quantised along the tokens
        # MXFP8. What is quantised along a matrix's rows is stored transposed with block scales.
        routed_gate_t: Int64,  # bf16 [El, I, H], quantised along I; e4m3 [El, H, I] with block scales
        routed_up_t: Int64,  # the same; and routed_down along H, e4m3 [El, I, H]
        x_tokens: Int64,  # bf16 [macrobatch, H], quantised along the tokens; e4m3 [H, macrobatch]
        dy_tokens: Int64,  # bf16 [macrobatch, H]; e4m3 [H, macrobatch]
        d_gate_tokens: Int64,  # bf16 [macrobatch, I]; e4m3 [I, macrobatch], as weighted
        d_up_tokens: Int64,  # bf16 [macrobatch, I]; e4m3 [I, macrobatch]
        # Block scales of e4m3 [.., R, C]: uint8 [.., R/128, C/128, 512].
        routed_gate_scales: Int64,
        routed_up_scales: Int64,
        routed_down_scales: Int64,
        routed_gate_t_scales: Int64,
        routed_up_t_scales: Int64,
        saved_x_scales: Int64,
        replay_x_scales: Int64,
        dy_scales: Int64,
        d_gate_scales: Int64,
        d_up_scales: Int64,
        x_tokens_scales: Int64,
        dy_tokens_scales: Int64,
        d_gate_tokens_scales: Int64,
        d_up_tokens_scales: Int64,
        weighted_scales: Int64,
        dx: Int64,  # bf16 [dx_rows, H]: the ring's rows, or all rows (direct)
        dw_partial: Int64,  # fp32 [dx_rows, I/64]
        shared_d_gate: Int64,  # bf16 [T, Is]
        shared_d_up: Int64,  # bf16 [T, Is]
        shared_weighted: Int64,  # bf16 [T, Is]
        shared_dw_partial: Int64,  # fp32 [T, Is/64]
        shared_dx: Int64,  # bf16 [T, H]
        accumulators: Int64,  # fp32 [2][group tasks][tile_m * 256]
        dw_gate: Int64,  # [El, I, H]
        dw_up: Int64,  # [El, I, H]
        dw_down: Int64,  # [El, H, I]
        shared_dw_gate: Int64,  # [Is, H]
        shared_dw_up: Int64,  # [Is, H]
        shared_dw_down: Int64,  # [H, Is]
        x_heap: Int64,  # symmetric, rank 0's address: bf16 [max tokens, H]
        x_heap_scales: Int64,  # symmetric uint8 [max tokens, H/32] (wire)
        dy_heap: Int64,  # symmetric bf16 [max tokens, H]
        weight_heap: Int64,  # symmetric fp32 [max tokens, K]
        dx_heap: Int64,  # symmetric bf16 [max tokens * K, H]
        dw_heap: Int64,  # symmetric fp32 [max tokens * K]
        rank_stride: Int64,  # bytes
        counters: Int64,  # int32, zeroed
        record: Int64,  # int32 [RECORD_WORDS]
        gate: Int64,  # int32 [1], 0 for none: nonzero, and the launch does nothing
        timeout_ns: Int64,
        tokens: Int32,
        hidden: Int32,
        intermediate: Int32,
        shared_intermediate: Int32,
        experts: Int32,
        topk: Int32,
        minibatch: Int32,
        macrobatch: Int32,
        dx_rows: Int32,
        max_minibatches: Int32,
        max_blocks: Int32,
        max_groups: Int32,
        table_stride: Int32,
        num_comm_ctas: Int32,
        grid: Int32,
        rank: Int32,
        swiglu_limit: Float32,
        stream: cuda.CUstream,
    ):
        """Build the TMA descriptors and launch. All tensors are row-major and 16-byte aligned."""
        self.setup()
        main, stage = self.mainloop, self.staging
        T = cutlass.max(tokens, Int32(1))
        H, I = hidden, intermediate
        S = cutlass.max(shared_intermediate, Int32(64))
        B, E = macrobatch, experts
        # Where x is multiplied, it or d is A; the boxes are the same.
        x_mn, d_mn = main.tma_a_mn, main.tma_b_half_mn
        x_side, d_side = "a", "b"
        if cutlass.const_expr(self.d_first):
            x_mn, d_mn = d_mn, x_mn
            x_side, d_side = d_side, x_side
        # Rows of routed experts: with block scales TMA moves pairs of E4M3 as BF16.
        h, i = H, I
        if cutlass.const_expr(self.scaled):
            h, i = H // 2, I // 2
        # Hopper's load warp brings the saved pre-activations; Blackwell's epilogue reads them.
        saved = main.tma_a if cutlass.const_expr(self.hopper) else lambda tensor: None
        # What the gradients of data and of weights multiply with.
        gate_t, up_t = routed_gate, routed_up
        dy_tok, saved_tok, replay_tok = dy_ring, saved_x, replay_x
        d_gate_tok, d_up_tok = d_gate, d_up
        if cutlass.const_expr(self.mxfp8):
            gate_t, up_t = routed_gate_t, routed_up_t
            dy_tok, saved_tok, replay_tok = dy_tokens, x_tokens, x_tokens
            d_gate_tok, d_up_tok = d_gate_tokens, d_up_tokens
        store_x = stage.tma_store if cutlass.const_expr(self.d_first) else stage.tma_store_wide
        sources = Sources(
            x_rows=main.row_source(x, T, H),
            dy_rows=main.row_source(dy, T, H),
            x_ring=main.tma_a(matrix(replay_x, B, h)),
            dy=main.tma_a(matrix(dy, T, H)),
            dy_ring=main.tma_a(matrix(dy_ring, B, h)),
            d_gate=main.tma_a(matrix(d_gate, B, i)),
            d_up=main.tma_a(matrix(d_up, B, i)),
            shared_d_gate=main.tma_a(matrix(shared_d_gate, T, S)),
            shared_d_up=main.tma_a(matrix(shared_d_up, T, S)),
            saved_gate=saved(matrix(saved_gate, B, I)),
            saved_up=saved(matrix(saved_up, B, I)),
            replay_gate=saved(matrix(replay_gate, B, I)),
            replay_up=saved(matrix(replay_up, B, I)),
            shared_gate_pre=saved(matrix(saved_shared_gate, T, S)),
            shared_up_pre=saved(matrix(saved_shared_up, T, S)),
            gate=main.tma_b_half(matrix(routed_gate, I, h, E)),
            up=main.tma_b_half(matrix(routed_up, I, h, E)),
            down_t=self.over_rows("b", routed_down, H, I, E),
            gate_t=self.over_rows("b", gate_t, I, H, E),
            up_t=self.over_rows("b", up_t, I, H, E),
            shared_down_t=main.tma_b_half_mn(transposed(shared_down, H, S)),
            shared_gate_t=main.tma_b_half_mn(transposed(shared_gate, S, H)),
            shared_up_t=main.tma_b_half_mn(transposed(shared_up, S, H)),
            dy_t=main.tma_a_mn(transposed(dy, T, H)),
            dy_ring_t=self.over_rows("a", dy_tok, B, H),
            x_t=x_mn(transposed(x, T, H)),
            saved_x_t=self.over_rows(x_side, saved_tok, B, H),
            replay_x_t=self.over_rows(x_side, replay_tok, B, H),
            weighted_t=self.over_rows("b", weighted, B, I),
            d_gate_t=self.over_rows(d_side, d_gate_tok, B, I),
            d_up_t=self.over_rows(d_side, d_up_tok, B, I),
            shared_weighted_t=main.tma_b_half_mn(transposed(shared_weighted, T, S)),
            shared_d_gate_t=d_mn(transposed(shared_d_gate, T, S)),
            shared_d_up_t=d_mn(transposed(shared_d_up, T, S)),
        )
        scales = None
        if cutlass.const_expr(self.scaled):
            tiles = main.tma_scales
            scales = Scales(
                x_ring=tiles(replay_x_scales, B, H),
                dy_ring=tiles(dy_scales, B, H),
                d_gate=tiles(d_gate_scales, B, I),
                d_up=tiles(d_up_scales, B, I),
                gate=tiles(routed_gate_scales, I, H, E),
                up=tiles(routed_up_scales, I, H, E),
                down_t=tiles(routed_down_scales, I, H, E),
                gate_t=tiles(routed_gate_t_scales, H, I, E),
                up_t=tiles(routed_up_t_scales, H, I, E),
                dy_ring_t=tiles(dy_tokens_scales, H, B),
                x_t=tiles(x_tokens_scales, H, B),
                weighted_t=tiles(weighted_scales, I, B),
                d_gate_t=tiles(d_gate_tokens_scales, I, B),
                d_up_t=tiles(d_up_tokens_scales, I, B),
            )
        staged = (lambda tensor: None) if cutlass.const_expr(self.scaled) else stage.tma_store
        targets = Targets(
            replay_gate=stage.tma_store(matrix(replay_gate, B, I)),
            replay_up=stage.tma_store(matrix(replay_up, B, I)),
            d_gate=staged(matrix(d_gate, B, I)),
            d_up=staged(matrix(d_up, B, I)),
            weighted=staged(matrix(weighted, B, I)),
            dx=stage.tma_store(matrix(dx, dx_rows, H)),
            shared_d_gate=stage.tma_store(matrix(shared_d_gate, T, S)),
            shared_d_up=stage.tma_store(matrix(shared_d_up, T, S)),
            shared_weighted=stage.tma_store(matrix(shared_weighted, T, S)),
            shared_dx=stage.tma_store(matrix(shared_dx, T, H)),
            dw_gate=store_x(matrix(dw_gate, I, H, E)),
            dw_up=store_x(matrix(dw_up, I, H, E)),
            dw_down=stage.tma_store(matrix(dw_down, H, I, E)),
            shared_dw_gate=store_x(matrix(shared_dw_gate, S, H)),
            shared_dw_up=store_x(matrix(shared_dw_up, S, H)),
            shared_dw_down=stage.tma_store(matrix(shared_dw_down, H, S)),
        )
        outputs = Outputs(dw_gate, dw_up, dw_down, shared_dw_gate, shared_dw_up, shared_dw_down)
        schedule = Schedule(
            int_ptr(num_rows),
            int_ptr(expert_offset),
            int_ptr(block_expert),
            comm.Rows(int_ptr(peer_rank), int_ptr(peer_token_idx), rank_stride, Int64(hidden) * 2),
            int_ptr(tables),
            int_ptr(groups),
            int_ptr(counts),
        )
        sizes = Sizes(
            tokens, hidden, intermediate, shared_intermediate, experts, topk, minibatch,
            macrobatch, max_minibatches, max_blocks, max_groups, table_stride, num_comm_ctas,
        )  # fmt: skip
        buffers = Buffers(
            x, dy, router_weights, shared_scale, saved_gate, saved_up, replay_gate, replay_up,
            saved_shared_gate, saved_shared_up, row_weight, dw_partial, shared_dw_partial,
            accumulators, replay_x, dy_ring, dx, saved_x, x_tokens, dy_tokens, d_gate_tokens,
            d_up_tokens, weighted, d_gate, d_up,
            ScaleBuffers(
                saved_x_scales, replay_x_scales, dy_scales, d_gate_scales, d_up_scales,
                x_tokens_scales, dy_tokens_scales, d_gate_tokens_scales, d_up_tokens_scales,
                weighted_scales,
            ),
            x_heap, x_heap_scales, dy_heap, weight_heap, dx_heap, dw_heap,
            counters,
        )  # fmt: skip

        self.shared_storage = self.make_storage()
        self.kernel(
            sources, scales, targets, outputs, schedule, sizes, buffers,
            sync.Watch(record, timeout_ns, rank, gate), swiglu_limit,
        ).launch(**self.launch_options(grid, stream))  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        sources: Sources,
        scales: Scales | None,
        targets: Targets,
        outputs: Outputs,
        schedule: Schedule,
        sizes: Sizes,
        buffers: Buffers,
        watch: sync.Watch,
        swiglu_limit: Float32,
    ):
        self.setup()
        swiglu_limit = swiglu_limit if self.limited else None
        ctx = Context(
            sources, scales, targets, outputs, schedule, sizes, buffers, watch, swiglu_limit
        )
        storage = SmemAllocator().allocate(self.shared_storage)
        if cutlass.const_expr(self.trace):
            ctx.tracer = tracing.Tracer(storage.trace_words.data_ptr())
            if cute.arch.thread_idx()[0] == 0:
                ctx.tracer.open(watch.record, trace.BACKWARD)
        shared = self.enter(storage, ctx.counters.started)
        if cutlass.const_expr(self.direct):
            self.compute_cta(ctx, shared)
        elif sync.goes_on(watch.gate):
            if shared.order < sizes.num_comm_ctas // self.ctas:
                self.comm_cta(ctx, shared)
                self.cluster_sync()
            else:
                self.compute_cta(ctx, shared)
