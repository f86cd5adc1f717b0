"""One rank per process: torchrun and the commands, and the bits of one rank."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mok import functional, processes
from mok.commands.check_cases import CheckCase, on_processes
from mok.errors import DeviceError, MokError
from mok.reference import forward_loop, integer_case, random_case, random_gradient
from mok.runtime.group import Group

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "runtime"))
import ranks

ROOT = Path(__file__).resolve().parents[2]


def test_a_split_for_any_number_of_ranks():
    assert processes.fit(None, 4) is None
    assert processes.fit([35, 0, 5], 3) == [35, 0, 5]
    assert processes.fit([35, 0, 5], 4) == [35, 0, 0, 5]
    assert processes.fit([35, 0, 5], 2) == [35, 5]


def test_who_was_launched(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert not processes.launched() and processes.is_leader()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert processes.launched() and not processes.is_leader()
    with pytest.raises(DeviceError, match="--emulate"):
        processes.require_kernel("reference", "no driver")


def test_cases_of_the_group_s_size():
    cases = [
        CheckCase(f"routing EP {n}, integer", lambda: None, n, "mismatches", 0.0)
        for n in (1, 3)  # one and the same on four processes
    ]
    uneven = CheckCase(
        "a rank with no token EP 3", lambda: None, 3, "mismatches", 0.0, None, (9, 0, 1)
    )
    found = list(on_processes(iter([*cases, uneven]), 4))
    assert [c.name for c in found] == ["routing EP 4, integer", "a rank with no token EP 4"]
    assert all(c.ep_size == 4 for c in found)
    assert found[1].tokens_per_rank == (9, 0, 0, 1)


def torchrun(size, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(size), "-m", "mok", *arguments]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=550)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.emulator
def test_check_under_torchrun_in_the_emulator():
    pytest.importorskip("mok.tools.emulator", reason="the emulator needs numba")
    output = torchrun(2, "check", "forward", "--emulate", "--model", "olmoe", "--json")
    (line,) = output.splitlines()  # one document, from one rank
    document = json.loads(line)
    assert document["processes"] == 2 and len(document["cases"]) == 2
    assert all(case["ok"] and "EP 2" in case["name"] for case in document["cases"])


# ------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.spread
@pytest.mark.parametrize("size", [2, 3, 4])
def test_check_under_torchrun_on_one_gpu(size):
    document = json.loads(torchrun(size, "check", "forward", "--quick", "--json"))
    assert document["processes"] == size and all(case["ok"] for case in document["cases"])
    assert json.loads(torchrun(size, "demo", "--json"))["ok"]


@pytest.mark.multi_gpu
def test_check_under_torchrun_on_all_gpus():
    document = json.loads(torchrun(torch.cuda.device_count(), "check", "forward", "--json"))
    assert all(case["ok"] for case in document["cases"])


def _step(case, size, group):
    """Output and gradients of a rank, or of all virtual ranks one after the other."""
    from tests.helpers_layer import SMALL, Layer

    dy = random_gradient(case)
    with Layer(case, size, device="cuda", group=group) as layer:
        result = layer.queue(save_context=True)
        grads = functional.backward(
            SMALL, layer.workspace, result.schedule, result.context, layer.each(layer.split(dy)),
            *layer.arguments(case), case.swiglu_limit,
        )  # fmt: skip
        layer.finish()
        parts = [result.output, *(torch.cat(g) if isinstance(g, list) else g for g in grads[:5])]
        found = [p.float().cpu().numpy() for p in parts]
        layer.workspace.group.barrier("done")
    return found


CASE = {"kind": "skewed", "seed": 4}


def _shape():
    from mok.config import Shape

    return Shape(250, 256, 192, 10, 3, 1, 128)


def _process(group):
    torch.cuda.set_device(group.rank % torch.cuda.device_count())
    return _step(random_case(_shape(), device="cuda", **CASE), group.size, group)


@pytest.mark.gpu
@pytest.mark.spread
@pytest.mark.parametrize("size", [2, 3, 4])
def test_processes_have_the_bits_of_virtual_ranks_and_of_one(size, tmp_path):
    found = ranks.run_ok(_process, size, tmp_path, timeout_s=120.0)
    case = random_case(_shape(), device="cuda", **CASE)
    alone = _step(case, 1, Group.single("cuda"))
    virtual = _step(case, size, Group.virtual(size, "cuda"))
    for k, want in enumerate(alone):
        together = torch.cat([torch.from_numpy(part[k]) for part in found])
        assert torch.equal(together, torch.from_numpy(want)), k
        assert torch.equal(torch.from_numpy(virtual[k]), torch.from_numpy(want)), k


def _bad_id(group):
    from tests.helpers_layer import SMALL, Layer

    torch.cuda.set_device(group.rank % torch.cuda.device_count())
    case = integer_case(_shape(), device="cuda")
    wrong = case.top_experts.clone()
    if group.rank == 1:
        wrong[200, 1] = 10
    bad = dataclasses.replace(case, top_experts=wrong)
    texts = []
    config = dataclasses.replace(SMALL, timeout_s=20.0)
    with Layer(case, group.size, config, "cuda", group=group) as layer:
        for _ in range(5):  # every rank goes on: the record is told once per call
            try:
                layer.queue(bad)
                layer.finish()
                texts.append("")
            except MokError as error:
                texts.append(str(error))
            group.barrier("next")
        output = layer().output
        want = forward_loop(case).bfloat16().split(layer.lengths)[group.rank]
        group.barrier("done")
    return texts, bool(torch.equal(output, want.cuda()))


@pytest.mark.gpu
@pytest.mark.spread
def test_a_bad_id_on_one_process_holds_up_nobody(tmp_path):
    (first, ok), (second, also) = ranks.run_ok(_bad_id, 2, tmp_path, timeout_s=60.0)
    assert ok and also and first == [""] * 5
    assert all("10 for token" in text and "rank 1" in text for text in second)
