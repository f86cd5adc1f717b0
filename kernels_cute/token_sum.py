"""The token sum: each token's expert results, weighted and added in a fixed order.

``out[t] = shared[t] + Σ_k weights[t, k] · y[slot(t, k)]`` in FP32, the shared expert's result first,
then k ascending with one ``fma.rn.f32`` per term, rounded to BF16 once. Backward adds gradients of x
that carry their weights already: ``add.rn.f32``. A gated shared expert's result is multiplied by the
token's gate first (``mul.rn.f32``). The order is fixed by the code, so the result does not depend on
anything but the token's own values.
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, cute, select_

from mok.kernels_cute import ptx
from mok.kernels_cute.sync import goes_on, int_ptr

THREADS = 256
VECTOR = 8  # BF16 elements in one 16-byte access
TWO_NANS = 0x7FC07FC0  # BF16
ROUTES_IN_FLIGHT = 8  # independent 16-byte loads that one thread issues before it uses the first


def token_sum_ctas(num_tokens: int, hidden_size: int, num_sms: int) -> int:
    """CTAs to launch: one per ``THREADS`` vectors of the output, at most 32 per SM.

    A CTA beyond the resident ones hides the index-to-data latency of those before it, so the
    launch is not held to one wave; past 32 per SM a grid-stride loop takes over.
    """
    vectors = num_tokens * (hidden_size // VECTOR)
    return max(1, min(-(-vectors // THREADS), 32 * num_sms))


class TokenSumKernel:
    """Sum of each token's routes.

    Config:
        has_shared: the sum starts from ``shared`` instead of zero.
        has_shared_scale: from ``shared_scale[t] · shared[t]``.
        has_weights: each term is multiplied by its router weight.
        has_index: ``slots`` is ``route_row`` int32 [T·K] and names the row of y that holds a route,
            or −1. Otherwise ``slots`` is the expert ids [T, K] and route (t, k) is row t·K + k.
        ids_bits: 32 or 64, the width of the ids; unused with ``has_index``.

    A route whose row is −1, or whose id is outside [0, E), is skipped and its row never read.
    """

    def __init__(
        self,
        has_shared: bool,
        has_index: bool,
        ids_bits: int = 32,
        has_weights: bool = True,
        has_shared_scale: bool = False,
    ):
        if ids_bits not in (32, 64):
            raise ValueError(f"ids_bits is 32 or 64, not {ids_bits}")
        if has_shared_scale and not has_shared:
            raise ValueError("has_shared_scale needs has_shared")
        self.has_shared = has_shared
        self.has_shared_scale = has_shared_scale
        self.has_weights = has_weights
        self.has_index = has_index
        self.slot_type = Int64 if ids_bits == 64 and not has_index else Int32

    @cute.jit
    def __call__(
        self,
        out_addr: Int64,
        y_addr: Int64,
        weights_addr: Int64,
        shared_addr: Int64,
        shared_scale_addr: Int64,
        slots_addr: Int64,
        gate_addr: Int64,
        num_tokens: Int32,
        hidden_size: Int32,
        topk: Int32,
        num_experts: Int32,
        clear_addr: Int64,
        clear_words: Int32,
        num_ctas: Int32,
        stream: cuda.CUstream,
    ):
        """out, shared: bf16 [T, H]; y: bf16 [rows, H]; weights: fp32 [T, K]; shared_scale: fp32 [T];
        slots: see the class. What the config does without is not read: any address will do.

        Rows are contiguous. out, y and shared start at multiples of 16 bytes; H is a multiple of
        64; T·H < 2^34. gate: int32 [1], or address 0; where it is not 0 some results never came,
        and with slots filled by peers (not ``has_index``) the sum is NaN. T must be at least 1: the host skips the launch for an empty batch.
        out may be shared: the thread that writes an element has read it before.
        clear: int32 [clear_words], set to zero: the counters of the next call.
        """
        self.kernel(
            out_addr,
            y_addr,
            weights_addr,
            shared_addr,
            shared_scale_addr,
            slots_addr,
            gate_addr,
            num_tokens,
            hidden_size,
            topk,
            num_experts,
            clear_addr,
            clear_words,
        ).launch(grid=(num_ctas, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(
        self,
        out_addr: Int64,
        y_addr: Int64,
        weights_addr: Int64,
        shared_addr: Int64,
        shared_scale_addr: Int64,
        slots_addr: Int64,
        gate_addr: Int64,
        num_tokens: Int32,
        hidden_size: Int32,
        topk: Int32,
        num_experts: Int32,
        clear_addr: Int64,
        clear_words: Int32,
    ):
        complete = Boolean(True)
        if cutlass.const_expr(not self.has_index):
            complete = goes_on(gate_addr)
        row_bytes = Int64(hidden_size) * 2
        vectors_per_row = Uint32(hidden_size >> 3)
        num_vectors = Uint32(num_tokens) * vectors_per_row
        step = Uint32(cute.arch.grid_dim()[0] * THREADS)
        vector = Uint32(cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0])
        word = vector
        while word < Uint32(clear_words):
            cute.arch.store(int_ptr(clear_addr) + word, Int32(0))
            word += step
        while vector < num_vectors:
            token = vector // vectors_per_row
            column = Int64(vector - token * vectors_per_row) * 16
            acc = cute.make_rmem_tensor(VECTOR, Float32)
            for i in cutlass.range_constexpr(VECTOR):
                acc[i] = Float32(0.0)
            if cutlass.const_expr(self.has_shared):
                shared = ptx.load_16(shared_addr + Int64(token) * row_bytes + column)
                shared_scale = Float32(1.0)
                if cutlass.const_expr(self.has_shared_scale):
                    shared_scale = ptx.load_f32(shared_scale_addr + Int64(token) * 4)
            first_route = Int32(token) * topk
            for first_k in cutlass.range(0, topk, ROUTES_IN_FLIGHT, unroll=1):
                # All indices and weights, then all data, then all arithmetic: the loads of one
                # phase are in flight together.
                slots = []
                scales = []
                for u in cutlass.range_constexpr(ROUTES_IN_FLIGHT):
                    route = Int64(first_route + first_k + u)
                    exists = first_k + u < topk
                    slot_addr = slots_addr + route * (self.slot_type.width // 8)
                    slots.append(ptx.load_if(slot_addr, exists, self.slot_type(-1)))
                    if cutlass.const_expr(self.has_weights):
                        scales.append(ptx.load_if(weights_addr + route * 4, exists, Float32(0.0)))
                    else:
                        scales.append(Float32(1.0))
                rows = [
                    self.row(slots[u], first_route + first_k + u, num_experts)
                    for u in range(ROUTES_IN_FLIGHT)
                ]
                data = [
                    ptx.load_16_if(y_addr + Int64(row) * row_bytes + column, row >= 0)
                    for row in rows
                ]
                if cutlass.const_expr(self.has_shared):
                    # Here and not before the loop, so that nothing waits for it alone.
                    if first_k == 0:
                        self.start(acc, shared_scale, shared)
                for u in cutlass.range_constexpr(ROUTES_IN_FLIGHT):
                    if rows[u] >= 0:
                        self.add(acc, scales[u], data[u])
            packed = [ptx.pack_bf16(acc[2 * i], acc[2 * i + 1]) for i in range(VECTOR // 2)]
            if cutlass.const_expr(not self.has_index):
                packed = [Uint32(select_(complete, pair, Uint32(TWO_NANS))) for pair in packed]
            ptx.store_16(out_addr + Int64(token) * row_bytes + column, *packed)
            vector += step

    @cute.jit
    def start(self, acc: cute.Tensor, scale: Float32, pairs):
        """acc = the shared expert's values, times the token's gate if there is one."""
        for i in cutlass.range_constexpr(VECTOR // 2):
            acc[2 * i] = ptx.bf16_low(pairs[i])
            acc[2 * i + 1] = ptx.bf16_high(pairs[i])
        if cutlass.const_expr(self.has_shared_scale):
            for i in cutlass.range_constexpr(VECTOR):
                acc[i] = ptx.mul_rn(scale, acc[i])

    @cute.jit
    def row(self, slot, route: Int32, num_experts: Int32):
        """Row of y that holds a route; −1 when there is nothing to add."""
        row = Int32(-1)
        if cutlass.const_expr(self.has_index):
            row = slot
        else:
            if slot >= 0 and slot < num_experts:
                row = route
        return row

    @cute.jit
    def add(self, acc: cute.Tensor, scale: Float32, pairs):
        """acc += scale · y, one ``fma.rn`` per element; without weights acc += y, one ``add.rn``."""
        for i in cutlass.range_constexpr(VECTOR // 2):
            values = (ptx.bf16_low(pairs[i]), ptx.bf16_high(pairs[i]))
            for half in cutlass.range_constexpr(2):
                if cutlass.const_expr(self.has_weights):
                    acc[2 * i + half] = ptx.fma_rn(scale, values[half], acc[2 * i + half])
                else:
                    acc[2 * i + half] = ptx.add_rn(acc[2 * i + half], values[half])
