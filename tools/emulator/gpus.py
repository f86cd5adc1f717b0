"""Several GPUs: stores that reach another one late, and launches that run at the same time."""

import random
from typing import TYPE_CHECKING

import numpy as np

from mok.tools.emulator import layout as L
from mok.tools.emulator.errors import KernelFault

if TYPE_CHECKING:
    from mok.tools.emulator.machine import Machine


class LateStores:
    """What a launch has stored to other GPUs' memory and they do not see yet.

    With a seed, weak and relaxed stores wait here.  A release or fence of scope sys delivers all of
    them, and so does a load from another GPU's memory; otherwise each arrives when the seed says, in
    order only with the stores to the same address.
    """

    def __init__(self, machine: "Machine") -> None:
        self.machine = machine
        self.words = np.zeros(1 + 3 * L.LATE_STORES, dtype=np.int64)

    def deliver(self) -> bool:
        """Delivers one store, after earlier ones to its address.  False when there is none."""
        from mok.tools.emulator.tma import host_bytes

        count = int(self.words[0])
        if not count:
            return False
        entries = self.words[1 : 1 + 3 * count].reshape(-1, 3)
        chosen = int(entries[self.machine.engine.random.randrange(count), 0])
        first = int(np.flatnonzero(entries[:, 0] == chosen)[0])
        address, size, value = (int(v) for v in entries[first])
        raw = (value & (1 << 64) - 1).to_bytes(8, "little")[:size]
        host_bytes(address, size)[:] = np.frombuffer(raw, dtype=np.uint8)
        entries[first:-1] = entries[first + 1 :].copy()
        self.words[0] = count - 1
        self.machine.x[L.X_EV_MEM] += 1
        return True


def run_together(queues: list[list["Machine"]], seed: int | None) -> None:
    """Runs the launches of several GPUs at the same time; those of one GPU one after another.

    Raises KernelFault, also when every GPU waits for ever.
    """
    order = random.Random(seed)
    queues = [list(q) for q in queues if q]
    for queue in queues:
        queue[0].begin()
    while queues:
        order.shuffle(queues)
        busy = False
        for queue in queues:
            machine = queue[0]
            moved = machine.turn()
            busy |= moved
            if machine.finished:
                queue.pop(0)
                if queue:
                    queue[0].begin()
        queues = [q for q in queues if q]
        if busy:
            for queue in queues:  # another GPU may have written what a warp polls
                queue[0].x[L.X_EV_MEM] += 1
            continue
        faults = []
        for queue in queues:
            try:
                queue[0].idle()
            except KernelFault as fault:
                faults.append(f"GPU {queue[0].gpu}: {fault}")
        if len(faults) == len(queues):
            raise KernelFault("deadlock: every GPU waits", "\n".join(faults))
