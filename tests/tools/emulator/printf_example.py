"""A kernel of the DSL that prints."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64


@cute.kernel
def tell(address: Int64, n: Int32):
    thread, _, _ = cute.arch.thread_idx()
    pointer = cute.make_ptr(Float32, address, cutlass.AddressSpace.gmem, assumed_align=4)
    x = cute.make_tensor(pointer, cute.make_layout(n))
    if thread == 3:
        cute.printf("thread %d of %ld: %f, 100%%", thread, Int64(n), x[thread])


@cute.jit
def host(address: Int64, n: Int32, stream: cuda.CUstream):
    tell(address, n).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


def build():
    """The host function, compiled for Hopper."""
    return cute.compile[cute.GPUArch("sm_90a")](host, Int64(0), Int32(1), cuda.CUstream(0))
