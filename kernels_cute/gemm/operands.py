"""What the mainloops of both machines pass around: TMA sources, their partitions, mbarrier rings."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64
from cutlass.cute.nvgpu import cpasync


class Tma(NamedTuple):
    """A TMA copy atom and the coordinate tensor that goes with it."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


class Operand(NamedTuple):
    """A TMA source partitioned for one CTA: global tiles (TMA, tile, k, batch) and stages (TMA, stage)."""

    atom: cute.CopyAtom
    tXgX: cute.Tensor
    tXsX: cute.Tensor


class Stages(NamedTuple):
    """The mbarriers of a ring of buffers. full: filled; empty: read, free again."""

    full: cute.Pointer
    empty: cute.Pointer


class RowSource(NamedTuple):
    """A bf16 matrix whose rows are gathered one by one."""

    address: Int64
    row_bytes: Int64
    rows: Int32  # of the matrix: the first index outside it
    tma: Tma | None  # boxes of one row, where TMA gathers


def sw128_atom() -> cute.ComposedLayout:
    """8 rows of 64 BF16, K-major, in the 128-byte swizzle (16-byte chunk xor row mod 8)."""
    return cute.make_composed_layout(
        cute.make_swizzle(3, 4, 3), 0, cute.make_layout((8, 64), stride=(64, 1))
    )


def strip_atom() -> cute.ComposedLayout:
    """64 columns of 8 rows, columns contiguous, in the same swizzle: (column, row)."""
    return cute.make_composed_layout(
        cute.make_swizzle(3, 4, 3), 0, cute.make_layout((64, 8), stride=(1, 64))
    )


def aligned(elements: int) -> object:
    """A shared-storage field of BF16 ``elements`` that TMA and MMA can address: 1024-byte aligned."""
    return cute.struct.Align[cute.struct.MemRange[BFloat16, elements], 1024]


def aligned_bytes(count: int) -> object:
    """A shared-storage field of ``count`` bytes, 128-byte aligned."""
    return cute.struct.Align[cute.struct.MemRange[BFloat16, count // 2], 128]


def view(storage, layout: cute.ComposedLayout) -> cute.Tensor:
    """A swizzled tensor over a range of shared memory."""
    return storage.get_tensor(layout.outer, swizzle=layout.inner)


def make_tma(op, tensor: cute.Tensor, staged: cute.ComposedLayout, tile: tuple[int, int]) -> Tma:
    """TMA loads or stores, by ``op``, of (rows, columns) = ``tile`` boxes with the stages of layout ``staged``."""
    layout = cute.slice_(staged, (None, None, 0))
    return Tma(*cpasync.make_tiled_tma_atom(op, tensor, layout, tile))


def partition(source: Tma, sX: cute.Tensor, tile: tuple[int, int]) -> Operand:
    """Partition a TMA source (or target) of ``tile`` boxes for the stages of ``sX``."""
    gX = cute.local_tile(source.tensor, tile, (None, None, None))
    tXsX, tXgX = cpasync.tma_partition(
        source.atom, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
    )
    return Operand(source.atom, tXgX, tXsX)
