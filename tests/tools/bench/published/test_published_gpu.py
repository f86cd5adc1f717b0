"""Both suites on the GPU of this machine, short."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.timeout(900), pytest.mark.spread]
ALONE = (sys.executable, "-m")
TWO = (*ALONE, "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")


def bench(folder, *arguments, start=ALONE):
    command = [*start, "mok", "bench", "--out", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    print(done.stdout[-4000:], done.stderr[-4000:])
    assert done.returncode == 0
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text())


@pytest.mark.gpu
@pytest.mark.alone  # 512 experts' weights and gradients, twice: ours and the peer's
@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_ours_beside_nccl_and_torch(precision, tmp_path):
    short = ["--models", "qwen3.5-397b", "--tokens", "1024", "--warmup", "5", "--iterations", "5"]
    found = bench(
        tmp_path, "--suite", "published", "--precision", precision, "--peers", "nccl-torch", *short
    )
    ours = {r["pass"]: r for r in found["rows"] if r["program"] == "mok"}
    assert {*ours} == {"forward", "backward"} and all(r["ms"] > 0 for r in ours.values())
    assert found["iterations"] == 5 and found["versions"]["torch"]
    if precision == "bf16":
        assert all(e["fastest_peer"] == "nccl-torch" for e in found["speed_ups"])


@pytest.mark.gpu
def test_sweep_on_virtual_ranks(tmp_path):
    short = ["--models", "qwen3.5-397b", "--tokens", "1024", "--warmup", "1", "--iterations", "2"]
    found = bench(tmp_path, "--suite", "sweep", *short)
    assert {r["tunable"] for r in found["rows"]} == {"minibatch_size", "comm_sms"}
    assert all(r["ms"] > 0 for r in found["rows"]) and found["virtual"]
    assert all(r["model_ms"] is None or r["model_ms"] > 0 for r in found["rows"])
    assert (tmp_path / "sweep-minibatch-size.png").exists()


@pytest.mark.multi_gpu
def test_both_suites_on_two_gpus(tmp_path):
    short = ["--models", "qwen3.5-397b", "--tokens", "1024", "--precision", "bf16"]
    few = ["--warmup", "3", "--iterations", "4"]
    found = bench(tmp_path / "p", "--suite", "published", *short, *few, start=TWO)
    assert found["ranks"] == 2 and {r["program"] for r in found["rows"]} >= {"mok", "nccl-torch"}
    assert all(r["ok"] for r in found["rows"])
    named = {m["program"] for m in found["missing"]} | {r["program"] for r in found["rows"]}
    assert named == {
        "mok", "nccl-torch", "deepep-torch", "deepep-te", "hybridep-megatron", "upstream",
    }  # fmt: skip
    found = bench(tmp_path / "s", "--suite", "sweep", *short, *few, start=TWO)
    assert not found["virtual"] and found["links"]["bandwidth"]
    assert (tmp_path / "s" / "links.png").exists()
