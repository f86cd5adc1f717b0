"""The symmetric heap in one process: allocation, addresses, views, copies, signals."""

import gc

import numpy as np
import pytest
import torch

from mok.errors import (
    CapacityError,
    DeviceError,
    DtypeError,
    GroupError,
    MokTimeoutError,
    ResourceError,
    ShapeError,
)
from mok.runtime.allocator import ALIGNMENT, Allocator
from mok.runtime.barrier import Barrier
from mok.runtime.group import Group
from mok.runtime.heap import Heap, HeapOptions
from mok.runtime.memory_host import HostMemory
from mok.runtime.views import tensor_at

HOST = HeapOptions(memory="host", max_size=1 << 30)


@pytest.fixture
def heap():
    with Heap(Group.virtual(4), HOST) as heap:
        yield heap


# ---------------------------------------------------------------- the allocator


def test_blocks_are_aligned_and_disjoint_and_space_is_reused():
    allocator = Allocator()
    allocator.grow(4096)
    blocks = [allocator.take(size) for size in (1, 256, 257, 0)]
    assert blocks == [0, 256, 512, 1024]
    allocator.give(256)
    assert allocator.take(200) == 256  # first fit
    allocator.give(512)
    allocator.give(256)  # merges with 512…1024
    assert allocator.take(700) == 256
    assert allocator.used == 256 + 768 + 256


def test_everything_merges_back_in_any_order():
    import random

    for seed in range(20):
        order = random.Random(seed)
        allocator = Allocator()
        allocator.grow(1 << 16)
        blocks = [allocator.take(order.randint(1, 2000)) for _ in range(20)]
        order.shuffle(blocks)
        for block in blocks:
            allocator.give(block)
        assert allocator._free == [(0, 1 << 16)] and allocator.used == 0


def test_growth_counts_the_free_tail():
    allocator = Allocator()
    allocator.grow(1024)
    allocator.take(512)
    assert allocator.missing(512) == 0
    assert allocator.missing(1024) == 512
    allocator.grow(1536)
    assert allocator.take(1024) == 512
    assert allocator.missing(1) == ALIGNMENT


def test_double_free_is_refused():
    allocator = Allocator()
    allocator.grow(1024)
    block = allocator.take(1)
    allocator.give(block)
    with pytest.raises(ShapeError, match="in use"):
        allocator.give(block)
    with pytest.raises(CapacityError):
        allocator.take(4096)


# ---------------------------------------------------------------- addresses and views


def test_addresses_are_arithmetic(heap):
    a = heap.empty((3, 5), torch.bfloat16)
    b = heap.empty(7, torch.int32)
    assert heap.stride % heap.memory.granularity == 0
    for tensor in (a, b):
        assert tensor.base_address % ALIGNMENT == 0
        assert tensor.rank_stride == heap.stride
        for rank in range(4):
            address = tensor.base_address + rank * tensor.rank_stride
            assert tensor.address(rank) == tensor.peer(rank).data_ptr() == address
    assert (a.local.shape, a.local.dtype, a.nbytes) == ((3, 5), torch.bfloat16, 30)
    assert b.shape == (7,)
    with pytest.raises(ShapeError, match="0…3"):
        a.address(4)


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.uint8, torch.float8_e4m3fn],
)
def test_views_share_memory_in_every_dtype(heap, dtype):
    tensor = heap.empty((4, 8), dtype)
    assert not tensor.local.to(torch.float32).any()  # fresh memory is zero
    values = torch.arange(32).view(4, 8).to(dtype)
    tensor.peer(2).copy_(values)
    assert torch.equal(tensor.peer(2).view(torch.uint8), values.view(torch.uint8))
    assert not tensor.peer(1).to(torch.float32).any()


def test_peer_of_slices_keeps_strides(heap):
    tensor = heap.empty((6, 8), torch.float32)
    tensor.peer(3).copy_(torch.arange(48.0).view(6, 8))
    local = tensor.local
    for piece in (local[2:4], local[:, 3], local[1::2, ::3], local.t(), local[5, 7], local[2:2]):
        peer = heap.peer(piece, 3)
        assert peer.shape == piece.shape and peer.stride() == piece.stride()
    assert torch.equal(heap.peer(local[1::2, ::3], 3), tensor.peer(3)[1::2, ::3])
    assert torch.equal(heap.peer(tensor.peer(1)[2:4], 3), tensor.peer(3)[2:4])
    assert heap.contains(local[3:]) and not heap.contains(torch.empty(3))
    with pytest.raises(ShapeError, match="must lie in this symmetric heap"):
        heap.peer(torch.empty(3), 1)


def test_empty_tensors_and_bad_sizes(heap):
    tensor = heap.empty((0, 7), torch.bfloat16)
    assert tensor.local.shape == (0, 7) and tensor.peer(3).numel() == 0
    with pytest.raises(ShapeError, match="negative"):
        heap.empty((-1, 2), torch.float32)


def test_dlpack_views_leak_nothing():
    memory = HostMemory()
    base = memory.reserve(1 << 21)
    memory.map(base, 4096, memory.create(4096, "none"))
    view = tensor_at(base, (16,), torch.int32, None)
    view.fill_(3)
    assert torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(view))[2] == 3
    for _ in range(1000):
        tensor_at(base, (4, 4), torch.bfloat16, None)
    del view
    gc.collect()
    memory.unmap(base, 4096)
    memory.unreserve(base, 1 << 21)


# ---------------------------------------------------------------- growth, freeing, closing


def test_growth_keeps_addresses_and_contents(heap):
    a = heap.empty(100, torch.int32)
    a.peer(1).fill_(5)
    size, view = heap.size, a.peer(1)
    big = heap.empty(1 << 16, torch.int32)
    assert heap.size > size
    assert (view == 5).all() and (a.peer(1) == 5).all()
    big.peer(3).fill_(1)
    assert heap.used == 512 + (1 << 18)


def test_memory_is_reused_after_free(heap):
    a = heap.empty(1000, torch.float32)
    offset, size = a.offset, heap.size
    a.free()
    assert heap.used == 0
    b = heap.zeros(1000, torch.float32)
    assert (b.offset, heap.size) == (offset, size)
    with pytest.raises(ShapeError):
        Heap(Group.single(), HOST).free(b)


def test_zeros_clears_reused_memory(heap):
    a = heap.empty(10, torch.float32)
    for rank in range(4):
        a.peer(rank).fill_(float("nan"))
    a.free()
    b = heap.zeros(10, torch.float32)
    assert all(not b.peer(rank).any() for rank in range(4))


def test_the_limit_is_an_error_that_changes_nothing():
    with Heap(Group.virtual(2), HeapOptions(memory="host", max_size=8192)) as heap:
        heap.empty(1024, torch.float32)
        with pytest.raises(CapacityError, match=r"max_size"):
            heap.empty(2048, torch.float32)
        assert heap.used == 4096
        heap.empty(1024, torch.float32)
    with pytest.raises(CapacityError, match=r"2\^40"):
        Heap(Group.virtual(2), HeapOptions(memory="host", max_size=1 << 41))


def test_initial_size_is_mapped_at_once():
    with Heap(Group.virtual(2), HeapOptions(memory="host", size=10000, max_size=1 << 20)) as heap:
        assert heap.size == 12288
        heap.empty(2500, torch.float32)
        assert heap.size == 12288


def test_a_closed_heap_says_so(heap):
    tensor = heap.empty(4, torch.int32)
    heap.close()
    heap.close()
    for use in (lambda: tensor.local, lambda: heap.empty(1, torch.int32), tensor.free):
        with pytest.raises(ResourceError, match="closed"):
            use()


def test_a_failed_growth_is_rolled_back(heap, monkeypatch):
    kept = heap.empty(4, torch.int32)
    mapped = []
    original = HostMemory.map

    def failing(self, address, size, handle):
        if len(mapped) == 2:
            raise CapacityError("no more", size)
        mapped.append(address)
        original(self, address, size, handle)

    unmapped = []
    unmap = HostMemory.unmap
    monkeypatch.setattr(HostMemory, "map", failing)
    monkeypatch.setattr(
        HostMemory, "unmap", lambda self, a, s: (unmapped.append(a), unmap(self, a, s))
    )
    size = heap.size
    with pytest.raises(CapacityError, match="no more"):
        heap.empty(1 << 20, torch.float32)
    assert unmapped == mapped[::-1]
    assert heap.size == size
    monkeypatch.setattr(HostMemory, "map", original)
    kept.peer(3).fill_(1)
    heap.empty(1 << 20, torch.float32).peer(3).fill_(2)


def test_closing_gives_address_space_and_memory_back():
    def mappings():
        with open("/proc/self/maps") as file:
            return sum(1 for _ in file)

    with Heap(Group.virtual(8), HOST) as heap:
        heap.empty(1000, torch.float32)
    before = mappings()
    for _ in range(20):
        with Heap(Group.virtual(8), HOST) as heap:
            heap.empty(1 << 14, torch.float32)
            heap.empty(1 << 18, torch.float32)
    assert mappings() <= before + 2


# ---------------------------------------------------------------- moving data


def test_put_and_get(heap):
    tensor = heap.empty((4, 4), torch.bfloat16)
    values = torch.arange(16.0).view(4, 4).bfloat16()
    heap.put(tensor, values, rank=2)
    assert torch.equal(tensor.peer(2), values) and not tensor.local.any()
    heap.put(tensor.local[1:2], values[3:], rank=3)
    assert torch.equal(tensor.peer(3)[1], values[3])
    found = torch.empty(4, 4, dtype=torch.bfloat16)
    heap.get(found, tensor, rank=2)
    assert torch.equal(found, values)


def test_put_and_get_refuse_what_they_cannot_copy(heap):
    tensor = heap.empty((4, 4), torch.bfloat16)
    with pytest.raises(ShapeError, match="equal shapes and dtypes"):
        heap.put(tensor, torch.empty(4, 4), rank=1)
    with pytest.raises(ShapeError, match="contiguous"):
        heap.put(tensor, torch.empty(4, 4, dtype=torch.bfloat16).t(), rank=1)
    with pytest.raises(DeviceError):
        heap.put(tensor, torch.empty(4, 4, dtype=torch.bfloat16, device="meta"), rank=1)


def test_signal_and_wait(heap):
    word = heap.empty(4, torch.int32)
    heap.signal(word, 7, rank=2, index=1)
    assert word.peer(2).tolist() == [0, 7, 0, 0]
    heap.wait(word, 7, index=1, rank=2, timeout_s=1)
    heap.wait(word, 3, index=1, rank=2, timeout_s=1)
    with pytest.raises(MokTimeoutError, match=r"reach 8 .* found it is at 7"):
        heap.wait(word, 8, index=1, rank=2, timeout_s=0.05)
    # Epochs may wrap: -2 comes before 1.
    heap.signal(word, 2**32 - 2, rank=0)
    with pytest.raises(MokTimeoutError):
        heap.wait(word, 1, timeout_s=0.01)
    heap.signal(word, 1, rank=0)
    heap.wait(word, 2**32 - 2, timeout_s=0.01)
    with pytest.raises(ShapeError, match="32-bit"):
        heap.signal(heap.empty(4, torch.int64), 1, rank=0)
    with pytest.raises(ShapeError, match="32-bit"):
        heap.signal(word, 1, rank=0, index=4)


def test_read_is_a_snapshot(heap):
    word = heap.empty(2, torch.int32)
    word.peer(1).fill_(9)
    assert heap.read(word, 1) == b"\x09\0\0\0" * 2
    assert heap.read(word) == bytes(8)


# ---------------------------------------------------------------- misuse

NO_NUMBERS = ["x", None, 1.0, True, np.float32(1), np.True_]


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_what_is_no_number(heap, value):
    word = heap.zeros(4, torch.int32)
    calls = [
        lambda: heap.empty((2, value), torch.int32),
        lambda: word.peer(value),
        lambda: heap.signal(word, value, rank=0),
        lambda: heap.signal(word, 1, rank=value),
        lambda: heap.signal(word, 1, rank=0, index=value),
        lambda: heap.wait(word, value, timeout_s=1),
        lambda: heap.wait(word, 0, index=value, timeout_s=1),
        lambda: HeapOptions(max_size=value),
    ]
    for call in calls:
        with pytest.raises(DtypeError, match="must be a whole number"):
            call()
    assert not word.peer(0).any() and not word.peer(1).any()


def test_numpy_s_numbers_are_numbers(heap):
    word = heap.zeros(np.array([4, 8]), torch.int32)
    assert word.shape == (4, 8) and all(type(n) is int for n in word.shape)
    for shape in (np.int64(4), np.array(4), (np.int32(4),), torch.Size([4])):
        assert heap.empty(shape, torch.int32).shape == (4,)
    assert heap.address(np.int32(1)) == heap.base + heap.stride  # beyond an int32
    heap.signal(word, np.int64(3), rank=np.int64(1), index=np.int64(9))
    assert int(word.peer(np.int32(1))[1, 1]) == 3
    heap.wait(word, np.int32(3), index=9, rank=1, timeout_s=np.float32(1))
    heap.wait(word, 3, index=9, rank=1, timeout_s=np.int64(1))
    heap.barrier(timeout_s=np.int64(1))
    options = HeapOptions(max_size=np.int64(1 << 20), memory="host")
    assert type(options.max_size) is int


@pytest.mark.parametrize(
    "shape", ["x", b"ab", {4}, {4: 4}, np.array(4.0), np.array([4.0])], ids=repr
)
def test_what_is_no_shape(heap, shape):
    with pytest.raises(DtypeError, match="must be a whole number"):
        heap.empty(shape, torch.int32)


NO_TIMES = [
    *(
        (value, ShapeError, "must be a finite number from 0")
        for value in (float("nan"), float("inf"), -1)
    ),
    pytest.param(10**400, ShapeError, "must be a finite number from 0", id="beyond floats"),
    (np.float32("nan"), ShapeError, "must be a finite number from 0"),
    *((value, DtypeError, "must be a number") for value in ("x", True, np.True_, [1.0])),
]


@pytest.mark.parametrize(("seconds", "error", "words"), NO_TIMES, ids=repr)
def test_nothing_waits_for_ever(heap, seconds, error, words):
    word = heap.zeros(1, torch.int32)
    calls = [
        lambda: heap.wait(word, 1, timeout_s=seconds),
        lambda: heap.barrier(timeout_s=seconds),
        lambda: Group.from_process_group(timeout_s=seconds),
        lambda: Group.from_store(None, 0, 1, timeout_s=seconds),
        lambda: Group(1, (0,), heap.group.rendezvous, timeout_s=seconds),
        lambda: Barrier(heap, None, timeout_s=seconds),
    ]
    for call in calls:
        with pytest.raises(error, match=f"timeout_s {words}"):
            call()


def test_a_tensor_of_another_heap_is_refused(heap):
    with Heap(heap.group, HOST) as other:
        word = other.zeros(4, torch.int32)
        calls = [
            lambda: heap.signal(word, 1, rank=0),
            lambda: heap.wait(word, 0, timeout_s=1),
            lambda: heap.peer(word, 0),
            lambda: heap.read(word),
            lambda: heap.put(word, torch.ones(4, dtype=torch.int32), rank=0),
            lambda: heap.get(torch.ones(4, dtype=torch.int32), word, rank=0),
            lambda: heap.free(word),
        ]
        for call in calls:
            with pytest.raises(ShapeError, match="of this heap; found one of another"):
                call()
        assert not word.local.any()


@pytest.mark.parametrize("value", ["x", None, 3, torch.zeros(4, dtype=torch.int32)], ids=type)
def test_what_is_no_symmetric_tensor(heap, value):
    for call in (lambda: heap.signal(value, 1, rank=0), lambda: heap.free(value)):
        with pytest.raises(DtypeError, match=r"what heap\.empty returned"):
            call()
    with pytest.raises((DtypeError, ShapeError), match="heap"):
        heap.peer(value, 1)


@pytest.mark.parametrize("reused", [False, True])
def test_a_freed_tensor_is_refused(heap, reused):
    """Also where another one lies in its place: neither its contents nor its block are touched."""
    old = heap.empty(4, torch.int32)
    old.free()
    new = heap.zeros(4, torch.int32) if reused else None
    assert new is None or new.offset == old.offset
    calls = [
        old.free,
        lambda: old.local,
        lambda: old.address(0),
        lambda: heap.read(old),
        lambda: heap.read(old, 1),
        lambda: heap.signal(old, 1, rank=0),
        lambda: heap.put(old, torch.ones(4, dtype=torch.int32), rank=0),
    ]
    for call in calls:
        with pytest.raises(ShapeError, match="must be in use"):
            call()
    if new is not None:
        assert not new.local.any()
        new.free()
    assert heap.used == 0


def test_what_no_heap_is_made_of():
    for value in ("x", None, 3):
        with pytest.raises(DtypeError, match="group must be a Group"):
            Heap(value, HOST)
    with pytest.raises(DtypeError, match="options must be a HeapOptions"):
        Heap(Group.virtual(2), "host")
    with pytest.raises(ShapeError, match="at least 0"):
        HeapOptions(max_size=-1)
    with Heap(Group.virtual(2), HOST) as heap:
        for dtype in ("int32", None, int):
            with pytest.raises(DtypeError, match=r"dtype must be a torch\.dtype"):
                heap.empty(4, dtype)
        for other in ("x", None):
            with pytest.raises(DtypeError, match="put and get copy tensors"):
                heap.put(heap.empty(4, torch.int32), other, rank=0)


@pytest.mark.parametrize("ranks", ["x", None, 3, [1.5], [True], []], ids=repr)
def test_what_is_no_subgroup(ranks):
    with pytest.raises(GroupError, match="ints in a list"):
        Group.virtual(3).subgroup(ranks)


def test_more_than_the_machine_has_is_refused():
    """Before a page is touched, which would have the process killed."""
    with pytest.raises(CapacityError, match=r"must fit this machine's memory.*smaller size"):
        Heap(Group.virtual(1), HeapOptions(size=1 << 40, memory="host"))
    with pytest.raises(CapacityError, match=f"at most 2.40 bytes.*found {1 << 44}"):
        Heap(Group.virtual(1), HeapOptions(size=1 << 44, memory="host"))
