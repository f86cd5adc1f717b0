"""A ring that holds every routing: backward has no memory for replays and carried sums, and needs none."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mok import functional
from mok.config import Config, Shape
from mok.reference import integer_case, integer_gradient
from tests.helpers_layer import Layer, to_device, watched

CONFIG = Config(2, 2, 256, 256)


def gradients(case, ep_size, ring, precision, device="cpu", machine=None):
    """All of a call's results, and the scratch that its backward pass took."""
    config = dataclasses.replace(CONFIG, macrobatch_size=ring)
    dy = integer_gradient(case)
    with Layer(case, ep_size, config, device, precision=precision) as layer:
        if machine is not None:
            with watched(machine, layer):
                if ep_size > 1:
                    made = vars(layer.workspace.backward).values()
                    machine.register(*(t.peer(r) for t in made for r in layer.ranks))
                found = _both(layer, case, dy.to(device))
        else:
            found = _both(layer, case, dy.to(device))
        holds_all = layer.workspace.sizes.ring >= layer.workspace.sizes.capacity
    return found, holds_all


def _both(layer, case, dy):
    result = layer.queue(save_context=True)
    grads = functional.backward(
        layer.config, layer.workspace, result.schedule, result.context,
        layer.each(layer.split(dy)), *layer.arguments(case), case.swiglu_limit,
    )  # fmt: skip
    layer.finish()
    flat = [t for g in grads for t in (g if isinstance(g, list) else [g])]
    return [result.output, *flat]


@pytest.mark.emulator
@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
@pytest.mark.parametrize("ep_size", [1, 2])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_same_bits_without_the_memory(arch, ep_size, precision):
    """Told of all memory, the emulator reports any other access."""
    pytest.importorskip("numba", reason="the emulator needs numba")
    pytest.importorskip("cutlass", reason="kernels need the CuTe DSL")
    from mok.tools.emulator import Emulator

    size = 64 if precision == "bf16" else 128
    case = integer_case(Shape(200, size, size, 5, 2, 1, 64), kind="skewed", seed=2)
    with Emulator(arch, num_sms=6):
        want, small = gradients(case, ep_size, 256, precision)
    with Emulator(arch, num_sms=6) as machine:
        found, holds_all = gradients(
            case, ep_size, 4096, precision, machine=machine if precision == "bf16" else None
        )
    assert not machine.report.findings, "\n".join(map(str, machine.report.findings))
    assert holds_all and not small
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
@pytest.mark.parametrize("ep_size", [1, 2])
def test_same_bits_on_a_gpu(ep_size, precision):
    shape = Shape(3000, 512, 384, 9, 3, 1, 192)
    case = to_device(integer_case(shape, kind="skewed", seed=2), "cuda")
    want, small = gradients(case, ep_size, 1024, precision, "cuda")
    found, holds_all = gradients(case, ep_size, 65536, precision, "cuda")
    assert holds_all and not small
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
