"""The layer's numbers on a GPU: accuracy, exact cases at real sizes, equal bits."""

from __future__ import annotations

import dataclasses
import gc
import math

import pytest
import torch

from mok.config import Config, Shape
from mok.models import MODELS
from mok.reference import (
    BF16_LIMIT,
    forward_oracle,
    forward_reference,
    integer_case,
    random_case,
    relative_l2,
    schedule_reference,
)
from mok.runtime.device import device_info
from tests.helpers_layer import Layer, run_layer, sensitive, to_device, with_routes

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
CONFIG = Config(fwd_num_comm_sms=16, bwd_num_comm_sms=16, minibatch_size=1024, macrobatch_size=8192)


@pytest.fixture(autouse=True)
def _memory_back():
    """Symmetric memory does not come from torch's allocator, so that must not keep what it has."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


def expected(case):
    """Exact for integer cases: every intermediate value is."""
    return forward_oracle(case).bfloat16()


def scaled(name: str, num_tokens: int) -> Shape:
    """A model's layer, with fewer experts where their weights would take a third of the GPU."""
    shape = Shape.of_model(MODELS[name], num_tokens)
    expert_bytes = 3 * 2 * shape.hidden_size * shape.intermediate_size
    fit = device_info().memory_bytes // 3 // expert_bytes
    return dataclasses.replace(shape, num_experts=min(shape.num_experts, fit))


# ------------------------------------------------------------------ against FP32


@pytest.mark.alone
@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_near_fp32(name):
    case = random_case(scaled(name, 2048), device=DEVICE, seed=1)
    want = forward_oracle(case)
    config = Config.suggest(dataclasses.replace(case.shape, num_tokens=2048), DEVICE)
    outputs = []
    for ep_size in (1, 4):
        found = run_layer(case, ep_size, config, DEVICE)
        error = relative_l2(found.output, want)
        print(f"{name} E {case.shape.num_experts} EP {ep_size}: relative L2 {error:.2e}")
        assert error <= BF16_LIMIT
        outputs.append(found.output)
    assert torch.equal(*outputs)


@pytest.mark.parametrize("kind", ["skewed", "dropped", "duplicates", "few_experts"])
@pytest.mark.parametrize("limit", [None, 0.7])
def test_routings_and_the_clamp_are_near_fp32(kind, limit):
    shape = dataclasses.replace(scaled("qwen3-30b-a3b", 2048), shared_intermediate_size=320)
    case = random_case(shape, kind=kind, device=DEVICE, swiglu_limit=limit)
    want = forward_oracle(case)
    for ep_size in (1, 3):
        found = run_layer(case, ep_size, CONFIG, DEVICE)
        assert relative_l2(found.output, want) <= BF16_LIMIT


# ------------------------------------------------------------------ exact at real sizes

REAL = {  # model, T, experts, shared I, routing, EP sizes
    "qwen3-30b-a3b": (4096, 128, None, "random", (1, 2, 4, 8)),
    "kimi-k2.5": (2048, 64, 2048, "skewed", (1, 3, 8)),
    "deepseek-v3": (1024, 256, 2048, "random", (1, 4)),
    "mixtral-8x7b": (2048, 8, 1024, "dropped", (1, 2)),
    "olmoe": (4096, 64, None, "one_expert", (1, 4)),
    "qwen3.5-397b": (1024, 128, 1024, "few_experts", (1, 6)),
}


@pytest.mark.parametrize("name", REAL)
def test_integer_cases_are_exact_at_real_sizes(name):
    num_tokens, experts, shared, kind, ep_sizes = REAL[name]
    shape = scaled(name, num_tokens)
    shape = dataclasses.replace(
        shape,
        num_experts=min(experts, shape.num_experts),
        shared_intermediate_size=shared,
    )
    case = integer_case(shape, kind=kind, device=DEVICE)
    want = expected(case)
    for ep_size in ep_sizes:
        found = run_layer(case, ep_size, CONFIG, DEVICE)
        assert torch.equal(found.output, want), f"EP {ep_size}"


def test_the_scheduled_reference_agrees_to_the_last_bit():
    case = integer_case(Shape(700, 576, 320, 12, 4, 1, 192), kind="dropped", device=DEVICE)
    want = expected(case)
    for ep_size in (1, 3):
        assert torch.equal(forward_reference(case, ep_size), want)
        assert torch.equal(run_layer(case, ep_size, CONFIG, DEVICE).output, want)


@pytest.mark.parametrize("lengths", [[4096], [1000, 0, 3096]], ids=str)
def test_the_schedule_is_the_references(lengths):
    case = integer_case(Shape(4096, 64, 64, 100, 8), kind="dropped", device=DEVICE)
    ids = list(case.top_experts.cpu().split(lengths))
    with Layer(case, len(lengths), CONFIG, DEVICE, tokens_per_rank=lengths) as layer:
        found = layer.build_schedule()
        for got, want in zip(
            found.ranks, schedule_reference(ids, 100, len(lengths), 128), strict=True
        ):
            rows = int(got.num_rows)
            assert rows == want.num_tokens
            assert torch.equal(got.peer_rank[:rows].cpu(), want.peer_rank)
            assert torch.equal(got.peer_token_idx[:rows].cpu(), want.peer_token_idx)


# ------------------------------------------------------------------ sizes

SIZES = {
    "T = 0": (Shape(0, 576, 320, 16, 4, 1, 192), "random"),
    "T = 1": (Shape(1, 576, 320, 16, 4, 1, 192), "random"),
    "T = 7": (Shape(7, 576, 320, 16, 4), "random"),
    "T = 255": (Shape(255, 576, 320, 16, 4, 1, 64), "random"),
    "T = 4096": (Shape(4096, 576, 320, 16, 4, 1, 192), "random"),
    "smallest": (Shape(300, 64, 64, 8, 2, 1, 64), "random"),
    "tails": (Shape(500, 64 * 33, 64 * 11, 10, 4, 1, 64 * 7), "skewed"),
    "one expert": (Shape(777, 512, 256, 1, 1), "random"),
    "K = 1": (Shape(1000, 512, 256, 32, 1, 1, 256), "random"),
    "K = 32": (Shape(300, 512, 256, 64, 32), "random"),
    "all to one": (Shape(2000, 512, 256, 64, 8), "one_expert"),
    "most experts empty": (Shape(1000, 512, 256, 512, 8), "few_experts"),
    "more experts than rows": (Shape(5, 128, 64, 2000, 2), "random"),
}


@pytest.mark.parametrize("ep_size", [1, 4])
@pytest.mark.parametrize("name", SIZES)
def test_sizes(name, ep_size):
    shape, kind = SIZES[name]
    case = integer_case(shape, kind=kind, device=DEVICE)
    found = run_layer(case, ep_size, CONFIG, DEVICE)
    assert found.output.shape == case.x.shape
    assert torch.equal(found.output, expected(case))


@pytest.mark.parametrize("lengths", [[0, 900], [900, 0, 0], [1, 0, 898, 1]], ids=str)
def test_ranks_without_tokens(lengths):
    case = integer_case(Shape(900, 576, 320, 9, 3, 1, 192), kind="skewed", device=DEVICE)
    found = run_layer(case, len(lengths), CONFIG, DEVICE, tokens_per_rank=lengths)
    assert torch.equal(found.output, expected(case))


@pytest.mark.parametrize("ep_size", [1, 2])
def test_no_route_at_all(ep_size):
    case = integer_case(Shape(300, 576, 320, 9, 3, 1, 192), device=DEVICE)
    case = with_routes(case, torch.full((300, 3), -1))
    found = run_layer(case, ep_size, CONFIG, DEVICE, spoiled=True)
    assert torch.equal(found.output, expected(case))


@pytest.mark.alone
@pytest.mark.parametrize("lengths", [[40960], [40960, 0]], ids=str)
def test_rows_times_hidden_pass_2_31(lengths):
    case = integer_case(Shape(40960, 7168, 64, 4, 8), device=DEVICE)
    with Layer(case, len(lengths), CONFIG, DEVICE, tokens_per_rank=lengths) as layer:
        found = layer()
        rows = sum(int(r.num_rows) for r in found.schedule.ranks)
    assert rows * 7168 > 2**31
    assert torch.equal(found.output, expected(case))


@pytest.mark.alone
@pytest.mark.parametrize("ep_size", [1, 2])
def test_expert_weights_pass_2_31(ep_size):
    shape = Shape(512, 7168, 2048, 160 * ep_size, 8)
    case = integer_case(shape, device=DEVICE)
    # Each stack alone on each rank, so that no address arithmetic can be 32 bits wide.
    assert case.routed.gate.numel() // ep_size > 2**31
    used = case.top_experts.unique()
    assert used.max() > shape.num_experts - 8
    assert torch.equal(run_layer(case, ep_size, CONFIG, DEVICE).output, expected(case))


@pytest.mark.parametrize("save_context", [False, True])
@pytest.mark.parametrize("ep_size", [1, 4])
def test_memory_that_held_nan(ep_size, save_context):
    case = integer_case(Shape(900, 576, 320, 9, 3, 1, 192), kind="dropped", device=DEVICE)
    found = run_layer(
        case, ep_size, CONFIG, DEVICE, save_context=save_context, spoiled=True, max_tokens=2000
    )
    assert torch.equal(found.output, expected(case))


# ------------------------------------------------------------------ the same bits


@pytest.fixture(scope="module")
def bits():
    """A case whose output shows the order of every sum, and the output at EP = 1."""
    shape = dataclasses.replace(scaled("qwen3-30b-a3b", 4096), shared_intermediate_size=832)
    case = sensitive(random_case(shape, kind="skewed", device=DEVICE, seed=2))
    found = run_layer(case, 1, CONFIG, DEVICE)
    # Between its two large terms, 2^10 times the result, a sum loses up to 2^-23 of them at each step
    # of 16 along K: the tensor core cuts off rather than rounds. Two products follow one another.
    steps = (shape.hidden_size + max(shape.intermediate_size, 832)) / 16
    limit = BF16_LIMIT + steps * 2.0 ** (10 - 23)
    assert relative_l2(found.output, forward_oracle(case, torch.float64)) <= limit
    return case, found.output


def configured(**changes) -> Config:
    return dataclasses.replace(CONFIG, **changes)


def reserve_all_but(num_sms: int) -> int:
    present = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    if present < num_sms:
        pytest.skip(f"needs {num_sms} SMs: there are {present}")
    return present - num_sms


@pytest.mark.parametrize("ep_size", [1, 4])
def test_twenty_repeats(bits, ep_size):
    case, want = bits
    with Layer(case, ep_size, CONFIG, DEVICE) as layer:
        for repeat in range(20):
            found = layer(save_context=repeat % 2 == 1)
            assert torch.equal(found.output, want), f"repeat {repeat}"
            if repeat % 5 == 0:
                layer.spoil()


# Each tunable: settings, EP sizes it is tried at, and what must differ between the settings.
TUNABLES = {
    "fwd_num_comm_sms": ([2, 16, 64], [4], lambda r: r.facts.comm_ctas),
    "minibatch_size": ([128, 512, 4096], [1, 4], lambda r: r.minibatches),
    "macrobatch_size": ([1024, 4096, 8192], [1, 4], lambda r: r.facts.ring_slots),
    "schedule_capacity_multiplier": ([1e-6, 0.008, 0.5], [1, 4], lambda r: r.facts.grid),
    "pairs": ([True, False], [1, 4], lambda r: r.facts.pair),
    "push": ([True, False], [4], lambda r: any(r.counters["y_free"])),  # told by combines alone
}


@pytest.mark.parametrize(
    ("tunable", "ep_size"), [(name, ep) for name, (_, eps, _) in TUNABLES.items() for ep in eps]
)
def test_no_tunable_changes_a_bit(bits, tunable, ep_size):
    case, want = bits
    settings, _, recorded = TUNABLES[tunable]
    seen = []
    for value in settings:
        found = run_layer(case, ep_size, configured(**{tunable: value}), DEVICE)
        seen.append(recorded(found))
        print(tunable, value, found.facts, "minibatches", found.minibatches)
        assert torch.equal(found.output, want), (tunable, value)
    assert len(set(seen)) == len(settings), seen


@pytest.mark.parametrize("ep_size", [1, 4])
def test_a_smaller_gpu_gives_the_same_bits(bits, ep_size):
    case, want = bits
    present = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    for num_sms in (present, 114, 78):
        config = configured(reserved_sms=reserve_all_but(num_sms))
        found = run_layer(case, ep_size, config, DEVICE)
        assert found.facts.grid == num_sms
        assert torch.equal(found.output, want), num_sms


@pytest.mark.parametrize("ep_size", [2, 4])
def test_the_least_machine_is_enough(ep_size):
    """All comm workers and one compute cluster: nothing waits for what cannot run."""
    case = integer_case(Shape(900, 576, 320, 24, 3, 1, 192), device=DEVICE)
    for num_sms, comm in ((2, 1), (9, 8)):
        config = Config(comm, comm, 128, 256, reserved_sms=reserve_all_but(num_sms))
        found = run_layer(case, ep_size, config, DEVICE)
        assert (found.facts.grid, found.facts.comm_ctas) == (num_sms, comm)
        assert torch.equal(found.output, expected(case))


@pytest.mark.parametrize("lengths", [2, 3, 4, 8, [100, 0, 3996]], ids=str)
def test_ranks_change_no_bit(bits, lengths):
    case, want = bits
    if isinstance(lengths, int):
        lengths = case.tokens_per_rank(lengths)
    found = run_layer(case, len(lengths), CONFIG, DEVICE, tokens_per_rank=lengths)
    assert torch.equal(found.output, want)


@pytest.mark.parametrize("ep_size", [1, 4])
def test_the_ring_wraps(bits, ep_size):
    case, want = bits
    for minibatch, macrobatch in ((128, 128), (256, 1024), (1024, 1024)):
        config = configured(minibatch_size=minibatch, macrobatch_size=macrobatch)
        found = run_layer(case, ep_size, config, DEVICE, save_context=True)
        assert found.facts.ring_slots == macrobatch // minibatch
        assert found.ring_wraps >= 3
        assert torch.equal(found.output, want), (minibatch, macrobatch)


@pytest.mark.parametrize("ep_size", [1, 4])
@pytest.mark.parametrize("change", ["values", "routes", "nan", "removed"])
def test_other_tokens_leave_a_tokens_bits_alone(bits, change, ep_size):
    case, want = bits
    num_tokens, num_experts = len(case.x), case.shape.num_experts
    kept = torch.arange(0, num_tokens, 3, device=DEVICE)
    others = torch.ones(num_tokens, dtype=torch.bool, device=DEVICE)
    others[kept] = False
    x, ids, weights = case.x.clone(), case.top_experts.clone(), case.router_weights.clone()
    rows = torch.arange(num_tokens, device=DEVICE)
    if change == "values":
        x[others] = torch.randn(x[others].shape, device=DEVICE).bfloat16()
        weights[others] = -3.0
    elif change == "routes":
        ids[others] = (ids[others] * 5 + 1) % num_experts
        ids[others, 1] = -1
    elif change == "nan":
        x[others] = torch.nan
        weights[others] = torch.nan
    else:
        rows = kept
    changed = dataclasses.replace(
        case, x=x[rows], top_experts=ids[rows], router_weights=weights[rows]
    )
    output = run_layer(changed, ep_size, CONFIG, DEVICE).output
    assert torch.equal(output if change == "removed" else output[kept], want[kept])
    if change != "removed":
        assert not torch.equal(output[others], want[others])


def test_tokens_of_a_workspace_change_by_call(bits):
    case, want = bits
    with Layer(case, 4, CONFIG, DEVICE) as layer:
        for share in (1.0, 0.3, 0.0, 1.0):
            count = math.floor(share * len(case.x))
            rows = torch.arange(count, device=DEVICE)
            some = dataclasses.replace(
                case,
                x=case.x[rows],
                top_experts=case.top_experts[rows],
                router_weights=case.router_weights[rows],
            )
            layer.lengths = some.tokens_per_rank(4)
            assert torch.equal(layer(some).output, want[:count])


# ------------------------------------------------------------------ streams and devices


@pytest.mark.parametrize("ep_size", [1, 2])
def test_a_side_stream(ep_size):
    case = integer_case(Shape(900, 576, 320, 9, 3, 1, 192), device=DEVICE)
    want = expected(case)
    side = torch.cuda.Stream()
    with Layer(case, ep_size, CONFIG, DEVICE) as layer:
        with torch.cuda.stream(side):
            layer()  # compiles, and gives the stream memory of its own
        # With the default stream busy, the side stream's call still ends: nothing uses the former.
        torch.cuda._sleep(4_000_000_000)
        with torch.cuda.stream(side):
            found = layer.queue()
        side.synchronize()
        assert not torch.cuda.default_stream().query()
        assert torch.equal(found.output.cpu(), want.cpu())
        torch.cuda.synchronize()
        # Inputs that the side stream makes late are waited for.
        x = torch.zeros_like(case.x)
        late = dataclasses.replace(case, x=x)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)
            x.copy_(case.x)
            found = layer.queue(late)
        side.synchronize()
        assert torch.equal(found.output, want)
        layer.finish()


@pytest.mark.multi_gpu
@pytest.mark.parametrize("ep_size", [1, 3])
def test_a_second_device(ep_size):
    case = integer_case(Shape(900, 576, 320, 9, 3, 1, 192))
    assert torch.cuda.current_device() == 0
    found = run_layer(to_device(case, "cuda:1"), ep_size, CONFIG, "cuda:1", spoiled=True)
    assert found.output.device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    assert torch.equal(found.output.cpu(), expected(case))
