"""The layer on several GPUs of a host, one process per GPU: same bits as one rank, and how fast.

    torchrun --nproc-per-node 2 -m mok.tools.bench.ranks --json result.json

Every rank makes the whole problem, runs its share in the group, and the whole on its own GPU at EP = 1:
outputs and gradients must have the same bits. Times are the maximum over ranks of the mean of back-to-back
calls, schedule included in forward; FLOP rule 6·T·K·H·I per rank forward, twice that backward.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mok import functional
from mok.config import Config, Shape
from mok.reference import Case, integer_case, random_case
from mok.runtime.group import Group

QWEN3 = (8192, 2048, 768, 128, 8)
MIXTRAL = (8192, 4096, 14336, 8, 2)


class Rank:
    """This process: its group, device and share of a problem."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", self.rank)))
        torch.cuda.set_device(self.device)
        dist.init_process_group("gloo")
        self.group = Group.from_process_group(dist.group.WORLD, self.device)

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

    def share(self, case: Case) -> tuple[Shape, slice, range]:
        """(shape of the group's call, this rank's tokens, its experts)."""
        lengths = case.tokens_per_rank(self.size)
        shape = dataclasses.replace(case.shape, ep_size=self.size, num_tokens=max(lengths))
        start = sum(lengths[: self.rank])
        return shape, slice(start, start + lengths[self.rank]), shape.experts_on(self.rank)

    def maximum(self, value: float) -> float:
        """The largest of all ranks' values."""
        seen = torch.tensor([value])
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


def measure(rank: Rank, sizes: tuple[int, ...], **tunables: int) -> dict[str, Any]:
    """Milliseconds and TFLOP/s per GPU of forward and backward at ``sizes`` = (T per rank, H, I, E, K)."""
    T, H, I, E, K = sizes
    case = random_case(Shape(T * rank.size, H, I, E, K), device=rank.device)
    shape, tokens, experts = rank.share(case)
    changes: dict[str, Any] = dict(tunables)
    config = dataclasses.replace(Config.suggest(shape, rank.device), **changes)
    values = arguments(case, tokens, experts)
    ids = case.top_experts[tokens].contiguous()
    dy = torch.randn_like(values[0])

    def mean_ms(call: Callable[[], Any], repeats: int = 20) -> float:
        for _ in range(8):
            call()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.cuda.synchronize()
        return rank.maximum(begin.elapsed_time(end) / repeats)

    with rank.workspace(config, rank.group, shape, shape.num_tokens) as w:
        schedule = functional.build_schedule(w, config, ids)
        _, context = functional.forward(config, w, schedule, *values)
        assert context is not None

        def forward() -> None:
            now = functional.build_schedule(w, config, ids)
            functional.forward(config, w, now, *values, save_context=False)

        forward_ms = mean_ms(forward)
        backward_ms = mean_ms(
            lambda: functional.backward(config, w, schedule, context, dy, *values)
        )
        w.check()
    flops = 6e-9 * T * K * H * I
    return {
        "shape": sizes,
        "config": dataclasses.asdict(config),
        "forward_ms": forward_ms,
        "forward_tflops": flops / forward_ms,
        "backward_ms": backward_ms,
        "backward_tflops": 2 * flops / backward_ms,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--comm-sms", default="12,16,20,24,32", help="to sweep on Qwen3-30B")
    options = parser.parse_args()
    rank = Rank()
    device = torch.device(rank.device)

    def say(*words: Any) -> None:
        if rank.rank == 0:
            print(*words, flush=True)

    say(f"{rank.size} x {torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    bits = {
        "integer (1001, 512, 320, 16, 4, shared 192)": same_bits(
            rank, integer_case(Shape(1001, 512, 320, 16, 4, 1, 192), device=device)
        ),
        "random (8192, 2048, 768, 128, 8)": same_bits(
            rank, random_case(Shape(*QWEN3), device=device)
        ),
    }
    ok = rank.maximum(float(not all(all(b.values()) for b in bits.values()))) == 0
    say("same bits as EP = 1:", ok, bits)
    rows = []
    sweep = [int(v) for v in options.comm_sms.split(",")]
    runs = [(QWEN3, dict(fwd_num_comm_sms=n, bwd_num_comm_sms=n)) for n in sweep]
    runs += [(MIXTRAL, dict(fwd_num_comm_sms=n, bwd_num_comm_sms=n)) for n in (6, 8)]
    for sizes, tunables in runs:
        row = measure(rank, sizes, **tunables)
        rows.append(row)
        say(
            f"{sizes} comm SMs {tunables['fwd_num_comm_sms']}:"
            f" forward {row['forward_ms']:.3f} ms {row['forward_tflops']:.0f} TFLOP/s/GPU,"
            f" backward {row['backward_ms']:.3f} ms {row['backward_tflops']:.0f}"
        )
    if options.json and rank.rank == 0:
        options.json.write_text(json.dumps({"ranks": rank.size, "bits": bits, "rows": rows}))
    dist.barrier()
    rank.group.close()
    dist.destroy_process_group()
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
