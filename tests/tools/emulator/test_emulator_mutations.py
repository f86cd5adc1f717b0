"""Every damage to three kernels' waits, arrives, fences, counts and scopes; no false report."""

from pathlib import Path

import pytest

from mok.tools.emulator.mutations import INVISIBLE, mutations, run, summary
from tests.tools.emulator.mutated import KERNELS

pytestmark = pytest.mark.emulator
RECORD = Path(__file__).parents[3] / "docs" / "measurements" / "emulator-mutations.md"


def text_of(name: str) -> str:
    return KERNELS[name].text


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("seed", [None, *range(5)])
def test_no_report(name, seed):
    assert KERNELS[name].run(lambda text: text, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("seed", range(5, 50))
def test_no_report_with_many_seeds(name, seed):
    assert KERNELS[name].run(lambda text: text, seed)


def check(name, seeds, only=lambda m: True):
    """Runs the mutations: whatever survives must be invisible to the model, and the reason written."""
    kernel = KERNELS[name]
    outcomes = run(kernel.text, kernel.run, seeds, only)
    seen = [o for o in outcomes if o.mutation.kind not in INVISIBLE]
    lost = [o for o in seen if o.result == "survived"]
    unexplained = [
        key
        for o in lost
        if (key := f"{o.mutation.kind}: {o.mutation.old.strip()}") not in kernel.explained
    ]
    assert not unexplained
    return outcomes


@pytest.mark.parametrize("name", KERNELS)
def test_a_sample_of_the_mutations_is_noticed(name):
    """Every third, with few seeds: CI's share of the full run below."""
    chosen = {m for i, m in enumerate(mutations(text_of(name))) if i % 3 == 0}
    check(name, [None, 0, 1, 2, 3], chosen.__contains__)


@pytest.mark.slow
def test_all_mutations_are_noticed():
    """Writes the record that is committed: run it after a change to the model or the kernels."""
    lines = []
    for name in KERNELS:
        lines += summary(name, check(name, [None, *range(20)]), KERNELS[name].explained)
    head = RECORD.read_text().split("### ")[0] if RECORD.exists() else "# Mutations\n\n"
    RECORD.write_text(head + "\n".join(lines).rstrip() + "\n")


@pytest.mark.parametrize("name", KERNELS)
def test_every_mutation_changes_one_line(name):
    text = text_of(name)
    for m in mutations(text):
        changed = m.apply(text).split("\n")
        assert sum(a != b for a, b in zip(changed, text.split("\n"), strict=True)) == 1


def test_survivors_are_explained_in_the_record():
    assert "**not explained**" not in RECORD.read_text()
