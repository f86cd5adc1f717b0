"""Comm workers that carry rows through shared memory by bulk copies: whole layers, with the same bits."""

import dataclasses

import pytest
import torch

pytest.importorskip("cutlass")

from mok import kernels
from mok.config import Shape
from mok.errors import ResourceError
from mok.kernels_cute.carry import BARRIERS, LANES, PIECE, piece_bytes
from mok.kernels_cute.forward import ForwardKernel
from mok.reference import forward_loop, integer_case
from mok.runtime.compile import get_kernel
from tests.backward_cases import Layer, assert_same, exact_run
from tests.backward_cases import emulated as emulated_backward
from tests.forward_runs import ForwardRun, forward_kernel

ARCHS = ["sm_90a", "sm_100a"]


def run_forward(shape: Shape, arch: str, seed: int | None, push: bool = False, **config) -> None:
    """Without ``push`` comm workers carry results, too."""
    Emulator = pytest.importorskip("mok.tools.emulator").Emulator
    case = integer_case(shape, seed=1)
    size = 128 if arch == "sm_90a" else 256
    with Emulator(arch, num_sms=8, seed=seed) as emulator:
        run = ForwardRun(
            case, arch, shape.ep_size, minibatch=size, macrobatch=2 * size, grid=8,
            num_comm_ctas=2, num_sms=8, carry=True, push=push, **config,
        )  # fmt: skip
        found = run.run()
        assert not emulator.report.findings
    assert torch.equal(found, forward_loop(case).to(torch.bfloat16))


@pytest.mark.emulator
@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize(("arch", "push"), [(arch, False) for arch in ARCHS] + [("sm_90a", True)])
def test_forward(arch, push, seed):
    """Padding, and a ring that is filled again."""
    run_forward(Shape(300, 256, 256, 4, 2, 2), arch, seed, push)


@pytest.mark.emulator
@pytest.mark.parametrize("hidden", [64, 320, 8320])
def test_lengths_of_rows(hidden):
    """More rows than barriers for a warp's memory, some, and rows that are longer than it."""
    assert (PIECE // (2 * 64) > LANES) and PIECE < 2 * 8320
    run_forward(Shape(140, hidden, 64, 4, 2, 2), "sm_90a", 2)


@pytest.mark.emulator
@pytest.mark.parametrize("hidden", [128, 2048, 8320])
def test_items_of_128_rows(hidden):
    run_forward(Shape(300, hidden, 64, 4, 2, 2), "sm_90a", 1, comm_m=128)


@pytest.mark.emulator
@pytest.mark.parametrize("comm_m", [64, 128])
@pytest.mark.parametrize("hidden", [128, 2048, 8320])
@pytest.mark.parametrize(("seed", "push"), [(None, False), (0, False), (1, False), (1, True)])
def test_items_overlap(hidden, comm_m, seed, push):
    """An item begins while the last one's rows are on their way, and tells of it."""
    run_forward(Shape(300, hidden, 64, 4, 2, 2), "sm_90a", seed, push, comm_m=comm_m, overlap=True)


@pytest.mark.emulator
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_items_overlap_on_blackwell(seed):
    run_forward(Shape(300, 320, 64, 4, 2, 2), "sm_100a", seed, overlap=True)


@pytest.mark.emulator
@pytest.mark.parametrize("macrobatch", [1, 3])
@pytest.mark.parametrize(("pair", "comm_m"), [(False, 64), (True, 128)])
def test_items_of_backward_overlap(pair, comm_m, macrobatch):
    layer = Layer(
        Shape(300, 320, 192, 3, 3, 1, 64), kind="few_experts", direct=False, ep_size=2, seed=1,
        macrobatch=macrobatch,
    )  # fmt: skip
    options = {"pair": True} if pair else {}
    run, want = exact_run(
        layer, "sm_90a", "cpu", grid=6, num_comm_ctas=2, comm_m=comm_m, overlap=True, **options
    )
    assert_same(emulated_backward(run, 6, layer.seed), want)


@pytest.mark.emulator
@pytest.mark.parametrize(("arch", "stages"), [("sm_90a", 3), ("sm_100a", 2)])
def test_little_memory(arch, stages):
    """Fewer stages leave less for rows, so that these are cut."""
    run_forward(Shape(140, 7168, 64, 4, 2, 2), arch, 3, stages=stages)


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("arch", "pair", "comm_m"),
    [("sm_90a", False, 64), ("sm_90a", True, 128), ("sm_100a", False, 64)],
)
def test_backward(arch, pair, comm_m):
    layer = Layer(
        Shape(300, 320, 192, 3, 3, 1, 64), kind="few_experts", direct=False, ep_size=2, seed=1,
        macrobatch=3,
    )  # fmt: skip
    options = {"pair": True} if pair else {}
    options |= {"comm_m": comm_m} if comm_m != 64 else {}
    run, want = exact_run(layer, arch, "cpu", grid=6, num_comm_ctas=2, carry=True, **options)
    assert_same(emulated_backward(run, 6, layer.seed), want)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("arch", ARCHS)
def test_no_spill(arch, overlap):
    kernel = forward_kernel(arch, direct=False, carry=True, overlap=overlap, push=False)
    (used,) = kernel.resources.kernels
    assert used.spill_bytes == 0 and not used.warnings


@pytest.mark.parametrize("comm_m", [64, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("arch", ARCHS)
def test_no_spill_of_backward(arch, comm_m):
    """Overlapping items, whose build is the largest."""
    spec = kernels.backward_spec(arch, direct=False)
    config = dict(spec.config) | {"carry": True, "overlap": True, "comm_m": comm_m}
    spec = dataclasses.replace(spec, config=tuple(sorted(config.items())))
    (used,) = get_kernel(spec).resources.kernels
    assert used.spill_bytes == 0 and not used.warnings


def test_items_that_the_workers_do_not_take():
    for config in ({"comm_m": 96}, {"comm_m": 128, "carry": False}, {"comm_m": 128, "mxfp8": True}):
        with pytest.raises(ResourceError, match="comm_m must be 64"):
            ForwardKernel(False, "sm_90a", **config)
    for config in ({"carry": False}, {"mxfp8": True}):
        with pytest.raises(ResourceError, match="overlap"):
            ForwardKernel(False, "sm_90a", overlap=True, **config)


def test_memory_of_a_warp():
    assert piece_bytes(224 * 1024, 12) == PIECE
    assert piece_bytes(131072, 12) == 9984
    for free in (131072, 229376):
        assert BARRIERS + 13 * piece_bytes(free, 12) <= free
    with pytest.raises(ValueError, match="too few"):
        piece_bytes(10000, 12)
    with pytest.raises(ValueError, match="too few"):
        piece_bytes(1 << 20, 17)  # barriers
