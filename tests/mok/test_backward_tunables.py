"""No tunable changes a bit of a training step, and each changes its launches: in the emulator."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("numba", reason="the emulator needs numba")
pytest.importorskip("cutlass", reason="kernels need the CuTe DSL")

from mok import functional
from mok.config import Config, Shape
from mok.reference import random_case, random_gradient
from mok.tools.emulator import Emulator
from tests.mok.test_layer_train_gpu import TUNABLES, assert_no_gradient_depends_on

pytestmark = pytest.mark.emulator
SHAPE = Shape(150, 64, 64, 4, 2, 1, 64)
SETTINGS = {
    "minibatch_size": (128, 256, 512),
    "macrobatch_size": (128, 256, 768),
    "fwd_num_comm_sms": (1, 2, 5),
    "bwd_num_comm_sms": (1, 2, 5),
    "schedule_capacity_multiplier": (1e-9, 0.5, 2.0),
    "pairs": (True, False),
}


RESERVED = ((0, 3, 6), lambda forward, backward: (forward.grid, backward.grid))  # of 10 SMs


@pytest.mark.parametrize("name", [*SETTINGS, "reserved_sms"])
def test_no_tunable_changes_a_gradients_bit(name):
    macrobatches = run(name, SHAPE, "bf16")
    if name == "macrobatch_size":
        assert len(set(macrobatches)) == 3 and macrobatches[-1] == 1


MXFP8 = [name for name in (*SETTINGS, "reserved_sms") if name != "pairs"]  # it has none on Hopper


@pytest.mark.parametrize("name", MXFP8)
def test_no_tunable_changes_a_bit_of_mxfp8(name):
    run(name, Shape(150, 128, 128, 4, 2, 1, 64), "mxfp8")


def run(name, shape, precision):
    case = random_case(shape, kind="skewed", seed=2)
    # Room for all the work, so that the setting and nothing else limits the launch.
    base = Config(2, 2, 128, 256, schedule_capacity_multiplier=2.0)
    if name == "minibatch_size":
        base = dataclasses.replace(base, macrobatch_size=512)
    settings, recorded = RESERVED if name == "reserved_sms" else (SETTINGS[name], TUNABLES[name][1])
    with Emulator("sm_90a", num_sms=10):
        macrobatches = assert_no_gradient_depends_on(
            name, settings, recorded, case, random_gradient(case), base, precision
        )
        functional.clear_workspace_cache()
    return macrobatches
