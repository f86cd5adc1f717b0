"""The whole optimizer step of a few transformer blocks of a large model: MoK's MoE layer, torch's and SonicMoE's.

    python -m mok.tools.train_block --out results/       # four blocks of Qwen3-30B-A3B, on one GPU
    python -m mok.tools.train_block --layers mok mxfp8 torch sonic --out results/

Prints tokens/s, the MoE layers' share of the step, and two ratios side by side: that of the layer alone
(forward and backward) and that of the whole step. They differ since a step is also attention, norms and
optimizer. Programs take turns, so that clocks and temperature are shared. Beside the times stands how far a
layer's output is from torch's, from the same weights. Peers that are not installed or fail are named with
the reason; the exit code is 0 if ours ran.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from mok.errors import DeviceError
from mok.layer import MoELayer
from mok.models import MODELS
from mok.reference import relative_l2
from mok.tools.bench.programs.base import Unavailable
from mok.tools.bench.tables import wide
from mok.tools.bench.timing import reason_of
from mok.tools.bench.versions import versions
from mok.tools.train import block_layers
from mok.tools.train.block_layers import GroupedMoELayer, SonicMoELayer

LAYERS: dict[str, Callable[..., MoELayer]] = {
    "mok": MoELayer,
    "mxfp8": partial(MoELayer, precision="mxfp8"),
    "torch": GroupedMoELayer,
    "sonic": SonicMoELayer,
}
OURS = ("mok", "mxfp8")
DEFAULT = ("mok", "torch", "sonic")


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


def programs_of(
    names: Sequence[str], size: Size, device: torch.device, say: Callable[[str], None]
) -> tuple[list[Program], dict[str, float], list[dict[str, str]]]:
    """The programs after their first step, their outputs' distances, and what is missing.

    Distances are relative L2, of the first block's layer on the input, from "torch" (or the first program).
    A peer that cannot be set up or cannot do a step is missing; ours raises.
    """
    programs: list[Program] = []
    outputs: dict[str, Tensor] = {}
    missing: list[dict[str, str]] = []
    for name in names:
        begin, reason = time.perf_counter(), ""
        try:
            program = Program(name, size, device)
            output = program.moes[0](program.x).detach()
            program.step()
            program.layers()
            if device.type == "cuda":
                torch.cuda.synchronize()
            programs.append(program)
            outputs[name] = output
        except Exception as error:
            if name in OURS:
                raise
            reason = str(error) if isinstance(error, Unavailable) else reason_of(error)
        if reason:
            program = output = None  # type: ignore[assignment]
            gc.collect()
            missing.append({"program": name, "reason": reason})
        say(f"{name}: " + (reason or f"first step after {time.perf_counter() - begin:.1f} s"))
    base = outputs.get("torch", next(iter(outputs.values()), None))
    away = {name: relative_l2(value, base) for name, value in outputs.items() if base is not None}
    return programs, away, missing


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


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(DEFAULT))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warm", type=int, default=5, help="rounds that are not counted")
    parser.add_argument("--out", type=Path, help="folder for step.json")
    qwen = MODELS["qwen3-30b-a3b"]
    default = Size(qwen.hidden_size, qwen.intermediate_size, qwen.num_experts, qwen.topk)
    for name, value in asdict(default).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    from rich.console import Console

    args, console = parse(argv), Console()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and any(name in OURS for name in args.layers):
        raise DeviceError("MoK's layer needs a GPU", "none", "Use --layers torch")
    size = Size(**{name: getattr(args, name) for name in asdict(Size())})
    try:
        programs, away, missing = programs_of(args.layers, size, device, console.print)
        rows = measure(programs, size, device, args.rounds, args.warm) if programs else []
    finally:
        block_layers.close()
    for row in rows:
        row["output_error"] = away[row["program"]]
    document = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "versions": versions(["mok", "torch", "sonic"]),
        "size": asdict(size),
        "rows": rows,
        "missing": missing,
    }
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "step.json").write_text(json.dumps(document, indent=1) + "\n")
    show(document, size, console)
    return 0 if rows else 1


def show(document: dict[str, Any], size: Size, console: Any) -> None:
    """The rows as a table, and what is missing."""
    from rich.table import Table

    forms: dict[str, Callable[[dict[str, Any]], str]] = {
        "program": lambda row: str(row["program"]),
        "step ms": lambda row: f"{row['step_ms']:.2f}",
        "±%": lambda row: f"{100 * row['spread']:.0f}",
        "tokens/s/GPU": lambda row: f"{row['tokens_per_s']:.0f}",
        "MoE ms": lambda row: f"{row['moe_ms']:.2f}",
        "share": lambda row: f"{row['moe_share']:.0%}",
        "layer ratio": lambda row: f"{row['layer_ratio']:.2f}",
        "step ratio": lambda row: f"{row['step_ratio']:.2f}",
        "output differs": lambda row: f"{row['output_error']:.1e}",
    }
    table = Table(
        title=f"One step of {size.blocks} blocks, {size.tokens} tokens, {document['device']}"
    )
    for column in forms:
        table.add_column(column, justify="left" if column == "program" else "right")
    for row in document["rows"]:
        table.add_row(*(form(row) for form in forms.values()))
    wide(console).print(table)
    for entry in document["missing"]:
        console.print(
            f"not measured: {entry['program']}: {entry['reason']}", soft_wrap=True, markup=False
        )


if __name__ == "__main__":
    sys.exit(main())
