"""Run the forward kernel on virtual ranks: on a GPU, or in the emulator on CPU tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mok.config import Shape
from mok.kernels_cute.machine import check_launch, machine_of
from mok.kernels_cute.program import counter_layout
from mok.reference import (
    Case,
    forward_loop,
    quantise,
    schedule_reference,
    through_mxfp8,
    tile_scales,
    token_sum,
)
from mok.runtime.compile import Kernel, KernelSpec, get_kernel
from mok.runtime.launch import launch
from tests.helpers import stream_of

FACTORY = "mok.kernels_cute.forward:ForwardKernel"
SCHEDULE = ("peer_rank", "peer_token_idx", "block_expert", "num_rows", "expert_offset")
# Buffers that the kernel writes before it reads them.
FRESH = (
    "x_ring",
    "hidden",
    "y",
    "shared_hidden",
    "shared_y",
    "gate",
    "up",
    "shared_gate",
    "shared_up",
)
TIMEOUT_NS = 30_000_000_000


def forward_kernel(arch: str, **config) -> Kernel:
    """The compiled kernel of a configuration."""
    return get_kernel(KernelSpec("forward", arch, FACTORY, tuple({"arch": arch, **config}.items())))


@contextlib.contextmanager
def emulated(arch: str, num_sms: int, seed: int | None = None, **options) -> Iterator:
    """An emulated GPU; kernels launched inside run on CPU tensors."""
    from mok.tools.emulator import Emulator

    with Emulator(arch, num_sms=num_sms, seed=seed, **options) as emulator:
        yield emulator


class ForwardRun:
    """One layer call on ``ep_size`` virtual ranks that share a device.

    Args:
        case: inputs of all ranks.
        tokens_per_rank: how the tokens are split; evenly by default.
        minibatch, macrobatch: rows.
        grid, num_comm_ctas: CTAs. num_sms: of the device.
        mxfp8: routed experts in MXFP8. config: of ``ForwardKernel``.
    """

    def __init__(
        self,
        case: Case,
        arch: str,
        ep_size: int = 1,
        *,
        tokens_per_rank: Sequence[int] | None = None,
        minibatch: int,
        macrobatch: int,
        grid: int,
        num_comm_ctas: int = 0,
        num_sms: int = 8,
        device: torch.device | str = "cpu",
        mxfp8: bool = False,
        wire: bool = False,
        **config,
    ):
        self.case, self.arch, self.device = case, arch, torch.device(device)
        self.direct = ep_size == 1 and num_comm_ctas == 0
        self.mxfp8 = mxfp8
        self.scaled = mxfp8 and arch != "sm_90a"  # the MMA takes E4M3 and scales
        self.wire = wire
        config["mxfp8"] = mxfp8
        if wire:
            config["wire"] = True
        self.lengths = list(tokens_per_rank or case.tokens_per_rank(ep_size))
        self.minibatch, self.macrobatch = minibatch, macrobatch
        self.grid, self.num_comm_ctas, self.ep_size = grid, num_comm_ctas, ep_size
        self.tile = machine_of(arch).tile_m
        pair = config.get("pair", False)
        check_launch(arch, grid, num_comm_ctas, num_sms, minibatch, macrobatch, pair)
        self.kernel = forward_kernel(arch, direct=self.direct, **config)
        self.ids = case.top_experts.split(self.lengths)
        num_experts = case.routed.gate.shape[0]
        self.schedules = schedule_reference(self.ids, num_experts, ep_size, self.tile)
        self.placement = Shape(0, 64, 64, num_experts, self.ids[0].shape[1], ep_size)
        hidden = case.x.shape[1]
        topk, longest = case.top_experts.shape[1], max(max(self.lengths), 1)
        # One allocation as the symmetric heap: per rank its tokens, then its slots.
        self.slots_at = longest * hidden
        self.stride = self.slots_at + longest * topk * hidden
        self.heap = torch.full(
            (ep_size * self.stride,), torch.nan, dtype=torch.bfloat16, device=device
        )
        self.x_of: list[Tensor] = []
        for r, x in enumerate(case.x.split(self.lengths)):
            part = self.heap[r * self.stride :]
            if not wire:
                part[: x.numel()] = x.reshape(-1)
            elif x.numel():
                # E4M3 in the first half of the place of x, its plain scales behind them.
                q = quantise(x)
                part[: x.numel() // 2] = q.data.view(torch.bfloat16).reshape(-1)
                scales = q.scales.view(torch.uint8).reshape(-1).view(torch.bfloat16)
                part[self.slots_at // 2 :][: len(scales)] = scales
            self.x_of.append(x)
        self.record = torch.zeros(16, dtype=torch.int32, device=device)
        self.gate = 0
        self.saved: list[dict[str, Tensor]] = []

    def tensors(self) -> list[Tensor]:
        """Memory that the kernels may touch, as far as it exists before the launch."""
        return [self.heap, self.record]

    def empty(self, *size: int) -> Tensor:
        size = tuple(max(n, 1) for n in size)
        return torch.full(size, torch.nan, dtype=torch.bfloat16, device=self.device)

    def launch(self, rank: int, register=None) -> None:
        """Launch one rank's kernel."""
        case, schedule = self.case, self.schedules[rank]
        hidden, (_, intermediate, _) = case.x.shape[1], case.routed.gate.shape
        shared_i = case.shared.gate.shape[1] if case.shared else 0
        local = self.placement.experts_on(rank)
        experts = case.routed[local.start : local.stop]
        tokens, topk = self.ids[rank].shape
        rows = schedule.num_tokens
        blocks = max(rows // self.tile, 1)
        minibatches = -(-rows // self.minibatch) + 1
        layout = counter_layout(minibatches, blocks, -(-tokens // self.tile))
        padded = (schedule.tokens_per_expert + self.tile - 1) // self.tile * self.tile
        words = lambda size: torch.zeros(max(size, 1), dtype=torch.int32, device=self.device)  # noqa: E731
        x = self.empty(tokens, hidden)
        x[:tokens] = self.x_of[rank]
        b = {
            "x_ring": self.empty(self.macrobatch, hidden),
            "hidden": self.empty(self.macrobatch, intermediate),
            "y": self.empty(rows if self.direct else self.macrobatch, hidden),
            "shared_hidden": self.empty(tokens, shared_i or 64),
            "shared_y": self.empty(tokens, hidden),
            "gate": self.empty(self.macrobatch, intermediate),
            "up": self.empty(self.macrobatch, intermediate),
            "shared_gate": self.empty(tokens, shared_i or 64),
            "shared_up": self.empty(tokens, shared_i or 64),
            "peer_rank": schedule.peer_rank.to(self.device),
            "peer_token_idx": schedule.peer_token_idx.to(self.device),
            "block_expert": schedule.block_expert.to(self.device),
            "num_rows": torch.tensor([rows], dtype=torch.int32, device=self.device),
            "expert_offset": torch.cat([padded.new_zeros(1), padded.cumsum(0).int()]).to(
                self.device
            ),
            "counters": words(layout.size),
        }
        for name in ("peer_rank", "peer_token_idx", "block_expert"):
            if not b[name].numel():
                b[name] = words(1)
        self.saved.append(b)
        weights = [
            t if t.numel() else self.empty(1, 128, 128)
            for t in (experts.gate, experts.up, experts.down)
        ]
        scales = [words(1) for _ in range(5)]
        if self.scaled:
            parts = [quantise(w) for w in weights]
            weights = [q.data for q in parts]
            scales[:3] = [tile_scales(q.scales) for q in parts]
            scales[3:] = [
                torch.full(
                    (self.macrobatch * n // 32,), 0xFF, dtype=torch.uint8, device=self.device
                )
                for n in (hidden, intermediate)
            ]
            for name, n in (("x_ring", hidden), ("hidden", intermediate)):
                b[name] = torch.full(
                    (self.macrobatch, n), 0x7F, dtype=torch.uint8, device=self.device
                )
        elif self.mxfp8:
            weights = [through_mxfp8(w) for w in weights]
        self.keep = (weights, scales)
        shared = (
            [case.shared.gate, case.shared.up, case.shared.down]
            if case.shared
            else [self.empty(64) for _ in range(3)]
        )
        if register is not None:
            register(x, *b.values(), *weights, *scales, *shared, *self.tensors())
            register(*(b[name] for name in FRESH), *scales[3:], written=False)
        launch(
            self.kernel,
            x.data_ptr(),
            *(t.data_ptr() for t in (*weights, *shared)),
            *(b[n].data_ptr() for n in SCHEDULE),
            *(b[n].data_ptr() for n in ("x_ring", "hidden", "y", "shared_hidden", "shared_y")),
            *(b[n].data_ptr() for n in ("gate", "up", "shared_gate", "shared_up")),
            *(t.data_ptr() for t in scales),
            self.heap.data_ptr(),
            self.heap.data_ptr() + self.slots_at,  # half of x's place: see the constructor
            self.heap.data_ptr() + 2 * self.slots_at,
            2 * self.stride,
            b["counters"].data_ptr(),
            self.record.data_ptr(),
            self.gate,
            TIMEOUT_NS,
            tokens,
            hidden,
            intermediate,
            shared_i,
            len(local),
            topk,
            self.minibatch,
            self.macrobatch,
            len(b["y"]),
            minibatches,
            blocks,
            self.num_comm_ctas,
            self.grid,
            rank,
            case.swiglu_limit if case.swiglu_limit is not None else float("inf"),
            stream_of(self.device),
        )

    def run(self, register=None) -> Tensor:
        """Launch every rank in turn; bf16 [N, H], the ranks' outputs one after the other."""
        self.saved = []
        if register is not None and not self.wire:
            slots = (self.heap[r * self.stride :][: self.stride] for r in range(self.ep_size))
            register(*(s[self.slots_at :] for s in slots), written=False)
        for rank in range(self.ep_size):
            self.launch(rank, register)
        return torch.cat([self.output(rank) for rank in range(self.ep_size)])

    def output(self, rank: int) -> Tensor:
        """The token sum over a rank's slots."""
        tokens, topk = self.ids[rank].shape
        hidden = self.case.x.shape[1]
        if self.direct:
            rows = self.schedules[rank].route_row
            assert rows is not None
            slots = self.saved[rank]["y"][rows.to(self.device).clamp(min=0).long()]
        else:
            slots = self.heap[rank * self.stride + self.slots_at :][: tokens * topk * hidden]
            slots = slots.view(tokens * topk, hidden)
        weights = self.case.router_weights.split(self.lengths)[rank]
        y_shared = self.saved[rank]["shared_y"][:tokens] if self.case.shared else None
        return token_sum(slots, weights, self.ids[rank], y_shared)


def exact_on_hopper(case: Case, ep_size: int, seed: int | None, **config) -> None:
    """An integer case in the emulator gives the loop's bits; with a seed, all checkers are silent."""
    grid, comm = (4, 0) if ep_size == 1 else (6, 2)
    with emulated("sm_90a", 6, seed) as emulator:
        emulator.check = seed is not None
        layer = ForwardRun(case, "sm_90a", ep_size, grid=grid, num_comm_ctas=comm, **config)
        output = layer.run(emulator.register if emulator.check else None)
    assert not emulator.report.findings, "\n".join(map(str, emulator.report.findings))
    assert torch.equal(output, forward_loop(case).to(torch.bfloat16))
