"""Wrong arguments of the layer: each gets an error that names rule, value and remedy."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mok import capture, functional
from mok.call import schedule_sizes
from mok.config import Config, Shape
from mok.errors import (
    CapacityError,
    ContextError,
    DeviceError,
    DriverError,
    DtypeError,
    GroupError,
    MissingDependencyError,
    MokError,
    ResourceError,
    RouteError,
    ShapeError,
)
from mok.mxfp8 import mxfp8_quantize
from mok.runtime import compile as compiler
from mok.runtime import device as runtime_device
from mok.runtime import driver
from mok.runtime.group import Group
from mok.runtime.launch import set_active_emulator
from mok.runtime.workspace import Workspace
from tests.helpers_layer import SMALL, refused

T, H, I, E, K, SHARED = 12, 128, 64, 4, 2, 192
BF16, FP32 = torch.bfloat16, torch.float32


class Idle:
    """Stands in for the emulator and launches nothing: arguments are refused before that."""

    arch = "sm_90a"
    num_sms = 6

    def launch(self, compiled: Any, args: Any) -> None:
        raise AssertionError("launched in spite of a wrong argument")


@pytest.fixture
def standin(monkeypatch):
    monkeypatch.setattr(compiler, "_kernels", {})  # what is compiled here serves nobody else
    before = set_active_emulator(Idle())
    yield
    set_active_emulator(before)


@pytest.fixture
def idle(standin, monkeypatch):
    def refuse(spec: Any) -> None:
        raise AssertionError(f"{spec.name} was compiled in spite of a wrong argument")

    monkeypatch.setattr(compiler, "_compile_only", refuse)


def workspace(ep_size: int = 1, config: Config = SMALL, **changes: Any):
    sizes = {
        "max_tokens": T,
        "hidden_size": H,
        "intermediate_size": I,
        "num_experts": E,
        "topk": K,
        "shared_intermediate_size": SHARED,
    }
    group = Group.virtual(ep_size, torch.device("cpu"))
    return functional.create_workspace(config, group, **{**sizes, **changes})


# ------------------------------------------------------------------ sizes and tunables

SIZES = [
    ({"topk": 33}, ShapeError, "topk", "32", "33"),
    ({"topk": 0}, ShapeError, "topk", "1", "0"),
    ({"hidden_size": 100}, ShapeError, "hidden_size", "multiple of 64", "100", "128"),
    ({"intermediate_size": 32}, ShapeError, "intermediate_size", "64", "32"),
    ({"intermediate_size": 0}, ShapeError, "intermediate_size", "at least 1", "0"),
    ({"shared_intermediate_size": 65}, ShapeError, "shared_intermediate_size", "64", "65"),
    ({"num_experts": 0}, ShapeError, "num_experts", "at least 1", "0"),
    ({"num_experts": 2.0}, DtypeError, "num_experts", "int", "2.0"),
    ({"hidden_size": "128"}, DtypeError, "hidden_size", "int", "'128'"),
    ({"max_tokens": -1}, ShapeError, "max_tokens", "-1"),
    ({"max_tokens": 1.5}, DtypeError, "max_tokens", "int", "1.5"),
    ({"max_tokens": 2**30, "hidden_size": 64}, MokError, "max_tokens", "must be"),
    ({"num_experts": 6000}, ShapeError, "experts", "5632", "6000", "ranks"),
]


@pytest.mark.parametrize(("changes", "error", "words"), [(c, e, w) for c, e, *w in SIZES], ids=str)
def test_sizes(idle, changes, error, words):
    with refused(error, *words):
        workspace(**changes)


CONFIGS = [
    ({"minibatch_size": 100}, ShapeError, "minibatch_size", "multiple of 128", "100"),
    ({"minibatch_size": 0}, ShapeError, "minibatch_size", "0"),
    ({"macrobatch_size": 200}, ShapeError, "macrobatch_size", "multiple", "200"),
    ({"fwd_num_comm_sms": 0}, ShapeError, "fwd_num_comm_sms", "at least 1", "0"),
    ({"fwd_num_comm_sms": 2.5}, DtypeError, "fwd_num_comm_sms", "int", "2.5"),
    ({"reserved_sms": -1}, ShapeError, "reserved_sms", "-1"),
    ({"timeout_s": 0.0}, ShapeError, "timeout_s", "positive", "0.0"),
    ({"timeout_s": float("nan")}, ShapeError, "timeout_s", "finite", "nan"),
    ({"schedule_capacity_multiplier": -0.5}, ShapeError, "schedule_capacity", "-0.5"),
    ({"schedule_capacity_multiplier": "1"}, DtypeError, "schedule_capacity", "number", "'1'"),
]


@pytest.mark.parametrize(
    ("changes", "error", "words"), [(c, e, w) for c, e, *w in CONFIGS], ids=str
)
def test_tunables(changes, error, words):
    with refused(error, *words):
        dataclasses.replace(SMALL, **changes)


FEW_SMS = [  # on 6 SMs
    (2, {"fwd_num_comm_sms": 6}),
    (2, {"bwd_num_comm_sms": 6}),
    (2, {"fwd_num_comm_sms": 3, "reserved_sms": 3}),
    (1, {"reserved_sms": 6}),
    (1, {"reserved_sms": 100}),
]


@pytest.mark.parametrize(("ep_size", "changes"), FEW_SMS, ids=str)
def test_too_few_free_sms(idle, ep_size, changes):
    config = dataclasses.replace(SMALL, **changes)
    with refused(ResourceError, "SMs", "comm", "6", "lower"):
        workspace(ep_size, config)
    # The tunables of a call may differ from those the workspace was made with.
    if "bwd_num_comm_sms" not in changes:
        with workspace(ep_size) as made, refused(ResourceError, "SMs", "comm", "lower"):
            functional.forward(config, made, schedule_of(made), *arguments(ep_size).values())


def test_comm_sms_do_not_count_on_one_rank(idle):
    workspace(1, dataclasses.replace(SMALL, fwd_num_comm_sms=6)).close()


@pytest.mark.parametrize(
    "changes",
    [{"minibatch_size": 256}, {"macrobatch_size": 128}, {"macrobatch_size": 512}],
    ids=str,
)
@pytest.mark.parametrize("ep_size", [1, 2])
def test_a_call_cannot_change_what_buffers_are_sized_by(idle, ep_size, changes):
    config = dataclasses.replace(SMALL, **changes)
    (name,) = changes
    with workspace(ep_size, max_tokens=600) as made, refused(MokError, name):
        functional.forward(config, made, schedule_of(made), *arguments(ep_size).values())


# ------------------------------------------------------------------ the ids


def ids(count: int = T) -> torch.Tensor:
    return torch.arange(count * K).view(count, K) % E


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


# ------------------------------------------------------------------ forward's tensors


def schedule_of(made) -> functional.Schedule:
    """A schedule as ``build_schedule`` returns it, without running anything."""
    ranks = made.group.local_ranks
    buffers = [made.new_schedule(r) for r in ranks]
    return functional.Schedule(buffers, [ids() for _ in ranks], schedule_sizes(made))


def arguments(ep_size: int = 1) -> dict[str, Any]:
    experts = E // ep_size

    def each(*size: int, dtype: torch.dtype = BF16) -> Any:
        tensors = [torch.zeros(size, dtype=dtype) for _ in range(ep_size)]
        return tensors if ep_size > 1 else tensors[0]

    return {
        "x": each(T, H),
        "router_weights": each(T, K, dtype=FP32),
        "shared_gate": torch.zeros(SHARED, H, dtype=BF16),
        "shared_up": torch.zeros(SHARED, H, dtype=BF16),
        "shared_down": torch.zeros(H, SHARED, dtype=BF16),
        "routed_gate": each(experts, I, H),
        "routed_up": each(experts, I, H),
        "routed_down": each(experts, H, I),
    }


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    storage = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
    return storage[1:].view(tensor.shape)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)[
        ..., : tensor.shape[-1]
    ]


NAMES = list(arguments())
WRONG = {
    "float16": (lambda t: t.half(), DtypeError, "float16"),
    "float64": (lambda t: t.double(), DtypeError, "float64"),
    "int32": (lambda t: t.int(), DtypeError, "int32"),
    "elsewhere": (lambda t: t.to("meta"), DeviceError, "meta"),
    "strided": (strided, ShapeError, "contiguous"),
    "transposed": (lambda t: t.transpose(-1, -2), ShapeError, "["),
    "short": (lambda t: t[1:], ShapeError, "["),
    "long": (lambda t: torch.cat([t, t[:1]]), ShapeError, "["),
    "narrow": (lambda t: t[..., :-1].contiguous(), ShapeError, "["),
    "flat": (lambda t: t.flatten(), ShapeError, "["),
    "deep": (lambda t: t[None], ShapeError, "["),
}


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


# ------------------------------------------------------------------ backward's tensors


def context_of(made, ring: int | None = None) -> functional.ForwardContext:
    """A context as ``forward`` returns it with ``save_context``, without running anything."""
    ring = made.sizes.ring if ring is None else ring
    ranks = len(made.group.local_ranks)

    def each(*size: int) -> list[torch.Tensor]:
        return [torch.zeros(size, dtype=BF16) for _ in range(ranks)]

    return functional.ForwardContext(
        x_routed=[None] * ranks if made.sizes.direct else each(ring, H),
        gate_routed=each(ring, I),
        up_routed=each(ring, I),
        gate_shared=each(T, SHARED),
        up_shared=each(T, SHARED),
    )


def gradient_buffers(dtype: torch.dtype = BF16) -> list[Any]:
    given = arguments()
    names = ("routed_gate", "routed_up", "routed_down", "shared_gate", "shared_up", "shared_down")
    return [torch.zeros_like(given[n], dtype=dtype) for n in names]


def backward(made, *, context=None, grad_output=None, **options: Any) -> None:
    ranks = len(made.group.local_ranks)
    dy = torch.zeros(T, H, dtype=BF16) if grad_output is None else grad_output
    functional.backward(
        SMALL, made, schedule_of(made), context_of(made) if context is None else context,
        [dy] * ranks if ranks > 1 else dy, *arguments(ranks).values(), **options,
    )  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_gradient_of_the_wrong_kind(idle, wrong):
    change, error, word = WRONG[wrong]
    with workspace() as made, refused(error, "grad_output", word):
        backward(made, grad_output=change(torch.zeros(T, H, dtype=BF16)))


def unsaved(made, what: str) -> functional.ForwardContext | None:
    context = context_of(made)
    if what == "None":
        return None
    if what == "empty":
        return functional.ForwardContext()
    context.gate_shared, context.up_shared = [None], [None]
    return context


@pytest.mark.parametrize("what", ["None", "empty", "without the shared expert"])
def test_backward_without_a_saved_context(idle, what):
    with workspace() as made, refused(MokError, "context", "save_context"):
        functional.backward(
            SMALL, made, schedule_of(made), unsaved(made, what), torch.zeros(T, H, dtype=BF16),
            *arguments().values(),
        )  # fmt: skip


def test_a_context_used_twice(idle):
    with workspace() as made:
        context = context_of(made)
        context.used = True
        with refused(ContextError, "used", "keep_context=True", "recompute_forward_context"):
            backward(made, context=context)


CHANGES = {
    "narrow": (lambda t: t[:, :32], "shape"),
    "short": (lambda t: t[:-1], "shape"),
    "without dimensions": (lambda t: t.flatten()[0], "shape"),
    "float32": (lambda t: t.float(), "bfloat16"),
    "elsewhere": (lambda t: t.to("meta"), "device"),
    "strided": (lambda t: t.t().contiguous().t(), "contiguous"),
    "misaligned": (misaligned, "16-byte aligned"),
    "None": (lambda t: None, "no saved tensors"),
    "text": (lambda t: "x", "no saved tensors"),
}


@pytest.mark.parametrize("changed", CHANGES)
@pytest.mark.parametrize(
    ("ep_size", "name"),
    [
        *((n, name) for n in (1, 2) for name in ("gate_routed", "up_routed")),
        *((n, name) for n in (1, 2) for name in ("gate_shared", "up_shared")),
        (2, "x_routed"),
    ],
)
def test_a_context_that_was_changed(idle, ep_size, name, changed):
    change, word = CHANGES[changed]
    with workspace(ep_size) as made:
        context = context_of(made)
        parts = getattr(context, name)
        setattr(context, name, [*parts[:-1], change(parts[-1])])  # the last rank's alone
        with refused(MokError, "context", name, word):
            backward(made, context=context)
        setattr(context, name, 3)
        with refused(MokError, "context", "no saved tensors"):
            backward(made, context=context)
        setattr(context, name, [*parts, parts[0]])
        with refused(ShapeError, "context", f"{ep_size + 1} saved tensors for {ep_size} ranks"):
            backward(made, context=context)


@pytest.mark.parametrize("ep_size", [1, 2])
def test_a_context_as_forward_saves_it_is_taken(idle, ep_size):
    with workspace(ep_size) as made, pytest.raises(AssertionError, match="was compiled"):
        backward(made)


@pytest.mark.parametrize("name", ["x_routed", "x_scales", "gate_routed"])
@pytest.mark.parametrize("wrong", ["BF16", "short", "strided", "misaligned", "None"])
def test_a_quantised_context_that_was_changed(idle, monkeypatch, name, wrong):
    """With block-scaled MMAs the ring holds bytes, and its scales are saved, too."""
    monkeypatch.setattr(Idle, "arch", "sm_100a")
    change, word = {
        "BF16": (lambda t: t.float() if t.dtype == BF16 else t.bfloat16(), "must be"),
        "short": (lambda t: t[:-1], "shape"),
        "strided": (lambda t: t.repeat_interleave(2, dim=0)[::2], "contiguous"),
        "misaligned": (misaligned, "16-byte aligned"),
        "None": (lambda t: None, "no saved tensors"),
    }[wrong]
    config = dataclasses.replace(SMALL, minibatch_size=256)
    sizes = {"intermediate_size": 128, "shared_intermediate_size": None, "precision": "mxfp8"}
    with workspace(1, config, **sizes) as made:
        assert made.sizes.scaled
        ring, experts = made.sizes.ring, (E, 128, 128)
        context = functional.ForwardContext(
            x_routed=[torch.zeros(ring, H, dtype=torch.uint8)],
            x_scales=[torch.zeros(ring * H // 32, dtype=torch.uint8)],
            gate_routed=[torch.zeros(ring, 128, dtype=BF16)],
            up_routed=[torch.zeros(ring, 128, dtype=BF16)],
            gate_shared=[None],
            up_shared=[None],
        )
        emulator = set_active_emulator(None)  # by torch, without a kernel
        weight = mxfp8_quantize(torch.zeros(experts, dtype=BF16), expanded=False)
        set_active_emulator(emulator)

        def call() -> None:
            functional.backward(
                config, made, schedule_of(made), context, torch.zeros(T, H, dtype=BF16),
                torch.zeros(T, H, dtype=BF16), torch.zeros(T, K), *[None] * 3, *[weight] * 3,
            )  # fmt: skip

        with pytest.raises(AssertionError, match="was compiled"):
            call()
        setattr(context, name, [change(getattr(context, name)[0])])
        with refused(MokError, "context", name, word):
            call()


def test_a_schedule_without_its_ids(idle):
    with workspace() as made:
        schedule = schedule_of(made)
        schedule.top_experts = []
        with refused(ShapeError, "schedule", "local ranks", "Build it"):
            functional.forward(SMALL, made, schedule, *arguments().values())


@pytest.mark.parametrize("ring", [128, 1024])
def test_a_context_of_another_workspace(idle, ring):
    with workspace(max_tokens=300) as made, refused(MokError, "context", str(ring)):
        assert made.sizes.ring not in (128, 1024)
        backward(made, context=context_of(made, ring))


@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize("wrong", ["float16", "elsewhere", "strided", "short", "flat"])
def test_a_main_grad_of_the_wrong_kind(idle, index, wrong):
    change, error, word = WRONG[wrong]
    grads = gradient_buffers()
    grads[index] = change(grads[index])
    with workspace() as made, refused(error, "grad", word):
        backward(made, grads=grads, accumulate=True)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"grad_dtype": torch.float16}, DtypeError, ["bfloat16 or float32", "float16"]),
        ({"accumulate": True}, ShapeError, ["accumulate", "buffers", "None"]),
        ({"grads": gradient_buffers()[:5]}, ShapeError, ["6", "5"]),
        ({"grads": gradient_buffers(), "grad_dtype": FP32}, DtypeError, ["float32", "bfloat16"]),
    ],
    ids=["dtype", "nothing to add to", "five", "buffers of another dtype"],
)
def test_gradient_options(idle, options, error, words):
    with workspace() as made, refused(error, "grad", *words):
        backward(made, **options)


@pytest.mark.parametrize("grads", [3, [3] * 6])
def test_gradient_buffers_that_are_none(idle, grads):
    with workspace() as made, refused(DtypeError, "grad", "must be", "int"):
        backward(made, grads=grads)


# ------------------------------------------------------------------ objects of another kind

KINDS = [{}, None, "x", 3]
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


@pytest.mark.parametrize("make", [functional.create_workspace, functional.get_workspace])
def test_what_no_workspace_is_made_with(idle, make):
    sizes = {"hidden_size": H, "intermediate_size": I, "num_experts": E, "topk": K, "max_tokens": T}
    group = Group.virtual(1, torch.device("cpu"))
    for value in KINDS:
        with refused(DtypeError, "config must be a Config", type(value).__name__):
            make(value, group, **sizes)
    for value in ({}, "x", 3):
        with refused(DtypeError, "group must be a Group", type(value).__name__):
            make(SMALL, value, **sizes)
    set_active_emulator(None)
    for value in ("nodevice", {}):
        with refused(DeviceError, "one that torch knows", repr(value)):
            make(SMALL, None, device=value, **sizes)


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


def test_what_no_config_is_suggested_for():
    shape = Shape(8, 64, 64, 4, 2)
    with refused(DtypeError, "mok.Shape", "str"):
        Config.suggest("x", "h200")  # type: ignore[arg-type]
    with refused(DtypeError, "precision", "'fp4'"):
        Config.suggest(shape, "h200", "fp4")
    for device in (None, 3.5, {}):
        with refused(DeviceError, "needs a GPU", "'h200'"):
            Config.suggest(shape, device)


@pytest.mark.parametrize("size", ["x", None, 1.5, True, 10**9, -1])
def test_what_is_no_number_of_virtual_ranks(size):
    with refused(GroupError, "1…4096", repr(size)):
        Group.virtual(size)


# ------------------------------------------------------------------ the machine


@pytest.fixture
def fake_driver(monkeypatch):
    """A driver of a given version (None: there is no driver)."""

    def install(version: int | None) -> None:
        def missing(*_: Any) -> Any:
            raise RuntimeError("no libcuda.so.1")

        success = SimpleNamespace(CUDA_SUCCESS=0)
        fake = SimpleNamespace(
            CUresult=success,
            cuInit=missing if version is None else lambda _: (0,),
            cuDriverGetVersion=missing if version is None else lambda: (0, version),
        )
        monkeypatch.setattr(driver, "bindings", lambda: fake)
        monkeypatch.setattr(runtime_device, "bindings", lambda: fake)

    for cache in (driver.init, runtime_device._device_info):
        cache.cache_clear()
    yield install
    for cache in (driver.init, runtime_device._device_info):
        cache.cache_clear()


def on_gpu() -> None:
    functional.create_workspace(
        SMALL, device="cuda:0", max_tokens=T, hidden_size=H, intermediate_size=I,
        num_experts=E, topk=K,
    )  # fmt: skip


def test_a_driver_that_is_too_old(fake_driver):
    fake_driver(12080)
    with refused(DriverError, "580", "12.8", "update"):
        on_gpu()


def test_no_driver(fake_driver):
    fake_driver(None)
    with refused(DriverError, "driver", "no libcuda", "580"):
        on_gpu()


def test_a_workspace_on_the_cpu():
    with refused(DeviceError, "CUDA", "cpu", "cuda"):
        functional.create_workspace(
            SMALL, device="cpu", max_tokens=T, hidden_size=H, intermediate_size=I,
            num_experts=E, topk=K,
        )  # fmt: skip


@pytest.mark.parametrize("module", ["cutlass", "cutlass.cute"])
def test_a_missing_dsl(standin, monkeypatch, module):
    for name in [n for n in sys.modules if n.split(".")[0] == "cutlass"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with workspace() as made, refused(MissingDependencyError, "CuTe DSL", module, "pip install"):
        functional.build_schedule(made, SMALL, ids())


def test_cuda_python_is_missing(fake_driver, monkeypatch):
    monkeypatch.undo()
    driver.bindings.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    try:
        with refused(MissingDependencyError, "cuda-python", "pip install"):
            on_gpu()
    finally:
        driver.bindings.cache_clear()


def test_ep_size_is_the_groups(idle):
    with refused(GroupError, "ep_size", "3", "2"):
        Workspace(
            Group.virtual(2),
            Shape(0, H, I, E, K, 3),
            SMALL,
            T,
            torch.device("cpu"),
            "sm_90a",
            "host",
        )
