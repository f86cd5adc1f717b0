"""The run itself: shape after shape, all programs taking turns, within a time budget."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from mok.config import Config
from mok.tools.bench import results
from mok.tools.bench.bits import digest
from mok.tools.bench.ceiling import ceiling_ms
from mok.tools.bench.oracle import Match, Oracle
from mok.tools.bench.phases import measure_phases
from mok.tools.bench.programs import Options, Program, Unavailable, make_program
from mok.tools.bench.programs.ours import precision_of
from mok.tools.bench.shapes import BenchShape, fit_tokens
from mok.tools.bench.telemetry import Reading, Telemetry, mean
from mok.tools.bench.timing import (
    Clock,
    Deadline,
    Regime,
    Step,
    Window,
    reason_of,
    summarize,
)
from mok.tools.bench.work import Work, make_work

_PHASES_MS = 200.0  # how long phases are measured

KEPT_CALLS = 60  # of a window, whose times stand in the document


@dataclass(frozen=True)
class Entry:
    """A program that takes part.

    Attributes:
        name: in ``programs.PROGRAMS``.
        config: tunables of ours, where they are not the suggested ones.
        setting: what is special about them, such as "minibatch_size=512".
        shape: the only one that it takes part in; None for all.
    """

    name: str
    config: Config | None = None
    setting: str = ""
    shape: BenchShape | None = None

    @property
    def label(self) -> str:
        return f"{self.name} {self.setting}".strip()


@dataclass(frozen=True)
class Settings:
    """What to run; see the arguments of ``mok bench``."""

    shapes: Sequence[BenchShape]
    entries: Sequence[Entry]
    passes: Sequence[str] = ("forward", "both")
    rounds: int = 3
    regime: Regime = field(default_factory=Regime)
    num_sets: int = 2
    seed: int = 0
    routing: str = "random"
    budget_s: float | None = None
    phases: bool = True


@dataclass
class Ready:
    """A program that is set up and whose numbers were compared with the oracle's.

    Attributes:
        matches: of "output" and of each gradient with the oracle's.
        peak_bytes: by pass, memory above weights and inputs.
        kept_bytes: what backward needs of one forward call.
        setup_s: seconds to set it up, compile, choose variants and compare.
        digests: of the output and of each gradient: equal bits, equal digest.
    """

    entry: Entry
    program: Program
    matches: dict[str, Match] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    kept_bytes: int | None = None
    setup_s: float = 0.0
    digests: dict[str, int] = field(default_factory=dict)
    trains: bool = False

    @property
    def ours(self) -> bool:
        return self.entry.name.startswith(results.OURS)

    @property
    def precision(self) -> str:
        return precision_of(self.entry.name)

    def checked(self, pass_name: str) -> dict[str, Match]:
        """Matches of what a pass computes."""
        forward = {n: m for n, m in self.matches.items() if n == "output"}
        return forward if pass_name == "forward" else self.matches

    def error(self, pass_name: str) -> float | None:
        """The largest error of what a pass computes."""
        return max((m.error for m in self.checked(pass_name).values()), default=None)

    def ok(self, pass_name: str) -> bool:
        """Whether everything that a pass computes is within its limits."""
        return all(m.ok(name, self.precision) for name, m in self.checked(pass_name).items())


@dataclass
class Item:
    """One program doing one pass, round after round."""

    ready: Ready
    pass_name: str
    step: Step
    windows: list[Window] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)


class Runner:
    """Runs the settings and collects rows.

    Args:
        options: of the programs.
        save: called with what there is after every shape, so that a run that is cut off leaves it.

    Attributes:
        rows, phases, missing, not_run: parts of the document.
    """

    def __init__(
        self,
        settings: Settings,
        device: torch.device,
        options: Options,
        clock: Clock,
        telemetry: Telemetry,
        *,
        say: Callable[[str], None] = lambda _: None,
        save: Callable[[], None] = lambda: None,
        deadline: Deadline | None = None,
    ) -> None:
        self.settings = settings
        self.device = device
        self.options = options
        self.clock = clock
        self.telemetry = telemetry
        self.say = say
        self.save = save
        self.deadline = deadline or Deadline(settings.budget_s)
        self.rows: list[results.Row] = []
        self.phases: list[dict[str, Any]] = []
        self.missing: list[dict[str, Any]] = []
        self.not_run: list[dict[str, Any]] = []
        self.bits: list[dict[str, Any]] = []

    # ------------------------------------------------------------------ shapes

    def run(self) -> None:
        shapes = self.settings.shapes
        for number, wanted in enumerate(shapes):
            if self.deadline.over:
                self.not_run.append({"shape": wanted.as_dict(), "reason": "the budget was used up"})
                continue
            self.say(f"shape {number + 1} of {len(shapes)}: {wanted.title}")
            try:
                self._shape(wanted, self.deadline.part(1 / (len(shapes) - number)))
            except Exception as error:  # the other shapes are still worth having
                self.not_run.append({"shape": wanted.as_dict(), "reason": reason_of(error)})
            finally:
                self._free()
            self.save()

    def _shape(self, wanted: BenchShape, deadline: Deadline) -> None:
        s = self.settings
        bench = self._fit(wanted)
        if bench.fitted:
            self.say(f"T fitted to memory: {bench.shape.num_tokens}")
        work = make_work(bench, self.device, num_sets=s.num_sets, seed=s.seed, kind=s.routing)
        oracle = Oracle(work)
        ready: list[Ready] = []
        try:
            for entry in s.entries:
                if entry.shape not in (None, wanted):
                    continue
                if deadline.over and ready:
                    self._miss(entry, bench, "the budget was used up")
                elif (found := self._prepare(entry, work, oracle)) is not None:
                    ready.append(found)
            self._compare_bits(bench, ready)
            del oracle
            items = self._items(ready, bench)
            self._rounds(items, deadline, bench)
            if s.phases:
                self._measure_phases(items, deadline, bench)
            self._add_rows(items, bench, work)
            items.clear()
        finally:
            for each in ready:
                each.program.close()

    def _fit(self, wanted: BenchShape) -> BenchShape:
        if self.device.type != "cuda":
            return wanted
        self._free()
        free, _ = torch.cuda.mem_get_info(self.device)
        names = [entry.name for entry in self.settings.entries]
        return fit_tokens(wanted, free, names, self.settings.passes, self.settings.num_sets)

    def _free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _miss(self, entry: Entry, bench: BenchShape, reason: str, pass_name: str = "") -> None:
        self.say(f"  {entry.label}{' ' + pass_name if pass_name else ''}: not measured: {reason}")
        found = {"program": entry.label, "shape": bench.as_dict(), "reason": reason}
        self.missing.append({**found, "pass": pass_name} if pass_name else found)

    # ------------------------------------------------------------------ one program

    def _prepare(self, entry: Entry, work: Work, oracle: Oracle) -> Ready | None:
        """Set a program up, compare its numbers once, or note why it is missing."""
        options = replace(self.options, config=entry.config) if entry.config else self.options
        failure, program, begin = "", None, self.clock.now()
        try:
            program = make_program(entry.name, work, options)
            ready = Ready(entry, program)
            self._check_forward(ready, oracle)
        except Exception as error:  # a peer's failure is a result, not the end of the run
            failure = str(error) if isinstance(error, Unavailable) else reason_of(error)
        if failure or program is None:
            if program is not None:
                program.close()
            program = None
            self._free()
            self._miss(entry, work.bench, failure)
            return None
        if self._wants_backward() and "backward" in program.passes:
            try:
                self._check_backward(ready, oracle)
            except Exception as error:
                failure = reason_of(error)
            if failure:
                self._free()
                self._miss(entry, work.bench, failure, "backward")
        ready.setup_s = self.clock.now() - begin
        note = f" ({program.note})" if program.note else ""
        worst = ready.error("both") or 0.0
        self.say(f"  {entry.label}{note}: error {worst:.1e}, set up in {ready.setup_s:.1f} s")
        return ready

    def _wants_backward(self) -> bool:
        return any(p in ("backward", "both") for p in self.settings.passes)

    def _check_forward(self, ready: Ready, oracle: Oracle) -> None:
        program = ready.program
        raw = program.forward(0)
        self.clock.wait()
        if "forward" in program.passes:
            output = program.output(raw).detach()
            ready.matches["output"] = oracle.output_match(output)
            if ready.ours:
                ready.digests["output"] = digest(output)
            del output
        del raw
        peak = None if program.remote else self._peak(lambda: program.forward(0))
        if peak is not None:
            ready.peak_bytes[program.passes[0]] = peak + program.persistent_bytes

    def _check_backward(self, ready: Ready, oracle: Oracle) -> None:
        program = ready.program
        before = None if program.remote else self._allocated()
        raw, saved = program.forward_training(0)
        self.clock.wait()
        output = program.output(raw).detach()
        if before is not None:
            kept = (self._allocated() or 0) - before - output.numel() * output.element_size()
            ready.kept_bytes = max(kept, 0)
        seen = [oracle.output_match(output), *ready.checked("forward").values()]
        ready.matches["output"] = max(seen, key=lambda m: (math.isnan(m.error), m.error))
        del raw, output
        found = program.gradients(program.backward(0, saved))
        self.clock.wait()
        del saved
        ready.matches.update(oracle.gradient_matches(found))
        if ready.ours:
            ready.digests.update({name: digest(value) for name, value in found.items()})
        del found
        self._free()

        def both() -> None:
            _, kept = program.forward_training(0)
            program.backward(0, kept)

        peak = None if program.remote else self._peak(both)
        if peak is not None:
            ready.peak_bytes["both"] = ready.peak_bytes["backward"] = (
                peak + program.persistent_bytes
            )
        ready.trains = True

    def _allocated(self) -> int | None:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else None

    def _peak(self, call: Callable[[], Any]) -> int | None:
        if self.device.type != "cuda":
            return None
        self.clock.wait()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        kept = call()
        self.clock.wait()
        peak = torch.cuda.max_memory_allocated(self.device) - before
        del kept
        return peak

    def _compare_bits(self, bench: BenchShape, ready: Sequence[Ready]) -> None:
        """Ours must give the same bits for every configuration and number of ranks."""
        for precision in ("bf16", "mxfp8"):
            ours = [r for r in ready if r.ours and r.precision == precision]
            if len(ours) > 1:
                self._compare_digests(bench, ours)

    def _compare_digests(self, bench: BenchShape, ours: Sequence[Ready]) -> None:
        first = ours[0].digests
        different = [
            f"{r.entry.label}: {name}"
            for r in ours[1:]
            for name, value in r.digests.items()
            if first.get(name, value) != value
        ]
        self.bits.append(
            {
                "shape": bench.as_dict(),
                "programs": len(ours),
                "different": different,
                "ok": not different,
            }
        )
        if different:
            self.say(f"  BITS DIFFER from {ours[0].entry.label}: {', '.join(different)}")

    # ------------------------------------------------------------------ rounds

    def _items(self, ready: Sequence[Ready], bench: BenchShape) -> list[Item]:
        items = []
        for each in ready:
            program = each.program
            for pass_name in self.settings.passes:
                if pass_name in program.passes and (each.trains or pass_name == "forward"):
                    try:
                        items.append(Item(each, pass_name, self._step(program, pass_name)))
                    except Exception as error:
                        self._miss(each.entry, bench, reason_of(error), pass_name)
            if program.passes == ("gemm",):
                items.append(Item(each, "gemm", program.forward))
        return items

    def _step(self, program: Program, pass_name: str) -> Step:
        if pass_name == "forward":
            return program.forward
        if pass_name == "both":

            def both(index: int) -> Any:
                _, saved = program.forward_training(index)
                return program.backward(index, saved)

            return both
        count = self.settings.num_sets
        kept = [program.forward_training(index)[1] for index in range(count)]
        return lambda index: program.backward(index, kept[index % count], keep=True)

    def _rounds(self, items: list[Item], deadline: Deadline, bench: BenchShape) -> None:
        """Every item once per round, each round starting with another one."""
        for number in range(self.settings.rounds):
            if number and deadline.over:
                self.say(f"  the budget ends this shape after {number} rounds")
                break
            start = number % max(len(items), 1)
            for item in items[start:] + items[:start]:
                try:
                    window = item.ready.program.window(
                        item.pass_name, item.step, self.clock, self.settings.regime
                    )
                except Exception as error:
                    items.remove(item)
                    self._miss(item.ready.entry, bench, reason_of(error), item.pass_name)
                    continue
                item.windows.append(window)
                item.readings.append(self.telemetry.between(window.begin, window.end))
        for item in list(items):
            try:
                item.ready.program.check()
            except Exception as error:
                items.remove(item)
                self._miss(item.ready.entry, bench, reason_of(error), item.pass_name)

    def _measure_phases(self, items: Sequence[Item], deadline: Deadline, bench: BenchShape) -> None:
        for item in items:
            program = item.ready.program
            ours = item.ready.ours and not self.options.reference
            if not ours or item.pass_name == "backward" or not item.windows or deadline.over:
                continue
            calls = int(min(max(_PHASES_MS / max(item.windows[0].median, 1e-3), 3), 200))
            try:
                found = measure_phases(item.step, self.clock, calls, warm_calls=calls)
            except Exception as error:
                self._miss(item.ready.entry, bench, reason_of(error), f"phases of {item.pass_name}")
                continue
            self.phases.append(
                {
                    "shape": bench.as_dict(),
                    "program": item.ready.entry.label,
                    "pass": item.pass_name,
                    "phases": found,
                    "note": program.note,
                }
            )

    # ------------------------------------------------------------------ rows

    def _add_rows(self, items: Sequence[Item], bench: BenchShape, work: Work) -> None:
        rows = [self._row(item, bench) for item in items if item.windows]
        self.rows.extend(rows)
        results.add_shares(rows)
        top = next((r["tflops"] for r in rows if r["program"] == "cublas"), None)
        if top is None or self.device.type != "cuda":
            return
        counts, schedule = work.counts(), self._schedule_ms(bench)
        for row in rows:
            if row["program"].startswith(results.OURS):
                row["ceiling_ms"] = ceiling_ms(bench, row["pass"], counts, top, schedule)
        results.add_shares(rows)

    def _schedule_ms(self, bench: BenchShape) -> float | None:
        for entry in self.phases:
            if entry["shape"] == bench.as_dict() and "schedule" in entry["phases"]:
                return float(entry["phases"]["schedule"])
        return None

    def _row(self, item: Item, bench: BenchShape) -> results.Row:
        ready, program = item.ready, item.ready.program
        summary = summarize(item.windows)
        reading = mean(item.readings)
        flops = program.flops(item.pass_name)
        row: results.Row = {
            "shape": bench.as_dict(),
            "pass": item.pass_name,
            "program": ready.entry.name,
            "ms": summary.ms,
            "spread": summary.spread,
            "tflops": flops / summary.ms / 1e9,
            "clock_mhz": reading.clock_mhz,
            "watts": reading.watts,
            "peak_bytes": ready.peak_bytes.get(item.pass_name),
            "kept_bytes": ready.kept_bytes if item.pass_name != "forward" else None,
            "p10_ms": summary.p10,
            "p90_ms": summary.p90,
            "rounds_ms": list(summary.rounds_ms),
            "calls": summary.calls,
            # In order, so that a slow start can be told from slow calls here and there.
            "calls_ms": [[round(ms, 4) for ms in w.calls_ms[:KEPT_CALLS]] for w in item.windows],
            "error": ready.error(item.pass_name),
            "ok": ready.ok(item.pass_name),
            "accuracy": {n: asdict(m) for n, m in ready.checked(item.pass_name).items()},
            "setup_s": ready.setup_s,
            "note": program.note,
        }
        if ready.entry.setting:
            row["config"] = ready.entry.setting
        target = bench.target(item.pass_name)
        if target is not None and ready.entry.name == "mok":  # set for our direct path
            row["target"] = target
        return row
