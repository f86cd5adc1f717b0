from __future__ import annotations

from typing import Any

import pytest
import torch

from mok.config import Config
from mok.tools.bench import runner as runner_module
from mok.tools.bench.bits import digest
from mok.tools.bench.programs import Options
from mok.tools.bench.runner import Entry, Runner, Settings
from mok.tools.bench.shapes import BenchShape, parse_shape
from mok.tools.bench.timing import Deadline, Regime
from tests.tools.bench.fakes import CPU, FakeClock, FakeTelemetry, ScriptedProgram

SHAPE = parse_shape("32,64,128,4,2")


@pytest.fixture
def run(monkeypatch):
    """Runs scripted programs; returns the runner."""
    made: list[ScriptedProgram] = []

    def make(name: str, work: Any, options: Options) -> ScriptedProgram:
        made.append(ScriptedProgram(name, work, options))
        return made[-1]

    monkeypatch.setattr(runner_module, "make_program", make)

    def start(script: dict[str, dict[str, Any]], **more: Any) -> Runner:
        ScriptedProgram.script, ScriptedProgram.log = script, []
        clock = FakeClock()
        deadline = more.pop("deadline", None)
        settings = Settings(
            shapes=more.pop("shapes", [SHAPE]),
            entries=more.pop("entries", [Entry(name) for name in script]),
            regime=Regime(15, 30),
            **{"rounds": 3, **more},
        )
        said: list[str] = []
        found = Runner(
            settings,
            CPU,
            Options(clock, reference=True),
            clock,
            FakeTelemetry(),
            say=said.append,
            deadline=Deadline(deadline, clock.now) if deadline is not None else None,
        )
        found.said, found.made, found.clock = said, made, clock  # type: ignore[attr-defined]
        found.run()
        return found

    return start


def rows_of(found: Runner) -> dict[tuple[str, str], dict[str, Any]]:
    return {(r["program"], r["pass"]): r for r in found.rows}


def test_rows(run):
    found = run(
        {
            "mok": {"ms": {"forward": 2.0, "backward": 3.0}},
            "sonic": {"ms": {"forward": 2.5, "backward": 4.5}, "note": "variant 7"},
            "cublas": {"passes": ("gemm",), "ms": {"forward": 1.0}},
        },
        passes=("forward", "backward", "both"),
    )
    rows = rows_of(found)
    assert set(rows) == {
        *((program, p) for program in ("mok", "sonic") for p in ("forward", "backward", "both")),
        ("cublas", "gemm"),
    }
    assert rows["mok", "both"]["ms"] == pytest.approx(5.0)
    assert rows["mok", "backward"]["ms"] == pytest.approx(3.0)
    row = rows["sonic", "forward"]
    assert set(row) >= {
        "shape", "pass", "program", "ms", "spread", "tflops", "clock_mhz", "watts", "peak_bytes",
    }  # fmt: skip
    assert row["tflops"] == pytest.approx(SHAPE.flops("forward") / 2.5 / 1e9)
    assert (row["clock_mhz"], row["watts"], row["spread"]) == (1500, 690, 0)
    assert row["ok"] and 1e-4 < row["error"] < 1e-2 and row["note"] == "variant 7"
    assert len(row["rounds_ms"]) == 3 and row["calls"] == 3 * 12
    assert [len(times) for times in row["calls_ms"]] == [12] * 3
    assert row["of_cublas"] == pytest.approx(row["tflops"] / rows["cublas", "gemm"]["tflops"])
    assert found.missing == [] and found.not_run == []
    assert all(program.closed for program in found.made)


def test_programs_take_turns_and_each_round_starts_with_another(run):
    found = run({"mok": {}, "torch": {}, "cublas": {"passes": ("gemm",)}}, passes=("forward",))
    turns: list[str] = []
    for name, _ in ScriptedProgram.log:
        if not turns or turns[-1] != name:
            turns.append(name)
    # Checks first, then three rounds; a program that ends a round and starts the next is one turn.
    assert turns[:3] == ["mok", "torch", "cublas"]
    assert turns[3:] == [
        "mok",
        "torch",
        "cublas",
        "torch",
        "cublas",
        "mok",
        "cublas",
        "mok",
        "torch",
    ]
    assert len({len(r["rounds_ms"]) for r in found.rows}) == 1


def test_missing_and_failing_programs_are_named(run):
    found = run(
        {
            "mok": {},
            "sonic": {"missing": "not installed"},
            "flashinfer": {"fails": "illegal instruction"},
            "torch": {"backward_fails": "no grouped gradient"},
        }
    )
    reasons = {(m["program"], m.get("pass", "")): m["reason"] for m in found.missing}
    assert reasons == {
        ("sonic", ""): "not installed",
        ("flashinfer", ""): "RuntimeError: illegal instruction",
        ("torch", "backward"): "RuntimeError: no grouped gradient",
    }
    assert set(rows_of(found)) == {("mok", "forward"), ("mok", "both"), ("torch", "forward")}
    assert found.missing[0]["shape"]["T"] == 32
    assert any("sonic: not measured: not installed" in line for line in found.said)


def test_a_program_that_fails_while_timed_keeps_the_others(run, monkeypatch):
    found = run({"mok": {}, "torch": {"check": "a wait expired"}}, passes=("forward",))
    assert set(rows_of(found)) == {("mok", "forward")}
    assert found.missing[0]["reason"] == "RuntimeError: a wait expired"


@pytest.mark.parametrize("change", [lambda out: out * 1.05, lambda out: out * float("nan")])
def test_wrong_results_are_marked(run, change):
    found = run({"mok": {}, "torch": {"change": change}}, passes=("forward",))
    rows = rows_of(found)
    assert rows["mok", "forward"]["ok"] and not rows["torch", "forward"]["ok"]


def test_bits_of_ours_are_compared(run):
    found = run({"mok": {}, "mok-ep4": {}, "torch": {}})
    (bits,) = found.bits
    assert bits["ok"] and bits["programs"] == 2 and bits["different"] == []

    def flip(out):
        out = out.clone()
        out.view(torch.int16)[3, 5] ^= 1
        return out

    found = run({"mok": {}, "mok-ep4": {"change": flip}}, passes=("forward",))
    (bits,) = found.bits
    assert not bits["ok"] and bits["different"] == ["mok-ep4: output"]


def test_settings_of_a_sweep_are_told_apart(run):
    config = Config(2, 2, 256, 512)
    entries = [Entry("mok", config, f"minibatch_size={n}") for n in (256, 512)]
    found = run({"mok": {}}, entries=entries, passes=("forward",))
    assert [r["config"] for r in found.rows] == ["minibatch_size=256", "minibatch_size=512"]
    assert [m.options.config for m in found.made] == [config, config]
    assert len(found.bits) == 1


def test_the_budget_ends_rounds_then_programs_then_shapes(run):
    slow = {"ms": {"forward": 5.0, "backward": 10.0}}
    shapes = [SHAPE, parse_shape("16,64,128,4,2"), parse_shape("8,64,128,4,2")]
    everything = run({"mok": slow}, shapes=shapes)
    whole = everything.clock.now()
    assert len(everything.rows) == 6 and not everything.not_run

    some = run({"mok": slow}, shapes=shapes, deadline=0.7 * whole)
    assert {len(r["rounds_ms"]) for r in some.rows} <= {1, 2, 3}
    assert min(len(r["rounds_ms"]) for r in some.rows) < 3
    assert {r["shape"]["T"] for r in some.rows} == {32, 16, 8}  # each got its share

    little = run({"mok": slow}, shapes=shapes, deadline=0.01)
    assert [n["shape"]["T"] for n in little.not_run] == [16, 8]
    assert all("budget" in n["reason"] for n in little.not_run)
    assert {r["shape"]["T"] for r in little.rows} == {32}  # what was begun gives a round


def test_a_program_left_out_for_want_of_time_is_named(run, monkeypatch):
    original = ScriptedProgram.forward

    def slow(self, index):
        self.options.clock.spend(5000)
        return original(self, index)

    monkeypatch.setattr(ScriptedProgram, "forward", slow)
    found = run({"mok": {}, "torch": {}}, deadline=3.0)
    assert [(m["program"], m["reason"]) for m in found.missing] == [
        ("torch", "the budget was used up")
    ]


def test_a_shape_that_cannot_be_set_up_does_not_end_the_run(run, monkeypatch):
    original = runner_module.make_work

    def make_work(bench: BenchShape, *args: Any, **more: Any) -> Any:
        if bench.shape.num_tokens == 32:
            raise torch.OutOfMemoryError("out of memory\ndetails")
        return original(bench, *args, **more)

    monkeypatch.setattr(runner_module, "make_work", make_work)
    found = run({"mok": {}}, shapes=[SHAPE, parse_shape("16,64,128,4,2")])
    assert [n["reason"] for n in found.not_run] == ["OutOfMemoryError: out of memory"]
    assert {r["shape"]["T"] for r in found.rows} == {16}


def test_results_are_saved_after_every_shape(run, monkeypatch):
    states: list[int] = []
    original = Runner.__init__

    def init(self, *args, **more):
        original(self, *args, **{**more, "save": lambda: states.append(len(self.rows))})

    monkeypatch.setattr(Runner, "__init__", init)
    run({"mok": {}}, shapes=[SHAPE, parse_shape("16,64,128,4,2")], passes=("forward",))
    assert states == [1, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.uint8])
def test_digest_sees_every_bit(dtype):
    rng = torch.Generator().manual_seed(1)
    tensor = torch.randint(0, 100, (37, 11), generator=rng).to(dtype)
    before = digest(tensor)
    assert digest(tensor.clone()) == before
    size = tensor.element_size()
    words = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
    for place, bit in ((0, 0), (200, 3), (406, 5)):
        words.view(-1)[place] ^= 1 << bit
        assert digest(tensor) != before
        words.view(-1)[place] ^= 1 << bit
    assert digest(tensor) == before
    swapped = tensor.view(-1).clone()
    swapped[[0, 400]] = swapped[[400, 0]]
    if swapped[0] != swapped[400]:
        assert digest(swapped) != before
