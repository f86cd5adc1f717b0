"""What tasks and items cost, from the machine's rates and a program's calibration."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mok.kernels_cute.machine import CHUNK_N
from mok.kernels_cute.program import Tile, tasks_ahead
from mok.tools.simulator.constants import Table, calibration
from mok.tools.simulator.load import RankLoad
from mok.tools.simulator.machine import Machine
from mok.tools.simulator.scenario import Scenario
from mok.tools.simulator.work import Items, Pipeline, Sent, singles

Array = NDArray[np.int64]
Floats = NDArray[np.float64]


def ours_calibration(arch: str) -> str:
    """Name of the calibration of our kernels on an architecture."""
    return "ours_sm90" if arch == "sm_90a" else "ours_sm100"


K_STEP = 64  # columns of the contraction in one step of the main loop, BF16
PADDING_ROW_S = 0.4e-6  # clearing a row
STORE_STAGES = 2  # staging buffers, of CHUNK_N columns each: the default of the kernels


@dataclass(frozen=True)
class Costs:
    """Costs of one program in one scenario.

    Attributes:
        comm_sms: SMs that communicate; the others, but for ``reserved_sms``, form ``workers``
            clusters of ``cluster`` CTAs.
        precision: of the routed experts' GEMMs: on Hopper BF16.
        quantises: rows are brought to MXFP8 when they are pulled, on Hopper too.
        tile_name: key of the machine's ``tiles``.
    """

    machine: Machine
    table: Table
    tile: Tile
    tile_name: str
    precision: str
    comm_sms: int
    hidden: int
    wire_share: float
    reserved_sms: int = 0
    quantises: bool = False

    @classmethod
    def ours(cls, scenario: Scenario) -> Costs:
        hopper = scenario.machine.arch == "sm_90a"
        tile = Tile() if hopper else Tile(m=256, group_m=8)
        return cls(
            scenario.machine,
            calibration(ours_calibration(scenario.machine.arch)).replace(**scenario.overrides),
            tile,
            f"{tile.m}x{tile.down_n}",
            "bf16" if hopper else scenario.precision,
            scenario.comm_sms,
            scenario.shape.hidden_size,
            33 / 64 if scenario.mxfp8_wire and scenario.precision == "mxfp8" else 1.0,
            scenario.config.reserved_sms,
            scenario.precision == "mxfp8",
        )

    @property
    def cluster(self) -> int:
        return self.machine.cluster

    @property
    def workers(self) -> int:
        return (self.machine.num_sms - self.comm_sms - self.reserved_sms) // self.cluster

    @property
    def ahead(self) -> int:
        """Tasks of the next minibatch that go first, as kernels in BF16 have it whose rows pass the ring."""
        return tasks_ahead(not self.comm_sms, self.quantises, int(self.table["ahead"]))

    @property
    def element_bytes(self) -> float:
        """Bytes of a GEMM operand's element, scales included."""
        return 33 / 32 if self.precision == "mxfp8" else 2.0

    # ---- compute ----

    def steps(self, depth: Array) -> Array:
        """Main-loop steps of ``K_STEP`` columns for contractions over ``depth``."""
        return -(-depth // K_STEP)

    def step_flops(self) -> float:
        """FLOP of one step on the whole cluster."""
        return 2.0 * self.tile.m * self.tile.down_n * K_STEP

    def step_s(self, precise: bool) -> float:
        """Seconds of one step; ``precise``: BF16 whatever the precision."""
        precision = "bf16" if precise else self.precision
        compute_sms = self.workers * self.cluster
        rate = self.machine.tensor_rate(self.tile_name, precision)
        tensor = self.step_flops() / self.cluster / rate
        # Every CTA loads its rows of A and (in a pair, half of) B through L2.
        per_cta = self.tile.m / self.cluster + self.tile.down_n / self.cluster
        size = per_cta * K_STEP * (2.0 if precise else self.element_bytes)
        return max(tensor, size * compute_sms / self.machine["l2_bytes_per_s"])

    def busy(self, steps: Array, precise: NDArray[np.bool_]) -> Floats:
        """Seconds in the main loop."""
        step = np.where(precise, self.step_s(True), self.step_s(False))
        return steps.astype(np.float64) * step

    def neighbours(self, expert: Array, mb_blocks: int) -> Floats:
        """float64 [blocks]: row blocks that share a block's weight tiles while they are in L2."""
        if not len(expert):
            return np.ones(0)
        block = np.arange(len(expert))
        group = block % mb_blocks // self.tile.group_m
        groups = -(-mb_blocks // self.tile.group_m)
        key = (block // mb_blocks * groups + group) * (int(expert.max()) + 1) + expert
        _, where, count = np.unique(key, return_inverse=True, return_counts=True)
        return count[where].astype(np.float64)

    def operand_bytes(
        self, columns: Array, sharing: Floats, n_tiles: Array, precise: NDArray[np.bool_]
    ) -> Floats:
        """HBM bytes that a task's operands cost: A over ``columns``, B of the same depth.

        B is read once per raster group and expert. A is read once per group if the group's rows
        fit half of L2, else again for every column tile that is not in flight with it.
        """
        size = np.where(precise, 2.0, self.element_bytes)
        a = self.tile.m * columns * size
        b = self.tile.down_n * columns * size
        together = max(1.0, self.workers / self.tile.group_m)
        fits = a * self.tile.group_m <= self.machine["l2_bytes"] / 2
        reuse = np.where(fits, n_tiles, np.minimum(n_tiles, together))
        return a / np.maximum(reuse, 1) + b / np.maximum(sharing, 1)

    def hold(self, tail: Floats) -> Floats:
        """Seconds of each epilogue that keep the accumulator from the next task."""
        return tail * self.table["mxfp8_hold" if self.precision == "mxfp8" else "hold"]

    def pipeline(self) -> Pipeline:
        t = self.table
        mxfp8 = self.precision == "mxfp8"
        two = t["accumulators"] == 2 and not mxfp8
        return Pipeline(
            accumulators=2 if two else 1,
            lead_s=t["stages"] * self.step_s(False),
            fill_s=t["fill_s"],
            store_s=t["store_s"],
            draws_late=self.cluster == 2,
            staged=STORE_STAGES * CHUNK_N / self.tile.down_n,
        )

    # ---- communication ----

    @property
    def carried(self) -> bool:
        """Whether comm workers move rows by bulk copies."""
        return self.table["comm_carried"] > 0 and not self.quantises

    def crowded_s(self, hbm: list[float], used: float) -> list[float]:
        """What items of so many bytes of HBM traffic take longer, carried within the GPU, while all of the
        kernel's traffic uses this share of HBM: they wait there.
        """
        rate = self.machine["sm_bytes_per_s"]  # both ways, as is the traffic
        return (np.array(hbm) / rate * self.table["local_crowd"] * used**2).tolist()

    def copy_rounds(self) -> float:
        """Rounds of loads of an item's slowest warp, as ``kernels_cute.comm`` deals them out.

        The item's pairs of rows are cut in pieces, all first ones before the second; warp w takes pieces
        w, w + warps, …. A row's last piece may be shorter; it is copied a half at a time. With ``comm_dealt``
        0 a pair's pieces come one after the other and a short one takes two rounds, as in the layer times
        that the constants are fitted to.
        """
        dealt, warps = self.table["comm_dealt"] > 0, int(self.table["comm_warps"])
        piece, pairs = int(self.table["comm_piece_bytes"]), self.tile.comm_m // 2
        whole, rest = divmod(2 * self.hidden, piece)
        pieces = whole + (rest > 0)
        last = 1.0 if dealt and 2 * rest <= piece else 2.0
        cost = [1.0] * whole + [last] * (rest > 0)
        return max(
            sum(
                cost[unit // pairs if dealt else unit % pieces]
                for unit in range(warp, pieces * pairs, warps)
            )
            for warp in range(warps)
        )

    def item_s(self, pull: NDArray[np.bool_], real: Array, load: RankLoad) -> Floats:
        """Seconds that an item of ``tile.comm_m`` rows keeps its SM."""
        t, m = self.table, self.machine
        # However many warps: one SM moves no more than this.
        rate = np.where(pull, m["sm_pull_bytes_per_s"], m["sm_push_bytes_per_s"])
        rate = np.where(load.local == 1.0, m["sm_bytes_per_s"] / 2, rate)
        if self.carried:
            # Bulk copies of whole rows: enough of them are on their way. Within the GPU, see ``crowded_s``.
            beside = 1.0 if load.local == 1.0 else t["carry_load"]
            return real * 2.0 * self.hidden / rate * beside + t["carry_overhead_s"]
        rounds = self.copy_rounds()
        local = m["local_latency_s"] * t["comm_load"]
        near = m["nvlink_latency_s"] * t["comm_load"]
        far = m["network_latency_s"] * t["comm_load"]
        pulled = load.local * local + load.near * near + load.far * far
        one = np.where(pull, pulled, local)  # a push loads locally and does not wait for its stores
        fill = real / self.tile.comm_m
        busy = rounds * (fill * one + (1 - fill) * np.where(pull, PADDING_ROW_S, 0.0))
        busy = np.maximum(busy, real * 2.0 * self.hidden / rate)
        if self.quantises:
            # Both orientations of whatever is pulled, as upstream. Ours makes the copy of x along the
            # tokens in backward's dispatch instead of forward's: over both directions, the same work.
            elements = self.tile.comm_m * self.hidden
            busy = busy + np.where(pull, elements / t["quantise_elements_per_s"], 0.0)
        return busy + t["item_overhead_s"]

    def wires(
        self, pull: NDArray[np.bool_], payload: Floats, load: RankLoad
    ) -> tuple[Floats, Floats, Floats]:
        """Bytes on the rank's own ports for moves of ``payload`` bytes: received, sent, network.

        The peers do the same at the same time, so their pulls from this rank and their pushes to it
        are charged along with its own, scaled by how much they take.
        """
        m, mirror = self.machine, load.near_mirror
        near = payload * load.near
        data = np.where(pull, m["pull_data_wire"], m["push_data_wire"])
        reply = np.where(pull, m["pull_request_wire"], m["push_ack_wire"])
        # A pull's data is received, its requests are sent; a push the other way round.
        towards = near * (data + mirror * reply)
        back = near * (reply + mirror * data)
        net = payload * load.far * max(1.0, load.far_mirror)
        return np.where(pull, towards, back), np.where(pull, back, towards), net

    def sends(
        self, pushed: NDArray[np.bool_], block: Array, n: Array, load: RankLoad
    ) -> tuple[Floats, Floats, list[Sent]]:
        """Of tasks that push their rows where ``pushed``: payload in bytes, the least seconds that a CTA
        needs for them, and the bytes on the ports.
        """
        at = np.flatnonzero(pushed)
        columns = np.minimum(self.tile.down_n, self.hidden - n[at] * self.tile.down_n)
        payload = np.zeros(len(pushed))
        payload[at] = 2.0 * columns * load.real_rows(block[at] * self.tile.m, self.tile.m)
        rate = self.machine["sm_push_bytes_per_s"]
        if load.local == 1.0:
            rate = self.machine["sm_bytes_per_s"] / 2
        wires = self.wires(np.zeros_like(pushed), payload, load)
        sent = list(zip(*(amount.tolist() for amount in wires), strict=True))
        return payload, payload / (rate * self.cluster), sent

    def items(
        self,
        names: tuple[str, ...],
        kind: Array,
        pull: NDArray[np.bool_],
        row: Array,
        minibatch: Array,
        wait: Array,
        signal: Array,
        load: RankLoad,
        matrices: Array | int = 1,
        sums: bool = False,
    ) -> Items:
        """Items of ``tile.comm_m`` rows each; ``matrices`` of them are moved per row.

        ``sums``: a push also adds up each row's router-weight gradient, a row per warp at a time.
        """
        real = load.real_rows(row, self.tile.comm_m)
        payload = real * 2.0 * self.hidden * matrices * np.where(pull, self.wire_share, 1.0)
        rx, tx, net = self.wires(pull, payload, load)
        overhead = self.table["carry_overhead_s" if self.carried else "item_overhead_s"]
        busy = (self.item_s(pull, real, load) - overhead) * matrices + overhead
        if sums:
            rows = -(-real // int(self.table["comm_warps"]))
            busy = busy + np.where(pull, 0.0, rows * self.table["sum_row_s"])
        return Items(
            names,
            kind.tolist(),
            busy.tolist(),
            rx.tolist(),
            tx.tolist(),
            net.tolist(),
            (2 * payload).tolist(),
            singles(wait),
            singles(signal),
            minibatch.tolist(),
        )
