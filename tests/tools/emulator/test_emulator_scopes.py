"""Scopes: a release or an acquire reaches its CTA, its cluster or its GPU, and no further."""

import numpy as np
import pytest

from mok.tools.emulator import KernelFault
from tests.tools.emulator.ptx import kernel, run

pytestmark = pytest.mark.emulator


def message(send, receive, by="%ctaid.x"):
    """Thread 0 of writer 0 writes data and a flag; of writer 1 it polls the flag, then reads."""
    return kernel(
        f"mov.u32 %r0, {by};\nmov.u32 %r9, %tid.x;\nand.b32 %r9, %r9, 31;\n"
        "ld.param.u64 %d0, [p0];\nsetp.ne.u32 %p3, %r9, 0;\n@%p3 bra E;\n"
        "setp.ne.u32 %p1, %r0, 0;\n@%p1 bra R;\n"
        f"st.global.b32 [%d0], 42;\n{send}\nbra E;\nR:\n{receive}\n"
        "setp.eq.u32 %p2, %r1, 0;\n@%p2 bra R;\n"
        "ld.global.b32 %r2, [%d0];\nst.global.b32 [%d0+64], %r2;\nE:"
    )


def release(scope):
    return f"st.release.{scope}.global.b32 [%d0+128], 1;"


def acquire(scope):
    return f"ld.acquire.{scope}.global.b32 %r1, [%d0+128];"


def fenced_store(scope, store="gpu"):
    return f"fence.acq_rel.{scope};\nst.relaxed.{store}.global.b32 [%d0+128], 1;"


def fenced_load(scope):
    return f"ld.relaxed.gpu.global.b32 %r1, [%d0+128];\nfence.acq_rel.{scope};"


def delivered(text, **options):
    data = np.zeros(64, dtype=np.uint32)
    run(text, data, check=True, **options)
    assert data[16] == 42


TWO_CTAS = {"grid": 2}
PAIR = {"grid": 2, "cluster": 2}
ONE_CTA = {"threads": 64, "grid": 1}


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize(
    "send,receive,where,enough",
    [
        (release("gpu"), acquire("gpu"), TWO_CTAS, True),
        (release("sys"), acquire("sys"), TWO_CTAS, True),
        (release("cta"), acquire("gpu"), TWO_CTAS, False),
        (release("cluster"), acquire("gpu"), TWO_CTAS, False),
        (release("gpu"), acquire("cta"), TWO_CTAS, False),
        (release("cluster"), acquire("cluster"), PAIR, True),
        (release("cta"), acquire("cluster"), PAIR, False),
        (release("cluster"), acquire("cta"), PAIR, False),
        (release("gpu"), acquire("cluster"), PAIR, True),
        (release("cta"), acquire("cta"), ONE_CTA, True),
        (release("gpu"), acquire("cta"), ONE_CTA, True),
        (fenced_store("gpu"), fenced_load("gpu"), TWO_CTAS, True),
        (fenced_store("cta"), fenced_load("gpu"), TWO_CTAS, False),
        (fenced_store("gpu", "cta"), fenced_load("gpu"), TWO_CTAS, False),
        (fenced_store("gpu"), fenced_load("cta"), TWO_CTAS, False),
        (fenced_store("cta"), fenced_load("cta"), ONE_CTA, True),
        ("red.release.gpu.global.add.u32 [%d0+128], 1;", acquire("gpu"), TWO_CTAS, True),
        ("red.release.cta.global.add.u32 [%d0+128], 1;", acquire("gpu"), TWO_CTAS, False),
    ],
)
def test_a_scope_must_reach(send, receive, where, enough, seed):
    by = "%warpid" if where is ONE_CTA else "%ctaid.x"
    text = message(send, receive, by)
    if enough:
        delivered(text, seed=seed, **where)
    else:
        with pytest.raises(KernelFault, match="data race"):
            delivered(text, seed=seed, **where)


def handover(
    arrive, data="st.shared::cluster.b32 [%r6], 42;", after="ld.shared.b32 %r2, [%r1+64];"
):
    """CTA 1 touches CTA 0's shared memory and arrives there; CTA 0 waits, then touches it too."""
    return kernel(
        "mov.u32 %r0, %cluster_ctarank;\nmov.u32 %r1, smem;\nmov.u32 %r9, %tid.x;\n"
        "ld.param.u64 %d0, [p0];\nsetp.ne.u32 %p3, %r9, 0;\n@%p3 bra S;\n"
        "mbarrier.init.shared.b64 [%r1], 1;\nst.shared.b32 [%r1+64], 7;\n"
        "fence.mbarrier_init.release.cluster;\nS:\n"
        "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n@%p3 bra E;\n"
        "setp.eq.u32 %p1, %r0, 0;\n@%p1 bra R;\nmov.u32 %r4, 0;\n"
        "mapa.shared::cluster.u32 %r5, %r1, %r4;\nadd.u32 %r6, %r5, 64;\n"
        f"{data}\n{arrive}\nbra E;\nR:\n"
        "mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0;\n@!%p2 bra R;\n"
        f"{after}\nst.global.b32 [%d0+64], %r2;\nE:\n"
        "barrier.cluster.arrive;\nbarrier.cluster.wait;",
        shared=128,
    )


NARROW = "mbarrier.arrive.shared::cluster.b64 _, [%r5];"
WIDE = "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r5];"


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_handing_data_to_a_peer_needs_cluster_scope(seed):
    delivered(handover(WIDE), seed=seed, **PAIR)
    with pytest.raises(KernelFault, match="data race"):
        delivered(handover(NARROW), seed=seed, **PAIR)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_freeing_a_buffer_of_a_peer_needs_no_scope(seed):
    """CTA 1 has read what CTA 0 overwrites after the arrival."""
    read = "ld.shared::cluster.b32 %r8, [%r6];"
    again = "st.shared.b32 [%r1+64], 9;\nmov.u32 %r2, 42;"
    delivered(handover(NARROW, read, again), seed=seed, **PAIR)
    with pytest.raises(KernelFault, match="data race"):
        delivered(handover(NARROW + "\n" + read, "", again), seed=seed, **PAIR)


def refill(before, wait, peer=1):
    """CTA 1 does ``before`` and arrives at CTA 0, which has a bulk copy overwrite CTA ``peer``'s memory."""
    here = "W:\nmbarrier.try_wait.parity.shared.b64 %p2, [%r1+8], 0;\n@!%p2 bra W;\n"
    return kernel(
        "mov.u32 %r0, %cluster_ctarank;\nmov.u32 %r1, smem;\nmov.u32 %r9, %tid.x;\n"
        "ld.param.u64 %d0, [p0];\nsetp.ne.u32 %p3, %r9, 0;\n@%p3 bra S;\n"
        "mbarrier.init.shared.b64 [%r1], 1;\nmbarrier.init.shared.b64 [%r1+8], 1;\n"
        "fence.mbarrier_init.release.cluster;\n"
        "mbarrier.arrive.expect_tx.shared.b64 _, [%r1+8], 16;\nS:\n"
        "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n@%p3 bra E;\n"
        "setp.eq.u32 %p1, %r0, 0;\n@%p1 bra R;\n"
        "mapa.shared::cluster.u32 %r5, %r1, 0;\nadd.u32 %r6, %r5, 64;\n"
        f"{before}\n{NARROW}\n{here * peer}bra E;\nR:\n{wait}\n"
        f"mapa.shared::cluster.u32 %r5, %r1, {peer};\nadd.u32 %r6, %r5, 64;\nadd.u32 %r7, %r5, 8;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r6], [%d0], 16, [%r7];\n"
        f"{here * (1 - peer)}E:\nbarrier.cluster.arrive;\nbarrier.cluster.wait;",
        shared=128,
    )


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_bulk_copy_may_refill_what_its_own_cta_has_written(seed):
    """Nothing is handed over then; where another CTA wrote, its store might still be on its way."""
    wait = "mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0;\n@!%p2 bra R;"
    own, foreign = "st.shared.b32 [%r1+64], 5;", "st.shared::cluster.b32 [%r6], 5;"

    def refilled(*arguments):
        text, data = refill(*arguments), np.zeros(32, dtype=np.uint32)
        run(text, data, check=True, seed=seed, **PAIR)

    refilled(own, wait)
    for damaged in ((own, ""), (foreign, wait, 0)):
        with pytest.raises(KernelFault, match="data race"):
            refilled(*damaged)


def poll(load, where):
    """Writer 1 polls a flag that writer 0 raises; nothing else is handed over."""
    by = "%warpid" if where is ONE_CTA else "%cluster_ctarank" if where is PAIR else "%ctaid.x"
    return kernel(
        f"mov.u32 %r0, {by};\nmov.u32 %r9, %tid.x;\nand.b32 %r9, %r9, 31;\n"
        "ld.param.u64 %d0, [p0];\nsetp.ne.u32 %p3, %r9, 0;\n@%p3 bra E;\n"
        "setp.ne.u32 %p1, %r0, 0;\n@%p1 bra R;\n"
        "red.relaxed.gpu.global.add.u32 [%d0], 1;\nbra E;\nR:\n"
        f"{load} %r1, [%d0];\nsetp.eq.u32 %p2, %r1, 0;\n@%p2 bra R;\nE:"
    )


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize(
    "load,where,enough",
    [
        ("ld.relaxed.gpu.global.b32", TWO_CTAS, True),
        ("ld.acquire.gpu.global.b32", TWO_CTAS, True),
        ("ld.volatile.global.b32", TWO_CTAS, True),
        ("ld.relaxed.cta.global.b32", TWO_CTAS, False),
        ("ld.acquire.cta.global.b32", TWO_CTAS, False),
        ("ld.relaxed.cluster.global.b32", TWO_CTAS, False),
        ("ld.relaxed.cluster.global.b32", PAIR, True),
        ("ld.relaxed.cta.global.b32", PAIR, False),
        ("ld.relaxed.cta.global.b32", ONE_CTA, True),
    ],
)
def test_a_polled_flag_needs_a_scope_that_reaches_its_writer(load, where, enough, seed):
    """A load of CTA scope may be served from a cache that the other CTA's write never reaches."""
    text, data = poll(load, where), np.zeros(32, dtype=np.uint32)
    if enough:
        run(text, data, check=True, seed=seed, **where)
    else:
        with pytest.raises(KernelFault, match=r"data race(.|\n)*red\.relaxed\.gpu"):
            run(text, data, check=True, seed=seed, **where)


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("first", ["ld.acquire.cta.global.b32", "ld.global.b32"])
def test_a_stronger_look_does_not_excuse_the_first(first, seed):
    text, data = poll("ld.acquire.gpu.global.b32", TWO_CTAS), np.zeros(32, dtype=np.uint32)
    run(text, data, check=True, seed=seed, **TWO_CTAS)
    text = text.replace("R:\n", f"R:\n{first} %r1, [%d0];\n")
    with pytest.raises(KernelFault, match=r"data race(.|\n)*red\.relaxed\.gpu"):
        run(text, data, check=True, seed=seed, **TWO_CTAS)
