"""What ``push_ab`` times: the layer's own call, with kernels that push or do not, and the same bits."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="kernels need the CuTe DSL")

from mok import kernels
from mok.config import Shape
from mok.reference import integer_case
from mok.tools.bench.programs.ours import layer_pushes
from mok.tools.bench.push_ab import pushing
from tests.mok.test_one_macrobatch import gradients


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_kernels_are_those_of_the_layer_but_for_push(which):
    original = getattr(kernels, f"{which}_spec")
    spec = original("sm_90a", False)
    with pushing(which, True):
        pushed = getattr(kernels, f"{which}_spec")("sm_90a", False)
    with pushing(which, False):
        base = getattr(kernels, f"{which}_spec")("sm_90a", False)
    assert base.name == spec.name and pushed.name == f"{spec.name}_push"
    assert dict(base.config) == {**dict(spec.config), "push": False}
    assert getattr(kernels, f"{which}_spec") is original
    assert dict(pushed.config) == {**dict(spec.config), "push": True}


def test_what_a_program_notes():
    """``pushed``, where the layer's own kernel does so, or is made to."""
    assert layer_pushes("sm_90a", False) and not layer_pushes("sm_90a", True)
    assert not layer_pushes("sm_100a", False)
    for push in (True, False):
        with pushing("forward", push):
            assert layer_pushes("sm_90a", False) == push
            assert not layer_pushes("sm_100a", False)


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
@pytest.mark.parametrize("ring", [256, 4096])
def test_layers_of_both_passes(precision, ring):
    from mok.tools.emulator import Emulator

    case = integer_case(Shape(200, 128, 128, 5, 2, 1, 64), kind="skewed", seed=2)
    with Emulator("sm_90a", num_sms=6):
        want, _ = gradients(case, 2, ring, precision)
    with (
        pushing("forward", True),
        pushing("backward", True),
        Emulator("sm_90a", num_sms=6) as machine,
    ):
        found, _ = gradients(case, 2, ring, precision)
    assert not machine.report.findings, "\n".join(map(str, machine.report.findings))
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    ran = {launch.kernel for launch in machine.report.launches}
    rings = {name for name in ran if name.startswith(("forward_ring", "backward_ring"))}
    assert len(rings) == 2 and all("_push" in name for name in rings), ran
