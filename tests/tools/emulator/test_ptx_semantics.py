"""Single instructions against numpy, on 32 lanes of random bits."""

import numpy as np
import pytest

from mok.tools.emulator import UnsupportedInstruction
from tests.tools.emulator.ptx import kernel, run

pytestmark = pytest.mark.emulator
RNG = np.random.default_rng(0)
A = RNG.integers(0, 2**32, 32, dtype=np.uint32)
B = RNG.integers(0, 2**32, 32, dtype=np.uint32)
F = RNG.standard_normal(32).astype(np.float32)
G = RNG.standard_normal(32).astype(np.float32)
S, T = A.view(np.int32), B.view(np.int32)


def apply(instruction, a, b, out_type=np.uint32):
    """Result of ``instruction`` on %r1, %r2 (result %r3) per lane."""
    out = np.zeros(32, dtype=out_type)
    text = kernel(
        "mov.u32 %r0, %tid.x;\nmul.wide.u32 %d0, %r0, 4;\n"
        "ld.param.u64 %d1, [p0];\nld.param.u64 %d2, [p1];\nld.param.u64 %d3, [p2];\n"
        "add.s64 %d1, %d1, %d0;\nadd.s64 %d2, %d2, %d0;\nadd.s64 %d3, %d3, %d0;\n"
        f"ld.global.b32 %r1, [%d1];\nld.global.b32 %r2, [%d2];\n{instruction}\n"
        "st.global.b32 [%d3], %r3;",
        ".param .u64 p0, .param .u64 p1, .param .u64 p2",
    )
    run(text, np.ascontiguousarray(a), np.ascontiguousarray(b), out)
    return out


CASES = {
    "add.s32 %r3, %r1, %r2;": lambda: A + B,
    "sub.s32 %r3, %r1, %r2;": lambda: A - B,
    "mul.lo.s32 %r3, %r1, %r2;": lambda: A * B,
    "mul.hi.u32 %r3, %r1, %r2;": lambda: (A.astype(np.uint64) * B >> 32).astype(np.uint32),
    "mul.hi.s32 %r3, %r1, %r2;": lambda: (
        (S.astype(np.int64) * T >> 32).astype(np.int32).view(np.uint32)
    ),
    "min.s32 %r3, %r1, %r2;": lambda: np.minimum(S, T).view(np.uint32),
    "max.u32 %r3, %r1, %r2;": lambda: np.maximum(A, B),
    "div.u32 %r3, %r1, 7;": lambda: A // 7,
    "div.s32 %r3, %r1, -7;": lambda: (S.astype(np.int64) / -7).astype(np.int32).view(np.uint32),
    "rem.u32 %r3, %r1, 10;": lambda: A % 10,
    "shl.b32 %r3, %r1, 5;": lambda: A << 5,
    "shl.b32 %r3, %r1, 40;": lambda: A * 0,
    "shr.s32 %r3, %r1, 3;": lambda: (S >> 3).view(np.uint32),
    "shr.s32 %r3, %r1, 99;": lambda: (S >> 31).view(np.uint32),
    "shr.u32 %r3, %r1, 3;": lambda: A >> 3,
    "popc.b32 %r3, %r1;": lambda: np.array([int(x).bit_count() for x in A], np.uint32),
    "clz.b32 %r3, %r1;": lambda: np.array([32 - int(x).bit_length() for x in A], np.uint32),
    "brev.b32 %r3, %r1;": lambda: np.array([int(f"{x:032b}"[::-1], 2) for x in A], np.uint32),
    "lop3.b32 %r3, %r1, %r2, %r1, 0x6a;": lambda: np.where(True, (A & B) ^ A, 0).astype(np.uint32),
    "prmt.b32 %r3, %r1, %r2, 0x0123;": lambda: A.byteswap(),
    "bfe.u32 %r3, %r1, 4, 8;": lambda: A >> 4 & 255,
    "shf.l.wrap.b32 %r3, %r1, %r1, 8;": lambda: A << 8 | A >> 24,
    "not.b32 %r3, %r1;": lambda: ~A,
    "setp.lt.s32 %p1, %r1, %r2; selp.b32 %r3, 1, 0, %p1;": lambda: (S < T).astype(np.uint32),
    "setp.lo.u32 %p1, %r1, %r2; selp.b32 %r3, 1, 0, %p1;": lambda: (A < B).astype(np.uint32),
    "mov.u32 %r3, 7; setp.gt.u32 %p1, %r1, %r2; @%p1 mov.b32 %r3, %r1;": lambda: np.where(
        A > B, A, 7
    ),
    "cvt.u16.u32 %h1, %r1; cvt.s32.s16 %r3, %h1;": lambda: (
        A.astype(np.int16).astype(np.int32).view(np.uint32)
    ),
    "vote.sync.ballot.b32 %r3, %p0, -1;": lambda: A * 0,
    "shfl.sync.bfly.b32 %r3, %r1, 1, 31, -1;": lambda: A[np.arange(32) ^ 1],
    "shfl.sync.up.b32 %r3, %r1, 2, 0, -1;": lambda: A[
        np.maximum(np.arange(32) - 2, 0) + (np.arange(32) < 2) * np.arange(32)
    ],
    "redux.sync.add.s32 %r3, %r1, -1;": lambda: np.full(32, A.sum(dtype=np.uint32)),
    "and.b32 %r4, %r1, 3; match.any.sync.b32 %r3, %r4, -1;": lambda: np.array(
        [sum(1 << j for j in range(32) if (A[j] & 3) == (a & 3)) for a in A], np.uint32
    ),
}


@pytest.mark.parametrize("instruction", CASES)
def test_integer(instruction):
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(apply(instruction, A, B), CASES[instruction]())


FLOATS = {
    "add.rn.f32 %r3, %r1, %r2;": lambda: F + G,
    "mul.rn.f32 %r3, %r1, %r2;": lambda: F * G,
    "fma.rn.f32 %r3, %r1, %r2, %r1;": lambda: (F.astype(np.float64) * G + F).astype(np.float32),
    "div.rn.f32 %r3, %r1, %r2;": lambda: F / G,
    "max.f32 %r3, %r1, %r2;": lambda: np.maximum(F, G),
    "neg.f32 %r3, %r1;": lambda: -F,
    "cvt.rni.s32.f32 %r4, %r1; cvt.rn.f32.s32 %r3, %r4;": lambda: np.rint(F) + 0.0,
}


@pytest.mark.parametrize("instruction", FLOATS)
def test_float(instruction):
    np.testing.assert_array_equal(apply(instruction, F, G, np.float32), FLOATS[instruction]())


def test_bf16_pairs_round_to_nearest_even():
    import torch

    got = apply("cvt.rn.bf16x2.f32 %r3, %r1, %r2;", F, G).view(np.uint16).reshape(32, 2)
    want = [
        torch.from_numpy(x).bfloat16().view(torch.int16).numpy().view(np.uint16) for x in (G, F)
    ]
    np.testing.assert_array_equal(got, np.stack(want, 1))


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_fp8_pairs_saturate(kind):
    import torch

    values = np.concatenate(
        [
            F[:16] * 100,
            F[16:] * 1e-3,
        ]
    ).astype(np.float32)
    values[:4] = [1e9, -1e9, 0.0, 448.0]
    got = apply(f"cvt.rn.satfinite.{kind}x2.f32 %h1, %r1, %r1; cvt.u32.u16 %r3, %h1;", values, G)
    dtype = torch.float8_e4m3fn if kind == "e4m3" else torch.float8_e5m2
    limit = torch.finfo(dtype).max
    want = torch.from_numpy(values).clamp(-limit, limit).to(dtype).view(torch.uint8).numpy()
    np.testing.assert_array_equal(got & 255, want)


def test_an_unknown_instruction_names_itself():
    with pytest.raises(UnsupportedInstruction, match=r"dp4a.*PTX line"):
        apply("dp4a.s32.s32 %r3, %r1, %r2, %r1;", A, B)


def test_divergent_loops_meet_again():
    # Each lane loops tid times, then all lanes vote: the ballot needs every lane back.
    got = apply(
        "mov.u32 %r4, 0;\nL: setp.ge.u32 %p1, %r4, %r0;\n@%p1 bra D;\nadd.s32 %r4, %r4, 1;\n"
        "bra L;\nD: setp.ge.u32 %p2, %r4, 16;\nvote.sync.ballot.b32 %r3, %p2, -1;",
        A,
        B,
    )
    np.testing.assert_array_equal(got, np.full(32, 0xFFFF0000, np.uint32))
