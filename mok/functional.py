"""The layer as functions, with the reference system's names and order.

A call is: ``build_schedule`` from the router's ids, ``forward``, and for training ``backward``. All work goes to
torch's current stream; nothing waits for the GPU. On a group of virtual ranks (several ranks in one
process) every per-rank argument and result is a list with one entry per rank; with one local rank it is
the plain value. Arguments that are the same on all ranks (config, shared expert, limit) are never lists.

Code for the reference system works too: called with its ``MoKConfig`` and ``MoKWorkspace``, the functions
take and return what they do there (``mok.upstream``, docs/migrating.md).

The symmetric heap, the rings and the counters live in the workspace. Calls that share a workspace must
follow one another on one stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from mok import steady
from mok.arguments import (
    check_group,
    check_kind,
    check_max_tokens,
    check_tensor,
    check_tunables,
    check_workspace,
    device_of,
    per_rank,
    stream_of,
    unwrap,
)
from mok.call import Call, LaunchFacts, num_sms, schedule_sizes
from mok.config import Config, Shape
from mok.errors import ContextError, MokError, ShapeError
from mok.saved import ForwardContext, Schedule

if TYPE_CHECKING:
    from mok.runtime.group import Group
    from mok.runtime.workspace import Workspace

P = ParamSpec("P")
R = TypeVar("R")


def on_device(position: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Run a function with its workspace's device as the current one: launches go to that.

    ``position``: of the argument ``workspace``.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            workspace: Any = args[position] if len(args) > position else kwargs.get("workspace")
            device: Any = getattr(workspace, "device", None)
            if getattr(device, "type", "cpu") != "cuda":
                return function(*args, **kwargs)
            if torch.cuda.current_device() == device.index:
                return function(*args, **kwargs)
            with torch.cuda.device(device):
                return function(*args, **kwargs)

        return wrapped

    return decorate


def also_upstream(ours: Callable[P, R]) -> Callable[P, R]:
    """Hand a call with the reference system's objects to its namesake in ``mok.upstream``."""

    @wraps(ours)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        # Every function has the config or the workspace first.
        first = args[0] if args else kwargs.get("config", kwargs.get("workspace"))
        if type(first).__name__ in ("MoKConfig", "MoKWorkspace"):
            from mok import upstream

            return getattr(upstream, ours.__name__)(*args, **kwargs)  # type: ignore[no-any-return]
        return ours(*args, **kwargs)

    return call


observer: Any = None
"""Told of every call while ``mok.capture.watch`` is active."""

_UPSTREAM = (
    "MoKConfig", "MoKForwardContext", "MoKSchedule", "MoKWorkspace", "validate_inputs",
    "validate_workspace_args",
)  # fmt: skip
_UPSTREAM_ROUTED = ("backward_routed", "forward_routed", "recompute_forward_context_routed")


def __getattr__(name: str) -> Any:
    """The reference system's names; see ``mok.upstream``."""
    if name in _UPSTREAM:
        from mok import upstream

        return getattr(upstream, name)
    if name in _UPSTREAM_ROUTED:
        from mok import upstream_routed

        return getattr(upstream_routed, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# ---------------------------------------------------------------------- workspaces


@also_upstream
def create_workspace(
    config: Config,
    group: Group | None = None,
    *,
    device: Any = None,
    max_tokens: int,
    hidden_size: int,
    intermediate_size: int,
    num_experts: int,
    topk: int,
    shared_intermediate_size: int | None = None,
    precision: str = "bf16",
) -> Workspace:
    """Make a workspace (collective). One can serve all layers of equal sizes.

    Args:
        config: the tunables.
        group: the ranks; ``Group.single()`` by default.
        device: the torch device; inside an emulator always the CPU.
        max_tokens: the most tokens of any rank in any call.
        hidden_size, intermediate_size, num_experts, topk, shared_intermediate_size: H, I, E, K and the
            shared expert's I.
        precision: "bf16", or "mxfp8": routed weights are then what ``mok.mxfp8_quantize`` returns.

    Raises:
        ShapeError, ResourceError, CapacityError, DriverError, DeviceError: a limit, named.
    """
    _check_made_with(config, max_tokens)
    group, shape, arguments = _workspace_arguments(
        group, device, hidden_size, intermediate_size, num_experts, topk, shared_intermediate_size
    )
    from mok.runtime.workspace import Workspace

    workspace = Workspace(
        group, shape, config, max(max_tokens, 1), precision=precision, **arguments
    )
    try:
        _check_config(config, workspace)
    except MokError:
        workspace.close()
        raise
    return workspace


@also_upstream
def get_workspace(
    config: Config,
    group: Group | None = None,
    *,
    device: Any = None,
    max_tokens: int,
    hidden_size: int,
    intermediate_size: int,
    num_experts: int,
    topk: int,
    shared_intermediate_size: int | None = None,
    precision: str = "bf16",
) -> Workspace:
    """``create_workspace``, cached by its arguments. ``clear_workspace_cache`` empties the cache."""
    _check_made_with(config, max_tokens)
    group, shape, arguments = _workspace_arguments(
        group, device, hidden_size, intermediate_size, num_experts, topk, shared_intermediate_size
    )
    from mok.runtime import workspace as workspaces

    found = workspaces.get_workspace(
        group, shape, config, max(max_tokens, 1), precision=precision, **arguments
    )
    _check_config(config, found)
    return found


def _check_made_with(config: Any, max_tokens: Any) -> None:
    check_kind("config", config, Config, "mok.Config(…) or mok.Config.suggest(shape, device)")
    check_max_tokens(max_tokens)


def clear_workspace_cache() -> None:
    """Close every cached workspace once its work has ended (collective)."""
    from mok import upstream
    from mok.runtime import workspace as workspaces

    upstream.clear_workspace_cache()
    workspaces.clear_workspace_cache()


def _workspace_arguments(
    group: Group | None,
    device: Any,
    hidden: int,
    inner: int,
    experts: int,
    topk: int,
    shared: int | None,
) -> tuple[Group, Shape, dict[str, Any]]:
    from mok.runtime.launch import active_emulator

    emulator = active_emulator()
    arguments: dict[str, Any] = {"device": device}
    if emulator is not None:
        arguments = {"device": torch.device("cpu"), "arch": emulator.arch, "memory": "host"}
    if group is None:
        group = _single_group(device_of(arguments["device"]))
    check_group(group)
    shape = Shape(0, hidden, inner, experts, topk, group.size, shared)
    return group, shape, arguments


@cache
def _single_group(device: Any) -> Group:
    """One for all calls on a device: cached workspaces are found by their group."""
    from mok.runtime.group import Group as RuntimeGroup

    return RuntimeGroup.single(device)


def _check_config(config: Config, workspace: Workspace) -> None:
    comm = 0 if workspace.sizes.direct else max(config.fwd_num_comm_sms, config.bwd_num_comm_sms)
    config.check(workspace.arch, num_sms(workspace), comm)


# ---------------------------------------------------------------------- schedule


@also_upstream
@on_device(0)
def build_schedule(
    workspace: Workspace,
    config: Config,
    top_experts: Tensor | Sequence[Tensor],
    *,
    num_local_experts: int | Sequence[int] | None = None,
) -> Schedule:
    """Exchange the ranks' expert ids and place every route (collective).

    Args:
        top_experts: int64 or int32 [T, K], contiguous, on the workspace's device. -1 drops a route.
            T may differ by rank and call, up to the workspace's max_tokens.
        num_local_experts: El; checked against E and the rank when given.

    Raises:
        ShapeError, DtypeError, DeviceError, CapacityError: an argument. An id out of range is noted on
            the device and counts as -1. RouteError is raised once this rank has queued its part of
            the call in which the host sees the note (no peer waits for it in vain), or at
            ``workspace.check()``; with ``config.debug`` it is raised here.
    """
    from mok import kernels
    from mok.kernels_cute.schedule.plan import stage_ctas
    from mok.runtime.compile import get_kernel
    from mok.runtime.launch import launch

    check_workspace(workspace)
    workspace.check_group()
    check_tunables(workspace, config)
    shape, sizes = workspace.shape, workspace.sizes
    locals_ = workspace.group.local_ranks
    ids = per_rank(workspace, "top_experts", top_experts)
    experts = num_local_experts if isinstance(num_local_experts, Sequence) else None
    if experts is not None and len(experts) != len(locals_):
        raise ShapeError(
            f"num_local_experts needs one entry for each of the {len(locals_)} local ranks",
            f"{len(experts)} given",
        )
    stream, sms = stream_of(workspace), num_sms(workspace)
    for i, rank in enumerate(locals_):
        check_tensor(
            workspace, "top_experts", ids[i], (None, shape.topk), (torch.int64, torch.int32)
        )
        workspace.check_tokens(ids[i].shape[0])
        given = experts[i] if experts is not None else num_local_experts
        owned = len(shape.experts_on(rank))
        if given is not None and given != owned:
            raise ShapeError(
                f"num_local_experts of rank {rank} must be its share of E = {shape.num_experts}: {owned}",
                given,
            )
        if config.debug:
            _check_ids(ids[i], shape.num_experts)
    half = workspace.next_call()
    for i, rank in enumerate(locals_):
        bits = 64 if ids[i].dtype == torch.int64 else 32
        count = ids[i].shape[0]
        launch(
            get_kernel(kernels.stage_ids_spec(workspace.arch, bits)),
            ids[i].data_ptr(),
            workspace.ids_address(half, rank),
            workspace.num_tokens_address(half, rank),
            workspace.records.route_address(rank),
            count,
            shape.topk,
            shape.num_experts,
            rank,
            stage_ctas(count * shape.topk, sms),
            stream,
        )
    workspace.barrier()
    ranks = []
    for rank in locals_:
        b = workspace.new_schedule(rank)
        launch(
            get_kernel(kernels.schedule_spec(workspace.arch)),
            workspace.ids_address(half),
            workspace.num_tokens_address(half),
            workspace.heap.stride,
            workspace.counts.data_ptr(),
            workspace.totals.data_ptr(),
            workspace.local_ids.data_ptr(),
            workspace.rank_starts.data_ptr(),
            b.peer_rank.data_ptr(),
            b.peer_token_idx.data_ptr(),
            b.num_rows.data_ptr(),
            b.tokens_per_expert.data_ptr(),
            b.expert_offset.data_ptr(),
            b.block_expert.data_ptr(),
            b.route_row.data_ptr() if b.route_row is not None else 0,
            workspace.records.route_address(rank),
            workspace.barrier.gate_address(rank),
            shape.ep_size,
            shape.num_experts,
            shape.topk,
            rank,
            sizes.tile,
            sizes.capacity,
            sizes.schedule.num_chunks,
            stream,
        )
        ranks.append(b)
    return Schedule(ranks, ids, schedule_sizes(workspace))


def _check_ids(ids: Tensor, num_experts: int) -> None:
    from mok.errors import RouteError

    bad = (ids < -1) | (ids >= num_experts)
    if bool(bad.any()):
        token, k = (int(v) for v in bad.nonzero()[0])
        raise RouteError(
            f"expert ids must be in 0…{num_experts - 1}, or -1 to drop a route",
            f"{int(ids[token, k])} at token {token}, k {k}",
            "Check the router: with E experts the largest id is E - 1",
        )


# ---------------------------------------------------------------------- forward


@also_upstream
@on_device(1)
def forward(
    config: Config,
    workspace: Workspace,
    schedule: Schedule,
    x: Tensor | Sequence[Tensor],
    router_weights: Tensor | Sequence[Tensor],
    shared_gate: Tensor | None,
    shared_up: Tensor | None,
    shared_down: Tensor | None,
    routed_gate: Tensor | Sequence[Tensor],
    routed_up: Tensor | Sequence[Tensor],
    routed_down: Tensor | Sequence[Tensor],
    swiglu_limit: float | None = None,
    *,
    save_context: bool = True,
    shared_scale: Tensor | Sequence[Tensor] | None = None,
) -> tuple[Any, ForwardContext | None]:
    """One forward pass: dispatch, expert FFN and combine in one kernel, then the token sum (collective).

    Args:
        x: BF16 [T, H].
        router_weights: FP32 [T, K]; NaN propagates to its token.
        shared_gate, shared_up, shared_down: BF16 [Is, H], [Is, H], [H, Is], or all None.
        routed_gate, routed_up, routed_down: BF16 [El, I, H], [El, I, H], [El, H, I] of this rank;
            with precision "mxfp8" Mxfp8Weight of these shapes, in the normal orientation.
        swiglu_limit: clamp gate from above and up on both sides; None clamps nothing.
        save_context: also keep what backward needs. The output has the same bits either way.
        shared_scale: FP32 [T], multiplies the shared expert's output (a gated shared expert).

    Returns:
        (output BF16 [T, H], context or None).

    Raises:
        ShapeError, DtypeError, DeviceError, CapacityError, ResourceError: an argument, with the rule.
    """
    arguments = steady.Arguments(
        schedule,
        (x, router_weights, routed_gate, routed_up, routed_down, shared_gate, shared_up, shared_down,
        shared_scale), swiglu_limit, save_context,
    )  # fmt: skip
    if observer is None:
        ready = steady.find(workspace, config, arguments)
        if ready is not None:
            output, context = ready(workspace, schedule, arguments)
            return [output] if arguments.listed else output, context
    call = Call(
        config, workspace, schedule, x, router_weights, (shared_gate, shared_up, shared_down),
        (routed_gate, routed_up, routed_down), swiglu_limit, shared_scale,
    )  # fmt: skip
    if observer is not None:
        observer.begin(config, workspace, schedule, call.given(), call.clamp)
    call.zero_counters(workspace.sizes.counters.size, workspace.turns.filled(call.stream))
    call.stage_x()
    workspace.barrier()
    context = ForwardContext.of(schedule) if save_context else None
    shared_y = [call.run_forward(i, context) for i in range(call.count)]
    workspace.barrier()
    outputs = [call.sum_forward(i, shared_y[i]) for i in range(call.count)]
    workspace.check_call()
    if observer is not None:
        observer.end({"output": outputs})
    steady.keep(call, arguments, save_context)
    return unwrap(outputs, x), context


@also_upstream
@on_device(1)
def recompute_forward_context(
    config: Config,
    workspace: Workspace,
    schedule: Schedule,
    x: Tensor | Sequence[Tensor],
    shared_gate: Tensor | None,
    shared_up: Tensor | None,
    routed_gate: Tensor | Sequence[Tensor],
    routed_up: Tensor | Sequence[Tensor],
    swiglu_limit: float | None = None,
) -> ForwardContext:
    """The context of a forward call, rebuilt in one kernel for activation checkpointing (collective).

    Only dispatch and gate+up of macrobatch 0, and the shared expert's gate+up, are done. The bits are
    those that ``forward`` saved. Arguments as there.
    """
    call = Call(
        config, workspace, schedule, x, None, (shared_gate, shared_up), (routed_gate, routed_up),
        swiglu_limit, None, recompute=True,
    )  # fmt: skip
    call.zero_counters(workspace.sizes.counters.size, workspace.turns.filled(call.stream))
    call.stage_x()
    workspace.barrier()
    context = ForwardContext.of(schedule)
    for i in range(call.count):
        call.run_forward(i, context, recompute=True)
    workspace.barrier()
    workspace.check_call()
    return context


# ---------------------------------------------------------------------- backward


@also_upstream
@on_device(1)
def backward(
    config: Config,
    workspace: Workspace,
    schedule: Schedule,
    forward_context: ForwardContext,
    grad_output: Tensor | Sequence[Tensor],
    x: Tensor | Sequence[Tensor],
    router_weights: Tensor | Sequence[Tensor],
    shared_gate: Tensor | None,
    shared_up: Tensor | None,
    shared_down: Tensor | None,
    routed_gate: Tensor | Sequence[Tensor],
    routed_up: Tensor | Sequence[Tensor],
    routed_down: Tensor | Sequence[Tensor],
    swiglu_limit: float | None = None,
    *,
    shared_scale: Tensor | Sequence[Tensor] | None = None,
    grads: Sequence[Tensor | None] | Sequence[Sequence[Tensor | None]] | None = None,
    grad_dtype: torch.dtype = torch.bfloat16,
    accumulate: bool = False,
    keep_context: bool = False,
) -> tuple[Any, ...]:
    """All gradients of a forward call, in one kernel and the sums after it (collective).

    Args:
        forward_context: of the forward call with the same arguments, or of
            ``recompute_forward_context``.
        grad_output: BF16 [T, H].
        grads: buffers for the six weight gradients in the order of the result (a list of such per rank
            on virtual ranks); None makes new ones.
        grad_dtype: of the weight gradients, bfloat16 or float32.
        accumulate: add to ``grads`` (one rounding) instead of overwriting them.
        keep_context: the context may serve another backward call, which gives the same bits. Without,
            a second use is taken for a mistake, as torch does without ``retain_graph``.
        Other arguments as ``forward``.

    Returns:
        (d_x BF16 [T, H], d_router_weights FP32 [T, K], d_routed_gate, d_routed_up, d_routed_down,
        d_shared_gate, d_shared_up, d_shared_down), and with ``shared_scale`` its gradient FP32 [T].
        Experts without rows get zeros, dropped routes exactly 0, shared ones are None without a shared
        expert.

    Raises:
        As ``forward``; ContextError: the context has been used, or is of a call with another schedule.
    """
    if getattr(forward_context, "used", False):
        raise ContextError(
            "a forward context serves one backward call",
            "one that has been used",
            "Pass keep_context=True to the calls before the last, or rebuild it with "
            "recompute_forward_context",
        )
    from mok.backward_call import GRAD_NAMES, BackwardCall

    call = BackwardCall(
        config, workspace, schedule, x, router_weights, (shared_gate, shared_up, shared_down),
        (routed_gate, routed_up, routed_down), swiglu_limit, shared_scale,
    )  # fmt: skip
    buffers: Any = [grads] if grads is not None and call.count == 1 else grads
    call.attach(
        forward_context,
        per_rank(workspace, "grad_output", grad_output),
        buffers,
        grad_dtype,
        accumulate,
    )
    if observer is not None:
        given = {**call.given(), "grad_output": call.dy}
        observer.begin(config, workspace, schedule, given, call.clamp)
    plans = call.prepare()
    call.stage()
    workspace.barrier()
    scratch = call.scratch()
    parts = [call.run_backward(i, scratch, plans[i]) for i in range(call.count)]
    workspace.barrier()
    results = []
    for i in range(call.count):
        d_x, d_weights, d_scale = call.sum_backward(i, scratch, parts[i])
        g = call.grads[i]
        tail = () if d_scale is None else (d_scale,)
        results.append((d_x, d_weights, *g.routed, *g.shared, *tail))
    workspace.check_call()
    forward_context.used = not keep_context
    if observer is not None:
        names = ("d_x", "d_router_weights", *(f"d_{name}" for name in GRAD_NAMES))
        columns = [] if accumulate else zip(*(r[: len(names)] for r in results), strict=True)
        observer.end(dict(zip(names, columns, strict=False)))
    if isinstance(x, Tensor):
        return results[0]
    return tuple(list(column) for column in zip(*results, strict=True))


__all__ = [
    "ForwardContext",
    "LaunchFacts",
    "Schedule",
    "backward",
    "build_schedule",
    "clear_workspace_cache",
    "create_workspace",
    "forward",
    "get_workspace",
    "num_sms",
    "recompute_forward_context",
]
