"""Runs the published comparison on all ranks: programs take turns, results are checked against each other."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mok.errors import MokError
from mok.tools.bench.oracle import Match
from mok.tools.bench.published import accuracy, figures, programs, upstream
from mok.tools.bench.published.iterations import measure
from mok.tools.bench.published.share import Share, Unavailable, layer_of, make_share

LIMITS = {"bf16": 1e-2, "mxfp8": 1e-1}
"""Relative L2 that a peer's output may be from ours: both round, in other places."""


@dataclass
class Place:
    """Where this process runs.

    Attributes:
        group: torch's, that exchanges tensors of ``device``. host_group: one on the host (gloo).
        ours: ``mok.Group`` of the ranks, None where there is no kernel.
        bench: the ``mok.tools.bench.ranks.Rank`` that all this is of, for the link measurements.
    """

    rank: int
    size: int
    device: torch.device
    group: Any
    host_group: Any
    ours: Any = None
    bench: Any = None


@dataclass
class Settings:
    """What is run."""

    models: tuple[str, ...] = figures.MODELS
    precisions: tuple[str, ...] = figures.PRECISIONS
    programs: tuple[str, ...] = (figures.OURS, *programs.PEERS, "upstream")
    tokens: int = figures.TOKENS
    warmup: int = figures.WARMUP
    iterations: int = figures.ITERATIONS
    seed: int = 0
    interpreter: str | None = None  # of upstream
    free_bytes: int | None = None  # by default what the GPU has
    layers: dict[str, Any] = field(default_factory=dict)  # instead of the models' own


def run(
    place: Place, settings: Settings, say: Callable[[str], None] = lambda _: None,
    save: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """The document's part: rows, missing programs with their reasons, speed-ups.

    ``save`` gets it after every program, so that a run which is ended early leaves something.
    """
    document: dict[str, Any] = {"rows": [], "missing": [], "layers": {}}
    free = settings.free_bytes
    if free is None and place.device.type == "cuda":
        free = min(everyone(place, torch.cuda.mem_get_info(place.device)[0]))
    for model in settings.models:
        try:
            layer = settings.layers.get(model) or layer_of(model, settings.tokens, place.size, free)
        except MokError as error:
            document["missing"].append({"model": model, "program": "all", "reason": str(error)})
            continue
        document["layers"][model] = layer.as_dict()
        if layer.experts != layer.asked_experts:
            say(
                f"{model}: {layer.experts} of {layer.asked_experts} experts, to fit {place.size} GPUs"
            )
        share = make_share(layer, place.rank, place.group, place.device, settings.seed)
        wanted, reason = _expected(place, share)
        if wanted is None:
            document["missing"].append({"model": model, "program": "all", "reason": reason})
            continue
        for precision in settings.precisions:
            first: Tensor | None = None
            for name in settings.programs:
                found, results, reason = _timed(place, settings, share, precision, name)
                if reason:
                    entry = {"model": model, "precision": precision, "program": name}
                    document["missing"].append({**entry, "reason": reason})
                    say(f"{model} {precision} {programs.TITLES[name]}: {reason}")
                    continue
                assert found is not None and results is not None
                away = _distance(place, results[0], first)
                first = results[0] if first is None else first
                found["accuracy"] = accuracy.everyones_worst(
                    everyone(place, wanted.matches(*results))
                )
                for row in _rows(model, precision, name, layer.as_dict(), found, away):
                    document["rows"].append(row)
                    say(
                        f"{model} {precision} {programs.TITLES[name]} {row['pass']}: {row['ms']:.3f} ms"
                    )
                document["speed_ups"] = figures.speed_ups([r for r in document["rows"] if r["ok"]])
                save(document)
        del share, wanted
        if place.device.type == "cuda":
            torch.cuda.empty_cache()
    document["speed_ups"] = figures.speed_ups([r for r in document["rows"] if r["ok"]])
    document["best"] = figures.best(document["speed_ups"])
    return document


def _expected(place: Place, share: Share) -> tuple[accuracy.Expected | None, str]:
    """The layer in FP32, or why some rank has none; collective."""
    found: accuracy.Expected | None = None
    reason = ""
    try:
        found = accuracy.expected(share, place.size)
    except Unavailable as error:
        reason = str(error)
    if place.device.type == "cuda":
        torch.cuda.empty_cache()  # a heap takes its memory from the driver
    reasons = [r for r in everyone(place, reason) if r]
    return (None, reasons[0]) if reasons else (found, "")


def _rows(
    model: str, precision: str, name: str, layer: dict[str, int], found: dict[str, Any],
    error: float,
) -> list[dict[str, Any]]:  # fmt: skip
    rows = []
    right = error <= LIMITS[precision]
    if name == figures.OURS:
        right &= all(Match(**each).ok(of, precision) for of, each in found["accuracy"].items())
    for pass_name in figures.PASSES:
        summary = figures.summary(found["times"][pass_name])
        rows.append(
            {
                "model": model, "precision": precision, "pass": pass_name, "program": name,
                **summary, "tflops": figures.flops(layer, pass_name) / summary["ms"] / 1e9,
                "error": error, "ok": right, "accuracy": found["accuracy"], "note": found["note"],
                "config": found["config"],
            }
        )  # fmt: skip
    return rows


def _timed(
    place: Place, settings: Settings, share: Share, precision: str, name: str
) -> tuple[dict[str, Any] | None, tuple[Tensor, Tensor | None] | None, str]:
    """(times by pass of all ranks, this rank's output and d_x, reason why there are none); collective."""
    times: dict[str, list[float]] = {}
    results: tuple[Tensor, Tensor | None] | None = None
    note, config, reason = "", None, ""
    try:
        if name == "upstream":
            host = os.environ.get("MASTER_ADDR", "127.0.0.1")
            times, output, note = upstream.times(  # its d_x stays in its process
                share, precision, settings.warmup, settings.iterations, settings.interpreter, host,
                place.host_group,
            )  # fmt: skip
            results = output, None
        else:
            with _made(place, share, precision, name) as program:
                results = program.forward().clone(), program.backward()[0].clone()
                times = measure(program, settings.warmup, settings.iterations, place.device)
                config = program.tunables() if isinstance(program, programs.Ours) else None
    except Unavailable as error:
        reason = str(error)
    except Exception as error:  # of another library: many of them assert
        reason = _failed(error)
    every = everyone(place, (times, reason))
    reasons = [r for _, r in every if r]
    if reasons:
        return None, None, reasons[0]
    by_pass = {p: [t[p] for t, _ in every] for p in figures.PASSES}
    return {"times": by_pass, "note": note, "config": config}, results, ""


def _failed(error: Exception) -> str:
    return f"failed: {type(error).__name__}: {error}"[:400]


@contextlib.contextmanager
def _made(place: Place, share: Share, precision: str, name: str) -> Iterator[Any]:
    """A program, made by all ranks or by none."""
    reason = ""
    with contextlib.ExitStack() as undo:
        program: Any = None
        try:
            if name == figures.OURS:
                if place.ours is None:
                    raise Unavailable("there is no GPU with kernels here")
                program = programs.Ours([share], precision, place.ours)
                undo.callback(program.close)
            else:
                program = undo.enter_context(programs.peer(name, share, precision))
        except Unavailable as error:
            reason = str(error)
        except Exception as error:  # the other ranks must hear of it
            reason = _failed(error)
        reasons = [r for r in everyone(place, reason) if r]
        if reasons:
            raise Unavailable(reasons[0])
        yield program


def _distance(place: Place, output: Tensor, first: Tensor | None) -> float:
    """The largest relative L2 error of any rank against the first program's output."""
    if first is None:
        return 0.0
    from mok.reference import relative_l2

    return max(everyone(place, float(relative_l2(output, first))))


def everyone(place: Place, value: Any) -> list[Any]:
    """``value`` of every rank."""
    if place.size == 1:
        return [value]
    found: list[Any] = [None] * place.size
    dist.all_gather_object(found, value, group=place.host_group)
    return found
