"""``mok emulate`` with scripts as people write them: exits, exceptions, caught errors, files beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading

import pytest

pytest.importorskip("cutlass")
pytest.importorskip("numba")

from mok.tools.emulator import Emulator
from mok.tools.emulator.cli import emulate
from mok.tools.emulator.errors import EmulatorError

KERNEL = """
import cutlass, torch
from cutlass import Int32, Int64, cute
import cuda.bindings.driver as cuda

@cute.kernel
def kernel(out: Int64, back: Int32):
    at = cute.make_ptr(Int32, out, cute.AddressSpace.gmem, assumed_align=4)
    if cute.arch.thread_idx()[0] == 0:
        cute.arch.store(at + back, Int32(7))

@cute.jit
def f(out: Int64, back: Int32, stream: cuda.CUstream):
    kernel(out, back).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

def run(back=0, **options):
    out = torch.zeros(4, dtype=torch.int32)
    compiled = cute.compile(f, Int64(out.data_ptr()), Int32(0), cuda.CUstream(0), **options)
    compiled(Int64(out.data_ptr()), Int32(back), cuda.CUstream(0))
    assert int(out[0]) == 7
"""
ARCH = 'options="--gpu-arch sm_90a"'


def run(tmp_path, text, seeds=2, **options):
    (tmp_path / "beside.py").write_text(KERNEL)
    script = tmp_path / "script.py"
    script.write_text("from beside import *\n" + textwrap.dedent(text))
    try:
        return emulate(str(script), "sm_90a", seeds, num_sms=2, **options)
    finally:
        sys.modules.pop("beside", None)


def test_every_seed_runs_though_the_compiler_returns_what_it_has(tmp_path):
    """Without options the second context gets the function that the first has compiled."""
    (tmp_path / "beside.py").write_text(KERNEL)
    script = tmp_path / "script.py"
    script.write_text("from beside import *\nrun()\n")
    command = [sys.executable, "-m", "mok", "emulate", str(script), "--arch", "sm_90a"]
    done = subprocess.run(
        [*command, "--seeds", "3", "--num-sms", "2", "--json"],
        capture_output=True, text=True, env={**os.environ, "CUTE_DSL_ARCH": "sm_90a"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    runs = [r["run"] for r in found["launches"]]
    assert not found["reports"] and runs == ["seed 0", "seed 1", "seed 2"]


@pytest.mark.parametrize(("code", "reports"), [("", 0), ("0", 0), ("3", 2)])
def test_a_script_that_exits_runs_with_every_seed(tmp_path, code, reports):
    found = run(tmp_path, f"run({ARCH})\nimport sys; sys.exit({code})")
    assert len(found["launches"]) == 2 and len(found["reports"]) == reports
    assert all("exit code 3" in r["text"] for r in found["reports"])


def test_an_exception_of_the_script_is_reported_with_its_seed(tmp_path):
    found = run(tmp_path, f"run({ARCH})\nassert False, 'wrong result'")
    assert [r["run"] for r in found["reports"]] == ["seed 0", "seed 1"]
    assert "wrong result" in found["reports"][0]["text"] and len(found["launches"]) == 2


def test_a_fault_that_the_script_catches_is_not_lost(tmp_path):
    text = f"""
    from mok.runtime.launch import active_emulator
    try:
        active_emulator().register(torch.zeros(4))
        run(1 << 20, {ARCH})
    except Exception as error:
        print("caught", type(error).__name__)
    """
    found = run(tmp_path, text)
    assert {r["run"] for r in found["reports"]} == {"seed 0", "seed 1"}


HANG = """
import cutlass, torch
from cutlass import Int64, cute
import cuda.bindings.driver as cuda

@cute.kernel
def kernel(out: Int64):
    if cute.arch.thread_idx()[0] < 32:
        cute.arch.barrier(barrier_id=1, number_of_threads=64)

@cute.jit
def f(out: Int64, stream: cuda.CUstream):
    kernel(out).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)

cute.compile(f, Int64(0), cuda.CUstream(0), options="--gpu-arch sm_90a")(Int64(0), cuda.CUstream(0))
"""


def test_a_hang_names_each_waiting_warp_as_data(tmp_path):
    script = tmp_path / "hang.py"
    script.write_text(HANG)
    whole, *waits = emulate(str(script), "sm_90a", 1, num_sms=2)["reports"]
    assert "deadlock" in whole["kind"]
    assert [w["kind"] for w in waits] == ["a warp waits"] and waits[0]["ptx_line"] > 0
    assert waits[0]["warp"] == "CTA (0, 0, 0) warp 0" and "32 of 64" in waits[0]["text"]


def test_seeds_below_zero(tmp_path):
    with pytest.raises(EmulatorError, match="must not be negative"):
        run(tmp_path, "", -2)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"num_sms": 0}, "num_sms must be"),
        ({"num_sms": "8"}, "num_sms must be"),
        ({"num_gpus": 0}, "num_gpus must be"),
        ({"seed": "a"}, "a seed must be"),
        ({"seed": 1.5}, "a seed must be"),
    ],
)
def test_what_an_emulator_is_made_of(options, rule):
    with pytest.raises(EmulatorError, match=rule):
        Emulator("sm_90a", **options)


def test_an_emulator_is_entered_once_at_a_time():
    from mok.runtime.launch import active_emulator

    before = active_emulator()
    emulator = Emulator("sm_90a", num_sms=2)
    with emulator, pytest.raises(EmulatorError, match="entered again"):
        emulator.__enter__()
    assert active_emulator() is before


def test_emulators_end_in_reverse_order():
    first, second = Emulator("sm_90a", num_sms=2), Emulator("sm_90a", num_sms=2)
    first.__enter__()
    second.__enter__()
    with pytest.raises(EmulatorError, match="reverse order"):
        first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    first.__exit__(None, None, None)


def test_one_thread_has_emulators():
    errors: list[Exception] = []

    def other() -> None:
        try:
            with Emulator("sm_90a", num_sms=2):
                pass
        except EmulatorError as error:
            errors.append(error)

    with Emulator("sm_90a", num_sms=2):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(errors) == 1 and "one thread at a time" in str(errors[0])


def test_more_ctas_than_memory_are_refused_before_the_launch(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sysconf", lambda name: 1 << 12)  # 16 MiB in all
    found = run(tmp_path, f"run({ARCH})", 1)
    assert "must fit half of the memory" in found["reports"][0]["text"] and not found["launches"]
