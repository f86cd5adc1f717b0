"""Runs a call whose kernels record themselves: on the GPU of this machine, or in the emulator."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mok.config import Config, Shape
from mok.errors import DeviceError, MokError, ShapeError

if TYPE_CHECKING:
    from mok.runtime.trace import Trace
    from mok.tools.simulator.machine import Machine

EMULATED_FLOP = 2e10
"""The most that the emulator is asked for: minutes."""


def ids_for(text: str, shape: Shape) -> NDArray[np.int64]:
    """Expert ids [EP, T, K]: drawn ("uniform"), or from a .npy file.

    Raises:
        MokError: neither.
    """
    from mok.reference import routing
    from mok.tools.simulator.routing import read_ids

    if text.endswith(".npy"):
        ids = read_ids(text)
    elif text == "uniform":
        tokens = shape.num_tokens * shape.ep_size
        ids = routing("random", tokens, shape.num_experts, shape.topk).numpy()
    else:
        raise MokError("a call that runs takes uniform routing or a .npy file of ids", repr(text))
    size = (shape.ep_size, shape.num_tokens, shape.topk)
    if ids.size != math.prod(size):
        raise ShapeError(
            f"ids of a call that runs must be [EP, T, K] = {list(size)}",
            list(ids.shape),
            "Give their --shape and --ep",
        )
    return ids.reshape(size)


def traced(
    shape: Shape,
    config: Config,
    machine: Machine,
    direction: str,
    place: str,
    ids: NDArray[np.int64],
) -> list[Trace]:
    """Traces of one call on virtual ranks, one per rank; the second call counts (the first warms up).

    Args:
        shape: T is each rank's.
        place: "emulator" (of ``machine``'s architecture and SMs) or "hardware".
    """
    flop = 6.0 * ids.size * shape.hidden_size * shape.intermediate_size
    if place == "emulator" and flop > EMULATED_FLOP:
        raise ShapeError(
            "a call in the emulator must be small",
            f"{flop:.1e} FLOP",
            "Give a --shape such as 128,128,64,4,2",
        )
    with _place(machine, place) as device:
        return _run(shape, dataclasses.replace(config, trace=True), direction, place, device, ids)


@contextlib.contextmanager
def _place(machine: Machine, place: str) -> Any:
    import torch

    if place == "emulator":
        from mok.tools.emulator import Emulator

        with Emulator(machine.arch, num_sms=machine.num_sms):
            yield torch.device("cpu")
        return
    from mok.runtime.device import best_backend

    found = best_backend()
    if found.device is None or found.arch != machine.arch:
        raise DeviceError(
            f"tracing on hardware needs a GPU of {machine.arch}, that of --machine {machine.name}",
            found.reason or str(found.arch),
        )
    yield torch.device("cuda", found.device.ordinal)


def _run(
    shape: Shape, config: Config, direction: str, place: str, device: Any, ids: NDArray[np.int64]
) -> list[Trace]:
    import torch

    from mok import functional
    from mok.kernels_cute.trace import PROGRAMS
    from mok.reference import random_case
    from mok.runtime.group import Group

    ep, tokens = shape.ep_size, shape.num_tokens
    whole = dataclasses.replace(shape, ep_size=1, num_tokens=ep * tokens)
    case = random_case(whole, device=device)
    experts = [shape.experts_on(r) for r in range(ep)]

    def each(values: Any) -> Any:
        return list(values) if ep > 1 else values[0]

    split = lambda t: each([part.clone() for part in t.split(tokens)])  # noqa: E731
    shared: tuple[Any, Any, Any] = (None, None, None)
    if case.shared is not None:
        shared = (case.shared.gate[0], case.shared.up[0], case.shared.down[0])
    weights = [
        each([w[p.start : p.stop] for p in experts])
        for w in (case.routed.gate, case.routed.up, case.routed.down)
    ]
    x, router = split(case.x), split(case.router_weights)
    chosen = torch.from_numpy(np.ascontiguousarray(ids.reshape(-1, shape.topk))).to(device)
    with functional.create_workspace(
        config, Group.virtual(ep, device) if ep > 1 else Group.single(device), device=device,
        max_tokens=max(1, tokens), hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size, num_experts=shape.num_experts,
        topk=shape.topk, shared_intermediate_size=shape.shared_intermediate_size,
    ) as workspace:  # fmt: skip
        schedule = functional.build_schedule(workspace, config, split(chosen))
        for _ in range(1 if place == "emulator" else 2):
            _, context = functional.forward(
                config, workspace, schedule, x, router, *shared, *weights,
                save_context=direction != "recompute",
            )  # fmt: skip
            if direction == "recompute":
                functional.recompute_forward_context(
                    config, workspace, schedule, x, *shared[:2], *weights[:2]
                )
            if direction == "backward":
                assert context is not None
                functional.backward(
                    config, workspace, schedule, context, split(torch.randn_like(case.x)), x,
                    router, *shared, *weights,
                )  # fmt: skip
        found = workspace.recorder.traces(place)
        workspace.check()
    program = PROGRAMS.index(direction)
    return [t for t in found if t.notes["program"] == PROGRAMS[program]]
