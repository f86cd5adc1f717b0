"""The symmetric heap's memory on the CPU: the same mappings as on a GPU, with mmap.

For the emulator and for tests of everything that is not a kernel. One reservation of address space;
segments are shared memory (memfd) that other processes can map, or private pages (virtual ranks).
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import struct
import sys
import time
from typing import Any

from mok.errors import CapacityError, MokTimeoutError, ResourceError

_PROT_NONE = 0
_PROT_RW = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0x40
_FAILED = ctypes.c_void_p(-1).value
_PRIVATE = -1  # a handle without a file: pages of this process only


class HostMemory:
    """``mok.runtime.memory.Memory`` on mmap. There are no streams: everything is done at once."""

    kind = "host"
    handle_kinds = ("posix_fd", "none")

    def __init__(self) -> None:
        self.granularity = mmap.PAGESIZE
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = (
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_long,
        )
        self._libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self._private = itertools.count(1)

    # -------------------------------------------------------------- address space

    def _mmap(self, address: int, size: int, protection: int, flags: int, fd: int) -> int:
        found = self._libc.mmap(address or None, size, protection, flags, fd, 0)
        if found == _FAILED or found is None:
            error = ctypes.get_errno()
            raise CapacityError(
                f"{size / 2**20:.1f} MiB must be mapped", f"mmap: {os.strerror(error)}"
            )
        return found

    def reserve(self, size: int) -> int:
        # 2 MiB alignment as on a GPU, so that addresses look alike.
        alignment = 2 << 20
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        raw = self._mmap(0, size + alignment, _PROT_NONE, flags, -1)
        start = -(-raw // alignment) * alignment
        if start > raw:
            self._libc.munmap(raw, start - raw)
        tail = raw + size + alignment - (start + size)
        if tail:
            self._libc.munmap(start + size, tail)
        return start

    def unreserve(self, address: int, size: int) -> None:
        self._libc.munmap(address, size)

    # -------------------------------------------------------------- segments

    def create(self, size: int, handle_kind: str) -> int:
        have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if size > have:  # pages come when they are touched: the process would be killed then
            raise CapacityError(
                f"{size / 2**30:.1f} GiB must fit this machine's memory",
                f"{have / 2**30:.1f} GiB",
                "Give HeapOptions a smaller size",
            )
        if handle_kind == "none":
            return _PRIVATE * next(self._private)
        if not hasattr(os, "memfd_create"):
            raise ResourceError(
                "Host memory shared by processes needs memfd", sys.platform, "Use a Linux machine."
            )
        fd = os.memfd_create("mok-heap", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)  # reads as zeros
        except OSError as error:
            os.close(fd)
            raise CapacityError(f"{size} bytes of shared memory", str(error)) from error
        return fd

    def export(self, handle: int, handle_kind: str) -> int:
        return os.dup(handle)

    def import_handle(self, token: int | bytes, handle_kind: str) -> int:
        assert isinstance(token, int)
        return os.dup(token)

    def release(self, handle: int) -> None:
        if handle >= 0:
            os.close(handle)

    def map(self, address: int, size: int, handle: int) -> None:
        if handle < 0:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
            self._mmap(address, size, _PROT_RW, flags, -1)
        else:
            self._mmap(address, size, _PROT_RW, mmap.MAP_SHARED | _MAP_FIXED, handle)

    def unmap(self, address: int, size: int) -> None:
        # Back to reserved address space, which frees the pages.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
        self._mmap(address, size, _PROT_NONE, flags, -1)

    # -------------------------------------------------------------- contents

    def fill(self, address: int, value: int, size: int, stream: Any) -> None:
        ctypes.memset(address, value, size)

    def copy(self, target: int, source: int, size: int, stream: Any) -> None:
        ctypes.memmove(target, source, size)

    def write_word(self, address: int, value: int, stream: Any) -> None:
        # An aligned 4-byte store, which x86-64 and AArch64 do in one piece.
        ctypes.c_uint32.from_address(address).value = value & 0xFFFFFFFF

    def wait_word(self, address: int, value: int, stream: Any, timeout_s: float) -> None:
        word = ctypes.c_uint32.from_address(address)
        deadline = time.monotonic() + timeout_s
        while True:
            # The driver's rule: cyclic, (int32)(*address - value) >= 0.
            found = word.value
            (difference,) = struct.unpack("<i", struct.pack("<I", (found - value) & 0xFFFFFFFF))
            if difference >= 0:
                return
            if time.monotonic() > deadline:
                raise MokTimeoutError(
                    f"A signal must reach {value} within {timeout_s:g} s", f"it is at {found}"
                )
            time.sleep(0.0002)

    def read(self, address: int, size: int) -> bytes:
        return ctypes.string_at(address, size)

    def pin(self, size: int) -> int:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        return self._mmap(0, size, _PROT_RW, flags, -1)

    def unpin(self, address: int, size: int) -> None:
        self._libc.munmap(address, size)

    def synchronize(self, stream: Any) -> None:
        pass

    def device_index(self) -> int | None:
        return None

    def close(self) -> None:
        pass
