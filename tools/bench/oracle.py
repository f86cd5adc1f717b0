"""Each program's output and gradients against FP32, once before it is timed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mok.reference import FP32_COSINE_LIMIT, FP32_GRADIENT_LIMIT, FP32_LIMIT, forward_oracle
from mok.reference.precision import ieee_matmul
from mok.tools.bench.work import Work

OUTPUT_LIMIT = 8e-3
GRADIENT_LIMIT = 1.5e-2
"""Relative L2 error beyond which a program computes something else. BF16 roundings cost about 3e-3
in an output and 5e-3 in gradients, more where sums are kept in BF16 as in torch's pipeline."""

GRADIENTS = ("x", "router_weights", "gate", "up", "down")
_PART = 1 << 27  # elements that are compared in FP64 at a time


def error_limit(name: str, precision: str) -> float:
    """Of "output" or one of ``GRADIENTS``."""
    if precision == "mxfp8":
        return FP32_LIMIT if name in ("output", "x") else FP32_GRADIENT_LIMIT
    return OUTPUT_LIMIT if name == "output" else GRADIENT_LIMIT


@dataclass(frozen=True)
class Match:
    """How a tensor agrees with the oracle's: relative L2 error, and the cosine of the two."""

    error: float
    cosine: float

    def ok(self, name: str, precision: str) -> bool:
        """Whether it is within the limits; NaN is not."""
        near = self.error <= error_limit(name, precision)
        return near and (precision != "mxfp8" or self.cosine >= FP32_COSINE_LIMIT)


class _Sums:
    """Of ‖found − expected‖², ‖expected‖², ‖found‖² and found·expected, in FP64."""

    def __init__(self) -> None:
        self.values = [0.0] * 4

    def add(self, found: Tensor, expected: Tensor) -> None:
        parts = (t.reshape(-1).split(_PART) for t in (found, expected))
        for mine, wanted in zip(*parts, strict=True):
            a, b = mine.double(), wanted.double()
            new = torch.stack([(a - b).square().sum(), b @ b, a @ a, a @ b]).tolist()
            self.values = [old + more for old, more in zip(self.values, new, strict=True)]

    def match(self) -> Match:
        difference, size, own, product = self.values
        if size == 0:
            same = difference == 0
            return Match(0.0 if same else math.inf, 1.0 if same else 0.0)
        cosine = product / math.sqrt(size * own) if own else 0.0
        return Match(math.sqrt(difference / size), cosine)


def match(found: Tensor, expected: Tensor) -> Match:
    """Of two tensors of one shape."""
    sums = _Sums()
    sums.add(found, expected)
    return sums.match()


def swiglu_gradients(gate: Tensor, up: Tensor, d_hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden, d_gate, d_up) of hidden = gate·sigmoid(gate)·up, all [rows, I]."""
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    d_gate = d_hidden * up * (sigmoid + silu * (1 - sigmoid))
    return silu * up, d_gate, d_hidden * silu


class Oracle:
    """What the programs should give for input set 0 of a shape."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self._output: Tensor | None = None

    def output_match(self, output: Tensor) -> Match:
        """Of an output [T, H]."""
        if self._output is None:
            self._output = forward_oracle(self.work.case())
        return match(output, self._output)

    def output_error(self, output: Tensor) -> float:
        """Relative L2 error of an output [T, H]."""
        return self.output_match(output).error

    def gradient_errors(self, found: Mapping[str, Tensor]) -> dict[str, float]:
        """Relative L2 error of each of ``GRADIENTS``."""
        return {name: each.error for name, each in self.gradient_matches(found).items()}

    def gradient_matches(self, found: Mapping[str, Tensor]) -> dict[str, Match]:
        """Of each of ``GRADIENTS``.

        FP32 gradients of all experts need not fit beside everything else: the weights' are compared
        one expert at a time.

        Args:
            found: x [T, H], router_weights [T, K], gate and up [E, I, H], down [E, H, I].
        """
        work = self.work
        case, dy = work.case(), work.inputs(0).dy.float()
        d_x = torch.zeros_like(dy)
        d_weights = torch.zeros_like(case.router_weights)
        sums = {name: _Sums() for name in ("gate", "up", "down")}
        with ieee_matmul():
            for expert, routes in _routes_by_expert(work):
                token = routes // work.ids.shape[1]
                gate_w, up_w, down_w = (w[expert].float() for w in (work.gate, work.up, work.down))
                x, dy_rows = case.x[token].float(), dy[token]
                weight = case.router_weights.flatten()[routes].unsqueeze(1)
                gate, up = x @ gate_w.t(), x @ up_w.t()
                d_hidden = dy_rows @ down_w  # not yet times the router weight
                hidden, d_gate, d_up = swiglu_gradients(gate, up, d_hidden * weight)
                d_weights.flatten()[routes] = (d_hidden * hidden).sum(1)
                expected = {
                    "gate": d_gate.t() @ x,
                    "up": d_up.t() @ x,
                    "down": (dy_rows * weight).t() @ hidden,
                }
                d_x.index_add_(0, token, d_gate @ gate_w + d_up @ up_w)
                for name, value in expected.items():
                    sums[name].add(found[name][expert], value)
        # Experts without routes get zeros.
        for expert in (e for e, count in enumerate(work.counts()) if count == 0):
            for name in sums:
                sums[name].add(found[name][expert], torch.zeros_like(found[name][expert]))
        return {name: each.match() for name, each in sums.items()} | {
            "x": match(found["x"], d_x),
            "router_weights": match(found["router_weights"], d_weights),
        }


def _routes_by_expert(work: Work) -> Iterator[tuple[int, Tensor]]:
    ids = work.ids.flatten()
    order = ids.argsort(stable=True)
    dropped = int((ids < 0).sum())
    parts = order[dropped:].split(work.counts())
    return ((expert, part) for expert, part in enumerate(parts) if len(part))
