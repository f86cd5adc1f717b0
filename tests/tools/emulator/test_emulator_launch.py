"""Functions from cute.compile: interception, the command, and what is refused."""

import contextlib
import ctypes
import gc
import json
import textwrap

import pytest

pytest.importorskip("cutlass")

import torch

from mok.tools.emulator import Emulator, KernelFault, LaunchError
from mok.tools.emulator.cli import emulate
from mok.tools.emulator.machine import Machine

pytestmark = pytest.mark.emulator

SCRIPT = """
import sys
import cuda.bindings.driver as cuda
import cutlass, torch
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64


@cute.kernel
def double(address: Int64, n: Int32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    pointer = cute.make_ptr(Float32, address, cutlass.AddressSpace.gmem, assumed_align=4)
    x = cute.make_tensor(pointer, cute.make_layout(n))
    i = block * 64 + thread
    if i < n:
        x[i] = x[i] * 2.0 + 1.0


class Double:
    @cute.jit
    def __call__(self, address: Int64, n: Int32, stream: cuda.CUstream):
        double(address, n).launch(grid=((n + 63) // 64, 1, 1), block=(64, 1, 1), stream=stream)


class Twice:
    @cute.jit
    def __call__(self, address: Int64, n: Int32, stream: cuda.CUstream):
        for _ in cutlass.range_constexpr(2):
            double(address, n).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)


def build(arch="sm_90a", host=Double):
    stream = cuda.CUstream(0)
    return cute.compile[cute.GPUArch(arch)](host(), Int64(0), Int32(1), stream)


if __name__ == "__main__":
    x = torch.arange(100, dtype=torch.float32)
    want = x * 2 + 1
    build()(x.data_ptr(), int(sys.argv[1]), 0)
    assert torch.equal(x, want)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("emulated") / "double_script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


@pytest.fixture
def build(script, monkeypatch):
    monkeypatch.syspath_prepend(str(script.parent))
    import double_script

    return double_script.build


def test_the_command_needs_no_compiler(script, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    timeline = tmp_path / "run.json"
    found = emulate(str(script), "sm_90a", 2, 4, timeline=str(timeline), arguments=["100"])
    assert found["reports"] == [] and len(found["launches"]) == 2
    assert "traceEvents" in json.loads(timeline.read_text())


def test_every_architecture_runs_its_own_kernels(build):
    for arch in ("sm_90a", "sm_100a", "sm_103a"):
        x = torch.ones(70)
        with Emulator(arch, num_sms=2) as emulator:
            build(arch)(x.data_ptr(), 70, 0)
        assert torch.equal(x, torch.full((70,), 3.0))
        assert [r.grid for r in emulator.report.launches] == [(2, 1, 1)]
    with Emulator("sm_100a", num_sms=2), pytest.raises(LaunchError, match="sm_90a"):
        build("sm_90a")(x.data_ptr(), 70, 0)


def test_an_access_past_the_tensor_names_the_line(build):
    x = torch.ones(70)
    with Emulator("sm_90a", num_sms=2) as emulator:
        emulator.register(x)
        with pytest.raises(KernelFault, match=r"outside every registered(.|\n)*PTX line"):
            build()(x.data_ptr(), 128, 0)


def test_a_fault_ends_the_host_function_and_asks_the_driver_nothing(build, script, monkeypatch):
    """The DSL describes an error of a launch by asking the driver about the GPU, which a forked process must
    not do."""
    import double_script
    from cutlass.base_dsl.runtime import cuda as runtime

    asked, x = [], torch.ones(64)
    monkeypatch.setattr(runtime, "get_device_info", lambda: asked.append(1))
    with Emulator("sm_90a", num_sms=2) as emulator:
        emulator.register(x)
        function = build(host=double_script.Twice)
        for _ in range(2):
            with pytest.raises(KernelFault, match="outside every registered"):
                function(x.data_ptr() + 4096, 64, 0)
        function(x.data_ptr(), 64, 0)
    assert torch.equal(x, torch.full((64,), 7.0)) and not asked
    assert len(emulator.report.interleavings) == 4  # one of each faulty call, two of the last


@pytest.mark.parametrize("fails", [False, True])
def test_a_launch_leaves_no_registers_behind(build, fails):
    """Objects of a run are garbage in circles, which Python may keep for long."""
    gc.collect()
    gc.disable()
    try:
        x = torch.zeros(100)
        with contextlib.suppress(KernelFault), Emulator("sm_90a") as emulator:
            emulator.register(x)
            build("sm_90a")(x.data_ptr(), 1000 if fails else 100, 0)
        left = [o.regs.nbytes for o in gc.get_objects() if isinstance(o, Machine)]
        assert left and not any(left)
    finally:
        gc.enable()


def test_the_runtime_library_is_restored(build):
    from cutlass.base_dsl.env_manager import get_prefix_dsl_libs

    library = ctypes.CDLL(get_prefix_dsl_libs("CUTE_DSL"))
    address = ctypes.cast(library._cudaLaunchKernelEx, ctypes.c_void_p).value
    before = ctypes.string_at(address, 16)
    with pytest.raises(ZeroDivisionError), Emulator("sm_90a"):
        assert ctypes.string_at(address, 16) != before
        raise ZeroDivisionError
    assert ctypes.string_at(address, 16) == before


def test_a_function_without_host_code_is_refused(build):
    outside = build("sm_90a")
    if outside.engine is not None:
        pytest.skip("this machine's default architecture is the kernel's")
    with Emulator("sm_90a"), pytest.raises(LaunchError, match="inside the emulator's context"):
        outside(0, 1, 0)


def test_a_function_that_carries_no_ptx_is_refused(build, monkeypatch):
    with Emulator("sm_90a"):
        function = build()
        monkeypatch.setattr(type(function), "__ptx__", None)
        with pytest.raises(LaunchError, match=r"must carry its PTX(.|\n)*cute\.KeepPTX"):
            function(torch.ones(64).data_ptr(), 64, 0)


def test_an_option_that_would_refuse_cpu_tensors_is_dropped(script, monkeypatch):
    """With --enable-tvm-ffi the DSL's functions take tensors of a GPU only."""
    monkeypatch.syspath_prepend(str(script.parent))
    import cuda.bindings.driver as cuda
    import cutlass
    import cutlass.cute as cute
    from double_script import Double

    x = torch.ones(64)
    with Emulator("sm_90a", num_sms=2):
        arguments = Double(), cutlass.Int64(0), cutlass.Int32(1), cuda.CUstream(0)
        compiled = cute.compile(*arguments, options="--enable-tvm-ffi --gpu-arch sm_90a")
        compiled(x.data_ptr(), 64, 0)
    assert torch.equal(x, torch.full((64,), 3.0))


RACE = """
    memory = cutlass.utils.SmemAllocator()
    words = memory.allocate_tensor(Float32, cute.make_layout(64), byte_alignment=16)
    words[thread] = 1.0
    x[i] = words[63 - thread]
"""
REGISTERED = "    from mok.runtime.launch import active_emulator\n    active_emulator().register(x)\n    build("


@pytest.mark.parametrize(
    "line,wrong,argument,kind",
    [
        ("", "", "128", "global memory access outside every registered tensor"),
        ("        x[i] = x[i] * 2.0 + 1.0\n", RACE, "64", "data race"),
    ],
)
def test_what_the_command_reports_is_data(tmp_path, line, wrong, argument, kind):
    text = SCRIPT.replace("    build(", REGISTERED)
    if line:
        text = text.replace("    if i < n:\n", "").replace(line, wrong)
    path = tmp_path / "wrong.py"
    path.write_text(text)
    found = emulate(str(path), "sm_90a", 2, 4, arguments=[argument])
    assert {r["run"] for r in found["reports"]} == {"seed 0", "seed 1"}
    assert json.loads(json.dumps(found)) == found
    for report in found["reports"]:
        assert set(report) == {"run", "kind", "warp", "ptx_line", "source", "text"}
        assert report["kind"] in (kind, "read of shared memory that nothing has written")
        assert report["warp"].startswith("CTA (") and report["ptx_line"] > 0
        assert report["text"].count("PTX line") >= 1
    assert any(r["kind"] == kind for r in found["reports"])


def test_a_script_that_cannot_be_launched_is_reported_without_a_place(script):
    found = emulate(str(script), "sm_100a", 0, 4, arguments=["100"])
    (report,) = found["reports"]
    assert report["warp"] is None and report["ptx_line"] is None and report["run"] == "plain"
    assert "sm_90a" in report["text"]


def test_our_handles_are_never_unloaded(build, monkeypatch):
    """The DSL unloads a dead function's libraries through the real driver, which crashes on our handles."""
    from cutlass.cutlass_dsl import cuda_jit_executor

    unloaded = []
    monkeypatch.setattr(cuda_jit_executor.cuda_runtime, "cudaLibraryUnload", unloaded.append)
    x = torch.zeros(64)
    with Emulator("sm_90a"):
        function = build()
        function(x.data_ptr(), 64, 0)
        del function
        gc.collect()
    gc.collect()
    assert torch.equal(x, torch.ones(64))
    assert not unloaded
