"""What the compiler makes of a layer's kernels, of both directions, without a GPU.

Shapes are run-time arguments, so each kernel here is the one that every model gets.
"""

import pytest

pytest.importorskip("cutlass")

from mok import kernels
from mok.kernels_cute.backward.kernel import GRAD_MODES, BackwardKernel
from mok.kernels_cute.machine import SMEM_BYTES, machine_of
from mok.runtime.compile import get_kernel
from mok.runtime.resources import WARNING_MEANINGS
from tests.helpers import assert_only_targets_differ, opcodes

FORBIDDEN = {"C7507", "C7508", "C7510", "C7511", "C7519"}
ARCHS = ["sm_90a", "sm_100a"]


def builds():
    for arch in (*ARCHS, "sm_103a"):
        once = {
            spec
            for mode in GRAD_MODES
            for spec in (
                *kernels.forward_kernels(arch, has_shared=True),
                *kernels.backward_kernels(arch, has_shared=True, grad_mode=mode),
            )
        }
        if machine_of(arch).pairs:
            for direct in (True, False):
                once.add(kernels.forward_spec(arch, direct, save_context=True, pair=False))
                once.add(kernels.backward_spec(arch, direct, pair=False))
        for spec in sorted(once, key=str):
            # Compiled in other tests, too, or small; the rest takes many minutes.
            common = arch in ARCHS and dict(spec.config).get("grad_mode", "bf16") == "bf16"
            marks = () if common else pytest.mark.slow
            yield pytest.param(spec, id=f"{arch}-{spec.name}", marks=marks)


@pytest.mark.parametrize("spec", list(builds()))
def test_no_build_of_the_layer_spills(spec):
    for used in get_kernel(spec).resources.kernels:
        assert used.spill_bytes == 0 and used.stack_bytes == 0
        assert used.registers <= 255 and used.smem_bytes <= SMEM_BYTES
        reasons = [WARNING_MEANINGS.get(w, w) for w in used.warnings]
        assert not FORBIDDEN & set(used.warnings), reasons


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("arch", ARCHS)
def test_instructions(arch, direct):
    kernel = get_kernel(kernels.backward_spec(arch, direct))
    (used,) = kernel.resources.kernels
    assert used.tmem_columns == machine_of(arch).tmem_columns
    assert ".local" not in kernel.ptx
    found = opcodes(kernel.ptx)
    mma = "tcgen05.mma.cta_group::2.kind::f16"
    blackwell = arch != "sm_90a"
    assert any(name.startswith(mma) for name in found) == blackwell
    assert all(name.startswith(mma) for name in found if name.startswith("tcgen05.mma"))
    assert any(name.startswith("wgmma.mma_async") for name in found) != blackwell
    assert not any(name.startswith("mma.sync") for name in found)
    assert any(n.startswith("clusterlaunchcontrol.try_cancel") for n in found) == blackwell
    gathers = sum(n for name, n in found.items() if "tile::gather4" in name)
    # Rows of x and of dy, and each of them as columns: 8 instructions per K step and warp.
    assert gathers == (4 * 8 if blackwell and direct else 0)


def test_machine_code():
    blackwell = get_kernel(kernels.backward_spec("sm_100a", True)).instructions(modifiers=True)
    assert blackwell["UTCHMMA.2CTA"] == 3 * 4  # one loop each for kk, km and mm
    hopper = get_kernel(kernels.backward_spec("sm_90a", True)).instructions()
    assert hopper["USETMAXREG"] == 2 and hopper["HGMMA"] > 0


@pytest.mark.parametrize("arch", ARCHS)
def test_registers_stay_within_the_launch(arch):
    """The pool of a CTA is what it was launched with: 384 threads of 168."""
    assert sum(BackwardKernel(True, arch).registers) <= 3 * 168


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"direct": False}, id="ring"),
        pytest.param({"direct": True}, id="direct", marks=pytest.mark.slow),
        pytest.param({"direct": False, "mxfp8": True}, id="mxfp8", marks=pytest.mark.slow),
        pytest.param(
            {"direct": False, "mxfp8": True, "wire": True}, id="wire", marks=pytest.mark.slow
        ),
    ],
)
def test_both_blackwells_get_the_same_code(config):
    """So that what is emulated for sm_100a holds for sm_103a."""
    specs = [kernels.backward_spec(arch, **config) for arch in ("sm_100a", "sm_103a")]
    assert_only_targets_differ([get_kernel(spec).ptx for spec in specs])
