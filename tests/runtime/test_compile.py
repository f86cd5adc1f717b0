"""Compile, keep, read back, rebuild: the life of a kernel without a GPU."""

import dataclasses
import enum
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mok.errors import CompileError
from mok.runtime import compile as compiler
from mok.runtime.cache import CacheFolder, default_folder
from mok.runtime.compile import Kernel, KernelSpec, get_kernel
from mok.runtime.resources import find_nvdisasm

SCALE = KernelSpec.of("scale", "sm_90a", "toy_kernels:Scale", constant=3)


def entries():
    root = default_folder() / "kernels"
    return sorted(p for p in root.iterdir() if p.is_dir()) if root.exists() else []


def count_compilations(monkeypatch):
    count = []
    original = compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda spec: (count.append(spec), original(spec))[1])
    return count


# ---------------------------------------------------------------- specs and keys


@pytest.mark.parametrize(
    "arguments, text",
    [
        (("a/b", "sm_90a", "m:C"), "identifier"),
        (("a", "sm_80", "m:C"), "arch must be one of"),
        (("a", "sm_90a", "m.C"), "package.module:Class"),
    ],
)
def test_bad_specs_are_named(arguments, text):
    with pytest.raises(CompileError, match=text):
        KernelSpec(*arguments)


def test_config_order_does_not_matter():
    one = KernelSpec("k", "sm_90a", "toy_kernels:Scale", (("b", 1), ("a", 2)))
    assert one == KernelSpec.of("k", "sm_90a", "toy_kernels:Scale", a=2, b=1)


def test_specs_are_found_again_in_another_process():
    import pickle

    code = (
        "import pickle, sys; from mok.runtime.compile import KernelSpec; "
        "spec = pickle.load(sys.stdin.buffer); "
        "assert spec in {KernelSpec.of('k', 'sm_90a', 'm:C', a=1)}"
    )
    spec = KernelSpec.of("k", "sm_90a", "m:C", a=1)
    assert KernelSpec.of("k", "sm_90a", "m:C", a=1) is spec
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(spec), check=True, env=environment
    )


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass(frozen=True)
class Tile:
    m: int
    n: int


def test_key_depends_on_what_the_code_depends_on(monkeypatch, tmp_path):
    def key(name="k", arch="sm_90a", **config):
        return compiler.cache_key(KernelSpec.of(name, arch, "toy_kernels:Scale", **config))

    base = key(constant=1)
    assert key(constant=1) == base
    others = [
        key(constant=2),
        key(constant=True),
        key(constant="1"),
        key(constant=1.5),
        key(constant=(1,)),
        key(constant=Colour.RED),
        key(constant=Tile(1, 2)),
        key(constant=Tile(2, 1)),
        key(constant=None),
        key(name="l", constant=1),
        key(arch="sm_100a", constant=1),
    ]
    assert len({base, *others}) == 1 + len(others)
    monkeypatch.setenv("CUTE_DSL_ENABLE_ASSERTIONS", "1")
    assert key(constant=1) != base
    monkeypatch.delenv("CUTE_DSL_ENABLE_ASSERTIONS")
    monkeypatch.setattr(compiler, "_versions", lambda: {"nvidia-cutlass-dsl": "9"})
    assert key(constant=1) != base


def test_key_follows_kernel_sources(monkeypatch, tmp_path):
    package = tmp_path / "mok_toy_sources.py"
    package.write_text("class K: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = KernelSpec.of("k", "sm_90a", "mok_toy_sources:K")
    before = compiler.cache_key(spec)
    package.write_text("class K: x = 1\n")
    assert compiler.cache_key(spec) != before


def test_unstable_configuration_is_refused():
    with pytest.raises(CompileError, match="stable repr"):
        compiler.cache_key(KernelSpec.of("k", "sm_90a", "toy_kernels:Scale", constant=object()))


def test_importing_the_runtime_imports_neither_dsl_nor_cuda():
    code = (
        "import sys; import mok.runtime.compile, mok.runtime.launch, mok.runtime.device; "
        "assert not {'cutlass', 'cuda', 'torch'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ---------------------------------------------------------------- the life of a kernel


@pytest.mark.usefixtures("dsl")
def test_compile_then_memory_then_disk(monkeypatch, capsys):
    compiled = count_compilations(monkeypatch)
    kernel = get_kernel(SCALE)
    assert "compiling scale for sm_90a" in capsys.readouterr().err
    assert get_kernel(SCALE) is kernel
    assert not kernel.from_cache and kernel.compile_s > 0
    assert kernel.argument_types == ("Int64", "Int32", "Float32", "stream")
    assert ".target sm_90a" in kernel.ptx and ".entry scale_0(" in kernel.ptx
    assert kernel.cubin[:4] == b"\x7fELF"
    kernel.load()

    compiler.clear_memory_cache()
    again = get_kernel(SCALE)
    assert again is not kernel and again.from_cache
    assert (again.ptx, again.cubin, again.resources, again.compile_s) == (
        kernel.ptx,
        kernel.cubin,
        kernel.resources,
        kernel.compile_s,
    )
    assert capsys.readouterr().err == ""
    again.load()
    assert compiled == [SCALE]
    assert again.load_s["read"] + again.load_s["link"] < 0.5
    # What the emulator asks for exists even when the kernel came from disk.
    assert again.jit.__ptx__ == kernel.ptx
    assert compiled == [SCALE, SCALE]


@pytest.mark.usefixtures("dsl")
def test_configuration_reaches_the_code():
    other = get_kernel(KernelSpec.of("scale", "sm_90a", "toy_kernels:Scale", constant=7))
    assert "0f40E00000" in other.ptx  # 7.0
    assert "0f40400000" in get_kernel(SCALE).ptx  # 3.0


@pytest.mark.usefixtures("dsl")
@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_other_architectures(arch):
    kernel = get_kernel(KernelSpec.of("scale", arch, "toy_kernels:Scale"))
    assert f".target {arch}" in kernel.ptx
    assert os.environ.get("CUTE_DSL_ARCH") is None


@pytest.mark.usefixtures("dsl")
@pytest.mark.parametrize("name", ["kernel.o", "kernel.cubin", "meta.json"])
def test_a_corrupted_entry_is_rebuilt(monkeypatch, name):
    get_kernel(SCALE)
    (entry,) = entries()
    (entry / name).write_bytes(b"garbage")
    compiler.clear_memory_cache()
    compiled = count_compilations(monkeypatch)
    kernel = get_kernel(SCALE)
    assert compiled == [SCALE] and not kernel.from_cache
    kernel.load()
    compiler.clear_memory_cache()
    assert get_kernel(SCALE).from_cache


@pytest.mark.usefixtures("dsl")
def test_entry_of_an_older_format_is_rebuilt():
    get_kernel(SCALE)
    (entry,) = entries()
    files = CacheFolder(default_folder()).read(entry.name)[1]
    CacheFolder(default_folder()).write(entry.name, {"prefix": "only"}, files)
    compiler.clear_memory_cache()
    assert not get_kernel(SCALE).from_cache


@pytest.mark.usefixtures("dsl")
def test_no_cache_folder_still_compiles_and_links(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOK_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="cache is not used"):
        kernel = get_kernel(SCALE)
    kernel.load()


def _compile_in_process(folder, results):
    os.environ["MOK_CACHE_DIR"] = folder
    sys.path.insert(0, str(Path(__file__).parent))
    kernel = get_kernel(SCALE)
    kernel.load()
    results.append(kernel.from_cache)


@pytest.mark.usefixtures("dsl")
@pytest.mark.parametrize("count", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_ranks_starting_cold_compile_once(tmp_path, count):
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        results = manager.list()
        workers = [
            context.Process(target=_compile_in_process, args=(str(tmp_path / "c"), results))
            for _ in range(count)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(300)
            assert worker.exitcode == 0
        assert sorted(results) == [False] + [True] * (count - 1)


@pytest.mark.usefixtures("dsl")
def test_sources_edited_under_a_running_process_are_not_cached(monkeypatch, tmp_path):
    toys = (Path(__file__).parent / "toy_kernels.py").read_text()
    (tmp_path / "edited_kernels.py").write_text(toys)
    monkeypatch.syspath_prepend(str(tmp_path))
    factory = "edited_kernels:Scale"
    get_kernel(KernelSpec.of("scale", "sm_90a", factory, constant=1))
    (tmp_path / "edited_kernels.py").write_text(toys + "\n# edited\n")
    with pytest.warns(RuntimeWarning, match="sources changed"):
        get_kernel(KernelSpec.of("scale", "sm_90a", factory, constant=2))
    assert len(entries()) == 1


@pytest.mark.usefixtures("dsl")
def test_our_own_sources_count_from_the_import_on(monkeypatch):
    """Not from a factory's first compilation: what was imported before is older then."""
    from mok.runtime import compile as compiling

    monkeypatch.setitem(compiling._first_digests, "sync.py", "as it was when imported")
    with pytest.warns(RuntimeWarning, match=r"sources changed .*\(sync.py\)"):
        kernel = get_kernel(KernelSpec.of("scale", "sm_90a", "toy_kernels:Scale", constant=9))
    assert not kernel.from_cache and entries() == []


# ---------------------------------------------------------------- reports and errors


@pytest.mark.usefixtures("dsl")
def test_resources_of_two_launches():
    kernel = get_kernel(KernelSpec.of("shift", "sm_90a", "toy_kernels:Shift"))
    by_name = {k.symbol: k for k in kernel.resources.kernels}
    assert set(by_name) == {"shift_first_0", "shift_second_1"}
    assert by_name["shift_first_0"].dynamic_smem_bytes == 0
    assert by_name["shift_second_1"].dynamic_smem_bytes == 102400
    assert by_name["shift_second_1"].barriers == 1
    assert 0 < kernel.resources.registers < 32
    assert kernel.resources.spill_bytes == 0 and kernel.resources.warnings == ()


@pytest.mark.usefixtures("dsl")
def test_spills_and_ignored_setmaxnreg_are_reported():
    kernel = get_kernel(KernelSpec.of("spilling", "sm_90a", "toy_kernels:Spilling"))
    assert kernel.resources.spill_bytes > 0
    assert "C7508" in kernel.resources.warnings


@pytest.mark.usefixtures("dsl")
@pytest.mark.skipif(find_nvdisasm() is None, reason="needs nvidia-cuda-nvdisasm")
def test_sass_histogram():
    counts = get_kernel(SCALE).instructions()
    assert counts["LDG"] == 1 and counts["STG"] == 1 and counts["FMUL"] == 2


@pytest.mark.usefixtures("dsl")
@pytest.mark.parametrize(
    "factory, text",
    [
        ("toy_kernels:TakesTensor", "takes scalars"),
        ("toy_kernels:Broken", "must compile"),
        ("toy_kernels:Absent", "importable class"),
        ("no_such_module_here:Scale", "importable class"),
    ],
)
def test_errors_say_what_is_wrong(factory, text):
    with pytest.raises(CompileError, match=text):
        get_kernel(KernelSpec.of("bad", "sm_90a", factory))
    assert entries() == []


@pytest.mark.usefixtures("dsl")
def test_wrong_configuration_is_named():
    with pytest.raises(CompileError, match="config must fit"):
        get_kernel(KernelSpec.of("scale", "sm_90a", "toy_kernels:Scale", colour=3))


def test_repr_of_a_kernel_shows_the_numbers():
    meta = {
        "prefix": "p",
        "function": "f",
        "argument_types": ["stream"],
        "compile_s": 1.0,
        "resources": [],
    }
    files = {"kernel.o": b"", "kernel.ptx": b"", "kernel.cubin": b""}
    assert "0 registers" in repr(Kernel(SCALE, meta, files, from_cache=False))
