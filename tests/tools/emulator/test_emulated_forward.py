"""The forward layer in the emulator: exact on integers, and without any report."""

import pytest

pytest.importorskip("cutlass")

import torch

from mok.config import Shape
from mok.reference import forward_loop, integer_case
from mok.tools.emulator import KernelFault
from tests.forward_runs import ForwardRun, emulated

pytestmark = pytest.mark.emulator


def run(arch, ep_size, seed=None, check=False, tokens=256, **shape):
    case = integer_case(Shape(tokens, 256, 256, 4, 2, ep_size, **shape), seed=1)
    unit = 256 if arch.startswith("sm_10") else 128
    grid, comm = (8, 0) if ep_size == 1 else (8, 2)
    with emulated(arch, 8, seed) as emulator:
        emulator.check = check
        layer = ForwardRun(
            case,
            arch,
            ep_size,
            minibatch=2 * unit,
            macrobatch=4 * unit,
            grid=grid,
            num_comm_ctas=comm,
        )
        output = layer.run(emulator.register if check else None)
    expected = forward_loop(case).to(torch.bfloat16)
    assert torch.equal(output, expected)
    return emulator.report


@pytest.mark.parametrize(
    "arch,ep_size", [("sm_90a", 1), ("sm_90a", 2), ("sm_90a", 4), ("sm_100a", 2)]
)
def test_integers_are_exact(arch, ep_size):
    report = run(arch, ep_size)
    assert sum(r.cpu_seconds for r in report.launches) < 15


@pytest.mark.parametrize("ep_size", [1, 2])
def test_no_report_on_the_adversarial_machine(ep_size):
    report = run("sm_90a", ep_size, seed=3, check=True)
    assert not report.findings


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_no_report_with_many_seeds(seed):
    assert not run("sm_90a", 2, seed=seed, check=True).findings


def test_a_token_that_nobody_has_written_is_reported():
    """The heap's x of rank 1, which the kernels of both ranks fetch."""
    case = integer_case(Shape(256, 256, 256, 4, 2, 2), seed=1)
    with emulated("sm_90a", 8, check=True) as emulator:
        layer = ForwardRun(
            case, "sm_90a", 2, minibatch=256, macrobatch=512, grid=8, num_comm_ctas=2
        )
        emulator.register(layer.heap)
        emulator.register(layer.heap[layer.stride :][: layer.slots_at], written=False)
        with pytest.raises(KernelFault, match=r"global memory that nothing(.|\n)*tensor 0 \+ 0x"):
            layer.run(emulator.register)
