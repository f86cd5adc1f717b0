"""One call of the layer: its arguments, checked once, and the launches that make it up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mok.arguments import check_tensor, check_tunables, per_rank, stream_of
from mok.config import Config
from mok.errors import ResourceError, ShapeError
from mok.kernels_cute import trace

if TYPE_CHECKING:
    from mok.runtime.workspace import ScheduleBuffers, Workspace

WEIGHT_NAMES = ("gate", "up", "down")


@dataclass
class Schedule:
    """Which row of which expert each route is, for the local ranks; used by forward and backward.

    A pure function of the ids of all ranks. The properties give the first local rank's arrays (int32, on
    the device, sized for the worst routing; entries past ``num_tokens`` are undefined).
    """

    ranks: list[ScheduleBuffers]
    top_experts: list[Tensor]  # int64 or int32 [T, K] per local rank, as given
    sizes: tuple[int, ...] = ()  # (E, K, EP, tile, max_tokens) of its workspace; () where not known

    @property
    def peer_rank(self) -> Tensor:
        """[rows]: rank of a row's token, -1 for padding."""
        return self.ranks[0].peer_rank

    @property
    def peer_token_idx(self) -> Tensor:
        """[rows]: token*K + k on that rank, -1 for padding."""
        return self.ranks[0].peer_token_idx

    @property
    def num_tokens(self) -> Tensor:
        """[1]: rows of this rank, padding included."""
        return self.ranks[0].num_rows

    @property
    def tokens_per_expert(self) -> Tensor:
        """[El]: routes of each local expert, without padding."""
        return self.ranks[0].tokens_per_expert


@dataclass
class ForwardContext:
    """What backward needs of a forward call, per local rank (BF16; rows of macrobatch 0 only).

    x_routed [ring, H] (None at one rank: rows are gathered from x), gate_routed and up_routed [ring, I],
    gate_shared and up_shared [T, Is] (None without a shared expert), shared_y [T, H] where a later step
    needs it. In MXFP8 with block-scaled MMAs x_routed holds E4M3 bytes, x_scales (uint8 [ring·H/32])
    its scales in tiles.
    """

    x_routed: list[Tensor | None] = field(default_factory=list)
    gate_routed: list[Tensor] = field(default_factory=list)
    up_routed: list[Tensor] = field(default_factory=list)
    gate_shared: list[Tensor | None] = field(default_factory=list)
    up_shared: list[Tensor | None] = field(default_factory=list)
    x_scales: list[Tensor] = field(default_factory=list)

    def tensors(self) -> list[Tensor]:
        """All tensors, for autograd's saved-tensor hooks."""
        parts = (
            self.x_routed, self.gate_routed, self.up_routed, self.gate_shared, self.up_shared,
            self.x_scales,
        )  # fmt: skip
        return [t for part in parts for t in part if t is not None]


@dataclass(frozen=True)
class LaunchFacts:
    """How the last megakernel of a workspace was launched, for tests, benches and the curious."""

    kernel: str
    grid: int
    comm_ctas: int
    minibatch: int
    ring: int  # rows

    @property
    def ring_slots(self) -> int:
        """Minibatches that the ring holds."""
        return self.ring // self.minibatch


def num_sms(workspace: Workspace) -> int:
    """SMs of the workspace's device (of the emulated one inside an emulator)."""
    if workspace.device.type == "cpu":
        from mok.runtime.launch import active_emulator

        emulator: Any = active_emulator()
        return int(emulator.num_sms)
    return workspace.num_sms


def schedule_sizes(workspace: Workspace) -> tuple[int, ...]:
    """What a schedule's arrays depend on, beside the ids."""
    shape = workspace.shape
    return (
        shape.num_experts, shape.topk, shape.ep_size, workspace.sizes.tile, workspace.max_tokens,
    )  # fmt: skip


class Call:
    """The checked arguments of one call, and its launches."""

    program = trace.FORWARD  # as its trace names it

    def __init__(
        self,
        config: Config,
        workspace: Workspace,
        schedule: Schedule,
        x: Any,
        router_weights: Any,
        shared: tuple[Tensor | None, ...],
        routed: tuple[Any, ...],
        swiglu_limit: float | None,
        shared_scale: Any,
        *,
        recompute: bool = False,
    ) -> None:
        """``recompute``: no router weights and no down weights are given, nor needed."""
        workspace.check_open()
        check_tunables(workspace, config)
        workspace.check_group()
        self.config, self.workspace, self.schedule = config, workspace, schedule
        self.recompute = recompute
        self.shape, self.sizes = workspace.shape, workspace.sizes
        self.direct = self.sizes.direct
        if len(schedule.ranks) != len(workspace.group.local_ranks):
            raise ShapeError(
                "the schedule must be of the workspace's local ranks: "
                f"{len(workspace.group.local_ranks)} of them",
                f"a schedule of {len(schedule.ranks)} ranks",
                "Build it with the same workspace",
            )
        if schedule.sizes and schedule.sizes != schedule_sizes(workspace):
            raise ShapeError(
                "the schedule must be of a workspace with the same E, K, EP, tile and max_tokens: "
                f"{schedule_sizes(workspace)}",
                schedule.sizes,
                "Build it with this workspace",
            )
        self.local_ranks = workspace.group.local_ranks
        self.count = len(self.local_ranks)
        self.stream = stream_of(workspace)
        self.ring = self.sizes.ring
        self.limit = math.inf if swiglu_limit is None else float(swiglu_limit)
        self.limited = self.limit != math.inf
        if not self.limit >= 0:
            raise ShapeError("swiglu_limit must be at least 0", swiglu_limit)
        H, I, K = self.shape.hidden_size, self.shape.intermediate_size, self.shape.topk
        self.x = per_rank(workspace, "x", x)
        self.weights = [] if recompute else per_rank(workspace, "router_weights", router_weights)
        names = WEIGHT_NAMES[: 2 if recompute else 3]
        self.mxfp8 = workspace.precision == "mxfp8"
        self.routed_given = routed
        self.scales: list[list[Tensor | None]] = []
        from mok.mxfp8 import mxfp8_per_rank

        self.routed = []
        for name, value in zip(names, routed, strict=True):
            if self.mxfp8:
                data, scales = mxfp8_per_rank(workspace, f"routed_{name}", value, name == "down")
                self.scales.append(scales)
            else:
                data = per_rank(workspace, f"routed_{name}", value)
            self.routed.append(data)
        for i, rank in enumerate(self.local_ranks):
            tokens = schedule.top_experts[i].shape[0]
            experts = len(self.shape.experts_on(rank))
            check = lambda name, value, size, dtype=torch.bfloat16: check_tensor(  # noqa: E731
                workspace, name, value, size, (dtype,)
            )
            check("x", self.x[i], (tokens, H))
            if not recompute:
                check("router_weights", self.weights[i], (tokens, K), torch.float32)
            sizes = ((experts, I, H), (experts, I, H), (experts, H, I))
            for name, weight, size in zip(names, self.routed, sizes, strict=False):
                kind = torch.float8_e4m3fn if self.scales and self.sizes.scaled else torch.bfloat16
                check(f"routed_{name}", weight[i], size, kind)
        self.shared = self._check_shared(shared, names)
        self.shared_scale: list[Tensor] | None = None
        if shared_scale is not None:
            if self.shared is None:
                raise ShapeError("shared_scale needs a shared expert", "no shared weights")
            self.shared_scale = per_rank(workspace, "shared_scale", shared_scale)
            for i in range(self.count):
                check_tensor(
                    workspace,
                    "shared_scale",
                    self.shared_scale[i],
                    (self.tokens(i),),
                    (torch.float32,),
                )

    def _check_shared(self, shared: Any, names: Sequence[str]) -> tuple[Tensor, ...] | None:
        width, H = self.shape.shared_intermediate_size, self.shape.hidden_size
        given = [f"shared_{n}" for n, t in zip(names, shared, strict=True) if t is not None]
        if width is None:
            if given:
                raise ShapeError(
                    "shared weights need a workspace with shared_intermediate_size",
                    ", ".join(given),
                )
            return None
        if len(given) < len(names):
            raise ShapeError(
                f"the workspace has a shared expert of width {width}: all its weights are needed",
                ", ".join(given) or "none given",
            )
        sizes = ((width, H), (width, H), (H, width))
        for name, value, size in zip(names, shared, sizes, strict=False):
            check_tensor(self.workspace, f"shared_{name}", value, size, (torch.bfloat16,))
        return tuple(shared)

    def given(self) -> dict[str, Any]:
        """The call's tensors by name, for ``mok.capture``."""
        names = [f"routed_{name}" for name in WEIGHT_NAMES]
        shared = [f"shared_{name}" for name in WEIGHT_NAMES]
        return {
            "x": self.x,
            "router_weights": self.weights,
            "shared_scale": self.shared_scale,
            **dict(zip(names, self.routed, strict=False)),
            **dict(zip(shared, self.shared or (), strict=False)),
        }

    def tokens(self, i: int) -> int:
        """T of local rank number ``i``."""
        return self.x[i].shape[0]

    def zero_counters(self, size: int, first: Tensor | None = None) -> None:
        """Fresh counters for every local rank, before the barrier: nothing but the kernel comes after it.

        ``first``: the first local rank's, where the workspace keeps them for a look from the host.
        """
        sets = [] if first is None else [first]
        sets += [self._new(size, dtype=torch.int32) for _ in range(len(sets), self.count)]
        self.counters = [t.data_ptr() for t in sets]
        self._counter_sets = sets  # alive until the launches are queued
        for address in self.counters:
            self.workspace.heap.memory.fill(address, 0, 4 * size, self.stream)
        if self.config.trace:
            program = trace.RECOMPUTE if self.recompute else self.program
            self.workspace.recorder.arm(program, num_sms(self.workspace), self.stream)

    def stage_x(self) -> None:
        """Copy x into the symmetric heap, unless it lives there or rows are gathered in place."""
        if self.direct:
            return
        heap_x = self.workspace.x
        assert heap_x is not None
        for i, rank in enumerate(self.local_ranks):
            target = heap_x.peer(rank)[: self.tokens(i)]
            if self.sizes.wire:
                self._quantise_x(i, rank, target)
                continue
            if target.data_ptr() != self.x[i].data_ptr():
                target.copy_(self.x[i], non_blocking=True)

    def _quantise_x(self, i: int, rank: int, target: Tensor) -> None:
        """x of local rank ``i`` as E4M3 and scales into the heap."""
        from mok import kernels
        from mok.kernels_cute.quantise_rows import quantise_rows_ctas
        from mok.runtime.compile import get_kernel
        from mok.runtime.launch import launch

        scales = self.workspace.x_wire_scales
        assert scales is not None
        tokens, hidden = self.x[i].shape
        if tokens:
            launch(
                get_kernel(kernels.quantise_rows_spec(self.workspace.arch)),
                self.x[i].data_ptr(),
                target.data_ptr(),
                scales.address(rank),
                tokens * hidden,
                quantise_rows_ctas(tokens, hidden, num_sms(self.workspace)),
                self.stream,
            )

    def launch_shape(self, comm_sms: int) -> tuple[int, int]:
        """(CTAs, comm CTAs) of a megakernel, in whole clusters.

        ``schedule_capacity_multiplier`` is a hint of the rows this rank gets, as a fraction of all routes:
        no more CTAs than such a call has tasks. Work is drawn by ticket, so any grid computes everything.
        With launch control there is a cluster per task, so that some are left to give their SMs away;
        otherwise no more than fit.
        """
        from mok.kernels import scheduling_of
        from mok.kernels_cute.machine import launch_grid, machine_of

        cluster = machine_of(self.workspace.arch).cluster
        usable = (num_sms(self.workspace) - self.config.reserved_sms) // cluster * cluster
        comm = 0 if self.direct else -(-comm_sms // cluster) * cluster
        if comm + cluster > usable:
            raise ResourceError(
                f"comm SMs and one cluster of {cluster} must fit the usable SMs",
                f"{comm} + {cluster} > {usable}",
                "Lower num_comm_sms or reserved_sms",
            )
        routes = self.shape.ep_size * self.workspace.max_tokens * self.shape.topk
        rows = max(1, math.ceil(routes * self.config.schedule_capacity_multiplier))
        per_block = -(-2 * self.shape.intermediate_size // 256) + -(-self.shape.hidden_size // 256)
        tasks = -(-rows // self.sizes.tile) * per_block
        arch = self.workspace.arch
        scheduling = scheduling_of(arch, self.config.launch_control)
        return launch_grid(arch, scheduling, usable, comm, tasks), comm

    def run_forward(
        self, i: int, context: ForwardContext | None, recompute: bool = False
    ) -> Tensor | None:
        """Launch the forward megakernel of local rank ``i``, or the one that only rebuilds ``context``.

        Returns the shared expert's output (nothing writes it when recomputing).
        """
        from mok import kernels
        from mok.runtime.compile import get_kernel
        from mok.runtime.launch import launch

        w, s, rank = self.workspace, self.sizes, self.local_ranks[i]
        T, H, I = self.tokens(i), self.shape.hidden_size, self.shape.intermediate_size
        Is = self.shape.shared_intermediate_size or 0
        b = self.schedule.ranks[i]
        # Scratch: launches of virtual ranks follow one another.
        shared_hidden = w.shared_hidden if Is else None
        shared_y = self._new(T, H) if Is else None
        gate = up = shared_gate = shared_up = None
        x_ring, x_scales = w.x_ring, w.x_scales
        if context is not None:
            gate, up = self._new(self.ring, I), self._new(self.ring, I)
            if Is:
                shared_gate, shared_up = self._new(T, Is), self._new(T, Is)
            if not self.direct:
                x_ring = self._new(self.ring, H, dtype=self.sizes.ring_dtype)
            if self.sizes.scaled:
                x_scales = self._new(self.ring * H // 32, dtype=torch.uint8)
                context.x_scales.append(x_scales)
            context.x_routed.append(None if self.direct else x_ring)
            context.gate_routed.append(gate)
            context.up_routed.append(up)
            context.gate_shared.append(shared_gate)
            context.up_shared.append(shared_up)
        grid, comm = self.launch_shape(self.config.fwd_num_comm_sms)
        w.last_launch = LaunchFacts(
            "recompute" if recompute else "forward",
            grid,
            comm,
            self.config.minibatch_size,
            self.ring,
        )
        # The recompute kernel has no down task: any valid address will do there.
        routed = [r[i] for r in self.routed] + [None] * (3 - len(self.routed))
        shared = [*(self.shared or ()), None, None, None][:3]
        scales = [*(part[i] for part in self.scales), None, None, None][:3]
        launch(
            get_kernel(
                kernels.recompute_spec(
                    w.arch,
                    self.direct,
                    self.config.launch_control,
                    self.config.trace,
                    self.mxfp8,
                    self.sizes.wire,
                    self.limited,
                )
                if recompute
                else kernels.forward_spec(
                    w.arch,
                    self.direct,
                    context is not None,
                    self.config.launch_control,
                    self.config.trace,
                    self.mxfp8,
                    self.sizes.wire,
                    self.limited,
                )
            ),
            self._address(self.x[i]),
            *(self._address(t) for t in routed),
            *(self._address(t) for t in shared),
            self._address(b.peer_rank),
            self._address(b.peer_token_idx),
            self._address(b.block_expert),
            self._address(b.num_rows),
            self._address(x_ring),
            self._address(w.hidden),
            self._address(w.y),
            self._address(shared_hidden),
            self._address(shared_y),
            self._address(gate),
            self._address(up),
            self._address(shared_gate),
            self._address(shared_up),
            *(self._address(t) for t in (*scales, x_scales, w.hidden_scales)),
            w.x.base_address if w.x is not None else 0,
            w.x_wire_scales.base_address if w.x_wire_scales is not None else 0,
            w.slots.base_address if w.slots is not None else 0,
            w.heap.stride,
            self.counters[i],
            w.records.wait_address(rank),
            w.barrier.gate_address(rank),
            int(self.config.timeout_s * 1e9),
            T,
            H,
            I,
            Is,
            len(self.shape.experts_on(rank)),
            self.shape.topk,
            self.config.minibatch_size,
            self.ring,
            s.y_rows,
            s.max_minibatches,
            s.max_blocks,
            comm,
            grid,
            rank,
            self.limit,
            self.stream,
        )
        return shared_y

    def sum_forward(self, i: int, shared_y: Tensor | None) -> Tensor:
        """out[t] = shared[t] + Σ_k w·y in fixed order."""
        w, rank = self.workspace, self.local_ranks[i]
        if self.direct:
            y = w.y.data_ptr()
        else:
            assert w.slots is not None
            y = w.slots.address(rank)
        scale = self.shared_scale[i] if self.shared_scale is not None else None
        return self._token_sum(i, y, self.weights[i], shared_y, scale)

    def _token_sum(
        self, i: int, rows: int, weights: Tensor | None, shared: Tensor | None, scale: Tensor | None
    ) -> Tensor:
        from mok import kernels
        from mok.kernels_cute.token_sum import token_sum_ctas
        from mok.runtime.compile import get_kernel
        from mok.runtime.launch import launch

        T, H = self.tokens(i), self.shape.hidden_size
        out = self._new(T, H)
        if T == 0:
            return out
        ids = self.schedule.top_experts[i]
        slots = self.schedule.ranks[i].route_row if self.direct else ids
        assert slots is not None
        bits = 64 if slots.dtype == torch.int64 else 32
        spec = kernels.token_sum_spec(
            self.workspace.arch, self.direct, shared is not None, bits,
            has_weights=weights is not None, has_shared_scale=scale is not None,
        )  # fmt: skip
        launch(
            get_kernel(spec),
            out.data_ptr(),
            rows,
            self._address(weights),
            self._address(shared),
            self._address(scale),
            slots.data_ptr(),
            self.workspace.barrier.gate_address(self.local_ranks[i]),
            T,
            H,
            self.shape.topk,
            self.shape.num_experts,
            token_sum_ctas(T, H, num_sms(self.workspace)),
            self.stream,
        )
        return out

    def _new(self, *size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(size, dtype=dtype, device=self.workspace.device)

    def _address(self, tensor: Tensor | None) -> int:
        """A tensor's address; a valid, aligned one for what is absent or empty (nothing reads it)."""
        if tensor is None or tensor.numel() == 0:
            return self.workspace.counter_words.data_ptr()
        return tensor.data_ptr()
