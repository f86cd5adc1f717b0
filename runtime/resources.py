"""What a compiled kernel uses, read on any machine: ptxas' report, the launch code, PTX and SASS.

Everything here is text in, numbers out; nothing needs a GPU, a driver or a CUDA toolkit. SASS comes
from ``nvdisasm`` of the ``nvidia-cuda-nvdisasm`` package (or one on PATH).
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from mok.errors import CompileError, MissingDependencyError

WARNING_MEANINGS = {
    "C7507": "'setmaxnreg' ignored: register count at entry unknown or incompatible",
    "C7508": "'setmaxnreg' ignored: no register cap at entry (set min_blocks_per_mp)",
    "C7510": "wgmma serialised: accumulator registers used across a call or branch",
    "C7511": "wgmma serialised: an asynchronous accumulator is touched while in flight",
    "C7517": "wait_group injected before a read of wgmma accumulators",
}
"""ptxas notes that cost speed. C7507, C7508, C7510 and C7511 should never appear in our kernels."""


@dataclass(frozen=True)
class KernelResources:
    """One device kernel: per-thread registers and spills, per-CTA shared memory, in bytes.

    ``dynamic_smem_bytes`` is None when the host code computes it; ``tmem_columns`` is what
    ``tcgen05.alloc`` asks for (0 without tensor memory).
    """

    symbol: str
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    static_smem_bytes: int
    dynamic_smem_bytes: int | None
    barriers: int
    tmem_columns: int
    warnings: tuple[str, ...]

    @property
    def spill_bytes(self) -> int:
        return self.spill_store_bytes + self.spill_load_bytes

    @property
    def smem_bytes(self) -> int:
        return self.static_smem_bytes + (self.dynamic_smem_bytes or 0)


@dataclass(frozen=True)
class Resources:
    """All device kernels of one compiled host function; the properties are the worst of them."""

    kernels: tuple[KernelResources, ...]

    @property
    def registers(self) -> int:
        return max((k.registers for k in self.kernels), default=0)

    @property
    def spill_bytes(self) -> int:
        return max((k.spill_bytes for k in self.kernels), default=0)

    @property
    def smem_bytes(self) -> int:
        return max((k.smem_bytes for k in self.kernels), default=0)

    @property
    def tmem_columns(self) -> int:
        return max((k.tmem_columns for k in self.kernels), default=0)

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(sorted({w for k in self.kernels for w in k.warnings}))

    def to_json(self) -> list[dict[str, Any]]:
        return [asdict(k) for k in self.kernels]

    @staticmethod
    def from_json(data: list[dict[str, Any]]) -> Resources:
        return Resources(
            tuple(KernelResources(**{**k, "warnings": tuple(k["warnings"])}) for k in data)
        )


# ------------------------------------------------------------------ ptxas' report

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_ENTRY = re.compile(r"Compiling entry function '([^']*)' for '([^']*)'")


def parse_ptxas_log(log: str) -> tuple[dict[str, dict[str, int]], tuple[str, ...]]:
    """Read the compiler's remarks: ({symbol: {registers, spill_store, …}}, warning codes).

    The DSL wraps lines at 100 columns and may break a long symbol, so white space is collapsed
    before matching and dropped from symbols.
    """
    text = re.sub(r"\s+", " ", _ANSI.sub("", log))
    codes = tuple(sorted(set(re.findall(r"\((C7\d{3})\)", text))))
    kernels: dict[str, dict[str, int]] = {}
    entries = list(_ENTRY.finditer(text))
    for i, entry in enumerate(entries):
        end = entries[i + 1].start() if i + 1 < len(entries) else len(text)
        section = text[entry.end() : end]

        def number(pattern: str, section: str = section) -> int:
            found = re.search(pattern, section)
            return int(found.group(1)) if found else 0

        kernels[entry.group(1).replace(" ", "")] = {
            "registers": number(r"Used (\d+) registers"),
            "barriers": number(r"used (\d+) barriers"),
            "stack": number(r"(\d+) bytes stack frame"),
            "spill_store": number(r"(\d+) bytes spill stores"),
            "spill_load": number(r"(\d+) bytes spill loads"),
            "static_smem": number(r"(\d+) bytes smem"),
        }
    return kernels, codes


# ------------------------------------------------------------------ the host launch code

_CONFIG = r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
_SMEM_SLOT = re.compile(rf"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] : .*{_CONFIG}")
_STORE = re.compile(r"llvm\.store (%\w+), (%\w+) : i64")
_CONSTANT = re.compile(r"(%\w+) = llvm\.mlir\.constant\((\d+) : i64\)")
_HANDLE = re.compile(r"llvm\.mlir\.addressof @(\w+)")
_LAUNCH = re.compile(r"llvm\.call @_cudaLaunchKernel(Ex)?\(")


def dynamic_smem_bytes(host_ir: str, symbols: list[str]) -> dict[str, int]:
    """Dynamic shared memory of each launch, from the lowered host function (LLVM dialect text).

    The launch configuration's third field is the size; a kernel missing in the result has a size
    that is computed at run time.
    """
    sizes: dict[str, int] = {}
    for function in re.split(r"\n\s*llvm\.func ", host_ir):
        constants: dict[str, int] = {}
        slot, pending, handle = "", None, ""
        for line in function.splitlines():
            if m := _CONSTANT.search(line):
                constants[m.group(1)] = int(m.group(2))
            elif m := _SMEM_SLOT.search(line):
                slot = m.group(1)
            elif (m := _STORE.search(line)) and m.group(2) == slot:
                pending = constants.get(m.group(1))
            elif m := _HANDLE.search(line):
                handle = m.group(1)
            elif _LAUNCH.search(line):
                # Handles are named <module>_<kernel symbol>.
                names = [s for s in symbols if handle == s or handle.endswith("_" + s)]
                if names and pending is not None:
                    sizes[max(names, key=len)] = pending
                pending = None
    return sizes


# ------------------------------------------------------------------ PTX

_ENTRY_BODY = re.compile(r"\.entry\s+(\w+)")
_PTX_OPCODE = re.compile(r"^\s*(?:\{\s*)?(?:@!?%\w+\s+)?([a-z][a-z0-9_]*(?:[.:][\w:]+)*)[\s;]")
_ALLOC = re.compile(r"tcgen05\.alloc[\w.:]*\s+\[[^\]]*\],\s*(%?\w+)")


def split_entries(ptx: str) -> dict[str, str]:
    """PTX text of each kernel by symbol."""
    starts = [(m.group(1), m.start()) for m in _ENTRY_BODY.finditer(ptx)]
    ends = [s for _, s in starts[1:]] + [len(ptx)]
    return {name: ptx[start:end] for (name, start), end in zip(starts, ends, strict=True)}


def tmem_columns(ptx_entry: str) -> int:
    """Columns asked from ``tcgen05.alloc`` (the largest, when branches differ); 0 if unknown."""
    columns = 0
    for operand in _ALLOC.findall(ptx_entry):
        if operand.isdigit():
            columns = max(columns, int(operand))
            continue
        moves = re.findall(rf"mov\.[bsu]32\s+{re.escape(operand)},\s*(\d+);", ptx_entry)
        columns = max([columns, *map(int, moves)])
    return columns


def ptx_instructions(ptx: str) -> dict[str, int]:
    """Count of each PTX instruction, modifiers included (``ld.acquire.sys.global.b32``)."""
    counts: Counter[str] = Counter()
    for line in ptx.splitlines():
        if line.lstrip().startswith((".", "//", "$", ")")):
            continue
        if m := _PTX_OPCODE.match(line + " "):
            counts[m.group(1)] += 1
    return dict(counts.most_common())


def collect(log: str, ptx: str, host_ir: str) -> Resources:
    """The resources of one compilation, from the compiler's remarks, its PTX and its host code."""
    report, codes = parse_ptxas_log(log)
    entries = split_entries(ptx)
    if missing := [name for name in entries if name not in report]:
        raise CompileError(
            "ptxas must report the resources of every kernel",
            f"no report for {', '.join(missing)}",
            "The DSL's remark format changed: update runtime/resources.py.",
        )
    dynamic = dynamic_smem_bytes(host_ir, list(entries))
    return Resources(
        tuple(
            KernelResources(
                symbol=name,
                registers=report[name]["registers"],
                spill_store_bytes=report[name]["spill_store"],
                spill_load_bytes=report[name]["spill_load"],
                stack_bytes=report[name]["stack"],
                static_smem_bytes=report[name]["static_smem"],
                dynamic_smem_bytes=dynamic.get(name),
                barriers=report[name]["barriers"],
                tmem_columns=tmem_columns(body),
                warnings=codes,  # ptxas prints its notes before the kernel they belong to
            )
            for name, body in entries.items()
        )
    )


# ------------------------------------------------------------------ SASS


@functools.cache
def find_nvdisasm() -> str | None:
    """Path of nvdisasm: the ``nvidia-cuda-nvdisasm`` wheel's (it knows our cubins), else PATH's."""
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "nvdisasm":
            path = os.fspath(file.locate())
            if os.access(path, os.X_OK):
                return path
    return shutil.which("nvdisasm")


def disassemble(cubin: bytes) -> str:
    """SASS text of a cubin.

    Raises:
        MissingDependencyError: nvdisasm is not installed.
        CompileError: nvdisasm cannot read this cubin.
    """
    tool = find_nvdisasm()
    if tool is None:
        raise MissingDependencyError(
            "Reading SASS needs nvdisasm", "none found", "pip install nvidia-cuda-nvdisasm"
        )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CompileError(
            "nvdisasm must read our cubins",
            done.stderr.strip()[:300],
            "Install a newer nvidia-cuda-nvdisasm; a CUDA 13.0 toolkit's cannot read CUDA 13.4's.",
        )
    return done.stdout


_SASS_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.[\w.]+)?)")


def sass_instructions(sass: str, modifiers: bool = False) -> dict[str, int]:
    """Count of each SASS instruction; with ``modifiers``, ``HGMMA.64x256x16.F32.BF16`` in full."""
    counts: Counter[str] = Counter()
    for line in sass.splitlines():
        if m := _SASS_LINE.search(line):
            name = m.group(1)
            counts[name if modifiers else name.split(".", 1)[0]] += 1
    return dict(counts.most_common())
