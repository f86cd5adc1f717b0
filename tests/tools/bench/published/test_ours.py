"""Ours as the suites call it, in the emulator: one rank, and virtual ranks."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass")

from mok.config import Config
from mok.reference import Case, Experts, backward_loop, forward_loop, relative_l2
from mok.runtime.group import Group
from mok.tools.bench.published import accuracy, programs
from mok.tools.bench.published.iterations import measure
from mok.tools.bench.published.share import Layer, make_share

pytestmark = pytest.mark.emulator
CPU = torch.device("cpu")
SMALL = Config(2, 2, 128, 256)


@pytest.fixture(autouse=True)
def machine():
    from mok.tools.emulator import Emulator

    with Emulator("sm_90a", num_sms=6):
        yield


def whole(shares):
    """The ranks' shares as one case."""
    x, ids, router = (torch.cat([getattr(s, n) for s in shares]) for n in ("x", "ids", "router"))
    routed = Experts(*(torch.cat([getattr(s, n) for s in shares]) for n in ("gate", "up", "down")))
    shared = Experts(*(w.unsqueeze(0) for w in shares[0].shared))
    return Case("whole", x, ids, router, routed, shared)


def test_virtual_ranks_give_the_layer():
    layer = Layer("small", 12, 64, 64, 4, 2, 64, 2, 4)
    shares = [make_share(layer, rank, None, CPU) for rank in range(2)]
    program = programs.Ours(shares, "bf16", Group.virtual(2, CPU), SMALL)
    output = program.forward()
    gradients = program.backward()
    assert program.tunables()["minibatch_size"] == 128
    program.close()
    case = whole(shares)
    assert relative_l2(output, forward_loop(case)[:12]) < 3.5e-3
    wanted = backward_loop(case, torch.cat([s.dy for s in shares]))
    assert relative_l2(torch.cat([*gradients[0]]), wanted.x) < 4.5e-3
    assert relative_l2(torch.cat([*gradients[4]]), wanted.routed.down) < 4.5e-3
    fp32 = accuracy.expected_of_first(shares)  # of rank 0, whose output forward returns
    assert relative_l2(fp32.output, forward_loop(case)[:12]) < 1e-5
    assert relative_l2(fp32.x, wanted.x[:12]) < 1e-5


@pytest.mark.slow
def test_mxfp8_is_timed_like_anything_else():
    layer = Layer("small", 12, 128, 128, 2, 2, 64, 1, 2)
    (share,) = [make_share(layer, 0, None, CPU)]
    program = programs.Ours([share], "mxfp8", Group.single(CPU), SMALL)
    times = measure(program, 0, 1, CPU)
    assert times["forward"][0] > 0 and times["backward"][0] > 0
    assert relative_l2(program.forward(), forward_loop(whole([share]))) < 7e-2
    program.close()
