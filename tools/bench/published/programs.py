"""The programs of the published comparison: ours, and peers put together from a transport and experts."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from mok.config import Config, Shape
from mok.tools.bench.programs.base import installed_versions
from mok.tools.bench.published.experts import MegatronExperts, TeExperts, TorchExperts, alignment
from mok.tools.bench.published.share import Layer, Share, Unavailable
from mok.tools.bench.published.transports import DeepEp, HybridEp, Nccl


class Program(Protocol):
    """What is timed: a forward pass that keeps what backward needs, and a backward pass with all gradients."""

    def forward(self) -> Tensor:
        """BF16 [T, H]."""

    def backward(self) -> tuple[Tensor, ...]:
        """Gradients of x and the router's weights first, then of all weights."""


class Pipeline:
    """A peer: tokens to experts, experts, and back, with the shared expert as plain torch beside it."""

    def __init__(self, share: Share, precision: str, transport: Any, experts: Any) -> None:
        layer = share.layer
        if layer.experts % layer.ep:
            raise Unavailable(
                f"{layer.experts} experts on {layer.ep} ranks: each must hold as many"
            )
        self.share = share
        self.experts = experts(share, precision)
        self.transport = transport(share, alignment(precision))
        self.x = share.x.detach().clone().requires_grad_()
        self.router = share.router.detach().clone().requires_grad_()
        self.shared = [w.detach().clone().requires_grad_() for w in share.shared]
        self.output: Tensor | None = None

    def forward(self) -> Tensor:
        arrived = self.transport.send(self.x, self.router, self.share.ids)
        y = self.experts(arrived.rows, arrived.splits, arrived.weights)
        output = self.transport.back(y, arrived.handle)
        if self.shared:
            gate, up, down = self.shared
            output = output + linear(silu(linear(self.x, gate)) * linear(self.x, up), down)
        self.output = output
        return output.detach()

    def backward(self) -> tuple[Tensor, ...]:
        assert self.output is not None
        leaves = [self.x, self.router, *self.experts.parameters(), *self.shared]
        output, self.output = self.output, None
        return torch.autograd.grad(output, leaves, self.share.dy)


class Ours:
    """This project's layer; schedule and context are part of forward.

    Args:
        shares: one per rank of ``group`` in this process: one rank, or all virtual ones.
        config: tunables, ``Config.suggest`` by default.
    """

    def __init__(
        self, shares: list[Share], precision: str, group: Any, config: Config | None = None
    ) -> None:
        from mok import functional
        from mok.mxfp8 import mxfp8_quantize

        self.functional: Any = functional
        self.shares = shares
        first = shares[0]
        layer = first.layer
        self.config = config or Config.suggest(shape_of(layer), first.device, precision)
        self.workspace = functional.create_workspace(
            self.config, group, device=first.device, max_tokens=layer.tokens,
            hidden_size=layer.hidden, intermediate_size=layer.intermediate,
            num_experts=layer.experts, topk=layer.topk,
            shared_intermediate_size=layer.shared or None, precision=precision,
        )  # fmt: skip
        routed: list[list[Any]] = [[s.gate, s.up, s.down] for s in shares]
        if precision == "mxfp8":  # once: the caller does this after each step of the optimizer
            routed = [[mxfp8_quantize(w) for w in part] for part in routed]
        self.arguments: tuple[Any, ...] = (
            self.each([s.x for s in shares]),
            self.each([s.router for s in shares]),
            *(first.shared or (None, None, None)),
            *(self.each([part[i] for part in routed]) for i in range(3)),
        )
        self.ids, self.dy = self.each([s.ids for s in shares]), self.each([s.dy for s in shares])
        self.local = self.each([s.layer.local for s in shares])
        self.kept: Any = None

    def each(self, values: list[Any]) -> Any:
        """As ``mok.functional`` takes what each local rank has."""
        return values[0] if len(values) == 1 else values

    def forward(self) -> Tensor:
        schedule = self.functional.build_schedule(
            self.workspace, self.config, self.ids, num_local_experts=self.local
        )
        output, context = self.functional.forward(
            self.config, self.workspace, schedule, *self.arguments
        )
        self.kept = schedule, context
        found: Tensor = output if isinstance(output, Tensor) else output[0]
        return found

    def backward(self) -> tuple[Tensor, ...]:
        (schedule, context), self.kept = self.kept, None
        found: tuple[Tensor, ...] = self.functional.backward(
            self.config, self.workspace, schedule, context, self.dy, *self.arguments
        )
        return found

    def close(self) -> None:
        self.workspace.check()
        self.workspace.close()

    def tunables(self) -> dict[str, Any]:
        return dataclasses.asdict(self.config)


def shape_of(layer: Layer) -> Shape:
    """As ``mok.Shape``."""
    return Shape(
        layer.tokens, layer.hidden, layer.intermediate, layer.experts, layer.topk, layer.ep,
        layer.shared or None,
    )  # fmt: skip


PEERS: dict[str, tuple[str, Any, Any]] = {
    "nccl-torch": ("NCCL + torch", Nccl, TorchExperts),
    "deepep-torch": ("DeepEP + torch", DeepEp, TorchExperts),
    "deepep-te": ("DeepEP + Transformer Engine", DeepEp, TeExperts),
    "hybridep-megatron": ("HybridEP + Megatron", HybridEp, MegatronExperts),
}
"""By name: title, transport, experts. Upstream MoK runs in another interpreter: see ``upstream``."""
TITLES = {name: title for name, (title, _, _) in PEERS.items()} | {
    "mok": "this project",
    "upstream": "upstream MoK",
}


@contextlib.contextmanager
def peer(name: str, share: Share, precision: str) -> Iterator[Pipeline]:
    """A peer that is ready to be called.

    Raises:
        Unavailable: it is not installed, or cannot do this layer.
    """
    _, transport, experts = PEERS[name]
    yield Pipeline(share, precision, transport, experts)


def versions(names: list[str]) -> dict[str, str]:
    """Versions of the installed packages that peers are made of."""
    packages = [
        package
        for name in names
        if name in PEERS
        for part in PEERS[name][1:]
        for package in part.packages
    ]
    return installed_versions(list(dict.fromkeys(packages)))
