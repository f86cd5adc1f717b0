"""The router-weight gradients: bits equal to the reference's order of additions."""

import pytest
import torch

pytest.importorskip("cutlass")

from mok.kernels_cute.router_grad import router_grad_ctas
from mok.reference.router_grad import sum_groups
from mok.runtime.launch import launch
from tests.helpers import address, arch_of, kernel, opcodes, stream_of

# T, K, I
SHAPES = [(1, 1, 64), (7, 2, 64 * 33), (20, 8, 64 * 5), (33, 3, 64 * 224), (300, 8, 768)]


def run(source, slots, num_routes, num_experts=1, has_index=True, num_ctas=None):
    device = source.device
    config = {"has_index": has_index}
    if slots is not None:
        config["ids_bits"] = slots.element_size() * 8
    out = torch.full((num_routes,), torch.nan, device=device)
    ctas = router_grad_ctas(num_routes, has_index, 4) if num_ctas is None else num_ctas
    launch(
        kernel("router_grad", arch_of(device), **config),
        out.data_ptr(),
        source.data_ptr(),
        address(slots),
        num_routes,
        source.shape[1] if source.ndim == 2 else 0,
        num_experts,
        ctas,
        stream_of(device),
    )
    return out.cpu()


def check(shape, device, num_ctas=None):
    tokens, topk, intermediate = shape
    rng = torch.Generator().manual_seed(tokens)
    routes = tokens * topk
    dropped = torch.rand(routes, generator=rng) < 0.2
    # Large spread: another order of additions has other bits.
    partials = torch.randn(routes + 5, intermediate // 64, generator=rng)
    partials *= torch.exp2(torch.randint(-12, 12, partials.shape, generator=rng))
    index = torch.where(dropped, -1, torch.randperm(routes + 5, generator=rng)[:routes]).int()
    unused = torch.ones(routes + 5, dtype=torch.bool)
    unused[index[~dropped].long()] = False
    partials[unused] = torch.nan
    sums = sum_groups(partials)
    want = torch.where(dropped, 0.0, sums[index.long()])
    assert not want.isnan().any()
    got = run(partials.to(device), index.to(device), routes, num_ctas=num_ctas)
    assert torch.equal(got, want)

    # A row per route: the gated shared expert.
    kept = partials[~unused].contiguous()
    if len(kept):
        got = run(kept.to(device), None, len(kept), num_ctas=num_ctas)
        assert torch.equal(got, sums[~unused])

    # Sums that came through the slots.
    slots = torch.where(dropped, torch.nan, want)
    ids = torch.randint(0, 10, (routes,), generator=rng)
    ids[dropped] = torch.tensor([-1, -7, 10])[torch.arange(int(dropped.sum())) % 3]
    for wide in (ids, ids.int()):
        got = run(slots.to(device), wide.to(device), routes, 10, has_index=False, num_ctas=num_ctas)
        assert torch.equal(got, want)


def test_the_order_matters_in_these_tests():
    partials = torch.randn(100, 40) * torch.exp2(torch.randint(-12, 12, (100, 40)))
    assert not torch.equal(sum_groups(partials), partials.sum(1))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("config", [{"has_index": True}, {"has_index": False, "ids_bits": 64}])
def test_code(arch, config):
    built = kernel("router_grad", arch, **config)
    (found,) = built.resources.kernels
    assert found.registers <= 32 and found.spill_bytes == 0 and found.stack_bytes == 0
    assert not built.resources.warnings
    count = opcodes(built.ptx)
    assert "add.f32" not in count
    assert not any(op.startswith(("atom", "red")) for op in count)


@pytest.fixture(scope="module")
def emulator():
    with pytest.importorskip("mok.tools.emulator").Emulator("sm_90a", num_sms=2, seed=0) as found:
        yield found


@pytest.mark.emulator
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_bits_in_the_emulator(emulator, shape):
    check(shape, "cpu")
    check(shape, "cpu", num_ctas=1)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (4096, 8, 2048)], ids=str)
def test_bits(shape):
    check(shape, "cuda")
    check(shape, "cuda", num_ctas=3)
