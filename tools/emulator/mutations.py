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
    "delete griddepcontrol": "launches do not overlap here",
}

_GUARD = r"\s*(?:@!?%?\w+ )?"
_TRY_WAIT = re.compile(
    r"(\s*)mbarrier\.(?:try|test)_wait\S*\s+(%?\w+),\s*(\[[^\]]*\]),\s*(\S+?)([,;].*)"
)
_DELETE = tuple(
    (kind, re.compile(_GUARD + pattern))
    for kind, pattern in (
        ("delete arrive", r"mbarrier\.arrive\.(?!expect_tx)"),
        ("delete copy arrive", r"cp\.async\.mbarrier\.arrive"),
        ("delete fence.proxy", r"fence\.proxy\.async"),
        ("delete tensor map fence", r"fence\.proxy\.tensormap"),
        ("delete tensor map copy", r"tensormap\.cp_fenceproxy"),
        ("delete memory fence", r"(?:fence\.(?:acq_rel|sc)|membar)"),
        ("delete bulk commit", r"cp\.async\.bulk\.commit_group"),
        ("delete bulk wait", r"cp\.async\.bulk\.wait_group"),
        ("delete copy wait", r"cp\.async\.wait"),
        ("delete wgmma commit", r"wgmma\.commit_group"),
        ("delete wgmma wait", r"wgmma\.wait_group"),
        ("delete wgmma.fence", r"wgmma\.fence"),
        ("delete barrier", r"(?:bar\.sync|barrier\.sync|bar\.arrive)"),
        ("delete cluster arrive", r"barrier\.cluster\.arrive"),
        ("delete cluster wait", r"barrier\.cluster\.wait"),
        ("delete tcgen05 commit", r"tcgen05\.commit"),
        ("delete tcgen05.fence", r"tcgen05\.fence"),
        ("delete tcgen05.wait", r"tcgen05\.wait"),
        ("delete fence.mbarrier_init", r"fence\.mbarrier_init"),
        ("delete release", r"(?:red|st)\.release"),
    )
)
_WEAKEN = (
    ("relax acquire", re.compile(r"ld\.acquire"), "ld.relaxed"),
    ("relax release", re.compile(r"red\.release"), "red.relaxed"),
    ("relax release", re.compile(r"st\.release"), "st.relaxed"),
    ("relax atomic", re.compile(r"atom\.acq_rel"), "atom.relaxed"),
    (
        "weaken scope",
        re.compile(
            r"(?<=\b)((?:ld|st|red|atom|fence|mbarrier\.arrive)"
            r"\.(?:acquire|release|acq_rel|relaxed|sc)\.)(?:cluster|gpu|sys)(?=[.;])"
        ),
        r"\1cta",
    ),
    (
        "weaken scope",
        re.compile(r"(tensormap::generic\.(?:release|acquire)\.)(?:cluster|gpu|sys)\b"),
        r"\1cta",
    ),
)
_WAIT_COUNT = re.compile(r"(\s*(?:cp\.async\.bulk|wgmma|cp\.async)\.wait_group\S*\s+)(\d+)(;.*)")
_EXPECT = re.compile(r"(\s*(?:@!?%?\w+ )?mbarrier\.arrive)\.expect_tx(\S*\s+[^;]*),\s*(%?\w+);(.*)")
_INIT = re.compile(r"(\s*(?:@!?%?\w+ )?mbarrier\.init\S*\s+\[[^\]]*\],\s*)(\d+)(;.*)")


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
        m = _INIT.match(line)
        if m:
            more = f"{m.group(1)}{int(m.group(2)) + 1}{m.group(3)}"
            yield Mutation("expect one arrival more", number, line, more)
            if int(m.group(2)) > 1:
                fewer = f"{m.group(1)}{int(m.group(2)) // 2}{m.group(3)}"
                yield Mutation("expect half the arrivals", number, line, fewer)
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


def summary(name: str, outcomes: list[Outcome], explained: dict[str, str]) -> list[str]:
    """Markdown lines: how many mutations of a kernel were noticed, and every survivor with its reason.

    ``explained``: reasons by "kind: stripped line", beside ``INVISIBLE``.
    """

    def reason(o: Outcome) -> str:
        key = f"{o.mutation.kind}: {o.mutation.old.strip()}"
        return INVISIBLE.get(o.mutation.kind) or explained.get(key, "**not explained**")

    count = {r: sum(o.result == r for o in outcomes) for r in ("reported", "wrong", "survived")}
    lines = [
        f"### {name}",
        "",
        f"{len(outcomes)} mutations: {count['reported']} reported by a checker, {count['wrong']} "
        f"seen by a wrong result, {count['survived']} survived.",
        "",
    ]
    survivors = [o for o in outcomes if o.result == "survived"]
    if survivors:
        lines += ["| survivor | line | why |", "| --- | --- | --- |"]
        lines += [
            f"| {o.mutation.kind} | `{o.mutation.old.strip()[:90]}` | {reason(o)} |"
            for o in survivors
        ]
        lines.append("")
    return lines
