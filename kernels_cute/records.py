"""What kernels leave behind when something is wrong, as int32 words that the host reads.

One block per rank, in pinned host memory, so that it outlives a trap and is read without any call to
the driver. All zero: nothing happened. Plain Python, shared by kernels and host.
"""

WAIT = 0  # sync.RECORD_WORDS words: a wait inside a megakernel expired
TRACE = 10  # of the same words: int64 addresses of trace buffers (0: none), by program (``trace``)
ROUTE = 16  # schedule.plan.RECORD_WORDS words: a bad id, or more rows than the workspace holds
BARRIER = 24  # the words below, then one per rank
BARRIER_STATE, BARRIER_EPOCH, BARRIER_POISONER = 0, 1, 2
BARRIER_MISSING = (
    8  # [ranks]: 1 + (what rank r's word showed when waiting ended), 0 where it had come
)

EXPIRED, POISONED = 1, 2
"""BARRIER_STATE: this rank's own wait expired; another rank had given up before."""

MISSING_SHIFT = 16
"""The poison word, also BARRIER_POISONER: 1 + the rank that gave up, and above this bit 1 + one that it
waited for (0 where it waited for no rank)."""


def poison_value(rank: int, missing: int = -1) -> int:
    """The poison word of a rank that gave up waiting for another."""
    return rank + 1 + ((missing + 1) << MISSING_SHIFT)


def poisoner(value: int) -> tuple[int, int]:
    """(rank that gave up, rank that it waited for or -1) of a poison word."""
    return (value & ((1 << MISSING_SHIFT) - 1)) - 1, (value >> MISSING_SHIFT) - 1


def record_words(ranks: int) -> int:
    """Words of a block, rounded up to 64 bytes."""
    return (BARRIER + BARRIER_MISSING + ranks + 15) // 16 * 16


WAIT_FIELDS = (
    "state", "kind", "rank", "sm", "role", "task", "counter", "index", "value", "awaited",
)  # fmt: skip
WAIT_ROLES = ("load", "comm", "scheduler")
WAIT_COUNTERS = (
    "x_ready", "y_ready", "y_free", "hidden_ready", "shared_hidden_ready",  # forward
    "dispatch", "push", "dx", "free", "replay", "ddown", "group", "shared",  # backward
)  # fmt: skip
