"""The cases of ``mok check backward`` and ``mok check bits``, and the same in MXFP8, by kind of backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mok.backends import Backend, emulated_machine
from mok.commands.check_cases import CheckCase, exact_case, model_cases, mxfp8_model_cases
from mok.commands.shapes import fit_to_gpu, shrink
from mok.config import Config, Shape, tile_rows
from mok.models import MODELS
from mok.reference import (
    FP32_GRADIENT_LIMIT,
    FP32_LIMIT,
    GRADIENT_LIMIT,
    MXFP8_LIMIT,
    ROUTINGS,
    Gradients,
    backward_loop,
    backward_oracle,
    backward_reference,
    integer_gradient,
    random_case,
    random_gradient,
    relative_l2,
)
from mok.training_run import run_training


def backward_cases(backend: Backend, model: str | None, quick: bool) -> Iterator[CheckCase]:
    """Models with random and exact values, then exact cases over routings, ranks and rings.

    With ``model``, its shape alone.
    """
    yield from model_cases(backend, model, quick, GRADIENT_LIMIT, training=True)
    if model:
        return
    tokens = 4096 if backend.on_gpu else 40
    base = Shape(tokens, 192, 320, 10, 4, shared_intermediate_size=128)
    for ep_size in (1, 3) if quick else (1, 2, 3, 4, 8):
        for kind in ("dropped",) if quick else ROUTINGS:
            yield exact_case(backend, "routing", base, ep_size, kind)
    # Three tiles of one expert in a ring of one: macrobatches are replayed, accumulators handed on.
    tile = _tile(backend)
    wrapped = Shape(2 * tile + 40, 64, 64, 3, 2, shared_intermediate_size=64)
    for ep_size in (1, 2):
        yield exact_case(
            backend, "replay", wrapped, ep_size, "few_experts", config=Config(2, 2, tile, tile)
        )
    if quick:
        return
    for t in (0, 1, 255):
        yield exact_case(backend, "tokens", dataclasses.replace(base, num_tokens=t), 2)
    yield exact_case(backend, "one expert, K 1", Shape(tokens, 64, 64, 1, 1))
    uneven = (tokens - 5, 0, 5)
    yield exact_case(backend, "a rank with no token", base, 3, tokens_per_rank=uneven)


def run_backward_case(case: CheckCase, backend: Backend) -> list[dict[str, Any]]:
    """One row of the document: the worst gradient of the case against the oracle.

    In MXFP8 random values have one for the worst against the quantised reference, and error and cosine of
    each gradient against FP32.
    """
    from mok.commands.check import cosine_row, row

    inputs = case.make()
    exact = case.metric == "mismatches"
    dy = integer_gradient(inputs) if exact else random_gradient(inputs)
    _, found = run_training(
        inputs, dy, case.ep_size, backend, config=case.config,
        tokens_per_rank=case.tokens_per_rank, precision=case.precision,
    )  # fmt: skip

    def compared(expected: Gradients, name: str, limit: float) -> dict[str, Any]:
        errors = [
            _error(value, oracle, exact)
            for _, value, oracle in _pairs(found, expected)
            # Each rank rounds its own sum for the shared expert; the oracle has one for all.
            if not exact or value.shape == oracle.shape
        ]
        value = sum(errors) if exact else max(errors)
        return row(f"{name}, {len(errors)} gradients", case.metric, value, limit)

    rows = []
    if case.precision == "mxfp8":
        quantised = backward_reference(
            inputs, dy, case.ep_size, tokens_per_rank=case.tokens_per_rank, precision="mxfp8"
        )
        limit = 0.0 if exact else MXFP8_LIMIT
        rows.append(compared(quantised, f"{case.name}, against the quantised", limit))
    if not rows or not exact:
        expected = backward_oracle(inputs, dy) if backend.on_gpu else backward_loop(inputs, dy)
        if not rows:
            return [compared(expected, case.name, case.limit)]
        for name, value, oracle in _pairs(found, expected):
            text = f"{case.name}, d {name}"
            limit = FP32_LIMIT if name == "x" else FP32_GRADIENT_LIMIT
            rows.append(row(text, case.metric, _error(value, oracle, False), limit))
            rows.append(cosine_row(text, *_joined(value, oracle)))
    return rows


def mxfp8_backward_cases(backend: Backend, model: str | None, quick: bool) -> Iterator[CheckCase]:
    """Gradients in MXFP8: models with random values, then integers, whose sums are exact once quantised."""
    for case in mxfp8_model_cases(backend, model, quick, training=True):
        if case.metric == "relative_l2":
            name = f"{case.name}, backward"
            yield dataclasses.replace(case, name=name)
    if model:
        return
    # As ``backward_cases``: one expert in three tiles, a ring of one.
    tile = _tile(backend)
    shape = Shape(2 * tile + 40, 128, 128, 3, 2, shared_intermediate_size=64)
    for ep_size in (2,) if quick else (1, 2, 3):
        for kind in ("few_experts",) if quick else ("few_experts", "dropped"):
            case = exact_case(
                backend, "mxfp8 replay", shape, ep_size, kind, config=Config(2, 2, tile, tile)
            )
            yield dataclasses.replace(case, precision="mxfp8")


def mxfp8_bits_cases(backend: Backend, model: str | None, quick: bool) -> Iterator[BitsCase]:
    """As ``bits_cases`` with MXFP8 experts; with MXFP8 on the wire, too."""
    tile = _tile(backend)
    if model or backend.kind == "reference":
        return
    ways = [BitsCase("EP 2, on the wire", 2, Config(2, 2, tile, 2 * tile, mxfp8_wire=True))]
    if not quick:
        ways += [
            BitsCase("repeat"),
            BitsCase("EP 3, one tile per macrobatch", 3, Config(2, 4, tile, tile)),
            BitsCase("a rebuilt context", config=Config(2, 2, tile, tile), recompute=True),
        ]
    shape = Shape(_tokens(backend), 128, 256, 3, 2, shared_intermediate_size=64)
    for way in ways:
        yield dataclasses.replace(
            way, name=f"mxfp8 bits: {way.name}", shape=shape, precision="mxfp8"
        )


def _pairs(found: Gradients, expected: Gradients) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Names and gradients with their oracles."""
    oracle = expected.named()
    for name, value in found.named().items():
        yield name, value, oracle[name]


def _joined(found: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Both, ranks' sums for the shared expert added up."""
    if found.shape != expected.shape:
        found = found.double().sum(0, keepdim=True)
    return found, expected


def _error(found: Tensor, expected: Tensor, exact: bool) -> float:
    if exact:  # every sum is; its one rounding is the same
        return float((found != expected.to(found.dtype)).sum())
    found, expected = _joined(found, expected)
    # Of a gradient that is zero everywhere, such as no token's, any error is too much.
    if not expected.any():
        return float("inf") if found.any() else 0.0
    return relative_l2(found, expected)


# ---------------------------------------------------------------------- bits


@dataclass(frozen=True)
class BitsCase:
    """Another way to run the same call, which must not change a bit."""

    name: str
    ep_size: int = 1
    config: Config | None = None
    recompute: bool = False
    tokens_per_rank: tuple[int, ...] | None = None
    shape: Shape | None = None
    precision: str = "bf16"
    alike: bool = False  # the run that it is compared with has the same config


def bits_cases(backend: Backend, model: str | None, quick: bool) -> Iterator[BitsCase]:
    """``_ways`` to run a small layer, or one of ``model``'s shape."""
    shape = Shape(_tokens(backend), 128, 192, 3, 2, shared_intermediate_size=64)
    if model:
        real = Shape.of_model(MODELS[model], _tokens(backend))
        shape = fit_to_gpu(real, backend.device, True) if backend.on_gpu else shrink(real, 32)
    for way in _ways(backend, quick):
        name = f"{model} {way.name}" if model else way.name
        yield dataclasses.replace(way, name=name, shape=shape)


def _ways(backend: Backend, quick: bool) -> Iterator[BitsCase]:
    """A repeat, tunables, one to five macrobatches, ranks, a rebuilt context.

    The reference adds an expert's macrobatches in another order than the kernels, so it promises only the
    first and other ranks, and these where one macrobatch holds everything.
    """
    tile = _tile(backend)
    yield BitsCase("repeat")
    if backend.kind == "reference":
        yield BitsCase("EP 2", 2, Config(2, 2, tile, 1024 * tile), alike=True)
        return
    yield BitsCase("a rebuilt context", recompute=True)
    yield BitsCase("one tile per macrobatch", config=Config(2, 2, tile, tile))
    yield BitsCase("EP 2, two tiles per macrobatch", 2, Config(2, 2, tile, 2 * tile))
    if quick:
        return
    yield BitsCase("minibatch of two tiles", config=Config(2, 2, 2 * tile, 2 * tile))
    yield BitsCase("EP 2, rebuilt, one tile", 2, Config(2, 4, tile, tile), recompute=True)
    yield BitsCase("EP 2, one rank without tokens", 2, tokens_per_rank=(_tokens(backend), 0))
    yield BitsCase("EP 4, more comm SMs", 4, Config(4, 4, tile, tile))
    yield BitsCase("EP 8", 8)
    if tile_rows(_arch(backend)) == 256:
        config = Config(2, 2, tile, tile, launch_control=False)
        yield BitsCase("EP 2, without launch control", 2, config)


_baselines: dict[tuple[Any, ...], tuple[Tensor, Gradients]] = {}


def run_bits_case(case: BitsCase, backend: Backend) -> list[dict[str, Any]]:
    """One row of the document: differing elements of the output and all gradients.

    Left out are gradients of the shared expert at other numbers of ranks: each is a rank's own sum.
    """
    from mok.commands.check import row

    assert case.shape is not None
    gated = case.shape.shared_intermediate_size is not None
    inputs = random_case(
        case.shape, kind="skewed", swiglu_limit=0.75, gated=gated, device=backend.device
    )
    dy = random_gradient(inputs)
    config = case.config if case.alike else None
    key = (backend.name, case.shape, case.precision, config)
    if key not in _baselines:
        _baselines[key] = run_training(
            inputs, dy, 1, backend, config=config, precision=case.precision
        )
    output, gradients = _baselines[key]
    found, others = run_training(
        inputs,
        dy,
        case.ep_size,
        backend,
        config=case.config,
        recompute=case.recompute,
        tokens_per_rank=case.tokens_per_rank,
        precision=case.precision,
    )
    different = int((found != output).sum())
    want = gradients.named()
    for name, value in others.named().items():
        if case.ep_size == 1 or not name.startswith("shared "):
            different += int((value != want[name]).sum())
    return [row(case.name, "mismatches", float(different), 0.0)]


def _arch(backend: Backend) -> str:
    return backend.arch or emulated_machine(None).arch


def _tile(backend: Backend) -> int:
    return tile_rows(_arch(backend))


def _tokens(backend: Backend) -> int:
    """So many that a skewed routing fills more than five tiles of rows."""
    return 4096 if backend.on_gpu else 2 * _tile(backend) + 44
