"""The order in which the kernels add up a router-weight gradient, d_w = Σ d·hidden over I columns.

``kernels_cute/epilogue/router_grad.py`` is the kernels' side.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mok.reference.precision import fma32

GROUP = 64  # columns of one partial
LANES = 32


def butterfly(values: Tensor) -> Tensor:
    """The sum over the last dimension, a power of two, as lanes add that exchange values: FP32."""
    while values.shape[-1] > 1:
        values = values[..., : values.shape[-1] // 2] + values[..., values.shape[-1] // 2 :]
    return values[..., 0]


def row_partials(d: Tensor, hidden: Tensor) -> Tensor:
    """Partials of 64 columns each: FP32 [rows, I/64] from d and hidden, FP32 [rows, I].

    A thread owns the columns 8b + 2q and 8b + 2q + 1 of a group and adds them, ascending, with one
    fma each; then its quad of threads q = 0 … 3 adds.
    """
    shape = (len(d), d.shape[1] // GROUP, GROUP // 8, 4, 2)
    d, hidden = d.reshape(shape), hidden.reshape(shape)
    total = torch.zeros_like(d[:, :, 0, :, 0])
    for block in range(GROUP // 8):
        for side in range(2):
            total = fma32(d[:, :, block, :, side], hidden[:, :, block, :, side], total)
    return butterfly(total)


def sum_groups(partials: Tensor) -> Tensor:
    """The sum of each row's partials: FP32 [rows] from [rows, groups].

    Lane l of a warp adds the groups l, l + 32, … to 0, then the lanes add.
    """
    rows, groups = partials.shape
    total = partials.new_zeros(rows, LANES)
    for first in range(0, groups, LANES):
        part = partials[:, first : first + LANES]
        total[:, : part.shape[1]] += part
    return butterfly(total)
