"""setmaxnreg: the pool of a block, what may be asked of it, and the cap that it needs."""

import numpy as np
import pytest

from mok.tools.emulator import KernelFault, LaunchError
from mok.tools.emulator.emulator import translate
from mok.tools.emulator.registers import resident_blocks
from tests.tools.emulator.ptx import HEAD, kernel, run

pytestmark = pytest.mark.emulator
CAP = ".reqntid 384, 1, 1\n.minnctapersm 1\n"  # 65536 / 384 threads, rounded down to 168 each


def roles(producers, consumers, middle="", cap=CAP):
    """Warps 0-3 execute one setmaxnreg, warps 4-11 another."""
    body = (
        "mov.u32 %r0, %tid.x;\nsetp.ge.u32 %p0, %r0, 128;\n@%p0 bra C;\n"
        f"{producers}\nbra E;\nC:\n{consumers}\nE:\n{middle}"
    )
    return kernel(body).replace(")\n{\n", f")\n{cap}{{\n", 1)


def dec(n):
    return f"setmaxnreg.dec.sync.aligned.u32 {n};"


def inc(n):
    return f"setmaxnreg.inc.sync.aligned.u32 {n};"


def launch(text, threads=384, **options):
    return run(text, np.zeros(4, dtype=np.uint32), threads=threads, **options)


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_a_budget_that_fits(seed):
    report = launch(roles(dec(40), inc(232)), seed=seed)  # 128 x 40 + 256 x 232 = 64512
    assert report.warnings == []
    launch(roles(dec(104), inc(200)), seed=seed)
    launch(roles(dec(40), inc(232) + inc(232)), seed=seed)
    launch(roles(dec(40) + inc(168), dec(88) + inc(104)), seed=seed)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_an_increase_that_can_never_be_satisfied(seed):
    """The last consumer warp finds 8 registers per thread where it needs 72."""
    pool = r"deadlock(.|\n)*72 × 32 registers of its block's pool, which has 8 × 32"
    with pytest.raises(KernelFault, match=pool):
        launch(roles(dec(40), inc(240)), seed=seed)
    with pytest.raises(KernelFault, match="must fit the registers"):
        launch(roles(inc(256), "", cap=".reqntid 64, 1, 1\n.maxnreg 32\n"), threads=64, seed=seed)
    with pytest.raises(KernelFault, match="launched with 168"):
        launch(roles("", inc(232)), seed=seed)


@pytest.mark.parametrize("seed", [None, 0])
def test_an_increase_that_waits_for_ever_names_the_pool(seed):
    """The producers would give registers up, but wait for the consumers first."""
    text = roles(
        "bar.sync 1, 384;\n" + dec(40),
        inc(232) + "\nbar.sync 1, 384;",
    )
    with pytest.raises(KernelFault, match=r"deadlock(.|\n)*registers of its block's pool"):
        launch(text, seed=seed)


@pytest.mark.parametrize(
    "producers,consumers,rule",
    [
        (dec(20), inc(168), "multiple of 8 from 24 to 256"),
        (dec(42), inc(168), "multiple of 8 from 24 to 256"),
        (dec(176), inc(168), "dec may not raise"),
        (dec(40), inc(168) + inc(160), "inc may not lower"),
    ],
)
def test_counts_that_are_not_allowed(producers, consumers, rule):
    with pytest.raises(KernelFault, match=rule):
        launch(roles(producers, consumers))


def test_every_warp_of_a_warpgroup_should_take_part():
    one_warp = "setp.ge.u32 %p1, %r0, 32;\n@%p1 bra E;\n" + dec(40)
    report = launch(roles(one_warp, inc(168)))
    assert any("all warps of a warpgroup" in w for w in report.warnings)


def test_without_a_cap_it_has_no_effect_and_says_so():
    report = launch(roles(dec(40), inc(240), cap=".reqntid 384, 1, 1\n"))
    assert any("register cap" in w for w in report.warnings)


def test_more_registers_than_an_sm_has():
    with pytest.raises(LaunchError, match="must fit the 65536"):
        launch(roles(dec(40), inc(240), cap=".reqntid 384, 1, 1\n.maxnreg 240\n"))


@pytest.mark.parametrize(("pool", "together"), [(True, 1), (False, 2)])
def test_registers_bound_the_blocks_of_an_sm(pool, together):
    """168 registers for each of 384 threads: a second block finds none, whatever memory is left."""
    text = HEAD.format(arch="sm_90a") + roles(dec(104) if pool else "", inc(200) if pool else "")
    assert min(resident_blocks(translate(text, "k"), 384), 2) == together
