"""The layer with torch.compile, autocast, DDP and FSDP2, in the emulator."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mok import functional, ops
from mok.router import Router
from mok.tools.emulator import Emulator
from tests.module_helpers import assert_same, small_layer, take_grads

pytestmark = pytest.mark.emulator
BACKEND = "aot_eager"  # everything of torch.compile but the code generator of other operators


@pytest.fixture(scope="module", autouse=True)
def emulator() -> Iterator[Emulator]:
    with Emulator("sm_90a", num_sms=6) as emulator:
        yield emulator
        functional.clear_workspace_cache()


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def tokens(count: int = 24) -> Tensor:
    x = torch.randn(count, 64, generator=torch.Generator().manual_seed(3))
    return x.bfloat16().requires_grad_()


class Block(nn.Module):
    """Dense layers around an MoE layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(64, 64, dtype=torch.bfloat16)
        router = Router(64, 2, 1, score="sigmoid", normalize=False, dtype=torch.bfloat16)
        self.moe = small_layer(2, 1, router=router, **options)
        self.after = nn.Linear(64, 64, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(x + self.moe(self.before(x)))


def run(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Output, and gradients of x and the parameters."""
    out = model(x)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).bfloat16())
    return out.detach(), take_grads(model, x)


def unwrapped(grads: dict[str, Tensor | None], prefix: str) -> dict[str, Tensor | None]:
    return {name.removeprefix(prefix): grad for name, grad in grads.items()}


@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_as_one_graph(recompute: bool) -> None:
    model, x = Block(shared_intermediate_size=64, recompute=recompute), tokens()
    out, grads = run(model, x)
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND)
    again, compiled_grads = run(compiled, x)
    assert torch.equal(again, out)
    assert_same(unwrapped(compiled_grads, "_orig_mod."), grads)
    with torch.no_grad():
        assert torch.equal(compiled(x), out)


def test_compiled_with_a_changing_number_of_tokens() -> None:
    """Beyond the first workspace, too, and back."""
    model = Block()
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND, dynamic=True)
    for count in (24, 31, 130, 24):
        x = tokens(count)
        out, grads = run(model, x)
        again, compiled_grads = run(compiled, x)
        assert torch.equal(again, out)
        assert_same(unwrapped(compiled_grads, "_orig_mod."), grads)


def test_compiled_with_main_grad() -> None:
    model, x = Block(), tokens()
    _, grads = run(model, x)
    model.moe.main_grad = True
    for parameter in model.moe.routed_parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND)
    run(compiled, x)
    for name in ("routed_gate", "routed_up", "routed_down"):
        parameter = getattr(model.moe, name)
        assert parameter.grad is None
        assert torch.equal(parameter.main_grad.bfloat16(), grads[f"moe.{name}"])


def test_equal_layers_compile_once() -> None:
    """As for the blocks of a model that are compiled one by one."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    x = tokens()
    with torch.no_grad():
        for _ in range(3):
            block = Block()
            block.compile(fullgraph=True, backend=backend)
            block(x)
    assert len(graphs) == 1


def test_operators_obey_the_rules_of_torch_library() -> None:
    layer, x = small_layer(2, 1, shared_intermediate_size=64), tokens()
    weights = torch.rand(24, 1).requires_grad_()
    ids = torch.arange(24)[:, None] % 2
    parameters = [getattr(layer, name) for name in ops.WEIGHTS]
    call = (x, ids, weights, *parameters, torch.rand(24).requires_grad_(), None)
    torch.library.opcheck(ops.forward, (layer._layer, 128, False, *call, [], []))
    # Parts of a context are never written, so comparing its values would compare old memory.
    rules = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ops.forward, (layer._layer, 128, True, *call, [], []), test_utils=rules)
    with torch.no_grad():
        out, saved = ops.forward(layer._layer, 128, True, *call, [], [])
    rest = [t.detach() if isinstance(t, Tensor) else t for t in call]
    backward = (layer._layer, 128, saved, torch.randn_like(out), *rest)
    torch.library.opcheck(ops.backward, backward)
    main = [torch.zeros_like(w, dtype=torch.float32) for w in rest[3:9]]
    torch.library.opcheck(ops.backward_add, (*backward, main))


def test_autocast() -> None:
    """FP32 around the layer under autocast: its results are those of BF16 inputs."""
    layer, x = small_layer(2, 1, router="sigmoid"), tokens()
    out, grads = run(layer, x)
    wide = copy.deepcopy(layer).float()
    y = x.detach().float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = wide(y)
    assert again.dtype == torch.float32 and torch.equal(again.bfloat16(), out)
    again.backward(
        torch.randn(24, 64, generator=torch.Generator().manual_seed(4)).bfloat16().float()
    )
    for name, grad in take_grads(wide, y).items():
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad, grads[name].float(), rtol=1e-2, atol=1e-3)


@pytest.fixture
def one_process() -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_ddp_leaves_routed_experts_alone(one_process: None) -> None:
    from torch.nn.parallel import DistributedDataParallel as DDP

    model, x = Block(), tokens()
    out, grads = run(model, x)
    routed = {id(p) for p in model.moe.routed_parameters()}
    names = [name for name, p in model.named_parameters() if id(p) in routed]
    DDP._set_params_and_buffers_to_ignore_for_model(model, names)
    ddp = DDP(model)
    again, ddp_grads = run(ddp, x)
    assert torch.equal(again, out)
    assert_same(unwrapped(ddp_grads, "module."), grads)


def test_fsdp2_shards_the_dense_rest(one_process: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    model, x = Block(shared_intermediate_size=64), tokens()
    out, grads = run(model, x)
    ignored = set(model.moe.routed_parameters())
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), ignored_params=ignored)
    again, sharded = run(model, x)
    assert torch.equal(again, out)
    assert isinstance(model.moe.shared_gate, DTensor)
    assert not isinstance(model.moe.routed_gate, DTensor)
    full = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in sharded.items()}
    assert_same(full, grads)
