"""What equal layers share, and how one process' tokens and weights are split over its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mok import functional
from mok.config import Config, Shape
from mok.errors import MokError

if TYPE_CHECKING:
    from mok.runtime.group import Group
    from mok.runtime.plan import WorkspacePlan
    from mok.runtime.workspace import Workspace

ALIGNMENT = 16  # bytes, of every argument of a kernel


@dataclass(frozen=True)
class LayerSpec:
    """What equal layers share. ``group`` None: one rank. ``config`` None: ``Config.suggest``.

    ``precision``: of the routed experts, "bf16" or "mxfp8".
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    topk: int
    shared_intermediate_size: int | None = None
    group: Group | None = None
    config: Config | None = None
    precision: str = "bf16"

    @property
    def ep_size(self) -> int:
        return self.group.size if self.group is not None else 1

    @property
    def local_ranks(self) -> tuple[int, ...]:
        return self.group.local_ranks if self.group is not None else (0,)

    def shape(self, num_tokens: int = 0) -> Shape:
        return Shape(
            num_tokens, self.hidden_size, self.intermediate_size, self.num_experts, self.topk,
            self.ep_size, self.shared_intermediate_size,
        )  # fmt: skip

    def tokens(self, num_tokens: int) -> list[int]:
        """Tokens of each local rank."""
        ranks = len(self.local_ranks)
        if ranks == 1:
            return [num_tokens]
        return [(num_tokens + ranks - 1 - i) // ranks for i in range(ranks)]

    def experts(self) -> list[int]:
        """Experts of each local rank."""
        shape = self.shape()
        return [len(shape.experts_on(rank)) for rank in self.local_ranks]

    def config_for(self, max_tokens: int, device: torch.device) -> Config:
        if self.config is not None:
            return self.config
        return _suggest(self, max_tokens, _machine(device))

    def plan(self, max_tokens: int, device: torch.device) -> WorkspacePlan:
        """Sizes of the workspace, without making it."""
        config = self.config_for(max_tokens, device)
        arch = _machine(device).arch
        return _plan(self.shape(), config, max(max_tokens, 1), arch, self.precision)

    def workspace(self, max_tokens: int, device: torch.device) -> tuple[Config, Workspace]:
        """The workspace, made at its first use (collective)."""
        config = self.config_for(max_tokens, device)
        workspace = functional.get_workspace(
            config,
            self.group,
            device=device,
            max_tokens=max_tokens,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_experts=self.num_experts,
            topk=self.topk,
            shared_intermediate_size=self.shared_intermediate_size,
            precision=self.precision,
        )
        return config, workspace


_specs: list[LayerSpec] = []
_numbers: dict[LayerSpec, int] = {}


def register_layer(spec: LayerSpec) -> int:
    """The number of a layer in this process; equal layers get the same."""
    if spec not in _numbers:
        _numbers[spec] = len(_specs)
        _specs.append(spec)
    return _numbers[spec]


def layer_spec(layer: int) -> LayerSpec:
    """The layer with a number."""
    if not 0 <= layer < len(_specs):
        raise MokError("layer must be a number that register_layer gave", layer)
    return _specs[layer]


@dataclass(frozen=True)
class _Emulated:
    arch: str
    num_sms: int


def _machine(device: torch.device) -> Any:
    """The device, or the emulator in use: an object with ``arch`` and ``num_sms``."""
    from mok.runtime.launch import active_emulator

    emulator: Any = active_emulator()
    if emulator is not None:
        return _Emulated(emulator.arch, int(emulator.num_sms))
    from mok.runtime.device import require_arch

    return require_arch(device)


@lru_cache
def _suggest(spec: LayerSpec, max_tokens: int, machine: Any) -> Config:
    return Config.suggest(spec.shape(max_tokens), machine, spec.precision)


@lru_cache
def _plan(
    shape: Shape, config: Config, max_tokens: int, arch: str, precision: str
) -> WorkspacePlan:
    from mok.runtime.plan import plan_workspace

    return plan_workspace(shape, config, max_tokens, arch, precision)


# ---------------------------------------------------------------------- splitting over local ranks


def aligned(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


def split(tensor: Tensor, lengths: list[int]) -> list[Tensor]:
    """One part per local rank, contiguous and aligned."""
    if len(lengths) == 1:
        return [aligned(tensor)]
    return [aligned(part) for part in tensor.split(lengths)]


def views(tensor: Tensor, lengths: list[int]) -> list[Tensor]:
    """One part per local rank, in place."""
    return [tensor] if len(lengths) == 1 else list(tensor.split(lengths))


def join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
