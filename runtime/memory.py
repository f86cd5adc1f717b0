"""What the symmetric heap needs from a kind of memory, and the GPU's: CUDA virtual memory (VMM)."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any, Protocol

from mok.errors import CapacityError, DeviceError, ResourceError
from mok.runtime.driver import DriverCallError, bindings, call, current_device, device_context

HANDLE_KINDS = ("fabric", "posix_fd", "none")
"""How physical memory is handed over: between hosts, within one host, not at all."""

_READ_BYTES = 1 << 20
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class Memory(Protocol):
    """Address space, physical segments, and the operations on their contents.

    Addresses and sizes are bytes; sizes of ``reserve``, ``create`` and ``map`` are multiples of
    ``granularity``. Handles are opaque. Streams are int handles; on the host there are none.
    """

    kind: str
    handle_kinds: tuple[str, ...]
    granularity: int

    def reserve(self, size: int) -> int: ...
    def unreserve(self, address: int, size: int) -> None: ...
    def create(self, size: int, handle_kind: str) -> Any: ...
    def export(self, handle: Any, handle_kind: str) -> int | bytes:
        """A file descriptor that the caller closes, or the bytes of a fabric handle."""

    def import_handle(self, token: int | bytes, handle_kind: str) -> Any: ...
    def release(self, handle: Any) -> None:
        """Give up a handle; memory stays while it is mapped anywhere."""

    def map(self, address: int, size: int, handle: Any) -> None: ...
    def unmap(self, address: int, size: int) -> None: ...
    def fill(self, address: int, value: int, size: int, stream: Any) -> None:
        """Set bytes on a stream; with None, at once: the host waits."""

    def copy(self, target: int, source: int, size: int, stream: Any) -> None: ...
    def write_word(self, address: int, value: int, stream: Any) -> None:
        """Store a 32-bit word after all earlier work of the stream, visible to all ranks."""

    def wait_word(self, address: int, value: int, stream: Any, timeout_s: float) -> None:
        """Hold the stream until the word, taken cyclically, is at least ``value``."""

    def read(self, address: int, size: int) -> bytes:
        """Bytes as they are now, even while a kernel runs."""

    def pin(self, size: int) -> int:
        """Zeroed memory that kernels and host both read and write at one address."""

    def unpin(self, address: int, size: int) -> None: ...
    def synchronize(self, stream: Any) -> None: ...
    def device_index(self) -> int | None:
        """CUDA ordinal; None on the host."""

    def close(self) -> None: ...


class CudaMemory:
    """Memory of one GPU, mapped with the driver's virtual memory calls.

    Args:
        ordinal: the GPU that holds this process' segments and reads and writes all others.
    """

    kind = "cuda"
    handle_kinds = HANDLE_KINDS

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self._reader: Any = None
        flags = bindings().CUmemAllocationGranularity_flags
        self.granularity = int(
            call(
                "cuMemGetAllocationGranularity",
                self._properties("none"),
                flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
            )
        )

    def _properties(self, handle_kind: str) -> Any:
        driver = bindings()
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self.ordinal
        properties.requestedHandleTypes = self._handle_type(handle_kind)
        return properties

    @staticmethod
    def _handle_type(handle_kind: str) -> Any:
        kinds = bindings().CUmemAllocationHandleType
        return {
            "fabric": kinds.CU_MEM_HANDLE_TYPE_FABRIC,
            "posix_fd": kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            "none": kinds.CU_MEM_HANDLE_TYPE_NONE,
        }[handle_kind]

    # -------------------------------------------------------------- address space

    def reserve(self, size: int) -> int:
        return int(call("cuMemAddressReserve", size, self.granularity, 0, 0))

    def unreserve(self, address: int, size: int) -> None:
        call("cuMemAddressFree", address, size)

    # -------------------------------------------------------------- segments

    def create(self, size: int, handle_kind: str) -> Any:
        try:
            return call("cuMemCreate", size, self._properties(handle_kind), 0)
        except DriverCallError as error:
            if error.code == _OUT_OF_MEMORY:
                raise CapacityError(
                    "The symmetric heap must fit the GPU's free memory",
                    f"{size / 2**20:.0f} MiB asked of cuda:{self.ordinal}",
                    "Lower max_tokens or macrobatch_size, or free memory "
                    "(torch.cuda.empty_cache()).",
                ) from error
            if handle_kind == "fabric":
                raise no_fabric(str(error)) from error
            raise

    def export(self, handle: Any, handle_kind: str) -> int | bytes:
        try:
            exported = call(
                "cuMemExportToShareableHandle", handle, self._handle_type(handle_kind), 0
            )
        except DriverCallError as error:
            if handle_kind == "fabric":
                raise no_fabric(str(error)) from error
            raise
        return bytes(exported.data) if handle_kind == "fabric" else int(exported)

    def import_handle(self, token: int | bytes, handle_kind: str) -> Any:
        source: Any = token
        if handle_kind == "fabric":
            assert isinstance(token, bytes)
            fabric = bindings().CUmemFabricHandle()
            fabric.data = token
            source = fabric.getPtr()  # an address; `fabric` lives until this returns
        try:
            kind = self._handle_type(handle_kind)
            return call("cuMemImportFromShareableHandle", source, kind)
        except DriverCallError as error:
            if handle_kind == "fabric":
                raise no_fabric(str(error)) from error
            raise

    def release(self, handle: Any) -> None:
        call("cuMemRelease", handle)

    def map(self, address: int, size: int, handle: Any) -> None:
        driver = bindings()
        call("cuMemMap", address, size, 0, handle, 0)
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.ordinal
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        try:
            call("cuMemSetAccess", address, size, [access], 1)
        except DriverCallError as error:
            call("cuMemUnmap", address, size)
            raise DeviceError(
                f"cuda:{self.ordinal} must reach every rank's memory",
                str(error),
                "Peers need NVLink or PCIe peer access (nvidia-smi topo -p2p w).",
            ) from error

    def unmap(self, address: int, size: int) -> None:
        call("cuMemUnmap", address, size)

    # -------------------------------------------------------------- contents

    def fill(self, address: int, value: int, size: int, stream: Any) -> None:
        if stream is not None and current_device() == self.ordinal:  # every call of the layer
            call("cuMemsetD8Async", address, value, size, stream)
            return
        with device_context(self.ordinal), contextlib.ExitStack() as stack:
            if stream is None:
                stream = stack.enter_context(_side_stream())
            call("cuMemsetD8Async", address, value, size, stream)

    def copy(self, target: int, source: int, size: int, stream: Any) -> None:
        with device_context(self.ordinal):
            call("cuMemcpyAsync", target, source, size, stream)

    def write_word(self, address: int, value: int, stream: Any) -> None:
        with device_context(self.ordinal):
            call("cuStreamWriteValue32", stream, address, value & 0xFFFFFFFF, 0)

    def wait_word(self, address: int, value: int, stream: Any, timeout_s: float) -> None:
        # The stream's own wait has no limit; runtime.barrier has the bounded one.
        with device_context(self.ordinal):
            geq = bindings().CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
            call("cuStreamWaitValue32", stream, address, value & 0xFFFFFFFF, int(geq))

    def read(self, address: int, size: int) -> bytes:
        # Own stream and pinned buffer, so that it answers while a kernel hangs.
        pieces = []
        with device_context(self.ordinal):
            if self._reader is None:
                self._reader = (_new_stream(), int(call("cuMemHostAlloc", _READ_BYTES, 0)))
            stream, buffer = self._reader
            for start in range(0, size, _READ_BYTES):
                length = min(_READ_BYTES, size - start)
                call("cuMemcpyDtoHAsync", buffer, address + start, length, stream)
                call("cuStreamSynchronize", stream)
                pieces.append(ctypes.string_at(buffer, length))
        return b"".join(pieces)

    def pin(self, size: int) -> int:
        with device_context(self.ordinal):
            # 3: portable and mapped; with unified addressing the device's address is the host's.
            address = int(call("cuMemHostAlloc", size, 3))
        ctypes.memset(address, 0, size)
        return address

    def unpin(self, address: int, size: int) -> None:
        # After a trap the context refuses everything; the process' end frees the memory then.
        with contextlib.suppress(DriverCallError), device_context(self.ordinal):
            call("cuMemFreeHost", address)

    def synchronize(self, stream: Any) -> None:
        with device_context(self.ordinal):
            call("cuStreamSynchronize", stream)

    def device_index(self) -> int | None:
        return self.ordinal

    def close(self) -> None:
        """Free what ``read`` uses; the mappings are their owners' business."""
        if self._reader is not None:
            (stream, buffer), self._reader = self._reader, None
            with device_context(self.ordinal):
                call("cuStreamDestroy", stream)
                call("cuMemFreeHost", buffer)


def no_fabric(found: str) -> ResourceError:
    """The error for fabric handles that the driver refuses, whatever its attribute promises."""
    return ResourceError(
        "Memory shared between hosts needs fabric handles",
        found,
        "They need NVLink between the hosts (NVL72), the nvidia-imex service, and an IMEX channel "
        "(/dev/nvidia-caps-imex-channels) in this container.",
    )


def _new_stream() -> Any:
    flags = bindings().CUstream_flags
    return call("cuStreamCreate", int(flags.CU_STREAM_NON_BLOCKING))


@contextlib.contextmanager
def _side_stream() -> Iterator[Any]:
    stream = _new_stream()
    try:
        yield stream
        call("cuStreamSynchronize", stream)
    finally:
        call("cuStreamDestroy", stream)


def probe_handles(ordinal: int, size: int = 0) -> dict[str, str]:
    """Which handle kinds work on a GPU, found by allocating, exporting and importing.

    Returns:
        {kind: "" if it works, else the driver's reason}.
    """
    memory = CudaMemory(ordinal)
    size = max(size, memory.granularity)
    found: dict[str, str] = {}
    for kind in HANDLE_KINDS:
        try:
            handle = memory.create(size, kind)
            try:
                if kind != "none":
                    token = memory.export(handle, kind)
                    try:
                        memory.release(memory.import_handle(token, kind))
                    finally:
                        if isinstance(token, int):
                            os.close(token)
                found[kind] = ""
            finally:
                memory.release(handle)
        except (CapacityError, DeviceError, ResourceError, DriverCallError) as error:
            found[kind] = str(error.value)
    return found
