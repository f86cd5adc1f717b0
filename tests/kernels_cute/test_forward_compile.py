"""What the compiler makes of the forward kernel, for every machine, without a GPU.

Shapes are run-time arguments, so each kernel here is the one that every model gets.
"""

import re

import pytest

pytest.importorskip("cutlass")

from mok.kernels_cute.machine import SMEM_BYTES, machine_of
from mok.runtime.resources import WARNING_MEANINGS
from tests.forward_runs import forward_kernel
from tests.helpers import opcodes

BLACKWELL = ["sm_100a", "sm_103a"]
BUILDS = [
    pytest.param(arch, config, id=f"{arch}-{'-'.join(map(str, config.values()))}")
    for arch, config in [
        ("sm_90a", {"direct": True}),
        ("sm_90a", {"direct": False}),
        ("sm_90a", {"direct": True, "save_context": True}),
        ("sm_100a", {"direct": True}),
        ("sm_100a", {"direct": False}),
        ("sm_100a", {"direct": False, "save_context": True}),
        ("sm_100a", {"direct": False, "scheduling": "tickets"}),
        ("sm_103a", {"direct": True}),
        ("sm_103a", {"direct": False}),
    ]
]
# Speed is lost without notice where ptxas says one of these.
FORBIDDEN = {"C7507", "C7508", "C7510", "C7511", "C7519"}


@pytest.mark.parametrize(("arch", "config"), BUILDS)
def test_resources(arch, config):
    kernel = forward_kernel(arch, **config)
    (used,) = kernel.resources.kernels
    assert used.spill_bytes == 0 and used.stack_bytes == 0
    assert used.registers <= 255
    assert used.smem_bytes <= SMEM_BYTES
    assert used.tmem_columns == machine_of(arch).tmem_columns
    assert not FORBIDDEN & set(used.warnings), [WARNING_MEANINGS.get(w, w) for w in used.warnings]
    assert ".local" not in kernel.ptx
    assert kernel.compile_s < 60


@pytest.mark.parametrize(("arch", "config"), BUILDS)
def test_instructions(arch, config):
    found = opcodes(forward_kernel(arch, **config).ptx)
    mma = "tcgen05.mma.cta_group::2.kind::f16"
    on_blackwell = arch in BLACKWELL
    assert any(name.startswith(mma) for name in found) == on_blackwell
    assert all(name.startswith(mma) for name in found if name.startswith("tcgen05.mma"))
    assert any(name.startswith("wgmma.mma_async") for name in found) != on_blackwell
    assert not any(name.startswith("mma.sync") for name in found)
    uses_clc = on_blackwell and config.get("scheduling") != "tickets"
    assert any(n.startswith("clusterlaunchcontrol.try_cancel.async") for n in found) == uses_clc
    gathers = sum(n for name, n in found.items() if "tile::gather4" in name)
    assert gathers == (8 if on_blackwell and config["direct"] else 0)
    assert (found["ld.acquire.gpu.global.b32"] > 0) == (found["ld.relaxed.gpu.global.b32"] > 0)
    # Five counters are waited for in the ring and one by comm workers, three without a ring; a wait
    # acquires in two places, when it need not wait and after it did.
    assert found["ld.acquire.gpu.global.b32"] == 2 * (3 if config["direct"] else 6)


@pytest.mark.parametrize("direct", [True, False])
def test_register_hand_over_is_in_the_machine_code(direct):
    """Warps trade registers: the epilogue's get what loading and scheduling do not need."""
    pytest.importorskip("cutlass")
    hopper = forward_kernel("sm_90a", direct=direct).instructions()
    assert hopper["USETMAXREG"] == 2 and hopper["HGMMA"] > 0
    blackwell = forward_kernel("sm_100a", direct=direct).instructions(modifiers=True)
    assert sum(n for name, n in blackwell.items() if name.startswith("USETMAXREG")) == 2
    assert blackwell["UTCHMMA.2CTA"] == 4
    assert any(name.startswith("UTCBAR.2CTA.MULTICAST") for name in blackwell)
    assert any(name.startswith("UTMALDG.2D.GATHER4.2CTA") for name in blackwell) == direct


@pytest.mark.parametrize("direct", [True, False])
def test_both_blackwells_get_the_same_code(direct):
    """So that what is emulated for sm_100a holds for sm_103a."""
    texts = [forward_kernel(arch, direct=direct).ptx for arch in BLACKWELL]
    targets = [re.findall(r"^\.target\s+(\w+)", text, re.M) for text in texts]
    assert targets == [["sm_100a"], ["sm_103a"]]
    first, second = (re.sub(r"^\.target.*$", "", text, flags=re.M) for text in texts)
    assert first == second


def test_code_does_not_grow_with_the_launch():
    """One program for every routing: no loop over experts is unrolled."""
    kernel = forward_kernel("sm_100a", direct=False)
    assert len(kernel.cubin) < 160 * 1024  # 130 KB today; one expert unrolled would add kilobytes
