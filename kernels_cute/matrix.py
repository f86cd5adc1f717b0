"""Row-major matrices in global memory from a raw address."""

import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64


def matrix(address: Int64, rows: Int32, columns: Int32, batch: Int32 | None = None) -> cute.Tensor:
    """A row-major bf16 tensor (rows, columns, batch) in global memory, 64-bit strides."""
    pointer = cute.make_ptr(BFloat16, address, cute.AddressSpace.gmem, assumed_align=16)
    columns = cute.assume(columns, divby=64)
    stride = cute.assume(Int64(columns), divby=64)
    plane = cute.assume(Int64(columns) * Int64(rows), divby=64)
    count = Int32(1) if batch is None else batch
    return cute.make_tensor(
        pointer, cute.make_layout((rows, columns, count), stride=(stride, 1, plane))
    )


def transposed(
    address: Int64, rows: Int32, columns: Int32, batch: Int32 | None = None
) -> cute.Tensor:
    """The tensor of ``matrix`` with its first two modes exchanged: (columns, rows, batch)."""
    plain = matrix(address, rows, columns, batch)
    return cute.make_tensor(plain.iterator, cute.select(plain.layout, mode=[1, 0, 2]))
