"""Damage the Blackwell forward kernel, one synchronising instruction at a time, and see who notices.

    python -m tests.forward_mutations ring FILE.jsonl     # about an hour on one core
    python -m tests.forward_mutations direct FILE.jsonl

Each line of the file is one mutation; a run that is started again goes on where the last one stopped.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
import time
from collections import ChainMap, Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from mok.config import Shape
from mok.reference import random_case
from mok.tools.emulator import EmulatorError, emulator
from mok.tools.emulator.mutations import INVISIBLE, Mutation, mutations
from tests.forward_runs import ForwardRun, emulated, forward_kernel

ARCH = "sm_100a"
SEEDS = (None, *range(19))  # the plain machine first: it takes a third of the time
# Normal runs take less than a million warp instructions.
MAX_STEPS = 2_000_000
# Few stages, so that each is filled again and again.
STAGES = 2
# Plain and even seeds: three blocks of few rows on rank 0, whose ring holds one, and one pair that computes.
# Odd ones: four blocks with rows in both halves of the pair's tile, a ring of two, several pairs.
CASES = (
    (Shape(16, 128, 64, 6, 2, shared_intermediate_size=64), {"macrobatch": 256, "grid": 16}),
    (Shape(440, 64, 128, 4, 2, shared_intermediate_size=64), {"macrobatch": 512, "grid": 12}),
)
BUILDS = {
    "ring": ({"ep_size": 2, "num_comm_ctas": 2, "num_sms": 4}, {"num_comm_ctas": 4, "num_sms": 8}),
    "direct": ({"ep_size": 1, "num_sms": 2}, {"num_sms": 6}),
}
_CLUSTER_WAIT = re.compile(r"\s*barrier\.cluster\.wait")


def kernel_ptx(build: str) -> str:
    """PTX of a build's kernel."""
    return forward_kernel(ARCH, direct=build == "direct", stages=STAGES).ptx


def all_mutations(ptx: str) -> Iterator[Mutation]:
    """Every mutation of a PTX text: the emulator's, and the waits of cluster barriers."""
    yield from mutations(ptx)
    for number, line in enumerate(ptx.split("\n"), 1):
        if _CLUSTER_WAIT.match(line):
            yield Mutation("delete cluster wait", number, line, "")


def named_mutations(ptx: str) -> dict[str, Mutation]:
    """All mutations by name: the kind, which of its kind it is, and the instruction."""
    found: dict[str, Mutation] = {}
    counts: Counter[str] = Counter()
    for mutation in all_mutations(ptx):
        instruction = re.search(r"[a-z][\w.:]*\.[\w.:]+", mutation.old)
        assert instruction is not None
        found[f"{mutation.kind} {counts[mutation.kind]}: {instruction[0]}"] = mutation
        counts[mutation.kind] += 1
    return found


def results(
    build: str, rewrite: Callable[[str], str] | None, seed: int | None
) -> tuple[list[torch.Tensor], set[int]]:
    """What rank 0's kernel leaves behind, and the PTX lines it ran.

    Raises:
        EmulatorError: a checker's report.
    """
    which = (seed or 0) % len(CASES)
    options: dict[str, Any] = dict(
        ChainMap(BUILDS[build][which], BUILDS[build][0], CASES[which][1])
    )
    with emulated(ARCH, options["num_sms"], seed, check=True) as emu:
        emu.rewrite, emu.max_steps = rewrite, MAX_STEPS
        run = ForwardRun(
            random_case(CASES[which][0]), ARCH, minibatch=256, stages=STAGES, **options
        )
        run.launch(0, emu.register)
        lines = emu.report.lines
    saved = run.saved[0]
    y = [saved["y"]] if run.direct else []
    return [t.view(torch.int16).clone() for t in (run.heap, saved["shared_y"], *y)], lines


def judge(
    build: str, mutation: Mutation, expected: Sequence[list[torch.Tensor]], seeds: Sequence
) -> dict[str, object]:
    """Try a mutation with each seed until someone notices."""
    for seed in seeds:
        try:
            found, _ = results(build, mutation.apply, seed)
        except EmulatorError as error:
            return {"result": "reported", "seed": seed, "detail": str(error).split("\n")[0][:120]}
        finally:  # texts are kept by what they hold, and each mutation is a new one
            emulator._PROGRAMS.clear()
            emulator._PARSED.clear()
        wanted = expected[(seed or 0) % len(CASES)]
        if not all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)):
            return {"result": "wrong", "seed": seed, "detail": ""}
    return {"result": "survived", "seed": seeds[-1], "detail": ""}


def read(target: Path) -> dict[str, dict]:
    """The last word on each mutation of a file."""
    lines = target.read_text().splitlines() if target.exists() else []
    return {entry["name"]: entry for entry in map(json.loads, lines)}


def main(build: str, target: Path) -> None:
    ptx = kernel_ptx(build)
    digest = hashlib.sha256(ptx.encode()).hexdigest()[:16]
    expected, lines = [], set()
    for seed in (None, *range(1, len(CASES))):
        found, seen = results(build, None, seed)
        expected.append(found)
        lines |= seen
    named = named_mutations(ptx)
    # First all of them on the plain machine, then the adversarial ones for what is left.
    for seeds in (SEEDS[:1], SEEDS[1:]):
        done = read(target)
        # In any order, so that the part that a run has reached is a fair sample.
        for name, mutation in random.Random(0).sample(list(named.items()), len(named)):
            last = done.get(name)
            if last and (last["result"] != "survived" or last["seed"] == seeds[-1]):
                continue
            begin = time.perf_counter()
            outcome: dict[str, object] = {"name": name, "line": mutation.line, "ptx": digest}
            if mutation.kind in INVISIBLE:
                outcome |= {"result": "invisible", "seed": None, "detail": INVISIBLE[mutation.kind]}
            elif mutation.line not in lines:
                outcome |= {"result": "not run", "seed": None, "detail": ""}
            else:
                outcome |= judge(build, mutation, expected, seeds)
            outcome["seconds"] = round(time.perf_counter() - begin, 1)
            with target.open("a") as file:
                file.write(json.dumps(outcome) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
