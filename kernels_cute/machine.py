"""The two machines in numbers, and what is refused before anything is compiled.

Host-side Python without the kernel language, so that planning works where it is not installed.
"""

from dataclasses import dataclass

from mok.errors import ResourceError

SMEM_BYTES = 227 * 1024  # what one CTA can have, on sm_90 and on sm_100
CONTROL_BYTES = (
    1024  # barriers, queue entries, single words: in front of the 1024-byte aligned buffers
)
CHUNK_N = 64  # columns of a staging buffer
TILE_K = 64  # BF16 elements of a 128-byte row


@dataclass(frozen=True)
class Machine:
    """What a mainloop is built for.

    Attributes:
        ctas: CTAs that work on one task: a cluster.
        pairs: whether the BF16 kernels have builds whose clusters are two CTAs with a task each (``pairs``).
        carry: the default of the kernels' argument.
        pushes_forward: whether forward's rings have builds whose tasks send their results themselves (``push``),
            which then are the default.
        tile_m: rows of a task; each CTA holds 128 of them.
        tmem_columns: columns of tensor memory, 0 where accumulators live in registers.
        acc_stages: accumulators in tensor memory.
        stages, group_m: defaults of the kernels' arguments.
        least_stages: with which loads and MMAs do not wait for each other.
        scaled_stages: the default of ``stages`` with block scales; 0 where the MMA takes none.
        scheduling: ways to get the next task, the default first.
    """

    name: str
    ctas: int
    pairs: bool
    carry: bool
    pushes_forward: bool
    tile_m: int
    tmem_columns: int
    acc_stages: int
    stages: int
    least_stages: int
    scaled_stages: int
    group_m: int
    scheduling: tuple[str, ...]

    def stage_bytes(self, tile_n: int, scaled: bool = False) -> int:
        """Shared memory of one A/B stage per CTA: 128 rows of A, its share of B's tile_n rows.

        ``scaled``: with the scales of its rows of A and of all rows of B, four bytes each.
        """
        scales = 4 * (128 + tile_n) if scaled else 0
        return (128 + tile_n // self.ctas) * TILE_K * 2 + scales

    def smem_bytes(self, tile_n: int, stages: int, store_stages: int, scaled: bool = False) -> int:
        """Shared memory of a CTA."""
        staging = store_stages * 128 * CHUNK_N * 2
        return CONTROL_BYTES + stages * self.stage_bytes(tile_n, scaled) + staging

    def cluster(self, pair: bool) -> int:
        """CTAs of a cluster."""
        return 2 if pair else self.ctas


HOPPER = Machine("Hopper", 1, True, True, True, 128, 0, 0, 4, 3, 0, 16, ("tickets",))
BLACKWELL = Machine(
    "Blackwell", 2, False, False, False, 256, 512, 2, 6, 2, 5, 8, ("clc", "tickets")
)
MACHINES = {"sm_90a": HOPPER, "sm_100a": BLACKWELL, "sm_103a": BLACKWELL}


def machine_of(arch: str) -> Machine:
    """The machine of an architecture.

    Raises:
        ResourceError: there are no kernels for it.
    """
    if arch not in MACHINES:
        raise ResourceError(
            f"arch must be one of {', '.join(MACHINES)}",
            repr(arch),
            "Use a Hopper or Blackwell GPU.",
        )
    return MACHINES[arch]


def forward_pushes(arch: str, direct: bool, push: bool | None = None) -> bool:
    """Whether forward's tasks send their results themselves; ``push``: what was asked for, None for the default.

    Raises:
        ResourceError: there are no kernels for ``arch``.
    """
    return push is not False and not direct and machine_of(arch).pushes_forward


def check_tile(
    arch: str, tile_n: int, stages: int, store_stages: int = 2, scaled: bool = False
) -> None:
    """Refuse a tile and its stages where they do not fit; ``scaled``: with block scales.

    Raises:
        ResourceError: names the budget that breaks.
    """
    machine = machine_of(arch)
    if tile_n not in (128, 256):
        raise ResourceError(
            f"tile_n must be 128 or 256: two halves of whole {CHUNK_N}-column chunks, at most 256",
            tile_n,
        )
    # Hopper's gather hands a stage over when the next one is on its way, and the MMA warps let go of one when
    # the next has come: with two stages they wait for each other. Blackwell's loads need a stage of their own.
    if stages < machine.least_stages:
        raise ResourceError(f"stages must be at least {machine.least_stages} on {arch}", stages)
    columns = machine.acc_stages * tile_n
    if columns > machine.tmem_columns:
        raise ResourceError(
            f"{machine.acc_stages} accumulators of tile_n columns must fit {machine.tmem_columns} "
            "columns of tensor memory",
            columns,
            "Use a smaller tile_n.",
        )
    if scaled and tile_n != 256:
        raise ResourceError("tile_n must be 256 with block scales", tile_n)
    need = machine.smem_bytes(tile_n, stages, store_stages, scaled)
    if need > SMEM_BYTES:
        free = SMEM_BYTES - machine.smem_bytes(tile_n, 0, store_stages)
        most = free // machine.stage_bytes(tile_n, scaled)
        raise ResourceError(
            f"stages and staging must fit {SMEM_BYTES} bytes of shared memory per CTA on {arch}",
            f"{need} bytes for {stages} stages of {machine.stage_bytes(tile_n, scaled)} and {store_stages} "
            f"staging buffers of {128 * CHUNK_N * 2}",
            f"Use at most {most} stages with tile_n = {tile_n}.",
        )


def check_scheduling(arch: str, scheduling: str | None) -> str:
    """The way to get the next task: the machine's default for None.

    Raises:
        ResourceError: the machine does not have it.
    """
    known = machine_of(arch).scheduling
    if scheduling is None:
        return known[0]
    if scheduling not in known:
        raise ResourceError(
            f"scheduling on {arch} must be one of {', '.join(known)}",
            repr(scheduling),
            "Cluster Launch Control came with Blackwell.",
        )
    return scheduling


def works_in_pairs(
    arch: str, num_sms: int, reserved_sms: int, num_comm_ctas: int, mxfp8: bool = False
) -> bool:
    """Whether a launch takes the build for pairs of CTAs; the other one gives the same bits.

    A pair needs two SMs near each other. Other kernels may hold ``reserved_sms`` of the device's ``num_sms`` for
    as long as they like, in the worst case one of each of as many pairs. The launch must be able to run to its end
    on the others: all comm workers and two compute CTAs at once. Comm workers of an odd number stay single, too.
    """
    whole = num_sms // 2 - reserved_sms
    needed = num_comm_ctas // 2 + 1
    return machine_of(arch).pairs and not mxfp8 and num_comm_ctas % 2 == 0 and needed <= whole


PAIR_STEPS = 24  # Qwen3-30B has 21, OLMoE 24, Mixtral 84


def pays_backward(hidden: int, intermediate: int) -> bool:
    """Whether pairs make backward faster: where a task has ``PAIR_STEPS`` K steps or more on average.

    The two CTAs of a pair wait for each other at each task, which short ones do not earn back: - 1.5 to + 0.5 %
    on Qwen3-30B, + 1.5 % on OLMoE, + 2.5 % on DeepSeek-V3; in forward + 0 to 3 % (docs/measurements/h200.md).
    """
    # Per row block: I/128 tasks of H/64 steps and H/256 of I/64.
    steps = 3 * hidden * intermediate / (64 * (2 * intermediate + hidden))
    return steps >= PAIR_STEPS


def launch_grid(
    arch: str,
    scheduling: str | None,
    num_sms: int,
    num_comm_ctas: int,
    tasks: int,
    pair: bool = False,
) -> int:
    """CTAs to launch for about ``tasks`` compute tasks (a hint: any grid computes everything).

    ``pair``: for the build that works in pairs.

    With launch control one cluster per task, so that clusters which are not running can be cancelled or,
    when someone else needs the SMs, started later; otherwise what fits ``num_sms`` at once.
    """
    machine = machine_of(arch)
    cluster = machine.cluster(pair)
    clusters = -(-machine.ctas * max(1, tasks) // cluster)
    wanted = num_comm_ctas + cluster * clusters
    if check_scheduling(arch, scheduling) == "clc":
        return wanted
    return min(wanted, num_sms // cluster * cluster)


def check_launch(
    arch: str,
    grid: int,
    num_comm_ctas: int,
    num_sms: int,
    minibatch: int,
    macrobatch: int,
    pair: bool = False,
) -> None:
    """Refuse a launch that could not run to its end, or whose sizes do not match the tile.

    Args:
        grid: CTAs. num_comm_ctas: of these, comm workers. num_sms: usable SMs.
        pair: of the build that works in pairs.

    Raises:
        ResourceError: the rule, the value and what to change.
    """
    machine = machine_of(arch)
    cluster = machine.cluster(pair)
    for name, value in (("grid", grid), ("num_comm_ctas", num_comm_ctas)):
        if value % cluster:
            raise ResourceError(
                f"{name} must be a multiple of the cluster's {cluster} CTAs on {arch}",
                value,
                f"Use {-(-value // cluster) * cluster}.",
            )
    for name, value in (("the grid", grid), ("the usable SMs", num_sms)):
        if num_comm_ctas + cluster > value:
            raise ResourceError(
                f"comm workers and one compute cluster of {cluster} must fit {name}",
                f"{num_comm_ctas} + {cluster} > {value}",
                "Use fewer comm SMs, or free SMs.",
            )
    if minibatch % machine.tile_m or macrobatch % max(minibatch, 1) or minibatch <= 0:
        raise ResourceError(
            f"minibatch must be a positive multiple of {machine.tile_m} on {arch}, and divide macrobatch",
            f"minibatch {minibatch}, macrobatch {macrobatch}",
        )
