"""The plan of the backward program on the device: the tables of ``program.make_plan``, in one launch.

Three facts make every entry a lookup. Groups lie in row order and tile the blocks, so the groups placed
before a minibatch are those before the group of its first block. Everything before that group's first block
has been read by then, so whole minibatches before it are free. And a minibatch's groups are numbered without
gaps, so the group of its last block tells how many it overlaps, and how many end in it.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from .. import ptx
from ..machine import machine_of
from ..queue import DSL
from ..schedule.common import find_segment, warp_inclusive_sum
from ..sync import int_ptr, select
from .program import (
    AHEAD_OF,
    FREE_BASE,
    GROUP_BASE,
    GROUP_WORDS,
    ITEM_BASE,
    OVERLAPS,
    TASK_BASE,
    Backward,
    backward_tile,
)

WARP, WARPS = 32, 32
THREADS = WARP * WARPS


class PlanKernel:
    """Groups, tables and counts of one rank's backward pass, by one CTA. Integers only.

    Args:
        arch: "sm_90a", "sm_100a" or "sm_103a", whose backward kernel follows.
    """

    def __init__(self, arch: str = "sm_90a"):
        self.tile = backward_tile(machine_of(arch))

    @cute.jit
    def __call__(
        self,
        num_rows: Int64,  # int32 [1]
        expert_offset: Int64,  # int32 [El + 1], padded
        block_expert: Int64,  # int32 [blocks]
        tables: Int64,  # int32 [TABLES][table_stride]
        groups: Int64,  # int32 [max_groups][GROUP_WORDS]
        counts: Int64,  # int32 [2]: all groups, groups of experts with rows
        tokens: Int32,
        hidden: Int32,
        intermediate: Int32,
        shared_intermediate: Int32,
        experts: Int32,
        minibatch: Int32,
        macrobatch: Int32,
        table_stride: Int32,
        ahead: Int32,
        stream: cuda.CUstream,
    ):
        """The first three are ``ScheduleKernel``'s; room for the others: ``program.plan_room``.

        Writes ``minibatches + 1`` entries of each table. El ≤ 5632 (the schedule's limit).
        """
        smem_bytes = (3 * experts + 2 + WARPS) * 4
        self.kernel(
            num_rows, expert_offset, block_expert, tables, groups, counts, tokens, hidden,
            intermediate, shared_intermediate, experts, minibatch, macrobatch, table_stride, ahead,
        ).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), smem=smem_bytes, stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        num_rows: Int64,
        expert_offset: Int64,
        block_expert: Int64,
        tables: Int64,
        groups: Int64,
        counts: Int64,
        tokens: Int32,
        hidden: Int32,
        intermediate: Int32,
        shared_intermediate: Int32,
        experts: Int32,
        minibatch: Int32,
        macrobatch: Int32,
        table_stride: Int32,
        ahead: Int32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        first_block = cute.arch.get_dyn_smem(Int32, alignment=16)  # [El + 1]
        group_start = first_block + experts + 1  # [El]: groups before an expert
        empty_start = group_start + experts  # [El]: experts without rows before one
        sums = empty_start + experts  # [WARPS]
        prog = Backward(
            rows=cute.arch.load(int_ptr(num_rows), Int32),
            tokens=tokens,
            hidden=hidden,
            intermediate=intermediate,
            shared_intermediate=shared_intermediate,
            experts=experts,
            minibatch=minibatch,
            macrobatch=macrobatch,
            tile=self.tile,
            ops=DSL,
            ahead=ahead,
        )
        placed = self.number_groups(
            prog, expert_offset, first_block, group_start, empty_start, sums, counts, tid
        )
        self.write_groups(prog, int_ptr(groups), first_block, group_start, empty_start, placed, tid)
        self.write_tables(
            prog, int_ptr(tables), table_stride, int_ptr(block_expert), first_block, group_start,
            sums, placed, tid,
        )  # fmt: skip

    @cute.jit
    def number_groups(
        self, prog, expert_offset, first_block, group_start, empty_start, sums, counts, tid
    ):
        """Prefix sums over the experts in shared memory; returns the number of groups with rows."""
        placed, empty = Int32(0), Int32(0)
        for base in cutlass.range(0, prog.experts, THREADS, unroll=1):
            expert = base + tid
            exists = expert < prog.experts
            address = expert_offset + Int64(expert) * 4
            first = ptx.load_if(address, exists, Int32(0)) // self.tile.m
            end = ptx.load_if(address + 4, exists, Int32(0)) // self.tile.m
            last_macrobatch = (end - 1) // prog.ring_blocks
            own = select(end > first, last_macrobatch - first // prog.ring_blocks + 1, Int32(0))
            is_empty = select(exists & (end == first), Int32(1), Int32(0))
            before, total = block_scan(own, sums, tid)
            empty_before, empty_total = block_scan(is_empty, sums, tid)
            if exists:
                first_block[expert] = first
                group_start[expert] = placed + before
                empty_start[expert] = empty + empty_before
            placed += total
            empty += empty_total
        if tid == 0:
            first_block[prog.experts] = prog.blocks
            cute.arch.store(int_ptr(counts), placed + empty)
            cute.arch.store(int_ptr(counts) + 1, placed)
        cute.arch.sync_threads()
        return placed

    @cute.jit
    def write_groups(self, prog, groups, first_block, group_start, empty_start, placed, tid):
        """The groups with rows, in row order, then one for each expert without rows."""
        for group in cutlass.range(tid, placed, THREADS, unroll=1):
            expert = find_segment(group_start, prog.experts, group)
            first, end = first_block[expert], first_block[expert + 1]
            macrobatch = first // prog.ring_blocks + group - group_start[expert]
            start = cutlass.max(first, macrobatch * prog.ring_blocks)
            stop = cutlass.min(end, (macrobatch + 1) * prog.ring_blocks)
            earlier = select(start > first, Int32(1), Int32(0))
            later = select(stop < end, Int32(1), Int32(0))
            write(groups + group * GROUP_WORDS, (expert, start, stop, earlier, later))
        zero = Int32(0)
        for expert in cutlass.range(tid, prog.experts, THREADS, unroll=1):
            if first_block[expert] == first_block[expert + 1]:
                group = placed + empty_start[expert]
                write(groups + group * GROUP_WORDS, (expert, zero, zero, zero, zero))

    @cute.jit
    def write_tables(
        self, prog, tables, stride, block_expert, first_block, group_start, sums, placed, tid
    ):
        """Entries 0 … minibatches of every table."""
        task_base = prog.shared_tasks
        for base in cutlass.range(0, prog.minibatches + 1, THREADS, unroll=1):
            s = base + tid
            # What the entry behind the last minibatch holds.
            group, free, overlaps, tasks = placed, prog.minibatches, Int32(0), Int32(0)
            gone, blocks_before = Int32(0), prog.blocks
            if s < prog.minibatches:
                first = s * prog.mb_blocks
                last = first + prog.blocks_in(s) - 1
                expert = cute.arch.load(block_expert + first, Int32)
                before = cutlass.max(s - 1, Int32(0)) * prog.mb_blocks
                expert_before = cute.arch.load(block_expert + before, Int32)
                last_expert = cute.arch.load(block_expert + last, Int32)
                ring = first // prog.ring_blocks
                group = group_start[expert] + ring - first_block[expert] // prog.ring_blocks
                group_first = cutlass.max(first_block[expert], ring * prog.ring_blocks)
                ring = last // prog.ring_blocks
                last_group = (
                    group_start[last_expert] + ring - first_block[last_expert] // prog.ring_blocks
                )
                last_end = cutlass.min(first_block[last_expert + 1], (ring + 1) * prog.ring_blocks)
                overlaps = last_group - group + 1
                follow = overlaps - select(last_end > last + 1, Int32(1), Int32(0))
                free = group_first // prog.mb_blocks
                ring = before // prog.ring_blocks
                first_before = cutlass.max(first_block[expert_before], ring * prog.ring_blocks)
                gone = prog.ahead_of(s, first_before // prog.mb_blocks)
                tasks = prog.tasks_of(s, follow, gone, prog.ahead_of(s + 1, free))
                blocks_before = first
            before, total = block_scan(tasks, sums, tid)
            if s <= prog.minibatches:
                at = tables + s
                # Blocks pushed, and blocks dispatched: macrobatch 0's, then one slot's per free slot.
                dispatched = cutlass.min(prog.blocks, (prog.ring_mbs + free) * prog.mb_blocks)
                cute.arch.store(at + TASK_BASE * stride, task_base + before)
                cute.arch.store(at + GROUP_BASE * stride, group)
                cute.arch.store(at + ITEM_BASE * stride, blocks_before + dispatched)
                cute.arch.store(at + FREE_BASE * stride, free)
                cute.arch.store(at + OVERLAPS * stride, overlaps)
                cute.arch.store(at + AHEAD_OF * stride, gone)
            task_base += total


@cute.jit
def block_scan(value: Int32, sums: cute.Pointer, tid: Int32):
    """(Sum over the threads before, over all threads) of the CTA; ``sums``: int32 [WARPS] in shared memory."""
    lane = tid % WARP
    warp = cute.arch.make_warp_uniform(tid // WARP)
    through = warp_inclusive_sum(value, lane)
    if lane == WARP - 1:
        sums[warp] = through
    cute.arch.sync_threads()
    of_warp = sums[lane]
    warps = warp_inclusive_sum(of_warp, lane)
    before = cute.arch.shuffle_sync(warps - of_warp, warp)
    total = cute.arch.shuffle_sync(warps, WARPS - 1)
    cute.arch.sync_threads()
    return before + through - value, total


@cute.jit
def write(at: cute.Pointer, words):
    """Consecutive int32 words to global memory."""
    for i in cutlass.range_constexpr(len(words)):
        cute.arch.store(at + i, words[i])
