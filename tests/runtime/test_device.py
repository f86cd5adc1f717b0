"""Devices and the driver, with a driver made of plain Python."""

import enum
from types import SimpleNamespace

import pytest

from mok.errors import DeviceError, DriverError, MissingDependencyError, MokError
from mok.runtime import device, driver


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_INVALID_CONTEXT = 201


class FakeDriver:
    """Two GPUs: what cuda.bindings.driver would answer."""

    CUresult = CUresult
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major",
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor",
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT="sms",
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN="smem",
        CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE="l2",
    )

    def __init__(self, api=13000):
        self.api = api
        self.current = None
        h200 = {"major": 9, "minor": 0, "sms": 132, "smem": 232448, "l2": 60 << 20}
        a100 = {"major": 8, "minor": 0, "sms": 108, "smem": 166912, "l2": 40 << 20}
        self.gpus = [
            {**h200, "name": b"NVIDIA H200\0\0"},
            {**a100, "name": b"NVIDIA A100\0"},
        ]

    def cuInit(self, flags):
        return (CUresult.CUDA_SUCCESS,)

    def cuDriverGetVersion(self):
        return CUresult.CUDA_SUCCESS, self.api

    def cuDeviceGetCount(self):
        return CUresult.CUDA_SUCCESS, len(self.gpus)

    def cuDeviceGet(self, ordinal):
        return CUresult.CUDA_SUCCESS, ordinal

    def cuDeviceGetName(self, length, gpu):
        return CUresult.CUDA_SUCCESS, self.gpus[gpu]["name"]

    def cuDeviceGetAttribute(self, key, gpu):
        return CUresult.CUDA_SUCCESS, self.gpus[gpu][key]

    def cuDeviceTotalMem(self, gpu):
        return CUresult.CUDA_SUCCESS, 141 << 30

    def cuCtxGetDevice(self):
        if self.current is None:
            return CUresult.CUDA_ERROR_INVALID_CONTEXT, None
        return CUresult.CUDA_SUCCESS, self.current

    def cuDevicePrimaryCtxRetain(self, gpu):
        return CUresult.CUDA_SUCCESS, ("context", gpu)

    def cuCtxSetCurrent(self, context):
        self.current = context[1]
        return (CUresult.CUDA_SUCCESS,)

    def cuGetErrorString(self, error):
        return CUresult.CUDA_SUCCESS, b"invalid argument"

    def cuMemFree(self, pointer):
        return (CUresult.CUDA_ERROR_INVALID_VALUE,)


@pytest.fixture
def fake(monkeypatch):
    caches = (driver.init, driver._primary_context, device._device_info)
    for cache in caches:
        cache.cache_clear()
    fake = FakeDriver()
    monkeypatch.setattr(driver, "bindings", lambda: fake)
    monkeypatch.setattr(device, "bindings", lambda: fake)
    yield fake
    for cache in caches:
        cache.cache_clear()


def test_device_info(fake):
    info = device.device_info(0)
    assert (info.name, info.cc, info.arch) == ("NVIDIA H200", (9, 0), "sm_90a")
    assert (info.num_sms, info.smem_per_block_optin, info.l2_bytes) == (132, 232448, 60 << 20)
    assert info.memory_bytes == 141 << 30
    assert info.driver_api == 13000
    assert info.reason_unsupported == ""
    assert device.ordinal_of(info) == 0


def test_unsupported_gpu_is_named_and_falls_back(fake):
    backend = device.best_backend(1)
    assert backend.arch is None
    assert "NVIDIA A100 has compute capability 8.0" in backend.reason
    assert str(backend).startswith("the scheduled reference (NVIDIA A100")
    assert str(device.best_backend(0)) == "sm_90a on NVIDIA H200"
    with pytest.raises(DeviceError, match=r"A100.*Use the reference"):
        device.require_arch(1)
    assert device.require_arch(0).arch == "sm_90a"


def test_no_such_device(fake):
    with pytest.raises(DeviceError, match="cuda:2"):
        device.device_info(2)
    with pytest.raises(DeviceError, match="CUDA devices"):
        device.ordinal_of("cpu")
    assert device.ordinal_of("cuda:1") == 1


def test_old_driver_is_refused(fake):
    fake.api = 12080
    with pytest.raises(DriverError, match=r"580 or newer.*found it provides CUDA 12\.8"):
        device.device_info(0)
    assert "12.8" in device.best_backend(0).reason


def test_a_failed_call_carries_the_drivers_text(fake):
    with pytest.raises(
        DriverError, match=r"cuMemFree must succeed.*INVALID_VALUE: invalid arg"
    ) as e:
        driver.call("cuMemFree", 0)
    assert e.value.code == 1


def test_current_device_makes_the_first_context(fake):
    assert driver.current_device() == 0 and fake.current == 0
    fake.current = 1
    assert driver.current_device() == 1


def test_without_a_driver_every_entry_says_so(monkeypatch):
    class NoDriver(FakeDriver):
        def cuInit(self, flags):
            raise RuntimeError("libcuda not found")

        def cuCtxGetDevice(self):
            raise RuntimeError("libcuda not found")

    driver.init.cache_clear()
    monkeypatch.setattr(driver, "bindings", lambda: NoDriver())
    with pytest.raises(DriverError, match="needs the NVIDIA driver"):
        device.device_count()
    with pytest.raises(DriverError, match="needs the NVIDIA driver"):
        driver.current_device()
    backend = device.best_backend()
    assert backend.arch is None and "NVIDIA driver" in str(backend)


def test_without_cuda_python(monkeypatch):
    driver.bindings.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings.driver", None)
    with pytest.raises(MissingDependencyError, match="pip install"):
        driver.bindings()
    driver.bindings.cache_clear()


def test_arch_choice():
    assert [device.arch_for(c) for c in [(9, 0), (10, 0), (10, 3), (12, 0), (8, 9)]] == [
        "sm_90a",
        "sm_100a",
        "sm_103a",
        None,
        None,
    ]


def test_driver_package_version(tmp_path):
    version = tmp_path / "version"
    version.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build\nGCC\n"
    )
    assert device.driver_package_version(version) == "580.159.03"
    assert device.driver_package_version(tmp_path / "absent") == ""


def test_errors_are_mok_errors():
    assert issubclass(driver.DriverCallError, MokError)
