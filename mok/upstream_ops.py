"""The reference system's operators ``mok::`` that stand alone, under its names and with its arguments.

Its callers use ``mxfp8_quantize``; schedule and epilogues are here because they are as useful by
themselves. The operators around its megakernels take lists of peer addresses and multicast pointers,
which do not exist here (docs/migrating.md). ``mok.ops`` hands all of these on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mok.config import MAX_TOPK
from mok.errors import DeviceError, DtypeError, ShapeError

_PAD = 32  # int32 words: what the schedule reads of a rank starts at multiples of 128 bytes


def _arch(tensor: Tensor) -> str:
    """What kernels on the tensor's device are compiled for."""
    from mok.mxfp8 import kernel_arch

    arch = kernel_arch(tensor)
    if arch is None:
        raise DeviceError("this operator runs on a GPU or in an emulator", tensor.device)
    return arch


def _sms(device: torch.device) -> int:
    from mok.runtime.device import device_info
    from mok.runtime.launch import active_emulator

    emulator: Any = active_emulator()
    return int(emulator.num_sms if emulator is not None else device_info(device).num_sms)


def _check(name: str, tensor: Tensor, dtype: torch.dtype, size: tuple[int | None, ...]) -> None:
    shape = tuple(tensor.shape)
    fits = len(shape) == len(size) and all(
        n in (None, have) for n, have in zip(size, shape, strict=True)
    )
    if tensor.dtype != dtype:
        raise DtypeError(f"{name} must be {str(dtype).removeprefix('torch.')}", tensor.dtype)
    if not fits or not tensor.is_contiguous():
        shown = ", ".join("any" if n is None else str(n) for n in size)
        raise ShapeError(f"{name} must be contiguous, [{shown}]", list(shape))


# ---------------------------------------------------------------------- quantising


@torch.library.custom_op(
    "mok::mxfp8_quantize",
    mutates_args=(),
    schema="(Tensor x_bf16, bool return_normal, bool return_transposed)"
    " -> (Tensor?, Tensor?, Tensor?, Tensor?)",
)
def mxfp8_quantize(
    x_bf16: Tensor, return_normal: bool, return_transposed: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Weights in MXFP8, as ``mok.functional`` takes them from callers of the reference system.

    Args:
        x_bf16: BF16 [M, N] or [E, M, N], M and N multiples of 128.
        return_normal: with blocks along N; return_transposed: the transpose, with blocks along M.

    Returns:
        (float8_e4m3fn [.., M, N], uint8 [E * M/128, N/128, 32, 16], float8_e4m3fn [.., N, M],
        uint8 [E * N/128, M/128, 32, 16]); None for what was not asked for. On every GPU these; our own
        ``mok.mxfp8_quantize`` gives Hopper the values that its kernels want.

    Raises:
        DtypeError, ShapeError: the weight, or neither is asked for.
    """
    from mok.mxfp8 import mxfp8_quantize as quantise

    _asked(return_normal, return_transposed)
    made = quantise(
        x_bf16, normal=return_normal, transposed=return_transposed, layout="tile", expanded=False
    )
    found: list[Tensor | None] = []
    for part in (made.normal, made.transposed):
        if part is None:
            found += [None, None]
            continue
        assert part.data is not None and part.scales is not None
        found += [part.data[0] if x_bf16.dim() == 2 else part.data, part.scales.flatten(0, 1)]
    return found[0], found[1], found[2], found[3]


def _asked(normal: bool, transposed: bool) -> None:
    if not normal and not transposed:
        raise ShapeError("return_normal or return_transposed must be True", "both are False")


@mxfp8_quantize.register_fake
def _(
    x_bf16: Tensor, return_normal: bool, return_transposed: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    _asked(return_normal, return_transposed)
    *batch, rows, columns = x_bf16.shape
    experts = batch[0] if batch else 1

    def part(wanted: bool, r: int, c: int) -> tuple[Tensor | None, Tensor | None]:
        if not wanted:
            return None, None
        data = x_bf16.new_empty(*batch, r, c, dtype=torch.float8_e4m3fn)
        scales = x_bf16.new_empty(experts * (r // 128), c // 128, 32, 16, dtype=torch.uint8)
        return data, scales

    return (*part(return_normal, rows, columns), *part(return_transposed, columns, rows))


# ---------------------------------------------------------------------- the schedule


def _rows(topk_all: Tensor, num_local_experts: int, schedule_capacity: int, rank: int) -> int:
    """Rows of the result: ``schedule_capacity``, or more where a routing could need them."""
    from mok.kernels_cute.schedule.plan import schedule_plan

    if topk_all.dim() != 3:
        raise ShapeError("topk_all must be [EP, T, K]", list(topk_all.shape))
    ep, tokens, topk = topk_all.shape
    if num_local_experts < 1 or not 0 <= rank < ep or not 1 <= topk <= MAX_TOPK:
        raise ShapeError(
            f"num_local_experts must be at least 1, rank in 0…{ep - 1} and K in 1…{MAX_TOPK}",
            f"{num_local_experts}, {rank}, {topk}",
        )
    # 256 rows: the larger of the two tiles, so that a fake needs no device.
    plan = schedule_plan(max(tokens, 1), topk, num_local_experts * ep, ep, rank, 256)
    return max(plan.capacity, schedule_capacity)


@torch.library.custom_op("mok::schedule", mutates_args=())
def schedule(
    topk_all: Tensor, num_local_experts: int, schedule_capacity: int, rank: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Which row each route of a rank's experts is; the rows' order is ours (docs/architecture.md).

    Args:
        topk_all: int32 [EP, T, K], all ranks' expert ids; -1 (and what is no expert) drops a route.
        schedule_capacity: the least length of the results. It limits nothing.

    Returns:
        int32 (peer_rank [rows], peer_token_idx [rows], num_tokens [1], tokens_per_expert [El]);
        -1 in rows without a route. num_tokens counts the padding, tokens_per_expert does not.

    Raises:
        DtypeError, ShapeError, DeviceError: an argument.
    """
    from mok import kernels
    from mok.arguments import on, stream_handle
    from mok.config import tile_rows
    from mok.kernels_cute.schedule.plan import RECORD_WORDS, schedule_plan
    from mok.runtime.compile import get_kernel
    from mok.runtime.launch import launch

    rows = _rows(topk_all, num_local_experts, schedule_capacity, rank)
    _check("topk_all", topk_all, torch.int32, (None, None, None))
    ep, tokens, topk = topk_all.shape
    arch = _arch(topk_all)
    tile, experts = tile_rows(arch), num_local_experts * ep
    plan = schedule_plan(max(tokens, 1), topk, experts, ep, rank, tile)

    def ints(*size: int, fill: int | None = None) -> Tensor:
        if fill is not None:
            return topk_all.new_full(size, fill)
        return topk_all.new_empty(size)

    # As in the heap: a rank's ids, and its number of tokens at the same distance.
    length = -(-tokens * topk // _PAD) * _PAD
    staged = ints(ep, length + _PAD)
    staged[:, : tokens * topk] = topk_all.flatten(1)
    staged[:, length] = tokens
    peer_rank, peer_token_idx = ints(rows, fill=-1), ints(rows, fill=-1)
    num_rows, counts = ints(1), ints(num_local_experts)
    scratch = [
        ints(-(-size // 4))
        for size in (
            plan.counts_bytes, plan.totals_bytes, plan.local_bytes, plan.rank_starts_bytes
        )
    ]  # fmt: skip
    unused = [ints(num_local_experts + 1), ints(rows // tile), ints(RECORD_WORDS, fill=0)]
    offset, blocks, record = (t.data_ptr() for t in unused)
    with on(topk_all.device):
        launch(
            get_kernel(kernels.schedule_spec(arch)),
            staged.data_ptr(),
            staged.data_ptr() + 4 * length,
            4 * (length + _PAD),
            *(t.data_ptr() for t in scratch),
            peer_rank.data_ptr(),
            peer_token_idx.data_ptr(),
            num_rows.data_ptr(),
            counts.data_ptr(),
            offset,
            blocks,
            0,
            record,
            0,
            ep,
            experts,
            topk,
            rank,
            tile,
            rows // tile * tile,
            plan.num_chunks,
            stream_handle(topk_all.device),
        )
    return peer_rank, peer_token_idx, num_rows, counts


@schedule.register_fake
def _(
    topk_all: Tensor, num_local_experts: int, schedule_capacity: int, rank: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = _rows(topk_all, num_local_experts, schedule_capacity, rank)
    sizes = (rows, rows, 1, num_local_experts)
    first, second, third, fourth = (topk_all.new_empty(n, dtype=torch.int32) for n in sizes)
    return first, second, third, fourth


# ---------------------------------------------------------------------- epilogues


@torch.library.custom_op("mok::fwd_epilogue", mutates_args=())
def fwd_epilogue(y_shared: Tensor, combine_buffer: Tensor, topk_weights: Tensor) -> Tensor:
    """y_shared[t] + Σ_k topk_weights[t, k] · combine_buffer[t·K + k], in the order of the layer.

    Args:
        y_shared: BF16 [T, H], H a multiple of 64; combine_buffer: BF16 [T * K, H];
            topk_weights: FP32 [T, K].

    Returns:
        BF16 [T, H].

    Raises:
        DtypeError, ShapeError, DeviceError: an argument.
    """
    _check("topk_weights", topk_weights, torch.float32, (y_shared.shape[0], None))
    return _sum(y_shared, combine_buffer, topk_weights, topk_weights.shape[1])


@fwd_epilogue.register_fake
def _(y_shared: Tensor, combine_buffer: Tensor, topk_weights: Tensor) -> Tensor:
    return torch.empty_like(y_shared)


@torch.library.custom_op("mok::bwd_epilogue", mutates_args=())
def bwd_epilogue(d_x_shared: Tensor, d_x_routed_buffer: Tensor) -> Tensor:
    """d_x_shared[t] + Σ_k d_x_routed_buffer[t·K + k], in the order of the layer.

    Args:
        d_x_shared: BF16 [T, H], H a multiple of 64; d_x_routed_buffer: BF16 [T * K, H].

    Returns:
        BF16 [T, H].

    Raises:
        DtypeError, ShapeError, DeviceError: an argument.
    """
    tokens, rows = d_x_shared.shape[0], d_x_routed_buffer.shape[0]
    return _sum(d_x_shared, d_x_routed_buffer, None, rows // max(tokens, 1))


@bwd_epilogue.register_fake
def _(d_x_shared: Tensor, d_x_routed_buffer: Tensor) -> Tensor:
    return torch.empty_like(d_x_shared)


def _sum(shared: Tensor, routed: Tensor, weights: Tensor | None, topk: int) -> Tensor:
    from mok import kernels
    from mok.arguments import on, stream_handle
    from mok.kernels_cute.token_sum import token_sum_ctas
    from mok.runtime.compile import get_kernel
    from mok.runtime.launch import launch

    _check("the shared expert's result", shared, torch.bfloat16, (None, None))
    tokens, hidden = shared.shape
    _check("the routes' results", routed, torch.bfloat16, (tokens * topk, hidden))
    if hidden % 64 or (tokens and not 1 <= topk <= MAX_TOPK):
        raise ShapeError(
            f"H must be a multiple of 64 and K in 1…{MAX_TOPK}", f"H {hidden}, K {topk}"
        )
    out = torch.empty_like(shared)
    if not tokens:
        return out
    arch = _arch(shared)
    ids = torch.zeros(tokens, topk, dtype=torch.int32, device=shared.device)  # nothing is dropped
    spec = kernels.token_sum_spec(arch, False, True, 32, has_weights=weights is not None)
    with on(shared.device):
        launch(
            get_kernel(spec),
            out.data_ptr(),
            routed.data_ptr(),
            ids.data_ptr() if weights is None else weights.data_ptr(),
            shared.data_ptr(),
            ids.data_ptr(),
            ids.data_ptr(),
            0,
            tokens,
            hidden,
            topk,
            1,
            0,
            0,
            token_sum_ctas(tokens, hidden, _sms(shared.device)),
            stream_handle(shared.device),
        )
    return out
