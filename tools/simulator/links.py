"""Push against pull: what signalling costs, and how well links are used under imbalance.

Two experiments beside the engine. *Signalling*: whoever pulls reads what a device barrier made complete,
and another barrier must pass before it may be overwritten; whoever pushes must tell the receiver what has
arrived, so each task of a comm worker waits for the acknowledgement of its stores, one trip over NVLink,
before it may signal. *Imbalance*: rows flow as fluids through the ports of all GPUs. A receiver pulls from
all sources at once. A sender that pushes goes round the receivers, each sender starting at another one;
while the port of a crowded receiver is full, its senders wait there and the other receivers' ports idle.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mok.errors import MokError, ShapeError
from mok.tools.simulator.load import critical, loads
from mok.tools.simulator.machine import Machine
from mok.tools.simulator.scenario import Scenario
from mok.tools.simulator.simulate import build
from mok.tools.simulator.upstream_comm import PULL

Floats = NDArray[np.float64]
EPSILON = 1e-9


def signalling(scenario: Scenario) -> dict[str, float]:
    """Seconds that dispatch spends on signalling, with upstream's tasks: {"pull", "push"}.

    Raises:
        MokError: not upstream's program, or a single rank.
    """
    if scenario.program != "upstream" or scenario.shape.ep_size == 1:
        raise MokError(
            "signalling is that of upstream's program between ranks",
            f"{scenario.program}, EP {scenario.shape.ep_size}",
        )
    m = scenario.machine
    barrier = m["barrier_s"] + m["launch_s"]
    items = build(scenario, critical(loads(scenario, 256))[0]).items
    assert items.step is not None
    worker = np.array(items.step)[np.array(items.kind) == PULL] % scenario.comm_sms
    turns = int(np.bincount(worker).max()) if len(worker) else 0
    return {"pull": 2 * barrier, "push": barrier + turns * m["nvlink_latency_s"]}


def drain(
    flows: list[list[tuple[int, int, float]]], ports: int, data: float, reply: float
) -> float:
    """Seconds until all flows are through, on ports of one byte a second in each direction.

    Args:
        flows: lists of (source, destination, bytes); a list's entries go one after the other, and the
            first ones of all lists at the same time, each as fast as the fullest port allows.
        data, reply: bytes on the wire per byte, with the data and against it.
    """
    todo = [list(f) for f in flows]
    now = 0.0
    while active := [f for f in todo if f]:
        heads = np.array([f[0] for f in active])
        source, target = heads[:, 0].astype(int), heads[:, 1].astype(int)
        use = np.zeros((len(active), 2 * ports))  # sending, then receiving
        each = np.arange(len(active))
        for port, amount in (
            (source, data), (ports + target, data), (target, reply), (ports + source, reply)
        ):  # fmt: skip
            np.add.at(use, (each, port), amount)
        use[source == target] = 0.0  # local rows take no link
        rate = _fair(use)
        step = float((heads[:, 2] / rate).min())
        now += step
        for f, r in zip(active, rate.tolist(), strict=True):
            left = f[0][2] - r * step
            if left <= EPSILON:
                f.pop(0)
            else:
                f[0] = (*f[0][:2], left)
    return now


def _fair(use: Floats) -> Floats:
    """Max-min fair rates of flows that use ports of capacity 1 in the given proportions."""
    rate = np.where(use.any(axis=1), 0.0, 1 / EPSILON)
    growing = use.any(axis=1)
    free = np.ones(use.shape[1])
    while growing.any():
        load = use[growing].sum(axis=0)
        more = (free[load > 0] / load[load > 0]).min()
        rate[growing] += more
        free = free - load * more
        growing &= ~(use[:, free <= EPSILON] > 0).any(axis=1)
    return rate


def imbalance_gain(machine: Machine, ranks: int, hot: float) -> float:
    """How much better pulling uses the links than pushing: t_push / t_pull - 1.

    One receiver gets ``hot`` times as many rows as each other one; all ranks send the same.
    """
    if ranks < 2 or not hot >= 1:
        raise ShapeError("imbalance needs two ranks and a share of at least 1", f"{ranks}, {hot}")
    share = np.ones(ranks)
    share[0] = hot
    share *= ranks / share.sum()
    pull = [[(s, d, float(share[d]))] for d in range(ranks) for s in range(ranks)]
    push = [
        [(s, d, float(share[d])) for k in range(ranks) for d in ((s + k) % ranks,)]
        for s in range(ranks)
    ]
    pulled = drain(pull, ranks, machine["pull_data_wire"], machine["pull_request_wire"])
    pushed = drain(push, ranks, machine["push_data_wire"], machine["push_ack_wire"])
    return pushed / pulled - 1
