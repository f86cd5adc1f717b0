"""CUDA memory without a GPU: the real bindings' types and signatures over a driver made of mmap."""

import os

import pytest

pytest.importorskip("cuda.bindings.driver")
import cuda.bindings.driver as real
import torch

from mok.errors import CapacityError, DeviceError, ResourceError
from mok.runtime import driver, memory
from mok.runtime.group import Group
from mok.runtime.heap import Heap, HeapOptions
from mok.runtime.memory_host import HostMemory

OK = real.CUresult.CUDA_SUCCESS


class MmapDriver:
    """The driver calls that the heap makes, on host memory; everything else is the real module."""

    def __init__(self):
        self.host = HostMemory()
        self.calls = []
        self.fail = {}  # call name: CUresult

    def __getattr__(self, name):
        real_thing = getattr(real, name)
        if not name.startswith("cu"):
            return real_thing
        implementation = getattr(type(self), "_" + name)

        def function(*args):
            arity = real_thing.__doc__.partition(")")[0].count(",") + 1
            assert len(args) == arity, f"{name} takes {arity} arguments"
            self.calls.append(name)
            if name in self.fail:
                return (self.fail[name], None)
            result = implementation(self, *args)
            return (OK,) if result is None else (OK, result)

        return function

    def cuInit(self, flags):
        return (OK,)

    def cuDriverGetVersion(self):
        return OK, 13000

    def cuGetErrorString(self, error):
        return OK, b"as the test asked"

    def cuCtxGetDevice(self):
        return OK, 0

    def cuCtxPopCurrent(self):
        return OK, None

    def _cuDeviceGet(self, ordinal):
        return ordinal

    def _cuDevicePrimaryCtxRetain(self, device):
        return "context"

    def _cuCtxPushCurrent(self, context):
        assert context == "context"

    def _cuMemGetAllocationGranularity(self, properties, option):
        return 2 << 20

    def _cuMemAddressReserve(self, size, alignment, address, flags):
        assert size % (2 << 20) == 0 and alignment == 2 << 20
        return self.host.reserve(size)

    def _cuMemAddressFree(self, address, size):
        self.host.unreserve(address, size)

    def _cuMemCreate(self, size, properties, flags):
        assert properties.location.id == 3
        assert properties.location.type == real.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self.requested = properties.requestedHandleTypes
        return self.host.create(size, "none" if int(self.requested) == 0 else "posix_fd")

    def _cuMemRelease(self, handle):
        self.host.release(handle)

    def _cuMemExportToShareableHandle(self, handle, kind, flags):
        if int(kind) == 8:
            token = real.CUmemFabricHandle()
            token.data = b"%64d" % handle
            return token
        return os.dup(handle)

    def _cuMemImportFromShareableHandle(self, token, kind):
        if int(kind) == 8:
            import ctypes

            return os.dup(int(ctypes.string_at(token, 64)))
        return os.dup(token)

    def _cuMemMap(self, address, size, offset, handle, flags):
        self.host.map(address, size, handle)

    def _cuMemSetAccess(self, address, size, descriptions, count):
        (access,) = descriptions
        assert (access.location.id, count) == (3, 1)
        assert access.flags == real.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE

    def _cuMemUnmap(self, address, size):
        self.host.unmap(address, size)

    def _cuStreamCreate(self, flags):
        assert flags == 1
        return "side"

    def _cuStreamDestroy(self, stream):
        pass

    def _cuStreamSynchronize(self, stream):
        pass

    def _cuMemsetD8Async(self, address, value, size, stream):
        self.host.fill(address, value, size, stream)

    def _cuMemcpyAsync(self, target, source, size, stream):
        self.host.copy(target, source, size, stream)

    def _cuMemHostAlloc(self, size, flags):
        base = self.host.reserve(size)
        self.host.map(base, size, self.host.create(size, "none"))
        return base

    def _cuMemFreeHost(self, address):
        self.host.unreserve(address, 1 << 20)

    def _cuMemcpyDtoHAsync(self, target, source, size, stream):
        assert stream == "side"
        self.host.copy(target, source, size, stream)

    def _cuStreamWriteValue32(self, stream, address, value, flags):
        self.host.write_word(address, value, stream)

    def _cuStreamWaitValue32(self, stream, address, value, flags):
        assert flags == 0  # cyclic >=
        self.host.wait_word(address, value, stream, 1.0)


@pytest.fixture
def fake(monkeypatch):
    caches = (driver.init, driver._primary_context)
    for cache in caches:
        cache.cache_clear()
    fake = MmapDriver()
    monkeypatch.setattr(driver, "bindings", lambda: fake)
    monkeypatch.setattr(memory, "bindings", lambda: fake)
    yield fake
    for cache in caches:
        cache.cache_clear()


OPTIONS = HeapOptions(max_size=1 << 28)


def test_a_heap_on_the_driver(fake):
    with Heap(Group.virtual(3, 3), OPTIONS) as heap:
        assert heap.handle_kind == "none" and heap.stride == 1 << 28
        tensor = heap.empty(1 << 20, torch.float32)
        assert heap.size == 4 << 20
        word = heap.empty(4, torch.int32)
        heap.signal(word, 5, rank=2, index=3, stream=7)
        assert heap.read(word, 2) == bytes(12) + b"\5\0\0\0"
        heap.memory.fill(tensor.address(1) + (3 << 20), 9, 4, 0)
        want = bytes(3 << 20) + b"\t" * 4 + bytes((1 << 20) - 4)
        assert heap.read(tensor, 1) == want  # in several pieces
        assert fake.calls.count("cuMemCreate") == fake.calls.count("cuMemRelease") == 6
    assert fake.calls.count("cuMemUnmap") == fake.calls.count("cuMemMap")
    assert fake.calls.count("cuStreamCreate") == fake.calls.count("cuStreamDestroy")
    assert fake.calls.count("cuMemHostAlloc") == fake.calls.count("cuMemFreeHost") == 1
    assert fake.calls.count("cuMemAddressFree") == 1


@pytest.mark.parametrize("kind", ["posix_fd", "fabric"])
def test_handles_travel(fake, kind):
    gpu = memory.CudaMemory(3)
    handle = gpu.create(2 << 20, kind)
    assert int(fake.requested) == {"posix_fd": 1, "fabric": 8}[kind]
    token = gpu.export(handle, kind)
    assert isinstance(token, bytes if kind == "fabric" else int)
    base = gpu.reserve(4 << 20)
    gpu.map(base, 2 << 20, handle)
    gpu.map(base + (2 << 20), 2 << 20, gpu.import_handle(token, kind))
    gpu.fill(base, 7, 100, None)
    assert gpu.read(base + (2 << 20), 101) == b"\7" * 100 + b"\0"
    gpu.unmap(base, 4 << 20)
    gpu.unreserve(base, 4 << 20)


def test_no_memory_is_a_capacity_error_and_nothing_stays(fake):
    fake.fail["cuMemCreate"] = real.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with Heap(Group.virtual(2, 3), OPTIONS) as heap:
        with pytest.raises(CapacityError, match=r"fit the GPU's free memory.*cuda:3"):
            heap.empty(16, torch.float32)
        fake.fail.clear()
        heap.empty(16, torch.float32)


def test_a_half_mapped_heap_is_undone(fake):
    fake.fail["cuMemSetAccess"] = real.CUresult.CUDA_ERROR_INVALID_DEVICE
    with pytest.raises(DeviceError, match=r"must reach every rank's memory.*NVLink"):
        Heap(Group.virtual(2, 3), HeapOptions(size=1, max_size=1 << 28))
    assert fake.calls.count("cuMemMap") == fake.calls.count("cuMemUnmap") == 1
    assert fake.calls.count("cuMemCreate") == fake.calls.count("cuMemRelease") == 1
    assert fake.calls.count("cuMemAddressFree") == 1


def test_refused_fabric_names_the_remedy(fake):
    for name in ("cuMemCreate", "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle"):
        fake.fail = {name: real.CUresult.CUDA_ERROR_NOT_PERMITTED}
        gpu = memory.CudaMemory(3)
        with pytest.raises(ResourceError, match=r"fabric handles.*NOT_PERMITTED.*IMEX"):
            gpu.import_handle(gpu.export(gpu.create(2 << 20, "fabric"), "fabric"), "fabric")


def test_probing_allocates(fake):
    assert memory.probe_handles(3) == {"fabric": "", "posix_fd": "", "none": ""}
    fake.fail["cuMemExportToShareableHandle"] = real.CUresult.CUDA_ERROR_NOT_SUPPORTED
    found = memory.probe_handles(3)
    assert found["none"] == "" and "NOT_SUPPORTED" in found["fabric"]
    assert "NOT_SUPPORTED" in found["posix_fd"]
    created, imported = fake.calls.count("cuMemCreate"), 2
    assert fake.calls.count("cuMemRelease") == created + imported
