"""Generated damage: delete or weaken each synchronising instruction of a kernel, one at a time.

A checker that finds nothing in working kernels proves little until it finds something in broken
ones.  ``mutations`` lists every damage of a PTX text; ``run`` tries them against a case.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mok.tools.emulator.errors import EmulatorError


@dataclass(frozen=True)
class Mutation:
    """One damaged line of a PTX text (line numbers from 1)."""

    kind: str
    line: int
    old: str
    new: str

    def apply(self, ptx: str) -> str:
        lines = ptx.split("\n")
        if lines[self.line - 1] != self.old:
            raise EmulatorError("a mutation must fit the PTX it was made from", self.line)
        lines[self.line - 1] = self.new
        return "\n".join(lines)


@dataclass(frozen=True)
class Outcome:
    """What became of a mutation: ``reported``, ``wrong`` result, or ``survived``."""

    mutation: Mutation
    result: str
    seed: int | None
    detail: str


# Kinds that this memory model cannot see, with the reason.
INVISIBLE = {
    "delete wgmma.fence": "registers of an MMA in flight are not tracked",
    "delete fence.mbarrier_init": "initialisation is visible at once here",
    "delete tcgen05.fence": "accepted: commit and mbarrier order TMEM",
    "delete tcgen05.wait": "accepted: a load's result is ready at first use",
    "weaken scope": "scopes are not distinguished",
    "delete griddepcontrol": "launches do not overlap here",
    "delete cluster arrive": "counted with its wait",
}

_TRY_WAIT = re.compile(
    r"(\s*)mbarrier\.(?:try|test)_wait\S*\s+(%?\w+),\s*(\[[^\]]*\]),\s*(\S+?)([,;].*)"
)
_DELETE = (
    ("delete arrive", re.compile(r"\s*(?:@!?%p\d+ )?mbarrier\.arrive\.(?!expect_tx)")),
    ("delete copy arrive", re.compile(r"\s*cp\.async\.mbarrier\.arrive")),
    ("delete fence.proxy", re.compile(r"\s*fence\.proxy\.async")),
    ("delete memory fence", re.compile(r"\s*(?:fence\.(?:acq_rel|sc)|membar)")),
    ("delete bulk commit", re.compile(r"\s*cp\.async\.bulk\.commit_group")),
    ("delete bulk wait", re.compile(r"\s*cp\.async\.bulk\.wait_group")),
    ("delete copy wait", re.compile(r"\s*cp\.async\.wait")),
    ("delete wgmma commit", re.compile(r"\s*wgmma\.commit_group")),
    ("delete wgmma wait", re.compile(r"\s*wgmma\.wait_group")),
    ("delete wgmma.fence", re.compile(r"\s*wgmma\.fence")),
    ("delete barrier", re.compile(r"\s*(?:bar\.sync|barrier\.sync|bar\.arrive)")),
    ("delete tcgen05 commit", re.compile(r"\s*(?:@%?\w+ )?tcgen05\.commit")),
    ("delete fence.mbarrier_init", re.compile(r"\s*fence\.mbarrier_init")),
    ("delete release", re.compile(r"\s*(?:red|st)\.release")),
)
_WEAKEN = (
    ("relax acquire", re.compile(r"ld\.acquire"), "ld.relaxed"),
    ("relax release", re.compile(r"red\.release"), "red.relaxed"),
    ("relax release", re.compile(r"st\.release"), "st.relaxed"),
    ("relax atomic", re.compile(r"atom\.acq_rel"), "atom.relaxed"),
)
_WAIT_COUNT = re.compile(r"(\s*(?:cp\.async\.bulk|wgmma|cp\.async)\.wait_group\S*\s+)(\d+)(;.*)")
_EXPECT = re.compile(r"(\s*(?:@!?%p\d+ )?mbarrier\.arrive)\.expect_tx(\S*\s+[^;]*),\s*(%?\w+);(.*)")


def mutations(ptx: str) -> Iterator[Mutation]:
    """Every damage of a PTX text, in order of its lines."""
    for number, line in enumerate(ptx.split("\n"), 1):
        m = _TRY_WAIT.match(line)
        if m:
            pad, predicate, _, parity, _ = m.groups()
            yield Mutation("skip wait", number, line, f"{pad}setp.eq.u32 {predicate}, 0, 0;")
            if re.fullmatch(r"%\w+", parity):
                damaged = line.replace(f"], {parity}", "], %mutated", 1)
                yield Mutation(
                    "flip parity",
                    number,
                    line,
                    f"{pad}{{ .reg .b32 %mutated; xor.b32 %mutated, {parity}, 1; "
                    f"{damaged.strip()} }}",
                )
            continue
        for kind, pattern in _DELETE:
            if pattern.match(line):
                yield Mutation(kind, number, line, "")
        for kind, pattern, replacement in _WEAKEN:
            if pattern.search(line):
                yield Mutation(kind, number, line, pattern.sub(replacement, line))
        m = _WAIT_COUNT.match(line)
        if m:
            weaker = f"{m.group(1)}{int(m.group(2)) + 1}{m.group(3)}"
            yield Mutation("weaken wait count", number, line, weaker)
        m = _EXPECT.match(line)
        if m:
            head, middle, _count, tail = m.groups()
            yield Mutation("drop expected bytes", number, line, f"{head}{middle};{tail}")
            yield Mutation("delete expect arrive", number, line, "")


def run(
    ptx: str,
    case: Callable[[Callable[[str], str], int | None], bool],
    seeds: list[int | None],
    only: Callable[[Mutation], bool] = lambda m: True,
    progress: Callable[[Outcome], None] = lambda o: None,
) -> list[Outcome]:
    """Tries every mutation of ``ptx``.

    ``case(rewrite, seed)`` runs the kernel with its PTX rewritten and says whether the result was
    right; a checker's report is the exception it raises.
    """
    out = []
    for mutation in mutations(ptx):
        if not only(mutation):
            continue
        outcome = Outcome(mutation, "survived", None, INVISIBLE.get(mutation.kind, ""))
        for seed in seeds:
            try:
                right = case(mutation.apply, seed)
            except EmulatorError as exc:
                outcome = Outcome(mutation, "reported", seed, str(exc).split("\n")[0][:200])
                break
            if not right:
                outcome = Outcome(mutation, "wrong", seed, "")
                break
        progress(outcome)
        out.append(outcome)
    return out
