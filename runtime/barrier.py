"""The device barrier of a group, and bounded waits on signals; see ``mok.kernels_cute.barrier``."""

from __future__ import annotations

import time
from typing import Any

from mok.kernels_cute import records as R
from mok.runtime.compile import Kernel, KernelSpec, get_kernel
from mok.runtime.heap import Heap, SymmetricTensor
from mok.runtime.launch import launch
from mok.runtime.watchdog import Records
from mok.scalars import check_timeout


class Barrier:
    """Orders the streams of all ranks: what a rank's stream did before it, every rank sees after.

    Collective to make and to call. In a local group (one process) stream order does it, and a call
    does nothing. A call never blocks the host and never hangs the stream: after the time limit it
    notes the missing ranks in ``records`` and poisons the group; ``records.check()`` raises.

    Args:
        heap: symmetric memory for the words.
        records: where expiries are noted.
        arch: what to compile for; by default the heap's device's.
        timeout_s: time limit of a call; by default the group's.
    """

    def __init__(
        self,
        heap: Heap,
        records: Records,
        arch: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        import torch

        self.heap = heap
        self.group = heap.group
        self.records = records
        self.timeout_s = heap.group.timeout_s if timeout_s is None else check_timeout(timeout_s)
        # One 128-byte line each, so that pollers of one do not slow writers of the other.
        self._words = heap.zeros((self.group.size + 31) // 32 * 32, torch.int32)
        self._poison = heap.zeros(32, torch.int32)
        self._epoch = heap.zeros(32, torch.int32)
        self._arch = arch
        self._barrier: Kernel | None = None
        if not self.group.is_local:
            if heap.memory.kind == "cuda":
                # Compiled now, so that compiling does not eat into a barrier's time limit.
                threads = max(32, (self.group.size + 31) // 32 * 32)
                self._barrier = get_kernel(_spec(heap, arch, "barrier", threads=threads))
                self._barrier.load()
            heap.memory.synchronize(heap.stream())
            self.group.barrier("a new device barrier")  # nobody signals before all words are zero

    def poison_address(self, rank: int) -> int:
        """Address of a rank's poison word: nonzero once any rank gave up; barriers then return."""
        return self._poison.address(rank)

    def gate_address(self, rank: int) -> int:
        """Address of the word that kernels after a barrier read at entry, nonzero if this rank's last
        barrier found the group poisoned; 0 in a local group, which cannot be."""
        return 0 if self.group.is_local else self._epoch.address(rank) + 4

    def __call__(self, stream: Any = None, timeout_s: float | None = None) -> None:
        """Put a barrier on a stream (torch's current one by default)."""
        if self.group.is_local:
            return
        limit = self.timeout_s if timeout_s is None else check_timeout(timeout_s)
        if self.heap.memory.kind == "host":
            self._on_host(limit)
            return
        assert self._barrier is not None
        rank = self.group.rank
        launch(
            self._barrier,
            self._words.base_address,
            self._poison.base_address,
            self._epoch.address(rank),
            self.records.barrier_address(rank),
            self.heap.stride,
            int(limit * 1e9),
            rank,
            self.group.size,
            self.heap.stream(stream),
        )

    def wait(
        self,
        word: SymmetricTensor,
        value: int,
        index: int = 0,
        stream: Any = None,
        timeout_s: float | None = None,
    ) -> None:
        """Like ``heap.wait``; expiry also poisons the group."""
        limit = self.timeout_s if timeout_s is None else check_timeout(timeout_s)
        if self.heap.memory.kind == "host":
            self.heap.wait(word, value, index, timeout_s=limit)
            return
        rank = self.group.rank
        launch(
            wait_kernel(self.heap, self._arch),
            word.address(rank) + 4 * index,
            self._poison.base_address,
            self.records.barrier_address(rank),
            self.heap.stride,
            int(limit * 1e9),
            value,
            rank,
            self.group.size,
            self.heap.stream(stream),
        )

    def _on_host(self, timeout_s: float) -> None:
        """The kernel's algorithm on host memory, step by step."""
        rank, size = self.group.rank, self.group.size
        epoch = self._epoch.peer(rank)
        own = self._poison.peer(rank)
        record = self.records.barrier_view(rank)
        now = int(epoch[0]) + 1
        if not int(own[0]):
            epoch[0] = now
            for other in range(size):
                self._words.peer(other)[rank] = now
            mine = self._words.peer(rank)
            deadline = time.monotonic() + timeout_s
            while int((mine[:size] < now).sum()) and not int(own[0]):
                if time.monotonic() > deadline:
                    record[R.BARRIER_STATE], record[R.BARRIER_EPOCH] = R.EXPIRED, now
                    missing = [r for r in range(size) if int(mine[r]) < now]
                    for other in range(size):
                        self._poison.peer(other)[0] = R.poison_value(rank, missing[-1])
                    break
                time.sleep(0.0002)
            for other in range(size):
                if int(own[0]) and int(mine[other]) < now:
                    record[R.BARRIER_MISSING + other] = int(mine[other]) + 1
        if int(own[0]) and not record[R.BARRIER_STATE]:
            record[R.BARRIER_STATE], record[R.BARRIER_EPOCH] = R.POISONED, now
            record[R.BARRIER_POISONER] = int(own[0])
        if int(own[0]):
            epoch[1] = int(own[0])


class Waits:
    """Bounded waits for signals on a heap's own rank, without a barrier: nobody else takes part.

    After an expiry, later waits of this object return at once; ``records.check()`` raises.
    """

    def __init__(self, heap: Heap, records: Records) -> None:
        import torch

        self.heap = heap
        self.records = records
        # Stands for the group's poison; a line of its own.
        self._expired = torch.zeros(32, dtype=torch.int32, device=heap.memory.device_index())

    def __call__(self, address: int, value: int, rank: int, timeout_s: float, stream: Any) -> None:
        """Hold a stream until the int32 at ``address`` is at least ``value`` (cyclically)."""
        launch(
            wait_kernel(self.heap),
            address,
            self._expired.data_ptr(),
            self.records.barrier_address(rank),
            0,
            int(timeout_s * 1e9),
            value,
            0,
            1,
            self.heap.stream(stream),
        )


def wait_kernel(heap: Heap, arch: str | None = None) -> Kernel:
    """The kernel that holds a stream for a signal."""
    return get_kernel(_spec(heap, arch, "signal_wait"))


_KERNELS = {"barrier": "BarrierKernel", "signal_wait": "WaitKernel"}


def _spec(heap: Heap, arch: str | None, name: str, **config: int) -> KernelSpec:
    if arch is None:
        from mok.runtime.device import require_arch

        arch = require_arch(heap.memory.device_index()).arch
    assert arch is not None
    return KernelSpec.of(name, arch, f"mok.kernels_cute.barrier:{_KERNELS[name]}", **config)
