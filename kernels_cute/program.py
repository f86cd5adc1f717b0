"""The task program: which work exists, in which order, and what each piece waits for.

This is the one description of the order of the megakernel. Kernels decode their tickets with it, the
host sizes launches and counters with it, the simulator walks it. All of it is integer arithmetic
without branches, so the same code runs on Python ints (``PY``) and on the kernel language's integers
(``kernels_cute.queue.DSL``).

Vocabulary: a *block* is ``tile_m`` rows of an expert's padded segment; blocks are numbered through all
experts of the rank. Minibatch ``s`` holds blocks ``[s*mb_blocks, (s+1)*mb_blocks)``. The ring holds
``ring_mbs`` minibatches: minibatch ``s`` lives in slot ``s mod ring_mbs``, and before it that slot belonged
to ``previous(s) = s + ring_mbs``, since forward walks macrobatches from the last to the first.

Total order of the forward pass (comm items exist only when rows pass the ring):

    shared up, shared down,
    dispatch of every minibatch whose slot is fresh,
    then for each minibatch s in processing order: up(s), down(s), combine(s), dispatch(next(s))

With ``push``, down itself sends its rows to their slots: there is no combine, and nobody waits for one.

With ``ahead``, and ``MIN_AHEAD`` slots or more, the first ``ahead`` tasks of the next up come before down(s). All
column tiles of up(s) end at about the same time, and none of down(s) can begin before; so its last, partly
filled wave needs something beside it, or the GPU waits a wave per minibatch. One wave of tasks is enough, and
more would only delay the combines.

Processing goes round the slots: after the last macrobatch (the *head*, which may fill only some of them)
come the slots that it left free, then its own again. Were every macrobatch to begin at slot 0, all fresh
dispatches would come before the first refill, and compute would wait for them (docs/scaling.md).

Every wait below is on an item that comes earlier in this order, and every worker takes its items in
increasing order, so the first unfinished item can always run: no deadlock as long as all comm workers
and one compute worker are resident. ``tests/kernels_cute/test_program.py`` checks it on random shapes.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from .invariant import Invariant

AHEAD = 132  # tasks: a wave of a whole GPU
MIN_AHEAD = 3  # slots: with fewer, the next up would wait for the refill of the slot that was read just before


def tasks_ahead(direct: bool, mxfp8: bool, ahead: int = AHEAD) -> int:
    """``ahead`` in builds whose order it changes, both directions: where BF16 rows pass the ring. Else 0."""
    return 0 if direct or mxfp8 else ahead


Int = Any  # a Python int, or the kernel language's Int32

# Kinds of compute task.
END, SHARED_UP, SHARED_DOWN, UP, DOWN = 0, 1, 2, 3, 4
IDLE = 7  # no task: while the other CTA of a pair has one alone; the same in backward
# Kinds of comm item.
DISPATCH, COMBINE = 1, 2


class _PyOps:
    """Integer operations on Python ints."""

    @staticmethod
    def select(condition: Any, yes: Int, no: Int) -> Int:
        return yes if condition else no

    @staticmethod
    def minimum(a: Int, b: Int) -> Int:
        return min(a, b)

    @staticmethod
    def maximum(a: Int, b: Int) -> Int:
        return max(a, b)


PY = _PyOps()


@dataclass(frozen=True)
class Tile:
    """Rows and columns of one compute task, and the raster's group of row blocks.

    ``m`` rows; ``up_n`` columns of I per gate+up task (the accumulator is twice as wide); ``down_n``
    columns of H per down task; ``group_m`` row blocks share each weight tile while it is in L2; ``comm_m``
    rows per comm item; ``signals`` arrivals per finished task, one from each CTA that worked on it.
    """

    m: int = 128
    up_n: int = 128
    down_n: int = 256
    group_m: int = 16
    comm_m: int = 64
    signals: int = 1


class Task(NamedTuple):
    """A compute task: ``kind``, its row ``block``, column tile ``n`` and ``minibatch``."""

    kind: Int
    block: Int
    n: Int
    minibatch: Int


def side_by_side(first: Any, second: Any) -> Any:
    """Whether two consecutive tasks can be worked on at once by CTAs that keep step: neither waits for the
    other, and both have as many steps. Tasks of one kind and minibatch do, in backward of one group, too.
    """
    same = (first.kind == second.kind) & (first.minibatch == second.minibatch)
    if hasattr(first, "group"):
        same = same & (first.group == second.group)
    return same & (first.kind != END)


class Item(NamedTuple):
    """A comm item: ``kind``, first row ``row`` (of ``Tile.comm_m``) and ``minibatch``."""

    kind: Int
    row: Int
    minibatch: Int


class Forward(Invariant):
    """The forward program of one rank.

    Args:
        rows: padded rows of this rank's experts, a multiple of ``tile.m`` (known on the device only).
        tokens: T, the rank's own tokens (shared expert).
        hidden, intermediate: H and I.
        shared_intermediate: the shared expert's I, 0 for none.
        minibatch, macrobatch: rows; ``tile.m`` divides minibatch, minibatch divides macrobatch.
        tile: task sizes.
        ops: ``PY`` or the kernel's equivalent.
        ahead: tasks of the next up that go before a minibatch's down, where the ring has ``MIN_AHEAD`` slots.
        push: down sends its rows itself; there are no combines.
        recompute: the program that rebuilds the saved context instead: dispatch and gate+up of
            macrobatch 0, gate+up of the shared expert, no down, no combine.
    """

    def __init__(
        self,
        rows: Int,
        tokens: Int,
        hidden: Int,
        intermediate: Int,
        shared_intermediate: Int,
        minibatch: Int,
        macrobatch: Int,
        tile: Tile,
        ops: Any = PY,
        recompute: bool = False,
        ahead: int = 0,
        push: bool = False,
    ):
        self.tile = tile
        self.push = push
        self.ops = ops
        self.recompute = recompute
        if recompute:
            rows, hidden = ops.minimum(rows, macrobatch), 0 * hidden  # no columns of H: no down
        self.blocks = rows // tile.m
        self.mb_blocks = minibatch // tile.m
        self.ring_mbs = macrobatch // minibatch
        self.ring_blocks = self.mb_blocks * self.ring_mbs
        self.n_up = (intermediate + tile.up_n - 1) // tile.up_n
        self.n_down = (hidden + tile.down_n - 1) // tile.down_n
        self.shared_n_up = (shared_intermediate + tile.up_n - 1) // tile.up_n
        zero = 0 * macrobatch
        tasks = ops.minimum(ahead + zero, self.mb_blocks * self.n_up)
        self.ahead = ops.select(self.ring_mbs >= MIN_AHEAD, tasks, zero)
        # No shared expert has no shared down tasks either.
        self.shared_blocks = ops.select(
            shared_intermediate > 0, (tokens + tile.m - 1) // tile.m, 0 * tokens
        )
        self.shared_up_tasks = self.shared_blocks * self.shared_n_up
        self.shared_tasks = self.shared_up_tasks + self.shared_blocks * self.n_down
        self.minibatches = (self.blocks + self.mb_blocks - 1) // self.mb_blocks
        self.macrobatches = (self.minibatches + self.ring_mbs - 1) // self.ring_mbs
        self.tasks = self.shared_tasks + self.blocks * (self.n_up + self.n_down)
        # The last macrobatch is processed first and may be partial.
        self.head_first_mb = ops.maximum(self.macrobatches - 1, 0 * tokens) * self.ring_mbs
        self.head_mbs = self.minibatches - self.head_first_mb
        self.head_blocks = self.blocks - self.head_first_mb * self.mb_blocks

    # ---- minibatches ----

    def minibatch_at(self, position: Int) -> Int:
        """The minibatch processed at ``position`` (0 … minibatches-1)."""
        behind = position - self.head_mbs
        macrobatch = self.macrobatches - 2 - behind // self.ring_mbs
        # Slots go round: the head's are refilled last, and are needed last.
        later = macrobatch * self.ring_mbs + position % self.ring_mbs
        return self.ops.select(position < self.head_mbs, self.head_first_mb + position, later)

    def blocks_in(self, minibatch: Int) -> Int:
        """Row blocks of ``minibatch``; all have ``mb_blocks`` except the very last."""
        return self.ops.minimum(self.mb_blocks, self.blocks - minibatch * self.mb_blocks)

    def previous(self, minibatch: Int) -> Int:
        """The minibatch that held the slot before; ``>= minibatches`` when the slot is fresh."""
        return minibatch + self.ring_mbs

    # ---- compute tasks ----

    def task(self, ticket: Int) -> Task:
        """The compute task with number ``ticket``; kind ``END`` from ``tasks`` on."""
        select = self.ops.select
        position, is_up, offset = self._routed(
            self.ops.maximum(ticket - self.shared_tasks, 0 * ticket)
        )
        minibatch = self.minibatch_at(position)
        blocks = self.blocks_in(minibatch)
        first = minibatch * self.mb_blocks
        block, n = self._raster(offset, blocks, select(is_up, self.n_up, self.n_down))
        routed_kind = select(is_up, UP + 0 * ticket, DOWN + 0 * ticket)

        is_shared = ticket < self.shared_tasks
        is_shared_up = ticket < self.shared_up_tasks
        shared_offset = select(is_shared_up, ticket, ticket - self.shared_up_tasks)
        shared_block, shared_n = self._raster(
            shared_offset,
            self.shared_blocks,
            select(is_shared_up, self.shared_n_up, self.n_down),
        )
        shared_kind = select(is_shared_up, SHARED_UP + 0 * ticket, SHARED_DOWN + 0 * ticket)
        kind = select(is_shared, shared_kind, routed_kind)
        return Task(
            kind=select(ticket < self.tasks, kind, END + 0 * ticket),
            block=select(is_shared, shared_block, first + block),
            n=select(is_shared, shared_n, n),
            minibatch=minibatch,
        )

    def _routed(self, offset: Int) -> tuple[Int, Any, Int]:
        """(position, whether up, offset in its up or down) of routed task ``offset``.

        Units of equal size, once each gap is counted: what is left of up, the first ``ahead`` tasks of the next
        up, down. A unit before the first has only its middle, the last one none; the head's last
        minibatch may lack blocks.
        """
        select, ahead = self.ops.select, self.ahead
        zero = 0 * offset
        up, down = self.mb_blocks * self.n_up, self.mb_blocks * self.n_down
        unit, rest = up + down, up - ahead
        lacking = self.head_mbs * self.mb_blocks - self.head_blocks
        last = up - lacking * self.n_up  # tasks of the up that lacks blocks
        begun = self.ops.minimum(last, ahead + zero)
        first_lacks = select(self.head_mbs > 1, zero, ahead - begun)
        gaps = (
            (up - first_lacks, first_lacks + down),
            ((self.head_mbs - 1) * unit + rest + begun, ahead - begun - first_lacks),
            (self.head_mbs * unit + last - begun, rest - (last - begun)),
            ((self.head_mbs + 1) * unit - lacking * self.n_down, lacking * self.n_down),
            (self.minibatches * unit + rest, ahead + zero),
        )
        offset = offset + rest
        for begin, size in gaps:
            offset = offset + select(offset >= begin, size, zero)
        which = offset // unit
        within = offset - which * unit
        is_rest, is_up = within < rest, within < up
        position = which - select(is_up & (within >= rest), zero, 1 + zero)
        at = select(is_rest, within + ahead, select(is_up, within - rest, within - up))
        return position, is_up, at

    def _raster(self, offset: Int, blocks: Int, n_tiles: Int) -> tuple[Int, Int]:
        """Groups of ``group_m`` row blocks; inside a group rows fastest, so a weight tile is reused."""
        group = self.tile.group_m
        n_tiles = self.ops.maximum(n_tiles, 1 + 0 * offset)
        which = offset // (group * n_tiles)
        rest = offset - which * (group * n_tiles)
        height = self.ops.maximum(
            self.ops.minimum(blocks - which * group, group + 0 * offset), 1 + 0 * offset
        )
        n = rest // height
        return which * group + (rest - n * height), n

    # ---- comm items ----

    @property
    def items_per_block(self) -> int:
        return self.tile.m // self.tile.comm_m

    @property
    def items(self) -> Int:
        """Comm items in all: every block is dispatched once and, unless recomputing or pushed, combined once."""
        return (1 if self.recompute or self.push else 2) * self.blocks * self.items_per_block

    def item(self, index: Int) -> Item:
        """The comm item with number ``index`` < ``items``."""
        select, minimum, maximum = self.ops.select, self.ops.minimum, self.ops.maximum
        zero = 0 * index
        per_block = self.items_per_block
        at = index // per_block  # in blocks
        within = index - at * per_block
        if self.push:
            return self._dispatch(at, within)
        many = self.macrobatches > 1
        # 1: fresh slots: the head, then the slots of the macrobatch after it that the head left free.
        fresh_tail = select(many, (self.ring_mbs - self.head_mbs) * self.mb_blocks, zero)
        fresh = self.head_blocks + fresh_tail
        head_base = self.head_first_mb * self.mb_blocks
        tail_base = (self.head_first_mb - self.ring_mbs + self.head_mbs) * self.mb_blocks
        fresh_block = select(
            at < self.head_blocks, head_base + at, tail_base + at - self.head_blocks
        )
        # 2: combine(s), dispatch(next(s)) for s of the head, of the middle, then of macrobatch 0,
        #    whose slots nobody refills.
        after = at - fresh
        head = self.head_blocks + select(many, self.head_mbs * self.mb_blocks, zero)
        middle = maximum(self.macrobatches - 2, zero) * self.ring_blocks * 2
        in_head = after < head
        in_middle = after < head + middle
        pair = 2 * self.mb_blocks
        head_unit = select(many, pair, self.mb_blocks)
        head_step = minimum(after // head_unit, self.head_mbs - 1)
        middle_step = (after - head) // pair
        final_step = (after - head - middle) // self.mb_blocks
        step = select(in_head, head_step, select(in_middle, middle_step, final_step))
        offset = select(
            in_head,
            after - head_step * head_unit,
            select(
                in_middle,
                after - head - middle_step * pair,
                after - head - middle - final_step * self.mb_blocks,
            ),
        )
        position = select(
            in_head,
            step,
            self.head_mbs
            + select(in_middle, step, maximum(self.macrobatches - 2, zero) * self.ring_mbs + step),
        )
        combined = self.minibatch_at(position)
        combined_blocks = self.blocks_in(combined)
        is_combine = offset < combined_blocks
        later_minibatch = select(is_combine, combined, combined - self.ring_mbs)
        later_block = later_minibatch * self.mb_blocks + select(
            is_combine, offset, offset - combined_blocks
        )
        is_fresh = at < fresh
        block = select(is_fresh, fresh_block, later_block)
        return Item(
            kind=select(
                is_fresh, DISPATCH + zero, select(is_combine, COMBINE + zero, DISPATCH + zero)
            ),
            row=block * self.tile.m + within * self.tile.comm_m,
            minibatch=block // self.mb_blocks,
        )

    def _dispatch(self, at: Int, within: Int) -> Item:
        """Of dispatches alone: as minibatches are processed, so the slots that one refills are done the earliest."""
        head_base = self.head_first_mb * self.mb_blocks
        behind = self.ops.maximum(at - self.head_blocks, 0 * at)
        step = behind // self.mb_blocks
        first = self.minibatch_at(self.head_mbs + step) * self.mb_blocks
        later = first + behind - step * self.mb_blocks
        block = self.ops.select(at < self.head_blocks, head_base + at, later)
        return Item(
            kind=DISPATCH + 0 * at,
            row=block * self.tile.m + within * self.tile.comm_m,
            minibatch=block // self.mb_blocks,
        )

    # ---- counters: how many arrivals complete each ----

    def x_ready_target(self, minibatch: Int) -> Int:
        """Dispatch items of a minibatch (awaited by its up tasks)."""
        return self.blocks_in(minibatch) * self.items_per_block

    def hidden_ready_target(self) -> Int:
        """Up tasks of one row block (awaited by the block's down tasks)."""
        return self.n_up * self.tile.signals

    def shared_hidden_ready_target(self) -> Int:
        """Shared up tasks of one row block (awaited by the block's shared down tasks)."""
        return self.shared_n_up * self.tile.signals

    def y_ready_target(self, minibatch: Int) -> Int:
        """Down tasks of a minibatch (awaited by its combine, and by whoever refills its slot)."""
        return self.blocks_in(minibatch) * self.n_down * self.tile.signals

    def y_free_target(self, minibatch: Int) -> Int:
        """Combine items of a minibatch (awaited by the down tasks that overwrite its y rows)."""
        if self.push:
            return 0 * minibatch
        return self.blocks_in(minibatch) * self.items_per_block


class Counters(NamedTuple):
    """Where each counter lies in the kernel's int32 counter array (zeroed before every launch)."""

    ticket: int
    comm_ticket: int
    started: int  # clusters that started or were cancelled
    x_ready: int  # [minibatches]
    y_ready: int  # [minibatches]
    y_free: int  # [minibatches]
    hidden_ready: int  # [blocks]
    shared_hidden_ready: int  # [shared blocks]
    size: int


def counter_layout(max_minibatches: Int, max_blocks: Int, shared_blocks: Int) -> Counters:
    """Offsets in int32 words. The first three have a 128-byte line of their own each."""
    x_ready = 96
    y_ready = x_ready + max_minibatches
    y_free = y_ready + max_minibatches
    hidden_ready = y_free + max_minibatches
    shared = hidden_ready + max_blocks
    return Counters(
        0, 32, 64, x_ready, y_ready, y_free, hidden_ready, shared, shared + shared_blocks
    )
