"""Upstream's communication tasks and their order."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mok.tools.simulator.load import RankLoad
from mok.tools.simulator.upstream_costs import HALF, UpstreamCosts
from mok.tools.simulator.work import Ids, Items, no_items

NAMES = ("", "pull", "push")
PULL, PUSH = 1, 2


@dataclass
class Move:
    """A comm task: ``halves`` are the 128-row halves of blocks that it touches."""

    kind: int
    halves: tuple[int, ...]
    waits: Ids
    signals: Ids
    busy: float
    payload: float


@dataclass
class CommPlan:
    """Comm tasks in the order in which each worker takes them.

    A pull moves 128 rows by 512 columns, a push seven tiles of 16 rows by 1024 columns.
    """

    load: RankLoad
    costs: UpstreamCosts
    macrobatches: list[list[int]]
    mb_blocks: int
    blocks: int
    order: list[tuple[int, Move]] = field(default_factory=list)  # (worker, task)

    def __post_init__(self) -> None:
        first = np.arange(2 * self.blocks, dtype=np.int64) * HALF
        self.real = self.load.real_rows(first, HALF)
        tiles = np.arange(16 * self.blocks, dtype=np.int64) * 16
        self.real16 = self.load.real_rows(tiles, 16)

    @staticmethod
    def none() -> Items:
        return no_items()

    def pulls_of(self, blocks: int) -> int:
        """Pull tasks of ``blocks`` row blocks."""
        return 2 * blocks * self.costs.pull_columns

    def _halves(self, macro: list[int]) -> range:
        last = min((macro[-1] + 1) * self.mb_blocks, self.blocks)
        return range(2 * macro[0] * self.mb_blocks, 2 * last)

    def _minibatch(self, half: int) -> int:
        return half // 2 // self.mb_blocks

    def _push_halves(self, macro: list[int]) -> list[tuple[int, ...]]:
        """The halves that each push task of a macrobatch touches."""
        halves, per_half = self._halves(macro), 8 * self.costs.push_columns
        at = np.arange(0, len(halves) * per_half, 7)
        first = halves.start + at // per_half
        last = halves.start + np.minimum(at + 6, len(halves) * per_half - 1) // per_half
        return [tuple(range(a, b + 1)) for a, b in zip(first.tolist(), last.tolist(), strict=True)]

    def push_arrivals(self) -> list[int]:
        """Push tasks that touch each half."""
        found = np.zeros(2 * self.blocks, np.int64)
        for macro in self.macrobatches:
            for touched in self._push_halves(macro):
                found[list(touched)] += 1
        return found.tolist()

    # ---- tasks ----

    def pulls(self, macro: list[int], waits: list[Ids], ready: int) -> list[Move]:
        """Pulls of a macrobatch; ``waits`` per minibatch, signalling ``ready`` + minibatch."""
        columns = self.costs.pull_columns
        widths = [min(512, self.costs.hidden - 512 * c) for c in range(columns)]
        seconds: dict[tuple[int, int], float] = {}
        out = []
        for half in self._halves(macro):
            real, s = int(self.real[half]), self._minibatch(half)
            halves, signal = (half,), (ready + s,)
            for width in widths:
                busy = seconds.get((real, width))
                if busy is None:
                    busy = seconds[real, width] = self.costs.pull_s(real, width, self.load)
                out.append(Move(PULL, halves, waits[s], signal, busy, real * width * 2.0))
        return out

    def pushes(self, macro: list[int], ready: int, signals: list[Ids]) -> list[Move]:
        """Pushes of a macrobatch, once ``ready`` + minibatch is complete; ``signals`` per half."""
        halves = self._halves(macro)
        columns = self.costs.push_columns
        widths = np.minimum(1024, self.costs.hidden - 1024 * np.arange(columns))
        rows = self.real16[8 * halves.start : 8 * halves.stop]
        tiles = (2.0 * rows[:, None] * widths).reshape(-1)  # bytes of each tile, in order
        payloads = np.add.reduceat(tiles, np.arange(0, len(tiles), 7)) if len(tiles) else tiles
        busy = self.costs.push_s(payloads, self.load)
        out = []
        for touched, size, seconds in zip(
            self._push_halves(macro), payloads.tolist(), busy.tolist(), strict=True
        ):
            wait: Ids = (ready + self._minibatch(touched[0]),)
            signal = signals[touched[0]]
            for half in touched[1:]:
                wait = tuple({**dict.fromkeys(wait), ready + self._minibatch(half): None})
                signal = tuple(dict.fromkeys((*signal, *signals[half])))
            out.append(Move(PUSH, touched, wait, signal, seconds, size))
        return out

    def _lay(self, *lists: list[Move]) -> None:
        """Grid-stride loops over the lists at once: one task of each per turn."""
        workers = self.costs.comm_sms
        turns = max((-(-len(found) // workers) for found in lists), default=0)
        for turn in range(turns):
            for found in lists:
                part = found[turn * workers : (turn + 1) * workers]
                self.order += [(w, move) for w, move in enumerate(part)]

    # ---- orders ----

    def forward(self, x_ready: int, y_ready: int, y_free: int, ring: int) -> None:
        """All pulls of the last macrobatch; then, descending, pushes with the next one's pulls."""
        count = -(-self.blocks // self.mb_blocks)
        waits: list[Ids] = [(y_ready + s + ring,) if s + ring < count else () for s in range(count)]
        free: list[Ids] = [(y_free + half,) for half in range(2 * self.blocks)]
        macros = self.macrobatches[::-1]
        if macros:
            self._lay(self.pulls(macros[0], waits, x_ready))
        for m, macro in enumerate(macros):
            later = macros[m + 1] if m + 1 < len(macros) else None
            pulls = self.pulls(later, waits, x_ready) if later else []
            self._lay(self.pushes(macro, y_ready, free), pulls)

    def backward(
        self, dy_ready: int, x_ready: int, dx_ready: int, free: int, owner: list[int], ring: int
    ) -> None:
        """Per macrobatch: pull dy (and x, where it is replayed), then push dx.

        ``owner`` gives the index of the counter (from ``free`` on) that says when a minibatch's
        slot is free again: the minibatch itself, or its whole macrobatch.
        """
        count = len(owner)
        waits: list[Ids] = [() if s < ring else (free + owner[s - ring],) for s in range(count)]
        signals: list[Ids] = [
            (free + owner[self._minibatch(half)],) for half in range(2 * self.blocks)
        ]
        slots = owner == list(range(count))
        macros = self.macrobatches
        for m, macro in enumerate(macros):
            if m == 0 or not slots:
                self._bring(macro, m, waits, dy_ready, x_ready)
            pushes = self.pushes(macro, dx_ready, signals)
            if slots and m + 1 < len(macros):
                # Slots are refilled as they become free, in turn with the pushes.
                pulls = self._pulled(macros[m + 1], m + 1, waits, dy_ready, x_ready)
                self._lay(pushes, pulls)
            else:
                self._lay(pushes)

    def _pulled(
        self, macro: list[int], m: int, waits: list[Ids], dy_ready: int, x_ready: int
    ) -> list[Move]:
        found = []
        for s in macro:
            if m:
                found += self.pulls([s], waits, x_ready)
            found += self.pulls([s], waits, dy_ready)
        return found

    def _bring(
        self, macro: list[int], m: int, waits: list[Ids], dy_ready: int, x_ready: int
    ) -> None:
        self._lay(self._pulled(macro, m, waits, dy_ready, x_ready))

    def items(self) -> Items:
        """The tasks as the engine takes them."""
        moves = [move for _, move in self.order]
        kind = np.array([move.kind for move in moves], np.int64)
        payload = np.array([move.payload for move in moves])
        rx, tx, net = self.costs.costs.wires(kind == PULL, payload, self.load)
        return Items(
            NAMES,
            kind.tolist(),
            [move.busy for move in moves],
            rx.tolist(),
            tx.tolist(),
            net.tolist(),
            (2 * payload).tolist(),
            [move.waits for move in moves],
            [move.signals for move in moves],
            [self._minibatch(move.halves[0]) for move in moves],
            [worker for worker, _ in self.order],
        )
