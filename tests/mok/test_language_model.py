"""A tiny language model whose experts are trained on two ranks has the loss bits of one rank.

Only the routed experts learn: every other gradient is a sum over a rank's own tokens, which design promise 2
leaves out.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from mok.config import Config
from mok.layer import MoELayer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "runtime"))
import ranks

WORDS, H, I, E, K, LENGTH, SIZE = 32, 64, 64, 6, 2, 24, 2


class Model(nn.Module):
    def __init__(self, group, device):
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(WORDS, H)
        self.route = nn.Linear(H, E, bias=False)
        self.head = nn.Linear(H, WORDS, bias=False)
        self.to(device)
        torch.manual_seed(4)
        self.experts = MoELayer(
            H, I, E, K, group=group, max_tokens=SIZE * LENGTH, dtype=torch.float32,
            config=Config(2, 2, 128, 256), device=device,
        )  # fmt: skip
        for part in (self.words, self.route, self.head):
            part.requires_grad_(False)

    def forward(self, tokens):
        x = self.words(tokens)
        # A token at a time: a matrix product's bits may depend on how many there are.
        rows = [torch.mv(self.route.weight, row) for row in x]
        weights, ids = torch.stack(rows).softmax(-1).topk(K, dim=-1)
        y = self.experts(x.bfloat16(), weights, ids).float()
        return torch.stack([torch.mv(self.head.weight, row) for row in y])


def train(group, device, tokens, steps=4):
    """Every token's loss at every step, FP32."""
    model = Model(group, device)
    optimizer = torch.optim.SGD(model.experts.routed_parameters(), lr=0.5)
    inputs, targets = tokens[:, 0].to(device), tokens[:, 1].to(device)
    losses = []
    for _ in range(steps):
        logits = model(inputs)
        each = torch.stack(
            [nn.functional.cross_entropy(row, t) for row, t in zip(logits, targets, strict=True)]
        )
        losses.append(each.detach().cpu())
        optimizer.zero_grad()
        (each.sum() / (SIZE * LENGTH)).backward()
        optimizer.step()
    return torch.stack(losses)


def pairs():
    """Words and what follows them: [all tokens, 2]."""
    words = torch.randint(WORDS, (SIZE * LENGTH,), generator=torch.Generator().manual_seed(9))
    return torch.stack([words, (words * 5 + 1) % WORDS], dim=1)


def _gpu(group):
    device = torch.device("cuda", group.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    found = train(group, device, pairs().split(LENGTH)[group.rank])
    group.barrier("done")
    return found.numpy()


def _emulated(group):
    from mok.tools.emulator import Emulator

    with Emulator("sm_90a", num_sms=4):
        found = train(group, torch.device("cpu"), pairs().split(LENGTH)[group.rank], steps=2)
    group.barrier("done")
    return found.numpy()


def compare(parts, alone):
    together = torch.cat([torch.from_numpy(p) for p in parts], dim=1)
    assert torch.equal(together, alone)
    assert alone[-1].mean() < alone[0].mean()  # it learns


@pytest.mark.gpu
@pytest.mark.spread
def test_two_processes_have_the_loss_bits_of_one(tmp_path):
    parts = ranks.run_ok(_gpu, SIZE, tmp_path, timeout_s=120.0)
    compare(parts, train(None, torch.device("cuda"), pairs()))


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.timeout(2400)
def test_in_the_emulator(tmp_path):
    emulator = pytest.importorskip("mok.tools.emulator", reason="the emulator needs numba")
    started = ranks.start(_emulated, SIZE, tmp_path, timeout_s=1200.0)
    results = ranks.collect(started, limit_s=1500.0)
    assert all(state == "ok" for state, _ in results.values()), results
    with emulator.Emulator("sm_90a", num_sms=4):
        alone = train(None, torch.device("cpu"), pairs(), steps=2)
    compare([results[r][1] for r in range(SIZE)], alone)
