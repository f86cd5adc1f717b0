"""Damage a compiled megakernel, one synchronising instruction at a time, and see who notices.

    python -m tests.kernel_mutations run BUILD FILE.jsonl [--sample N] [--jobs N] [--seconds S] [--known F …]
    python -m tests.kernel_mutations merge FILE.jsonl FILE.jsonl …
    python -m tests.kernel_mutations table FILE.jsonl …

``run`` tries a build of ``tests.mutation_builds.BUILDS``: the undamaged kernel with every seed, then each
mutation with one seed after the other until someone notices, on ``--jobs`` processes. Each line of the file
is one try, written when it has ended; a run goes on from what its own file and the ``--known`` ones say of
the same PTX. ``merge`` keeps the last word on each mutation.
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

from mok.tools.emulator import EmulatorError, emulator
from mok.tools.emulator.mutations import INVISIBLE, Mutation, mutations
from tests.mutation_builds import BUILDS, Build, Outcome

SEEDS = (None, *range(19))  # the plain machine first: it takes a third of the time
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
        with forgotten():
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
    return hashlib.sha256(repr(build.cases).encode()).hexdigest()[:8]


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

    def next_seed(self, name: str, line: int) -> int | None:
        """Index in ``SEEDS`` of the next one to try on a mutation; None if no other can notice."""
        last = self.last.get(name)
        if last and last["result"] != "survived":
            return None
        start = SEEDS.index(last["seed"]) + 1 if last else 0
        # A run that does not come to the damaged line is as it was.
        left = (i for i in range(start, len(SEEDS)) if line in self.lines[SEEDS[i]])
        return next(left, None)


def rank(entry: Entry) -> int:
    """How much an entry says: a survivor of more seeds says more, a noticed one most."""
    return SEEDS.index(entry["seed"]) if entry["result"] == "survived" else len(SEEDS)


def read(*files: Path) -> Iterator[Entry]:
    """The lines of files; the last one may have been cut off with its run."""
    for file in files:
        for line in file.read_text().splitlines() if file.exists() else []:
            if line.endswith("}"):
                yield json.loads(line)


def work(name: str, mutation: str | None, seed: int | None, expected: str) -> Entry:
    """One try. ``STATE`` is filled before the processes fork."""
    build, ptx, named = STATE[name]
    begin = time.perf_counter()
    entry: Entry
    if mutation is None:
        entry = undamaged(build, seed)
    else:
        damage = build.damage(ptx, named[mutation])
        entry = {"name": mutation, "line": named[mutation].line}
        entry |= judge(build, damage, seed, expected)
    return entry | {"seconds": round(time.perf_counter() - begin, 1)}


STATE: dict[str, tuple[Build, str, dict[str, Mutation]]] = {}


class Run:
    """A run on several processes, bounded in time."""

    def __init__(self, name: str, target: Path, jobs: int, seconds: float, known: Sequence[Path]):
        self.name, self.target, self.jobs = name, target, jobs
        self.end = time.monotonic() + seconds
        build = BUILDS[name]
        ptx = build.ptx()
        STATE[name] = build, ptx, named_mutations(ptx)
        self.ptx = hashlib.sha256(ptx.encode()).hexdigest()[:16]
        self.cases = cases_digest(build)
        self.records = Records(e for e in read(*known, target) if self.holds(e))
        # Loads and compiles what all processes need; and this machine has the bits of the others.
        self.add(work(name, None, None, ""))

    def holds(self, entry: Entry) -> bool:
        """Whether an entry is of this PTX and, unless somebody noticed, of these cases."""
        noticed = entry["result"] in ("reported", "wrong", "invisible")
        return entry["ptx"] == self.ptx and (noticed or entry["cases"] == self.cases)

    def add(self, entry: Entry) -> None:
        entry |= {"ptx": self.ptx, "cases": self.cases}
        with self.target.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        assert entry["name"].split()[0] != "undamaged" or entry["result"] == "clean", entry
        self.records.add(entry)

    def tries(self, pool: ProcessPoolExecutor, todo: list[tuple[str | None, int]]) -> None:
        """Each (mutation, index of a seed), and what follows from it, the lowest seeds first."""
        named = STATE[self.name][2]
        running: set[Future] = set()
        while todo or running:
            todo.sort(key=lambda t: t[1])
            while todo and len(running) < self.jobs and time.monotonic() < self.end:
                mutation, index = todo.pop(0)
                seed = SEEDS[index]
                expected = self.records.clean[seed]["bits"] if mutation else ""
                running.add(pool.submit(work, self.name, mutation, seed, expected))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                entry = future.result()
                self.add(entry)
                name = entry["name"]
                if name in named:
                    following = self.records.next_seed(name, entry["line"])
                    if following is not None:
                        todo.append((name, following))

    def all(self, sample: int | None) -> None:
        named = STATE[self.name][2]
        # In any order, so that the part that a run has reached is a fair sample.
        order = random.Random(0).sample(list(named.items()), len(named))[:sample]
        with ProcessPoolExecutor(self.jobs, get_context("fork")) as pool:
            missing = [i for i, seed in enumerate(SEEDS) if seed not in self.records.clean]
            self.tries(pool, [(None, i) for i in missing])
            if len(self.records.clean) < len(SEEDS):
                return
            todo: list[tuple[str | None, int]] = []
            for name, mutation in order:
                index = self.records.next_seed(name, mutation.line)
                if name not in self.records.last and (mutation.kind in INVISIBLE or index is None):
                    why = INVISIBLE.get(mutation.kind, "")
                    result = "invisible" if why else "not run"
                    entry = {"name": name, "line": mutation.line, "result": result}
                    self.add(entry | {"seed": None, "detail": why, "seconds": 0.0})
                elif index is not None:
                    todo.append((name, index))
            self.tries(pool, todo)


def merged(files: Sequence[Path]) -> dict[str, Records]:
    """The records of each PTX."""
    found: dict[str, list[Entry]] = {}
    for entry in read(*files):
        found.setdefault(entry["ptx"], []).append(entry)
    return {ptx: Records(entries) for ptx, entries in found.items()}


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
        open_ = [
            e
            for e in survived
            if not all_seeds or records.next_seed(e["name"], e["line"]) is not None
        ]
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
