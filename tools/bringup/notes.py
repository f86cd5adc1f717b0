"""What the process of a rung writes down as it goes, so that it is there however the process ends.

One JSON object a line: "kernel" (compiled: its name and hashes), "launch" (about to run), "counters" (of a
kernel that runs for long), "value" (a comparison), "result" (the end). Kernels' PTX and cubins lie beside it.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mok.runtime.compile import Kernel


class Notes:
    """Appends to ``path``; ``kernels`` is the folder for device code."""

    def __init__(self, path: Path, kernels: Path) -> None:
        self.path, self.kernels = path, kernels
        self._known: set[int] = set()
        path.parent.mkdir(parents=True, exist_ok=True)
        kernels.mkdir(parents=True, exist_ok=True)
        path.write_text("")

    def write(self, event: str, **facts: Any) -> None:
        """One line, on disk before this returns."""
        with self.path.open("a") as file:
            file.write(json.dumps({"event": event, "time": time.time(), **facts}) + "\n")

    def kernel(self, kernel: Kernel) -> None:
        """Note a kernel once, and keep its device code."""
        if id(kernel) in self._known:
            return
        self._known.add(id(kernel))
        found = kernel_facts(kernel)
        stem = self.kernels / f"{found['name']}-{found['ptx_sha256'][:12]}"
        stem.with_suffix(".ptx").write_text(kernel.ptx)
        stem.with_suffix(".cubin").write_bytes(kernel.cubin)
        self.write("kernel", **found)


def kernel_facts(kernel: Kernel) -> dict[str, Any]:
    """What identifies a compiled kernel, and what it uses."""
    resources = kernel.resources
    return {
        "name": kernel.spec.name,
        "arch": kernel.spec.arch,
        "config": {name: str(value) for name, value in kernel.spec.config},
        "ptx_sha256": hashlib.sha256(kernel.ptx.encode()).hexdigest(),
        "cubin_sha256": hashlib.sha256(kernel.cubin).hexdigest(),
        "registers": resources.registers,
        "spill_bytes": resources.spill_bytes,
        "smem_bytes": resources.smem_bytes,
        "tmem_columns": resources.tmem_columns,
    }


def read(path: Path) -> list[dict[str, Any]]:
    """The lines written so far; a torn last line is left out."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    events = []
    for line in lines:
        try:
            events.append(json.loads(line))
        except ValueError:
            continue
    return events
