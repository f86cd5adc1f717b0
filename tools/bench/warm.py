"""Compile our kernels side by side before the first call needs them one after another."""

from __future__ import annotations

import base64
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

_WORKER = (
    "import base64, pickle, sys\n"
    "from mok.runtime.compile import get_kernel\n"
    "for spec in pickle.loads(base64.b64decode(sys.argv[1])):\n"
    "    get_kernel(spec)\n"
)


def layer_specs(
    arch: str,
    direct: bool,
    trains: bool,
    mxfp8: bool = False,
    sizes: Iterable[tuple[int, int]] = (),
    pairs: Iterable[bool] = (),
) -> list[Any]:
    """Specs of the kernels that a layer launches, the slowest to compile first.

    ``direct``: one rank in BF16, without the ring. ``sizes``: (H, I) of the layers; by default any.
    ``pairs``: what ``Config.pairs`` is set to, if it is.
    """
    from mok import kernels
    from mok.kernels_cute.machine import machine_of, pays_backward

    in_pairs = {pays_backward(*size) for size in sizes} or {True, False}
    forward: Sequence[bool | None] = [None]
    if mxfp8 or not machine_of(arch).pairs:
        in_pairs = {False}
    elif chosen := set(pairs):
        in_pairs, forward = chosen, sorted(chosen)

    specs = [kernels.forward_spec(arch, direct, mxfp8=mxfp8, pair=p) for p in forward]
    if trains:
        specs = [
            *(kernels.backward_spec(arch, direct, mxfp8=mxfp8, pair=p) for p in sorted(in_pairs)),
            *(kernels.forward_spec(arch, direct, True, mxfp8=mxfp8, pair=p) for p in forward),
            *specs,
        ]
        specs += [
            kernels.plan_spec(arch),
            kernels.router_grad_spec(arch, direct, 32 if direct else 64),
        ]
        specs.append(
            kernels.token_sum_spec(arch, direct, False, 32 if direct else 64, has_weights=False)
        )
    specs += [
        kernels.schedule_spec(arch),
        kernels.stage_ids_spec(arch),
        kernels.token_sum_spec(arch, direct, False, 32 if direct else 64),
    ]
    if mxfp8:
        specs.append(kernels.quantise_spec(arch, True, True, arch == "sm_90a"))
    return specs


def missing(specs: Sequence[Any]) -> list[Any]:
    """Those that are not in the cache on disk."""
    from mok.runtime.cache import CacheFolder, default_folder
    from mok.runtime.compile import cache_key

    folder = CacheFolder(default_folder())
    return [
        s for s in specs if not folder.path(f"{s.name}-{s.arch}-{cache_key(s)[:24]}", "").is_dir()
    ]


class Compilation:
    """Worker processes that compile specs into the cache on disk; ``wait`` for them.

    What a worker cannot do is left: the first call compiles it, or says what is wrong with it.

    Args:
        workers: at most so many processes.
    """

    def __init__(self, specs: Sequence[Any], workers: int | None = None) -> None:
        todo = missing(specs)
        most = workers if workers is not None else max((os.cpu_count() or 2) - 1, 1)
        count = min(len(todo), most)
        # One kernel alone gains nothing from a second process.
        shares = [todo[n::count] for n in range(count)] if count > 1 else []
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._logs = [tempfile.TemporaryFile() for _ in shares]  # noqa: SIM115  wait closes them
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", _WORKER, base64.b64encode(pickle.dumps(share)).decode()],
                env={**os.environ, "PYTHONPATH": path},
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
            for share, log in zip(shares, self._logs, strict=True)
        ]

    def wait(self, seconds: float = 600.0) -> list[str]:
        """The last words of workers that failed."""
        failures = []
        for process, log in zip(self.processes, self._logs, strict=True):
            try:
                code = process.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            with log:
                log.seek(0)
                lines = log.read().decode(errors="replace").strip().splitlines()
            if code:
                failures.append(lines[-1] if lines else f"ended with code {code}")
        self.processes, self._logs = [], []
        return failures
