"""Bad input that only a running kernel meets: in the emulator, and on a GPU where there is one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from mok import functional
from mok.config import Shape
from mok.errors import CapacityError, ContextError, DeviceError, ResourceError, RouteError
from mok.reference import forward_loop, integer_case
from tests.helpers_layer import SMALL, Layer, refused, run_layer, with_routes

H, I, E, K = 128, 64, 4, 2
NAMES = ("x", "router_weights", "shared_gate", "shared_up", "shared_down", "routed_gate",
         "routed_up", "routed_down")  # fmt: skip


BAD_IDS = [
    (E, torch.int64),
    (-2, torch.int64),
    (2**31, torch.int64),
    (2**32 + 1, torch.int64),
    (-(2**63), torch.int64),
    (2**63 - 1, torch.int64),
    (E, torch.int32),
    (-(2**31), torch.int32),
    (2**31 - 1, torch.int32),
]


def exact_case(device: str, **options: Any):
    return integer_case(Shape(60, H, I, E, K, 1, 64), device=device, **options)


@pytest.mark.parametrize(("bad", "dtype"), BAD_IDS, ids=str)
@pytest.mark.parametrize("ep_size", [1, 3])
def test_a_bad_id_becomes_a_record_and_a_dropped_route(device, ep_size, bad, dtype):
    case = exact_case(device)
    case = dataclasses.replace(case, top_experts=case.top_experts.to(dtype))
    wrong = case.top_experts.clone()
    wrong[47, 1] = bad
    rank, token = (0, 47) if ep_size == 1 else (2, 7)
    with Layer(with_routes(case, wrong), ep_size, device=device) as layer:
        schedule = layer.build_schedule()  # raises nothing: the host has not looked
        with refused(
            RouteError, "-1", f"0…{E - 1}", f"{bad} ", f"token {token}", "k 1", f"rank {rank}"
        ):
            layer.finish()
        layer.workspace.check()  # told once
        found = layer(schedule=schedule)
    wrong[47, 1] = -1
    assert torch.equal(found.output, forward_loop(with_routes(case, wrong)).bfloat16())


def test_a_call_after_a_bad_id_is_not_silent(device):
    case = exact_case(device)
    wrong = case.top_experts.clone()
    wrong[3, 0] = E
    with Layer(case, device=device) as layer:
        schedule = layer.build_schedule(with_routes(case, wrong))
        if device == "cuda":
            torch.cuda.synchronize()
        with refused(RouteError, "token 3", str(E)):
            layer.queue(schedule=schedule)
        assert torch.equal(layer().output, forward_loop(case).bfloat16())


@pytest.mark.parametrize("step", ["forward", "recompute", "backward"])
def test_a_rank_with_a_bad_id_still_takes_part(device, step, monkeypatch):
    """Its peers wait at the call's barriers, and read what its kernels push: it raises after them."""
    import mok.runtime.launch as path

    case = exact_case(device)
    wrong = case.top_experts.clone()
    wrong[3, 0] = E
    steps = []
    with Layer(case, 2, device=device) as layer:
        workspace, given = layer.workspace, layer.arguments(case)
        schedule = layer.build_schedule()
        _, context = functional.forward(SMALL, workspace, schedule, *given)
        context.schedule = None  # that of the bad id is another one
        layer.finish()
        recompute = (*given[:1], *given[2:4], *given[5:7])
        call = {
            "forward": lambda s: functional.forward(SMALL, workspace, s, *given),
            "recompute": lambda s: functional.recompute_forward_context(
                SMALL, workspace, s, *recompute
            ),
            "backward": lambda s: functional.backward(
                SMALL, workspace, s, context, given[0], *given, keep_context=True
            ),
        }[step]

        real, barrier = path.launch, workspace.barrier
        monkeypatch.setattr(
            path, "launch", lambda k, *a: (steps.append(k.spec.name), real(k, *a))[1]
        )
        workspace.barrier = Counted(barrier, steps)
        call(schedule)
        whole = list(steps)
        assert whole.count("barrier") == 2 and len(whole) >= 4
        schedule = layer.build_schedule(with_routes(case, wrong))
        if device == "cuda":
            torch.cuda.synchronize()
        steps.clear()
        with refused(RouteError, "token 3", str(E)):
            call(schedule)
        assert steps == whole


@pytest.mark.parametrize("ep_size", [1, 2])
def test_contexts_serve_their_own_call_and_once(device, ep_size):
    """What a second use, and a schedule of other ids, would compute is nobody's gradient."""
    case = exact_case(device)
    with Layer(case, ep_size, device=device) as layer:
        given = layer.arguments(case)

        def forward(schedule):
            return functional.forward(SMALL, layer.workspace, schedule, *given)[1]

        def backward(schedule, context, **options):
            return functional.backward(
                SMALL, layer.workspace, schedule, context, given[0], *given, **options
            )

        ids = [t.to(device) for t in layer.split(case.top_experts)]
        own = functional.build_schedule(layer.workspace, SMALL, layer.each(ids))
        other = layer.build_schedule(with_routes(case, case.top_experts.flip(0)))
        context = forward(own)
        for made in (context, recomputed(layer, own, given)):
            with refused(ContextError, "schedule", "another call", "recompute_forward_context"):
                backward(other, made)
        first = backward(own, context, keep_context=True)
        # The same ids again have the same schedule.
        again = backward(
            functional.build_schedule(layer.workspace, SMALL, layer.each(ids)), context
        )
        for a, b in zip(first, again, strict=True):
            a, b = ([t] if isinstance(t, torch.Tensor) else t for t in (a, b))
            assert all(x is y is None or torch.equal(x, y) for x, y in zip(a, b, strict=True))
        with refused(ContextError, "one backward call", "used", "keep_context=True"):
            backward(own, context)
        kept = forward(own)
        ids[0][0] = ids[0][1]  # written in place after the forward call
        changed = functional.build_schedule(layer.workspace, SMALL, layer.each(ids))
        with refused(ContextError, "schedule", "another call"):
            backward(changed, kept)
        layer.finish()


def recomputed(layer, schedule, given):
    return functional.recompute_forward_context(
        SMALL, layer.workspace, schedule, given[0], *given[2:4], *given[5:7]
    )


class Counted:
    """A barrier that notes its calls."""

    def __init__(self, barrier: Any, steps: list[str]) -> None:
        self._barrier, self._steps = barrier, steps

    def __call__(self, *arguments: Any) -> None:
        self._steps.append("barrier")
        self._barrier(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._barrier, name)


def test_debug_mode_launches_nothing_for_a_bad_id(device):
    case = exact_case(device)
    wrong = case.top_experts.clone()
    wrong[59, 1] = 99
    config = dataclasses.replace(SMALL, debug=True)
    with Layer(case, 2, config, device) as layer:
        with refused(RouteError, "99", "token 29", "k 1"):
            layer.build_schedule(with_routes(case, wrong))
        layer.finish()
        assert torch.equal(layer().output, forward_loop(case).bfloat16())


@pytest.mark.parametrize("ep_size", [1, 2])
def test_nan_router_weights_reach_their_token_only(device, ep_size):
    case = exact_case(device)
    weights = case.router_weights.clone()
    weights[11, 0] = weights[59, 1] = torch.nan
    found = run_layer(dataclasses.replace(case, router_weights=weights), ep_size, device=device)
    want = forward_loop(case).bfloat16()
    assert found.output[[11, 59]].isnan().all()
    want[[11, 59]] = torch.nan
    torch.testing.assert_close(found.output, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("ep_size", [1, 2])
def test_nan_weights_of_dropped_routes_are_not_read(device, ep_size):
    case = exact_case(device, kind="dropped")
    weights = case.router_weights.masked_fill(case.top_experts < 0, torch.nan)
    found = run_layer(dataclasses.replace(case, router_weights=weights), ep_size, device=device)
    assert torch.equal(found.output, forward_loop(case).bfloat16())


@pytest.mark.parametrize("ep_size", [1, 2])
def test_more_tokens_than_the_workspace_was_made_for(device, ep_size):
    case = exact_case(device)
    with Layer(case, ep_size, device=device, max_tokens=29) as layer:
        with refused(CapacityError, "max_tokens", "29", "60" if ep_size == 1 else "30"):
            layer.build_schedule()
        layer.finish()


@pytest.mark.parametrize("lengths", [[15, 45], [33, 27], [1, 1, 58]], ids=str)
def test_slices_of_tokens_are_good_input(device, lengths):
    """Router weights and ids are read word by word: they need no more than their own alignment."""
    case = integer_case(Shape(60, H, I, E, 3), device=device)
    with Layer(case, len(lengths), device=device, tokens_per_rank=lengths) as layer:
        layer.split = lambda tensor: list(tensor.split(lengths))
        assert torch.equal(layer().output, forward_loop(case).bfloat16())


@pytest.mark.gpu
def test_tensors_on_another_device_than_the_workspace():
    case = exact_case("cuda")
    with Layer(case, device="cuda") as layer:
        with refused(DeviceError, "top_experts", "cuda:0", "cpu", ".to("):
            functional.build_schedule(layer.workspace, SMALL, case.top_experts.cpu())
        schedule = layer.build_schedule()
        given = layer.arguments(case)
        for i, name in enumerate(NAMES):
            wrong = [*given]
            wrong[i] = wrong[i].cpu()
            with refused(DeviceError, name, "cuda:0", "cpu", ".to("):
                functional.forward(SMALL, layer.workspace, schedule, *wrong)
        assert torch.equal(layer(schedule=schedule).output, forward_loop(case).bfloat16())


@pytest.mark.gpu
def test_too_few_free_sms_of_a_gpu():
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    config = dataclasses.replace(SMALL, reserved_sms=sms - 2)
    with refused(ResourceError, "SMs", str(sms), "lower"):
        Layer(exact_case("cuda"), 2, config, "cuda")
