from __future__ import annotations

import pytest
import torch

from mok.tools.bench.oracle import GRADIENT_LIMIT, GRADIENTS, OUTPUT_LIMIT, Match, Oracle
from mok.tools.bench.shapes import parse_shape
from mok.tools.bench.work import Work, make_work


def small_work(experts: int = 4) -> Work:
    return make_work(parse_shape(f"24,64,128,{experts},2"), torch.device("cpu"))


def by_autograd(work: Work) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Output and gradients in FP64, token by token, from torch's autograd."""
    inputs = work.inputs(0)
    x, weights, gate, up, down = (
        t.double().requires_grad_()
        for t in (inputs.x, inputs.router_weights, work.gate, work.up, work.down)
    )
    rows = []
    for t in range(len(x)):
        out = 0
        for k, e in enumerate(work.ids[t].tolist()):
            hidden = torch.nn.functional.silu(gate[e] @ x[t]) * (up[e] @ x[t])
            out = out + weights[t, k] * (down[e] @ hidden)
        rows.append(out)
    output = torch.stack(rows)
    found = torch.autograd.grad(output, (x, weights, gate, up, down), inputs.dy.double())
    return output.detach(), dict(zip(GRADIENTS, found, strict=True))


@pytest.mark.parametrize("experts", [4, 40])  # with 40, some have no route
def test_right_results_have_no_error(experts):
    work = small_work(experts)
    output, gradients = by_autograd(work)
    oracle = Oracle(work)
    assert oracle.output_error(output) < 1e-6
    errors = oracle.gradient_errors(gradients)
    assert set(errors) == set(GRADIENTS) and max(errors.values()) < 1e-5


def test_limits_of_each_precision():
    work = small_work()
    output, gradients = by_autograd(work)
    oracle = Oracle(work)
    rng = torch.Generator().manual_seed(0)
    noise = torch.randn(output.shape, generator=rng, dtype=torch.float64)
    noisy = output + 0.05 * noise * output.norm() / noise.norm()
    near = oracle.output_match(noisy)
    assert near.error == pytest.approx(0.05, rel=1e-3)
    assert near.cosine == pytest.approx(1 - 0.05**2 / 2, abs=2e-3)
    assert near.ok("output", "mxfp8") and not near.ok("output", "bf16")
    turned = oracle.output_match(output * 0.95)  # its cosine is 1, an error remains
    assert turned.cosine == pytest.approx(1) and turned.error == pytest.approx(0.05, rel=1e-3)
    assert not Match(0.05, 0.995).ok("x", "mxfp8") and Match(0.05, 0.997).ok("x", "mxfp8")
    assert Match(0.075, 0.997).ok("gate", "mxfp8") and not Match(0.075, 0.997).ok("x", "mxfp8")
    assert not Match(float("nan"), float("nan")).ok("gate", "mxfp8")
    matches = oracle.gradient_matches(gradients)
    assert all(m.cosine > 1 - 1e-9 for m in matches.values())


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_wrong_gradient_is_found(name):
    work = small_work()
    _, gradients = by_autograd(work)
    gradients[name] = gradients[name] * 1.02
    errors = Oracle(work).gradient_errors(gradients)
    assert errors[name] > GRADIENT_LIMIT
    assert all(error < 1e-5 for other, error in errors.items() if other != name)


def test_a_gradient_of_an_unused_expert_must_be_zero():
    work = small_work(40)
    _, gradients = by_autograd(work)
    unused = work.counts().index(0)
    gradients["up"] = gradients["up"].clone()
    gradients["up"][unused] = 1.0
    assert Oracle(work).gradient_errors(gradients)["up"] > GRADIENT_LIMIT


def test_what_was_not_written_is_found():
    work = small_work()
    output, _ = by_autograd(work)
    output[3] = float("nan")
    assert not Oracle(work).output_error(output) <= OUTPUT_LIMIT
