"""Cluster launch control: grants, refusals, and a competing grid that takes SMs in mid-run."""

import numpy as np
import pytest

from mok.tools.emulator import Competitor, EmulatorError, KernelFault
from tests.tools.emulator.ptx import kernel, run

pytestmark = pytest.mark.emulator
SETUP = """
.reg .b128 %q;
mov.u32 %r0, %tid.x;
setp.ne.u32 %p0, %r0, 0;
@%p0 bra DONE;
mov.u32 %r1, smem;
ld.param.u64 %d0, [p0];
mbarrier.init.shared.b64 [%r1], 1;
fence.mbarrier_init.release.cluster;
mov.u32 %r2, %ctaid.x;
mov.u32 %r3, 0;
"""
QUERY = """
mbarrier.arrive.expect_tx.shared.b64 %d9, [%r1], 16;
clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r1+16], [%r1];
"""
WAIT = """
W: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], %r3;
@!%p1 bra W;
xor.b32 %r3, %r3, 1;
"""
DECODE = """
ld.shared.b128 %q, [%r1+16];
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p2, %q;
@%p2 clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r2, %r5, %r6, %r7}, %q;
fence.proxy.async.shared::cta;
"""
# Counts the tile that %r2 names, after a while.
WORK = """
mul.wide.u32 %d1, %r2, 4;
add.s64 %d1, %d0, %d1;
red.relaxed.gpu.global.add.u32 [%d1], 1;
mov.u32 %r8, 40;
SPIN: sub.u32 %r8, %r8, 1;
setp.ne.u32 %p3, %r8, 0;
@%p3 bra SPIN;
"""
LOOP = SETUP + "TILE:\n" + WORK + QUERY + WAIT + DECODE + "@%p2 bra TILE;\nDONE:"


def tiles(body=LOOP, grid=24, num_sms=4, shared=120_000, **options):
    """How often each tile was done, and the report.  One CTA fits an SM."""
    done = np.zeros(grid, dtype=np.uint32)
    text = kernel(body, shared=shared)
    report = run(text, done, grid=grid, arch="sm_100a", num_sms=num_sms, **options)
    return done, report


def test_every_tile_is_done_once_whatever_the_seed():
    for seed in (None, *range(10)):
        done, _ = tiles(seed=seed, check=seed is not None)
        np.testing.assert_array_equal(done, 1)


def test_grants_come_in_any_order():
    """The order in which one CTA meets tiles is not that of the grid."""
    body = LOOP.replace("red.relaxed.gpu.global.add.u32 [%d1], 1;", "atom.add.u32 %r9, [%d0+96], 1;"
                        "add.u32 %r9, %r9, 1;st.global.b32 [%d1], %r9;")  # fmt: skip
    orders = set()
    for seed in range(3):
        done = np.zeros(25, dtype=np.uint32)
        run(kernel(body, shared=120_000), done, grid=24, arch="sm_100a", num_sms=1, seed=seed)
        orders.add(tuple(done[:24]))
    assert all(sorted(o) == list(range(1, 25)) for o in orders)
    assert len(orders) == 3 and tuple(range(1, 25)) not in orders


@pytest.mark.parametrize("sms", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_competing_grid_takes_sms_that_retire_and_gives_them_back(sms, seed):
    done, report = tiles(grid=100, seed=seed, preempt=Competitor(sms, at=500, steps=2000))
    np.testing.assert_array_equal(done, 1)
    (met,) = report.preemptions
    assert met.arrived is not None and met.arrived >= 500
    assert len(met.taken) == sms == met.left  # every SM it ran on was one that we had left
    assert met.refused >= sms  # each of ours retired because a query was refused
    assert met.ended is not None and met.relaunched > 0  # it ended before us, and the rest ran


def test_nothing_starts_on_the_sms_of_a_grid_that_came_first():
    body = SETUP + "mov.u32 %r9, %smid;\nmul.wide.u32 %d1, %r9, 4;\nadd.s64 %d1, %d0, %d1;\n"
    body += "red.relaxed.gpu.global.add.u32 [%d1], 1;\nDONE:"
    for seed in range(6):
        done, report = tiles(
            body, grid=8, num_sms=8, seed=seed, preempt=Competitor(5, at=0, steps=10**9)
        )
        (met,) = report.preemptions
        assert len(met.taken) == 5 and met.ended is None
        assert done.sum() == 8 and not done[sorted(met.taken)].any()


def test_the_seed_chooses_the_moment():
    moments = {
        tiles(grid=100, seed=s, preempt=Competitor(2))[1].preemptions[0].arrived for s in range(4)
    }
    assert len(moments) > 1


def test_only_the_kernel_that_is_named_meets_it():
    _, report = tiles(preempt=Competitor(2, at=0, kernel="another"))
    assert report.preemptions == []


def test_waiting_for_a_cluster_that_cannot_start_is_a_deadlock():
    """Tile 0 waits for the last tile, which only a free SM could start: the kernel's bug."""
    wait_last = SETUP + (
        "setp.ne.u32 %p4, %r2, 0;\n@!%p4 bra SPIN;\nst.release.gpu.global.b32 [%d0+28], 1;\n"
        "bra DONE;\nSPIN: ld.acquire.gpu.global.b32 %r9, [%d0+28];\nsetp.eq.u32 %p3, %r9, 0;\n"
        "@%p3 bra SPIN;\nDONE:"
    )
    with pytest.raises(KernelFault, match=r"deadlock(.|\n)*7 clusters have not started"):
        tiles(wait_last, grid=8, num_sms=1)
    tiles(wait_last, grid=8, num_sms=2)
    with pytest.raises(KernelFault, match=r"deadlock(.|\n)*while a competing grid"):
        tiles(wait_last, grid=8, num_sms=1, preempt=Competitor(1, at=1))


def test_a_query_after_an_observed_refusal_is_an_error():
    body = SETUP + QUERY + WAIT + DECODE + QUERY + WAIT.replace("W", "V") + "DONE:"
    tiles(body, grid=8, num_sms=1)  # both are granted
    with pytest.raises(KernelFault, match="after a cancellation has failed"):
        tiles(body, grid=1, num_sms=1)


def test_leaving_with_a_query_in_flight_is_an_error():
    for seed in range(3):
        with pytest.raises(KernelFault, match="may not exit while an operation"):
            for again in range(4):  # it may also have completed in time
                tiles(SETUP + QUERY + "DONE:", grid=8, num_sms=1, seed=10 * seed + again)


@pytest.mark.parametrize("wrong", [{"sms": 0}, {"sms": 1, "at": -1}, {"sms": 1, "steps": -2}])
def test_impossible_competitors(wrong):
    with pytest.raises(EmulatorError, match="competing grid"):
        Competitor(**wrong)
    with pytest.raises(EmulatorError, match="must fit 4 SMs"):
        tiles(preempt=Competitor(5))


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_reply_over_one_that_was_read_needs_a_proxy_fence(seed):
    """As PTX's own example of try_cancel has it: the warp reads, the asynchronous proxy writes."""
    bare = LOOP.replace("fence.proxy.async.shared::cta;", "")
    with pytest.raises(
        KernelFault, match=r"launch query's reply(.|\n)*try_cancel(.|\n)*ld\.shared"
    ):
        tiles(bare, seed=seed, check=True)
    done, _ = tiles(
        bare.replace("mbarrier.arrive.expect", "fence.proxy.async;\nmbarrier.arrive.expect"),
        seed=seed,
        check=True,
    )
    np.testing.assert_array_equal(done, 1)
