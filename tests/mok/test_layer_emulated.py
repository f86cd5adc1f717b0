"""The whole layer in the emulator: the compiled kernels, on the CPU, against the reference."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch

from mok.config import Config, Shape
from mok.reference import (
    BF16_LIMIT,
    ROUTINGS,
    Experts,
    forward_loop,
    forward_reference,
    integer_case,
    random_case,
    relative_l2,
    schedule_reference,
)
from tests.helpers_layer import (
    SMALL,
    Layer,
    first_tokens,
    run_layer,
    sensitive,
    watched,
    with_routes,
)

pytest.importorskip("numba", reason="the emulator needs numba")
pytest.importorskip("cutlass", reason="kernels need the CuTe DSL")

pytestmark = pytest.mark.emulator

TILE = 128


@contextlib.contextmanager
def emulator(num_sms: int = 6, seed: int | None = None):
    """With a seed, the adversarial machine: no data race, no read of what nothing has written."""
    from mok.tools.emulator import Emulator

    with Emulator("sm_90a", num_sms=num_sms, seed=seed) as machine:
        yield machine
    assert not machine.report.findings, "\n".join(map(str, machine.report.findings))


def expected(case):
    """Exact for integer cases: every intermediate value is."""
    return forward_loop(case).bfloat16()


# ------------------------------------------------------------------ exact results

CASES = {
    "one tile": (Shape(100, 64, 64, 4, 2), {}),
    "shared": (Shape(100, 128, 64, 4, 2, 1, 192), {}),
    "tails": (Shape(70, 64 * 5, 64 * 3, 5, 3), {}),
    "tails and shared": (Shape(70, 64 * 7, 64 * 5, 3, 2, 1, 64 * 3), {}),
    "wide": (Shape(60, 512, 256, 2, 2, 1, 256), {}),
    "one expert": (Shape(90, 64, 128, 1, 1), {}),
    "K = 1": (Shape(90, 128, 64, 6, 1, 1, 64), {}),
    "K = 32": (Shape(9, 64, 64, 5, 32), {}),
    "all to one": (Shape(130, 64, 64, 6, 2), {"kind": "one_expert"}),
    "most experts empty": (Shape(100, 64, 64, 16, 2), {"kind": "few_experts"}),
    "skewed": (Shape(120, 64, 64, 9, 3), {"kind": "skewed"}),
    "dropped": (Shape(120, 64, 64, 4, 4, 1, 64), {"kind": "dropped"}),
    "duplicates": (Shape(100, 64, 64, 3, 4), {"kind": "duplicates"}),
    "clamped": (Shape(100, 128, 64, 4, 2, 1, 64), {"swiglu_limit": 128.0}),
}


@pytest.mark.parametrize("ep_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_integer_cases_are_exact(name, ep_size):
    shape, options = CASES[name]
    case = integer_case(shape, seed=ep_size, **options)
    with emulator():
        found = run_layer(case, ep_size)
    assert torch.equal(found.output, expected(case))
    assert found.output.dtype == torch.bfloat16


@pytest.mark.parametrize("shared", [None, 64])
@pytest.mark.parametrize("ep_size", [1, 2, 3])
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_few_tokens(num_tokens, ep_size, shared):
    case = integer_case(Shape(num_tokens, 128, 64, 4, 2, 1, shared))
    with emulator():
        found = run_layer(case, ep_size)
    assert found.output.shape == case.x.shape
    assert torch.equal(found.output, expected(case))


@pytest.mark.parametrize(
    "lengths", [[0, 90], [90, 0], [0, 0, 90], [40, 0, 50], [1, 88, 0, 1]], ids=str
)
def test_ranks_without_tokens(lengths):
    case = integer_case(Shape(90, 64, 64, 5, 2, 1, 64), kind="skewed")
    with emulator():
        found = run_layer(case, len(lengths), tokens_per_rank=lengths)
    assert [len(out) for out in found.outputs] == lengths
    assert torch.equal(found.output, expected(case))


@pytest.mark.parametrize("shared", [None, 64])
@pytest.mark.parametrize("ep_size", [1, 3])
def test_no_route_at_all(ep_size, shared):
    case = integer_case(Shape(50, 64, 64, 4, 2, 1, shared))
    case = with_routes(case, torch.full((50, 2), -1))
    with emulator():
        found = run_layer(case, ep_size, spoiled=True)
    want = expected(case)
    assert torch.equal(found.output, want)
    assert bool(want.any()) == (shared is not None)


@pytest.mark.parametrize("ep_size", [5, 8])
def test_more_ranks_than_experts(ep_size):
    case = integer_case(Shape(60, 64, 64, 3, 2, 1, 64))
    with emulator():
        found = run_layer(case, ep_size)
    assert torch.equal(found.output, expected(case))


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_ids_of_both_widths(ids_dtype):
    case = integer_case(Shape(40, 64, 64, 4, 2), kind="dropped")
    narrow = dataclasses.replace(case, top_experts=case.top_experts.to(ids_dtype))
    with emulator():
        for ep_size in (1, 2):
            assert torch.equal(run_layer(narrow, ep_size).output, expected(case))


# ------------------------------------------------------------------ against FP64


@pytest.mark.parametrize("ep_size", [1, 3])
@pytest.mark.parametrize(
    ("kind", "limit"), [*((kind, None) for kind in ROUTINGS), ("random", 0.5), ("dropped", 1.0)]
)
def test_random_values_are_near_the_mathematics(kind, ep_size, limit):
    case = random_case(Shape(80, 192, 128, 6, 3, 1, 64), kind=kind, seed=3, swiglu_limit=limit)
    with emulator():
        found = run_layer(case, ep_size)
    assert relative_l2(found.output, forward_loop(case)) < BF16_LIMIT
    # Same roundings in the same places: what is left is exp2 and the order of FP32 sums.
    assert relative_l2(found.output, forward_reference(case, ep_size)) < BF16_LIMIT / 4


# ------------------------------------------------------------------ the schedule and the ring


@pytest.mark.parametrize("lengths", [[77], [30, 0, 47]], ids=str)
def test_the_schedule_is_the_references(lengths):
    case = integer_case(Shape(77, 64, 64, 5, 3), kind="dropped", seed=4)
    with emulator(), Layer(case, len(lengths), tokens_per_rank=lengths) as layer:
        found = layer.build_schedule()
        wanted = schedule_reference(list(case.top_experts.split(lengths)), 5, len(lengths), TILE)
        for got, want in zip(found.ranks, wanted, strict=True):
            rows = int(got.num_rows)
            assert rows == want.num_tokens
            assert torch.equal(got.peer_rank[:rows], want.peer_rank)
            assert torch.equal(got.peer_token_idx[:rows], want.peer_token_idx)
            count = len(want.tokens_per_expert)
            assert torch.equal(got.tokens_per_expert[:count], want.tokens_per_expert)
            if want.route_row is not None:
                assert torch.equal(got.route_row, want.route_row)
        assert int(found.num_tokens) == wanted[0].num_tokens


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize(
    ("minibatch", "macrobatch"), [(128, 128), (128, 256), (256, 256), (128, 384)]
)
@pytest.mark.parametrize("ep_size", [1, 2])
def test_the_ring_wraps(ep_size, minibatch, macrobatch, seed):
    num_experts = (4 * macrobatch // 128 + 1) * ep_size
    case = integer_case(Shape(90, 64, 64, num_experts, 3, 1, 64), seed=5)
    config = Config(2, 2, minibatch, macrobatch)
    with emulator(seed=seed) as machine:
        found = run_layer(
            case, ep_size, config, save_context=True, spoiled=True,
            machine=None if seed is None else machine,
        )  # fmt: skip
    assert found.facts.ring_slots == macrobatch // minibatch
    assert found.ring_wraps >= 3
    assert torch.equal(found.output, expected(case))


@pytest.mark.parametrize("macrobatch", [128, 256])
def test_the_ring_is_handed_over_among_many_workers(macrobatch):
    """More comm workers than a block has items, so that no worker's own order hides a wait."""
    case = integer_case(Shape(90, 64, 64, 10, 2), seed=12)
    config = Config(7, 7, 128, macrobatch)
    for seed in range(2):
        with emulator(num_sms=9, seed=seed) as machine:
            found = run_layer(case, 2, config, spoiled=True, machine=machine)
        assert found.facts.comm_ctas == 7
        assert torch.equal(found.output, expected(case))


@pytest.mark.parametrize("macrobatch", [128, 256, 8192])
@pytest.mark.parametrize("lengths", [[90], [50, 0, 40]], ids=str)
def test_the_context_is_that_of_macrobatch_0(lengths, macrobatch):
    case = integer_case(Shape(90, 128, 192, 6, 2, 1, 64), seed=6)
    ep_size = len(lengths)
    config = dataclasses.replace(SMALL, macrobatch_size=macrobatch)
    with emulator(), Layer(case, ep_size, config, tokens_per_rank=lengths) as layer:
        found = layer(save_context=True)
    schedules = schedule_reference(list(case.top_experts.split(lengths)), 6, ep_size, TILE)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    placement = layer.placement()
    for rank, schedule in enumerate(schedules):
        ring = min(macrobatch, schedule.num_tokens)
        rows = (schedule.peer_rank[:ring] >= 0).nonzero().flatten()
        source = starts[schedule.peer_rank[rows]] + schedule.peer_token_idx[rows] // 2
        expert = schedule.block_expert[rows // TILE] + placement[rank].start
        x = case.x[source]
        gate, up = (
            torch.einsum("rh,rih->ri", x.float(), weight[expert].float()).bfloat16()
            for weight in (case.routed.gate, case.routed.up)
        )
        assert torch.equal(found.context.gate_routed[rank][rows], gate)
        assert torch.equal(found.context.up_routed[rank][rows], up)
        if ep_size > 1:
            assert torch.equal(found.context.x_routed[rank][rows], x)
    own = case.x.split(lengths)
    for rank in range(ep_size):
        for saved, weight in (
            (found.context.gate_shared, case.shared.gate),
            (found.context.up_shared, case.shared.up),
        ):
            assert torch.equal(saved[rank], (own[rank].float() @ weight[0].float().t()).bfloat16())


# ------------------------------------------------------------------ the same bits

BITS = sensitive(random_case(Shape(120, 128, 192, 6, 3, 1, 64), kind="skewed", seed=7))


@pytest.fixture(scope="module")
def reference_bits():
    with emulator():
        found = run_layer(BITS).output
    assert relative_l2(found, forward_loop(BITS)) < BF16_LIMIT
    return found


def test_the_case_shows_the_order_of_sums():
    """Otherwise the tests below could not fail: the reference with its sums in another order."""
    base = forward_reference(BITS)
    columns = torch.randperm(len(BITS.x[0]), generator=torch.Generator().manual_seed(0))

    def permuted(experts):
        return Experts(experts.gate[..., columns], experts.up[..., columns], experts.down)

    other_k = dataclasses.replace(
        BITS,
        x=BITS.x[:, columns],
        routed=permuted(BITS.routed),
        shared=permuted(BITS.shared),
    )
    other_routes = dataclasses.replace(
        BITS,
        top_experts=BITS.top_experts.flip(1),
        router_weights=BITS.router_weights.flip(1),
    )
    for other in (other_k, other_routes):
        assert (forward_reference(other) != base).sum() > 100


def configured(**changes):
    return dataclasses.replace(SMALL, **changes)


# Each tunable: settings, EP sizes it is tried at, and what must differ between the settings.
TUNABLES = {
    "fwd_num_comm_sms": ([1, 2, 5], [2], lambda r: r.facts.comm_ctas),
    "minibatch_size": ([128, 256, 512], [1, 2], lambda r: r.minibatches),
    "macrobatch_size": ([128, 256, 768], [1, 2], lambda r: r.facts.ring_slots),
    "schedule_capacity_multiplier": ([1e-9, 0.5, 2.0], [1, 2], lambda r: r.facts.grid),
    "reserved_sms": ([0, 2, 3], [1, 2], lambda r: r.facts.grid),
    "pairs": ([True, False], [1, 2], lambda r: r.facts.pair),
    "push": ([True, False], [2], lambda r: any(r.counters["y_free"])),  # told by combines alone
}


@pytest.mark.parametrize(
    ("tunable", "ep_size"), [(name, ep) for name, (_, eps, _) in TUNABLES.items() for ep in eps]
)
def test_no_tunable_changes_a_bit(reference_bits, tunable, ep_size):
    settings, _, recorded = TUNABLES[tunable]
    # Room for all the work, so that the setting and nothing else limits the launch.
    roomy = {"schedule_capacity_multiplier": 2.0}
    if tunable == "minibatch_size":
        roomy["macrobatch_size"] = 512
    if tunable == "pairs":
        roomy["fwd_num_comm_sms"] = 2
    seen = []
    for value in settings:
        with emulator(num_sms=10):
            found = run_layer(BITS, ep_size, configured(**{**roomy, tunable: value}))
        assert torch.equal(found.output, reference_bits), (tunable, value)
        seen.append(recorded(found))
    assert len(set(seen)) == len(settings), seen


@pytest.mark.parametrize(
    "lengths", [[120], [60, 60], [9, 111], [50, 0, 70], [30, 31, 29, 30]], ids=str
)
def test_ranks_change_no_bit(reference_bits, lengths):
    with emulator():
        found = run_layer(BITS, len(lengths), tokens_per_rank=lengths)
    assert torch.equal(found.output, reference_bits)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("ep_size", [1, 2])
def test_interleaving_changes_no_bit(reference_bits, ep_size, seed):
    with (
        emulator(seed=seed) as machine,
        Layer(BITS, ep_size) as layer,
        watched(machine, layer),
    ):
        assert torch.equal(layer().output, reference_bits)
        assert torch.equal(layer(save_context=True).output, reference_bits)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 20))
@pytest.mark.parametrize("ep_size", [1, 2, 3])
def test_many_interleavings_change_no_bit(reference_bits, ep_size, seed):
    with emulator(seed=seed) as machine:
        found = run_layer(
            BITS, ep_size, configured(macrobatch_size=128), spoiled=True, machine=machine
        )
    assert torch.equal(found.output, reference_bits)


@pytest.mark.parametrize("ep_size", [1, 3])
def test_saving_the_context_changes_no_bit(reference_bits, ep_size):
    with emulator():
        found = run_layer(BITS, ep_size, save_context=True)
    assert found.context is not None and found.context.tensors()
    assert torch.equal(found.output, reference_bits)


@pytest.mark.parametrize("ep_size", [2, 3])
def test_the_least_machine_is_enough(reference_bits, ep_size):
    """All comm workers and one compute cluster."""
    with emulator(num_sms=3, seed=11) as machine:
        found = run_layer(BITS, ep_size, configured(macrobatch_size=128), machine=machine)
    assert (found.facts.grid, found.facts.comm_ctas) == (3, 2)
    assert torch.equal(found.output, reference_bits)


# ------------------------------------------------------------------ what must not matter


@pytest.mark.parametrize("ep_size", [1, 2])
@pytest.mark.parametrize("change", ["values", "routes", "nan", "removed"])
def test_other_tokens_leave_a_tokens_bits_alone(reference_bits, change, ep_size):
    kept = torch.arange(0, len(BITS.x), 3)
    others = torch.ones(len(BITS.x), dtype=torch.bool)
    others[kept] = False
    x, ids, weights = BITS.x.clone(), BITS.top_experts.clone(), BITS.router_weights.clone()
    rows = torch.arange(len(x))
    if change == "values":
        x[others] = torch.randn(x[others].shape).bfloat16()
        weights[others] = -3.0
    elif change == "routes":
        ids[others] = (ids[others] * 5 + 1) % 6
        ids[others, 1] = -1
    elif change == "nan":
        x[others] = torch.nan
        weights[others] = torch.nan
    else:
        rows = kept
    case = dataclasses.replace(BITS, x=x[rows], top_experts=ids[rows], router_weights=weights[rows])
    with emulator():
        output = run_layer(case, ep_size).output
    found = output if change == "removed" else output[kept]
    assert torch.equal(found, reference_bits[kept])
    if change != "removed":
        assert not torch.equal(output[others], reference_bits[others])


@pytest.mark.parametrize("ep_size", [1, 2])
def test_values_that_are_not_numbers_stay_in_their_token(reference_bits, ep_size):
    x, weights = BITS.x.clone(), BITS.router_weights.clone()
    weights[5, 1], weights[6, 0], x[77, 3], x[90, 0] = torch.nan, torch.inf, torch.nan, torch.inf
    case = dataclasses.replace(BITS, x=x, router_weights=weights)
    with emulator():
        found = run_layer(case, ep_size).output
    touched = torch.tensor([5, 6, 77, 90])
    assert found[[5, 77]].isnan().all()
    assert not found[[6, 90]].isfinite().all(dim=1).any()
    found[touched] = reference_bits[touched]
    assert torch.equal(found, reference_bits)


@pytest.mark.parametrize("save_context", [False, True])
@pytest.mark.parametrize("ep_size", [1, 2, 3])
def test_memory_that_held_nan(ep_size, save_context):
    case = integer_case(Shape(90, 64 * 3, 64 * 3, 5, 2, 1, 64), kind="dropped", seed=8)
    with emulator():
        found = run_layer(case, ep_size, save_context=save_context, spoiled=True, max_tokens=150)
    assert torch.equal(found.output, expected(case))


@pytest.mark.parametrize("ep_size", [1, 2])
def test_calls_of_different_sizes_share_a_workspace(ep_size):
    full = integer_case(Shape(120, 64, 64, 6, 2, 1, 64), seed=9)
    with emulator(), Layer(full, ep_size, max_tokens=120) as layer:
        for count in (120, 3, 0, 77, 120):
            case = first_tokens(full, count)
            layer.lengths = case.tokens_per_rank(ep_size)
            assert torch.equal(layer(case).output, expected(case)), count
            layer.spoil()


@pytest.mark.parametrize("ep_size", [1, 2])
def test_a_schedule_serves_several_calls(ep_size):
    first = integer_case(Shape(80, 64, 64, 4, 2), seed=1)
    second = dataclasses.replace(
        integer_case(Shape(80, 64, 64, 4, 2), seed=2), top_experts=first.top_experts
    )
    with emulator(), Layer(first, ep_size) as layer:
        schedule = layer.build_schedule()
        layer.build_schedule(integer_case(Shape(80, 64, 64, 4, 2), kind="one_expert"))
        for case in (first, second):
            assert torch.equal(layer(case, schedule=schedule).output, expected(case))


# ------------------------------------------------------------------ stray accesses


@pytest.mark.parametrize("bad_id", [None, 4, -2, 2**31 - 1, 2**32, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("ep_size", [1, 3])
def test_only_the_layers_own_memory_is_touched(ep_size, bad_id):
    case = integer_case(Shape(70, 64 * 3, 64, 4, 2, 1, 64), seed=10)
    if bad_id is not None:
        ids = case.top_experts.clone()
        ids[41, 1] = bad_id
        case = with_routes(case, ids)
    with emulator() as machine, Layer(case, ep_size) as layer, watched(machine, layer):
        schedule = layer.build_schedule()
        layer.workspace.records.clear()
        found = layer.queue(schedule=schedule, save_context=True)
    if bad_id is not None:
        ids[41, 1] = -1
    assert torch.equal(
        found.output, expected(with_routes(case, ids) if bad_id is not None else case)
    )
