"""docs/symmetric.md's all-gathers, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from mok.runtime.group import Group
from mok.runtime.heap import Heap, HeapOptions
from mok.runtime.launch import launch

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "symmetric.md").read_text()
CODE = dict(
    re.findall(r"^<!-- run: (\w+) -->\n```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
)
RANKS, N = 3, 64


def test_the_kernel_is_short():
    assert set(CODE) == {"host", "kernel"}
    lines = CODE["kernel"].partition("class AllGather")[2].splitlines()
    assert len([line for line in lines if line.strip()]) <= 30


def test_on_the_host():
    names: dict = {}
    exec(CODE["host"], names)
    options = HeapOptions(memory="host", max_size=1 << 24)
    with Heap(Group.single(), options) as heap:
        rows = heap.zeros((1, N), torch.float32)
        mine = torch.arange(float(N))
        assert torch.equal(names["all_gather"](heap, rows, mine)[0], mine)


@pytest.fixture
def all_gather(tmp_path, monkeypatch):
    pytest.importorskip("cutlass")
    from mok.runtime.compile import KernelSpec, get_kernel

    (tmp_path / "gathering.py").write_text(CODE["kernel"])
    monkeypatch.syspath_prepend(tmp_path)

    def make(arch, push):
        return get_kernel(KernelSpec.of("gather", arch, "gathering:AllGather", push=push))

    return make


def run(make, arch, heap, stream, device):
    rows = heap.zeros((RANKS, N), torch.bfloat16)
    words = heap.zeros(RANKS, torch.int32)
    failed = torch.zeros(1, dtype=torch.int32, device=device)
    for step in range(1, 4):
        mine = [torch.full((N,), float(10 * step + r), device=device).bfloat16() for r in range(3)]

        def arguments(rank, step=step, mine=mine):
            return (
                rows.base_address, words.base_address, heap.stride, mine[rank].data_ptr(),
                failed.data_ptr(), 2 * N, step, rank, RANKS, stream,
            )  # fmt: skip

        for push in (True, False):
            for rank in range(RANKS):
                launch(make(arch, push), *arguments(rank))
        for rank in range(RANKS):
            assert torch.equal(rows.peer(rank), torch.stack(mine))
        assert not int(failed)
    return failed, arguments


@pytest.mark.emulator
def test_in_the_emulator(all_gather):
    emulator = pytest.importorskip("mok.tools.emulator")
    options = HeapOptions(memory="host", max_size=1 << 24)
    with emulator.Emulator("sm_90a", num_sms=4), Heap(Group.virtual(RANKS), options) as heap:
        run(all_gather, "sm_90a", heap, 0, "cpu")


@pytest.mark.gpu
def test_on_a_gpu(all_gather):
    from mok.runtime.device import require_arch

    with Heap(Group.virtual(RANKS)) as heap:
        stream = torch.cuda.current_stream().cuda_stream
        failed, arguments = run(all_gather, require_arch().arch, heap, stream, "cuda")
        rows, words, stride, mine, at, nbytes, step, *rest = arguments(0)
        late = (rows, words, stride, mine, at, nbytes, step + 1, *rest)
        launch(all_gather(require_arch().arch, False), *late)
        torch.cuda.synchronize()
        assert int(failed) in (1, 2, 3)  # 5 s without a signal: named, not hung
