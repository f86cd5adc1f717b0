"""Each program's output and gradients against FP32, once before it is timed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from mok.reference import forward_oracle, relative_l2
from mok.reference.precision import ieee_matmul
from mok.tools.bench.work import Work

OUTPUT_LIMIT = 8e-3
GRADIENT_LIMIT = 1.5e-2
"""Relative L2 error beyond which a program computes something else. BF16 roundings cost about 3e-3
in an output and 5e-3 in gradients, more where sums are kept in BF16 as in torch's pipeline."""

GRADIENTS = ("x", "router_weights", "gate", "up", "down")


class Oracle:
    """What the programs should give for input set 0 of a shape."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self._output: Tensor | None = None

    def output_error(self, output: Tensor) -> float:
        """Relative L2 error of an output [T, H]."""
        if self._output is None:
            self._output = forward_oracle(self.work.case())
        return relative_l2(output, self._output)

    def gradient_errors(self, found: Mapping[str, Tensor]) -> dict[str, float]:
        """Relative L2 error of each of ``GRADIENTS``.

        FP32 gradients of all experts need not fit beside everything else: the weights' are compared
        one expert at a time.

        Args:
            found: x [T, H], router_weights [T, K], gate and up [E, I, H], down [E, H, I].
        """
        work = self.work
        case, dy = work.case(), work.inputs(0).dy.float()
        d_x = torch.zeros_like(dy)
        d_weights = torch.zeros_like(case.router_weights)
        sums = {name: [0.0, 0.0] for name in ("gate", "up", "down")}
        with ieee_matmul():
            for expert, routes in _routes_by_expert(work):
                token = routes // work.ids.shape[1]
                gate_w, up_w, down_w = (w[expert].float() for w in (work.gate, work.up, work.down))
                x, dy_rows = case.x[token].float(), dy[token]
                weight = case.router_weights.flatten()[routes].unsqueeze(1)
                gate, up = x @ gate_w.t(), x @ up_w.t()
                sigmoid = torch.sigmoid(gate)
                silu = gate * sigmoid
                hidden = silu * up
                d_hidden = dy_rows @ down_w  # not yet times the router weight
                d_weights.flatten()[routes] = (d_hidden * hidden).sum(1)
                d_hidden *= weight
                d_gate = d_hidden * up * (sigmoid + silu * (1 - sigmoid))
                d_up = d_hidden * silu
                expected = {
                    "gate": d_gate.t() @ x,
                    "up": d_up.t() @ x,
                    "down": (dy_rows * weight).t() @ hidden,
                }
                d_x.index_add_(0, token, d_gate @ gate_w + d_up @ up_w)
                for name, value in expected.items():
                    _add(sums[name], found[name][expert], value)
        # Experts without routes get zeros.
        for expert in (e for e, count in enumerate(work.counts()) if count == 0):
            for name in sums:
                _add(sums[name], found[name][expert], torch.zeros_like(found[name][expert]))
        errors = {name: _error(*pair) for name, pair in sums.items()}
        errors["x"] = relative_l2(found["x"], d_x)
        errors["router_weights"] = relative_l2(found["router_weights"], d_weights)
        return errors


def _routes_by_expert(work: Work) -> Iterator[tuple[int, Tensor]]:
    ids = work.ids.flatten()
    order = ids.argsort(stable=True)
    dropped = int((ids < 0).sum())
    parts = order[dropped:].split(work.counts())
    return ((expert, part) for expert, part in enumerate(parts) if len(part))


def _add(pair: list[float], found: Tensor, expected: Tensor) -> None:
    pair[0] += float((found.float() - expected.float()).double().square().sum())
    pair[1] += float(expected.double().square().sum())


def _error(difference: float, size: float) -> float:
    if size == 0:
        return 0.0 if difference == 0 else float("inf")
    return float((difference / size) ** 0.5)
