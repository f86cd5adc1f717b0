"""Quantise weights to MXFP8: one pass over a stack of BF16 matrices, in one or both orientations.

A CTA takes a 128×128 tile through shared memory. *Normal* blocks lie along a row (the contraction of
forward's GEMMs), *transposed* ones along a column (that of backward's). For machines with block-scaled
MMAs: E4M3 and scales, the transposed result stored transposed. For Hopper (``expanded``): the same
values as BF16, both in the layout of the input.
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import BFloat16, Int32, Int64, Uint32, cute
from cutlass.memory import SmemAllocator

from . import mxfp8, ptx

THREADS = 256
TILE = 128
ROW_BYTES = 2 * TILE + 16  # of a tile in shared memory: rows start in different banks


class QuantiseKernel:
    """Config:
    normal, transposed: which orientations to make.
    expanded: BF16 values instead of E4M3 and scales.
    tiled: scales in the hardware's tiles instead of plain (rows, columns/32).
    """

    def __init__(self, normal: bool, transposed: bool, expanded: bool, tiled: bool = True):
        self.normal = normal
        self.transposed = transposed
        self.expanded = expanded
        self.tiled = tiled

    @cute.jit
    def __call__(
        self,
        source: Int64,  # bf16 [E, M, N]
        normal: Int64,  # e4m3 [E, M, N], or bf16
        normal_scales: Int64,  # uint8 [E, M, N/32] or tiles of it
        transposed: Int64,  # e4m3 [E, N, M], or bf16 [E, M, N]
        transposed_scales: Int64,  # uint8 [E, N, M/32] or tiles of it
        rows: Int32,
        columns: Int32,
        batch: Int32,
        stream: cuda.CUstream,
    ):
        """M and N are multiples of 128. What the config does without is not written."""

        @cute.struct
        class Storage:
            tile: cute.struct.Align[cute.struct.MemRange[BFloat16, TILE * ROW_BYTES // 2], 16]

        self.storage = Storage
        self.kernel(
            source, normal, normal_scales, transposed, transposed_scales, rows, columns
        ).launch(grid=(columns // TILE, rows // TILE, batch), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(
        self,
        source: Int64,
        normal: Int64,
        normal_scales: Int64,
        transposed: Int64,
        transposed_scales: Int64,
        rows: Int32,
        columns: Int32,
    ):
        column_tile, row_tile, matrix = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        first_row, first_column = row_tile * TILE, column_tile * TILE
        plane = Int64(rows) * Int64(columns) * Int64(matrix)
        storage = SmemAllocator().allocate(self.storage)
        shared = storage.tile.data_ptr().toint()
        for i in cutlass.range_constexpr(TILE * TILE // 8 // THREADS):
            row, column = (thread + i * THREADS) // 16, (thread + i * THREADS) % 16 * 8
            at = plane + Int64(first_row + row) * Int64(columns) + Int64(first_column + column)
            ptx.shared_store_16(
                shared + row * ROW_BYTES + 2 * column, *ptx.load_16(source + 2 * at)
            )
        cute.arch.sync_threads()
        if cutlass.const_expr(self.normal):
            for i in cutlass.range_constexpr(2):
                row, block = (thread + i * THREADS) // 4, thread % 4
                self.along_row(
                    shared + row * ROW_BYTES + 64 * block, plane, first_row + row,
                    first_column + 32 * block, normal, normal_scales, rows, columns,
                )  # fmt: skip
        if cutlass.const_expr(self.transposed):
            column, block = thread % 64 * 2, thread // 64
            self.along_column(
                shared + 32 * block * ROW_BYTES + 2 * column, plane, first_row + 32 * block,
                first_column + column, transposed, transposed_scales, rows, columns,
            )  # fmt: skip

    @cute.jit
    def along_row(self, address, plane, row, column, target, scales, rows, columns):
        """One block of 32 columns."""
        pairs = []
        for j in cutlass.range_constexpr(4):
            pairs += [*ptx.shared_load_16(address + 16 * j)]
        code = mxfp8.scale_code(mxfp8.magnitude(pairs))
        at = plane + Int64(row) * Int64(columns) + Int64(column)
        if cutlass.const_expr(self.expanded):
            values = mxfp8.through(pairs, code)
            for j in cutlass.range_constexpr(4):
                ptx.store_16(target + 2 * at + 16 * j, *values[4 * j : 4 * j + 4])
        else:
            words = mxfp8.quantise(pairs, mxfp8.reciprocal(code))
            for j in cutlass.range_constexpr(2):
                ptx.store_16(target + at + 16 * j, *words[4 * j : 4 * j + 4])
            self.put_scale(scales, plane, row, column // 32, columns // 32, code)

    @cute.jit
    def along_column(self, address, plane, row, column, target, scales, rows, columns):
        """One block of 32 rows in each of two neighbouring columns."""
        words = [ptx.shared_load_4(address + i * ROW_BYTES) for i in range(32)]
        if cutlass.const_expr(self.expanded):
            # Low halves are the first column, high halves the second.
            most = mxfp8.magnitude(words)
            codes = [
                mxfp8.scale_code(most & Uint32(0xFFFF)), mxfp8.scale_code(most & Uint32(0xFFFF0000))
            ]  # fmt: skip
            split = [
                [ptx.pack_bf16(half(words[i]), half(words[i + 1])) for i in range(0, 32, 2)]
                for half in (ptx.bf16_low, ptx.bf16_high)
            ]
            first, second = (mxfp8.through(p, code) for p, code in zip(split, codes))
            for i in cutlass.range_constexpr(32):
                a, b = first[i // 2], second[i // 2]
                half = ptx.bf16_high if i % 2 else ptx.bf16_low
                at = plane + Int64(row + i) * Int64(columns) + Int64(column)
                ptx.store_4(target + 2 * at, ptx.pack_bf16(half(a), half(b)))
        else:
            columns_ = mxfp8.quantise_columns(words)
            for c in cutlass.range_constexpr(2):
                code, data = columns_[c]
                at = plane + Int64(column + c) * Int64(rows) + Int64(row)
                for j in cutlass.range_constexpr(2):
                    ptx.store_16(target + at + 16 * j, *data[4 * j : 4 * j + 4])
                self.put_scale(scales, plane, column + c, row // 32, rows // 32, code)

    @cute.jit
    def put_scale(self, scales, plane, row, block, row_blocks, code):
        """Store one scale; ``plane`` counts elements, of which 32 share one."""
        if cutlass.const_expr(self.tiled):
            at = mxfp8.scale_offset(row, block, row_blocks)
        else:
            at = Int64(row) * Int64(row_blocks) + Int64(block)
        ptx.store_1(scales + plane // 32 + at, Uint32(code))
