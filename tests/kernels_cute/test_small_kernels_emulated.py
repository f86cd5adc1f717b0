"""Each of our small kernels, undamaged, on the adversarial machine: five seeds, the same bits, no report.

Every tensor that is alive is registered, so that accesses beside them and races in global memory are reported,
too. What is run and compared is that of the kernels' own tests.
"""

import pytest

pytest.importorskip("cutlass")

from mok.tools.emulator import Emulator
from tests.kernels_cute import (
    test_barrier_kernel,
    test_gate,
    test_plan_kernel,
    test_quantise_kernel,
    test_router_grad_kernel,
    test_schedule_kernels,
    test_token_sum_kernel,
)

pytestmark = [pytest.mark.emulator, pytest.mark.slow]


class Watching(Emulator):
    """Knows, at every launch, the tensors that are alive, and no other memory."""

    def launch(self, compiled, args):
        self._ranges.clear()
        self._keep.clear()
        self.register_live()
        super().launch(compiled, args)


def plan(machine):
    test_plan_kernel.small("cpu")


def router_grad(machine):
    for shape in test_router_grad_kernel.SHAPES[:4]:
        test_router_grad_kernel.check(shape, "cpu")
        test_router_grad_kernel.check(shape, "cpu", num_ctas=1)


def token_sum(machine):
    tests = test_token_sum_kernel
    for shape in ((1, 64, 1), (3, 64 * 5, 2), (5, 64 * 13, 9)):
        for has_shared in (False, True):
            tests.check(shape, "cpu", has_shared)
            tests.check(shape, "cpu", has_shared, weighted=False, num_ctas=1)
        tests.check(shape, "cpu", True, scaled=True)
    tests.nan_weights_and_bad_ids("cpu")
    for num_ctas in (1, None):
        tests.written_over_the_shared_result("cpu", num_ctas)


def quantise(machine):
    tests = test_quantise_kernel
    tests.check(tests.random_values(2, 128, 256), "cpu", machine.arch)


def quantise_rows(machine):
    tests = test_quantise_kernel
    for tokens, hidden, ctas in ((1, 128, 1), (37, 384, 2), (9, 256, 16)):
        tests.check_rows(tests.random_values(tokens, hidden), "cpu", ctas, machine.arch)


def barrier(machine):
    tests = test_barrier_kernel
    for start in (0, 41, 2**31 - 1):
        tests.test_a_barrier_passes_when_all_have_come(machine, start)
    tests.test_missing_ranks_are_noted_and_the_group_is_poisoned(machine)
    tests.test_a_poisoned_group_returns_at_once_and_says_who(machine)
    tests.test_a_wait_for_a_signal(machine)


def gate(machine):
    test_gate.test_the_schedule_is_empty_and_reads_no_peer(machine)
    test_gate.test_backward_does_nothing(machine)
    test_gate.test_a_sum_of_results_that_never_came_is_nan(machine)


def schedule(machine):
    tests = test_schedule_kernels
    for shape in tests.SHAPES[:4] + tests.SHAPES[7:12]:
        tokens, topk, num_experts = shape
        for routing in ("random", "dropped", "none"):
            ids = tests.make_ids(tokens, topk, num_experts, routing)
            tests.check(ids, num_experts, "cpu", num_chunks=3)
    tests.bad_ids_become_a_record("cpu")
    tests.too_little_capacity_gives_an_empty_schedule("cpu")


KERNELS = [plan, router_grad, token_sum, quantise, quantise_rows, barrier, gate, schedule]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_same_bits_and_no_report(kernel, seed):
    with Watching("sm_90a", num_sms=4, seed=seed) as machine:
        kernel(machine)
    assert machine.check and machine.report.launches
    assert not machine.report.findings and not machine.report.faults
