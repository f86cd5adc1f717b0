"""The reference system's functional API: its names, arguments and results, on our kernels.

``mok.functional`` comes here when it is called with a ``MoKConfig`` or a ``MoKWorkspace``, so that code
written for the reference system runs as it is. docs/migrating.md lists what differs. One process is one
rank; sizes that the reference system learns with each call (experts, intermediate size) are learned here
the same way, so a workspace allocates when the first schedule is built.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mok import functional
from mok.arguments import check_tensor
from mok.config import MAX_TOPK, Config, Shape, _require_int
from mok.errors import DtypeError, GroupError, MokError, ResourceError, ShapeError
from mok.mxfp8 import Mxfp8Weight
from mok.saved import ForwardContext, Schedule
from mok.upstream_weights import routed_weights

if TYPE_CHECKING:
    from mok.runtime.group import Group
    from mok.runtime.workspace import Workspace

RoutedWeight = Tensor | Sequence[Tensor]
# main_grads comes as (shared gate, routed gate, shared up, routed up, shared down, routed down).
_GRADS = (1, 3, 5, 0, 2, 4)
_ABSENT: Any = object()
_layer: Any = functional  # whose arguments are spread from lists here


@dataclass(frozen=True, slots=True)
class MoKConfig:
    """The tunables under their upstream names and defaults; see ``mok.Config``.

    ``all_gather_top_experts_chunk_bytes`` is accepted and means nothing here.
    """

    fwd_num_comm_sms: int = 40
    bwd_num_comm_sms: int = 28
    minibatch_size: int = 4096
    macrobatch_size: int = 131072
    schedule_capacity_multiplier: float = 0.5
    all_gather_top_experts_chunk_bytes: int = 2048
    scale_router_before_fc2: bool = False

    def __post_init__(self) -> None:
        if self.scale_router_before_fc2:
            raise ShapeError(
                "router weights are applied after the down projection",
                "scale_router_before_fc2=True",
                "Leave it False: the mathematics are the same",
            )
        self.config()

    def config(self) -> Config:
        return Config(
            fwd_num_comm_sms=self.fwd_num_comm_sms,
            bwd_num_comm_sms=self.bwd_num_comm_sms,
            minibatch_size=self.minibatch_size,
            macrobatch_size=self.macrobatch_size,
            schedule_capacity_multiplier=self.schedule_capacity_multiplier,
        )


@dataclass(frozen=True, slots=True)
class MoKSchedule:
    """Which row each route is. Every field is a tensor, so that it can go through saved-tensor hooks.

    peer_rank, peer_token_idx int32 [cap]; num_tokens int32 [1]; tokens_per_expert int32 [El] (routes,
    without padding). The rest is ours: expert_offset int32 [El + 1], block_expert int32 [cap / tile],
    route_row int32 [T*K] (empty unless EP = 1), top_experts as given.
    """

    peer_rank: Tensor
    peer_token_idx: Tensor
    num_tokens: Tensor
    tokens_per_expert: Tensor
    expert_offset: Tensor
    block_expert: Tensor
    route_row: Tensor
    top_experts: Tensor


@dataclass(frozen=True, slots=True)
class MoKForwardContext:
    """What backward needs, BF16. x_routed [ring, H] (empty at EP = 1), gate and up [ring, I], the shared
    expert's [T, I] (empty without one); hidden_* are empty: backward forms them from gate and up.
    With MXFP8 weights x_routed is there at EP = 1, too; on Blackwell it is (E4M3 bytes [ring, H], scales
    uint8 [ring * H / 32]). A context can be used more than once."""

    x_routed: Tensor | tuple[Tensor, Tensor]
    gate_shared: Tensor
    gate_routed: Tensor
    up_shared: Tensor
    up_routed: Tensor
    hidden_shared: Tensor
    hidden_routed: Tensor


@dataclass(slots=True)
class MoKWorkspace:
    """A workspace under its upstream sizes; ``inner`` is ours, one per number of experts.

    Attributes:
        num_local_tokens: the most tokens of any rank.
        schedule_capacity: upstream's rows, from the multiplier. It limits nothing here.
    """

    group_name: str
    ep_rank: int
    ep_size: int
    device: torch.device
    num_local_tokens: int
    hidden_size: int
    topk: int
    schedule_capacity: int
    group: Group
    inner: dict[tuple[int, Config, str], Workspace] = field(default_factory=dict)
    noted: MokError | None = None  # by the schedule of a workspace that has been closed since

    def of(self, config: MoKConfig, num_experts: int, precision: str = "") -> Workspace:
        """Ours for a number of experts on all ranks; made at its first use (collective).

        ``precision``: "bf16" or "mxfp8"; "" takes what is there, as a schedule serves both.
        """
        ours = config.config()
        # What no buffer is sized by may change between calls.
        key = (num_experts, Config(1, 1, ours.minibatch_size, ours.macrobatch_size))
        open_ = {p: w for p in ("bf16", "mxfp8") if (w := self._open((*key, p))) is not None}
        found = open_.get(precision) if precision else next(iter(open_.values()), None)
        if found is not None:
            return found
        other = open_.get("bf16")
        if precision == "mxfp8" and other is not None and other.last_launch is None:
            # Made for the first schedule, before the weights told the precision; nothing else used it.
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.group.barrier("MoKWorkspace: the schedule's workspace is not needed any more")
            try:
                other.check()
            except MokError as error:
                self.noted = error  # raised after the call, in which peers wait for this rank
            other.close()
        made = functional.create_workspace(
            ours, self.group, device=self.device, max_tokens=self.num_local_tokens,
            hidden_size=self.hidden_size, intermediate_size=128 if precision == "mxfp8" else 64,
            num_experts=num_experts, topk=self.topk, precision=precision or "bf16",
        )  # fmt: skip
        self.inner[*key, precision or "bf16"] = made
        return made

    def check(self, used: Workspace) -> None:
        """After a call of one: raise what a schedule of another has noted, such as a bad id."""
        if self.noted is not None:
            error, self.noted = self.noted, None
            raise error
        for made in self.inner.values():
            if made is not used and not made.closed:
                made.check_call()

    def _open(self, key: tuple[int, Config, str]) -> Workspace | None:
        found = self.inner.get(key)
        return None if found is None or found.closed else found

    @property
    def x_buffer(self) -> Tensor:
        """BF16 [T, H] in the symmetric heap: an x that lives here is not copied (EP > 1)."""
        for made in self.inner.values():
            if not made.closed and made.x is not None:
                return made.x.local
        raise ResourceError(
            "x_buffer exists from the first build_schedule on, at EP > 1", f"EP {self.ep_size}"
        )

    def close(self) -> None:
        for made in self.inner.values():
            made.close()
        self.inner.clear()


_groups: dict[tuple[str, Any], Group] = {}
_cache: dict[tuple[Any, ...], MoKWorkspace] = {}


def _group(group: Any, device: torch.device) -> tuple[str, Group]:
    """(name, ours) of a process group; collective when it is first seen."""
    from mok.runtime.group import Group

    if isinstance(group, Group):
        if len(group.local_ranks) != 1:
            raise GroupError("one process is one rank in this API", f"{group.size} virtual ranks")
        return f"mok-{id(group)}", group
    name = getattr(group, "group_name", None)
    if not isinstance(name, str):
        raise DtypeError("group must be a torch.distributed.ProcessGroup", type(group).__name__)
    found = _groups.get((name, device))
    if found is None or found.closed or found.process_group is not group:
        found = Group.from_process_group(group, device if device.type == "cuda" else None)
        _groups[name, device] = found
    return name, found


def validate_workspace_args(
    config: MoKConfig, group: Any, *, device: torch.device, num_local_tokens: int,
    hidden_size: int, topk: int,
) -> None:  # fmt: skip
    """Raise ShapeError, DtypeError or GroupError for what no workspace can be made of."""
    from mok.runtime.group import Group

    if not isinstance(config, MoKConfig):
        raise DtypeError("config must be a MoKConfig", type(config).__name__)
    if not isinstance(device, torch.device):
        raise DtypeError("device must be a torch.device", type(device).__name__)
    if not isinstance(group, Group) and not isinstance(getattr(group, "group_name", None), str):
        raise DtypeError("group must be a torch.distributed.ProcessGroup", type(group).__name__)
    _require_int("num_local_tokens", num_local_tokens, 0)
    Shape(num_local_tokens, hidden_size, 64, 1, topk)
    assert topk <= MAX_TOPK


def create_workspace(
    config: MoKConfig, group: Any, *, device: torch.device, num_local_tokens: int,
    hidden_size: int, topk: int,
) -> MoKWorkspace:  # fmt: skip
    """A new workspace (collective). Token counts may differ by rank; H and K may not.

    Args:
        group: a torch process group, or ours with one rank here.
    """
    sizes = {"num_local_tokens": num_local_tokens, "hidden_size": hidden_size, "topk": topk}
    validate_workspace_args(config, group, device=device, **sizes)
    from mok.runtime.rendezvous import agree

    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    name, ranks = _group(group, device)
    agree(ranks.rendezvous, "hidden_size and topk", [hidden_size, topk])
    most = max(ranks.rendezvous.all_gather("num_local_tokens", num_local_tokens))
    factor = max(2, math.ceil(ranks.size * config.schedule_capacity_multiplier))
    capacity = num_local_tokens * topk * factor
    return MoKWorkspace(
        name, ranks.rank, ranks.size, device, max(most, 1), hidden_size, topk, capacity, ranks
    )


def get_workspace(
    config: MoKConfig, group: Any, *, device: torch.device, num_local_tokens: int,
    hidden_size: int, topk: int,
) -> MoKWorkspace:  # fmt: skip
    """``create_workspace``, cached by the group's name, the device and the sizes."""
    name = getattr(group, "group_name", id(group))
    factor = math.ceil(config.schedule_capacity_multiplier * 64)
    key = (name, device, num_local_tokens, hidden_size, topk, factor)
    found = _cache.get(key)
    if found is None or found.group.closed:
        found = create_workspace(
            config, group, device=device, num_local_tokens=num_local_tokens,
            hidden_size=hidden_size, topk=topk,
        )  # fmt: skip
        _cache[key] = found
    return found


def clear_workspace_cache() -> None:
    """Close every cached workspace once its work has ended (collective)."""
    while _cache:
        _, workspace = _cache.popitem()
        if workspace.device.type == "cuda":
            torch.cuda.synchronize(workspace.device)
        workspace.group.barrier("clear_workspace_cache")
        workspace.close()
    while _groups:
        _groups.popitem()[1].close()


def build_schedule(
    workspace: MoKWorkspace, config: MoKConfig, top_experts: Tensor, *, num_local_experts: int
) -> MoKSchedule:
    """Place every route (collective).

    Args:
        top_experts: int64 or int32 [T, K]; -1 drops a route. T is at most the workspace's.
        num_local_experts: El; with E = El * EP experts on all ranks.
    """
    _require_int("num_local_experts", num_local_experts, 1)
    inner = workspace.of(config, num_local_experts * workspace.ep_size)
    made = functional.build_schedule(
        inner, config.config(), top_experts, num_local_experts=num_local_experts
    )
    rows = made.ranks[0]
    none = rows.num_rows.new_empty(0)
    return MoKSchedule(
        rows.peer_rank, rows.peer_token_idx, rows.num_rows, rows.tokens_per_expert,
        rows.expert_offset, rows.block_expert,
        none if rows.route_row is None else rows.route_row, made.top_experts[0],
    )  # fmt: skip


def validate_inputs(
    config: MoKConfig,
    workspace: MoKWorkspace,
    schedule: MoKSchedule,
    x: Tensor,
    router_weights: Tensor | None = None,
    grad_output: Tensor | None = None,
) -> None:
    """Raise DtypeError, DeviceError or ShapeError for an input that does not fit the schedule."""
    for name, value, kind in (
        ("config", config, MoKConfig),
        ("workspace", workspace, MoKWorkspace),
        ("schedule", schedule, MoKSchedule),
    ):
        if not isinstance(value, kind):
            raise DtypeError(f"{name} must be a {kind.__name__}", type(value).__name__)
    tokens = schedule.top_experts.shape[0]
    rows = (tokens, workspace.hidden_size)
    check_tensor(workspace, "x", x, rows, (torch.bfloat16,))
    if router_weights is not None:
        size = (tokens, workspace.topk)
        check_tensor(workspace, "router_weights", router_weights, size, (torch.float32,))
    if grad_output is not None:
        check_tensor(workspace, "grad_output", grad_output, rows, (torch.bfloat16,))


class _Arguments:
    """The workspace and the weights of a call, as ours takes them."""

    def __init__(
        self, config: MoKConfig, workspace: MoKWorkspace, schedule: MoKSchedule,
        shared: Sequence[Tensor | None], routed: Sequence[Any], backward: bool = False,
    ) -> None:  # fmt: skip
        self.routed: Any = routed_weights(routed, backward)
        self.shared: Any = list(shared)
        self.config = config.config()
        gate = self.routed[0]
        if len(gate.shape) != 3:
            raise ShapeError(
                "routed_gate_weights must have the shape [El, I, H]", list(gate.shape),
                "Stack the experts",
            )  # fmt: skip
        precision = "mxfp8" if isinstance(gate, Mxfp8Weight) else "bf16"
        self.workspace = workspace.of(config, gate.shape[0] * workspace.ep_size, precision)
        width = None if shared[0] is None else shared[0].shape[0]
        self.workspace.fit(gate.shape[1], width)
        have = (len(schedule.tokens_per_expert), len(schedule.peer_rank))
        want = (gate.shape[0], self.workspace.sizes.capacity)
        if have != want or schedule.top_experts.shape[1] != workspace.topk:
            raise ShapeError(
                f"the schedule must be of this workspace and of {want[0]} experts, with {want[1]} rows",
                f"one of {have[0]} experts with {have[1]} rows",
                "Build it with num_local_experts of the weights",
            )
        buffers = _buffers(schedule, self.workspace)
        self.schedule = Schedule([buffers], [schedule.top_experts])


def _buffers(schedule: MoKSchedule, workspace: Workspace) -> Any:
    from mok.runtime.workspace import ScheduleBuffers

    route_row = None
    if workspace.sizes.direct:
        # A schedule that was built while only MXFP8 layers used the workspace has none.
        route_row = schedule.route_row if schedule.route_row.numel() else _route_row(schedule)
    return ScheduleBuffers(
        workspace.group.rank, schedule.peer_rank, schedule.peer_token_idx, schedule.num_tokens,
        schedule.tokens_per_expert, schedule.expert_offset, schedule.block_expert, route_row,
    )  # fmt: skip


def _route_row(schedule: MoKSchedule) -> Tensor:
    """The row of each route of the one rank there is, -1 for a dropped one: int32 [T * K]."""
    places, count = schedule.peer_token_idx, schedule.top_experts.numel()
    rows = torch.arange(len(places), dtype=torch.int32, device=places.device)
    used = (rows < schedule.num_tokens) & (places >= 0)
    found = rows.new_full((count + 1,), -1)
    found[torch.where(used, places, count).long()] = rows  # padding goes to the last one
    return found[:count].contiguous()


def _gate(x: Tensor, weight: Tensor | None) -> Tensor | None:
    """sigmoid(x . w), FP32 [T]."""
    return None if weight is None else (x.float() @ weight.float().flatten()).sigmoid()


def _context(made: ForwardContext) -> MoKForwardContext:
    none = made.gate_routed[0].new_empty(0)

    def first(part: Sequence[Tensor | None]) -> Tensor:
        return none if part[0] is None else part[0]

    x = first(made.x_routed)
    return MoKForwardContext(
        (x, made.x_scales[0]) if made.x_scales else x, first(made.gate_shared),
        made.gate_routed[0], first(made.up_shared), made.up_routed[0], none, none,
    )  # fmt: skip


def _ours(context: MoKForwardContext, workspace: Workspace, shared: bool) -> ForwardContext:
    x, scales = context.x_routed, None
    if not isinstance(x, Tensor):
        x, scales = x
    if (scales is not None) != workspace.sizes.scaled or (not x.numel()) != workspace.sizes.direct:
        raise ShapeError(
            "forward_context must be of a forward call with weights of the same precision",
            f"another one, for {workspace.precision} weights",
        )
    return ForwardContext(
        [None if workspace.sizes.direct else x],
        [context.gate_routed],
        [context.up_routed],
        [context.gate_shared if shared else None],
        [context.up_shared if shared else None],
        [] if scales is None else [scales],
    )


def forward(
    config: MoKConfig,
    workspace: MoKWorkspace,
    schedule: MoKSchedule,
    x: Tensor,
    router_weights: Tensor,
    shared_gate_weights: Tensor | None,
    shared_up_weights: Tensor | None,
    shared_down_weights: Tensor | None,
    routed_gate_weights: RoutedWeight,
    routed_up_weights: RoutedWeight,
    routed_down_weights: RoutedWeight,
    swiglu_limit: float | None = None,
    *,
    shared_output_gate_weight: Tensor | None = None,
) -> tuple[Tensor, MoKForwardContext]:
    """(output BF16 [T, H], context) (collective).

    Args:
        shared weights: of any width, or all None.
        routed weights: BF16 [El, ., .], or one tensor per expert (they are copied together), or
            (data, scales) as ``mok.ops.mxfp8_quantize`` returns them.
        shared_output_gate_weight: BF16 [1, H]; the shared expert's result is multiplied by
            sigmoid(x . w), formed in FP32.
    """
    validate_inputs(config, workspace, schedule, x, router_weights)
    a = _Arguments(
        config, workspace, schedule, (shared_gate_weights, shared_up_weights, shared_down_weights),
        (routed_gate_weights, routed_up_weights, routed_down_weights),
    )  # fmt: skip
    output, context = _layer.forward(
        a.config, a.workspace, a.schedule, x, router_weights, *a.shared, *a.routed, swiglu_limit,
        shared_scale=_gate(x, shared_output_gate_weight),
    )  # fmt: skip
    assert context is not None
    workspace.check(a.workspace)
    return output, _context(context)


def recompute_forward_context(
    config: MoKConfig,
    workspace: MoKWorkspace,
    schedule: MoKSchedule,
    x: Tensor,
    shared_gate_weights: Tensor | None,
    shared_up_weights: Tensor | None,
    routed_gate_weights: RoutedWeight,
    routed_up_weights: RoutedWeight,
    swiglu_limit: float | None = None,
) -> MoKForwardContext:
    """The context of a forward call, rebuilt (collective)."""
    validate_inputs(config, workspace, schedule, x)
    a = _Arguments(
        config, workspace, schedule, (shared_gate_weights, shared_up_weights),
        (routed_gate_weights, routed_up_weights),
    )  # fmt: skip
    context = _layer.recompute_forward_context(
        a.config, a.workspace, a.schedule, x, *a.shared, *a.routed, swiglu_limit
    )
    workspace.check(a.workspace)
    return _context(context)


def backward(
    config: MoKConfig,
    workspace: MoKWorkspace,
    schedule: MoKSchedule,
    forward_context: MoKForwardContext,
    grad_output: Tensor,
    x: Tensor,
    router_weights: Tensor,
    shared_gate_weights: Tensor | None,
    shared_up_weights: Tensor | None,
    shared_down_weights: Tensor | None,
    routed_gate_weights: RoutedWeight,
    routed_up_weights: RoutedWeight,
    routed_down_weights: RoutedWeight,
    swiglu_limit: float | None = None,
    main_grads: Sequence[Tensor] | None = None,
    main_grad_storage_tables: Any = None,
    *,
    shared_output_gate_weight: Any = _ABSENT,
    shared_output_gate_main_grad: Tensor | None = None,
) -> tuple[Any, ...]:
    """(d_x, d_router_weights, d_routed gate, up, down, d_shared gate, up, down), and where
    ``shared_output_gate_weight`` is named, even as None, its gradient FP32 [1, H] or None (collective).

    Args:
        routed weights: as in forward; in MXFP8 (data, scales, transposed data, its scales) of gate and
            up, and (transposed data, its scales) of down.
        shared_output_gate_main_grad: [1, H], added to and returned instead of a new tensor.
        main_grads: BF16 or FP32 buffers to add the weight gradients to, as (shared gate, routed gate,
            shared up, routed up, shared down, routed down); they are returned.
        main_grad_storage_tables: must be None: routed buffers are [El, ., .].
    """
    validate_inputs(config, workspace, schedule, x, router_weights, grad_output)
    if not isinstance(forward_context, MoKForwardContext):
        raise DtypeError(
            "forward_context must be a MoKForwardContext", type(forward_context).__name__
        )
    if main_grad_storage_tables is not None:
        raise DtypeError(
            "main_grads of routed weights are one tensor [El, ., .] each",
            "main_grad_storage_tables",
            "Keep the experts' main_grad in one buffer and pass it",
        )
    a = _Arguments(
        config, workspace, schedule, (shared_gate_weights, shared_up_weights, shared_down_weights),
        (routed_gate_weights, routed_up_weights, routed_down_weights), backward=True,
    )  # fmt: skip
    more: dict[str, Any] = {}
    if main_grads is not None:
        if len(main_grads) != len(_GRADS):
            raise ShapeError(f"main_grads has {len(_GRADS)} buffers", len(main_grads))
        grads = [main_grads[k] for k in _GRADS]
        more = {"grads": grads, "grad_dtype": grads[0].dtype, "accumulate": True}
    gate = None if shared_output_gate_weight is _ABSENT else shared_output_gate_weight
    scale = _gate(x, gate)
    results = _layer.backward(
        a.config, a.workspace, a.schedule,
        _ours(forward_context, a.workspace, shared_gate_weights is not None),
        grad_output, x, router_weights, *a.shared, *a.routed, swiglu_limit, shared_scale=scale,
        **more,
    )  # fmt: skip
    workspace.check(a.workspace)
    if shared_output_gate_weight is _ABSENT:
        return results
    if gate is None or scale is None:
        return *results[:8], None
    d_z = (results[8] * scale * (1 - scale))[:, None]
    d_x = (results[0].float() + d_z * gate.float()).to(torch.bfloat16)
    d_gate = d_z.t() @ x.float()
    if shared_output_gate_main_grad is not None:
        d_gate = shared_output_gate_main_grad.add_(d_gate)
    return d_x, *results[1:8], d_gate
