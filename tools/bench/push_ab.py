"""Results that compute pushes against those that comm workers do, one process per GPU, variants in turn within it.

    torchrun --nproc-per-node 2 -m mok.tools.bench.push_ab SHAPE VARIANT … [--pass backward] [--rounds N]

SHAPE: qwen, mixtral or deepseek, or T,H,I,E,K. VARIANT: base or push, its comm SMs and, if not the suggested one,
its minibatch: ``base:8 push:4 push:4:2176``. The first one's results have the bits that all must have: forward's
output, or all of backward's gradients. Forward is always as it is by default where backward is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mok import functional, kernels
from mok.config import Config, Shape
from mok.reference import Case, random_case
from mok.runtime.compile import KernelSpec
from mok.tools.bench.ranks import PASSES, Rank, arguments, window
from mok.tools.bench.sweep import config_with
from mok.tools.bench.timing import Regime

SHAPES = {
    "qwen": (8192, 2048, 768, 128, 8),
    "mixtral": (8192, 4096, 14336, 8, 2),
    "deepseek": (8192, 7168, 2048, 64, 8),
}
FLOPS = {"forward": 6, "backward": 12}  # times T*K*H*I
Results = tuple[Tensor, ...]


def spec_maker(original: Callable[..., KernelSpec], push: bool) -> Callable[..., KernelSpec]:
    """``kernels.forward_spec`` or ``backward_spec``, with or without ``push``."""

    def make(*args: Any, **options: Any) -> KernelSpec:
        spec = original(*args, **options)
        config = {**dict(spec.config), "push": push}  # in both: a default may be either
        name = f"{spec.name}_push" if push else spec.name
        return dataclasses.replace(spec, name=name, config=tuple(sorted(config.items())))

    return make


@contextmanager
def pushing(which: str, push: bool) -> Iterator[None]:
    """The layer's kernels of a pass with or without ``push``."""
    name = f"{which}_spec"
    original = getattr(kernels, name)
    setattr(kernels, name, spec_maker(original, push))
    try:
        yield
    finally:
        setattr(kernels, name, original)


@contextmanager
def made(
    rank: Rank, case: Case, shape: Shape, share: tuple[slice, range], config: Config, which: str
) -> Iterator[Callable[[], Results]]:
    """A pass of this rank's share, ready to be called; returns its results."""
    tokens, _ = share
    values = arguments(case, *share)
    ids = case.top_experts[tokens].contiguous()
    noise = torch.Generator(rank.device).manual_seed(5 + rank.rank)
    dy = torch.empty_like(values[0]).normal_(generator=noise)
    with rank.workspace(config, rank.group, shape, shape.num_tokens) as w:

        def forward() -> Results:
            now = functional.build_schedule(w, config, ids)
            return (functional.forward(config, w, now, *values, save_context=False)[0],)

        schedule = functional.build_schedule(w, config, ids)
        context: Any = None
        if which == "backward":
            _, context = functional.forward(config, w, schedule, *values)

        def backward() -> Results:
            found = functional.backward(
                config, w, schedule, context, dy, *values, keep_context=True
            )
            return tuple(gradient for gradient in found if gradient is not None)

        yield {"forward": forward, "backward": backward}[which]
        torch.cuda.synchronize()
        w.check()


def equal(found: Results, wanted: Results) -> bool:
    """The same bits in all results."""
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def main() -> None:
    """Measure and print; rank 0 prints one JSON line per variant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape")
    parser.add_argument("variants", nargs="+")
    parser.add_argument("--pass", dest="which", choices=PASSES, default="forward")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-ms", type=float, default=200)
    parser.add_argument("--run-ms", type=float, default=200)
    args = parser.parse_args()
    sizes = SHAPES.get(args.shape) or tuple(int(n) for n in args.shape.split(","))
    T, H, I, E, K = sizes
    rank = Rank()
    regime = Regime(warm_ms=args.warm_ms, run_ms=args.run_ms)
    case = random_case(Shape(T * rank.size, H, I, E, K), device=rank.device)
    shape, *share = rank.share(case)
    times: dict[str, list[float]] = {v: [] for v in args.variants}
    same: dict[str, bool] = {}
    configs: dict[str, Config] = {}
    first: Results | None = None
    for _ in range(args.rounds):
        for variant in args.variants:
            kind, comm, *minibatch = variant.split(":")
            config = config_with(Config.suggest(shape, rank.device), "comm_sms", int(comm))
            if minibatch:
                config = config_with(config, "minibatch_size", int(minibatch[0]))
            configs[variant] = config
            with (
                pushing(args.which, {"base": False, "push": True}[kind]),
                made(rank, case, shape, tuple(share), config, args.which) as call,
            ):
                found = call()
                if first is None:
                    first = tuple(result.clone() for result in found)
                same[variant] = same.get(variant, True) and equal(found, first)
                del found
                times[variant].append(window(rank, call, regime))
            torch.cuda.empty_cache()
    base = statistics.median(times[args.variants[0]])
    for variant, taken in times.items():
        ms = statistics.median(taken)
        wrong = rank.maximum(0.0 if same[variant] else 1.0)
        row = {
            "shape": list(sizes), "pass": args.which, "variant": variant, "ms": ms, "all_ms": taken,
            "of_first": ms / base, "tflops": FLOPS[args.which] * 1e-9 * T * K * H * I / ms,
            "same_bits": wrong == 0, "minibatch": configs[variant].minibatch_size,
        }  # fmt: skip
        if rank.rank == 0:
            print(json.dumps(row), flush=True)
    rank.close()


if __name__ == "__main__":
    main()
