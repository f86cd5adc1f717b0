"""Measurements of the links of a group, one process per GPU; see ``command`` for what is printed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mok.runtime.barrier import Barrier
from mok.runtime.compile import KernelSpec, get_kernel
from mok.runtime.device import require_arch
from mok.runtime.heap import Heap
from mok.runtime.launch import launch
from mok.runtime.watchdog import Records
from mok.tools.bench.links.kernels import ITEM_ROWS
from mok.tools.bench.links.wire import CountersRefused, Traffic, read_traffic

BUFFER_BYTES = 1 << 28  # rows of each rank
TIMEOUT_NS = 2 * 10**9
ROUTINGS = ("remote", "balanced", "zipf")


@dataclass(frozen=True)
class Transfer:
    """One timed transfer.

    Attributes:
        ms: the slowest rank's mean time.
        gbytes_per_s: payload that crossed links into (pull) or out of (push) the busiest rank, per second.
        received: the same, into the rank that receives most: what a skewed push suffers from.
    """

    ms: float
    gbytes_per_s: float
    received: float


class Links:
    """Buffers and kernels of a rank. Collective to make, to use and to close."""

    def __init__(self, rank: Any) -> None:
        self.rank = rank.rank
        self.size = rank.size
        self.device = rank.device
        self.maximum = rank.maximum
        self.arch = require_arch(rank.device).arch
        self.heap = Heap(rank.group)
        self.far = self.heap.zeros(BUFFER_BYTES, torch.uint8)
        self.words = self.heap.zeros(64, torch.int32)
        self.near = torch.zeros(BUFFER_BYTES, dtype=torch.uint8, device=rank.device)
        self.records = Records(self.heap.memory, rank.size, rank.group.local_ranks)
        self.barrier = Barrier(self.heap, self.records)
        self.side = torch.cuda.Stream(rank.device)

    def close(self) -> None:
        torch.cuda.synchronize()
        dist.barrier()
        self.records.close()
        self.heap.close()

    def kernel(self, name: str, kernel: str, **config: bool) -> Any:
        factory = f"mok.tools.bench.links.kernels:{kernel}"
        return get_kernel(KernelSpec.of(name, self.arch, factory, **config))

    # ------------------------------------------------------------------ bandwidth

    def routes(self, routing: str, row_bytes: int) -> tuple[Tensor, Tensor]:
        """int32 (rank, row) of each of this rank's rows, random; only time is measured, so rows may meet."""
        count = BUFFER_BYTES // row_bytes // ITEM_ROWS * ITEM_ROWS
        made = torch.Generator().manual_seed(self.rank)
        weights = torch.ones(self.size)
        if routing == "remote":
            weights[self.rank] = 0
        elif routing == "zipf":
            weights = 1 / torch.arange(1, self.size + 1, dtype=torch.float32)
        picked = torch.multinomial(weights, count, replacement=True, generator=made)
        rows = torch.randint(0, count, (count,), generator=made)
        return picked.int().to(self.device), rows.int().to(self.device)

    def start(
        self,
        push: bool,
        signals: bool,
        sms: int,
        row_bytes: int,
        routes: tuple[Tensor, Tensor],
        ends: Tensor,
        carry: bool = False,
    ) -> None:
        """Put a transfer on the current stream."""
        launch(
            self.kernel("link_transfer", "TransferKernel", push=push, signals=signals, carry=carry),
            routes[0].data_ptr(),
            routes[1].data_ptr(),
            self.near.data_ptr(),
            self.far.base_address,
            self.words.base_address,
            ends.data_ptr(),
            self.heap.stride,
            row_bytes,
            len(routes[0]) // ITEM_ROWS,
            self.rank,
            self.size,
            sms,
            torch.cuda.current_stream().cuda_stream,
        )

    def transfer(
        self,
        push: bool,
        sms: int,
        row_bytes: int,
        routing: str = "remote",
        one_way: bool = False,
        signals: bool = False,
        repeats: int = 5,
        carry: bool = False,
    ) -> Transfer:
        """Time a transfer; ``one_way``: only rank 0 moves rows."""
        routes = self.routes(routing, row_bytes)
        ends = torch.zeros(sms, dtype=torch.int64, device=self.device)
        active = self.rank == 0 or not one_way
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def call() -> None:
            if active:
                self.start(push, signals, sms, row_bytes, routes, ends, carry)

        for _ in range(2):
            call()
        torch.cuda.synchronize()
        self.barrier()
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.cuda.synchronize()
        dist.barrier()
        ms = self.maximum(begin.elapsed_time(end) / repeats if active else 0.0)
        sent = torch.bincount(routes[0].cpu().long(), minlength=self.size)
        table = [torch.zeros_like(sent) for _ in range(self.size)]
        dist.all_gather(table, sent if active else torch.zeros_like(sent))
        matrix = torch.stack(table) * row_bytes  # [mover, other]
        matrix.fill_diagonal_(0)
        own, other = matrix.sum(1).max().item(), matrix.sum(0).max().item()
        return Transfer(ms, own / ms / 1e6, other / ms / 1e6)

    # ------------------------------------------------------------------ signals

    def ping_local(self, rounds: int = 1000) -> float:
        """Microseconds from a release on one SM to the acquire that sees it on another."""
        words = torch.zeros(64, dtype=torch.int32, device=self.device)
        times = torch.zeros(2, rounds, 2, dtype=torch.int64, device=self.device)
        base = words.data_ptr()
        stream = torch.cuda.current_stream().cuda_stream
        launch(
            self.kernel("link_ping", "PingKernel"),
            base, base + 128, 128, 1, rounds, times.data_ptr(), TIMEOUT_NS, 2, stream,
        )  # fmt: skip
        torch.cuda.synchronize()
        return _half_round_trip(times[0].cpu())

    def ping_peer(self, rounds: int = 1000) -> tuple[float, float]:
        """Between ranks 0 and 1: (microseconds one way, their clocks' difference in microseconds)."""
        self.words.local.zero_()
        torch.cuda.synchronize()
        dist.barrier()
        times = torch.zeros(rounds, 2, dtype=torch.int64, device=self.device)
        if self.rank < 2:
            launch(
                self.kernel("link_ping", "PingKernel"),
                self.words.address(self.rank) + 128, self.words.address(1 - self.rank) + 128,
                0, int(self.rank == 0), rounds, times.data_ptr(), TIMEOUT_NS, 1,
                torch.cuda.current_stream().cuda_stream,
            )  # fmt: skip
        torch.cuda.synchronize()
        both = [torch.zeros(rounds, 2, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(both, times.cpu())
        (sent, seen), (answered, asked) = both[0].T.double(), both[1].T.double()
        offset = ((asked - sent) + (answered - seen)) / 2
        return _half_round_trip(both[0]), float(offset.median()) / 1e3

    def barrier_us(self, repeats: int = 200) -> float:
        """Microseconds of a device barrier in a row of them, launch included."""
        for _ in range(10):
            self.barrier()
        torch.cuda.synchronize()
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            self.barrier()
        end.record()
        torch.cuda.synchronize()
        return self.maximum(1e3 * begin.elapsed_time(end) / repeats)

    def usable_us(self, push: bool, sms: int, row_bytes: int, repeats: int = 9) -> list[float]:
        """Microseconds from the last byte to the first reader that may use it, of each repeat.

        Pull: on this GPU. Push: from the senders to this rank, clocks aligned by ``ping_peer``.
        """
        if push and self.size != 2:
            raise ValueError(f"clocks are compared between two ranks; found {self.size}")
        offset = self.ping_peer()[1] if push else 0.0
        routes = self.routes("remote", row_bytes)
        items = len(routes[0]) // ITEM_ROWS
        found = []
        for _ in range(repeats):
            self.words.local.zero_()
            ends = torch.zeros(sms, dtype=torch.int64, device=self.device)
            came = torch.zeros(1, dtype=torch.int64, device=self.device)
            torch.cuda.synchronize()
            dist.barrier()
            sender = 1 - self.rank if push else self.rank
            launch(
                self.kernel("link_ready", "ReadyKernel"),
                self.words.address(self.rank), items, sender, 1, came.data_ptr(), TIMEOUT_NS,
                self.side.cuda_stream,
            )  # fmt: skip
            self.barrier()
            self.start(push, True, sms, row_bytes, routes, ends)
            torch.cuda.synchronize()
            last = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(last, ends.max().view(1).cpu())
            if int(came) == 0:
                raise RuntimeError("rows did not come within two seconds")
            # Rank 1's clock is ``offset`` ahead of rank 0's.
            shift = offset if push and self.rank == 1 else -offset if push else 0.0
            found.append((int(came) - int(last[sender])) / 1e3 - shift)
        return found

    # ------------------------------------------------------------------ bytes on the wire

    def tile_traffic(self, push: bool, repeats: int = 20) -> Traffic | str:
        """Link traffic of rank 0 for a 256 x 256 BF16 tile (131,072 bytes), or why it is not known."""
        row_bytes, sms = 512, 16
        gpu = torch.cuda.get_device_properties(self.device)
        name = str(getattr(gpu, "uuid", self.device.index))
        name = name if name.isdigit() or name.startswith("GPU-") else f"GPU-{name}"
        routes = self.routes("remote", row_bytes)
        ends = torch.zeros(sms, dtype=torch.int64, device=self.device)
        result: Traffic | str = "only rank 0 reads"
        before = None
        if self.rank == 0:
            try:
                before = read_traffic(name)
                for _ in range(repeats):
                    self.start(push, False, sms, row_bytes, routes, ends)
                torch.cuda.synchronize()
                moved = read_traffic(name) - before
                tiles = repeats * len(routes[0]) / 256
                result = Traffic(*(round(v / tiles) for v in vars(moved).values()))
            except CountersRefused as error:
                result = str(error)
        dist.barrier()
        return result


def _half_round_trip(times: Tensor) -> float:
    """Median of half the time from sending to seeing the answer, in microseconds."""
    sent, seen = times.T.tolist()
    return statistics.median((b - a) / 2e3 for a, b in zip(sent[1:], seen[1:], strict=True))


def median_of_ranks(values: Sequence[float]) -> float:
    """The largest of the ranks' medians."""
    seen = torch.tensor([statistics.median(values)])
    dist.all_reduce(seen, op=dist.ReduceOp.MAX)
    return float(seen)
