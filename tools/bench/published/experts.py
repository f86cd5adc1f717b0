"""How peers multiply: torch's grouped GEMM, Transformer Engine's, and Megatron's mixture of both.

Each takes rows in expert order with their numbers per expert, and the router's weights where they are applied
here; all are differentiable. MXFP8 quantises weights in every iteration, as these libraries do while training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from mok.tools.bench.published.share import Share, Unavailable

MXFP8_ROWS = 32  # an expert's rows come in multiples of so many, for blocks along the rows


def alignment(precision: str) -> int:
    """Rows of an expert come in multiples of this."""
    return MXFP8_ROWS if precision == "mxfp8" else 1


def weighted(y: Tensor, weights: Tensor | None) -> Tensor:
    """Rows times the router's weights, where those came along."""
    return y if weights is None else y * weights.to(y.dtype).unsqueeze(1)


class TorchExperts:
    """``torch._grouped_mm``; in MXFP8 torchao's differentiable grouped GEMM."""

    packages = ("torch", "torchao")

    def __init__(self, share: Share, precision: str) -> None:
        self.multiply: Callable[..., Tensor] = torch._grouped_mm
        if precision == "mxfp8":
            self.multiply = torchao_multiply()
        self.gate_up = torch.cat((share.gate, share.up), dim=1).requires_grad_()
        self.down = share.down.detach().clone().requires_grad_()

    def parameters(self) -> list[Tensor]:
        return [self.gate_up, self.down]

    def __call__(self, rows: Tensor, splits: list[int], weights: Tensor | None) -> Tensor:
        ends = torch.tensor([*accumulate(splits)], dtype=torch.int32, device=rows.device)
        both = self.multiply(rows, self.gate_up.transpose(1, 2), offs=ends)
        gate, up = both.chunk(2, dim=-1)
        y = self.multiply(silu(gate) * up, self.down.transpose(1, 2), offs=ends)
        return weighted(y, weights)


def torchao_multiply() -> Callable[..., Tensor]:
    """torchao's grouped GEMM that quantises to MXFP8, wherever this version has it.

    Raises:
        Unavailable: no torchao, or one without it.
    """
    try:
        import torchao  # noqa: F401
    except ImportError as error:
        raise Unavailable(f"torch in MXFP8 needs torchao ({error})") from error
    name = "_to_mxfp8_then_scaled_grouped_mm"
    for module in ("mxfp8_grouped_mm", "scaled_grouped_mm"):
        with contextlib.suppress(ImportError):
            import importlib

            place = importlib.import_module(f"torchao.prototype.moe_training.{module}")
            if hasattr(place, name):
                found: Callable[..., Tensor] = getattr(place, name)
                return found
    raise Unavailable(f"this torchao has no {name}")


class TeExperts:
    """Transformer Engine's ``GroupedLinear``, before and after a SwiGLU of torch."""

    packages: tuple[str, ...] = ("transformer-engine", "transformer_engine")

    def __init__(self, share: Share, precision: str) -> None:
        try:
            import transformer_engine.pytorch as te
        except ImportError as error:
            raise Unavailable(f"Transformer Engine is not installed ({error})") from error
        self.te, self.precision = te, precision
        layer = share.layer

        def linear(columns: int, rows: int, weights: Tensor) -> Any:
            made = te.GroupedLinear(
                layer.local, columns, rows, bias=False, params_dtype=torch.bfloat16,
                device=share.device,
            )  # fmt: skip
            with torch.no_grad():
                for i, weight in enumerate(weights):
                    getattr(made, f"weight{i}").copy_(weight)
            return made

        both = torch.cat((share.gate, share.up), dim=1)
        self.up = linear(layer.hidden, 2 * layer.intermediate, both)
        self.down = linear(layer.intermediate, layer.hidden, share.down)

    def parameters(self) -> list[Tensor]:
        return [*self.up.parameters(), *self.down.parameters()]

    def activation(self, both: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """SwiGLU, and the weights that are still to be applied."""
        gate, up = both.chunk(2, dim=-1)
        return silu(gate) * up, weights

    def __call__(self, rows: Tensor, splits: list[int], weights: Tensor | None) -> Tensor:
        with mxfp8_recipe(self.te, self.precision):
            both = self.up(rows, splits)
            hidden, weights = self.activation(both, weights)
            y = self.down(hidden, splits)
        return weighted(y, weights)


class MegatronExperts(TeExperts):
    """As Megatron-Core's experts: its fused SwiGLU applies the router's weights between the GEMMs."""

    packages = ("megatron-core", *TeExperts.packages)

    def __init__(self, share: Share, precision: str) -> None:
        try:
            from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
        except ImportError as error:
            raise Unavailable(f"Megatron-Core is not installed ({error})") from error
        super().__init__(share, precision)
        self.swiglu: Any = weighted_bias_swiglu_impl

    def activation(self, both: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert weights is not None
        return self.swiglu(both, None, weights.unsqueeze(1)), None


def mxfp8_recipe(te: Any, precision: str) -> contextlib.AbstractContextManager[Any]:
    """Transformer Engine's autocast to MXFP8, under its newer name or its older one."""
    if precision != "mxfp8":
        return contextlib.nullcontext()
    from transformer_engine.common.recipe import MXFP8BlockScaling

    recipe = MXFP8BlockScaling()
    if hasattr(te, "autocast"):
        newer: contextlib.AbstractContextManager[Any] = te.autocast(enabled=True, recipe=recipe)
        return newer
    older: contextlib.AbstractContextManager[Any] = te.fp8_autocast(enabled=True, fp8_recipe=recipe)
    return older
