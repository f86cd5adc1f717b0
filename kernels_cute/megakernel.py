"""What the megakernels share: shared memory, start-up, and which warp does what on which machine.

A kernel brings its roles as methods; this class brings the machine. Warps of a compute CTA:

    Hopper (one CTA per task)                Blackwell (two CTAs per task)
    0     load: draws, waits, loads          0     load
    1     store                              1     store
    2-3   gather (direct); push              2     MMA: the first CTA's works for both
    4-11  multiply, then the epilogue        3     first CTA: scheduler, draws and waits for both
                                                   second CTA: relay of the scheduler's entries
                                             4-7   epilogue
                                             8-11  gather (direct); quantise (backward in MXFP8)

In ring builds the first clusters to start are comm workers, the others compute. Order of starting, not the
block index, decides: so comm workers run before any compute cluster exists that waits for them, whatever
the order in which the hardware starts or cancels clusters.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from mok.errors import ResourceError

from . import ptx, sync, tracing
from .carry import Hold, Worker, piece_bytes
from .comm import Rows
from .comm_items import CommItems
from .epilogue.staging import RowStaging, Staging
from .gemm import sm90, sm100, sm100_mxfp8
from .gemm.operands import Stages, aligned, view
from .invariant import Invariant
from .machine import CHUNK_N, CONTROL_BYTES, HOPPER, check_scheduling, check_tile, machine_of
from .pairs import MAIL_WORDS, Mail, PairFeed, PairTurns
from .program import IDLE
from .push import PUSH_WARPS
from .queue import (
    DEPTH,
    WORDS,
    LaunchControl,
    PairQueue,
    Starts,
    TaskQueue,
    broadcast,
    draw,
    next_slot,
)

LOAD_WARP, STORE_WARP, FIRST_RESULT_WARP = 0, 1, 4
THREADS = 384
WARPS = THREADS // 32
LAUNCH_REGISTERS = 168  # per thread: 65536 / THREADS, in steps of 8
END = 0  # the kind of a queue's last entry, in every task program


class Feed(NamedTuple):
    """Where a load warp is in its tasks.

    Attributes:
        ticket: the one drawn ahead (Hopper).
        slot, phase: of the queue.
        cursor: what ``decode`` carries from ticket to ticket (Hopper).
    """

    ticket: Int32
    slot: Int32
    phase: Int32
    cursor: NamedTuple


class NoCursor(NamedTuple):
    """Nothing to carry."""


class Shared(Invariant):
    """A CTA's shared memory: queue, mbarriers, stages, and the single words."""

    def __init__(self, queue, bars, stores, sA, sB, sB_half, sD, storage, order, mail):
        self.queue = queue
        self.bars = bars
        self.stores = stores
        self.sA = sA
        self.sB = sB
        self.sB_half = sB_half
        self.sD = sD
        self.storage = storage
        self.mail: Mail | None = mail
        self.order = order  # of this cluster among those that started; 0 where nobody counts

    @property
    def comm_item(self) -> cute.Pointer:
        """int32 [1]: the comm item drawn for the CTA."""
        return self.storage.comm_item.data_ptr()


class MegaKernel(PairTurns, CommItems):
    """Base of the megakernels.

    Args:
        arch: "sm_90a", "sm_100a" or "sm_103a".
        direct: rows are gathered in place (one rank, BF16); otherwise they pass the ring.
        tile_n: accumulator columns.
        stages: A/B stages in shared memory; None for the machine's default.
        scheduling: "clc" or "tickets"; None for the machine's default. Without Cluster Launch Control
            every cluster draws tickets to the end, and the grid should be what fits the GPU.
        mxfp8: routed experts in MXFP8. ``self.scaled`` says whether the MMA takes block scales.
        store_stages: staging buffers.
        pair: clusters of two CTAs that share B (``pairs``), in BF16 on Hopper.
        carry: comm workers move rows by bulk copies through shared memory, not through registers. None: the
            machine's.
        overlap: comm workers begin an item while the last one's rows are on their way (``carry.Worker``).
        push: warps of compute CTAs send some results to their routes' slots (``push``); rings on Hopper.

    Raises:
        mok.errors.ResourceError: the configuration does not fit the machine.
    """

    trace = False  # record begin and end of every task
    quantises = False  # warps of their own quantise results (Blackwell, where none gathers)

    def __init__(
        self,
        arch: str,
        direct: bool,
        tile_n: int,
        stages: int | None,
        scheduling: str | None,
        mxfp8: bool = False,
        store_stages: int = 2,
        pair: bool = False,
        carry: bool | None = None,
        overlap: bool = False,
        push: bool = False,
    ):
        self.arch = arch
        self.direct = direct
        self.machine = machine_of(arch)
        self.scheduling = check_scheduling(arch, scheduling)
        self.mxfp8 = mxfp8
        self.scaled = mxfp8 and self.machine.scaled_stages > 0
        if stages is None:
            stages = self.machine.scaled_stages if self.scaled else self.machine.stages
        check_tile(arch, tile_n, stages, store_stages, self.scaled)
        self.hopper = self.machine is HOPPER
        if pair and (not self.machine.pairs or mxfp8):
            raise ResourceError(
                "pairs that share B are for BF16 on Hopper", f"{arch}, mxfp8={mxfp8}"
            )
        self.pair = pair
        self.ctas = self.machine.cluster(pair)
        if self.hopper:
            gather_warps = 2 if direct else 0
            self.first_gather_warp = 2
            self.mainloop = sm90.Mainloop(tile_n, stages, 32 * gather_warps, pair)
            self.staging = Staging(self.mainloop.CTA_ROWS, 8, store_stages)
            if push:
                gather_warps = PUSH_WARPS  # in the gather warps' place
                self.staging.readers = 1 + PUSH_WARPS
            self.readers = 1 + gather_warps + 8  # store, gather or push, MMA
        else:
            gather_warps = 4 if direct else 0
            self.first_gather_warp = 8
            self.mainloop = sm100.Mainloop(tile_n, stages, gather_warps)
            if self.scaled:
                self.mainloop = sm100_mxfp8.Mainloop(tile_n, stages)
            self.staging = RowStaging(
                self.mainloop.CTA_ROWS, self.mainloop.EPILOGUE_WARPS, store_stages
            )
            # Load, store, epilogue and gather warps; in the first CTA also the MMA warp.
            self.readers = 2 + self.mainloop.EPILOGUE_WARPS + gather_warps
        self.carry = self.machine.carry if carry is None else carry
        if overlap and (not self.carry or mxfp8):
            raise ResourceError(
                "comm items overlap where rows are carried in BF16",
                f"carry={self.carry}, mxfp8={mxfp8}",
            )
        self.overlap = overlap
        self.push = push
        # A comm CTA has the memory of stages and staging for the rows that pass through it.
        free = self.machine.smem_bytes(tile_n, stages, store_stages, self.scaled) - CONTROL_BYTES
        self.comm_piece = piece_bytes(free, WARPS)
        self.wait_role = sync.ROLES.index("load" if self.hopper else "scheduler")
        self.use_clc = self.scheduling == "clc"
        # Per thread of each warpgroup: on Hopper the last two multiply; on Blackwell the second has the
        # epilogue, the third gathers.
        self.registers = (88, 208, 208) if self.hopper else (120, 208, 168)
        self.counts_starts = self.use_clc or not direct

    # ---------------------------------------------------------------- host

    def check_comm_rows(self, count: int) -> int:
        """``count``, the rows of a comm item.

        Raises:
            mok.errors.ResourceError: the comm workers of this build do not take so many.
        """
        if count not in (64, 128) or (count == 128 and (not self.carry or self.mxfp8)):
            raise ResourceError("comm_m must be 64, or 128 where rows are carried in BF16", count)
        return count

    def setup(self) -> None:
        """Build layouts; host and device code each need their own."""
        self.mainloop.setup()
        self.staging.setup()

    def make_storage(self) -> type:
        """The shared memory of a CTA, as a ``cute.struct``."""
        array, words = cute.struct.MemRange, cute.struct.Align
        fields = {
            **self.mainloop.storage(),
            "queue_full": array[Int64, DEPTH],
            "queue_empty": array[Int64, DEPTH],
            "store_full": array[Int64, self.staging.stages],
            "store_empty": array[Int64, self.staging.stages],
            "queue_words": words[array[Int32, DEPTH * WORDS], 16],
            "comm_item": array[Int32, 2],
            "order": array[Int32, 2],
        }
        if self.pair:
            fields |= {
                "mail_arrived": array[Int64, DEPTH],
                "mail_freed": array[Int64, DEPTH],
                "mail_words": words[array[Int32, DEPTH * MAIL_WORDS], 16],
            }
        if not self.hopper:
            fields |= {
                "queue_arrived": array[Int64, DEPTH],
                "queue_freed": array[Int64, DEPTH],
                "tmem": array[Int32, 2],  # base address of the tensor memory
                "launch_arrived": array[Int64, 1],
                "launch_reply": words[array[Int32, 4], 16],
            }
        if self.trace:
            fields["trace_words"] = array[Int64, tracing.WORDS]
        fields |= self.mainloop.buffers()
        fields["sD"] = aligned(cute.cosize(self.staging.layout))
        return cute.struct(type("SharedStorage", (), {"__annotations__": fields}))

    def launch_options(self, grid: Int32, stream) -> dict[str, object]:
        """Keyword arguments of the launch."""
        return {
            "grid": (grid, 1, 1),
            "block": (THREADS, 1, 1),
            "cluster": (self.ctas, 1, 1),
            "min_blocks_per_mp": 1,
            "stream": stream,
        }

    # -------------------------------------------------------------- device

    def rank_in_cluster(self) -> Int32:
        """Which CTA of a task's CTAs this is."""
        return Int32(0) if self.ctas == 1 else cute.arch.block_idx_in_cluster()

    def queue_readers(self):
        """Warps of this CTA that read the queue."""
        if self.hopper:
            return self.readers
        return sync.select(
            self.rank_in_cluster() == 0, Int32(self.readers + 1), Int32(self.readers)
        )

    def row_tile(self, block: Int32) -> Int32:
        """This CTA's 128 rows of a task's row block."""
        return block if self.hopper else self.ctas * block + self.rank_in_cluster()

    def halves(self, ctx, block: Int32) -> Int32:
        """Of a routed row block, how many halves have rows: the second MMA warpgroup of Hopper may have none."""
        if not self.hopper:
            return Int32(2)
        routes = ctx.schedule.rows.peer_token_idx + block * self.tile.m
        empty = cute.arch.load(routes + self.tile.m // 2, Int32) < 0
        return sync.select(empty, Int32(1), Int32(2))

    def starts(self, counter: cute.Pointer) -> Starts:
        """Started clusters against the grid's."""
        return Starts(counter, cute.arch.grid_dim()[0] // self.ctas)

    @cute.jit
    def cluster_sync(self):
        """All threads of the cluster, with release and acquire."""
        if cutlass.const_expr(self.ctas == 1):
            cute.arch.sync_threads()
        else:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def enter(self, storage, started: cute.Pointer) -> Shared:
        """Initialise the barriers, count this cluster, and let the cluster's CTAs see each other."""
        main, staging = self.mainloop, self.staging
        queue = self.make_queue(storage)
        bars = main.bars(storage)
        stores = Stages(storage.store_full.data_ptr(), storage.store_empty.data_ptr())
        self.init_barriers(queue, bars, stores, storage, started)
        self.cluster_sync()
        order = Int32(0)
        if self.counts_starts:
            word = storage.order.data_ptr()
            if self.ctas == 1:
                order = cute.arch.load(word, Int32)
            else:
                order = ptx.cluster_load(ptx.cluster_address(word.toint(), Int32(0)))
        return Shared(
            queue,
            bars,
            stores,
            view(storage.sA, main.a_layout),
            view(storage.sB, main.b_layout),
            view(storage.sB, main.b_half_layout),
            view(storage.sD, staging.layout),
            storage,
            order,
            self.make_mail(storage),
        )

    def make_worker(self, shared: Shared, rows: Rows, warp: Int32) -> Worker:
        """What a comm CTA moves rows with."""
        hold = None
        if self.carry:
            hold = Hold(shared.sA.iterator.toint(), self.comm_piece, WARPS, rows.row_bytes)
        return Worker(hold, rows, self.tile.comm_m, warp, WARPS, self.overlap)

    def make_mail(self, storage) -> Mail | None:
        """The mail of a pair, in the shared storage."""
        if not self.pair:
            return None
        words, arrived = storage.mail_words.data_ptr(), storage.mail_arrived.data_ptr()
        return Mail(words, arrived, storage.mail_freed.data_ptr())

    def make_queue(self, storage) -> TaskQueue:
        """The queue in the shared storage."""
        words = storage.queue_words.data_ptr()
        full, empty = storage.queue_full.data_ptr(), storage.queue_empty.data_ptr()
        if self.hopper:
            return TaskQueue(words, full, empty)
        arrived, freed = storage.queue_arrived.data_ptr(), storage.queue_freed.data_ptr()
        return PairQueue(words, full, empty, arrived, freed)

    @cute.jit
    def init_barriers(self, queue, bars, stores, storage, started):
        """One thread of each CTA."""
        if cute.arch.warp_idx() == 0:
            if cute.arch.lane_idx() == 0:
                self.mainloop.init_barriers(bars)
                queue.init(self.queue_readers())
                self.staging.init_barriers(stores)
                if cutlass.const_expr(self.pair):
                    self.make_mail(storage).init()
                if cutlass.const_expr(self.use_clc):
                    launch_control(storage).init()
                if cutlass.const_expr(self.counts_starts):
                    if self.rank_in_cluster() == 0:
                        order = self.starts(started).add()
                        cute.arch.store(storage.order.data_ptr(), order)
            cute.arch.mbarrier_init_fence()

    # ---- roles ----

    @cute.jit
    def compute_cta(self, ctx, shared):
        """Warp roles of a compute CTA."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if cutlass.const_expr(self.hopper):
            self.hopper_roles(ctx, shared, warp)
        else:
            self.blackwell_roles(ctx, shared, warp)

    @cute.jit
    def hopper_roles(self, ctx, shared, warp):
        if warp < FIRST_RESULT_WARP:
            self.budget(0)
            if warp == LOAD_WARP:
                self.load_role(ctx, shared)
            elif warp == STORE_WARP:
                self.store_role(ctx, shared)
            else:
                if cutlass.const_expr(self.direct):
                    self.gather_role(ctx, shared)
                elif cutlass.const_expr(self.push):
                    self.push_role(ctx, shared)
        else:
            self.budget(1)
            self.result_role(ctx, shared, self.mainloop.worker(warp, shared.storage))
        if cutlass.const_expr(self.pair):
            # Nobody leaves while the other CTA may still reach it.
            self.cluster_sync()

    @cute.jit
    def blackwell_roles(self, ctx, shared, warp):
        """Result warps read gate, up and the accumulator at once, so they get more registers."""
        MMA_WARP = 2  # the next one schedules
        columns = self.machine.tmem_columns
        word = shared.storage.tmem.data_ptr()
        if warp == MMA_WARP:
            cute.arch.alloc_tmem(columns, word, is_two_cta=True)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=True)
            ptx.tcgen05_before_sync()
        cute.arch.sync_threads()
        ptx.tcgen05_after_sync()
        tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, word)
        if warp < FIRST_RESULT_WARP:
            self.budget(0)
            if warp == LOAD_WARP:
                self.load_role(ctx, shared)
            elif warp == STORE_WARP:
                self.store_role(ctx, shared)
            elif warp == MMA_WARP:
                if self.rank_in_cluster() == 0:
                    self.mma_role(shared, tmem)
            else:
                if self.rank_in_cluster() == 0:
                    self.schedule_role(ctx, shared)
                else:
                    shared.queue.relay(END)
            # Nobody leaves while the other CTA may still reach it, or its tensor memory is read.
            self.cluster_sync()
            if warp == MMA_WARP:
                cute.arch.dealloc_tmem(tmem, columns, is_two_cta=True)
        elif warp < self.first_gather_warp:
            self.budget(1)
            self.result_role(ctx, shared, self.mainloop.worker(warp, tmem.toint()))
            self.cluster_sync()
        else:
            self.budget(2)
            if cutlass.const_expr(self.direct):
                self.gather_role(ctx, shared)
            elif cutlass.const_expr(self.quantises):
                self.quantise_role(ctx, shared)
            self.cluster_sync()

    # A kernel whose ``decode`` looks tickets up, which only grow, can carry how far it has got.

    def first_cursor(self, ctx, prog) -> NamedTuple:
        """What ``decode`` gets with the first ticket."""
        return NoCursor()

    def last_ticket(self, prog, cursor) -> Int32:
        """A ticket that decodes to ``END``."""
        return Int32(prog.tasks)

    def budget(self, group: int) -> None:
        """Trade registers: what a thread of this warpgroup has from here on.

        Their sum over the three warpgroups is what the CTA was launched with, 3 · 168: an increase waits
        for registers that others give up, and the rest of the SM's are not in the pool.
        """
        count = self.registers[group]
        if count > LAUNCH_REGISTERS:
            cute.arch.setmaxregister_increase(count)
        elif count < LAUNCH_REGISTERS:
            cute.arch.setmaxregister_decrease(count)

    def agreed(self, entry: NamedTuple) -> NamedTuple:
        """The entry, whose kind and steps all lanes know to be the same."""
        kind, k_tiles = self.common(entry.kind, entry.k_tiles)
        return entry._replace(kind=kind, k_tiles=k_tiles)

    def common(self, *values: Int32) -> tuple[Int32, ...]:
        """Values that all lanes share."""
        return self.mainloop.uniform(*values) if self.hopper else values

    def works(self, kind: Int32):
        """Whether an entry of this kind is a task."""
        return (kind != END) & (kind != IDLE) if self.pair else kind != END

    def shares(self, feed) -> Int32:
        """1 where the entry that came with ``feed`` has its B in common with the other CTA's."""
        return feed.shares if self.pair else Int32(0)

    def first_task(self, ctx, prog) -> Feed | PairFeed:
        """A load warp's feed before its first task."""
        if self.pair:
            return self.first_turn(ctx, prog)
        if not self.hopper:
            return Feed(Int32(0), Int32(0), Int32(0), NoCursor())
        ticket = draw(ctx.counters.ticket)
        return Feed(ticket, Int32(0), Int32(0), self.first_cursor(ctx, prog))

    def next_task(self, ctx, prog, shared, feed: Feed | PairFeed):
        """The load warp's next entry, and the feed after it."""
        if self.pair:
            return self.next_turn(ctx, prog, shared, feed)
        return self.next_alone(ctx, prog, shared, feed)

    @cute.jit
    def next_alone(self, ctx, prog, shared, feed: Feed):
        """The load warp's next task and feed. On Hopper it publishes it, draws one ahead and waits itself."""
        slot, phase = next_slot(feed.slot, feed.phase)
        ticket, cursor = feed.ticket, feed.cursor
        if cutlass.const_expr(self.hopper):
            entry, cursor = self.decode(ctx, prog, broadcast(ticket), cursor)
            shared.queue.wait_free(feed.slot, feed.phase)
            shared.queue.put(entry, feed.slot)
            ticket = draw(ctx.counters.ticket)
            self.wait_for(ctx, prog, entry)
        else:
            entry = shared.queue.get(feed.slot, feed.phase, self.entry)
        return entry, Feed(ticket, slot, phase, cursor)

    @cute.jit
    def schedule_role(self, ctx, shared):
        """Draw tickets for the pair while it has the right to; publish each task, one ahead, once it can run."""
        queue, starts = shared.queue, self.starts(ctx.counters.started)
        control = launch_control(shared.storage)
        slot, phase = Int32(0), Int32(0)
        right = Int32(1)  # to draw one more ticket: the launch gave the first
        asked, reply_phase = Int32(0), Int32(0)
        asking = Int32(1 if self.use_clc else 0)
        prog = self.program(ctx)
        cursor = self.first_cursor(ctx, prog)
        kind = Int32(END + 1)
        while kind != END:
            queue.wait_free(slot, phase)
            if asked != 0:
                asking = self.granted(control, starts, reply_phase)
                reply_phase = reply_phase ^ 1
                asked = Int32(0)
                right = asking
                if asking == 0:
                    right = starts.all_started()
            ticket = self.last_ticket(prog, cursor)
            if right != 0:
                ticket = broadcast(draw(ctx.counters.ticket))
            entry, cursor = self.decode(ctx, prog, ticket, cursor)
            self.wait_for(ctx, prog, entry)
            queue.put(entry, slot)
            slot, phase = next_slot(slot, phase)
            kind = entry.kind
            if kind != END and asking != 0:
                control.ask()
                asked = Int32(1)
        # No ticket is left: clusters that have not started need not.
        while asking != 0:
            control.ask()
            asking = self.granted(control, starts, reply_phase)
            reply_phase = reply_phase ^ 1

    @cute.jit
    def granted(self, control, starts, phase):
        """1 if a cluster's launch was cancelled for this pair, which then counts it; 0 for a refusal."""
        grant = control.answer(phase)
        if grant != 0 and cute.arch.lane_idx() == 0:
            starts.add()
        return grant

    def put_chunk(
        self, shared, worker, at, columns, chunk, phase, formula=lambda value: value, quantised=None
    ):
        """Apply ``formula`` to 64 accumulator columns from each of ``columns`` on, and stage the result.

        ``quantised`` is applied to the result once it is rounded to BF16.
        """
        main, staging = self.mainloop, self.staging
        sD_row = shared.sD.iterator.toint() + worker.row * (2 * CHUNK_N)
        for piece in range(staging.PIECES):
            first = [column + piece * main.PIECE for column in columns]
            values = [formula(*each) for each in zip(*main.columns(worker, at, *first))]
            packed = [ptx.pack_bf16(values[i], values[i + 1]) for i in range(0, len(values), 2)]
            if quantised is not None:
                packed = quantised(packed)
            chunk, phase = staging.put_packed(
                packed, shared.stores, sD_row, worker.row, chunk, phase, piece
            )
        return chunk, phase

    @cute.jit
    def mma_role(self, shared, tmem):
        """Multiply for both CTAs, into one accumulator after the other."""
        main, bars, queue = self.mainloop, shared.bars, shared.queue
        fragments = main.fragments(shared.storage, tmem)
        stage, phase = Int32(0), Int32(0)
        acc, acc_phase = Int32(0), Int32(0)
        slot, slot_phase = Int32(0), Int32(0)
        kind = Int32(END + 1)
        while kind != END:
            entry = queue.get(slot, slot_phase, self.entry)
            slot, slot_phase = next_slot(slot, slot_phase)
            kind = entry.kind
            if entry.k_tiles > 0:
                stage, phase = self.multiply(
                    shared, fragments, tmem, entry, stage, phase, acc, acc_phase
                )
                acc, acc_phase = sync.advance(acc, acc_phase, main.acc_stages)

    def multiply(self, shared, fragments, tmem, entry, stage, phase, acc, acc_phase):
        """One task of the MMA role."""
        return self.mainloop.mma_tile(
            shared.bars, *fragments, entry.k_tiles, stage, phase, acc, acc_phase
        )


def launch_control(storage) -> LaunchControl:
    """The scheduler warp's query, in the shared storage."""
    return LaunchControl(storage.launch_reply.data_ptr(), storage.launch_arrived.data_ptr())
