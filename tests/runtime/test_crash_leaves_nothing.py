"""Ranks that are killed leave no memory: what they share has no name that outlives them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import ranks

SHARED_MB = 64
pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="host heaps are Linux's memfd"
)


def _hold(group):
    """Fill a heap that the other rank has mapped, say so, and wait to be killed."""
    import torch

    from mok.runtime.heap import Heap, HeapOptions

    heap = Heap(group, HeapOptions(memory="host", size=SHARED_MB << 20))
    mine = heap.empty((SHARED_MB << 17,), torch.int32)
    mine.peer(group.rank).fill_(group.rank + 1)
    group.barrier()
    assert int(mine.peer(1 - group.rank)[-1]) == 2 - group.rank
    Path(os.environ["MOK_TEST_READY"], str(group.rank)).write_text(str(os.getpid()))
    time.sleep(600)


def _heaps(pid: int) -> set[str]:
    """Inodes of the heaps that a process has mapped or open."""
    found = set()
    with contextlib.suppress(OSError):  # it may end meanwhile, or be another user's
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "memfd:mok-heap" in line:
                found.add(line.split()[4])
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if "memfd:mok-heap" in os.readlink(fd):
                    found.add(str(fd.stat().st_ino))
    return found


def test_killed_ranks_leave_nothing(tmp_path, monkeypatch):
    ready = tmp_path / "ready"
    ready.mkdir()
    monkeypatch.setattr(ranks, "_FOLLOWS", (*ranks._FOLLOWS, "MOK_TEST_READY"))
    monkeypatch.setenv("MOK_TEST_READY", str(ready))
    started = ranks.start(_hold, 2, tmp_path / "meet")
    limit = time.monotonic() + 120
    while len(list(ready.iterdir())) < 2:
        dead = [pipe.recv() for process, pipe in started.values() if not process.is_alive()]
        assert not dead and time.monotonic() < limit, dead
        time.sleep(0.1)
    pids = [process.pid for process, _ in started.values()]
    heaps = _heaps(pids[0])
    assert len(heaps) == 2 and _heaps(pids[1]) == heaps  # each has its own and the other's
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for process, _ in started.values():
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
    # Memory without a process that has it, and without a name, is freed.
    everyone = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()]
    assert not [pid for pid in everyone if _heaps(pid) & heaps]
