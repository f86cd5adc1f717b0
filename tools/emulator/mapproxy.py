"""Who may use which edit of a tensor map: the rule of the tensor map proxy.

A bulk copy reads its map through a proxy of its own.  What a kernel has written to a map is visible
there only after a release to the proxy that follows the write (``fence.proxy.tensormap`` or
``tensormap.cp_fenceproxy``), then an acquire of the map's address by a thread of the CTA that issues
the copy; each step must happen before the next one.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mok.tools.emulator import layout as L
from mok.tools.emulator import race

if TYPE_CHECKING:
    from mok.tools.emulator.checkers import Checker
    from mok.tools.emulator.resident import Cta, Warp

_WORDS = 16  # of a tensor map, those that mean something
_SCOPES = {"cta": 0, "cluster": 1, "gpu": 2, "sys": 3}


@dataclass(frozen=True)
class _Release:
    """A release: its warp and moment, what happened before it, and whom it reaches."""

    agent: int
    epoch: int
    clock: np.ndarray
    scope: int
    cta: tuple[int, int]  # cluster number, rank

    def reaches(self, cta: tuple[int, int], scope: int) -> bool:
        narrow = min(scope, self.scope)
        return narrow >= 2 or (self.cta == cta if narrow == 0 else self.cta[0] == cta[0])


@dataclass(frozen=True)
class _Acquire:
    """An acquire of one map: its warp and moment, and the writes that it makes visible."""

    agent: int
    epoch: int
    writes: frozenset[int]


def _name(cta: "Cta") -> tuple[int, int]:
    return cta.cluster.number, cta.rank


class MapProxy:
    """Releases and acquires of one launch."""

    def __init__(self, checker: "Checker") -> None:
        self.checker = checker
        self.releases: list[_Release] = []

    def release(self, w: "Warp", mods: tuple[str, ...]) -> None:
        """What the warp has written, or knows to be written, is released to the proxy."""
        row = self.checker.tick(w)
        scope = next(_SCOPES[m] for m in mods if m in _SCOPES)
        epoch = int(row[w.index])
        self.releases.append(_Release(w.index, epoch, row, scope, _name(w.cta)))

    def acquire(self, w: "Warp", address: int, mods: tuple[str, ...]) -> None:
        """Released writes to the map become visible to bulk copies of the warp's CTA."""
        row = self.checker.tick(w)
        scope, name = next(_SCOPES[m] for m in mods if m in _SCOPES), _name(w.cta)
        known = [
            r for r in self.releases if int(row[r.agent]) >= r.epoch and r.reaches(name, scope)
        ]
        visible = frozenset(
            e for e, _ in self._writes(address) if any(_covers(r.clock, e) for r in known)
        )
        table = w.cta.extra.setdefault("tensor maps", {})
        table.setdefault(address, []).append(_Acquire(w.index, int(row[w.index]), visible))

    def use(self, w: "Warp", address: int) -> None:
        """A copy that the warp issues reads the map: reports a write that it may not see."""
        checker = self.checker
        clock, agent = checker.row(w, 0), w.index
        acquires = w.cta.extra.get("tensor maps", {}).get(address, [])
        before = [a for a in acquires if int(clock[a.agent]) >= a.epoch]
        for epoch, pc in self._writes(address):
            if not any(epoch in a.writes for a in before):
                race.report(
                    checker.machine.x.ctypes.data,
                    np.int64(L.F_MAP),
                    np.int64(agent << 32 | int(clock[agent])),
                    np.int64(int(w.state[L.W_PC])),
                    np.int64(-1),
                    np.int64(address),
                    np.int64(epoch),
                    np.int64(pc),
                )
        checker.global_by_warp(w, address, 4 * _WORDS, False)

    def _writes(self, address: int) -> list[tuple[int, int]]:
        """Epochs of the writes that the map's words hold, with their instructions."""
        shadow = self.checker.global_words(address, _WORDS)
        if shadow is None:
            return []
        found = {int(e): int(info) >> 16 & 0xFFFFFFFF for e, info in shadow[:, :2] if e}
        return sorted(found.items())


def _covers(clock: np.ndarray, epoch: int) -> bool:
    return int(clock[epoch >> 32]) >= epoch & 0xFFFFFFFF
