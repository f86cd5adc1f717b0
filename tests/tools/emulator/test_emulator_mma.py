"""tcgen05.mma of the kinds f16, tf32 and f8f6f4 against numpy: integers, so that every value is exact."""

import numpy as np
import pytest

from mok.tools.emulator import KernelFault
from tests.tools.emulator.ptx import kernel, run
from tests.tools.emulator.test_emulator_tcgen05 import LOAD_SOURCE

pytestmark = pytest.mark.emulator
ROWS, COLUMNS, WIDTH = 128, 32, 32  # M, N, bytes of K

# A lies at 0 of shared memory, B behind it; both as cores of 8 rows and 16 bytes, those of one column of
# cores after each other.
LOAD_B = """
ld.param.u64 %d6, [p2];
setp.ge.u32 %p3, %r0, 32;
@%p3 bra LOADED;
add.s64 %d7, %d6, %d2;
ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%d7];
st.shared.v4.b32 [%r3+4096], {%r4, %r5, %r6, %r7};
ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%d7+16];
st.shared.v4.b32 [%r3+4112], {%r4, %r5, %r6, %r7};
LOADED:
fence.proxy.async.shared::cta;
bar.sync 0;
"""
MULTIPLY = """
@%p0 bra ISSUED;
shr.u32 %r10, %r1, 4;
cvt.u64.u32 %d4, %r10;
or.b64 %d5, %d4, {of_b};
add.s64 %d5, %d5, 256;
or.b64 %d4, %d4, {of_a};
mov.u32 %r12, {what};
setp.eq.u32 %p4, 0, 1;
tcgen05.mma.cta_group::1.kind::{kind} [%r9], %d4, %d5, %r12, %p4;
setp.eq.u32 %p4, 0, 0;
tcgen05.mma.cta_group::1.kind::{kind} [%r9], %d4, %d5, %r12, %p4;
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1+8200];
ISSUED:
W: mbarrier.try_wait.parity.shared.b64 %p2, [%r1+8200], 0;
@!%p2 bra W;
shl.b32 %r11, %r8, 21;
add.u32 %r11, %r11, %r9;
mul.wide.u32 %d8, %r0, 128;
add.s64 %d8, %d1, %d8;
"""
READ = """
tcgen05.ld.sync.aligned.32x32b.x8.b32 {{%r20, %r21, %r22, %r23, %r24, %r25, %r26, %r27}}, [%r11+{at}];
tcgen05.wait::ld.sync.aligned;
st.global.v4.b32 [%d8+{to}], {{%r20, %r21, %r22, %r23}};
st.global.v4.b32 [%d8+{more}], {{%r24, %r25, %r26, %r27}};
"""
FREE = """
bar.sync 0;
@%p1 bra FREED;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r9, 32;
FREED:
"""


def descriptor(rows):
    """Version 1, no swizzle, from the start of shared memory."""
    return (16 * rows >> 4) << 16 | (128 >> 4) << 32 | 1 << 46


def instruction(a, b, negate=False, transpose=False):
    """The instruction descriptor of types a and b, FP32 accumulation."""
    shape = COLUMNS >> 3 << 17 | ROWS >> 4 << 24
    return 1 << 4 | a << 7 | b << 10 | negate << 13 | transpose << 15 | shape


def cores(matrix):
    """Bytes of a matrix [rows, 32 bytes] in the order that the descriptor names."""
    raw = matrix.view(np.uint8).reshape(len(matrix), WIDTH // 16, 16)
    return np.ascontiguousarray(raw.transpose(1, 0, 2)).reshape(-1)


def e4m3(values):
    """Integers from -16 to 16 as E4M3: 4 exponent bits of bias 7."""
    size = np.abs(values)
    power = np.floor(np.log2(np.maximum(size, 1))).astype(int)
    code = (power + 7) << 3 | ((size / 2.0**power - 1) * 8).astype(int)
    return (np.where(size == 0, 0, code) | (values < 0) << 7).astype(np.uint8)


def e5m2(values):
    """The upper byte of FP16, for integers of three significant bits."""
    half = values.astype(np.float16).view(np.uint16)
    assert not (half & 255).any()
    return (half >> 8).astype(np.uint8)


def tf32(values):
    """FP32 with something in the bits that TF32 has not: hardware leaves them out."""
    return values.astype(np.float32).view(np.uint32) | np.where(values, 0x1FFF, 0).astype(np.uint32)


def bf16(values):
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def f16(values):
    return values.astype(np.float16)


def product(kind, code, a, b, **options):
    """D [128, 32] after the product was stored and added once more."""
    out = np.zeros((ROWS, COLUMNS), dtype=np.float32)
    multiply = MULTIPLY.format(
        kind=kind, of_a=descriptor(ROWS), of_b=descriptor(COLUMNS), what=code
    )
    read = "".join(READ.format(at=at, to=4 * at, more=4 * at + 16) for at in range(0, COLUMNS, 8))
    text = kernel(
        LOAD_SOURCE + LOAD_B + multiply + read + FREE,
        ".param .u64 p0, .param .u64 p1, .param .u64 p2",
        shared=8448,
    )
    run(text, cores(a), out, cores(b), check=True, arch="sm_100a", threads=128, **options)
    return out


KINDS = {
    "f16": ("f16", 0, 0, f16, f16),
    "bf16": ("f16", 1, 1, bf16, bf16),
    "tf32": ("tf32", 2, 2, tf32, tf32),
    "e4m3": ("f8f6f4", 0, 0, e4m3, e4m3),
    "e5m2": ("f8f6f4", 1, 1, e5m2, e5m2),
    "e4m3 by e5m2": ("f8f6f4", 0, 1, e4m3, e5m2),
    "e5m2 by e4m3": ("f8f6f4", 1, 0, e5m2, e4m3),
}


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("negate", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_products_of_integers_are_exact(name, negate, seed):
    kind, code_a, code_b, to_a, to_b = KINDS[name]
    k = WIDTH // to_a(np.zeros(1, dtype=int)).itemsize
    rng = np.random.default_rng(1)
    # E5M2 holds no odd number above 4.
    a, b = (rng.choice([*range(-4, 5), 6, -6, 8, 16, -16], (rows, k)) for rows in (ROWS, COLUMNS))
    found = product(kind, instruction(code_a, code_b, negate), to_a(a), to_b(b), seed=seed)
    np.testing.assert_array_equal(found, (-2 if negate else 2) * (a @ b.T))


@pytest.mark.parametrize("name", ["tf32", "e4m3"])
def test_transposed_operands_of_other_sizes_are_refused(name):
    kind, code_a, code_b, to_a, to_b = KINDS[name]
    k = WIDTH // to_a(np.zeros(1, dtype=int)).itemsize
    a, b = to_a(np.ones((ROWS, k), dtype=int)), to_b(np.ones((COLUMNS, k), dtype=int))
    with pytest.raises(KernelFault, match="operand of two bytes"):
        product(kind, instruction(code_a, code_b, transpose=True), a, b)
