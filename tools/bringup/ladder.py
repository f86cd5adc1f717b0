"""Climbs: starts each rung in a process of its own, ends it at its limit, and stops at the first failure."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mok import processes
from mok.tools.bringup import notes
from mok.tools.bringup.child import notes_path
from mok.tools.bringup.rungs import Rung

LOG_LINES = 40  # of a failed process, in the report
GRACE_S = 20  # for a killed process to be gone


@dataclass
class Start:
    """How to run one rung.

    Attributes:
        rung: which.
        arch, emulate, seed: for what, and where.
        folder: for notes, logs and device code.
        ranks: processes to start; 1 for the process alone (or one of those that torchrun started).
        fault: what to inject, "" for nothing.
        limit_s: when to end it.
    """

    rung: Rung
    arch: str
    emulate: bool
    folder: Path
    ranks: int
    limit_s: float
    fault: str = ""
    seed: int = 0

    def paths(self) -> list[Path]:
        """The notes of each process."""
        if self.ranks > 1:
            numbers: list[int | None] = list(range(self.ranks))
        else:
            numbers = [int(os.environ["RANK"]) if processes.launched() else None]
        return [notes_path(self.folder, self.rung.name, self.emulate, n) for n in numbers]

    def log(self) -> Path:
        """Standard output and error."""
        return self.paths()[0].with_suffix(".log")


@dataclass
class Ending:
    """How a process ended: its exit code, None for one that was ended at its limit."""

    code: int | None
    seconds: float


Executor = Callable[[Start], Ending]


def in_process_group(start: Start) -> Ending:
    """Run a rung in a process group of its own, and end it and its ranks at the limit."""
    command = [sys.executable, "-m"]
    if start.ranks > 1:
        run = ["--standalone", "--nproc-per-node", str(start.ranks)]
        command += ["torch.distributed.run", *run, "-m"]
    command += ["mok.tools.bringup.child", start.rung.name, "--arch", start.arch]
    command += ["--folder", str(start.folder), "--seed", str(start.seed)]
    command += ["--emulate"] if start.emulate else []
    command += ["--fault", start.fault] if start.fault else []
    begin = time.monotonic()
    with start.log().open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            start_new_session=True, env=_environment(start),
        )  # fmt: skip
        try:
            code: int | None = process.wait(start.limit_s)
        except subprocess.TimeoutExpired:
            code = None
            _end(process)
        except BaseException:  # an interrupt: leave nothing running
            _end(process)
            raise
    return Ending(code, time.monotonic() - begin)


def _environment(start: Start) -> dict[str, str]:
    env = dict(os.environ)
    if start.rung.ranks == "rack" and "TORCHELASTIC_RESTART_COUNT" in env:
        # Processes of later rungs meet at the same store: under names of their own.
        env["TORCHELASTIC_RESTART_COUNT"] = str(1000 + len(start.rung.name))
    if start.ranks > 1:
        env.setdefault("OMP_NUM_THREADS", "1")  # torchrun would say that it sets this
    return env


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a rung's process and all that it started: torchrun's ranks have sessions of their own."""
    for pid in (process.pid, *descendants(process.pid)):
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)  # or the driver holds it: the report matters more


def descendants(pid: int) -> list[int]:
    """The process' children and theirs, as Linux knows them."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # gone meanwhile
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found, left = [], [pid]
    while left:
        below = children.get(left.pop(), [])
        found += below
        left += below
    return found


@dataclass
class Climb:
    """A way up a ladder.

    Attributes:
        rungs: bottom first.
        arch, emulate, folder, seed: as in ``Start``.
        num_gpus: of this host.
        faults: what to inject, by rung.
        limit_scale: multiplies every limit.
        executor: runs a rung.
        say: told what happens.
        checks: of the document, one per rung.
    """

    rungs: list[Rung]
    arch: str
    emulate: bool
    folder: Path
    num_gpus: int = 1
    faults: dict[str, str] = field(default_factory=dict)
    limit_scale: float = 1.0
    seed: int = 0
    executor: Executor = in_process_group
    say: Callable[[str], None] = print
    checks: list[dict[str, Any]] = field(default_factory=list)
    failure: dict[str, Any] | None = None

    def run(self) -> None:
        """Climb until a rung fails. Rungs above it are listed as not run.

        What ends this process (an interrupt, SIGTERM as the command takes it) counts as a failure of the
        rung that runs, and goes on.
        """
        for rung in self.rungs:
            if self.failure is not None:
                self.checks.append(_check(rung, "not run", "", 0.0, 0.0))
                continue
            start = self._start(rung, self.emulate)
            self.say(f"{rung.name}: {rung.title} (at most {start.limit_s:.0f} s) …")
            begin = time.monotonic()
            try:
                ending = self.executor(start)
            except (KeyboardInterrupt, SystemExit):
                self._stopped(start, time.monotonic() - begin)
                raise
            check = self._read(start, ending)
            self.checks.append(check)
            self.say(f"{rung.name}: {check['state']}, {ending.seconds:.1f} s. {check['found']}")
            if not check["ok"]:
                self._failed(start, check)
                if not self.emulate:
                    self._compare(rung)

    def _stopped(self, start: Start, seconds: float) -> None:
        """Note that the climb ends here, from outside."""
        doing = _doing(notes.read(start.paths()[0]))
        found = f"stopped from outside after {seconds:.0f} s; {doing}"
        check = _check(start.rung, "stopped", found, seconds, start.limit_s)
        self.checks.append(check)
        self._failed(start, check)
        above = self.rungs[self.rungs.index(start.rung) + 1 :]
        self.checks += [_check(rung, "not run", "", 0.0, 0.0) for rung in above]

    def _start(self, rung: Rung, emulate: bool, fault: bool = True) -> Start:
        limit = rung.emulated_limit_s if emulate else rung.limit_s
        ranks = max(2, self.num_gpus) if rung.ranks == "host" else 1
        if emulate:
            ranks = min(ranks, 2)
        given = self.faults.get(rung.name, "") if fault else ""
        start = Start(
            rung, self.arch, emulate, self.folder, ranks, limit * self.limit_scale, given, self.seed
        )
        for path in start.paths():  # an earlier run's would pass for this one's
            path.unlink(missing_ok=True)
        return start

    def _read(self, start: Start, ending: Ending) -> dict[str, Any]:
        """A rung's entry of the document, from what its processes wrote."""
        rung = start.rung
        every = [notes.read(path) for path in start.paths()]
        results = [_last(events, "result") for events in every]
        if ending.code is None:
            state = "timed out"
            found = f"ended after {start.limit_s:.0f} s; {_doing(every[0])}"
        elif any(result is None for result in results):
            state = "failed"
            found = f"the process died ({_exit(ending.code)}); {_doing(every[0])}"
        else:
            states = [result["state"] for result in results if result]
            state = next((s for s in ("failed", "not here") if s in states), "ok")
            at = states.index(state)
            result = results[at]
            assert result is not None
            found = result["found"] + (f" (rank {at})" if state == "failed" and at else "")
        check = _check(rung, state, found, ending.seconds, start.limit_s)
        check["kernels"] = [_facts(e) for e in every[0] if e["event"] == "kernel"]
        return check

    def _failed(self, start: Start, check: dict[str, Any]) -> None:
        """Note what the report says about the failure."""
        self.say("collecting the report …")
        every = [notes.read(path) for path in start.paths()]
        guilty = next((e for e in every if _state(e) in ("failed", None)), every[0])
        result = _last(guilty, "result") or {}
        error = result.get("error", {})
        check["remedy"] = check["remedy"] or error.get("remedy", "") or _remedy(check["state"])
        kernels = [_facts(e) for e in guilty if e["event"] == "kernel"]
        launches = [e["name"] for e in guilty if e["event"] == "launch"]
        last = launches[-1] if launches else None
        failing = next((k for k in kernels if k["name"] == last), None)
        self.failure = {
            "rung": start.rung.name,
            "state": check["state"],
            "found": check["found"],
            "error": error,
            "kernel": failing,
            "launches": launches[-12:],
            "counters": [_facts(e) for e in guilty if e["event"] == "counters"][-3:],
            "values": [_facts(e) for e in guilty if e["event"] == "value"][-24:],
            "log": _tail(start.log()),
            "emulated": None,
        }

    def _compare(self, rung: Rung) -> None:
        """Add to the failure what the emulator has for the same rung with the same inputs."""
        failure = self.failure
        assert failure is not None
        start = self._start(rung, emulate=True, fault=False)
        self.say(f"the same inputs in the emulator (at most {start.limit_s:.0f} s) …")
        ending = self.executor(start)
        check = self._read(start, ending)
        events = notes.read(start.paths()[0])
        ours = {k["name"]: k["ptx_sha256"] for k in map(_facts, events) if "ptx_sha256" in k}
        values = [_facts(e) for e in events if e["event"] == "value"]
        hashes = {v["name"]: v["sha256"] for v in values if "sha256" in v}
        other = [
            v["name"]
            for v in failure["values"]
            if hashes.get(v["name"], v.get("sha256")) != v.get("sha256")
        ]
        kernel = failure["kernel"]
        same = None
        if kernel is not None and kernel["name"] in ours:
            same = ours[kernel["name"]] == kernel["ptx_sha256"]
        failure["emulated"] = {
            "state": check["state"],
            "found": check["found"],
            "seconds": ending.seconds,
            "ranks": start.ranks,
            "same_ptx": same,
            "other_bits": other,  # results that have other bits than the GPU's
            "values": values[-24:],
        }


def _check(rung: Rung, state: str, found: str, seconds: float, limit: float) -> dict[str, Any]:
    return {
        "name": rung.name,
        "title": rung.title,
        "proves": rung.proves,
        "ok": state in ("ok", "not here"),
        "state": state,
        "found": found,
        "remedy": "",
        "seconds": round(seconds, 2),
        "limit_s": limit,
        "kernels": [],
    }


def _facts(event: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in event.items() if key not in ("event", "time")}


def _last(events: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    return next((e for e in reversed(events) if e["event"] == name), None)


def _state(events: list[dict[str, Any]]) -> str | None:
    result = _last(events, "result")
    return None if result is None else result["state"]


def _doing(events: list[dict[str, Any]]) -> str:
    """What the process last noted."""
    launch = _last(events, "launch")
    return f"last launched: {launch['name']}" if launch else "it had launched no kernel"


def _exit(code: int) -> str:
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def _remedy(state: str) -> str:
    if state == "timed out":
        return "A wait that never ended, or a slow machine: see counters, or raise --limit-scale"
    if state == "stopped":
        return "Under torchrun another rank failed first: see the reports of the others"
    return "Send the report's folder; docs/blackwell-first-hour.md says where to look meanwhile"


def _tail(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()[-LOG_LINES:]
    except OSError:
        return []
