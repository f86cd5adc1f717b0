"""Which implementation runs a forward pass here, and the one function that runs it."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mok.config import Config, tile_rows
from mok.errors import DeviceError, MissingDependencyError
from mok.models import Machine
from mok.reference import Case, forward_reference

if TYPE_CHECKING:
    from mok.laid_out import LaidOut
    from mok.runtime.device import DeviceInfo

KERNEL_ARCHS = ("sm_90a",)
"""Architectures whose kernels have run on a GPU. Another GPU falls back to the reference."""
COMPILED_ARCHS = ("sm_90a", "sm_100a", "sm_103a")
"""Architectures with a forward kernel: on request also where it has only been emulated."""

EMULATED_SMS = 8


@dataclass(frozen=True)
class Backend:
    """What runs.

    Attributes:
        kind: "kernel" (a GPU), "emulator" (the compiled kernel on the CPU) or "reference".
        name: for people: "sm_90a on NVIDIA H200", "sm_90a in the emulator", "scheduled reference
            (CPU)". Printed with every result.
        arch: what the kernel is compiled for; None for the reference.
        device: where the tensors live.
        note: why there is no kernel, or no GPU for it, where one might be expected.
        info: the GPU, for a kernel.
    """

    kind: str
    name: str
    arch: str | None
    device: torch.device
    note: str = ""
    info: DeviceInfo | None = None

    @property
    def on_gpu(self) -> bool:
        return self.kind == "kernel"

    def announce(self, say: Callable[[str], None]) -> None:
        """Say what runs, and why there is no kernel where there is none."""
        say(f"Running on: {self.name}")
        if self.note:
            say(f"{'No GPU' if self.kind == 'emulator' else 'No kernel'}: {self.note}")


def choose_backend(arch: str | None = None, emulate: bool = False) -> Backend:
    """The best backend present, or the one asked for.

    Args:
        arch: a kernel of this architecture and nothing else. None: the kernel of the current GPU
            if there is one, else the scheduled reference, with the reason in ``note``.
        emulate: run the kernel for ``arch`` (by default sm_90a) in the CPU emulator.

    Raises:
        DeviceError: the kernel that was asked for cannot run here, or does not exist.
    """
    cpu = torch.device("cpu")
    if arch is not None:
        tile_rows(arch)  # a known name?
    if emulate:
        arch = arch or KERNEL_ARCHS[0]
        require_kernel(arch)
        return Backend("emulator", f"{arch} in the emulator", arch, cpu)
    info, reason = _usable_gpu(KERNEL_ARCHS if arch is None else COMPILED_ARCHS)
    if arch is not None:
        require_kernel(arch)
        if info is None or info.arch != arch:
            raise DeviceError(
                f"a kernel for {arch} needs a GPU of that architecture",
                reason or f"{info.name} ({info.arch})" if info else reason,
                "Add --emulate to run it on the CPU, or leave --arch out",
            )
    if info is None:
        return Backend("reference", "scheduled reference (CPU)", None, cpu, reason)
    device = torch.device("cuda", info.ordinal)
    return Backend("kernel", f"{info.arch} on {info.name}", info.arch, device, "", info)


def emulated_instead(reference: Backend) -> Backend:
    """The emulator in place of the reference, where it can run; else the reference, whose note says
    what is missing."""
    try:
        import cutlass  # noqa: F401
        import numba  # noqa: F401
    except ImportError as error:
        note = f"{reference.note} No emulator either: {error}. {EMULATOR_REMEDY}"
        return replace(reference, note=note)
    return replace(choose_backend(emulate=True), note=reference.note)


def require_kernel(arch: str) -> None:
    """Raise DeviceError unless there is a forward kernel for ``arch``."""
    if arch not in COMPILED_ARCHS:
        raise DeviceError(
            "a forward kernel must exist for the architecture",
            arch,
            f"Kernels exist for: {', '.join(COMPILED_ARCHS)}",
        )


def _usable_gpu(archs: Sequence[str]) -> tuple[DeviceInfo | None, str]:
    """The current GPU if its architecture is among ``archs``, else None and the reason."""
    from mok.runtime.device import best_backend

    found = best_backend()
    if found.device is None or found.arch is None:
        return None, found.reason
    if found.arch not in archs:
        return None, (
            f"the kernel for {found.device.name} ({found.arch}) has not run on hardware yet;"
            f" --arch {found.arch} runs it"
        )
    if not torch.cuda.is_available():
        return None, f"{found.device.name} is present, but this torch was built without CUDA"
    return found.device, ""


def run_forward(
    case: Case,
    ep_size: int,
    backend: Backend,
    *,
    config: Config | None = None,
    tokens_per_rank: Sequence[int] | None = None,
    precision: str = "bf16",
) -> Tensor:
    """One forward pass over the case's tokens on ``ep_size`` virtual ranks: BF16 [N, H].

    Within ``processes.joined`` and at its size, on its processes instead (collective).

    Args:
        config: tunables; ``Config.suggest`` by default. The reference uses its batch sizes.
        tokens_per_rank: how the tokens are split; evenly by default.
        precision: of the routed experts, "bf16" or "mxfp8".
    """
    return prepare_forward(case, ep_size, backend, config, tokens_per_rank, precision=precision)()


def prepare_forward(
    case: Case,
    ep_size: int,
    backend: Backend,
    config: Config | None = None,
    tokens_per_rank: Sequence[int] | None = None,
    progress: Callable[[int], None] | None = None,
    precision: str = "bf16",
) -> Callable[[], Tensor]:
    """A function that runs the pass, schedule included, in a workspace that is made once.

    ``progress``: told by the emulator how many warp instructions the running launch has taken.
    """
    lengths = list(tokens_per_rank or case.tokens_per_rank(ep_size))
    if backend.kind == "reference":
        sizes: dict[str, Any] = (
            {"minibatch": config.minibatch_size, "macrobatch": config.macrobatch_size}
            if config
            else {}
        )
        sizes |= {"tokens_per_rank": lengths, "precision": precision}
        return lambda: forward_reference(case, ep_size, **sizes)
    if backend.kind == "kernel":
        return _prepare_kernel(case, lengths, backend, config, precision=precision)
    # A workspace on the CPU exists only for the emulator.
    with _emulator(backend.arch):
        prepared = _prepare_kernel(case, lengths, backend, config, precision=precision)

    def emulated() -> Tensor:
        with _emulator(backend.arch, progress):
            return prepared()

    return emulated


def run_step(
    case: Case, dy: Tensor | None, ep_size: int, backend: Backend, precision: str = "bf16"
) -> Tensor:
    """Forward, and with the output's gradient ``dy`` [N, H] backward, on virtual ranks: BF16 [N, H]."""
    lengths = case.tokens_per_rank(ep_size)
    with machine(backend):
        return _prepare_kernel(case, lengths, backend, None, dy, precision)()


def machine(backend: Backend) -> contextlib.AbstractContextManager[Any]:
    """What a backend's calls need around them: the emulator, or nothing."""
    return _emulator(backend.arch) if backend.kind == "emulator" else contextlib.nullcontext()


def lay_out(
    case: Case,
    lengths: list[int],
    backend: Backend,
    config: Config | None = None,
    precision: str = "bf16",
) -> LaidOut:
    """The case over ranks of a backend's kernels; in the emulator only inside ``machine``."""
    from mok.laid_out import LaidOut

    found = backend.info or emulated_machine(backend.arch)
    return LaidOut(case, lengths, backend.device, found, config, precision)


def _prepare_kernel(
    case: Case,
    lengths: list[int],
    backend: Backend,
    config: Config | None,
    dy: Tensor | None = None,
    precision: str = "bf16",
) -> Callable[[], Tensor]:
    layer = lay_out(case, lengths, backend, config, precision)

    def run() -> Tensor:
        schedule = layer.schedule()
        output, context = layer.forward(schedule, save_context=dy is not None)
        if dy is not None:
            assert context is not None
            layer.backward(schedule, context, dy)
        return layer.place.together(output)

    return run


def emulated_machine(arch: str | None) -> Machine:
    """What the emulator stands for: few SMs, since each costs time."""
    return Machine("emulator", EMULATED_SMS, arch or KERNEL_ARCHS[0], "ours")


EMULATOR_REMEDY = (
    "Install numba and nvidia-cutlass-dsl: pip install mok-cutedsl brings both on Linux"
)


def _emulator(
    arch: str | None, progress: Callable[[int], None] | None = None
) -> contextlib.AbstractContextManager[Any]:
    machine = emulated_machine(arch)
    try:
        from mok.tools.emulator import Emulator

        return Emulator(machine.arch, num_sms=machine.num_sms, progress=progress)
    except ImportError as error:
        raise MissingDependencyError(
            "the emulator needs numba and the kernel language", str(error), EMULATOR_REMEDY
        ) from error


def measure_ms(run: Callable[[], Any], backend: Backend, repeats: int = 10) -> float:
    """Median milliseconds of one call, after one that is not counted."""
    run()
    if not backend.on_gpu:
        begin = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - begin)
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)
