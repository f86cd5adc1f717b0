"""The layer on several GPUs of a host, one process per GPU: same bits as one rank, and how fast.

    torchrun --nproc-per-node 2 -m mok bench --out FOLDER

Programs take turns in rounds; a window warms up, then runs back to back, and counts as its slowest
rank. Beside ours: the same rows with all experts on the rank itself (what communication adds), and
all-to-all over NCCL with ``torch._grouped_mm``. FLOP rule 6·T·K·H·I per rank forward, twice that backward.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mok import functional
from mok.config import Config, Shape
from mok.reference import Case, integer_case, random_case
from mok.runtime.group import Group
from mok.tools.bench.sweep import config_with
from mok.tools.bench.timing import Regime

Call = Callable[[], Any]
PROGRAMS = ("mok", "mok-local", "nccl-torch")
PASSES = ("forward", "backward")
REGIME = Regime()


def shapes(size: int) -> dict[str, tuple[int, ...]]:
    """(T per rank, H, I, E, K) by name, for ``size`` ranks."""
    return {
        "Qwen3-30B": (8192, 2048, 768, 128, 8),
        "Mixtral": (8192, 4096, 14336, 8, 2),
        "DeepSeek-V3, 32 experts a rank": (8192, 7168, 2048, 32 * size, 8),
    }


class Rank:
    """This process: its group, device and share of a problem."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", self.rank)))
        torch.cuda.set_device(self.device)
        dist.init_process_group("gloo")
        self.group = Group.from_process_group(dist.group.WORLD, self.device)
        self.nccl = dist.new_group(backend="nccl")

    def close(self) -> None:
        dist.barrier()
        self.group.close()
        dist.destroy_process_group()

    def workspace(self, config: Config, group: Group, shape: Shape, max_tokens: int) -> Any:
        return functional.create_workspace(
            config,
            group,
            device=self.device,
            max_tokens=max_tokens,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_experts=shape.num_experts,
            topk=shape.topk,
            shared_intermediate_size=shape.shared_intermediate_size,
        )

    def share(self, case: Case, idle: bool = False) -> tuple[Shape, slice, range]:
        """(shape of the group's call, this rank's tokens, its experts); ``idle``: the last has no token."""
        lengths = case.tokens_per_rank(self.size)
        if idle:
            lengths = [*case.tokens_per_rank(self.size - 1), 0]
        shape = dataclasses.replace(case.shape, ep_size=self.size, num_tokens=max(lengths))
        start = sum(lengths[: self.rank])
        return shape, slice(start, start + lengths[self.rank]), shape.experts_on(self.rank)

    def maximum(self, value: float) -> float:
        """The largest of all ranks' values."""
        seen = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        return float(seen.item())


def arguments(case: Case, tokens: slice, experts: range) -> tuple[Any, ...]:
    """Forward's arguments from x on."""
    shared = case.shared
    routed = case.routed[experts.start : experts.stop]
    return (
        case.x[tokens].contiguous(),
        case.router_weights[tokens].contiguous(),
        *((shared.gate[0], shared.up[0], shared.down[0]) if shared else (None, None, None)),
        routed.gate,
        routed.up,
        routed.down,
    )


# ------------------------------------------------------------------ bits


def same_bits(rank: Rank, case: Case) -> dict[str, bool]:
    """Whether outputs and gradients of the group's call have the bits of EP = 1."""
    shape, tokens, experts = rank.share(case)
    noise = torch.randn(case.x.shape, generator=torch.Generator().manual_seed(5))
    dy = noise.bfloat16().to(rank.device)

    def run(group: Group, sizes: Shape, part: slice, held: range) -> tuple[Tensor, ...]:
        config = Config.suggest(sizes, rank.device)
        with rank.workspace(config, group, sizes, sizes.num_tokens) as w:
            values = arguments(case, part, held)
            schedule = functional.build_schedule(w, config, case.top_experts[part].contiguous())
            output, context = functional.forward(config, w, schedule, *values)
            assert context is not None
            grads = functional.backward(
                config, w, schedule, context, dy[part].contiguous(), *values
            )
            torch.cuda.synchronize()
            w.check()
        return output, *grads[:5]

    everything = slice(0, len(case.x))
    group_result = run(rank.group, shape, tokens, experts)
    alone = run(Group.single(rank.device), case.shape, everything, range(case.shape.num_experts))
    held = slice(experts.start, experts.stop)
    names = ("output", "d_x", "d_router_weights", "d_gate", "d_up", "d_down")
    parts = (tokens, tokens, tokens, held, held, held)
    return {
        name: bool(torch.equal(a, b[part]))
        for name, part, a, b in zip(names, parts, group_result, alone, strict=True)
    }


# ------------------------------------------------------------------ programs


@contextmanager
def ours(
    rank: Rank, group: Group, case: Case, tokens: slice, experts: range, sizes: Shape, changes: Any
) -> Iterator[tuple[Call, Call, Config]]:
    """(forward, backward, config) of a share of ``case`` in ``group``; schedule included in forward."""
    config = Config.suggest(sizes, rank.device)
    for tunable, value in changes.items():
        config = config_with(config, tunable, value)
    values = arguments(case, tokens, experts)
    ids = case.top_experts[tokens].contiguous()
    dy = torch.randn_like(values[0])
    with rank.workspace(config, group, sizes, sizes.num_tokens) as w:
        schedule = functional.build_schedule(w, config, ids)
        _, context = functional.forward(config, w, schedule, *values)
        assert context is not None

        def forward() -> None:
            now = functional.build_schedule(w, config, ids)
            functional.forward(config, w, now, *values, save_context=False)

        def backward() -> None:
            functional.backward(config, w, schedule, context, dy, *values, keep_context=True)

        yield forward, backward, config
        torch.cuda.synchronize()
        w.check()


def local_case(case: Case, experts: range) -> Case:
    """A rank's rows with every expert at home: the ids of all tokens folded onto its own experts."""
    ids = case.top_experts
    folded = torch.where(ids < 0, ids, ids % len(experts))
    return dataclasses.replace(
        case, top_experts=folded, routed=case.routed[experts.start : experts.stop]
    )


@contextmanager
def made(
    name: str, rank: Rank, case: Case, idle: bool, changes: dict[str, Any]
) -> Iterator[tuple[Call, Call, Config | None]]:
    """A program ready to be called."""
    shape, tokens, experts = rank.share(case, idle)
    if name == "mok":
        with ours(rank, rank.group, case, tokens, experts, shape, changes) as found:
            yield found
    elif name == "mok-local":
        alone = dataclasses.replace(shape, ep_size=1, num_experts=len(experts))
        group = Group.single(rank.device)
        local = local_case(case, experts)
        every = range(len(experts))
        with ours(rank, group, local, tokens, every, alone, {}) as found:
            yield found
    else:
        from mok.tools.bench.programs.nccl_torch import NcclTorch

        routed = case.routed[experts.start : experts.stop]
        layer = NcclTorch(routed.gate, routed.up, routed.down, case.shape.num_experts, rank.nccl)
        x = case.x[tokens].detach().requires_grad_()
        weights = case.router_weights[tokens].detach().requires_grad_()
        ids = case.top_experts[tokens].contiguous()
        dy = torch.randn_like(x)
        output = layer(x, weights, ids)

        def forward() -> None:
            with torch.no_grad():
                layer(x, weights, ids)

        def backward() -> None:
            leaves = (x, weights, layer.gate_up, layer.down)
            torch.autograd.grad(output, leaves, dy, retain_graph=True)

        yield forward, backward, None


def window(rank: Rank, call: Call, regime: Regime) -> float:
    """Milliseconds of a call in the steady regime: the slowest rank's mean."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    once = max(rank.maximum(begin.elapsed_time(end)), 1e-3)
    warm, run = (max(2, int(ms / once)) for ms in (regime.warm_ms, regime.run_ms))
    dist.barrier()
    for _ in range(warm):
        call()
    begin.record()
    for _ in range(run):
        call()
    end.record()
    torch.cuda.synchronize()
    return rank.maximum(begin.elapsed_time(end) / run)


def measure(
    rank: Rank,
    sizes: Sequence[int],
    programs: Sequence[str] = PROGRAMS,
    kind: str = "random",
    idle: bool = False,
    rounds: int = 2,
    regime: Regime = REGIME,
    **changes: int,
) -> list[dict[str, Any]]:
    """Rows of results of one shape, (T per rank, H, I, E, K); programs take turns.

    ``kind``: routing, as in ``mok.reference.routing``. ``idle``: the last rank has no token, the others
    share them. ``changes``: tunables of ours, instead of those suggested.
    """
    T, H, I, E, K = sizes
    case = random_case(Shape(T * rank.size, H, I, E, K), kind=kind, device=rank.device)
    flops = 6e-9 * T * K * H * I
    times: dict[tuple[str, str], list[float]] = {}
    configs: dict[str, Any] = {}
    for _ in range(rounds):
        for name in programs:
            with made(name, rank, case, idle, changes) as (forward, backward, config):
                configs[name] = config
                for pass_name, call in zip(PASSES, (forward, backward), strict=True):
                    ms = window(rank, call, regime)
                    times.setdefault((name, pass_name), []).append(ms)
            torch.cuda.empty_cache()
    rows = []
    for (name, pass_name), found in times.items():
        ms = statistics.median(found)
        rows.append(
            {
                "shape": list(sizes), "routing": kind, "idle_rank": idle, "program": name,
                "pass": pass_name, "ms": ms, "spread": (max(found) - min(found)) / ms,
                "tflops": flops * (1 if pass_name == "forward" else 2) / ms,
                "config": dataclasses.asdict(configs[name]) if configs[name] else None,
            }
        )  # fmt: skip
    return rows


def exposed(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Share of our time beyond that of the same rows at home, by pass."""
    ms = {(r["program"], r["pass"]): r["ms"] for r in rows}
    return {p: 1 - ms["mok-local", p] / ms["mok", p] for p in PASSES if ("mok-local", p) in ms}


def bits(rank: Rank) -> dict[str, dict[str, bool]]:
    """An integer layer with unequal token counts and a shared expert, and a random Qwen3 layer."""
    device = rank.device
    integer = integer_case(Shape(1001, 512, 320, 16, 4, 1, 192), device=device)
    random = random_case(Shape(*shapes(1)["Qwen3-30B"]), device=device)
    return {
        "integer (1001, 512, 320, 16, 4, shared 192)": same_bits(rank, integer),
        "random (8192, 2048, 768, 128, 8)": same_bits(rank, random),
    }
