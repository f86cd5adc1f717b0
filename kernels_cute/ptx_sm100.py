"""The inline PTX that only clusters and Blackwell need; ``ptx`` holds the rest and its rules.

Cluster hand-over: a thread writes into the other CTA's shared memory and arrives on its mbarrier with
cluster scope, and the reader waits with cluster scope. The DSL's own arrive and wait have CTA scope.
"""

from collections.abc import Sequence

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

# ---- a cluster's shared memory and mbarriers ----


def cluster_address(address: Int32, cta: Int32) -> Int32:
    """Where CTA ``cta`` of the cluster holds what this CTA holds at a shared-memory address."""
    return cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Int32],
        read_only_args=[address, cta],
    )


def cluster_store_16(address: Int32, r0: Uint32, r1: Uint32, r2: Uint32, r3: Uint32) -> None:
    """16 bytes to a ``cluster_address``."""
    cute.arch.inline_ptx(
        "st.shared::cluster.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, r0, r1, r2, r3],
    )


def cluster_load(address: Int32) -> Int32:
    """An int32 from a ``cluster_address``."""
    return cute.arch.inline_ptx(
        "ld.shared::cluster.b32 {$w0}, [{$r0}];",
        write_only_types=[Int32],
        read_only_args=[address],
    )


def cluster_arrive(address: Int32) -> None:
    """Arrive on the mbarrier at a ``cluster_address``; releases what this thread did before it."""
    cute.arch.inline_ptx(
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [{$r0}];",
        read_only_args=[address],
    )


def cluster_wait(address: Int32, parity: Int32) -> None:
    """Wait for a phase of an own mbarrier on which other CTAs arrive; acquires what they released."""
    cute.arch.inline_ptx(
        "{\n\t.reg .pred done;\n\tAGAIN:\n\t"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [{$r0}], {$r1}, 10000000;\n\t"
        "@done bra.uni DONE;\n\tbra.uni AGAIN;\n\tDONE:\n\t}",
        read_only_args=[address, parity],
    )


# ---- tensor memory ----


def tmem_load(*addresses: Int32, width: int = 32) -> list[list[Float32]]:
    """32 (or ``width``: 16) columns of this lane's row from each tensor-memory address.

    An address is lane · 65536 + column.
    """
    count = len(addresses)
    loads = []
    for i in range(count):
        registers = ", ".join(f"{{$w{width * i + j}}}" for j in range(width))
        loads.append(f"tcgen05.ld.sync.aligned.32x32b.x{width}.b32 {{{registers}}}, [{{$r{i}}}];")
    # One block with its wait, so that nothing reads the registers before they are loaded.
    values = cute.arch.inline_ptx(
        "\n\t".join([*loads, "tcgen05.wait::ld.sync.aligned;"]),
        write_only_types=[Float32] * (width * count),
        read_only_args=list(addresses),
    )
    return [list(values[width * i : width * i + width]) for i in range(count)]


def copy_scales(target: Int32, descriptor: Int64) -> None:
    """512 bytes of scales (32 rows of 16) from shared to tensor memory, four columns, once per warp's
    lanes; in both CTAs, each from its own shared memory (one thread)."""
    cute.arch.inline_ptx(
        "tcgen05.cp.cta_group::2.32x128b.warpx4 [{$r0}], {$r1};",
        read_only_args=[target, descriptor],
    )


def mma_mxfp8(
    accumulator: Int32,
    a: Int64,
    b: Int64,
    instruction: Int32,
    a_scales: Int32,
    b_scales: Int32,
    accumulate: Int32,
) -> None:
    """One block-scaled MMA of 32 K for a pair of CTAs: addresses, descriptors (one thread)."""
    cute.arch.inline_ptx(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, {$r6}, 0;\n\t"
        "tcgen05.mma.cta_group::2.kind::mxf8f6f4.block_scale.block32 [{$r0}], {$r1}, {$r2}, {$r3}, "
        "[{$r4}], [{$r5}], p;\n\t}",
        read_only_args=[accumulator, a, b, instruction, a_scales, b_scales, accumulate],
    )


def tmem_store(address: Int32, values: Sequence[Float32]) -> None:
    """32 columns of this lane's row to a tensor-memory address; before others read: ``tmem_store_wait``."""
    registers = ", ".join(f"{{$r{1 + i}}}" for i in range(32))
    cute.arch.inline_ptx(
        f"tcgen05.st.sync.aligned.32x32b.x32.b32 [{{$r0}}], {{{registers}}};",
        read_only_args=[address, *values],
    )


def tmem_store_wait() -> None:
    """Wait until this thread's ``tmem_store``s are done."""
    cute.arch.inline_ptx("tcgen05.wait::st.sync.aligned;")


def tcgen05_before_sync() -> None:
    """Order this thread's earlier tcgen05 operations before the synchronisation that follows."""
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")


def tcgen05_after_sync() -> None:
    """Order this thread's later tcgen05 operations after the synchronisation before it."""
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")


# ---- TMA ----


def tma_gather_4(
    target: Int32, descriptor: Int64, column: Int32, rows: Sequence[Int32], mbarrier: Int32
) -> None:
    """Four rows of a 2-D tensor from ``column`` on; a row outside the tensor arrives as zeros.

    The descriptor's box is one row. ``mbarrier`` may be either CTA's of the pair.
    """
    cute.arch.inline_ptx(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes"
        ".cta_group::2 [{$r0}], [{$r1}, {{$r2}, {$r3}, {$r4}, {$r5}, {$r6}}], [{$r7}];",
        read_only_args=[target, descriptor, column, *rows, mbarrier],
    )


# ---- wide global accesses ----


def load_32_if(address: Int64, valid: Boolean) -> list[Uint32]:
    """32 bytes from global memory, past L1, where ``valid``; zeros, and no access, elsewhere."""
    zeros = "".join(f"mov.b32 {{$w{i}}}, 0;\n\t" for i in range(8))
    registers = ", ".join(f"{{$w{i}}}" for i in range(8))
    return list(
        cute.arch.inline_ptx(
            f"{{\n\t.reg .pred p;\n\tsetp.ne.b32 p, {{$r1}}, 0;\n\t{zeros}"
            f"@p ld.global.L1::no_allocate.v8.b32 {{{registers}}}, [{{$r0}}];\n\t}}",
            write_only_types=[Uint32] * 8,
            read_only_args=[address, Int32(valid)],
        )
    )


def load_f32_4(address: Int64) -> tuple[Float32, ...]:
    """Four FP32 from global memory."""
    return cute.arch.inline_ptx(
        "ld.global.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Float32] * 4,
        read_only_args=[address],
    )


def store_f32_4(address: Int64, values: Sequence[Float32]) -> None:
    """Four FP32 to global memory."""
    cute.arch.inline_ptx(
        "st.global.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *values],
    )


def shared_store_16(address: Int32, r0: Uint32, r1: Uint32, r2: Uint32, r3: Uint32) -> None:
    """16 bytes to this CTA's shared memory."""
    cute.arch.inline_ptx(
        "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, r0, r1, r2, r3],
    )
