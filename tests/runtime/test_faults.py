"""One rank fails in each way there is; every other one says so in time, names it, and works on.

On the CPU with the barrier's algorithm on the host, and on a GPU with the layer's kernels, three
processes sharing it. A GPU run does 20 rounds of each fault.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import ranks
import torch

from mok.errors import GroupError, MokError
from mok.runtime.group import Group
from mok.runtime.heap import Heap, HeapOptions

SIZE, VICTIM = 3, 1
FAULTS = ("killed", "stopped", "raises", "other shape", "absent")
IN_KERNEL = ("killed in forward", "killed in backward")


class HostWork:
    """Calls that consist of their barriers."""

    def __init__(self, group, hidden=64):
        self.heap = Heap(group, HeapOptions(memory="host", max_size=1 << 26))
        self.rows = self.heap.empty((group.size, hidden), torch.float32)

    def call(self):
        self.heap.barrier()
        self.heap.barrier()

    def finish(self):
        self.heap.check()

    def close(self):
        self.heap.close()


class DeviceWork:
    """Calls of the layer."""

    def __init__(self, group, hidden=128):
        import dataclasses

        from mok.config import Shape
        from mok.reference import integer_case
        from tests.helpers_layer import SMALL, Layer

        torch.cuda.set_device(0)
        self.case = integer_case(Shape(90, hidden, 64, 6, 2, 1, 64), device="cuda")
        config = dataclasses.replace(SMALL, timeout_s=group.timeout_s)
        self.layer = Layer(self.case, group.size, config, "cuda", group=group)

    def call(self):
        self.layer.queue(save_context=True)

    def finish(self):
        torch.cuda.synchronize()
        self.layer.workspace.check()

    def close(self):
        self.layer.close()


def _work(group, fault, on_gpu):
    """What a rank reports: (error text, seconds until it was known, whether a new group worked)."""
    make = DeviceWork if on_gpu else HostWork
    mine = group.rank == VICTIM
    begin = time.monotonic()
    work = None
    try:
        work = make(group, hidden=192 if mine and fault == "other shape" else 128)
        work.call()  # kernels are loaded, all is well
        work.finish()
        group.barrier("warm")
        begin = time.monotonic()
        if mine:
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            if fault == "raises":
                raise ValueError("bad batch")
        work.call()
        work.finish()
        text = "nothing"
    except (MokError, ValueError) as error:
        text = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - begin
    if work is not None:
        work.close()
    if mine:
        return text, seconds, False
    with group.subgroup([r for r in range(SIZE) if r != VICTIM]) as smaller:
        again = make(smaller)
        again.call()
        again.finish()
        smaller.barrier("done")
        again.close()
    return text, seconds, True


def _in_kernel(group, direction):
    """As ``_work``; the victim is killed while every rank's megakernel runs, each on its own GPU."""
    from mok import functional
    from mok.config import Config, Shape
    from mok.reference import random_case, random_gradient
    from tests.helpers_layer import Layer

    torch.cuda.set_device(group.rank)
    device = f"cuda:{group.rank}"
    # On a few SMs, so that a kernel outlives its killed process' last actions by far.
    case = random_case(Shape(32768, 4096, 14336, 8, 4), device=device)
    reserved = torch.cuda.get_device_properties(device).multi_processor_count - 16
    config = Config(8, 8, 8192, 32768, timeout_s=group.timeout_s, reserved_sms=reserved)
    with Layer(case, group.size, config, device, group=group) as layer:
        dy = layer.each(layer.split(random_gradient(case)))

        def call():
            result = layer.queue(save_context=True)
            torch.cuda.synchronize()
            group.barrier("forward")
            begin = time.monotonic()
            if direction == "forward":
                layer.queue(schedule=result.schedule)
            else:
                functional.backward(
                    config, layer.workspace, result.schedule, result.context, dy,
                    *layer.arguments(case),
                )  # fmt: skip
            return begin

        begin = call()  # kernels are loaded
        torch.cuda.synchronize()
        seconds = time.monotonic() - begin
        begin = call()
        if group.rank == VICTIM:
            time.sleep(seconds / 8)
            if not torch.cuda.current_stream().query():  # or the test would show nothing
                os.kill(os.getpid(), signal.SIGKILL)
            return f"the kernel had ended, which took {seconds} s", 0.0, False
        try:
            torch.cuda.synchronize()
            layer.workspace.check()
            text = "nothing"
        except MokError as error:
            text = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - begin
    return text, seconds, True


def _absent(rank, folder, timeout_s):
    import torch.distributed as dist

    store = dist.FileStore(f"{folder}/store", SIZE)
    store.set_timeout(timedelta(seconds=60))
    begin = time.monotonic()
    try:
        Group.from_store(store, rank, SIZE, timeout_s=timeout_s)
        text = "nothing"
    except MokError as error:
        text = f"{type(error).__name__}: {error}"
    return text, time.monotonic() - begin, True


def run_round(fault, folder, timeout_s, on_gpu):
    size = SIZE
    if fault in IN_KERNEL:
        size = max(2, torch.cuda.device_count())
        started = ranks.start(_in_kernel, size, folder, fault.split()[-1], timeout_s=timeout_s)
        results = ranks.collect({r: p for r, p in started.items() if r != VICTIM})
        victim, pipe = started[VICTIM]
        victim.join(30)
        assert victim.exitcode == -signal.SIGKILL, "the victim was not killed: " + (
            str(pipe.recv()) if pipe.poll() else str(victim.exitcode)
        )
        pipe.close()
    elif fault == "absent":
        others = [r for r in range(SIZE) if r != VICTIM]
        results = ranks.call({r: (_absent, r, str(folder), timeout_s) for r in others}, folder)
    else:
        started = ranks.start(_work, SIZE, folder, fault, on_gpu, timeout_s=timeout_s)
        survivors = {r: p for r, p in started.items() if r != VICTIM}
        results = ranks.collect(survivors)
        victim, pipe = started[VICTIM]
        if fault in ("killed", "stopped"):
            victim.kill()  # SIGKILL also ends a stopped process
        victim.join(30)
        assert not victim.is_alive()
        pipe.close()
    assert len(results) == size - 1, f"only ranks {sorted(results)} answered"
    for rank, (state, value) in results.items():
        assert state == "ok", value
        text, seconds, worked = value
        assert f"rank {VICTIM}" in text, f"rank {rank} does not name the victim: {text}"
        assert seconds < timeout_s + (10 if on_gpu else 3), (rank, seconds)
        assert worked


@pytest.mark.parametrize("fault", FAULTS)
def test_on_the_host(fault, tmp_path):
    run_round(fault, tmp_path, 1.0, on_gpu=False)


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("fault", FAULTS)
def test_on_a_gpu(fault, part, tmp_path):
    """Twenty rounds, in parts that may run side by side."""
    for number in range(5):
        run_round(fault, tmp_path / f"{part}-{number}", 5.0, on_gpu=True)


@pytest.mark.multi_gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("fault", IN_KERNEL)
def test_killed_while_kernels_run(fault, part, tmp_path):
    """Ten rounds a direction, in parts that may run side by side."""
    for number in range(5):
        run_round(fault, tmp_path / f"{part}-{number}", 5.0, on_gpu=True)


def test_groups_of_a_store_agree_on_their_size(tmp_path):
    with pytest.raises(GroupError, match="0…1"):
        Group.from_store(None, 2, 2)
