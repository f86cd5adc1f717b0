"""Compile what many GPU tests need before several workers want it at once: ``python -m tests.warm``.

Each worker would otherwise wait for whichever one compiles a kernel first, and a test that keeps others off its GPU
would do so while it compiles.
"""

from __future__ import annotations

import time
from typing import Any

from mok import kernels
from mok.backends import choose_backend
from mok.runtime.device import device_info
from mok.tools.bench.warm import Compilation, layer_specs

GRAD_MODES = ("bf16_add", "fp32", "fp32_add")


def specs(arch: str) -> list[Any]:
    """Kernels of layers at one rank and on a ring, in both precisions; traced, recomputing, as single CTAs."""
    found = []
    for direct, mxfp8 in ((True, False), (False, False), (False, True)):
        found += layer_specs(arch, direct, trains=True, mxfp8=mxfp8)
        found += [
            *(kernels.backward_spec(arch, direct, mode, mxfp8=mxfp8) for mode in GRAD_MODES),
            kernels.recompute_spec(arch, direct, mxfp8=mxfp8),
        ]
        if not mxfp8:
            found += [
                kernels.forward_spec(arch, direct, trace=True),
                kernels.backward_spec(arch, direct, trace=True),
                kernels.forward_spec(arch, direct, True, pair=False),
                kernels.forward_spec(arch, direct, limited=True),
                kernels.backward_spec(arch, direct, limited=True),
            ]
    return list(dict.fromkeys(found))


def main() -> None:
    """Print how many were compiled, or that there is no GPU to compile for."""
    if not choose_backend().on_gpu:
        print("no GPU: nothing is compiled beforehand")
        return
    begin = time.monotonic()
    compilation = Compilation(specs(device_info().arch))
    failures = compilation.wait()
    print(
        f"kernels of layers were compiled beforehand in {time.monotonic() - begin:.0f} s", *failures
    )


if __name__ == "__main__":
    main()
