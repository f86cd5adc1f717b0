"""The whole optimizer step of a few transformer blocks of a large model, with MoK's MoE layer and with torch's.

    python -m mok.tools.train_block --out results/       # four blocks of Qwen3-30B-A3B, on one GPU

Prints tokens/s, the MoE layers' share of the step, and two ratios side by side: that of the layer alone
(forward and backward) and that of the whole step. They differ since a step is also attention, norms and
optimizer. Programs take turns, so that clocks and temperature are shared. Nothing is checked here: the exit
code is 0 if everything ran.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from mok.errors import DeviceError
from mok.layer import MoELayer
from mok.models import MODELS


class GroupedMoELayer(MoELayer):
    """``MoELayer`` of one rank, without a shared expert, as the usual torch: sort, ``_grouped_mm``, index_add."""

    def _compute(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        x, topk = x.to(torch.bfloat16), self.spec.topk
        weights, ids = weights.reshape(-1, topk), ids.reshape(-1, topk)
        sorted_ids, order = ids.flatten().sort(stable=True)
        experts = torch.arange(self.spec.num_experts, device=x.device)
        ends = torch.searchsorted(sorted_ids, experts, right=True, out_int32=True)
        token = order // topk
        rows = x.index_select(0, token)
        gate = torch._grouped_mm(rows, self.routed_gate.transpose(1, 2), offs=ends)
        up = torch._grouped_mm(rows, self.routed_up.transpose(1, 2), offs=ends)
        y = torch._grouped_mm(silu(gate) * up, self.routed_down.transpose(1, 2), offs=ends)
        scale = weights.flatten().index_select(0, order).to(y.dtype)
        return torch.zeros_like(x).index_add(0, token, y * scale.unsqueeze(1))


LAYERS: dict[str, type[MoELayer]] = {"mok": MoELayer, "torch": GroupedMoELayer}


@dataclass(frozen=True)
class Size:
    """Blocks and a step. Attention as in Qwen3-30B-A3B: 32 heads of 128, 4 of keys and values."""

    hidden: int = 2048
    intermediate: int = 768
    experts: int = 128
    topk: int = 8
    heads: int = 32
    kv_heads: int = 4
    head_size: int = 128
    blocks: int = 4
    batch: int = 2
    context: int = 4096

    @property
    def tokens(self) -> int:
        return self.batch * self.context


class Block(nn.Module):
    """Grouped-query attention and an MoE layer, BF16."""

    def __init__(self, size: Size, layer: str, device: torch.device):
        super().__init__()
        options: dict[str, Any] = {"bias": False, "device": device, "dtype": torch.bfloat16}
        h, width = size.hidden, size.head_size
        self.size = size
        self.before = nn.RMSNorm(h, device=device, dtype=torch.bfloat16)
        self.between = nn.RMSNorm(h, device=device, dtype=torch.bfloat16)
        self.q = nn.Linear(h, size.heads * width, **options)
        self.kv = nn.Linear(h, 2 * size.kv_heads * width, **options)
        self.out = nn.Linear(size.heads * width, h, **options)
        self.moe = LAYERS[layer](
            h, size.intermediate, size.experts, size.topk, router="softmax", device=device
        )

    def forward(self, x: Tensor) -> Tensor:
        s, (b, t, _) = self.size, x.shape
        y = self.before(x)
        q = self.q(y).view(b, t, s.heads, s.head_size).transpose(1, 2)
        k, v = self.kv(y).view(b, t, 2, s.kv_heads, s.head_size).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, -1))
        return x + self.moe(self.between(x))


class Program:
    """Blocks with one kind of layer, and their optimizer."""

    def __init__(self, name: str, size: Size, device: torch.device):
        torch.manual_seed(0)
        self.name = name
        blocks = [Block(size, name, device) for _ in range(size.blocks)]
        self.blocks = nn.Sequential(*blocks)
        self.moes = [block.moe for block in blocks]
        self.optimizer = torch.optim.AdamW(
            self.blocks.parameters(), lr=1e-4, fused=device.type == "cuda"
        )
        shape = (size.batch, size.context, size.hidden)
        self.x = torch.randn(shape, device=device, dtype=torch.bfloat16)
        self.target = torch.randn(shape, device=device, dtype=torch.bfloat16)

    def step(self) -> None:
        """Forward, backward, optimizer."""
        loss = (self.blocks(self.x) - self.target).float().square().mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()

    def layers(self) -> None:
        """Forward and backward of the MoE layers alone."""
        for moe in self.moes:
            x = self.x.detach().requires_grad_()
            moe(x).backward(self.target)
        self.optimizer.zero_grad(set_to_none=True)


def milliseconds(work: Callable[[], None], device: torch.device) -> float:
    """Time of one call."""
    if device.type == "cpu":
        begin = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - begin)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def measure(
    programs: Sequence[Program], size: Size, device: torch.device, rounds: int, warm: int
) -> list[dict[str, Any]]:
    """Medians per program; each round runs every program once."""
    times: dict[str, tuple[list[float], list[float]]] = {p.name: ([], []) for p in programs}
    for i in range(warm + rounds):
        for p in programs:
            for kept, work in zip(times[p.name], (p.step, p.layers), strict=True):
                ms = milliseconds(work, device)
                if i >= warm:
                    kept.append(ms)
    found: list[dict[str, Any]] = []
    for p in programs:
        steps, layers = times[p.name]
        step, layer = statistics.median(steps), statistics.median(layers)
        found.append(
            {
                "program": p.name,
                "step_ms": step,
                "moe_ms": layer,
                "moe_share": layer / step,
                "tokens_per_s": 1e3 * size.tokens / step,
                "spread": (max(steps) - min(steps)) / step,
            }
        )
    base = next((row for row in found if row["program"] == "torch"), found[0])
    for row in found:
        row["step_ratio"] = base["step_ms"] / row["step_ms"]
        row["layer_ratio"] = base["moe_ms"] / row["moe_ms"]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warm", type=int, default=5, help="rounds that are not counted")
    parser.add_argument("--out", type=Path, help="folder for step.json")
    qwen = MODELS["qwen3-30b-a3b"]
    default = Size(qwen.hidden_size, qwen.intermediate_size, qwen.num_experts, qwen.topk)
    for name, value in asdict(default).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and "mok" in args.layers:
        raise DeviceError("MoK's layer needs a GPU", "none", "Use --layers torch")
    size = Size(**{name: getattr(args, name) for name in asdict(default)})
    programs = [Program(name, size, device) for name in args.layers]
    rows = measure(programs, size, device, args.rounds, args.warm)
    document = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "size": asdict(size),
        "rows": rows,
    }
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "step.json").write_text(json.dumps(document, indent=1) + "\n")
    table = Table(
        title=f"One step of {size.blocks} blocks, {size.tokens} tokens, {document['device']}"
    )
    for column in (
        "program",
        "step ms",
        "tokens/s",
        "MoE ms",
        "share",
        "layer ratio",
        "step ratio",
    ):
        table.add_column(column, justify="left" if column == "program" else "right")
    for row in rows:
        table.add_row(
            row["program"],
            f"{row['step_ms']:.2f}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['moe_ms']:.2f}",
            f"{row['moe_share']:.0%}",
            f"{row['layer_ratio']:.2f}",
            f"{row['step_ratio']:.2f}",
        )
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
