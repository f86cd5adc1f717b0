"""Callers of the reference system with MXFP8 weights: its tuples, and the bits of our own functions."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("cutlass", reason="kernels need the CuTe DSL")

import mok
from mok import functional, ops
from mok.config import Config, Shape
from mok.errors import DtypeError, MokError, RouteError, ShapeError
from mok.functional import MoKConfig
from mok.reference import random_case, random_gradient
from mok.runtime.group import Group

CONFIG = MoKConfig(2, 2, 256, 512)
OURS = Config(2, 2, 256, 512)
SHAPE = Shape(70, 128, 256, 4, 2, 1, 64)


@pytest.fixture(
    params=[
        pytest.param("sm_90a", marks=pytest.mark.emulator),
        pytest.param("sm_100a", marks=[pytest.mark.emulator, pytest.mark.slow]),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request):
    if request.param == "cuda":
        yield torch.device("cuda", 0)
        functional.clear_workspace_cache()
        return
    emulator = pytest.importorskip("mok.tools.emulator")
    with emulator.Emulator(request.param, num_sms=6):
        yield torch.device("cpu")
        functional.clear_workspace_cache()


def get(device, case):
    return functional.create_workspace(
        CONFIG, Group.single(device), device=device, num_local_tokens=case.x.shape[0],
        hidden_size=case.x.shape[1], topk=case.top_experts.shape[1],
    )  # fmt: skip


def dense(case):
    shared = case.shared
    parts = (None,) * 3 if shared is None else (shared.gate[0], shared.up[0], shared.down[0])
    return (case.x, case.router_weights, *parts)


def bf16(case):
    return case.routed.gate, case.routed.up, case.routed.down


def ours(device, case, dy, weights, precision):
    """(output, gradients) of our own functions."""
    shape = case.shape
    with functional.create_workspace(
        OURS, Group.single(device), device=device, max_tokens=shape.num_tokens,
        hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
        num_experts=shape.num_experts, topk=shape.topk,
        shared_intermediate_size=shape.shared_intermediate_size, precision=precision,
    ) as made:  # fmt: skip
        schedule = functional.build_schedule(made, OURS, case.top_experts)
        given = (*dense(case), *weights, case.swiglu_limit)
        output, context = functional.forward(OURS, made, schedule, *given)
        grads = functional.backward(OURS, made, schedule, context, dy, *given)
        made.check()
    return output, grads


def same(found, expected):
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_tuples_have_the_bits_of_our_weights(device):
    case = random_case(SHAPE, device=device, swiglu_limit=0.5)
    dy, given = random_gradient(case), dense(case)
    limit = case.swiglu_limit
    want, want_grads = ours(device, case, dy, [mok.mxfp8_quantize(w) for w in bf16(case)], "mxfp8")
    plain, _ = ours(device, case, dy, bf16(case), "bf16")
    assert not torch.equal(want, plain)

    # Both of an adapter's ways: everything from one call, and each orientation by itself.
    gate, up, down = (ops.mxfp8_quantize(w, True, True) for w in bf16(case))
    workspace = get(device, case)
    schedule = functional.build_schedule(workspace, CONFIG, case.top_experts, num_local_experts=4)
    output, context = functional.forward(
        CONFIG, workspace, schedule, *given, gate[:2], up[:2], down[:2], limit
    )
    assert torch.equal(output, want)
    backward = (CONFIG, workspace, schedule)
    same(functional.backward(*backward, context, dy, *given, gate, up, down[2:], limit), want_grads)
    again = functional.recompute_forward_context(
        CONFIG, workspace, schedule, given[0], given[2], given[3], gate[:2], up[:2], limit
    )
    same(functional.backward(*backward, again, dy, *given, gate, up, down, limit), want_grads)
    only = ops.mxfp8_quantize(bf16(case)[2], False, True)
    assert only[:2] == (None, None)
    same(functional.backward(*backward, again, dy, *given, gate, up, only[2:], limit), want_grads)
    # Megatron-LM's way: added to buffers in FP32, with both at once.
    weights = (*bf16(case), *given[2:])
    main = [torch.zeros_like(weights[k], dtype=torch.float32) for k in (3, 0, 4, 1, 5, 2)]
    added = functional.backward(
        *backward, again, dy, *given, gate, up, down[2:], limit, main_grads=main
    )
    same([t.bfloat16() for t in added[2:]], want_grads[2:])
    assert added[2] is main[1] and added[5] is main[0]
    # Automodel flattens what it saves: every field a tensor or a tuple of tensors.
    for part in (schedule, context, again):
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            for tensor in value if isinstance(value, tuple) else (value,):
                assert isinstance(tensor, torch.Tensor), field.name
    # The workspace that the first schedule was built with has gone.
    assert [w.precision for w in workspace.inner.values() if not w.closed] == ["mxfp8"]
    workspace.close()


def test_layers_of_both_precisions_share_a_workspace(device):
    """Whatever the order: a schedule that an MXFP8 layer's workspace built serves a BF16 layer."""
    case = random_case(SHAPE, kind="dropped", device=device)
    other = random_case(dataclasses.replace(SHAPE, intermediate_size=128), device=device)
    other = dataclasses.replace(other, top_experts=case.top_experts)
    dy, weights = random_gradient(case), [mok.mxfp8_quantize(w) for w in bf16(case)]
    quantised = [ops.mxfp8_quantize(w, True, True) for w in bf16(case)]
    pairs = [w[:2] for w in quantised]
    want, _ = ours(device, case, dy, weights, "mxfp8")
    plain, plain_grads = ours(device, other, dy, bf16(other), "bf16")
    workspace = get(device, case)

    def build():
        return functional.build_schedule(workspace, CONFIG, case.top_experts, num_local_experts=4)

    functional.forward(CONFIG, workspace, build(), *dense(case), *pairs)
    schedule = build()
    assert not schedule.route_row.numel()
    output, context = functional.forward(CONFIG, workspace, schedule, *dense(other), *bf16(other))
    assert torch.equal(output, plain)
    same(
        functional.backward(CONFIG, workspace, schedule, context, dy, *dense(other), *bf16(other)),
        plain_grads,
    )
    for _ in range(2):
        schedule = build()
        assert schedule.route_row.numel()
        found, _ = functional.forward(CONFIG, workspace, schedule, *dense(case), *pairs)
        assert torch.equal(found, want)
        assert torch.equal(
            functional.forward(CONFIG, workspace, schedule, *dense(other), *bf16(other))[0], plain
        )
    assert len([w for w in workspace.inner.values() if not w.closed]) == 2
    with pytest.raises(ShapeError, match="same precision"):
        functional.backward(CONFIG, workspace, schedule, context, dy, *dense(case), *quantised)
    workspace.close()


def test_a_bad_id_is_named_after_the_call(device):
    """Also where another workspace than the weights' has built the schedule: closed since, or in use."""
    case = random_case(SHAPE, device=device)
    wrong = case.top_experts.clone()
    wrong[3, 1] = 4
    pairs = [ops.mxfp8_quantize(w, True, False)[:2] for w in bf16(case)]
    workspace = get(device, case)

    def call(weights):
        schedule = functional.build_schedule(workspace, CONFIG, wrong, num_local_experts=4)
        if device.type == "cuda":
            torch.cuda.synchronize()
        functional.forward(CONFIG, workspace, schedule, *dense(case), *weights)

    for weights in (pairs, pairs, bf16(case), pairs, pairs):
        with pytest.raises(RouteError, match="found 4 for token 3, k 1"):
            call(weights)
    workspace.close()


def bad_weights(case):
    gate, up, down = (ops.mxfp8_quantize(w, True, True) for w in bf16(case))
    pairs = (gate[:2], up[:2], down[:2])
    full = (gate, up, down[2:])
    turned = (down[2], down[3])
    half = (bf16(case)[0].half(),) * 4
    return {
        "three parts": (False, ((*gate[:3],), *pairs[1:]), DtypeError, "data, scales"),
        "an absent part": (False, ((gate[0], None), *pairs[1:]), DtypeError, "data, scales"),
        "forward's in backward": (True, pairs, DtypeError, "transposed data, its scales"),
        "some in BF16": (False, (bf16(case)[0], *pairs[1:]), DtypeError, "all BF16 or all MXFP8"),
        "other dtypes": (False, (list(half), *pairs[1:]), DtypeError, "must be BF16, or E4M3"),
        "what is no weight": (False, (3, *pairs[1:]), DtypeError, "mok.ops.mxfp8_quantize"),
        "scales of another": (False, ((gate[0], gate[3]), *pairs[1:]), ShapeError, "transposed"),
        "short scales": (False, ((gate[0], gate[1][:-1]), *pairs[1:]), ShapeError, "the scales of"),
        "down for gate": (False, (down[:2], *pairs[1:]), MokError, "must"),
        "down turned": (False, (*pairs[:2], turned), ShapeError, "its transpose"),
        "down not turned": (True, (*full[:2], down[:2]), ShapeError, "its transpose"),
        "the transpose of another": (
            True, ((*gate[:2], *down[2:]), *full[1:]), ShapeError, "quantised along its last"
        ),
    }  # fmt: skip


BAD = (
    "three parts", "an absent part", "forward's in backward", "some in BF16", "other dtypes",
    "what is no weight", "scales of another", "short scales", "down for gate", "down turned",
    "down not turned", "the transpose of another",
)  # fmt: skip


@pytest.fixture(scope="module")
def called():
    """A case with the workspace, schedule and context of a call."""
    emulator = pytest.importorskip("mok.tools.emulator")
    with emulator.Emulator("sm_90a", num_sms=6):
        device = torch.device("cpu")
        case = random_case(dataclasses.replace(SHAPE, num_tokens=8), device=device)
        workspace = get(device, case)
        schedule = functional.build_schedule(
            workspace, CONFIG, case.top_experts, num_local_experts=4
        )
        pairs = [ops.mxfp8_quantize(w, True, False)[:2] for w in bf16(case)]
        _, context = functional.forward(CONFIG, workspace, schedule, *dense(case), *pairs)
        yield case, workspace, schedule, context, bad_weights(case)
        workspace.close()


@pytest.mark.emulator
@pytest.mark.parametrize("what", BAD)
def test_refused(called, what):
    case, workspace, schedule, context, table = called
    assert set(table) == set(BAD)
    backward, weights, error, word = table[what]
    with pytest.raises(error, match=word):
        if backward:
            functional.backward(
                CONFIG, workspace, schedule, context, torch.zeros_like(case.x), *dense(case),
                *weights,
            )  # fmt: skip
        else:
            functional.forward(CONFIG, workspace, schedule, *dense(case), *weights)
