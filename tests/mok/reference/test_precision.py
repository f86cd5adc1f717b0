from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mok.reference import fma32, ieee_matmul

finite = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-1e18, max_value=1e18)


def rounded_once(a: float, b: float, c: float) -> float:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    near = np.float32(float(exact))
    candidates = [
        np.nextafter(near, np.float32(-np.inf)),
        near,
        np.nextafter(near, np.float32(np.inf)),
    ]

    def distance(value):
        is_odd = int(value.view(np.uint32)) & 1
        return abs(Fraction(float(value)) - exact), is_odd

    return float(min(candidates, key=distance))


def fma(a, b, c):
    return fma32(*(torch.tensor(v, dtype=torch.float32) for v in (a, b, c))).item()


@given(finite, finite, finite)
def test_fma_rounds_once(a, b, c):
    assert fma(a, b, c) == rounded_once(a, b, c)


@pytest.mark.parametrize("sign", [1, -1])
def test_fma_where_a_second_rounding_would_err(sign):
    # 1 + half an ulp + a bit too small for FP64: FP64 rounds it to a tie, and the tie to even.
    ulp = 2.0**-23
    a, b, c = 1 + ulp, 2.0**-24, 1.0
    assert fma(a, sign * b, sign * c) == sign * (1 + ulp)
    tiny = 2.0**-60
    assert fma(1 + 2.0**-12, tiny, 1.0) == 1.0
    a = torch.tensor(1.0 + 2**-23)
    b = torch.tensor(2.0**-24 * (1 + 2**-23))
    c = torch.tensor(1.0)
    assert fma32(a, b, c).item() == rounded_once(a.item(), b.item(), c.item())


@pytest.mark.parametrize(
    ("a", "b", "c", "expected"),
    [
        (float("inf"), 1.0, 1.0, float("inf")),
        (float("-inf"), 1.0, 1.0, float("-inf")),
        (3e38, 3e38, 0.0, float("inf")),
        (0.0, 1.0, 2.0, 2.0),
    ],
)
def test_fma_special_values(a, b, c, expected):
    assert fma(a, b, c) == expected


def test_fma_propagates_nan():
    assert np.isnan(fma(float("nan"), 0.0, 1.0))
    assert np.isnan(fma(float("inf"), 0.0, 1.0))


def test_ieee_matmul_restores_the_callers_setting():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        with ieee_matmul():
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before
