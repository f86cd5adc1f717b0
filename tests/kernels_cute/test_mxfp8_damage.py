"""Damage to the scale path of the Blackwell kernels, one instruction at a time: somebody must notice.

Fences, waits and counters are the matter of ``tests.kernel_mutations``.
"""

import random
import re
import time

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
from tests.kernel_mutations import forgotten

ARCH, SMS = "sm_100a", 6
MAX_STEPS = 5_000_000
SAMPLE_S = 60.0
SHARES = 8  # tests that share the damages: each compiles once
# Tokens, H, I, E, K: one tile per expert, several with tails, experts larger than the ring, rows in several
# pieces. A damage is tried on those that run its line, in this order, until somebody notices.
CASES = [
    (Shape(40, 128, 128, 3, 2), 0),
    (Shape(40, 128, 128, 3, 2), 1),
    (Shape(300, 384, 256, 3, 2, 1, 128), 0),
    (Shape(700, 128, 256, 2, 1), 0),
    (Shape(24, 2176, 128, 2, 1), 0),
]


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


def outcome(shape, rewrite, seed):
    """The output, and the PTX lines of the forward kernel."""
    with emulated(ARCH, SMS, seed) as machine:
        machine.rewrite, machine.max_steps = rewrite, MAX_STEPS
        run = ForwardRun(
            random_case(shape), ARCH, minibatch=256, macrobatch=256, grid=6, num_comm_ctas=2,
            num_sms=SMS, mxfp8=True,
        )  # fmt: skip
        output = run.run(machine.register)
        assert not machine.report.findings
        return output, machine.report.lines


def backward_outcome(shape, rewrite, seed):
    """Every gradient, and the PTX lines of the backward kernel, which alone is damaged."""
    case = random_case(shape)
    with Emulator(ARCH, num_sms=SMS, seed=seed) as machine:
        machine.max_steps = 4 * MAX_STEPS
        run = BackwardRun(
            case, random_gradient(case), direct=False, minibatch=256, macrobatch=256, grid=6,
            num_comm_ctas=2, arch=ARCH, mxfp8=True,
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


def results_of(ptx, run, share=slice(None)):
    """(name, line, "reported", "wrong" or "survived") of a share of the damages that some case runs.

    ``run(shape, rewrite, seed)`` gives results and PTX lines.
    """
    expected = [run(shape, None, seed) for shape, seed in CASES]
    chosen = [d for d in damages(ptx) if any(d[1] + 1 in lines for _, lines in expected)]
    for name, number, new in random.Random(0).sample(chosen, len(chosen))[share]:

        def rewrite(text, number=number, new=new):
            lines = text.split("\n")
            lines[number] = new
            return "\n".join(lines)

        result = "survived"
        for (shape, seed), (wanted, lines) in zip(CASES, expected, strict=True):
            if result != "survived" or number + 1 not in lines:
                continue
            try:
                with forgotten():
                    found, _ = run(shape, rewrite, seed)
            except EmulatorError:
                result = "reported"
            else:
                if not torch.equal(found, wanted):
                    result = "wrong"
        print(f"{name}, line {number + 1}: {result}", flush=True)
        yield name, number + 1, result


def assert_noticed(results):
    results = list(results)
    lost = [r for r in results if r[2] == "survived"]
    assert results and not lost


@pytest.mark.emulator
def test_a_sample_of_damage_is_noticed():
    """As many as a minute allows; in CI."""
    begin, found = time.perf_counter(), []
    ptx = forward_kernel(ARCH, direct=False, mxfp8=True).ptx
    for each in results_of(ptx, outcome):
        found.append(each)
        if time.perf_counter() - begin > SAMPLE_S:
            break
    assert_noticed(found)
    assert len(found) >= 3


@pytest.mark.emulator
@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_damage_is_noticed(share):
    ptx = forward_kernel(ARCH, direct=False, mxfp8=True).ptx
    assert_noticed(results_of(ptx, outcome, slice(share, None, SHARES)))


@pytest.mark.emulator
@pytest.mark.slow
@pytest.mark.parametrize("share", range(4 * SHARES))
def test_damage_to_backward_is_noticed(share):
    """Forward has run undamaged."""
    ptx = get_kernel(kernels.backward_spec(ARCH, False, mxfp8=True)).ptx
    assert_noticed(results_of(ptx, backward_outcome, slice(share, None, 4 * SHARES)))
