"""Many steps in one process: same bits as alone, and no memory that grows."""

from __future__ import annotations

import random

import pytest
import torch

from mok import functional
from mok.capture import digest
from mok.config import Config, Shape
from mok.reference import ROUTINGS, random_case, random_gradient
from tests.helpers_layer import SMALL, Layer

pytestmark = pytest.mark.gpu


def step(layer, case, dy):
    result = layer.queue(case, save_context=True)
    grads = functional.backward(
        layer.config, layer.workspace, result.schedule, result.context, layer.each(layer.split(dy)),
        *layer.arguments(case), case.swiglu_limit,
    )  # fmt: skip
    parts = [result.output, *(torch.cat(g) if isinstance(g, list) else g for g in grads[:5])]
    return [digest(part) for part in parts]


def problem(rng, number):
    """A random shape, routing and configuration, and on how many virtual ranks."""
    shape = Shape(
        rng.choice([1, 17, 100, 513, 2000]), 64 * rng.randint(1, 16), 64 * rng.randint(1, 12),
        rng.randint(1, 40), rng.randint(1, 8), 1, rng.choice([None, 64, 192]),
    )  # fmt: skip
    minibatch = 128 * rng.choice([1, 2, 8])
    comm = rng.randint(1, 40)
    config = Config(
        comm, comm, minibatch, minibatch * rng.choice([1, 2, 5]), rng.choice([0.01, 0.5, 2.0])
    )
    return shape, rng.choice(sorted(ROUTINGS)), config, rng.choice([1, 1, 2, 3, 4])


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_thousand_steps():
    rng = random.Random(7)
    problems = []
    for number in range(40):
        shape, kind, config, ep_size = problem(rng, number)
        case = random_case(shape, kind=kind, seed=number, device="cuda")
        dy = random_gradient(case, seed=number)
        with Layer(case, 1, SMALL, "cuda") as layer:  # alone, on one rank, other tunables
            want = step(layer, case, dy)
        problems.append((case, dy, config, ep_size, want))
    layers = [Layer(case, ep, config, "cuda") for case, _, config, ep, _ in problems]
    used = 0
    for number in range(2000):
        k = rng.randrange(len(problems))
        case, dy, _, _, want = problems[k]
        assert step(layers[k], case, dy) == want, (number, k)
        if number == 200:
            used = torch.cuda.mem_get_info()[0]
    torch.cuda.synchronize()
    total = torch.cuda.mem_get_info()[1]
    assert used - torch.cuda.mem_get_info()[0] < 0.01 * (total - used)
    for layer in layers:
        layer.finish()
        layer.close()


@pytest.mark.parametrize("ep_size", [1, 2])
def test_a_graph_replayed_a_thousand_times_beside_gemms(ep_size):
    case = random_case(Shape(4096, 1024, 512, 32, 4), kind="skewed", device="cuda")
    config = Config.suggest(case.shape, "cuda")
    a, b = (torch.randn(4096, 4096, device="cuda").bfloat16() for _ in range(2))
    others = [torch.cuda.Stream() for _ in range(2)]
    with Layer(case, ep_size, config, "cuda") as layer:
        want = layer().output
        graph, result = torch.cuda.CUDAGraph(), None
        with torch.cuda.graph(graph):
            result = layer.queue().output
        differ = torch.zeros((), dtype=torch.int64, device="cuda")
        for number in range(1000):
            if number % 4 == 0:
                for stream in others:
                    with torch.cuda.stream(stream):
                        torch.mm(a, b)
            result.fill_(torch.nan)
            graph.replay()
            differ += (result.view(torch.int16) != want.view(torch.int16)).sum()
        torch.cuda.synchronize()
        layer.workspace.check()
    assert int(differ) == 0
