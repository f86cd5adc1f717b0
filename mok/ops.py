"""The layer as torch.library operators: what autograd, torch.compile and torch.export see.

``mok::forward`` and ``mok::backward`` are opaque to the compiler and have fakes, so that a model
with MoK layers compiles as one graph. An operator takes tensors and plain numbers only; the sizes,
the group and the tunables of its layer are looked up by an integer, ``layer``, which equal layers
share. The workspace is found at run time by that and ``max_tokens``, which together fix the shape
of every result.

On a group of virtual ranks, tokens are split evenly over the ranks in order (the first T mod EP
have one more), and weights hold the experts of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mok import functional, upstream_ops
from mok.errors import DtypeError, ShapeError
from mok.layer_spec import LayerSpec, join, layer_spec, split, views
from mok.runtime.workspace import ScheduleBuffers
from mok.saved import ForwardContext, Schedule

WEIGHTS = ("routed_gate", "routed_up", "routed_down", "shared_gate", "shared_up", "shared_down")

# ---------------------------------------------------------------------- what is saved

_SCHEDULE = (
    "peer_rank", "peer_token_idx", "num_rows", "tokens_per_expert", "expert_offset", "block_expert",
    "route_row",
)  # fmt: skip
_CONTEXT = ("x_routed", "x_scales", "gate_routed", "up_routed", "gate_shared", "up_shared")


def _flatten(schedule: Schedule, context: ForwardContext) -> list[Tensor]:
    """Per local rank the schedule, then the context; what is absent is left out."""
    flat = []
    for i, buffers in enumerate(schedule.ranks):
        parts = [getattr(buffers, name) for name in _SCHEDULE]
        parts += [found[i] for name in _CONTEXT if (found := getattr(context, name))]
        flat += [t for t in parts if t is not None]
    return flat


def _unflatten(
    spec: LayerSpec, saved: Sequence[Tensor], ids: list[Tensor]
) -> tuple[Schedule, ForwardContext]:
    direct = spec.ep_size == 1 and spec.precision == "bf16"
    shared = spec.shared_intermediate_size is not None
    present = {
        "route_row": direct,
        "x_routed": not direct,
        "gate_shared": shared,
        "up_shared": shared,
    }
    rest = iter(saved)
    schedule, context = Schedule([], ids), ForwardContext()
    for rank in spec.local_ranks:
        parts: dict[str, Tensor | None] = {}
        for name in _SCHEDULE + _CONTEXT:
            parts[name] = next(rest) if present.get(name, True) else None
            if name == "x_routed":  # E4M3 has scales
                x = parts[name]
                present["x_scales"] = x is not None and x.dtype != torch.bfloat16
        schedule.ranks.append(
            ScheduleBuffers(rank=rank, **{name: parts[name] for name in _SCHEDULE})  # type: ignore[arg-type]
        )
        for name in _CONTEXT:
            if present.get(name, True) or name != "x_scales":
                getattr(context, name).append(parts[name])
    return schedule, context


def _empty_saved(spec: LayerSpec, max_tokens: int, x: Tensor) -> list[Tensor]:
    """What ``_flatten`` gives, unwritten."""
    plan = spec.plan(max_tokens, x.device)
    sizes = {b.name: b.shape if 0 not in b.shape else (1,) for b in plan if b.place == "schedule"}
    width = spec.shared_intermediate_size
    flat = []
    for tokens in spec.tokens(x.shape[0]):
        flat += [x.new_empty(sizes[n], dtype=torch.int32) for n in _SCHEDULE if n in sizes]
        if not plan.direct:
            flat.append(x.new_empty(plan.ring, spec.hidden_size, dtype=plan.ring_dtype))
            if plan.scaled:
                flat.append(x.new_empty(plan.ring * spec.hidden_size // 32, dtype=torch.uint8))
        flat += [x.new_empty(plan.ring, spec.intermediate_size) for _ in range(2)]
        if width is not None:
            flat += [x.new_empty(tokens, width) for _ in range(2)]
    return flat


# ---------------------------------------------------------------------- the call


class _Call:
    """The arguments that both operators share, as ``mok.functional`` wants them."""

    def __init__(
        self, layer: int, max_tokens: int, x: Tensor, ids: Tensor, weights: Tensor,
        routed: Sequence[Any], shared: Sequence[Tensor | None], scale: Tensor | None,
        limit: float | None,
    ) -> None:  # fmt: skip
        self.spec = spec = layer_spec(layer)
        if x.dim() != 2:
            raise ShapeError("x must have the shape [T, H]", list(x.shape))
        for name, tensor in (("top_experts", ids), ("router_weights", weights)):
            if tensor.dim() != 2 or tensor.shape[0] != x.shape[0]:
                raise ShapeError(
                    f"{name} must have the shape [T, K] with T = {x.shape[0]}", list(tensor.shape)
                )
        self.tokens, self.experts = spec.tokens(x.shape[0]), spec.experts()
        self.config, self.workspace = spec.workspace(max_tokens, x.device)
        self.x, self.ids = split(x, self.tokens), split(ids, self.tokens)
        self.weights = split(weights, self.tokens)
        self.scale = None if scale is None else split(scale, self.tokens)
        # FP32 parameters are rounded here; their gradients come back in FP32.
        self.routed: list[Any] = [
            views(w.bfloat16(), self.experts) if isinstance(w, Tensor) else w.split(self.experts)
            for w in routed
        ]
        self.shared = [None if w is None else w.bfloat16() for w in shared]
        self.limit = limit

    def schedule(self) -> Schedule:
        return functional.build_schedule(self.workspace, self.config, self.ids)

    def forward(self, schedule: Schedule, save: bool) -> tuple[Tensor, ForwardContext | None]:
        outputs, context = functional.forward(
            self.config, self.workspace, schedule, self.x, self.weights,
            self.shared[0], self.shared[1], self.shared[2],
            self.routed[0], self.routed[1], self.routed[2], self.limit,
            save_context=save, shared_scale=self.scale,
        )  # fmt: skip
        return join(outputs), context

    def recompute(self, schedule: Schedule) -> ForwardContext:
        return functional.recompute_forward_context(
            self.config, self.workspace, schedule, self.x, self.shared[0], self.shared[1],
            self.routed[0], self.routed[1], self.limit,
        )  # fmt: skip

    def backward(
        self, schedule: Schedule, context: ForwardContext, grad: Tensor, sinks: _Sinks
    ) -> list[list[Tensor]]:
        """For each result of ``functional.backward``, one tensor per local rank."""
        grads = sinks.per_rank()
        return functional.backward(
            self.config, self.workspace, schedule, context, split(grad, self.tokens), self.x,
            self.weights, self.shared[0], self.shared[1], self.shared[2],
            self.routed[0], self.routed[1], self.routed[2], self.limit,
            shared_scale=self.scale, grad_dtype=sinks.dtype,
            grads=grads if len(grads) > 1 else grads[0], accumulate=sinks.accumulate,
        )  # type: ignore[return-value]  # fmt: skip


class _Sinks:
    """The buffers that the six weight gradients are written, or with ``given`` added to."""

    def __init__(
        self, spec: LayerSpec, weights: Sequence[Tensor | None], given: Sequence[Tensor] | None
    ) -> None:
        self.experts, self.accumulate = spec.experts(), given is not None
        present = [(k, w) for k, w in enumerate(weights) if w is not None]
        if given is None:
            wide = any(w.dtype == torch.float32 for _, w in present)
            self.dtype = torch.float32 if wide else torch.bfloat16
            given = [self._new(k, w) for k, w in present]
        else:
            self.dtype = given[0].dtype
        self.totals = dict(zip((k for k, _ in present), given, strict=True))
        for k, weight in present:
            self._check(k, weight, self.totals[k])
        # Routed weights have one buffer for all ranks. Of the shared ones, each virtual rank has a
        # gradient of its own, as ranks in different processes do.
        self.parts: dict[int, list[Tensor]] = {}
        for k, weight in present:
            if k < 3:
                self.parts[k] = views(self.totals[k], self.experts)
            elif len(self.experts) == 1:
                self.parts[k] = [self.totals[k]]
            else:
                self.parts[k] = [self._new(k, weight) for _ in self.experts]

    def _check(self, k: int, weight: Tensor, given: Tensor) -> None:
        if given.shape != weight.shape:
            raise ShapeError(
                f"main_grad of {WEIGHTS[k]} must have its shape, {list(weight.shape)}",
                list(given.shape),
            )
        if given.dtype != self.dtype:
            raise DtypeError(
                "main_grad of all weights of a layer must have one dtype",
                f"{self.dtype} and, of {WEIGHTS[k]}, {given.dtype}",
            )

    def _new(self, k: int, weight: Tensor) -> Tensor:
        make = torch.zeros if self.accumulate else torch.empty
        return make(weight.shape, dtype=self.dtype, device=weight.device)

    def per_rank(self) -> list[list[Tensor | None]]:
        ranks = range(len(self.experts))
        return [[self.parts[k][i] if k in self.parts else None for k in range(6)] for i in ranks]

    def finish(self) -> list[Tensor]:
        """The totals, in order, once the ranks' parts are there."""
        for k, total in self.totals.items():
            if k >= 3 and len(self.experts) > 1:
                rank_sum = torch.stack(self.parts[k]).float().sum(dim=0)
                if self.accumulate:
                    total.add_(rank_sum)
                else:
                    total.copy_(rank_sum)
        return list(self.totals.values())


@torch.library.custom_op("mok::forward", mutates_args=())
def forward(
    layer: int,
    max_tokens: int,
    save_context: bool,
    x: Tensor,
    top_experts: Tensor,
    router_weights: Tensor,
    routed_gate: Tensor,
    routed_up: Tensor,
    routed_down: Tensor,
    shared_gate: Tensor | None,
    shared_up: Tensor | None,
    shared_down: Tensor | None,
    shared_scale: Tensor | None,
    swiglu_limit: float | None,
    main_grads: Sequence[Tensor],
    main_index: Sequence[int],
) -> tuple[Tensor, list[Tensor]]:
    """The layer's output, and what backward needs beyond the arguments (collective).

    Args:
        layer: from ``register_layer``.
        max_tokens: the most tokens of any rank that the workspace is made for.
        save_context: keep the context; else the list is empty and backward rebuilds it.
        x, top_experts, router_weights, shared_scale: BF16 [T, H], int64 or int32 [T, K],
            FP32 [T, K], FP32 [T] or None.
        the weights: BF16 or FP32 (rounded to BF16), of this process' ranks one after the other.
        main_grads, main_index: buffers, all BF16 or all FP32, that backward shall add gradients to,
            and the positions in (routed gate, up, down, shared gate, up, down) of their weights.

    Returns:
        (BF16 [T, H], saved).
    """
    call = _Call(
        layer, max_tokens, x, top_experts, router_weights, (routed_gate, routed_up, routed_down),
        (shared_gate, shared_up, shared_down), shared_scale, swiglu_limit,
    )  # fmt: skip
    schedule = call.schedule()
    output, context = call.forward(schedule, save_context)
    return output, [] if context is None else _flatten(schedule, context)


@forward.register_fake
def _(
    layer: int, max_tokens: int, save_context: bool, x: Tensor, *_: Any
) -> tuple[Tensor, list[Tensor]]:
    saved = _empty_saved(layer_spec(layer), max_tokens, x) if save_context else []
    return torch.empty_like(x, memory_format=torch.contiguous_format), saved


def _run_backward(
    grads: Sequence[Tensor] | None,
    layer: int,
    max_tokens: int,
    saved: Sequence[Tensor],
    grad_output: Tensor,
    *arguments: Any,
    quantised: Sequence[Any] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
    """Gradients of x, of the router weights, of the shared scale, and of the weights.

    ``quantised``: the routed weights that forward used, in MXFP8.
    """
    x, ids, weights, *parameters, scale, limit = arguments
    routed, shared = quantised or parameters[:3], parameters[3:]
    call = _Call(layer, max_tokens, x, ids, weights, routed, shared, scale, limit)
    if saved:
        schedule, context = _unflatten(call.spec, saved, call.ids)
    else:
        schedule = call.schedule()
        context = call.recompute(schedule)
    sinks = _Sinks(call.spec, parameters, grads)
    columns = call.backward(schedule, context, grad_output, sinks)
    d_scale = None if scale is None else join(columns[8])
    return join(columns[0]), join(columns[1]), d_scale, sinks.finish()


@torch.library.custom_op("mok::backward", mutates_args=())
def backward(
    layer: int,
    max_tokens: int,
    saved: Sequence[Tensor],
    grad_output: Tensor,
    x: Tensor,
    top_experts: Tensor,
    router_weights: Tensor,
    routed_gate: Tensor,
    routed_up: Tensor,
    routed_down: Tensor,
    shared_gate: Tensor | None,
    shared_up: Tensor | None,
    shared_down: Tensor | None,
    shared_scale: Tensor | None,
    swiglu_limit: float | None,
) -> list[Tensor]:
    """All gradients (collective).

    Args:
        saved: what ``forward`` returned; empty to rebuild it from x and the ids.
        grad_output: BF16 [T, H].
        Other arguments as ``forward``.

    Returns:
        [d_x BF16 [T, H], d_router_weights FP32 [T, K], with a shared scale its gradient FP32 [T],
        and the gradients of the weights in order: all FP32 if a weight is, else BF16].
    """
    d_x, d_weights, d_scale, grads = _run_backward(
        None, layer, max_tokens, saved, grad_output, x, top_experts, router_weights, routed_gate,
        routed_up, routed_down, shared_gate, shared_up, shared_down, shared_scale, swiglu_limit,
    )  # fmt: skip
    return [d_x, d_weights, *([] if d_scale is None else [d_scale]), *grads]


@backward.register_fake
def _(
    layer: int, max_tokens: int, saved: Any, grad_output: Tensor, x: Tensor, top_experts: Tensor,
    router_weights: Tensor, *weights_scale_limit: Any,
) -> list[Tensor]:  # fmt: skip
    *weights, scale, _ = weights_scale_limit
    weights = [w for w in weights if w is not None]
    wide = any(w.dtype == torch.float32 for w in weights)
    dtype = torch.float32 if wide else torch.bfloat16
    return [
        x.new_empty(x.shape),
        router_weights.new_empty(router_weights.shape),
        *([] if scale is None else [scale.new_empty(scale.shape)]),
        *(w.new_empty(w.shape, dtype=dtype) for w in weights),
    ]


@torch.library.custom_op("mok::backward_add", mutates_args=("grads",))
def backward_add(
    layer: int,
    max_tokens: int,
    saved: Sequence[Tensor],
    grad_output: Tensor,
    x: Tensor,
    top_experts: Tensor,
    router_weights: Tensor,
    routed_gate: Tensor,
    routed_up: Tensor,
    routed_down: Tensor,
    shared_gate: Tensor | None,
    shared_up: Tensor | None,
    shared_down: Tensor | None,
    shared_scale: Tensor | None,
    swiglu_limit: float | None,
    grads: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """``backward`` that adds the weights' gradients to ``grads``, all BF16 or all FP32.

    Returns:
        (d_x, d_router_weights, the shared scale's gradient, empty without one).
    """
    d_x, d_weights, d_scale, _ = _run_backward(
        grads, layer, max_tokens, saved, grad_output, x, top_experts, router_weights, routed_gate,
        routed_up, routed_down, shared_gate, shared_up, shared_down, shared_scale, swiglu_limit,
    )  # fmt: skip
    return d_x, d_weights, d_weights.new_empty(0) if d_scale is None else d_scale


@backward_add.register_fake
def _(
    layer: int, max_tokens: int, saved: Any, grad_output: Tensor, x: Tensor, top_experts: Tensor,
    router_weights: Tensor, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    scale = rest[6]
    d_scale = router_weights.new_empty(0 if scale is None else scale.shape)
    return x.new_empty(x.shape), router_weights.new_empty(router_weights.shape), d_scale


# ---------------------------------------------------------------------- autograd

_TENSORS = 10  # of forward's arguments: x, ids, router weights, six weights, shared scale


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, list[Tensor]]) -> None:
    layer, max_tokens, _, *tensors, limit, main_grads, main_index = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1])
    ctx.layer, ctx.max_tokens, ctx.limit, ctx.quantised = layer, max_tokens, limit, None
    # Not saved for backward: another layer's or call's backward may add to them in between.
    ctx.main_grads, ctx.main_index = list(main_grads), list(main_index)
    ctx.save_for_backward(*tensors, *output[1])


def _backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    result: list[Any] = [None] * _TENSORS
    if grad is not None:
        everything = ctx.saved_tensors  # read once: torch.utils.checkpoint recomputes at each time
        tensors, saved = everything[:_TENSORS], list(everything[_TENSORS:])
        arguments = (ctx.layer, ctx.max_tokens, saved, grad, *tensors, ctx.limit)
        weights = {3 + k: w for k, w in enumerate(tensors[3:9]) if w is not None}
        plain, add = backward, backward_add
        if ctx.quantised is not None:
            plain, add = ctx.backward_quantised, ctx.backward_quantised_add
        if ctx.main_grads:
            main = {3 + k: g for k, g in zip(ctx.main_index, ctx.main_grads, strict=True)}
            dtype = ctx.main_grads[0].dtype
            # The kernel treats all weights alike, so gradients that go elsewhere are added to zero.
            sums = [
                main[k] if k in main else torch.zeros_like(w, dtype=dtype)
                for k, w in weights.items()
            ]
            result[0], result[2], result[9] = add(*arguments, sums)
            grads = [None if k in main else g for k, g in zip(weights, sums, strict=True)]
        else:
            found = iter(plain(*arguments))
            result[0], result[2] = next(found), next(found)
            result[9] = next(found) if tensors[9] is not None else None
            grads = list(found)
        for (k, weight), g in zip(weights.items(), grads, strict=True):
            result[k] = None if g is None else g.to(weight.dtype)
        needed = ctx.needs_input_grad[3 : 3 + _TENSORS]
        result = [g if need else None for g, need in zip(result, needed, strict=True)]
    empty = [None] * len(ctx.main_grads)
    return (None, None, None, *result, None, empty, None if ctx.main_index else [])


forward.register_autograd(_backward, setup_context=_setup_context)


class _Quantised(torch.autograd.Function):
    """``mok::forward`` with routed weights in MXFP8; its arguments, then three ``Mxfp8Weight``."""

    @staticmethod
    def forward(ctx: Any, *everything: Any) -> Tensor:
        *inputs, quantised = everything
        layer, max_tokens, save, x, ids, weights, *parameters, scale, limit, _, _ = inputs
        call = _Call(layer, max_tokens, x, ids, weights, quantised, parameters[3:], scale, limit)
        schedule = call.schedule()
        output, context = call.forward(schedule, save)
        saved = [] if context is None else _flatten(schedule, context)
        _setup_context(ctx, tuple(inputs), (output, saved))
        ctx.quantised = quantised

        def plain(*arguments: Any) -> list[Tensor]:
            d_x, d_w, d_scale, grads = _run_backward(None, *arguments, quantised=quantised)
            return [d_x, d_w, *([] if d_scale is None else [d_scale]), *grads]

        def add(*arguments_and_sums: Any) -> tuple[Tensor, Tensor, Tensor]:
            *arguments, sums = arguments_and_sums
            d_x, d_w, d_scale, _ = _run_backward(sums, *arguments, quantised=quantised)
            return d_x, d_w, d_w.new_empty(0) if d_scale is None else d_scale

        ctx.backward_quantised, ctx.backward_quantised_add = plain, add
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        # Autograd functions take None where operators take lists: main_grads, main_index, quantised.
        return (*_backward(ctx, grads[0], None)[:-2], None, None, None)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def forward_quantised(*arguments: Any) -> Tensor:
    """The output with routed weights in MXFP8 (collective): the arguments of ``forward``, then the three
    quantised weights. torch.compile breaks its graph here."""
    output: Tensor = _Quantised.apply(*arguments)
    return output


# ---------------------------------------------------------------------- the reference system's

# Its callers import these from here.
mxfp8_quantize, schedule = upstream_ops.mxfp8_quantize, upstream_ops.schedule
fwd_epilogue, bwd_epilogue = upstream_ops.fwd_epilogue, upstream_ops.bwd_epilogue
