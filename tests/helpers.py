"""Run kernels in tests: the same code on a GPU and in the emulator."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mok.kernels_cute.schedule.plan import RECORD_WORDS, schedule_plan, stage_ctas
from mok.reference import RankSchedule
from mok.runtime.compile import Kernel, KernelSpec, get_kernel
from mok.runtime.launch import launch

KERNELS = {
    "backward": "mok.kernels_cute.backward.kernel:BackwardKernel",
    "forward": "mok.kernels_cute.forward:ForwardKernel",
    "plan": "mok.kernels_cute.backward.plan_kernel:PlanKernel",
    "quantise": "mok.kernels_cute.quantise:QuantiseKernel",
    "quantise_rows": "mok.kernels_cute.quantise_rows:QuantiseRowsKernel",
    "router_grad": "mok.kernels_cute.router_grad:RouterGradKernel",
    "schedule": "mok.kernels_cute.schedule.build:ScheduleKernel",
    "stage_ids": "mok.kernels_cute.schedule.stage:StageIdsKernel",
    "token_sum": "mok.kernels_cute.token_sum:TokenSumKernel",
}
POISON = -987654321  # what output memory holds before a kernel runs


def kernel(name: str, target: str, **config: Hashable) -> Kernel:
    """A compiled kernel of ``KERNELS`` for architecture ``target``."""
    return get_kernel(KernelSpec(name, target, KERNELS[name], tuple(sorted(config.items()))))


def opcodes(ptx: str) -> Counter[str]:
    """Count of each PTX instruction, those behind a predicate and in inline blocks included."""
    found = re.findall(r"^\s*(?:@!?%?\w+\s+)?([a-z][\w.:]*)(?=[\s;])", ptx, re.MULTILINE)
    return Counter(found)


def assert_only_targets_differ(texts: Sequence[str]) -> None:
    """PTX of one kernel for sm_100a and for sm_103a."""
    targets = [re.findall(r"(?m)^\.target\s+(\w+)", text) for text in texts]
    assert targets == [["sm_100a"], ["sm_103a"]]
    first, second = (re.sub(r"(?m)^\.target.*$", "", text) for text in texts)
    # Names of functions hold the architecture they are built for, too.
    assert first.replace("sm_100a", "") == second.replace("sm_103a", "")


def arch_of(device: torch.device | str) -> str:
    """The architecture to compile for; the emulator (CPU memory) takes Hopper's by default."""
    device = torch.device(device)
    if device.type == "cpu":
        return "sm_90a"
    return {9: "sm_90a", 10: "sm_100a"}[torch.cuda.get_device_capability(device)[0]]


def stream_of(device: torch.device | str) -> int:
    """Handle of torch's current stream; 0 in the emulator."""
    device = torch.device(device)
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


@dataclass(frozen=True)
class DeviceSchedule(RankSchedule):
    """A schedule that kernels made, cut to its rows and on the CPU.

    Attributes beyond RankSchedule's:
        expert_offset: int32 [El + 1], padded segment starts.
        error: int32 [8], the error record.
        tail_untouched: nothing past the rows was written.
    """

    expert_offset: Tensor
    error: Tensor
    tail_untouched: bool


def run_schedule(
    ids_per_rank: Sequence[Tensor],
    num_experts: int,
    ep_size: int,
    device: torch.device | str,
    *,
    arch: str | None = None,
    tile: int = 128,
    num_chunks: int | None = None,
    capacity: int | None = None,
    max_tokens: int | None = None,
    gate: Tensor | None = None,
) -> list[DeviceSchedule]:
    """Stage all ranks' ids and build every rank's schedule on one device (virtual ranks).

    Args:
        ids_per_rank: int64 or int32 [T_r, K] each.
        arch: what to compile for; by default the device's.
        num_chunks, capacity: instead of the plan's.
        max_tokens: for the plan and the heap; by default the largest T_r.
        gate: the word that stops the kernel where it is not 0.
    """
    device = torch.device(device)
    arch = arch or arch_of(device)
    stream = stream_of(device)
    topk = ids_per_rank[0].shape[1]
    longest = max(len(ids) for ids in ids_per_rank)
    max_tokens = longest if max_tokens is None else max_tokens
    stage = kernel("stage_ids", arch, ids_bits=ids_per_rank[0].element_size() * 8)
    build = kernel("schedule", arch)

    # One allocation as the symmetric heap: per rank the token count (padded to 16 bytes), the ids.
    rank_stride = (16 + max_tokens * topk * 4 + 255) // 256 * 256
    heap = torch.full((ep_size * rank_stride // 4,), POISON, dtype=torch.int32, device=device)
    base = heap.data_ptr()
    errors = torch.zeros(ep_size, RECORD_WORDS, dtype=torch.int32, device=device)
    staged = [ids.to(device).contiguous() for ids in ids_per_rank]
    for rank, ids in enumerate(staged):
        launch(
            stage,
            ids.data_ptr(),
            base + rank * rank_stride + 16,
            base + rank * rank_stride,
            errors[rank].data_ptr(),
            len(ids),
            topk,
            num_experts,
            rank,
            stage_ctas(ids.numel(), 4),
            stream,
        )

    def empty(count: int) -> Tensor:
        # At least one word, so that every address is valid.
        return torch.full((max(count, 1),), POISON, dtype=torch.int32, device=device)

    results = []
    for rank in range(ep_size):
        plan = schedule_plan(max_tokens, topk, num_experts, ep_size, rank, tile)
        rows = plan.capacity if capacity is None else capacity
        scratch = [
            empty(-(-size // 4))
            for size in (
                plan.counts_bytes if num_chunks is None else num_chunks * plan.num_local * 4,
                plan.totals_bytes,
                plan.local_bytes,
                plan.rank_starts_bytes,
            )
        ]
        peer_rank, peer_token_idx, num_rows = empty(rows), empty(rows), empty(1)
        tokens_per_expert, expert_offset = empty(plan.num_local), empty(plan.num_local + 1)
        block_expert = empty(rows // tile)
        route_row = empty(staged[0].numel()) if ep_size == 1 else None
        launch(
            build,
            base + 16,
            base,
            rank_stride,
            *(buffer.data_ptr() for buffer in scratch),
            peer_rank.data_ptr(),
            peer_token_idx.data_ptr(),
            num_rows.data_ptr(),
            tokens_per_expert.data_ptr(),
            expert_offset.data_ptr(),
            block_expert.data_ptr(),
            0 if route_row is None else route_row.data_ptr(),
            errors[rank].data_ptr(),
            address(gate),
            ep_size,
            num_experts,
            topk,
            rank,
            tile,
            rows,
            plan.num_chunks if num_chunks is None else num_chunks,
            stream,
        )
        total = int(num_rows)
        tails = (peer_rank[total:], peer_token_idx[total:], block_expert[total // tile :])
        results.append(
            DeviceSchedule(
                peer_rank=peer_rank[:total].cpu(),
                peer_token_idx=peer_token_idx[:total].cpu(),
                tokens_per_expert=tokens_per_expert[: plan.num_local].cpu(),
                num_tokens=total,
                block_expert=block_expert[: total // tile].cpu(),
                route_row=None if route_row is None else route_row[: staged[0].numel()].cpu(),
                expert_offset=expert_offset.cpu(),
                error=errors[rank].cpu(),
                tail_untouched=all(bool((tail == POISON).all()) for tail in tails),
            )
        )
    return results


def assert_same_schedule(got: DeviceSchedule, want: RankSchedule, tile: int) -> None:
    """Every array of the schedule is exactly the reference's, and nothing else was written."""
    assert got.num_tokens == want.num_tokens
    torch.testing.assert_close(got.tokens_per_expert, want.tokens_per_expert, rtol=0, atol=0)
    padded = (want.tokens_per_expert + tile - 1) // tile * tile
    starts = torch.cat([padded.new_zeros(1), padded.cumsum(0)]).int()
    torch.testing.assert_close(got.expert_offset, starts, rtol=0, atol=0)
    torch.testing.assert_close(got.peer_rank, want.peer_rank, rtol=0, atol=0)
    torch.testing.assert_close(got.peer_token_idx, want.peer_token_idx, rtol=0, atol=0)
    torch.testing.assert_close(got.block_expert, want.block_expert, rtol=0, atol=0)
    assert (got.route_row is None) == (want.route_row is None)
    if want.route_row is not None:
        torch.testing.assert_close(got.route_row, want.route_row, rtol=0, atol=0)
    assert got.tail_untouched


def run_token_sum(
    y: Tensor,
    router_weights: Tensor | None,
    *,
    num_experts: int,
    topk: int | None = None,
    top_experts: Tensor | None = None,
    route_row: Tensor | None = None,
    y_shared: Tensor | None = None,
    shared_scale: Tensor | None = None,
    arch: str | None = None,
    num_ctas: int | None = None,
    gate: Tensor | None = None,
    clear: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """out [T, H] from y [rows, H]; exactly one of ids [T, K] and route_row [T·K] is given.

    Without router weights (backward), ``topk`` says what K is.
    """
    from mok.kernels_cute.token_sum import token_sum_ctas

    slots = route_row if top_experts is None else top_experts
    assert slots is not None
    device, hidden = y.device, y.shape[-1]
    if router_weights is not None:
        topk = router_weights.shape[1]
    assert topk is not None
    num_tokens = slots.numel() // topk
    build = kernel(
        "token_sum",
        arch or arch_of(device),
        has_shared=y_shared is not None,
        has_index=route_row is not None,
        ids_bits=slots.element_size() * 8,
        has_weights=router_weights is not None,
        has_shared_scale=shared_scale is not None,
    )
    if out is None:
        out = torch.full((num_tokens, hidden), torch.nan, dtype=torch.bfloat16, device=device)
    if num_tokens:
        launch(
            build,
            out.data_ptr(),
            y.data_ptr(),
            address(router_weights),
            address(y_shared),
            address(shared_scale),
            slots.data_ptr(),
            address(gate),
            num_tokens,
            hidden,
            topk,
            num_experts,
            address(clear),
            clear.numel() if clear is not None else 0,
            token_sum_ctas(num_tokens, hidden, 4) if num_ctas is None else num_ctas,
            stream_of(device),
        )
    return out


def address(tensor: Tensor | None) -> int:
    """A tensor's address; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()
