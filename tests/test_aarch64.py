"""Grace: every dependency has a wheel for it, our code asks for no x86, host functions compile for it.

Nothing here runs on aarch64, the emulator's compiled loops least of all: that is listed as untested.
"""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mok.tools import aarch64

ROOT = Path(__file__).resolve().parents[1]
RECORD = json.loads((ROOT / "docs/measurements/aarch64.json").read_text())
PACKAGES = {p["name"]: p for p in RECORD["packages"]}


def test_every_wheel_of_the_record_fits():
    assert len(PACKAGES) > 50
    assert [p["wheel"] for p in PACKAGES.values() if not aarch64.fits(p["wheel"])] == []
    # The kernel language's compiler and the interpreter's compiler are there, in binary.
    for name in ("nvidia-cutlass-dsl-libs-cu13", "llvmlite", "torch", "cuda-bindings"):
        assert "aarch64" in PACKAGES[name]["wheel"], name


def test_the_record_has_every_dependency_in_a_version_that_we_allow():
    """A new dependency, or another pin, needs a new record: python -m mok.tools.aarch64."""
    for requirement in aarch64.direct():
        found = PACKAGES[canonicalize_name(requirement.name)]
        assert found["direct"]
        assert requirement.specifier.contains(found["version"], prereleases=True), requirement


def test_tags():
    assert aarch64.fits("a-1-py3-none-any.whl")
    assert aarch64.fits("a-1-cp312-cp312-manylinux_2_27_aarch64.manylinux_2_28_aarch64.whl")
    assert not aarch64.fits("a-1-cp312-cp312-manylinux_2_28_x86_64.whl")
    assert not aarch64.fits("a-1-cp312-cp312-macosx_11_0_arm64.whl")


def package(name, requires=(), wheel="none-any"):
    return {"name": name, "version": "1", "wheel": f"{name}-1-py3-{wheel}.whl",
            "requires": list(requires)}  # fmt: skip


def test_dependencies_are_walked_with_the_other_machines_markers():
    shelf = {
        "top": package("top", ["left[more]>=1", 'right; platform_machine == "x86_64"']),
        "left": package("left", ['extra; extra == "more"', 'other; extra == "else"', "below<3"]),
        "extra": package("extra", ['arm; platform_machine == "aarch64"', "below>1"]),
        "below": package("below", ["top"]),  # a circle
        "arm": package("arm"),
    }
    asked = []

    def ask(lines):
        asked.append(list(lines))
        return [shelf[canonicalize_name(Requirement(line).name)] for line in lines]

    found = aarch64.walk([Requirement("top==1")], ask)
    assert [p["name"] for p in found] == ["arm", "below", "extra", "left", "top"]
    assert [p["name"] for p in found if p["direct"]] == ["top"]
    assert asked == [["top==1"], ["left>=1"], ["extra", "below<3"], ["arm"]]


def test_extras_that_come_later_are_followed():
    shelf = {
        "a": package("a", ["b"]),
        "b": package("b", ['c; extra == "x"']),
        "c": package("c"),
        "d": package("d", ["b[x]"]),
    }
    found = aarch64.walk(
        [Requirement("a"), Requirement("d"), Requirement("b")],
        lambda lines: [shelf[Requirement(line).name] for line in lines],
    )
    assert "c" in [p["name"] for p in found]


@pytest.mark.slow
def test_it_resolves_today():
    """Asks the package index; without one there is nothing to ask."""
    try:
        aarch64.ask_pip(["packaging"])
    except aarch64.NoWheelError as error:
        pytest.skip(f"no package index: {str(error)[:200]}")
    found = aarch64.walk(aarch64.direct())
    assert [p["wheel"] for p in found if not aarch64.fits(p["wheel"])] == []


# --------------------------------------------------------------------- our code


def test_nothing_asks_for_x86_alone():
    """A file that speaks of x86 speaks of aarch64, too: the emulator's jump into its callbacks does."""
    words = re.compile(r"\b(x86(_64)?|amd64|i686|avx\d*|sse\d+|rdtsc|cpuid|_mm_\w+)\b", re.I)
    found = [
        str(path.relative_to(ROOT))
        for folder in ("mok", "kernels_cute", "runtime", "tools")
        for path in (ROOT / folder).rglob("*.py")
        for text in [path.read_text()]
        if words.search(text) and "aarch64" not in text.lower()
    ]
    assert found == []


def test_the_compile_cache_tells_machines_apart(monkeypatch):
    from mok.runtime import compile as compiling

    cpuinfo = {"x86_64": "flags\t\t: fpu avx512f\n", "aarch64": "Features\t: fp asimd sve2\n"}
    keys = []
    for machine, text in cpuinfo.items():
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        monkeypatch.setattr(Path, "read_text", lambda self, text=text: text)
        keys.append(compiling._host.__wrapped__())
    assert keys[0][1:] != keys[1][1:] and keys[1][1] == "aarch64"
    assert len({key[2] for key in keys}) == 2  # the CPU's features are read on both


def test_a_host_function_compiles_for_it():
    pytest.importorskip("cutlass")
    import cutlass
    from cuda.bindings import driver
    from cutlass import cute

    from mok.kernels_cute.bringup.simple import CopyKernel
    from mok.runtime.compile import _preload_runtime

    arguments = (cutlass.Int64(1), cutlass.Int64(1), cutlass.Int32(1), driver.CUstream(0))
    options = "--gpu-arch sm_100a --host-target linux-aarch64"
    compiled = cute.compile(CopyKernel(), *arguments, options=options)
    _preload_runtime()
    code = compiled.dump_to_object("mok_copy")
    assert code[:4] == b"\x7fELF"
    assert struct.unpack_from("<H", code, 18) == (183,)  # EM_AARCH64
