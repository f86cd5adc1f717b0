"""Reads what kernels left behind when a wait expired or an input was bad, and raises it.

The words lie in pinned host memory, one block per rank: looking costs no call to the driver and
works while a kernel hangs and after one has trapped.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from mok.errors import CapacityError, GroupError, MokError, MokTimeoutError, RouteError
from mok.kernels_cute import records
from mok.kernels_cute.schedule.plan import (
    RECORD_WORDS,
    ROUTE_OUT_OF_RANGE,
    ROWS_OUT_OF_CAPACITY,
)
from mok.runtime.memory import Memory

_WAIT, _ROUTE = records.WAIT, records.ROUTE
_STATE = records.BARRIER + records.BARRIER_STATE


class Records:
    """The error words of this process' ranks.

    Args:
        memory: where kernels run.
        size: ranks of the group.
        local_ranks: ranks of this process.
    """

    def __init__(self, memory: Memory, size: int, local_ranks: Sequence[int]) -> None:
        self.size = size
        self.local_ranks = tuple(local_ranks)
        self._memory = memory
        self._words = records.record_words(size)
        self._starts = range(0, self._words * len(self.local_ranks), self._words)
        self._bytes = 4 * self._words * len(self.local_ranks)
        self._start = memory.pin(self._bytes)
        self._view = (ctypes.c_int32 * (self._words * len(self.local_ranks))).from_address(
            self._start
        )
        self.closed = False

    def _base(self, rank: int) -> int:
        return self.local_ranks.index(rank) * self._words

    def wait_address(self, rank: int) -> int:
        """Where a megakernel notes a wait that expired: int32 [16]."""
        return self._start + 4 * (self._base(rank) + records.WAIT)

    def route_address(self, rank: int) -> int:
        """Where the schedule notes a bad id: int32 [8]."""
        return self._start + 4 * (self._base(rank) + records.ROUTE)

    def barrier_address(self, rank: int) -> int:
        """Where the device barrier notes who is missing: int32 [8 + ranks]."""
        return self._start + 4 * (self._base(rank) + records.BARRIER)

    def words(self, rank: int) -> list[int]:
        """All words of a rank, now."""
        base = self._base(rank)
        return list(self._view[base : base + self._words])

    def barrier_view(self, rank: int) -> ctypes.Array[ctypes.c_int32]:
        """The barrier's words of a rank, to write: what the kernel does, for host memory."""
        count = self._words - records.BARRIER
        return (ctypes.c_int32 * count).from_address(self.barrier_address(rank))

    def any(self) -> bool:
        """Whether anything was noted. Cheap enough for every call."""
        view = self._view
        for i in self._starts:  # noqa: SIM110 - a loop is faster, and this runs in every call
            if view[i + _WAIT] or view[i + _ROUTE] or view[i + _STATE]:
                return True
        return False

    def broken(self) -> bool:
        """Whether a wait expired or the group was poisoned: no further call can succeed."""
        view = self._view
        for i in self._starts:  # noqa: SIM110
            if view[i + _WAIT] or view[i + _STATE]:
                return True
        return False

    def clear(self) -> None:
        """Forget what was noted (bad ids are forgivable; a poisoned group stays poisoned)."""
        ctypes.memset(self._start, 0, self._bytes)

    def clear_routes(self) -> None:
        for rank in self.local_ranks:
            ctypes.memset(self.route_address(rank), 0, 4 * RECORD_WORDS)

    def check(self, num_experts: int = 0) -> None:
        """Raise what was noted, if anything.

        Raises:
            MokTimeoutError: a wait expired; a table says who waited for whom.
            GroupError: another rank gave up and poisoned the group.
            RouteError: an expert id is out of range. Forgotten once raised.
            CapacityError: more rows than the workspace holds. Forgotten once raised.
        """
        if self.any():
            raise self.error(num_experts)

    def error(self, num_experts: int = 0) -> MokError:
        """The error for what was noted, the most telling first."""
        blocks = {rank: self.words(rank) for rank in self.local_ranks}
        waits = {r: w[: records.ROUTE] for r, w in blocks.items() if w[records.WAIT]}
        if waits:
            return _wait_error(waits)
        barriers = {r: w[records.BARRIER :] for r, w in blocks.items()}
        for rank, words in barriers.items():
            if words[records.BARRIER_STATE] == records.EXPIRED:
                return _barrier_error(rank, words, self.size)
        for rank, words in barriers.items():
            if words[records.BARRIER_STATE] == records.POISONED:
                who, missing = records.poisoner(words[records.BARRIER_POISONER])
                waited = f" waiting for rank {missing}" if missing >= 0 else ""
                rows = _missing(rank, words, self.size)
                return GroupError(
                    "A group works until one of its ranks gives up waiting",
                    f"rank {who} gave up{waited}; rank {rank} stopped at barrier "
                    f"{words[records.BARRIER_EPOCH]}" + (f"\n{table(rows)}\n" if rows else ""),
                    "See that rank's error for who was missing, then close this group and build a "
                    "new one.",
                )
        self.clear_routes()
        for words in blocks.values():
            route = words[records.ROUTE : records.ROUTE + RECORD_WORDS]
            if route[0]:
                return _route_error(route)
        return MokError("A kernel left an unknown record", str(blocks))

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._view = (ctypes.c_int32 * 0)()
            self._starts = range(0)
            self._memory.unpin(self._start, self._bytes)


def _name(names: Sequence[str], index: int) -> str:
    return names[index] if 0 <= index < len(names) else str(index)


def table(rows: Sequence[Sequence[object]]) -> str:
    """Rows of cells as aligned text, the first row the heading."""
    text = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in text) for i in range(len(text[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in text
    )


def _wait_error(waits: dict[int, list[int]]) -> MokTimeoutError:
    rows: list[list[object]] = [
        ["rank", "SM", "role", "task", "counter", "index", "value", "awaited"]
    ]
    for words in waits.values():
        found = dict(zip(records.WAIT_FIELDS, words, strict=False))
        rows.append(
            [
                found["rank"],
                found["sm"],
                _name(records.WAIT_ROLES, found["role"]),
                found["task"],
                _name(records.WAIT_COUNTERS, found["counter"]),
                found["index"],
                found["value"],
                found["awaited"],
            ]
        )
    return MokTimeoutError(
        "Every wait inside a kernel must end within the time limit",
        "\n" + table(rows) + "\n",
        "This is a bug of the kernel, or SMs were withheld from it (see Config.reserved_sms). The "
        "CUDA context is lost: restart the process.",
    )


def _missing(rank: int, words: list[int], size: int) -> list[list[object]]:
    """The table of the ranks that had not come to this rank's barrier; empty if none is known."""
    rows: list[list[object]] = [["rank", "waited for", "last came to", "awaited"]]
    for other in range(size):
        seen, epoch = words[records.BARRIER_MISSING + other], words[records.BARRIER_EPOCH]
        if seen:
            rows.append(
                [f"rank {rank}", f"rank {other}", f"barrier {seen - 1}", f"barrier {epoch}"]
            )
    return rows if len(rows) > 1 else []


def _barrier_error(rank: int, words: list[int], size: int) -> MokTimeoutError:
    rows = _missing(rank, words, size)
    names = ", ".join(str(row[1]) for row in rows[1:])
    found = f"{names} did not\n{table(rows)}\n" if rows else "a signal did not come"
    return MokTimeoutError(
        "Every rank must come to the device barrier within the time limit",
        found,
        "See whether that process runs, failed earlier, or makes other calls; then close this "
        "group and build a new one.",
    )


def _route_error(words: list[int]) -> MokError:
    code, rank, token, k, low, high, limit = words[:7]
    value = (high << 32) | (low & 0xFFFFFFFF)
    if code == ROUTE_OUT_OF_RANGE:
        return RouteError(
            f"Expert ids must be -1 (no route) or in 0…{limit - 1}",
            f"{value} for token {token}, k {k} of rank {rank}",
            "The route was dropped. Config(debug=True) checks ids before the launch.",
        )
    if code == ROWS_OUT_OF_CAPACITY:
        return CapacityError(
            f"Rank {rank}'s rows must fit its workspace ({limit} rows)",
            f"{value} rows",
            "Some rank has more tokens than max_tokens; the result of this call is not valid.",
        )
    return MokError("The schedule left an unknown record", str(words))
