"""FP32 arithmetic that means what it says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def ieee_matmul() -> Iterator[None]:
    """FP32 matrix products in FP32 proper, whatever TF32 setting the caller chose."""
    backends: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
    before = [b.fp32_precision for b in backends]
    try:
        for b in backends:
            b.fp32_precision = "ieee"
        yield
    finally:
        for b, precision in zip(backends, before, strict=True):
            b.fp32_precision = precision


def fma32(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a·b + c of FP32 tensors, rounded once, as ``fma.rn.f32`` does.

    The product is exact in FP64. The FP64 sum is rounded to odd (Boldo and Melquiond, 2008), which
    keeps the second rounding, to FP32, from rounding a tie that the first one made.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)  # TwoSum: exact
    towards = torch.where(error > 0, torch.inf, -torch.inf).to(total)
    even = (total.view(torch.int64) & 1) == 0
    odd = torch.where((error != 0) & even, torch.nextafter(total, towards), total)
    return odd.float()
