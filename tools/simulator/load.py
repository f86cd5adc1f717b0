"""What one rank receives, and from where."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mok.tools.simulator.scenario import Scenario


@dataclass(frozen=True, eq=False)
class RankLoad:
    """One rank's share of a call.

    Attributes:
        rows: padded rows of its experts.
        counts: int64 [El], routes of each local expert.
        blocks_of_expert: int64 [El], row blocks of each.
        local, near, far: shares of its rows that come from itself, over NVLink, over the network.
        near_mirror, far_mirror: rows of its tokens that NVLink (network) peers take, over the rows
            that it takes from them: the peers' traffic on its ports, relative to its own.
    """

    rank: int
    tokens: int
    rows: int
    tile_m: int
    counts: NDArray[np.int64]
    blocks_of_expert: NDArray[np.int64]
    local: float
    near: float
    far: float
    near_mirror: float
    far_mirror: float

    @property
    def routes(self) -> int:
        return int(self.counts.sum())

    def real_rows(self, first: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """How many of the ``count`` rows from each of ``first`` are real, not padding.

        ``count`` divides the tile, so that no range crosses experts.
        """
        starts = (
            np.cumsum(self.blocks_of_expert * self.tile_m) - self.blocks_of_expert * self.tile_m
        )
        expert = spread(self.blocks_of_expert)[first // self.tile_m]
        return np.clip(self.counts[expert] - (first - starts[expert]), 0, count)


def spread(blocks_of_expert: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [blocks]: the expert of each row block."""
    return np.repeat(np.arange(len(blocks_of_expert)), blocks_of_expert)


def loads(scenario: Scenario, tile_m: int) -> list[RankLoad]:
    """The load of every rank."""
    shape, routing, domain = scenario.shape, scenario.routes, scenario.machine.domain
    sources = routing.sources(shape)
    ranks = np.arange(shape.ep_size)
    found = []
    for rank in range(shape.ep_size):
        counts = routing.local_counts(shape, rank).sum(axis=0)
        blocks = -(-counts // tile_m)
        itself = (ranks == rank) | scenario.virtual
        near = ~itself & (ranks // domain == rank // domain)
        far = ~itself & ~near
        takes, gives = sources[rank], sources[:, rank]
        total = max(1, int(takes.sum()))
        found.append(
            RankLoad(
                rank,
                int(routing.tokens[rank]),
                int(blocks.sum()) * tile_m,
                tile_m,
                counts,
                blocks,
                takes[itself].sum() / total,
                takes[near].sum() / total,
                takes[far].sum() / total,
                gives[near].sum() / max(1, int(takes[near].sum())),
                gives[far].sum() / max(1, int(takes[far].sum())),
            )
        )
    return found


def critical(found: list[RankLoad]) -> list[RankLoad]:
    """The ranks that can be the last to finish: most rows, most traffic, most tokens.

    Ranks meet only at their ports, and rows come from all peers in turn, so each rank's time
    follows from its own load; the slowest is among the extremes. If all are alike, one stands for
    all.
    """

    def port(load: RankLoad) -> float:
        near = load.near * load.routes * (1 + load.near_mirror)
        return near + 20 * load.far * load.routes * (1 + load.far_mirror)

    first = max(found, key=lambda load: load.rows)
    chosen = [first]
    for measure in (port, lambda load: load.tokens):
        other = max(found, key=measure)
        # What differs by less than a percent is noise of the routing.
        if measure(other) > 1.01 * measure(first):
            chosen.append(other)
    return list({load.rank: load for load in chosen}.values())
