"""One rank per process, as torchrun starts them, for the commands of ``mok``.

``torchrun --nproc-per-node 4 -m mok check forward`` runs every case on a group of four processes: each
holds its tokens and experts, and the results are gathered to be compared on all of them. More processes
than GPUs share them (their kernels are time-sliced, which costs milliseconds per barrier).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mok.config import Config, Shape
from mok.errors import DeviceError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mok.reference import Case
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


def fit(lengths: Sequence[int] | None, size: int) -> list[int] | None:
    """A split of tokens over any number of ranks, for ``size`` ranks: its ends stay, ranks between
    the first and the last have none."""
    if lengths is None or len(lengths) == size:
        return None if lengths is None else list(lengths)
    return [sum(lengths) - lengths[-1], *[0] * (size - 2), lengths[-1]]


def prepare_forward(
    case: Case, lengths: Sequence[int], config: Config, device: torch.device, ranks: Group
) -> Callable[[], Tensor]:
    """A function that runs the case on the group, this process its share: BF16 [N, H], on every rank
    (collective)."""
    import torch
    import torch.distributed as dist

    from mok import functional

    rank, shape = ranks.rank, share(case.shape, lengths)
    workspace = functional.create_workspace(
        config,
        ranks,
        device=device,
        max_tokens=max(shape.num_tokens, 1),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_experts=shape.num_experts,
        topk=shape.topk,
        shared_intermediate_size=shape.shared_intermediate_size,
    )
    experts = shape.experts_on(rank)
    routed = case.routed[experts.start : experts.stop]
    start = sum(lengths[:rank])
    mine = slice(start, start + lengths[rank])
    x, ids, weights = (
        t[mine].clone() for t in (case.x, case.top_experts, case.router_weights)
    )  # fmt: skip
    shared: tuple[Any, Any, Any] = (None, None, None)
    if case.shared:
        shared = (case.shared.gate[0], case.shared.up[0], case.shared.down[0])

    def run() -> Tensor:
        schedule = functional.build_schedule(workspace, config, ids, num_local_experts=len(experts))
        output, _ = functional.forward(
            config, workspace, schedule, x, weights, *shared, routed.gate, routed.up, routed.down,
            swiglu_limit=case.swiglu_limit, save_context=False,
        )  # fmt: skip
        parts: list[Any] = [None] * ranks.size
        dist.all_gather_object(parts, output.cpu())  # waits for the GPU
        workspace.check()
        return torch.cat(parts).to(device)

    return run


def share(shape: Shape, lengths: Sequence[int]) -> Shape:
    """The shape of a call on as many ranks as there are ``lengths``."""
    return Shape(
        max(lengths, default=0), shape.hidden_size, shape.intermediate_size, shape.num_experts,
        shape.topk, len(lengths), shape.shared_intermediate_size,
    )  # fmt: skip


def require_kernel(kind: str, note: str) -> None:
    """Raise DeviceError where several processes would have no kernel to run."""
    if kind == "reference":
        raise DeviceError(
            "Ranks in several processes need a GPU, or the emulator",
            note or "no GPU",
            "Add --emulate to run the compiled kernels on the CPU, or start one process",
        )
