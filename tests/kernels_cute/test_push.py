"""Down pushes its rows itself: whole layers with the same bits, and only the slots of real routes written."""

import pytest
import torch

pytest.importorskip("cutlass")

from mok import kernels
from mok.config import Shape
from mok.kernels_cute.forward import ForwardKernel
from mok.kernels_cute.machine import machine_of
from mok.kernels_cute.program import COMBINE, Forward, Tile
from mok.reference import forward_loop, integer_case
from tests.forward_runs import ForwardRun, emulated, forward_kernel

EVERYTHING = {
    "pair": True, "save_context": True, "comm_m": 128, "overlap": True, "limited": False,
}  # fmt: skip


def run(shape: Shape, seed: int | None, *, kind: str = "random", slots: int = 2, **config) -> None:
    case = integer_case(shape, kind=kind, seed=1 + (seed or 0))
    with emulated("sm_90a", 8, seed) as emulator:
        layer = ForwardRun(
            case, "sm_90a", shape.ep_size, minibatch=128, macrobatch=128 * slots, grid=8,
            num_comm_ctas=2, push=True, **config,
        )  # fmt: skip
        found = layer.run(emulator.register)
        assert not emulator.report.findings
    assert not layer.record.any()
    assert torch.equal(found, forward_loop(case).to(torch.bfloat16))
    # Slots are NaN until they are written; those of routes to nobody stay so.
    topk, hidden = shape.topk, shape.hidden_size
    for rank, ids in enumerate(layer.ids):
        at = rank * layer.stride + layer.slots_at
        slots_of = layer.heap[at : (rank + 1) * layer.stride].view(-1, hidden)
        written = ~slots_of.isnan()
        wanted = torch.zeros(len(slots_of), dtype=torch.bool)
        wanted[: len(ids) * topk] = ids.reshape(-1) >= 0
        assert torch.equal(written, wanted[:, None].expand_as(written))
        assert layer.saved[rank]["y"].isnan().all()


@pytest.mark.emulator
@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize("ep_size", [2, 4])
def test_forward(ep_size, seed):
    """A ring that is filled again, and rows that are padding."""
    run(Shape(600, 256, 256, 4, 2, ep_size, 64), seed, slots=3)


@pytest.mark.emulator
@pytest.mark.parametrize("kind", ["dropped", "skewed", "one_expert", "few_experts", "duplicates"])
def test_routings(kind):
    run(Shape(300, 320, 128, 8, 2, 2), 3, kind=kind)


@pytest.mark.emulator
@pytest.mark.parametrize("hidden", [64, 192, 320, 576])
@pytest.mark.parametrize("tile_n", [128, 256])
def test_columns_end_within_a_tile(hidden, tile_n):
    run(Shape(260, hidden, 64, 4, 2, 2), 4, kind="dropped", tile_n=tile_n)


@pytest.mark.emulator
@pytest.mark.parametrize("seed", [5, 6])
@pytest.mark.parametrize(
    "config",
    [{"save_context": True}, {"pair": True}, EVERYTHING, {"ahead": 3}],
    ids=lambda config: "-".join(config),
)
def test_builds(config, seed):
    run(Shape(600, 320, 192, 4, 2, 2, 128), seed, kind="dropped", slots=3, **config)


@pytest.mark.parametrize(
    "config",
    [
        {},
        EVERYTHING,
        EVERYTHING | {"save_context": False},
        {"tile_n": 128},
        {"mxfp8": True},
        {"trace": True},
    ],
    ids=lambda config: "-".join(config) or "plain",
)
def test_resources(config):
    kernel = forward_kernel("sm_90a", direct=False, push=True, **config)
    (used,) = kernel.resources.kernels
    assert used.spill_bytes == 0 and used.stack_bytes == 0 and not used.warnings
    assert used.registers == 168


@pytest.mark.parametrize(
    ("arch", "config"),
    [
        ("sm_90a", {"direct": True}),
        ("sm_90a", {"direct": False, "recompute": True}),
        ("sm_100a", {"direct": False}),
    ],
    ids=str,
)
def test_where_nothing_is_pushed(arch, config):
    """``push`` may be said everywhere; builds that have no pushes stay as they are."""
    texts = {forward_kernel(arch, push=push, **config).ptx for push in (None, True, False)}
    assert len(texts) == 1


@pytest.mark.parametrize("mxfp8", [False, True])
def test_a_ring_on_hopper_pushes(mxfp8):
    default, pushing, combining = (
        ForwardKernel(False, "sm_90a", mxfp8=mxfp8, push=push) for push in (None, True, False)
    )
    assert default.push and pushing.push and not combining.push
    spec = kernels.forward_spec("sm_90a", False, mxfp8=mxfp8)
    assert "push" not in dict(spec.config)  # what a layer runs has the default


@pytest.mark.parametrize("tokens", [1, 5, 8, 9, 30])
@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_dispatches_alone(tokens, slots):
    """The comm items are those of the program with combines, without them, and in the same order."""
    tile = Tile(comm_m=machine_of("sm_90a").tile_m // 2)
    programs = [
        Forward(128 * tokens, 0, 64, 64, 0, 256, 256 * slots, tile, push=push)
        for push in (False, True)
    ]
    with_combines, alone = ([p.item(i) for i in range(p.items)] for p in programs)
    assert alone == [item for item in with_combines if item.kind != COMBINE]
