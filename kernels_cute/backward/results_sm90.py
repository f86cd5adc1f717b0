"""Epilogues of the backward kernel where accumulators live in registers (Hopper)."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .. import mxfp8, ptx
from ..epilogue.router_grad import add_butterfly
from ..epilogue.swiglu import swiglu_backward
from ..invariant import Invariant
from ..machine import CHUNK_N
from ..sync import advance
from .operands import float_ptr
from .program import SHARED, WDOWN


class Results(Invariant):
    """The machine's part of ``ResultRoles``.

    Args:
        kernel: the backward kernel.
    """

    def __init__(self, kernel):
        self.kernel = kernel
        self.main = kernel.mainloop
        self.tile = kernel.tile

    def thread(self, worker) -> Int32:
        """This thread's number among those that hold a task's accumulator."""
        return cute.arch.thread_idx()[0] - 128

    def thread_row(self) -> Int32:
        """The first of this thread's two accumulator rows; the other is 8 further."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        return warp % 4 * 16 + (warp // 4 - 1) * 64 + cute.arch.lane_idx() // 4

    @cute.jit
    def ddown(self, ctx, shared, worker, entry, stage, phase, chunk, chunk_phase):
        """d_gate, d_up, w·hidden and the router-gradient partials of 64 columns at a time.

        gate and up arrive in a stage (A's place and B's left half); d_gate, d_up and w·hidden (B's right
        half) leave from it: the store warp frees the stage.
        """
        kernel, main, bars = self.kernel, self.main, shared.bars
        limit = ctx.swiglu_limit
        routed = entry.kind < SHARED
        # The load warp waits for a task's data; the first full stage passes that on.
        cute.arch.mbarrier_wait(bars.full + stage, phase)
        first_row = self.thread_row()
        weights = [kernel.row_weight(ctx, entry, routed, first_row + 8 * i) for i in range(2)]
        stage, phase = main.take(
            worker, bars, entry.k_tiles, stage, phase, "km", halves=entry.halves
        )
        lane = cute.arch.lane_idx()
        row, acc = worker.row, worker.acc
        sA_row = shared.sA.iterator.toint() + row * 128
        sB_row = shared.sB.iterator.toint() + row * 128
        partial_row, groups = kernel.partials(ctx, entry, routed, first_row)
        for c in cutlass.range_constexpr(kernel.chunks):
            cute.arch.mbarrier_wait(bars.full + stage, phase)
            parts = [Float32(0.0), Float32(0.0)]
            sA_at = sA_row + stage * main.a_bytes
            sB_at = sB_row + stage * main.b_bytes
            for j in cutlass.range_constexpr(4):  # 16 columns
                at = ((2 * j + lane // 16) ^ (row % 8)) << 4
                gates, ups = ptx.ldmatrix_x4(sA_at + at), ptx.ldmatrix_x4(sB_at + at)
                d_gates, d_ups, weighted = [], [], []
                for i in cutlass.range_constexpr(4):  # two columns of one row
                    half = i % 2
                    g, u = ptx.unpack_bf16(gates[i]), ptx.unpack_bf16(ups[i])
                    pair = []
                    for side in cutlass.range_constexpr(2):
                        d_hidden = acc[c * 32 + j * 8 + 2 * i + side]
                        d = swiglu_backward(g[side], u[side], d_hidden, weights[half], limit)
                        parts[half] = ptx.fma_rn(d_hidden, d.hidden, parts[half])
                        pair.append(d)
                    d_gates.append(ptx.pack_bf16(pair[0].gate, pair[1].gate))
                    d_ups.append(ptx.pack_bf16(pair[0].up, pair[1].up))
                    weighted.append(ptx.pack_bf16(pair[0].weighted, pair[1].weighted))
                # In place: the stage belongs to these warps until the store warp frees it.
                ptx.stmatrix_x4(sA_at + at, *d_gates)
                ptx.stmatrix_x4(sB_at + at, *d_ups)
                ptx.stmatrix_x4(sB_at + main.a_bytes + at, *weighted)
            # Before the hand-over, so that whoever waits for the task's counter sees the partials, too.
            column = entry.n * kernel.chunks + c
            for half in cutlass.range_constexpr(2):
                part = add_butterfly(parts[half], 4)
                if lane % 4 == 0:
                    kernel.store_partial(ctx, routed, partial_row + 8 * half, groups, column, part)
            if cutlass.const_expr(kernel.mxfp8):
                if routed:
                    self.quantise_chunk(ctx, shared, entry, stage, entry.n * kernel.chunks + c)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(bars.written + stage)
            stage, phase = advance(stage, phase, main.stages)
        return stage, phase, chunk, chunk_phase

    @cute.jit
    def quantise_chunk(self, ctx, shared, entry, stage, column):
        """MXFP8 of 64 columns of d_gate, d_up and w·hidden that lie in a stage as BF16 (all result warps).

        Blocks of 32 rows go to memory from here, expanded, for the weight gradients. Then d_gate and d_up are
        quantised along the row, in place, for the gradient of x.
        """
        main, buffers = self.main, ctx.buffers
        warp, pair = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        first, which = (warp & 3) * 32, (warp >> 2) - 1
        sA = shared.sA.iterator.toint() + stage * main.a_bytes
        sB = shared.sB.iterator.toint() + stage * main.b_bytes
        row_bytes = Int64(ctx.sizes.intermediate) * 2
        inside = column * CHUNK_N < ctx.sizes.intermediate
        offset = Int64(entry.ring_block * self.tile.m + first) * row_bytes
        offset += Int64(column * CHUNK_N + 2 * pair) * 2
        cute.arch.barrier(barrier_id=1, number_of_threads=256)
        if inside:
            gate_or_up, tokens = sA, buffers.d_gate_tokens
            if which == 1:
                gate_or_up, tokens = sB, buffers.d_up_tokens
            self.quantise_rows(gate_or_up, tokens + offset, row_bytes, first, pair)
            if which == 0:
                hidden = sB + main.a_bytes
                self.quantise_rows(hidden, buffers.weighted_tokens + offset, row_bytes, first, pair)
            cute.arch.fence_proxy("async.global")  # TMA reads them
        cute.arch.barrier(barrier_id=1, number_of_threads=256)
        row = first + pair
        for base in (sA, sB):
            at = [base + row * 128 + (((4 * which + j) ^ (row & 7)) << 4) for j in range(4)]
            pairs = [word for address in at for word in ptx.shared_load_16(address)]
            values = mxfp8.through(pairs, mxfp8.scale_code(mxfp8.magnitude(pairs)))
            for j in cutlass.range_constexpr(4):
                ptx.shared_store_16(at[j], *values[4 * j : 4 * j + 4])

    @cute.jit
    def quantise_rows(self, source, target, row_bytes, first, pair):
        """32 rows of two columns of a chunk in the 128-byte swizzle, to rows in global memory."""

        def load(row):
            at = first + row
            return ptx.shared_load_4(
                source + at * 128 + (((pair >> 2) ^ (at & 7)) << 4) + (pair & 3) * 4
            )

        mxfp8.through_rows(
            load, lambda row, word: ptx.store_4(target + Int64(row) * row_bytes, word), 8
        )

    @cute.jit
    def put_x_gradient(self, shared, worker, stage, chunk, phase):
        """A gradient of gate or up, whose rows are columns of the accumulator, rounded to BF16."""
        warp_row = worker.row - cute.arch.lane_idx() % 16
        sD = shared.sD.iterator.toint()
        for c in cutlass.range_constexpr(self.kernel.chunks):
            (values,) = self.main.columns(worker, stage, c * CHUNK_N)
            chunk, phase = self.kernel.staging.put_transposed(
                values, shared.stores, sD, warp_row, chunk, phase
            )
        return chunk, phase

    # ---- the accumulator of a weight gradient ----

    @cute.jit
    def accumulate(self, shared, worker, entry, source, stage, phase):
        """Zero, or what the group before left, and the products of this group's rows.

        The order of additions does not see the boundary.
        """
        acc, bars = worker.acc, shared.bars
        count = cute.size(acc)
        if entry.earlier != 0:
            cute.arch.mbarrier_wait(bars.full + stage, phase)  # the load warp has waited for it
            for i in cutlass.range_constexpr(count):
                acc[i] = ptx.load_f32(source + Int64(i * 1024))
        else:
            for i in cutlass.range_constexpr(count):
                acc[i] = Float32(0.0)
        a, b = worker.operands["mm"]
        return self.main.mma_add_tile("mm", bars, a, b, acc, entry.k_tiles, stage, phase)

    @cute.jit
    def keep(self, worker, stage, target):
        """Leave the accumulator for the next group of the expert."""
        for i in cutlass.range_constexpr(cute.size(worker.acc)):
            cute.arch.store(float_ptr(target + Int64(i * 1024)), worker.acc[i])

    @cute.jit
    def write_gradient(self, ctx, entry, worker, stage):
        """Write or add a finished tile of a weight gradient (modes other than "bf16")."""
        kernel, hidden = self.kernel, ctx.sizes.hidden
        base, inner = kernel.gradient_output(ctx, entry)
        width = kernel.grad_bytes
        lane = cute.arch.lane_idx()
        # Bytes from an element of the tile to the next in H and in I.
        h_step, i_step = Int64(width), Int64(hidden) * width
        if entry.kind % SHARED == WDOWN:
            h_step, i_step = Int64(inner) * width, Int64(width)
        for half in cutlass.range_constexpr(2):
            h = entry.m * self.tile.m + self.thread_row() + 8 * half
            if h < hidden:
                line = base + Int64(h) * h_step
                for j in cutlass.range_constexpr(self.main.tile_n // 8):
                    i = entry.n * self.main.tile_n + 8 * j + 2 * (lane % 4)
                    if i < inner:
                        at = line + Int64(i) * i_step
                        kernel.write_element(at, worker.acc[4 * j + 2 * half])
                        kernel.write_element(at + i_step, worker.acc[4 * j + 2 * half + 1])
