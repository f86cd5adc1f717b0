"""Expert parallelism inside data parallelism: the groups, the gradients, the checkpoints.

With W processes and EP ranks per layer there are W / EP copies of every expert. Process r is rank r mod EP
of its expert group, and r div EP is its copy's number, so that an expert group's ranks are neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mok.errors import GroupError, ShapeError

if TYPE_CHECKING:
    from mok.layer import MoELayer

ROUTED = ("routed_gate", "routed_up", "routed_down")


@dataclass(frozen=True)
class ExpertMesh:
    """Process groups of expert parallelism inside data parallelism.

    Attributes:
        expert: this process' expert group, EP ranks: ``Group.from_process_group(mesh.expert)``.
        replica: the processes that hold the same experts, W / EP of them.
        copy: number of this process' copy.
    """

    expert: Any
    replica: Any
    ep_size: int
    copies: int
    rank: int
    copy: int


def expert_mesh(ep_size: int) -> ExpertMesh:
    """Split all processes (collective).

    Raises:
        GroupError: torch.distributed is not initialised, or EP does not divide the processes.
    """
    if not dist.is_initialized():
        raise GroupError(
            "torch.distributed must be initialised first",
            remedy="Call torch.distributed.init_process_group() (torchrun sets what it needs)",
        )
    world, me = dist.get_world_size(), dist.get_rank()
    if ep_size < 1 or world % ep_size:
        raise GroupError("EP must divide the number of processes", f"EP {ep_size} of {world}")
    expert = replica = None
    # Every process takes part in making every group.
    for copy in range(world // ep_size):
        made = dist.new_group(list(range(copy * ep_size, (copy + 1) * ep_size)))
        expert = made if me // ep_size == copy else expert
    for rank in range(ep_size):
        made = dist.new_group(list(range(rank, world, ep_size)))
        replica = made if me % ep_size == rank else replica
    return ExpertMesh(expert, replica, ep_size, world // ep_size, me % ep_size, me // ep_size)


def routed_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a model that differ between the ranks of an expert group."""
    from mok.layer import MoELayer

    layers = (m for m in module.modules() if isinstance(m, MoELayer))
    return [p for layer in layers for p in layer.routed_parameters()]


def reduce_gradients(module: nn.Module, mesh: ExpertMesh) -> None:
    """Mean of the gradients over all W processes, as one process would have on the whole batch.

    Every process' loss is a mean over its own tokens, all the same number. Routed experts have the sum
    over their expert group's tokens already, and are reduced over the copies only.
    """
    routed = {id(p) for p in routed_parameters(module)}
    world = mesh.ep_size * mesh.copies
    for parameter in module.parameters():
        if parameter.grad is None:
            continue
        group = mesh.replica if id(parameter) in routed else None
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad.div_(world)


def clip_grad_norm(
    module: nn.Module, max_norm: float, mesh: ExpertMesh, eps: float = 1e-6
) -> Tensor:
    """Scale all gradients so that their 2-norm over the whole model is at most ``max_norm``.

    The norm counts every expert once, on whichever rank it is, and every other parameter once; it and so
    the scale are the same on all processes. After ``reduce_gradients``.

    Returns:
        The norm before, FP32.
    """
    routed = {id(p) for p in routed_parameters(module)}
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    if not grads:
        return torch.zeros(())
    squares = torch.zeros(2, dtype=torch.float64, device=grads[0].device)
    for parameter in module.parameters():
        if parameter.grad is not None:
            squares[int(id(parameter) in routed)] += parameter.grad.double().square().sum()
    # One process' contribution at a time, in rank order: the same sum on every rank.
    parts = [torch.empty_like(squares[1:]) for _ in range(mesh.ep_size)]
    dist.all_gather(parts, squares[1:].contiguous(), group=mesh.expert)
    norm = (squares[0] + torch.stack(parts).sum()).sqrt().float()
    scale = (max_norm / (norm + eps)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(scale.to(grad.dtype) if grad.dtype != torch.float64 else scale.double())
    return norm


# ---------------------------------------------------------------------- checkpoints


def expert_state(module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """A model's tensors by name for torch.distributed.checkpoint, every expert under its global number.

    The tensors share memory with the parameters, so ``dcp.load`` fills the model. A checkpoint written at
    one number of ranks is read at any other: each rank asks for the experts it has::

        dcp.save(expert_state(model), checkpoint_id=folder)
        dcp.load(expert_state(model), checkpoint_id=folder)

    Keys are those of ``state_dict``, routed weights with ``.<expert>`` behind; in a group of processes
    every rank adds its own, and the copies' are the same.
    """
    from mok.layer import MoELayer

    state = {prefix + name: value for name, value in module.state_dict(keep_vars=True).items()}
    found: dict[str, Tensor] = {}
    owned: dict[str, Sequence[int]] = {}
    for path, layer in module.named_modules():
        if isinstance(layer, MoELayer):
            for name in ROUTED:
                key = prefix + (f"{path}.{name}" if path else name)
                owned[key] = _experts(layer)
    for key, value in state.items():
        value = value.detach()
        if key not in owned:
            found[key] = value
            continue
        if len(value) != len(owned[key]):
            raise ShapeError(
                f"{key} must hold the experts of its ranks", f"{len(value)} of {len(owned[key])}"
            )
        found |= {f"{key}.{e}": value[i] for i, e in enumerate(owned[key])}
    return found


def _experts(layer: MoELayer) -> list[int]:
    """Global numbers of a layer's experts, in the order it holds them."""
    shape = layer.spec.shape()
    ranks: Iterable[int] = layer.spec.local_ranks
    return [expert for rank in ranks for expert in shape.experts_on(rank)]
