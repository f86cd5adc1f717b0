"""Comm SMs for ``Config.suggest``: the part of ``mok plan`` that is quick enough for a first call.

How many SMs communicate matters most and follows from no rule of thumb: of 132 SMs a Mixtral layer on two
H200s wants 4 and a Qwen3-30B layer 12, in backward 16. So the model tries some numbers, each direction on its
own, on a call of some minibatches with as many rows an expert: at most 18 calls, kept for the process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache, lru_cache

from mok.config import Config, Shape
from mok.tools.simulator.machine import Machine, load_machine
from mok.tools.simulator.routing import balanced
from mok.tools.simulator.scenario import Direction, Scenario
from mok.tools.simulator.simulate import simulate

STEPS = (4, 6, 8, 12, 16, 20, 24, 28, 32, 36, 40, 48, 56)
COARSE = (
    4,
    8,
    16,
    24,
    36,
    48,
)  # the curve has several minima: first all over, then beside the best
MINIBATCHES = 32  # of the call that is simulated: enough for the steady state to decide
TIE, CLIFF = 0.025, 1.05
"""Where the number below the best one is slower by ``CLIFF``, the best stands at an edge that the model does not
know to a few per cent: the next larger one is taken if it costs no more than ``TIE``. Two H200s, DeepSeek-V3,
combined: forward 430, 556, 581 TFLOP/s with 4, 6, 8, of which the model thinks the last 0.5 % slower than the
second. One H200, EP 2, Sonic 7B: backward 1.94, 1.53 ms with 16, 24; 20, which the model thinks 1.1 % faster than
24, lost 4 % (docs/measurements/2026-11-30-h200-exhaustive.jsonl). Qwen3-30B, pushed, EP 4: on one H200 8 lost
14 % to 12 (2026-12-01-h200-push-virtual.json), which on links of their own the model thinks 2.2 % slower than 8;
there it makes too much of more comm SMs (20: + 5.5 %, 2026-11-30-2xh200-push.json)."""
NAMES: tuple[tuple[Direction, str], ...] = (
    ("forward", "fwd_num_comm_sms"),
    ("backward", "bwd_num_comm_sms"),
)
KNOWN = {("sm_90a", 132): "h200", ("sm_100a", 148): "gb200", ("sm_103a", 148): "gb300"}
"""The machine that stands for a GPU of an architecture and a number of SMs."""


def machine_for(arch: str, num_sms: int) -> Machine | None:
    """The machine file for a GPU; None where there is none, as for a small emulated one."""
    name = KNOWN.get((arch, num_sms))
    return load_machine(name) if name else None


def with_comm_sms(
    config: Config,
    shape: Shape,
    arch: str,
    num_sms: int,
    precision: str = "bf16",
    push: bool | None = None,
) -> Config:
    """``config`` with the comm SMs that the model finds best; itself where they do not matter.

    ``push``: for kernels whose tasks send their rows themselves, or do not; None: as they do by default.
    """
    moves = shape.ep_size > 1 or precision == "mxfp8"
    if not moves or shape.num_tokens == 0 or (arch, num_sms) not in KNOWN:
        return config
    rows = MINIBATCHES * config.minibatch_size
    tokens = min(shape.num_tokens, -(-rows // shape.topk))
    experts = -(-shape.max_local_experts * tokens // shape.num_tokens)
    small = dataclasses.replace(shape, num_tokens=tokens, num_experts=shape.ep_size * experts)
    start = dataclasses.replace(config, macrobatch_size=rows)
    forward, backward = _best(start, small, arch, num_sms, precision, push)
    return dataclasses.replace(config, fwd_num_comm_sms=forward, bwd_num_comm_sms=backward)


@lru_cache(maxsize=256)
def _best(
    start: Config, shape: Shape, arch: str, num_sms: int, precision: str, push: bool | None
) -> tuple[int, ...]:
    machine = machine_for(arch, num_sms)
    assert machine is not None
    routing = balanced(shape)
    gains: dict[str, float] = {}  # the clock of the last call of a direction

    @cache
    def ms(direction: Direction, name: str, value: int) -> float:
        changes: dict[str, int] = {name: value}
        config = dataclasses.replace(start, **changes)  # type: ignore[arg-type]
        scenario = Scenario(
            shape, config, machine, direction, precision, routing=routing,  # type: ignore[arg-type]
            save_context=direction == "forward", push=push,
        )  # fmt: skip
        found = simulate(scenario, start_gain=gains.get(direction, 1.0))
        gains[direction] = found.scenario.machine.gain
        return found.ms

    found = []
    for direction, name in NAMES:
        coarse = min(COARSE, key=lambda n: ms(direction, name, n))
        at = STEPS.index(coarse)
        near = STEPS[max(0, at - 1) : at + 2]
        best = min(near, key=lambda n: ms(direction, name, n))
        found.append(off_the_edge(best, STEPS, lambda n: ms(direction, name, n)))  # noqa: B023
    return tuple(found)


def off_the_edge(best: int, steps: Sequence[int], ms: Callable[[int], float]) -> int:
    """``best`` of the numbers ``steps``, or the next larger one where that is safer; ``ms``: a number's time."""
    at = steps.index(best)
    below, above = steps[max(0, at - 1)], steps[min(len(steps) - 1, at + 1)]
    time = ms(best)
    return above if ms(below) > CLIFF * time and ms(above) <= (1 + TIE) * time else best
