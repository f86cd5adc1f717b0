"""Blocks of transformers as layers: routing, state dicts, results, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mok
from mok.errors import MokError, ShapeError
from mok.hf import HFLayer, is_moe_block
from mok.layer import MoELayer
from mok.reference import relative_l2
from mok.router import Router
from tests.module_helpers import SMALL, torch_layer

# ---------------------------------------------------------------------- transformers 4, imitated


class MLP(nn.Module):
    def __init__(
        self, inner: int = 64, names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    ):
        super().__init__()
        for name, (rows, columns) in zip(
            names, [(inner, 64), (inner, 64), (64, inner)], strict=True
        ):
            setattr(self, name, nn.Linear(columns, rows, bias=False))
        self.act_fn = nn.SiLU()


class MixtralSparseMoeBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.top_k, self.jitter_noise = 2, 0.0
        self.gate = nn.Linear(64, 4, bias=False)
        self.experts = nn.ModuleList(MLP(names=("w1", "w3", "w2")) for _ in range(4))


class Qwen3MoeSparseMoeBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.top_k, self.norm_topk_prob = 2, False
        self.gate = nn.Linear(64, 4, bias=False)
        self.experts = nn.ModuleList(MLP() for _ in range(4))


class TopkRouter(nn.Module):
    """Ids first, as in transformers 4."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k = 2
        self.weight = nn.Parameter(torch.randn(4, 64) / 8)
        self.register_buffer("e_score_correction_bias", torch.randn(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = (x.view(-1, 64).float() @ self.weight.float().t()).sigmoid()
        ids = (scores + self.e_score_correction_bias).topk(2).indices
        return ids, scores.gather(1, ids)


class DeepseekV3MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = TopkRouter()
        self.experts = nn.ModuleList(MLP() for _ in range(4))
        self.shared_experts = MLP(128)


OLD = (MixtralSparseMoeBlock, Qwen3MoeSparseMoeBlock, DeepseekV3MoE)


def make(block: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return block().bfloat16()


def assert_same_state(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


@pytest.mark.parametrize("block", OLD)
def test_state_dict_of_separate_experts_round_trips(block: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Identity(), make(block))
    state = {k: v.clone() for k, v in model.state_dict().items()}
    assert mok.replace_moe(model, config=SMALL) is model
    assert isinstance(model[1], HFLayer) and not is_moe_block(model[1])
    # transformers 4 finds router logits by the class of what returns them.
    assert isinstance(model[1], block) == isinstance(model[1].router, Router)
    assert_same_state(model.state_dict(), state)
    other = {k: torch.randn_like(v) for k, v in state.items()}
    model.load_state_dict(other)
    assert_same_state(model.state_dict(), other)
    assert_same_state(copy.deepcopy(model).state_dict(), other)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({k: v for k, v in other.items() if "experts.2." not in k})


def test_routes_of_a_linear_gate() -> None:
    """Softmax over all experts, then the best; normalised by Mixtral, as its config says by Qwen3."""
    for block, normalize in ((MixtralSparseMoeBlock, True), (Qwen3MoeSparseMoeBlock, False)):
        original = make(block)
        layer = MoELayer.from_hf(original)
        assert isinstance(layer.router, Router) and layer.router.weight is original.gate.weight
        x = torch.randn(10, 64).bfloat16()
        weights, ids = layer._route(x, None, None)
        scores = original.gate(x).float().softmax(1)
        best, expected = scores.topk(2)
        assert torch.equal(ids, expected)
        torch.testing.assert_close(weights, best / best.sum(1, keepdim=True) if normalize else best)


def test_routes_that_come_ids_first() -> None:
    original = make(DeepseekV3MoE)
    layer = MoELayer.from_hf(original)
    x = torch.randn(10, 64).bfloat16()
    ids, weights = original.gate(x)
    found_weights, found_ids = layer._route(x, None, None)
    assert torch.equal(found_ids, ids) and torch.equal(found_weights, weights)


def test_ranks_take_their_experts() -> None:
    from tests.mok.test_layer_errors import Processes

    original = make(DeepseekV3MoE)
    whole = MoELayer.from_hf(original)
    for rank, part in enumerate((slice(0, 2), slice(2, 3), slice(3, 4))):
        layer = MoELayer.from_hf(original, group=Processes(3, rank), max_tokens=8)
        for name in ("routed_gate", "routed_up", "routed_down"):
            assert torch.equal(getattr(layer, name), getattr(whole, name)[part])
        assert "routed_gate" in layer.state_dict()


def changed(block: type[nn.Module], change: Callable[[Any], None]) -> nn.Module:
    module = make(block)
    change(module)
    return module


@pytest.mark.parametrize(
    ("module", "match"),
    [
        (nn.Linear(2, 2), "takes an MoE block"),
        (changed(MixtralSparseMoeBlock, lambda m: setattr(m, "jitter_noise", 0.1)), "jitter"),
        (changed(DeepseekV3MoE, lambda m: setattr(m, "norm", nn.LayerNorm(4))), "parts.*norm"),
        (changed(DeepseekV3MoE, lambda m: setattr(m.experts[1], "act_fn", nn.GELU())), "SiLU"),
        (
            changed(Qwen3MoeSparseMoeBlock, lambda m: setattr(m, "gate", nn.Linear(64, 4))),
            "gate.bias",
        ),
        (
            changed(DeepseekV3MoE, lambda m: setattr(m.experts[3], "up_proj", nn.Linear(64, 64))),
            "up_proj.bias",
        ),
    ],
)
def test_refused(module: nn.Module, match: str) -> None:
    with pytest.raises(MokError, match=match):
        MoELayer.from_hf(module)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda m: setattr(m, "experts", nn.ModuleList()), "must have experts"),
        (lambda m: delattr(m, "experts"), "must have the module experts"),
        (lambda m: setattr(m, "gate", None), "must have the module gate"),
        (lambda m: setattr(m, "gate", nn.Linear(64, 5, bias=False)), r"\[4, 64\]; found \[5, 64\]"),
        (lambda m: setattr(m, "gate", nn.Linear(32, 4, bias=False)), r"\[4, 64\]; found \[4, 32\]"),
        (lambda m: setattr(m, "top_k", "x"), "top_k must be an int"),
        (lambda m: setattr(m, "top_k", True), "top_k must be an int"),
        (lambda m: delattr(m.experts[1], "up_proj"), "must have the layers.*up_proj"),
        (
            lambda m: setattr(m.experts[1], "up_proj", nn.Linear(64, 128, bias=False).bfloat16()),
            "up_proj of expert 1 must have the shape",
        ),
        (
            lambda m: m.experts[2].float(),
            "one dtype, torch.bfloat16; found torch.float32 .*expert 2",
        ),
    ],
)
def test_blocks_that_do_not_fit_together(change: Callable[[Any], None], match: str) -> None:
    with pytest.raises(MokError, match=match):
        MoELayer.from_hf(changed(Qwen3MoeSparseMoeBlock, change))


@pytest.mark.parametrize("name", ["router", "device", "topk"])
def test_options_that_the_block_decides(name: str) -> None:
    with pytest.raises(MokError, match=f"the block decides.*{name}"):
        MoELayer.from_hf(make(Qwen3MoeSparseMoeBlock), **{name: "softmax"})


def test_a_block_in_several_places_stays_one() -> None:
    model = nn.Module()
    model.first = model.again = make(Qwen3MoeSparseMoeBlock)
    model.inner = nn.ModuleList([model.first, make(Qwen3MoeSparseMoeBlock)])
    mok.replace_moe(model)
    assert isinstance(model.first, MoELayer) and isinstance(model.inner[1], MoELayer)
    assert model.first is model.again is model.inner[0] is not model.inner[1]


def test_a_numpy_int_is_a_top_k() -> None:
    layer = MoELayer.from_hf(
        changed(Qwen3MoeSparseMoeBlock, lambda m: setattr(m, "top_k", np.int64(2)))
    )
    assert layer.spec.topk == 2 and type(layer.spec.topk) is int


def test_a_state_dict_of_unequal_experts_is_named() -> None:
    layer = MoELayer.from_hf(make(Qwen3MoeSparseMoeBlock))
    state = dict(layer.state_dict())
    state["experts.1.up_proj.weight"] = torch.zeros(3, 3)
    with pytest.raises(
        RuntimeError, match=r"size mismatch for experts\.1\.up_proj\.weight: \[3, 3\]"
    ):
        layer.load_state_dict(state)


def test_a_shard_without_the_first_expert() -> None:
    """As the files of a large checkpoint hold a layer: strict=False reports what is absent."""
    layer = MoELayer.from_hf(make(MixtralSparseMoeBlock))
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    state = {k: v + 1 for k, v in before.items() if not k.startswith("experts.0.")}
    found = layer.load_state_dict(state, strict=False)
    assert sorted(found.missing_keys) == ["routed_down", "routed_gate", "routed_up"]
    after = layer.state_dict()
    assert torch.equal(after["gate.weight"], before["gate.weight"] + 1)
    assert all(torch.equal(after[k], v) for k, v in before.items() if k.startswith("experts."))
    wrong = next(k for k in state if k.startswith("experts.2."))
    state[wrong] = torch.zeros(3, 3)
    with pytest.raises(RuntimeError, match=rf"size mismatch for {wrong}: \[3, 3\]"):
        layer.load_state_dict(state, strict=False)


def test_what_is_no_model() -> None:
    for value in (None, "x"):
        with pytest.raises(MokError, match="must be a torch module"):
            mok.replace_moe(value)  # type: ignore[arg-type]


def test_models_without_blocks() -> None:
    with pytest.raises(MokError, match="must hold MoE blocks"):
        mok.replace_moe(nn.Sequential(nn.Linear(2, 2)))


# ---------------------------------------------------------------------- the real transformers

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "num_experts_per_tok": 2,
    "intermediate_size": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 32, "first_k_dense_replace": 1,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Olmoe": {"num_experts": 4, "norm_topk_prob": False},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 64, "norm_topk_prob": True},
    "Qwen2Moe": {
        "num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 128,
    },
    "DeepseekV3": {
        "n_routed_experts": 8, "moe_intermediate_size": 64, "n_shared_experts": 2, "n_group": 4,
        "topk_group": 2, "routed_scaling_factor": 1.5, **LATENT,
    },
}  # fmt: skip


def make_model(name: str, seed: int = 0) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3 if key.endswith("gate.weight") else 0.1)
    return model.bfloat16()


@pytest.mark.parametrize("name", MODELS)
def test_model_state_dict_round_trips(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    mok.replace_moe(model, config=SMALL)
    assert_same_state(model.state_dict(), state)
    other = make_model(name, seed=1)
    model.load_state_dict(other.state_dict())
    states = []
    for kind, saved in (("replaced", model), ("original", other)):
        saved.save_pretrained(tmp_path / kind)
        loaded = type(other).from_pretrained(tmp_path / kind, dtype=torch.bfloat16)
        states.append(loaded.state_dict())
    assert_same_state(*states)


def block_of(model: Any) -> nn.Module:
    return [module for module in model.modules() if is_moe_block(module)][-1]


@pytest.mark.parametrize("name", MODELS)
def test_block_routes_and_weights_against_fp32(name: str) -> None:
    """The weights that from_hf reads, in plain torch, compute what the block does in FP32."""
    model = make_model(name).float()
    x = torch.randn(2, 5, 64)
    expected = block_of(model)(x)
    layer = MoELayer.from_hf(block_of(model))
    flat = x.view(10, 64)
    weights, ids = layer._route(flat, None, None)
    routed = [layer.routed_gate, layer.routed_up, layer.routed_down]
    shared = [w for w in (layer.shared_gate, layer.shared_up, layer.shared_down) if w is not None]
    found = torch_layer(flat, weights, ids, routed, shared, layer.shared_scale)
    torch.testing.assert_close(found.view(2, 5, 64), expected)


ROUTERS: dict[str, dict[str, Any]] = {
    "Mixtral": {"normalize": True},
    "Olmoe": {"normalize": False},
    "Qwen3Moe": {"normalize": True},
    "DeepseekV3": {
        "score": "sigmoid", "expert_bias": True, "num_groups": 4, "topk_groups": 2, "scale": 1.5,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ROUTERS)
def test_own_router_against_transformers(name: str) -> None:
    gate = block_of(make_model(name).float()).gate
    router = Router(64, len(gate.weight), 2, **ROUTERS[name])
    with torch.no_grad():
        router.weight.copy_(gate.weight)
        if router.expert_bias is not None:
            gate.e_score_correction_bias.normal_(std=0.3)
            router.expert_bias.copy_(gate.e_score_correction_bias)
    x = torch.randn(200, 64)
    logits, weights, ids = gate(x)
    found_logits, found_weights, found_ids = router(x)
    torch.testing.assert_close(found_logits, logits)
    dense = torch.zeros_like(logits).scatter(1, ids, weights)
    torch.testing.assert_close(torch.zeros_like(logits).scatter(1, found_ids, found_weights), dense)


@pytest.mark.emulator
class TestResults:
    """Logits, loss and gradients of whole models: as near to FP32 as transformers' own in BF16."""

    @pytest.fixture(scope="class", autouse=True)
    def emulator(self) -> Iterator[None]:
        from mok import functional
        from mok.tools.emulator import Emulator

        with Emulator("sm_90a", num_sms=6):
            yield
            functional.clear_workspace_cache()

    @staticmethod
    def run(model: Any, ids: Tensor, **options: Any) -> tuple[Any, dict[str, Tensor]]:
        model.train()
        out = model(ids, labels=ids, **options)
        out.loss.backward()
        # Gradients under the names of the state dict: put in the parameters' place.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(
                    torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                )
        return out, {k: v.clone() for k, v in model.state_dict().items() if "bias" not in k}

    @pytest.mark.parametrize("name", MODELS)
    def test_against_the_original(self, name: str) -> None:
        options = {} if name == "DeepseekV3" else {"output_router_logits": True}
        original = make_model(name)
        replaced = mok.replace_moe(copy.deepcopy(original), config=SMALL)
        exact = copy.deepcopy(original).float()
        ids = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(5))
        (a, found), (b, theirs), (c, best) = (
            self.run(model, ids, **options) for model in (replaced, original, exact)
        )
        assert relative_l2(a.logits, c.logits) <= 1.25 * relative_l2(b.logits, c.logits)
        if options:
            torch.testing.assert_close(a.aux_loss, b.aux_loss, rtol=1e-2, atol=0)
        assert found.keys() == best.keys()
        for key, expected in best.items():
            allowed = max(2 * relative_l2(theirs[key], expected), 1e-2)
            assert relative_l2(found[key], expected) <= allowed, key

    def test_old_blocks_return_their_logits(self) -> None:
        original = make(MixtralSparseMoeBlock)
        layer = MoELayer.from_hf(original, config=SMALL)
        x = torch.randn(2, 6, 64).bfloat16()
        out, logits = layer(x)
        torch.testing.assert_close(logits.bfloat16(), original.gate(x.view(12, 64)))
        weights, ids = layer._route(x.view(12, 64), None, None)
        routed = [w.float() for w in layer.routed_parameters()]
        expected = torch_layer(x.view(12, 64).float(), weights, ids, routed)
        assert relative_l2(out.view(12, 64), expected) <= 5e-3


def test_sizes_beyond_the_limits_are_named() -> None:
    class OlmoeSparseMoeBlock(Qwen3MoeSparseMoeBlock):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(MLP(96) for _ in range(4))

    with pytest.raises(ShapeError, match="intermediate_size"):
        MoELayer.from_hf(OlmoeSparseMoeBlock())
