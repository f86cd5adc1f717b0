"""The backward megakernel for Hopper: all gradients of the layer in one launch.

Roles as in ``forward``: the load warp draws tickets and loads, the store warp writes and signals, gather
warps read rows in place (direct), two warpgroups multiply. Ring builds have comm workers in the lowest CTAs.
With d = dy·W_down still unweighted, the epilogue of dgrad down forms hidden from the saved pre-activations,
the router gradient Σ d·hidden, and the weighted d_gate, d_up and w·hidden: no division by a weight.
"""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from .. import comm, sync
from ..epilogue.staging import Staging
from ..gemm.operands import Stages, view
from ..gemm.sm90 import Mainloop
from ..matrix import matrix, transposed
from ..program import Tile
from ..queue import DEPTH, DSL, WORDS, TaskQueue
from ..sync import int_ptr
from .comm import CommRoles
from .load import LoadRoles
from .mma import MmaRoles
from .operands import (
    CHUNK_N,
    GATHER_WARP,
    LOAD_WARP,
    STORE_WARP,
    THREADS,
    Bars,
    Buffers,
    Outputs,
    Schedule,
    Sizes,
    Sources,
    Targets,
)
from .program import Backward
from .store import StoreRoles

GRAD_MODES = ("bf16", "fp32", "bf16_add", "fp32_add")


class Smem(NamedTuple):
    """Views of the stages: (rows, 64, stages), both majors over the same bytes."""

    sA: cute.Tensor
    sA_mn: cute.Tensor
    sB: cute.Tensor
    sB_mn: cute.Tensor
    sB_half: cute.Tensor
    sB_half_mn: cute.Tensor
    sD: cute.Tensor
    sD_wide: cute.Tensor


class BackwardKernel(LoadRoles, MmaRoles, StoreRoles, CommRoles):
    """The backward kernel for sm_90a.

    Args:
        direct: gather rows in place (one rank, BF16); otherwise rows pass the ring.
        grad_mode: weight gradients as "bf16" or "fp32", or added ("bf16_add", "fp32_add") to what is there.
        group_m: row tiles that share a weight tile.
        stages: A/B stages in shared memory.
    """

    def __init__(self, direct: bool, grad_mode: str = "bf16", group_m: int = 16, stages: int = 4):
        if grad_mode not in GRAD_MODES:
            raise ValueError(f"grad_mode must be one of {GRAD_MODES}, got {grad_mode!r}")
        self.direct = direct
        self.grad_mode = grad_mode
        self.gather_threads = 64 if direct else 0
        self.mainloop = Mainloop(256, stages, self.gather_threads)
        self.tile = Tile(m=128, up_n=128, down_n=256, group_m=group_m)
        self.consumer_warps = self.mainloop.WARPGROUPS * 4
        self.staging = Staging(self.tile.m, self.consumer_warps)
        self.chunks = self.tile.down_n // CHUNK_N

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
        weighted: Int64,  # bf16 [macrobatch, I]: w * hidden
        dx: Int64,  # bf16 [dx_rows, H]: the ring's rows, or all rows (direct)
        dw_partial: Int64,  # fp32 [dx_rows, I/64]
        shared_d_gate: Int64,  # bf16 [T, Is]
        shared_d_up: Int64,  # bf16 [T, Is]
        shared_weighted: Int64,  # bf16 [T, Is]
        shared_dw_partial: Int64,  # fp32 [T, Is/64]
        shared_dx: Int64,  # bf16 [T, H]
        accumulators: Int64,  # fp32 [2][group tasks][128*256]
        dw_gate: Int64,  # [El, I, H]
        dw_up: Int64,  # [El, I, H]
        dw_down: Int64,  # [El, H, I]
        shared_dw_gate: Int64,  # [Is, H]
        shared_dw_up: Int64,  # [Is, H]
        shared_dw_down: Int64,  # [H, Is]
        x_heap: Int64,  # symmetric, rank 0's address: bf16 [max tokens, H]
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
        main, stage = self.mainloop, self.staging
        main.setup()
        stage.setup()
        T = cutlass.max(tokens, Int32(1))
        H, I = hidden, intermediate
        S = cutlass.max(shared_intermediate, Int32(64))
        B, E = macrobatch, experts
        sources = Sources(
            x_ring=main.tma_a(matrix(replay_x, B, H)),
            dy=main.tma_a(matrix(dy, T, H)),
            dy_ring=main.tma_a(matrix(dy_ring, B, H)),
            d_gate=main.tma_a(matrix(d_gate, B, I)),
            d_up=main.tma_a(matrix(d_up, B, I)),
            shared_d_gate=main.tma_a(matrix(shared_d_gate, T, S)),
            shared_d_up=main.tma_a(matrix(shared_d_up, T, S)),
            saved_gate=main.tma_a(matrix(saved_gate, B, I)),
            saved_up=main.tma_a(matrix(saved_up, B, I)),
            replay_gate=main.tma_a(matrix(replay_gate, B, I)),
            replay_up=main.tma_a(matrix(replay_up, B, I)),
            shared_gate_pre=main.tma_a(matrix(saved_shared_gate, T, S)),
            shared_up_pre=main.tma_a(matrix(saved_shared_up, T, S)),
            gate=main.tma_b_half(matrix(routed_gate, I, H, E)),
            up=main.tma_b_half(matrix(routed_up, I, H, E)),
            down_t=main.tma_b_half_mn(transposed(routed_down, H, I, E)),
            gate_t=main.tma_b_half_mn(transposed(routed_gate, I, H, E)),
            up_t=main.tma_b_half_mn(transposed(routed_up, I, H, E)),
            shared_down_t=main.tma_b_half_mn(transposed(shared_down, H, S)),
            shared_gate_t=main.tma_b_half_mn(transposed(shared_gate, S, H)),
            shared_up_t=main.tma_b_half_mn(transposed(shared_up, S, H)),
            dy_t=main.tma_a_mn(transposed(dy, T, H)),
            dy_ring_t=main.tma_a_mn(transposed(dy_ring, B, H)),
            x_t=main.tma_a_mn(transposed(x, T, H)),
            saved_x_t=main.tma_a_mn(transposed(saved_x, B, H)),
            replay_x_t=main.tma_a_mn(transposed(replay_x, B, H)),
            weighted_t=main.tma_b_half_mn(transposed(weighted, B, I)),
            d_gate_t=main.tma_b_half_mn(transposed(d_gate, B, I)),
            d_up_t=main.tma_b_half_mn(transposed(d_up, B, I)),
            shared_weighted_t=main.tma_b_half_mn(transposed(shared_weighted, T, S)),
            shared_d_gate_t=main.tma_b_half_mn(transposed(shared_d_gate, T, S)),
            shared_d_up_t=main.tma_b_half_mn(transposed(shared_d_up, T, S)),
        )
        targets = Targets(
            replay_gate=stage.tma_store(matrix(replay_gate, B, I)),
            replay_up=stage.tma_store(matrix(replay_up, B, I)),
            d_gate=stage.tma_store(matrix(d_gate, B, I)),
            d_up=stage.tma_store(matrix(d_up, B, I)),
            weighted=stage.tma_store(matrix(weighted, B, I)),
            dx=stage.tma_store(matrix(dx, dx_rows, H)),
            shared_d_gate=stage.tma_store(matrix(shared_d_gate, T, S)),
            shared_d_up=stage.tma_store(matrix(shared_d_up, T, S)),
            shared_weighted=stage.tma_store(matrix(shared_weighted, T, S)),
            shared_dx=stage.tma_store(matrix(shared_dx, T, H)),
            dw_gate=stage.tma_store_wide(matrix(dw_gate, I, H, E)),
            dw_up=stage.tma_store_wide(matrix(dw_up, I, H, E)),
            dw_down=stage.tma_store(matrix(dw_down, H, I, E)),
            shared_dw_gate=stage.tma_store_wide(matrix(shared_dw_gate, S, H)),
            shared_dw_up=stage.tma_store_wide(matrix(shared_dw_up, S, H)),
            shared_dw_down=stage.tma_store(matrix(shared_dw_down, H, S)),
        )
        outputs = Outputs(dw_gate, dw_up, dw_down, shared_dw_gate, shared_dw_up, shared_dw_down)
        schedule = Schedule(
            int_ptr(num_rows),
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
            x, dy, router_weights, shared_scale, row_weight, dw_partial, shared_dw_partial,
            accumulators, replay_x, dy_ring, dx, x_heap, dy_heap, weight_heap, dx_heap, dw_heap,
            counters,
        )  # fmt: skip

        @cute.struct
        class SharedStorage:
            full: cute.struct.MemRange[Int64, main.stages]
            empty: cute.struct.MemRange[Int64, main.stages]
            written: cute.struct.MemRange[Int64, main.stages]
            queue_full: cute.struct.MemRange[Int64, DEPTH]
            queue_empty: cute.struct.MemRange[Int64, DEPTH]
            store_full: cute.struct.MemRange[Int64, stage.stages]
            store_empty: cute.struct.MemRange[Int64, stage.stages]
            queue_words: cute.struct.MemRange[Int32, DEPTH * WORDS]
            comm_item: cute.struct.MemRange[Int32, 2]
            # bf16 (128, 64, stages), (256, 64, stages), (128, 64, store stages)
            sA: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(main.a_layout)], 1024]
            sB: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(main.b_layout)], 1024]
            sD: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(stage.layout)], 1024]

        self.shared_storage = SharedStorage
        self.kernel(
            sources, targets, outputs, schedule, sizes, buffers,
            sync.Watch(record, timeout_ns, rank, gate), swiglu_limit,
        ).launch(
            grid=(grid, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(1, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        sources: Sources,
        targets: Targets,
        outputs: Outputs,
        schedule: Schedule,
        sizes: Sizes,
        buffers: Buffers,
        watch: sync.Watch,
        swiglu_limit: Float32,
    ):
        main, stage = self.mainloop, self.staging
        main.setup()
        stage.setup()
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta, _, _ = cute.arch.block_idx()
        storage = cutlass.utils.SmemAllocator().allocate(self.shared_storage)
        bars = Bars(storage.full.data_ptr(), storage.empty.data_ptr(), storage.written.data_ptr())
        queue = TaskQueue(
            storage.queue_words.data_ptr(),
            storage.queue_full.data_ptr(),
            storage.queue_empty.data_ptr(),
        )
        stores = Stages(storage.store_full.data_ptr(), storage.store_empty.data_ptr())
        smem = Smem(
            view(storage.sA, main.a_layout),
            view(storage.sA, main.a_layout_mn),
            view(storage.sB, main.b_layout),
            view(storage.sB, main.b_layout_mn),
            view(storage.sB, main.b_half_layout),
            view(storage.sB, main.b_half_layout_mn),
            view(storage.sD, stage.layout),
            view(storage.sD, stage.wide_layout),
        )
        if warp == 0:
            if cute.arch.lane_idx() == 0:
                main.init_barriers(bars)
                for i in range(main.stages):
                    cute.arch.mbarrier_init(bars.written + i, self.consumer_warps)
                queue.init(1 + self.gather_threads // 32 + self.consumer_warps)
                stage.init_barriers(stores)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        prog = Backward(
            rows=cute.arch.load(schedule.num_rows, Int32),
            tokens=sizes.tokens,
            hidden=sizes.hidden,
            intermediate=sizes.intermediate,
            shared_intermediate=sizes.shared_intermediate,
            experts=sizes.experts,
            minibatch=sizes.minibatch,
            macrobatch=sizes.macrobatch,
            tile=self.tile,
            ops=DSL,
        )
        if cutlass.const_expr(self.direct) or sync.goes_on(watch.gate):
            if not cutlass.const_expr(self.direct) and cta < sizes.num_comm_ctas:
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
                    thread, warp, prog, queue, bars, stores, smem, sources, targets, outputs,
                    schedule, sizes, buffers, watch, swiglu_limit,
                )  # fmt: skip

    @cute.jit
    def compute_cta(
        self, thread, warp, prog, queue, bars, stores, smem, sources, targets, outputs,
        schedule, sizes, buffers, watch, swiglu_limit,
    ):  # fmt: skip
        """Warp roles of a compute CTA."""
        if warp < 4:
            cute.arch.setmaxregister_decrease(88)
            if warp == LOAD_WARP:
                self.load_role(prog, queue, bars, smem, sources, schedule, sizes, buffers, watch)
            elif warp == STORE_WARP:
                self.store_role(prog, queue, bars, stores, smem, targets, sizes, buffers)
            elif warp >= GATHER_WARP:
                if cutlass.const_expr(self.direct):
                    self.gather_role(thread, queue, bars, smem, schedule, sizes, buffers)
        else:
            cute.arch.setmaxregister_increase(208)
            self.mma_role(
                warp, prog, queue, bars, stores, smem, schedule, sizes, buffers, outputs,
                swiglu_limit,
            )  # fmt: skip
