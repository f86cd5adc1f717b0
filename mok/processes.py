"""One rank per process, as torchrun starts them, for the commands of ``mok``.

``torchrun --nproc-per-node 4 -m mok check forward`` runs every case on a group of four processes: each
holds its tokens and experts, and the results are gathered to be compared on all of them. More processes
than GPUs share them (their kernels are time-sliced, which costs milliseconds per barrier).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mok.errors import DeviceError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mok.runtime.group import Group

_joined: Group | None = None


def launched() -> bool:
    """Whether torchrun, or something that sets the same variables, started this process."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_leader() -> bool:
    """Whether this process speaks for all: rank 0, or the only one."""
    return not launched() or os.environ["RANK"] == "0"


def group() -> Group | None:
    """The group that ``joined`` made, within it."""
    return _joined


@contextlib.contextmanager
def joined(timeout_s: float | None = None) -> Iterator[Group | None]:
    """The group of all processes (collective); None where this process is alone.

    The process group's backend is gloo: it only serves the rendezvous and the gathering of results.
    """
    global _joined
    if not launched():
        yield None
        return
    import torch
    import torch.distributed as dist

    from mok.runtime.group import DEFAULT_TIMEOUT_S, Group

    device = None
    if torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        device = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(device)
    own = not dist.is_initialized()
    if own:
        dist.init_process_group("gloo")
    try:
        limit = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        with Group.from_process_group(None, device, limit) as made:
            _joined = made
            yield made
    finally:
        _joined = None
        if own:
            dist.destroy_process_group()


def smallest(value: int) -> int:
    """The least of all processes' values (collective within ``joined``)."""
    import torch
    import torch.distributed as dist

    found = torch.tensor(value, dtype=torch.int64)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return int(found)


def on_one_gpu() -> int:
    """Processes of this host that share a GPU."""
    import torch

    here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    return -(-here // torch.cuda.device_count())


def fit(lengths: Sequence[int] | None, size: int) -> list[int] | None:
    """A split of tokens over any number of ranks, for ``size`` ranks: its ends stay, ranks between
    the first and the last have none."""
    if lengths is None or len(lengths) == size:
        return None if lengths is None else list(lengths)
    return [sum(lengths) - lengths[-1], *[0] * (size - 2), lengths[-1]]


class Place:
    """Where a case's ranks run: each in a process of ``joined`` if there are as many, else here.

    Attributes:
        group: of the ranks.
        local: those of this process.
    """

    def __init__(self, ep_size: int, device: torch.device) -> None:
        from mok.runtime.group import Group

        self.ep_size, self.device = ep_size, device
        self.apart = _joined is not None and _joined.size == ep_size > 1
        if self.apart:
            assert _joined is not None
            self.group: Group = _joined
        else:
            self.group = Group.virtual(ep_size, device) if ep_size > 1 else Group.single(device)
        self.local = list(self.group.local_ranks)

    def each(self, values: Sequence[Any]) -> Any:
        """Of one value per rank those of this process, as ``mok.functional`` takes them: with one rank a
        plain value."""
        return values[self.local[0]] if len(self.local) == 1 else [values[r] for r in self.local]

    def every(self, values: Any) -> list[Tensor]:
        """What ``mok.functional`` returned, of all ranks (collective; waits for the GPU)."""
        own = [values] if len(self.local) == 1 else list(values)
        if not self.apart:
            return own
        import torch.distributed as dist

        parts: list[Any] = [None] * self.ep_size
        dist.all_gather_object(parts, own[0].cpu())
        return [part.to(self.device) for part in parts]

    def together(self, values: Any) -> Tensor:
        """The same, one rank's rows after the other's."""
        import torch

        parts = self.every(values)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def require_kernel(kind: str, note: str) -> None:
    """Raise DeviceError where several processes would have no kernel to run."""
    if kind == "reference":
        raise DeviceError(
            "Ranks in several processes need a GPU, or the emulator",
            note or "no GPU",
            "Add --emulate to run the compiled kernels on the CPU, or start one process",
        )
