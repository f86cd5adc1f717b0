"""Cluster launch control: a running cluster takes over the work of one that has not started."""

from typing import Any

import numpy as np

from mok.tools.emulator import layout as L
from mok.tools.emulator import race
from mok.tools.emulator.asyncops import complete_tx
from mok.tools.emulator.errors import EmulatorError
from mok.tools.emulator.machine import Machine
from mok.tools.emulator.resident import Warp
from mok.tools.emulator.tma import generic_smem

_OFFSET = (1 << L.RANK_SHIFT) - 1


def op_try_cancel(machine: Machine, w: Warp, op: Any) -> None:
    """try_cancel: writes a 16-byte response and signals an mbarrier, here or in every CTA."""
    multicast = "multicast::cluster::all" in op.ins.mods
    for lane in w.lanes():
        dst = generic_smem(w.value(op.operands[0][1][0], lane) + op.operands[0][2])
        barrier = generic_smem(w.value(op.operands[1][1][0], lane) + op.operands[1][2])
        cluster = w.cta.cluster
        if cluster.extra.get("clc_failed"):
            raise EmulatorError(
                "no cluster launch may be cancelled after a cancellation has failed",
                f"cluster {cluster.number}",
                "stop querying at the first invalid response",
            )
        targets = range(len(cluster.ctas)) if multicast else [dst >> L.RANK_SHIFT]

        def run(
            dst: int = dst, barrier: int = barrier, cluster: Any = cluster, targets: Any = targets
        ) -> None:
            number = machine.cancel_cluster()
            words = np.zeros(4, dtype=np.uint32)
            if number is None:
                words[1:] = machine.engine.random.getrandbits(31)  # coordinates are garbage
                words[0] = 0
            else:
                gx, gy, _ = machine.cluster_grid
                origin = (number % gx, number // gx % gy, number // (gx * gy))
                words[0] = 1
                words[1:] = [o * c for o, c in zip(origin, machine.request.cluster, strict=True)]
            at = dst & _OFFSET
            for rank in targets:
                if machine.checker is not None:
                    machine.checker.smem(cluster.ctas[rank], at, 16, True, race.REPLY)
                cluster.ctas[rank].smem[at : at + 16] = words.view(np.uint8)
                complete_tx(machine, cluster, rank, barrier & _OFFSET, 16)

        machine.engine.submit("clusterlaunchcontrol.try_cancel", w, [run])


def _words(w: Warp, row: int) -> list[np.ndarray]:
    low, high = w.regs[row], w.regs[row + 1]
    return [low & 0xFFFFFFFF, low >> 32 & 0xFFFFFFFF, high & 0xFFFFFFFF, high >> 32 & 0xFFFFFFFF]


def op_query(machine: Machine, w: Warp, op: Any) -> None:
    """query_cancel: decodes a response."""
    words = _words(w, op.operands[1])
    name = op.ins.name
    if "is_canceled" in name:
        granted = (words[0] == 1).astype(np.int64)
        if not all(granted[lane] for lane in w.lanes()):
            w.cta.cluster.extra["clc_failed"] = True  # observed: no query may follow
        w.write(op.operands[0], granted)
    elif "v4" in op.ins.mods:
        for row, value in zip(op.operands[0][1][:3], words[1:], strict=True):
            w.write(row, value)
    else:
        axis = "xyz".index(name.split("get_first_ctaid::")[1][0])
        w.write(op.operands[0], words[1 + axis])


HANDLERS = {
    "clusterlaunchcontrol.try_cancel": op_try_cancel,
    "clusterlaunchcontrol.query_cancel": op_query,
}
