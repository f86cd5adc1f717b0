"""What a call keeps for backward is what ``mok plan`` says: torch's allocator against the formula."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch

from mok import functional
from mok.config import Config, Shape
from mok.reference import random_case
from mok.tools.simulator.memory import memory
from tests.helpers_layer import Layer

pytestmark = pytest.mark.gpu
CONFIG = Config(8, 8, minibatch_size=1024, macrobatch_size=8192)
SHAPE = Shape(4096, 2048, 768, 32, 4)


def kept_bytes(shape: Shape, ep_size: int, kind: str, precision: str) -> tuple[int, int]:
    """(held by torch for schedule and context, the formula's) of a forward call on all ranks."""
    case = random_case(shape, kind=kind, device="cuda")
    with Layer(case, ep_size, CONFIG, "cuda", precision=precision) as layer:
        arguments = layer.arguments(case)
        held = 0
        for _ in range(2):  # the first call makes what later calls share
            torch.cuda.synchronize()
            gc.collect()
            before = torch.cuda.memory_allocated()
            schedule = layer.build_schedule()
            output, context = functional.forward(CONFIG, layer.workspace, schedule, *arguments)
            layer.finish()
            gc.collect()
            held = torch.cuda.memory_allocated() - before
            outputs = [output] if isinstance(output, torch.Tensor) else output
            held -= sum(t.numel() * t.element_size() for t in outputs)
            assert context is not None
            del schedule, output, outputs, context
        one = dataclasses.replace(layer.shape, num_tokens=max(layer.lengths))
        needed = memory(one, CONFIG, layer.workspace.arch, precision)
        return held, ep_size * (needed["saved context"] + needed["schedule"])


@pytest.mark.parametrize(
    ("ep_size", "shared", "precision"),
    [(1, None, "bf16"), (1, 1024, "bf16"), (2, 1024, "bf16"), (1, None, "mxfp8")],
)
def test_kept_from_forward_to_backward(ep_size: int, shared: int | None, precision: str) -> None:
    shape = dataclasses.replace(SHAPE, shared_intermediate_size=shared)
    held, formula = kept_bytes(shape, ep_size, "random", precision)
    assert held == pytest.approx(formula, rel=0.02)


def test_one_expert_with_all_routes_keeps_no_more() -> None:
    """16384 rows of one expert in a ring of 8192."""
    even, _ = kept_bytes(SHAPE, 1, "random", "bf16")
    held, formula = kept_bytes(SHAPE, 1, "one_expert", "bf16")
    assert held == even and held == pytest.approx(formula, rel=0.02)
