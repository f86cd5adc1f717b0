"""The checkers' Python side: clocks and shadow memory of a machine, asynchronous agents."""

import os
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mok.tools.emulator import clocks, phases, race
from mok.tools.emulator import layout as L
from mok.tools.emulator.errors import LaunchError, Where
from mok.tools.emulator.mapproxy import MapProxy

if TYPE_CHECKING:
    from mok.tools.emulator.asyncops import Pending
    from mok.tools.emulator.machine import Machine
    from mok.tools.emulator.resident import Cta, Warp

SLOTS_PER_CTA = 64
TMEM_BASE = -(1 << 40)  # reports name TMEM columns by addresses from here on, four bytes each
MAX_GLOBAL_SHADOW = 128 << 20  # bytes of global memory tracked at most


@dataclass
class Agent:
    """One asynchronous operation: its place among the agents and what happened before it."""

    slot: int
    epoch: int  # its clock value
    clock: np.ndarray
    proxy: np.ndarray
    pc: int

    @property
    def tag(self) -> np.int64:
        return np.int64(self.slot << 32 | self.epoch)


@dataclass(frozen=True)
class Finding:
    """One report of a checker."""

    rule: str
    where: str
    other: str  # the other side, empty where there is none
    address: str
    lane: int
    at: Where

    def __str__(self) -> str:
        text = f"{self.rule} at {self.address}: {self.where}"
        return f"{text}\n    against {self.other}" if self.other else text


class Checker:
    """Clocks, shadow memory and findings of one launch."""

    def __init__(self, machine: "Machine") -> None:
        self.machine = machine
        warps, ctas = len(machine.warps), len(machine.ctas)
        self.num_warps = warps
        self.first_slot = 3 * warps  # after the warps, their cp.async, their generic writes
        self.slots = SLOTS_PER_CTA * ctas
        agents = self.first_slot + self.slots
        objects = 1 << 14
        while objects > 1024 and objects * clocks.ROWS_PER_OBJECT * agents * 4 > 192 << 20:
            objects //= 2
        self.agents = agents
        rows = warps * clocks.ROWS_PER_WARP + objects * clocks.ROWS_PER_OBJECT
        self._refuse(ctas, 4 * rows * agents)
        self.clocks = np.zeros((rows, agents), dtype=np.int32)
        self.keys = np.zeros(objects + 64, dtype=np.int64)
        self.owners = np.zeros((objects + 64, clocks.OWNER_WORDS), dtype=np.int64)
        self.reports = np.zeros((race.MAX_REPORTS, race.REPORT_WORDS), dtype=np.int64)
        self.slot_epoch = np.zeros(self.slots, dtype=np.int64)
        self.slot_op: list[Pending | None] = [None] * self.slots
        # Lives of warps, one per CTA: the warp, the CTA, and the warp's first epoch.
        self.lives: list[tuple[int, tuple[int, int, int], int]] = []
        self.lives_of: list[list[int]] = [[] for _ in range(warps)]
        # Of each slot, by the epochs of its operations: the life that has issued them.
        self.issuers = [array("l") for _ in range(self.slots)]
        self.next_slot = 0
        self.agent: Agent | None = None  # the operation whose step runs now
        self.maps = MapProxy(self)
        words = machine.smem_size // 4
        self.shadow = np.zeros((ctas, words + 16, 8), dtype=np.int64)
        self.global_shadow: list[np.ndarray | None] = []
        self.tmem_shadow: dict[int, np.ndarray] = {}
        x = machine.x
        x[L.X_CHECK] = 1
        x[L.X_VC] = self.clocks.ctypes.data
        x[L.X_NAGENTS] = agents
        x[L.X_OBJECTS], x[L.X_OBJECT_MASK] = self.keys.ctypes.data, objects - 1
        x[L.X_OWNERS] = self.owners.ctypes.data
        x[L.X_REPORTS] = self.reports.ctypes.data
        self._global_shadow()
        for i, w in enumerate(machine.warps):
            w.state[L.W_AGENT] = i
        for cta in machine.ctas:
            cta.on_read = self.smem_chunks

    @staticmethod
    def _refuse(ctas: int, need: int) -> None:
        """Every warp has a clock of every other one: they grow with the square of the CTAs."""
        have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if need > have // 2:
            raise LaunchError(
                "the checkers' clocks of all CTAs at once must fit half of the memory",
                f"{need / 2**30:.1f} GiB for {ctas} CTAs, of {have / 2**30:.1f} GiB",
                "use fewer CTAs at once (num_sms), a smaller grid or block, or check=False",
            )

    def _global_shadow(self) -> None:
        m = self.machine
        n = int(m.x[L.X_NRANGES])
        if n == 0:
            return
        table = np.zeros(n, dtype=np.int64)
        total = 0
        self.global_shadow = [None] * n
        for i in sorted(range(n), key=lambda i: m.memory[i].number):  # those registered first
            start, end = (int(v) for v in m.ranges[i])
            total += end - start
            if total <= MAX_GLOBAL_SHADOW:
                array = np.zeros(((end + 3) // 4 - start // 4 + 4, 8), dtype=np.int64)
                table[i] = array.ctypes.data
                self.global_shadow[i] = array
        self.global_table = table
        m.x[L.X_GSHADOW] = table.ctypes.data
        if any(r.start in m.written for r in m.memory):
            # Kept: others may be registered before a queued launch runs.
            self.written = [m.written.get(r.start) for r in m.memory]
            self.written_table = np.array(
                [0 if masks is None else masks.ctypes.data for masks in self.written],
                dtype=np.int64,
            )
            m.x[L.X_WRITTEN] = self.written_table.ctypes.data

    # -- CTAs and warps ---------------------------------------------------------------

    def start_cta(self, cta: "Cta") -> None:
        shadow = self.shadow[cta.index]
        shadow[:] = 0
        cta.cluster.state[L.L_SHADOW + cta.rank] = shadow.ctypes.data

    def start_warp(self, w: "Warp") -> None:
        w.state[L.W_AGENT] = w.index
        clocks.start_warp(self.machine.x.ctypes.data, w.state.ctypes.data)
        self.lives_of[w.index].append(len(self.lives))
        self.lives.append((w.index, w.cta.coords, int(self.row(w, 0)[w.index])))

    def row(self, w: "Warp", which: int) -> np.ndarray:
        """A warp's clock (0), or what of it the asynchronous proxy sees (1)."""
        row: np.ndarray = self.clocks[w.index * clocks.ROWS_PER_WARP + which]
        return row

    def tick(self, w: "Warp") -> np.ndarray:
        """What has happened before this moment of a warp; what follows is a new epoch of it."""
        own = self.row(w, 0)
        before = own.copy()
        own[w.index] += 1
        own[2 * self.num_warps + w.index] = own[w.index]
        return before

    # -- asynchronous agents ----------------------------------------------------------

    def begin(self, w: "Warp", pc: int) -> Agent:
        """A new asynchronous operation, issued now by a warp."""
        for _ in range(self.slots):
            slot = self.next_slot
            self.next_slot = (slot + 1) % self.slots
            op = self.slot_op[slot]
            if op is None or op.finished:
                break
        self.slot_epoch[slot] += 1
        epoch = int(self.slot_epoch[slot])
        clock, proxy = self.tick(w), self.row(w, 1).copy()
        place = self.first_slot + slot
        clock[place] = epoch
        self.issuers[slot].append(self.lives_of[w.index][-1])
        return Agent(place, epoch, clock, proxy, pc)

    def own(self, agent: Agent, op: "Pending") -> None:
        self.slot_op[agent.slot - self.first_slot] = op

    def advance(self, agent: Agent) -> None:
        """The operation's second phase: its later accesses are not covered by its first."""
        i = agent.slot - self.first_slot
        self.slot_epoch[i] += 1
        self.issuers[i].append(self.issuers[i][agent.epoch - 1])
        agent.epoch = int(self.slot_epoch[i])
        agent.clock[agent.slot] = agent.epoch

    def observe(self, w: "Warp", agent: Agent, epoch: int | None = None) -> None:
        """A warp has waited for the operation, or for its phase that ended with ``epoch``."""
        row = self.row(w, 0)
        if epoch is None:
            np.maximum(row, agent.clock, out=row)
        row[agent.slot] = max(int(row[agent.slot]), epoch or agent.epoch)

    def signal(self, agent: Agent, host: int) -> None:
        """The operation's completion is published through the mbarrier at ``host``."""
        x = self.machine.x.ctypes.data
        other = phases.early(x, np.int64(host), agent.clock.ctypes.data)
        if other:
            none, pc = np.int64(-1), np.int64(agent.pc)
            race.report(
                x, np.int64(L.F_EARLY), agent.tag, pc, none, np.int64(host), np.int64(other), none
            )
        clocks.publish_clock(
            self.machine.x.ctypes.data,
            np.int64(host),
            agent.clock.ctypes.data,
            agent.proxy.ctypes.data,
        )

    def flip(self, host: int) -> None:
        clocks.flip(self.machine.x.ctypes.data, np.int64(host))

    # -- accesses of the running operation --------------------------------------------

    def _check(
        self,
        shadow: int,
        count: int,
        kind: int,
        address: int,
        uninit: bool,
        rows: int = 1,
        pitch: int = 0,
        written: int = 0,
    ) -> None:
        a = self.agent
        if a is not None:
            race.check_rows(
                self.machine.x.ctypes.data,
                np.int64(shadow),
                np.int64(count),
                np.int64(rows),
                np.int64(pitch),
                np.int64(kind),
                a.tag,
                a.clock.ctypes.data,
                a.proxy.ctypes.data,
                np.int64(a.pc),
                np.int64(address),
                uninit,
                np.int64(written),
            )

    def smem(self, cta: "Cta", offset: int, size: int, write: bool, more: int = 0) -> None:
        base = self.shadow[cta.index].ctypes.data + race.RECORD * (offset >> 2)
        kind = (race.WRITE if write else race.READ) | race.ASYNC | more
        self._check(base, size >> 2, kind, cta.smem.ctypes.data + offset, not write)

    def smem_chunks(self, cta: "Cta", chunks: np.ndarray) -> None:
        a = self.agent
        if a is None:
            return
        flat = np.ascontiguousarray(chunks.reshape(-1), dtype=np.int64)
        race.check_chunks(
            self.machine.x.ctypes.data,
            np.int64(self.shadow[cta.index].ctypes.data),
            flat.ctypes.data,
            np.int64(flat.size),
            np.int64(race.ASYNC | race.MMA),
            a.tag,
            a.clock.ctypes.data,
            a.proxy.ctypes.data,
            np.int64(a.pc),
            np.int64(cta.smem.ctypes.data),
        )

    def global_memory(
        self,
        address: int,
        size: int,
        write: bool,
        rows: int = 1,
        pitch: int = 0,
        atomic: bool = False,
    ) -> None:
        """``rows`` ranges of one tensor, ``pitch`` bytes (a multiple of 4) apart."""
        count = ((address + size + 3) >> 2) - (address >> 2)
        words = self.global_words(address, count)
        if words is not None:
            kind = (race.WRITE if write else race.READ) | race.ASYNC
            kind |= race.STRONG | race.UPDATE if atomic else 0
            written = self._written(address)
            self._check(words.ctypes.data, count, kind, address, False, rows, pitch, written)

    def global_by_warp(self, w: "Warp", address: int, size: int, write: bool) -> None:
        """A generic access to whole words that a warp makes through a Python handler."""
        words = self.global_words(address, size >> 2)
        if words is not None:
            self._by_warp(w, words.ctypes.data, size >> 2, write, address, False)
            written = self._written(address)
            if written:
                race.check_written(
                    self.machine.x.ctypes.data,
                    np.int64(written),
                    np.int64(size >> 2),
                    np.int64(15),
                    np.int64(int(write)),
                    np.int64(w.index << 32 | int(self.row(w, 0)[w.index])),
                    np.int64(int(w.state[L.W_PC])),
                    np.int64(-1),
                    np.int64(address),
                )

    def _written(self, address: int) -> int:
        """Where the byte of a word's written bytes is; 0 where they are not followed."""
        m = self.machine
        if not m.x[L.X_WRITTEN]:
            return 0
        i = int(np.searchsorted(m.ranges[: len(m.memory), 0], address, side="right")) - 1
        first = int(self.written_table[i])
        return first and first + (address >> 2) - (int(m.ranges[i, 0]) >> 2)

    def global_words(self, address: int, count: int) -> np.ndarray | None:
        """Shadow records of ``count`` words of registered global memory; None where not tracked."""
        m = self.machine
        n = int(m.x[L.X_NRANGES])
        i = int(np.searchsorted(m.ranges[:n, 0], address, side="right")) - 1
        array = self.global_shadow[i] if i >= 0 else None
        if array is None:
            return None
        first = (address >> 2) - (int(m.ranges[i, 0]) >> 2)
        return array[first : first + count]

    def tmem(self, sm: int, lanes: np.ndarray, first: int, count: int, write: bool) -> None:
        """TMEM that the running operation touches, in units of 16 lanes and one column."""
        for g in lane_groups(lanes):
            self._check(
                self._tmem_base(sm, g, first), count, int(write), TMEM_BASE + 4 * first, False
            )

    def smem_by_warp(self, w: "Warp", cta: "Cta", offset: int, size: int, write: bool) -> None:
        """A generic access that a warp makes through a Python handler."""
        base = self.shadow[cta.index].ctypes.data + race.RECORD * (offset >> 2)
        self._by_warp(w, base, size >> 2, write, cta.smem.ctypes.data + offset, not write)

    def _by_warp(
        self, w: "Warp", shadow: int, count: int, write: bool, address: int, uninit: bool
    ) -> None:
        clock, proxy = self.row(w, 0), self.row(w, 1)
        # Tensor memory (address < 0) is handed over by arrivals of any scope, as other order is.
        agent = w.index + (2 * self.num_warps if write and address >= 0 else 0)
        tag = np.int64(agent << 32 | int(clock[agent]))
        race.check_range(
            self.machine.x.ctypes.data,
            np.int64(shadow),
            np.int64(count),
            np.int64(int(write)),
            tag,
            clock.ctypes.data,
            proxy.ctypes.data,
            np.int64(int(w.state[L.W_PC])),
            np.int64(address),
            uninit,
        )

    def tmem_by_warp(
        self, w: "Warp", sm: int, lanes: np.ndarray, first: int, count: int, write: bool
    ) -> None:
        for g in lane_groups(lanes):
            base = self._tmem_base(sm, g, first)
            self._by_warp(w, base, count, write, TMEM_BASE + 4 * first, not write)

    def _tmem_base(self, sm: int, group: int, first: int) -> int:
        array = self.tmem_shadow.setdefault(sm, np.zeros((8, 512, 8), dtype=np.int64))
        return int(array[group, first].ctypes.data)

    def tmem_clear(self, sm: int, first: int, count: int) -> None:
        array = self.tmem_shadow.setdefault(sm, np.zeros((8, 512, 8), dtype=np.int64))
        array[:, first : first + count] = 0

    # -- findings ---------------------------------------------------------------------

    def findings(self) -> list[Finding]:
        """Everything reported so far."""
        if self.machine.x[L.X_CROWDED]:
            self.machine.warn(
                "more barriers and flags than the checkers can follow: some of the races that are reported "
                "may be none; give the emulator fewer SMs"
            )
        from mok.tools.emulator.places import locate

        out = []
        for i in range(int(self.machine.x[L.X_NREPORTS])):
            kind, epoch, pc, lane, address, other, other_pc, _ = (int(v) for v in self.reports[i])
            second = (
                ""
                if kind in (L.F_UNINIT, L.F_UNWRITTEN, L.F_MISSED)
                else self._who(other, other_pc)
            )
            rule, place = L.FAULT_TEXT[kind], ""
            if address < 0:
                place = f"TMEM column {(address - TMEM_BASE) // 4}"
                rule = rule.replace("shared memory", "tensor memory")
            else:
                place = locate(self.machine, address)
            _, at = self._where(epoch, pc)
            out.append(Finding(rule, self._who(epoch, pc), second, place, lane, at))
        return out

    def _who(self, epoch: int, pc: int) -> str:
        """One side of a finding in words; without an instruction when ``pc`` is negative."""
        kind, at = self._where(epoch, max(pc, 0))
        return kind + (str(at) if pc >= 0 else f"CTA {at.cta} warp {at.warp}")

    def _where(self, epoch: int, pc: int) -> tuple[str, Where]:
        m, agent, moment = self.machine, epoch >> 32, epoch & 0xFFFFFFFF
        if agent >= self.first_slot:
            warp, coords, _ = self.lives[self.issuers[agent - self.first_slot][moment - 1]]
            return "operation of ", m.where(m.warps[warp], pc, coords)
        warp = agent % self.num_warps
        copy = self.num_warps <= agent < 2 * self.num_warps
        lives = [self.lives[i] for i in reversed(self.lives_of[warp])]
        # A copy's epoch counts copies: it names the CTA that is there now.
        coords = next((c for _, c, start in lives if copy or start <= moment), lives[0][1])
        return "copy of " if copy else "", m.where(m.warps[warp], pc, coords)


def lane_groups(lanes: np.ndarray) -> list[int]:
    """Groups of 16 TMEM lanes that have some of these."""
    return [int(g) for g in np.flatnonzero(np.bincount(lanes.ravel() >> 4))]


def use(checker: Any, agent: Any) -> Any:
    """Makes ``agent`` the running operation; returns the one before."""
    if checker is None:
        return None
    before, checker.agent = checker.agent, agent
    return before
