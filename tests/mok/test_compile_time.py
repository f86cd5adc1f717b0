"""A whole layer, both directions, compiles in two minutes, and for any number of experts once."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("cutlass", reason="kernels need the CuTe DSL")

from mok import functional
from mok.config import Shape
from mok.reference import random_case, random_gradient
from mok.runtime import compile as compiler
from mok.tools.bench.warm import layer_specs
from tests.helpers_layer import SMALL

LIMIT_S = 120.0


@pytest.mark.parametrize("direct", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_layer_compiles_in_two_minutes(monkeypatch, tmp_path, arch, direct):
    """All that a call of either direction may launch, one after the other; on Hopper, which has them,
    backward alone and in pairs of CTAs."""
    import cutlass.cute  # noqa: F401  (importing the DSL is not compiling)

    monkeypatch.setenv("MOK_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "_kernels", {})
    seconds = {}
    for spec in layer_specs(arch, direct, trains=True):
        start = time.perf_counter()
        kernel = compiler.get_kernel(spec)
        seconds[spec.name] = time.perf_counter() - start
        assert not kernel.from_cache
    print(f"{sum(seconds.values()):.1f} s: {seconds}")
    assert sum(seconds.values()) <= LIMIT_S


@pytest.mark.emulator
def test_sizes_compile_nothing(monkeypatch):
    """Neither experts nor tokens, routes or widths: the first layer's kernels serve the others."""
    from mok.tools.emulator import Emulator

    monkeypatch.setattr(compiler, "_kernels", {})
    counts = []
    shapes = [Shape(20, 64, 64, 2, 1), Shape(20, 64, 64, 48, 1), Shape(30, 128, 192, 5, 3)]
    with Emulator("sm_90a", num_sms=6) as emulator:
        for shape in shapes:
            case = random_case(shape, device="cpu")
            weights = (None, None, None, case.routed.gate, case.routed.up, case.routed.down)
            with functional.create_workspace(
                SMALL, max_tokens=shape.num_tokens, hidden_size=shape.hidden_size,
                intermediate_size=shape.intermediate_size, num_experts=shape.num_experts,
                topk=shape.topk,
            ) as made:  # fmt: skip
                schedule = functional.build_schedule(made, SMALL, case.top_experts)
                given = (case.x, case.router_weights, *weights)
                _, context = functional.forward(SMALL, made, schedule, *given)
                functional.backward(SMALL, made, schedule, context, random_gradient(case), *given)
            counts.append(len(compiler._kernels))
        assert emulator.arch == "sm_90a"
    assert counts[0] > 5 and counts == [counts[0]] * len(shapes)
