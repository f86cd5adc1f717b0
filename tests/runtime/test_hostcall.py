"""The launch path end to end, with a stand-in for the CUDA runtime that records launches."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None or not sys.platform.startswith("linux"),
    reason="the stand-in library needs a C compiler",
)


class Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("smem", ctypes.c_uint64),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_int32),
    )


class Launch(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_char_p),
        ("config", ctypes.POINTER(Config)),
        ("params", ctypes.POINTER(ctypes.c_void_p)),
    )


CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p)

SCRIPT = r"""
import ctypes, json, sys
sys.path.insert(0, {here!r})
import test_hostcall as t
library = ctypes.CDLL({library!r}, mode=ctypes.RTLD_GLOBAL)
events = []

@t.CALLBACK
def log(kind, number, pointer):
    kind = kind.decode()
    if kind == "launch":
        launch = ctypes.cast(pointer, ctypes.POINTER(t.Launch)).contents
        config = launch.config.contents
        address = ctypes.cast(launch.params[0], ctypes.POINTER(ctypes.c_uint64))[0]
        shape = [list(config.grid), list(config.block), config.smem]
        event = [launch.kernel.decode(), *shape, number, address]
        if launch.kernel.startswith(b"scale"):
            event.append(ctypes.cast(launch.params[1], ctypes.POINTER(ctypes.c_int32))[0])
            event.append(ctypes.cast(launch.params[2], ctypes.POINTER(ctypes.c_float))[0])
        events.append([kind, *event])
    else:
        events.append([kind, number])

library.mok_standin_log(log)
import mok.runtime.hostcall as hostcall
device = 0
hostcall.current_device = lambda: device
from mok.runtime.compile import KernelSpec, get_kernel
from mok.runtime.launch import launch, set_active_emulator
{body}
print(json.dumps(events))
"""


@pytest.fixture(scope="module")
def standin(tmp_path_factory):
    path = tmp_path_factory.mktemp("standin") / "libstandin.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", path, HERE / "standin.c"], check=True)
    return path


@pytest.fixture
def run(standin, monkeypatch, dsl):
    # Its own process: the DSL binds its runtime library when it is first imported.
    import json

    monkeypatch.setenv("CUTE_DSL_LIBS", str(standin))

    def run(body):
        script = SCRIPT.format(here=str(HERE), library=str(standin), body=body)
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


SCALE = 'k = get_kernel(KernelSpec.of("scale", "sm_90a", "toy_kernels:Scale"))\n'


def test_arguments_arrive_and_devices_are_prepared_once(run):
    body = SCALE + (
        "k(0x1234567890, 300, 1.5, 77)\n"
        "launch(k, 16, -1, 0.25, 0)\n"
        "device = 3\n"
        "k(16, 1, 2, 5)\n"
        "k(16, 1, 2, 5)\n"
    )
    block = [128, 1, 1]
    for _ in ("compiled", "from the cache"):
        events = run(body)
        assert events == [
            ["load", 0],
            ["kernel", 0x11],
            ["prepare", 0],
            ["launch", "scale_0", [3, 1, 1], block, 0, 77, 0x1234567890, 300, 1.5],
            ["launch", "scale_0", [0, 1, 1], block, 0, 0, 16, -1, 0.25],
            ["kernel", 0x11],
            ["prepare", 3],
            ["launch", "scale_0", [1, 1, 1], block, 0, 5, 16, 1, 2.0],
            ["launch", "scale_0", [1, 1, 1], block, 0, 5, 16, 1, 2.0],
        ]


def test_stream_objects_and_two_launches(run):
    body = (
        "from cuda.bindings.driver import CUstream\n"
        'k = get_kernel(KernelSpec.of("shift", "sm_90a", "toy_kernels:Shift"))\n'
        "k(64, 128, CUstream(9))\n"
    )
    launches = [e for e in run(body) if e[0] == "launch"]
    assert [(e[1], e[2], e[4], e[5]) for e in launches] == [
        ("shift_first_0", [1, 1, 1], 0, 9),
        ("shift_second_1", [2, 1, 1], 102400, 9),
    ]


def test_bad_arguments_never_reach_a_launch(run):
    body = SCALE + (
        "for args in [(1, 2**31, 1.0, 0), (2**63, 1, 1.0, 0), (1, 1, 'x', 0), (1, 1, 1.0)]:\n"
        "    try: k(*args)\n"
        "    except Exception as e: events.append([type(e).__name__, str(e)])\n"
    )
    errors = [e for e in run(body) if e[0] == "CompileError"]
    assert len(errors) == 4
    assert "Argument 1 of this kernel is Int32" in errors[0][1]
    assert "Argument 0 of this kernel is Int64" in errors[1][1]
    assert "Argument 2 of this kernel is Float32" in errors[2][1]
    assert "takes 4 arguments" in errors[3][1] and "3 given" in errors[3][1]


PREPARED = SCALE + "from mok.runtime.launch import Prepared\np = Prepared(k, 1, (300, 1.5), 2)\n"


def test_a_prepared_launch_changes_its_first_arguments_and_stream(run):
    body = PREPARED + (
        "p(0, 0x1234567890)\n"
        "p(77, 64)\n"
        "k(16, 1, 0.5, 5)\n"  # has a buffer of its own
        "p(77, 80)\n"
        "p(0, 96)\n"
    )
    launches = [(e[5], *e[6:]) for e in run(body) if e[0] == "launch"]
    assert launches == [
        (0, 0x1234567890, 300, 1.5), (77, 64, 300, 1.5), (5, 16, 1, 0.5), (77, 80, 300, 1.5),
        (0, 96, 300, 1.5),
    ]  # fmt: skip
    assert [e for e in run(body) if e[0] == "prepare"] == [["prepare", 2], ["prepare", 0]]


def test_a_prepared_launch_that_fails_raises(run):
    body = PREPARED + (
        "p(0, 64)\n"
        "library.mok_standin_fail(9)\n"
        "try: p(0, 64)\n"
        "except Exception as e: events.append([type(e).__name__, str(e)])\n"
        "library.mok_standin_fail(0)\n"
        "p(0, 64)\n"
        "try: Prepared(k, 2, (1.5,), 0)(0, 64, 300)\n"
        "except Exception as e: events.append([type(e).__name__, str(e)])\n"
    )
    events = run(body)
    errors = [e for e in events if e[0].endswith("Error")]
    assert errors[0][0] == "DriverError" and "error 9" in errors[0][1]
    assert errors[1][0] == "CompileError" and "Int64" in errors[1][1]
    assert sum(e[0] == "launch" for e in events) == 3


def test_a_failed_launch_raises(run):
    body = SCALE + (
        "library.mok_standin_fail(9)\n"
        "try: k(16, 1, 1.0, 0)\n"
        "except Exception as e: events.append([type(e).__name__, str(e)])\n"
    )
    name, text = run(body)[-1]
    assert name == "DriverError" and "error 9" in text and "configuration" in text


def test_the_emulator_gets_the_jit_function(run):
    body = (
        "class Emulator:\n"
        "    def launch(self, compiled, args):\n"
        "        kind = type(compiled).__name__\n"
        "        events.append(['emulator', kind, compiled.__ptx__[:2], list(args)])\n"
        + SCALE
        + "before = set_active_emulator(Emulator())\n"
        "assert before is None\n"
        "outside = k\n" + SCALE + "assert k is not outside\n"
        "launch(k, 16, 1, 1.0, 0)\n"
        "set_active_emulator(before)\n"
        "assert get_kernel(outside.spec) is outside\n"
    )
    assert run(body) == [["emulator", "CudaDialectJitCompiledFunction", "//", [16, 1, 1.0, 0]]]
