"""A NaN or Inf in one token reaches the gradients that it mathematically touches, and no others."""

import dataclasses

import pytest
import torch

pytest.importorskip("cutlass")

from mok.config import Shape
from tests.backward_cases import Layer, emulated

pytestmark = pytest.mark.emulator

LAYER = Layer(Shape(24, 64, 64, 8, 2, 1, 64), gated=True)
RING = dataclasses.replace(LAYER, ep_size=2, direct=False)
# In MXFP8 32 rows of an expert share scales along the tokens: weight gradients of touched experts alone.
MXFP8 = dataclasses.replace(RING, shape=Shape(24, 128, 128, 8, 2, 1, 64))
IN_X, IN_DY = 7, 20  # the tokens


def run(layer, arch, case, dy):
    comm = 0 if layer.direct else 2
    grid = comm + (2 if arch == "sm_90a" else 4)
    mxfp8 = layer is MXFP8
    return emulated(layer.make_run(case, dy, arch, grid=grid, num_comm_ctas=comm, mxfp8=mxfp8), 8)


@pytest.mark.parametrize("layer", [LAYER, RING, MXFP8], ids=["direct", "ring", "mxfp8"])
@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
def test_values_that_are_not_numbers_stay_where_they_belong(arch, layer):
    case, dy = layer.inputs(False, "cpu")
    clean = run(layer, arch, case, dy)
    x, bad_dy = case.x.clone(), dy.clone()
    x[IN_X, 3], bad_dy[IN_DY, 5] = torch.nan, torch.inf
    found = run(layer, arch, dataclasses.replace(case, x=x), bad_dy)

    others = [t for t in range(24) if t not in (IN_X, IN_DY)]
    assert torch.equal(found.x[others], clean.x[others])
    assert torch.equal(found.router_weights[others], clean.router_weights[others])
    assert torch.equal(found.shared_scale[others], clean.shared_scale[others])
    assert not found.x[[IN_X, IN_DY]].isfinite().any()
    assert not found.router_weights[[IN_X, IN_DY]].isfinite().any()

    ids = case.top_experts
    touched = {int(e) for e in ids[[IN_X, IN_DY]].flatten() if e >= 0}
    assert 0 < len(touched) < 8
    for name in ("gate", "up", "down"):
        value, before = getattr(found.routed, name), getattr(clean.routed, name)
        for expert in range(8):
            if expert in touched:
                assert not value[expert].isfinite().all()
            else:
                assert torch.equal(value[expert], before[expert])
