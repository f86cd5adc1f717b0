"""The time a layer would take if its matrix products ran at cuBLAS' speed and nothing else cost.

What stays: rows that pad each expert's segment to the tile, the token sum at the speed of memory
(it reads one row of H per route and writes one per token), and the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence

from mok.tools.bench.shapes import FLOPS_PER_ROUTE, BenchShape

HBM_BYTES_PER_S = 4.3e12
"""A device-to-device copy on an H200, bytes read plus written."""

SCHEDULE_MS = 0.02
"""Used where the schedule's own time was not measured."""

TOKEN_SUMS = {"forward": 1, "backward": 1, "both": 2}


def ceiling_ms(
    bench: BenchShape,
    pass_name: str,
    counts: Sequence[int],
    cublas_tflops: float,
    schedule_ms: float | None = None,
    tile: int = 128,
) -> float:
    """Milliseconds below which the pass cannot go with this routing.

    Args:
        counts: routes of each expert.
        cublas_tflops: what cuBLAS reached in the same rounds.
    """
    s = bench.shape
    padded = sum(-(-count // tile) * tile for count in counts)
    flops = FLOPS_PER_ROUTE[pass_name] * padded * s.hidden_size * s.intermediate_size
    sum_bytes = 2 * s.hidden_size * (sum(counts) + s.num_tokens)
    schedule = 0.0
    if pass_name != "backward":  # one schedule serves both directions
        schedule = SCHEDULE_MS if schedule_ms is None else schedule_ms
    return (
        flops / cublas_tflops / 1e9
        + TOKEN_SUMS[pass_name] * 1e3 * sum_bytes / HBM_BYTES_PER_S
        + schedule
    )
