"""Bytes of GPU memory that a rank needs for one layer: what ``mok plan`` shows."""

from __future__ import annotations

from fractions import Fraction

from mok.config import Config, Shape, tile_rows
from mok.kernels_cute.backward.program import Backward
from mok.kernels_cute.program import Tile
from mok.runtime.plan import plan_workspace

BF16, FP32, MXFP8 = 2, 4, Fraction(33, 32)  # bytes of an element, scales included


def memory(shape: Shape, config: Config, arch: str, precision: str = "bf16") -> dict[str, int]:
    """Bytes by purpose, for T = ``num_tokens`` at most.

    The workspace is sized by ``runtime.plan``. The context (per layer and call) and backward's
    scratch come from torch's allocator with the shapes that ``mok.saved`` and ``mok.backward_call``
    document: context x [ring, H], gate and up [ring, I], shared gate and up [T, Is]; scratch
    2 × [ring, I], FP32 [dx rows, I/64], in a ring dy [ring, H] and FP32 [ring]; where a
    call may have a second macrobatch 2 × [ring, I], two accumulators, in a ring x [ring, H]; of a shared
    expert 3 × [T, Is], dx [T, H] and FP32 [T, Is/64].

    In MXFP8 scratch has copies along the tokens, 2 × [ring, H] and 2 × [ring, I], and both orientations of
    the routed weights lie beside the BF16 masters. With block-scaled MMAs x, dy, the gradients of gate and
    up, w·hidden, all these copies and the quantised weights take 33/32 bytes an element.
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
    routed, mxfp8 = 3 * h * experts * i, precision == "mxfp8"
    value = MXFP8 if sizes.scaled else BF16
    weights = BF16 * (routed + 3 * h * shared)
    context = BF16 * (2 * ring * i + 2 * tokens * shared) + value * ring * h * in_ring
    again = ring < sizes.capacity
    rows_in = in_ring * (1 + again + 2 * mxfp8) * h + (2 + 2 * mxfp8) * i  # quantised in MXFP8
    scratch = BF16 * again * 2 * ring * i + value * ring * rows_in
    scratch += sizes.scaled * ring * i // 32  # the scales of w·hidden
    scratch += FP32 * (ring * in_ring + rows * i // 64)
    scratch += FP32 * again * 2 * program.group_tasks * tile.m * tile.down_n
    shared_scratch = 0
    if shared:
        shared_scratch = tokens * (BF16 * (3 * shared + h) + FP32 * shared // 64)
    symmetric = sizes.bytes_of("symmetric")
    if in_ring:
        symmetric += BF16 * tokens * h + 2 * FP32 * tokens * topk
    found: dict[str, Fraction | int] = {
        "weights": weights,
        "quantised weights": 2 * value * routed * mxfp8,
        "weight gradients": weights,
        "symmetric heap": symmetric,
        "workspace": sizes.bytes_of("local"),
        "schedule": sizes.bytes_of("schedule"),
        "saved context": context,
        "backward scratch": scratch,
        "shared expert scratch": shared_scratch,
    }
    return {name: int(size) for name, size in found.items() if size or name != "quantised weights"}
