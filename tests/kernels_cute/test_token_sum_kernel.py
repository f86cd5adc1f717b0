"""The token sum: its code on any machine, its bits on a GPU."""

import pytest
import torch

pytest.importorskip("cutlass")

from mok.kernels_cute.token_sum import ROUTES_IN_FLIGHT, THREADS, token_sum_ctas
from mok.reference import token_sum
from tests.helpers import kernel, opcodes, run_token_sum

CONFIGS = [
    {"has_shared": shared, "has_index": index, "ids_bits": bits}
    for shared in (False, True)
    for index, bits in ((True, 32), (False, 32), (False, 64))
]
CONFIGS += [
    {**config, "has_weights": weights, "has_shared_scale": scale}
    for config in CONFIGS
    for weights, scale in ((False, False), (True, True))
    if (config["has_shared"] or not scale) and config["ids_bits"] == 32
]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_code(arch, config):
    built = kernel("token_sum", arch, **config)
    (found,) = built.resources.kernels
    assert found.spill_bytes == 0 and found.stack_bytes == 0
    assert found.registers <= 85  # 3 CTAs of 256 threads per SM: 96 KB of loads in flight
    assert not built.resources.warnings
    count = opcodes(built.ptx)
    wide = "ld.global.L1::no_allocate.v4.b32"
    # The shared row is loaded once; the compiler may keep a second copy for K = 0.
    assert count[wide] - ROUTES_IN_FLIGHT in ((1, 2) if config["has_shared"] else (0,))
    weighted = config.get("has_weights", True)
    terms = {"fma.rn.f32": weighted, "add.rn.f32": not weighted}
    for name, used in terms.items():
        assert count[name] == (8 * ROUTES_IN_FLIGHT if used else 0)
    assert count["mul.rn.f32"] == (8 if config.get("has_shared_scale") else 0)
    # Results are stored 16 bytes at a time; the one narrow store zeroes counters.
    assert count["st.global.b32"] == 1 and count["st.global.v4.b32"] >= 1
    for contracted in ("add.f32", "mul.f32", "fma.f32"):
        assert contracted not in count
    # The data loads of a group are issued together.
    lines = built.ptx.splitlines()
    loads = [i for i, line in enumerate(lines) if wide in line]
    groups = [loads[i : i + ROUTES_IN_FLIGHT] for i in range(len(loads) - ROUTES_IN_FLIGHT + 1)]
    assert any(
        not any("bra" in line or "fma" in line for line in lines[group[0] : group[-1]])
        for group in groups
    )


def test_grid():
    assert token_sum_ctas(1, 64, 132) == 1
    assert token_sum_ctas(16384, 2048, 132) == 32 * 132
    assert token_sum_ctas(1000, 2048, 132) == 1000 * 256 // THREADS


def make(num_tokens, hidden, topk, num_experts, seed=0, drop=0.2):
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, num_experts, (num_tokens, topk), generator=rng)
    ids[torch.rand(num_tokens, topk, generator=rng) < drop] = -1
    weights = torch.randn(num_tokens, topk, generator=rng)
    y = torch.randn(num_tokens * topk, hidden, generator=rng).bfloat16()
    y[ids.flatten() < 0] = torch.nan  # never read
    shared = torch.randn(num_tokens, hidden, generator=rng).bfloat16()
    return ids, weights, y, shared


def check(shape, device, has_shared, weighted=True, scaled=False, **options):
    num_tokens, hidden, topk = shape
    ids, weights, y, shared = make(num_tokens, hidden, topk, 10)
    y_shared = shared if has_shared else None
    scale = torch.randn(num_tokens, generator=torch.Generator().manual_seed(2)) if scaled else None
    want = token_sum(y, weights if weighted else None, ids, y_shared, scale)
    assert not want.isnan().any()

    def there(tensor):
        return None if tensor is None else tensor.to(device)

    on = {"num_experts": 10, "topk": topk, **options}
    on["router_weights"] = there(weights if weighted else None)
    on["y_shared"], on["shared_scale"] = there(y_shared), there(scale)

    by_slot = run_token_sum(y.to(device), top_experts=ids.to(device), **on)
    assert torch.equal(by_slot.cpu(), want)
    by_slot = run_token_sum(y.to(device), top_experts=ids.int().to(device), **on)
    assert torch.equal(by_slot.cpu(), want)

    # The same rows in another order, found by an index.
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(1))
    rows = torch.full((max(order.numel(), 1), hidden), torch.nan, dtype=torch.bfloat16)
    rows[order] = y
    index = torch.where(ids.flatten() < 0, -1, order).int()
    by_index = run_token_sum(rows.to(device), route_row=index.to(device), **on)
    assert torch.equal(by_index.cpu(), want)


SHAPES = [(1, 64, 1), (3, 64 * 5, 2), (7, 2048, 8), (255, 7168, 8), (33, 64 * 13, 9), (20, 128, 32)]


@pytest.mark.gpu
@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_equal_the_reference(shape, has_shared):
    check(shape, "cuda", has_shared)
    check(shape, "cuda", has_shared, num_ctas=2)  # several vectors per thread


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_of_gradients_and_gated_shared_experts(shape):
    for has_shared in (False, True):
        check(shape, "cuda", has_shared, weighted=False)
    check(shape, "cuda", True, scaled=True)


@pytest.fixture(scope="module")
def emulator():
    with pytest.importorskip("mok.tools.emulator").Emulator("sm_90a", num_sms=2, seed=0) as found:
        yield found


@pytest.mark.emulator
@pytest.mark.parametrize("shape", [(1, 64, 1), (3, 64 * 5, 2), (5, 64 * 13, 9)], ids=str)
def test_bits_in_the_emulator(emulator, shape):
    for has_shared in (False, True):
        check(shape, "cpu", has_shared)
        check(shape, "cpu", has_shared, weighted=False, num_ctas=1)
    check(shape, "cpu", True, scaled=True)
    nan_weights_and_bad_ids("cpu")


@pytest.mark.emulator
def test_additions_are_in_order(emulator):
    # 2^24 + 1 rounds to 2^24 in FP32, so a sum shows the order of its terms.
    y = torch.tensor([1.0, 2.0**24, -(2.0**24)]).bfloat16().unsqueeze(1).repeat(1, 64)
    ids = torch.zeros(1, 3, dtype=torch.int64)
    for rows, want in ((y, 0.0), (y.flip(0), 1.0)):
        got = run_token_sum(rows.contiguous(), None, topk=3, num_experts=1, top_experts=ids)
        assert (got == want).all()
        assert torch.equal(got, token_sum(rows, None, ids, None))


def written_over_the_shared_result(device, num_ctas):
    """out may be shared, and the counters that are zeroed end where they end."""
    ids, weights, y, shared = make(5, 64 * 3, 2, 6)
    want = run_token_sum(y, weights, num_experts=6, top_experts=ids, y_shared=shared)
    words = torch.arange(1, 1001, dtype=torch.int32, device=device)
    out = shared.clone().to(device)
    run_token_sum(
        y.to(device), weights.to(device), num_experts=6, top_experts=ids.to(device),
        y_shared=out, out=out, clear=words[3:903], num_ctas=num_ctas,
    )  # fmt: skip
    assert torch.equal(out.cpu(), want.cpu())
    assert not words[3:903].any()
    assert words[:3].tolist() == [1, 2, 3] and words[903:].tolist() == list(range(904, 1001))


@pytest.mark.emulator
@pytest.mark.parametrize("num_ctas", [1, None])
def test_written_over_the_shared_result(emulator, num_ctas):
    written_over_the_shared_result("cpu", num_ctas)


@pytest.mark.gpu
def test_bad_ids_are_skipped_and_nan_weights_propagate():
    nan_weights_and_bad_ids("cuda")


def nan_weights_and_bad_ids(device):
    ids, weights, y, _ = make(6, 128, 4, 10, drop=0.0)
    ids[2, 1] = 10  # as staging does, the sum treats it as dropped
    ids[3, 0] = -5
    y[[2 * 4 + 1, 3 * 4]] = torch.nan
    weights[4, 2] = torch.nan
    weights[3, 0] = torch.nan
    got = run_token_sum(
        y.to(device),
        weights.to(device),
        num_experts=10,
        top_experts=ids.to(device),
    ).cpu()
    assert got[4].isnan().all()
    good = torch.tensor([0, 1, 2, 3, 5])
    want = token_sum(y, weights, torch.where((ids < 0) | (ids > 9), -1, ids), None)
    assert torch.equal(got[good], want[good])
    assert not got[good].isnan().any()


@pytest.mark.gpu
def test_rows_beyond_2_31_elements():
    hidden, rows = 4096, 2**19 + 8
    y = torch.empty(rows, hidden, dtype=torch.bfloat16, device="cuda")
    y[-1] = 3.0
    index = torch.tensor([rows - 1], dtype=torch.int32, device="cuda")
    weights = torch.full((1, 1), 0.5, device="cuda")
    got = run_token_sum(y, weights, num_experts=1, route_row=index)
    assert (got == 1.5).all()
