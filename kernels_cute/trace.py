"""What a kernel built with ``trace=True`` leaves behind. Plain Python, shared by kernels and host.

A buffer in global memory, little-endian::

    int32 header[HEADER_WORDS]     MAGIC, VERSION, program, rank, workers, capacity, cluster, 0…
    int32 counts[workers]          records that each worker made, padded to a multiple of 4 words
    record records[workers][capacity]

A *worker* is a CTA; it owns its row of records, so that no two CTAs ever write the same line and no
atomic is needed. ``counts`` may exceed ``capacity``: what came later is lost, and the reader says so.
``cluster`` CTAs work on one compute task, and each records it. A record is 48 bytes::

    int64 begin     globaltimer, nanoseconds
    int64 end
    int32 sm        SM of the CTA
    int32 kind      ROLE_SHIFT bits of the task's kind, then its role
    int32 ticket    number of the task or item
    int32 minibatch
    int32 expert    local expert; -1 for an item
    int32 block     row block of the task, first row of the item
    int32 n         column tile; -1 for an item
    int32 0

Tasks of the shared expert have no minibatch and no expert; the reader says -1.

``begin`` is taken when the task's waits are over (load warp, comm worker), ``end`` when its results are in
memory and signalled, or, where nobody waits for them, on their way there. So the records of one CTA overlap: the next task loads while the
last one's results leave. On the globaltimer all SMs of a GPU agree; between GPUs only order within a
rank means anything.
"""

MAGIC = 0x544B4F4D  # "MOKT"
VERSION = 2
"""Of this layout and of the task programs' kinds: raise it when either changes."""

HEADER_WORDS = 16
H_MAGIC, H_VERSION, H_PROGRAM, H_RANK, H_WORKERS, H_CAPACITY, H_CLUSTER = range(7)
RECORD_BYTES = 48
ROLE_SHIFT = 8

FORWARD, BACKWARD, RECOMPUTE = 0, 1, 2
COMPUTE, COMM = 0, 1
"""Roles."""

PROGRAMS = ("forward", "backward", "recompute")

_FORWARD_NAMES = {
    COMPUTE: {1: "shared up", 2: "shared down", 3: "up", 4: "down"},
    COMM: {1: "dispatch", 2: "combine"},
}
_WEIGHTS = {
    1: "replay",
    2: "dgrad down",
    3: "dgrad up",
    4: "wgrad down",
    5: "wgrad gate",
    6: "wgrad up",
}
NAMES: dict[int, dict[int, dict[int, str]]] = {
    FORWARD: _FORWARD_NAMES,
    RECOMPUTE: _FORWARD_NAMES,
    BACKWARD: {
        COMPUTE: _WEIGHTS
        | {8 + kind: f"shared {name}" for kind, name in _WEIGHTS.items() if kind > 1},
        COMM: {1: "dispatch", 2: "push"},
    },
}
"""Names of kinds by program and role; the numbers are those of ``program`` and ``backward.program``."""


def count_words(workers: int) -> int:
    """Words of ``counts``, padded so that records begin 16-byte aligned."""
    return (workers + 3) // 4 * 4


def buffer_bytes(workers: int, capacity: int) -> int:
    """Bytes of a buffer for ``workers`` CTAs of up to ``capacity`` records each."""
    return 4 * (HEADER_WORDS + count_words(workers)) + RECORD_BYTES * workers * capacity
