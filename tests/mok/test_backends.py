from __future__ import annotations

import pytest
import torch

from mok import backends
from mok.backends import choose_backend, measure_ms, prepare_forward, run_forward
from mok.config import Config, Shape
from mok.errors import DeviceError
from mok.reference import forward_loop, integer_case
from mok.runtime import device as runtime_device
from mok.runtime.device import Backend as RuntimeBackend
from mok.runtime.device import DeviceInfo


def gpu(name: str, cc: tuple[int, int], arch: str | None) -> DeviceInfo:
    return DeviceInfo(
        ordinal=0,
        name=name,
        cc=cc,
        arch=arch,
        num_sms=132,
        smem_per_block_optin=232448,
        l2_bytes=1,
        memory_bytes=1,
        driver_api=13000,
        driver_version="580.1",
    )


H200 = gpu("NVIDIA H200", (9, 0), "sm_90a")
B200 = gpu("NVIDIA B200", (10, 0), "sm_100a")
A100 = gpu("NVIDIA A100", (8, 0), None)


@pytest.fixture
def machine(monkeypatch):
    def present(info: DeviceInfo | None, torch_has_cuda: bool = True) -> None:
        reason = info.reason_unsupported if info else "there is no NVIDIA driver"
        found = RuntimeBackend(info.arch if info else None, info, reason)
        monkeypatch.setattr(runtime_device, "best_backend", lambda: found)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: torch_has_cuda)

    return present


def test_without_a_gpu_the_reference_runs_and_says_why(machine):
    machine(None)
    found = choose_backend()
    assert (found.kind, found.name) == ("reference", "scheduled reference (CPU)")
    assert found.note == "there is no NVIDIA driver"
    said: list[str] = []
    found.announce(said.append)
    assert said == [
        "Running on: scheduled reference (CPU)",
        "No kernel: there is no NVIDIA driver",
    ]


def test_on_hopper_the_kernel_runs(machine):
    machine(H200)
    found = choose_backend()
    assert (found.kind, found.name, found.note) == ("kernel", "sm_90a on NVIDIA H200", "")
    assert found.on_gpu and found.device == torch.device("cuda", 0)
    assert choose_backend("sm_90a") == found


@pytest.mark.parametrize(
    ("info", "torch_has_cuda", "named"),
    [
        (A100, True, "NVIDIA A100 has compute capability 8.0"),
        (B200, True, "the kernel for NVIDIA B200 (sm_100a) has not run on hardware yet"),
        (H200, False, "NVIDIA H200 is present, but this torch was built without CUDA"),
    ],
)
def test_an_unusable_gpu_is_named_and_falls_back(machine, info, torch_has_cuda, named):
    machine(info, torch_has_cuda)
    found = choose_backend()
    assert found.kind == "reference" and named in found.note
    with pytest.raises(DeviceError, match="needs a GPU of that architecture"):
        choose_backend("sm_90a")


def test_an_explicit_kernel_that_cannot_run_is_an_error(machine):
    machine(H200)
    with pytest.raises(DeviceError, match="needs a GPU of that architecture"):
        choose_backend("sm_100a")
    with pytest.raises(DeviceError, match=r"supported one.*sm_80"):
        choose_backend("sm_80")
    machine(None)
    with pytest.raises(DeviceError, match=r"no NVIDIA driver.*--emulate"):
        choose_backend("sm_90a")


def test_blackwell_runs_on_request_only(machine):
    machine(B200)
    assert choose_backend().kind == "reference"
    assert choose_backend("sm_100a").name == "sm_100a on NVIDIA B200"


def test_the_emulator_is_only_used_on_request(machine):
    machine(H200)
    found = choose_backend(emulate=True)
    assert (found.kind, found.name) == ("emulator", "sm_90a in the emulator")
    assert found.device == torch.device("cpu")


@pytest.mark.parametrize("ep_size", [1, 3])
def test_run_forward_on_the_reference(machine, ep_size):
    machine(None)
    case = integer_case(Shape(300, 64, 64, 2, 4))
    config = Config(2, 2, minibatch_size=128, macrobatch_size=256)
    expected = forward_loop(case).bfloat16()
    found = run_forward(case, ep_size, choose_backend(), config=config)
    assert torch.equal(found, expected)
    lengths = [300] if ep_size == 1 else [0, 299, 1]
    assert torch.equal(
        run_forward(case, ep_size, choose_backend(), tokens_per_rank=lengths), expected
    )


def test_the_config_reaches_the_reference(machine, monkeypatch):
    machine(None)
    seen = {}
    monkeypatch.setattr(backends, "forward_reference", lambda *_, **more: seen.update(more))
    case = integer_case(Shape(4, 64, 64, 2, 1))
    run_forward(case, 1, choose_backend(), config=Config(2, 2, 256, 1024))
    assert (seen["minibatch"], seen["macrobatch"]) == (256, 1024)


def test_measuring_counts_neither_the_first_call_nor_the_workspace(machine):
    machine(None)
    calls = []
    assert measure_ms(lambda: calls.append(1), choose_backend()) >= 0
    assert len(calls) == 2
    case = integer_case(Shape(4, 64, 64, 2, 1))
    forward = prepare_forward(case, 1, choose_backend())
    assert torch.equal(forward(), forward())
