"""The plan kernel writes exactly what ``make_plan`` says."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("cutlass")

from mok.kernels_cute.backward import program as pb
from mok.kernels_cute.backward.program import Backward, make_plan, plan_room
from mok.kernels_cute.program import AHEAD, Tile
from mok.runtime.launch import launch
from tests.helpers import POISON, arch_of, kernel, opcodes, stream_of

TILE = Tile()
BLOCKS = [0, 0, 0, 1, 1, 2, 3, 7, 20]  # of an expert


def words(*size, device):
    return torch.full(size, POISON, dtype=torch.int32, device=device)


def run_plan(p, expert_blocks, device, minibatch, macrobatch, sizes, spare=3):
    """(tables, groups, counts) of the kernel, cut to what it must write; it wrote nothing else."""
    blocks = torch.tensor(expert_blocks, dtype=torch.int32)
    offset = torch.cat([blocks.new_zeros(1), blocks.cumsum(0).int()]) * TILE.m
    block_expert = torch.arange(len(blocks), dtype=torch.int32).repeat_interleave(blocks)
    if not len(block_expert):
        block_expert = blocks.new_zeros(1)
    num_rows = offset[-1:].clone()
    inputs = [t.to(device) for t in (num_rows, offset, block_expert)]
    _, entries, most = plan_room(int(num_rows), len(expert_blocks), minibatch, macrobatch)
    tables = words(pb.TABLES, entries + spare, device=device)
    groups = words(most + spare, pb.GROUP_WORDS, device=device)
    counts = words(2 + spare, device=device)
    launch(
        kernel("plan", arch_of(device)),
        *(t.data_ptr() for t in (*inputs, tables, groups, counts)),
        *sizes,
        len(expert_blocks),
        minibatch,
        macrobatch,
        tables.shape[1],
        p.ahead,
        stream_of(device),
    )
    tables, groups, counts = tables.cpu(), groups.cpu(), counts.cpu()
    total = int(counts[0])
    used = p.minibatches + 1
    for tail in (tables[:, used:], groups[total:], counts[2:]):
        assert (tail == POISON).all()
    return tables[:, :used], groups[:total], counts[:2]


def check(expert_blocks, device, mb_blocks=2, ring_mbs=2, sizes=(200, 192, 320, 64)):
    minibatch = mb_blocks * TILE.m
    macrobatch = minibatch * ring_mbs
    p = Backward(
        TILE.m * sum(expert_blocks), *sizes, len(expert_blocks), minibatch, macrobatch, TILE,
        ahead=5,
    )  # fmt: skip
    want = make_plan(p, expert_blocks)
    tables, groups, counts = run_plan(p, expert_blocks, device, minibatch, macrobatch, sizes)
    assert tables.tolist() == want.tables
    assert [tuple(g) for g in groups.tolist()] == want.groups
    assert counts.tolist() == [len(want.groups), want.tables[pb.GROUP_BASE][p.minibatches]]


def test_code():
    built = kernel("plan", "sm_90a")
    (found,) = built.resources.kernels
    assert found.registers <= 64  # 1024 threads
    assert found.spill_bytes == 0 and found.stack_bytes == 0
    assert not built.resources.warnings
    count = opcodes(built.ptx)
    assert not any(op.startswith(("atom", "red")) or ".f32" in op for op in count)


def test_room_is_enough_and_sometimes_needed():
    for blocks in ([5], [1, 0, 3], [2, 2, 2], [0, 0], [7, 2, 1, 1, 8]):
        rows = TILE.m * sum(blocks)
        p = Backward(rows, 0, 64, 64, 0, len(blocks), 256, 512, TILE)
        minibatches, entries, most = plan_room(rows, len(blocks), 256, 512)
        found = len(make_plan(p, blocks).groups)
        assert (minibatches, entries) == (p.minibatches, p.minibatches + 1)
        assert found <= most
    assert found == most


CASES = [
    # expert blocks, mb_blocks, ring_mbs
    ([0], 1, 1),
    ([0, 0, 0], 2, 2),
    ([1], 4, 4),
    ([9], 1, 1),  # a group per block
    ([23], 2, 3),  # one expert, several macrobatches, a short last minibatch
    ([4, 4, 4, 4], 2, 2),  # boundaries between experts
    ([3, 5, 0, 4, 1, 11, 0], 2, 2),  # experts across boundaries
    ([0, 0, 1, 0], 20, 13),
]


def small(device):
    for blocks, mb_blocks, ring_mbs in CASES:
        check(blocks, device, mb_blocks, ring_mbs)
    for sizes in ((0, 64, 64, 0), (1, 7168, 2048, 2048), (129, 64, 14336, 0)):
        check([2, 0, 7], device, sizes=sizes)


@st.composite
def loads(draw):
    rng = draw(st.randoms(use_true_random=False))
    experts = draw(st.sampled_from([1, 3, 8, 128]))
    blocks = [rng.choice(BLOCKS) for _ in range(experts)]
    return blocks, draw(st.integers(1, 9)), draw(st.integers(1, 5))


def many(device):
    # Several rounds of the CTA over experts and over minibatches.
    rng = torch.Generator().manual_seed(0)
    check(torch.randint(0, 2, (3000,), generator=rng).tolist(), device, 1, 7)
    check([0] * 5631 + [2], device)


@pytest.fixture(scope="module")
def emulator():
    with pytest.importorskip("mok.tools.emulator").Emulator("sm_90a", num_sms=1, seed=0) as found:
        yield found


@pytest.mark.emulator
def test_named_loads_in_the_emulator(emulator):
    small("cpu")


@pytest.mark.emulator
@settings(max_examples=25, deadline=None)
@given(loads())
@example(([0] * 40, 3, 2))
def test_random_loads_in_the_emulator(emulator, load):
    check(load[0], "cpu", *load[1:])


@pytest.mark.emulator
def test_more_experts_and_minibatches_than_threads_in_the_emulator(emulator):
    many("cpu")


@pytest.mark.gpu
def test_named_loads():
    small("cuda")
    many("cuda")


@pytest.mark.gpu
@settings(max_examples=200, deadline=None)
@given(loads())
def test_random_loads(load):
    check(load[0], "cuda", *load[1:])


@pytest.mark.gpu
def test_takes_a_few_microseconds():
    """El = 128, 64 minibatches: under 15 µs, so that backward does not see it."""
    blocks = [20] * 128
    sizes = (16384, 2048, 768, 0)
    inputs = torch.tensor([128 * 20 * 128, *range(0, 129 * 2560, 2560)], dtype=torch.int32).cuda()
    block_expert = torch.arange(128, dtype=torch.int32).repeat_interleave(20).cuda()
    _, entries, most = plan_room(128 * 2560, 128, 5120, 20480)
    assert entries == 65
    out = words(pb.TABLES * entries + most * pb.GROUP_WORDS + 2, device="cuda")
    at = out.data_ptr()
    places = [at, at + 4 * pb.TABLES * entries, at + 4 * (out.numel() - 2)]
    call = kernel("plan", arch_of("cuda"))
    arguments = [inputs.data_ptr(), inputs.data_ptr() + 4, block_expert.data_ptr(), *places]
    arguments += [*sizes, len(blocks), 5120, 20480, entries, AHEAD, stream_of("cuda")]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for repeats in (20, 200):
        start.record()
        for _ in range(repeats):
            launch(call, *arguments)
        end.record()
        end.synchronize()
    assert start.elapsed_time(end) * 1000 / repeats < 15
