"""SonicMoE: its own autograd functions and kernels, from given expert ids and router weights."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mok.tools.bench.programs import sonic_configs
from mok.tools.bench.programs.base import Options, Program, Unavailable, interleaved
from mok.tools.bench.timing import reason_of
from mok.tools.bench.work import Work


@dataclass
class Library:
    """What is used of the packages sonic-moe and quack-kernels."""

    up: Any  # the autograd functions of both projections
    down: Any
    metadata: Any  # ids → offsets and permutations
    swiglu: Any


_library: Library | None = None


def load(path: str | None, tune: bool) -> Library:
    """Import SonicMoE under the kernel language that is installed here.

    quack 0.6.5 refuses values of newer releases of the kernel language when it makes the keys of
    its caches; a constant key in their place is safe as long as the kernel cache on disk is off.

    Args:
        path: a folder to import it from; None: it is installed.
        tune: leave all choices to its own tuner.

    Raises:
        Unavailable: it cannot be imported, with the reason.
    """
    global _library
    if _library is None:
        if path:
            sys.path.insert(0, path)
        os.environ.setdefault("QUACK_CACHE_ENABLED", "0")
        try:
            _accept_unknown_values(importlib.import_module("quack.gemm_runtime.identity"))
            functional = importlib.import_module("sonicmoe.functional")
            triton_kernels = importlib.import_module("sonicmoe.functional.triton_kernels")
            enums = importlib.import_module("sonicmoe.enums")
            _library = Library(
                functional._UpProjection,
                functional._DownProjection,
                triton_kernels.TC_topk_router_metadata_triton,
                enums.ActivationType.SWIGLU,
            )
        except (ImportError, AttributeError, OSError, RuntimeError) as error:
            raise Unavailable(reason_of(error)) from error
        if not tune:
            try:
                sonic_configs.pin_reduction(
                    importlib.import_module("sonicmoe.functional.reduction_over_k_gather")
                )
            except (ImportError, AttributeError) as error:
                raise Unavailable(reason_of(error)) from error
    return _library


def _accept_unknown_values(identity: Any) -> None:
    original = identity.semantic_value_key

    def semantic_value_key(value: Any, seen: Any) -> Any:
        try:
            return original(value, seen)
        except TypeError:
            return ("opaque", type(value).__module__, type(value).__qualname__)

    identity.semantic_value_key = semantic_value_key


def layer(
    library: Library, x: Tensor, w1: Tensor, w2: Tensor, ids: Tensor, router_weights: Tensor,
    experts: int, inference: bool,
) -> Tensor:  # fmt: skip
    """SonicMoE's layer from given routes: BF16 [T, H], with autograd.

    Args:
        x: BF16 [T, H]. w1: [2I, H, E], a view of contiguous [E, 2I, H] with gate and up rows in turn.
        w2: [H, I, E], a view of contiguous [E, H, I]. ids: int32 [T, K]. router_weights: FP32 [T, K].
        inference: keep nothing for backward.
    """
    tokens, topk = ids.shape
    routes = tokens * topk

    def ints(count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int32, device=x.device)

    frequency, offset = ints(experts), ints(experts + 1)
    gather, scatter, reverse = ints(routes), ints(routes), ints(routes)
    library.metadata(ids, experts, frequency, offset, gather, scatter, reverse)
    a, h = library.up.apply(
        x, w1, None, offset, routes, topk, gather, scatter, reverse, None, False,
        library.swiglu, inference, False,
    )  # fmt: skip
    output: Tensor = library.down.apply(
        a, h, w2, None, router_weights, offset, tokens, topk, gather, scatter, reverse,
        None, False, library.swiglu,
    )  # fmt: skip
    return output


class SonicProgram(Program):
    """Metadata, up projection, down projection, token sum; backward by its autograd functions.

    Gate and up rows are interleaved one by one, weights are [2I, H, E] and [H, I, E] views of
    contiguous [E, 2I, H] and [E, H, I], as its documentation asks.
    """

    packages = ("sonic-moe", "quack-kernels", "triton", "apache-tvm-ffi")
    needs_gpu = True

    def __init__(self, name: str, work: Work, options: Options) -> None:
        super().__init__(name, work, options)
        self.library = load(options.paths.get("sonic"), options.sonic_tune)
        self.chooser: sonic_configs.Chooser | None = None
        if not options.sonic_tune:
            try:
                self.chooser = sonic_configs.install(options.clock, options.variants)
            except (ImportError, AttributeError, TypeError) as error:
                raise Unavailable(reason_of(error)) from error
        self.w1 = interleaved(work.gate, work.up, 1).permute(1, 2, 0).requires_grad_()
        self.w2 = work.down.permute(1, 2, 0).detach().requires_grad_()
        self.ids = work.ids.int()  # as its own router gives them
        self.inputs = [
            (s.x.detach().requires_grad_(), s.router_weights.detach().requires_grad_(), s.dy)
            for s in work.sets
        ]
        self.note = "its own tuner" if options.sonic_tune else "known-good tile configs"

    def _layer(self, x: Tensor, router_weights: Tensor, inference: bool) -> Tensor:
        experts = self.work.bench.shape.num_experts
        return layer(
            self.library, x, self.w1, self.w2, self.ids, router_weights, experts, inference
        )

    def forward(self, index: int) -> Tensor:
        x, router_weights, _ = self.inputs[index % len(self.inputs)]
        with torch.no_grad():
            return self._layer(x, router_weights, inference=True)

    def forward_training(self, index: int) -> tuple[Tensor, Any]:
        x, router_weights, _ = self.inputs[index % len(self.inputs)]
        output = self._layer(x, router_weights, inference=False)
        return output, output

    def backward(self, index: int, saved: Any, keep: bool = False) -> tuple[Tensor, ...]:
        x, router_weights, dy = self.inputs[index % len(self.inputs)]
        return torch.autograd.grad(
            saved, (x, router_weights, self.w1, self.w2), dy, retain_graph=keep
        )

    def gradients(self, raw: Any) -> dict[str, Tensor]:
        d_x, d_weights, d_w1, d_w2 = raw
        both, down = d_w1.permute(2, 0, 1), d_w2.permute(2, 0, 1)
        return {
            "x": d_x,
            "router_weights": d_weights,
            "gate": both[:, 0::2],
            "up": both[:, 1::2],
            "down": down,
        }

    def close(self) -> None:
        if self.chooser is not None:
            self.chooser.uninstall()
