"""Damage a compiled megakernel, one synchronising instruction at a time, and see who notices.

    python -m tests.kernel_mutations ring FILE.jsonl [SAMPLE]

for each build of ``tests.mutation_builds.BUILDS``. Each line of the file is one mutation; a run that is
started again goes on where the last one stopped. With SAMPLE only so many are tried, drawn at random.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from mok.tools.emulator import EmulatorError, emulator
from mok.tools.emulator.mutations import INVISIBLE, Mutation, mutations
from tests.mutation_builds import BUILDS, Build, Outcome

SEEDS = (None, *range(19))  # the plain machine first: it takes a third of the time


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


def undamaged(build: Build, seeds: Sequence[int | None]) -> tuple[dict[int, Outcome], set[int]]:
    """Each case's results, and the PTX lines that some case runs.

    Raises:
        EmulatorError: the undamaged kernel is reported. AssertionError: its results differ.
    """
    expected: dict[int, Outcome] = {}
    lines: set[int] = set()
    for seed in seeds:
        which = case_of(build, seed)
        found, seen = build.run(build.cases[which], None, seed)
        assert same(expected.setdefault(which, found), found), f"seed {seed}: other bits"
        lines |= seen
    return expected, lines


def same(a: Outcome, b: Outcome) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def judge(
    build: Build,
    rewrite: Callable[[str], str],
    expected: dict[int, Outcome],
    seeds: Sequence[int | None],
) -> dict[str, object]:
    """Try a mutation with each seed until someone notices."""
    for seed in seeds:
        which = case_of(build, seed)
        try:
            found, _ = build.run(build.cases[which], rewrite, seed)
        except EmulatorError as error:
            return {"result": "reported", "seed": seed, "detail": str(error).split("\n")[0][:120]}
        finally:  # texts are kept by what they hold, and each mutation is a new one
            emulator._PROGRAMS.clear()
            emulator._PARSED.clear()
        if not same(expected[which], found):
            return {"result": "wrong", "seed": seed, "detail": ""}
    return {"result": "survived", "seed": seeds[-1], "detail": ""}


def read(target: Path) -> dict[str, dict]:
    """The last word on each mutation of a file."""
    lines = target.read_text().splitlines() if target.exists() else []
    return {entry["name"]: entry for entry in map(json.loads, lines)}


def main(name: str, target: Path, sample: int | None) -> None:
    build = BUILDS[name]
    ptx = build.ptx()
    digest = hashlib.sha256(ptx.encode()).hexdigest()[:16]
    named = named_mutations(ptx)
    # In any order, so that the part that a run has reached is a fair sample.
    order = random.Random(0).sample(list(named.items()), len(named))[:sample]
    expected, lines = undamaged(build, SEEDS)
    print(f"{name}: undamaged, {len(SEEDS)} seeds: no report", flush=True)
    # First all of them on the plain machine, then the adversarial ones for what is left.
    for seeds in (SEEDS[:1], SEEDS[1:]):
        done = read(target)
        for key, mutation in order:
            last = done.get(key)
            if last and (last["result"] != "survived" or last["seed"] == seeds[-1]):
                continue
            begin = time.perf_counter()
            outcome: dict[str, object] = {"name": key, "line": mutation.line, "ptx": digest}
            if mutation.kind in INVISIBLE:
                outcome |= {"result": "invisible", "seed": None, "detail": INVISIBLE[mutation.kind]}
            elif mutation.line not in lines:
                outcome |= {"result": "not run", "seed": None, "detail": ""}
            else:
                outcome |= judge(build, build.damage(ptx, mutation), expected, seeds)
            outcome["seconds"] = round(time.perf_counter() - begin, 1)
            with target.open("a") as file:
                file.write(json.dumps(outcome) + "\n")
    print(name, Counter(entry["result"] for entry in read(target).values()))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
