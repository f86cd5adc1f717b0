"""No kernel adds floating-point numbers in memory: the order of such sums is another in every run."""

import re

import pytest

pytest.importorskip("cutlass")

from mok.runtime.compile import get_kernel
from tests.helpers import opcodes
from tests.kernels_cute import test_backward_compile, test_backward_mxfp8, test_forward_mxfp8

# Instructions that read, change and write memory, or reduce over GPUs; atom.cas and exch of bits do not add.
IN_MEMORY = re.compile(r"(red|atom|cp\.reduce|multimem)\b.*\.(f16|bf16|f32|f64|e4m3|e5m2)")


def float_atomics(ptx):
    return {name for name in opcodes(ptx) if IN_MEMORY.match(name)}


def builds():
    """Every build of the layer in either precision, each once; the rare ones are slow to compile."""
    seen = set()
    for module in (test_backward_compile, test_backward_mxfp8, test_forward_mxfp8):
        for param in module.builds():
            if param.values not in seen:
                seen.add(param.values)
                yield param


@pytest.mark.parametrize("spec", list(builds()))
def test_no_build_adds_in_memory(spec):
    ptx = get_kernel(spec).ptx
    assert not float_atomics(ptx)
    # TMA's reductions of tensors have no type of their own: it is the tensor map's.
    assert "cp.reduce.async.bulk.tensor" not in ptx
    if spec.name.startswith(("forward", "backward", "recompute")):
        # The kernels do draw tickets and count arrivals, in integers: the search finds what there is.
        assert any(re.match(r"(red|atom)\..*\.(u32|s32)", name) for name in opcodes(ptx))


@pytest.mark.parametrize(
    "instruction",
    [
        "red.global.add.f32 [%rd1], %f1;",
        "@%p1 red.relaxed.gpu.global.add.noftz.bf16x2 [%rd1], %r1;",
        "atom.global.v4.f32.add %f1, [%rd1], %f2;",
        "atom.shared::cluster.add.f64 %fd1, [%r1], %fd2;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r1], 128;",
        "multimem.red.relaxed.sys.global.add.bf16x2 [%rd1], %r1;",
    ],
)
def test_it_would_be_found(instruction):
    assert len(float_atomics(f"\t{instruction}\n\tred.global.add.u32 [%rd1], 1;\n")) == 1
