"""What the doctor says about several GPUs, with memory on the host and a stand-in for NVML."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from mok.commands import doctor_gpu
from mok.errors import CapacityError
from mok.runtime.memory_host import HostMemory


def test_peers_map_each_other():
    found = doctor_gpu.peers([HostMemory() for _ in range(3)])
    assert found["ok"] and found["found"] == "3 GPUs map each other"
    assert doctor_gpu.peers([HostMemory()])["ok"]


def test_a_peer_that_cannot_be_mapped_is_named():
    class Walled(HostMemory):
        def map(self, address, size, handle):
            raise CapacityError("peer access must be possible", "CUDA_ERROR_INVALID_DEVICE")

    found = doctor_gpu.peers([HostMemory(), Walled()])
    assert not found["ok"] and "1 cannot map 0: CUDA_ERROR_INVALID_DEVICE" in found["found"]
    assert "nvidia-smi topo" in found["remedy"]


def test_imex(tmp_path):
    assert "one host" in doctor_gpu.imex(tmp_path / "absent")["found"]
    (tmp_path / "channel0").touch()
    assert doctor_gpu.imex(tmp_path)["found"] == "channel0"


class Nvml:
    """As far as the doctor asks."""

    NVMLError = RuntimeError
    NVML_CLOCK_SM = 1

    class c_nvmlGpuFabricInfo_t(ctypes.Structure):
        """As in nvidia-ml-py: the caller's, filled through a pointer."""

        _fields_ = (
            ("clusterUuid", ctypes.c_char * 16),
            ("status", ctypes.c_uint),
            ("cliqueId", ctypes.c_uint),
            ("state", ctypes.c_ubyte),
        )

    def __init__(self, count, links, fabric=None, reasons=0):
        self.count, self.links, self.fabric, self.reasons = count, links, fabric, reasons

    def nvmlDeviceGetCount(self):
        return self.count

    def nvmlDeviceGetHandleByIndex(self, i):
        return i

    def nvmlDeviceGetNvLinkState(self, handle, link):
        if link >= self.links:
            raise RuntimeError("not supported")
        return 1

    def nvmlDeviceGetGpuFabricInfo(self, handle, info):
        if self.fabric is None:
            raise RuntimeError("not supported")
        for name, value in vars(self.fabric).items():
            setattr(info._obj, name, value)

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return 1200

    def nvmlDeviceGetMaxClockInfo(self, handle, kind):
        return 1980

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return self.reasons


RACK = SimpleNamespace(clusterUuid=bytes(range(1, 17)), cliqueId=7, state=3)
NO_RACK = SimpleNamespace(clusterUuid=bytes(16), cliqueId=0, state=3)


@pytest.mark.parametrize(
    ("nvml", "ok", "text"),
    [
        (Nvml(8, 18), True, "8 GPUs, 18 NVLinks each, one host"),
        (Nvml(8, 18, NO_RACK), True, "8 GPUs, 18 NVLinks each, one host"),
        (Nvml(4, 18, RACK), True, "4 GPUs, 18 NVLinks each, a tray of an NVLink rack (fabric 01020304.7)"),
        (Nvml(2, 0), False, "2 GPUs, 0 NVLinks each, one host"),
        (Nvml(1, 0), True, "1 GPUs, 0 NVLinks each, one host"),
    ],
)  # fmt: skip
def test_topology(nvml, ok, text):
    found = doctor_gpu.topology(nvml)
    assert (found["ok"], found["found"]) == (ok, text)
    assert bool(found["remedy"]) != ok


@pytest.mark.parametrize(("reasons", "ok"), [(0, True), (0x4, True), (0x40, False), (0x8, False)])
def test_clocks(reasons, ok):
    found = doctor_gpu.clocks(Nvml(1, 18, reasons=reasons))
    assert found["ok"] == ok and "1200 of 1980 MHz" in found["found"]
