"""Random tiny models of transformers with their blocks replaced: logits and gradients of the originals.

How far apart may the two be? Let e be the original's distance from itself in FP32, which is what BF16 costs it.
The replaced blocks round where the original does, in fewer places: hidden, each route's result and the sum,
against gate, up, their product's two factors, the product, the result, the weighted result and each addition.
So they are expected to be as near to FP32, and by the triangle inequality the two are at most 2 e apart. What
is exact in the original up to one rounding needs room for the other's: UNIT, half a unit in the last place of
BF16 at 1. For e to be the price of rounding, all three must choose the same experts: inputs are taken with
which no choice is near a tie.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mok
from mok import functional
from mok.reference import relative_l2
from tests.module_helpers import SMALL
from tests.mok import test_hf

UNIT = 2.0**-8
MEANINGFUL = 0.1  # an original farther from FP32 than that shows nothing
NAMES = ("Mixtral", "Olmoe", "Qwen3Moe", "DeepseekV3")
LAYOUTS = {"Mixtral": "num_local_experts", "Olmoe": "num_experts", "Qwen3Moe": "num_experts"}


def sizes_of(name: str, seed: int) -> tuple[dict[str, Any], tuple[int, int]]:
    """A configuration, and the shape of its input, that model and seed decide."""
    rng = random.Random(f"{name} {seed}")
    layers, heads = rng.choice([1, 2]), rng.choice([1, 2, 4])
    hidden, inner = rng.choice([64, 128, 192]), rng.choice([64, 128, 192])
    experts = rng.choice([2, 3, 4, 6, 8]) if name != "DeepseekV3" else rng.choice([4, 6, 8])
    topk = rng.randint(1, min(4, experts))
    # The one weight of a token would be normalised to 1, and the router's gradient to nothing but noise.
    normalize = topk > 1 and rng.random() < 0.5
    if name == "Mixtral":
        topk = max(topk, 2)
    sizes: dict[str, Any] = {
        "vocab_size": rng.choice([48, 64, 100]), "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([n for n in (1, 2, 4) if heads % n == 0]),
        "max_position_embeddings": 64, "num_experts_per_tok": topk, "bos_token_id": 0,
        "eos_token_id": 1, "pad_token_id": None, "tie_word_embeddings": rng.random() < 0.5,
    }  # fmt: skip
    if name == "DeepseekV3":
        sizes |= {
            "num_key_value_heads": heads, "n_routed_experts": experts, "n_group": 2,
            "moe_intermediate_size": inner, "n_shared_experts": rng.choice([1, 2]),
            "topk_group": rng.choice([1, 2]) if topk <= experts // 2 else 2,
            "routed_scaling_factor": rng.choice([1.0, 1.5, 2.5]), "norm_topk_prob": normalize,
            "first_k_dense_replace": layers - 1, "q_lora_rank": 32, "kv_lora_rank": 32,
            "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32,
        }  # fmt: skip
    else:
        sizes[LAYOUTS[name]] = experts
        if name != "Mixtral":
            sizes["norm_topk_prob"] = normalize
        if name == "Qwen3Moe":
            sizes |= {"moe_intermediate_size": inner, "head_dim": hidden // heads}
    return sizes, (rng.choice([1, 2, 3]), rng.choice([5, 12, 17]))


def make(name: str, sizes: dict[str, Any], seed: int) -> Any:
    """A model in BF16 whose parts all matter to its logits."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3 if key.endswith("gate.weight") else 0.1)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)
    return model.bfloat16()


def routes(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """For each router the experts of each token, in order."""
    found: list[Tensor] = []

    def keep(_: nn.Module, __: Any, out: tuple[Tensor, ...]) -> None:
        found.append(out[2].sort(dim=1).values)

    routers = [m for m in model.modules() if type(m).__name__.endswith("Router")]
    hooks = [m.register_forward_hook(keep) for m in routers]
    with torch.no_grad():
        model.train()(ids)
    for hook in hooks:
        hook.remove()
    assert found
    return found


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def decided(vocabulary: int, shape: tuple[int, int], *models: nn.Module) -> Tensor:
    """Tokens for which the models choose the same experts."""
    for seed in range(50):
        rng = torch.Generator().manual_seed(seed)
        ids = torch.randint(vocabulary, shape, generator=rng)
        ids = ids.to(next(models[0].parameters()).device)
        first, *rest = (routes(model, ids) for model in models)
        if all(same(other, first) for other in rest):
            return ids
    raise AssertionError("every input has a tie")


def check(name: str, seed: int, device: str) -> None:
    sizes, shape = sizes_of(name, seed)
    original = make(name, sizes, seed).to(device)
    exact = copy.deepcopy(original).float()
    replaced = mok.replace_moe(copy.deepcopy(original), config=SMALL if device == "cpu" else None)
    ids = decided(sizes["vocab_size"], shape, original, exact, replaced)
    (a, found), (b, theirs), (c, best) = (
        test_hf.TestResults.run(model, ids) for model in (replaced, original, exact)
    )
    tensors = {"logits": (a.logits, b.logits, c.logits)}
    assert found.keys() == theirs.keys() == best.keys()
    tensors |= {key: (found[key], theirs[key], best[key]) for key in best}
    with torch.no_grad():
        for key, (ours, other, truth) in tensors.items():
            if not truth.any():  # an expert's that no token chose
                assert not ours.any() and not other.any(), key
                continue
            price = relative_l2(other, truth)
            assert price <= MEANINGFUL, key
            apart = float((ours.double() - other.double()).norm() / truth.double().norm())
            assert apart <= 2 * price + UNIT, (key, apart, price)


@pytest.fixture(scope="module")
def emulator() -> Iterator[None]:
    from mok.tools.emulator import Emulator

    with Emulator("sm_90a", num_sms=6):
        yield
        functional.clear_workspace_cache()


@pytest.mark.emulator
@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(s, marks=pytest.mark.slow) for s in range(2, 12))]
)
@pytest.mark.parametrize("name", NAMES)
def test_in_the_emulator(emulator: None, name: str, seed: int) -> None:
    check(name, seed, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu(name: str, seed: int) -> None:
    check(name, seed, "cuda")


def test_the_table_is_random() -> None:
    """Sizes, numbers of experts and of routes, normalisation and layers all differ among the seeds."""
    for name in NAMES:
        found = [sizes_of(name, seed)[0] for seed in range(12)]
        assert found == [sizes_of(name, seed)[0] for seed in range(12)]
        for key in (
            "hidden_size",
            "num_experts_per_tok",
            "num_hidden_layers",
            "num_attention_heads",
        ):
            assert len({sizes[key] for sizes in found}) > 1, (name, key)
