"""Run forward and backward on virtual ranks, every kernel of both: on a GPU, or in the emulator."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mok import kernels
from mok.config import Shape
from mok.kernels_cute import program
from mok.kernels_cute.backward import operands
from mok.kernels_cute.backward.program import (
    GROUP_WORDS,
    TABLES,
    Backward,
    backward_tile,
    plan_room,
)
from mok.kernels_cute.machine import machine_of
from mok.kernels_cute.router_grad import router_grad_ctas
from mok.reference import Case, Experts, Gradients, RankSchedule, schedule_reference
from mok.reference.mxfp8 import quantise, through_mxfp8, through_mxfp8_along, tile_scales
from mok.runtime.compile import KernelSpec, get_kernel
from mok.runtime.launch import active_emulator, launch
from tests.helpers import address, arch_of, kernel, run_token_sum, stream_of

TIMEOUT_NS = 30_000_000_000
AHEAD = 3  # tasks: in small layers, a part of what leads a minibatch
BF16, FP32 = torch.bfloat16, torch.float32


def call(spec: KernelSpec, device: torch.device, **arguments) -> None:
    """Launch a kernel, its arguments by name; tensors stand for their addresses."""
    module, _, cls = spec.factory.rpartition(":")
    host = getattr(importlib.import_module(module), cls).__call__
    names = list(inspect.signature(host).parameters)[1:-1]
    absent = {name: 0 for name in names if name.endswith("_scales")}  # of MXFP8
    arguments = absent | arguments
    assert set(arguments) == set(names), set(arguments) ^ set(names)
    values = [arguments[n] for n in names]
    emulator = active_emulator()
    if emulator is not None:
        emulator.register(*(v for v in values if isinstance(v, Tensor)))
    launch(
        get_kernel(spec),
        *(address(v) if isinstance(v, Tensor) else v for v in values),
        stream_of(device),
    )


def declare_fresh(*buffers: Tensor) -> None:
    """Tells an emulator that nothing has been written to the buffers yet."""
    emulator = active_emulator()
    if emulator is not None:
        emulator.register(*buffers, written=False)


class BackwardRun:
    """One layer call and its gradients on ``ep_size`` virtual ranks that share a device.

    Args:
        case, dy: inputs of all ranks, on the device to run on.
        direct: gather in place (one rank) instead of passing the ring.
        tokens_per_rank: how the tokens are split; evenly by default.
        minibatch, macrobatch: rows. grid, num_comm_ctas: CTAs.
        arch: of the kernels; the device's by default.
        mxfp8: routed experts in MXFP8. config: more of ``BackwardKernel``.
        grad_mode: of ``BackwardKernel``; into: what the adding modes add to, all ranks together.
    """

    def __init__(
        self,
        case: Case,
        dy: Tensor,
        ep_size: int = 1,
        *,
        direct: bool,
        minibatch: int,
        macrobatch: int,
        grid: int,
        num_comm_ctas: int = 0,
        tokens_per_rank: Sequence[int] | None = None,
        grad_mode: str = "bf16",
        into: Gradients | None = None,
        arch: str | None = None,
        mxfp8: bool = False,
        **config,
    ):
        if mxfp8:
            config["mxfp8"] = True
        self.mxfp8 = mxfp8
        self.arch = arch or arch_of(case.x.device)
        self.limited = case.swiglu_limit is not None
        self.scaled = mxfp8 and machine_of(self.arch).scaled_stages > 0  # E4M3 and scales
        spec = kernels.backward_spec(self.arch, direct, grad_mode, limited=self.limited, pair=False)
        if config:
            spec = replace(spec, config=tuple(sorted({**dict(spec.config), **config}.items())))
        self.spec = spec
        self.tile = backward_tile(machine_of(self.arch), config.get("group_m"))
        self.case, self.device, self.direct = case, case.x.device, direct
        self.lengths = list(tokens_per_rank or case.tokens_per_rank(ep_size))
        self.minibatch, self.macrobatch = minibatch, macrobatch
        self.grid, self.num_comm_ctas, self.ep_size = grid, num_comm_ctas, ep_size
        self.grad_mode, self.into = grad_mode, into
        self.num_experts, self.intermediate, self.hidden = case.routed.gate.shape
        self.shared_i = case.shared.gate.shape[1] if case.shared else 0
        self.topk = case.top_experts.shape[1]
        self.limit = float("inf") if case.swiglu_limit is None else case.swiglu_limit
        self.ids = case.top_experts.split(self.lengths)
        self.schedules = schedule_reference(self.ids, self.num_experts, ep_size, self.tile.m)
        self.gate = 0
        self.record = torch.zeros(64, dtype=torch.int32, device=self.device)
        self.make_heap(dy)

    def full(self, *size: int, dtype: torch.dtype = BF16, value: float = torch.nan) -> Tensor:
        """A buffer with room for one element at least.

        Zeros are zeros; another value is none yet: an emulator reports a read of it before a kernel's write.
        """
        buffer = torch.full([max(n, 1) for n in size], value, dtype=dtype, device=self.device)
        if value != 0:
            declare_fresh(buffer)
        return buffer

    def words(self, *size: int, value: int = 0) -> Tensor:
        return self.full(*size, dtype=torch.int32, value=value)

    def rows(self, rows: int, columns: int, along: bool = False) -> tuple[Tensor, Tensor | int]:
        """A buffer that MXFP8 quantises, ``along`` the rows: BF16, or E4M3 with the bytes of its scales.

        Both full of NaN.
        """
        if not self.scaled:
            return self.full(rows, columns), 0
        size = (columns, rows) if along else (rows, columns)
        scales = self.full(rows * columns // 32, dtype=torch.uint8, value=0xFF)
        return self.full(*size, dtype=torch.uint8, value=0x7F), scales

    def make_heap(self, dy: Tensor) -> None:
        """The symmetric heap: per rank x, dy, w, combine slots, dx slots and dw slots."""
        most = max(1, *self.lengths)
        sizes = {
            "x": (BF16, (most, self.hidden)),
            "dy": (BF16, (most, self.hidden)),
            "w": (FP32, (most, self.topk)),
            "slots": (BF16, (most * self.topk, self.hidden)),
            "dx": (BF16, (most * self.topk, self.hidden)),
            "dw": (FP32, (most * self.topk,)),
        }
        offsets, end = {}, 0
        for name, (dtype, size) in sizes.items():
            offsets[name] = end
            end += -(-torch.Size(size).numel() * dtype.itemsize // 256) * 256
        self.stride = end
        self.heap = torch.full((self.ep_size, end), 0xFF, dtype=torch.uint8, device=self.device)
        self.at = {name: self.heap.data_ptr() + offset for name, offset in offsets.items()}
        self.views = {}
        for name, (dtype, size) in sizes.items():
            length = torch.Size(size).numel() * dtype.itemsize
            bytes_ = self.heap[:, offsets[name] :][:, :length]
            self.views[name] = [bytes_[r].view(dtype).view(size) for r in range(self.ep_size)]
        weights = self.case.router_weights.split(self.lengths)
        for r, (x, d) in enumerate(
            zip(self.case.x.split(self.lengths), dy.split(self.lengths), strict=True)
        ):
            for name, value in (("x", x), ("dy", d), ("w", weights[r])):
                self.views[name][r][: len(value)] = value

    def run(self) -> Gradients:
        """Forward on every rank, then backward on every rank, then the sums."""
        self.launch()
        return self.sums()

    def launch(self) -> None:
        """Forward and backward kernels of every rank. An emulator is told of the memory they may use."""
        emulator = active_emulator()
        if emulator is not None:
            emulator.register(self.heap, self.record)
            declare_fresh(*(v for name in ("slots", "dx", "dw") for v in self.views[name]))
        self.ranks = [_Rank(self, r) for r in range(self.ep_size)]
        for rank in self.ranks:
            rank.forward()
        for rank in self.ranks:
            rank.backward()

    def sums(self) -> Gradients:
        """What the kernels after backward make of it."""
        done = [rank.finish() for rank in self.ranks]
        assert not self.record.any(), self.record.tolist()

        def together(experts: Sequence[Experts]) -> Experts:
            return Experts(
                *(torch.cat([getattr(e, n) for e in experts]) for n in ("gate", "up", "down"))
            )

        return Gradients(
            x=torch.cat([g.x for g in done]),
            router_weights=torch.cat([g.router_weights for g in done]),
            routed=together([g.routed for g in done]),
            shared=together([g.shared for g in done]) if self.case.shared else None,
            shared_scale=torch.cat([g.shared_scale for g in done])
            if self.case.shared_scale is not None
            else None,
        )


class _Rank:
    """One rank's buffers and launches."""

    def __init__(self, run: BackwardRun, rank: int):
        self.run, self.rank = run, rank
        self.tile = run.tile.m
        self.schedule: RankSchedule = run.schedules[rank]
        self.tokens = run.lengths[rank]
        placement = Shape(0, 64, 64, run.num_experts, run.topk, run.ep_size).experts_on(rank)
        self.local = slice(placement.start, placement.stop)
        self.experts = len(placement)
        routed = run.case.routed[self.local]
        shared = run.case.shared
        hidden, inner, shared_i = run.hidden, run.intermediate, max(run.shared_i, 64)
        rows = self.schedule.num_tokens
        self.rows = max(rows, self.tile) if run.direct else run.macrobatch
        self.minibatches, self.entries, self.groups = plan_room(
            max(rows, self.tile), self.experts, run.minibatch, run.macrobatch
        )
        start = sum(run.lengths[:rank])
        mine = slice(start, start + self.tokens)

        def some(tensor: Tensor) -> Tensor:
            return tensor if tensor.numel() else run.full(1, dtype=tensor.dtype, value=0)

        parts = (routed.gate, routed.up, routed.down)
        shared_parts = (shared.gate, shared.up, shared.down) if shared else [run.full(64)] * 3
        self.weights = {
            f"{kind}_{name}": some(tensor.contiguous())
            for kind, tensors in (("routed", parts), ("shared", shared_parts))
            for name, tensor in zip(("gate", "up", "down"), tensors, strict=True)
        }
        self.weights_t = {"routed_gate_t": 0, "routed_up_t": 0}
        self.backward_weights = self.weights
        if run.scaled:
            self.quantise_weights()
        elif run.mxfp8 and self.experts:
            plain = self.weights
            along = {n: through_mxfp8(plain[n]) for n in plain if n.startswith("routed")}
            across = {n: through_mxfp8_along(plain[n], 1).contiguous() for n in along}
            self.weights = plain | along
            self.backward_weights = self.weights | {"routed_down": across["routed_down"]}
            self.weights_t = {f"{n}_t": across[n] for n in ("routed_gate", "routed_up")}
        scale = run.case.shared_scale
        self.scale = None if scale is None else scale[mine].contiguous()
        if self.scale is not None and not self.tokens:
            self.scale = run.full(1, dtype=FP32)
        self.router_weights = some(run.case.router_weights[mine].contiguous())
        padded = (self.schedule.tokens_per_expert + self.tile - 1) // self.tile * self.tile
        self.expert_offset = torch.cat([padded.new_zeros(1), padded.cumsum(0).int()])
        self.num_rows = self.expert_offset[-1:].clone()
        self.rows_of = {
            "peer_rank": some(self.schedule.peer_rank),
            "peer_token_idx": some(self.schedule.peer_token_idx),
            "block_expert": some(self.schedule.block_expert),
            "num_rows": self.num_rows,
            "expert_offset": self.expert_offset,
        }
        ring, tokens = run.macrobatch, self.tokens
        self.saved = {
            "saved_gate": run.full(ring, inner),
            "saved_up": run.full(ring, inner),
            "saved_shared_gate": run.full(tokens, shared_i),
            "saved_shared_up": run.full(tokens, shared_i),
        }
        self.saved_x, self.saved_x_scales = run.rows(ring, hidden)
        self.dx = run.full(self.rows, hidden)
        self.dw_partial = run.full(self.rows, inner // 64, dtype=FP32)
        self.shared_dx = run.full(tokens, hidden)
        self.shared_dw_partial = run.full(tokens, shared_i // 64, dtype=FP32)
        self.outputs = self.make_outputs()
        self.keep: list = []

    def quantise_weights(self) -> None:
        """E4M3 with scales in tiles: of forward's orientation, and of backward's, which is transposed."""
        plain = self.weights

        def quantised(name: str, across: bool) -> tuple[Tensor, Tensor]:
            weight = plain[f"routed_{name}"]
            if weight.dim() < 3:  # no experts here
                return weight.to(torch.uint8), weight.to(torch.uint8)
            found = quantise(weight.transpose(1, 2).contiguous() if across else weight)
            return found.data, tile_scales(found.scales)

        weights, more = dict(plain), {}
        for name in ("gate", "up", "down"):
            weights[f"routed_{name}"], scales = quantised(name, False)
            weights[f"{name}_scales"] = scales
        self.weights = weights
        self.backward_weights = {n: t for n, t in weights.items() if not n.endswith("_scales")}
        for name in ("gate", "up"):
            more[f"routed_{name}_scales"] = weights[f"{name}_scales"]
            more[f"routed_{name}_t"], more[f"routed_{name}_t_scales"] = quantised(name, True)
        down, more["routed_down_scales"] = quantised("down", True)
        self.backward_weights["routed_down"] = down
        self.weights_t = more

    def make_outputs(self) -> dict[str, Tensor]:
        """Weight gradients: NaN, or what they are added to."""
        run = self.run
        dtype = FP32 if run.grad_mode.startswith("fp32") else BF16
        sizes = {"gate": (run.intermediate, run.hidden), "up": (run.intermediate, run.hidden)}
        sizes["down"] = (run.hidden, run.intermediate)
        outputs = {f"dw_{n}": run.full(self.experts, *s, dtype=dtype) for n, s in sizes.items()}
        shared_i = max(run.shared_i, 64)
        for name, size in (
            ("gate", (shared_i, run.hidden)),
            ("up", (shared_i, run.hidden)),
            ("down", (run.hidden, shared_i)),
        ):
            outputs[f"shared_dw_{name}"] = run.full(*size, dtype=dtype)
        if run.into is not None:
            for name in ("gate", "up", "down"):
                outputs[f"dw_{name}"][: self.experts] = getattr(run.into.routed, name)[self.local]
                if run.into.shared is not None:
                    outputs[f"shared_dw_{name}"][:] = getattr(run.into.shared, name)[self.rank]
            emulator = active_emulator()
            if emulator is not None:
                emulator.register(*outputs.values(), written=True)
        return outputs

    def sizes(self) -> dict[str, int]:
        run = self.run
        return {
            "tokens": self.tokens,
            "intermediate": run.intermediate,
            "shared_intermediate": run.shared_i,
            "experts": self.experts,
            "minibatch": run.minibatch,
            "macrobatch": run.macrobatch,
        }

    def launch_sizes(self) -> dict[str, int | float]:
        run = self.run
        return {
            "topk": run.topk,
            "max_minibatches": self.minibatches,
            "max_blocks": max(self.schedule.num_tokens // self.tile, 1),
            "num_comm_ctas": run.num_comm_ctas,
            "grid": run.grid,
            "rank": self.rank,
            "rank_stride": run.stride,
            "record": run.record,
            "gate": run.gate,
            "timeout_ns": TIMEOUT_NS,
            "swiglu_limit": run.limit,
        }

    def forward(self) -> None:
        """The forward kernel with ``save_context``."""
        run = self.run
        layout = program.counter_layout(
            self.minibatches,
            max(self.schedule.num_tokens // self.tile, 1),
            -(-self.tokens // self.tile),
        )
        shared_i = max(run.shared_i, 64)
        self.y = run.full(self.rows, run.hidden)
        hidden, hidden_scales = run.rows(run.macrobatch, run.intermediate)
        scales = {"x_scales": self.saved_x_scales, "hidden_scales": hidden_scales}
        self.keep.append((hidden, hidden_scales))
        call(
            kernels.forward_spec(
                run.arch,
                run.direct,
                save_context=True,
                mxfp8=run.mxfp8,
                limited=run.limited,
                pair=False,
            ),
            run.device,
            x=run.views["x"][self.rank],
            x_ring=self.saved_x,
            hidden=hidden,
            y=self.y,
            shared_hidden=self.kept(run.full(self.tokens, shared_i)),
            shared_y=self.kept(run.full(self.tokens, run.hidden)),
            x_heap=run.at["x"],
            slots_heap=run.at["slots"],
            counters=self.kept(run.words(layout.size)),
            hidden_size=run.hidden,
            y_rows=self.rows,
            **scales,
            **self.weights,
            **self.rows_of,
            **self.saved,
            **self.sizes(),
            **self.launch_sizes(),
        )

    def plan(self) -> dict[str, Tensor]:
        """The plan's device arrays."""
        run = self.run
        arrays = {
            "tables": run.words(TABLES, self.entries, value=-1),
            "groups": run.words(self.groups, GROUP_WORDS, value=-1),
            "counts": run.words(2, value=-1),
        }
        call(
            kernels.plan_spec(run.arch),
            run.device,
            num_rows=self.num_rows,
            expert_offset=self.expert_offset,
            block_expert=self.rows_of["block_expert"],
            table_stride=self.entries,
            hidden=run.hidden,
            ahead=0 if run.direct or run.mxfp8 else AHEAD,
            **arrays,
            **self.sizes(),
        )
        return arrays

    def backward(self) -> None:
        """Plan and backward kernel."""
        run, tokens = self.run, self.tokens
        ring, hidden, inner = run.macrobatch, run.hidden, run.intermediate
        shared_i = max(run.shared_i, 64)
        count = Backward(
            0, tokens, hidden, inner, run.shared_i, self.experts, run.minibatch, ring, run.tile
        )
        layout = operands.counter_layout(
            self.minibatches,
            max(self.schedule.num_tokens // self.tile, 1),
            max(self.groups, 1),
            -(-tokens // self.tile),
        )
        rings = {"replay_x": hidden, "dy_ring": hidden}
        rings |= dict.fromkeys(("d_gate", "d_up"), inner)
        along = {"x_tokens": hidden, "dy_tokens": hidden, "d_gate_tokens": inner}
        along["d_up_tokens"] = inner
        scratch = {name: run.full(ring, inner) for name in ("replay_gate", "replay_up")}
        scratch |= {name: 0 for name in along}
        scratch["saved_x_scales"] = self.saved_x_scales
        for name, columns in (rings | {"weighted": inner} | (along if run.mxfp8 else {})).items():
            of = {"dy_ring": "dy"}.get(name, name)
            scratch[name], scratch[f"{of}_scales"] = run.rows(ring, columns, name not in rings)
        for name in ("shared_d_gate", "shared_d_up", "shared_weighted"):
            scratch[name] = run.full(tokens, shared_i)
        scratch["row_weight"] = run.full(ring, dtype=FP32)
        scratch["accumulators"] = run.full(2, count.group_tasks, self.tile * 256, dtype=FP32)
        scratch["counters"] = run.words(layout.size)
        scratch |= self.plan()
        self.keep.append(scratch)
        heap = {"x_heap": "x", "dy_heap": "dy", "weight_heap": "w", "dx_heap": "dx"}
        call(
            run.spec,
            run.device,
            x=run.views["x"][self.rank],
            dy=run.views["dy"][self.rank],
            router_weights=self.router_weights,
            shared_scale=0 if self.scale is None else self.scale,
            saved_x=self.saved_x,
            dx=self.dx,
            dw_partial=self.dw_partial,
            shared_dw_partial=self.shared_dw_partial,
            shared_dx=self.shared_dx,
            **{name: run.at[part] for name, part in (heap | {"dw_heap": "dw"}).items()},
            dx_rows=self.rows,
            hidden=hidden,
            max_groups=max(self.groups, 1),
            table_stride=self.entries,
            **scratch,
            **self.backward_weights,
            **self.weights_t,
            **self.rows_of,
            **self.saved,
            **self.outputs,
            **self.sizes(),
            **self.launch_sizes(),
        )

    def finish(self) -> Gradients:
        """The token sum and the router gradients."""
        run, tokens, topk = self.run, self.tokens, self.run.topk
        ids = run.ids[self.rank]
        of_route = {"route_row": self.schedule.route_row} if run.direct else {"top_experts": ids}
        d_x = run_token_sum(
            self.dx if run.direct else run.views["dx"][self.rank],
            None,
            topk=topk,
            num_experts=run.num_experts,
            y_shared=self.shared_dx if run.case.shared else None,
            arch=run.arch,
            **of_route,
        )
        (slots,) = of_route.values()
        d_w = self.router_grad(
            self.dw_partial if run.direct else run.views["dw"][self.rank], slots, tokens * topk
        )
        shared = None
        if run.case.shared:
            shared = Experts(
                *(self.outputs[f"shared_dw_{n}"].unsqueeze(0) for n in ("gate", "up", "down"))
            )
        d_scale = None
        if self.scale is not None:
            d_scale = self.router_grad(self.shared_dw_partial, None, tokens)
        return Gradients(
            x=d_x,
            router_weights=d_w.view(tokens, topk),
            routed=Experts(
                *(self.outputs[f"dw_{n}"][: self.experts] for n in ("gate", "up", "down"))
            ),
            shared=shared,
            shared_scale=d_scale,
        )

    def router_grad(self, source: Tensor, slots: Tensor | None, count: int) -> Tensor:
        run = self.run
        has_index = source.ndim == 2
        out = torch.full((count,), torch.nan, device=run.device)
        config = {"has_index": has_index}
        if not has_index:
            config["ids_bits"] = slots.element_size() * 8
        if count:
            launch(
                kernel("router_grad", run.arch, **config),
                out.data_ptr(),
                source.data_ptr(),
                address(slots),
                count,
                source.shape[-1] if has_index else 0,
                run.num_experts,
                router_grad_ctas(count, has_index, 4),
                stream_of(run.device),
            )
        return out

    def kept(self, tensor: Tensor) -> Tensor:
        """A buffer that must live until the launch is done."""
        self.keep.append(tensor)
        return tensor
