"""The emulator against what an H200 computed, as ``hardware.py`` recorded it.

Until the record is committed the comparison has nothing to compare with; once ``tests/data/h200.json``
is there, a program that is missing from it or differs fails.
"""

import json

import pytest

pytest.importorskip("cutlass")

import torch

from mok.tools.emulator import Emulator
from tests.tools.emulator.hardware import PROGRAMS, RECORD, available, digest, packed, unpacked

pytestmark = pytest.mark.emulator
SAMPLE = ["forward, integers, EP 1", "token sum"]  # CI's share; the rest is slow


def emulate(name):
    with Emulator("sm_90a", num_sms=8) as emulator:
        # Only values are compared here, and not every helper declares its memory.
        emulator.register = lambda *tensors, gpu=0: None
        return PROGRAMS[name][0]("cpu")


@pytest.mark.skipif(not RECORD.exists(), reason="no H200 record yet: run hardware.py on one")
@pytest.mark.parametrize(
    "name", [n if n in SAMPLE else pytest.param(n, marks=pytest.mark.slow) for n in PROGRAMS]
)
def test_same_as_the_h200(name):
    _, package, exact = PROGRAMS[name]
    programs = json.loads(RECORD.read_text())["programs"]
    if name not in programs:
        assert len(programs) >= 8 and not name.startswith(("forward", "backward", "token")), (
            f"not recorded yet: on an H200, python -m tests.tools.emulator.hardware '{name}'"
        )
        return
    assert available(package), f"pip install -e '.[test]' brings {package}"
    found, want = emulate(name), programs[name]
    assert found.keys() == want["hashes"].keys()
    for key, value in found.items():
        if exact:
            assert digest(value) == want["hashes"][key], key
        else:
            compare(value, unpacked(want["values"][key], value))


def compare(value, want):
    """FP32 within 1e-5 in L2; BF16 within one ulp, and at most 1 % of the elements different."""
    if value.dtype == torch.float32:
        assert (value - want).norm() <= 1e-5 * want.norm()
        return
    ulps = (ordered(value) - ordered(want.to(value.dtype))).abs()
    assert int(ulps.max()) <= 1 and float((ulps > 0).float().mean()) <= 0.01


def ordered(bf16):
    """BF16 values as integers in which neighbours differ by one."""
    bits = bf16.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def test_the_record_holds_enough_programs():
    if RECORD.exists():
        assert len(json.loads(RECORD.read_text())["programs"]) >= 8
    ours = [n for n, (_, package, _) in PROGRAMS.items() if package == "cutlass"]
    assert len(ours) >= 8  # so that a GPU machine without the test packages can record enough


@pytest.mark.parametrize("name", ["token sum"])
def test_a_record_is_compared(name, tmp_path, monkeypatch):
    """A recorded output is found equal, and one bit more makes the comparison fail."""
    from tests.tools.emulator import test_emulator_hardware as module

    outputs = emulate(name)
    hashes = {k: digest(v) for k, v in outputs.items()}
    path = tmp_path / "h200.json"
    monkeypatch.setattr(module, "RECORD", path)
    path.write_text(json.dumps({"programs": {name: {"hashes": hashes}}}))
    test_same_as_the_h200(name)
    path.write_text(json.dumps({"programs": {name: {"hashes": {k: "0" for k in hashes}}}}))
    with pytest.raises(AssertionError):
        test_same_as_the_h200(name)


def test_tolerances():
    x = torch.linspace(-2, 2, 1000).bfloat16()
    torch.testing.assert_close(unpacked(packed(x), x), x.float())
    compare(x, x.float())
    moved = x.view(torch.int16).clone()
    moved[:9] += 1
    compare(moved.view(torch.bfloat16), x.float())
    moved[:20] += 1
    with pytest.raises(AssertionError):
        compare(moved.view(torch.bfloat16), x.float())
