"""Bulk reductions: 1-D into global and shared memory, and of tensors, by two CTAs at the same time."""

import numpy as np
import pytest

from mok.tools.emulator import KernelFault
from tests.tools.emulator.ptx import kernel, run
from tests.tools.emulator.test_emulator_tcgen05 import COLUMNS, ROWS, tensor_map

pytestmark = pytest.mark.emulator
SEEDS = [None, 0, 1, 2]
LOAD = (  # 128 bytes of p1 per CTA into shared memory, 4 per lane
    "mov.u32 %r0, %tid.x;\nmov.u32 %r1, smem;\nmov.u32 %r2, {rank};\nld.param.u64 %d0, [p0];\n"
    "ld.param.u64 %d1, [p1];\nshl.b32 %r3, %r0, 2;\nshl.b32 %r4, %r2, 7;\nadd.u32 %r4, %r4, %r3;\n"
    "cvt.u64.u32 %d2, %r4;\nadd.s64 %d2, %d1, %d2;\nld.global.b32 %r5, [%d2];\nadd.u32 %r6, %r1, %r3;\n"
    "st.shared.b32 [%r6], %r5;\nfence.proxy.async.shared::cta;\nbar.warp.sync -1;\n"
    "setp.ne.u32 %p0, %r0, 0;\n"
)
DONE = "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\nE:"
PARAMS = ".param .u64 p0, .param .u64 p1"
TYPES = {
    "u32": np.uint32,
    "s32": np.int32,
    "u64": np.uint64,
    "s64": np.int64,
    "b32": np.uint32,
    "b64": np.uint64,
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
}


def numbers(kind, rows, seed):
    """Whole numbers, so that sums are exact in any order."""
    rng = np.random.default_rng(seed)
    dtype = TYPES[kind]
    low = 0 if kind[0] in "ub" else -9
    return rng.integers(low, 10, (rows, 128 // np.dtype(dtype).itemsize)).astype(dtype)


def one_by_one(op, old, new):
    """A reduction of whole numbers, element by element, as PTX defines it."""
    functions = {
        "add": lambda a, b: a + b,
        "min": min,
        "max": max,
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
        "inc": lambda a, b: 0 if a >= b else a + 1,
        "dec": lambda a, b: b if a == 0 or a > b else a - 1,
    }
    return [functions[op](int(a), int(b)) for a, b in zip(old, new, strict=True)]


ONE_DIMENSION = [
    *(("add", t) for t in ("u32", "s32", "u64", "f16", "f32", "f64")),
    *((op, t) for op in ("min", "max") for t in ("u32", "s32", "u64", "s64", "f16")),
    *((op, t) for op in ("and", "or", "xor") for t in ("b32", "b64")),
    ("inc", "u32"),
    ("dec", "u32"),
]


@pytest.mark.parametrize("op,kind", ONE_DIMENSION)
def test_two_ctas_reduce_into_one_tensor(op, kind):
    suffix = f"{op}.noftz.{kind}" if kind == "f16" and op == "add" else f"{op}.{kind}"
    text = kernel(
        LOAD.format(rank="%ctaid.x") + "@%p0 bra E;\n"
        f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{suffix} [%d0], [%r1], 128;\n" + DONE,
        PARAMS,
        shared=128,
    )
    parts, start = numbers(kind, 2, 1), numbers(kind, 1, 2)[0]
    either = []
    for first, second in ((0, 1), (1, 0)):
        either.append(one_by_one(op, one_by_one(op, start, parts[first]), parts[second]))
    for seed in SEEDS:
        total = start.copy()
        run(text, total, parts, grid=2, seed=seed, check=True)
        assert [int(v) for v in total] in either


def test_bf16_sums_are_rounded_once():
    text = kernel(
        LOAD.format(rank="%ctaid.x") + "@%p0 bra E;\n"
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16 [%d0], [%r1], 128;\n"
        + DONE,
        PARAMS,
        shared=128,
    )
    ones, steps = np.full(64, 0x3F80, np.uint16), np.full((1, 64), 0x3B80, np.uint16)  # 1, 2^-8
    run(text, ones, steps, check=True)
    assert (ones == 0x3F80).all()  # halfway: to even
    steps[:] = 0x3C00  # 2^-7
    run(text, ones, steps, check=True)
    assert (ones == 0x3F81).all()


def test_a_reduction_races_with_a_store():
    one = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%d0], [%r1], 128;\n"
    other = "cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r1], 128;\n"
    body = LOAD.format(rank="%ctaid.x") + "@%p0 bra E;\nsetp.eq.u32 %p1, %r2, 0;\n"
    text = kernel(body + f"@%p1 {one}@!%p1 {other}" + DONE, PARAMS, shared=128)
    with pytest.raises(KernelFault, match="data race"):
        run(text, np.zeros(32, np.uint32), np.ones((2, 32), np.uint32), grid=2, check=True)


def into_shared(reduction, prepare="st.shared.b32 [%r6+256], 5;\n"):
    """Both CTAs of a pair reduce into CTA 0's shared memory, which it stores in p0."""
    return kernel(
        LOAD.format(rank="%cluster_ctarank")
        + "setp.ne.u32 %p1, %r2, 0;\nmov.u32 %r7, 0;\nmapa.shared::cluster.u32 %r8, %r1, %r7;\n"
        "@!%p0 mbarrier.init.shared.b64 [%r1+512], 1;\n"
        f"{prepare}fence.proxy.async.shared::cta;\nfence.mbarrier_init.release.cluster;\n"
        "bar.warp.sync -1;\n"
        "or.pred %p2, %p0, %p1;\n"
        "@!%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r1+512], 256;\n"
        "barrier.cluster.arrive;\nbarrier.cluster.wait;\n@%p0 bra SENT;\n"
        "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes."
        f"{reduction} [%r8+256], [%r1], 128, [%r8+512];\nSENT:\nbar.warp.sync -1;\n@%p1 bra E;\n"
        "W: mbarrier.try_wait.parity.shared.b64 %p3, [%r1+512], 0;\n@!%p3 bra W;\n"
        "ld.shared.b32 %r9, [%r6+256];\ncvt.u64.u32 %d3, %r3;\nadd.s64 %d3, %d0, %d3;\n"
        "st.global.b32 [%d3], %r9;\nE:\nbarrier.cluster.arrive;\nbarrier.cluster.wait;",
        PARAMS,
        shared=1024,
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("reduction", ["add.u32", "max.s32", "xor.b32", "inc.u32", "dec.u32"])
def test_two_ctas_reduce_into_shared_memory(reduction, seed):
    op, kind = reduction.split(".")
    parts, out = numbers(kind, 2, 3), np.zeros(32, TYPES[kind])
    run(into_shared(reduction), out, parts, grid=2, cluster=2, check=True, seed=seed)
    orders = ((0, 1), (1, 0))
    either = [one_by_one(op, one_by_one(op, np.full(32, 5), parts[a]), parts[b]) for a, b in orders]
    assert [int(v) for v in out] in either


def test_reducing_into_what_nothing_has_written():
    text = into_shared("add.u32", "")
    with pytest.raises(KernelFault, match="nothing has written"):
        parts = np.ones((2, 32), np.uint32)
        run(text, np.zeros(32, np.uint32), parts, grid=2, cluster=2, check=True)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("op", ["add", "max", "xor"])
def test_two_ctas_reduce_boxes_of_a_tensor(op, seed):
    """Both add a box of one row; what lies outside the tensor is dropped."""
    target = np.arange(ROWS * COLUMNS, dtype=np.uint32).reshape(ROWS, COLUMNS)
    parts, want = numbers("u32", 2, 4), target.copy()
    row = want[3, 48:]
    for part in parts:
        row[:] = one_by_one(op, row, part[:16])
    text = kernel(
        LOAD.format(rank="%ctaid.x") + "ld.param.u64 %d4, [p2];\n@%p0 bra E;\n"
        f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.{op}.tile.bulk_group "
        "[%d4, {48, 3}], [%r1];\n" + DONE,
        PARAMS + ", .param .u64 p2",
        shared=128,
    )
    run(text, target, parts, tensor_map(target), grid=2, check=True, seed=seed)
    np.testing.assert_array_equal(target, want)
