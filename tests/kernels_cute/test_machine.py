"""Configurations that do not fit a machine are refused before anything is compiled."""

import pytest

from mok.errors import ResourceError
from mok.kernels_cute import machine
from mok.kernels_cute.machine import (
    BLACKWELL,
    HOPPER,
    MACHINES,
    SMEM_BYTES,
    check_launch,
    check_scheduling,
    check_tile,
    launch_grid,
    machine_of,
    pays_backward,
    works_in_pairs,
)


@pytest.mark.parametrize("arch", MACHINES)
def test_defaults_fit_and_one_stage_more_does_not(arch):
    m = machine_of(arch)
    check_tile(arch, 256, m.stages)
    assert m.smem_bytes(256, m.stages, 2) <= SMEM_BYTES
    with pytest.raises(ResourceError, match=f"at most {m.stages} stages with tile_n = 256") as e:
        check_tile(arch, 256, m.stages + 1)
    assert "shared memory" in e.value.rule


def test_tensor_memory_budget_is_named(monkeypatch):
    small = machine.Machine(**{**vars(BLACKWELL), "tmem_columns": 256})
    monkeypatch.setitem(MACHINES, "sm_100a", small)
    with pytest.raises(ResourceError, match="256 columns of tensor memory; found 512"):
        check_tile("sm_100a", 256, 6)
    check_tile("sm_100a", 128, 6)


@pytest.mark.parametrize("tile_n", [64, 192, 512])
def test_tile_columns(tile_n):
    with pytest.raises(ResourceError, match="tile_n must be 128 or 256"):
        check_tile("sm_100a", tile_n, 4)


def test_too_few_stages():
    with pytest.raises(ResourceError, match="at least 2"):
        check_tile("sm_100a", 256, 1)


def test_unknown_arch_and_scheduling():
    with pytest.raises(ResourceError, match="sm_90a, sm_100a, sm_103a"):
        machine_of("sm_120a")
    assert check_scheduling("sm_103a", None) == "clc"
    assert check_scheduling("sm_90a", None) == "tickets"
    assert check_scheduling("sm_100a", "tickets") == "tickets"
    with pytest.raises(ResourceError, match="Blackwell"):
        check_scheduling("sm_90a", "clc")


def test_launches():
    check_launch("sm_100a", 148, 16, 148, 2560, 131072 // 2560 * 2560)
    check_launch("sm_100a", 18, 16, 18, 256, 256)  # the minimum: comm workers and one pair
    check_launch("sm_90a", 17, 16, 17, 128, 128)
    check_launch("sm_90a", 18, 16, 18, 128, 128, pair=True)
    with pytest.raises(ResourceError, match="grid must be a multiple of the cluster's 2 CTAs"):
        check_launch("sm_90a", 17, 14, 17, 128, 128, pair=True)
    for arguments, message in [
        (("sm_100a", 147, 16, 148, 256, 256), "grid must be a multiple of the cluster's 2 CTAs"),
        (("sm_100a", 148, 15, 148, 256, 256), "num_comm_ctas must be a multiple"),
        (("sm_100a", 16, 16, 148, 256, 256), "must fit the grid"),
        (("sm_100a", 148, 16, 17, 256, 256), "must fit the usable SMs"),
        (("sm_90a", 132, 132, 132, 128, 128), "must fit the grid"),
        (("sm_100a", 148, 16, 148, 128, 256), "multiple of 256"),
        (("sm_100a", 148, 16, 148, 512, 768), "divide macrobatch"),
        (("sm_90a", 132, 16, 132, 0, 128), "positive multiple of 128"),
    ]:
        with pytest.raises(ResourceError, match=message):
            check_launch(*arguments)


def test_grids():
    assert launch_grid("sm_90a", None, 132, 16, 1000) == 132
    assert launch_grid("sm_90a", None, 132, 16, 5) == 21
    assert launch_grid("sm_90a", None, 132, 16, 5, pair=True) == 22
    assert launch_grid("sm_90a", None, 131, 16, 1000, pair=True) == 130
    assert launch_grid("sm_100a", None, 148, 16, 1000) == 2016  # one cluster per task
    assert launch_grid("sm_100a", "tickets", 147, 16, 1000) == 146
    assert launch_grid("sm_103a", None, 148, 0, 0) == 2  # an empty call still needs a cluster


def test_pairs_where_they_cannot_wait_for_ever():
    def found(num_sms, reserved, comm, arch="sm_90a", **options):
        return works_in_pairs(arch, num_sms, reserved, comm, **options)

    assert found(132, 0, 0) and found(132, 8, 16) and found(2, 0, 0)
    assert not found(132, 0, 16, mxfp8=True) and not found(148, 0, 16, "sm_100a")
    assert not found(132, 0, 15)  # a pair is either comm workers or not
    assert found(4, 0, 2) and not found(3, 0, 2)  # a pair of each kind
    # 132 SMs are 66 pairs. Where 57 other CTAs sit on an SM of another pair each, 9 are left.
    assert found(132, 57, 16) and not found(132, 58, 16)
    assert found(132, 65, 0) and not found(132, 66, 0)


def test_pairs_in_backward_where_tasks_are_long():
    assert pays_backward(4096, 14336) and pays_backward(7168, 2048)
    assert not pays_backward(2048, 768)


def test_kernel_classes_refuse_before_compiling():
    pytest.importorskip("cutlass")
    from mok.kernels_cute.forward import ForwardKernel

    with pytest.raises(ResourceError, match="stages"):
        ForwardKernel(direct=True, arch="sm_100a", stages=7)
    with pytest.raises(ResourceError, match="scheduling"):
        ForwardKernel(direct=True, arch="sm_90a", scheduling="clc")


def test_budgets_by_hand():
    # Blackwell: 6 stages of 16 KB A and 16 KB B, 2 staging buffers of 16 KB, 1 KB of barriers.
    assert BLACKWELL.smem_bytes(256, 6, 2) == 6 * 32768 + 2 * 16384 + 1024
    # Hopper: 4 stages of 16 KB A and 32 KB B.
    assert HOPPER.smem_bytes(256, 4, 2) == 4 * 49152 + 2 * 16384 + 1024


@pytest.mark.parametrize("direct", [True, False])
def test_hopper_needs_three_stages(direct):
    """With two the gather and the MMA warps wait for each other (seen in the emulator)."""
    pytest.importorskip("cutlass")
    from mok.kernels_cute.backward.kernel import BackwardKernel
    from mok.kernels_cute.forward import ForwardKernel

    for kernel in (ForwardKernel, BackwardKernel):
        kernel(direct=direct, arch="sm_90a", stages=3)
        kernel(direct=direct, arch="sm_100a", stages=2)
        with pytest.raises(ResourceError, match="at least 3 on sm_90a"):
            kernel(direct=direct, arch="sm_90a", stages=2)
