"""Damage to the megakernels is noticed: a sample of ``tests.kernel_mutations``."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass")
pytest.importorskip("numba", reason="the emulator needs numba")

from mok.tools.emulator.mutations import INVISIBLE
from tests.kernel_mutations import judge, named_mutations, undamaged
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
    expected, lines = undamaged(build, [None])
    for kind in KINDS:
        (mutation,) = [m for name, m in named.items() if name.startswith(kind + ":")]
        assert mutation.line in lines and mutation.kind not in INVISIBLE
        found = judge(build, build.damage(ptx, mutation), expected, [None])
        assert found["result"] == "reported", kind


def test_most_mutations_can_be_seen():
    for name in ("ring", "direct"):
        named = named_mutations(BUILDS[name].ptx())
        visible = [m for m in named.values() if m.kind not in INVISIBLE]
        assert len(named) > 150 and len(visible) > 0.95 * len(named)
