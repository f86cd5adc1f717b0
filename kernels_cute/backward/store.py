"""The store role of the backward kernel: finished tiles to memory, then their counters."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..queue import next_slot
from ..sync import int_ptr
from .operands import Entry, counter_layout
from .program import DDOWN, DX, END, REPLAY, SHARED, WDOWN, WGATE


class StoreRoles:
    """Mixin of ``BackwardKernel``."""

    @cute.jit
    def store_role(self, queue, stores, sD, targets, sizes, buffers):
        """Write what the MMA warps stage, in their order; signal a tile once it is in memory."""
        staging, zero = self.staging, Int32(0)
        base = int_ptr(buffers.counters)
        counters = counter_layout(sizes.max_minibatches, sizes.max_blocks, sizes.max_groups, 0)

        def to(*tmas):
            return tuple(staging.partition(tma, sD) for tma in tmas)

        replayed = to(targets.replay_gate, targets.replay_up)
        d_hidden = to(targets.d_gate, targets.d_up, targets.weighted)
        shared_d_hidden = to(targets.shared_d_gate, targets.shared_d_up, targets.shared_weighted)
        dx, shared_dx = to(targets.dx), to(targets.shared_dx)
        dw_gate, dw_up, dw_down = to(targets.dw_gate), to(targets.dw_up), to(targets.dw_down)
        shared_dw_gate, shared_dw_up = to(targets.shared_dw_gate), to(targets.shared_dw_up)
        shared_dw_down = to(targets.shared_dw_down)
        up_chunks = self.tile.up_n // staging.CHUNK_N
        slot, slot_phase = Int32(0), Int32(0)
        chunk, phase = Int32(0), Int32(0)
        kind = Int32(DX)
        while kind != END:
            entry = queue.get(slot, slot_phase, Entry)
            slot, slot_phase = next_slot(slot, slot_phase)
            kind, n = entry.kind, entry.n
            if kind == REPLAY:
                chunk, phase = staging.store_tile(
                    stores, replayed, entry.ring_block, n, up_chunks, zero, chunk, phase
                )
                staging.signal(base + counters.replay + entry.block)
            elif kind == DDOWN:
                chunk, phase = staging.store_tile(
                    stores, d_hidden, entry.ring_block, n, self.chunks, zero, chunk, phase
                )
                staging.signal(base + counters.ddown + entry.block)
            elif kind == DX:
                block = entry.block if cutlass.const_expr(self.direct) else entry.ring_block
                chunk, phase = staging.store_tile(
                    stores, dx, block, n, self.chunks, zero, chunk, phase
                )
                staging.signal(base + counters.dx + entry.minibatch)
            elif kind == SHARED + DDOWN:
                chunk, phase = staging.store_tile(
                    stores, shared_d_hidden, entry.block, n, self.chunks, zero, chunk, phase
                )
                staging.signal(base + counters.shared + entry.block)
            elif kind == SHARED + DX:
                chunk, phase = staging.store_tile(
                    stores, shared_dx, entry.block, n, self.chunks, zero, chunk, phase
                )
            elif kind != END:
                if cutlass.const_expr(self.grad_mode == "bf16"):
                    if kind < SHARED and entry.later == 0:
                        chunk, phase = self.store_gradient(
                            stores, (dw_gate, dw_up, dw_down), entry, kind, chunk, phase
                        )
                    elif kind >= SHARED:
                        chunk, phase = self.store_gradient(
                            stores, (shared_dw_gate, shared_dw_up, shared_dw_down),
                            entry, kind - SHARED, chunk, phase,
                        )  # fmt: skip
        staging.drain()

    @cute.jit
    def store_gradient(self, stores, outputs, entry, kind, chunk, phase):
        """A tile of dW_gate, dW_up or dW_down of the entry's expert."""
        gate, up, down = outputs
        if kind == WDOWN:
            chunk, phase = self.staging.store_tile(
                stores, down, entry.m, entry.n, self.chunks, entry.expert, chunk, phase
            )
        elif kind == WGATE:
            chunk, phase = self.staging.store_tile(
                stores, gate, entry.m, entry.n, self.chunks, entry.expert, chunk, phase
            )
        else:
            chunk, phase = self.staging.store_tile(
                stores, up, entry.m, entry.n, self.chunks, entry.expert, chunk, phase
            )
        return chunk, phase
