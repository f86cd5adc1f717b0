"""Call a host function out of an object file that the DSL exported.

The DSL's own loader unpickles the signature from the object file and walks every visible GPU. We
know the signature from our cache entry and prepare only the devices that launch, so this does
neither. Calling convention (DSL 4.8.1): ``f(void **p)``, p[i] the address of argument i, and after
the last argument the address of the int32 result.
"""

from __future__ import annotations

import ctypes
import importlib
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mok.errors import CompileError, DriverError
from mok.runtime.driver import current_device

_CODES = {
    "Int32": "i",
    "Uint32": "I",
    "Int64": "q",
    "Uint64": "Q",
    "Float32": "f",
    "Float64": "d",
    "stream": "Q",
}
_SLOT = 8


class HostFunction:
    """A host function linked into this process.

    Args:
        path: the object file; it may be deleted afterwards.
        prefix: the prefix it was exported under.
        function: the DSL's name of the host function.
        types: argument types as in ``Kernel.argument_types``, the stream last.
    """

    def __init__(self, path: Path, prefix: str, function: str, types: tuple[str, ...]) -> None:
        runtime = importlib.import_module("cutlass.cute.runtime")
        self._module = runtime.load_module(str(path))  # owns the machine code
        self._launch = self._function(f"_mlir_{prefix}__mlir_ciface_{function}")
        self._init = self._function(f"_mlir_{prefix}_cuda_init")
        self._prepare = self._function(f"_mlir_{prefix}_cuda_load_to_device")

        self._types = types
        self._pack = _packer(types)
        self._buffer, self._pointers, self._result = _slots(len(types))
        self._library = ctypes.c_void_p()
        self._devices: set[int] = set()
        self._lock = threading.Lock()  # one buffer: the call itself takes microseconds

    def _function(self, symbol: str) -> Any:
        address = self._module.engine.lookup(symbol)
        if not address:
            raise CompileError("A compiled kernel must hold its host code", f"no {symbol}")
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

    def __call__(self, *args: Any) -> None:
        with self._lock:
            device = current_device()
            if device not in self._devices:
                self.prepare(device)
            try:
                self._pack(self._buffer, 0, *args)
            except struct.error:
                self._pack_slowly(args)
            self._launch(self._pointers)
            error = self._result.value
        if error:
            raise DriverError("A kernel launch must succeed", _runtime_error(error))

    def _pack_slowly(self, args: tuple[Any, ...]) -> None:
        # A CUstream is no int for struct; anything else that fails is an error worth a name.
        if len(args) != len(self._types):
            raise CompileError(
                f"This kernel takes {len(self._types)} arguments ({', '.join(self._types)})",
                f"{len(args)} given",
            )
        values = list(args)
        for i, (kind, value) in enumerate(zip(self._types, args, strict=True)):
            convert = float if kind.startswith("Float") else int
            try:
                values[i] = convert(value)
                struct.pack(_CODES[kind], values[i])
            except (struct.error, TypeError, ValueError, OverflowError) as error:
                raise CompileError(
                    f"Argument {i} of this kernel is {kind}", f"{value!r}: {error}"
                ) from error
        self._pack(self._buffer, 0, *values)

    def prepare(self, device: int) -> None:
        """Load the device code, once, and allow its shared memory and clusters on a device."""
        error = ctypes.c_int32(0)
        library = ctypes.pointer(self._library)
        if not self._devices:
            self._run(self._init, library, error)
        self._run(self._prepare, library, ctypes.c_int32(device), error)
        self._devices.add(device)

    def repeated(self, leading: int, rest: tuple[Any, ...], device: int) -> Repeated:
        """The call with these arguments behind the first ``leading`` ones, to be repeated on a device."""
        if device not in self._devices:
            with self._lock:
                self.prepare(device)
        return Repeated(self, self._launch, self._types, leading, rest)

    @staticmethod
    def _run(function: Any, library: Any, *values: Any) -> None:
        error = values[-1]
        pointers = (ctypes.c_void_p * (1 + len(values)))(
            ctypes.addressof(library), *(ctypes.addressof(v) for v in values)
        )
        function(pointers)
        if error.value:
            raise DriverError("The driver must load our device code", _runtime_error(error.value))


class Repeated:
    """Calls of a host function that differ in their first arguments, all Int64, and the stream.

    Everything else is packed once. Calls go to the device that this was made for: it must be current.
    """

    def __init__(
        self,
        owner: HostFunction,
        launch: Any,
        types: tuple[str, ...],
        leading: int,
        rest: tuple[Any, ...],
    ) -> None:
        self._owner = owner  # keeps the code of ``launch`` loaded
        if any(t != "Int64" for t in types[:leading]):
            raise CompileError(
                f"The first {leading} arguments of a repeated call are Int64", types[:leading]
            )
        buffer, self._pointers, self._result = _slots(len(types))
        _packer(types)(buffer, 0, *[0] * leading, *rest, 0)
        self._buffer = buffer
        self._launch = launch
        self._pack = struct.Struct(f"<{leading}q").pack_into
        self._pack_stream = struct.Struct("<Q").pack_into
        self._stream_at = _SLOT * (len(types) - 1)
        self._stream = 0
        self._lock = threading.Lock()

    def __call__(self, stream: int, leading: Sequence[int]) -> None:
        with self._lock:
            self._pack(self._buffer, 0, *leading)
            if stream != self._stream:
                self._pack_stream(self._buffer, self._stream_at, stream)
                self._stream = stream
            self._launch(self._pointers)
            error = self._result.value
        if error:
            raise DriverError("A kernel launch must succeed", _runtime_error(error))


def _packer(types: tuple[str, ...]) -> Any:
    """``pack_into`` of arguments into 8-byte slots: one call converts and checks all."""
    layout = "<" + "".join(_CODES[t] + "x" * (_SLOT - struct.calcsize(_CODES[t])) for t in types)
    return struct.Struct(layout).pack_into


def _slots(count: int) -> tuple[Any, Any, Any]:
    """A buffer for ``count`` arguments, the pointers that a host function takes, and its result."""
    buffer = ctypes.create_string_buffer(_SLOT * (count + 1))
    start = ctypes.addressof(buffer)
    pointers = (ctypes.c_void_p * (count + 1))(*(start + _SLOT * i for i in range(count + 1)))
    return buffer, pointers, ctypes.c_int32.from_address(start + _SLOT * count)


def _runtime_error(code: int) -> str:
    try:
        from cuda.bindings import runtime

        _, text = runtime.cudaGetErrorString(runtime.cudaError_t(code))
        return f"CUDA runtime error {code}: {text.decode() if isinstance(text, bytes) else text}"
    except Exception:  # the number alone still says it
        return f"CUDA runtime error {code}"
