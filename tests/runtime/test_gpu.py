"""The runtime on a real GPU: launches, symmetric memory, processes that share one GPU."""

import time

import pytest
import ranks
import torch

from mok.config import Config, Shape
from mok.errors import GroupError, MokTimeoutError
from mok.kernels_cute import records as R
from mok.runtime.compile import KernelSpec, clear_memory_cache, get_kernel
from mok.runtime.device import device_info
from mok.runtime.group import Group
from mok.runtime.heap import Heap, HeapOptions
from mok.runtime.launch import launch
from mok.runtime.memory import CudaMemory, probe_handles
from mok.runtime.watchdog import Records
from mok.runtime.workspace import Workspace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(scope="module")
def arch():
    info = device_info()
    if info.arch is None:
        pytest.skip(info.reason_unsupported)
    return info.arch


def scale(arch):
    return get_kernel(KernelSpec.of("scale", arch, "toy_kernels:Scale"))


# ---------------------------------------------------------------- devices and launches


def test_device_info_is_torchs():
    info, properties = device_info(), torch.cuda.get_device_properties(0)
    assert info.num_sms == properties.multi_processor_count
    assert info.cc == torch.cuda.get_device_capability()
    assert info.name == torch.cuda.get_device_name()
    assert info.memory_bytes >= properties.total_memory
    assert info.smem_per_block_optin == properties.shared_memory_per_block_optin


def test_launch_compiled_and_from_the_cache(arch):
    for from_cache in (False, True):
        kernel = scale(arch)
        assert kernel.from_cache == from_cache
        x = torch.ones(1000, device="cuda")
        kernel(x.data_ptr(), 999, 1.5, torch.cuda.current_stream().cuda_stream)
        assert x[:999].eq(3.0).all() and x[999] == 1.0
        clear_memory_cache()


def test_launch_follows_its_stream(arch):
    kernel, x = scale(arch), torch.ones(128, device="cuda")
    kernel(x.data_ptr(), 128, 1.0, 0)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        start = time.perf_counter()
        launch(kernel, x.data_ptr(), 128, 1.0, side.cuda_stream)
        assert time.perf_counter() - start < 0.02  # the host does not wait
    assert x[0].item() == 2.0 or side.query()
    side.synchronize()
    assert x[0].item() == 4.0


def test_dynamic_shared_memory_and_clusters(arch):
    kernel = get_kernel(KernelSpec.of("shift", arch, "toy_kernels:Shift"))
    x = torch.arange(128.0, device="cuda")
    kernel(x.data_ptr(), 128, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()


def test_host_cost_of_a_launch(arch):
    kernel, x = scale(arch), torch.ones(1, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    for _ in range(100):
        kernel(x.data_ptr(), 1, 0.5, stream)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(500):
        kernel(x.data_ptr(), 1, 0.5, stream)
    cost = (time.perf_counter() - start) / 500
    torch.cuda.synchronize()
    print(f"host cost of a launch: {cost * 1e6:.1f} us")
    assert cost < 40e-6


# ---------------------------------------------------------------- symmetric memory


@pytest.fixture
def heap():
    with Heap(Group.virtual(4)) as heap:
        yield heap
        torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32, torch.uint8])
def test_views_share_memory(heap, dtype):
    tensor = heap.empty((4, 64), dtype)
    assert tensor.local.is_cuda and not tensor.peer(3).float().any()
    values = torch.arange(256, device="cuda").view(4, 64).to(dtype)
    tensor.peer(2).copy_(values)
    assert torch.equal(tensor.peer(2), values) and not tensor.peer(1).float().any()
    assert torch.equal(heap.peer(tensor.local[1:3, ::2], 2), values[1:3, ::2])


def test_fresh_memory_is_zero_after_others_used_it():
    for _ in range(3):
        with Heap(Group.virtual(2)) as heap:
            tensor = heap.empty(1 << 22, torch.int32)
            assert not tensor.peer(1).any()
            tensor.peer(1).fill_(-1)
            torch.cuda.synchronize()


def test_kernels_reach_peers_by_arithmetic(heap, arch):
    tensor = heap.empty(256, torch.float32)
    for rank in range(4):
        tensor.peer(rank).fill_(rank + 1.0)
    stream = torch.cuda.current_stream().cuda_stream
    for rank in range(4):
        address = tensor.base_address + rank * tensor.rank_stride
        scale(arch)(address, 256, 0.5, stream)
    assert [tensor.peer(r)[255].item() for r in range(4)] == [1.0, 2.0, 3.0, 4.0]


def test_put_get_signal_wait_on_streams(heap):
    data = heap.empty(1 << 16, torch.bfloat16)
    word = heap.empty(8, torch.int32)
    source = torch.randn(1 << 16, device="cuda").bfloat16()
    writer, reader = torch.cuda.Stream(), torch.cuda.Stream()
    found = torch.zeros_like(source)
    torch.cuda._sleep(1)  # loaded now: a first launch waits for the device, and so for the reader
    torch.cuda.synchronize()
    # The reader is queued first and waits for the signal that follows the data.
    heap.wait(word, 1, index=5, rank=3, stream=reader)
    heap.get(found, data, 3, stream=reader)
    with torch.cuda.stream(writer):
        torch.cuda._sleep(50_000_000)
    heap.put(data, source, 3, stream=writer)
    heap.signal(word, 1, 3, index=5, stream=writer)
    torch.cuda.synchronize()
    assert torch.equal(found, source)
    assert heap.read(word, 3)[20:24] == b"\1\0\0\0"


def test_a_wait_for_a_signal_that_never_comes_ends(heap):
    word, after = heap.zeros(8, torch.int32), torch.zeros(1, device="cuda")
    # All kernels are loaded now: a first launch waits for the device, and so for what waits there.
    heap.signal(word, 1, 1, index=3)
    heap.wait(word, 1, index=3, rank=1)
    after.add_(1).zero_()
    torch.cuda.synchronize()
    start = time.monotonic()
    heap.wait(word, 1, index=2, rank=1, timeout_s=1.0)
    after.add_(1)
    assert time.monotonic() - start < 0.5  # only the stream waits
    torch.cuda.synchronize()
    assert 0.9 < time.monotonic() - start < 5.0 and int(after) == 1
    with pytest.raises(MokTimeoutError, match="signal"):
        heap.check()


@pytest.mark.alone
def test_growth_on_a_gpu(heap):
    first = heap.empty(10, torch.int32)
    first.peer(3).fill_(7)
    free = torch.cuda.mem_get_info()[0]
    big = heap.empty(1 << 26, torch.int32)
    assert free - torch.cuda.mem_get_info()[0] >= 4 * (1 << 28)
    big.peer(3)[-1] = 1
    assert first.peer(3).eq(7).all()


@pytest.mark.alone
def test_closing_returns_memory():
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        with Heap(Group.virtual(4), HeapOptions(size=1 << 28)):
            pass
    assert abs(free - torch.cuda.mem_get_info()[0]) < 64 << 20


def test_probe_finds_what_works():
    found = probe_handles(0)
    print(found)
    assert found["none"] == "" and found["posix_fd"] == ""


# ---------------------------------------------------------------- looking in while a kernel runs


CONFIG = Config(2, 2, 128, 384)


def test_counters_are_readable_while_a_kernel_runs():
    shape = Shape(64, 128, 192, 8, 2, 2)
    with Workspace(Group.virtual(2), shape, CONFIG, 100) as workspace:
        workspace.counter_words[workspace.sizes.counters.ticket] = 3
        torch.cuda.synchronize()
        torch.cuda._sleep(1_500_000_000)  # about a second
        start = time.perf_counter()
        assert workspace.counters()["ticket"] == [3]
        assert workspace.ring.state() == []  # no minibatch has been touched
        assert workspace.counters("backward") == {}
        assert time.perf_counter() - start < 0.2
        assert not torch.cuda.current_stream().query()  # still running
        torch.cuda.synchronize()
        print(workspace.plan())


def _record_then_trap(arch):
    kernel = get_kernel(KernelSpec.of("note", arch, "toy_kernels:NoteAndTrap"))
    noted = Records(CudaMemory(0), 2, (0, 1))
    kernel(noted.wait_address(1), 0)
    try:
        torch.cuda.synchronize()
        return "no trap"
    except RuntimeError:
        pass
    try:
        noted.check()
    except MokTimeoutError as error:
        noted.close()
        return str(error)
    return "nothing noted"


def _in_process(group, arch):
    return _record_then_trap(arch)


def test_the_record_outlives_a_trap(arch, tmp_path):
    (text,) = ranks.run_ok(_in_process, 1, tmp_path, arch)
    assert "4321" in text and "y_free" in text


# ---------------------------------------------------------------- processes on one GPU


def _share(group):
    torch.cuda.set_device(0)
    with Heap(group) as heap:
        rows = heap.empty((group.size, 64), torch.bfloat16)
        for step in range(20):
            mine = torch.full((64,), float(16 * step + group.rank), device="cuda").bfloat16()
            for rank in range(group.size):
                heap.put(rows.local[group.rank], mine, rank)
            heap.barrier()
            found = rows.local[:, 63].float()
            heap.barrier()
            want = torch.tensor([16.0 * step + r for r in range(group.size)]).bfloat16().float()
            assert torch.equal(found.cpu(), want), (step, found, want)
        torch.cuda.synchronize()
        heap.check()
        group.barrier("done")
        return heap.handle_kind


@pytest.mark.parametrize("size", [2, 4])
def test_processes_share_memory_and_barriers(tmp_path, arch, size):
    assert ranks.run_ok(_share, size, tmp_path) == ["posix_fd"] * size


def _graph(group):
    torch.cuda.set_device(0)
    with Heap(group) as heap:
        rows = heap.empty(group.size, torch.int32)
        count = torch.zeros(1, dtype=torch.int32, device="cuda")
        total = torch.zeros(group.size, dtype=torch.int32, device="cuda")
        heap.barrier()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            count.add_(1)
            for rank in range(group.size):
                heap.put(rows.local[group.rank : group.rank + 1], count, rank)
            heap.barrier()
            total.add_(rows.local)
            heap.barrier()
        for _ in range(50):
            graph.replay()
        torch.cuda.synchronize()
        heap.check()
        group.barrier("done")
        return total.tolist()


def test_barriers_replay_in_graphs(tmp_path, arch):
    assert ranks.run_ok(_graph, 2, tmp_path) == [[50 * 51 // 2] * 2] * 2


def _missing(group):
    torch.cuda.set_device(0)
    with Heap(group) as heap:
        heap.barrier()
        torch.cuda.synchronize()
        group.barrier("together")
        if group.rank != 1:
            start = time.monotonic()
            heap.barrier(timeout_s=1.0)
            torch.cuda.synchronize()
            waited = time.monotonic() - start
            assert 0.9 < waited < 5.0
            with pytest.raises((MokTimeoutError, GroupError), match=r"rank 1 did not|gave up"):
                heap.check()
            heap.barrier(timeout_s=100.0)  # poisoned: returns at once
            torch.cuda.synchronize()
            assert time.monotonic() - start < waited + 0.5
        group.barrier("seen")
        if group.rank == 1:
            heap.barrier(timeout_s=100.0)
            torch.cuda.synchronize()
            with pytest.raises(GroupError, match="gave up"):
                heap.check()
        group.barrier("all know")
    with Heap(group) as heap:  # the processes live and can start again
        heap.barrier()
        torch.cuda.synchronize()
        heap.check()
        group.barrier("done")
    return True


def test_a_missing_rank_is_named_and_the_processes_live(tmp_path, arch):
    assert ranks.run_ok(_missing, 3, tmp_path) == [True] * 3


def _waits(group):
    torch.cuda.set_device(0)
    from mok.runtime.barrier import Barrier

    with Heap(group) as heap:
        noted = Records(heap.memory, group.size, group.local_ranks)
        barrier = Barrier(heap, noted)
        word = heap.zeros(4, torch.int32)
        barrier()
        if group.rank == 0:
            heap.signal(word, 5, rank=1, index=2)
        else:
            barrier.wait(word, 5, index=2, timeout_s=30.0)
        barrier()
        torch.cuda.synchronize()
        noted.check()
        state = noted.words(group.rank)[R.BARRIER + R.BARRIER_STATE]
        group.barrier("done")
        noted.close()
    return state


def test_bounded_waits_for_signals(tmp_path, arch):
    assert ranks.run_ok(_waits, 2, tmp_path) == [0, 0]
