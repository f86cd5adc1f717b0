"""The suite's arithmetic, on recorded times."""

from __future__ import annotations

import pytest

from mok.models import MODELS
from mok.tools.bench.published import figures

# Three ranks, five iterations: another rank is the slowest in each, and one iteration is disturbed.
RECORDED = [
    [1.00, 1.20, 1.10, 9.00, 1.05],
    [1.10, 1.00, 1.30, 1.10, 1.00],
    [0.90, 1.10, 1.20, 1.00, 1.15],
]


def test_the_slowest_rank_of_each_iteration_counts():
    assert figures.per_iteration(RECORDED) == [1.10, 1.20, 1.30, 9.00, 1.15]


def test_the_median_is_of_those_not_of_ranks():
    found = figures.summary(RECORDED)
    assert found["ms"] == 1.20
    assert (found["fastest_ms"], found["slowest_ms"]) == (1.10, 9.00)
    assert found["spread"] == pytest.approx((1.30 - 1.15) / 1.20)
    # The largest of the ranks' medians would be 1.10, the median over all 1.10.
    assert max(sorted(r)[2] for r in RECORDED) == 1.10


def test_one_iteration_and_even_numbers():
    assert figures.summary([[2.0], [3.0]])["ms"] == 3.0
    assert figures.summary([[1.0, 2.0], [1.5, 1.0]])["ms"] == pytest.approx(1.75)


@pytest.mark.parametrize("times", [[], [[]], [[1.0], [1.0, 2.0]]])
def test_times_that_do_not_fit(times):
    with pytest.raises(ValueError, match="same number of iterations"):
        figures.per_iteration(times)


def row(program, ms, model="kimi-k2.5", precision="mxfp8", pass_name="forward"):
    return {"model": model, "precision": precision, "pass": pass_name, "program": program, "ms": ms}


def test_the_fastest_peer_is_what_counts():
    rows = [row("mok", 2.0), row("nccl-torch", 9.0), row("deepep-te", 5.0), row("upstream", 2.2)]
    rows += [row("mok", 3.0, pass_name="backward"), row("nccl-torch", 1.0, model="glm-5.2")]
    first, second = figures.speed_ups(rows)
    assert first["fastest_peer"] == "deepep-te" and first["speed_up"] == 2.5
    assert first["over_upstream"] == pytest.approx(1.1)
    assert first["published"] == 2.37 and first["published_model"] == 2.37
    # Nobody else ran this pass, and another model's time is no peer's.
    assert second["speed_up"] is None and second["fastest_peer"] is None
    assert second["over_upstream"] is None and second["published_model"] is None


def test_upstream_is_no_peer():
    (found,) = figures.speed_ups([row("mok", 2.0), row("upstream", 1.0)])
    assert found["fastest_peer"] is None and found["over_upstream"] == 0.5


def test_the_best_of_the_models_stands_beside_the_published():
    rows = []
    for model, peer in (("kimi-k2.5", 4.0), ("glm-5.2", 6.0), ("qwen3.5-397b", 3.0)):
        rows += [row("mok", 2.0, model), row("deepep-torch", peer, model)]
    best = {(b["precision"], b["pass"]): b for b in figures.best(figures.speed_ups(rows))}
    assert best["mxfp8", "forward"]["model"] == "glm-5.2"
    assert best["mxfp8", "forward"]["speed_up"] == 3.0
    assert best["bf16", "backward"] == {
        "precision": "bf16", "pass": "backward", "published": 1.58, "speed_up": None,
        "model": None, "fastest_peer": None,
    }  # fmt: skip
    assert {k: b["published"] for k, b in best.items()} == figures.PUBLISHED


def test_flops():
    shape = {"T": 2, "H": 10, "I": 3, "K": 4, "shared": 5}
    assert figures.flops(shape, "forward") == 6 * 2 * 10 * (4 * 3 + 5)
    assert figures.flops(shape, "backward") == 12 * 2 * 10 * 17


def test_the_models_are_known():
    assert {*figures.MODELS} == {*figures.READ_OFF} and {*figures.MODELS} <= {*MODELS}
    assert max(figures.READ_OFF.values()) == figures.PUBLISHED["mxfp8", "forward"]
