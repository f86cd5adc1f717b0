"""What was published, and the arithmetic that puts a run beside it. No torch: recorded times suffice.

The comparison of August 2026 (cursor/mixture-of-kittens, README and blog post): one MoE layer on an NVL72 of
GB300, 64 ranks of 2048 tokens, 500 iterations of warm-up and 100 timed; per iteration the slowest rank counts,
of these the median; the schedule's construction is included. A speed-up is over the fastest other program.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

EP, TOKENS = 64, 2048
WARMUP, ITERATIONS = 500, 100
MODELS = ("kimi-k2.5", "glm-5.2", "qwen3.5-397b", "deepseek-v4-pro")
PRECISIONS = ("bf16", "mxfp8")
PASSES = ("forward", "backward")
OURS = "mok"

PUBLISHED = {
    ("mxfp8", "forward"): 2.37,
    ("mxfp8", "backward"): 1.78,
    ("bf16", "forward"): 1.92,
    ("bf16", "backward"): 1.58,
}
"""Upstream MoK over the fastest baseline, in the best of the four models."""

READ_OFF = {"kimi-k2.5": 2.37, "glm-5.2": 2.15, "qwen3.5-397b": 1.95, "deepseek-v4-pro": 2.22}
"""MXFP8 forward by model, as a third party read them off the published chart (±2 %)."""

PUBLISHED_WITH = {
    "gpu": "GB300 NVL72",
    "torch": "2.13",
    "deep-ep": "2.1.0",
    "torchao": "0.18",
    "transformer-engine": "2.17",
    "nccl": "2.30.7",
}


def per_iteration(times: Sequence[Sequence[float]]) -> list[float]:
    """The slowest rank's time of each iteration, from ``times[rank][iteration]``.

    Raises:
        ValueError: no rank, no iteration, or ranks with different numbers of iterations.
    """
    lengths = {len(rank) for rank in times}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            f"every rank must have the same number of iterations, at least one: {lengths}"
        )
    return [max(each) for each in zip(*times, strict=True)]


def summary(times: Sequence[Sequence[float]]) -> dict[str, float]:
    """Median, extremes and quartile distance of the slowest rank's times, in milliseconds."""
    slowest = per_iteration(times)
    low, middle, high = (
        statistics.quantiles(slowest, n=4, method="inclusive")
        if len(slowest) > 1
        else [slowest[0]] * 3
    )
    return {
        "ms": middle,
        "fastest_ms": min(slowest),
        "slowest_ms": max(slowest),
        "spread": (high - low) / middle,
    }


def flops(shape: Mapping[str, int], pass_name: str) -> int:
    """FLOP of a rank: 6·H·I for each route and 6·H·I_shared for each token; twice that backward."""
    per_token = shape["K"] * shape["I"] + shape["shared"]
    forward = 6 * shape["T"] * shape["H"] * per_token
    return forward if pass_name == "forward" else 2 * forward


def speed_ups(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Ours, and upstream where it ran, against the fastest of the other programs.

    Args:
        rows: with "model", "precision", "pass", "program", "ms".

    Returns one entry per (model, precision, pass) that ours has, in the rows' order: "ms", "fastest_peer",
    "peer_ms", "speed_up" (None without a peer), "upstream_ms" and "over_upstream" (None without it),
    "published" (the best of all models) and "published_model" (of this one, where it was read off).
    """
    found = []
    for row in rows:
        if row["program"] != OURS:
            continue
        key = (row["model"], row["precision"], row["pass"])
        others = [r for r in rows if (r["model"], r["precision"], r["pass"]) == key]
        peers = [r for r in others if r["program"] not in (OURS, "upstream")]
        fastest = min(peers, key=lambda r: r["ms"], default=None)
        upstream = next((r for r in others if r["program"] == "upstream"), None)
        found.append(
            {
                "model": key[0],
                "precision": key[1],
                "pass": key[2],
                "ms": row["ms"],
                "fastest_peer": fastest["program"] if fastest else None,
                "peer_ms": fastest["ms"] if fastest else None,
                "speed_up": fastest["ms"] / row["ms"] if fastest else None,
                "upstream_ms": upstream["ms"] if upstream else None,
                "over_upstream": upstream["ms"] / row["ms"] if upstream else None,
                "published": PUBLISHED[key[1], key[2]],
                "published_model": READ_OFF.get(key[0])
                if key[1:] == ("mxfp8", "forward")
                else None,
            }
        )
    return found


def best(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The largest speed-up over the models by precision and pass, beside the published one."""
    found = []
    for (precision, pass_name), published in PUBLISHED.items():
        mine = [
            e
            for e in entries
            if (e["precision"], e["pass"]) == (precision, pass_name) and e["speed_up"] is not None
        ]
        top = max(mine, key=lambda e: e["speed_up"], default=None)
        found.append(
            {
                "precision": precision,
                "pass": pass_name,
                "published": published,
                "speed_up": top["speed_up"] if top else None,
                "model": top["model"] if top else None,
                "fastest_peer": top["fastest_peer"] if top else None,
            }
        )
    return found
