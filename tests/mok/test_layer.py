"""The layer against mok.functional and torch's autograd, in the emulator."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mok import functional
from mok.errors import DeviceError, DtypeError
from mok.layer import MoELayer
from mok.layer_spec import layer_spec
from mok.runtime.group import Group
from mok.tools.emulator import Emulator
from tests.module_helpers import (
    SMALL,
    assert_gradient,
    assert_same,
    small_layer,
    take_grads,
    torch_of,
)

pytestmark = pytest.mark.emulator


@pytest.fixture(scope="module", autouse=True)
def emulator() -> Iterator[Emulator]:
    with Emulator("sm_90a", num_sms=6) as emulator:
        yield emulator
        functional.clear_workspace_cache()


def tensors(*shape: int, experts: int = 2, topk: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """(x [*shape, 64] and router weights that need gradients, ids)."""
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(*shape, 64, generator=rng).bfloat16().requires_grad_()
    weights = torch.rand(*shape, topk, generator=rng).requires_grad_()
    ids = torch.rand(*shape, experts, generator=rng).argsort(-1)[..., :topk].contiguous()
    return x, weights, ids


def grad_like(out: Tensor) -> Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(out.dtype)


def test_output_equals_functional() -> None:
    layer, (x, weights, ids) = small_layer(4, 2), tensors(3, 8, experts=4, topk=2)
    out = layer(x, weights, ids)
    assert out.shape == x.shape and out.dtype == torch.bfloat16
    workspace = functional.create_workspace(
        SMALL, max_tokens=24, hidden_size=64, intermediate_size=64, num_experts=4, topk=2
    )
    with workspace:
        schedule = functional.build_schedule(workspace, SMALL, ids.view(24, 2))
        expected, _ = functional.forward(
            SMALL, workspace, schedule, x.detach().view(24, 64), weights.detach().view(24, 2),
            None, None, None, layer.routed_gate, layer.routed_up, layer.routed_down,
        )  # fmt: skip
    assert torch.equal(out.view(24, 64), expected)


# Half-way between two BF16 values, so that saved gate and up are on the side of the exact ones.
@pytest.mark.parametrize("limit", [None, 1 + 2**-8])
def test_gradients_against_autograd(limit: float | None) -> None:
    """Gated shared expert of another width, an expert without routes, dropped routes, zero and
    negative router weights."""
    layer = small_layer(4, 2, shared_intermediate_size=128, gated_shared=True, swiglu_limit=limit)
    x, weights, ids = tensors(40, experts=3, topk=2)
    ids[::5, 0] = -1
    ids[7] = -1
    with torch.no_grad():
        weights[:, 1] -= 0.5
        weights[3] = 0
    out = layer(x, weights, ids)
    dy = grad_like(out)
    out.backward(dy)
    expected, leaves = torch_of(layer, x, weights, ids)
    expected.backward(dy.float())
    names = ["x", "weights", *(n for n, _ in layer.named_parameters())]
    for name, found, leaf in zip(names, [x, weights, *layer.parameters()], leaves, strict=True):
        assert_gradient(name, found.grad, leaf.grad)
    assert not weights.grad[ids == -1].any()
    assert all(not p.grad[3].any() for p in layer.routed_parameters())


def test_router_trains() -> None:
    layer, (x, _, _) = small_layer(4, 2, router="sigmoid"), tensors(24)
    out = layer(x)
    dy = grad_like(out)
    out.backward(dy)
    y = x.detach().float().requires_grad_()
    router = copy.deepcopy(layer.router).float()
    router.weight.grad = None
    _, weights, ids = router(y)
    expected, leaves = torch_of(layer, y, weights, ids)
    expected.backward(dy.float())
    weights.backward(leaves[1].grad)
    assert_gradient("router", layer.router.weight.grad, router.weight.grad)
    assert_gradient("x", x.grad, y.grad + leaves[0].grad)


def test_no_grad_stores_nothing_and_has_the_same_bits() -> None:
    layer, (x, weights, ids) = small_layer(), tensors(24)
    out = layer(x, weights, ids)
    assert out.requires_grad
    with torch.no_grad():
        again = layer(x, weights, ids)
    assert again.grad_fn is None and torch.equal(again, out)
    frozen = small_layer().requires_grad_(False)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        assert torch.equal(frozen(x.detach(), weights.detach(), ids), out)
    assert not kept


def forwards(layer: MoELayer) -> dict[str, Callable[..., Tensor]]:
    again = copy.deepcopy(layer)
    again.recompute = True

    def offloaded(*args: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return layer(*args)

    return {
        "recompute": again,
        "checkpoint": lambda *args: checkpoint(layer, *args, use_reentrant=False),
        "reentrant checkpoint": lambda *args: checkpoint(layer, *args, use_reentrant=True),
        "offloaded": offloaded,
        "repeat": layer,
    }


def test_checkpointing_changes_no_bit() -> None:
    layer = small_layer(2, 1, shared_intermediate_size=64)
    x, weights, ids = tensors(24)
    out = layer(x, weights, ids)
    dy = grad_like(out)
    out.backward(dy)
    expected = take_grads(layer, x, weights)
    for name, run in forwards(layer).items():
        again = run(x, weights, ids)
        again.backward(dy)
        assert torch.equal(again, out), name
        source = run if isinstance(run, MoELayer) else layer
        assert_same(take_grads(source, x, weights), expected)


def test_recompute_keeps_only_inputs() -> None:
    layer, (x, weights, ids) = small_layer(recompute=True), tensors(24)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x, weights, ids)
    inputs = {t.data_ptr() for t in (x, ids, *layer.parameters())}
    others = [t for t in kept if t.data_ptr() not in inputs]
    assert sum(t.numel() for t in others) <= weights.numel()


def test_backward_twice() -> None:
    layer, (x, weights, ids) = small_layer(), tensors(24)
    out = layer(x, weights, ids)
    dy = grad_like(out)
    out.backward(dy, retain_graph=True)
    first = take_grads(layer, x, weights)
    out.backward(dy)
    assert_same(take_grads(layer, x, weights), first)
    # The last time did not retain the graph: torch has let go of what it saved.
    with pytest.raises(RuntimeError, match="second time"):
        out.backward(dy)


def test_main_grad_is_added_to() -> None:
    layer, (x, weights, ids) = small_layer(shared_intermediate_size=64), tensors(24)
    out = layer(x, weights, ids)
    dy = grad_like(out)
    out.backward(dy)
    plain = take_grads(layer, x, weights)
    layer.main_grad = True
    for parameter in layer.routed_parameters():
        parameter.main_grad = torch.full_like(parameter, 2, dtype=torch.float32)
    for _ in range(2):
        layer(x, weights, ids).backward(dy)
    for name, parameter in layer.named_parameters():
        total = plain[name].float() * 2
        if name.startswith("routed"):
            assert parameter.grad is None
            torch.testing.assert_close(parameter.main_grad, total + 2, rtol=1e-2, atol=1e-2)
            assert_gradient(name, parameter.main_grad - 2, total)
        else:  # without main_grad: grad as ever
            assert_gradient(name, parameter.grad, total)


def test_main_grads_must_fit() -> None:
    layer, (x, weights, ids) = small_layer(main_grad=True), tensors(24)
    layer.routed_gate.main_grad = "x"
    with pytest.raises(DtypeError, match="main_grad must be a tensor; found a str"):
        layer(x, weights, ids)
    layer.routed_gate.main_grad = torch.zeros(2, 64, 64, device="meta")
    with pytest.raises(DeviceError, match="main_grad must be on x's device, cpu; found meta"):
        layer(x, weights, ids)
    layer.routed_gate.main_grad = torch.zeros(2, 64, 32)
    with pytest.raises(ValueError, match="main_grad of routed_gate must have its shape"):
        layer(x, weights, ids).sum().backward()
    layer.routed_gate.main_grad = torch.zeros(2, 64, 64)
    layer.routed_up.main_grad = torch.zeros(2, 64, 64, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="one dtype"):
        layer(x, weights, ids).sum().backward()


def test_fp32_parameters_and_input() -> None:
    layer, (x, weights, ids) = small_layer(), tensors(24)
    wide = copy.deepcopy(layer).float()
    y = x.detach().float().requires_grad_()
    out, wide_out = layer(x, weights, ids), wide(y, weights, ids)
    assert wide_out.dtype == torch.float32 and torch.equal(wide_out.bfloat16(), out)
    dy = grad_like(out)
    wide_out.backward(dy.float())
    fp32 = take_grads(wide, y)
    out.backward(dy)
    for name, grad in take_grads(layer, x).items():
        assert fp32[name].dtype == torch.float32
        assert torch.equal(fp32[name].bfloat16(), grad), name
    assert any(bool((g != g.bfloat16()).any()) for g in fp32.values())


@pytest.mark.parametrize("shape", [(0,), (2, 0), (1,)])
def test_few_tokens(shape: tuple[int, ...]) -> None:
    layer, (x, weights, ids) = small_layer(shared_intermediate_size=64), tensors(*shape)
    out = layer(x, weights, ids)
    assert out.shape == x.shape
    out.sum().backward()
    assert x.grad.shape == x.shape and weights.grad.shape == weights.shape
    for parameter in layer.parameters():
        assert parameter.grad is not None
        assert bool(parameter.grad.any()) <= bool(x.numel())


def test_workspace_grows_and_earlier_calls_keep_theirs() -> None:
    layer = small_layer()
    x, weights, ids = tensors(24)
    out = layer(x, weights, ids)
    dy = grad_like(out)
    out.backward(dy, retain_graph=True)
    expected = take_grads(layer, x, weights)
    assert layer._max_tokens(0) == 128
    many = layer(*(t.detach() for t in tensors(130)))
    assert layer._max_tokens(0) == 256
    assert torch.equal(many[:1], layer(*(t.detach()[:1] for t in tensors(130))))
    out.backward(dy)
    assert_same(take_grads(layer, x, weights), expected)


def test_max_tokens_is_a_limit() -> None:
    layer = small_layer(max_tokens=16)
    with pytest.raises(RuntimeError, match="max_tokens = 16"):
        layer(*tensors(17))


def test_equal_layers_share_a_workspace() -> None:
    first, second, other = small_layer(), small_layer(), small_layer(topk=2)
    assert first._layer == second._layer != other._layer
    device = torch.device("cpu")
    assert first.spec.workspace(128, device)[1] is second.spec.workspace(128, device)[1]
    assert layer_spec(first._layer) == first.spec


def test_frozen_experts() -> None:
    layer, (x, weights, ids) = small_layer(shared_intermediate_size=64), tensors(24)
    for parameter in layer.routed_parameters():
        parameter.requires_grad_(False)
    layer(x, weights, ids).sum().backward()
    assert all(p.grad is None for p in layer.routed_parameters())
    assert layer.shared_gate.grad is not None and x.grad is not None


def test_virtual_ranks_change_no_bit() -> None:
    """Of outputs and gradients of x, router weights and routed experts; T not a multiple of EP."""
    one, (x, weights, ids) = small_layer(3, 2), tensors(23, experts=3, topk=2)
    out = one(x, weights, ids)
    dy = grad_like(out)
    out.backward(dy)
    expected = take_grads(one, x, weights)
    several = small_layer(3, 2, group=Group.virtual(2))
    assert all(
        torch.equal(a, b) for a, b in zip(one.parameters(), several.parameters(), strict=True)
    )
    again = several(x, weights, ids)
    again.backward(dy)
    assert torch.equal(again, out)
    assert_same(take_grads(several, x, weights), expected)


def test_shared_gradients_of_virtual_ranks_are_summed() -> None:
    layer = small_layer(3, 2, group=Group.virtual(2), shared_intermediate_size=64)
    x, weights, ids = tensors(23, experts=3, topk=2)
    out = layer(x, weights, ids)
    dy = grad_like(out)
    out.backward(dy)
    expected, leaves = torch_of(layer, x, weights, ids)
    expected.backward(dy.float())
    for (name, parameter), leaf in zip(layer.named_parameters(), leaves[2:], strict=True):
        assert_gradient(name, parameter.grad, leaf.grad)


def test_training_lowers_the_loss() -> None:
    layer = small_layer(2, 1, router="softmax", dtype=torch.float32)
    x, _, _ = tensors(32)
    x = x.detach()
    target = torch.tanh(x.float().roll(1, 1))
    optimizer = torch.optim.Adam(layer.parameters(), lr=2e-2)
    losses = []
    for _ in range(20):
        loss = (layer(x).float() - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0] / 2, losses


def test_copies_are_independent() -> None:
    layer, (x, weights, ids) = small_layer(), tensors(24)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.routed_down.zero_()
    assert layer(x, weights, ids).any() and not other(x, weights, ids).any()


def test_noncontiguous_and_unaligned_arguments() -> None:
    layer, (x, weights, ids) = small_layer(4, 2), tensors(24, experts=4, topk=2)
    out = layer(x, weights, ids)
    wide = torch.empty(24, 128, dtype=torch.bfloat16)
    wide[:, 32:96] = x.detach()
    odd = torch.empty(24 * 2 + 1)[1:].view(24, 2).copy_(weights.detach())
    assert odd.data_ptr() % 16
    assert torch.equal(layer(wide[:, 32:96], odd, ids.t().contiguous().t()), out)
    out.backward(torch.ones(()).bfloat16().expand(24, 64))
    expected = take_grads(layer, x, weights)
    layer(x, weights, ids).sum().backward()
    assert_same(take_grads(layer, x, weights), expected)


def test_a_clamp_is_kept_as_a_number():
    layer = small_layer(4, 2, swiglu_limit=torch.tensor(0.5))
    assert layer.swiglu_limit == 0.5 and type(layer.swiglu_limit) is float
    assert small_layer(4, 2).swiglu_limit is None
