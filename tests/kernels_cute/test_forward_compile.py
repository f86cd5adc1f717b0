"""What the compiler makes of the forward kernel, for every machine, without a GPU.

Shapes are run-time arguments, so each kernel here is the one that every model gets.
"""

import argparse
import time

import pytest

pytest.importorskip("cutlass")

from rich.console import Console

from mok import kernels
from mok.commands import compile as compile_command
from mok.kernels_cute.machine import SMEM_BYTES, machine_of
from mok.models import MODELS
from mok.runtime.compile import clear_memory_cache, get_kernel
from mok.runtime.resources import WARNING_MEANINGS
from tests.helpers import assert_only_targets_differ, opcodes

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
        ("sm_100a", {"direct": False, "launch_control": False}),
        ("sm_103a", {"direct": True}),
        ("sm_103a", {"direct": False}),
    ]
]


def forward_kernel(arch, **config):
    """The layer's own build."""
    return get_kernel(kernels.forward_spec(arch, **config))


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


@pytest.mark.parametrize("arch", BLACKWELL)
def test_every_kernel_of_every_model(arch):
    """`mok compile` of each model: what the compiler reports keeps every limit."""
    for model in MODELS:
        arguments = argparse.Namespace(arch=arch, model=model, precision="bf16")
        document = compile_command.run(arguments, Console(stderr=True))
        assert compile_command.passed(document)
        for kernel in document["kernels"]:
            assert kernel["spill_bytes"] == 0, kernel["name"]
            assert kernel["registers"] <= 255
            assert kernel["smem_bytes"] <= SMEM_BYTES
            assert kernel["tmem_columns"] <= 512
            assert not FORBIDDEN & set(kernel["warnings"])
    # No size is in a spec, so neither code nor time depends on the number of experts.
    sizes = {"experts", "hidden", "intermediate", "topk", "tokens"}
    specs = kernels.forward_kernels(arch, True)
    assert not sizes & {name for spec in specs for name, _ in spec.config}


def test_a_layer_compiles_in_a_minute(monkeypatch, tmp_path):
    """Everything that a call of several ranks launches, cold; processor time, one thread."""
    monkeypatch.setenv("MOK_CACHE_DIR", str(tmp_path))
    clear_memory_cache()
    names = {"stage_ids", "schedule", "forward_ring", "token_sum_ring"}
    specs = [s for s in kernels.forward_kernels("sm_100a", True) if s.name in names]
    begin = time.process_time()
    assert len([get_kernel(spec) for spec in specs]) == 4
    spent = time.process_time() - begin
    clear_memory_cache()
    print(f"{spent:.1f} s")
    assert spent < 60


@pytest.mark.parametrize(
    "spec",
    [
        kernels.forward_spec("sm_100a", True),
        kernels.forward_spec("sm_100a", False),
        kernels.forward_spec("sm_100a", False, mxfp8=True),
        kernels.recompute_spec("sm_100a", False, mxfp8=True),
    ],
    ids=lambda spec: spec.name,
)
def test_launch_control_keeps_its_rules(spec):
    """Armed before it is asked, by the CTA that asks; read in one load; fenced before it is reused.

    That nobody asks after a refusal, or leaves with a query in flight, the emulator checks.
    """
    ptx = get_kernel(spec).ptx
    code = [line.strip() for line in ptx.split("\n") if line.strip() and "//" not in line]
    asked = [i for i, line in enumerate(code) if "clusterlaunchcontrol.try_cancel" in line]
    assert len(asked) == 2  # beside the tasks, and at the end
    for i in asked:
        assert "multicast" not in code[i]
        assert code[i - 1].startswith("mbarrier.arrive.expect_tx.shared.b64")
        assert code[i].split("[")[2] == code[i - 1].split("[")[1].split("]")[0] + "];"
    read = [i for i, line in enumerate(code) if "query_cancel.is_canceled" in line]
    assert len(read) == 2
    for i in read:
        assert any(line.startswith("ld.shared.v2.b64") for line in code[i - 8 : i])
        assert any(line.startswith("fence.proxy.async.shared::cta") for line in code[i : i + 8])
    assert "get_first_ctaid" not in ptx  # a grant is a right to draw, not a task


@pytest.mark.parametrize(("arch", "config"), BUILDS)
def test_instructions(arch, config):
    found = opcodes(forward_kernel(arch, **config).ptx)
    mma = "tcgen05.mma.cta_group::2.kind::f16"
    on_blackwell = arch in BLACKWELL
    assert any(name.startswith(mma) for name in found) == on_blackwell
    assert all(name.startswith(mma) for name in found if name.startswith("tcgen05.mma"))
    assert any(name.startswith("wgmma.mma_async") for name in found) != on_blackwell
    assert not any(name.startswith("mma.sync") for name in found)
    uses_clc = on_blackwell and config.get("launch_control", True)
    assert any(n.startswith("clusterlaunchcontrol.try_cancel.async") for n in found) == uses_clc
    gathers = sum(n for name, n in found.items() if "tile::gather4" in name)
    assert gathers == (8 if on_blackwell and config["direct"] else 0)
    assert (found["ld.acquire.gpu.global.b32"] > 0) == (found["ld.relaxed.gpu.global.b32"] > 0)
    # Four counters are waited for in the ring and one by comm workers, three without a ring, where results are
    # pushed none for a free row of y; a wait acquires in two places, when it need not wait and after it did.
    waits = 3 if config["direct"] else 5 if on_blackwell else 4
    assert found["ld.acquire.gpu.global.b32"] == 2 * waits


@pytest.mark.parametrize("direct", [True, False])
def test_register_hand_over_is_in_the_machine_code(direct):
    """Warps trade registers on both machines; on Blackwell one thread multiplies for a pair."""
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
    assert_only_targets_differ([forward_kernel(arch, direct=direct).ptx for arch in BLACKWELL])


def test_code_does_not_grow_with_the_launch():
    """One program for every routing: no loop over experts is unrolled."""
    kernel = forward_kernel("sm_100a", direct=False)
    assert len(kernel.cubin) < 128 * 1024
