"""Pushed against combined results, forward, one process per GPU, variants in turn within one process.

    torchrun --nproc-per-node 2 -m mok.tools.bench.push_ab SHAPE VARIANT … [--rounds N]

SHAPE: qwen, mixtral or deepseek, or T,H,I,E,K. VARIANT: base or push, its comm SMs and, if not the suggested one,
its minibatch: ``base:8 push:4 push:4:2176``. The first one's output has the bits that all must have.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch

from mok import functional, kernels
from mok.config import Config, Shape
from mok.reference import random_case
from mok.runtime.compile import KernelSpec
from mok.tools.bench.ranks import Rank, arguments, window
from mok.tools.bench.sweep import config_with
from mok.tools.bench.timing import Regime

SHAPES = {
    "qwen": (8192, 2048, 768, 128, 8),
    "mixtral": (8192, 4096, 14336, 8, 2),
    "deepseek": (8192, 7168, 2048, 64, 8),
}
ORIGINAL = kernels.forward_spec


def spec_maker(push: bool) -> Callable[..., KernelSpec]:
    """``kernels.forward_spec`` with or without ``push``."""

    def make(*args: Any, **options: Any) -> KernelSpec:
        spec = ORIGINAL(*args, **options)
        config = {**dict(spec.config), "push": push}
        if not push:
            return spec
        return dataclasses.replace(
            spec, name=f"{spec.name}_push", config=tuple(sorted(config.items()))
        )

    return make


def main() -> None:
    """Measure and print; rank 0 prints one JSON line per variant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape")
    parser.add_argument("variants", nargs="+")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-ms", type=float, default=200)
    parser.add_argument("--run-ms", type=float, default=200)
    args = parser.parse_args()
    sizes = SHAPES.get(args.shape) or tuple(int(n) for n in args.shape.split(","))
    T, H, I, E, K = sizes
    rank = Rank()
    regime = Regime(warm_ms=args.warm_ms, run_ms=args.run_ms)
    case = random_case(Shape(T * rank.size, H, I, E, K), device=rank.device)
    shape, tokens, experts = rank.share(case)
    values = arguments(case, tokens, experts)
    ids = case.top_experts[tokens].contiguous()
    times: dict[str, list[float]] = {v: [] for v in args.variants}
    same: dict[str, bool] = {}
    configs: dict[str, Config] = {}
    first: torch.Tensor | None = None
    for _ in range(args.rounds):
        for variant in args.variants:
            kind, comm, *minibatch = variant.split(":")
            kernels.forward_spec = spec_maker({"base": False, "push": True}[kind])  # type: ignore
            config = config_with(Config.suggest(shape, rank.device), "fwd_num_comm_sms", int(comm))
            if minibatch:
                config = config_with(config, "minibatch_size", int(minibatch[0]))
            configs[variant] = config
            with rank.workspace(config, rank.group, shape, shape.num_tokens) as w:

                def forward(w: Any = w, config: Config = config) -> torch.Tensor:
                    now = functional.build_schedule(w, config, ids)
                    return functional.forward(config, w, now, *values, save_context=False)[0]

                output = forward().clone()
                first = output if first is None else first
                same[variant] = same.get(variant, True) and torch.equal(output, first)
                times[variant].append(window(rank, forward, regime))
                torch.cuda.synchronize()
                w.check()
            torch.cuda.empty_cache()
    base = statistics.median(times[args.variants[0]])
    for variant, found in times.items():
        ms = statistics.median(found)
        wrong = rank.maximum(0.0 if same[variant] else 1.0)
        row = {
            "shape": list(sizes), "variant": variant, "ms": ms, "all_ms": found,
            "of_first": ms / base, "tflops": 6e-9 * T * K * H * I / ms, "same_bits": wrong == 0,
            "minibatch": configs[variant].minibatch_size,
        }  # fmt: skip
        if rank.rank == 0:
            print(json.dumps(row), flush=True)
    rank.close()


if __name__ == "__main__":
    main()
