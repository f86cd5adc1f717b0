"""The backward kernel in MXFP8, in the emulator, against the quantised reference.

The unmarked tests are a sample that fits CI; ``slow`` ones are the full matrix.
"""

import functools

import pytest

pytest.importorskip("cutlass")

import torch

from mok import kernels
from mok.config import Shape
from mok.errors import ResourceError
from mok.kernels_cute.backward.kernel import GRAD_MODES, BackwardKernel
from mok.kernels_cute.machine import SMEM_BYTES, machine_of
from mok.reference import (
    backward_oracle,
    backward_reference,
    integer_case,
    integer_gradient,
    random_case,
    random_gradient,
    relative_l2,
)
from mok.runtime.compile import get_kernel
from tests.backward_cases import emulated
from tests.backward_runs import BackwardRun
from tests.helpers import opcodes

ARCHS = ["sm_90a", "sm_100a"]
LIMIT = 5e-3  # against the quantised reference
FP32_LIMIT = {"x": 7e-2}  # and 8e-2 for weights, the router's too: a few hundred values here
SMS = {"sm_90a": 6, "sm_100a": 8}


def make_run(case, dy, arch, ep_size=1, minibatch=1, macrobatch=2, **options):
    """A run; minibatch and macrobatch in tiles of rows."""
    tile = machine_of(arch).tile_m
    options = {"grid": SMS[arch], "num_comm_ctas": 2} | options
    return BackwardRun(
        case, dy, ep_size, direct=False, minibatch=minibatch * tile, macrobatch=macrobatch * tile,
        arch=arch, mxfp8=True, **options,
    )  # fmt: skip


def run(case, dy, arch, ep_size=1, seed=None, **options):
    return emulated(make_run(case, dy, arch, ep_size, **options), SMS[arch], seed)


def check(case, dy, found, ep_size=1, exact=False):
    """``exact``: what MXFP8 quantises holds few bits, so that no sum rounds."""
    wanted = backward_reference(case, dy, ep_size, precision="mxfp8").named()
    # What the clamp cuts off jumps, and quantising moves values across it: FP32 says nothing there.
    oracle = {} if case.swiglu_limit else backward_oracle(case, dy).named()
    for name, value in found.named().items():
        assert value.dtype == wanted[name].dtype
        if exact:
            assert torch.equal(value, wanted[name]), name
        assert relative_l2(value, wanted[name]) < LIMIT, name
        # A sum over two values, and a gradient of one row, may be any share of what they cost.
        many = value.numel() > 2 and (name in ("x", "router_weights") or case.x.shape[0] > 1)
        if name in oracle and not name.startswith("shared") and many:
            assert relative_l2(value, oracle[name]) < FP32_LIMIT.get(name, 8e-2), name


@functools.cache
def random_inputs(shape, kind="random", seed=1, limit=None):
    case = random_case(shape, kind=kind, seed=seed, swiglu_limit=limit)
    return case, random_gradient(case, seed=seed)


# ------------------------------------------------------------------ a sample for CI


@pytest.mark.emulator
def test_gradients_on_hopper():
    """Two experts of three blocks: a ring of two, so that one macrobatch is replayed."""
    inputs = random_inputs(Shape(150, 128, 128, 2, 2, 1, 64))
    check(*inputs, run(*inputs, "sm_90a"))


@pytest.mark.emulator
def test_gradients_on_blackwell():
    """Integers, exact; one expert of three tiles through a ring of two, in adversarial order."""
    case = integer_case(Shape(300, 128, 128, 3, 2, 1, 64), kind="few_experts", seed=1)
    dy = integer_gradient(case, seed=1)
    check(case, dy, run(case, dy, "sm_100a", 2, seed=1), 2, exact=True)


# ------------------------------------------------------------------ the full matrix


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
def test_more_gradients_on_hopper(shape, ep_size, kind, seed):
    inputs = random_inputs(shape, kind, seed)
    check(*inputs, run(*inputs, "sm_90a", ep_size, seed), ep_size)


# T (of all ranks), H, I, E, K, EP (unused), shared I: those of the forward kernel's matrix.
SHAPES = {
    "small": Shape(200, 128, 256, 4, 2, 1, 64),
    "no shared expert": Shape(257, 384, 128, 3, 2),
    "wide": Shape(130, 640, 128, 2, 1, 1, 128),
    "deep": Shape(140, 128, 640, 2, 2, 1, 320),
    "many experts": Shape(200, 128, 128, 11, 3),
    "one token": Shape(1, 128, 128, 4, 2, 1, 64),
    "top all": Shape(90, 256, 128, 5, 5, 1, 64),
    "whole tiles": Shape(512, 256, 256, 2, 1, 1, 256),
}


@pytest.mark.emulator
@pytest.mark.slow
@pytest.mark.parametrize("ep_size", [1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_on_blackwell(name, ep_size):
    """Random values, a ring that wraps."""
    inputs = random_inputs(SHAPES[name], "skewed" if name == "many experts" else "random")
    check(*inputs, run(*inputs, "sm_100a", ep_size, seed=2, macrobatch=1), ep_size)


@pytest.mark.emulator
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_ten_seeds_on_blackwell(seed):
    inputs = random_inputs(SHAPES["small"], "dropped", limit=1.0 if seed % 2 else None)
    check(*inputs, run(*inputs, "sm_100a", 2, seed=seed, macrobatch=1), 2)


@pytest.mark.emulator
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["few_experts", "one_expert", "dropped", "skewed", "duplicates"])
def test_exact_routings_on_blackwell(kind):
    case = integer_case(Shape(300, 128, 256, 3, 2, 1, 64), kind=kind, seed=2)
    dy = integer_gradient(case, seed=2)
    check(case, dy, run(case, dy, "sm_100a", 2, seed=3, macrobatch=1), 2)


@pytest.mark.emulator
@pytest.mark.slow  # each mode is a kernel of its own
@pytest.mark.parametrize("grad_mode", ["fp32", "bf16_add", "fp32_add"])
def test_grad_modes_on_blackwell(grad_mode):
    inputs = random_inputs(SHAPES["small"])
    adding = {}
    if grad_mode.endswith("_add"):
        adding = {
            "into": backward_reference(*inputs, 2, precision="mxfp8", grad_mode=grad_mode[:4])
        }
    found = run(*inputs, "sm_100a", 2, macrobatch=1, grad_mode=grad_mode, **adding).named()
    wanted = backward_reference(*inputs, 2, precision="mxfp8", grad_mode=grad_mode, **adding)
    for name, value in wanted.named().items():
        assert found[name].dtype == value.dtype
        assert relative_l2(found[name], value) < LIMIT, name


@pytest.mark.emulator
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_bits_do_not_depend_on_ranks_and_sizes(arch):
    inputs = random_inputs(Shape(300, 128, 128, 2, 2), seed=2)
    one = run(*inputs, arch, macrobatch=8).named()
    launches = [{"ep_size": 2, "seed": 1}, {"minibatch": 2, "macrobatch": 2}, {"macrobatch": 1}]
    if arch == "sm_100a":  # other tiles, stages and schedulers
        launches += [{"group_m": 1, "stages": 3, "ep_size": 2}, {"scheduling": "tickets"}]
    for options in launches:
        found = run(*inputs, arch, **options).named()
        for name, value in found.items():
            assert torch.equal(value, one[name]), (options, name)


# ------------------------------------------------------------------ the code


def test_what_is_refused():
    for arch in ARCHS:
        with pytest.raises(ResourceError, match="ring"):
            BackwardKernel(direct=True, arch=arch, mxfp8=True)
    with pytest.raises(ResourceError, match="at most 5 stages"):
        BackwardKernel(direct=False, arch="sm_100a", mxfp8=True, stages=6)


def builds():
    for arch in (*ARCHS, "sm_103a"):
        for mode in GRAD_MODES:
            for wire in (False, True):
                common = arch == "sm_100a" and mode == "bf16" and not wire
                spec = kernels.backward_spec(arch, False, mode, mxfp8=True, wire=wire)
                marks = () if common else pytest.mark.slow  # compiles once more
                yield pytest.param(spec, id=f"{arch}-{spec.name}", marks=marks)


@pytest.mark.parametrize("spec", list(builds()))
def test_code(spec):
    kernel = get_kernel(spec)
    (used,) = kernel.resources.kernels
    assert used.spill_bytes == 0 and used.stack_bytes == 0
    assert used.smem_bytes <= SMEM_BYTES and not used.warnings
    assert used.tmem_columns == machine_of(spec.arch).tmem_columns
    assert ".local" not in kernel.ptx
    found = opcodes(kernel.ptx)
    assert found["cvt.rn.satfinite.e4m3x2.f32"] > 0
    if spec.arch == "sm_90a":
        return
    assert found["tcgen05.cp.cta_group::2.32x128b.warpx4"] == 3
    assert found["tcgen05.mma.cta_group::2.kind::mxf8f6f4.block_scale.block32"] == 4
    # The shared expert is BF16: one loop each for its data and its weights.
    assert sum(n for name, n in found.items() if "kind::f16" in name) == 2 * 4
    assert any(n.startswith("clusterlaunchcontrol.try_cancel") for n in found)


def test_machine_code():
    """One loop of block-scaled MMAs, two of BF16's (the shared expert's data and weights)."""
    kernel = get_kernel(kernels.backward_spec("sm_100a", False, mxfp8=True))
    found = kernel.instructions(modifiers=True)
    assert found["UTCQMMA.2CTA"] == 4 and found["UTCHMMA.2CTA"] == 8
    assert found["UTCCP.T.S.2CTA.4x32dp128bit"] == 3
    assert sum(n for name, n in found.items() if name.startswith("USETMAXREG")) == 2


def test_all_builds_are_listed():
    for arch in ARCHS:
        listed = kernels.mxfp8_kernels(arch, has_shared=True)
        for wire in (False, True):
            assert kernels.backward_spec(arch, False, mxfp8=True, wire=wire) in listed


def test_registers_stay_within_the_launch():
    assert sum(BackwardKernel(False, "sm_100a", mxfp8=True).registers) <= 3 * 168


# ------------------------------------------------------------------ GPU


@pytest.mark.gpu
@pytest.mark.parametrize("ep_size", [1, 2])
@pytest.mark.parametrize("shape", [Shape(1024, 1024, 512, 16, 4, 1, 256), SHAPES["deep"]], ids=str)
def test_on_the_gpu(shape, ep_size):
    from mok.runtime.device import device_info

    info = device_info(0)
    integers = integer_case(shape, device="cuda", seed=1)
    case = random_case(shape, device="cuda", seed=1)
    for inputs in (
        (integers, integer_gradient(integers, seed=1)),
        (case, random_gradient(case, seed=1)),
    ):
        launch = make_run(
            *inputs, info.arch, ep_size, macrobatch=4, grid=info.num_sms, num_comm_ctas=8
        )
        check(*inputs, launch.run(), ep_size)
