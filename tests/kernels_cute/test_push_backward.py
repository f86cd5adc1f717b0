"""Dgrad gate+up pushes its rows itself: all gradients with the same bits, only slots of real routes written."""

import dataclasses

import pytest
import torch

pytest.importorskip("cutlass")

from mok import kernels
from mok.config import Shape
from mok.kernels_cute.backward import program
from mok.kernels_cute.backward.kernel import GRAD_MODES, BackwardKernel
from mok.kernels_cute.backward.program import Backward, backward_tile, make_plan
from mok.kernels_cute.machine import machine_of
from mok.runtime.compile import Kernel, get_kernel
from tests.backward_cases import Layer, assert_same, emulated, exact_run
from tests.backward_runs import BackwardRun


def pushing(grad_mode: str = "bf16", **config) -> Kernel:
    """A layer's kernel, but that it pushes."""
    spec = kernels.backward_spec("sm_90a", False, grad_mode)
    config = dict(spec.config) | {"push": True} | config
    return get_kernel(dataclasses.replace(spec, config=tuple(sorted(config.items()))))


def only_real_slots(run: BackwardRun) -> None:
    """Slots are NaN until they are written; those of routes to nobody stay so, and the ring of dx."""
    for rank, ids in enumerate(run.ids):
        real = torch.zeros(len(run.views["dx"][rank]), dtype=torch.bool)
        real[: ids.numel()] = ids.reshape(-1) >= 0
        dx, dw = (run.views[name][rank] for name in ("dx", "dw"))
        assert torch.equal(~dx.isnan(), real[:, None].expand_as(dx))
        assert torch.equal(~dw.isnan(), real)
        assert run.ranks[rank].dx.isnan().all()


def exact(layer: Layer, *, comm: int = 2, grid: int = 6, **config) -> None:
    layer = dataclasses.replace(layer, direct=False)
    run, want = exact_run(
        layer, "sm_90a", "cpu", grid=grid, num_comm_ctas=comm, push=True, **config
    )
    assert_same(emulated(run, grid, layer.seed), want)
    only_real_slots(run)


@pytest.mark.emulator
@pytest.mark.parametrize("ep_size, seed", [(2, None), (2, 0), (4, 1)])
def test_gradients(ep_size, seed):
    """A ring that is filled again, whose minibatches are replayed."""
    exact(Layer(Shape(260, 64, 64, 4, 2, 1, 64), ep_size=ep_size, seed=seed, gated=True), grid=4)


@pytest.mark.emulator
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 16))
@pytest.mark.parametrize("ep_size", [2, 4])
@pytest.mark.parametrize("macrobatch", [1, 3, 5])
def test_rings(ep_size, macrobatch, seed):
    shape = Shape(400, 192, 64, 6, 2, 1, 64)
    exact(Layer(shape, ep_size=ep_size, macrobatch=macrobatch, seed=seed, kind="dropped"))


@pytest.mark.emulator
@pytest.mark.parametrize("kind", ["dropped", "one_expert"])
def test_routings(kind):
    """Routes to nobody; an expert larger than the ring, whose partial sums go on in the next macrobatch."""
    shape = Shape(150, 64, 64, 3, 3, 1, 64)
    layer = Layer(shape, kind=kind, ep_size=3, macrobatch=1, lengths=(100, 0, 50), seed=3)
    exact(layer, grid=14)  # whoever adds up a block's partials has no part in what frees the slot


@pytest.mark.emulator
@pytest.mark.slow
@pytest.mark.parametrize("seed", [4, 5])
@pytest.mark.parametrize("kind", ["random", "skewed", "few_experts", "duplicates"])
def test_more_routings(kind, seed):
    exact(Layer(Shape(300, 64, 128, 8, 2), kind=kind, ep_size=2, seed=seed))


@pytest.mark.emulator
def test_odd_sizes():
    """Columns that end within a tile; more groups of 64 columns than a warp has lanes."""
    exact(Layer(Shape(30, 320, 2112, 2, 1), ep_size=2, kind="dropped", seed=6))


@pytest.mark.emulator
@pytest.mark.slow
@pytest.mark.parametrize("hidden", [128, 192, 256, 576])
def test_more_odd_sizes(hidden):
    exact(Layer(Shape(200, hidden, 320, 4, 2, 1, 128), ep_size=2, kind="dropped", seed=7))


@pytest.mark.emulator
@pytest.mark.parametrize("seed", [8, pytest.param(9, marks=pytest.mark.slow)])
def test_pairs_and_overlapping_items(seed):
    layer = Layer(Shape(300, 64, 64, 4, 2, 1, 64), kind="dropped", ep_size=2, seed=seed)
    exact(layer, grid=8, pair=True, comm_m=128, overlap=True)


@pytest.mark.emulator
@pytest.mark.slow
@pytest.mark.parametrize("grad_mode", ["fp32", "bf16_add", "fp32_add"])
def test_weight_gradients_that_are_not_staged(grad_mode):
    """Buffers stay in step where the result warps write the weight gradients themselves."""
    layer = Layer(Shape(150, 64, 64, 3, 3, 1, 64), kind="few_experts", ep_size=2, seed=9)
    exact(layer, grad_mode=grad_mode)


@pytest.mark.emulator
@pytest.mark.slow
@pytest.mark.parametrize("wire", [False, True])
def test_mxfp8(wire):
    """The same bits as where comm workers push."""
    layer = Layer(Shape(200, 128, 64, 3, 2), kind="dropped", ep_size=2, direct=False, seed=3)
    found = []
    for push in (False, True):
        run = layer.make_run(
            *layer.inputs(False, "cpu"), "sm_90a", grid=6, num_comm_ctas=2, mxfp8=True, push=push
        )
        found.append(emulated(run, 6, layer.seed))
    assert_same(*found)
    only_real_slots(run)


RESOURCES = [
    {},
    {"comm_m": 128, "overlap": True},
    {"limited": True},
    {"pair": False},
    {"mxfp8": True, "pair": False},
    {"mxfp8": True, "pair": False, "wire": True},
    {"trace": True},
    *({"grad_mode": mode} for mode in GRAD_MODES[1:]),
]


@pytest.mark.parametrize(
    "config",
    [pytest.param(c, marks=pytest.mark.slow if c else ()) for c in RESOURCES],
    ids=lambda config: "-".join(map(str, config.values())) or "layer",
)
def test_resources(config):
    (used,) = pushing(**config).resources.kernels
    assert used.spill_bytes == 0 and used.stack_bytes == 0 and not used.warnings
    assert used.registers == 168


@pytest.mark.parametrize("arch, direct", [("sm_90a", True), ("sm_100a", False)])
def test_where_nothing_is_pushed(arch, direct):
    """The default may be switched on."""
    assert not BackwardKernel(direct, arch, push=True).push


@pytest.mark.parametrize(
    "experts", [[1], [9], [1] * 9, [0, 3, 2, 0, 4], [20, 1, 1]], ids=lambda e: "-".join(map(str, e))
)
@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_dispatches_alone(experts, slots):
    """The comm items are those of the program with pushes, without them, and in the same order."""
    tile = backward_tile(machine_of("sm_90a"))
    sizes = (128 * sum(experts), 0, 64, 64, 0, len(experts), 256, 256 * slots, tile)
    both, alone = (Backward(*sizes, push=push) for push in (False, True))
    plan = make_plan(both, experts)
    bases, freed = plan.tables[program.ITEM_BASE], plan.tables[program.FREE_BASE]
    items = []
    for at in range(bases[-1]):
        for within in range(both.items_per_block):
            if at < both.first_blocks:
                items.append(both.first_item(at, within))
            else:
                s = max(i for i in range(both.minibatches) if bases[i] <= at)
                items.append(both.item_in(s, at - bases[s], within, freed[s]))
    assert len(items) == both.items
    per_block = alone.items_per_block
    assert [alone.first_item(*divmod(i, per_block)) for i in range(alone.items)] == [
        item for item in items if item.kind == program.DISPATCH
    ]
    assert alone.items <= alone.first_blocks * per_block
