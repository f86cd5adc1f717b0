"""The workspace: its plan, its buffers, what the host can see, sharing and closing."""

import pytest
import ranks
import torch

from mok.config import Config, Shape
from mok.errors import (
    CapacityError,
    GroupError,
    MokTimeoutError,
    ResourceError,
    RouteError,
    ShapeError,
)
from mok.kernels_cute import records
from mok.kernels_cute.program import Forward, Tile
from mok.runtime import workspace as module
from mok.runtime.group import Group
from mok.runtime.plan import plan_workspace
from mok.runtime.workspace import Workspace, clear_workspace_cache, get_workspace

CONFIG = Config(2, 2, minibatch_size=128, macrobatch_size=384)


def shape_of(ep=1, shared=None):
    return Shape(64, 128, 192, 6, 2, ep, shared)


@pytest.fixture
def make():
    made = []

    def make(ep=1, shared=None, max_tokens=100, config=CONFIG):
        group = Group.virtual(ep) if ep > 1 else Group.single()
        made.append(Workspace(group, shape_of(ep, shared), config, max_tokens, memory="host"))
        return made[-1]

    yield make
    for workspace in made:
        workspace.close()


# ---------------------------------------------------------------- the plan


def test_capacity_is_the_worst_routing():
    # EP 4, 100 tokens each, K 2: 800 routes may all come here; 2 experts, 127 rows of padding each.
    plan = plan_workspace(shape_of(4), CONFIG, 100)
    assert plan.schedule.num_local == 2
    assert plan.capacity == (800 + 2 * 127) // 128 * 128 == 1024
    assert plan.max_blocks == 8 and plan.max_minibatches == 8
    assert plan_workspace(shape_of(4), CONFIG, 100, "sm_100a").tile == 256


def test_one_rank_has_no_symmetric_copies_and_several_have_a_ring():
    one = {b.name: b for b in plan_workspace(shape_of(1), CONFIG, 100)}
    assert not {"x", "slots", "x_ring"} & set(one)
    assert one["y"].shape == (896, 128) and one["route_row"].shape == (200,)
    four = {b.name: b for b in plan_workspace(shape_of(4, shared=64), CONFIG, 100)}
    assert four["y"].shape == four["x_ring"].shape == (384, 128)
    assert four["hidden"].shape == (384, 192)
    assert four["slots"].shape == (200, 128) and four["slots"].place == "symmetric"
    assert four["shared_hidden"].shape == (100, 64)
    assert "route_row" not in four


def test_plan_prints_and_adds_up():
    plan = plan_workspace(shape_of(4), CONFIG, 100)
    assert plan.nbytes == sum(plan.bytes_of(p) for p in ("symmetric", "local", "schedule"))
    text = str(plan)
    assert "slots" in text and text.splitlines()[-1].startswith("total")
    with pytest.raises(ShapeError, match="max_tokens"):
        plan_workspace(shape_of(), CONFIG, 0)


@pytest.mark.parametrize("ep", [1, 2, 6, 64])
def test_no_routing_exceeds_the_capacity(ep):
    from mok.reference import schedule_reference

    shape = Shape(3, 64, 64, 7, 3, ep)
    ids = [torch.zeros(3, 3, dtype=torch.int64) for _ in range(ep)]  # everything to rank 0
    plan = plan_workspace(shape, CONFIG, 3)
    assert schedule_reference(ids, 7, ep, 128)[0].num_tokens <= plan.capacity
    spread = [torch.tensor([[0, 1, 2], [3, 4, 5], [6, 0, 1]]) for _ in range(ep)]
    for schedule in schedule_reference(spread, 7, ep, 128):
        assert schedule.num_tokens <= plan.capacity


# ---------------------------------------------------------------- buffers


def test_every_planned_buffer_is_there(make):
    for workspace in (make(1), make(3, shared=64)):
        for buffer in workspace.plan():
            if buffer.place == "schedule":
                for rank in workspace.group.local_ranks:
                    tensor = getattr(workspace.schedules[rank], buffer.name)
                    assert tensor.shape == buffer.shape
                continue
            tensor = getattr(workspace, buffer.name)
            local = tensor.local if buffer.place == "symmetric" else tensor
            assert local.shape == buffer.shape or 0 in buffer.shape
            assert str(local.dtype) == f"torch.{buffer.dtype}"
            assert local.is_contiguous() and local.data_ptr() % 16 == 0
        assert workspace.heap.stride == workspace.ids.rank_stride


def test_ids_take_turns(make):
    workspace = make(2)
    halves = [workspace.next_call() for _ in range(3)]
    assert halves == [0, 1, 0]
    addresses = {workspace.ids_address(h, r) for h in (0, 1) for r in (0, 1)}
    assert len(addresses) == 4
    assert workspace.ids_address(1, 1) - workspace.ids.address(1) == 100 * 2 * 4
    assert workspace.num_tokens_address(1) - workspace.num_tokens_address(0) == 128


def test_schedules_can_outlive_a_call(make):
    workspace = make(2)
    kept = workspace.new_schedule(1)
    assert kept.rank == 1
    assert kept.peer_rank.data_ptr() != workspace.schedules[1].peer_rank.data_ptr()


def test_more_tokens_than_agreed_is_an_error(make):
    workspace = make()
    workspace.check_tokens(100)
    workspace.check_tokens(0)
    with pytest.raises(CapacityError, match="max_tokens = 100"):
        workspace.check_tokens(101)


def test_sizes_must_fit_the_group():
    with pytest.raises(GroupError, match="ep_size"):
        Workspace(Group.virtual(2), shape_of(4), CONFIG, 100, memory="host")


def test_a_failed_workspace_leaves_nothing(monkeypatch):
    def mappings():
        with open("/proc/self/maps") as file:
            return sum(1 for _ in file)

    def fail(self, rank):
        raise CapacityError("no")

    Workspace(Group.virtual(2), shape_of(2), CONFIG, 100, memory="host").close()
    before = mappings()
    monkeypatch.setattr(Workspace, "new_schedule", fail)
    for _ in range(5):
        with pytest.raises(CapacityError):
            Workspace(Group.virtual(2), shape_of(2), CONFIG, 100, memory="host")
    assert mappings() <= before + 1


# ---------------------------------------------------------------- what the host sees


def test_counters_and_ring_state(make):
    workspace = make(4)
    layout = workspace.sizes.counters
    assert workspace.counters()["ticket"] == [0] and workspace.ring.state() == []
    words = workspace.counter_words
    words[layout.ticket] = 7
    words[layout.x_ready + 4] = 3
    words[layout.y_free + 1] = 2
    counters = workspace.counters()
    assert counters["ticket"] == [7] and counters["x_ready"] == [0, 0, 0, 0, 3, 0, 0, 0]
    assert workspace.ring.slots == 3
    states = workspace.ring.state()
    assert [(s.minibatch, s.slot, s.x_ready, s.y_free) for s in states] == [
        (1, 1, (0, None), (2, None)),
        (4, 1, (3, None), (0, None)),
    ]
    program = Forward(640, 100, 128, 192, 0, 128, 384, Tile())
    states = workspace.ring.state(program)
    assert len(states) == 5
    assert states[4].x_ready == (3, program.x_ready_target(0)) and states[4].y_ready == (0, 1)


# ---------------------------------------------------------------- error words


def block(workspace, rank, part, values):
    import ctypes

    address = {
        "wait": workspace.records.wait_address,
        "route": workspace.records.route_address,
        "barrier": workspace.records.barrier_address,
    }[part](rank)
    (ctypes.c_int32 * len(values)).from_address(address)[:] = values


def test_nothing_noted_is_no_error(make):
    workspace = make(2)
    workspace.check()
    assert not workspace.records.any()


def test_an_expired_wait_becomes_a_table(make):
    workspace = make(3)
    block(workspace, 2, "wait", [1, 1, 2, 57, 1, 4321, 2, 3, 11, 16])
    block(workspace, 0, "wait", [1, 1, 0, 9, 0, 12, 0, 1, 0, 4])
    with pytest.raises(MokTimeoutError) as caught:
        workspace.check()
    lines = [line.split() for line in str(caught.value).splitlines()]
    assert ["rank", "SM", "role", "task", "counter", "index", "value", "awaited"] in lines
    assert ["2", "57", "comm", "4321", "y_free", "3", "11", "16"] in lines
    assert ["0", "9", "load", "12", "x_ready", "1", "0", "4"] in lines


def test_bad_ids_are_named_and_forgiven(make):
    workspace = make(2)
    block(workspace, 1, "route", [1, 1, 33, 1, -7, -1, 6, 0])
    with pytest.raises(RouteError, match=r"0…5; found -7 for token 33, k 1 of rank 1"):
        workspace.check()
    workspace.check()
    block(workspace, 0, "route", [1, 0, 2, 0, 5, 256, 6, 0])  # 64-bit ids are shown whole
    with pytest.raises(RouteError, match="found 1099511627781 for token 2"):
        workspace.check()
    block(workspace, 0, "route", [2, 0, 0, 0, 5000, 0, 1024, 0])
    with pytest.raises(CapacityError, match=r"1024 rows.*5000"):
        workspace.check()


def test_a_missing_rank_is_named_and_stays_fatal(make):
    workspace = make(3)
    words = [records.EXPIRED, 8, 0, 0, 0, 0, 0, 0, 0, 0, 1 + 7]
    block(workspace, 0, "barrier", words)
    for _ in range(2):
        with pytest.raises(MokTimeoutError, match=r"rank 2 did not") as caught:
            workspace.check()
    assert "barrier 7" in str(caught.value) and "barrier 8" in str(caught.value)


def test_a_poisoned_group_names_who_gave_up(make):
    workspace = make(3)
    block(workspace, 1, "barrier", [records.POISONED, 4, 1 + 2])
    with pytest.raises(GroupError, match="rank 2 gave up; rank 1 stopped at barrier 4"):
        workspace.check()


def test_record_layout_is_the_kernels():
    from mok.kernels_cute.schedule import plan

    assert records.ROUTE + plan.RECORD_WORDS <= records.BARRIER
    assert records.record_words(72) >= records.BARRIER + records.BARRIER_MISSING + 72
    sync = pytest.importorskip("mok.kernels_cute.sync")
    assert sync.RECORD_WORDS <= records.ROUTE - records.WAIT
    assert sync.RECORD_FIELDS == records.WAIT_FIELDS
    assert sync.ROLES == records.WAIT_ROLES
    backward = pytest.importorskip("mok.kernels_cute.backward.operands")
    assert sync.COUNTERS + backward.COUNTERS == records.WAIT_COUNTERS


# ---------------------------------------------------------------- sharing and closing


def test_workspaces_are_shared_and_cleared():
    group = Group.virtual(2)

    def get(config=CONFIG, tokens=100, group=group):
        return get_workspace(group, shape_of(2), config, tokens, memory="host")

    one = get()
    assert get() is one
    assert get(tokens=101) is not one
    assert get(config=Config(4, 2, 128, 384)) is not one
    assert get(group=Group.virtual(2)) is not one
    one.close()
    again = get()
    assert again is not one
    clear_workspace_cache()
    assert again.closed and not module._cache


def test_a_closed_workspace_says_so(make):
    workspace = make(2)
    workspace.close()
    workspace.close()
    with pytest.raises(ResourceError, match="closed"):
        workspace.counters()
    assert workspace.hidden is None and workspace.schedules == {}


# ---------------------------------------------------------------- several processes


def _mismatched(group):
    shape = Shape(64, 128 + 64 * group.rank, 192, 6, 2, group.size)
    Workspace(group, shape, CONFIG, 100, memory="host")


def test_mismatched_sizes_are_named(tmp_path):
    results = ranks.run(_mismatched, 2, tmp_path)
    for rank in range(2):
        assert "agree on the workspace's sizes" in results[rank][1]
        assert "rank 1: [192," in results[rank][1]


def _exchange(group):
    shape = shape_of(group.size)
    with Workspace(group, shape, CONFIG, 100, memory="host") as workspace:
        for step in range(20):
            half = workspace.next_call()
            workspace.ids.local[half].fill_(100 * step + group.rank)
            workspace.barrier()
            seen = [int(workspace.ids.peer(r)[half, 99, 1]) for r in range(group.size)]
            assert seen == [100 * step + r for r in range(group.size)], (step, seen)
        workspace.check()
        group.barrier("done")
    return True


def test_exchanges_in_a_row_do_not_race(tmp_path):
    assert ranks.run_ok(_exchange, 3, tmp_path) == [True] * 3


def _one_gives_up(group):
    import time

    with Workspace(group, shape_of(group.size), CONFIG, 100, memory="host") as workspace:
        workspace.barrier()
        workspace.check()
        group.barrier("together")
        if group.rank == 1:
            time.sleep(2.0)  # late by more than the limit
        workspace.barrier(timeout_s=0.5)
        texts = []
        for _ in range(2):
            start = time.monotonic()
            workspace.barrier(timeout_s=0.5)  # poisoned: returns at once
            assert time.monotonic() - start < 0.4
            try:
                workspace.check()
            except Exception as error:
                texts.append(f"{type(error).__name__}: {error}")
        group.barrier("all have seen it")
    # The processes live, and can build a new group's memory.
    with Workspace(group, shape_of(group.size), CONFIG, 100, memory="host") as workspace:
        workspace.barrier()
        workspace.check()
        group.barrier("done")
    return texts


def test_a_late_rank_poisons_the_group_and_the_processes_live(tmp_path):
    results = ranks.run_ok(_one_gives_up, 3, tmp_path)
    # Ranks 0 and 2 expire together; whichever is first, both name rank 1 or who gave up.
    named = [text for rank in (0, 2) for text in results[rank]]
    assert any(t.startswith("MokTimeoutError") and "rank 1 did not" in t for t in named)
    assert all("rank 1 did not" in t or "gave up" in t for t in named)
    assert all("gave up" in t for t in results[1]) and len(results[1]) == 2


# ---------------------------------------------------------------- ranks that die or freeze


def _until_struck(group):
    import time

    with Workspace(group, shape_of(group.size), CONFIG, 100, memory="host") as workspace:
        workspace.barrier()
        group.barrier("ready")
        if group.rank == 1:
            time.sleep(60)  # struck here
        time.sleep(0.5)
        workspace.barrier(timeout_s=1.0)
        try:
            workspace.check()
            device = "no error"
        except Exception as error:
            device = str(error)
    try:
        group.barrier("forward")
        host = "no error"
    except MokTimeoutError as error:
        host = str(error)
    return device, host


@pytest.mark.parametrize("blow", ["SIGKILL", "SIGSTOP"])
def test_a_struck_rank_is_named_by_every_other(tmp_path, blow):
    import os
    import signal
    import time

    started = ranks.start(_until_struck, 3, tmp_path, timeout_s=3.0)
    deadline = time.monotonic() + 60
    store = tmp_path / "store"
    while not store.exists() or store.read_bytes().count(b'"what": "ready"') < 3:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    victim, pipe = started.pop(1)
    os.kill(victim.pid, getattr(signal, blow))
    results = ranks.collect(started, limit_s=60)
    if blow == "SIGSTOP":
        victim.kill()
    victim.join()
    pipe.close()
    for rank in (0, 2):
        state, value = results[rank]
        assert state == "ok", value
        device, host = value
        assert "rank 1 did not" in device or "gave up" in device, device
        assert "saw nothing of rank 1" in host, host
