"""The code of every kernel that a forward call may launch; needs no GPU."""

from __future__ import annotations

import shutil
import time

import pytest

from mok import kernels
from mok.runtime.compile import clear_memory_cache, get_kernel

pytest.importorskip("cutlass", reason="kernels need the CuTe DSL")

ARCH = "sm_90a"


def specs():
    found = dict.fromkeys(
        [spec for shared in (False, True) for spec in kernels.forward_kernels(ARCH, shared)]
    )
    for direct in (True, False):
        found[kernels.forward_spec(ARCH, direct, save_context=True)] = None
    return list(found)


@pytest.fixture(scope="module")
def cold(tmp_path_factory):
    """All kernels, compiled into an empty cache, and the seconds that took."""
    import cutlass.cute  # noqa: F401  (importing the DSL is not compiling)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOK_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        clear_memory_cache()
        seconds, built = {}, {}
        for spec in specs():
            start = time.perf_counter()
            built[spec] = get_kernel(spec)
            seconds[spec] = time.perf_counter() - start
            assert not built[spec].from_cache
        clear_memory_cache()
        start = time.perf_counter()
        for spec in specs():
            again = get_kernel(spec)
            again.load()
            assert again.from_cache
        warm = time.perf_counter() - start
        clear_memory_cache()
    return built, seconds, warm


def test_a_first_call_compiles_in_a_minute(cold):
    _, seconds, _ = cold
    for direct in (True, False):
        path = "direct" if direct else "ring"
        call = sum(
            s for spec, s in seconds.items()
            if spec.name in ("stage_ids", "schedule", f"forward_{path}", f"token_sum_{path}")
        )  # fmt: skip
        print(f"{path}: {call:.1f} s")
        assert call < 60


def test_later_processes_load_in_half_a_second(cold):
    _, _, warm = cold
    print(f"all {len(specs())} kernels from the cache: {warm:.2f} s")
    assert warm < 0.5


def test_no_kernel_spills_or_loses_speed_silently(cold):
    for spec, kernel in cold[0].items():
        resources = kernel.resources
        assert resources.spill_bytes == 0, spec.name
        assert all(k.stack_bytes == 0 for k in resources.kernels), spec.name
        # C7507/C7508: setmaxnreg ignored. C7510/C7511: wgmma serialised. See resources.py.
        assert not set(resources.warnings) & {"C7507", "C7508", "C7510", "C7511"}, spec.name
        assert resources.smem_bytes <= 227 * 1024, spec.name
        assert ".local" not in kernel.ptx, spec.name


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("save_context", [False, True])
def test_the_megakernel_uses_the_machine(cold, direct, save_context):
    kernel = cold[0][kernels.forward_spec(ARCH, direct, save_context)]
    for instruction in (
        "wgmma.mma_async",
        "cp.async.bulk.tensor",
        "setmaxnreg.inc",
        "setmaxnreg.dec",
    ):
        assert instruction in kernel.ptx
    assert len(kernel.resources.kernels) == 1  # one launch
    # A persistent grid of one CTA per SM: registers and threads of one CTA fit.
    assert kernel.resources.registers * 384 <= 65536


@pytest.mark.parametrize("direct", [True, False])
def test_setmaxnreg_reaches_the_machine_code(cold, direct):
    try:
        counts = cold[0][kernels.forward_spec(ARCH, direct)].instructions()
    except ImportError:
        assert shutil.which("nvdisasm") is None
        pytest.skip("needs nvdisasm")
    assert counts["USETMAXREG"] >= 2
    assert counts["HGMMA"] > 0
