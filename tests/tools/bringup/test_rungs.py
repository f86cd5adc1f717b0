"""Every rung holds, in the emulator; with a damaged kernel or a damaged result it does not."""

from __future__ import annotations

import importlib
import re

import pytest

pytest.importorskip("cutlass")

from mok.backends import choose_backend
from mok.errors import MokError
from mok.tools.bringup.context import Context, NotHere, WrongError
from mok.tools.bringup.notes import Notes, read
from mok.tools.bringup.rungs import RUNGS, ladder, part

pytestmark = pytest.mark.emulator
BY_NAME = {rung.name: rung for rung in RUNGS}


def run(tmp_path, name, arch="sm_100a", fault="", rewrite=None):
    """What the rung found, and its notes."""
    module, _, function = BY_NAME[name].work.partition(":")
    notes = Notes(tmp_path / f"{name}.jsonl", tmp_path / "kernels")
    ctx = Context(choose_backend(arch, emulate=True), notes, fault, rewrite=rewrite)
    with ctx.watched():
        ctx.begin()
        found = getattr(importlib.import_module(module), function)(ctx)
    return found, read(notes.path)


def names(arch):
    return [rung.name for rung in ladder(arch, launched=False) if rung.ranks == "one"]


QUICK = ["driver", "copy", "tile-1cta", "tile-2cta", "accumulator", "block-scaled", "loop"]
QUICK += ["loop-competing", "posix-handle"]
SLOW = ["assumptions", "forward", "backward", "bits", "forward-mxfp8", "backward-mxfp8"]
LONG = [pytest.param(name, marks=pytest.mark.slow) for name in SLOW]


def test_the_lists_name_every_rung():
    assert {*QUICK, *SLOW, "fabric-handle"} == {*names("sm_100a")}
    assert names("sm_103a") == names("sm_100a")
    assert {*names("sm_90a")} == {*names("sm_100a"), "wgmma"} - {"tile-1cta", "tile-2cta"}


@pytest.mark.parametrize("name", [*QUICK, *LONG])
def test_holds_on_blackwell(name, tmp_path):
    found, events = run(tmp_path, name)
    assert found
    launches = [e["name"] for e in events if e["event"] == "launch"]
    kernels = {e["name"]: e for e in events if e["event"] == "kernel"}
    assert {*launches} <= {*kernels}
    assert launches or name in ("driver", "posix-handle")
    for kernel in kernels.values():
        assert kernel["arch"] == "sm_100a" and kernel["spill_bytes"] == 0
        stem = f"{kernel['name']}-{kernel['ptx_sha256'][:12]}"
        assert (tmp_path / "kernels" / f"{stem}.ptx").read_text().count(".entry") >= 1
        assert (tmp_path / "kernels" / f"{stem}.cubin").stat().st_size
    assert all(e["ok"] for e in events if e["event"] == "value")


HOPPER = ["wgmma", "accumulator", "block-scaled", "loop", "loop-competing"]


@pytest.mark.parametrize("name", [*HOPPER, *LONG])
def test_holds_on_hopper(name, tmp_path):
    found, _ = run(tmp_path, name, "sm_90a")
    assert found


@pytest.mark.parametrize("name", ["copy", "tile-2cta", "block-scaled", "loop-competing"])
def test_holds_on_blackwell_ultra(name, tmp_path):
    """GB300's own architecture."""
    found, events = run(tmp_path, name, "sm_103a")
    assert found
    assert {e["arch"] for e in events if e["event"] == "kernel"} == {"sm_103a"}


def test_a_fabric_handle_is_nothing_for_the_emulator(tmp_path):
    with pytest.raises(NotHere, match="one host only"):
        run(tmp_path, "fabric-handle")


@pytest.mark.parametrize("name", [*QUICK, "assumptions", "forward", *LONG[2:5]])
def test_a_damaged_result_is_noticed(name, tmp_path):
    with pytest.raises(WrongError):
        run(tmp_path, name, fault="wrong")
    last = read(tmp_path / f"{name}.jsonl")[-1]
    assert last["event"] == "value" and not last["ok"]
    if "first" in last:
        assert last["mismatches"] == 1 and last["first"][0]["found"] != last["first"][0]["expected"]


def test_a_damaged_tile_of_hopper_is_noticed(tmp_path):
    with pytest.raises(WrongError, match="1 of 16384 elements differ"):
        run(tmp_path, "wgmma", "sm_90a", fault="wrong")


@pytest.mark.slow
def test_damaged_gradients_of_mxfp8_are_noticed(tmp_path):
    with pytest.raises(WrongError, match="against the quantised"):
        run(tmp_path, "backward-mxfp8", "sm_90a", fault="wrong")


# What is taken out of a rung's kernel; the second, third … of its kind where the first matters less.
DAMAGE = {
    "copy": r"st\.global\.v4\.b32 ",
    "tile-1cta": r"tcgen05\.mma\.cta_group::1",
    "tile-2cta": r"tcgen05\.mma\.cta_group::2",
    "accumulator": r"tcgen05\.st\.sync",
    "block-scaled": r"tcgen05\.cp\.cta_group::2",
    "loop": r"atom\.global\.add",
    "loop-competing": r"clusterlaunchcontrol\.query_cancel\.is_canceled",
    "assumptions": r"tcgen05\.st\.sync",
    "wgmma": r"wgmma\.mma_async",
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_kernel_is_noticed(name, tmp_path):
    """One instruction taken out."""
    removed = []

    def rewrite(ptx):
        found = re.search(rf"^[^\n;/]*{DAMAGE[name]}[^;]*;", ptx, re.MULTILINE)
        if found is None:
            return ptx
        removed.append(found.group())
        return ptx[: found.start()] + ptx[found.end() :]

    with pytest.raises(MokError):
        run(tmp_path, name, "sm_90a" if name == "wgmma" else "sm_100a", rewrite=rewrite)
    assert removed


def test_parts_of_the_ladder():
    rungs = ladder("sm_100a", launched=False)
    assert [r.name for r in part(rungs, "tile-2cta", "block-scaled")] == [
        "tile-2cta", "accumulator", "block-scaled",
    ]  # fmt: skip
    assert part(rungs, None, None) == rungs
    with pytest.raises(MokError, match="wgmma"):
        part(rungs, "wgmma", None)
    with pytest.raises(MokError, match="must not be above"):
        part(rungs, "loop", "copy")
    assert [r.name for r in ladder("sm_100a", launched=True)] == ["fabric-handle", "rack"]


def test_an_expected_value_names_its_remedy(tmp_path):
    notes = Notes(tmp_path / "n.jsonl", tmp_path / "kernels")
    ctx = Context(choose_backend("sm_100a", emulate=True), notes)
    with pytest.raises(WrongError, match=r"must be 580; found 570\. Update it"):
        ctx.expect("the driver", 570, 580, "Update it")
