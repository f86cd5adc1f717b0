"""The schedule kernels: their code on any machine, their results on a GPU."""

import pytest
import torch

from mok.kernels_cute.schedule.plan import ROUTE_OUT_OF_RANGE, ROWS_OUT_OF_CAPACITY
from mok.reference import schedule_reference
from mok.runtime.resources import split_entries
from tests.helpers import assert_same_schedule, kernel, opcodes, run_schedule

pytest.importorskip("cutlass")

# ------------------------------------------------------------------ compiled code


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_code_uses_no_local_memory_and_few_registers(arch):
    for name, limits in {
        "schedule": {"schedule_count": 64, "schedule_scan": 64, "schedule_place": 64},
        "stage_ids": {"stage_ids": 40},
    }.items():
        built = kernel(name, arch)
        found = {k.symbol.rpartition("_")[0]: k for k in built.resources.kernels}
        assert found.keys() == limits.keys()
        for symbol, limit in limits.items():
            assert found[symbol].registers <= limit  # 4 CTAs of 256 threads or 1 of 1024 per SM
            assert found[symbol].spill_bytes == 0
            assert found[symbol].stack_bytes == 0
        assert ".local" not in built.ptx
        assert not built.resources.warnings
        assert built.compile_s < 30


def test_loads_are_predicated_and_in_flight_together():
    code = {
        symbol.rpartition("_")[0]: text
        for symbol, text in split_entries(kernel("schedule", "sm_90a").ptx).items()
    }
    # Four independent loads, and no use of the first before the last.
    place = code["schedule_place"]
    loads = [i for i, line in enumerate(place.splitlines()) if "ld.global.s16" in line]
    assert len(loads) == 8
    for first, last in ((loads[0], loads[3]), (loads[4], loads[7])):
        between = place.splitlines()[first:last]
        assert not any("match" in line or "red." in line or "bra" in line for line in between)
    assert opcodes(place)["match.any.sync.b32"] == 4
    assert opcodes(code["schedule_scan"])["ld.global.b32"] == 16
    assert "red.relaxed.cta.shared::cta.add.u32" in opcodes(code["schedule_count"])
    # No floating point, and the only global atomic is the claim of the error record.
    for text in code.values():
        assert ".f32" not in text and "red.global" not in text
        assert all("cas" in name for name in opcodes(text) if name.startswith("atom"))


# ------------------------------------------------------------------ results

SHAPES = [  # tokens of each rank, K, E
    ([1], 1, 1),
    ([7], 2, 8),
    ([64], 32, 512),
    ([255], 8, 16),
    ([1000], 8, 128),
    ([4096], 8, 128),
    ([777], 5, 3000),
    ([0], 8, 16),
    ([130, 127], 3, 5),
    ([0, 3], 2, 1),
    ([100, 0, 200], 6, 7),
    ([40, 50, 60, 0], 8, 9),
    ([64, 0, 1, 200, 5, 77, 90, 63], 1, 300),
    ([9] * 63 + [0], 4, 40),
]
ROUTINGS = {
    "random": lambda t, k, e, g: torch.randint(0, e, (t, k), generator=g),
    "skewed": lambda t, k, e, g: (torch.rand(t, k, generator=g).pow(6) * e).long(),
    "one": lambda t, k, e, g: torch.full((t, k), e - 1),
    "half": lambda t, k, e, g: torch.randint(0, (e + 1) // 2, (t, k), generator=g),
    "dropped": lambda t, k, e, g: torch.randint(-1, e, (t, k), generator=g).clamp(max=e // 3),
    "none": lambda t, k, e, g: torch.full((t, k), -1),
    "duplicates": lambda t, k, e, g: torch.randint(0, e, (t, 1), generator=g).expand(t, k),
}


def make_ids(tokens, topk, num_experts, routing, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return [ROUTINGS[routing](t, topk, num_experts, rng).contiguous() for t in tokens]


def check(ids, num_experts, device, tile=128, **options):
    got = run_schedule(ids, num_experts, len(ids), device, tile=tile, **options)
    want = schedule_reference([i.long() for i in ids], num_experts, len(ids), tile)
    for mine, theirs in zip(got, want, strict=True):
        assert_same_schedule(mine, theirs, tile)
        assert not mine.error.any()


@pytest.mark.gpu
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    "shape", SHAPES, ids=lambda s: f"T{sum(s[0])}-EP{len(s[0])}-K{s[1]}-E{s[2]}"
)
def test_equals_the_reference(shape, routing):
    tokens, topk, num_experts = shape
    check(make_ids(tokens, topk, num_experts, routing), num_experts, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [128, 256])
@pytest.mark.parametrize("num_chunks", [1, 2, 3, 31, 512])
def test_chunks_and_tile_change_nothing_else(tile, num_chunks):
    check(make_ids([900, 1100], 8, 33, "skewed"), 33, "cuda", tile=tile, num_chunks=num_chunks)


@pytest.mark.gpu
def test_workspace_made_for_more_tokens():
    check(make_ids([5, 0, 300], 4, 10, "random"), 10, "cuda", max_tokens=5000)


@pytest.mark.gpu
def test_int32_ids():
    check([ids.int() for ids in make_ids([500], 8, 64, "dropped")], 64, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "topk,num_experts,tokens", [(8, 2048, 16384), (8, 256, 131072), (1, 4, 2**20)]
)
def test_large(topk, num_experts, tokens):
    check(make_ids([tokens], topk, num_experts, "random"), num_experts, "cuda")


@pytest.mark.gpu
@pytest.mark.slow
def test_the_largest_supported():
    check(make_ids([2**23], 8, 2048, "skewed"), 2048, "cuda")


def bad_ids_become_a_record(device):
    ids = make_ids([50, 100], 4, 16, "random")
    ids[1][37, 2] = 2**33 + 5  # in range after a careless cut to 32 bits
    got = run_schedule(ids, 16, 2, device)
    assert got[1].error.tolist() == [ROUTE_OUT_OF_RANGE, 1, 37, 2, 5, 2, 16, 1]
    assert not got[0].error.any()
    ids[1][37, 2] = -1
    for mine, theirs in zip(got, schedule_reference(ids, 16, 2, 128), strict=True):
        assert_same_schedule(mine, theirs, 128)


@pytest.mark.gpu
def test_bad_ids_become_a_record():
    bad_ids_become_a_record("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [-2, -(2**40), 16, 2**31 - 1, 2**63 - 1])
def test_every_kind_of_bad_id(bad):
    ids = make_ids([90], 4, 16, "random")
    ids[0][11, 3] = bad
    (got,) = run_schedule(ids, 16, 1, "cuda")
    low, high = got.error[4:6].tolist()
    assert (high << 32) + (low & 0xFFFFFFFF) == bad
    assert got.error[:4].tolist() == [ROUTE_OUT_OF_RANGE, 0, 11, 3]
    assert got.route_row[11 * 4 + 3] == -1


def too_little_capacity_gives_an_empty_schedule(device):
    ids = make_ids([1000], 4, 16, "random")
    (got,) = run_schedule(ids, 16, 1, device, capacity=1024)
    (want,) = schedule_reference(ids, 16, 1, 128)
    assert got.error.tolist() == [ROWS_OUT_OF_CAPACITY, 0, 0, 0, want.num_tokens, 0, 1024, 1]
    assert got.num_tokens == 0 and got.tail_untouched
    assert not got.tokens_per_expert.any() and not got.expert_offset.any()
    assert (got.route_row == -1).all()


@pytest.mark.gpu
def test_too_little_capacity_gives_an_empty_schedule():
    too_little_capacity_gives_an_empty_schedule("cuda")


@pytest.mark.gpu
def test_twenty_runs_are_the_same():
    ids = make_ids([3000], 8, 128, "skewed")
    first = run_schedule(ids, 128, 1, "cuda")[0]
    for _ in range(19):
        again = run_schedule(ids, 128, 1, "cuda")[0]
        assert torch.equal(first.peer_token_idx, again.peer_token_idx)
        assert torch.equal(first.route_row, again.route_row)
