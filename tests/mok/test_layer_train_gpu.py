"""Training steps of the layer at real sizes on a GPU."""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mok import functional
from mok.call import LaunchFacts
from mok.config import Config, Shape
from mok.layer import MoELayer
from mok.models import MODELS
from mok.reference import GRADIENT_LIMIT, Case, backward_oracle, random_case, relative_l2
from mok.runtime.device import device_info
from mok.runtime.group import Group
from tests.module_helpers import COSINE_LIMIT, assert_same, take_grads

pytestmark = pytest.mark.gpu
TOKENS = 4096
WEIGHTS = ("routed_gate", "routed_up", "routed_down", "shared_gate", "shared_up", "shared_down")


@pytest.fixture(autouse=True)
def _memory_back() -> Iterator[None]:
    """Symmetric memory does not come from torch's allocator, so that must not keep what it has."""
    yield
    functional.clear_workspace_cache()
    gc.collect()
    torch.cuda.empty_cache()


def scaled(name: str) -> Shape:
    """A model's layer, with fewer experts where weights and FP32 gradients would not fit."""
    shape = Shape.of_model(MODELS[name], TOKENS)
    expert_bytes = 3 * 2 * shape.hidden_size * shape.intermediate_size
    fit = device_info().memory_bytes // 8 // expert_bytes
    return dataclasses.replace(shape, num_experts=max(shape.topk, min(shape.num_experts, fit)))


def layer_of(case: Case, **options: Any) -> MoELayer:
    s = case.shape
    layer = MoELayer(
        s.hidden_size, s.intermediate_size, s.num_experts, s.topk,
        shared_intermediate_size=s.shared_intermediate_size, swiglu_limit=case.swiglu_limit,
        device=case.x.device, **options,
    )  # fmt: skip
    values = [case.routed.gate, case.routed.up, case.routed.down]
    if case.shared:
        values += [w[0] for w in (case.shared.gate, case.shared.up, case.shared.down)]
    with torch.no_grad():
        for name, value in zip(WEIGHTS, values, strict=False):
            getattr(layer, name).copy_(value)
    return layer


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    return (
        case.x.clone().requires_grad_(),
        case.router_weights.clone().requires_grad_(),
        case.top_experts,
    )


def cosine(found: Tensor, want: Tensor) -> float:
    """In FP64, part by part: copies of a model's gradients would not fit."""
    parts = [
        torch.stack([a @ b, a @ a, b @ b])
        for a, b in (
            (a.double(), b.double())
            for a, b in zip(
                found.flatten().split(1 << 27), want.flatten().split(1 << 27), strict=True
            )
        )
    ]
    product, a, b = torch.stack(parts).sum(0).tolist()
    return float(product / math.sqrt(a * b))


def gradient(case: Case) -> Tensor:
    rng = torch.Generator(device="cuda").manual_seed(9)
    return torch.randn(case.x.shape, generator=rng, device="cuda", dtype=torch.bfloat16)


def step(layer: MoELayer, case: Case, dy: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
    x, weights, ids = inputs(case)
    out = layer(x, weights, ids)
    out.backward(dy)
    return out.detach(), take_grads(layer, x, weights)


@pytest.mark.alone
@pytest.mark.parametrize("name", MODELS)
def test_every_model_trains(name: str) -> None:
    case = random_case(scaled(name), kind="skewed", device="cuda", seed=2)
    dy = gradient(case)
    _, grads = step(layer_of(case), case, dy)
    expected = backward_oracle(case, dy)
    named = {"input 0": expected.x, "input 1": expected.router_weights}
    named |= {f"routed_{n}": getattr(expected.routed, n) for n in ("gate", "up", "down")}
    if expected.shared is not None:
        named |= {f"shared_{n}": getattr(expected.shared, n)[0] for n in ("gate", "up", "down")}
    assert named.keys() == grads.keys()
    for key, want in named.items():
        found = grads[key]
        error = relative_l2(found, want)
        print(f"{name} E {case.shape.num_experts} {key}: {error:.2e}")
        assert error <= GRADIENT_LIMIT and cosine(found, want) >= COSINE_LIMIT, key


@pytest.fixture(scope="module")
def case() -> Case:
    return random_case(Shape(TOKENS, 2048, 768, 64, 8, 1, 512), kind="skewed", device="cuda")


def test_the_same_bits_however_it_is_run(case: Case) -> None:
    """Repeated, recomputed, checkpointed, offloaded, with FP32 parameters, on virtual ranks."""
    layer, dy = layer_of(case), gradient(case)
    out, expected = step(layer, case, dy)
    for _ in range(20):
        again, grads = step(layer, case, dy)
        assert torch.equal(again, out)
        assert_same(grads, expected)
    with torch.no_grad():
        assert torch.equal(layer(*inputs(case)), out)
    layer.recompute = True
    assert_same(step(layer, case, dy)[1], expected)
    layer.recompute = False
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        assert_same(step(layer, case, dy)[1], expected)
    wide = layer_of(case, dtype=torch.float32)
    for name, grad in step(wide, case, dy)[1].items():
        assert torch.equal(grad.to(expected[name].dtype), expected[name]), name
    for ep_size in (2, 4, 8):
        again, grads = step(layer_of(case, group=Group.virtual(ep_size)), case, dy)
        assert torch.equal(again, out)
        for name, grad in grads.items():
            assert name.startswith("shared") or torch.equal(grad, expected[name]), name


# The limit lies between two BF16 values, so that rounding gate and up does not move them across it.
@pytest.mark.parametrize("limit", [None, 1 + 2.0**-8], ids=["", "clamp"])
@pytest.mark.parametrize("topk", range(1, 9))
def test_every_topk_is_near_fp32(topk: int, limit: float | None) -> None:
    shape = Shape(2048, 1024, 512, 16, topk, 1, 256)
    case = random_case(shape, kind="skewed", swiglu_limit=limit, device="cuda", seed=topk)
    dy = gradient(case)
    _, grads = step(layer_of(case), case, dy)
    expected = backward_oracle(case, dy)
    assert expected.shared is not None
    named = {"input 0": expected.x, "input 1": expected.router_weights}
    named |= {f"routed_{n}": getattr(expected.routed, n) for n in ("gate", "up", "down")}
    named |= {f"shared_{n}": getattr(expected.shared, n)[0] for n in ("gate", "up", "down")}
    for key, want in named.items():
        assert relative_l2(grads[key], want) <= GRADIENT_LIMIT, key
        assert cosine(grads[key], want) >= COSINE_LIMIT, key


# Three settings of each tunable (two of pairs), and what must differ between their launches.
Recorded = Callable[[LaunchFacts, LaunchFacts], object]
TUNABLES: dict[str, tuple[tuple[float, ...], Recorded]] = {
    "minibatch_size": ((128, 512, 2048), lambda fwd, bwd: (fwd.ring_slots, bwd.ring_slots)),
    "macrobatch_size": ((8192, 20480, 40960), lambda fwd, bwd: (fwd.ring, bwd.ring)),
    "fwd_num_comm_sms": ((2, 8, 24), lambda fwd, bwd: fwd.comm_ctas),
    "bwd_num_comm_sms": ((2, 8, 24), lambda fwd, bwd: bwd.comm_ctas),
    "schedule_capacity_multiplier": ((1e-6, 0.015, 1.0), lambda fwd, bwd: (fwd.grid, bwd.grid)),
    "pairs": ((True, False), lambda fwd, bwd: (fwd.pair, bwd.pair)),
}


def recorded_step(
    layer: MoELayer, case: Case, dy: Tensor
) -> tuple[Tensor, dict[str, Tensor | None], list[LaunchFacts]]:
    """As ``step``, and how the megakernels of forward and of backward were launched."""
    x, weights, ids = inputs(case)
    out = layer(x, weights, ids)
    _, workspace = layer.spec.workspace(layer._max_tokens(len(x)), x.device)
    facts = [workspace.last_launch]
    out.backward(dy)
    facts.append(workspace.last_launch)
    return out.detach(), take_grads(layer, x, weights), facts


def assert_no_gradient_depends_on(
    name: str, settings: Sequence[float], recorded: Recorded, case: Case, dy: Tensor, base: Config,
    precision: str = "bf16",
) -> list[int]:  # fmt: skip
    """On one rank, and on two where communication takes part; backward's macrobatches on one rank."""
    layer = layer_of(case, config=base, precision=precision)
    out, expected = step(layer, case, dy)
    rows = sum(-(-n // 128) * 128 for n in case.top_experts.flatten().bincount().tolist())
    macrobatches = []
    for group in (None, Group.virtual(2, case.x.device)):
        seen = []
        for value in settings:
            config = dataclasses.replace(base, **{name: value})
            layer = layer_of(case, config=config, group=group, precision=precision)
            again, grads, (forward, backward) = recorded_step(layer, case, dy)
            assert forward.kernel == "forward" and backward.kernel == "backward"
            print(name, value, forward, backward)
            seen.append(recorded(forward, backward))
            if group is None:
                macrobatches.append(-(-rows // backward.ring))
            assert torch.equal(again, out), value
            for key, grad in grads.items():
                same = torch.equal(grad, expected[key])
                assert same or (group is not None and key.startswith("shared")), (value, key)
        if group is None and name.endswith("_comm_sms") and precision == "bf16":
            assert seen == [0] * len(seen)  # nothing to communicate
        else:
            assert len(set(seen)) == len(seen), seen
    return macrobatches


@pytest.mark.parametrize("name", TUNABLES)
def test_no_tunable_changes_a_gradients_bit(case: Case, name: str) -> None:
    base = Config(8, 8, minibatch_size=512, macrobatch_size=8192)
    macrobatches = assert_no_gradient_depends_on(name, *TUNABLES[name], case, gradient(case), base)
    if name == "macrobatch_size":
        assert macrobatches == [5, 2, 1]


def test_main_grad_accumulates_in_fp32(case: Case) -> None:
    layer, dy = layer_of(case, main_grad=True), gradient(case)
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    step(layer, case, dy)
    once = [p.main_grad.clone() for p in layer.parameters()]
    step(layer, case, dy)
    for parameter, first in zip(layer.parameters(), once, strict=True):
        assert parameter.grad is None
        assert relative_l2(parameter.main_grad, 2 * first) <= 1e-6


class Captured:
    """Forward and backward of a layer as one CUDA graph."""

    def __init__(self, layer: MoELayer, case: Case, dy: Tensor, pool: Any = None) -> None:
        self.x, self.weights, ids = inputs(case)
        self.ids, self.dy, self.layer = ids.clone(), dy.clone(), layer
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.run()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.out, self.grads = self.run()

    def run(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        out = self.layer(self.x, self.weights, self.ids)
        wanted = [self.x, self.weights, *self.layer.parameters()]
        return out, torch.autograd.grad(out, wanted, self.dy)

    def replay(self, case: Case, dy: Tensor) -> None:
        with torch.no_grad():
            self.x.copy_(case.x)
            self.weights.copy_(case.router_weights)
        self.ids.copy_(case.top_experts)
        self.dy.copy_(dy)
        self.graph.replay()

    def check(self, case: Case, dy: Tensor) -> None:
        out, grads = step(self.layer, case, dy)
        names = ["input 0", "input 1", *(n for n, _ in self.layer.named_parameters())]
        assert torch.equal(self.out, out)
        assert_same(dict(zip(names, self.grads, strict=True)), {n: grads[n] for n in names})


def test_graphs_replay_other_inputs_and_routings(case: Case) -> None:
    """Two layers as graphs of one pool, replayed in turn."""
    dy = gradient(case)
    first = Captured(layer_of(case), case, dy)
    other = layer_of(case)
    with torch.no_grad():
        other.routed_down.mul_(-1)
    second = Captured(other, case, dy, pool=first.graph.pool())
    for kind in ("one_expert", "dropped", "random"):
        new = random_case(case.shape, kind=kind, seed=7, device="cuda")
        for captured in (first, second):
            captured.replay(new, dy)
            torch.cuda.synchronize()
            kept = [t.clone() for t in (captured.out, *captured.grads)]
            captured.check(new, dy)
            again = (captured.out, *captured.grads)
            assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


def test_compiled_with_inductor(case: Case) -> None:
    layer, dy = layer_of(case), gradient(case)
    out, expected = step(layer, case, dy)
    x, weights, ids = inputs(case)
    compiled = torch.compile(layer, fullgraph=True)
    again = compiled(x, weights, ids)
    again.backward(dy)
    assert torch.equal(again, out)
    assert_same(take_grads(layer, x, weights), expected)
