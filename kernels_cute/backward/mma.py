"""The MMA role of the backward kernel and its epilogues."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .. import ptx, sync
from ..epilogue.router_grad import add_butterfly
from ..epilogue.swiglu import swiglu_backward
from ..queue import next_slot
from ..sync import advance, int_ptr, select
from .operands import CHUNK_N, Entry, counter_layout
from .program import DDOWN, DX, END, REPLAY, SHARED, WDOWN, WUP


def float_ptr(address: Int64) -> cute.Pointer:
    """A pointer to FP32 in global memory."""
    return cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4)


class MmaRoles:
    """Mixin of ``BackwardKernel``."""

    @cute.jit
    def mma_role(
        self, warp, prog, queue, bars, stores, smem, schedule, sizes, buffers, outputs, limit
    ):
        """Multiply, apply the epilogue, hand finished chunks to the store warp."""
        main = self.mainloop
        group = cute.arch.make_warp_uniform(warp // 4) - 1
        lane = cute.arch.lane_idx()
        rA, rB = main.fragments("kk", smem.sA, smem.sB, group)
        rA_t, rB_t = main.fragments("mm", smem.sA_mn, smem.sB_mn, group)
        acc = main.accumulator()
        warp_row = warp % 4 * 16 + group * 64
        row = warp_row + lane % 16  # whose address this lane gives ldmatrix and stmatrix
        sD_row = smem.sD.iterator.toint() + row * 128
        base = int_ptr(buffers.counters)
        counters = counter_layout(sizes.max_minibatches, sizes.max_blocks, sizes.max_groups, 0)
        stage, phase = Int32(0), Int32(0)
        slot, slot_phase = Int32(0), Int32(0)
        chunk, chunk_phase = Int32(0), Int32(0)
        kind = Int32(DX)
        while kind != END:
            entry = queue.get(slot, slot_phase, Entry)
            slot, slot_phase = next_slot(slot, slot_phase)
            kind = entry.kind
            routed = kind < SHARED
            step = kind % SHARED
            if kind == REPLAY:
                stage, phase = main.mma_tile("kk", bars, rA, rB, acc, entry.k_tiles, stage, phase)
                chunk, chunk_phase = self.replay_epilogue(
                    acc, stores, sD_row, row, chunk, chunk_phase
                )
            elif step == DDOWN:
                thread_row = warp_row + lane // 4
                # The load warp waits for a task's data; the first full stage passes that on.
                cute.arch.mbarrier_wait(bars.full + stage, phase)
                w0, w1 = self.row_weights(entry, thread_row, routed, schedule, sizes, buffers)
                stage, phase = main.mma_tile("km", bars, rA, rB_t, acc, entry.k_tiles, stage, phase)
                stage, phase = self.ddown_epilogue(
                    acc, entry, routed, thread_row, w0, w1, limit, bars, smem, row,
                    sizes, buffers, stage, phase,
                )  # fmt: skip
            elif step == DX:
                stage, phase = main.mma_tile("km", bars, rA, rB_t, acc, entry.k_tiles, stage, phase)
                chunk, chunk_phase = self.plain_epilogue(
                    acc, stores, sD_row, row, chunk, chunk_phase
                )
            elif step >= WDOWN:
                where = self.accumulator_address(prog, entry, sizes, buffers, warp, lane)
                self.start_accumulator(acc, entry, where, prog, bars, stage, phase)
                stage, phase = main.mma_add_tile(
                    "mm", bars, rA_t, rB_t, acc, entry.k_tiles, stage, phase
                )
                # Tiles that leave through the store warp are counted there, off this path.
                unstaged = entry.later != 0
                if cutlass.const_expr(self.grad_mode != "bf16"):
                    unstaged = routed
                if unstaged and warp == 4:
                    self.release_rows(prog, base + counters.free, entry)
                if entry.later != 0:
                    self.keep_accumulator(acc, entry, where, prog)
                elif cutlass.const_expr(self.grad_mode != "bf16"):
                    self.write_gradient(acc, entry, warp_row + lane // 4, lane, sizes, outputs)
                elif step == WDOWN:
                    chunk, chunk_phase = self.plain_epilogue(
                        acc, stores, sD_row, row, chunk, chunk_phase
                    )
                else:
                    chunk, chunk_phase = self.transposed_epilogue(
                        acc, stores, smem.sD.iterator.toint(), warp_row, chunk, chunk_phase
                    )
                if entry.later != 0:
                    cute.arch.sync_warp()
                    if lane == 0:
                        sync.arrive(base + counters.group + entry.group)

    # ---- dgrad down: swiglu backward ----

    @cute.jit
    def row_weights(self, entry, thread_row, routed, schedule, sizes, buffers):
        """Router weights of this thread's two rows (0 for padding); the shared expert's scale, or 1."""
        weights = [Float32(1.0), Float32(1.0)]
        for i in cutlass.range_constexpr(2):
            weight = Float32(1.0)
            row = thread_row + 8 * i
            if routed:
                if cutlass.const_expr(self.direct):
                    route = cute.arch.load(
                        schedule.rows.peer_token_idx + entry.block * self.tile.m + row, Int32
                    )
                    weight = Float32(0.0)
                    if route >= 0:
                        weight = cute.arch.load(float_ptr(buffers.router_weights) + route, Float32)
                else:
                    weight = cute.arch.load(
                        float_ptr(buffers.row_weight) + entry.ring_block * self.tile.m + row,
                        Float32,
                    )
            else:
                token = entry.block * self.tile.m + row
                if buffers.shared_scale != 0:
                    weight = Float32(0.0)
                    if token < sizes.tokens:
                        weight = cute.arch.load(float_ptr(buffers.shared_scale) + token, Float32)
            weights[i] = weight
        return weights[0], weights[1]

    @cute.jit
    def ddown_epilogue(
        self, acc, entry, routed, thread_row, w0, w1, limit, bars, smem, row,
        sizes, buffers, stage, phase,
    ):  # fmt: skip
        """d_gate, d_up, w·hidden and the router-gradient partials of 64 columns at a time.

        gate and up arrive in a stage (A's place and B's left half); d_gate, d_up and w·hidden (B's right
        half) leave from it: the store warp frees the stage.
        """
        lane = cute.arch.lane_idx()
        main = self.mainloop
        sA_row = smem.sA.iterator.toint() + row * 128
        sB_row = smem.sB.iterator.toint() + row * 128
        groups = select(routed, sizes.intermediate, sizes.shared_intermediate) // CHUNK_N
        partial_row = thread_row + self.tile.m * (
            entry.block
            if cutlass.const_expr(self.direct)
            else select(routed, entry.ring_block, entry.block)
        )
        partials = buffers.shared_dw_partial
        if routed:
            partials = buffers.dw_partial
        for c in cutlass.range_constexpr(self.chunks):
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
                        d = swiglu_backward(g[side], u[side], d_hidden, (w0, w1)[half], limit)
                        parts[half] = ptx.fma_rn(d_hidden, d.hidden, parts[half])
                        pair.append(d)
                    d_gates.append(ptx.pack_bf16(pair[0].gate, pair[1].gate))
                    d_ups.append(ptx.pack_bf16(pair[0].up, pair[1].up))
                    weighted.append(ptx.pack_bf16(pair[0].weighted, pair[1].weighted))
                # In place: the stage belongs to these warps until the store warp frees it.
                ptx.stmatrix_x4(sA_at + at, *d_gates)
                ptx.stmatrix_x4(sB_at + at, *d_ups)
                ptx.stmatrix_x4(sB_at + main.a_bytes + at, *weighted)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(bars.written + stage)
            stage, phase = advance(stage, phase, main.stages)
            column = entry.n * self.chunks + c
            for half in cutlass.range_constexpr(2):
                part = add_butterfly(parts[half], 4)
                if (
                    lane % 4 == 0
                    and column < groups
                    and self.inside(routed, partial_row + 8 * half, sizes)
                ):
                    cute.arch.store(
                        float_ptr(partials)
                        + Int64(partial_row + 8 * half) * Int64(groups)
                        + column,
                        part,
                    )
        return stage, phase

    def inside(self, routed, row, sizes):
        """Routed rows are padded to whole tiles; the shared expert's end with the tokens."""
        return routed | (row < sizes.tokens)

    # ---- plain epilogues ----

    @cute.jit
    def replay_epilogue(self, acc, stores, sD_row, row, chunk, chunk_phase):
        """gate and up, rounded to BF16, as forward saves them."""
        half = 4 * (self.tile.up_n // 8)
        for c in cutlass.range_constexpr(self.tile.up_n // CHUNK_N):
            for start in (c * 32, half + c * 32):
                values = [acc[start + i] for i in range(32)]
                chunk, chunk_phase = self.staging.put(
                    values, stores, sD_row, row, chunk, chunk_phase
                )
        return chunk, chunk_phase

    @cute.jit
    def plain_epilogue(self, acc, stores, sD_row, row, chunk, chunk_phase):
        """The accumulator, rounded to BF16."""
        for c in cutlass.range_constexpr(self.chunks):
            values = [acc[c * 32 + i] for i in range(32)]
            chunk, chunk_phase = self.staging.put(values, stores, sD_row, row, chunk, chunk_phase)
        return chunk, chunk_phase

    @cute.jit
    def transposed_epilogue(self, acc, stores, sD_address, warp_row, chunk, chunk_phase):
        """The accumulator's transpose, rounded to BF16."""
        for c in cutlass.range_constexpr(self.chunks):
            values = [acc[c * 32 + i] for i in range(32)]
            chunk, chunk_phase = self.staging.put_transposed(
                values, stores, sD_address, warp_row, chunk, chunk_phase
            )
        return chunk, chunk_phase

    # ---- weight gradients ----

    @cute.jit
    def accumulator_address(self, prog, entry, sizes, buffers, warp, lane):
        """Where this thread's part of a task's FP32 accumulator lies in buffer 0.

        Layout [2][group tasks][values of a thread][256 threads]: element i of a thread is 1 KB after i-1.
        """
        step = entry.kind % SHARED
        tile = (step - WDOWN) * prog.w_tasks + entry.m * prog.w_n + entry.n
        values = self.tile.m * self.mainloop.tile_n
        return (
            buffers.accumulators + Int64(tile) * (4 * values) + Int64(((warp - 4) * 32 + lane) * 4)
        )

    def accumulator_buffer(self, prog, macrobatch):
        """Byte offset of the buffer that macrobatch ``macrobatch`` hands on."""
        size = 4 * self.tile.m * self.mainloop.tile_n
        return Int64(macrobatch % 2) * Int64(prog.group_tasks) * size

    @cute.jit
    def start_accumulator(self, acc, entry, where, prog, bars, stage, phase):
        """Zero, or what the group before left: the order of additions does not see the boundary."""
        count = cute.size(acc)
        if entry.earlier != 0:
            cute.arch.mbarrier_wait(bars.full + stage, phase)  # the load warp has waited for it
            source = where + self.accumulator_buffer(prog, entry.first // prog.ring_blocks - 1)
            for i in cutlass.range_constexpr(count):
                acc[i] = ptx.load_f32(source + Int64(i * 1024))
        else:
            for i in cutlass.range_constexpr(count):
                acc[i] = Float32(0.0)

    @cute.jit
    def keep_accumulator(self, acc, entry, where, prog):
        """Leave the accumulator for the next group of the expert."""
        target = where + self.accumulator_buffer(prog, entry.first // prog.ring_blocks)
        for i in cutlass.range_constexpr(cute.size(acc)):
            cute.arch.store(float_ptr(target + Int64(i * 1024)), acc[i])

    @cute.jit
    def write_gradient(self, acc, entry, thread_row, lane, sizes, outputs):
        """Write or add a finished tile of a weight gradient from registers (modes other than "bf16").

        Adding rounds once: FP32 accumulator + old value in FP32, then the output's dtype.
        """
        step = entry.kind % SHARED
        is_down = step == WDOWN
        inner = select(entry.kind < SHARED, sizes.intermediate, sizes.shared_intermediate)
        base = Int64(0)
        if entry.kind < SHARED:
            base = outputs.dw_gate
            if is_down:
                base = outputs.dw_down
            elif step == WUP:
                base = outputs.dw_up
        else:
            base = outputs.shared_dw_gate
            if is_down:
                base = outputs.shared_dw_down
            elif step == WUP:
                base = outputs.shared_dw_up
        plane = Int64(entry.expert) * Int64(sizes.hidden) * Int64(inner)
        width = 4 if cutlass.const_expr(self.grad_mode.startswith("fp32")) else 2
        # Bytes from an element of the tile to the next in H and in I.
        h_step, i_step = Int64(width), Int64(sizes.hidden) * width
        if is_down:
            h_step, i_step = Int64(inner) * width, Int64(width)
        for half in cutlass.range_constexpr(2):
            h = entry.m * self.tile.m + thread_row + 8 * half
            if h < sizes.hidden:
                line = base + plane * width + Int64(h) * h_step
                for j in cutlass.range_constexpr(self.mainloop.tile_n // 8):
                    i = entry.n * self.mainloop.tile_n + 8 * j + 2 * (lane % 4)
                    if i < inner:
                        at = line + Int64(i) * i_step
                        self.write_element(at, acc[4 * j + 2 * half])
                        self.write_element(at + i_step, acc[4 * j + 2 * half + 1])

    @cute.jit
    def write_element(self, address: Int64, value: Float32):
        """One element in the output's dtype, added to what is there in the adding modes."""
        if cutlass.const_expr(self.grad_mode == "fp32_add"):
            value = ptx.add_rn(ptx.load_f32(address), value)
        elif cutlass.const_expr(self.grad_mode == "bf16_add"):
            value = ptx.add_rn(ptx.load_bf16(address), value)
        if cutlass.const_expr(self.grad_mode.startswith("fp32")):
            ptx.store_f32(address, value)
        else:
            ptx.store_bf16(address, value)
