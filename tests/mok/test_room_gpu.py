"""The layer beside other kernels: room for them where it is asked for, and patience where they hold SMs."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path

import pytest
import torch

from mok import functional
from mok.config import Config, Shape
from mok.reference import random_case, random_gradient
from mok.runtime.compile import KernelSpec, get_kernel
from mok.runtime.device import device_info
from tests.helpers_layer import Layer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "runtime"))

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
SHAPE = Shape(16384, 2048, 768, 64, 8)
RUNS = 20


@pytest.fixture(scope="module")
def case():
    return random_case(SHAPE, device="cuda")


def hold():
    return get_kernel(KernelSpec.of("hold", device_info().arch, "toy_kernels:Hold"))


class Timed:
    """Forward or backward of a layer with events around it."""

    def __init__(self, case, ep_size, config, direction):
        self.layer = Layer(case, ep_size, config, "cuda")
        layer, self.direction = self.layer, direction
        result = layer(save_context=True)
        self.schedule, self.context, self.want = result.schedule, result.context, result.output
        self.dy = layer.each(layer.split(random_gradient(case)))
        self.given = layer.arguments(case)
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self):
        layer = self.layer
        self.begin.record()
        if self.direction == "forward":
            found = layer.queue(schedule=self.schedule).output
        else:
            found = functional.backward(
                layer.config, layer.workspace, self.schedule, self.context, self.dy, *self.given,
                keep_context=True,
            )[0]  # fmt: skip
        self.end.record()
        return found if isinstance(found, torch.Tensor) else torch.cat(list(found))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("ep_size", [1, 2])
def test_a_kernel_with_priority_starts_before_the_layer_ends(case, ep_size, direction):
    config = dataclasses.replace(Config.suggest(case.shape, "cuda"), reserved_sms=8)
    timed = Timed(case, ep_size, config, direction)
    other, small = torch.cuda.Stream(priority=-1), torch.zeros(1 << 20, device="cuda")
    done = torch.cuda.Event(enable_timing=True)
    early = 0
    timed()  # loading a kernel can hold the host until those that run have ended
    with torch.cuda.stream(other):
        small.add_(1)
    torch.cuda.synchronize()
    with timed.layer:
        for _ in range(RUNS):
            torch.cuda._sleep(2_000_000)  # the host is ahead when the layer starts
            timed()
            with torch.cuda.stream(other):
                other.wait_event(timed.begin)
                torch.cuda._sleep(500_000)  # the megakernel has all its SMs by now
                small.add_(1)
                done.record()
            torch.cuda.synchronize()
            early += done.elapsed_time(timed.end) > 0
        took = timed.begin.elapsed_time(timed.end)
    assert took > 1.0, f"the layer is too short to tell: {took} ms"
    assert early == RUNS, f"in {early} of {RUNS} runs"


@pytest.mark.parametrize("held", [8, 57, 66, 100])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("ep_size", [1, 2])
def test_a_layer_ends_beside_kernels_for_which_it_left_room(case, ep_size, direction, held):
    """Wherever they sit: 57 CTAs may leave nine pairs of SMs, and 66 none, which takes kernels of single CTAs."""
    sms = device_info().num_sms
    if sms < 110:
        pytest.skip(f"needs 110 SMs: there are {sms}")
    suggested = Config.suggest(case.shape, "cuda")
    config = dataclasses.replace(
        suggested, fwd_num_comm_sms=8, bwd_num_comm_sms=8, reserved_sms=held, timeout_s=20.0
    )
    timed = Timed(case, ep_size, config, direction)
    other, released = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
    with timed.layer:
        want = timed()
        comm = 0 if ep_size == 1 else 8
        if direction == "forward":  # short tasks: backward of this shape is single
            assert timed.layer.workspace.last_launch.pair == (held + comm // 2 + 1 <= sms // 2)
        torch.cuda.synchronize()
        hold()(held, 500_000_000, other.cuda_stream)
        with torch.cuda.stream(other):
            released.record()
        time.sleep(0.01)  # it has its SMs
        found = timed()
        torch.cuda.synchronize()
        timed.layer.workspace.check()
        assert torch.equal(found, want)
        assert timed.end.elapsed_time(released) > 0, "the layer waited for the other kernel"


@pytest.mark.parametrize("held", [4, 66])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("ep_size", [1, 2])
def test_a_kernel_that_holds_sms_delays_but_never_hangs(case, ep_size, direction, held):
    config = dataclasses.replace(Config.suggest(case.shape, "cuda"), timeout_s=20.0)
    timed = Timed(case, ep_size, config, direction)
    other = torch.cuda.Stream(priority=-1)
    with timed.layer:
        torch.cuda.synchronize()
        want = timed()
        torch.cuda.synchronize()
        for _ in range(RUNS):
            hold()(held, 20_000_000, other.cuda_stream)  # for 20 ms
            found = timed()
            torch.cuda.synchronize()
            timed.layer.workspace.check()
            assert torch.equal(found, want)
