"""Groups of processes: rendezvous, descriptors, subgroups, shared memory; on CPUs with gloo."""

import os
import time

import numpy as np
import pytest
import ranks
import torch

from mok.errors import GroupError, MokTimeoutError
from mok.runtime.group import Group
from mok.runtime.heap import Heap, HeapOptions
from mok.runtime.rendezvous import LocalRendezvous, agree, together

HOST = HeapOptions(memory="host", max_size=1 << 30)


def test_local_groups():
    single, virtual = Group.single(), Group.virtual(6)
    assert (single.size, single.local_ranks, single.is_local) == (1, (0,), True)
    assert (virtual.size, virtual.local_ranks, virtual.rank) == (6, tuple(range(6)), 0)
    assert virtual.subgroup([1, 3, 5]).size == 3
    for chosen in (np.arange(2), [np.int64(1), 3], range(2), torch.arange(2)):
        assert virtual.subgroup(chosen).size == 2
    assert type(Group.virtual(np.int64(3)).size) is int
    virtual.barrier()
    with pytest.raises(GroupError, match="distinct"):
        virtual.subgroup([1, 1])
    with pytest.raises(GroupError, match="0…5"):
        virtual.subgroup([6])
    with pytest.raises(GroupError):
        Group.virtual(0)
    assert "ranks 0…5 here" in repr(virtual)


def test_a_process_group_must_exist():
    with pytest.raises(GroupError, match="init_process_group"):
        Group.from_process_group()


def test_errors_stay_errors_in_a_local_group():
    with pytest.raises(ValueError, match="own"), together(LocalRendezvous(), "step"):
        raise ValueError("own")


# ---------------------------------------------------------------- exchanges


def _exchanges(group):
    rendezvous = group.rendezvous
    values = rendezvous.all_gather("squares", {"r": group.rank, "n": group.rank**2})
    for i in range(50):
        assert rendezvous.all_gather("round", i + group.rank) == [i + r for r in range(group.size)]
    read, write = os.pipe()
    os.write(write, b"%d" % group.rank)
    descriptors = rendezvous.all_gather_fd("pipes", read)
    rendezvous.all_gather("written", None)
    # Each pipe is read by the next rank: descriptors reach processes that did not open them.
    text = os.read(descriptors[(group.rank + 1) % group.size], 10).decode()
    opened = len(os.listdir("/proc/self/fd"))
    for descriptor in descriptors:
        os.close(descriptor)
    assert len(os.listdir("/proc/self/fd")) == opened - group.size
    return [v["n"] for v in values], int(text)


def test_values_and_descriptors_reach_everyone(tmp_path):
    results = ranks.run_ok(_exchanges, 3, tmp_path)
    assert results == [([0, 1, 4], (r + 1) % 3) for r in range(3)]


def _disagree(group):
    agree(group.rendezvous, "the hidden size", 64 + 64 * (group.rank == 1))


def test_disagreement_names_who_holds_what(tmp_path):
    results = ranks.run(_disagree, 3, tmp_path)
    for rank in range(3):
        state, text = results[rank]
        assert state == "error" and "GroupError" in text
        assert "the hidden size" in text and "rank 1: 128" in text


def _fail_on_one(group):
    with together(group.rendezvous, "Opening the valve"):
        if group.rank == 2:
            raise ValueError("stuck")


def test_a_failure_on_one_rank_is_known_to_all(tmp_path):
    results = ranks.run(_fail_on_one, 3, tmp_path)
    assert "ValueError: stuck" in results[2][1]
    for rank in (0, 1):
        assert "Opening the valve must succeed on every rank" in results[rank][1]
        assert "rank 2: stuck" in results[rank][1]


def _different_calls(group):
    group.barrier("forward" if group.rank else "backward")


def test_different_calls_are_noticed(tmp_path):
    results = ranks.run(_different_calls, 2, tmp_path)
    assert "same calls in the same order" in results[0][1]
    assert "rank 1 at 'forward'" in results[0][1]


def _late(group):
    group.barrier("start")
    if group.rank == 1:
        time.sleep(3)
        return "late"
    start = time.monotonic()
    try:
        group.barrier("forward")
    finally:
        assert time.monotonic() - start < 2.5


def test_a_missing_rank_is_named_by_every_other(tmp_path):
    results = ranks.run(_late, 3, tmp_path, timeout_s=1.0)
    assert results[1] == ("ok", "late")
    for rank in (0, 2):
        assert "MokTimeoutError" in results[rank][1]
        assert "Every rank must come to 'forward' within 1 s" in results[rank][1]
        assert "nothing of rank 1" in results[rank][1]


# ---------------------------------------------------------------- the heap across processes


def _share(group):
    with Heap(group, HOST) as heap:
        assert heap.handle_kind == "posix_fd"
        rows = heap.empty((group.size, 4), torch.bfloat16)
        words = heap.zeros(group.size, torch.int32)
        group.barrier("ready")
        for rank in range(group.size):
            heap.put(
                rows.local[group.rank],
                torch.full((4,), float(10 * group.rank + rank)).bfloat16(),
                rank,
            )
            heap.signal(words, 1, rank, index=group.rank)
        for rank in range(group.size):
            heap.wait(words, 1, index=rank, timeout_s=20)
        mine = rows.local[:, 0].tolist()
        # Growth, and a peer's view of memory that came later.
        more = heap.empty(1 << 16, torch.int32)
        more.local.fill_(group.rank)
        group.barrier("filled")
        seen = [int(more.peer(r)[-1]) for r in range(group.size)]
        # Closing in any order: rank 0 is long gone while the others still read its memory.
        group.barrier("seen")
        if group.rank == 0:
            heap.close()
            group.barrier("closed")
            return mine, seen
        group.barrier("closed")
        assert int(more.peer(0)[5]) == 0 and int(more.peer(1)[5]) == 1
        return mine, seen


@pytest.mark.parametrize("size", [2, 4])
def test_symmetric_memory_of_processes(tmp_path, size):
    for rank, (mine, seen) in enumerate(ranks.run_ok(_share, size, tmp_path)):
        assert mine == [10.0 * source + rank for source in range(size)]
        assert seen == list(range(size))


def _asymmetric(group):
    with Heap(group, HOST) as heap:
        heap.empty(1024 * (1 + group.rank), torch.float32)


def test_different_allocations_are_noticed(tmp_path):
    results = ranks.run(_asymmetric, 2, tmp_path)
    for rank in range(2):
        assert "agree on what to allocate" in results[rank][1]
        assert "[2048]" in results[rank][1]


def _out_of_memory(group):
    from mok.errors import CapacityError
    from mok.runtime.memory_host import HostMemory

    with Heap(group, HOST) as heap:
        kept = heap.empty(4, torch.int32)
        create = HostMemory.create
        if group.rank == 1:

            def refuse(self, size, kind):
                raise CapacityError("memory must suffice", size)

            HostMemory.create = refuse
        try:
            heap.empty(1 << 16, torch.int32)
            return "no error"
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        HostMemory.create = create
        kept.local.fill_(1)  # the heap is as before, and usable
        heap.empty(1 << 16, torch.int32).peer(1 - group.rank)[3] = 2
        return text


def test_one_rank_without_memory_fails_all_and_leaves_the_heap_usable(tmp_path):
    texts = ranks.run_ok(_out_of_memory, 2, tmp_path)
    assert texts[1].startswith("CapacityError: memory must suffice")
    assert texts[0].startswith("GroupError: Allocating symmetric memory")
    assert "rank 1: memory must suffice" in texts[0]


def _subgroups(group):
    pair = [0, 2] if group.rank % 2 == 0 else [1, 3]
    inner = group.subgroup(pair)
    assert (inner.size, inner.rank) == (2, group.rank // 2)
    assert group.subgroup([(group.rank + 1) % group.size]) is None
    with Heap(inner, HOST) as heap:
        word = heap.empty(1, torch.int32)
        word.peer(1 - inner.rank).fill_(group.rank)
        inner.barrier("written")
        found = int(word.local)
        inner.barrier("read")
    return found


def test_subgroups_have_heaps_of_their_own(tmp_path):
    assert ranks.run_ok(_subgroups, 4, tmp_path) == [2, 3, 0, 1]


def _forbidden_none(group):
    with pytest.raises(GroupError, match="share memory by handles"):
        Heap(group, HeapOptions(memory="host", handle="none"))
    return True


def test_processes_need_handles(tmp_path):
    assert ranks.run_ok(_forbidden_none, 2, tmp_path) == [True, True]


def _all_gather(group):
    with Heap(group, HOST) as heap:
        rows = heap.empty((group.size, 3), torch.float32)
        for step in range(10):
            mine = torch.full((3,), float(100 * step + group.rank))
            for rank in range(group.size):
                heap.put(rows.local[group.rank], mine, rank)
            heap.barrier()  # all rows are here
            assert rows.local[:, 2].tolist() == [100.0 * step + r for r in range(group.size)]
            heap.barrier()  # all have read
        heap.check()
        if group.rank == 0:
            heap.barrier(timeout_s=0.3)  # alone
            with pytest.raises(MokTimeoutError, match="rank 1, rank 2 did not"):
                heap.check()
        group.barrier("done")
    return True


def test_heap_barriers_order_puts(tmp_path):
    assert ranks.run_ok(_all_gather, 3, tmp_path) == [True] * 3
