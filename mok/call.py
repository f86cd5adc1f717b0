"""One call of the layer: its arguments, checked once, and the launches that make it up."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import attrgetter, methodcaller, or_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mok.arguments import (
    check_kind,
    check_tensor,
    check_tunables,
    check_workspace,
    limit_of,
    per_rank,
    stream_of,
)
from mok.config import Config
from mok.errors import DeviceError, ResourceError, ShapeError
from mok.kernels_cute import trace
from mok.runtime import launch as launcher
from mok.saved import ForwardContext, Schedule

if TYPE_CHECKING:
    from mok.runtime.compile import Kernel
    from mok.runtime.workspace import Workspace

WEIGHT_NAMES = ("gate", "up", "down")
ROUTED = tuple(f"routed_{name}" for name in WEIGHT_NAMES)
SHARED = tuple(f"shared_{name}" for name in WEIGHT_NAMES)
_FACTS = attrgetter("shape", "dtype", "device")
_ADDRESS, _CONTIGUOUS = methodcaller("data_ptr"), methodcaller("is_contiguous")
_NONE = (None, None, None)
# torch's own compiler allocates with these (on the current device); None in a torch without them.
_GUARDS = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_EMPTY = {kind: getattr(_GUARDS, f"_empty_strided_{kind}", None) for kind in ("cpu", "cuda")}
FORWARD_LEADING, SUM_LEADING = 21, 6  # arguments of the kernels that differ from call to call
BF16, FP32, E4M3 = (torch.bfloat16,), (torch.float32,), (torch.float8_e4m3fn,)


@dataclass(frozen=True)
class LaunchFacts:
    """How the last megakernel of a workspace was launched, for tests, benches and the curious."""

    kernel: str
    grid: int
    comm_ctas: int
    minibatch: int
    ring: int  # rows
    pair: bool = False  # CTAs work in pairs, with two tasks a ticket

    @property
    def ring_slots(self) -> int:
        """Minibatches that the ring holds."""
        return self.ring // self.minibatch


@dataclass(frozen=True)
class Plan:
    """What a launch takes from the shape and the config alone.

    A workspace keeps them by number of tokens and kind of call, so that a call costs the host little.
    """

    config: Config
    kernel: Kernel
    numbers: tuple[int, ...]
    buffers: tuple[int, ...] = ()
    heap: tuple[int, ...] = ()
    facts: LaunchFacts | None = None


def num_sms(workspace: Workspace) -> int:
    """SMs of the workspace's device (of the emulated one inside an emulator)."""
    if workspace.device.type == "cpu":
        from mok.runtime.launch import active_emulator

        emulator: Any = active_emulator()
        if emulator is None:
            raise DeviceError(
                "a workspace on the CPU is used inside an emulator",
                "no emulator is active",
                "Call it within `with Emulator(arch):`, as when it was made",
            )
        return int(emulator.num_sms)
    return workspace.num_sms


def schedule_sizes(workspace: Workspace) -> tuple[int, ...]:
    """What a schedule's arrays depend on, beside the ids."""
    shape = workspace.shape
    return (
        shape.num_experts, shape.topk, shape.ep_size, workspace.sizes.tile, workspace.max_tokens,
    )  # fmt: skip


def launch_shape(
    workspace: Workspace, config: Config, backward: bool = False
) -> tuple[int, int, bool]:
    """(CTAs, comm CTAs, whether they work in pairs) of a megakernel, in whole clusters.

    ``schedule_capacity_multiplier`` is a hint of the rows this rank gets, as a fraction of all routes:
    no more CTAs than such a call has tasks. Work is drawn by ticket, so any grid computes everything.
    With launch control there is a cluster per task, so that some are left to give their SMs away;
    otherwise no more than fit.

    Raises:
        ResourceError: the comm SMs leave no room for a cluster that computes.
    """
    from mok.kernels import scheduling_of
    from mok.kernels_cute.machine import launch_grid, machine_of, pays_backward, works_in_pairs

    arch, sms, reserved = str(workspace.arch), num_sms(workspace), config.reserved_sms
    shape = workspace.shape
    comm = config.bwd_num_comm_sms if backward else config.fwd_num_comm_sms
    comm = 0 if workspace.sizes.direct else comm
    pair = works_in_pairs(arch, sms, reserved, comm, workspace.precision == "mxfp8")
    pays = not backward or pays_backward(shape.hidden_size, shape.intermediate_size)
    pair = pair and (pays if config.pairs is None else config.pairs)
    cluster = machine_of(arch).cluster(pair)
    comm = -(-comm // cluster) * cluster
    usable = (sms - reserved) // cluster * cluster
    if comm + cluster > usable:
        raise ResourceError(
            f"comm SMs and one cluster of {cluster} must fit the usable SMs",
            f"{comm} + {cluster} > {usable}",
            "Lower num_comm_sms or reserved_sms",
        )
    routes = shape.ep_size * workspace.max_tokens * shape.topk
    rows = max(1, math.ceil(routes * config.schedule_capacity_multiplier))
    per_block = -(-2 * shape.intermediate_size // 256) + -(-shape.hidden_size // 256)
    tasks = -(-rows // workspace.sizes.tile) * per_block
    scheduling = scheduling_of(arch, config.launch_control)
    return launch_grid(arch, scheduling, usable, comm, tasks, pair), comm, pair


def new_tensor(
    device: torch.device, size: tuple[int, ...], dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """An uninitialised tensor on the current device, which is ``device``."""
    empty = _EMPTY.get(device.type)
    if empty is not None and len(size) == 2:  # half the host's time of torch.empty
        return empty(size, (size[1], 1), dtype)  # type: ignore[no-any-return]
    return torch.empty(size, dtype=dtype, device=device)


MOST_KINDS = 64  # of arguments that are known: with so many numbers of tokens, begin again


def facts_of(kind: Any, schedule: Schedule, tensors: Sequence[Any]) -> tuple[Any, list[int]]:
    """(all that decides whether arguments are right, as a key; their addresses).

    One local rank in BF16: its calls are checked once for each set of sizes. The key is None where only
    ``Call._check`` can tell.

    Args:
        kind: of the call, hashable: what is given and for what.
    """
    try:
        addresses = [*map(_ADDRESS, tensors)]
        if not all(map(_CONTIGUOUS, tensors)):
            return None, addresses
        ids = schedule.top_experts[0]
        sizes = schedule.sizes
        facts = (kind, sizes, len(schedule.ranks), ids.shape, ids.dtype, *map(_FACTS, tensors))
    except (AttributeError, IndexError, TypeError):
        return None, []  # lists of several ranks, quantised weights, not a tensor
    return (None if reduce(or_, addresses, 0) % 16 or not sizes else facts), addresses


class Call:
    """The checked arguments of one call, and its launches."""

    program = trace.FORWARD  # as its trace names it
    down_orientation = "normal"  # of quantised down weights: what the kernel multiplies with

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
        check_workspace(workspace)
        check_tunables(workspace, config)
        workspace.check_group()
        check_kind("schedule", schedule, Schedule, "functional.build_schedule(…)")
        self.config, self.workspace, self.schedule = config, workspace, schedule
        self.absent = workspace.counter_sets.data_ptr()
        self.recompute = recompute
        self.shape, self.sizes = workspace.shape, workspace.sizes
        self.direct = self.sizes.direct
        self.local_ranks = workspace.group.local_ranks
        self.count = len(self.local_ranks)
        self.stream = stream_of(workspace)
        self.ring = self.sizes.ring
        self.limit = limit_of(swiglu_limit)
        self.limited = self.limit != math.inf
        self.mxfp8 = workspace.precision == "mxfp8"
        self.routed_given = routed
        self.scales: list[list[Tensor | None]] = []
        given = (x, router_weights, *routed, *shared, shared_scale)
        known = workspace.known_arguments
        absent = tuple([t is None for t in given])
        facts, _ = facts_of(
            (recompute, self.limit, absent), schedule, [t for t in given if t is not None]
        )
        if facts is not None and facts in known:
            self._take(given, len(routed))
            return
        self._check(x, router_weights, shared, routed, shared_scale)
        if facts is not None:
            if len(known) >= MOST_KINDS:
                known.clear()
            known.add(facts)

    def _take(self, given: tuple[Any, ...], routed: int) -> None:
        """Arguments that need no check, of one local rank."""
        self.x = [given[0]]
        self.weights = [] if self.recompute else [given[1]]
        self.routed = [[weight] for weight in given[2 : 2 + routed]]
        shared = given[2 + routed : -1]
        self.shared: tuple[Tensor, ...] | None = shared if shared[0] is not None else None
        self.shared_scale: list[Tensor] | None = None if given[-1] is None else [given[-1]]

    def _check(
        self,
        x: Any,
        router_weights: Any,
        shared: tuple[Tensor | None, ...],
        routed: tuple[Any, ...],
        shared_scale: Any,
    ) -> None:
        workspace, schedule, recompute = self.workspace, self.schedule, self.recompute
        if {len(schedule.ranks), len(schedule.top_experts)} != {len(workspace.group.local_ranks)}:
            raise ShapeError(
                "the schedule must be of the workspace's local ranks: "
                f"{len(workspace.group.local_ranks)} of them",
                f"a schedule of {len(schedule.ranks)} ranks, {len(schedule.top_experts)} of ids",
                "Build it with the same workspace",
            )
        if schedule.sizes and schedule.sizes != schedule_sizes(workspace):
            raise ShapeError(
                "the schedule must be of a workspace with the same E, K, EP, tile and max_tokens: "
                f"{schedule_sizes(workspace)}",
                schedule.sizes,
                "Build it with this workspace",
            )
        if not self.limit >= 0:
            raise ShapeError("swiglu_limit must be at least 0", self.limit)
        H, I, K = self.shape.hidden_size, self.shape.intermediate_size, self.shape.topk
        self.x = per_rank(workspace, "x", x)
        self.weights = [] if recompute else per_rank(workspace, "router_weights", router_weights)
        names = WEIGHT_NAMES[: 2 if recompute else 3]
        self.routed = []
        for name, value in zip(ROUTED[: len(names)], routed, strict=True):
            if self.mxfp8:
                from mok.mxfp8 import mxfp8_per_rank

                down = name == "routed_down"
                orientation = self.down_orientation if down else "normal"
                data, scales = mxfp8_per_rank(workspace, name, value, down, orientation)
                self.scales.append(scales)
            else:
                data = per_rank(workspace, name, value)
            self.routed.append(data)
        for i, rank in enumerate(self.local_ranks):
            tokens = schedule.top_experts[i].shape[0]
            experts = len(self.shape.experts_on(rank))
            check_tensor(workspace, "x", self.x[i], (tokens, H), BF16)
            if not recompute:
                check_tensor(workspace, "router_weights", self.weights[i], (tokens, K), FP32)
            kinds = E4M3 if self.scales and self.sizes.scaled else BF16
            turned = kinds is E4M3 and self.down_orientation == "transposed"
            sizes = (
                (experts, I, H),
                (experts, I, H),
                (experts, I, H) if turned else (experts, H, I),
            )
            for name, weight, size in zip(ROUTED, self.routed, sizes, strict=False):
                check_tensor(workspace, name, weight[i], size, kinds)
        self.shared = self._check_shared(shared, names)
        self.shared_scale = None
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
        given = [n for n, t in zip(SHARED, shared, strict=False) if t is not None]
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
        for name, value, size in zip(SHARED, shared, sizes, strict=False):
            check_tensor(self.workspace, name, value, size, BF16)
        return tuple(shared)

    @property
    def clamp(self) -> float | None:
        """swiglu_limit as a number, None where it clamps nothing, for ``mok.capture``."""
        return self.limit if self.limited else None

    def given(self) -> dict[str, Any]:
        """The call's tensors by name, for ``mok.capture``."""
        return {
            "x": self.x,
            "router_weights": self.weights,
            "shared_scale": self.shared_scale,
            **dict(zip(ROUTED, self.routed_given if self.mxfp8 else self.routed, strict=False)),
            **dict(zip(SHARED, self.shared or (), strict=False)),
        }

    def tokens(self, i: int) -> int:
        """T of local rank number ``i``."""
        return self.x[i].shape[0]

    def zero_counters(self, size: int, first: Tensor | None = None) -> None:
        """Fresh counters for every local rank, before the barrier: nothing but the kernel comes after it.

        ``first``: the first local rank's, filled, where the workspace keeps them for a look from the host.
        """
        sets = [] if first is None else [first]
        sets += [self._new(size, dtype=torch.int32) for _ in range(len(sets), self.count)]
        self.counters = [t.data_ptr() for t in sets]
        self._counter_sets = sets  # alive until the launches are queued
        for address in self.counters[first is not None :]:
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

        scales = self.workspace.x_wire_scales
        assert scales is not None
        tokens, hidden = self.x[i].shape
        if tokens:
            launcher.launch(
                get_kernel(kernels.quantise_rows_spec(self.workspace.arch)),
                self.x[i].data_ptr(),
                target.data_ptr(),
                scales.address(rank),
                tokens * hidden,
                quantise_rows_ctas(tokens, hidden, num_sms(self.workspace)),
                self.stream,
            )

    def run_forward(
        self, i: int, context: ForwardContext | None, recompute: bool = False
    ) -> Tensor | None:
        """Launch the forward megakernel of local rank ``i``, or the one that only rebuilds ``context``.

        Returns the shared expert's output (nothing writes it when recomputing).
        """
        w = self.workspace
        T, H, Is = self.tokens(i), self.shape.hidden_size, self.shape.shared_intermediate_size
        shared_y = self._new(T, H) if Is and not recompute else None
        gate = up = shared_gate = shared_up = None
        x_ring, x_scales = w.x_ring, w.x_scales
        if context is not None:
            I = self.shape.intermediate_size
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
        plan = self._planned((i, context is not None, recompute), self._plan_forward)
        w.last_launch = plan.facts
        # The recompute kernel has no down task: any valid address will do there.
        routed, shared = [r[i] for r in self.routed], self.shared or ()
        address = self._addresses
        launcher.launch(
            plan.kernel,
            *address(self.x[i], *routed, *_NONE[len(routed) :], *shared, *_NONE[len(shared) :]),
            *self.schedule.ranks[i].addresses,
            self._address(x_ring),
            *plan.buffers,
            *address(shared_y, gate, up, shared_gate, shared_up),
            *self.constants(i, plan, self.counters[i], x_scales),
            self.stream,
        )
        return shared_y

    def constants(
        self, i: int, plan: Plan, counters: int, x_scales: Tensor | None
    ) -> tuple[Any, ...]:
        """The forward kernel's arguments behind the first ``FORWARD_LEADING``, without the stream."""
        scales = [part[i] for part in self.scales]
        return (
            *self._addresses(
                *scales, *_NONE[len(scales) :], x_scales, self.workspace.hidden_scales
            ),
            *plan.heap,
            counters,
            *plan.numbers,
            self.limit,
        )

    def _planned(self, key: tuple[Any, ...], make: Callable[..., Plan]) -> Plan:
        """What such a launch takes from the shape and the config: made once and kept."""
        plans = self.workspace.plans
        key = (*key, self.limited, self.x[key[0]].shape[0], num_sms(self.workspace))
        plan = plans.get(key)
        if plan is None or (plan.config is not self.config and plan.config != self.config):
            plan = plans[key] = make(*key[:-3])
        return plan

    def _plan_forward(self, i: int, save: bool, recompute: bool) -> Plan:
        from mok import kernels
        from mok.runtime.compile import get_kernel

        w, s, c, rank = self.workspace, self.sizes, self.config, self.local_ranks[i]
        grid, comm, pair = launch_shape(w, c)
        options = (c.launch_control, c.trace, self.mxfp8, s.wire, self.limited, pair)
        if recompute:
            spec = kernels.recompute_spec(w.arch, self.direct, *options)
        else:
            spec = kernels.forward_spec(w.arch, self.direct, save, *options, c.push)
        name = "recompute" if recompute else "forward"
        return Plan(
            config=c,
            kernel=get_kernel(spec),
            facts=LaunchFacts(name, grid, comm, c.minibatch_size, self.ring, pair),
            buffers=tuple(self._addresses(w.hidden, w.y, w.shared_hidden)),
            heap=(
                w.x.base_address if w.x is not None else 0,
                w.x_wire_scales.base_address if w.x_wire_scales is not None else 0,
                w.slots.base_address if w.slots is not None else 0,
                w.heap.stride,
            ),
            numbers=(
                w.records.wait_address(rank),
                w.barrier.gate_address(rank),
                int(c.timeout_s * 1e9),
                self.tokens(i),
                self.shape.hidden_size,
                self.shape.intermediate_size,
                self.shape.shared_intermediate_size or 0,
                len(self.shape.experts_on(rank)),
                self.shape.topk,
                c.minibatch_size,
                self.ring,
                s.y_rows,
                s.max_minibatches,
                s.max_blocks,
                comm,
                grid,
                rank,
            ),
        )

    def sum_forward(self, i: int, shared_y: Tensor | None) -> Tensor:
        """out[t] = shared[t] + Σ_k w·y in fixed order, in the memory of ``shared_y`` if there is one."""
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
        T, H = self.tokens(i), self.shape.hidden_size
        out = self._new(T, H) if shared is None else shared
        if T == 0:
            return out
        ids = self.schedule.top_experts[i]
        slots = self.schedule.ranks[i].route_row if self.direct else ids
        assert slots is not None
        plan = self.sum_plan(i, weights, shared, scale, slots.dtype)
        launcher.launch(
            plan.kernel,
            out.data_ptr(),
            rows,
            *self._addresses(weights, shared, scale),
            slots.data_ptr(),
            *self.sum_constants(plan),
            self.stream,
        )
        return out

    def sum_plan(
        self,
        i: int,
        weights: Tensor | None,
        shared: Tensor | None,
        scale: Tensor | None,
        slots: torch.dtype,
    ) -> Plan:
        key = (i, weights is not None, shared is not None, scale is not None, slots)
        return self._planned(key, self._plan_token_sum)

    @staticmethod
    def sum_constants(plan: Plan, clear: int = 0, words: int = 0) -> tuple[int, ...]:
        """The token sum's arguments behind the first ``SUM_LEADING``, without the stream.

        ``clear``: int32 words that it sets to zero.
        """
        *sizes, ctas = plan.numbers
        return (*sizes, clear, words, ctas)

    def _plan_token_sum(
        self, i: int, weights: bool, shared: bool, scale: bool, slots: torch.dtype
    ) -> Plan:
        from mok import kernels
        from mok.kernels_cute.token_sum import token_sum_ctas
        from mok.runtime.compile import get_kernel

        T, H = self.tokens(i), self.shape.hidden_size
        spec = kernels.token_sum_spec(
            self.workspace.arch, self.direct, shared, 64 if slots == torch.int64 else 32,
            has_weights=weights, has_shared_scale=scale,
        )  # fmt: skip
        ctas = token_sum_ctas(T, H, num_sms(self.workspace))
        gate = self.workspace.barrier.gate_address(self.local_ranks[i])
        numbers = (gate, T, H, self.shape.topk, self.shape.num_experts, ctas)
        return Plan(self.config, get_kernel(spec), numbers)

    def _new(self, *size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return new_tensor(self.workspace.device, size, dtype)

    def _addresses(self, *tensors: Tensor | None) -> list[int]:
        """Addresses; a valid, aligned one for what is absent or empty (nothing reads it)."""
        absent = self.absent
        return [absent if t is None else t.data_ptr() or absent for t in tensors]

    def _address(self, tensor: Tensor | None) -> int:
        return self.absent if tensor is None else tensor.data_ptr() or self.absent
