"""How often and what the layer launches, read in the emulator and without running anything."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mok import functional
from mok.call import launch_shape
from mok.config import Shape
from mok.layer import MoELayer
from mok.reference import integer_case
from mok.runtime.group import Group
from tests.helpers_layer import SMALL, Layer, run_layer

pytest.importorskip("numba", reason="the emulator needs numba")
pytest.importorskip("cutlass", reason="kernels need the CuTe DSL")

pytestmark = pytest.mark.emulator


def emulator(num_sms: int = 6):
    from mok.tools.emulator import Emulator

    return Emulator("sm_90a", num_sms=num_sms)


def launched(machine) -> list[str]:
    """Names of the kernels that ran, without the number that makes a symbol unique."""
    return [record.kernel.rpartition("_")[0] for record in machine.report.launches]


SCHEDULE = ["schedule_count", "schedule_scan", "schedule_place"]


@pytest.mark.parametrize("save_context", [False, True])
@pytest.mark.parametrize("shared", [None, 64])
@pytest.mark.parametrize("ep_size", [1, 2, 3])
def test_one_megakernel_per_rank_and_direction(ep_size, shared, save_context):
    case = integer_case(Shape(60, 64, 64, 6, 2, 1, shared))
    with emulator() as machine, Layer(case, ep_size) as layer:
        schedule = layer.build_schedule()
        assert launched(machine) == ["stage_ids"] * ep_size + SCHEDULE * ep_size
        machine.report.launches.clear()
        layer(schedule=schedule, save_context=save_context)
        path = "direct" if ep_size == 1 else "ring"
        megakernel = f"forward_{path}" + ("_save" if save_context else "")
        # No kernel lies between the ranks' megakernels: those are the two barriers' only content.
        assert launched(machine) == [megakernel] * ep_size + [f"token_sum_{path}"] * ep_size


def test_an_empty_call_sums_nothing():
    case = integer_case(Shape(0, 64, 64, 4, 2))
    with emulator() as machine:
        run_layer(case)
    assert launched(machine) == ["stage_ids", *SCHEDULE, "forward_direct"]


@pytest.mark.parametrize("reserved", [0, 1, 3])
@pytest.mark.parametrize("ep_size", [1, 2])
def test_the_grid_leaves_reserved_sms_free_in_whole_pairs(ep_size, reserved):
    """Each SM that another kernel holds may be one of another pair."""
    case = integer_case(Shape(150, 64, 256, 8, 3))
    config = dataclasses.replace(SMALL, reserved_sms=reserved, schedule_capacity_multiplier=4.0)
    with emulator(num_sms=7) as machine:
        found = run_layer(case, ep_size, config)
    comm = 0 if ep_size == 1 else 2
    pair = reserved + comm // 2 + 1 <= 3
    grid = (7 - reserved) // 2 * 2 if pair else 7 - reserved
    facts = found.facts
    assert (facts.grid, facts.comm_ctas, facts.pair) == (grid, comm, pair)
    launches = [r for r in machine.report.launches if r.kernel.startswith("forward")]
    assert [r.grid[0] for r in launches] == [grid] * ep_size
    assert all(("single" in r.kernel) == (not pair) for r in launches)


@pytest.mark.parametrize("reserved", [1, 3])
@pytest.mark.parametrize("ep_size", [2])
def test_the_grid_leaves_reserved_sms_free(ep_size, reserved):
    case = integer_case(Shape(150, 64, 256, 8, 3))
    config = dataclasses.replace(
        SMALL, reserved_sms=reserved, schedule_capacity_multiplier=4.0, fwd_num_comm_sms=1
    )
    with emulator(num_sms=7) as machine:
        found = run_layer(case, ep_size, config)
    assert found.facts.grid == 7 - reserved
    assert found.facts.comm_ctas == 1  # an odd number: no pairs
    grids = [r.grid[0] for r in machine.report.launches if r.kernel.startswith("forward")]
    assert grids == [7 - reserved] * ep_size


@pytest.mark.parametrize("backward", [False, True])
def test_pairs_are_chosen_by_the_config_or_by_the_shape(backward):
    """In backward short tasks do not pay for pairs; what cannot work in pairs does not."""
    short, long = Shape(64, 128, 64, 4, 2), Shape(64, 4096, 4096, 4, 2)
    with emulator(num_sms=8):
        for shape, by_shape in ((short, not backward), (long, True)):
            for pairs, want in ((None, by_shape), (True, True), (False, False)):
                config = dataclasses.replace(SMALL, pairs=pairs)
                with functional.create_workspace(
                    config, Group.single("cpu"), max_tokens=64, hidden_size=shape.hidden_size,
                    intermediate_size=shape.intermediate_size, num_experts=4, topk=2,
                ) as workspace:  # fmt: skip
                    assert launch_shape(workspace, config, backward)[2] == want
                    full = dataclasses.replace(config, reserved_sms=4)
                    assert not launch_shape(workspace, full, backward)[2]


@pytest.mark.parametrize("ep_size", [1, 2])
def test_counters_tell_what_was_done(ep_size):
    case = integer_case(Shape(150, 64 * 5, 64 * 3, 8 * ep_size, 2, 1, 64))
    with emulator(), Layer(case, ep_size) as layer:
        found = layer()
        states = layer.workspace.ring.state()
    counters, facts = found.counters, found.facts
    blocks = int(found.schedule.ranks[-1].num_rows) // 128
    tokens = len(found.outputs[-1])
    up, down, shared_blocks = -(-192 // 128), -(-320 // 256), -(-tokens // 128)
    assert found.minibatches == blocks  # one block each
    assert [(s.minibatch, s.slot) for s in states] == [(i, i % 2) for i in range(blocks)]
    assert counters["y_ready"][:blocks] == [down] * blocks
    assert counters["hidden_ready"][:blocks] == [up] * blocks
    assert counters["shared_hidden_ready"][:shared_blocks] == [1] * shared_blocks
    tasks = blocks * (up + down) + shared_blocks * (1 + down)
    # Each pair also draws numbers past the end, one of them ahead.
    assert facts.pair
    assert tasks < found.tasks_drawn <= tasks + 1 + 2 * (facts.grid - facts.comm_ctas)
    if ep_size > 1:
        per_block = counters["x_ready"][0]
        assert counters["x_ready"][:blocks] == [per_block] * blocks
        assert not any(
            counters["y_free"]
        )  # down's tasks push their rows: comm workers only dispatch
        items = per_block * blocks
        assert items < counters["comm_ticket"][0] <= items + 2 * facts.comm_ctas


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("ep_size", [1, 2, 3])
def test_one_schedule_serves_a_whole_training_step(ep_size, recompute):
    """Dispatch and combine, their reverses, and the replay of dispatch: built once, and no ids staged again."""
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(600, 64, generator=rng).bfloat16().requires_grad_()
    weights = torch.rand(600, 2, generator=rng).requires_grad_()
    ids = torch.rand(600, 6, generator=rng).argsort(-1)[:, :2].contiguous()
    with emulator() as machine:
        group = Group.virtual(ep_size, "cpu") if ep_size > 1 else None
        layer = MoELayer(64, 64, 6, 2, group=group, config=SMALL, recompute=recompute)
        out = layer(x, weights, ids)
        _, workspace = layer.spec.workspace(layer._max_tokens(len(x)), x.device)
        forward = workspace.counters()
        out.backward(torch.ones_like(out))
        names, backward = launched(machine), workspace.counters("backward")
        functional.clear_workspace_cache()
    assert x.grad is not None and x.grad.any()
    # Only inputs are kept with ``recompute``: not the schedule either, but one serves all that is rebuilt.
    for name in ["stage_ids", *SCHEDULE]:
        assert names.count(name) == (2 if recompute else 1) * ep_size, names
    path = "direct" if ep_size == 1 else "ring"
    first = [f"forward_{path}", f"recompute_{path}"] if recompute else [f"forward_{path}_save"]
    megakernels = ("forward", "recompute", "backward")
    found = [n.removesuffix("_single") for n in names if n.startswith(megakernels)]
    assert found == [n for n in (*first, f"backward_{path}_bf16") for _ in range(ep_size)]
    if ep_size > 1:
        for counters, transfers in (
            (forward, ("x_ready", "y_ready")),  # down's tasks push what they count in y_ready
            (backward, ("dispatch", "push")),
        ):
            for transfer in transfers:
                assert any(counters[transfer]), transfer
        # More rows than the ring holds, so that dispatch was replayed.
        assert any(backward["replay"])
