"""The emulator as users see it: a context in which compiled functions run on the CPU."""

import contextlib
import ctypes
import functools
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from mok.tools.emulator import (  # noqa: F401
    clc,
    encode_mem,
    encode_ops,
    printf,
    registers,
    tcgen05,
    tensormaps,
    tma,
    wgmma,
)
from mok.tools.emulator import layout as L
from mok.tools.emulator.asyncops import TimelineEvent
from mok.tools.emulator.checkers import Finding
from mok.tools.emulator.encode import Encoder, Program
from mok.tools.emulator.errors import EmulatorError, KernelFault, LaunchError
from mok.tools.emulator.gpus import run_together
from mok.tools.emulator.intercept import Interceptor, LaunchRequest
from mok.tools.emulator.machine import LIMITS, Machine
from mok.tools.emulator.places import Range
from mok.tools.emulator.ptx_parser import Module, parse
from mok.tools.emulator.residency import Competitor, Preemption

_PARSED: dict[str, Module] = {}
_PROGRAMS: dict[tuple[str, str], Program] = {}


def translate(ptx: str, kernel: str) -> Program:
    """Parses and encodes a kernel, once per PTX text."""
    key = (ptx, kernel)
    if key not in _PROGRAMS:
        if ptx not in _PARSED:
            _PARSED[ptx] = parse(ptx)
        module = _PARSED[ptx]
        if kernel not in module.kernels:
            raise LaunchError("the PTX must hold the launched kernel", kernel)
        _PROGRAMS[key] = Encoder(module, module.kernels[kernel]).encode(encode_ops.HANDLERS)
    return _PROGRAMS[key]


def prepare(program: Program) -> None:
    """Compiles the parts of the interpreter that a program needs, or reads them from the cache."""
    from mok.tools.emulator import alu_table, interp
    from mok.tools.emulator.jit import compiling

    use_one_blas_thread()
    parts = [interp.run_grid, interp.step_memory, interp.step_sync]
    parts += alu_table.entries(program.operations)
    if all(p.loaded for p in parts):
        return
    with compiling():
        missing = sum(not p.cached for p in parts)
        if missing:
            text = f"mok: compiling {missing} parts of the emulator's interpreter, once …"
            print(text, end="", file=sys.stderr, flush=True)
        start = time.perf_counter()
        for part in parts:
            part.load()
        if missing:
            print(f" {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)


@functools.cache
def use_one_blas_thread() -> None:
    """Tells numpy's OpenBLAS to stay in this thread: the matrices here are small, and its threads spin
    while they wait, which on a busy machine costs twenty times what they compute."""
    for path in Path(np.__file__).parents[1].glob("numpy.libs/lib*openblas*"):
        library = ctypes.CDLL(str(path))
        for prefix, suffix in itertools.product(("scipy_", ""), ("64_", "_64", "")):
            function = getattr(library, f"{prefix}openblas_set_num_threads{suffix}", None)
            if function is not None:
                function(1)
                break


@dataclass
class LaunchRecord:
    """What one launch did."""

    kernel: str
    grid: tuple[int, int, int]
    seconds: float
    cpu_seconds: float
    steps: int  # warp instructions
    python_calls: int


@dataclass
class Report:
    """Everything an emulator observed, as data."""

    arch: str
    seed: int | None
    launches: list[LaunchRecord] = field(default_factory=list)
    # Of each launch, failed ones included: a hash of which warp ran how far when, and of what was
    # completed in between.
    interleavings: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # what hardware would run, but not as meant
    lines: set[int] = field(default_factory=set)  # PTX lines executed
    events: list[TimelineEvent] = field(default_factory=list)
    preemptions: list[Preemption] = field(
        default_factory=list
    )  # one per launch that could meet one

    def write_timeline(self, path: str | Path) -> None:
        """Writes asynchronous operations as a Perfetto (Chrome trace) JSON file.

        One process per CTA, one track per warp; a microsecond stands for one warp instruction.
        """
        trace = [
            {
                "ph": "X",
                "name": e.what,
                "pid": str(e.cta),
                "tid": f"warp {e.warp}",
                "ts": e.start,
                "dur": max(1, e.end - e.start),
                "args": {"at": e.place},
            }
            for e in self.events
        ]
        Path(path).write_text(json.dumps({"traceEvents": trace, "displayTimeUnit": "ns"}))


# Emulators that are active, the last entered one last, and the thread of each: they patch the process.
_active: list[tuple["Emulator", int]] = []


class Emulator:
    """Runs functions from ``cute.compile`` on CPU memory while the context is active.

    ``arch``: "sm_90a", "sm_100a" or "sm_103a".  ``num_sms``: SMs of each emulated device.
    ``num_gpus``: devices; ``device(r)`` chooses the one that launches run on, ``register`` says whose
    a tensor is, and an ordered access to another's memory then needs scope sys.
    ``seed``: None for a plain, fast machine; an int for the adversarial one, whose interleaving
    and asynchronous completions the seed decides.  ``check``: look for data races and reads of
    memory that nothing has written (by default with a seed only: it costs time).  ``max_steps``:
    warp instructions that one launch may take.  ``rewrite``: applied to the PTX before it runs.
    ``timeline``: keep what ``Report.write_timeline`` needs.  ``progress``: called now and then with
    the warp instructions that the running launch has taken so far.  ``preempt``: a grid of higher
    priority that takes SMs while kernels run.  Once ``register`` was called, an
    access to global memory outside every registered tensor is an error.

    Raises LaunchError before a launch that the device cannot run, UnsupportedInstruction for
    PTX that is not implemented, KernelFault when a checker stops the kernel.
    """

    def __init__(
        self,
        arch: str,
        num_sms: int | None = None,
        num_gpus: int = 1,
        seed: int | None = None,
        check: bool | None = None,
        max_steps: int | None = None,
        rewrite: Callable[[str], str] | None = None,
        timeline: bool = False,
        progress: Callable[[int], None] | None = None,
        preempt: Competitor | None = None,
    ) -> None:
        if arch not in LIMITS:
            raise EmulatorError("the architecture must be emulated", arch, f"use {list(LIMITS)}")
        for name, value in (("num_sms", num_sms), ("num_gpus", num_gpus)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise EmulatorError(f"{name} must be a whole number of at least 1", repr(value))
        if seed is not None and not isinstance(seed, int):
            raise EmulatorError("a seed must be a whole number, or None", repr(seed))
        self.arch, self.seed, self.num_gpus = arch, seed, num_gpus
        self.num_sms = num_sms or (132 if arch == "sm_90a" else 148)
        self.check = seed is not None if check is None else check
        self.max_steps, self.rewrite, self.timeline = max_steps, rewrite, timeline
        self.progress = progress
        self.preempt = preempt
        self.report = Report(arch, seed)
        self.gpu = 0
        self._queues: dict[int, list[Machine]] | None = None
        self._ranges: dict[int, tuple[int, int]] = {}  # start: end, GPU
        # Of ranges, by their start, that had unwritten parts: of each word the bytes that are written.
        self._written: dict[int, np.ndarray] = {}
        self._keep: list[Any] = []
        self._stack: contextlib.ExitStack | None = None
        self._globals: dict[tuple[int, str], np.ndarray] = {}

    @contextlib.contextmanager
    def device(self, gpu: int) -> Iterator[None]:
        """Launches inside run on this GPU; what other GPUs' memory needs is checked against it."""
        if not 0 <= gpu < self.num_gpus:
            raise EmulatorError(f"the emulator has {self.num_gpus} GPUs, counted from 0", gpu)
        before, self.gpu = self.gpu, gpu
        try:
            yield
        finally:
            self.gpu = before

    def register(self, *tensors: Any, gpu: int = 0, written: bool | None = None) -> None:
        """Declares tensors (torch or numpy, on the CPU) as memory of ``gpu`` that kernels may access.

        The whole storage of a torch tensor counts.  ``written=False``: nothing has written the tensor's own
        elements yet, and the checkers report a read of them before a kernel's write; ``written=True``: the
        host has written them since.  Both are for contiguous tensors.  By default all is as before, and
        memory that was never declared as unwritten is written.  A launch without checkers forgets it all.
        """
        if not 0 <= gpu < self.num_gpus:
            raise EmulatorError(f"the emulator has {self.num_gpus} GPUs, counted from 0", gpu)
        for t in tensors:
            if hasattr(t, "untyped_storage"):
                if t.device.type != "cpu":
                    raise LaunchError("emulated kernels need CPU tensors", t.device)
                storage = t.untyped_storage()
                start, size = storage.data_ptr(), storage.nbytes()
            else:
                start, size = t.__array_interface__["data"][0], t.nbytes
                if written is not None:  # of an array, numpy does not say the storage
                    inside = (
                        (s, e - s)
                        for s, (e, _) in self._ranges.items()
                        if s <= start and start + size <= e
                    )
                    start, size = next(inside, (start, size))
            if self._ranges.get(start, (start + size, gpu))[0] != start + size:
                self._written.pop(start, None)  # a storage of another size now
            self._ranges[start] = start + size, gpu
            self._keep.append(t)
            if written is not None:
                self._note_written(t, start, size, written)

    def _note_written(self, t: Any, start: int, size: int, written: bool) -> None:
        """Notes whether the host has written a tensor of the storage at ``start``."""
        torches = hasattr(t, "untyped_storage")
        if not (t.is_contiguous() if torches else t.flags.c_contiguous):
            raise EmulatorError("what is declared as written or not is contiguous", t.shape)
        first = t.data_ptr() if torches else t.__array_interface__["data"][0]
        last = first + (t.numel() * t.element_size() if torches else t.nbytes)
        if written and start not in self._written:
            return
        if start not in self._written:
            words = (start + size + 3 >> 2) - (start >> 2)
            self._written[start] = np.full(words, 15, dtype=np.uint8)
        masks = self._written[start][(first >> 2) - (start >> 2) : (last + 3 >> 2) - (start >> 2)]
        bits = np.unpackbits(masks[:, None], axis=1, count=4, bitorder="little").reshape(-1)
        bits[first & 3 : (first & 3) + last - first] = written
        masks[:] = np.packbits(bits.reshape(-1, 4), axis=1, bitorder="little")[:, 0]

    def register_live(self) -> None:
        """Registers every CPU tensor of torch that is alive now."""
        import gc

        import torch

        for obj in gc.get_objects():
            if type(obj) is torch.Tensor and obj.device.type == "cpu" and obj.numel():
                self.register(obj)

    def __enter__(self) -> "Emulator":
        if self._stack is not None:
            raise EmulatorError(
                "an emulator must not be entered again while it is active", self.arch
            )
        if _active and _active[-1][1] != threading.get_ident():
            raise EmulatorError(
                "one thread at a time may have emulators",
                "another thread's is active",
                "use one Emulator and launch from several threads, or processes",
            )
        interceptor = Interceptor(self._launch, self.arch, self.num_sms)
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(interceptor.active())
        _active.append((self, threading.get_ident()))
        try:
            from mok.runtime.launch import set_active_emulator
        except ImportError:  # the emulator also serves kernels outside this package
            return self
        self._stack.callback(set_active_emulator, set_active_emulator(self))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._stack is not None
        if _active[-1][0] is not self:
            raise EmulatorError("emulators must end in reverse order", f"{len(_active)} are active")
        _active.pop()
        self._stack.close()
        self._stack = None

    def launch(self, compiled: Any, args: tuple[Any, ...]) -> None:
        """Calls what ``cute.compile`` returned: the entry point of ``mok.runtime.launch``."""
        compiled(*args)

    def run_ptx(self, ptx: str, request: LaunchRequest) -> None:
        """Runs one kernel of a PTX module, or puts it into its GPU's queue inside ``concurrent``."""
        program = translate(ptx, request.kernel)
        prepare(program)
        start, cpu = time.perf_counter(), time.process_time()
        symbols = {name: self._global(program.module, name) for name in program.module.globals}
        ranges = self._merged_ranges(symbols, program)
        machine = Machine(
            program,
            request,
            LIMITS[self.arch],
            self.num_sms,
            dict(handlers()),
            ranges,
            self.seed,
            symbols,
            self.check,
            self.max_steps,
            self.preempt,
            self.gpu,
            self._written,
        )
        if not self.check:  # nobody notes what this launch writes
            self._written.clear()
        machine.progress = self.progress
        if machine.preemption is not None:
            self.report.preemptions.append(machine.preemption)
        machine.engine.timeline = self.report.events if self.timeline else None
        if self._queues is not None:
            self._queues.setdefault(self.gpu, []).append(machine)
            return
        try:
            machine.run()
        except KernelFault as exc:
            raise self._failed(exc, [machine]) from None
        else:
            self._finished(machine, time.perf_counter() - start, time.process_time() - cpu)
        finally:
            machine.release()

    @contextlib.contextmanager
    def concurrent(self) -> Iterator[None]:
        """Launches inside run at the end, those of different GPUs at the same time.

        Races between GPUs are not looked for, but with a seed their effects are: stores to another
        GPU's memory that no release or fence of scope sys has ordered arrive late, in any order.
        """
        self._queues = {}
        try:
            yield
            queues, start = list(self._queues.values()), time.perf_counter()
        finally:
            self._queues = None
        machines = [m for queue in queues for m in queue]
        cpu = time.process_time()
        try:
            run_together(queues, self.seed)
        except KernelFault as exc:
            raise self._failed(exc, machines) from None
        else:
            for machine in machines:  # the time of all of them
                self._finished(machine, time.perf_counter() - start, time.process_time() - cpu)
        finally:
            for machine in machines:
                machine.release()

    def _failed(self, fault: KernelFault, machines: list[Machine]) -> KernelFault:
        """The fault with what the machines have found beside it, which may be its cause; it is added to
        the report."""
        self.report.interleavings += [m.interleaving for m in machines]
        found = [f for machine in machines for f in machine.findings()]
        self.report.findings.extend(found)
        for machine in machines:
            self._note_warnings(machine)
        if found:
            beside = "\n  ".join(["found before it:", *map(str, found[:8])])
            value = f"{fault.value}\n  {beside}"
            fault = KernelFault(fault.rule, value, fault.remedy, at=fault.at)
        self.report.faults.append(str(fault))
        fault.report = self.report
        return fault

    def _note_warnings(self, machine: Machine) -> None:
        self.report.warnings += [t for t in machine.warnings if t not in self.report.warnings]

    def _finished(self, machine: Machine, seconds: float, cpu_seconds: float) -> None:
        """Records a launch.  Raises KernelFault when the checkers found something in it."""
        self.report.interleavings.append(machine.interleaving)
        self.report.lines |= machine.lines()
        found = machine.findings()
        self._note_warnings(machine)
        self.report.findings.extend(found)
        self.report.launches.append(
            LaunchRecord(
                machine.request.kernel,
                machine.request.grid,
                seconds,
                cpu_seconds,
                int(machine.x[L.X_STEPS]),
                machine.python_calls,
            )
        )
        if found:
            raise KernelFault(
                f"the checkers found {len(found)} problems",
                "\n  ".join(map(str, found[:8])),
                "the emulator's report holds all of them",
                self.report,
            )

    def _merged_ranges(self, symbols: dict[str, int], program: Program) -> list[Range]:
        """Everything registered, and the module's variables."""
        if not self._ranges:
            return []
        sizes = program.module.globals
        found = [
            Range(start, end, gpu, i, f"tensor {i}")
            for i, (start, (end, gpu)) in enumerate(self._ranges.items())
        ]
        extra = [
            Range(a, a + sizes[name].size, self.gpu, len(found) + i, name)
            for i, (name, a) in enumerate(symbols.items())
        ]
        return sorted(found + extra)

    def _global(self, module: Module, name: str) -> int:
        key = (id(module), name)
        if key not in self._globals:
            var = module.globals[name]
            data = np.zeros(max(16, var.size) + 256, dtype=np.uint8)
            shift = -data.ctypes.data % 256
            self._globals[key] = data[shift:]
            if var.init:
                data[shift : shift + len(var.init)] = np.frombuffer(var.init, dtype=np.uint8)
        return self._globals[key].ctypes.data

    def _launch(self, request: LaunchRequest) -> None:
        ptx = getattr(request.compiled, "__ptx__", None) if request.compiled is not None else None
        if not ptx:
            raise LaunchError(
                "an emulated function must carry its PTX",
                request.kernel,
                "compile it inside the emulator's context, or with cute.KeepPTX",
            )
        self.run_ptx(self.rewrite(ptx) if self.rewrite else ptx, request)


def handlers() -> Iterator[tuple[str, Any]]:
    """Python handlers of all asynchronous instructions."""
    yield from tma.HANDLERS.items()
    for module in (tensormaps, wgmma, tcgen05, clc, registers, printf):
        yield from module.HANDLERS.items()
