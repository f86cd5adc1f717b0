"""tcgen05.cp in every shape, and gather4 and scatter4, against numpy."""

import struct

import numpy as np
import pytest

from mok.tools.emulator import KernelFault
from tests.tools.emulator.ptx import kernel, run

pytestmark = pytest.mark.emulator
RNG = np.random.default_rng(0)
ARCH = {"arch": "sm_100a", "threads": 128}

# Shared memory: 4 KiB of source at 0 (without a swizzle: 8 x 16-byte cores of 128 bytes), the TMEM
# address at 8192, an mbarrier at 8200.
LOAD_SOURCE = """
mov.u32 %r0, %tid.x;
mov.u32 %r1, smem;
ld.param.u64 %d0, [p0];
ld.param.u64 %d1, [p1];
shl.b32 %r2, %r0, 5;
cvt.u64.u32 %d2, %r2;
add.s64 %d3, %d0, %d2;
add.u32 %r3, %r1, %r2;
ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%d3];
st.shared.v4.b32 [%r3], {%r4, %r5, %r6, %r7};
ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%d3+16];
st.shared.v4.b32 [%r3+16], {%r4, %r5, %r6, %r7};
setp.ne.u32 %p0, %r0, 0;
@%p0 bra READY;
mbarrier.init.shared.b64 [%r1+8200], 1;
READY:
shr.u32 %r8, %r0, 5;
setp.ne.u32 %p1, %r8, 0;
@%p1 bra ALLOCATED;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1+8192], 32;
tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
ALLOCATED:
fence.proxy.async.shared::cta;
bar.sync 0;
ld.shared.b32 %r9, [%r1+8192];
"""
# The descriptor: start, leading and stride byte offset in 16-byte units, version 1.
COPY = """
@%p0 bra COPIED;
shr.u32 %r10, %r1, 4;
cvt.u64.u32 %d4, %r10;
or.b64 %d4, %d4, {fields};
tcgen05.cp.cta_group::1.{shape} [%r9], %d4;
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1+8200];
COPIED:
W: mbarrier.try_wait.parity.shared.b64 %p2, [%r1+8200], 0;
@!%p2 bra W;
"""
STORE_TMEM = """
shl.b32 %r11, %r8, 21;
add.u32 %r11, %r11, %r9;
tcgen05.ld.sync.aligned.32x32b.x8.b32 {%r20, %r21, %r22, %r23, %r24, %r25, %r26, %r27}, [%r11];
tcgen05.wait::ld.sync.aligned;
add.s64 %d5, %d1, %d2;
st.global.v4.b32 [%d5], {%r20, %r21, %r22, %r23};
st.global.v4.b32 [%d5+16], {%r24, %r25, %r26, %r27};
bar.sync 0;
@%p1 bra FREED;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r9, 32;
FREED:
"""


def store_tmem(width):
    """The warps' lanes of the columns that hold ``width`` bytes."""
    if width == 32:
        return STORE_TMEM
    narrow = STORE_TMEM.replace(".x8.b32", ".x4.b32").replace(
        ", %r24, %r25, %r26, %r27}, [", "}, ["
    )
    return "\n".join(line for line in narrow.split("\n") if "%r24" not in line)


def copied(shape, rows, width, source):
    """TMEM words [128, 8] after a copy whose cores of one column follow each other."""
    stride, leading = 128, 16 * rows
    fields = (leading >> 4) << 16 | (stride >> 4) << 32 | 1 << 46
    out = np.zeros((128, 8), dtype=np.uint32)
    text = LOAD_SOURCE + COPY.format(shape=shape, fields=fields) + store_tmem(width)
    params = ".param .u64 p0, .param .u64 p1"
    run(kernel(text, params, shared=8448), source, out, check=True, **ARCH)
    return out


def matrix(source, rows, width):
    """The source as the rows [rows, width bytes] that the descriptor names, in words."""
    raw = source.reshape(-1).view(np.uint8)
    at = [
        (r // 8) * 128 + (r % 8) * 16 + c * 16 * rows
        for r in range(rows)
        for c in range(width // 16)
    ]
    return np.stack([raw[a : a + 16] for a in at]).reshape(rows, width).view(np.uint32)


def spread(shape, words):
    """Lanes that receive each row, as PTX defines the shapes."""
    if "warpx4" in shape:
        return np.tile(words, (4, 1))
    if "02_13" in shape:
        return np.tile(words, (2, 1))
    if "01_23" in shape:
        return np.concatenate([words[:32], words[:32], words[32:], words[32:]])
    return words


@pytest.mark.parametrize(
    "shape,rows,width",
    [
        ("32x128b.warpx4", 32, 16),
        ("64x128b.warpx2::02_13", 64, 16),
        ("64x128b.warpx2::01_23", 64, 16),
        ("128x128b", 128, 16),
        ("128x256b", 128, 32),
        ("4x256b", 4, 32),
    ],
)
def test_copies_to_tensor_memory(shape, rows, width):
    source = RNG.integers(0, 2**32, 1024, dtype=np.uint32)
    if rows == 4:
        out = copied(shape, 8, width, source)[:4]
        np.testing.assert_array_equal(out, matrix(source, 8, width)[:4])
        return
    out = copied(shape, rows, width, source)
    np.testing.assert_array_equal(out[:, : width // 4], spread(shape, matrix(source, rows, width)))


def test_reading_columns_that_nothing_has_written():
    params = ".param .u64 p0, .param .u64 p1"
    text = LOAD_SOURCE + STORE_TMEM
    with pytest.raises(KernelFault, match=r"tensor memory that nothing(.|\n)*TMEM column 0"):
        run(kernel(text, params, shared=8448), *np.zeros((2, 1024), "u4"), check=True, **ARCH)


def test_a_copy_needs_a_proxy_fence_and_its_commit():
    params = ".param .u64 p0, .param .u64 p1"
    source = RNG.integers(0, 2**32, 1024, dtype=np.uint32)
    copy = COPY.format(shape="32x128b.warpx4", fields=(512 >> 4) << 16 | 8 << 32 | 1 << 46)
    no_fence = (LOAD_SOURCE + copy + STORE_TMEM).replace("fence.proxy.async.shared::cta;", "")
    with pytest.raises(KernelFault, match=r"without fence\.proxy\.async"):
        text = kernel(no_fence, params, shared=8448)
        run(text, source, np.zeros(1024, "u4"), check=True, **ARCH)
    no_wait = LOAD_SOURCE + copy.split("W:")[0].replace("COPIED:", "COPIED: bar.sync 0;")
    with pytest.raises(KernelFault, match="data race at TMEM column 0"):
        text = kernel(no_wait + store_tmem(16), params, shared=8448)
        run(text, source, np.zeros(1024, "u4"), check=True, **ARCH)


# ------------------------------------------------------------------ gather4 and scatter4

ROWS, COLUMNS = 16, 64  # of the tensor, 32-bit words; boxes of 32 columns


def tensor_map(tensor):
    """A map of a 2-D array of words with boxes of one row and 32 columns."""
    raw = np.zeros(256, dtype=np.uint8)
    shift = -raw.ctypes.data % 64
    flags = 1 << 4 | 2 << 7  # two dimensions, 32-bit words
    words = [
        tensor.ctypes.data,
        flags | (tensor.strides[0] // 16) << 32,
        0,
        0,
        (COLUMNS - 1) | (ROWS - 1) << 32,
        0,
        31 << 56,
        0,
    ]
    raw[shift : shift + 64] = np.frombuffer(struct.pack("<8Q", *words), dtype=np.uint8)
    return raw[shift : shift + 128]


GATHER = "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes"
MOVE = """
mov.u32 %r0, %tid.x;
mov.u32 %r1, smem;
ld.param.u64 %d0, [p0];
ld.param.u64 %d1, [p1];
setp.ne.u32 %p0, %r0, 0;
@%p0 bra READY;
mbarrier.init.shared.b64 [%r1+512], 1;
mbarrier.arrive.expect_tx.shared.b64 %d9, [%r1+512], 512;
{gather} [%r1], [%d0, {{{a}}}], [%r1+512];
READY:
bar.sync 0;
W: mbarrier.try_wait.parity.shared.b64 %p2, [%r1+512], 0;
@!%p2 bra W;
@%p0 bra DONE;
cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group [%d1, {{{b}}}], [%r1];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
DONE:
"""


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("gather,scatter", [((32, 9, 2, 2, 15), (0, 3, 0, 7, 8))])
def test_gather4_and_scatter4(gather, scatter, seed):
    source = RNG.integers(0, 2**32, (ROWS, COLUMNS), dtype=np.uint32)
    target = np.zeros_like(source)
    maps = tensor_map(source), tensor_map(target)
    body = MOVE.format(gather=GATHER, a=", ".join(map(str, gather)), b=", ".join(map(str, scatter)))
    text = kernel(
        body, ".param .u64 p0, .param .u64 p1, .param .u64 p2, .param .u64 p3", shared=1024
    )
    run(text, *maps, source, target, seed=seed, check=True, arch="sm_100a")
    want = np.zeros_like(source)
    for to, of in zip(scatter[1:], gather[1:], strict=True):
        want[to, scatter[0] : scatter[0] + 32] = source[of, gather[0] : gather[0] + 32]
    np.testing.assert_array_equal(target, want)


def test_rows_outside_the_tensor_are_zero_and_not_written():
    source = RNG.integers(1, 2**32, (ROWS, COLUMNS), dtype=np.uint32)
    target = np.ones_like(source)
    maps = tensor_map(source), tensor_map(target)
    body = MOVE.format(gather=GATHER, a="0, 1, -1, 16, 2", b="32, 4, 5, 16, -3")
    text = kernel(
        body, ".param .u64 p0, .param .u64 p1, .param .u64 p2, .param .u64 p3", shared=1024
    )
    run(text, *maps, source, target, arch="sm_100a")
    want = np.ones_like(source)
    want[4, 32:], want[5, 32:] = source[1, :32], 0
    np.testing.assert_array_equal(target, want)


def commits(last):
    """CTA 0 commits twice to both CTAs' mbarriers, at 0 and 8; ``last`` is what CTA 1 then does."""
    return kernel(
        "mov.u32 %r0, %cluster_ctarank;\nmov.u32 %r1, smem;\nmov.u32 %r9, %tid.x;\n"
        "setp.ne.u32 %p3, %r9, 0;\n@%p3 bra S;\n"
        "mbarrier.init.shared.b64 [%r1], 1;\nmbarrier.init.shared.b64 [%r1+8], 1;\n"
        "fence.mbarrier_init.release.cluster;\nS:\n"
        "barrier.cluster.arrive;\nbarrier.cluster.wait;\n@%p3 bra E;\n"
        "setp.ne.u32 %p1, %r0, 0;\n@%p1 bra R;\nmov.u16 %h0, 3;\n"
        + "".join(
            "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster"
            f".multicast::cluster.b64 [%r1+{at}], %h0;\n"
            for at in (0, 8)
        )
        + "W: mbarrier.try_wait.parity.shared.b64 %p2, [%r1+8], 0;\n@!%p2 bra W;\nbra E;\nR:\n"
        + last
        + "\nE:",
        shared=64,
    )


def wait_for(*places):
    return "".join(
        f"L{at}: mbarrier.try_wait.parity.shared.b64 %p2, [%r1+{at}], 0;\n@!%p2 bra L{at};\n"
        for at in places
    )


def test_commits_arrive_in_the_other_cta_in_any_order():
    """So the last one's arrival says nothing of the first one's, for which a CTA must stay, too."""
    pair = {"arch": "sm_100a", "grid": 2, "cluster": 2}
    for seed in (None, *range(10)):
        run(commits(wait_for(0, 8)), np.zeros(4, np.uint32), seed=seed, check=True, **pair)
    left = 0
    for seed in range(10):
        try:
            run(commits(wait_for(8)), np.zeros(4, np.uint32), seed=seed, check=True, **pair)
        except KernelFault as fault:
            assert "may not signal a CTA that has exited" in str(fault)
            left += 1
    assert left >= 2
