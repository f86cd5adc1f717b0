"""Launch interception: the DSL's host functions run, their launches come to us.

The host function that ``cute.compile`` returns is native code.  It reaches CUDA only through
small wrappers (``_cudaLaunchKernelEx`` and others) exported by the DSL's runtime library.  While
an emulator is active, the first bytes of those wrappers are replaced in memory by a jump to a
ctypes callback, and restored afterwards.  No compiler, driver or GPU is involved.
"""

import atexit
import contextlib
import ctypes
import functools
import mmap
import os
import platform
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from mok.tools.emulator.errors import EmulatorError, LaunchError

_SIZE = 16  # wrappers are 16-byte aligned, so 16 bytes are always ours to overwrite

# cudaDeviceAttr values that the DSL's host code asks for.
_ATTR_MAX_SHARED_OPTIN = 97
_ATTR_SM_COUNT = 16
_ATTR_MAJOR = 75
_ATTR_MINOR = 76


@dataclass
class LaunchRequest:
    """One intercepted launch, as the host function made it."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem_bytes: int
    arg_pointers: int  # address of the void*[] of parameter addresses
    compiled: Any  # the DSL's compiled function, or None when it is unknown
    stream: int = 0
    attributes: dict[int, bytes] = field(default_factory=dict)


def _jump(target: int) -> bytes:
    machine = platform.machine()
    if machine in ("x86_64", "AMD64"):
        return b"\xff\x25\x00\x00\x00\x00" + struct.pack("<Q", target) + b"\x90\x90"
    if machine in ("aarch64", "arm64"):
        return struct.pack("<II", 0x58000050, 0xD61F0200) + struct.pack("<Q", target)
    raise EmulatorError(
        "launch interception needs an x86-64 or aarch64 host", machine, "run on one of these"
    )


@functools.cache
def _dump_folder() -> str:
    """Where the compiler leaves PTX: for the whole process, as it returns what an earlier context has compiled."""
    folder = tempfile.TemporaryDirectory(prefix="mok-emulator-")
    atexit.register(folder.cleanup)
    return folder.name


class Interceptor:
    """Redirects the runtime library's entry points to ``on_launch``.

    ``on_launch(LaunchRequest)`` is called on the launching thread; an exception it raises is kept
    and re-raised in Python once the native host function has returned, whose later launches are
    left out.  The host function itself is told of no error: the DSL would describe it with what
    the real driver knows of the GPU, and the driver must not be used in a forked process.
    """

    def __init__(self, on_launch: Callable[[LaunchRequest], None], arch: str, num_sms: int) -> None:
        self.on_launch = on_launch
        self.arch = arch
        self.num_sms = num_sms
        self.error: BaseException | None = None
        self._saved: list[tuple[int, bytes]] = []
        self._names: dict[int, str] = {}
        self._name_ids: dict[tuple[str, int], int] = {}
        self._callbacks: list[Any] = []
        self._stack: list[Any] = []
        self._touched: list[Any] = []
        self._smem_optin = 232448

    # -- the ten entry points -----------------------------------------------------------------

    def _launch_ex(self, config: int, func: int, args: int) -> int:
        if self.error is not None:
            return 0
        try:
            raw = ctypes.string_at(config, 56)
            gx, gy, gz, bx, by, bz = struct.unpack_from("<6I", raw, 0)
            smem, stream, attrs = struct.unpack_from("<QQQ", raw, 24)
            (count,) = struct.unpack_from("<I", raw, 48)
            found: dict[int, bytes] = {}
            for i in range(count):
                entry = ctypes.string_at(attrs + 72 * i, 72)
                found[struct.unpack_from("<I", entry, 0)[0]] = entry[8:72]
            cluster = struct.unpack_from("<3I", found[4]) if 4 in found else (1, 1, 1)
            self.on_launch(
                LaunchRequest(
                    self._names.get(func, ""),
                    (gx, gy, gz),
                    (bx, by, bz),
                    tuple(max(1, c) for c in cluster),  # type: ignore[arg-type]
                    smem,
                    args,
                    self._stack[-1] if self._stack else None,
                    stream,
                    found,
                )
            )
        except BaseException as exc:
            self.error = exc
        return 0

    def _get_kernel(self, out: int, library: int, name: int) -> int:
        text = ctypes.string_at(name).decode()
        handle = self._name_ids.setdefault((text, library), 0x10000 + 16 * len(self._name_ids))
        self._names[handle] = text
        ctypes.c_uint64.from_address(out).value = handle
        return 0

    def _load_data(self, out: int, *_rest: int) -> int:
        ctypes.c_uint64.from_address(out).value = 0x2000
        return 0

    def _get_device(self, out: int) -> int:
        ctypes.c_int32.from_address(out).value = 0
        return 0

    def _device_attribute(self, out: int, attribute: int, _device: int) -> int:
        digits = int("".join(c for c in self.arch if c.isdigit()))
        values = {
            _ATTR_MAX_SHARED_OPTIN: self._smem_optin,
            _ATTR_SM_COUNT: self.num_sms,
            _ATTR_MAJOR: digits // 10,
            _ATTR_MINOR: digits % 10,
        }
        ctypes.c_int32.from_address(out).value = values.get(attribute, 0)
        return 0

    def _kernel_attribute(self, out: int, *_rest: int) -> int:
        ctypes.c_int32.from_address(out).value = 0
        return 0

    def _occupancy(self, out: int, *_rest: int) -> int:
        ctypes.c_int32.from_address(out).value = 1
        return 0

    @staticmethod
    def _ok(*_rest: int) -> int:
        return 0

    # -- patching -------------------------------------------------------------------------------

    def _patch(self, library: ctypes.CDLL) -> None:
        u64, i32 = ctypes.c_uint64, ctypes.c_int32
        table: dict[str, tuple[Callable[..., int], int]] = {
            "_cudaLaunchKernelEx": (self._launch_ex, 3),
            "_cudaLibraryGetKernel": (self._get_kernel, 3),
            "_cudaLibraryLoadData": (self._load_data, 6),
            "_cudaGetDevice": (self._get_device, 1),
            "_cudaDeviceGetAttribute": (self._device_attribute, 3),
            "_cuKernelGetAttribute": (self._kernel_attribute, 4),
            "_cudaOccupancyMaxActiveBlocksPerMultiprocessor": (self._occupancy, 4),
            "_cudaKernelSetAttributeForDevice": (self._ok, 4),
            "_cudaFuncSetAttribute": (self._ok, 3),
            "_cudaSetDevice": (self._ok, 1),
            "_cudaLibraryUnload": (self._ok, 1),
            "_cudaDeviceSynchronize": (self._ok, 0),
        }
        for name, (function, arity) in table.items():
            try:
                symbol = getattr(library, name)
            except AttributeError:
                continue
            address = ctypes.cast(symbol, ctypes.c_void_p).value or 0
            callback = ctypes.CFUNCTYPE(i32, *([u64] * arity))(function)
            self._callbacks.append(callback)
            target = ctypes.cast(callback, ctypes.c_void_p).value or 0
            self._saved.append((address, ctypes.string_at(address, _SIZE)))
            _write_code(address, _jump(target))

    def _patch_dsl(self, stack: contextlib.ExitStack) -> None:
        from cutlass.base_dsl import compiler
        from cutlass.base_dsl.dsl import BaseDSL
        from cutlass.base_dsl.jit_executor import JitCompiledFunction
        from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction
        from cutlass.cutlass_dsl.cutlass import CutlassBaseDSL

        dump = _dump_folder()
        original_env = compiler.CompileOptions.apply_envar_settings

        def keep_ptx(options: Any, envar: Any, function_name: str) -> None:
            options.options[compiler.KeepPTX].value = True
            if not options.options[compiler.DumpDir].value:
                options.options[compiler.DumpDir].value = dump
            original_env(options, envar, function_name)
            options.options[compiler.EnableTVMFFI].value = False

        owner = self

        def swap(cls: Any, name: str, replacement: Any) -> None:
            previous = cls.__dict__[name]
            setattr(cls, name, replacement)
            stack.callback(setattr, cls, name, previous)

        def tracked(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(fn: Any, *args: Any, **kwargs: Any) -> Any:
                if getattr(fn, "engine", None) is None:
                    raise LaunchError(
                        "an emulated function must have host code for this machine",
                        getattr(fn, "function_name", fn),
                        "compile it inside the emulator's context",
                    )
                if not any(fn is t for t in owner._touched):
                    # Forget libraries loaded for a real device: their kernel handles are not ours.
                    fn.jit_module = None
                    fn._default_executor = None
                    fn.__dict__["num_devices"] = 1
                    owner._touched.append(fn)
                owner._stack.append(fn)
                try:
                    result = original(fn, *args, **kwargs)
                    if owner.error is not None:
                        raise owner.error
                    return result
                finally:
                    owner._stack.pop()
                    owner.error = None

            return call

        swap(compiler.CompileOptions, "apply_envar_settings", keep_ptx)
        for dsl in (BaseDSL, CutlassBaseDSL):
            if "_runtime_can_run_compiled" in dsl.__dict__:
                swap(dsl, "_runtime_can_run_compiled", lambda *_args: True)
        load = CudaDialectJitCompiledFunction._load_cuda_library

        def load_without_handles(self: Any) -> list[Any]:
            # The DSL unloads what it has loaded through the real driver: our handles crash that.
            load(self)
            return []

        swap(CudaDialectJitCompiledFunction, "_load_cuda_library", load_without_handles)
        for cls in (CudaDialectJitCompiledFunction, JitCompiledFunction):
            for name in ("__call__", "run_compiled_program"):
                if name in cls.__dict__ and not (cls is JitCompiledFunction and name == "__call__"):
                    swap(cls, name, tracked(cls.__dict__[name]))

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Redirects launches until the context ends; always restores the library."""
        from cutlass.base_dsl.env_manager import get_prefix_dsl_libs

        libs = [p for p in (get_prefix_dsl_libs("CUTE_DSL") or "").split(os.pathsep) if p]
        if not libs:
            raise EmulatorError(
                "the DSL's runtime library must be known",
                "none found",
                "reinstall nvidia-cutlass-dsl, or set CUTE_DSL_LIBS to libcute_dsl_runtime.so",
            )
        with contextlib.ExitStack() as stack:
            stack.callback(self._restore)
            for path in libs:
                self._patch(ctypes.CDLL(path))
            self._patch_dsl(stack)
            yield

    def _restore(self) -> None:
        for address, code in self._saved:
            _write_code(address, code)
        self._saved.clear()
        self._callbacks.clear()
        for fn in self._touched:
            fn.jit_module = None
            fn._default_executor = None
            fn.__dict__.pop("num_devices", None)
        self._touched.clear()


def _write_code(address: int, code: bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    page = mmap.PAGESIZE
    start = address & ~(page - 1)
    length = address + len(code) - start
    args = (ctypes.c_void_p(start), ctypes.c_size_t(length))
    # Write and execute together: other threads may run code on the same page meanwhile.
    if libc.mprotect(*args, 7) != 0 and libc.mprotect(*args, 3) != 0:
        raise EmulatorError(
            "the runtime library's code must be writable for interception",
            f"mprotect failed with errno {ctypes.get_errno()}",
            "run without a policy that forbids it",
        )
    ctypes.memmove(address, code, len(code))
    libc.mprotect(*args, 5)
    if platform.machine() in ("aarch64", "arm64"):
        clear = getattr(libc, "__clear_cache", None)
        if clear is not None:
            clear(ctypes.c_void_p(address), ctypes.c_void_p(address + len(code)))
