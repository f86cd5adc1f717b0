"""Equal bits, equal number."""

from __future__ import annotations

import torch
from torch import Tensor


def digest(tensor: Tensor) -> int:
    """A number that differs, but for a chance of 2⁻⁶⁴, where any bit of the tensor does.

    Exact integer arithmetic on the device: the sum of each word times an odd factor that depends on
    its place.
    """
    words = (
        tensor.detach()
        .contiguous()
        .view(
            {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        )
    )
    total = 0
    step = 1 << 24
    flat = words.flatten()
    for start in range(0, len(flat), step):
        part = flat[start : start + step].long()
        place = torch.arange(start, start + len(part), device=part.device)
        factor = (place * 0x9E3779B1 + 0x85EBCA6B) | 1
        factor = (factor ^ (factor >> 15)) * 0xC2B2AE35 | 1
        total = (total + int((part * factor).sum())) % (1 << 64)
    return total
