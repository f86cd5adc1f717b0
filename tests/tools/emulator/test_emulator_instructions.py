"""Instructions that kernels use in passing, each directly: their edge cases against PTX's words."""

import numpy as np
import pytest

from mok.tools.emulator import KernelFault
from tests.tools.emulator.ptx import kernel, run

pytestmark = pytest.mark.emulator
SEEDS = [None, 0, 1]
OUT = (  # the lane's word of p0
    "mov.u32 %r0, %tid.x;\nmov.u32 %r1, smem;\nld.param.u64 %d0, [p0];\nmul.wide.u32 %d1, %r0, 4;\n"
    "add.s64 %d1, %d0, %d1;\n"
)
STORE = "st.global.b32 [%d1], %r9;"


def lanes(body, threads=32, shared=256, **options):
    """What each thread leaves in %r9."""
    out = np.zeros(threads, dtype=np.uint32)
    run(kernel(OUT + body + STORE, shared=shared), out, threads=threads, check=True, **options)
    return out


def test_elect_chooses_one_lane_and_tells_all():
    found = lanes("elect.sync %r8|%p1, -1;\nselp.u32 %r9, 100, 0, %p1;\nadd.u32 %r9, %r9, %r8;\n")
    assert list(found) == [100] + [0] * 31


def test_elect_among_some():
    body = (
        "mov.u32 %r9, 7;\nsetp.lt.u32 %p2, %r0, 20;\n@%p2 bra E;\n"
        "elect.sync %r8|%p1, 0xFFF00000;\nselp.u32 %r9, 1, 0, %p1;\nE:\n"
    )
    assert list(lanes(body)) == [7] * 20 + [1] + [0] * 11


def test_match_finds_lanes_with_the_same_value():
    found = lanes("and.b32 %r8, %r0, 3;\nmatch.any.sync.b32 %r9, %r8, -1;\n")
    assert list(found) == [0x11111111 << (i & 3) for i in range(32)]
    every = "match.all.sync.b32 %r9|%p1, {0}, -1;\n@!%p1 mov.u32 %r9, 5;\n"
    assert set(lanes("mov.u32 %r8, 3;\n" + every.format("%r8"))) == {0xFFFFFFFF}
    assert set(lanes(every.format("%r0"))) == {5}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "form,limit,want",
    [("popc", 40, 40), ("and", 40, 0), ("and", 64, 1), ("or", 1, 1), ("or", 0, 0)],
)
def test_a_barrier_reduces_a_predicate(form, limit, want, seed):
    head = f"setp.lt.u32 %p1, %r0, {limit};\n"
    if form == "popc":
        body = head + "barrier.cta.red.popc.aligned.u32 %r9, 1, %p1;\n"
    else:
        body = (
            head + f"barrier.cta.red.{form}.aligned.pred %p2, 1, %p1;\nselp.u32 %r9, 1, 0, %p2;\n"
        )
    assert set(lanes(body, threads=64, seed=seed)) == {want}


@pytest.mark.parametrize("seed", SEEDS)
def test_copies_of_16_bytes_fill_up_with_zeros(seed):
    """Lane i copies i of 16 bytes, and waits for its own copies."""
    body = (
        "shl.b32 %r2, %r0, 4;\nadd.u32 %r3, %r1, %r2;\nst.shared.v4.b32 [%r3], {{-1, -1, -1, -1}};\n"
        "min.u32 %r4, %r0, 16;\nmul.wide.u32 %d2, %r0, 16;\nadd.s64 %d2, %d0, %d2;\n"
        "cp.async.cg.shared.global [%r3], [%d2], 16, %r4;\ncp.async.commit_group;\n"
        "{wait}ld.shared.v4.b32 {{%r5, %r6, %r7, %r8}}, [%r3];\n"
        "st.global.v4.b32 [%d2], {{%r5, %r6, %r7, %r8}};"
    )
    data = np.full((32, 16), 0xAB, dtype=np.uint8)
    text = OUT + body.format(wait="cp.async.wait_group 0;\n")
    run(kernel(text, shared=512), data, check=True, seed=seed)
    want = np.where(np.arange(16) < np.arange(32)[:, None], 0xAB, 0)
    np.testing.assert_array_equal(data, want)
    with pytest.raises(KernelFault, match=r"data race(.|\n)*copy of CTA"):
        run(kernel(OUT + body.format(wait=""), shared=512), data, check=True, seed=seed)


def test_local_memory_belongs_to_its_lane():
    body = (
        ".local .align 8 .b8 mine[64];\nmov.u64 %d3, mine;\ncvta.local.u64 %d3, %d3;\n"
        "and.b32 %r2, %r0, 15;\nmul.wide.u32 %d4, %r2, 4;\nadd.s64 %d4, %d3, %d4;\n"
        "st.b32 [%d4], %r0;\nbar.warp.sync -1;\nld.b32 %r9, [%d4];\n"
    )
    assert list(lanes(body)) == list(range(32))
    with pytest.raises(KernelFault, match="local memory access out of bounds"):
        lanes(body.replace("ld.b32 %r9, [%d4]", "ld.b32 %r9, [%d4+64]"))


def test_generic_addresses_know_their_space():
    body = (
        "mov.u64 %d3, smem;\ncvta.shared.u64 %d3, %d3;\nisspacep.shared %p1, %d3;\n"
        "isspacep.global %p2, %d3;\nisspacep.global %p3, %d0;\nisspacep.local %p4, %d0;\n"
        "selp.u32 %r9, 1, 0, %p1;\nselp.u32 %r8, 2, 0, %p2;\nadd.u32 %r9, %r9, %r8;\n"
        "selp.u32 %r8, 4, 0, %p3;\nadd.u32 %r9, %r9, %r8;\nselp.u32 %r8, 8, 0, %p4;\n"
        "add.u32 %r9, %r9, %r8;\n"
    )
    assert set(lanes(body)) == {1 + 4}


CLUSTER = (  # each CTA's rank in %r2; an mbarrier at 512 that expects ``count`` arrivals
    OUT + "mov.u32 %r2, %cluster_ctarank;\nsetp.ne.u32 %p0, %r0, 0;\n"
    "@!%p0 mbarrier.init.shared.b64 [%r1+512], 1;\nfence.mbarrier_init.release.cluster;\n"
    "@!%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1+512], 128;\n"
    "barrier.cluster.arrive;\nbarrier.cluster.wait;\n"
)
RECEIVE = (
    "W: mbarrier.try_wait.parity.shared.b64 %p3, [%r1+512], 0;\n@!%p3 bra W;\nshl.b32 %r3, %r0, 2;\n"
    "add.u32 %r3, %r3, %r1;\nld.shared.b32 %r9, [%r3+256];\nshl.b32 %r4, %r2, 7;\n"
    "cvt.u64.u32 %d3, %r4;\nadd.s64 %d1, %d1, %d3;\nst.global.b32 [%d1], %r9;\n"
    "barrier.cluster.arrive;\nbarrier.cluster.wait;"
)


@pytest.mark.parametrize("seed", SEEDS)
def test_remote_stores_signal_the_barrier_beside_them(seed):
    """Each CTA of a pair sends the other 32 words by st.async; bytes are counted there."""
    send = (
        "xor.b32 %r5, %r2, 1;\nmapa.shared::cluster.u32 %r6, %r1, %r5;\ngetctarank.shared::cluster.u32 "
        "%r7, %r6;\nshl.b32 %r8, %r0, 2;\nadd.u32 %r8, %r8, %r6;\nmad.lo.u32 %r10, %r7, 1000, %r0;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r8+256], %r10, [%r6+512];\n"
    )
    out = np.zeros((2, 32), dtype=np.uint32)
    run(
        kernel(CLUSTER + send + RECEIVE, shared=1024), out, grid=2, cluster=2, seed=seed, check=True
    )
    np.testing.assert_array_equal(out, np.arange(32) + np.array([[0], [1000]]))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mask", [0b11, 0b01, 0b10])
def test_a_multicast_copy_arrives_in_the_ctas_of_its_mask(mask, seed):
    """CTA 0 copies 128 bytes of p1; the other CTAs of the mask get them and their own signal."""
    skip = "" if mask == 3 else f"setp.eq.u32 %p5, %r2, {1 if mask == 1 else 0};\n@%p5 bra LEFT;\n"
    send = (
        f"ld.param.u64 %d5, [p1];\nmov.u16 %h0, {mask};\nor.b32 %r5, %r2, %r0;\n"
        "setp.ne.u32 %p4, %r5, 0;\n@%p4 bra SENT;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%r1+256], [%d5], 128, [%r1+512], %h0;\nSENT:\nbar.warp.sync -1;\n" + skip
    )
    receive = RECEIVE.replace("barrier.cluster.arrive", "LEFT: barrier.cluster.arrive", 1)
    source, out = np.arange(100, 132, dtype=np.uint32), np.zeros((2, 32), dtype=np.uint32)
    text = kernel(CLUSTER + send + receive, ".param .u64 p0, .param .u64 p1", shared=1024)
    run(text, out, source, grid=2, cluster=2, seed=seed, check=True)
    want = [source if mask >> rank & 1 else np.zeros(32) for rank in (0, 1)]
    np.testing.assert_array_equal(out, np.stack(want))
