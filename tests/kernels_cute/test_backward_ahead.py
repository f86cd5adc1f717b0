"""Dgrad down ahead of the minibatch before: rings of four slots, filled again, on the adversarial machine."""

import pytest

pytest.importorskip("cutlass")

from mok.config import Shape
from mok.kernels_cute.backward.program import AHEAD_OF, MIN_AHEAD
from mok.kernels_cute.machine import machine_of
from tests.backward_cases import Layer, assert_same, emulated, exact_run

SMS = 6


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("arch", "kind", "options"),
    [
        ("sm_90a", "random", {"pair": True}),
        ("sm_90a", "few_experts", {}),  # an expert beyond the ring: nothing goes ahead there
        ("sm_100a", "random", {}),
    ],
    ids=["hopper-pairs", "hopper", "blackwell"],
)
def test_exact_gradients(arch, kind, options):
    tokens = 5 * machine_of(arch).tile_m
    layer = Layer(
        Shape(tokens, 128, 192, 6, 3, 1, 64), kind=kind, direct=False, ep_size=2, seed=3,
        macrobatch=MIN_AHEAD,
    )  # fmt: skip
    run, want = exact_run(layer, arch, "cpu", grid=SMS, num_comm_ctas=2, **options)
    assert_same(emulated(run, SMS, layer.seed), want)
    tables = [kept["tables"] for rank in run.ranks for kept in rank.keep if isinstance(kept, dict)]
    assert len(tables) == 2 and max(int((t[AHEAD_OF] > 0).sum()) for t in tables) >= MIN_AHEAD - 1
    assert max(s.num_tokens for s in run.schedules) > run.macrobatch
