"""The DSL's own manager of tensor maps: groups of rows, each loaded by a map edited for it.

NVIDIA's grouped GEMMs use it, too, but come with no package: see ``grouped_examples.py``.
"""

import pytest

pytest.importorskip("cutlass")

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import utils
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack

from mok.tools.emulator import Emulator, KernelFault

pytestmark = pytest.mark.emulator
ROWS, COLUMNS = 8, 32  # of a box
SIZES = (8, 3, 6)  # rows of each group


class Gather:
    """Loads the first box of every group by one map that is edited in between."""

    def __init__(self, mode, published=True):
        self.mode, self.published = mode, published

    @cute.jit
    def __call__(
        self,
        first: cute.Tensor,
        addresses: cute.Tensor,
        sizes: cute.Tensor,
        maps: cute.Tensor,
        out: cute.Tensor,
        stream: cuda.CUstream,
    ):
        layout = cute.make_layout((ROWS, COLUMNS), stride=(COLUMNS, 1))
        atom, tensor = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), first, layout, (ROWS, COLUMNS)
        )
        self.kernel(atom, tensor, addresses, sizes, maps, out, layout).launch(
            grid=(1, 1, 1), block=(32, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        atom: cute.CopyAtom,
        tensor: cute.Tensor,
        addresses: cute.Tensor,
        sizes: cute.Tensor,
        maps: cute.Tensor,
        out: cute.Tensor,
        layout: cute.Layout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        memory = utils.SmemAllocator()
        tile = memory.allocate_tensor(cutlass.Float32, layout, byte_alignment=128)
        barrier = memory.allocate_array(cutlass.Int64, 1)
        buffer = memory.allocate_tensor(cutlass.Int64, cute.make_layout(16), byte_alignment=128)
        manager = utils.TensorMapManager(self.mode, 128)
        edited = manager.get_tensormap_ptr(maps.iterator)
        in_shared = cutlass.const_expr(self.mode == utils.TensorMapUpdateMode.SMEM)
        place = buffer.iterator if in_shared else edited
        manager.init_tensormap_from_atom(atom, place, 0)
        manager.fence_tensormap_initialization()
        if thread == 0:
            cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()
        boxes = cute.zipped_divide(tensor, (ROWS, COLUMNS))
        to, source = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(tile, 0, 2), boxes[(None, (0, None))]
        )
        for group in cutlass.range(len(SIZES), unroll=1):
            pointer = cute.make_ptr(
                cutlass.Float32, addresses[group], cute.AddressSpace.gmem, assumed_align=16
            )
            shape = cute.make_layout((sizes[group], COLUMNS), stride=(cutlass.Int32(COLUMNS), 1))
            real = cute.make_tensor(pointer, shape)
            manager.update_tensormap((real,), (atom,), (edited,), 0, (buffer.iterator,))
            if cutlass.const_expr(self.published):
                manager.fence_tensormap_update(edited)
            if thread == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, 4 * ROWS * COLUMNS)
            cute.arch.sync_warp()
            cute.copy(
                atom,
                source[(None, 0)],
                to,
                tma_bar_ptr=barrier,
                tma_desc_ptr=manager.get_tensormap_ptr(edited, cute.AddressSpace.generic),
            )
            cute.arch.mbarrier_wait(barrier, group % 2)
            for row in cutlass.range(ROWS, unroll=1):
                out[group, row, thread] = tile[row, thread]
            cute.arch.sync_warp()


def gather(arch, mode, seed, published=True):
    groups = [
        torch.arange(n * COLUMNS, dtype=torch.float32).view(n, COLUMNS) + 1000 * n for n in SIZES
    ]
    first = torch.zeros(ROWS, COLUMNS)
    addresses = torch.tensor([g.data_ptr() for g in groups], dtype=torch.int64)
    sizes = torch.tensor(SIZES, dtype=torch.int32)
    maps = torch.zeros(32, dtype=torch.int64)
    maps = maps[-(maps.data_ptr() // 8) % 16 :][:16]
    out = torch.full((len(SIZES), ROWS, COLUMNS), -1.0)
    arguments = [
        from_dlpack(t, assumed_align=a)
        for t, a in ((first, 16), (addresses, 8), (sizes, 4), (maps, 128), (out, 16))
    ]
    with Emulator(arch, num_sms=1, seed=seed, check=True) as emulator:
        emulator.register(first, addresses, sizes, maps, out, *groups)
        stream = cuda.CUstream(0)
        compiled = cute.compile[cute.GPUArch(arch)](Gather(mode, published), *arguments, stream)
        compiled(*arguments, stream)
    for i, group in enumerate(groups):
        assert torch.equal(out[i, : len(group)], group)
        assert not out[i, len(group) :].any()
    assert not emulator.report.findings
    return compiled.__ptx__


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("mode", ["SMEM", "GMEM"])
def test_groups_by_one_edited_map(mode, arch, seed):
    text = gather(arch, utils.TensorMapUpdateMode[mode], seed)
    form = "tile.global_dim.shared::cta" if mode == "SMEM" else "tile.global_dim.global"
    assert f"tensormap.replace.{form}" in text
    assert ("tensormap.cp_fenceproxy" in text) == (mode == "SMEM")


@pytest.mark.parametrize("mode", ["SMEM", "GMEM"])
def test_an_edit_that_is_not_acquired(mode):
    with pytest.raises(KernelFault, match="edited tensor map"):
        gather("sm_90a", utils.TensorMapUpdateMode[mode], None, published=False)
