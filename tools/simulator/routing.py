"""Who sends how many routes to which expert: balanced, random, skewed, or recorded."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mok.config import CTA_TILE_M, GEMM_TILE_N, Shape
from mok.errors import DtypeError, MokError, RouteError, ShapeError

MAX_TASKS = 2**22
"""Tiles of one rank's balanced share in a simulation: minutes."""
MAX_COUNTS = 2**24
"""Ranks times experts."""


def check_size(shape: Shape) -> None:
    """Raises ShapeError if a call is too large to be simulated."""
    inner, hidden = shape.intermediate_size, shape.hidden_size
    blocks = -(-shape.num_tokens * shape.topk // CTA_TILE_M)
    tasks = blocks * (-(-2 * inner // GEMM_TILE_N) + -(-hidden // GEMM_TILE_N))
    for what, value, limit in (
        ("tiles a rank", tasks, MAX_TASKS),
        ("ranks times experts", shape.ep_size * shape.num_experts, MAX_COUNTS),
    ):
        if value > limit:
            raise ShapeError(
                f"a simulated call has at most {limit} {what}", value, "Simulate a smaller one"
            )


@dataclass(frozen=True, eq=False)
class Routing:
    """The routes of one call.

    Attributes:
        name: what made it ("balanced", "uniform", "zipf:1.2", a file name).
        tokens: int64 [EP], tokens of each rank.
        counts: int64 [EP, E], routes of each rank to each expert.
    """

    name: str
    tokens: NDArray[np.int64]
    counts: NDArray[np.int64]

    def local_counts(self, shape: Shape, rank: int) -> NDArray[np.int64]:
        """int64 [EP, El]: routes of each rank to each expert of ``rank``."""
        experts = shape.experts_on(rank)
        return self.counts[:, experts.start : experts.stop]

    def sources(self, shape: Shape) -> NDArray[np.int64]:
        """int64 [EP, EP]: entry (r, p) counts the rows of rank r that come from rank p."""
        ranks = [self.local_counts(shape, rank).sum(axis=1) for rank in range(shape.ep_size)]
        return np.stack(ranks)


def balanced(shape: Shape) -> Routing:
    """Every expert gets the same number of routes from every rank, as far as integers allow."""
    check_size(shape)
    ep, experts = shape.ep_size, shape.num_experts
    routes = shape.num_tokens * shape.topk
    counts = np.full((ep, experts), routes // experts, np.int64)
    for rank in range(ep):
        # The remainder goes to different experts on different ranks.
        first = rank * (routes % experts)
        counts[rank, (first + np.arange(routes % experts)) % experts] += 1
    return Routing("balanced", np.full(ep, shape.num_tokens, np.int64), counts)


def drawn(shape: Shape, exponent: float, seed: int = 0) -> Routing:
    """Independent draws; the expert of rank i (in a seeded order) has weight (i+1)^-exponent.

    Exponent 0 is uniform. A token's K experts are drawn without replacement only on average.
    """
    if not 0 <= exponent <= 8:
        raise ShapeError("the Zipf exponent must be in 0…8", exponent)
    check_size(shape)
    rng = np.random.default_rng(seed)
    weights = (1.0 + rng.permutation(shape.num_experts)) ** -exponent
    routes = shape.num_tokens * shape.topk
    counts = rng.multinomial(routes, weights / weights.sum(), size=shape.ep_size)
    name = f"zipf:{exponent:g}" if exponent else "uniform"
    tokens = np.full(shape.ep_size, shape.num_tokens, np.int64)
    return Routing(name, tokens, counts.astype(np.int64))


def recorded(ids: NDArray[np.integer], shape: Shape, name: str = "recorded") -> Routing:
    """From expert ids, integers [EP, T, K] or [N, K] with T = N/EP; -1 drops a route.

    Raises:
        DtypeError, ShapeError: not integers, or not of that shape.
        RouteError: an id is neither -1 nor in 0…E-1.
    """
    check_size(shape)
    if not np.issubdtype(ids.dtype, np.integer):
        raise DtypeError("recorded ids must be integers", ids.dtype)
    if ids.ndim == 2 and len(ids) % shape.ep_size == 0:
        ids = ids.reshape(shape.ep_size, len(ids) // shape.ep_size, ids.shape[1])
    if ids.ndim != 3 or ids.shape[0] != shape.ep_size or ids.shape[2] != shape.topk:
        raise ShapeError(
            f"recorded ids must be [{shape.ep_size}, T, {shape.topk}] or [N, {shape.topk}] with "
            f"N a multiple of {shape.ep_size}",
            tuple(ids.shape),
        )
    wrong = np.argwhere((ids < -1) | (ids >= shape.num_experts))
    if len(wrong):
        rank, token, k = (int(i) for i in wrong[0])
        raise RouteError(
            f"expert ids must be -1 or in 0…{shape.num_experts - 1}",
            f"{ids[rank, token, k]} at rank {rank}, token {token}, k {k}",
        )
    counts = np.stack(
        [
            np.bincount(row[row >= 0], minlength=shape.num_experts)
            for row in ids.reshape(len(ids), -1)
        ]
    )
    return Routing(name, np.full(len(ids), ids.shape[1], np.int64), counts.astype(np.int64))


def read_ids(path: str) -> NDArray[np.integer]:
    """The array in a .npy file.

    Raises:
        MokError: it cannot be read.
    """
    rule = "recorded ids must be a readable .npy file"
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise MokError(rule, f"{path}: {error}") from error
    if not isinstance(found, np.ndarray):
        raise MokError(rule, f"{path}: an archive of several arrays", "Save one with numpy.save")
    return found


def make_routing(text: str, shape: Shape, seed: int = 0) -> Routing:
    """ "balanced", "uniform", "zipf:EXPONENT", or the name of a .npy file of ids.

    Raises:
        MokError: it is none of these, or the file cannot be read.
    """
    if text == "balanced":
        return balanced(shape)
    if text == "uniform":
        return drawn(shape, 0.0, seed)
    if text.startswith("zipf:"):
        try:
            exponent = float(text.removeprefix("zipf:"))
        except ValueError:
            raise ShapeError("zipf: must be followed by its exponent", repr(text)) from None
        return drawn(shape, exponent, seed)
    if text.endswith(".npy"):
        return recorded(read_ids(text), shape, Path(text).name)
    raise MokError(
        "the routing must be balanced, uniform, zipf:EXPONENT or a .npy file of ids", repr(text)
    )
