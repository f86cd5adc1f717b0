"""The cases of ``mok check forward``, for each kind of backend."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mok.backends import Backend
from mok.commands.shapes import fit_to_gpu, shrink
from mok.config import Config, Shape
from mok.models import MODELS
from mok.processes import fit
from mok.reference import (
    BF16_LIMIT,
    FP32_LIMIT,
    ROUTINGS,
    Case,
    integer_case,
    random_case,
)

GPU_MODEL_TOKENS = 4096
SMALL_RING = Config(2, 2, minibatch_size=256, macrobatch_size=512)


@dataclass(frozen=True)
class CheckCase:
    """One comparison with the oracle. ``make`` builds the inputs, late: they may be large.

    ``metric`` is "relative_l2", or "mismatches": elements that differ from an exact result.
    """

    name: str
    make: Callable[[], Case]
    ep_size: int
    metric: str
    limit: float
    config: Config | None = None
    tokens_per_rank: tuple[int, ...] | None = None
    precision: str = "bf16"


def forward_cases(backend: Backend, model: str | None, quick: bool) -> Iterator[CheckCase]:
    """Models with random values, then exact cases over routings, ranks, sizes and rings.

    With ``model``, its shape alone, with random and with exact values.
    """
    yield from model_cases(backend, model, quick, BF16_LIMIT)
    if not model:
        yield from _exact_cases(backend, quick)


def model_cases(
    backend: Backend, model: str | None, quick: bool, limit: float, training: bool = False
) -> Iterator[CheckCase]:
    """The shape of ``model``, or of all models, with random values (within ``limit``) and exact ones."""
    names = [model] if model else list(MODELS)
    if quick and not model:
        names = ["qwen3-30b-a3b", "deepseek-v3"]
    for name in names:
        for case in _model_cases(backend, name, training=training):
            if case.metric == "relative_l2":
                case = dataclasses.replace(case, limit=limit)
            yield case


def on_processes(cases: Iterator[Any], size: int) -> Iterator[Any]:
    """The cases (of any kind with a name, ranks and tokens) at EP = ``size``, each once."""
    seen = set()
    for case in cases:
        name, found = re.subn(r"EP \d+", f"EP {size}", case.name)
        name = name if found else f"{name}, EP {size}"
        if name not in seen:
            seen.add(name)
            lengths = fit(case.tokens_per_rank, size)
            yield dataclasses.replace(
                case,
                name=name,
                ep_size=size,
                tokens_per_rank=None if lengths is None else tuple(lengths),
            )


def mxfp8_model_cases(
    backend: Backend, model: str | None, quick: bool, training: bool = False
) -> Iterator[CheckCase]:
    """Models whose sizes MXFP8 can have, random (within ``FP32_LIMIT``) and exact."""
    names = [model] if model else ["qwen3-30b-a3b", "deepseek-v3", "mixtral-8x7b"]
    for name in names[: 1 if quick else None]:
        for case in _model_cases(backend, name, 128, training):
            limit = FP32_LIMIT if case.metric == "relative_l2" else case.limit
            yield dataclasses.replace(
                case, name=f"mxfp8 {case.name}", limit=limit, precision="mxfp8"
            )


def mxfp8_cases(backend: Backend, model: str | None, quick: bool) -> Iterator[CheckCase]:
    """Forward: ``mxfp8_model_cases``, then ranks and routings."""
    yield from mxfp8_model_cases(backend, model, quick)
    if model:
        return
    shape = Shape(4096 if backend.on_gpu else 40, 256, 384, 10, 4, shared_intermediate_size=128)
    for ep_size in (1,) if quick else (1, 2, 3):
        for kind in ("dropped",) if quick else ("random", "dropped", "one_expert"):
            yield CheckCase(
                f"mxfp8 routing: {_text(shape)} EP {ep_size}, integer {kind}",
                lambda kind=kind: integer_case(shape, kind=kind, device=backend.device),  # type: ignore[misc]
                ep_size,
                "mismatches",
                0.0,
                precision="mxfp8",
            )


def _model_cases(
    backend: Backend, name: str, multiple: int = 64, training: bool = False
) -> Iterator[CheckCase]:
    real = Shape.of_model(MODELS[name], GPU_MODEL_TOKENS)
    if backend.on_gpu:
        shape, ep_size = fit_to_gpu(real, backend.device, training), 1
    else:
        factor = 32 if backend.kind == "emulator" else 16
        shape = shrink(dataclasses.replace(real, num_tokens=32), factor)
        sizes = (shape.hidden_size, shape.intermediate_size)
        hidden, inner = (-(-size // multiple) * multiple for size in sizes)
        shape = dataclasses.replace(shape, hidden_size=hidden, intermediate_size=inner)
        ep_size = 4
    for make, metric, limit in (
        (random_case, "relative_l2", BF16_LIMIT),
        (integer_case, "mismatches", 0.0),
    ):
        yield CheckCase(
            f"{name} {_text(shape)} EP {ep_size}, {make.__name__.replace('_case', '')}",
            lambda make=make: make(shape, device=backend.device),  # type: ignore[misc]
            ep_size,
            metric,
            limit,
        )


def exact_case(
    backend: Backend,
    name: str,
    shape: Shape,
    ep_size: int = 1,
    kind: str = "random",
    **more: object,
) -> CheckCase:
    """A case of integers."""
    limit = 128.0 if kind == "skewed" else None  # one routing with the clamp, too
    return CheckCase(
        f"{name}: {_text(shape)} EP {ep_size}, integer {kind}",
        lambda: integer_case(shape, kind=kind, device=backend.device, swiglu_limit=limit),
        ep_size,
        "mismatches",
        0.0,
        **more,  # type: ignore[arg-type]
    )


def _exact_cases(backend: Backend, quick: bool) -> Iterator[CheckCase]:
    tokens = 4096 if backend.on_gpu else 40
    exact = functools.partial(exact_case, backend)
    base = Shape(tokens, 192, 320, 10, 4, shared_intermediate_size=128)
    for ep_size in (1, 3) if quick else (1, 2, 3, 4, 8):
        for kind in ("random", "dropped") if quick else ROUTINGS:
            yield exact("routing", base, ep_size, kind)
    if quick:
        return
    for t in (0, 1, 7, 255):
        yield exact("tokens", dataclasses.replace(base, num_tokens=t), 2)
    yield exact("one expert, K 1", Shape(tokens, 64, 64, 1, 1))
    yield exact("K 32", Shape(tokens, 64, 64, 40, 32))
    yield exact("more ranks than experts", Shape(tokens, 64, 64, 3, 2), 64)
    uneven = (tokens - 5, 0, 5)
    yield exact("a rank with no token", base, 3, tokens_per_rank=uneven)
    ring = Shape(tokens, 64, 128, 2, 8) if backend.on_gpu else Shape(250, 64, 64, 2, 8)
    yield exact("the ring wraps", ring, 2, config=SMALL_RING)


def _text(shape: Shape) -> str:
    shared = shape.shared_intermediate_size
    return (
        f"T {shape.num_tokens} H {shape.hidden_size} I {shape.intermediate_size} "
        f"E {shape.num_experts} K {shape.topk}" + (f" shared {shared}" if shared else "")
    )
