"""The reference system's calls, as they are made there, give the layer's bits."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mok import functional
from mok.config import Config, Shape
from mok.errors import DtypeError, GroupError, ShapeError
from mok.functional import MoKConfig, MoKForwardContext, MoKSchedule, MoKWorkspace
from mok.reference import integer_case, integer_gradient, random_case, random_gradient
from mok.runtime.group import Group

pytest.importorskip("cutlass", reason="kernels need the CuTe DSL")

CONFIG = MoKConfig(2, 2, 256, 512)
OURS = Config(2, 2, 256, 512)


@pytest.fixture
def device(device):
    """The device, with no workspace of an earlier test."""
    functional.clear_workspace_cache()
    yield torch.device(device, 0) if device == "cuda" else torch.device(device)
    functional.clear_workspace_cache()


def arguments(case):
    """From x to the routed weights, as upstream orders them."""
    shared = case.shared
    return (
        case.x,
        case.router_weights,
        *((shared.gate[0], shared.up[0], shared.down[0]) if shared else (None, None, None)),
        case.routed.gate,
        case.routed.up,
        case.routed.down,
    )


def get(device, case, group=None):
    return functional.get_workspace(
        CONFIG,
        group or Group.single(device),
        device=device,
        num_local_tokens=case.x.shape[0],
        hidden_size=case.x.shape[1],
        topk=case.top_experts.shape[1],
    )


def ours(device, case, dy, **options):
    shape = case.shape
    with functional.create_workspace(
        OURS, Group.single(device), device=device, max_tokens=shape.num_tokens,
        hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
        num_experts=shape.num_experts, topk=shape.topk,
        shared_intermediate_size=shape.shared_intermediate_size,
    ) as made:  # fmt: skip
        schedule = functional.build_schedule(made, OURS, case.top_experts)
        output, context = functional.forward(
            OURS, made, schedule, *arguments(case), case.swiglu_limit, **options
        )
        grads = functional.backward(
            OURS, made, schedule, context, dy, *arguments(case), case.swiglu_limit, **options
        )
        made.check()
    return output, grads


def test_calls_have_the_layers_bits(device):
    case = random_case(Shape(70, 128, 192, 4, 2, 1, 64), device=device, swiglu_limit=0.5)
    dy = random_gradient(case)
    group = Group.single(device)
    workspace = get(device, case, group)
    assert isinstance(workspace, MoKWorkspace) and workspace is get(device, case, group)
    schedule = functional.build_schedule(workspace, CONFIG, case.top_experts, num_local_experts=4)
    assert isinstance(schedule, MoKSchedule)
    given = arguments(case)
    output, context = functional.forward(
        CONFIG, workspace, schedule, *given, swiglu_limit=case.swiglu_limit
    )
    assert isinstance(context, MoKForwardContext)
    grads = functional.backward(
        CONFIG, workspace, schedule, context, dy, *given, swiglu_limit=case.swiglu_limit
    )
    want, want_grads = ours(device, case, dy)
    assert torch.equal(output, want) and len(grads) == 8
    assert all(torch.equal(a, b) for a, b in zip(grads, want_grads, strict=True))
    # Activation checkpointing, by hand; and every field a tensor, for saved-tensor hooks.
    again = functional.recompute_forward_context(
        CONFIG, workspace, schedule, given[0], given[2], given[3], given[5], given[6],
        swiglu_limit=case.swiglu_limit,
    )  # fmt: skip
    redone = functional.backward(CONFIG, workspace, schedule, again, dy, *given, case.swiglu_limit)
    assert all(torch.equal(a, b) for a, b in zip(redone, grads, strict=True))
    for part in (schedule, context, again):
        for field in dataclasses.fields(part):
            assert isinstance(getattr(part, field.name), torch.Tensor), field.name
    rebuilt = type(schedule)(
        **{f.name: getattr(schedule, f.name) for f in dataclasses.fields(schedule)}
    )
    assert torch.equal(functional.forward(CONFIG, workspace, rebuilt, *given, 0.5)[0], want)


def test_without_a_shared_expert(device):
    """As a Megatron-LM adapter that keeps its own calls it."""
    case = random_case(Shape(70, 128, 64, 4, 2), device=device)
    dy, given = random_gradient(case), arguments(case)
    x, weights, routed = given[0], given[1], given[5:]
    workspace = get(device, case)
    schedule = functional.build_schedule(workspace, CONFIG, case.top_experts, num_local_experts=4)
    output, _ = functional.forward_routed(CONFIG, workspace, schedule, x, weights, *routed)
    context = functional.recompute_forward_context_routed(
        CONFIG, workspace, schedule, x, *routed[:2]
    )
    grads = functional.backward_routed(
        CONFIG, workspace, schedule, context, dy, x, weights, *routed
    )
    want, want_grads = ours(device, case, dy)
    assert torch.equal(output, want) and len(grads) == 5
    assert all(torch.equal(a, b) for a, b in zip(grads, want_grads[:5], strict=True))


def test_layers_of_other_widths_share_a_workspace(device):
    shapes = [Shape(40, 128, 64, 4, 2, 1, 192), Shape(40, 128, 192, 4, 2), Shape(40, 128, 64, 6, 2)]
    cases = [integer_case(s, device=device, kind="dropped") for s in shapes]
    workspace = get(device, cases[0])
    for case in (*cases, cases[0]):
        schedule = functional.build_schedule(
            workspace, CONFIG, case.top_experts, num_local_experts=case.shape.num_experts
        )
        output, _ = functional.forward(CONFIG, workspace, schedule, *arguments(case))
        assert torch.equal(output, ours(device, case, integer_gradient(case))[0])
    assert len(workspace.inner) == 2  # by the number of experts


def test_what_the_megatron_adapter_adds(device):
    """One tensor per expert, main_grad, a gated shared expert, masked int32 ids."""
    case = random_case(Shape(40, 128, 64, 4, 2, 1, 64), device=device, kind="dropped")
    dy = random_gradient(case)
    gate = (torch.randn(1, 128, generator=torch.Generator().manual_seed(3)) / 8).bfloat16()
    gate = gate.to(device)
    given = arguments(case)
    workspace = get(device, case)
    schedule = functional.build_schedule(
        workspace, CONFIG, case.top_experts.int(), num_local_experts=4
    )
    split = (*given[:5], *(list(w.unbind()) for w in given[5:]))
    output, context = functional.forward(
        CONFIG, workspace, schedule, *split, shared_output_gate_weight=gate
    )
    scale = (case.x.float() @ gate.float()[0]).sigmoid()
    want, want_grads = ours(device, case, dy, shared_scale=scale)
    assert torch.equal(output, want)
    order = (2, 5, 3, 6, 4, 7)  # in given: shared gate, routed gate, …
    main = [torch.ones_like(given[k], dtype=torch.float32) for k in order]
    gate_main = torch.full((1, 128), 0.25, device=device)
    grads = functional.backward(
        CONFIG, workspace, schedule, context, dy, *split, main_grads=main,
        shared_output_gate_weight=gate, shared_output_gate_main_grad=gate_main,
    )  # fmt: skip
    assert len(grads) == 9 and grads[8] is gate_main
    assert grads[2] is main[1] and grads[5] is main[0]
    for got, plain in zip(grads[2:8], want_grads[2:8], strict=True):
        torch.testing.assert_close(got - 1, plain.float(), rtol=1e-2, atol=1e-3)
    d_z = (want_grads[8] * scale * (1 - scale))[:, None]
    torch.testing.assert_close(gate_main - 0.25, d_z.t() @ case.x.float(), rtol=1e-3, atol=1e-3)
    plain = functional.backward(
        CONFIG, workspace, schedule, context, dy, *split, shared_output_gate_weight=None
    )
    assert len(plain) == 9 and plain[8] is None


def test_a_schedule_of_other_experts_or_of_another_workspace_is_refused(device):
    """Its rows would be of experts that the weights do not have."""
    case = random_case(Shape(40, 128, 64, 4, 2), device=device)
    other = random_case(Shape(400, 128, 64, 4, 2), device=device)
    workspace, stranger, given = get(device, case), get(device, other), arguments(case)
    assert stranger is not workspace
    fewer = functional.build_schedule(workspace, CONFIG, case.top_experts, num_local_experts=5)
    foreign = functional.build_schedule(stranger, CONFIG, case.top_experts, num_local_experts=4)
    short = functional.build_schedule(workspace, CONFIG, case.top_experts, num_local_experts=4)
    context = functional.forward(CONFIG, workspace, short, *given)[1]
    short = dataclasses.replace(short, peer_rank=short.peer_rank[:-128])
    for schedule in (fewer, foreign, short):
        with pytest.raises(ShapeError, match="schedule must be of this workspace and of 4 experts"):
            functional.forward(CONFIG, workspace, schedule, *given)
        with pytest.raises(ShapeError, match="schedule must be of this workspace"):
            functional.backward(CONFIG, workspace, schedule, context, case.x, *given)


BAD = [
    (lambda **k: MoKConfig(minibatch_size=100), ShapeError, "minibatch_size"),
    (lambda **k: MoKConfig(scale_router_before_fc2=True), ShapeError, "scale_router_before_fc2"),
    (lambda **k: functional.validate_workspace_args(OURS, None, **k), DtypeError, "MoKConfig"),
    (lambda **k: functional.validate_workspace_args(CONFIG, 3, **k), DtypeError, "ProcessGroup"),
    (lambda **k: functional.create_workspace(CONFIG, Group.virtual(2), **k), GroupError, "virtual"),
    (
        lambda **k: functional.create_workspace(CONFIG, Group.single(), **{**k, "topk": 40}),
        ShapeError,
        "topk",
    ),
    (
        lambda **k: functional.create_workspace(CONFIG, Group.single(), **{**k, "hidden_size": 65}),
        ShapeError,
        "hidden_size",
    ),
    (
        lambda **k: functional.create_workspace(CONFIG, Group.single(), **{**k, "device": "cpu"}),
        DtypeError,
        "torch.device",
    ),
]


@pytest.mark.parametrize(("call", "error", "word"), BAD, ids=[b[2] for b in BAD])
def test_refused(call, error, word):
    sizes = {"device": torch.device("cpu"), "num_local_tokens": 8, "hidden_size": 64, "topk": 2}
    with pytest.raises(error, match=word):
        call(**sizes)
