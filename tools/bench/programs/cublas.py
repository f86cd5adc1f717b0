"""cuBLAS on one large square product: what the chip gives at its best in this run."""

from __future__ import annotations

import torch
from torch import Tensor

from mok.tools.bench.programs.base import Options, Program
from mok.tools.bench.work import Work

SIZE = 8192
CPU_SIZE = 256


class CublasProgram(Program):
    """C = A·Bᵀ, BF16, 8192³, two pairs of operands in turn."""

    passes = ("gemm",)

    def __init__(self, name: str, work: Work, options: Options) -> None:
        super().__init__(name, work, options)
        on_gpu = work.device.type == "cuda"
        self.size = SIZE if on_gpu else CPU_SIZE
        self.note = f"{self.size}³" + ("" if on_gpu else " on the CPU")
        rng = torch.Generator(device=work.device).manual_seed(0)
        shape = (self.size, self.size)
        self.operands = [
            tuple(
                torch.randn(shape, generator=rng, dtype=torch.bfloat16, device=work.device)
                for _ in range(2)
            )
            for _ in range(2)
        ]
        self.result = torch.empty(shape, dtype=torch.bfloat16, device=work.device)

    def forward(self, index: int) -> Tensor:
        a, b = self.operands[index % len(self.operands)]
        return torch.mm(a, b.t(), out=self.result)

    def flops(self, pass_name: str) -> int:
        return 2 * self.size**3
