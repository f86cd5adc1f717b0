"""The forward kernel in MXFP8, in the emulator, against the quantised reference.

The unmarked tests are a sample that fits CI; ``slow`` ones are the full matrix.
"""

import functools

import pytest

pytest.importorskip("cutlass")

import torch

from mok import kernels
from mok.config import Shape
from mok.errors import ResourceError
from mok.kernels_cute.machine import SMEM_BYTES, machine_of
from mok.reference import (
    forward_oracle,
    forward_reference,
    integer_case,
    random_case,
    relative_l2,
)
from mok.runtime.compile import get_kernel
from tests.forward_runs import ForwardRun, emulated, forward_kernel
from tests.helpers import assert_only_targets_differ, opcodes

LIMIT = 5e-3  # against the quantised reference
FP32_LIMIT = 7e-2
SMS = 8

# T (of all ranks), H, I, E, K, shared I.
SHAPES = {
    "small": (200, 128, 256, 4, 2, 64),
    "no shared expert": (257, 384, 128, 3, 2, None),
    "wide": (130, 640, 128, 2, 1, 128),
    "deep": (140, 128, 640, 2, 2, 320),
    "many experts": (200, 128, 128, 11, 3, None),
    "one token": (1, 128, 128, 4, 2, 64),
    "top all": (90, 256, 128, 5, 5, 64),
    "whole tiles": (512, 256, 256, 2, 1, 256),
}
ONE = {"ep_size": 1, "grid": 8, "num_comm_ctas": 2}
PAIR = {"ep_size": 2, "grid": 8, "num_comm_ctas": 2}
THREE = {"ep_size": 3, "grid": 8, "num_comm_ctas": 4}
ARCHS = ["sm_90a", "sm_100a"]


@functools.cache
def make_case(name, kind="random", integer=False, limit=None):
    tokens, hidden, intermediate, experts, topk, shared = SHAPES[name]
    shape = Shape(tokens, hidden, intermediate, experts, topk, 1, shared)
    if integer:
        return integer_case(shape, kind=kind)
    return random_case(shape, kind=kind, swiglu_limit=limit)


def run(case, arch, ep_size, *, seed=None, minibatch=1, macrobatch=2, num_sms=SMS, **options):
    """Output of one run; with a seed on the adversarial machine, whose checkers must be silent."""
    tile = machine_of(arch).tile_m
    with emulated(arch, num_sms, seed) as emulator:
        layer = ForwardRun(
            case,
            arch,
            ep_size,
            minibatch=minibatch * tile,
            macrobatch=macrobatch * tile,
            num_sms=num_sms,
            mxfp8=True,
            **options,
        )
        output = layer.run(emulator.register if seed is not None else None)
        assert not emulator.report.findings
    assert not layer.record.any()
    return output


def expected(case, arch):
    return forward_reference(case, tile=machine_of(arch).tile_m, precision="mxfp8")


def assert_right(case, arch, output):
    assert relative_l2(output, expected(case, arch)) < LIMIT
    assert relative_l2(output, forward_oracle(case)) < FP32_LIMIT


# ------------------------------------------------------------------ a sample for CI


@pytest.mark.emulator
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("how", [ONE, PAIR], ids=["ep1", "ep2"])
def test_exact_on_integers(arch, how):
    case = make_case("small", integer=True)
    assert torch.equal(run(case, arch, **how), expected(case, arch))


@pytest.mark.emulator
@pytest.mark.parametrize("arch", ARCHS)
def test_random_values(arch):
    case = make_case("small")
    assert_right(case, arch, run(case, arch, seed=1, **PAIR))


@pytest.mark.emulator
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_bits_do_not_depend_on_ranks_and_sizes(arch):
    case = make_case("no shared expert")
    one = run(case, arch, **ONE)
    assert torch.equal(one, run(case, arch, **PAIR, minibatch=2, macrobatch=4))
    assert_right(case, arch, one)


@pytest.mark.emulator
@pytest.mark.parametrize("arch", [pytest.param("sm_90a", marks=pytest.mark.slow), "sm_100a"])
def test_the_wire_changes_no_bit(arch):
    case = make_case("small", "dropped")
    plain = run(case, arch, **PAIR)
    assert torch.equal(run(case, arch, **PAIR, wire=True, seed=3), plain)


# ------------------------------------------------------------------ everything


@pytest.mark.emulator
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("how", [ONE, PAIR, THREE], ids=["ep1", "ep2", "ep3"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape(name, how, arch):
    case = make_case(name, "skewed" if name == "many experts" else "random", limit=1.5)
    assert_right(case, arch, run(case, arch, seed=2, **how))


@pytest.mark.emulator
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("seed", range(10))
def test_ten_seeds(seed, arch):
    case = make_case("small", "dropped")
    assert_right(case, arch, run(case, arch, seed=seed, **PAIR, save_context=seed % 2 == 0))


# ------------------------------------------------------------------ the code


def builds():
    """The layer's own: of both directions' calls, with and without the wire option."""
    for arch in (*ARCHS, "sm_103a"):
        for spec in kernels.mxfp8_kernels(arch, has_shared=True):
            if spec.name.startswith(("forward", "recompute")):
                common = arch in ARCHS or not spec.name.endswith("_wire")
                marks = () if common else pytest.mark.slow
                yield pytest.param(spec, id=f"{arch}-{spec.name}", marks=marks)


@pytest.mark.parametrize("spec", list(builds()))
def test_code(spec):
    kernel = get_kernel(spec)
    (used,) = kernel.resources.kernels
    assert used.spill_bytes == 0 and used.stack_bytes == 0
    assert used.registers <= 255 and used.smem_bytes <= SMEM_BYTES and not used.warnings
    assert used.tmem_columns == machine_of(spec.arch).tmem_columns
    assert ".local" not in kernel.ptx
    found = opcodes(kernel.ptx)
    assert found["cvt.rn.satfinite.e4m3x2.f32"] > 0
    blackwell = spec.arch != "sm_90a"
    scaled = {
        "tcgen05.cp.cta_group::2.32x128b.warpx4": 3,
        "tcgen05.mma.cta_group::2.kind::mxf8f6f4.block_scale.block32": 4,
    }
    assert {name: found[name] for name in scaled if name in found} == (scaled if blackwell else {})
    # The shared expert is BF16.
    assert sum(n for name, n in found.items() if "kind::f16" in name) == (4 if blackwell else 0)
    assert any(name.startswith("wgmma.mma_async") for name in found) != blackwell
    # Asked beside the tasks, and at the end.
    asked = sum(n for name, n in found.items() if "clusterlaunchcontrol.try_cancel" in name)
    assert asked == (2 if blackwell else 0)


@pytest.mark.parametrize("part", ["forward_ring_mxfp8", "recompute_ring_mxfp8"])
def test_both_blackwells_get_the_same_code(part):
    """So that what is emulated for sm_100a holds for sm_103a."""
    texts = [
        get_kernel(spec).ptx
        for arch in ("sm_100a", "sm_103a")
        for spec in kernels.mxfp8_kernels(arch, has_shared=True)
        if spec.name == part
    ]
    assert_only_targets_differ(texts)


def test_rows_in_place_are_refused():
    with pytest.raises(ResourceError, match="MXFP8"):
        forward_kernel("sm_90a", direct=True, mxfp8=True)


# ------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("how", [ONE, PAIR, THREE], ids=["ep1", "ep2", "ep3"])
def test_on_the_gpu(how):
    from mok.runtime.device import device_info

    info = device_info(0)
    shape = Shape(1024, 1024, 512, 16, 4, 1, 256)
    options = {**how, "grid": 64, "num_comm_ctas": 8, "num_sms": info.num_sms, "device": "cuda"}
    tile = machine_of(info.arch).tile_m
    for case in (integer_case(shape, device="cuda"), random_case(shape, device="cuda")):
        layer = ForwardRun(
            case, info.arch, minibatch=2 * tile, macrobatch=4 * tile, mxfp8=True, **options
        )
        output = layer.run()
        wanted = forward_reference(case, tile=tile, precision="mxfp8")
        if case.name.startswith("integer"):
            assert torch.equal(output, wanted)
        assert relative_l2(output, wanted) < LIMIT
