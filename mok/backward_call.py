"""The backward half of a call: buffers, launches and results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mok.arguments import check_tensor
from mok.call import Call, LaunchFacts, launch_shape, num_sms
from mok.errors import ContextError, DtypeError, ShapeError
from mok.kernels_cute import trace
from mok.saved import ForwardContext

GRAD_NAMES = (
    "routed_gate", "routed_up", "routed_down", "shared_gate", "shared_up", "shared_down",
)  # fmt: skip


# What the backward kernel takes block scales of, in its order.
SCALED = (
    "routed_gate", "routed_up", "routed_down", "routed_gate_t", "routed_up_t", "saved_x", "replay_x",
    "dy", "d_gate", "d_up", "x_tokens", "dy_tokens", "d_gate_tokens", "d_up_tokens", "weighted",
)  # fmt: skip


@dataclass
class WeightGrads:
    """Where a rank's six weight gradients go (shared ones None without a shared expert)."""

    routed: tuple[Tensor, Tensor, Tensor]
    shared: tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclass
class Scratch:
    """Buffers of one backward launch, BF16 unless said. The workspace's hidden and y serve as weighted and dx.

    d_gate, d_up, weighted [ring, I]; dx [dx rows, H]; dw_partial FP32 [dx rows, I/64]; in a ring also
    dy_ring [ring, H] and row_weight FP32 [ring]. Only where a call may have a second macrobatch: replay_gate,
    replay_up [ring, I], accumulators FP32 [2, group tasks * tile], in a ring replay_x [ring, H]. MXFP8:
    copies quantised along the tokens, x_tokens, dy_tokens [ring, H], d_gate_tokens, d_up_tokens [ring, I];
    weighted is one, too.

    With block-scaled MMAs what is quantised is E4M3 (uint8), the copies along the tokens transposed, and
    ``scales`` holds E8M0 in tiles (uint8) by the kernel's argument.
    """

    d_gate: Tensor
    d_up: Tensor
    weighted: Tensor
    dx: Tensor
    dw_partial: Tensor
    row_weight: Tensor | None
    replay_gate: Tensor | None = None
    replay_up: Tensor | None = None
    accumulators: Tensor | None = None
    replay_x: Tensor | None = None
    dy_ring: Tensor | None = None
    x_tokens: Tensor | None = None
    dy_tokens: Tensor | None = None
    d_gate_tokens: Tensor | None = None
    d_up_tokens: Tensor | None = None
    scales: dict[str, Tensor] = field(default_factory=dict)


class BackwardCall(Call):
    """The checked arguments of a backward call, and its launches."""

    program = trace.BACKWARD
    down_orientation = "transposed"  # replay ends with the SwiGLU

    def attach(
        self, context: ForwardContext, grad_output: Sequence[Tensor], grads: Sequence[Any] | None,
        grad_dtype: torch.dtype, accumulate: bool,
    ) -> None:  # fmt: skip
        """Check what only backward has. ``grads``: given buffers per local rank, or None."""
        self.transposed, self.transposed_scales = self._transposed() if self.mxfp8 else ([], [])
        self.context = context
        self.dy = list(grad_output)
        self._check_context(context)
        for i in range(self.count):
            size = (self.tokens(i), self.shape.hidden_size)
            check_tensor(self.workspace, "grad_output", self.dy[i], size, (torch.bfloat16,))
        if grad_dtype not in (torch.bfloat16, torch.float32):
            raise DtypeError("weight gradients are bfloat16 or float32", str(grad_dtype))
        if accumulate and grads is None:
            raise ShapeError("accumulate needs the gradient buffers to add to", "grads is None")
        for given in grads or ():
            if not isinstance(given, Sequence | None):
                raise DtypeError("grads must be buffers in a list", f"a {type(given).__name__}")
            if given is not None and len(given) != len(GRAD_NAMES):
                raise ShapeError(
                    f"grads has {len(GRAD_NAMES)} buffers, in the order of the result",
                    f"{len(given)} given",
                )
        mode = "bf16" if grad_dtype == torch.bfloat16 else "fp32"
        self.grad_mode = mode + ("_add" if accumulate else "")
        self.grads = [
            self._weight_grads(i, grads[i] if grads is not None else None, grad_dtype)
            for i in range(self.count)
        ]

    def _transposed(self) -> tuple[list[list[Tensor]], list[list[Tensor | None]]]:
        """Gate and up, quantised along the contractions of the gradients, per local rank; their scales."""
        from mok.mxfp8 import for_kernel

        found, scales = [], []
        for given in self.routed_given[:2]:
            weights = [given] if not isinstance(given, Sequence) else given
            parts = [for_kernel(weight, "transposed", self.sizes.scaled) for weight in weights]
            data = [part.data if self.sizes.scaled else part.values for part in parts]
            found.append([values for values in data if values is not None])
            scales.append([part.scales for part in parts])
        return found, scales

    def _check_context(self, context: Any) -> None:
        """The context must be one that ``forward`` saved in this workspace, whole."""
        rule = "the context must come from forward with save_context, in this workspace"
        if not isinstance(context, ForwardContext):
            raise DtypeError(rule, type(context).__name__)
        if not context.belongs_to(self.schedule):
            raise ContextError(
                "backward needs the schedule of the forward call that saved the context",
                "one from another call, of other ids",
                "Pass that one, or rebuild the context with recompute_forward_context",
            )
        bf16, rows, inner = torch.bfloat16, self.ring, self.shape.intermediate_size
        H, width = self.shape.hidden_size, self.shape.shared_intermediate_size
        every = range(self.count)
        # As ``run_forward`` saves them: the size of each local rank's, and the dtype.
        parts: dict[str, tuple[list[tuple[int, ...]], torch.dtype]] = {
            name: ([(rows, inner)] * self.count, bf16) for name in ("gate_routed", "up_routed")
        }
        if not self.direct:
            parts["x_routed"] = [(rows, H)] * self.count, self.sizes.ring_dtype
        if self.sizes.scaled:
            parts["x_scales"] = [(rows * H // 32,)] * self.count, torch.uint8
        if self.shared is not None and width is not None:
            for name in ("gate_shared", "up_shared"):
                parts[name] = [(self.tokens(i), width) for i in every], bf16
        for name, (sizes, dtype) in parts.items():
            part = getattr(context, name)
            if not isinstance(part, list) or not all(isinstance(t, Tensor) for t in part):
                raise ShapeError(rule, f"no saved tensors in {name}")
            if len(part) != self.count:
                raise ShapeError(rule, f"{len(part)} saved tensors for {self.count} ranks")
            for i in every:
                check_tensor(self.workspace, f"the context's {name}", part[i], sizes[i], (dtype,))

    def _weight_grads(self, i: int, given: Any, dtype: torch.dtype) -> WeightGrads:
        experts = len(self.shape.experts_on(self.local_ranks[i]))
        H, I = self.shape.hidden_size, self.shape.intermediate_size
        shared = [tuple(w.shape) for w in self.shared] if self.shared is not None else [None] * 3
        found: list[Tensor | None] = []
        for k, size in enumerate([(experts, I, H), (experts, I, H), (experts, H, I), *shared]):
            buffer = given[k] if given is not None else None
            if size is None:
                found.append(None)
            elif buffer is None:
                found.append(self._new(*size, dtype=dtype))
            else:
                name = f"grad of {GRAD_NAMES[k]}"
                check_tensor(self.workspace, name, buffer, size, (dtype,))
                found.append(buffer)
        gate, up, down = found[:3]
        assert gate is not None and up is not None and down is not None
        return WeightGrads((gate, up, down), (found[3], found[4], found[5]))

    def stage(self) -> None:
        """Copy x, dy and the router weights into the symmetric heap where rows pass the ring."""
        if self.direct:
            return
        self.stage_x()
        heap = self.workspace.backward
        for i, rank in enumerate(self.local_ranks):
            for symmetric, value in ((heap.dy, self.dy[i]), (heap.weights, self.weights[i])):
                target = symmetric.peer(rank)[: self.tokens(i)]
                if target.data_ptr() != value.data_ptr():
                    target.copy_(value, non_blocking=True)

    def scratch(self) -> Scratch:
        """The launch's buffers: one set for all virtual ranks, which run one after another."""
        from mok.kernels_cute.backward.program import Backward
        from mok.kernels_cute.program import Tile

        ring, y_rows = self.ring, self.sizes.y_rows
        H, I = self.shape.hidden_size, self.shape.intermediate_size
        tile = Tile(m=self.sizes.tile)
        program = Backward(
            0, 0, H, I, 0, self.shape.max_local_experts, self.config.minibatch_size, ring, tile
        )
        f32 = torch.float32
        in_ring = not self.direct
        # In a ring that holds every routing nothing is replayed, and no expert goes on in a next macrobatch.
        again = ring < self.sizes.capacity
        floats = 2 * program.group_tasks * tile.m * tile.down_n
        # By their columns: rows of the ring, and copies of rows along the tokens.
        rows = {"d_gate": I, "d_up": I} | ({"dy_ring": H} if in_ring else {})
        rows |= {"replay_x": H} if in_ring and again else {}
        along = {"weighted": I}
        if self.mxfp8:
            along |= {"x_tokens": H, "dy_tokens": H, "d_gate_tokens": I, "d_up_tokens": I}
        scales: dict[str, Tensor] = {}
        quantised: dict[str, Tensor] = {}
        for name, columns in (rows | along).items():
            size, kind = (ring, columns), torch.bfloat16
            if self.sizes.scaled:
                size, kind = (columns, ring) if name in along else size, torch.uint8
                scales[name] = self._new(ring * columns // 32, dtype=kind)
            # What forward's kernel leaves in the workspace is done with.
            done = self.workspace.hidden.view(size) if name == "weighted" else None
            quantised[name] = self._new(*size, dtype=kind) if done is None else done
        return Scratch(
            **quantised,
            scales=scales,
            replay_gate=self._new(ring, I) if again else None,
            replay_up=self._new(ring, I) if again else None,
            dx=self.workspace.y,
            dw_partial=self._new(y_rows, I // 64, dtype=f32),
            accumulators=self._new(floats, dtype=f32) if again else None,
            row_weight=self._new(ring, dtype=f32) if in_ring else None,
        )

    def plan(self, i: int) -> tuple[Tensor, Tensor, Tensor, int, int]:
        """Launch the plan kernel: (tables, groups, counts, table stride, most groups)."""
        from mok import kernels
        from mok.kernels_cute.backward.program import GROUP_WORDS, TABLES, plan_room
        from mok.kernels_cute.program import tasks_ahead
        from mok.runtime.compile import get_kernel
        from mok.runtime.launch import launch

        b, rank = self.schedule.ranks[i], self.local_ranks[i]
        experts = len(self.shape.experts_on(rank))
        _, stride, most = plan_room(
            self.sizes.capacity, experts, self.config.minibatch_size, self.ring
        )
        ints = torch.int32
        tables = self._new(TABLES, stride, dtype=ints)
        groups, counts = self._new(most, GROUP_WORDS, dtype=ints), self._new(2, dtype=ints)
        launch(
            get_kernel(kernels.plan_spec(self.workspace.arch)),
            b.num_rows.data_ptr(),
            b.expert_offset.data_ptr(),
            b.block_expert.data_ptr(),
            tables.data_ptr(),
            groups.data_ptr(),
            counts.data_ptr(),
            self.tokens(i),
            self.shape.hidden_size,
            self.shape.intermediate_size,
            self.shape.shared_intermediate_size or 0,
            experts,
            self.config.minibatch_size,
            self.ring,
            stride,
            tasks_ahead(self.sizes.direct, self.mxfp8),
            self.stream,
        )
        return tables, groups, counts, stride, most

    def prepare(self) -> list[tuple[Tensor, Tensor, Tensor, int, int]]:
        """What comes before the barrier besides the copies: the ranks' plans and fresh counters."""
        from mok.kernels_cute.backward.operands import counter_layout

        plans = [self.plan(i) for i in range(self.count)]
        tokens = max(self.tokens(i) for i in range(self.count))
        layout = counter_layout(
            self.sizes.max_minibatches,
            self.sizes.max_blocks,
            max(p[-1] for p in plans),
            -(-tokens // self.sizes.tile),
        )
        self.zero_counters(layout.size)
        self.workspace.backward_words = (layout, self._counter_sets[0])
        return plans

    def run_backward(
        self, i: int, s: Scratch, plan: tuple[Tensor, Tensor, Tensor, int, int]
    ) -> dict[str, Tensor | None]:
        """Launch the backward megakernel of local rank ``i``; returns what the sums need."""
        from mok import kernels
        from mok.runtime.compile import get_kernel
        from mok.runtime.launch import launch

        w, rank, ctx = self.workspace, self.local_ranks[i], self.context
        T, H, I = self.tokens(i), self.shape.hidden_size, self.shape.intermediate_size
        Is = self.shape.shared_intermediate_size or 0
        b = self.schedule.ranks[i]
        tables, groups, counts, stride, most = plan
        shared_grads = [self._new(T, Is) if Is else None for _ in range(3)]
        shared_partial = self._new(T, Is // 64, dtype=torch.float32) if Is else None
        shared_dx = self._new(T, H) if Is else None
        grid, comm, pair = launch_shape(w, self.config, backward=True)
        minibatch = self.config.minibatch_size
        w.last_launch = LaunchFacts("backward", grid, comm, minibatch, self.ring, pair)
        heap = None if self.direct else w.backward
        grads, at = self.grads[i], self._address
        shared = self.shared or (None, None, None)
        gate_t, up_t = (part[i] for part in self.transposed) if self.mxfp8 else (None, None)
        arguments: dict[str, Any] = {
            "x": at(self.x[i]),
            "dy": at(self.dy[i]),
            "router_weights": at(self.weights[i]),
            "shared_scale": self.shared_scale[i].data_ptr() if self.shared_scale else 0,
            **{
                f"routed_{n}": at(r[i])
                for n, r in zip(("gate", "up", "down"), self.routed, strict=True)
            },
            **{f"shared_{n}": at(t) for n, t in zip(("gate", "up", "down"), shared, strict=True)},
            "peer_rank": at(b.peer_rank),
            "peer_token_idx": at(b.peer_token_idx),
            "block_expert": at(b.block_expert),
            "num_rows": at(b.num_rows),
            "expert_offset": at(b.expert_offset),
            "tables": at(tables),
            "groups": at(groups),
            "counts": at(counts),
            "saved_x": at(ctx.x_routed[i]),
            "saved_gate": at(ctx.gate_routed[i]),
            "saved_up": at(ctx.up_routed[i]),
            "saved_shared_gate": at(ctx.gate_shared[i]),
            "saved_shared_up": at(ctx.up_shared[i]),
            "replay_x": at(s.replay_x),
            "replay_gate": at(s.replay_gate),
            "replay_up": at(s.replay_up),
            "dy_ring": at(s.dy_ring),
            "row_weight": at(s.row_weight),
            "d_gate": at(s.d_gate),
            "d_up": at(s.d_up),
            "weighted": at(s.weighted),
            "routed_gate_t": at(gate_t),
            "routed_up_t": at(up_t),
            "x_tokens": at(s.x_tokens),
            "dy_tokens": at(s.dy_tokens),
            "d_gate_tokens": at(s.d_gate_tokens),
            "d_up_tokens": at(s.d_up_tokens),
            **self._scale_arguments(i, s),
            "dx": at(s.dx),
            "dw_partial": at(s.dw_partial),
            "shared_d_gate": at(shared_grads[0]),
            "shared_d_up": at(shared_grads[1]),
            "shared_weighted": at(shared_grads[2]),
            "shared_dw_partial": at(shared_partial),
            "shared_dx": at(shared_dx),
            "accumulators": at(s.accumulators),
            **{f"dw_{n}": at(t) for n, t in zip(("gate", "up", "down"), grads.routed, strict=True)},
            **{
                f"shared_dw_{n}": at(t)
                for n, t in zip(("gate", "up", "down"), grads.shared, strict=True)
            },
            "x_heap": w.x.base_address if w.x is not None else 0,
            "x_heap_scales": w.x_wire_scales.base_address if w.x_wire_scales is not None else 0,
            "dy_heap": heap.dy.base_address if heap else 0,
            "weight_heap": heap.weights.base_address if heap else 0,
            "dx_heap": w.slots.base_address if w.slots is not None else 0,
            "dw_heap": heap.d_weights.base_address if heap else 0,
            "rank_stride": w.heap.stride,
            "counters": self.counters[i],
            "record": w.records.wait_address(rank),
            "gate": w.barrier.gate_address(rank),
            "timeout_ns": int(self.config.timeout_s * 1e9),
            "tokens": T,
            "hidden": H,
            "intermediate": I,
            "shared_intermediate": Is,
            "experts": len(self.shape.experts_on(rank)),
            "topk": self.shape.topk,
            "minibatch": self.config.minibatch_size,
            "macrobatch": self.ring,
            "dx_rows": self.sizes.y_rows,
            "max_minibatches": self.sizes.max_minibatches,
            "max_blocks": self.sizes.max_blocks,
            "max_groups": most,
            "table_stride": stride,
            "num_comm_ctas": comm,
            "grid": grid,
            "rank": rank,
            "swiglu_limit": self.limit,
        }
        launch(
            get_kernel(
                kernels.backward_spec(
                    w.arch,
                    self.direct,
                    self.grad_mode,
                    self.config.launch_control,
                    self.config.trace,
                    self.mxfp8,
                    self.sizes.wire,
                    self.limited,
                    pair,
                )
            ),
            *arguments.values(),
            self.stream,
        )
        return {"shared_dx": shared_dx, "shared_partial": shared_partial}

    def _scale_arguments(self, i: int, s: Scratch) -> dict[str, int]:
        """Addresses of all block scales of local rank ``i``, in the kernel's order."""
        found: dict[str, Tensor | None] = {name: s.scales.get(name) for name in SCALED}
        if self.sizes.scaled:
            found["dy"] = s.scales["dy_ring"]
            found["saved_x"] = self.context.x_scales[i]
            for k, name in enumerate(("gate", "up", "down")):
                found[f"routed_{name}"] = self.scales[k][i]
            for k, name in enumerate(("gate", "up")):
                found[f"routed_{name}_t"] = self.transposed_scales[k][i]
        return {f"{name}_scales": self._address(t) for name, t in found.items()}

    def sum_backward(
        self, i: int, s: Scratch, parts: dict[str, Tensor | None]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(d_x, router-weight gradients, gradient of the shared scale or None) of local rank ``i``."""
        w, rank = self.workspace, self.local_ranks[i]
        if self.direct:
            rows = s.dx.data_ptr()
        else:
            assert w.slots is not None
            rows = w.slots.address(rank)
        d_x = self._token_sum(i, rows, None, parts["shared_dx"], None)
        d_scale = None
        if self.shared_scale is not None:
            partial = parts["shared_partial"]
            assert partial is not None
            d_scale = self._scale_grad(i, partial)
        return d_x, self._router_grad(i, s), d_scale

    def _router_grad(self, i: int, s: Scratch) -> Tensor:
        """d_w FP32 [T, K]: of a dropped route exactly 0."""
        T, K = self.tokens(i), self.shape.topk
        if self.direct:
            source, slots = s.dw_partial.data_ptr(), self.schedule.ranks[i].route_row
            groups, bits = self.shape.intermediate_size // 64, 32
        else:
            rank, slots = self.local_ranks[i], self.schedule.top_experts[i]
            source, groups = self.workspace.backward.d_weights.address(rank), 1
            bits = 64 if slots.dtype == torch.int64 else 32
        return self._sum_groups(T * K, source, slots, groups, self.direct, bits).view(T, K)

    def _scale_grad(self, i: int, partial: Tensor) -> Tensor:
        """Gradient FP32 [T] of the shared expert's scale."""
        groups = (self.shape.shared_intermediate_size or 0) // 64
        return self._sum_groups(self.tokens(i), partial.data_ptr(), None, groups, True, 32)

    def _sum_groups(
        self,
        routes: int,
        source: int,
        slots: Tensor | None,
        groups: int,
        has_index: bool,
        bits: int,
    ) -> Tensor:
        from mok import kernels
        from mok.kernels_cute.router_grad import router_grad_ctas
        from mok.runtime.compile import get_kernel
        from mok.runtime.launch import launch

        out = self._new(routes, dtype=torch.float32)
        if routes:
            launch(
                get_kernel(kernels.router_grad_spec(self.workspace.arch, has_index, bits)),
                out.data_ptr(),
                source,
                slots.data_ptr() if slots is not None else 0,
                routes,
                groups,
                self.shape.num_experts,
                router_grad_ctas(routes, has_index, num_sms(self.workspace)),
                self.stream,
            )
        return out
