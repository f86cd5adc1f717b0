"""Wrong arguments of backward: contexts that were changed, gradient buffers of another kind."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mok import functional
from mok.errors import (
    ContextError,
    DtypeError,
    MokError,
    ShapeError,
)
from mok.mxfp8 import mxfp8_quantize
from mok.runtime.launch import set_active_emulator
from tests.helpers_bad_input import (
    BF16,
    FP32,
    WRONG,
    E,
    H,
    Idle,
    K,
    T,
    arguments,
    backward,
    context_of,
    gradient_buffers,
    misaligned,
    schedule_of,
    workspace,
)
from tests.helpers_layer import SMALL, refused


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
