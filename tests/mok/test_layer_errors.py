"""What the layer refuses, and what needs no kernel."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from mok.errors import CapacityError, DeviceError, DtypeError, MokError, ShapeError
from mok.layer import MoELayer
from mok.layer_spec import layer_spec
from mok.router import Router
from mok.runtime.group import Group
from tests.module_helpers import SMALL, small_layer

X = torch.zeros(4, 64, dtype=torch.bfloat16)
WEIGHTS, IDS = torch.zeros(4, 1), torch.zeros(4, 1, dtype=torch.int64)


class Processes(Group):
    """A group of several processes, as far as making a layer asks."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__(size, (rank,), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((X.half(), WEIGHTS, IDS), DtypeError, "bfloat16 or float32"),
        ((X[:, :32], WEIGHTS, IDS), ShapeError, r"\[\.\.\., 64\]"),
        ((X, WEIGHTS), ShapeError, "needs router_weights and top_experts"),
        ((X,), ShapeError, "needs router_weights and top_experts"),
        ((X, WEIGHTS, IDS), DeviceError, "CUDA devices"),
        ((X, WEIGHTS[:3], IDS), ShapeError, "router_weights must have the shape"),
        ((X, WEIGHTS, IDS[:3]), ShapeError, "top_experts must have the shape"),
        ((X, WEIGHTS.T, IDS.T), ShapeError, r"router_weights must have the shape .* K = 1"),
        ((X, WEIGHTS, IDS.T), ShapeError, r"top_experts must have the shape .* K = 1"),
        ((X, WEIGHTS, IDS.to("meta")), DeviceError, "top_experts must be on x's device"),
        ((X, WEIGHTS.to("meta"), IDS), DeviceError, "router_weights must be on x's device"),
        ((None, WEIGHTS, IDS), DtypeError, "x must be a tensor; found a NoneType"),
        ((X, WEIGHTS.tolist(), IDS), DtypeError, "router_weights must be a tensor; found a list"),
        ((X, WEIGHTS, IDS.tolist()), DtypeError, "top_experts must be a tensor; found a list"),
        ((X, WEIGHTS.long(), IDS), DtypeError, "router_weights must be floating point"),
        ((X, WEIGHTS + 1j, IDS), DtypeError, "router_weights must be floating point"),
    ],
)
def test_arguments(arguments: tuple[Any, ...], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        small_layer()(*arguments)


def test_parameters_without_memory_compute_nothing() -> None:
    """The operator would take them for a call that only asks for shapes."""
    with pytest.raises(DeviceError, match="parameters must be on x's device"):
        small_layer(device="meta")(X, WEIGHTS, IDS)


@pytest.mark.parametrize("returned", [None, "abc", torch.zeros(4, 1), (WEIGHTS,)])
def test_a_router_that_returns_something_else(returned: Any) -> None:
    class Other(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return returned

    with pytest.raises(DtypeError, match="must return \\(logits, weights, ids\\)"):
        small_layer(router=Other())(X)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"config": {}}, DtypeError, "config must be a Config; found a dict"),
        ({"config": "h200"}, DtypeError, "config must be a Config"),
        ({"group": "x"}, DtypeError, "group must be a Group; found a str"),
        ({"router": 3}, DtypeError, "router must be a module"),
        ({"router": Router}, DtypeError, "router must be a module"),
        ({"router": "tanh"}, ShapeError, "'softmax' or 'sigmoid'"),
        ({"swiglu_limit": "x"}, DtypeError, "swiglu_limit must be a number or None"),
        ({"swiglu_limit": "7"}, DtypeError, "swiglu_limit must be a number or None"),
        ({"swiglu_limit": -1.0}, ShapeError, "swiglu_limit must be at least 0"),
        ({"swiglu_limit": float("nan")}, ShapeError, "swiglu_limit must be at least 0"),
        ({"max_tokens": -1}, ShapeError, "max_tokens must be at least 0"),
        ({"max_tokens": 1.5}, DtypeError, "max_tokens must be an int"),
        ({"device": "nodevice"}, DeviceError, "one that torch knows; found 'nodevice'"),
    ],
)
def test_options_of_another_kind(options: Any, error: type[MokError], match: str) -> None:
    with pytest.raises(error, match=match):
        MoELayer(64, 64, 2, 1, **options)


def test_routes_are_for_layers_without_a_router() -> None:
    with pytest.raises(ShapeError, match="layers without a router"):
        small_layer(router="softmax")(X, WEIGHTS, IDS)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"dtype": torch.float16}, DtypeError),
        ({"gated_shared": True}, ShapeError),
        ({"shared_intermediate_size": 100}, ShapeError),
        ({"group": Processes(2, 0)}, CapacityError),
        ({"topk": 40}, ShapeError),
    ],
)
def test_options(options: dict[str, Any], error: type[MokError]) -> None:
    with pytest.raises(error):
        small_layer(**options)


def test_only_own_experts_are_made() -> None:
    layers = [small_layer(5, 2, group=Processes(2, r), max_tokens=8) for r in range(2)]
    assert [len(layer.routed_gate) for layer in layers] == [3, 2]
    whole = small_layer(5, 2, group=Group.virtual(2))
    for name in ("routed_gate", "routed_up", "routed_down"):
        parts = torch.cat([getattr(layer, name) for layer in layers])
        assert torch.equal(parts, getattr(whole, name))
        assert float(parts.detach().float().std()) == pytest.approx(3**-0.5 / 8, rel=0.1)


def test_a_router_module_is_used_as_it_is() -> None:
    router = Router(64, 2, 1, score="sigmoid", expert_bias=True)
    layer = MoELayer(64, 64, 2, 1, router=router, config=SMALL)
    assert layer.router is router
    assert {"router.weight", "router.expert_bias"} <= layer.state_dict().keys()


def test_unknown_layer_number() -> None:
    with pytest.raises(MokError, match="register_layer"):
        layer_spec(10**6)


def test_meta_device() -> None:
    layer = small_layer(shared_intermediate_size=64, router="softmax", device="meta")
    assert all(p.is_meta for p in layer.parameters())


def test_imports_without_the_kernel_language() -> None:
    code = (
        "import sys, mok\n"
        "assert not {'torch', 'cuda', 'cutlass'} & set(sys.modules)\n"
        "mok.MoELayer, mok.Config, mok.Shape, mok.functional, mok.replace_moe\n"
        "mok.MoELayer(64, 64, 2, 1, router='softmax')\n"
        "bad = [m for m in ('cutlass', 'transformers') if m in sys.modules]\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
