"""Compilation of the interpreter: numba, cached in a folder named by a hash of its sources.

numba's own cache depends on the path of a file, and does not notice a change of the functions that
a function calls.  Ours is shared by all checkouts with the same sources.

A function that calls another is optimised together with it, so a tree of calls would be optimised
once per level.  The interpreter's large parts are therefore ``Entry`` functions, compiled on their
own when first needed, and called through their addresses.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import caching, ccallback
from numba.extending import intrinsic

_COMPILED = (
    "alu_table",
    "clocks",
    "interp",
    "intrinsics",
    "jit",
    "layout",
    "mbarrier",
    "memops",
    "memory",
    "numerics",
    "phases",
    "race",
    "syncops",
)
_OPTIONS = {"error_model": "numpy"}


@functools.cache
def sources_digest() -> str:
    """Hash of every source that takes part in compilation."""
    digest = hashlib.sha256()
    for name in _COMPILED:
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()


@functools.cache
def cache_folder() -> Path:
    """Private folder for generated and compiled code, one per version of the sources."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "mok-emulator" / sources_digest()[:16]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Held while something is compiled, so that processes that start together wait for one."""
    with open(cache_folder() / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class _Locator(caching._CacheLocator):
    """Finds a function's cache by the sources' contents, not by their path."""

    def __init__(self, py_func: Any) -> None:
        self._py_file = py_func.__code__.co_filename
        self._lineno = py_func.__code__.co_firstlineno

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> "_Locator":
        return cls(py_func)

    def get_cache_path(self) -> str:
        return str(cache_folder())

    def get_source_stamp(self) -> str:
        return sources_digest()

    def get_disambiguator(self) -> str:
        return str(self._lineno)


class _Implementation(caching.CompileResultCacheImpl):
    _locator_classes: Any = [_Locator]  # noqa: RUF012 (numba's name)


class _Cache(caching.FunctionCache):
    _impl_class = _Implementation


def njit(function: Callable[..., Any] | None = None, cache: bool = True, **options: Any) -> Any:
    """``numba.njit`` with our cache; division by zero does not raise."""

    def wrap(fn: Callable[..., Any]) -> Any:
        dispatcher: Any = numba.njit(**{**_OPTIONS, **options})(fn)  # type: ignore[call-overload]
        if cache:
            dispatcher._cache = _Cache(fn)
        return dispatcher

    return wrap if function is None else wrap(function)


class Entry:
    """A function of 64-bit integers with a C address, compiled when first needed."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.arity = function.__code__.co_argcount
        self._made: Any = None

    def load(self) -> Any:
        """Compiles it, or reads it from the cache."""
        if self._made is None:
            signature = ((types.int64,) * self.arity, types.int64)
            compiled: Any = ccallback.CFunc(self.function, signature, {}, dict(_OPTIONS))
            compiled._cache = _Cache(self.function)
            compiled.compile()
            self._made = compiled
        return self._made

    @property
    def loaded(self) -> bool:
        return self._made is not None

    @property
    def cached(self) -> bool:
        """Whether it is loaded or the cache holds it."""
        stem = Path(self.function.__code__.co_filename).stem
        pattern = f"{stem}.{self.function.__qualname__}-*.nbc"
        return self.loaded or any(cache_folder().glob(pattern))

    @property
    def address(self) -> int:
        return int(self.load().address)

    def __call__(self, *args: int) -> int:
        return int(self.load().ctypes(*args))


def caller(arity: int) -> Any:
    """An intrinsic that calls the entry at its first argument with ``arity`` more."""

    @intrinsic
    def call(typingctx: Any, address: Any, arguments: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            i64 = ir.IntType(64)
            kind = ir.FunctionType(i64, [i64] * arity).as_pointer()
            function = builder.inttoptr(args[0], kind)
            values = [builder.extract_value(args[1], i) for i in range(arity)]
            return builder.call(function, values)

        return types.int64(types.int64, types.UniTuple(types.int64, arity)), codegen

    return call
