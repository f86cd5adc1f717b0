"""Damage a compiled megakernel, one synchronising instruction at a time, and see who notices.

    python -m tests.kernel_mutations run BUILD FILE.jsonl [--sample N] [--jobs N] [--seconds S] [--known F …]
    python -m tests.kernel_mutations merge FILE.jsonl FILE.jsonl …
    python -m tests.kernel_mutations table FILE.jsonl …

``run`` tries a build of ``tests.mutation_builds.BUILDS`` on its cases: the undamaged kernel on the plain
machine with each case and with every seed, then each mutation with one after the other of these until someone
notices, ``--jobs`` at a time, each in a process of its own. Each line of the file is an undamaged try or what
became of a mutation after a few, written when they have ended; a run goes on from what its own file and the
``--known`` ones say of the same PTX. A mutation whose process has died is "crashed": nobody knows what
becomes of it, and the next run tries again. ``merge`` keeps the last word on each mutation.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import faulthandler
import hashlib
import json
import random
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch

from mok.tools.emulator import EmulatorError, emulator
from mok.tools.emulator.mutations import INVISIBLE, Mutation, mutations
from tests.mutation_builds import BUILDS, Build, Outcome

SEEDS = 20  # of the adversarial machine
BATCH = 4  # tries of a process with a mutation in a row: it takes a second to read a kernel's text
FORK = get_context("fork")
Entry = dict  # one line of a file
Try = tuple[int, int | None]  # a case and a seed; None: the plain machine


def named_mutations(ptx: str) -> dict[str, Mutation]:
    """All mutations by name: the kind, which of its kind it is, and the instruction."""
    found: dict[str, Mutation] = {}
    counts: Counter[str] = Counter()
    for mutation in mutations(ptx):
        instruction = re.search(r"[a-z][\w.:]*\.[\w.:]+", mutation.old)
        assert instruction is not None
        found[f"{mutation.kind} {counts[mutation.kind]}: {instruction[0]}"] = mutation
        counts[mutation.kind] += 1
    return found


def tries_of(cases: int) -> list[Try]:
    """The plain machine on each case first, it takes a third of the time; then seeds, cases taking turns."""
    plain: list[Try] = [(case, None) for case in range(cases)]
    return [*plain, *((seed % cases, seed) for seed in range(SEEDS))]


def bits(outcome: Outcome) -> str:
    """A digest of all results."""
    digest = hashlib.sha256()
    for tensor in outcome:
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def undamaged(build: Build, case: int, seed: int | None) -> Entry:
    """The kernel as it is: a digest of its results, and the PTX lines that it runs."""
    entry = {"name": f"undamaged {case}", "case": case, "seed": seed, "detail": ""}
    try:
        found, lines = build.run(build.cases[case], None, seed)
    except EmulatorError as error:
        return entry | {"result": "reported", "detail": first_line(error)}
    return entry | {"result": "clean", "bits": bits(found), "lines": packed(lines)}


def judge(
    build: Build, rewrite: Callable[[str], str], case: int, seed: int | None, expected: str
) -> Entry:
    """A try: reported by a checker, a wrong result, or survived."""
    entry = {"case": case, "seed": seed, "detail": ""}
    try:
        found, _ = build.run(build.cases[case], rewrite, seed)
    except EmulatorError as error:
        return entry | {"result": "reported", "detail": first_line(error)}
    return entry | {"result": "survived" if bits(found) == expected else "wrong"}


@contextlib.contextmanager
def forgotten() -> Iterator[None]:
    """The emulator keeps programs by their text, and each mutation is a new one: drop those of the block."""
    caches = emulator._PROGRAMS, emulator._PARSED
    before = [set(cache) for cache in caches]
    try:
        yield
    finally:
        for cache, old in zip(caches, before, strict=True):
            for key in cache.keys() - old:
                del cache[key]


def cases_digest(build: Build) -> str:
    """Of the cases and of what draws their inputs: torch's numbers are not the same in every version."""
    release = torch.__version__.split("+")[0]
    return hashlib.sha256(f"{build.cases} {release}".encode()).hexdigest()[:8]


def first_line(error: EmulatorError) -> str:
    return str(error).split("\n")[0][:120]


def packed(lines: Iterable[int]) -> str:
    """Line numbers as the bits of a number, compressed: most lines run."""
    number = sum(1 << line for line in lines)
    data = number.to_bytes(number.bit_length() // 8 + 1, "little")
    return base64.b64encode(zlib.compress(data, 9)).decode()


def unpacked(text: str) -> set[int]:
    number = int.from_bytes(zlib.decompress(base64.b64decode(text)), "little")
    return {line for line in range(number.bit_length()) if number >> line & 1}


class Records:
    """What files say of one PTX: the last word on each mutation, and the undamaged tries.

    Attributes:
        last: the last word, by name.
        clean, lines: an undamaged try's entry, and the lines it runs.
    """

    def __init__(self, entries: Iterable[Entry]):
        entries = list(entries)
        self.last: dict[str, Entry] = {}
        self.clean: dict[Try, Entry] = {}
        self.lines: dict[Try, set[int]] = {}
        for entry in entries:
            if entry["name"].startswith("undamaged"):
                self.add(entry)
        for entry in entries:
            if not entry["name"].startswith("undamaged"):
                self.add(entry)

    def add(self, entry: Entry) -> None:
        if not entry["name"].startswith("undamaged"):
            old = self.last.get(entry["name"])
            if old is None or self.rank(entry) >= self.rank(old):
                self.last[entry["name"]] = entry
        elif entry["result"] == "clean":
            key = self.try_of(entry)
            kept = self.clean.setdefault(key, entry)
            assert kept["bits"] == entry["bits"], f"{key}: other bits"
            self.lines[key] = unpacked(entry["lines"])

    def try_of(self, entry: Entry) -> Try:
        """The case and the seed; in old files only undamaged tries name their case."""
        if "case" in entry:
            return entry["case"], entry["seed"]
        if entry["name"].startswith("undamaged"):
            return int(entry["name"].split()[1]), entry["seed"]
        return next(key for key in self.clean if key[1] == entry["seed"])

    def tries(self) -> list[Try]:
        """The undamaged tries in their order."""
        return sorted(self.clean, key=lambda key: (-1 if key[1] is None else key[1], key[0]))

    def all_tried(self) -> bool:
        """Whether the undamaged kernel has been tried as often as a mutation would be."""
        cases = {case for case, _ in self.clean}
        plain = sum(seed is None for _, seed in self.clean)
        # Old files have one try on the plain machine and 19 seeds.
        return len(self.clean) == (20 if plain == 1 else SEEDS + len(cases))

    def rank(self, entry: Entry) -> int:
        """How much an entry says: a survivor of more tries says more, a noticed one most, a crash nothing."""
        if entry["result"] == "crashed":
            return -1
        order = self.tries()
        return order.index(self.try_of(entry)) if entry["result"] == "survived" else len(order)

    def left(self, name: str, line: int) -> list[Try]:
        """What is left to try on a mutation, nothing if no other try can notice."""
        last = self.last.get(name)
        if last and last["result"] == "crashed":
            last = None
        if last and last["result"] != "survived":
            return []
        order = self.tries()
        start = order.index(self.try_of(last)) + 1 if last else 0
        # A try that does not come to the damaged line is as it was.
        return [key for key in order[start:] if line in self.lines[key]]


def holds(entry: Entry, cases: str | None) -> bool:
    """Whether an entry says something about a build with these cases."""
    noticed = entry["result"] in ("reported", "wrong", "invisible")
    return noticed or entry.get("cases") == cases


def read(*files: Path) -> Iterator[Entry]:
    """The lines of files; the last one may have been cut off with its run."""
    for file in files:
        for line in file.read_text().splitlines() if file.exists() else []:
            if line.endswith("}"):
                yield json.loads(line)


def work(name: str, mutation: str | None, tries: list[tuple[Try, str]], end: float) -> Entry:
    """An undamaged try, or what becomes of a mutation with each try and its bits in turn, until ``end``.

    ``STATE`` is filled before the processes fork.
    """
    build, ptx, named = STATE[name]
    begin = time.perf_counter()
    if mutation is None:
        entry = undamaged(build, *tries[0][0])
    else:
        damage = build.damage(ptx, named[mutation])
        for (case, seed), expected in tries:
            entry = {"name": mutation, "line": named[mutation].line}
            entry |= judge(build, damage, case, seed, expected)
            if entry["result"] != "survived" or time.monotonic() > end:
                break
    return entry | {"seconds": round(time.perf_counter() - begin, 1)}


def work_apart(answer: Connection, *task: Any) -> None:
    """``work`` in a forked process; the log says where one dies of a signal."""
    faulthandler.enable(2)  # the file descriptor: a test may have replaced sys.stderr
    answer.send(work(*task))


STATE: dict[str, tuple[Build, str, dict[str, Mutation]]] = {}


class Run:
    """A run on several processes, bounded in time."""

    def __init__(self, name: str, target: Path, jobs: int, seconds: float, known: Sequence[Path]):
        self.name, self.target, self.jobs = name, target, jobs
        self.end = time.monotonic() + seconds
        # A process that has used several threads must not fork: its children wait for them for ever.
        torch.set_num_threads(1)
        build = BUILDS[name]
        ptx = build.ptx()
        build.prepare_all()
        STATE[name] = build, ptx, named_mutations(ptx)
        self.ptx = hashlib.sha256(ptx.encode()).hexdigest()[:16]
        self.cases = cases_digest(build)
        self.records = Records(
            e for e in read(*known, target) if e["ptx"] == self.ptx and holds(e, self.cases)
        )
        # Loads and compiles what all processes need; and this machine has the bits of the others.
        self.order = tries_of(len(build.cases))
        self.add(work(name, None, [(self.order[0], "")], self.end))

    def add(self, entry: Entry) -> None:
        entry |= {"ptx": self.ptx, "cases": self.cases}
        with self.target.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        assert entry["name"].split()[0] != "undamaged" or entry["result"] == "clean", entry
        self.records.add(entry)

    def tries(self, todo: list[tuple[str | None, list[Try]]]) -> None:
        """Each mutation with tries, and what follows from it, the first tries first."""
        running: dict[Any, tuple[ForkProcess, str | None, Try]] = {}
        while todo or running:
            todo.sort(key=lambda t: self.order.index(t[1][0]))
            while todo and len(running) < self.jobs and time.monotonic() < self.end:
                mutation, left = todo.pop(0)
                # Most are noticed at once.
                batch = left[:1] if left[0] == self.order[0] else left[:BATCH]
                clean = self.records.clean
                tries = [(key, clean[key]["bits"] if mutation else "") for key in batch]
                answer, child = FORK.Pipe(duplex=False)
                process = FORK.Process(
                    target=work_apart, args=(child, self.name, mutation, tries, self.end)
                )
                process.start()
                child.close()  # so that the process's death ends the pipe
                running[answer] = process, mutation, batch[0]
            if not running:
                return
            for answer in wait(list(running)):
                entry = self.ended(answer, *running.pop(answer))
                self.add(entry)
                if entry["result"] == "survived":
                    following = self.records.left(entry["name"], entry["line"])
                    if following:
                        todo.append((entry["name"], following))

    def ended(self, answer: Any, process: ForkProcess, mutation: str | None, first: Try) -> Entry:
        """What a process has found, or that it has died."""
        try:
            entry: Entry = answer.recv()
        except EOFError:
            process.join()
            entry = {"name": mutation or f"undamaged {first[0]}", "line": 0}
            if mutation:
                entry["line"] = STATE[self.name][2][mutation].line
            entry |= {"case": first[0], "seed": first[1], "result": "crashed", "seconds": 0.0}
            entry["detail"] = f"exit code {process.exitcode}"
        answer.close()
        process.join()
        return entry

    def all(self, sample: int | None) -> None:
        named = STATE[self.name][2]
        # In any order, so that the part that a run has reached is a fair sample.
        order = random.Random(0).sample(list(named.items()), len(named))[:sample]
        missing = [key for key in self.order if key not in self.records.clean]
        self.tries([(None, [key]) for key in missing])
        if not self.records.all_tried():
            return
        todo: list[tuple[str | None, list[Try]]] = []
        for name, mutation in order:
            left = self.records.left(name, mutation.line)
            if name not in self.records.last and (mutation.kind in INVISIBLE or not left):
                why = INVISIBLE.get(mutation.kind, "")
                result = "invisible" if why else "not run"
                entry = {"name": name, "line": mutation.line, "result": result}
                self.add(entry | {"seed": None, "detail": why, "seconds": 0.0})
            elif left:
                todo.append((name, left))
        self.tries(todo)


def merged(files: Sequence[Path]) -> dict[str, Records]:
    """The records of each PTX: what was noticed, and the rest of the cases that came last."""
    found: dict[str, list[Entry]] = {}
    for entry in read(*files):
        found.setdefault(entry["ptx"], []).append(entry)
    return {
        ptx: Records(e for e in entries if holds(e, entries[-1].get("cases")))
        for ptx, entries in found.items()
    }


def merge(target: Path, files: Sequence[Path]) -> None:
    lines = []
    for records in merged(files).values():
        lines += [*records.last.values(), *records.clean.values()]
    target.write_text("".join(json.dumps(entry) + "\n" for entry in lines))


def table(files: Sequence[Path]) -> None:
    """Counts, and the names of what survived."""
    for ptx, records in merged(files).items():
        last = records.last.values()
        counts = Counter(entry["result"] for entry in last)
        survived = [entry for entry in last if entry["result"] == "survived"]
        complete = records.all_tried()
        open_ = [e for e in survived if not complete or records.left(e["name"], e["line"])]
        crashed = [entry for entry in last if entry["result"] == "crashed"]
        noticed = counts["reported"] + counts["wrong"]
        visible = noticed + len(survived) + len(crashed)
        print(f"{ptx}: {len(records.clean)} undamaged runs clean, {len(last)} mutations {counts}")
        print(f"  {noticed} of {visible} noticed ({noticed / max(visible, 1):.1%}),", end=" ")
        print(f"{len(survived) - len(open_)} survived all tries, {len(open_)} still open", end="")
        print(f", {len(crashed)} not known: their processes died" if crashed else "")
        for entry in sorted(survived, key=lambda e: e["line"]):
            at = f"case {entry.get('case', '?')}, seed {entry['seed']}"
            state = f"open after {at}" if entry in open_ else "survived"
            print(f"    {state}: line {entry['line']}, {entry['name']}")
        for entry in crashed:
            print(f"    crashed, {entry['detail']}: line {entry['line']}, {entry['name']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("build", choices=BUILDS)
    run.add_argument("target", type=Path)
    run.add_argument("--sample", type=int)
    run.add_argument("--jobs", type=int, default=1)
    run.add_argument("--seconds", type=float, default=float("inf"))
    run.add_argument("--known", type=Path, nargs="*", default=[])
    for name in ("merge", "table"):
        command = commands.add_parser(name)
        if name == "merge":
            command.add_argument("target", type=Path)
        command.add_argument("files", type=Path, nargs="+")
    a = parser.parse_args()
    if a.command == "run":
        Run(a.build, a.target, a.jobs, a.seconds, a.known).all(a.sample)
        table([*a.known, a.target])
    elif a.command == "merge":
        merge(a.target, a.files)
    else:
        table(a.files)


if __name__ == "__main__":
    main()
