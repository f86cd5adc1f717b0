"""Pairs of CTAs on Hopper: two tasks at a time, whose B arrives once for both.

A pair's ticket stands for two consecutive tasks of the program, one for each CTA. Mostly these are two row
blocks of one expert against the same columns of its weights: then each CTA loads one half of B and
multicasts it to both. Otherwise each loads its own. Both CTAs go through the same number of stages with
every ticket, so a stage and its phase are the same in both. Where the second task may wait for the first,
or has another number of steps, they take turns, and the other CTA passes the steps by (``IDLE``).

The first CTA's load warp draws, and posts the ticket to the second's. At every stage the two load warps tell
each other that it is empty.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from . import ptx
from .invariant import Invariant
from .program import IDLE, side_by_side
from .queue import DEPTH, broadcast, draw, next_slot
from .sync import select

MAIL_WORDS = 4  # int32 of a letter: 16 bytes are stored at once
END = 0


class PairFeed(NamedTuple):
    """Where a pair's load warp is in its tasks."""

    ticket: Int32  # the pair's present one
    drawn: Int32  # ahead: lane 0 of the first CTA
    turn: Int32  # of the ticket, the next
    shares: Int32  # 1: the entry's B is the other CTA's, too
    slot: Int32  # of the queue
    phase: Int32
    mail: Int32  # slot of the mail
    mail_phase: Int32
    cursor: NamedTuple


class Mail(Invariant):
    """Tickets from the first CTA's load warp to the second's.

    Args:
        words: int32 [DEPTH * MAIL_WORDS], 16-byte aligned.
        arrived: mbarrier [DEPTH] in the second CTA: one arrival, the sender's.
        freed: mbarrier [DEPTH] in the first CTA: one arrival, the reader's.
    """

    def __init__(self, words: cute.Pointer, arrived: cute.Pointer, freed: cute.Pointer):
        self.words = words
        self.arrived = arrived
        self.freed = freed

    def init(self) -> None:
        """Arrival counts (one thread)."""
        for i in range(DEPTH):
            cute.arch.mbarrier_init(self.arrived + i, 1)
            cute.arch.mbarrier_init(self.freed + i, 1)

    @cute.jit
    def send(self, ticket: Int32, index: Int32, phase: Int32):
        """Post a ticket (the first CTA's load warp)."""
        ptx.cluster_wait((self.freed + index).toint(), phase ^ 1)
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            slot = ptx.cluster_address((self.words + index * MAIL_WORDS).toint(), Int32(1))
            zero = Int32(0)
            ptx.cluster_store_16(slot, ticket, zero, zero, zero)
            ptx.cluster_arrive(ptx.cluster_address((self.arrived + index).toint(), Int32(1)))

    @cute.jit
    def receive(self, index: Int32, phase: Int32) -> Int32:
        """The next ticket (the second CTA's load warp)."""
        ptx.cluster_wait((self.arrived + index).toint(), phase)
        ticket = cute.arch.load(self.words + index * MAIL_WORDS, Int32)
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            ptx.cluster_arrive(ptx.cluster_address((self.freed + index).toint(), Int32(0)))
        return ticket


class PairTurns(Invariant):
    """How a kernel of pairs gets from ticket to ticket. Base of ``MegaKernel``."""

    @cute.jit
    def first_turn(self, ctx, prog) -> PairFeed:
        """A load warp's feed before its first task."""
        zero, drawn = Int32(0), Int32(0)
        if self.rank_in_cluster() == 0:
            drawn = draw(ctx.counters.ticket)
        return PairFeed(
            zero, drawn, zero, zero, zero, zero, zero, zero, self.first_cursor(ctx, prog)
        )

    def steps(self, entry: NamedTuple) -> Int32:
        """Stages that a task takes."""
        return entry.k_tiles

    @cute.jit
    def next_turn(self, ctx, prog, shared, feed: PairFeed):
        """Publish and return this CTA's next entry, and the feed after it; waits for what it needs."""
        rank = self.rank_in_cluster()
        ticket, drawn, turn = feed.ticket, feed.drawn, feed.turn
        mail, mail_phase = feed.mail, feed.mail_phase
        if turn == 0:
            if rank == 0:
                ticket = broadcast(drawn)
                shared.mail.send(ticket, mail, mail_phase)
                drawn = draw(ctx.counters.ticket)
            else:
                ticket = shared.mail.receive(mail, mail_phase)
            mail, mail_phase = next_slot(mail, mail_phase)
        # Even lanes decode the first task, odd ones the second.
        each, cursor = self.decode(ctx, prog, 2 * ticket + cute.arch.lane_idx() % 2, feed.cursor)
        first = type(each)(*[cute.arch.shuffle_sync(word, 0) for word in each])
        second = type(each)(*[cute.arch.shuffle_sync(word, 1) for word in each])
        cursor = type(cursor)(*[cute.arch.shuffle_sync(word, 0) for word in cursor])
        beside = select(side_by_side(first, second), Int32(1), Int32(0))
        shares = select((first.n == second.n) & (first.expert == second.expert), beside, Int32(0))
        acting = [select(turn == 0, a, b) for a, b in zip(first, second)]
        acting = type(each)(*acting)
        ended = acting.kind == END
        idle = (beside == 0) & (rank != turn)
        entry = type(each)(*[select(rank == 0, a, b) for a, b in zip(first, second)])
        kind = select(ended, Int32(END), select(idle, Int32(IDLE), entry.kind))
        k_tiles = select(ended, Int32(0), select(idle, self.steps(acting), entry.k_tiles))
        entry = entry._replace(kind=kind, k_tiles=k_tiles)
        turn = select((beside == 0) & (turn == 0), Int32(1), Int32(0))
        shared.queue.wait_free(feed.slot, feed.phase)
        shared.queue.put(entry, feed.slot)
        self.wait_for(ctx, prog, entry)
        slot, phase = next_slot(feed.slot, feed.phase)
        return entry, PairFeed(ticket, drawn, turn, shares, slot, phase, mail, mail_phase, cursor)
