"""Every damage to a pipeline's waits, arrives, fences and counts is noticed; no false report."""

import numpy as np
import pytest

from mok.tools.emulator.mutations import INVISIBLE, mutations, run
from tests.tools.emulator import ptx

pytestmark = pytest.mark.emulator

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


TEXT = pipeline()


def case(rewrite, seed):
    source = np.arange(32 * CHUNKS, dtype=np.uint32)
    target = np.zeros_like(source)
    ptx.run(rewrite(TEXT), source, target, threads=64, seed=seed, check=True, max_steps=200_000)
    return bool((target == source + 1).all())


@pytest.mark.parametrize("seed", [None, *range(50)])
def test_the_pipeline_gives_no_report(seed):
    assert case(lambda text: text, seed)


def test_mutations_are_noticed():
    outcomes = run(TEXT, case, [None, *range(20)])
    assert len(outcomes) >= 14
    seen = [o for o in outcomes if o.mutation.kind not in INVISIBLE]
    survivors = [o for o in seen if o.result == "survived"]
    assert not survivors, [(o.mutation.kind, o.mutation.line, o.mutation.old) for o in survivors]


def test_every_kind_of_mutation_changes_one_line():
    for m in mutations(TEXT):
        changed = m.apply(TEXT).split("\n")
        assert sum(a != b for a, b in zip(changed, TEXT.split("\n"), strict=True)) == 1
