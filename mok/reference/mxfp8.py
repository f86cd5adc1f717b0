"""MXFP8 in torch: E4M3 values with one power-of-two scale per 32, as the kernels quantise.

The scale rule is NVIDIA's (Transformer Engine, cuDNN, upstream): the smallest power of two that brings
the block's largest magnitude to at most 448, that is, amax/448 rounded *up*. OCP MX 1.0 takes
floor(log2 amax) - 8 instead, so that magnitudes above 448 times its scale saturate. docs/mxfp8.md has
the sources.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mok.errors import DtypeError, ShapeError

BLOCK = 32  # elements that share a scale
E4M3_MAX = 448.0
MXFP8_LIMIT = 5e-3  # relative L2 of the layer in MXFP8 against the quantised reference
FP32_LIMIT = 7e-2  # the same against FP32: what quantising costs
FP32_COSINE_LIMIT = 0.996  # cosine of each output and gradient with that in FP32
FP32_GRADIENT_LIMIT = 8e-2  # the same of weight gradients; that of x has the limit of outputs
TILE = 128  # rows and columns of a tile of the hardware's scale layout


class Quantised(NamedTuple):
    """``data`` float8_e4m3fn [..., C] and ``scales`` float8_e8m0fnu [..., C/32] of a BF16 tensor.

    Element c is data[c] · 2^(code - 127) with code the byte of scales[c // 32].
    """

    data: Tensor
    scales: Tensor


def scale_codes(amax: Tensor) -> Tensor:
    """E8M0 codes, uint8, of blocks with the largest magnitudes ``amax`` (BF16, not NaN).

    Integers only. A BF16 magnitude is (1 + m/128)·2^(e - 127), 448 is 1.75·2^8, so amax/448 is at most
    2^(e - 8 - 127) exactly where m <= 96. Codes stop at 0 (2^-127: blocks of zeros and of the smallest
    values). Inf gives 254.
    """
    bits = amax.view(torch.int16).int() & 0x7FFF
    exponent, mantissa = bits >> 7, bits & 0x7F
    codes = (exponent - 8 + (mantissa > 96).int()).clamp(min=0)
    return torch.where(exponent == 255, 254, codes).to(torch.uint8)


def quantise(values: Tensor) -> Quantised:
    """Quantise along the last dimension.

    Args:
        values: BF16 [..., C], C a multiple of 32.

    Zeros keep their sign. NaN becomes NaN (0x7F), leaves the scale to the block's other elements and
    does not touch them. Inf becomes NaN and its block's finite elements 0: the scale's reciprocal,
    2^(127 - code) made by exponent arithmetic, is then 0.

    Raises:
        DtypeError, ShapeError: not BF16; C no multiple of 32.
    """
    if values.dtype != torch.bfloat16:
        raise DtypeError("values to quantise must be bfloat16", values.dtype)
    if values.shape[-1] % BLOCK:
        raise ShapeError(
            "the last dimension must be a multiple of 32", tuple(values.shape), "Pad it with zeros"
        )
    blocks = values.unflatten(-1, (-1, BLOCK))
    amax = torch.where(blocks.isnan(), 0.0, blocks).abs().amax(-1)
    codes = scale_codes(amax)
    reciprocal = ((254 - codes.int()) << 23).view(torch.float32)
    scaled = blocks.float() * reciprocal.unsqueeze(-1)
    data = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    data = torch.where(scaled.isnan(), 0x7F, data.view(torch.uint8)).to(torch.uint8)
    return Quantised(data.flatten(-2).view(torch.float8_e4m3fn), codes.view(torch.float8_e8m0fnu))


def expand(quantised: Quantised) -> Tensor:
    """The values as BF16: exact, except that those below 2^-126 round to BF16's subnormal grid."""
    codes = quantised.scales.view(torch.uint8).int()
    # 2^(code - 127) in FP32: code 0 is the subnormal 2^-127, 255 is NaN.
    bits = torch.where(codes == 0, 0x400000, codes << 23)
    scale = torch.where(codes == 255, torch.nan, bits.view(torch.float32))
    values = quantised.data.float().unflatten(-1, (-1, BLOCK)) * scale.unsqueeze(-1)
    return values.flatten(-2).bfloat16()


def through_mxfp8(values: Tensor) -> Tensor:
    """BF16 → MXFP8 along the last dimension → BF16."""
    return expand(quantise(values))


def through_mxfp8_along(values: Tensor, dim: int) -> Tensor:
    """``through_mxfp8`` along another dimension."""
    return through_mxfp8(values.transpose(dim, -1).contiguous()).transpose(dim, -1)


def tile_scales(scales: Tensor) -> Tensor:
    """Scales [..., R, C/32] in the hardware's layout: uint8 [..., R/128, C/128, 32, 16].

    A tile is 512 bytes: those of 128 rows and four blocks. Row r's four bytes stand at
    (r mod 32)·16 + (r div 32)·4, as tcgen05.cp 32x128b brings them to tensor memory.

    Raises:
        ShapeError: R or C is no multiple of 128.
    """
    *batch, rows, blocks = scales.shape
    if rows % TILE or blocks % (TILE // BLOCK):
        raise ShapeError(
            "scales in tiles need rows and columns that are multiples of 128",
            f"{rows} rows, {BLOCK * blocks} columns",
        )
    tiles = scales.view(torch.uint8).reshape(*batch, rows // 128, 4, 32, blocks // 4, 4)
    return tiles.movedim(-2, -4).transpose(-3, -2).flatten(-2).contiguous()


def untile_scales(tiles: Tensor) -> Tensor:
    """The inverse of ``tile_scales``: float8_e8m0fnu [..., R, C/32]."""
    *batch, row_tiles, column_tiles, _, _ = tiles.shape
    parts = tiles.view(torch.uint8).unflatten(-1, (4, 4)).transpose(-3, -2).movedim(-4, -2)
    plain = parts.reshape(*batch, 128 * row_tiles, 4 * column_tiles)
    return plain.contiguous().view(torch.float8_e8m0fnu)


class Precision:
    """What a GEMM of routed experts sees of its BF16 operands: in BF16, the operand."""

    name = "bf16"

    def rows(self, values: Tensor) -> Tensor:
        """Quantised along the last dimension, expanded to BF16 again."""
        return values

    def along(self, values: Tensor, dim: int) -> Tensor:
        """Quantised along ``dim``."""
        return values


class Mxfp8(Precision):
    """In MXFP8, the operand after quantisation along the contraction."""

    name = "mxfp8"

    def rows(self, values: Tensor) -> Tensor:
        return through_mxfp8(values)

    def along(self, values: Tensor, dim: int) -> Tensor:
        return through_mxfp8_along(values, dim)


PRECISIONS = {"bf16": Precision(), "mxfp8": Mxfp8()}


def precision_of(name: str) -> Precision:
    """The precision called ``name``.

    Raises:
        DtypeError: there is no such.
    """
    if name not in PRECISIONS:
        raise DtypeError("precision must be bf16 or mxfp8", repr(name))
    return PRECISIONS[name]
