"""Three small kernels whose every synchronising instruction is damaged: a ring of bulk copies, a
hand-over through clusters and global memory, and a loop over tiles by cluster launch control."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.tools.emulator import ptx

CHUNKS, STAGES = 6, 2
WAIT = """
{{
.reg .pred Q;
W:
mbarrier.try_wait.parity.shared.b64 Q, [{barrier}], {parity};
@Q bra D;
bra W;
D:
}}
"""


def pipeline():
    """Warp 0 copies chunks into a ring, warp 1 adds one to each word and stores it back.

    Shared memory: full barriers at 0 and 8, empty ones at 16 and 24, input stages of 128 bytes at
    256, output stages at 1024.
    """
    setup = """
mov.u32 %r0, %tid.x;
mov.u32 %r1, smem;
ld.param.u64 %d0, [p0];
ld.param.u64 %d1, [p1];
setp.ne.u32 %p0, %r0, 0;
@%p0 bra READY;
mbarrier.init.shared.b64 [%r1], 1;
mbarrier.init.shared.b64 [%r1+8], 1;
mbarrier.init.shared.b64 [%r1+16], 32;
mbarrier.init.shared.b64 [%r1+24], 32;
READY:
bar.sync 0;
mov.u32 %r20, 0;
mov.u32 %r21, 0;
setp.ge.u32 %p1, %r0, 32;
@%p1 bra CONSUME;
@%p0 bra DONE;
"""
    produce = f"""
PRODUCE:
shl.b32 %r2, %r20, 3;
add.s32 %r3, %r1, %r2;
add.s32 %r4, %r3, 16;
xor.b32 %r5, %r21, 1;
{WAIT.format(barrier="%r4", parity="%r5")}
mov.u32 %r6, 128;
mbarrier.arrive.expect_tx.shared.b64 %d9, [%r3], %r6;
shl.b32 %r7, %r20, 7;
add.s32 %r7, %r7, %r1;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r7+256], [%d0], %r6, [%r3];
add.s64 %d0, %d0, 128;
add.s32 %r20, %r20, 1;
setp.eq.u32 %p2, %r20, {STAGES};
@%p2 xor.b32 %r21, %r21, 1;
@%p2 mov.u32 %r20, 0;
add.s32 %r10, %r10, 1;
setp.lt.u32 %p3, %r10, {CHUNKS};
@%p3 bra PRODUCE;
bra DONE;
"""
    consume = f"""
CONSUME:
shl.b32 %r2, %r20, 3;
add.s32 %r3, %r1, %r2;
add.s32 %r4, %r3, 16;
{WAIT.format(barrier="%r3", parity="%r21")}
and.b32 %r8, %r0, 31;
shl.b32 %r9, %r8, 2;
shl.b32 %r7, %r20, 7;
add.s32 %r7, %r7, %r1;
add.s32 %r9, %r9, %r7;
ld.shared.b32 %r11, [%r9+256];
mbarrier.arrive.shared.b64 %d9, [%r4];
setp.ne.u32 %p4, %r8, 0;
@%p4 bra WAITED;
cp.async.bulk.wait_group.read 1;
WAITED:
bar.warp.sync -1;
add.s32 %r11, %r11, 1;
st.shared.b32 [%r9+1024], %r11;
fence.proxy.async.shared::cta;
bar.warp.sync -1;
@%p4 bra STORED;
mov.u32 %r6, 128;
cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r7+1024], %r6;
cp.async.bulk.commit_group;
STORED:
add.s64 %d1, %d1, 128;
add.s32 %r20, %r20, 1;
setp.eq.u32 %p2, %r20, {STAGES};
@%p2 xor.b32 %r21, %r21, 1;
@%p2 mov.u32 %r20, 0;
add.s32 %r10, %r10, 1;
setp.lt.u32 %p3, %r10, {CHUNKS};
@%p3 bra CONSUME;
@%p4 bra DONE;
cp.async.bulk.wait_group.read 0;
DONE:
"""
    body = setup.replace("mov.u32 %r20", "mov.u32 %r10, 0;\nmov.u32 %r20", 1) + produce + consume
    return ptx.kernel(body, ".param .u64 p0, .param .u64 p1", shared=2048)


def handover():
    """CTA 1 of each pair writes into CTA 0's shared memory; CTA 0 stores it and sends it back, and the
    last pair to arrive at a counter in global memory adds up what all pairs have stored.

    p0: data [pairs, 64], p1: counter, p2: output [64].  Shared memory: mbarrier at 0, the last pair's
    flag at 8, data at 256 and, sent back, at 512.
    """
    body = f"""
mov.u32 %r0, %cluster_ctarank;
mov.u32 %r1, smem;
mov.u32 %r9, %tid.x;
shl.b32 %r10, %r9, 2;
ld.param.u64 %d0, [p0];
ld.param.u64 %d1, [p1];
ld.param.u64 %d2, [p2];
setp.ne.u32 %p0, %r9, 0;
@%p0 bra READY;
mbarrier.init.shared.b64 [%r1], 64;
fence.mbarrier_init.release.cluster;
READY:
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
setp.eq.u32 %p1, %r0, 0;
@%p1 bra RECEIVE;
mov.u32 %r2, %clusterid.x;
mad.lo.u32 %r3, %r2, 1000, %r9;
mov.u32 %r4, 0;
mapa.shared::cluster.u32 %r5, %r1, %r4;
add.u32 %r6, %r5, %r10;
st.shared::cluster.b32 [%r6+256], %r3;
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r5];
bra LEAVE;
RECEIVE:
mov.u32 %r20, 0;
{WAIT.format(barrier="%r1", parity="%r20")}
add.u32 %r7, %r1, %r10;
xor.b32 %r7, %r7, 128;
ld.shared.b32 %r8, [%r7+256];
mov.u32 %r4, 1;
mapa.shared::cluster.u32 %r5, %r1, %r4;
add.u32 %r5, %r5, %r10;
st.shared::cluster.b32 [%r5+512], %r8;
mov.u32 %r2, %clusterid.x;
shl.b32 %r11, %r2, 8;
add.u32 %r11, %r11, %r10;
cvt.u64.u32 %d3, %r11;
add.s64 %d3, %d0, %d3;
st.global.b32 [%d3], %r8;
bar.sync 1, 64;
@%p0 bra COUNTED;
fence.acq_rel.gpu;
atom.relaxed.gpu.global.add.u32 %r12, [%d1], 1;
fence.acq_rel.gpu;
st.shared.b32 [%r1+8], %r12;
COUNTED:
bar.sync 1, 64;
ld.shared.b32 %r13, [%r1+8];
mov.u32 %r14, %nclusterid.x;
sub.u32 %r14, %r14, 1;
setp.ne.u32 %p2, %r13, %r14;
@%p2 bra LEAVE;
mov.u32 %r15, 0;
cvt.u64.u32 %d4, %r10;
add.s64 %d5, %d0, %d4;
add.s64 %d6, %d2, %d4;
SUM:
ld.global.b32 %r16, [%d5];
add.u32 %r15, %r15, %r16;
add.s64 %d5, %d5, 256;
sub.u32 %r14, %r14, 1;
setp.ne.s32 %p3, %r14, -1;
@%p3 bra SUM;
st.global.b32 [%d6], %r15;
LEAVE:
barrier.cluster.arrive;
barrier.cluster.wait;
add.u32 %r7, %r1, %r10;
@!%p1 ld.shared.b32 %r17, [%r7+512];
"""
    return ptx.kernel(body, ".param .u64 p0, .param .u64 p1, .param .u64 p2", shared=1024)


def tile_loop():
    """Two warps work on the tiles of cancelled launches; warp 0 asks, one query ahead.

    p0: how often each tile was done, by each warp.  Shared memory: full mbarrier at 0, empty one at
    8, response at 16.
    """
    body = f"""
.reg .b128 %q;
mov.u32 %r0, %tid.x;
mov.u32 %r1, smem;
add.u32 %r4, %r1, 8;
ld.param.u64 %d0, [p0];
setp.ne.u32 %p0, %r0, 0;
@%p0 bra READY;
mbarrier.init.shared.b64 [%r1], 1;
mbarrier.init.shared.b64 [%r1+8], 64;
READY:
bar.sync 0;
mov.u32 %r2, %ctaid.x;
mov.u32 %r3, 0;
and.b32 %r9, %r0, 31;
setp.ne.u32 %p4, %r9, 0;
TILE:
@%p0 bra ASKED;
xor.b32 %r5, %r3, 1;
{WAIT.format(barrier="%r4", parity="%r5")}
mov.u32 %r6, 16;
mbarrier.arrive.expect_tx.shared.b64 %d9, [%r1], %r6;
clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r1+16], [%r1];
ASKED:
shl.b32 %r7, %r2, 2;
cvt.u64.u32 %d1, %r7;
add.s64 %d1, %d0, %d1;
@!%p4 red.relaxed.gpu.global.add.u32 [%d1], 1;
{WAIT.format(barrier="%r1", parity="%r3")}
ld.shared.b128 %q, [%r1+16];
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p2, %q;
@%p2 clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {{%r2, %r10, %r11, %r12}}, %q;
fence.proxy.async.shared::cta;
mbarrier.arrive.shared.b64 %d9, [%r1+8];
xor.b32 %r3, %r3, 1;
@%p2 bra TILE;
"""
    return ptx.kernel(body, shared=100_000)


Rewrite = Callable[[str], str]


def run_pipeline(rewrite: Rewrite, seed: int | None) -> bool:
    source = np.arange(32 * CHUNKS, dtype=np.uint32)
    target = np.zeros_like(source)
    text = rewrite(pipeline())
    ptx.run(text, source, target, threads=64, seed=seed, check=True, max_steps=200_000)
    return bool((target == source + 1).all())


def run_handover(rewrite: Rewrite, seed: int | None) -> bool:
    pairs = 2
    data = np.zeros((pairs, 64), dtype=np.uint32)
    counter, out = np.zeros(32, dtype=np.uint32), np.zeros(64, dtype=np.uint32)
    options = {"threads": 64, "grid": 2 * pairs, "cluster": 2, "seed": seed}
    ptx.run(rewrite(handover()), data, counter, out, check=True, max_steps=100_000, **options)
    rows = 1000 * np.arange(pairs)[:, None] + (np.arange(64) ^ 32)
    return bool((out == rows.sum(0)).all())


def run_tile_loop(rewrite: Rewrite, seed: int | None) -> bool:
    done = np.zeros(12, dtype=np.uint32)
    options = {"threads": 64, "grid": 12, "num_sms": 2, "arch": "sm_100a", "seed": seed}
    ptx.run(rewrite(tile_loop()), done, check=True, max_steps=100_000, **options)
    return bool((done == 2).all())


@dataclass(frozen=True)
class Kernel:
    """A kernel to damage.  ``run(rewrite, seed)`` says whether its result is right; ``explained``
    gives the reason for each survivor that is not a gap of the model."""

    text: str
    run: Callable[[Rewrite, int | None], bool]
    explained: dict[str, str]


KERNELS = {
    "ring of bulk copies": Kernel(pipeline(), run_pipeline, {}),
    "hand-over": Kernel(handover(), run_handover, {}),
    "launch control": Kernel(
        tile_loop(),
        run_tile_loop,
        {
            "weaken scope: @!%p4 red.relaxed.gpu.global.add.u32 [%d1], 1;": (
                "the kernel stays right: both warps that add to a tile are in one CTA"
            ),
        },
    ),
}
