"""Damage to the Blackwell forward kernel is noticed: a sample of ``tests.forward_mutations``."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass")
pytest.importorskip("numba", reason="the emulator needs numba")

from mok.tools.emulator.mutations import INVISIBLE
from tests.forward_mutations import judge, kernel_ptx, named_mutations, results

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
]


def test_a_sample_is_reported():
    """One of most kinds, on the plain machine with its checkers."""
    named = named_mutations(kernel_ptx("ring"))
    expected, lines = results("ring", None, None)
    for kind in KINDS:
        (mutation,) = [m for name, m in named.items() if name.startswith(kind + ":")]
        assert mutation.line in lines and mutation.kind not in INVISIBLE
        found = judge("ring", mutation, [expected], [None])
        assert found["result"] == "reported", kind


def test_most_mutations_can_be_seen():
    for build in ("ring", "direct"):
        named = named_mutations(kernel_ptx(build))
        visible = [m for m in named.values() if m.kind not in INVISIBLE]
        assert len(named) > 150 and len(visible) > 0.95 * len(named)
