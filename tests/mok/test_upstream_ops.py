"""The reference system's operators: results, fakes, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("cutlass", reason="kernels need the CuTe DSL")

from mok import ops
from mok.config import tile_rows
from mok.errors import DeviceError, DtypeError, ShapeError
from mok.reference import schedule_reference, token_sum
from mok.reference.mxfp8 import quantise, tile_scales

RULES = ("test_schema", "test_autograd_registration", "test_faketensor")


def normal(*size, dtype=torch.bfloat16, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("size", [(3, 128, 256), (256, 128)], ids=str)
@pytest.mark.parametrize("asked", [(True, True), (True, False), (False, True)], ids=str)
def test_mxfp8_quantize(device, size, asked):
    weight = normal(*size).to(device)
    found = ops.mxfp8_quantize(weight, *asked)
    for wanted, turned, part in zip(asked, (False, True), (found[:2], found[2:]), strict=True):
        if not wanted:
            assert part == (None, None)
            continue
        want = quantise(weight.transpose(-1, -2).contiguous() if turned else weight)
        assert torch.equal(part[0].view(torch.uint8), want.data.view(torch.uint8))
        assert torch.equal(part[1], tile_scales(want.scales).view(part[1].shape))
    torch.library.opcheck(ops.mxfp8_quantize, (weight, *asked), test_utils=RULES)
    assert found[0] is None or found[0].dtype == torch.float8_e4m3fn


@pytest.mark.parametrize(("ep_size", "experts", "tokens", "topk"), [(1, 5, 300, 3), (3, 4, 41, 2)])
def test_schedule(device, ep_size, experts, tokens, topk):
    rng = torch.Generator().manual_seed(1)
    ids = torch.randint(-1, experts * ep_size, (ep_size, tokens, topk), generator=rng)
    arch = "sm_90a"
    if device == "cuda":
        from mok.runtime.device import require_arch

        arch = require_arch(torch.device("cuda")).arch
    wanted = schedule_reference(list(ids), experts * ep_size, ep_size, tile_rows(arch))
    given = ids.int().to(device)
    for rank, want in enumerate(wanted):
        arguments = (given, experts, 256, rank)
        peer_rank, peer_token_idx, num_tokens, counts = ops.schedule(*arguments)
        rows = int(num_tokens)
        assert rows == want.num_tokens and len(peer_rank) >= max(rows, 256)
        assert torch.equal(peer_rank[:rows].cpu(), want.peer_rank)
        assert torch.equal(peer_token_idx[:rows].cpu(), want.peer_token_idx)
        assert torch.equal(counts.cpu(), want.tokens_per_expert)
        assert (peer_rank[rows:] == -1).all() and (peer_token_idx[rows:] == -1).all()
        torch.library.opcheck(ops.schedule, arguments, test_utils=RULES)
    assert len(ops.schedule(given, experts, 8192, 0)[0]) == 8192


@pytest.mark.parametrize("topk", [1, 3])
def test_epilogues(device, topk):
    shared, routed = normal(37, 128, seed=1), normal(37 * topk, 128, seed=2)
    weights = normal(37, topk, dtype=torch.float32, seed=3)
    kept = torch.zeros(37, topk, dtype=torch.int64)
    there = [t.to(device) for t in (shared, routed, weights)]
    found = ops.fwd_epilogue(*there)
    assert torch.equal(found.cpu(), token_sum(routed, weights, kept, shared))
    found = ops.bwd_epilogue(*there[:2])
    assert torch.equal(found.cpu(), token_sum(routed, None, kept, shared))
    torch.library.opcheck(ops.fwd_epilogue, tuple(there), test_utils=RULES)
    torch.library.opcheck(ops.bwd_epilogue, tuple(there[:2]), test_utils=RULES)
    assert ops.fwd_epilogue(there[0][:0], there[1][:0], there[2][:0]).shape == (0, 128)


def test_they_compile_as_one_graph(device):
    weight, shared, routed = normal(128, 128), normal(8, 128), normal(16, 128)
    weight, shared, routed = (t.to(device) for t in (weight, shared, routed))

    def run(weight, shared, routed):
        data, scales, _, _ = torch.ops.mok.mxfp8_quantize(weight, True, False)
        return data, scales, torch.ops.mok.bwd_epilogue(shared, routed)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(weight, shared, routed), run(weight, shared, routed), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


WEIGHT, IDS = torch.zeros(128, 128).bfloat16(), torch.zeros(2, 8, 2).int()
Y, ROUTES, WEIGHTS = (
    torch.zeros(8, 64).bfloat16(),
    torch.zeros(16, 64).bfloat16(),
    torch.zeros(8, 2),
)
BAD = [
    (ops.mxfp8_quantize, (WEIGHT, False, False), ShapeError, "must be True"),
    (ops.mxfp8_quantize, (WEIGHT.float(), True, True), DtypeError, "bfloat16"),
    (ops.mxfp8_quantize, (WEIGHT.flatten(), True, True), ShapeError, "two or three"),
    (ops.mxfp8_quantize, (WEIGHT[:127], True, True), ShapeError, "multiples of 128"),
    (ops.mxfp8_quantize, (WEIGHT[:, :127], True, True), ShapeError, "multiples of 128"),
    (ops.schedule, (IDS.long(), 2, 256, 0), DtypeError, "int32"),
    (ops.schedule, (IDS[0], 2, 256, 0), ShapeError, "EP, T, K"),
    (ops.schedule, (IDS, 0, 256, 0), ShapeError, "num_local_experts"),
    (ops.schedule, (IDS, 2, 256, 2), ShapeError, "rank in 0…1"),
    (ops.schedule, (IDS.expand(2, 8, 2)[:, ::2], 2, 256, 0), ShapeError, "contiguous"),
    (ops.schedule, (IDS, 2, 256, 0), DeviceError, "GPU or in an emulator"),
    (ops.fwd_epilogue, (Y, ROUTES, WEIGHTS.bfloat16()), DtypeError, "float32"),
    (ops.fwd_epilogue, (Y, ROUTES[1:], WEIGHTS), ShapeError, r"\[16, 64\]"),
    (ops.fwd_epilogue, (Y, ROUTES, WEIGHTS[1:]), ShapeError, "topk_weights"),
    (ops.fwd_epilogue, (Y[:, :32].contiguous(), ROUTES[:, :32].contiguous(), WEIGHTS), ShapeError,
     "multiple of 64"),
    (ops.bwd_epilogue, (Y, ROUTES[1:]), ShapeError, "routes' results"),
    (ops.bwd_epilogue, (Y.float(), ROUTES), DtypeError, "bfloat16"),
    (ops.bwd_epilogue, (Y, ROUTES[:0]), ShapeError, "K in 1"),
    (ops.bwd_epilogue, (Y, ROUTES), DeviceError, "GPU or in an emulator"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "arguments", "error", "word"), BAD, ids=str)
def test_refused(op, arguments, error, word):
    with pytest.raises(error, match=word):
        op(*arguments)


def test_fakes_need_no_device():
    """As torch.export sees them."""
    with FakeTensorMode():
        data, scales, turned, turned_scales = ops.mxfp8_quantize(
            torch.empty(4, 256, 128, dtype=torch.bfloat16), True, True
        )
        assert data.shape == (4, 256, 128) and turned.shape == (4, 128, 256)
        assert scales.shape == (8, 1, 32, 16) and turned_scales.shape == (4, 2, 32, 16)
        rows, places, count, counts = ops.schedule(
            torch.empty(4, 9, 2, dtype=torch.int32), 3, 64, 1
        )
        assert rows.shape == places.shape and count.shape == (1,) and counts.shape == (3,)
