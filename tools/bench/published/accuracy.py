"""How far a program's output and d_x lie from FP32: beside every time, since MXFP8 buys its speed with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mok.reference.precision import ieee_matmul
from mok.tools.bench.oracle import match, swiglu_gradients
from mok.tools.bench.published.share import Share, Unavailable

NAMES = ("output", "x")


@dataclass(frozen=True)
class Expected:
    """Of this rank's tokens, FP32 [T, H] each, from the BF16 inputs; on the host, a GPU is full enough.

    Attributes:
        output: the layer's. x: the gradient of x for ``Share.dy``.
    """

    output: Tensor
    x: Tensor

    def matches(self, output: Tensor, d_x: Tensor | None) -> dict[str, tuple[float, float]]:
        """{"output": (relative L2 error, cosine), "x": …}; "x" only with a ``d_x``."""
        found = {"output": match(output.cpu(), self.output)}
        if d_x is not None:
            found["x"] = match(d_x.cpu(), self.x)
        return {name: (each.error, each.cosine) for name, each in found.items()}


def expected(share: Share, size: int) -> Expected:
    """The layer in FP32, without TF32 (collective): rank after rank, all add their experts' part of its tokens.

    Args:
        size: ranks of ``share.group``, whose members are numbered as in the world.

    Raises:
        Unavailable: on a rank whose GPU has no room for an expert in FP32. It has taken part in everything.
    """
    found: Expected | None = None
    problem = ""
    for rank in range(size):
        tokens = [share.x, share.dy, share.ids, share.router]
        if size > 1:
            tokens = [_from(rank, each, share) for each in tokens]
        try:
            parts = _routed_part(share, *tokens)
        except torch.OutOfMemoryError as error:  # the others must not wait for this rank's sums
            problem = problem or str(error)
            parts = (torch.zeros_like(share.x, dtype=torch.float32),) * 2
        if size > 1:
            for part in parts:
                dist.reduce(part, rank, group=share.group)
        if rank == share.rank:
            found = Expected(*parts)
    assert found is not None
    if problem:
        raise Unavailable(f"the FP32 reference does not fit: {problem[:200]}")
    return _with_shared(share, found.output, found.x)


def _with_shared(share: Share, output: Tensor, d_x: Tensor) -> Expected:
    if share.shared:
        weights = tuple(w.float() for w in share.shared)
        more, gradient = _expert(share.x.float(), share.dy.float(), *weights)
        output, d_x = output + more, d_x + gradient
    return Expected(output.cpu(), d_x.cpu())


def expected_of_first(shares: Sequence[Share]) -> Expected:
    """``expected`` of the first of virtual ranks, all of whose shares are here."""
    first = shares[0]
    parts = [_routed_part(s, first.x, first.dy, first.ids, first.router) for s in shares]
    output, d_x = (sum(each[1:], each[0]) for each in zip(*parts, strict=True))
    return _with_shared(first, output, d_x)


def everyones_worst(every: Sequence[dict[str, tuple[float, float]]]) -> dict[str, dict[str, float]]:
    """The largest error and the least cosine of all ranks, by name."""
    return {
        name: {
            "error": max(found[name][0] for found in every),
            "cosine": min(found[name][1] for found in every),
        }
        for name in every[0]
    }


def _from(rank: int, mine: Tensor, share: Share) -> Tensor:
    """``rank``'s tensor in the place of ``mine``, as bytes: gloo does not send BF16."""
    sent = (mine if rank == share.rank else torch.empty_like(mine)).contiguous()
    dist.broadcast(sent.view(torch.uint8), rank, group=share.group)
    return sent


def _routed_part(
    share: Share, x: Tensor, dy: Tensor, ids: Tensor, router: Tensor
) -> tuple[Tensor, Tensor]:
    """What the experts of this rank add to the output and to d_x of some rank's tokens."""
    output = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    d_x = torch.zeros_like(output)
    first = share.rank * share.layer.local
    for e in range(share.layer.local):
        token, k = (ids == first + e).nonzero(as_tuple=True)
        if not len(token):
            continue
        weights = tuple(w[e].float() for w in (share.gate, share.up, share.down))
        scale = router[token, k].float().unsqueeze(1)
        y, gradient = _expert(x[token].float(), dy[token].float() * scale, *weights)
        output.index_add_(0, token, y * scale)
        d_x.index_add_(0, token, gradient)
    return output, d_x


def _expert(
    x: Tensor, dy: Tensor, gate_w: Tensor, up_w: Tensor, down_w: Tensor
) -> tuple[Tensor, Tensor]:
    """(y, d_x) of an expert whose output's gradient is ``dy``."""
    with ieee_matmul():
        hidden, d_gate, d_up = swiglu_gradients(x @ gate_w.t(), x @ up_w.t(), dy @ down_w)
        return hidden @ down_w.t(), d_gate @ gate_w + d_up @ up_w
