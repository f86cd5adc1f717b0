"""What backward launches on a GPU: one megakernel per rank; and that the host never waits for it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mok import functional
from mok.config import Shape
from mok.reference import random_case, random_gradient
from tests.helpers_layer import Layer
from tests.mok.test_layer_launch_gpu import A_SECOND, CONFIG, is_kernel, profiled

pytestmark = pytest.mark.gpu
OURS = ("backward_direct", "backward_ring", "plan", "dx_sum", "router_grad")


@pytest.fixture(autouse=True)
def _memory_back() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


def prepared(layer: Layer) -> Callable[[], Any]:
    """Backward of one kept forward call, whose arguments cost no launch."""
    given = layer.arguments(layer.case)
    dy = layer.each(layer.split(random_gradient(layer.case)))
    schedule = layer.build_schedule()
    _, context = functional.forward(layer.config, layer.workspace, schedule, *given)
    assert context is not None

    def backward() -> Any:
        return functional.backward(
            layer.config, layer.workspace, schedule, context, dy, *given, keep_context=True
        )

    return backward


@pytest.mark.parametrize(("ep_size", "precision"), [(1, "bf16"), (4, "bf16"), (1, "mxfp8")])
def test_one_megakernel_per_rank(ep_size: int, precision: str) -> None:
    case = random_case(Shape(2048, 1024, 512, 16, 4, 1, 512), device="cuda")
    with Layer(case, ep_size, CONFIG, "cuda", precision=precision) as layer:
        backward = prepared(layer)
        for _ in range(2):
            backward()
        profiled(backward)  # the profiler's own first time
        seen = profiled(backward)
        layer.finish()
    names = [next((ours for ours in OURS if ours in name), name) for name in seen]
    print(f"EP {ep_size} {precision}: {names}")
    path = "direct" if ep_size == 1 and precision == "bf16" else "ring"
    megakernel = f"backward_{path}"
    first = names.index(megakernel)
    last = len(names) - names[::-1].index(megakernel)
    before, between, after = (
        [n for n in part if is_kernel(n)]
        for part in (names[:first], names[first:last], names[last:])
    )
    assert before == ["plan"] * ep_size
    assert between == [megakernel] * ep_size
    assert sorted(after) == ["dx_sum"] * ep_size + ["router_grad"] * ep_size


@pytest.mark.parametrize(("ep_size", "precision"), [(1, "bf16"), (4, "bf16"), (1, "mxfp8")])
def test_the_host_never_waits(ep_size: int, precision: str) -> None:
    case = random_case(Shape(4096, 1024, 512, 16, 4, 1, 512), device="cuda")
    with Layer(case, ep_size, CONFIG, "cuda", precision=precision) as layer:
        backward = prepared(layer)
        for _ in range(3):
            want = backward()
        layer.finish()
        begin = time.perf_counter()
        torch.cuda._sleep(A_SECOND)
        start = time.perf_counter()
        found = backward()
        returned = time.perf_counter()
        blocked = not torch.cuda.current_stream().query()
        layer.finish()
        ended = time.perf_counter()
    print(f"EP {ep_size} {precision}: backward returned after {1e3 * (returned - start):.2f} ms")
    assert blocked and ended - begin > 0.8, "the stream was not blocked long enough to tell"
    assert returned - start < 0.05
    for a, b in zip(tensors(found), tensors(want), strict=True):
        assert torch.equal(a, b)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All of them in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif value is not None:
        for part in value:
            yield from tensors(part)
