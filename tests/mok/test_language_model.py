"""A tiny language model whose experts are trained on two ranks has the loss bits of one rank.

Only the routed experts learn: every other gradient is a sum over a rank's own tokens, which design promise 2
leaves out.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.mok.language_model import SIZE, pairs, train

ROOT = Path(__file__).resolve().parents[2]


def under_torchrun(folder: Path, steps: int, limit_s: float) -> torch.Tensor:
    """Losses of all tokens, [steps, tokens], of ``SIZE`` processes that torchrun has started."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(SIZE),
        str(ROOT / "tests" / "mok" / "language_model.py"), str(folder), str(steps),
    ]  # fmt: skip
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=limit_s,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    parts = [torch.from_numpy(np.load(folder / f"{rank}.npy")) for rank in range(SIZE)]
    return torch.cat(parts, dim=1)


def compare(together: torch.Tensor, alone: torch.Tensor) -> None:
    assert torch.equal(together, alone)
    assert alone[-1].mean() < alone[0].mean()  # it learns


@pytest.mark.gpu
@pytest.mark.spread
def test_two_processes_have_the_loss_bits_of_one(tmp_path):
    compare(under_torchrun(tmp_path, 4, 240.0), train(None, torch.device("cuda"), pairs()))


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.timeout(2400)
def test_in_the_emulator(tmp_path):
    emulator = pytest.importorskip("mok.tools.emulator", reason="the emulator needs numba")
    together = under_torchrun(tmp_path, 2, 1500.0)
    with emulator.Emulator("sm_90a", num_sms=4):
        alone = train(None, torch.device("cpu"), pairs(), steps=2)
    compare(together, alone)
