"""The grid of tunables: what it holds, what it writes, and what is compared."""

import json

import pytest
import torch

from mok.config import Config
from mok.errors import MokError
from mok.tools.bench import grid
from mok.tools.bench.shapes import SUITES, parse_shape
from mok.tools.bench.timing import Deadline
from mok.tools.bench.work import make_work
from mok.tools.simulator.measured import best_of, read_grid, rings_of
from tests.tools.bench.fakes import FakeClock, ScriptedProgram

BENCH = parse_shape("96,64,64,4,2")
PLAN = Config(16, 12, 128, 640)


class Tuned(ScriptedProgram):
    """Forward is fastest with 12 comm SMs, backward with 8, both with the smallest minibatch."""

    made: list["Tuned"] = []  # noqa: RUF012
    change = 0.0

    def __init__(self, name, work, options):
        super().__init__(name, work, options)
        self.config = options.config
        self.made.append(self)

    def _spend(self, pass_name):
        c = self.config
        off = {
            "forward": abs(c.fwd_num_comm_sms - 12),
            "backward": abs(c.bwd_num_comm_sms - 8),
        }[pass_name]
        self.options.clock.spend(5 + 0.1 * off + c.minibatch_size / 1000)

    def forward_training(self, index):
        output, saved = super().forward_training(index)
        return output + self.change * (self.config.minibatch_size > 128), saved


@pytest.fixture
def made(monkeypatch):
    Tuned.made, Tuned.change = [], 0.0
    monkeypatch.setattr(grid, "make_program", Tuned)
    return Tuned.made


class Fixed:
    def of(self, bench, ep):
        return PLAN


def run(path, budget_s=1e9, clock=None):
    clock = clock or FakeClock()
    said = []
    cases = [(BENCH, 1), (BENCH, 2)]
    rows = grid.run_grid(
        torch.device("cpu"), 132, "sm_90a", clock, Fixed(), budget_s, path, said.append, cases
    )
    return rows, said


def test_the_suite_has_six_layers_at_one_rank_and_on_a_ring():
    cases = grid.all_cases()
    assert len(SUITES["planned"]) == 6 and len(cases) == 12
    for bench, ep in cases:
        shape = grid.per_rank(bench, ep)
        found = grid.rings(shape, "sm_90a")
        assert len(found) == len(set(found)) >= 7
        for minibatch, macrobatch in found:
            Config(4, 4, minibatch, macrobatch).check("sm_90a", 132, 4 * (ep > 1))
        assert len(grid.comm_sms(shape, 132)) == (1 if ep == 1 else 7)


def test_every_combination_is_timed_and_the_best_confirmed(tmp_path, made):
    rows, said = run(tmp_path / "grid.jsonl")
    assert [row["ep"] for row in rows] == [1, 2] and all(row["finished"] for row in rows)
    ring = rows[1]
    assert ring["best"]["fwd_num_comm_sms"] == 12 and ring["best"]["bwd_num_comm_sms"] == 8
    assert ring["plan_ms"] > ring["best_ms"] and "plan" in said[-1]
    # 5 + 0.4 + 0.128 + 5 + 0.4 + 0.128 against 5 + 5 + 2 * 0.128
    assert ring["reached"] == pytest.approx(10.256 / 11.056)
    assert all(program.closed for program in made)
    found = read_grid(tmp_path / "grid.jsonl")
    times = found[(96, 64, 64, 4, 2), 2]
    shape = grid.per_rank(BENCH, 2)
    assert len(times) == 2 * 7 * len(grid.rings(shape, "sm_90a"))
    ms, config = best_of(times)
    assert ms == pytest.approx(10.256)
    assert (config.fwd_num_comm_sms, config.bwd_num_comm_sms, config.minibatch_size) == (12, 8, 128)


def test_what_is_finished_survives_the_budget(tmp_path, made, monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(grid, "Deadline", lambda s: Deadline(s, clock.now))
    rows, said = run(tmp_path / "grid.jsonl", 1.0, clock)
    assert len(rows) == 1 and not rows[0]["finished"] and "not finished" in said[0]
    assert "the budget ended before" in said[1]
    lines = [json.loads(line) for line in (tmp_path / "grid.jsonl").read_text().splitlines()]
    assert {line["what"] for line in lines} >= {"grid", "plan", "case"}


def test_a_ring_that_does_not_fit_is_passed_over(tmp_path, made, monkeypatch):
    def make(name, work, options):
        if options.config.minibatch_size == 128:
            raise grid.Unavailable("too large")
        return Tuned(name, work, options)

    monkeypatch.setattr(grid, "make_program", make)
    clock, lines = FakeClock(), []
    g = grid.Grid(make_work(BENCH, torch.device("cpu")), 2, 132, "sm_90a", clock, lines.append)
    assert g.measure(Deadline(1e9, clock.now))
    assert any(line["what"] == "skipped" for line in lines)
    assert g.finalists()[0].minibatch_size > 128


def test_other_bits_are_an_error(made):
    clock = FakeClock()
    g = grid.Grid(make_work(BENCH, torch.device("cpu")), 1, 132, "sm_90a", clock, lambda row: None)
    g.set_up(Config(8, 8, 128, 640))
    Tuned.change = 1.0
    with pytest.raises(MokError, match="must not change a bit"):
        g.set_up(Config(8, 8, 256, 512))


def test_a_plan_is_one_that_the_kernels_take():
    found = grid.config_of(grid.planned(parse_shape("512,256,128,8,2"), 2, "h200"))
    found.check("sm_90a", 132, max(found.fwd_num_comm_sms, found.bwd_num_comm_sms))


def test_a_file_that_is_no_grid_is_refused(tmp_path):
    with pytest.raises(MokError, match="tune --exhaustive"):
        read_grid(tmp_path / "none")
    (tmp_path / "x").write_text('{"what": "case"}\n')
    with pytest.raises(MokError, match="hold times"):
        read_grid(tmp_path / "x")
    (tmp_path / "x").write_text('{"ms": 1}\n')
    with pytest.raises(MokError, match="tune --exhaustive"):
        read_grid(tmp_path / "x")


def test_rings_need_both_passes():
    times = {("forward", 8, 128, 256): 1.0, ("backward", 8, 128, 256): 1.0,
             ("forward", 8, 256, 256): 0.1}  # fmt: skip
    assert rings_of(times) == [(128, 256)]
