"""Damage to the megakernels is noticed: a sample of ``tests.kernel_mutations``."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass")
pytest.importorskip("numba", reason="the emulator needs numba")

from mok.tools.emulator.mutations import INVISIBLE
from tests.kernel_mutations import SEEDS, Records, judge, named_mutations, packed, undamaged
from tests.mutation_builds import BUILDS

pytestmark = pytest.mark.emulator
KINDS = [
    "relax acquire 1",
    "delete barrier 1",
    "delete release 0",
    "relax release 0",
    "skip wait 0",
    "flip parity 0",
    "delete arrive 0",
    "drop expected bytes 0",
    "delete expect arrive 0",
    "delete cluster arrive 1",
    "delete fence.proxy 0",
    "weaken scope 1",
]


def test_a_sample_is_reported():
    """One of most kinds, on the plain machine with its checkers."""
    build = BUILDS["ring"]
    ptx = build.ptx()
    named = named_mutations(ptx)
    clean = undamaged(build, None) | {"ptx": ""}
    lines = Records([clean]).lines[None]
    for kind in KINDS:
        (mutation,) = [m for name, m in named.items() if name.startswith(kind + ":")]
        assert mutation.line in lines and mutation.kind not in INVISIBLE
        found = judge(build, build.damage(ptx, mutation), None, clean["bits"])
        assert found["result"] == "reported", kind


def test_most_mutations_can_be_seen():
    for name in ("ring", "direct"):
        named = named_mutations(BUILDS[name].ptx())
        visible = [m for m in named.values() if m.kind not in INVISIBLE]
        assert len(named) > 150 and len(visible) > 0.95 * len(named)


def entry(name, result, seed, **more):
    return {"name": name, "line": 7, "ptx": "0", "result": result, "seed": seed} | more


def test_a_run_goes_on_where_files_end():
    """Seeds whose run does not come to the line are passed over; a file's order does not matter."""
    runs = [
        entry("undamaged", "clean", seed, bits="1", lines=packed({6, 7} if seed == 3 else {6}))
        for seed in SEEDS
    ]
    assert SEEDS[Records(runs).next_seeds("a", 7)[0]] == 3
    tried = [entry("a", "survived", seed) for seed in (3, None)]
    for order in (tried, tried[::-1]):
        assert Records(runs + order).next_seeds("a", 6)[0] == SEEDS.index(4)
        assert Records(runs + order).next_seeds("a", 7) == []
    noticed = Records([*runs, entry("a", "wrong", None), *tried])
    assert noticed.last["a"]["result"] == "wrong" and noticed.next_seeds("a", 6) == []
    with pytest.raises(AssertionError, match="other bits"):
        noticed.add(entry("undamaged", "clean", 3, bits="2", lines=""))
