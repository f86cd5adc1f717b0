"""Bytes of GPU memory that a rank needs for one layer: what ``mok plan`` shows."""

from __future__ import annotations

from mok.config import Config, Shape, tile_rows
from mok.kernels_cute.backward.program import Backward
from mok.kernels_cute.program import Tile
from mok.runtime.plan import plan_workspace

BF16, FP32 = 2, 4


def memory(shape: Shape, config: Config, arch: str, precision: str = "bf16") -> dict[str, int]:
    """Bytes by purpose, for T = ``num_tokens`` at most.

    With MXFP8 the heap and the workspace are what ``runtime.plan`` says; weights, context and scratch are
    counted as BF16, an upper bound.

    The workspace is sized by ``runtime.plan``. The context (per layer and call) and backward's
    scratch come from torch's allocator with the shapes that ``mok.call`` and ``mok.backward_call``
    document: context x [ring, H], gate and up [ring, I], shared gate and up [T, Is]; scratch
    5 × [ring, I], dx [dx rows, H], FP32 [dx rows, I/64], two accumulators, and in a ring x and dy
    [ring, H] and FP32 [ring]; of a shared expert 3 × [T, Is], dx [T, H] and FP32 [T, Is/64].
    """
    tokens = max(1, shape.num_tokens)
    h, i, topk = shape.hidden_size, shape.intermediate_size, shape.topk
    shared = shape.shared_intermediate_size or 0
    sizes = plan_workspace(shape, config, tokens, arch, precision)
    ring, rows = sizes.ring, sizes.y_rows
    in_ring = not sizes.direct
    tile = Tile(m=tile_rows(arch))
    experts = shape.max_local_experts
    program = Backward(0, 0, h, i, 0, experts, config.minibatch_size, ring, tile)
    weights = BF16 * 3 * h * (experts * i + shared)
    context = BF16 * (ring * (2 * i + h * in_ring) + 2 * tokens * shared)
    scratch = BF16 * (5 * ring * i + rows * h + 2 * ring * h * in_ring) + FP32 * ring * in_ring
    scratch += FP32 * (rows * i // 64 + 2 * program.group_tasks * tile.m * tile.down_n)
    shared_scratch = 0
    if shared:
        shared_scratch = tokens * (BF16 * (3 * shared + h) + FP32 * shared // 64)
    symmetric = sizes.bytes_of("symmetric")
    if in_ring:
        symmetric += BF16 * tokens * h + 2 * FP32 * tokens * topk
    return {
        "weights": weights,
        "weight gradients": weights,
        "symmetric heap": symmetric,
        "workspace": sizes.bytes_of("local"),
        "schedule": sizes.bytes_of("schedule"),
        "saved context": context,
        "backward scratch": scratch,
        "shared expert scratch": shared_scratch,
    }
