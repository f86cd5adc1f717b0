"""Calls like earlier ones: packed once, their counters zeroed by the call before, and never less exact."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace

import pytest
import torch

from mok import functional, steady
from mok.config import Config, Shape
from mok.errors import MokError
from mok.layer import MoELayer
from mok.reference import forward_loop, integer_case
from mok.runtime import compile as compiler
from mok.runtime.group import Group
from mok.runtime.launch import set_active_emulator
from tests.helpers_layer import Layer, first_tokens, to_device

COUNTERS = 30  # the place of their address among the megakernel's arguments


class Recorder:
    """Stands in for the emulator and keeps the arguments of every launch."""

    arch = "sm_90a"
    num_sms = 132

    def __init__(self):
        self.launches = []

    def launch(self, compiled, args):
        self.launches.append((compiled, args))


class Recorded:
    """A workspace whose launches and fills are only noted."""

    def __init__(self, **sizes):
        given = {"tokens": 64, "hidden": 256, "inner": 128, "shared": 128, **sizes}
        self.tokens, H, I = given["tokens"], given["hidden"], given["inner"]
        shared = given["shared"]
        self.config = Config(16, 16, 256, 512)
        self.workspace = functional.create_workspace(
            self.config, Group.single(), max_tokens=self.tokens, hidden_size=H,
            intermediate_size=I, num_experts=8, topk=2, shared_intermediate_size=shared,
        )  # fmt: skip
        self.fills = []
        turns = self.workspace.turns
        turns._fill = lambda address, value, size, stream: self.fills.append((address, size))

        def new(*size, dtype=torch.bfloat16):
            return torch.zeros(size, dtype=dtype)

        self.ids = torch.arange(2 * self.tokens).view(-1, 2) % 8
        parts = [new(shared, H), new(shared, H), new(H, shared)] if shared else [None] * 3
        self.given = [
            new(self.tokens, H), new(self.tokens, 2, dtype=torch.float32), *parts,
            new(8, I, H), new(8, I, H), new(8, H, I),
        ]  # fmt: skip
        self.schedule = functional.build_schedule(self.workspace, self.config, self.ids)

    def call(self, given=None, schedule=None, config=None, **options):
        return functional.forward(
            config or self.config, self.workspace, schedule or self.schedule,
            *(given or self.given), **options,
        )  # fmt: skip


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setattr(compiler, "get_kernel", lambda spec: SimpleNamespace(jit=spec.name))
    found = Recorder()
    before = set_active_emulator(found)
    yield found
    set_active_emulator(before)


KINDS = [
    {"save_context": False},
    {"save_context": True},
    {"save_context": True, "swiglu_limit": 7.0},
    {"save_context": False, "shared_scale": torch.ones(64)},
]


@pytest.mark.parametrize("shared", [None, 128])
@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_a_call_that_is_like_another_launches_the_same(recorder, kind, shared):
    """Every argument of both kernels, but the addresses of what the call allocates and counts in."""
    if shared is None and "shared_scale" in kind:
        return
    layer = Recorded(shared=shared)
    seen = []
    kept = []  # so that no address comes twice
    for _ in range(5):
        recorder.launches.clear()
        kept.append(layer.call(**kind))
        out, context = kept[-1]
        mega, total = recorder.launches
        own = {out.data_ptr(): "out"}
        if context is not None:
            own |= {t.data_ptr(): f"saved {i}" for i, t in enumerate(context.tensors())}
        seen.append([(name, [own.get(a, a) for a in args]) for name, args in (mega, total)])
        counters = seen[-1][0][1]
        assert counters[COUNTERS] == layer.workspace.counter_words.data_ptr()
        counters[COUNTERS] = "counters"
    assert len(layer.workspace.steady) == 1
    # The sum's last arguments before its grid: what it zeroes. In two calls nothing, then the sets in turn.
    cleared = [total[1][-4:-2] for _, total in seen]
    first, second = layer.workspace.turns.sets
    size = layer.workspace.turns.size
    assert cleared == [[0, 0], [0, 0], [second, size], [first, size], [second, size]]
    for _, total in seen:
        total[1][-4:-2] = []
    assert all(one == seen[0] for one in seen)


@pytest.fixture
def served(monkeypatch):
    """One entry for each call that a prepared one has served."""
    calls = []
    serve = steady.Steady.__call__

    def counted(self, *given):
        calls.append(self)
        return serve(self, *given)

    monkeypatch.setattr(steady.Steady, "__call__", counted)
    return calls


def test_lists_of_one_rank_are_served_and_answered_with_lists(recorder, served):
    layer = Recorded()
    listed = [[g] for g in layer.given[:2]] + layer.given[2:5] + [[g] for g in layer.given[5:]]
    for _ in range(2):
        layer.call()
    output, context = layer.call(listed)
    assert len(served) == 1
    assert isinstance(output, list) and len(output) == 1 and output[0].shape == (64, 256)
    assert len(context.gate_routed) == 1
    assert isinstance(layer.call()[0], torch.Tensor)


def test_a_layer_s_calls_become_steady(recorder, served):
    """``MoELayer``, which hands over lists."""
    layer = MoELayer(256, 128, 8, 2, dtype=torch.bfloat16, max_tokens=64)
    x = torch.zeros(64, 256, dtype=torch.bfloat16)
    ids, weights = torch.arange(128).view(64, 2) % 8, torch.ones(64, 2)
    with torch.no_grad():
        for _ in range(5):
            layer(x, weights, ids)
    assert len(served) == 3


def test_no_fill_once_calls_follow_each_other(recorder):
    layer = Recorded()
    turns = layer.workspace.turns
    spare = turns.filled(0).data_ptr()
    layer.fills.clear()
    used = []
    for _ in range(6):
        layer.call()
        used.append(layer.workspace.counter_words.data_ptr())
    first, second = turns.sets
    assert used == [spare, spare, first, second, first, second]
    assert [address for address, _ in layer.fills] == [spare, spare, first]
    assert {size for _, size in layer.fills} == {4 * turns.size}


def test_a_call_that_fails_half_way_leaves_nothing_taken_for_zero(recorder, monkeypatch):
    layer = Recorded()
    for _ in range(4):
        layer.call()
    layer.fills.clear()
    ready = next(iter(layer.workspace.steady.values()))

    def fails(*_):
        raise RuntimeError("no")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(ready, "sums", [fails, fails])
        layer.call()
    assert not layer.fills
    layer.call()
    assert [address for address, _ in layer.fills] == [layer.workspace.turns.sets[0]]
    layer.call()
    assert len(layer.fills) == 1


def test_a_captured_call_fills_its_own_counters(recorder, monkeypatch):
    """Replays do not pass the host, so that they must not disturb whose turn it is."""
    layer = Recorded()
    for _ in range(4):
        layer.call()
    layer.fills.clear()
    turns = layer.workspace.turns
    with monkeypatch.context() as patch:
        patch.setattr(steady, "stream_of", lambda workspace: 7)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        recorder.launches.clear()
        layer.call()
    (_, mega), (_, total) = recorder.launches
    spare = layer.workspace.counter_words.data_ptr()
    assert spare not in turns.sets and mega[COUNTERS] == spare and total[-4:-2] == (0, 0)
    assert [address for address, _ in layer.fills] == [spare]
    layer.call()
    assert len(layer.fills) == 1 and layer.workspace.counter_words.data_ptr() in turns.sets


def test_other_calls_do_not_use_what_was_prepared(recorder, monkeypatch):
    layer = Recorded()
    made = []
    monkeypatch.setattr(functional, "Call", lambda *a, **k: made.append(a) or steady.Call(*a, **k))
    for _ in range(4):
        layer.call()
    assert len(made) == 2  # the second packs for those behind it
    # Fewer tokens: another kind, then known, too.
    fewer = [t[:9] if i < 2 else t for i, t in enumerate(layer.given)]
    schedule = functional.build_schedule(layer.workspace, layer.config, layer.ids[:9])
    for _ in range(4):
        layer.call(fewer, schedule)
    layer.call()
    assert len(made) == 4
    # The schedule's ids decide the number of tokens.
    with pytest.raises(MokError, match="x must have the shape"):
        layer.call(layer.given, schedule)
    # An equal config, and one that differs: what was prepared holds the old one's numbers.
    del made[:]
    layer.call(config=dataclasses.replace(layer.config))
    assert not made
    other = Config(8, 8, 256, 512)
    layer.call(config=other)
    layer.call(config=other)
    assert len(made) == 1 and layer.workspace.last_launch.comm_ctas == 0
    # Experts of another width.
    layer.call()
    layer.workspace.fit(64, 128)
    with pytest.raises(MokError, match="routed_gate"):
        layer.call()
    layer.workspace.close()
    with pytest.raises(MokError, match="closed"):
        layer.call()


# ------------------------------------------------------------------ results


def different_calls(layer: Layer, case, synchronize):
    """Calls of several kinds by turns, the results of each exact."""
    few = first_tokens(case, 40)
    want = {id(c): forward_loop(to_device(c, "cpu")).bfloat16() for c in (case, few)}
    schedules = {}
    for number in range(15):
        turn = number % 9
        given = few if turn in (2, 3, 6) else case
        layer.lengths = [len(given.x)]
        if id(given) not in schedules:
            schedules[id(given)] = layer.build_schedule(given)
        found = layer.queue(given, schedule=schedules[id(given)], save_context=turn in (1, 4, 5))
        assert torch.equal(found.output.cpu(), want[id(given)]), turn
        if turn == 7:  # its context is built in counters of its own
            functional.recompute_forward_context(
                layer.config, layer.workspace, found.schedule, *recomputed(layer, case)
            )
        synchronize()
        layer.workspace.check()


def recomputed(layer, case):
    x, _, gate, up, _, routed_gate, routed_up, _ = layer.arguments(case)
    return x, gate, up, routed_gate, routed_up


SHAPE = Shape(300, 128, 64, 6, 2, 1, 64)


@pytest.mark.emulator
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_exact_in_the_emulator(seed):
    pytest.importorskip("numba", reason="the emulator needs numba")
    pytest.importorskip("cutlass", reason="kernels need the CuTe DSL")
    from mok.tools.emulator import Emulator

    case = integer_case(SHAPE)
    with Emulator("sm_90a", num_sms=6, seed=seed) as machine, Layer(case) as layer:
        different_calls(layer, case, lambda: None)
        assert len(layer.workspace.steady) == 3
    assert not machine.report.findings, "\n".join(map(str, machine.report.findings))


@pytest.mark.gpu
def test_exact_on_a_gpu():
    case = to_device(integer_case(SHAPE), "cuda")
    with Layer(case, device="cuda") as layer:
        different_calls(layer, case, torch.cuda.synchronize)


@pytest.mark.gpu
def test_replays_between_other_calls():
    """A captured call has counters of its own: neither it nor the calls between replays mind."""
    cases = [to_device(integer_case(SHAPE, seed=seed), "cuda") for seed in (0, 1)]
    want = [forward_loop(to_device(c, "cpu")).bfloat16() for c in cases]
    with Layer(cases[0], device="cuda") as layer, contextlib.ExitStack():
        schedules = [layer.build_schedule(c) for c in cases]
        given = [layer.arguments(c) for c in cases]

        def call(i):
            return functional.forward(
                layer.config, layer.workspace, schedules[i], *given[i], save_context=False
            )[0]

        for _ in range(3):
            call(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call(1)
        for eager in (1, 0, 2, 3, 0, 1):
            captured.zero_()
            graph.replay()
            assert torch.equal(captured.cpu(), want[1])
            for _ in range(eager):
                assert torch.equal(call(0).cpu(), want[0])
        layer.finish()
