"""A small byte-level language model whose feed-forward parts are MoE layers, and the text it learns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from mok.layer import MoELayer
from mok.tools.train.torch_layer import TorchMoELayer

LAYERS: dict[str, Callable[..., MoELayer]] = {
    "mok": MoELayer,
    "mxfp8": partial(MoELayer, precision="mxfp8"),
    "torch": TorchMoELayer,
    "frozen": TorchMoELayer,
}
"""``mxfp8``: FP32 masters, quantised anew after each step of the optimizer. ``frozen``: experts keep their
initial values, to show that they learn something."""
OURS = ("mok", "mxfp8")
"""Those that run our kernels."""


@dataclass(frozen=True)
class Size:
    """Of the model and of a step: ``batch`` windows of ``context`` bytes.

    ``hidden`` and ``intermediate`` are multiples of 128, which MXFP8 needs.
    """

    hidden: int = 256
    intermediate: int = 256
    experts: int = 8
    topk: int = 2
    blocks: int = 2
    heads: int = 4
    context: int = 256
    batch: int = 32


def corpus() -> Tensor:
    """The reference manual that every Python ships (``pydoc_data.topics``), as bytes: uint8 [n]."""
    from pydoc_data.topics import topics  # type: ignore[import-untyped]

    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class Block(nn.Module):
    """Causal attention and an MoE layer, each behind an RMSNorm and beside a residual."""

    def __init__(self, size: Size, layer: str, device: torch.device):
        super().__init__()
        h = size.hidden
        self.heads = size.heads
        self.before, self.between = nn.RMSNorm(h, device=device), nn.RMSNorm(h, device=device)
        self.qkv = nn.Linear(h, 3 * h, bias=False, device=device)
        self.out = nn.Linear(h, h, bias=False, device=device)
        self.moe = LAYERS[layer](
            h, size.intermediate, size.experts, size.topk,
            router="softmax", device=device, dtype=torch.float32,
        )  # fmt: skip
        if layer == "frozen":
            for parameter in self.moe.routed_parameters():
                parameter.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, h = x.shape
        q, k, v = self.qkv(self.before(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(SDPBackend.MATH):  # the fused ones add with atomics: other bits each run
            y = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, h))
        return x + self.moe(self.between(x))


class ByteLM(nn.Module):
    """Logits of the next byte. Parameters FP32, the MoE layers compute in BF16."""

    def __init__(self, size: Size, layer: str, device: torch.device):
        super().__init__()
        self.bytes = nn.Embedding(256, size.hidden, device=device)
        self.places = nn.Embedding(size.context, size.hidden, device=device)
        self.blocks = nn.ModuleList(Block(size, layer, device) for _ in range(size.blocks))
        self.norm = nn.RMSNorm(size.hidden, device=device)
        self.head = nn.Linear(size.hidden, 256, bias=False, device=device)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.places.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte of ``windows`` int64 [batch, context + 1]."""
        logits = self(windows[:, :-1])
        return cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
