"""Row-major matrices in global memory from a raw address."""

import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64


def matrix(address: Int64, rows: Int32, columns: Int32, batch: Int32 | None = None) -> cute.Tensor:
    """A row-major bf16 tensor (rows, columns, batch) in global memory, 64-bit strides."""
    pointer, stride, plane, count = _rows(address, rows, columns, batch)
    columns = cute.assume(columns, divby=64)
    return cute.make_tensor(
        pointer, cute.make_layout((rows, columns, count), stride=(stride, 1, plane))
    )


def transposed(
    address: Int64, rows: Int32, columns: Int32, batch: Int32 | None = None
) -> cute.Tensor:
    """The elements of ``matrix`` with its first two modes exchanged: ((64, columns/64), rows, batch).

    In strips of 64 columns, what a row of swizzled shared memory holds: TMA counts them in a dimension of
    their own, so that one box brings all strips of a tile.
    """
    pointer, stride, plane, count = _rows(address, rows, columns, batch)
    shape = ((64, columns // 64), rows, count)
    return cute.make_tensor(pointer, cute.make_layout(shape, stride=((1, 64), stride, plane)))


def _rows(address: Int64, rows: Int32, columns: Int32, batch: Int32 | None):
    """Pointer, elements from row to row and from matrix to matrix, number of matrices."""
    pointer = cute.make_ptr(BFloat16, address, cute.AddressSpace.gmem, assumed_align=16)
    stride = cute.assume(Int64(columns), divby=64)
    plane = cute.assume(Int64(columns) * Int64(rows), divby=64)
    return pointer, stride, plane, Int32(1) if batch is None else batch
