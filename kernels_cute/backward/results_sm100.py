"""Epilogues of the backward kernel where accumulators live in tensor memory (Blackwell).

A thread owns a lane, hence one row of the task, and takes 32 of its 256 columns at a time.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .. import ptx
from ..epilogue.swiglu import swiglu_backward
from ..invariant import Invariant
from ..machine import CHUNK_N
from ..sync import advance, select
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
        # Columns of dgrad down at a time. With block scales 16 registers keep columns of the accumulator.
        self.piece = 16 if kernel.scaled else self.main.PIECE

    def row(self, worker) -> Int32:
        """This thread's row of a task."""
        return self.kernel.rank_in_cluster() * self.main.CTA_ROWS + worker.row

    def thread(self, worker) -> Int32:
        """This thread's number among those that hold a task's accumulator."""
        return self.row(worker)

    @cute.jit
    def ddown(self, ctx, shared, worker, entry, at, phase, chunk, chunk_phase):
        """d_gate, d_up, w·hidden and the router-gradient partials of 64 columns at a time.

        The thread reads its row of gate and up from memory, a piece ahead. The three results need three
        staging buffers at once, and a fourth, so that the last store need not be waited for
        (``Staging.store_together``).
        """
        kernel, main, staging = self.kernel, self.main, self.kernel.staging
        stores, stages, limit = shared.stores, self.kernel.staging.stages, ctx.swiglu_limit
        routed = entry.kind < SHARED
        own = self.row(worker)
        weight = kernel.row_weight(ctx, entry, routed, own)
        partial_row, groups = kernel.partials(ctx, entry, routed, own)
        sources = self.pre_activations(ctx, entry, routed, own)
        sD_row = shared.sD.iterator.toint() + worker.row * (2 * CHUNK_N)
        pieces = CHUNK_N // self.piece
        ahead = self.read_ahead(entry, sources, 0)
        at, phase = main.take(worker, shared.bars, entry.k_tiles, at, phase)
        for c in cutlass.range_constexpr(kernel.chunks):
            part = Float32(0.0)
            second, second_phase = advance(chunk, chunk_phase, stages)
            third, third_phase = advance(second, second_phase, stages)
            # They are freed in their order.
            cute.arch.mbarrier_wait(stores.empty + third, third_phase ^ 1)
            targets = [sD_row + at * staging.chunk_bytes for at in (chunk, second, third)]
            for piece in cutlass.range_constexpr(pieces):
                gates, ups = ahead
                if cutlass.const_expr(c * pieces + piece + 1 < kernel.chunks * pieces):
                    ahead = self.read_ahead(entry, sources, c * pieces + piece + 1)
                (acc,) = main.columns(
                    worker, at, c * CHUNK_N + piece * self.piece, width=self.piece
                )
                for eight in cutlass.range_constexpr(self.piece // 8):
                    packed = [[], [], []]  # d_gate, d_up, w·hidden
                    for i in cutlass.range_constexpr(4 * eight, 4 * eight + 4):
                        g, u = ptx.unpack_bf16(gates[i]), ptx.unpack_bf16(ups[i])
                        pair = []
                        for side in cutlass.range_constexpr(2):
                            d_hidden = acc[2 * i + side]
                            d = swiglu_backward(g[side], u[side], d_hidden, weight, limit)
                            part = ptx.fma_rn(d_hidden, d.hidden, part)
                            pair.append(d)
                        packed[0].append(ptx.pack_bf16(pair[0].gate, pair[1].gate))
                        packed[1].append(ptx.pack_bf16(pair[0].up, pair[1].up))
                        packed[2].append(ptx.pack_bf16(pair[0].weighted, pair[1].weighted))
                    for values, target in zip(packed, targets, strict=True):
                        staging.write_8(values, target, worker.row, self.piece // 8 * piece + eight)
            # Before the hand-over, so that whoever waits for the task's counter sees the partial, too.
            column = entry.n * kernel.chunks + c
            kernel.store_partial(ctx, routed, partial_row, groups, column, part)
            staging.hand_over(stores, chunk, second, third)
            chunk, chunk_phase = advance(third, third_phase, stages)
        at, phase = main.give_back(worker, shared.bars, at, phase)
        return at, phase, chunk, chunk_phase

    @cute.jit
    def pre_activations(self, ctx, entry, routed, own):
        """Where the thread's row of gate and of up begins, the columns they have, whether the row exists."""
        buffers, sizes = ctx.buffers, ctx.sizes
        block, inner, exists = entry.ring_block, sizes.intermediate, Int32(1)
        gate, up = buffers.saved_gate, buffers.saved_up
        if not routed:
            gate, up = buffers.saved_shared_gate, buffers.saved_shared_up
            block, inner = entry.block, sizes.shared_intermediate
            row = block * self.tile.m + own
            exists = select(row < sizes.tokens, Int32(1), Int32(0))
        elif entry.minibatch * sizes.minibatch >= sizes.macrobatch:
            gate, up = buffers.replay_gate, buffers.replay_up
        offset = Int64(block * self.tile.m + own) * Int64(inner) * 2
        return gate + offset, up + offset, inner, exists

    def read_ahead(self, entry, sources, index: int):
        """Piece ``index`` of gate and up, BF16x2 each; zeros outside the matrices."""
        gate, up, inner, exists = sources
        column = entry.n * self.tile.down_n + index * self.piece
        valid = (column < inner) & (exists != 0)
        offset = Int64(column) * 2
        return [
            [
                pair
                for at in range(0, 2 * self.piece, 32)
                for pair in ptx.load_32_if(base + offset + at, valid)
            ]
            for base in (gate, up)
        ]

    @cute.jit
    def put_x_gradient(self, shared, worker, at, chunk, phase):
        """A gradient of gate or up: its rows are the accumulator's, as those of down."""
        return self.kernel.plain_epilogue(shared, worker, at, chunk, phase)

    # ---- the accumulator of a weight gradient ----

    @cute.jit
    def accumulate(self, shared, worker, entry, source, at, phase):
        """Have the accumulator, with what the group before left, or zeros for no rows, as its first value.

        The order of additions does not see the boundary.
        """
        main = self.main
        if entry.earlier != 0:
            for piece in cutlass.range_constexpr(main.tile_n // main.PIECE):
                first = piece * main.PIECE
                values = [
                    ptx.load_f32(source + Int64((first + i) * 1024)) for i in range(main.PIECE)
                ]
                main.set_first(worker, at, first, values)
            main.hand_first(shared.bars)
        elif entry.k_tiles == 0:
            for piece in cutlass.range_constexpr(main.tile_n // main.PIECE):
                main.set_first(worker, at, piece * main.PIECE, [Float32(0.0)] * main.PIECE)
            main.hand_first(shared.bars)
        return main.take(worker, shared.bars, entry.k_tiles, at, phase)

    @cute.jit
    def keep(self, worker, at, target):
        """Leave the accumulator for the next group of the expert."""
        main = self.main
        for piece in cutlass.range_constexpr(main.tile_n // main.PIECE):
            first = piece * main.PIECE
            (values,) = main.columns(worker, at, first)
            for i in cutlass.range_constexpr(main.PIECE):
                cute.arch.store(float_ptr(target + Int64((first + i) * 1024)), values[i])

    @cute.jit
    def write_gradient(self, ctx, entry, worker, at):
        """Write or add a finished tile of a weight gradient (modes other than "bf16")."""
        main, kernel = self.main, self.kernel
        base, inner = kernel.gradient_output(ctx, entry)
        own, width = self.row(worker), kernel.grad_bytes
        # Rows of I and columns of H, or for down the other way round.
        row, rows = entry.n * self.tile.down_n + own, inner
        column, columns = entry.m * self.tile.m, ctx.sizes.hidden
        if entry.kind % SHARED == WDOWN:
            row, rows = entry.m * self.tile.m + own, ctx.sizes.hidden
            column, columns = entry.n * self.tile.down_n, inner
        line = base + (Int64(row) * Int64(columns) + Int64(column)) * width
        for piece in cutlass.range_constexpr(main.tile_n // main.PIECE):
            first = piece * main.PIECE
            (values,) = main.columns(worker, at, first)
            if row < rows and column + first < columns:
                self.write_columns(line + first * width, values)

    @cute.jit
    def write_columns(self, address: Int64, values):
        """32 neighbouring elements in the output's dtype, 16 bytes at a time; as ``write_element``."""
        mode = self.kernel.grad_mode
        if cutlass.const_expr(mode.startswith("fp32")):
            for i in cutlass.range_constexpr(0, len(values), 4):
                at, four = address + 4 * i, values[i : i + 4]
                if cutlass.const_expr(mode == "fp32_add"):
                    old = ptx.load_f32_4(at)
                    four = [ptx.add_rn(old[j], four[j]) for j in range(4)]
                ptx.store_f32_4(at, four)
        else:
            for i in cutlass.range_constexpr(0, len(values), 8):
                at, eight = address + 2 * i, values[i : i + 8]
                if cutlass.const_expr(mode == "bf16_add"):
                    old = [half for pair in ptx.load_16(at) for half in ptx.unpack_bf16(pair)]
                    eight = [ptx.add_rn(old[j], eight[j]) for j in range(8)]
                packed = [ptx.pack_bf16(eight[j], eight[j + 1]) for j in range(0, 8, 2)]
                ptx.store_16(at, *packed)
