"""A tiny language model whose experts learn; as a script, a rank of it.

    torchrun --nproc-per-node 2 tests/mok/language_model.py FOLDER [STEPS]

Every rank writes its tokens' losses, FP32 [steps, tokens], to FOLDER/RANK.npy. On a GPU, or in the emulator.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

from mok.config import Config
from mok.layer import MoELayer

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


def main() -> None:
    from mok.processes import joined

    folder, steps = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 4
    with joined() as group, contextlib.ExitStack() as stack:
        assert group is not None, "start it with torchrun"
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        else:
            from mok.tools.emulator import Emulator

            stack.enter_context(Emulator("sm_90a", num_sms=4))
        found = train(group, device, pairs().split(LENGTH)[group.rank], steps)
        group.barrier("done")
        np.save(folder / f"{group.rank}.npy", found.numpy())


if __name__ == "__main__":
    main()
