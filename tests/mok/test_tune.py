from __future__ import annotations

import dataclasses
import json
import math
import types
from typing import ClassVar

import pytest

from mok import cli, tune
from mok.commands import tune as command
from mok.config import Config, Shape
from mok.errors import ResourceError
from mok.runtime import device as runtime_device
from mok.runtime.device import Backend as RuntimeBackend
from mok.tune import BitsDiffer, Device, candidates, search

SHAPE = Shape(4096, 2048, 768, 128, 8)
RANKS = dataclasses.replace(SHAPE, ep_size=4)
H200 = Device("NVIDIA H200", 132, "sm_90a")
START = Config(36, 24, 4096, 32768)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MOK_CACHE_DIR", str(tmp_path))
    return tmp_path


# ---------------------------------------------------------------------- candidates


@pytest.mark.parametrize("tunable", tune.TUNABLES)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_candidates_are_valid_neighbours(tunable, arch):
    found = list(candidates(tunable, START, RANKS, 132, arch))
    if (tunable, arch) == ("pairs", "sm_100a"):  # always works in pairs
        assert not found
        return
    assert found
    for config in found:
        config.check(arch, 132, max(config.fwd_num_comm_sms, config.bwd_num_comm_sms))
        assert config != START
        before, after = dataclasses.asdict(START), dataclasses.asdict(config)
        changed = {name for name in before if before[name] != after[name]}
        assert changed <= {tunable, "macrobatch_size"}


def test_one_rank_has_no_communicating_sms():
    assert not list(candidates("fwd_num_comm_sms", START, SHAPE, 132, "sm_90a"))


def test_a_ring_of_one_minibatch_has_no_smaller_neighbour():
    one = Config(8, 8, 4096, 4096)
    rings = [c.macrobatch_size for c in candidates("macrobatch_size", one, SHAPE, 132, "sm_90a")]
    assert rings == [8192, 16384]


def test_an_unknown_tunable_is_named():
    with pytest.raises(tune.MokError, match="Known"):
        list(candidates("colour", START, SHAPE, 132, "sm_90a"))


# ---------------------------------------------------------------------- search


def bowl(config: Config) -> float:
    """Least at 16 comm SMs, minibatch 1024, ring 8192."""
    return (
        10
        + abs(math.log2(config.fwd_num_comm_sms / 16))
        + abs(math.log2(config.minibatch_size / 1024))
        + 0.5 * abs(math.log2(config.macrobatch_size / 8192))
    )


def find(cost=bowl, start=START, shape=RANKS, **more):
    return search(start, shape, 132, "sm_90a", lambda a, b: (cost(a), cost(b)), **more)


def test_search_goes_downhill_to_the_end():
    found = find()
    assert found.finished and bowl(found.best) < 10.6
    assert found.ratio == pytest.approx(bowl(found.best) / bowl(START))
    assert len({t.config for t in found.trials}) == len(found.trials)  # none twice
    assert START not in {t.config for t in found.trials}


def test_noise_moves_nothing():
    found = find(cost=lambda c: 10 + 0.001 * (c.minibatch_size % 7))
    assert found.best == START and found.ratio == 1 and found.finished


def test_the_budget_ends_the_search_with_the_best_so_far():
    asked = []

    def over() -> bool:
        asked.append(1)
        return len(asked) > 5

    seen = []
    found = find(over=over, on_trial=lambda s: seen.append(len(s.trials)))
    assert not found.finished and len(found.trials) == 5 and seen == [1, 2, 3, 4, 5]
    assert bowl(found.best) < bowl(START)


def test_what_does_not_fit_is_passed_over():
    def cost(config: Config) -> float:
        if config.minibatch_size < 2048:
            raise ResourceError("must fit", config.minibatch_size)
        return bowl(config)

    found = find(cost)
    assert found.best.minibatch_size >= 2048
    failed = [t for t in found.trials if t.ms is None]
    assert failed and all(t.ratio == math.inf and "must fit" in t.note for t in failed)


def test_other_bits_end_the_search():
    def cost(config: Config) -> float:
        raise BitsDiffer("tunables must not change a bit", "output")

    with pytest.raises(BitsDiffer):
        find(cost)


# ---------------------------------------------------------------------- memory


def test_results_are_remembered_per_device_and_shape(folder):
    best = Config(16, 12, 1024, 8192, 0.25, pairs=False)
    assert tune.lookup(SHAPE, H200) is None
    assert tune.record(SHAPE, H200, best, {"ms": 1.5}) == folder / "tune.json"
    assert tune.lookup(SHAPE, H200) == {
        "fwd_num_comm_sms": 16, "bwd_num_comm_sms": 12, "minibatch_size": 1024,
        "macrobatch_size": 8192, "schedule_capacity_multiplier": 0.25, "pairs": False,
    }  # fmt: skip
    assert tune.lookup(dataclasses.replace(SHAPE, num_tokens=2048), H200) is None
    assert tune.lookup(SHAPE, dataclasses.replace(H200, name="NVIDIA H100")) is None
    kept = dataclasses.replace(START, timeout_s=7.0, debug=True)
    applied = tune.apply(kept, SHAPE, H200)
    assert (applied.minibatch_size, applied.timeout_s, applied.debug) == (1024, 7.0, True)
    assert applied.pairs is False
    tune.record(RANKS, H200, START, {})
    assert tune.lookup(SHAPE, H200)["minibatch_size"] == 1024  # the first one stays
    assert tune.forget(SHAPE, H200) and not tune.forget(SHAPE, H200)
    assert tune.lookup(SHAPE, H200) is None and tune.lookup(RANKS, H200)


def test_virtual_ranks_are_another_question():
    virtual = dataclasses.replace(H200, virtual=True)
    tune.record(RANKS, virtual, START, {})
    assert tune.lookup(RANKS, H200) is None and tune.lookup(RANKS, virtual)
    tune.record(SHAPE, H200, START, {})  # one rank is the same either way
    assert tune.lookup(SHAPE, virtual)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"format": 99, "entries": {}}', '{"format": 1, "entries": 3}']
)
def test_a_damaged_file_counts_as_empty(folder, text):
    (folder / "tune.json").write_text(text)
    assert tune.lookup(SHAPE, H200) is None
    tune.record(SHAPE, H200, START, {})
    assert tune.lookup(SHAPE, H200)


@pytest.mark.parametrize(
    "config", [3, {"minibatch_size": 100}, {"minibatch_size": "many"}, {"minibatch_size": 3000}]
)
def test_a_remembered_setting_that_does_not_hold_is_not_used(folder, config):
    entries = {tune.key_of(SHAPE, H200): {"config": config}}
    (folder / "tune.json").write_text(json.dumps({"format": 1, "entries": entries}))
    assert tune.apply(START, SHAPE, H200) == START


def test_a_folder_that_cannot_be_written_is_a_warning(folder):
    blocked = folder / "file"
    blocked.write_text("")
    with pytest.warns(RuntimeWarning, match="not kept"):
        assert tune.record(SHAPE, H200, START, {}, blocked / "tune.json") is None


def test_what_was_found_before_forward_pushed_is_not_used(folder):
    """It wanted more comm SMs. What it does not concern is still used: one rank, and Blackwell."""
    blackwell = Device("NVIDIA B200", 148, "sm_100a")
    config = {"fwd_num_comm_sms": 20}
    old = "NVIDIA H200; 132 SMs; sm_90a; T 4096; H 2048; I 768; E 128; K 8; EP 4; shared 0"
    virtual = old.replace("sm_90a;", "sm_90a; virtual ranks;")
    alone = old.replace("EP 4", "EP 1")
    entries = {key: {"config": config} for key in (old, virtual, alone)}
    entries[tune.key_of(RANKS, blackwell)] = {"config": config}
    (folder / "tune.json").write_text(json.dumps({"format": 1, "entries": entries}))
    shared = dataclasses.replace(H200, virtual=True)
    assert tune.apply(START, RANKS, H200) == tune.apply(START, RANKS, shared) == START
    assert tune.lookup(SHAPE, H200) == tune.lookup(RANKS, blackwell) == config
    for device in (H200, shared):
        tune.record(RANKS, device, dataclasses.replace(START, fwd_num_comm_sms=12), {})
        assert tune.apply(START, RANKS, device).fwd_num_comm_sms == 12
    gpu = types.SimpleNamespace(name="NVIDIA H200", arch="sm_90a", num_sms=132, ordinal=0)
    assert Config.suggest(RANKS, gpu).minibatch_size == START.minibatch_size
    for push in (True, False):  # a question about other kernels than those that were tuned
        assert Config.suggest(RANKS, gpu, push=push) == Config.suggest(RANKS, "h200", push=push)


def test_suggest_uses_what_was_found_for_a_real_gpu_only():
    gpu = types.SimpleNamespace(name="NVIDIA H200", arch="sm_90a", num_sms=132, ordinal=0)
    before = Config.suggest(SHAPE, gpu)
    best = dataclasses.replace(before, minibatch_size=1024, macrobatch_size=4096)
    tune.record(SHAPE, H200, best, {})
    assert Config.suggest(SHAPE, gpu) == best
    assert Config.suggest(SHAPE, "h200") == before  # a name is the rule, not a device
    emulated = types.SimpleNamespace(arch="sm_90a", num_sms=132)
    assert Config.suggest(SHAPE, emulated) == before


# ---------------------------------------------------------------------- the command


@pytest.fixture
def gpu(monkeypatch):
    """A backend with kernels, and trials whose times follow ``bowl``."""
    import torch

    from mok import backends
    from mok.backends import Backend

    info = types.SimpleNamespace(name="NVIDIA H200", num_sms=132, arch="sm_90a", ordinal=0)
    chosen = Backend("kernel", "sm_90a on NVIDIA H200", "sm_90a", torch.device("cpu"), "", info)
    monkeypatch.setattr(backends, "choose_backend", lambda: chosen)

    class FakeTrials:
        made: ClassVar[list] = []

        def __init__(self, bench, device, ep, pass_name, clock, regime, seed):
            self.work = types.SimpleNamespace(bench=bench)
            self.closed = False
            self.made.append(self)

        def evaluate(self, a, b):
            return bowl(a), bowl(b)

        def milliseconds(self, config, rounds=1):
            return [bowl(config)] * rounds

        def close(self):
            self.closed = True

    monkeypatch.setattr(command, "Trials", FakeTrials)
    monkeypatch.setattr("mok.tools.bench.timing.CudaClock", lambda device: None)
    FakeTrials.made = []
    return FakeTrials


def document(capsys, *argv: str) -> tuple[int, dict]:
    code = cli.main(["tune", *argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_command_finds_remembers_and_forgets(capsys, gpu, folder):
    shape = ("--shape", "4096,2048,768,128,8")
    code, found = document(capsys, *shape)
    assert code == 0 and found["finished"] and gpu.made[0].closed
    assert found["best_ms"] < found["suggested_ms"]
    assert found["path"] == str(folder / "tune.json")
    for row in found["rows"]:
        assert set(row) >= {"config", "ms", "bound"}
    device = types.SimpleNamespace(name="NVIDIA H200", arch="sm_90a", num_sms=132, ordinal=0)
    assert Config.suggest(SHAPE, device).minibatch_size == found["best"]["minibatch_size"]
    assert document(capsys, *shape, "--forget")[1]["forgotten"]
    assert cli.main(["tune", *shape, "--forget"]) == 0
    assert "nothing was remembered" in capsys.readouterr().out


def test_command_on_virtual_ranks_and_without_remembering(capsys, gpu, folder):
    assert cli.main(["tune", "--ep", "4", "--model", "olmoe", "--tokens", "4096", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "fwd_num_comm_sms" in out and "not kept" in out
    assert not (folder / "tune.json").exists()


def test_command_keeps_the_suggestion_where_nothing_is_faster(capsys, gpu, monkeypatch):
    monkeypatch.setattr(gpu, "milliseconds", lambda self, config, rounds=1: [5.0])
    _, found = document(capsys)
    assert found["best"] == found["suggested"] and found["best_ms"] == 5.0


def test_command_times_a_grid_beside_the_plan(capsys, gpu, folder, monkeypatch):
    """``--exhaustive``: its exit code says whether the plan reaches 0.97 of the best, everywhere."""
    from mok.tools.bench import grid, warm

    case = {"shape": dict(T=8, H=64, I=64, E=4, K=2), "ep": 2, "plan_ms": 1.0, "best_ms": 0.98,
            "plan": tune_values(), "best": tune_values(), "finished": True}  # fmt: skip
    given = []

    def run(device, num_sms, arch, clock, plans, budget_s, path, say, cases=None):
        given.append((num_sms, arch, budget_s, path.name))
        return [case | {"reached": run.reached}]

    monkeypatch.setattr(grid, "Plans", lambda cases, machine, workers: FakePlans())
    monkeypatch.setattr(grid, "run_grid", run)
    monkeypatch.setattr(warm, "layer_specs", lambda *a: [])
    for reached, code in ((0.98, 0), (0.96, 1)):
        run.reached = reached
        argv = ("--exhaustive", str(folder / "g.jsonl"), "--budget-s", "30")
        assert document(capsys, *argv)[0] == code
        assert cli.main(["tune", *argv]) == code
        assert "the best of all combinations" in capsys.readouterr().out
    assert set(given) == {(132, "sm_90a", 30.0, "g.jsonl")}


def tune_values() -> dict:
    return dict(fwd_num_comm_sms=8, bwd_num_comm_sms=8, minibatch_size=128, macrobatch_size=256)


class FakePlans:
    def close(self) -> None:
        pass


def test_command_needs_a_gpu(capsys, monkeypatch):
    none = RuntimeBackend(None, None, "there is no NVIDIA driver")
    monkeypatch.setattr(runtime_device, "best_backend", lambda: none)
    assert cli.main(["tune"]) == 2
    assert "tuning needs a GPU" in capsys.readouterr().err


# ---------------------------------------------------------------------- trials


@pytest.fixture
def trials(monkeypatch):
    import torch

    from mok.tools.bench import programs
    from mok.tools.bench.shapes import parse_shape
    from mok.tools.bench.timing import Regime
    from tests.tools.bench.fakes import FakeClock, ScriptedProgram

    clock = FakeClock()
    made = []

    def make(name, work, options):
        ScriptedProgram.script = {
            name: {"ms": {"forward": options.config.minibatch_size / 1024}, "change": make.change}
        }
        made.append(ScriptedProgram(name, work, options))
        return made[-1]

    make.change = lambda out: out
    monkeypatch.setattr(programs, "make_program", make)
    shape = parse_shape("16,64,64,4,2")
    found = command.Trials(shape, torch.device("cpu"), 1, "both", clock, Regime(1, 2), 0)
    return found, made, make


def test_trials_time_both_in_turns_and_keep_the_incumbent(trials):
    found, made, _ = trials
    small, large = Config(2, 2, 1024, 2048), Config(2, 2, 4096, 4096)
    assert found.evaluate(small, large) == pytest.approx((2.0, 5.0))  # backward adds 1 ms
    third = Config(2, 2, 2048, 2048)
    assert found.evaluate(third, large) == pytest.approx((3.0, 5.0))
    assert [m.closed for m in made] == [False, True, False]  # large, small, third
    found.close()
    assert all(m.closed for m in made)


def test_trials_refuse_other_bits(trials):
    found, made, make = trials
    found.milliseconds(Config(2, 2, 1024, 2048))
    make.change = lambda out: out * 1.01
    with pytest.raises(BitsDiffer, match="output differ"):
        found.milliseconds(Config(2, 2, 2048, 2048))
    assert made[-1].closed
