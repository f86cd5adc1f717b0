"""Small kernels that the runtime's tests compile: host functions of scalars and a stream only."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute


class Scale:
    """x[i] *= factor * constant."""

    def __init__(self, constant: int = 2):
        self.constant = constant

    @cute.jit
    def __call__(
        self,
        x_addr: cutlass.Int64,
        n: cutlass.Int32,
        factor: cutlass.Float32,
        stream: cuda.CUstream,
    ):
        pointer = cute.make_ptr(cutlass.Float32, x_addr, cutlass.AddressSpace.gmem, assumed_align=4)
        x = cute.make_tensor(pointer, cute.make_layout((n,), stride=(1,)))
        self.kernel(x, n, factor).launch(
            grid=((n + 127) // 128, 1, 1), block=(128, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, n: cutlass.Int32, factor: cutlass.Float32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * 128 + thread
        if i < n:
            x[i] = x[i] * factor * self.constant


class Shift:
    """Two launches from one host function, the second with dynamic shared memory and a cluster."""

    @cute.jit
    def __call__(self, x_addr: cutlass.Int64, n: cutlass.Int32, stream: cuda.CUstream):
        pointer = cute.make_ptr(cutlass.Float32, x_addr, cutlass.AddressSpace.gmem, assumed_align=4)
        x = cute.make_tensor(pointer, cute.make_layout((n,), stride=(1,)))
        self.first(x).launch(grid=(1, 1, 1), block=(128, 1, 1), stream=stream)
        self.second(x).launch(grid=(2, 1, 1), block=(128, 1, 1), cluster=(2, 1, 1), stream=stream)

    @cute.kernel
    def first(self, x: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        x[thread] = x[thread] + 1.0

    @cute.kernel
    def second(self, x: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        smem = cutlass.memory.SmemAllocator().allocate_tensor(
            cutlass.Float32, cute.make_layout(25600), 128
        )
        smem[thread] = x[thread]
        cute.arch.sync_threads()
        x[thread] = smem[(thread + 1) % 128]


class Spilling:
    """Needs more registers than there are and asks setmaxnreg for what ptxas cannot give."""

    @cute.jit
    def __call__(self, x_addr: cutlass.Int64, n: cutlass.Int32, stream: cuda.CUstream):
        pointer = cute.make_ptr(cutlass.Float32, x_addr, cutlass.AddressSpace.gmem, assumed_align=4)
        x = cute.make_tensor(pointer, cute.make_layout((n,), stride=(1,)))
        self.kernel(x, n).launch(grid=(1, 1, 1), block=(512, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, n: cutlass.Int32):
        thread, _, _ = cute.arch.thread_idx()
        cute.arch.setmaxregister_increase(232)
        r = cute.make_rmem_tensor(cute.make_layout(160), cutlass.Float32)
        for i in cutlass.range_constexpr(160):
            r[i] = x[i * n + thread]
        cute.arch.sync_threads()
        for j in cutlass.range(n, unroll=1):
            for i in cutlass.range_constexpr(160):
                r[i] = r[i] * r[(i + 7) % 160] + x[j]
        for i in cutlass.range_constexpr(160):
            x[i * n + thread] = r[i]


class TakesTensor:
    """Breaks the rule that host functions take scalars."""

    @cute.jit
    def __call__(self, x: cute.Tensor, stream: cuda.CUstream):
        pass


class Broken:
    """Fails while it is traced."""

    @cute.jit
    def __call__(self, n: cutlass.Int32, stream: cuda.CUstream):
        self.no_such_method(n)


class NoteAndTrap:
    """Writes a wait's record, as a megakernel does, and traps."""

    @cute.jit
    def __call__(self, record_addr: cutlass.Int64, stream: cuda.CUstream):
        self.kernel(record_addr).launch(grid=(1, 1, 1), block=(1, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, record_addr: cutlass.Int64):
        words = cute.make_ptr(
            cutlass.Int32, record_addr, cutlass.AddressSpace.gmem, assumed_align=4
        )
        values = (1, 1, 1, 57, 1, 4321, 2, 3, 11, 16)
        for i in cutlass.range_constexpr(len(values)):
            cute.arch.store(words + i, cutlass.Int32(values[i]))
        cute.arch.fence_acq_rel_sys()
        cute.arch.inline_ptx("trap;")


class Hold:
    """Keep SMs for a time: each block takes so much shared memory that nothing else of size fits beside it."""

    @cute.jit
    def __call__(self, blocks: cutlass.Int32, ns: cutlass.Int64, stream: cuda.CUstream):
        self.kernel(ns).launch(grid=(blocks, 1, 1), block=(128, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, ns: cutlass.Int64):
        thread, _, _ = cute.arch.thread_idx()
        smem = cutlass.memory.SmemAllocator().allocate_tensor(
            cutlass.Float32, cute.make_layout(50000), 128
        )
        smem[thread] = cutlass.Float32(0.0)
        start = cute.arch.globaltimer()
        while cute.arch.globaltimer() - start < ns:
            smem[thread] = smem[thread] + 1.0
