"""What upstream's tasks cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mok.kernels_cute.program import Tile
from mok.tools.simulator.constants import Table, calibration
from mok.tools.simulator.load import RankLoad, spread
from mok.tools.simulator.scenario import Scenario
from mok.tools.simulator.tilecost import Costs, Floats
from mok.tools.simulator.work import Pipeline, Tasks

if TYPE_CHECKING:
    from mok.tools.simulator.upstream import Phases

HALF = 128  # rows of a pull


@dataclass(frozen=True)
class UpstreamCosts:
    """Costs of upstream's program on one rank; the tile's own costs are ``costs``."""

    scenario: Scenario
    load: RankLoad
    costs: Costs

    @classmethod
    def of(cls, scenario: Scenario, load: RankLoad) -> UpstreamCosts:
        costs = Costs(
            scenario.machine,
            calibration("upstream_sm100").replace(**scenario.overrides),
            Tile(m=256, up_n=256, down_n=256, group_m=8),
            "256x256",
            scenario.precision,
            scenario.comm_sms,
            scenario.shape.hidden_size,
            1.0,
        )
        return cls(scenario, load, costs)

    @property
    def table(self) -> Table:
        return self.costs.table

    @property
    def workers(self) -> int:
        return self.costs.workers

    @property
    def cluster(self) -> int:
        return 2

    @property
    def comm_sms(self) -> int:
        return self.costs.comm_sms

    @property
    def hidden(self) -> int:
        return self.costs.hidden

    @property
    def mxfp8(self) -> bool:
        return self.scenario.precision == "mxfp8"

    @property
    def pull_columns(self) -> int:
        return -(-self.hidden // 512)

    @property
    def push_columns(self) -> int:
        return -(-self.hidden // 1024)

    def pipeline(self) -> Pipeline:
        t = self.table
        return Pipeline(
            accumulators=2 if self.scenario.switches.two_accumulators else 1,
            lead_s=t["stages"] * self.costs.step_s(False),
            fill_s=t["fill_s"],
            store_s=t["store_s"],
            draws_late=True,
        )

    # ---- compute ----

    def tasks(self, names: tuple[str, ...], phases: Phases) -> Tasks:
        """Costs of all phases' tasks."""
        t, costs = self.table, self.costs
        kind = np.array(phases.kind, np.int64)
        depth = np.array(phases.depth, np.int64)
        width = np.array(phases.width, np.int64)
        block = np.array(phases.block, np.int64)
        minibatch = np.array(phases.minibatch, np.int64)
        precise = minibatch < 0  # the shared expert
        gemm = width == 0
        steps = costs.steps(depth)
        # The expert of a routed task is searched for; the shared expert's is known.
        experts = len(self.load.counts)
        scan = t["search_s"] if self.scenario.switches.prefix_search else t["scan_s"] * experts / 2
        scans = (
            np.isin(kind, (1, 3, 4, 6, 9)) & ~precise
        )  # a weight gradient's expert is a quotient
        start = t["task_s"] + np.where(scans, scan, 0.0)
        busy = np.where(gemm, costs.busy(steps, precise) + start, 0.0)
        scale = width / np.where(np.isin(kind, (5,)), 4, 6)
        swiglu = np.where(precise | (not self.mxfp8), t["swiglu_task_s"], t["swiglu_mxfp8_task_s"])
        busy = np.where(gemm, busy, scale * swiglu)
        long_tail = np.isin(kind, (1, 9)) & ~precise & self.mxfp8
        tail = np.where(gemm, np.where(long_tail, t["mxfp8_tail_s"], t["tail_s"]), 0.0)
        hold = np.where(gemm, np.where(long_tail, t["mxfp8_tail_s"], t["hold_s"]), 0.0)

        expert = spread(self.load.blocks_of_expert)
        near = np.append(costs.neighbours(expert, self.scenario.config.minibatch_size // 256), 1.0)
        sharing = np.where(precise | (block < 0), 8.0, near[np.clip(block, -1, len(near) - 1)])
        h, i = self.scenario.shape.hidden_size, self.scenario.shape.intermediate_size
        n_tiles = np.where(np.isin(kind, (3, 6)), -(-h // 256), -(-i // 256))
        hbm = costs.operand_bytes(depth, sharing, n_tiles, precise) + 2.0 * 256 * 256
        size = costs.element_bytes
        copies = np.where(long_tail, size * 256 * 256, 0.0)
        # SwiGLU reads gate and up and writes hidden; backward reads one and writes two more.
        moved = np.where(kind == 5, 2 * 3 + 3 * size, 2 * 2 + size)
        hbm = np.where(gemm, hbm + copies, width * 128 * 128 * moved)
        return Tasks(
            names,
            kind.tolist(),
            busy.tolist(),
            tail.tolist(),
            hold.tolist(),
            hbm.tolist(),
            phases.waits,
            phases.signals,
            [()] * len(kind),
            minibatch.tolist(),
        )

    def launched(self, per_minibatch: int, shared: int) -> int:
        """Clusters launched: one per task of the capacity."""
        shape, config = self.scenario.shape, self.scenario.config
        share = max(2, -(-shape.ep_size * config.schedule_capacity_multiplier // 1))
        capacity = int(shape.num_tokens * shape.topk * share)
        return shared + -(-capacity // config.minibatch_size) * per_minibatch

    def surplus_s(self, launched: int, real: int) -> float:
        """Seconds to cancel the clusters that have no task."""
        if self.scenario.switches.grid_hint:
            return 0.0
        at_once = self.workers * self.table["cancels"]
        return max(0, launched - real) / at_once * self.table["cancel_s"]

    # ---- communication ----

    def pull_s(self, real: int, columns: int, load: RankLoad) -> float:
        """Seconds of a pull of 128 rows, ``real`` of them no padding: all its loads at once, then
        quantising, then its stores until they are in memory."""
        m, t = self.costs.machine, self.table
        latency = (
            load.local * m["local_latency_s"]
            + load.near * m["nvlink_latency_s"]
            + load.far * m["network_latency_s"]
        )
        seconds = latency + real * columns * 2.0 / m["sm_pull_bytes_per_s"] if real else 0.0
        if self.mxfp8:
            seconds += HALF * columns / t["quantise_elements_per_s"]
        return seconds + t["store_s"] + t["item_overhead_s"]

    def push_s(self, payload: Floats, load: RankLoad) -> Floats:
        """Seconds of a push of ``payload`` bytes: loads from the ring, then stores as they come."""
        m, t = self.costs.machine, self.table
        rate = m["sm_bytes_per_s"] / 2 if load.local == 1.0 else m["sm_push_bytes_per_s"]
        return m["local_latency_s"] + payload / rate + t["item_overhead_s"]
