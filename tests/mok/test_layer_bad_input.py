"""Wrong arguments of the layer: each gets an error that names rule, value and remedy."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch

from mok import capture, functional
from mok.call import schedule_sizes
from mok.errors import (
    CapacityError,
    DeviceError,
    DtypeError,
    MokError,
    ResourceError,
    RouteError,
    ShapeError,
)
from mok.runtime.launch import set_active_emulator
from mok.runtime.workspace import Workspace
from tests.helpers_bad_input import (
    BF16,
    KINDS,
    WRONG,
    E,
    H,
    T,
    arguments,
    backward,
    ids,
    misaligned,
    schedule_of,
    workspace,
)
from tests.helpers_layer import SMALL, refused

NOT_IDS = [
    ("float", lambda: ids().float(), DtypeError, "int64 or int32", "float32"),
    ("int16", lambda: ids().short(), DtypeError, "int64 or int32", "int16"),
    ("bool", lambda: ids() > 0, DtypeError, "int64 or int32", "bool"),
    ("a list", lambda: ids().tolist(), DtypeError, "tensor", "list"),
    ("None", lambda: None, DtypeError, "tensor", "NoneType"),
    ("one dimension", lambda: ids().flatten(), ShapeError, "[T, 2]", "[24]"),
    ("another K", lambda: ids().view(8, 3), ShapeError, "[T, 2]", "[8, 3]"),
    ("strided", lambda: ids().t().contiguous().t(), ShapeError, "contiguous", "(1, 12)"),
    ("every other row", lambda: ids(2 * T)[::2], ShapeError, "contiguous", "(4, 1)"),
    ("elsewhere", lambda: ids().to("meta"), DeviceError, "device", "meta", "cpu"),
    ("two ranks", lambda: [ids(), ids()], ShapeError, "1 local rank", "2"),
    ("too many", lambda: ids(T + 1), CapacityError, "max_tokens", "12", "13"),
]


@pytest.mark.parametrize(
    ("make", "error", "words"), [(m, e, w) for _, m, e, *w in NOT_IDS], ids=[n[0] for n in NOT_IDS]
)
def test_what_is_no_ids(idle, make, error, words):
    with workspace() as made:
        if error is not CapacityError:
            words = ["top_experts", *words]
        with refused(error, *words):
            functional.build_schedule(made, SMALL, make())


@pytest.mark.parametrize(
    ("ep_size", "given", "words"),
    [(1, 3, ["4", "3"]), (2, [2, 3], ["rank 1", "2", "3"]), (2, [2], ["2", "1"])],
)
def test_num_local_experts(idle, ep_size, given, words):
    with workspace(ep_size) as made, refused(ShapeError, "num_local_experts", *words):
        tensors = [ids() for _ in range(ep_size)]
        functional.build_schedule(
            made, SMALL, tensors if ep_size > 1 else tensors[0], num_local_experts=given
        )


@pytest.mark.parametrize("bad", [E, -2, 2**31, -(2**63)])
def test_debug_mode_refuses_a_bad_id_at_once(idle, bad):
    wrong = ids()
    wrong[7, 1] = bad
    with workspace() as made:
        with refused(RouteError, "0…3", "-1", str(bad), "token 7", "k 1"):
            functional.build_schedule(made, dataclasses.replace(SMALL, debug=True), wrong)
        made.check()  # nothing was launched, so nothing was noted


NAMES = list(arguments())


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_of_the_wrong_kind(idle, name, wrong):
    change, error, word = WRONG[wrong]
    given = arguments()
    given[name] = change(given[name])
    with workspace() as made, refused(error, name, word):
        functional.forward(SMALL, made, schedule_of(made), *given.values())


@pytest.mark.parametrize("name", [n for n in NAMES if n != "router_weights"])
def test_a_tensor_that_is_not_aligned(idle, name):
    given = arguments()
    given[name] = misaligned(given[name])
    with workspace() as made, refused(ShapeError, name, "16-byte aligned", "clone"):
        functional.forward(SMALL, made, schedule_of(made), *given.values())


def test_router_weights_in_bf16(idle):
    given = arguments()
    given["router_weights"] = given["router_weights"].bfloat16()
    with workspace() as made, refused(DtypeError, "router_weights", "float32", "bfloat16"):
        functional.forward(SMALL, made, schedule_of(made), *given.values())


@pytest.mark.parametrize("name", ["x", "router_weights", "routed_gate", "routed_up", "routed_down"])
@pytest.mark.parametrize("value", [None, 3.0, "x"])
def test_what_is_no_tensor(idle, name, value):
    given = {**arguments(), name: value}
    with workspace() as made, refused(DtypeError, name, "tensor", type(value).__name__):
        functional.forward(SMALL, made, schedule_of(made), *given.values())


@pytest.mark.parametrize("name", ["x", "router_weights", "routed_gate", "routed_up", "routed_down"])
def test_one_tensor_per_virtual_rank(idle, name):
    given = arguments(2)
    with workspace(2) as made:
        for value in (given[name][0], given[name][:1], [*given[name], given[name][0]]):
            with refused(MokError, name, "local rank"):
                functional.forward(SMALL, made, schedule_of(made), *{**given, name: value}.values())


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_all_of_the_shared_expert_or_nothing(idle, missing):
    given = arguments()
    given.update(dict.fromkeys(["shared_down", "shared_gate", "shared_up"][:missing]))
    with workspace() as made, refused(ShapeError, "shared", "192", "weights are needed"):
        functional.forward(SMALL, made, schedule_of(made), *given.values())


def test_a_shared_expert_that_the_workspace_has_no_room_for(idle):
    with (
        workspace(shared_intermediate_size=None) as made,
        refused(ShapeError, "shared_intermediate_size", "shared_gate"),
    ):
        functional.forward(SMALL, made, schedule_of(made), *arguments().values())


@pytest.mark.parametrize("other", [{"num_experts": 3}, {"topk": 1}, {"max_tokens": 65}], ids=str)
def test_a_schedule_of_another_workspace(idle, other):
    with workspace() as made, workspace(**other) as stranger:
        schedule = schedule_of(made)
        schedule.sizes = schedule_sizes(stranger)
        with refused(ShapeError, "the same E, K, EP, tile", str(schedule_sizes(stranger))):
            functional.forward(SMALL, made, schedule, *arguments().values())


def test_launches_go_to_the_workspace_s_device(monkeypatch):
    """Also where another device is the current one."""
    entered = []

    @contextlib.contextmanager
    def device(wanted):
        entered.append(wanted)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    class OnGpu(Workspace):
        device = torch.device("cuda", 1)

        def __init__(self):
            pass

        def check_open(self):
            raise ResourceError("reached", len(entered))

    calls = [
        lambda w: functional.build_schedule(w, SMALL, ids()),
        lambda w: functional.forward(SMALL, w, None, *arguments().values()),
        lambda w: functional.forward(config=SMALL, workspace=w, schedule=None, **arguments()),
        lambda w: functional.recompute_forward_context(SMALL, w, None, *[None] * 6),
    ]
    for number, call in enumerate(calls, 1):
        with refused(ResourceError, "reached", str(number)):
            call(OnGpu())
    assert entered == [OnGpu.device] * len(calls)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with refused(ResourceError, "reached", str(len(calls))):  # nothing to enter
        calls[0](OnGpu())


def test_a_refused_workspace_is_closed(idle, monkeypatch):
    from mok.runtime import workspace as workspaces

    made = []
    original = workspaces.Workspace.__init__

    def remember(self, *args, **kwargs):
        original(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(workspaces.Workspace, "__init__", remember)
    with pytest.raises(ResourceError):
        workspace(2, config=dataclasses.replace(SMALL, fwd_num_comm_sms=500))
    assert [w.closed for w in made] == [True]


@pytest.mark.parametrize("limit", [-1.0, float("nan")])
def test_the_clamp(idle, limit):
    with workspace() as made, refused(ShapeError, "swiglu_limit", str(limit)):
        functional.forward(SMALL, made, schedule_of(made), *arguments().values(), limit)


@pytest.mark.parametrize(
    ("limit", "number"), [(torch.tensor(0.5), 0.5), (7, 7.0), (None, None)], ids=repr
)
@pytest.mark.parametrize("call", ["forward", "backward"])
def test_a_clamp_is_captured_as_a_number(idle, tmp_path, call, limit, number):
    with workspace() as made, capture.watch(tmp_path, on_nan=False) as watched:
        with pytest.raises(AssertionError, match="was compiled"):
            if call == "forward":
                functional.forward(SMALL, made, schedule_of(made), *arguments().values(), limit)
            backward(made, swiglu_limit=limit)
        watched.write("asked for")
    (document,) = capture.load([tmp_path])
    found = document["swiglu_limit"]
    assert found == number and type(found) is type(number)


def test_a_closed_workspace(idle):
    made = workspace()
    schedule = schedule_of(made)
    made.close()
    with refused(ResourceError, "workspace", "open", "closed"):
        functional.build_schedule(made, SMALL, ids())
    with refused(ResourceError, "workspace", "open", "closed"):
        functional.forward(SMALL, made, schedule, *arguments().values())


def test_another_number_of_ranks(idle):
    with workspace(2) as two, workspace(1) as one, refused(MokError, "rank"):
        functional.forward(SMALL, two, schedule_of(one), *arguments(2).values())


CALLS = {
    "build_schedule": lambda config, made, schedule: functional.build_schedule(made, config, ids()),
    "forward": lambda config, made, schedule: functional.forward(
        config, made, schedule, *arguments().values()
    ),
    "recompute": lambda config, made, schedule: functional.recompute_forward_context(
        config, made, schedule,
        *[arguments()[n] for n in ("x", "shared_gate", "shared_up", "routed_gate", "routed_up")],
    ),
    "backward": lambda config, made, schedule: functional.backward(
        config, made, schedule, None, torch.zeros(T, H, dtype=BF16), *arguments().values()
    ),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("value", KINDS, ids=repr)
def test_what_is_no_config_workspace_or_schedule(idle, call, value):
    shown = type(value).__name__
    with workspace() as made:
        schedule = schedule_of(made)
        with refused(DtypeError, "config must be a Config", shown):
            CALLS[call](value, made, schedule)
        with refused(DtypeError, "workspace must be a Workspace", shown, "create_workspace"):
            CALLS[call](SMALL, value, schedule)
        with refused(DtypeError, "workspace must be a Workspace", "Heap"):
            CALLS[call](SMALL, made.heap, schedule)
        if call != "build_schedule":
            with refused(DtypeError, "schedule must be a Schedule", shown, "build_schedule"):
                CALLS[call](SMALL, made, value)


@pytest.mark.parametrize("limit", ["x", "7", b"7", {}, [1.0], torch.ones(2)], ids=repr)
def test_a_clamp_that_is_no_number(idle, limit):
    with workspace() as made, refused(DtypeError, "swiglu_limit", repr(limit)):
        functional.forward(SMALL, made, schedule_of(made), *arguments().values(), limit)


@pytest.mark.parametrize("name", ["shared_gate", "shared_up", "shared_down"])
@pytest.mark.parametrize("value", ["x", 3, [torch.zeros(1)]], ids=["str", "int", "list"])
def test_a_shared_weight_that_is_no_tensor(idle, name, value):
    given = {**arguments(), name: value}
    with workspace() as made, refused(DtypeError, name, "tensor", type(value).__name__):
        functional.forward(SMALL, made, schedule_of(made), *given.values())


def test_a_workspace_that_outlives_its_emulator(idle):
    with workspace() as made:
        set_active_emulator(None)
        with refused(DeviceError, "inside an emulator", "no emulator", "with Emulator"):
            functional.build_schedule(made, SMALL, ids())
