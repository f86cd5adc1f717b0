"""The Hopper backward kernel in MXFP8, in the emulator, against the quantised reference."""

import pytest

pytest.importorskip("cutlass")

import torch

from mok import kernels
from mok.config import Shape
from mok.errors import ResourceError
from mok.kernels_cute.backward.kernel import BackwardKernel
from mok.reference import (
    backward_oracle,
    backward_reference,
    random_case,
    random_gradient,
    relative_l2,
)
from mok.runtime.compile import get_kernel
from tests.backward_cases import emulated
from tests.backward_runs import BackwardRun
from tests.helpers import opcodes

ARCH = "sm_90a"
LIMIT = 5e-3  # against the quantised reference
FP32_LIMIT = {"x": 7e-2, "router_weights": 7e-2}  # and 8e-2 for weights


def run(case, dy, ep_size=1, seed=None, minibatch=128, macrobatch=256, **options):
    backward = BackwardRun(
        case, dy, ep_size, direct=False, minibatch=minibatch, macrobatch=macrobatch, grid=4,
        num_comm_ctas=2, arch=ARCH, mxfp8=True, **options,
    )  # fmt: skip
    return emulated(backward, 6, seed)


def check(case, dy, found):
    wanted = backward_reference(case, dy, precision="mxfp8").named()
    exact = backward_oracle(case, dy).named()
    for name, value in found.named().items():
        assert relative_l2(value, wanted[name]) < LIMIT, name
        if not name.startswith("shared"):
            assert relative_l2(value, exact[name]) < FP32_LIMIT.get(name, 8e-2), name


@pytest.mark.emulator
def test_gradients():
    """Two experts of three blocks: a ring of two, so that one macrobatch is replayed."""
    case = random_case(Shape(150, 128, 128, 2, 2, 1, 64), seed=1)
    dy = random_gradient(case)
    check(case, dy, run(case, dy))


@pytest.mark.emulator
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("shape", "ep_size", "kind"),
    [
        (Shape(60, 256, 128, 4, 2), 2, "random"),
        (Shape(70, 128, 384, 3, 2, 1, 128), 3, "dropped"),
        (Shape(300, 128, 128, 3, 1), 1, "one_expert"),
    ],
)
def test_more_gradients(shape, ep_size, kind, seed):
    case = random_case(shape, kind=kind, seed=seed)
    dy = random_gradient(case, seed=seed)
    check(case, dy, run(case, dy, ep_size, seed))


@pytest.mark.emulator
@pytest.mark.slow
def test_bits_do_not_depend_on_ranks_and_sizes():
    case = random_case(Shape(150, 128, 128, 2, 2), seed=2)
    dy = random_gradient(case)
    one = run(case, dy, macrobatch=1024).named()
    for options in ({"ep_size": 2}, {"minibatch": 256, "macrobatch": 256}):
        found = run(case, dy, **options).named()
        for name, value in found.items():
            assert torch.equal(value, one[name]), (options, name)


def test_what_is_refused():
    with pytest.raises(ResourceError, match="Hopper"):
        BackwardKernel(direct=False, arch="sm_100a", mxfp8=True)
    with pytest.raises(ResourceError, match="ring"):
        BackwardKernel(direct=True, mxfp8=True)


@pytest.mark.slow  # compiles once more
def test_code():
    kernel = get_kernel(kernels.backward_spec(ARCH, False, mxfp8=True))
    (used,) = kernel.resources.kernels
    assert used.spill_bytes == 0 and used.stack_bytes == 0
    assert opcodes(kernel.ptx)["cvt.rn.satfinite.e4m3x2.f32"] > 0
