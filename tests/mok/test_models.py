from __future__ import annotations

import pytest

from mok.config import Shape
from mok.errors import MokError
from mok.models import MACHINES, MODELS, get_machine, get_model


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda m: m.name)
def test_every_model_is_within_the_limits(model):
    shape = Shape.of_model(model, num_tokens=1024, ep_size=8)
    assert (shape.hidden_size, shape.num_experts) == (model.hidden_size, model.num_experts)
    assert shape.shared_intermediate_size == model.shared_intermediate_size
    assert model.note


def test_shapes_of_the_issue():
    found = {
        name: (m.hidden_size, m.intermediate_size, m.num_experts, m.topk)
        for name, m in MODELS.items()
    }
    assert found == {
        "kimi-k2.5": (7168, 2048, 384, 8),
        "deepseek-v3": (7168, 2048, 256, 8),
        "qwen3-30b-a3b": (2048, 768, 128, 8),
        "qwen3-235b-a22b": (4096, 1536, 128, 8),
        "glm-5.2": (6144, 2048, 256, 8),
        "mixtral-8x7b": (4096, 14336, 8, 2),
        "olmoe": (2048, 1024, 64, 8),
        "qwen3.5-397b": (4096, 1024, 512, 10),
        "deepseek-v4-pro": (7168, 3072, 384, 6),
    }


def test_machines_say_their_source():
    assert {m.num_sms for m in MACHINES.values()} == {132, 148}
    assert all(m.note for m in MACHINES.values())
    assert get_machine("H200") is MACHINES["h200"]


@pytest.mark.parametrize("get", [get_model, get_machine])
def test_unknown_names_list_the_known_ones(get):
    with pytest.raises(MokError, match=r"'nope'.*Known: (kimi-k2\.5|h100)"):
        get("nope")
