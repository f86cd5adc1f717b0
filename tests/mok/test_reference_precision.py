from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mok.reference import fma32, ieee_matmul

finite = st.floats(
    width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**60), max_value=2.0**60
)


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
def test_fma_where_rounding_twice_would_err(sign):
    # a·b = 2^-24·(1 + 2^-46), just above half an ulp of 1. FP64 drops the 2^-70, and the tie that
    # is left goes down to 1.
    a, b = 1 + 2.0**-11 + 2.0**-23, sign * 2.0**-24 * (1 - 2.0**-11 + 2.0**-23)
    assert np.float32(a * b + sign) == sign
    assert fma(a, b, sign) == rounded_once(a, b, sign) == sign * (1 + 2.0**-23)


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
