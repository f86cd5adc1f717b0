"""Damage to the scale path of the Blackwell kernels, one instruction at a time: somebody must notice.

Fences between the proxies are not among it: they stand on both sides of each hand-over, and the emulator
is content with either.
"""

import random
import re

import pytest

pytest.importorskip("cutlass")

import torch

from mok import kernels
from mok.config import Shape
from mok.kernels_cute.gemm.sm100_mxfp8 import INSTRUCTION
from mok.reference import random_case, random_gradient
from mok.runtime.compile import get_kernel
from mok.tools.emulator import Emulator, EmulatorError
from tests.backward_runs import BackwardRun
from tests.backward_runs import _Rank as OneRank
from tests.forward_runs import ForwardRun, emulated, forward_kernel

ARCH, SMS = "sm_100a", 6
MAX_STEPS = 5_000_000
NOTICED = 0.95


def damages(ptx):
    """(name, line number, new text) of each damage."""
    for number, line in enumerate(ptx.split("\n")):
        if "tcgen05.cp" in line:
            yield "delete a copy of scales", number, ""
        if "block_scale" in line:
            word = int(re.search(r"\b\d{9,10}\b", line)[0])
            a, b = (word - INSTRUCTION) >> 29, (word - INSTRUCTION) >> 4 & 3
            assert a == b
            for other in ((a + 1) % 4 << 29 | b << 4, a << 29 | (b + 1) % 4 << 4):
                yield "use another byte", number, line.replace(str(word), str(INSTRUCTION | other))
            scales = re.findall(r"\[(%r\d+)\]", line)[1:]
            swapped = re.sub(r"\[%r\d+\], \[%r\d+\], p", f"[{scales[1]}], [{scales[0]}], p", line)
            yield "exchange the scales of A and B", number, swapped
        if re.match(r"\s*st\.global\.(b32|v2\.b32|v4\.b32|b8) ", line):
            yield "delete a store of scales or values", number, ""
        if "cp.async.bulk.tensor.3d.shared" in line:
            yield "delete a load", number, ""


def outcome(case, rewrite, seed):
    with emulated(ARCH, SMS, seed) as machine:
        machine.rewrite, machine.max_steps = rewrite, MAX_STEPS
        run = ForwardRun(
            case, ARCH, minibatch=256, macrobatch=256, grid=6, num_comm_ctas=2, num_sms=SMS,
            mxfp8=True,
        )  # fmt: skip
        output = run.run(machine.register)
        assert not machine.report.findings
        return output, machine.report.lines


def backward_outcome(inputs, rewrite, seed):
    """Every gradient, and the PTX lines of the backward kernel, which alone is damaged."""
    with Emulator(ARCH, num_sms=SMS, seed=seed) as machine:
        machine.max_steps = 4 * MAX_STEPS
        run = BackwardRun(
            *inputs, direct=False, minibatch=256, macrobatch=256, grid=6, num_comm_ctas=2, arch=ARCH,
            mxfp8=True,
        )  # fmt: skip
        machine.register(run.heap, run.record)
        rank = OneRank(run, 0)
        rank.forward()
        machine.report.lines.clear()
        if rewrite is not None:  # the plan kernel runs, too
            machine.rewrite = lambda ptx: rewrite(ptx) if "block_scale" in ptx else ptx
        rank.backward()
        assert not machine.report.findings
        found = [*rank.outputs.values(), run.views["dx"][0], run.views["dw"][0]]
        return torch.cat([t.flatten().view(torch.uint8) for t in found]), machine.report.lines


def results_of(ptx, run, most=None):
    """(name, line, "reported", "wrong" or "survived") of damages that ``run(rewrite, seed)`` executes.

    ``most``: of these, at random.
    """
    expected = {seed: run(None, seed) for seed in (0, 1)}
    executed = set.union(*(lines for _, lines in expected.values()))
    chosen = [damage for damage in damages(ptx) if damage[1] + 1 in executed]
    if most is not None and len(chosen) > most:
        chosen = random.Random(0).sample(chosen, most)
    for name, number, new in chosen:

        def rewrite(text, number=number, new=new):
            lines = text.split("\n")
            lines[number] = new
            return "\n".join(lines)

        result = "survived"
        for seed, (wanted, _) in expected.items():
            try:
                found, _ = run(rewrite, seed)
            except EmulatorError:
                result = "reported"
            else:
                if not torch.equal(found, wanted):
                    result = "wrong"
            if result != "survived":
                break
        print(name, number + 1, result, flush=True)
        yield name, number + 1, result


def assert_noticed(results):
    results = list(results)
    noticed = sum(result != "survived" for *_, result in results)
    assert len(results) >= 20 and noticed >= NOTICED * len(results), results


@pytest.mark.emulator
@pytest.mark.slow
def test_damage_is_noticed(capsys):
    case = random_case(Shape(40, 128, 128, 3, 2))
    ptx = forward_kernel(ARCH, direct=False, mxfp8=True).ptx
    with capsys.disabled():
        assert_noticed(results_of(ptx, lambda rewrite, seed: outcome(case, rewrite, seed)))


@pytest.mark.emulator
@pytest.mark.slow
def test_damage_to_backward_is_noticed(capsys):
    """A sample of 40: two experts of one tile each, the second replayed."""
    case = random_case(Shape(40, 128, 128, 2, 2))
    inputs = (case, random_gradient(case))
    ptx = get_kernel(kernels.backward_spec(ARCH, False, mxfp8=True)).ptx
    with capsys.disabled():
        run = lambda rewrite, seed: backward_outcome(inputs, rewrite, seed)  # noqa: E731
        assert_noticed(results_of(ptx, run, 40))
