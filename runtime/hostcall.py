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

        # Arguments live in one buffer of 8-byte slots; a single pack_into converts and checks all.
        count = len(types)
        self._types = types
        layout = "<" + "".join(
            _CODES[t] + "x" * (_SLOT - struct.calcsize(_CODES[t])) for t in types
        )
        self._pack = struct.Struct(layout).pack_into
        self._buffer = ctypes.create_string_buffer(_SLOT * (count + 1))
        start = ctypes.addressof(self._buffer)
        self._result = ctypes.c_int32.from_address(start + _SLOT * count)
        self._pointers = (ctypes.c_void_p * (count + 1))(
            *(start + _SLOT * i for i in range(count + 1))
        )
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

    @staticmethod
    def _run(function: Any, library: Any, *values: Any) -> None:
        error = values[-1]
        pointers = (ctypes.c_void_p * (1 + len(values)))(
            ctypes.addressof(library), *(ctypes.addressof(v) for v in values)
        )
        function(pointers)
        if error.value:
            raise DriverError("The driver must load our device code", _runtime_error(error.value))


def _runtime_error(code: int) -> str:
    try:
        from cuda.bindings import runtime

        _, text = runtime.cudaGetErrorString(runtime.cudaError_t(code))
        return f"CUDA runtime error {code}: {text.decode() if isinstance(text, bytes) else text}"
    except Exception:  # the number alone still says it
        return f"CUDA runtime error {code}"
