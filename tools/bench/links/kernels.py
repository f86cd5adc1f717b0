"""Kernels that measure links: our comm worker's pull and push alone, and signals.

``TransferKernel`` moves rows with the functions that the megakernels use. Pull reads random rows of peers
and arrives at a counter of its own GPU. Push writes to random rows of peers and must tell them, with a
fence and a flag per peer: the protocol that our layer does without, built here only to be compared.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from mok.kernels_cute import ptx
from mok.kernels_cute.carry import Hold, Worker, piece_bytes
from mok.kernels_cute.comm import Rows
from mok.kernels_cute.symmetric import peek, peer, reached, word

WARPS = 12  # as the megakernels' comm CTAs
ITEM_ROWS = 64
HOLD_BYTES = 224 * 1024  # as the megakernels' stages and staging


class TransferKernel:
    """CTA b moves items b, b + grid, … of 64 rows.

    Args:
        push: scatter own rows to peers; otherwise gather peers' rows.
        signals: tell those who wait for the rows; otherwise only move them.
        carry: by bulk copies through shared memory, as the kernels' argument of that name.
    """

    def __init__(self, push: bool, signals: bool, carry: bool = False):
        self.push = push
        self.signals = signals
        self.carry = carry

    @cute.jit
    def __call__(
        self,
        peer_rank: Int64,  # int32 [items*64]: the rank a row comes from or goes to
        peer_row: Int64,  # int32 [items*64]: its row there
        near: Int64,  # [items*64 rows]: pull writes, push reads
        far: Int64,  # rank 0's symmetric rows: pull reads, push writes
        counters: Int64,  # rank 0's symmetric int32 [ranks]: items that came from each rank
        ends: Int64,  # int64 [grid]: globaltimer after a CTA's last row
        rank_stride: Int64,  # bytes
        row_bytes: Int64,
        items: Int32,
        rank: Int32,
        ranks: Int32,
        sms: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(
            peer_rank, peer_row, near, far, counters, ends, rank_stride, row_bytes, items, rank,
            ranks,
        ).launch(
            grid=(sms, 1, 1), block=(32 * WARPS, 1, 1),
            smem=HOLD_BYTES if self.carry else 0,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        peer_rank: Int64,
        peer_row: Int64,
        near: Int64,
        far: Int64,
        counters: Int64,
        ends: Int64,
        rank_stride: Int64,
        row_bytes: Int64,
        items: Int32,
        rank: Int32,
        ranks: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rows = Rows(word(peer_rank), word(peer_row), rank_stride, row_bytes)
        hold = None
        if cutlass.const_expr(self.carry):
            memory = cutlass.utils.SmemAllocator().allocate(HOLD_BYTES, byte_alignment=128)
            hold = Hold(memory.toint(), piece_bytes(HOLD_BYTES, WARPS), WARPS, row_bytes)
        worker = Worker(hold, rows, ITEM_ROWS, warp, WARPS)
        worker.init()
        cute.arch.sync_threads()
        phase = Int32(0)
        for item in cutlass.range(cta, items, grid, unroll=1):
            first = item * ITEM_ROWS
            at = near + Int64(first) * row_bytes
            if cutlass.const_expr(self.push):
                phase = worker.push(first, at, far, phase, Int64(0))
            else:
                phase = worker.pull(first, far, Int32(1), at, phase, Int64(0))
            cute.arch.sync_threads()
            if cutlass.const_expr(self.signals):
                self.tell(counters, rank_stride, rank, ranks, thread)
        if thread == 0:
            now = cute.make_ptr(Int64, ends + Int64(cta) * 8, cute.AddressSpace.gmem)
            cute.arch.store(now, Int64(cute.arch.globaltimer()))

    @cute.jit
    def tell(self, counters, rank_stride, rank, ranks, thread):
        """One more item is there: to this GPU (pull), to every rank (push)."""
        if cutlass.const_expr(self.push):
            if thread < ranks:
                cute.arch.fence_acq_rel_sys()
                there = peer(counters, rank_stride, thread) + Int64(rank) * 4
                cute.arch.red(
                    word(there), Int32(1), op="add", dtype="s32", sem="release", scope="sys"
                )
        else:
            if thread == 0:
                here = peer(counters, rank_stride, rank) + Int64(rank) * 4
                cute.arch.red(
                    word(here), Int32(1), op="add", dtype="s32", sem="release", scope="gpu"
                )


class ReadyKernel:
    """One CTA waits for counters and notes when they came: the first reader of the rows.

    Run it before the transfers, on a stream of its own.
    """

    @cute.jit
    def __call__(
        self,
        counters: Int64,  # this rank's int32 [ranks]
        target: Int32,  # each counter's awaited value
        first: Int32,  # ranks first … first+count are awaited
        count: Int32,
        came: Int64,  # int64 [count]: globaltimer, 0 where time ran out
        timeout_ns: Int64,
        stream: cuda.CUstream,
    ):
        self.kernel(counters, target, first, count, came, timeout_ns).launch(
            grid=(1, 1, 1), block=(128, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        counters: Int64,
        target: Int32,
        first: Int32,
        count: Int32,
        came: Int64,
        timeout_ns: Int64,
    ):
        thread, _, _ = cute.arch.thread_idx()
        if thread < count:
            ok, now = wait_for(counters + Int64(first + thread) * 4, target, timeout_ns)
            if not ok:
                now = Int64(0)
            slot = cute.make_ptr(Int64, came + Int64(thread) * 8, cute.AddressSpace.gmem)
            cute.arch.store(slot, now)


class PingKernel:
    """Two CTAs, of one GPU or of two, send a word to and fro, and note when.

    CTA b owns the word at ``own + b*step`` and writes to ``other - b*step``: on one GPU a grid of two
    with ``step`` the distance of the words, on two GPUs one CTA each with step 0.
    """

    @cute.jit
    def __call__(
        self,
        own: Int64,
        other: Int64,
        step: Int64,
        starts: Int32,  # 1: CTA 0 sends first, 0: it answers
        rounds: Int32,
        times: Int64,  # int64 [ctas][rounds][2]: before sending, after seeing the other's
        timeout_ns: Int64,
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(own, other, step, starts, rounds, times, timeout_ns).launch(
            grid=(ctas, 1, 1), block=(32, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        own: Int64,
        other: Int64,
        step: Int64,
        starts: Int32,
        rounds: Int32,
        times: Int64,
        timeout_ns: Int64,
    ):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        if thread == 0:
            mine = own + Int64(cta) * step
            theirs = other - Int64(cta) * step
            leads = (starts ^ cta) == 1
            line = times + Int64(cta * rounds) * 16
            ok = Boolean(True)
            for i in cutlass.range(rounds, unroll=1):
                sent, seen = Int64(0), Int64(0)
                if ok:
                    if not leads:
                        ok, seen = wait_for(mine, i + 1, timeout_ns)
                    sent = Int64(cute.arch.globaltimer())
                    cute.arch.store(word(theirs), i + 1, sem="release", scope="sys")
                    if leads:
                        ok, seen = wait_for(mine, i + 1, timeout_ns)
                note = cute.make_ptr(Int64, line + Int64(i) * 16, cute.AddressSpace.gmem)
                cute.arch.store(note, sent)
                cute.arch.store(note + 1, seen)


@cute.jit
def wait_for(address: Int64, target: Int32, timeout_ns: Int64) -> tuple[Boolean, Int64]:
    """(whether a word came to ``target`` in time, globaltimer then): spins without pausing."""
    start = cute.arch.globaltimer()
    now = start
    came = reached(peek(address), target)
    waiting = Boolean(not came)
    while waiting:
        came = reached(peek(address), target)
        now = cute.arch.globaltimer()
        waiting = Boolean(not (came or now - start > timeout_ns))
    ptx.acquire_sys(address)
    return came, Int64(now)
