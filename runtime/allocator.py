"""Where a symmetric heap's blocks lie."""

from __future__ import annotations

import bisect

from mok.errors import CapacityError, ShapeError

ALIGNMENT = 256


class Allocator:
    """Offsets within [0, size): first fit, 256-byte aligned, neighbours merged when freed.

    Deterministic, so that ranks which make the same calls get the same offsets.
    """

    def __init__(self) -> None:
        self.size = 0
        self.used = 0
        self._free: list[tuple[int, int]] = []  # (start, end), sorted, never touching
        self._taken: dict[int, int] = {}

    def grow(self, size: int) -> None:
        """Add [self.size, size)."""
        start, self.size = self.size, size
        self._insert(start, size)

    def missing(self, size: int) -> int:
        """How much ``grow`` must add before ``size`` bytes fit; 0 if they do."""
        size = align(size, ALIGNMENT)
        if any(end - start >= size for start, end in self._free):
            return 0
        tail = 0
        if self._free and self._free[-1][1] == self.size:
            tail = self._free[-1][1] - self._free[-1][0]
        return size - tail

    def take(self, size: int) -> int:
        """The offset of a new block; the caller has made sure that it fits."""
        size = max(align(size, ALIGNMENT), ALIGNMENT)
        for i, (start, end) in enumerate(self._free):
            if end - start >= size:
                if end - start == size:
                    del self._free[i]
                else:
                    self._free[i] = (start + size, end)
                self._taken[start] = size
                self.used += size
                return start
        raise CapacityError(f"{size} bytes must fit the heap", f"{self.size - self.used} are free")

    def give(self, offset: int) -> None:
        """Free a block by its offset."""
        size = self._taken.pop(offset, None)
        if size is None:
            raise ShapeError("Only a block that is in use can be freed", f"offset {offset}")
        self.used -= size
        self._insert(offset, offset + size)

    def _insert(self, start: int, end: int) -> None:
        i = bisect.bisect(self._free, (start, end))
        if i < len(self._free) and self._free[i][0] == end:
            end = self._free.pop(i)[1]
        if i > 0 and self._free[i - 1][1] == start:
            start = self._free.pop(i - 1)[0]
            i -= 1
        self._free.insert(i, (start, end))


def align(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
