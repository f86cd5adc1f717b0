"""MoELayer: the layer as a torch module, with autograd."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mok import ops
from mok.arguments import check_group, check_kind, check_max_tokens, device_of, limit_of
from mok.config import Config
from mok.errors import CapacityError, DeviceError, DtypeError, ShapeError
from mok.layer_spec import LayerSpec, register_layer
from mok.mxfp8 import QuantisedMasters
from mok.router import Router, Score, linear_fp32
from mok.runtime.plan import check_precision

if TYPE_CHECKING:
    from mok.runtime.group import Group

FIRST_TOKENS = 128  # of a workspace that grows


class MoELayer(nn.Module):
    """Routed experts, optionally a shared expert and a router.

    ``out = [scale·] shared(x) + Σ_k router_weights[:, k] · expert[top_experts[:, k]](x)``, with
    experts ``down · (silu(gate·x) ⊙ (up·x))``. Computes in BF16 with FP32 accumulation. Gradients
    flow to x, the router weights and all parameters.

    Args:
        hidden_size, intermediate_size, num_experts, topk: H, I, E, K (limits: ``mok.Shape``).
        shared_intermediate_size: width of the shared expert, or None for no such.
        gated_shared: multiply the shared expert's output by sigmoid(x·shared_scale), per token.
        router: a module from x [T, H] to (logits, weights, ids), such as ``mok.router.Router``, or
            "softmax" or "sigmoid" for one with normalised weights. None: ``forward`` is given them.
        swiglu_limit: L: clamp gate at most L and up in [-L, L].
        group: the expert-parallel ranks; None is one rank. Routed parameters hold this rank's
            experts (of a virtual group: those of all its ranks, among which tokens are split).
        config: the tunables; by default ``Config.suggest`` for the tokens at hand.
        max_tokens: the most tokens of any rank in any call. Needed in groups of several processes.
            Otherwise the workspace is made for the first call's tokens rounded up to a power of
            two, and a larger one when a call has more; smaller ones stay until
            ``functional.clear_workspace_cache()``, since CUDA graphs may use them.
        recompute: keep only the layer's inputs for backward and rebuild the rest there.
        main_grad: add the gradient of each weight that has a ``main_grad`` (BF16 or FP32, at the
            time of forward) into it, and give that weight no ``grad``. Compiler passes cannot see
            these additions: read main_grad only after backward.
        precision: of the routed experts, "bf16" or "mxfp8" (docs/mxfp8.md). With "mxfp8" the parameters
            are masters, quantised again once after each change; H and I are multiples of 128.
            torch.compile breaks its graph at such a layer.
        device, dtype: of the parameters; dtype is bfloat16 or float32. FP32 parameters are rounded
            to BF16 for the kernels and get FP32 gradients.

    Parameters:
        routed_gate, routed_up [El, I, H], routed_down [El, H, I]; with a shared expert of width Is
        shared_gate, shared_up [Is, H], shared_down [H, Is]; if gated shared_scale [H].

    Across processes, routed parameters belong to their rank alone: leave them out of data-parallel
    reductions over the group (``routed_parameters()``). Gradients of all others are of this rank's
    tokens: reduce them as usual.

    Raises:
        ShapeError, DtypeError: sizes or dtypes beyond the limits.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        topk: int,
        *,
        shared_intermediate_size: int | None = None,
        gated_shared: bool = False,
        router: nn.Module | Score | None = None,
        swiglu_limit: float | None = None,
        group: Group | None = None,
        config: Config | None = None,
        max_tokens: int | None = None,
        recompute: bool = False,
        main_grad: bool = False,
        precision: str = "bf16",
        device: Any = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        nn.Module.__init__(self)  # not super(): a subclass may also have a block's class as base
        if config is not None:
            check_kind("config", config, Config, "mok.Config(…), or None for Config.suggest")
        if group is not None:
            check_group(group)
        if max_tokens is not None:
            check_max_tokens(max_tokens)
        if router is not None and not isinstance(router, nn.Module | str):
            raise DtypeError("router must be a module, 'softmax', 'sigmoid' or None", repr(router))
        if not limit_of(swiglu_limit) >= 0:
            raise ShapeError("swiglu_limit must be at least 0", swiglu_limit)
        device = device_of(device)
        if dtype not in (torch.bfloat16, torch.float32):
            raise DtypeError("parameters are bfloat16 or float32", dtype)
        if gated_shared and shared_intermediate_size is None:
            raise ShapeError("gated_shared needs a shared expert", "no shared_intermediate_size")
        if max_tokens is None and group is not None and not group.is_local:
            raise CapacityError(
                "a group of several processes needs max_tokens",
                "None",
                "Pass the most tokens that any rank will have in a call",
            )
        if isinstance(router, str):
            router = Router(
                hidden_size, num_experts, topk, score=router, device=device, dtype=dtype
            )
        self.spec = LayerSpec(
            hidden_size,
            intermediate_size,
            num_experts,
            topk,
            shared_intermediate_size,
            group,
            config,
            precision,
        )
        shape = self.spec.shape()
        check_precision(precision, shape)
        self._masters = QuantisedMasters()
        self.swiglu_limit = None if swiglu_limit is None else limit_of(swiglu_limit)
        self.max_tokens = max_tokens
        self.recompute = recompute
        self.main_grad = main_grad
        self.router = router
        self._layer = register_layer(self.spec)
        self._grown = FIRST_TOKENS
        self.expert_ids = [e for rank in self.spec.local_ranks for e in shape.experts_on(rank)]
        local, H, I = len(self.expert_ids), hidden_size, intermediate_size

        def weight(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(size, device=device, dtype=dtype))

        self.routed_gate, self.routed_up = weight(local, I, H), weight(local, I, H)
        self.routed_down = weight(local, H, I)
        names = ("shared_gate", "shared_up", "shared_down", "shared_scale")
        width = shared_intermediate_size
        if width is None:
            for name in names:
                self.register_parameter(name, None)
        else:
            self.shared_gate, self.shared_up = weight(width, H), weight(width, H)
            self.shared_down = weight(H, width)
            self.register_parameter("shared_scale", weight(H) if gated_shared else None)
        self.reset_parameters()

    shared_gate: nn.Parameter | None
    shared_up: nn.Parameter | None
    shared_down: nn.Parameter | None
    shared_scale: nn.Parameter | None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Uniform in ±1/sqrt(fan in), as nn.Linear.

        Takes one number from torch's generator, and each expert's values from that and its global
        id: ranks with one seed make one model, however many they are.
        """
        weights = (self.routed_gate, self.routed_up, self.routed_down)
        shared = [w for w in (self.shared_gate, self.shared_up, self.shared_down) if w is not None]
        if self.routed_gate.is_meta:
            return
        seed = int(torch.randint(2**62, (), dtype=torch.int64))

        def fill(values: Sequence[Tensor], number: int) -> None:
            rng = torch.Generator(device=values[0].device).manual_seed((seed + number) % 2**63)
            for value in values:
                bound = value.shape[-1] ** -0.5
                value.uniform_(-bound, bound, generator=rng)

        for i, expert in enumerate(self.expert_ids):
            fill([w[i] for w in weights], 1 + expert)
        if shared:
            fill(shared if self.shared_scale is None else [*shared, self.shared_scale], 0)

    # ------------------------------------------------------------------ forward

    def forward(
        self, x: Tensor, router_weights: Tensor | None = None, top_experts: Tensor | None = None
    ) -> Tensor:
        """The layer's output, with x's shape and dtype (collective).

        Args:
            x: BF16 or FP32 [..., H]; FP32 is rounded to BF16.
            router_weights: [T, K] or [..., K], any floating dtype; only without a built-in router.
            top_experts: int64 or int32, the same shape; -1 drops a route.

        Raises:
            ShapeError, DtypeError, DeviceError, CapacityError, ResourceError: an argument or limit.
        """
        if not isinstance(x, Tensor):
            raise DtypeError("x must be a tensor", f"a {type(x).__name__}")
        if x.dtype not in (torch.bfloat16, torch.float32):
            raise DtypeError("x must be bfloat16 or float32", x.dtype)
        if x.shape[-1:] != (self.spec.hidden_size,):
            raise ShapeError(f"x must have the shape [..., {self.spec.hidden_size}]", list(x.shape))
        flat = x.reshape(-1, self.spec.hidden_size)
        weights, ids = self._route(flat, router_weights, top_experts)
        return self._compute(flat, weights, ids).reshape(x.shape).to(x.dtype)

    def _route(
        self, flat: Tensor, weights: Tensor | None, ids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        given = weights is not None or ids is not None
        if self.router is not None:
            if given:
                raise ShapeError(
                    "router_weights and top_experts are for layers without a router",
                    type(self.router).__name__,
                )
            found = self.router(flat)
            if not isinstance(found, tuple | list) or len(found) < 2:
                raise DtypeError(
                    "a router must return (logits, weights, ids)", f"a {type(found).__name__}"
                )
            *_, weights, ids = found
        elif weights is None or ids is None:
            raise ShapeError(
                "a layer without a router needs router_weights and top_experts", "None"
            )
        return weights, ids

    def _compute(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """BF16 [T, H] from x [T, H] and routes [..., K]."""
        for name, given in (("router_weights", weights), ("top_experts", ids)):
            if not isinstance(given, Tensor):
                raise DtypeError(f"{name} must be a tensor", f"a {type(given).__name__}")
            if given.shape[-1:] != (self.spec.topk,):
                raise ShapeError(
                    f"{name} must have the shape [..., K] with K = {self.spec.topk}",
                    list(given.shape),
                )
        if not weights.is_floating_point():
            raise DtypeError("router_weights must be floating point numbers", weights.dtype)
        # Else the operator would take one meta tensor for a call that only asks for shapes.
        for name, given in (
            ("router_weights", weights), ("top_experts", ids), ("parameters", self.routed_gate)
        ):  # fmt: skip
            if given.device != x.device:
                raise DeviceError(f"{name} must be on x's device, {x.device}", str(given.device))
        scale = None
        if self.shared_scale is not None:
            scale = linear_fp32(x, self.shared_scale[None])[:, 0].sigmoid()
        x, topk = x.to(torch.bfloat16), self.spec.topk
        weights, ids = weights.reshape(-1, topk).float(), ids.reshape(-1, topk)
        parameters = (
            self.routed_gate, self.routed_up, self.routed_down,
            self.shared_gate, self.shared_up, self.shared_down,
        )  # fmt: skip
        inputs = [t for t in (x, weights, scale, *parameters) if t is not None]
        train = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
        main, index = [], []
        if train and self.main_grad:
            for k, parameter in enumerate(parameters):
                buffer = getattr(parameter, "main_grad", None)
                if buffer is not None:
                    # A meta tensor would make the operator one that only asks for shapes.
                    if not isinstance(buffer, Tensor):
                        raise DtypeError("main_grad must be a tensor", f"a {type(buffer).__name__}")
                    if buffer.device != x.device:
                        raise DeviceError(
                            f"main_grad must be on x's device, {x.device}", str(buffer.device)
                        )
                    main.append(buffer)
                    index.append(k)
        if self.spec.precision == "mxfp8":
            return self._compute_quantised(train, x, ids, weights, parameters, scale, main, index)
        output, _ = ops.forward(
            self._layer, self._max_tokens(x.shape[0]), train and not self.recompute,
            x, ids, weights, *parameters, scale, self.swiglu_limit, main, index,
        )  # fmt: skip
        return output

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _compute_quantised(
        self, train: bool, x: Tensor, ids: Tensor, weights: Tensor,
        parameters: Sequence[Tensor | None], scale: Tensor | None, main: list[Tensor],
        index: list[int],
    ) -> Tensor:  # fmt: skip
        """``_compute`` in MXFP8; the routed weights are quantised where a parameter has changed."""
        max_tokens = self._max_tokens(x.shape[0])
        debug = self.spec.config is not None and self.spec.config.debug
        names = ("routed_gate", "routed_up", "routed_down")
        quantised = [
            self._masters.get(n, getattr(self, n), transposed=train, debug=debug) for n in names
        ]
        return ops.forward_quantised(
            self._layer, max_tokens, train and not self.recompute, x, ids, weights, *parameters,
            scale, self.swiglu_limit, main, index, quantised,
        )  # fmt: skip

    def requantize(self) -> None:
        """Quantise the routed weights anew at the next call: after writes that torch cannot see."""
        self._masters.clear()

    def _max_tokens(self, tokens: int) -> int:
        """What the workspace is made for."""
        if self.max_tokens is not None:
            return self.max_tokens
        ranks = len(self.spec.local_ranks)
        while self._grown * ranks < tokens:
            self._grown *= 2
        return self._grown

    # ------------------------------------------------------------------ transformers

    @staticmethod
    def from_hf(module: nn.Module, **options: Any) -> MoELayer:
        """The layer that computes what an MoE block of transformers does; see ``mok.hf``."""
        from mok import hf

        return hf.from_hf(module, **options)

    # ------------------------------------------------------------------ looking in

    def routed_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that only this rank has."""
        yield from (self.routed_gate, self.routed_up, self.routed_down)

    def extra_repr(self) -> str:
        s = self.spec
        text = f"H={s.hidden_size}, I={s.intermediate_size}, E={s.num_experts}, K={s.topk}"
        if s.shared_intermediate_size is not None:
            text += f", shared={s.shared_intermediate_size}"
        text += f", EP={s.ep_size}" if s.ep_size > 1 else ""
        return text + (f", {s.precision}" if s.precision != "bf16" else "")

    def __deepcopy__(self, memo: dict[int, Any]) -> MoELayer:
        """A copy with its own parameters, in the same group."""
        import copy

        memo[id(self.spec)] = self.spec
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(self.__dict__, memo))
        return new
