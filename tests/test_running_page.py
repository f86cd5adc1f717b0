"""docs/running.md: its commands are ones that torchrun takes, and its Slurm scripts start the ranks they say.

Slurm is not here: ``srun``, ``scontrol`` and what they would start are stand-ins that write down how they
were called.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from mok.cli import build_parser

PAGE = (Path(__file__).parents[1] / "docs" / "running.md").read_text()
BLOCKS = [m[1].replace("\\\n", " ") for m in re.finditer(r"```bash\n(.*?)```", PAGE, re.S)]
SLURM = [block for block in BLOCKS if "#SBATCH" in block]
NODES, GPUS = 18, 4


def torchrun_lines() -> list[str]:
    lines = [line for block in BLOCKS for line in block.splitlines()]
    return [line.split("#")[0].strip() for line in lines if line.startswith("torchrun")]


@pytest.mark.parametrize("line", torchrun_lines())
def test_torchrun_takes_the_options(line: str) -> None:
    words = shlex.split(line.replace("$HOST0", "host0"))
    given = get_args_parser().parse_args(words[1:])
    assert given.nproc_per_node.isdigit()
    if given.module:
        assert given.training_script == "mok"
        build_parser().parse_args(given.training_script_args)
    else:
        assert given.training_script == "train.py"


def started(script: str, folder: Path, task: int = 0) -> str:
    """What one task of a Slurm script runs, with its environment."""
    for name, text in {
        "scontrol": '[ "$1 $2" = "show hostnames" ] && printf "first\\nsecond\\n"',
        "srun": 'exec "$@"',
        "torchrun": 'echo torchrun "$@"; echo "cache $MOK_CACHE_DIR"',
        "python": 'echo python "$@"; env | grep -E "^(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_)"',
    }.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o700)
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "first,second",
        "SLURM_NNODES": str(NODES),
        "SLURM_NTASKS": str(NODES * GPUS),
        "SLURM_PROCID": str(task),
        "SLURM_LOCALID": str(task % GPUS),
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], env=environment, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    return done.stdout


def test_slurm_with_torchrun(tmp_path: Path) -> None:
    script, _ = SLURM
    assert f"--nodes={NODES} --ntasks-per-node=1 --gpus-per-node={GPUS}" in script
    command, cache = started(script, tmp_path).splitlines()
    given = get_args_parser().parse_args(shlex.split(command)[1:])
    assert (given.nnodes, given.nproc_per_node) == (str(NODES), str(GPUS))
    assert (given.rdzv_backend, given.rdzv_endpoint, given.rdzv_id) == ("c10d", "first:29500", "77")
    assert given.training_script == "train.py"
    assert cache == "cache /tmp/mok-77"


@pytest.mark.parametrize("task", [0, 37])
def test_slurm_with_a_task_per_gpu(tmp_path: Path, task: int) -> None:
    _, script = SLURM
    assert f"--nodes={NODES} --ntasks-per-node={GPUS} --gpus-per-node={GPUS}" in script
    command, *variables = started(script, tmp_path, task).splitlines()
    assert command == "python train.py"
    assert dict(v.split("=") for v in variables) == {
        "RANK": str(task), "WORLD_SIZE": str(NODES * GPUS), "LOCAL_RANK": str(task % GPUS),
        "MASTER_ADDR": "first", "MASTER_PORT": "29500",
    }  # fmt: skip
