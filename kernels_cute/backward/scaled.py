"""What the backward kernel does otherwise where the MMA takes block scales (MXFP8 on Blackwell).

Tasks of routed experts multiply E4M3 with scales; every operand has its contraction contiguous, also in
weight gradients, whose operands were transposed when they were quantised along the tokens. The result warps
stage dgrad down's results as BF16, as without MXFP8. The four warps that gather in other builds then take
the place of the store warp: warp w quantises rows 32w … of a CTA's 128 along the row, and, being one block of
32, along the tokens, from shared memory straight to global memory.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from .. import mxfp8, ptx, sync, tracing
from ..machine import CHUNK_N
from ..megakernel import MegaKernel
from ..queue import next_slot
from ..sync import advance, select, select_i64
from .program import DDOWN, DX, END, REPLAY, SHARED, WDOWN, WGATE

QUANTISERS = 4  # warps
RESULTS = 3  # of dgrad down: d_gate, d_up, w·hidden


class ScaledRoles(MegaKernel):
    """Base of ``BackwardKernel``."""

    # ---- loads ----

    @cute.jit
    def load_scaled_task(self, ctx, shared, entry, stage, phase):
        """All TMA loads of a routed expert's task, with scales."""
        sources, scales, bars = ctx.sources, ctx.scales, shared.bars
        kind, m, n, expert, block = entry.kind, entry.m, entry.n, entry.expert, entry.ring_block
        k_tiles, half = entry.k_tiles, entry.k_tiles // 2
        if kind == REPLAY:
            stage, phase = self.load_scaled(
                shared, sources.x_ring, scales.x_ring, block,
                (sources.gate, sources.up), (scales.gate, scales.up), (n, n),
                expert, k_tiles, stage, phase,
            )  # fmt: skip
        elif kind == DDOWN:
            stage, phase = self.load_scaled(
                shared, sources.dy_ring, scales.dy_ring, block,
                (sources.down_t,) * 2, (scales.down_t,) * 2, (2 * n, 2 * n + 1),
                expert, k_tiles, stage, phase,
            )  # fmt: skip
        elif kind == DX:
            stage, phase = self.load_scaled(
                shared, sources.d_gate, scales.d_gate, block,
                (sources.gate_t,) * 2, (scales.gate_t,) * 2, (2 * n, 2 * n + 1),
                expert, half, stage, phase,
            )  # fmt: skip
            stage, phase = self.load_scaled(
                shared, sources.d_up, scales.d_up, block,
                (sources.up_t,) * 2, (scales.up_t,) * 2, (2 * n, 2 * n + 1),
                expert, half, stage, phase,
            )  # fmt: skip
        else:
            first = block * (self.tile.m // self.mainloop.SCALED_K)  # rows are K
            if kind == WDOWN:
                stage, phase = self.load_scaled(
                    shared, sources.dy_ring_t, scales.dy_ring_t, m,
                    (sources.weighted_t,) * 2, (scales.weighted_t,) * 2, (2 * n, 2 * n + 1),
                    Int32(0), k_tiles, stage, phase, first,
                )  # fmt: skip
            elif kind == WGATE:
                stage, phase = self.load_scaled(
                    shared, sources.d_gate_t, scales.d_gate_t, n,
                    (sources.saved_x_t,) * 2, (scales.x_t,) * 2, (2 * m, 2 * m + 1),
                    Int32(0), k_tiles, stage, phase, first,
                )  # fmt: skip
            else:
                stage, phase = self.load_scaled(
                    shared, sources.d_up_t, scales.d_up_t, n,
                    (sources.saved_x_t,) * 2, (scales.x_t,) * 2, (2 * m, 2 * m + 1),
                    Int32(0), k_tiles, stage, phase, first,
                )  # fmt: skip
        return stage, phase

    @cute.jit
    def load_scaled(
        self, shared, a, a_scales, block, halves, half_scales, tiles, batch, k_tiles, stage, phase,
        k_first=0,
    ):  # fmt: skip
        """A's row block ``block`` against B's ``halves`` at row tiles ``tiles``, each with scales."""
        main = self.mainloop
        of = main.partition_scales(shared.storage, a_scales, *half_scales)
        left, right = (self.b(shared, half) for half in halves)
        return main.load_scaled_tile(
            shared.bars, self.a(shared, a), block, left, tiles[0], right, tiles[1], of, batch,
            k_tiles, stage, phase, k_first,
        )  # fmt: skip

    # ---- results of dgrad down ----

    @cute.jit
    def quantise_role(self, ctx, shared):
        """Quantise what the result warps stage of routed dgrad down; keep step in other tasks."""
        staging, stores, queue = self.staging, shared.stores, shared.queue
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - self.first_gather_warp
        lane = cute.arch.lane_idx()
        sD = shared.sD.iterator.toint()
        slot, slot_phase = Int32(0), Int32(0)
        chunk, phase = Int32(0), Int32(0)
        kind = Int32(DX)
        while kind != END:
            entry = queue.get(slot, slot_phase, self.entry)
            slot, slot_phase = next_slot(slot, slot_phase)
            kind = entry.kind
            if kind == DDOWN:
                for c in cutlass.range(self.chunks, unroll=1):
                    for which in cutlass.range(RESULTS, unroll=1):
                        cute.arch.mbarrier_wait(stores.full + chunk, phase)
                        column = (entry.n * self.chunks + c) * CHUNK_N
                        if column < ctx.sizes.intermediate:
                            self.quantise_chunk(
                                ctx, sD + chunk * staging.chunk_bytes, warp, entry, column, which
                            )
                        staging.free(stores, chunk)
                        chunk, phase = advance(chunk, phase, staging.stages)
                cute.arch.fence_proxy("async.global")  # TMA reads them
                cute.arch.barrier(barrier_id=1, number_of_threads=32 * QUANTISERS)
                if warp == 0:
                    if lane == 0:
                        sync.arrive(ctx.counters.ddown + entry.block)
            else:
                chunk, phase = staging.pass_tile(stores, self.staged_chunks(entry), chunk, phase)
            if cutlass.const_expr(self.trace):
                if kind != END:
                    if warp == 0:
                        mine = select(kind == DDOWN, Int32(1), Int32(0))
                        ctx.tracer.end(mine, tracing.QUANTISED)

    def staged_chunks(self, entry) -> Int32:
        """Buffers that the result warps fill for a task."""
        shared_ddown = entry.kind == SHARED + DDOWN
        count = select(shared_ddown, Int32(RESULTS * self.chunks), Int32(self.chunks))
        return select((self.unstaged(entry) != 0) | (entry.kind == END), Int32(0), count)

    @cute.jit
    def quantise_chunk(self, ctx, source, warp, entry, column, which):
        """This warp's 32 rows of 64 columns of result ``which``, BF16 in the 128-byte swizzle at ``source``.

        Along the row (d_gate and d_up): a lane takes a row. Along the tokens: a lane takes two columns.
        """
        buffers, scales = ctx.buffers, ctx.buffers.scales
        inner, ring = ctx.sizes.intermediate, ctx.sizes.macrobatch
        lane = cute.arch.lane_idx()
        first = self.row_tile(entry.ring_block) * self.mainloop.CTA_ROWS + warp * mxfp8.BLOCK
        rows = source + warp * (mxfp8.BLOCK * 128)
        if which < 2:
            target = select_i64(which == 0, buffers.d_gate, buffers.d_up)
            target += Int64(first + lane) * Int64(inner) + column
            codes = select_i64(which == 0, scales.d_gate, scales.d_up)
            codes += mxfp8.scale_offset(first + lane, column // mxfp8.BLOCK, inner // mxfp8.BLOCK)
            line = rows + lane * 128
            for block in cutlass.range_constexpr(CHUNK_N // mxfp8.BLOCK):
                pairs = []
                for j in cutlass.range_constexpr(4):
                    at = line + (((4 * block + j) ^ (lane & 7)) << 4)
                    pairs += [*ptx.shared_load_16(at)]
                code = mxfp8.scale_code(mxfp8.magnitude(pairs))
                words = mxfp8.quantise(pairs, mxfp8.reciprocal(code))
                for half in cutlass.range_constexpr(2):
                    to = target + (mxfp8.BLOCK * block + 16 * half)
                    ptx.store_16(to, *words[4 * half : 4 * half + 4])
                ptx.store_1(codes + block, Uint32(code))
        target = select_i64(
            which == 0, buffers.d_gate_tokens,
            select_i64(which == 1, buffers.d_up_tokens, buffers.weighted_tokens),
        )  # fmt: skip
        codes = select_i64(
            which == 0, scales.d_gate_tokens,
            select_i64(which == 1, scales.d_up_tokens, scales.weighted_tokens),
        )  # fmt: skip
        pairs = []
        for row in cutlass.range_constexpr(mxfp8.BLOCK):
            at = rows + row * 128 + (((lane >> 2) ^ (row & 7)) << 4) + (lane & 3) * 4
            pairs.append(ptx.shared_load_4(at))
        mxfp8.store_columns(pairs, target, codes, column + 2 * lane, first, ring)
