"""Dgrad gate+up pushes its rows itself: all gradients with the same bits, and only the slots of real routes written."""

import dataclasses

import pytest
import torch

pytest.importorskip("cutlass")

from mok.config import Shape
from tests.backward_cases import Layer, assert_same, emulated, exact_run
from tests.backward_runs import BackwardRun


def only_real_slots(run: BackwardRun) -> None:
    """Slots are NaN until they are written; those of routes to nobody stay so, and the ring of dx, which has no use."""
    for rank, ids in enumerate(run.ids):
        real = torch.zeros(len(run.views["dx"][rank]), dtype=torch.bool)
        real[: ids.numel()] = ids.reshape(-1) >= 0
        dx, dw = (run.views[name][rank] for name in ("dx", "dw"))
        assert torch.equal(~dx.isnan(), real[:, None].expand_as(dx))
        assert torch.equal(~dw.isnan(), real)
        assert run.ranks[rank].dx.isnan().all()


def exact(layer: Layer, *, comm: int = 2, grid: int = 6, **config) -> None:
    layer = dataclasses.replace(layer, direct=False)
    run, want = exact_run(layer, "sm_90a", "cpu", grid=grid, num_comm_ctas=comm, push=True, **config)
    assert_same(emulated(run, grid, layer.seed), want)
    only_real_slots(run)


@pytest.mark.emulator
@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("ep_size", [2, 4])
def test_gradients(ep_size, seed):
    exact(Layer(Shape(300, 64, 64, 4, 2, 1, 64), ep_size=ep_size, seed=seed, gated=True))
