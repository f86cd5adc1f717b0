"""One launch on the emulated device: state arrays, CTA residency and the Python side of a run."""

import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mok.tools.emulator import alu_table, interp
from mok.tools.emulator import layout as L
from mok.tools.emulator.asyncops import AsyncEngine, BulkOps
from mok.tools.emulator.checkers import Checker, Finding
from mok.tools.emulator.encode import Program
from mok.tools.emulator.errors import EmulatorError, KernelFault, LaunchError, Where
from mok.tools.emulator.gpus import LateStores
from mok.tools.emulator.intercept import LaunchRequest
from mok.tools.emulator.places import Range, aligned, fault_place
from mok.tools.emulator.registers import check_exit, check_registers, resident_blocks
from mok.tools.emulator.residency import Competitor, Residency
from mok.tools.emulator.resident import WAIT, Cluster, Cta, Warp

SMEM_RESERVED = 1024  # hardware keeps the first KiB of every CTA's shared memory
POISON = 0x7F


@dataclass(frozen=True)
class Limits:
    """What one architecture offers."""

    arch: str
    max_smem: int = 232448
    smem_per_sm: int = 233472
    max_threads_per_sm: int = 2048
    max_cluster: int = 16
    tmem_columns: int = 0


LIMITS = {
    "sm_90a": Limits("sm_90a"),
    "sm_100a": Limits("sm_100a", tmem_columns=512),
    "sm_103a": Limits("sm_103a", tmem_columns=512),
}


class Machine(Residency, BulkOps):
    """Runs one kernel launch to completion.

    ``handlers`` maps a mnemonic prefix to the function that executes it; the longest prefix wins.
    """

    def __init__(
        self,
        program: Program,
        request: LaunchRequest,
        limits: Limits,
        num_sms: int,
        handlers: dict[str, Callable[..., Any]],
        ranges: list[Range],
        seed: int | None = None,
        global_symbols: dict[str, int] | None = None,
        check: bool = False,
        max_steps: int | None = None,
        competitor: Competitor | None = None,
        gpu: int = 0,
        written: dict[int, np.ndarray] | None = None,
    ) -> None:
        self.check = check
        self.written = (
            {} if written is None else written
        )  # per range, by its start: of each word the bytes written
        self.late = LateStores(self)
        self.gpu, self.memory = gpu, sorted(ranges)
        self.range_gpus = np.array([r.gpu for r in self.memory] or [0], dtype=np.int64)
        self.range_numbers = np.array([r.number for r in self.memory] or [0], dtype=np.int64)
        self.max_steps = max_steps
        self.progress: Callable[[int], None] | None = None
        self.competitor = competitor
        self.program, self.request, self.limits = program, request, limits
        self.num_sms = num_sms
        self.seed = seed
        self.handlers = handlers
        self.global_symbols = global_symbols or {}
        self.engine = AsyncEngine(self, seed)
        self._bind_handlers()
        self._check_launch()
        self._read_params()
        self._allocate()
        self.checker: Checker | None = Checker(self) if check else None
        self.reset_residency(competitor)
        self.idle_rounds = 0
        self.held = False  # a warp must wait for an asynchronous operation
        self.finished = False
        self.python_calls = 0
        self.warnings: list[str] = []

    # -- set-up -----------------------------------------------------------------------

    def release(self) -> None:
        """Drop the registers, a gigabyte for a large grid: a run's objects refer to each other in circles,
        and Python would keep them until it looks for such."""
        self.regs = self.template = np.empty((0, 0, 32), dtype=np.int64)
        for warp in self.warps:
            warp.regs = self.regs

    def _bind_handlers(self) -> None:
        for op in self.program.pyops:
            if op.handler is None:
                op.bind(self.handlers)

    def _check_launch(self) -> None:
        r, limits = self.request, self.limits
        for axis in range(3):
            if r.grid[axis] < 1 or r.grid[axis] % r.cluster[axis]:
                raise LaunchError(
                    "the grid must be a positive multiple of the cluster in every dimension",
                    f"grid {r.grid}, cluster {r.cluster}",
                )
        self.cluster_size = int(np.prod(r.cluster))
        self.threads = int(np.prod(r.block))
        if self.cluster_size > limits.max_cluster:
            raise LaunchError(
                f"a cluster on {limits.arch} has at most {limits.max_cluster} CTAs", r.cluster
            )
        if not 1 <= self.threads <= 1024:
            raise LaunchError("a block has 1 to 1024 threads", r.block)
        required = self.program.kernel.directives.get("reqntid")
        if required and int(np.prod(required)) != self.threads:
            raise LaunchError(f"the kernel was compiled for blocks of {required}", r.block)
        check_registers(self.program, self.threads)
        self.smem_bytes = self.program.static_smem + r.smem_bytes
        if self.smem_bytes > limits.max_smem:
            raise LaunchError(
                f"a block on {limits.arch} has at most {limits.max_smem} bytes of shared memory",
                self.smem_bytes,
            )
        if self.program.module.target != limits.arch:
            raise LaunchError(
                f"this emulator runs {limits.arch}",
                f"the kernel is for {self.program.module.target}",
                "compile for the emulated architecture, or make the emulator for the kernel's",
            )
        from mok.tools.emulator.tcgen05 import check_allocations  # which imports this module

        check_allocations(self.program)

    def _read_params(self) -> None:
        size = max(64, self.program.param_bytes)
        raw = np.zeros(size + 64, dtype=np.uint8)
        shift = -raw.ctypes.data % 64
        self.params = raw[shift : shift + size]
        pointers = (ctypes.c_uint64 * len(self.program.kernel.params)).from_address(
            self.request.arg_pointers
        )
        for p, pointer in zip(self.program.kernel.params, pointers, strict=True):
            data = ctypes.string_at(pointer, p.size)
            self.params[p.offset : p.offset + p.size] = np.frombuffer(data, dtype=np.uint8)

    def _allocate(self) -> None:
        r, limits = self.request, self.limits
        per_sm = max(
            1,
            min(
                limits.smem_per_sm // (self.smem_bytes + SMEM_RESERVED),
                limits.max_threads_per_sm // (-(-self.threads // 32) * 32),
                min(resident_blocks(self.program, self.threads), 32),
            ),
        )
        self.cluster_grid = tuple(g // c for g, c in zip(r.grid, r.cluster, strict=True))
        self.num_clusters = int(np.prod(self.cluster_grid))
        capacity = self.num_sms * per_sm // self.cluster_size
        if capacity < 1:
            raise LaunchError(
                "a cluster must fit the emulated SMs",
                f"{self.num_sms} SMs, cluster {r.cluster}",
                "give the emulator more SMs",
            )
        # Beside a competing grid a cluster may have to run on another SM than the next free one.
        slots = capacity if self.competitor else min(self.num_clusters, capacity)
        warps_per_cta = -(-self.threads // 32)
        num_ctas = slots * self.cluster_size
        num_warps = num_ctas * warps_per_cta
        self.warps_per_cta = warps_per_cta
        rows = self.program.num_rows
        self._check_memory(num_ctas, num_warps)
        self.template = np.zeros((rows, 32), dtype=np.int64)
        for row, value in self.program.constants:
            self.template[row] = value - (1 << 64) if value >> 63 else value
        self.regs = np.empty((num_warps, rows, 32), dtype=np.int64)
        self.scratch = np.zeros(64, dtype=np.int64)
        self.warp_state = np.zeros((num_warps, L.WARP_WORDS), dtype=np.int64)
        self.cta_state = aligned((num_ctas, L.CTA_WORDS), np.int64)
        self.cluster_state = aligned((slots, L.CLUSTER_WORDS), np.int64)
        self.smem_size = SMEM_RESERVED + max(16, -(-self.smem_bytes // 1024) * 1024)
        self.smem = aligned((num_ctas, self.smem_size), np.uint8)
        local = max(16, self.program.local_bytes)
        self.local = np.zeros((num_warps, 32 * local), dtype=np.uint8)
        self.x = np.zeros(L.MACHINE_WORDS, dtype=np.int64)
        self.ranges = np.array([r[:2] for r in self.memory] or [(0, 0)], dtype=np.int64)
        x = self.x
        x[L.X_CODE] = self.program.code.ctypes.data
        x[L.X_EXT] = self.program.ext.ctypes.data
        x[L.X_RANGES], x[L.X_NRANGES] = self.ranges.ctypes.data, len(self.memory)
        x[L.X_SMEM] = self.smem.ctypes.data
        x[L.X_SMEM_END] = self.smem.ctypes.data + self.smem.nbytes
        x[L.X_RANGE_NUMBERS] = self.range_numbers.ctypes.data
        x[L.X_GPU] = self.gpu
        if (self.range_gpus != self.gpu).any():
            x[L.X_RANGE_GPUS] = self.range_gpus.ctypes.data
            if self.seed is not None:
                x[L.X_LATE] = self.late.words.ctypes.data
        x[L.X_QUANTUM] = 64 if self.seed is not None else 4096
        x[L.X_ADVERSARIAL] = int(self.seed is not None)
        x[L.X_RNG] = ((self.seed or 0) * 0x9E3779B97F4A7C15 + 0x1234567) & (1 << 62) - 1 | 1
        x[L.X_NWARPS], x[L.X_WARPS] = num_warps, self.warp_state.ctypes.data
        if self.seed is not None:
            x[L.X_CURSOR] = self.engine.random.randrange(num_warps)
        x[L.X_SCRATCH] = self.scratch.ctypes.data
        x[L.X_CLOCK] = 1 << 40
        self.operations = alu_table.addresses(self.program.operations)
        x[L.X_ALU] = self.operations.ctypes.data
        x[L.X_STEP_MEMORY] = interp.step_memory.address
        x[L.X_STEP_SYNC] = interp.step_sync.address
        self.covered = np.zeros(len(self.program.code) + 8, dtype=np.uint8)
        x[L.X_COVER] = self.covered.ctypes.data
        self.warps = [Warp(i, self.warp_state[i], self.regs[i]) for i in range(num_warps)]
        self.ctas: list[Cta] = []
        for i in range(num_ctas):
            mine = self.warps[i * warps_per_cta : (i + 1) * warps_per_cta]
            cta = Cta(i, self.cta_state[i], self.smem[i], mine)
            for k, w in enumerate(mine):
                w.cta = cta
                w.state[L.W_REGS] = w.regs.ctypes.data
                w.state[L.W_LOCAL] = self.local[w.index].ctypes.data
                w.state[L.W_LOCAL_BYTES] = local
                w.state[L.W_CTA] = cta.state.ctypes.data
                w.state[L.W_INDEX] = k
            self.ctas.append(cta)
        self.clusters = [
            Cluster(
                s,
                self.cluster_state[s],
                self.ctas[s * self.cluster_size : (s + 1) * self.cluster_size],
            )
            for s in range(slots)
        ]

    def _check_memory(self, num_ctas: int, num_warps: int) -> None:
        """Raises LaunchError when this machine cannot hold the resident CTAs."""
        shared = SMEM_RESERVED + self.smem_bytes
        shadow = 16 * shared if self.check else 0
        need = num_ctas * (shared + shadow) + num_warps * 256 * self.program.num_rows
        have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if need > 0.8 * have:
            raise LaunchError(
                "the resident CTAs must fit this machine's memory",
                f"{num_ctas} CTAs need {need >> 20} MiB of {have >> 20} MiB",
                "give the emulator fewer SMs, or the kernel a smaller grid",
            )

    # -- CTA life ---------------------------------------------------------------------

    def start_cluster(self, cluster: Cluster, number: int) -> None:
        """Loads grid cluster ``number`` into a slot."""
        r, size = self.request, self.cluster_size
        gx, gy, _ = self.cluster_grid
        origin = (number % gx, number // gx % gy, number // (gx * gy))
        cluster.number, cluster.live = number, True
        cluster.extra = {}
        s = cluster.state
        s[:] = 0
        s[L.L_SIZE], s[L.L_ALIVE], s[L.L_ID] = size, size * self.threads, number
        for rank, cta in enumerate(cluster.ctas):
            cx, cy, _ = r.cluster
            inside = (rank % cx, rank // cx % cy, rank // (cx * cy))
            cta.coords = tuple(  # type: ignore[assignment]
                o * c + i for o, c, i in zip(origin, r.cluster, inside, strict=True)
            )
            cta.rank, cta.cluster = rank, cluster
            cta.extra = {}
            cta.smem[:] = POISON
            s[L.L_SMEM + rank] = cta.smem.ctypes.data
            s[L.L_CTA + rank] = cta.state.ctypes.data
            c = cta.state
            c[:] = 0
            c[L.C_CLUSTER], c[L.C_RANK] = cluster.state.ctypes.data, rank
            c[L.C_SMEM], c[L.C_SMEM_SIZE] = cta.smem.ctypes.data, self.smem_size
            c[L.C_THREADS] = self.warps_per_cta * 32
            c[L.C_ALIVE] = self.threads
            c[L.C_FIRST_WARP] = cta.warps[0].index
            c[L.C_NUM_WARPS] = len(cta.warps)
            c[L.C_INDEX] = cta.index
            if self.checker is not None:
                self.checker.start_cta(cta)
            for w in cta.warps:
                self._start_warp(w, origin, inside)

    def _start_warp(self, w: Warp, origin: tuple, inside: tuple) -> None:
        k = int(w.state[L.W_INDEX])
        keep = {
            i: int(w.state[i]) for i in (L.W_REGS, L.W_LOCAL, L.W_LOCAL_BYTES, L.W_CTA, L.W_INDEX)
        }
        w.state[:] = 0
        for i, v in keep.items():
            w.state[i] = v
        count = min(32, self.threads - 32 * k)
        mask = (1 << count) - 1
        w.state[L.W_STATE] = L.STATE_RUN
        w.state[L.W_MASK] = w.state[L.W_ALIVE] = mask
        w.state[L.W_POLL_PC] = -1
        w.open_ops, w.groups, w.wait = [], [], ""
        w.state[L.W_AGENT] = w.index
        if self.checker is not None:
            self.checker.start_warp(w)
        np.copyto(w.regs, self.template)
        for row, name, offset in self.program.specials:
            w.regs[row] = self._special(name, offset, w, k, origin, inside)

    def _special(
        self, name: str, offset: int, w: Warp, k: int, origin: tuple, inside: tuple
    ) -> Any:
        r = self.request
        lane = np.arange(32, dtype=np.int64)
        if name.startswith("@"):
            if name == "@param":
                return self.params.ctypes.data + offset
            if name == "@shared":
                return (w.cta.rank << L.RANK_SHIFT) + SMEM_RESERVED + offset
            if name == "@local":
                return offset
            return self.global_symbols[name.split(":", 1)[1]] + offset
        base, _, axis = name[1:].partition(".")
        i = {"x": 0, "y": 1, "z": 2}.get(axis, 0)
        flat = lane + 32 * k
        bx, by, _ = r.block
        simple: dict[str, Any] = {
            "tid": lambda: (flat % bx, flat // bx % by, flat // (bx * by))[i],
            "ntid": lambda: r.block[i],
            "ctaid": lambda: w.cta.coords[i],
            "nctaid": lambda: r.grid[i],
            "laneid": lambda: lane,
            "warpid": lambda: k,
            "nwarpid": lambda: self.warps_per_cta,
            "smid": lambda: w.cta.index % self.num_sms,
            "nsmid": lambda: self.num_sms,
            "gridid": lambda: 1,
            "clusterid": lambda: origin[i],
            "nclusterid": lambda: self.cluster_grid[i],
            "cluster_ctaid": lambda: inside[i],
            "cluster_nctaid": lambda: r.cluster[i],
            "cluster_ctarank": lambda: w.cta.rank,
            "cluster_nctarank": lambda: self.cluster_size,
            "is_explicit_cluster": lambda: 1,
            "lanemask_eq": lambda: 1 << lane,
            "lanemask_lt": lambda: (1 << lane) - 1,
            "lanemask_le": lambda: (2 << lane) - 1,
            "lanemask_gt": lambda: 0xFFFFFFFF & ~((2 << lane) - 1),
            "lanemask_ge": lambda: 0xFFFFFFFF & ~((1 << lane) - 1),
            "dynamic_smem_size": lambda: r.smem_bytes,
            "total_smem_size": lambda: self.smem_bytes,
            "aggr_smem_size": lambda: self.smem_bytes + SMEM_RESERVED,
        }
        if base not in simple:
            raise EmulatorError("a special register must be known", name)
        return simple[base]()

    # -- the run ----------------------------------------------------------------------

    def run(self) -> None:
        """Executes the launch.  Raises KernelFault when a checker stops it."""
        self.begin()
        while not self.finished:
            if not self.turn():
                self.idle()

    def begin(self) -> None:
        """Starts the first clusters."""
        self.place_clusters()
        self.started = time.perf_counter()

    def turn(self) -> bool:
        """Lets the warps run until Python is needed.  False when nothing could go on."""
        if self.rival is not None:
            self.place_clusters()
        plain = self.seed is None and self.rival is None
        result = interp.run_grid(self.x.ctypes.data, 1 << 18 if plain else 256)
        self.held = False
        self._check_steps()  # a kernel may go round in circles by way of Python
        if self.progress is not None:
            self.progress(int(self.x[L.X_STEPS]))
        if result == L.R_PY:
            self.held = not self._python(self.warps[int(self.x[L.X_CURRENT])])
            if not self.held:
                self.idle_rounds = 0
        elif result == L.R_CTA_DONE:
            self._cta_done(self.warps[int(self.x[L.X_CURRENT])].cta)
        elif result == L.R_FAULT:
            self._fault(self.warps[int(self.x[L.X_CURRENT])])
        elif result == L.R_PAUSE:
            self.pause()
        elif not self.waiting_clusters and not any(c.live for c in self.clusters):
            if not self.late.deliver():  # one by one: other GPUs see them in between
                self.finish()
        else:
            return self.complete_some() or self.time_passes()
        return True

    def pause(self) -> None:
        """Called after many steps without need of Python."""
        for _ in range(self.engine.random.randrange(4)):
            self.engine.advance(idle=False)
        if self.engine.random.random() < 0.25:
            self.late.deliver()

    def _check_steps(self) -> None:
        if self.max_steps is not None and self.x[L.X_STEPS] > self.max_steps:
            waits = "it may run forever; waiting warps:\n  " + "\n  ".join(self.waits())
            raise KernelFault(
                "a launch may not take more steps than allowed", self.max_steps, waits
            )

    def finish(self) -> None:
        """Called when every CTA has exited."""
        self.engine.drain()
        self.finished = True

    def complete_some(self) -> bool:
        """Completes a pending asynchronous operation; False when there is none."""
        return self.engine.advance() or self.late.deliver()

    def idle(self) -> None:
        events = int(self.x[L.X_EV_SYNC] + self.x[L.X_EV_MEM])
        if events != getattr(self, "_last_events", -1):
            self._last_events, self.idle_rounds = events, 0
        self.idle_rounds += 1
        if self.idle_rounds > 16:
            self._deadlock()
        for w in self.warps:
            w.state[L.W_SLEEP] = L.SLEEP_NO
        self.x[L.X_CLOCK] += 1000

    def _python(self, w: Warp) -> bool:
        """Runs a Python handler.  False when its warp must wait."""
        pc = int(w.state[L.W_PC])
        op = self.program.pyops[int(self.program.code[pc, L.I_X])]
        self.python_calls += 1
        assert op.handler is not None
        try:
            if op.handler(self, w, op) is WAIT:
                w.state[L.W_WAIT_KIND], w.state[L.W_WAIT_PC] = L.WAIT_PY, pc
                w.state[L.W_SLEEP] = L.SLEEP_EVENT
                w.state[L.W_SLEEP_EV] = self.x[L.X_EV_SYNC] + self.x[L.X_EV_MEM]
                return False
        except EmulatorError as exc:
            if isinstance(exc, KernelFault):
                raise
            at = self.where(w, pc)
            raise KernelFault(exc.rule, f"{exc.value}; {at}", exc.remedy, at=at) from exc
        w.state[L.W_PC] = pc + 1
        return True

    def warn(self, text: str) -> None:
        """Notes something that hardware would run, but not as the author meant it."""
        if text not in self.warnings:
            self.warnings.append(text)

    def sync_event(self) -> None:
        self.x[L.X_EV_SYNC] += 1

    def _cta_done(self, cta: Cta) -> None:
        cta.state[L.C_INDEX] = -1
        for w in cta.warps:
            w.state[L.W_STATE] = L.STATE_EMPTY
        if all(c.state[L.C_INDEX] == -1 for c in cta.cluster.ctas):
            self.engine.leave_cluster(cta.cluster)
            self.cluster_done(cta.cluster)
            cta.cluster.live = False
            self.place_clusters()

    def cluster_done(self, cluster: Cluster) -> None:
        """Called when the last CTA of a cluster has exited."""
        for cta in cluster.ctas:
            check_exit(self, cta)
            if cta.extra.get("tmem"):
                raise KernelFault(
                    "a CTA must free its TMEM before it exits",
                    f"CTA {cta.coords} leaves columns {cta.extra['tmem']}",
                )

    # -- reports ----------------------------------------------------------------------

    def findings(self) -> list[Finding]:
        """What the checkers have found so far."""
        return self.checker.findings() if self.checker is not None else []

    def where(self, w: Warp, pc: int, cta: tuple[int, int, int] | None = None) -> Where:
        """A warp, of the CTA that it belongs to now or of another one, and an instruction."""
        ins = self.program.source[min(pc, len(self.program.source) - 1)]
        text = ins.text if len(ins.text) <= 120 else ins.text[:117] + "..."
        file = self.program.module.files.get(ins.loc[0], "?")
        source = f"{file}:{ins.loc[1]}" if ins.loc != (0, 0) else ""
        return Where(cta or w.cta.coords, int(w.state[L.W_INDEX]), ins.line, text, source)

    def _fault(self, w: Warp) -> None:
        s = w.state
        code = int(s[L.W_FAULT])
        address, at = int(s[L.W_FAULT_ADDR]), self.where(w, int(s[L.W_PC]))
        raise KernelFault(
            L.FAULT_TEXT.get(code, f"fault {code}"),
            f"{fault_place(self, code, address)}, lane {int(s[L.W_FAULT_LANE])}, "
            f"size or value {int(s[L.W_FAULT_AUX])}; {at}",
            at=at,
        )

    @property
    def interleaving(self) -> str:
        """Hash of the order in which warps and asynchronous operations ran."""
        return f"{int(self.x[L.X_TRACE]) & (1 << 64) - 1:016x}"

    def lines(self) -> set[int]:
        """PTX lines that some warp has executed."""
        source = self.program.source
        return {source[i].line for i in np.flatnonzero(self.covered[: len(source)])}

    def waits(self) -> list[str]:
        """One line per live warp: where it is and what it waits for."""
        from mok.tools.emulator.waits import describe_wait

        return [describe_wait(self, w) for w in self.warps if w.state[L.W_STATE] == L.STATE_RUN]

    def _deadlock(self) -> None:
        lines = self.waits()
        live = [w for w in self.warps if w.state[L.W_STATE] == L.STATE_RUN]
        places = [
            self.where(w, int(w.state[L.W_WAIT_PC if w.state[L.W_WAIT_KIND] else L.W_PC]))
            for w in live
        ]
        if self.waiting_clusters:
            why = " while a competing grid has the SMs" if self.rival and self.rival.active else ""
            lines.append(f"{len(self.waiting_clusters)} clusters have not started{why}")
        raise KernelFault(
            "deadlock: no warp can go on and no operation is pending",
            f"{len(lines)} waits\n  " + "\n  ".join(lines),
            waits=list(zip(places, lines, strict=False)),
        )
