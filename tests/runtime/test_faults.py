"""One rank fails in each way there is; every other one says so in time, names it, and works on.

On the CPU with the barrier's algorithm on the host, and on a GPU with the layer's kernels, three
processes sharing it. A GPU run does 20 rounds of each fault, several side by side.

The short time limit under test begins when every rank stands right before the fault with its kernels
loaded: what comes before (processes start, compile, wait for each other's share of the machine) has a
limit of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
SETUP_S = 120.0
GRACE_S = 3.0  # beside the limit under test: processes share cores, and a GPU by time slices
RIGHT = "nothing, and gives the right bits"  # of a rank whose peer was killed when it had given all it had to


@pytest.fixture(autouse=True)
def _private_cache():
    """The session's kernels, in the place of conftest's private ones: compiling is not the test."""


class HostWork:
    """Calls that consist of their barriers."""

    def __init__(self, group, limit_s, hidden=128):
        self.heap = Heap(group, HeapOptions(memory="host", max_size=1 << 26))
        self.rows = self.heap.empty((group.size, hidden), torch.float32)
        self.limit_s = limit_s

    def run(self):
        self.heap.barrier(timeout_s=self.limit_s)
        self.heap.barrier(timeout_s=self.limit_s)
        self.heap.check()
        return True

    def close(self):
        self.heap.close()


class DeviceWork:
    """Calls of the layer whose exact result is known."""

    def __init__(self, group, limit_s, hidden=128, device=0):
        from mok.config import Shape
        from mok.reference import forward_loop, integer_case
        from tests.helpers_layer import SMALL, Layer, to_device

        torch.cuda.set_device(device)
        case = integer_case(Shape(90, hidden, 64, 6, 2, 1, 64))
        config = dataclasses.replace(SMALL, timeout_s=limit_s)
        on_gpu = to_device(case, f"cuda:{device}")
        self.layer = Layer(on_gpu, group.size, config, f"cuda:{device}", group=group)
        whole = forward_loop(case).to(torch.bfloat16)
        self.expected = whole.split(self.layer.lengths)[group.rank]

    def run(self):
        """Whether the output is right; raises what the call's kernels noted."""
        result = self.layer.queue(save_context=True)
        self.layer.finish()
        return torch.equal(result.output.cpu(), self.expected)

    def close(self):
        self.layer.close()


def _works(make, group, **options):
    """Whether a call of new buffers gives its result."""
    with contextlib.closing(make(group, SETUP_S, **options)) as work:
        works = work.run()
        group.barrier("worked")
    return works


def _strike(fault):
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "raises":
        raise ValueError("bad batch")


def _work(group, fault, limit_s, on_gpu):
    """What a rank reports: (error text, seconds until it was known, whether a new group worked)."""
    make = DeviceWork if on_gpu else HostWork
    mine = group.rank == VICTIM
    assert _works(make, group)  # kernels are loaded, all is well
    work, begin = None, time.monotonic()
    try:
        work = make(group, limit_s, hidden=192 if mine and fault == "other shape" else 128)
        assert work.run()
        group.barrier("right before the fault")
        begin = time.monotonic()
        if mine:
            _strike(fault)
        work.run()
        text = "nothing"
    except (MokError, ValueError) as error:
        text = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - begin
    if work is not None:
        work.close()
    if mine:
        return text, seconds, True
    with group.subgroup([r for r in range(SIZE) if r != VICTIM]) as smaller:
        return text, seconds, _works(make, smaller)


def _absent(rank, folder, limit_s, on_gpu):
    import torch.distributed as dist

    store = dist.FileStore(f"{folder}/store", SIZE)
    store.set_timeout(timedelta(seconds=60))
    others = [r for r in range(SIZE) if r != VICTIM]
    with Group.from_store(store, others.index(rank), len(others), timeout_s=SETUP_S) as group:
        group.barrier("right before the fault")
        begin = time.monotonic()
        try:
            Group.from_store(store, rank, SIZE, timeout_s=limit_s, name="all")
            text = "nothing"
        except MokError as error:
            text = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - begin
        return text, seconds, _works(DeviceWork if on_gpu else HostWork, group)


def _in_kernel(group, direction, limit_s, progress):
    """As ``_work``; the victim is killed while every rank's megakernel runs, each on its own GPU.

    ``progress``: the part of its tasks that the victim's kernel has begun by then.
    """
    from mok import functional
    from mok.capture import digest
    from mok.config import Config, Shape
    from mok.reference import random_case, random_gradient
    from tests.helpers_layer import Layer

    torch.cuda.set_device(group.rank)
    device = f"cuda:{group.rank}"
    case = random_case(Shape(8192 * group.size, 1024, 8192, 8, 4), device=device)
    # On a few SMs, so that a kernel runs long enough to be looked at and struck.
    reserved = torch.cuda.get_device_properties(device).multi_processor_count - 8
    config = Config(4, 4, 2048, 8192, timeout_s=SETUP_S, reserved_sms=reserved)

    def call(layer):
        """Queue the call to be struck; when it began, and what it will give."""
        result = layer.queue(save_context=True)
        torch.cuda.synchronize()
        group.barrier("forward")
        begin = time.monotonic()
        if direction == "forward":
            found = layer.queue(schedule=result.schedule).output
        else:
            found = functional.backward(
                layer.config, layer.workspace, result.schedule, result.context,
                layer.each(layer.split(random_gradient(case))), *layer.arguments(case),
            )[0]  # fmt: skip
        return begin, found[0] if isinstance(found, list) else found

    def tickets(layer):
        return layer.workspace.counters(direction).get("ticket", [0])[0]

    with Layer(case, group.size, config, device, group=group) as layer:
        call(layer)  # kernels are loaded
        layer.finish()
        group.barrier("kernels are loaded")
    config = dataclasses.replace(config, timeout_s=limit_s)
    with Layer(case, group.size, config, device, group=group) as layer:
        begin, found = call(layer)
        layer.finish()
        healthy_s = time.monotonic() - begin
        healthy = digest(found)
        # Of these the kernel had drawn all, and up to two a CTA past the last.
        drawn = tickets(layer) - 16
        begin, found = call(layer)
        if group.rank == VICTIM:
            running, seen = True, [drawn]
            while running:
                running = not torch.cuda.current_stream().query()
                seen.append(tickets(layer))
                # It grows: what stood there before the call did not.
                grows = 0 <= seen[-2] < seen[-1] < drawn
                if running and grows and seen[-1] >= progress * drawn:
                    os.kill(os.getpid(), signal.SIGKILL)
            return f"the kernel ended in {healthy_s} s, seen at {seen[-9:]} of {drawn}", 0.0, False
        try:
            layer.finish()
            text = RIGHT if digest(found) == healthy else "nothing, and gives another result"
        except MokError as error:
            text = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - begin - healthy_s
    others = [r for r in range(group.size) if r != VICTIM]
    with group.subgroup(others) as smaller:
        return text, seconds, _works(DeviceWork, smaller, device=group.rank)


class Round:
    """Processes of which one fails; ``judge`` says what was wrong with it."""

    def __init__(self, fault, folder, limit_s, on_gpu, progress=0.0):
        self.fault, self.limit_s, self.late = fault, limit_s, progress >= 0.5
        self.size = SIZE
        self.latest_s = 0.0  # after the fault, when the last of the others knew of it
        if fault in IN_KERNEL:
            self.size = max(2, torch.cuda.device_count())
            self.started = ranks.start(
                _in_kernel, self.size, folder, fault.split()[-1], limit_s, progress,
                timeout_s=SETUP_S,
            )  # fmt: skip
        elif fault == "absent":
            others = [r for r in range(SIZE) if r != VICTIM]
            work = {r: (_absent, r, str(folder), limit_s, on_gpu) for r in others}
            self.started = ranks.start_apart(work, folder)
        else:
            self.started = ranks.start(
                _work, SIZE, folder, fault, limit_s, on_gpu, timeout_s=SETUP_S
            )

    def judge(self):
        survivors = {r: p for r, p in self.started.items() if r != VICTIM}
        results = ranks.collect(survivors, limit_s=2 * SETUP_S)
        found = list(self._victim()) if VICTIM in self.started else []
        for rank, (process, _) in survivors.items():
            if process.exitcode != 0:
                found.append(f"rank {rank} did not end by itself: exit code {process.exitcode}")
            state, value = results.get(rank, ("error", "no answer"))
            if state != "ok":
                found.append(f"rank {rank}: {value}")
                continue
            text, seconds, works = value
            self.latest_s = max(self.latest_s, seconds)
            if not self._named(text) and not (self.late and text == RIGHT):
                found.append(f"rank {rank} does not name the victim: {text}")
            if seconds > self.limit_s + GRACE_S:
                found.append(f"rank {rank} knew of it after {seconds:.1f} s only")
            if not works:
                found.append(f"rank {rank}'s next run gave a wrong result")
        return [f"{self.fault}: {problem}" for problem in found]

    def _named(self, text):
        # Of the ranks, the text names no other one as the one that is missing.
        others = (f"rank {r} did not" for r in range(self.size) if r != VICTIM)
        return f"rank {VICTIM}" in text and not any(other in text for other in others)

    def _victim(self):
        process, pipe = self.started[VICTIM]
        if self.fault == "stopped":
            if not process.is_alive():
                yield "the victim was not stopped"
            process.kill()
        process.join(30)
        told = ""
        with contextlib.suppress(EOFError):
            told = str(pipe.recv()) if pipe.poll() else ""
        pipe.close()
        by_signal = self.fault in ("killed", "stopped", *IN_KERNEL)
        if process.exitcode != (-signal.SIGKILL if by_signal else 0):
            yield f"the victim's exit code is {process.exitcode}; {told}"
        if process.is_alive():
            process.kill()
            process.join()
        if self.fault == "raises" and "bad batch" not in told:
            yield f"the victim says: {told}"


def run_rounds(fault, count, folder, limit_s, on_gpu, record_property):
    """Rounds side by side, each with processes of its own."""
    # Never beyond the middle: a killed process's kernel runs on until the driver takes it away, and may
    # have given the others all that they need by then.
    rounds = [
        Round(fault, folder / str(i), limit_s, on_gpu, progress=i / count / 2) for i in range(count)
    ]
    found = [f"round {i}: {text}" for i, r in enumerate(rounds) for text in r.judge()]
    latest = " ".join(f"{r.latest_s:.2f}" for r in rounds)
    text = f"known within {limit_s:g} s: the last rank of each round after {latest} s"
    record_property("tells", text)
    assert not found, "\n".join([*found, text])


@pytest.mark.parametrize("fault", FAULTS)
def test_on_the_host(fault, tmp_path, record_property):
    run_rounds(fault, 1, tmp_path, 1.0, False, record_property)


@pytest.mark.gpu
@pytest.mark.crowd
@pytest.mark.timeout(900, func_only=True)  # not of the wait for a place among those on the GPU
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("fault", FAULTS)
def test_on_a_gpu(fault, part, tmp_path, record_property):
    """Twenty rounds, in parts that may run side by side."""
    run_rounds(fault, 5, tmp_path, 5.0, True, record_property)


@pytest.mark.multi_gpu
@pytest.mark.alone  # with other tests' kernels between its own, its limit would be theirs, too
@pytest.mark.timeout(900, func_only=True)
@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("fault", IN_KERNEL)
def test_killed_while_kernels_run(fault, part, tmp_path, record_property):
    """Twenty rounds a direction, half of them at a time."""
    run_rounds(fault, 10, tmp_path, 5.0, True, record_property)


def test_groups_of_a_store_agree_on_their_size(tmp_path):
    with pytest.raises(GroupError, match="0…1"):
        Group.from_store(None, 2, 2)
