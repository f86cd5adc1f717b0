"""Damage to the megakernels is noticed: a sample of ``tests.kernel_mutations``."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass")
pytest.importorskip("numba", reason="the emulator needs numba")

from mok.tools.emulator.mutations import INVISIBLE
from tests.kernel_mutations import Records, judge, named_mutations, packed, tries_of, undamaged
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
    clean = undamaged(build, 0, None) | {"ptx": ""}
    lines = Records([clean]).lines[0, None]
    for kind in KINDS:
        (mutation,) = [m for name, m in named.items() if name.startswith(kind + ":")]
        assert mutation.line in lines and mutation.kind not in INVISIBLE
        found = judge(build, build.damage(ptx, mutation), 0, None, clean["bits"])
        assert found["result"] == "reported", kind


def test_most_mutations_can_be_seen():
    for name in ("ring", "direct"):
        named = named_mutations(BUILDS[name].ptx())
        visible = [m for m in named.values() if m.kind not in INVISIBLE]
        assert len(named) > 150 and len(visible) > 0.95 * len(named)


def entry(name, result, case, seed, **more):
    return {
        "name": name,
        "line": 7,
        "ptx": "0",
        "result": result,
        "case": case,
        "seed": seed,
    } | more


def test_the_plain_machine_comes_first():
    tries = tries_of(3)
    assert tries[:5] == [(0, None), (1, None), (2, None), (0, 0), (1, 1)] and len(tries) == 23


def test_a_run_goes_on_where_files_end():
    """Tries that do not come to the line are passed over; a file's order does not matter."""
    runs = [
        entry("undamaged", "clean", *at, bits="1", lines=packed({6, 7} if at == (1, 1) else {6}))
        for at in tries_of(2)
    ]
    assert Records(runs).left("a", 7) == [(1, 1)] and Records(runs).all_tried()
    tried = [entry("a", "survived", *at) for at in ((1, 1), (1, None))]
    for order in (tried, tried[::-1]):
        assert Records(order + runs).left("a", 6)[0] == (0, 2)
        assert Records(order + runs).left("a", 7) == []
    noticed = Records([*runs, entry("a", "wrong", 0, None), *tried])
    assert noticed.last["a"]["result"] == "wrong" and noticed.left("a", 6) == []
    with pytest.raises(AssertionError, match="other bits"):
        noticed.add(entry("undamaged", "clean", 1, 3, bits="2", lines=""))


def test_old_files_name_a_case_in_undamaged_tries_only():
    runs = [
        entry(f"undamaged {s or 0}", "clean", 0, s, bits="1", lines=packed({7})) for s in (None, 1)
    ]
    tried = [entry("a", "survived", 0, None)]
    for old in runs + tried:
        del old["case"]
    assert Records(tried + runs).left("a", 7) == [(1, 1)]
