"""Several GPUs: stores that reach another one late, and launches that run at the same time."""

import random
from typing import TYPE_CHECKING

import numpy as np

from mok.tools.emulator import layout as L
from mok.tools.emulator import memory
from mok.tools.emulator.errors import KernelFault

if TYPE_CHECKING:
    from mok.tools.emulator.machine import Machine


class LateStores:
    """What a launch has stored to other GPUs' memory and they do not see yet.

    With a seed, weak and relaxed stores, ``red`` and bulk stores wait here.  A release or fence of scope
    sys delivers those that happened before it, for bulk stores after the wait for their completion; a
    load or an ``atom`` delivers those to its own address.  Otherwise each arrives when the seed says, in
    order only with others to the same address.  A bulk reduction is seen when it is performed.
    """

    def __init__(self, machine: "Machine") -> None:
        self.machine = machine
        self.words = np.zeros(1 + L.LATE_WORDS * L.LATE_STORES, dtype=np.int64)
        self.blocks: list[np.ndarray] = []  # bytes of bulk stores

    def takes(self, address: int) -> bool:
        """Whether a bulk store to an address is kept back: memory of another GPU, with a seed."""
        m = self.machine
        if not m.x[L.X_LATE]:
            return False
        i = int(np.searchsorted(m.ranges[: int(m.x[L.X_NRANGES]), 0], address, side="right")) - 1
        return i >= 0 and int(m.range_gpus[i]) != m.gpu

    def add(self, address: int, data: np.ndarray) -> None:
        """Keeps the bytes of a bulk store back."""
        if not self.words[0]:
            self.blocks.clear()
        self.blocks.append(np.ascontiguousarray(data).copy())
        agent = self.machine.checker.agent if self.machine.checker is not None else None
        memory.keep_entry(
            self.machine.x.ctypes.data,
            np.int64(address),
            np.int64(data.nbytes),
            np.int64(self.blocks[-1].ctypes.data),
            np.int64(memory.LATE_BLOCK),
            agent.tag if agent is not None else np.int64(0),
        )

    def deliver(self) -> bool:
        """Delivers one store, after earlier ones to its address.  False when there is none."""
        count = int(self.words[0])
        if not count:
            return False
        chosen = np.int64(self.machine.engine.random.randrange(count))
        memory.deliver_late(self.machine.x.ctypes.data, chosen)
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
        busy, waits = False, 0
        for queue in queues:
            machine = queue[0]
            moved = machine.turn()
            busy |= moved
            waits += not moved or machine.held
            if machine.finished:
                queue.pop(0)
                if queue:
                    queue[0].begin()
        queues = [q for q in queues if q]
        if busy:
            for queue in queues:
                if waits >= len(queues):  # for operations that nothing else would complete
                    queue[0].complete_some()
                queue[0].x[L.X_EV_MEM] += 1  # another GPU may have written what a warp polls
            continue
        faults = []
        for queue in queues:
            try:
                queue[0].idle()
            except KernelFault as fault:
                faults.append(f"GPU {queue[0].gpu}: {fault}")
        if len(faults) == len(queues):
            raise KernelFault("deadlock: every GPU waits", "\n".join(faults))
