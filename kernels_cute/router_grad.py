"""The router-weight gradients of backward, brought to the order of the router weights.

With one rank, backward leaves one FP32 partial per row and 64 columns of I, and this adds them up. With
several, comm workers have added them and pushed each sum to its route's slot, and this picks the slots of
routes that exist. Both add in the order of ``epilogue.router_grad``, so the bits are the same.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from . import ptx
from .epilogue.router_grad import sum_groups

THREADS = 256


def router_grad_ctas(num_routes: int, has_index: bool, num_sms: int) -> int:
    """CTAs to launch: a warp (with an index) or a thread per route, at most 16 CTAs per SM."""
    routes = THREADS // 32 if has_index else THREADS
    return max(1, min(-(-num_routes // routes), 16 * num_sms))


class RouterGradKernel:
    """d_w fp32 [T, K]; exactly 0 for a dropped route, whose values are not read.

    Config:
        has_index: ``source`` is the partials fp32 [rows, groups] and ``slots`` int32 [T·K] names the row
            of each route, or −1. Otherwise ``source`` is fp32 [T·K] and ``slots`` the expert ids [T, K].
        ids_bits: 32 or 64, the width of the ids; unused with ``has_index``.
    """

    def __init__(self, has_index: bool, ids_bits: int = 32):
        if ids_bits not in (32, 64):
            raise ValueError(f"ids_bits is 32 or 64, not {ids_bits}")
        self.has_index = has_index
        self.slot_type = Int64 if ids_bits == 64 and not has_index else Int32

    @cute.jit
    def __call__(
        self,
        out_addr: Int64,
        source_addr: Int64,
        slots_addr: Int64,
        num_routes: Int32,
        groups: Int32,
        num_experts: Int32,
        num_ctas: Int32,
        stream: cuda.CUstream,
    ):
        """out: fp32 [num_routes]; groups: I/64. With ``has_index``, ``slots_addr`` = 0 says that row i is
        route i: the gradient of a gated shared expert's gate, from partials fp32 [T, Is/64]."""
        self.kernel(out_addr, source_addr, slots_addr, num_routes, groups, num_experts).launch(
            grid=(num_ctas, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        out_addr: Int64,
        source_addr: Int64,
        slots_addr: Int64,
        num_routes: Int32,
        groups: Int32,
        num_experts: Int32,
    ):
        thread = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        threads = cute.arch.grid_dim()[0] * THREADS
        if cutlass.const_expr(self.has_index):
            self.add_partials(
                out_addr, source_addr, slots_addr, num_routes, groups, thread, threads
            )
        else:
            self.pick(out_addr, source_addr, slots_addr, num_routes, num_experts, thread, threads)

    @cute.jit
    def add_partials(self, out_addr, source_addr, slots_addr, num_routes, groups, thread, threads):
        """One warp per route."""
        first = cute.arch.make_warp_uniform(thread // 32)
        for route in cutlass.range(first, num_routes, threads // 32, unroll=1):
            row = route
            if slots_addr != 0:
                row = cute.arch.load(pointer(Int32, slots_addr) + route, Int32)
            total = Float32(0.0)
            if row >= 0:
                partials = source_addr + Int64(row) * Int64(groups) * 4
                total = sum_groups(pointer(Float32, partials), groups)
            if cute.arch.lane_idx() == 0:
                cute.arch.store(pointer(Float32, out_addr) + route, total)

    @cute.jit
    def pick(self, out_addr, source_addr, slots_addr, num_routes, num_experts, thread, threads):
        """One thread per route."""
        for route in cutlass.range(thread, num_routes, threads, unroll=1):
            slot = cute.arch.load(pointer(self.slot_type, slots_addr) + route, self.slot_type)
            exists = (slot >= 0) & (slot < num_experts)
            value = ptx.load_if(source_addr + Int64(route) * 4, exists, Float32(0.0))
            cute.arch.store(pointer(Float32, out_addr) + route, value)


def pointer(kind, address: Int64) -> cute.Pointer:
    """A pointer to scalars in global memory."""
    return cute.make_ptr(kind, address, cute.AddressSpace.gmem, assumed_align=kind.width // 8)
