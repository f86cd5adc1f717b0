from __future__ import annotations

import pytest
import torch

from mok.errors import ShapeError
from mok.router import Router, count_routes, linear_fp32


def make(topk: int = 2, **options: object) -> Router:
    torch.manual_seed(1)
    router = Router(64, 8, topk, **options)  # type: ignore[arg-type]
    with torch.no_grad():
        router.weight.normal_(std=0.125)
    return router


X = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))


def test_softmax_chooses_the_best_and_normalises() -> None:
    logits, weights, ids = make()(X)
    scores = logits.softmax(1)
    assert torch.equal(ids.sort(1).values, scores.topk(2).indices.sort(1).values)
    torch.testing.assert_close(weights.sum(1), torch.ones(40))
    torch.testing.assert_close(
        weights * scores.gather(1, ids).sum(1)[:, None], scores.gather(1, ids)
    )


def test_sigmoid_without_normalisation_scaled() -> None:
    logits, weights, ids = make(score="sigmoid", normalize=False, scale=2.5)(X)
    torch.testing.assert_close(weights, 2.5 * logits.sigmoid().gather(1, ids))


def test_all_scores_zero_give_zero_weights() -> None:
    router = make(score="sigmoid")
    with torch.no_grad():
        router.weight.fill_(-1e4)
    _, weights, _ = router(X.abs() + 1)
    assert torch.equal(weights, torch.zeros_like(weights))


def test_expert_bias_moves_the_choice_but_not_the_weights() -> None:
    router = make(expert_bias=True, normalize=False)
    assert router.expert_bias is not None
    router.expert_bias[3] = 10
    logits, weights, ids = router(X)
    assert bool((ids == 3).any(1).all())
    torch.testing.assert_close(weights, logits.softmax(1).gather(1, ids))


def test_updates_of_the_bias_balance_the_load() -> None:
    router = make(expert_bias=True)
    with torch.no_grad():
        router.weight[0] += 0.05  # a favourite
    x = torch.randn(400, 64, generator=torch.Generator().manual_seed(2)) + 0.5

    def spread() -> int:
        counts = count_routes(router(x)[2], 8)
        return int(counts.max() - counts.min())

    router.eval()
    before = spread()
    router.train()
    for _ in range(100):
        router(x)
        router.update_expert_bias(0.01)
    router.eval()
    assert spread() < before / 4
    assert router.routed is not None and int(router.routed.sum()) == 0  # only training counts


def test_groups_limit_the_choice() -> None:
    router = make(topk=3, score="sigmoid", num_groups=4, topk_groups=2)
    logits, _, ids = router(X)
    best = logits.sigmoid().view(40, 4, 2).sum(2).topk(2).indices
    assert bool((ids[:, :, None] // 2 == best[:, None, :]).any(2).all())
    free = make(topk=3, score="sigmoid")
    assert not torch.equal(free(X)[2], ids)


def test_gradient_equals_torch_and_keeps_no_copy() -> None:
    x = X.bfloat16().requires_grad_()
    weight = torch.randn(8, 64).bfloat16().requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = linear_fp32(x, weight)
    assert out.dtype == torch.float32
    assert {t.dtype for t in saved} == {torch.bfloat16}
    grad = torch.randn_like(out)
    out.backward(grad)
    y, w = (t.detach().float().requires_grad_() for t in (x, weight))
    (y @ w.t()).backward(grad)
    assert torch.equal(x.grad, y.grad.bfloat16()) and torch.equal(weight.grad, w.grad.bfloat16())


def test_autocast_does_not_round_the_logits() -> None:
    router = make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(router(X)[0], router(X.clone())[0])
        inside = router(X)[0]
    assert torch.equal(inside, router(X)[0])


def test_count_routes() -> None:
    ids = torch.tensor([[0, 3], [3, 1]])
    assert count_routes(ids, 5).tolist() == [1, 1, 0, 2, 0]
    assert count_routes(ids[:0], 5).tolist() == [0] * 5


@pytest.mark.parametrize(
    "options",
    [
        {"topk": 9},
        {"num_groups": 3},
        {"num_groups": 4, "topk_groups": 5},
        {"topk": 3, "num_groups": 4, "topk_groups": 1},
        {"score": "relu"},
    ],
)
def test_bad_sizes(options: dict[str, object]) -> None:
    with pytest.raises(ShapeError):
        make(**options)  # type: ignore[arg-type]


def test_bias_update_needs_a_bias() -> None:
    with pytest.raises(ShapeError, match="expert_bias"):
        make().update_expert_bias()
