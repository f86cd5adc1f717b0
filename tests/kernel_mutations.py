"""Damage a compiled megakernel, one synchronising instruction at a time, and see who notices.

    python -m tests.kernel_mutations run BUILD FILE.jsonl [--sample N] [--jobs N] [--seconds S] [--known F …]
    python -m tests.kernel_mutations merge FILE.jsonl FILE.jsonl …
    python -m tests.kernel_mutations table FILE.jsonl …

``run`` tries a build of ``tests.mutation_builds.BUILDS``: the undamaged kernel with every seed, then each
mutation with one seed after the other until someone notices, on ``--jobs`` processes. Each line of the file
is an undamaged run or what became of a mutation after a few seeds, written when they have ended; a run goes
on from what its own file and the ``--known`` ones say of the same PTX. ``merge`` keeps the last word on each
mutation.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import json
import random
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path

import torch

from mok.tools.emulator import EmulatorError, emulator
from mok.tools.emulator.mutations import INVISIBLE, Mutation, mutations
from tests.mutation_builds import BUILDS, Build, Outcome

SEEDS = (None, *range(19))  # the plain machine first: it takes a third of the time
# Seeds that a process tries on a mutation in a row: it takes a second to read a kernel's text.
BATCH = 4
Entry = dict  # one line of a file


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


def case_of(build: Build, seed: int | None) -> int:
    """The cases take turns: the first on the plain machine, the second with seed 0 …"""
    return 0 if seed is None else (seed + 1) % len(build.cases)


def bits(outcome: Outcome) -> str:
    """A digest of all results."""
    digest = hashlib.sha256()
    for tensor in outcome:
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def undamaged(build: Build, seed: int | None) -> Entry:
    """The kernel as it is: a digest of its results, and the PTX lines that it runs."""
    name = f"undamaged {case_of(build, seed)}"
    try:
        found, lines = build.run(build.cases[case_of(build, seed)], None, seed)
    except EmulatorError as error:
        return {"name": name, "result": "reported", "seed": seed, "detail": first_line(error)}
    return {
        "name": name,
        "result": "clean",
        "seed": seed,
        "detail": "",
        "bits": bits(found),
        "lines": packed(lines),
    }


def judge(build: Build, rewrite: Callable[[str], str], seed: int | None, expected: str) -> Entry:
    """A try: reported by a checker, a wrong result, or survived."""
    try:
        found, _ = build.run(build.cases[case_of(build, seed)], rewrite, seed)
    except EmulatorError as error:
        return {"result": "reported", "seed": seed, "detail": first_line(error)}
    return {
        "result": "survived" if bits(found) == expected else "wrong",
        "seed": seed,
        "detail": "",
    }


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
    """What files say of one PTX: the last word on each mutation, and the undamaged runs."""

    def __init__(self, entries: Iterable[Entry]):
        self.last: dict[str, Entry] = {}
        self.clean: dict[int | None, Entry] = {}
        self.lines: dict[int | None, set[int]] = {}
        for entry in entries:
            self.add(entry)

    def add(self, entry: Entry) -> None:
        seed = entry["seed"]
        if not entry["name"].startswith("undamaged"):
            old = self.last.get(entry["name"])
            if old is None or rank(entry) >= rank(old):
                self.last[entry["name"]] = entry
        elif entry["result"] == "clean":
            kept = self.clean.setdefault(seed, entry)
            assert kept["bits"] == entry["bits"], f"seed {seed}: other bits"
            self.lines[seed] = unpacked(entry["lines"])

    def next_seeds(self, name: str, line: int) -> list[int]:
        """Indices in ``SEEDS`` of those left to try on a mutation, none if no other can notice."""
        last = self.last.get(name)
        if last and last["result"] != "survived":
            return []
        start = SEEDS.index(last["seed"]) + 1 if last else 0
        # A run that does not come to the damaged line is as it was.
        return [i for i in range(start, len(SEEDS)) if line in self.lines[SEEDS[i]]]


def holds(entry: Entry, cases: str | None) -> bool:
    """Whether an entry says something about a build with these cases."""
    noticed = entry["result"] in ("reported", "wrong", "invisible")
    return noticed or entry.get("cases") == cases


def rank(entry: Entry) -> int:
    """How much an entry says: a survivor of more seeds says more, a noticed one most."""
    return SEEDS.index(entry["seed"]) if entry["result"] == "survived" else len(SEEDS)


def read(*files: Path) -> Iterator[Entry]:
    """The lines of files; the last one may have been cut off with its run."""
    for file in files:
        for line in file.read_text().splitlines() if file.exists() else []:
            if line.endswith("}"):
                yield json.loads(line)


def work(name: str, mutation: str | None, tries: list[tuple[int | None, str]], end: float) -> Entry:
    """An undamaged run, or what becomes of a mutation with each seed and its bits in turn, until ``end``.

    ``STATE`` is filled before the processes fork.
    """
    build, ptx, named = STATE[name]
    begin = time.perf_counter()
    if mutation is None:
        entry = undamaged(build, tries[0][0])
    else:
        damage = build.damage(ptx, named[mutation])
        with forgotten():
            for seed, expected in tries:
                entry = {"name": mutation, "line": named[mutation].line}
                entry |= judge(build, damage, seed, expected)
                if entry["result"] != "survived" or time.monotonic() > end:
                    break
    return entry | {"seconds": round(time.perf_counter() - begin, 1)}


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
        self.add(work(name, None, [(None, "")], self.end))

    def add(self, entry: Entry) -> None:
        entry |= {"ptx": self.ptx, "cases": self.cases}
        with self.target.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        assert entry["name"].split()[0] != "undamaged" or entry["result"] == "clean", entry
        self.records.add(entry)

    def tries(self, pool: ProcessPoolExecutor, todo: list[tuple[str | None, list[int]]]) -> None:
        """Each mutation with indices of seeds, and what follows from it, the lowest seeds first."""
        named = STATE[self.name][2]
        running: set[Future] = set()
        while todo or running:
            todo.sort(key=lambda t: t[1][0])
            while todo and len(running) < self.jobs and time.monotonic() < self.end:
                mutation, left = todo.pop(0)
                batch = left[:1] if left[0] == 0 else left[:BATCH]  # most are noticed at once
                seeds = [SEEDS[i] for i in batch]
                clean = self.records.clean
                tries = [(seed, clean[seed]["bits"] if mutation else "") for seed in seeds]
                running.add(pool.submit(work, self.name, mutation, tries, self.end))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                entry = future.result()
                self.add(entry)
                name = entry["name"]
                if name in named:
                    following = self.records.next_seeds(name, entry["line"])
                    if following:
                        todo.append((name, following))

    def all(self, sample: int | None) -> None:
        named = STATE[self.name][2]
        # In any order, so that the part that a run has reached is a fair sample.
        order = random.Random(0).sample(list(named.items()), len(named))[:sample]
        with ProcessPoolExecutor(self.jobs, get_context("fork")) as pool:
            missing = [i for i, seed in enumerate(SEEDS) if seed not in self.records.clean]
            self.tries(pool, [(None, [i]) for i in missing])
            if len(self.records.clean) < len(SEEDS):
                return
            todo: list[tuple[str | None, list[int]]] = []
            for name, mutation in order:
                left = self.records.next_seeds(name, mutation.line)
                if name not in self.records.last and (mutation.kind in INVISIBLE or not left):
                    why = INVISIBLE.get(mutation.kind, "")
                    result = "invisible" if why else "not run"
                    entry = {"name": name, "line": mutation.line, "result": result}
                    self.add(entry | {"seed": None, "detail": why, "seconds": 0.0})
                elif left:
                    todo.append((name, left))
            self.tries(pool, todo)


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
        lines += [*records.clean.values(), *records.last.values()]
    target.write_text("".join(json.dumps(entry) + "\n" for entry in lines))


def table(files: Sequence[Path]) -> None:
    """Counts, and the names of what survived."""
    for ptx, records in merged(files).items():
        last = records.last.values()
        counts = Counter(entry["result"] for entry in last)
        survived = [entry for entry in last if entry["result"] == "survived"]
        all_seeds = records.clean.keys() == set(SEEDS)
        open_ = [e for e in survived if not all_seeds or records.next_seeds(e["name"], e["line"])]
        noticed = counts["reported"] + counts["wrong"]
        visible = noticed + len(survived)
        print(f"{ptx}: {len(records.clean)} undamaged runs clean, {len(last)} mutations {counts}")
        print(f"  {noticed} of {visible} noticed ({noticed / max(visible, 1):.1%}),", end=" ")
        print(f"{len(survived) - len(open_)} survived all seeds, {len(open_)} still open")
        for entry in sorted(survived, key=lambda e: e["line"]):
            state = f"open after {entry['seed']}" if entry in open_ else "survived"
            print(f"    {state}: line {entry['line']}, {entry['name']}")


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
