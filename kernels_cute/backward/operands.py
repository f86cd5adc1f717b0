"""What the roles of the backward kernel share: tensors, addresses, sizes, counters, queue entries."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .. import comm
from ..gemm.operands import RowSource, Tma
from ..invariant import Invariant
from ..sync import Watch, int_ptr
from ..tracing import Tracer


class Sources(NamedTuple):
    """TMA loads. ``_t``: the contraction runs over rows (MN-major operand).

    None where a machine has no use for it: the saved pre-activations on Blackwell, whose epilogue reads
    them itself. With block scales every operand of a routed expert has the contraction contiguous: ``_t``
    is then stored transposed.
    """

    x_rows: RowSource  # gathered in place
    dy_rows: RowSource
    x_ring: Tma  # rows of replayed macrobatches
    dy: Tma  # the rank's own dy, for the shared expert
    dy_ring: Tma
    d_gate: Tma
    d_up: Tma
    shared_d_gate: Tma
    shared_d_up: Tma
    saved_gate: Tma | None
    saved_up: Tma | None
    replay_gate: Tma | None
    replay_up: Tma | None
    shared_gate_pre: Tma | None  # the shared expert's saved pre-activations
    shared_up_pre: Tma | None
    gate: Tma
    up: Tma
    down_t: Tma
    gate_t: Tma
    up_t: Tma
    shared_down_t: Tma
    shared_gate_t: Tma
    shared_up_t: Tma
    dy_t: Tma  # of weight gradients: dy and x
    dy_ring_t: Tma
    x_t: Tma
    saved_x_t: Tma
    replay_x_t: Tma
    weighted_t: Tma  # and what they are multiplied with
    d_gate_t: Tma
    d_up_t: Tma
    shared_weighted_t: Tma
    shared_d_gate_t: Tma
    shared_d_up_t: Tma


class Scales(NamedTuple):
    """TMA loads of the scales of the sources of the same names, where the MMA takes them."""

    x_ring: Tma
    dy_ring: Tma
    d_gate: Tma
    d_up: Tma
    gate: Tma
    up: Tma
    down_t: Tma
    gate_t: Tma
    up_t: Tma
    dy_ring_t: Tma
    x_t: Tma  # of replayed macrobatches and of the saved one
    weighted_t: Tma
    d_gate_t: Tma
    d_up_t: Tma


class Targets(NamedTuple):
    """TMA stores of (128, 64) chunks; None with block scales, where the quantising warps store."""

    replay_gate: Tma
    replay_up: Tma
    d_gate: Tma | None
    d_up: Tma | None
    weighted: Tma | None
    dx: Tma
    shared_d_gate: Tma
    shared_d_up: Tma
    shared_weighted: Tma
    shared_dx: Tma
    dw_gate: Tma
    dw_up: Tma
    dw_down: Tma
    shared_dw_gate: Tma
    shared_dw_up: Tma
    shared_dw_down: Tma


class Outputs(NamedTuple):
    """Addresses of the weight gradients, for the modes in which the MMA warps write them."""

    dw_gate: Int64
    dw_up: Int64
    dw_down: Int64
    shared_dw_gate: Int64
    shared_dw_up: Int64
    shared_dw_down: Int64


class Schedule(NamedTuple):
    """The schedule's and the plan's device arrays."""

    num_rows: cute.Pointer  # int32 [1]
    expert_offset: cute.Pointer  # int32 [El + 1]: first row of each expert
    block_expert: cute.Pointer  # int32 [blocks]
    rows: comm.Rows
    tables: cute.Pointer  # int32 [TABLES][table_stride]
    groups: cute.Pointer  # int32 [groups][GROUP_WORDS]
    counts: cute.Pointer  # int32 [2]: all groups, groups of experts with rows


class Sizes(NamedTuple):
    """Run-time sizes."""

    tokens: Int32
    hidden: Int32
    intermediate: Int32
    shared_intermediate: Int32
    experts: Int32
    topk: Int32
    minibatch: Int32
    macrobatch: Int32
    max_minibatches: Int32
    max_blocks: Int32
    max_groups: Int32
    table_stride: Int32
    num_comm_ctas: Int32


class ScaleBuffers(NamedTuple):
    """Where scales are written, E8M0 in tiles; ``_tokens``: of the copies along the tokens."""

    saved_x: Int64  # read only: forward's
    replay_x: Int64
    dy: Int64
    d_gate: Int64
    d_up: Int64
    x_tokens: Int64
    dy_tokens: Int64
    d_gate_tokens: Int64
    d_up_tokens: Int64
    weighted_tokens: Int64


class Buffers(NamedTuple):
    """Addresses that are not reached by TMA.

    Where the MMA takes scales, what MXFP8 quantises is e4m3, and copies along the tokens are transposed.
    """

    x: Int64  # bf16 [T, H]
    dy: Int64  # bf16 [T, H]
    router_weights: Int64  # fp32 [T, K] (direct)
    shared_scale: Int64  # fp32 [T], 0 for none
    saved_gate: Int64  # bf16 [macrobatch, I]
    saved_up: Int64
    replay_gate: Int64  # bf16 [macrobatch, I]
    replay_up: Int64
    saved_shared_gate: Int64  # bf16 [T, Is]
    saved_shared_up: Int64
    row_weight: Int64  # fp32 [macrobatch] (ring)
    dw_partial: Int64  # fp32 [dx rows, I/64]
    shared_dw_partial: Int64  # fp32 [T, Is/64]
    accumulators: Int64  # fp32 [2][group tasks][tile_m * tile_n]
    replay_x: Int64  # bf16 [macrobatch, H] (ring)
    dy_ring: Int64  # bf16 [macrobatch, H] (ring)
    dx_ring: Int64  # bf16 [macrobatch, H] (ring)
    saved_x: Int64  # MXFP8, as the next five: bf16 [macrobatch, H]
    x_tokens: Int64  # bf16 [macrobatch, H], quantised along the tokens
    dy_tokens: Int64
    d_gate_tokens: Int64  # bf16 [macrobatch, I], quantised along the tokens
    d_up_tokens: Int64
    weighted_tokens: Int64
    d_gate: Int64  # bf16 [macrobatch, I], quantised along I
    d_up: Int64
    scales: ScaleBuffers  # where the MMA takes scales
    x_heap: Int64
    x_heap_scales: Int64  # wire
    dy_heap: Int64
    weight_heap: Int64  # fp32 [max tokens, K]
    dx_heap: Int64  # bf16 [max tokens * K, H]
    dw_heap: Int64  # fp32 [max tokens * K]
    counters: Int64


class Entry(NamedTuple):
    """A decoded task as the warps of a CTA see it."""

    kind: Int32
    block: Int32
    ring_block: Int32
    m: Int32  # row tile of a weight gradient
    n: Int32
    minibatch: Int32
    expert: Int32
    k_tiles: Int32  # MMA steps
    group: Int32
    first: Int32  # a group's row blocks
    end: Int32
    earlier: Int32  # the accumulator starts from the group before
    later: Int32  # the accumulator goes to the group after
    ticket: Int32
    halves: Int32  # of the row block that have rows: 1 or 2 (Hopper, else 2)


class Counters(NamedTuple):
    """Where each counter lies in the kernel's int32 counter array (zeroed before every launch)."""

    ticket: int
    comm_ticket: int
    started: int  # clusters that started or were cancelled
    dispatch: int  # [minibatches]
    push: int  # [minibatches]
    dx: int  # [minibatches]
    free: int  # [minibatches]
    replay: int  # [blocks]
    ddown: int  # [blocks]
    group: int  # [groups]
    shared: int  # [shared blocks]
    size: int


# Names of the counters in the record of an expired wait, after the forward kernel's.
COUNTERS = ("dispatch", "push", "dx", "free", "replay", "ddown", "group", "shared")


def counter_layout(minibatches, blocks, groups, shared_blocks) -> Counters:
    """Offsets in int32 words. The first three have a 128-byte line of their own each."""
    at = [96]
    for size in (minibatches,) * 4 + (blocks, blocks, groups, shared_blocks):
        at.append(at[-1] + size)
    return Counters(0, 32, 64, *at)


class Context(Invariant):
    """The kernel's arguments, as its roles see them."""

    def __init__(
        self, sources, scales, targets, outputs, schedule, sizes, buffers, watch, swiglu_limit
    ):
        self.sources: Sources = sources
        self.scales: Scales | None = scales
        self.targets: Targets = targets
        self.outputs: Outputs = outputs
        self.schedule: Schedule = schedule
        self.sizes: Sizes = sizes
        self.buffers: Buffers = buffers
        self.watch: Watch = watch
        self.tracer: Tracer | None = None  # of a kernel built with ``trace``
        self.swiglu_limit: Float32 | None = swiglu_limit

    @property
    def counters(self) -> Counters:
        """Pointers to the counters, made where they are used: no role keeps another's in registers."""
        sizes = self.sizes
        layout = counter_layout(sizes.max_minibatches, sizes.max_blocks, sizes.max_groups, 0)
        base = int_ptr(self.buffers.counters)
        return Counters(*[base + at for at in layout])


def float_ptr(address: Int64) -> cute.Pointer:
    """A pointer to FP32 in global memory."""
    return cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4)
