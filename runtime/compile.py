"""Compile kernels once, keep them on disk, call them cheaply.

``get_kernel(spec)`` looks in this process, then in the cache folder, then compiles. All three give
the same thing: the DSL's host function out of an object file, beside its PTX, cubin and resources.
Importing this module imports neither the DSL nor cuda-python.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import io
import json
import os
import platform
import re
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mok.errors import CompileError, MissingDependencyError
from mok.runtime.cache import CacheFolder, default_folder
from mok.runtime.resources import Resources, collect, disassemble, sass_instructions

if TYPE_CHECKING:
    from mok.runtime.hostcall import HostFunction

ARCHS = ("sm_90a", "sm_100a", "sm_103a")
_FORMAT = 1  # of a cache entry


@dataclass(frozen=True)
class KernelSpec:
    """What to compile.

    Args:
        name: short and file-name safe ("forward"); also the prefix of the device symbols.
        arch: one of ``ARCHS``.
        factory: ``"package.module:Class"``; ``Class(**config)`` gives an object whose
            ``@cute.jit __call__`` is the host function. Its arguments are Int64 addresses,
            Int32/Float32 (also Uint32, Uint64, Float64) scalars, and last the CUstream.
        config: keyword arguments of the class, as (name, value) pairs sorted by name.
    """

    name: str
    arch: str
    factory: str
    config: tuple[tuple[str, Hashable], ...] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", self.name):
            raise CompileError("A kernel's name must be an identifier", repr(self.name))
        if self.arch not in ARCHS:
            raise CompileError(f"arch must be one of {', '.join(ARCHS)}", repr(self.arch))
        if not re.fullmatch(r"[\w.]+:\w+", self.factory):
            raise CompileError('factory must read "package.module:Class"', repr(self.factory))
        object.__setattr__(self, "config", tuple(sorted(self.config)))
        # Launches look kernels up by spec, so both hashing and `of` are worth keeping.
        whole = (self.name, self.arch, self.factory, self.config)
        object.__setattr__(self, "_hash", hash(whole))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined, no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        # Hashes of strings differ between processes: a copy in another one makes its own.
        return KernelSpec, (self.name, self.arch, self.factory, self.config)

    @staticmethod
    @functools.lru_cache(maxsize=4096, typed=True)
    def of(name: str, arch: str, factory: str, **config: Hashable) -> KernelSpec:
        """The same with the configuration as keyword arguments."""
        return KernelSpec(name, arch, factory, tuple(sorted(config.items())))


class Kernel:
    """A compiled host function and the device code it launches.

    Calling it launches on the given stream: ``kernel(a_address, n, scale, stream)`` with Python
    ints and floats, the stream as an int handle or a CUstream. Sizes are checked against the
    types of the signature; nothing else is.

    Attributes:
        spec: what was compiled.
        ptx, cubin: the device code.
        resources: registers, spills, shared memory, ptxas warnings per device kernel.
        argument_types: "Int64", "Int32", …, "stream" of each argument.
        compile_s: seconds the compilation took, whenever that was.
        from_cache: True when this process read it from disk.
        load_s: {"read", "link"}: seconds to read the entry and to link its object file.
    """

    def __init__(
        self,
        spec: KernelSpec,
        meta: dict[str, Any],
        files: dict[str, bytes],
        *,
        from_cache: bool,
        object_path: Path | None = None,
        compiled: Any = None,
    ) -> None:
        self.spec = spec
        self.ptx = files["kernel.ptx"].decode()
        self.cubin = files["kernel.cubin"]
        self.resources = Resources.from_json(meta["resources"])
        self.argument_types = tuple(meta["argument_types"])
        self.compile_s = float(meta["compile_s"])
        self.from_cache = from_cache
        self.load_s: dict[str, float] = {}
        self._meta = meta
        self._object = files["kernel.o"]
        self._object_path = object_path
        self._compiled = compiled
        self.host: HostFunction | None = None
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> None:
        call = self.host
        if call is None:
            call = self.load()
        call(*args)

    def load(self) -> HostFunction:
        """Link the object file into the process; needs the DSL, but no GPU. Idempotent."""
        with self._lock:
            if self.host is None:
                _import_dsl()
                from mok.runtime.hostcall import HostFunction

                def link(path: Path) -> HostFunction:
                    return HostFunction(
                        path, self._meta["prefix"], self._meta["function"], self.argument_types
                    )

                start = time.perf_counter()
                path = self._object_path
                if path is not None and path.exists():
                    with contextlib.suppress(Exception):  # somebody may be emptying the cache
                        self.host = link(path)
                if self.host is None:
                    with tempfile.TemporaryDirectory(prefix="mok-") as folder:
                        path = Path(folder) / "kernel.o"
                        path.write_bytes(self._object)
                        self.host = link(path)
                self.load_s["link"] = time.perf_counter() - start
            return self.host

    @property
    def jit(self) -> Any:
        """What ``cute.compile`` returned, for the emulator; compiles if this came from disk."""
        if self._compiled is None:
            self._compiled = _compile(self.spec).compiled
        return self._compiled

    def sass(self) -> str:
        """SASS text; needs the package nvidia-cuda-nvdisasm."""
        return disassemble(self.cubin)

    def instructions(self, modifiers: bool = False) -> dict[str, int]:
        """Count of each SASS instruction, all device kernels together."""
        return sass_instructions(self.sass(), modifiers)

    def __repr__(self) -> str:
        r = self.resources
        return (
            f"<Kernel {self.spec.name} {self.spec.arch}: {r.registers} registers, "
            f"{r.spill_bytes} B spilled, {r.smem_bytes} B shared>"
        )


# ---------------------------------------------------------------------- looking up

_kernels: dict[tuple[KernelSpec, bool], Kernel] = {}  # True: compiled for the emulator
_lock = threading.RLock()  # the DSL is not thread-safe: one compilation at a time


def get_kernel(spec: KernelSpec) -> Kernel:
    """The kernel of a spec: from this process, from the cache folder, or compiled now.

    Raises:
        MissingDependencyError: the DSL is absent or has another version.
        CompileError: the kernel does not compile.
    """
    from mok.runtime.launch import active_emulator

    key = (spec, active_emulator() is not None)
    kernel = _kernels.get(key)
    if kernel is None:
        with _lock:
            kernel = _kernels.get(key)
            if kernel is None:
                kernel = _compile_only(spec) if key[1] else _from_disk_or_compiled(spec)
                _kernels[key] = kernel
    return kernel


def clear_memory_cache() -> None:
    """Forget the kernels of this process; those on disk stay."""
    with _lock:
        _kernels.clear()


def _compile_only(spec: KernelSpec) -> Kernel:
    # The emulator replaces the DSL's runtime library, so its host code is linked afresh.
    built = _compile(spec)
    return Kernel(spec, built.meta, built.files, from_cache=False, compiled=built.compiled)


def _from_disk_or_compiled(spec: KernelSpec) -> Kernel:
    folder = CacheFolder(default_folder())
    entry = f"{spec.name}-{spec.arch}-{cache_key(spec)[:24]}"
    if (kernel := _read(folder, entry, spec)) is not None:
        return kernel
    with folder.lock(entry):
        if (kernel := _read(folder, entry, spec)) is not None:
            return kernel  # another process compiled it while this one waited
        built = _compile(spec)
        stored = built.storable and folder.write(entry, built.meta, built.files)
        return Kernel(
            spec,
            built.meta,
            built.files,
            from_cache=False,
            object_path=folder.path(entry, "kernel.o") if stored else None,
            compiled=built.compiled,
        )


def _read(folder: CacheFolder, entry: str, spec: KernelSpec) -> Kernel | None:
    start = time.perf_counter()
    found = folder.read(entry)
    if found is None:
        return None
    try:
        path = folder.path(entry, "kernel.o")
        kernel = Kernel(spec, *found, from_cache=True, object_path=path)
    except (KeyError, TypeError, ValueError):
        return None  # written by something else: rebuild it
    kernel.load_s["read"] = time.perf_counter() - start
    return kernel


# ---------------------------------------------------------------------- the key


def cache_key(spec: KernelSpec) -> str:
    """Hash of everything that the compiled code depends on."""
    parts = {
        "format": _FORMAT,
        "name": spec.name,
        "arch": spec.arch,
        "factory": spec.factory,
        "config": [[name, _canonical(value)] for name, value in spec.config],
        "sources": source_hash(spec.factory),
        "versions": _versions(),
        "host": _host(),
        "dsl_env": sorted(
            (k, v)
            for k, v in os.environ.items()
            if k.startswith("CUTE_DSL_") and k not in _INERT_ENV
        ),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


_INERT_ENV = {
    "CUTE_DSL_ARCH",  # set by us for each compilation
    "CUTE_DSL_LIBS",
    "CUTE_DSL_CACHE_DIR",
    "CUTE_DSL_DUMP_DIR",
    "CUTE_DSL_LOG_TO_CONSOLE",
    "CUTE_DSL_LOG_TO_FILE",
    "CUTE_DSL_LOG_LEVEL",
    "CUTE_DSL_SHOW_STACKTRACE",
}


def _canonical(value: object) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [_canonical(v) for v in value]
    if isinstance(value, frozenset):
        return ["frozenset", *sorted(json.dumps(_canonical(v)) for v in value)]
    if isinstance(value, enum.Enum):
        return [_qualified(type(value)), value.name]
    if isinstance(value, type):
        return _qualified(value)
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return [
            _qualified(type(value)),
            *([f.name, _canonical(getattr(value, f.name))] for f in fields),
        ]
    text = repr(value)
    if re.search(r" at 0x[0-9a-f]+", text):
        raise CompileError(
            "A kernel's configuration must be made of values with a stable repr",
            f"{text} ({_qualified(type(value))})",
            "Use numbers, strings, tuples, enums or frozen dataclasses.",
        )
    return [_qualified(type(value)), text]


def _qualified(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def source_hash(factory: str) -> str:
    """Hash of every source a kernel may be made of: ``kernels_cute``, this file, its factory."""
    digests = sorted(_file_digests(factory).items())
    return hashlib.sha256("".join(f"{n} {d}\n" for n, d in digests).encode()).hexdigest()


def _file_digests(factory: str = "") -> dict[str, str]:
    here = Path(__file__)
    kernels = importlib.util.find_spec("mok.kernels_cute")
    assert kernels is not None and kernels.submodule_search_locations
    root = Path(next(iter(kernels.submodule_search_locations)))
    files = {str(path.relative_to(root)): path for path in root.rglob("*.py")}
    files["<compile>"] = here
    module = factory.partition(":")[0]
    if module and not module.startswith("mok.kernels_cute"):
        found = None
        with contextlib.suppress(ImportError):  # _instantiate names the missing module
            found = importlib.util.find_spec(module)
        if found is not None and found.origin is not None:
            files[f"<factory> {module}"] = Path(found.origin)
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}


@functools.cache
def _versions() -> dict[str, str]:
    versions = {
        "python": sys.version.split()[0],
        "implementation": sys.implementation.cache_tag or "",
    }
    for package in ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu13"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    return versions


@functools.cache
def _host() -> list[str]:
    # Host code is generated for this CPU's features; a home folder may be shared by unlike hosts.
    features = ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                features = " ".join(sorted(line.split(":", 1)[1].split()))
                break
    return [sys.platform, platform.machine(), hashlib.sha256(features.encode()).hexdigest()]


# ---------------------------------------------------------------------- compiling


@dataclass
class _Built:
    meta: dict[str, Any]
    files: dict[str, bytes]
    compiled: Any
    storable: bool


def _import_dsl() -> Any:
    try:
        return importlib.import_module("cutlass.cute")
    except ImportError as error:
        raise MissingDependencyError(
            "Kernels need the CuTe DSL",
            str(error),
            'pip install "nvidia-cutlass-dsl[cu13]==4.8.1" (Linux)',
        ) from error


def _compile(spec: KernelSpec) -> _Built:
    """Trace, compile and export one kernel."""
    _changed_sources(spec.factory)  # notes those of a factory elsewhere
    with _progress(spec):
        start = time.perf_counter()
        cute = _import_dsl()
        imported = time.perf_counter()
        kernel_object, host = _instantiate(spec)
        types = _argument_types(host, spec)
        _name_device_symbols(kernel_object, spec.name)
        remarks = io.StringIO()
        with (
            tempfile.TemporaryDirectory(prefix="mok-") as dump,
            _environment("CUTE_DSL_ARCH", spec.arch),
            contextlib.redirect_stderr(remarks),
        ):
            options = (
                f"--gpu-arch {spec.arch} --keep-ptx --keep-cubin --dump-dir '{dump}' "
                "remarks{ptx} warnings{ptx}"
            )
            try:
                compiled = cute.compile(kernel_object, *_example_arguments(types), options=options)
            except Exception as error:
                raise CompileError(
                    f"Kernel {spec.name} must compile for {spec.arch}",
                    f"{type(error).__name__}: {error}",
                    f"factory {spec.factory}, config {dict(spec.config)}",
                ) from error
        ptx, cubin = compiled.__ptx__, compiled.__cubin__
        prefix = f"mok_{spec.name}_{spec.arch}"
        object_code = _export(compiled, prefix)
        done = time.perf_counter()
    changed = _changed_sources(spec.factory)
    if changed:
        warnings.warn(
            f"Kernel sources changed after this process first read them ({', '.join(changed)}): the "
            "kernel may mix old and new code and is not cached. Start a new process.",
            RuntimeWarning,
            stacklevel=2,
        )
    meta = {
        "spec": [spec.name, spec.arch, spec.factory, repr(spec.config)],
        "prefix": prefix,
        "function": compiled.function_name,
        "argument_types": types,
        "resources": collect(remarks.getvalue(), ptx, str(compiled.ir_module)).to_json(),
        "compile_s": done - imported,
        "dsl_import_s": imported - start,
    }
    files = {"kernel.o": object_code, "kernel.ptx": ptx.encode(), "kernel.cubin": cubin}
    return _Built(meta, files, compiled, storable=not changed)


# What each source was when this process first saw it: for our own kernels now, before any of them is
# imported, so that an entry never holds older code than its key says. A factory elsewhere: at its first use.
_first_digests: dict[str, str] = _file_digests()


def _changed_sources(factory: str) -> list[str]:
    """Sources of a kernel that are no longer what this process first saw."""
    now = _file_digests(factory)
    return sorted(name for name, d in now.items() if _first_digests.setdefault(name, d) != d)


def _instantiate(spec: KernelSpec) -> tuple[Any, Callable[..., Any]]:
    module, _, name = spec.factory.partition(":")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise CompileError(
            "factory must name an importable class", spec.factory, str(error)
        ) from error
    try:
        kernel_object = cls(**dict(spec.config))
    except TypeError as error:
        raise CompileError(
            f"config must fit the constructor of {spec.factory}", str(error)
        ) from error
    return kernel_object, inspect.unwrap(cls.__call__)


SCALARS = {"Int32", "Int64", "Uint32", "Uint64", "Float32", "Float64"}


def _argument_types(host: Callable[..., Any], spec: KernelSpec) -> list[str]:
    types: list[str] = []
    for name, parameter in list(inspect.signature(host).parameters.items())[1:]:
        annotation = parameter.annotation
        type_name = annotation if isinstance(annotation, str) else annotation.__name__
        type_name = type_name.rpartition(".")[2]
        if type_name == "CUstream":
            type_name = "stream"
        elif type_name not in SCALARS:
            raise CompileError(
                "A kernel's host function takes scalars and one CUstream",
                f"{spec.factory}.__call__ has {name}: {type_name}",
                f"Annotate with cutlass.{', cutlass.'.join(sorted(SCALARS))} or CUstream.",
            )
        types.append(type_name)
    if types.count("stream") != 1 or types[-1] != "stream":
        raise CompileError(
            "A kernel's host function ends with one argument `stream: CUstream`",
            f"{spec.factory}.__call__ has ({', '.join(types)})",
        )
    return types


def _example_arguments(types: list[str]) -> list[Any]:
    import cutlass
    from cuda.bindings import driver

    return [driver.CUstream(0) if t == "stream" else getattr(cutlass, t)(1) for t in types]


def _name_device_symbols(kernel_object: Any, name: str) -> None:
    """Short stable symbols: "<name>_0", or "<name>_<method>_0" where a class has several kernels.

    A kernel class may choose otherwise with ``set_name_prefix`` in its ``__call__``, which runs
    later. Names without "cutlass" are compiled without ptxas' special treatment of that word.
    """
    cls = type(kernel_object)
    methods = [m for m in dir(cls) if getattr(getattr(cls, m), "_decorator_kind", "") == "kernel"]
    for method in methods:
        prefix = name if method == "kernel" or len(methods) == 1 else f"{name}_{method}"
        getattr(cls, method).set_name_prefix(
            prefix, remove_cutlass_symbol=True, keep_mangled_name=False
        )


def _export(compiled: Any, prefix: str) -> bytes:
    """Object file with the host function and the cubin."""
    _preload_runtime()
    try:
        return compiled.dump_to_object(prefix)
    except Exception as error:
        raise CompileError("The DSL must export the host function", str(error)) from error


@functools.cache
def _preload_runtime() -> None:
    # Export resolves the DSL's launch functions among the process' global symbols; without this it
    # may fail with "Symbols not found: _cudaLaunchKernelEx".
    import ctypes

    runtime = importlib.import_module("cutlass.cute.runtime")
    for path in runtime.find_runtime_libraries(enable_tvm_ffi=False):
        if os.path.exists(path):
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextlib.contextmanager
def _progress(spec: KernelSpec) -> Iterator[None]:
    """Say on standard error that a compilation runs; MOK_QUIET=1 silences it."""
    stream = None if os.environ.get("MOK_QUIET") else sys.stderr
    start = time.perf_counter()
    if stream is not None:
        print(f"mok: compiling {spec.name} for {spec.arch} …", end="", file=stream, flush=True)
    try:
        yield
    except BaseException:
        if stream is not None:
            print(" failed", file=stream, flush=True)
        raise
    if stream is not None:
        print(f" {time.perf_counter() - start:.1f} s", file=stream, flush=True)
