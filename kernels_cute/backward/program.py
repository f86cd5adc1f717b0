"""The task program of the backward pass. ``program`` states the rules; this is backward's order.

Backward ascends: macrobatch 0 uses what forward saved, each later one is replayed first. Total order:

    shared expert: dgrad down, dgrad gate+up, weight gradients,
    dispatch of macrobatch 0 (ring only),
    for each minibatch s, ascending:
        replay up(s)            only from macrobatch 1 on
        dgrad down(s)           d = dy·W_down; swiglu backward; router-weight partials
        dgrad gate+up(s)        dx rows
        weight gradients        of each group whose last row of the macrobatch lies in s
        push(s)                 ring only: dx rows and router-weight gradients to their tokens' ranks
        dispatch(next slots)    ring only: into each slot that has become free with these groups
    weight gradients of experts without rows (zeros).

With ``push``, dgrad gate+up itself sends its rows to their slots: there is no push, and nobody waits for one.

With ``ahead``, that many of the tasks in front of dgrad gate+up(s + 1) come before dgrad gate+up(s), as in forward,
where the slot of s + 1 is free before s: an expert as large as the ring frees all its slots at once, behind it.

A *group* is one expert's rows in one macrobatch: an expert that crosses macrobatch boundaries has several
groups, whose accumulator travels in FP32. A slot is free again when every group that overlaps its minibatch
is done. Which groups follow which minibatch depends on the routing, so a small kernel
(``plan_kernel``) writes the tables that ``Plan`` describes; ``make_plan`` is the same in Python.
"""

from typing import Any, NamedTuple

from ..invariant import Invariant
from ..machine import Machine
from ..program import IDLE, PY, Int, Tile

END, REPLAY, DDOWN, DX, WDOWN, WGATE, WUP = 0, 1, 2, 3, 4, 5, 6
assert IDLE > WUP
SHARED = 8  # added to a kind: the same task of the shared expert

# Kinds of comm item.
DISPATCH, PUSH = 1, 2

# Tables per minibatch s, each with one entry more than there are minibatches.
TASK_BASE, GROUP_BASE, ITEM_BASE, FREE_BASE, OVERLAPS, AHEAD_OF = range(6)
TABLES = 6
MIN_AHEAD = (
    4  # slots: with fewer, compute would wait for the refill of the one that it has just left
)
# Words per group: expert, first block, end block, has an earlier group, has a later group.
GROUP_WORDS = 5


class Task(NamedTuple):
    """A compute task. ``m`` (of H) and ``n`` (of I) are a weight gradient's tile, ``group`` its group."""

    kind: Int
    block: Int
    m: Int
    n: Int
    minibatch: Int
    group: Int


class Item(NamedTuple):
    """A comm item: ``kind``, first row ``row`` (of ``Tile.comm_m``) and ``minibatch``."""

    kind: Int
    row: Int
    minibatch: Int


def backward_tile(machine: Machine, group_m: int | None = None, comm_m: int = 64) -> Tile:
    """Task sizes of the backward kernel; ``group_m`` None for the machine's default."""
    return Tile(
        m=machine.tile_m,
        up_n=128,
        down_n=256,
        group_m=machine.group_m if group_m is None else group_m,
        comm_m=comm_m,
        signals=machine.ctas,
    )


class Backward(Invariant):
    """Counts of the backward program of one rank; arguments as ``program.Forward``.

    Args:
        experts: El, this rank's experts.
        ahead: tasks of the next minibatch that go before a minibatch's dgrad gate+up.
        push: dgrad gate+up sends its rows itself; comm items are dispatches alone.
    """

    def __init__(
        self,
        rows: Int,
        tokens: Int,
        hidden: Int,
        intermediate: Int,
        shared_intermediate: Int,
        experts: Int,
        minibatch: Int,
        macrobatch: Int,
        tile: Tile,
        ops: Any = PY,
        ahead: Int = 0,
        push: bool = False,
    ):
        self.tile = tile
        self.push = push
        self.ops = ops
        self.ahead = ahead
        self.experts = experts
        self.blocks = rows // tile.m
        self.mb_blocks = minibatch // tile.m
        self.ring_mbs = macrobatch // minibatch
        self.ring_blocks = self.mb_blocks * self.ring_mbs
        self.minibatches = (self.blocks + self.mb_blocks - 1) // self.mb_blocks

        def columns(size: Int, width: int) -> Int:
            return (size + width - 1) // width

        self.n_up = columns(intermediate, tile.up_n)
        self.n_ddown = columns(intermediate, tile.down_n)
        self.n_dx = columns(hidden, tile.down_n)
        # The tiles of all three weight gradients are counted along H and I: tile.m of H, down_n of I.
        self.w_m, self.w_n = columns(hidden, tile.m), self.n_ddown
        self.w_tasks = self.w_m * self.w_n
        self.group_tasks = 3 * self.w_tasks

        self.shared_blocks = ops.select(
            shared_intermediate > 0, columns(tokens, tile.m), 0 * tokens
        )
        has_shared = ops.select(shared_intermediate > 0, 1 + 0 * tokens, 0 * tokens)
        self.shared_n_ddown = columns(shared_intermediate, tile.down_n)
        self.shared_w_tasks = self.w_m * self.shared_n_ddown
        self.shared_ddown_tasks = self.shared_blocks * self.shared_n_ddown
        self.shared_dx_tasks = self.shared_blocks * self.n_dx
        self.shared_tasks = (
            self.shared_ddown_tasks + self.shared_dx_tasks + has_shared * 3 * self.shared_w_tasks
        )

    def blocks_in(self, minibatch: Int) -> Int:
        """Row blocks of ``minibatch``; all have ``mb_blocks`` except the very last."""
        return self.ops.minimum(self.mb_blocks, self.blocks - minibatch * self.mb_blocks)

    def is_replayed(self, minibatch: Int) -> Any:
        """Whether the minibatch lies beyond the saved macrobatch."""
        return minibatch >= self.ring_mbs

    def leading(self, minibatch: Int) -> Int:
        """Tasks of a minibatch in front of its dgrad gate+up: replay and dgrad down."""
        replayed = self.ops.select(self.is_replayed(minibatch), self.n_up, 0 * self.n_up)
        return self.blocks_in(minibatch) * (self.n_ddown + replayed)

    def ahead_of(self, minibatch: Int, free: Int) -> Int:
        """How many of them go before dgrad gate+up of the minibatch before.

        ``free``: minibatches whose slot is free before that one.
        """
        zero = 0 * minibatch
        goes = (minibatch > 0) & (minibatch < self.minibatches)
        goes = goes & (free + self.ring_mbs > minibatch) & (zero + self.ring_mbs >= MIN_AHEAD)
        count = self.ops.minimum(self.ahead + zero, self.leading(minibatch))
        return self.ops.select(goes, count, zero)

    def tasks_of(self, minibatch: Int, groups: Int, gone: Int, following: Int) -> Int:
        """Compute tasks of a minibatch's stretch, which ``groups`` groups end.

        Of its own leading tasks ``gone`` went ahead; ``following`` of the next minibatch's are in it.
        """
        own = self.leading(minibatch) + self.blocks_in(minibatch) * self.n_dx - gone
        return own + following + groups * self.group_tasks

    def place(self, minibatch: Int, offset: Int, gone: Int, following: Int) -> tuple[Int, Int]:
        """(minibatch, offset in its tasks) of task ``offset`` of a stretch; arguments as of ``tasks_of``."""
        select = self.ops.select
        own = self.leading(minibatch) - gone
        is_own, is_next = offset < own, (offset >= own) & (offset < own + following)
        after = select(is_next, offset - own, offset - following + gone)
        return select(is_next, minibatch + 1, minibatch), select(is_own, offset + gone, after)

    # ---- compute tasks ----

    def total_tasks(self, tasks_end: Int, groups: Int) -> Int:
        """All compute tasks. ``tasks_end`` = TASK_BASE[minibatches] (which counts the shared tasks),
        ``groups`` = all groups, those of empty experts included."""
        return tasks_end + groups * self.group_tasks

    def shared_task(self, ticket: Int) -> Task:
        """The shared expert's task ``ticket`` < ``shared_tasks``."""
        select = self.ops.select
        zero = 0 * ticket
        after_ddown = ticket - self.shared_ddown_tasks
        after_dx = after_ddown - self.shared_dx_tasks
        is_ddown, is_dx = after_ddown < 0, after_dx < 0
        within = select(is_ddown, ticket, after_ddown)
        n_tiles, blocks = select(is_ddown, self.shared_n_ddown, self.n_dx), self.shared_blocks
        block, n = self._raster(within, blocks, n_tiles)
        kind, m, wn = self._weight_task(after_dx, self.shared_w_tasks, self.shared_n_ddown)
        kind = select(is_ddown, DDOWN + zero, select(is_dx, DX + zero, kind))
        return Task(kind + SHARED, select(is_dx, block, zero), m, select(is_dx, n, wn), zero, zero)

    def routed_task(self, minibatch: Int, offset: Int, group_base: Int) -> Task:
        """Task ``offset`` of ``minibatch``; ``group_base`` = GROUP_BASE[minibatch]."""
        select = self.ops.select
        zero = 0 * offset
        blocks = self.blocks_in(minibatch)
        replay_tasks = select(self.is_replayed(minibatch), blocks * self.n_up, zero)
        after_replay = offset - replay_tasks
        after_ddown = after_replay - blocks * self.n_ddown
        after_dx = after_ddown - blocks * self.n_dx
        is_replay, is_ddown, is_dx = after_replay < 0, after_ddown < 0, after_dx < 0
        first = minibatch * self.mb_blocks
        within = select(is_replay, offset, select(is_ddown, after_replay, after_ddown))
        n_tiles = select(is_replay, self.n_up, select(is_ddown, self.n_ddown, self.n_dx))
        block, n = self._raster(within, blocks, n_tiles)
        kind, m, wn, group = self.weight_task(after_dx)
        kind = select(
            is_replay, REPLAY + zero, select(is_ddown, DDOWN + zero, select(is_dx, DX + zero, kind))
        )
        return Task(
            kind=kind,
            block=first + select(is_dx, block, zero),
            m=m,
            n=select(is_dx, n, wn),
            minibatch=minibatch,
            group=group_base + group,
        )

    def weight_task(self, offset: Int) -> tuple[Int, Int, Int, Int]:
        """(kind, m, n, group) of weight-gradient task ``offset`` counted from the first group."""
        group = offset // self.group_tasks
        kind, m, n = self._weight_task(offset - group * self.group_tasks, self.w_tasks, self.w_n)
        return kind, m, n, group

    def _weight_task(self, offset: Int, tasks: Int, n_tiles: Int) -> tuple[Int, Int, Int]:
        which = offset // self.ops.maximum(tasks, 1 + 0 * offset)
        m, n = self._raster(offset - which * tasks, self.w_m, n_tiles)
        return WDOWN + which, m, n

    def _raster(self, offset: Int, blocks: Int, n_tiles: Int) -> tuple[Int, Int]:
        """As in ``program.Forward``: groups of ``group_m`` row tiles, rows fastest inside."""
        group = self.tile.group_m
        one = 1 + 0 * offset
        n_tiles = self.ops.maximum(n_tiles, one)
        which = offset // (group * n_tiles)
        rest = offset - which * (group * n_tiles)
        height = self.ops.maximum(self.ops.minimum(blocks - which * group, group * one), one)
        n = rest // height
        return which * group + (rest - n * height), n

    # ---- comm items, in units of ``items_per_block`` per block ----

    @property
    def items_per_block(self) -> int:
        return self.tile.m // self.tile.comm_m

    @property
    def items(self) -> Int:
        """Every block is dispatched once and, unless its tasks do that, pushed once."""
        return (1 if self.push else 2) * self.blocks * self.items_per_block

    @property
    def first_blocks(self) -> Int:
        """Blocks that are dispatched before the first push: macrobatch 0; all of them, where there are no pushes."""
        return self.blocks if self.push else self.ops.minimum(self.blocks, self.ring_blocks)

    def item_in(self, minibatch: Int, offset: Int, within: Int, free_base: Int) -> Item:
        """Comm block ``offset`` of ``minibatch``: its pushes, then dispatches into freed slots.

        ``free_base`` = FREE_BASE[minibatch]: minibatches whose slots were free before.
        """
        select = self.ops.select
        blocks = self.blocks_in(minibatch)
        is_push = offset < blocks
        refill = (free_base + self.ring_mbs) * self.mb_blocks + offset - blocks
        block = select(is_push, minibatch * self.mb_blocks + offset, refill)
        zero = 0 * offset
        return self._item(select(is_push, PUSH + zero, DISPATCH + zero), block, within)

    def first_item(self, block: Int, within: Int) -> Item:
        """The dispatch of one of ``first_blocks``."""
        return self._item(DISPATCH + 0 * block, block, within)

    def _item(self, kind: Int, block: Int, within: Int) -> Item:
        row = block * self.tile.m + within * self.tile.comm_m
        return Item(kind, row, block // self.mb_blocks)

    # ---- counters ----

    def dispatch_target(self, minibatch: Int) -> Int:
        """Comm items that bring a minibatch in, and that push it."""
        return self.blocks_in(minibatch) * self.items_per_block

    def replay_target(self) -> Int:
        """Replay tasks of one row block (awaited by its dgrad down)."""
        return self.n_up * self.tile.signals

    def ddown_target(self) -> Int:
        """Dgrad-down tasks of one row block (awaited by its dgrad gate+up, and by its weight gradients)."""
        return self.n_ddown * self.tile.signals

    def shared_target(self) -> Int:
        """The same for the shared expert."""
        return self.shared_n_ddown * self.tile.signals

    def group_target(self, arrivals: int) -> Int:
        """Arrivals after which a group's accumulators are kept, ``arrivals`` per task."""
        return self.group_tasks * arrivals

    def dx_target(self, minibatch: Int) -> Int:
        """Tiles of a minibatch's dx rows (awaited by its push)."""
        return self.blocks_in(minibatch) * self.n_dx * self.tile.signals

    def free_target(self, minibatch: Int, overlaps: Int) -> Int:
        """Tasks after which nothing of a minibatch is read any more: its dx tiles and its groups'."""
        tasks = self.blocks_in(minibatch) * self.n_dx + overlaps * self.group_tasks
        return tasks * self.tile.signals


class Plan(NamedTuple):
    """The routing-dependent tables (``tables[TABLES][minibatches + 1]`` and ``groups``)."""

    tables: list[list[int]]
    groups: list[tuple[int, int, int, int, int]]  # those of experts without rows last


def plan_room(max_rows: int, experts: int, minibatch: int, macrobatch: int) -> tuple[int, int, int]:
    """(minibatches, table entries, groups) that suffice for every routing of ``max_rows`` padded rows.

    Each macrobatch boundary makes at most one more group than there are experts.
    """
    minibatches = -(-max_rows // minibatch)
    boundaries = max(0, -(-max_rows // macrobatch) - 1)
    return minibatches, minibatches + 1, experts + boundaries


def make_plan(p: Backward, expert_blocks: list[int]) -> Plan:
    """The plan for experts with ``expert_blocks`` row blocks each (pure Python).

    TASK_BASE[s]: first ticket of minibatch s's stretch, shared tasks included. GROUP_BASE[s]: groups placed before s.
    ITEM_BASE[s]: comm blocks before s. FREE_BASE[s]: minibatches whose slot is free before s.
    OVERLAPS[s]: groups that have rows in s. AHEAD_OF[s]: tasks of s that go before dgrad gate+up(s - 1).
    """
    groups: list[tuple[int, int, int, int, int]] = []
    follows: list[int] = []
    at = 0
    for expert, count in enumerate(expert_blocks):
        first, end = at, at + count
        while first < end:
            stop = min(end, (first // p.ring_blocks + 1) * p.ring_blocks)
            groups.append((expert, first, stop, int(first > at), int(stop < end)))
            follows.append((stop - 1) // p.mb_blocks)
            first = stop
        at = end
    placed = len(groups)
    groups += [(e, 0, 0, 0, 0) for e, count in enumerate(expert_blocks) if count == 0]

    n = p.minibatches
    overlapping = [
        [
            g
            for g in groups[:placed]
            if g[1] < s * p.mb_blocks + p.blocks_in(s) and g[2] > s * p.mb_blocks
        ]
        for s in range(n)
    ]
    freed_by = [(max(g[2] for g in over) - 1) // p.mb_blocks for over in overlapping]
    tables: list[list[int]] = [[0] * (n + 1) for _ in range(TABLES)]
    tables[TASK_BASE][0] = p.shared_tasks
    tables[ITEM_BASE][0] = p.first_blocks
    for s in range(n):
        here = follows.count(s)
        freed = [j for j in range(n) if freed_by[j] == s]
        refills = [j + p.ring_mbs for j in freed if j + p.ring_mbs < n]
        tables[AHEAD_OF][s + 1] = p.ahead_of(s + 1, tables[FREE_BASE][s])
        around = tables[AHEAD_OF][s : s + 2]
        tables[TASK_BASE][s + 1] = tables[TASK_BASE][s] + p.tasks_of(s, here, *around)
        tables[GROUP_BASE][s + 1] = tables[GROUP_BASE][s] + here
        tables[ITEM_BASE][s + 1] = (
            tables[ITEM_BASE][s] + p.blocks_in(s) + sum(p.blocks_in(j) for j in refills)
        )
        tables[FREE_BASE][s + 1] = tables[FREE_BASE][s] + len(freed)
        tables[OVERLAPS][s] = len(overlapping[s])
    return Plan(tables, groups)
