"""Which clusters are resident: launch order, launch cancellation, and a competing grid.

A grid of higher priority evicts nobody.  While its blocks wait for SMs, launch queries are refused
and no cluster of ours starts; every SM that our clusters leave is its own until its block ends.
Then the clusters that still wait are launched.
"""

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mok.tools.emulator import layout as L
from mok.tools.emulator.errors import EmulatorError

if TYPE_CHECKING:
    from mok.tools.emulator.resident import Cluster

REFUSALS = 0.05  # launch queries that the adversarial machine refuses with clusters pending
ARRIVAL, DURATION = (8, 18), (6, 15)  # what the seed chooses: warp instructions, log2 limits


@dataclass(frozen=True)
class Competitor:
    """A grid of higher priority that wants SMs while a kernel runs.

    Args:
        sms: blocks of the competing grid; each needs one SM for itself.
        at: warp instructions after which it arrives (0: before the kernel starts); None: the seed
            chooses, 2**8 to 2**18.
        steps: warp instructions that each of its blocks runs; None: the seed chooses.
        kernel: only launches whose kernel's name contains this text meet it.
    """

    sms: int
    at: int | None = None
    steps: int | None = None
    kernel: str = ""

    def __post_init__(self) -> None:
        for name in ("sms", "at", "steps"):
            value = getattr(self, name)
            if value is not None and value < (1 if name == "sms" else 0):
                raise EmulatorError(f"a competing grid's {name} may not be less", value)


@dataclass
class Preemption:
    """What a competing grid met in one launch.  Moments in warp instructions of the launch."""

    kernel: str
    arrived: int | None = None
    ended: int | None = None
    blocks: int = 0  # of it that have begun; one may take the SM of one that has ended
    taken: set[int] = field(default_factory=set)  # SMs it ran on
    left: int = 0  # SMs among them that a cluster of ours had left
    refused: int = 0  # launch queries refused on its account
    relaunched: int = 0  # clusters started after it took its first SM


class Rival:
    """A competing grid at run time."""

    def __init__(self, competitor: Competitor, seed: int | None, kernel: str) -> None:
        self.random = random.Random(f"{seed} {competitor}")
        at = competitor.at
        self.at = self.draw(*ARRIVAL) if at is None else at
        self.steps = competitor.steps
        self.waiting = 0  # blocks without an SM
        self.running: dict[int, int] = {}  # SM: step at which its block ends
        self.blocks = competitor.sms
        self.record = Preemption(kernel)
        self.used: set[int] = set()  # SMs on which a cluster of ours has run

    def draw(self, low: int, high: int) -> int:
        """A number whose logarithm is uniform between these powers of two."""
        return int(2 ** self.random.uniform(low, high))

    @property
    def active(self) -> bool:
        return bool(self.waiting or self.running)

    def tick(self, now: int, free: list[int]) -> bool:
        """Arrives, ends blocks and takes free SMs.  True when an SM has changed hands."""
        changed = False
        if self.record.arrived is None and now >= self.at:
            self.record.arrived, self.waiting = now, self.blocks
        for sm in [s for s, end in self.running.items() if end <= now]:
            del self.running[sm]
            free.append(sm)
            changed = True
        while self.waiting and free:
            sm = free.pop(self.random.randrange(len(free)))
            length = self.draw(*DURATION) if self.steps is None else self.steps
            self.running[sm] = now + length
            self.waiting -= 1
            self.record.blocks += 1
            if sm not in self.record.taken and sm in self.used:
                self.record.left += 1
            self.record.taken.add(sm)
            changed = True
        if changed and not self.active:
            self.record.ended = now
        return changed

    def hurry(self, now: int) -> bool:
        """Time passes while our warps can only wait: the next block ends, or the grid arrives."""
        if self.running:
            sm = min(self.running, key=lambda s: self.running[s])
            self.running[sm] = now
            return True
        return False


class Residency:
    """Start, cancellation and end of a grid's clusters; mixed into Machine."""

    rival: Rival | None

    def reset_residency(self: Any, competitor: Competitor | None) -> None:
        """Nothing has started yet."""
        self.waiting_clusters = list(range(self.num_clusters))
        self.rival = None
        self.preemption = None
        if competitor is not None and competitor.kernel in self.request.kernel:
            if competitor.sms > self.num_sms:
                raise EmulatorError(
                    f"a competing grid's blocks must fit {self.num_sms} SMs", competitor.sms
                )
            self.rival = Rival(competitor, self.seed, self.request.kernel)
            self.preemption = self.rival.record

    def sms_of(self: Any, cluster: "Cluster") -> set[int]:
        """SMs of a cluster's slot."""
        return {cta.index % self.num_sms for cta in cluster.ctas}

    def place_clusters(self: Any) -> bool:
        """Gives SMs to the competing grid and to our waiting clusters.  True when any has started."""
        rival = self.rival
        if rival is not None:
            busy = {sm for c in self.clusters if c.live for sm in self.sms_of(c)}
            free = [s for s in range(self.num_sms) if s not in busy and s not in rival.running]
            rival.tick(int(self.x[L.X_STEPS]), free)
            if rival.waiting:
                return False
        started = False
        for cluster in self.clusters:
            if not self.waiting_clusters:
                break
            if cluster.live or (rival is not None and self.sms_of(cluster) & rival.running.keys()):
                continue
            self.start_cluster(cluster, self.waiting_clusters.pop(0))
            started = True
            if rival is not None:
                rival.used |= self.sms_of(cluster)
                rival.record.relaunched += bool(rival.record.taken)
        return started

    def cancel_cluster(self: Any) -> int | None:
        """Number of a pending cluster that a launch query takes over, or None when it is refused.

        With a seed the cluster is any of those that wait: PTX states no order.
        """
        if not self.waiting_clusters:
            return None
        if self.rival is not None and self.rival.waiting:
            self.rival.record.refused += 1
            return None
        if self.seed is None:
            return int(self.waiting_clusters.pop(0))
        if self.engine.random.random() < REFUSALS:
            return None
        return int(
            self.waiting_clusters.pop(self.engine.random.randrange(len(self.waiting_clusters)))
        )

    def time_passes(self: Any) -> bool:
        """Nothing of ours can go on now: let the competing grid go on, if it can."""
        if self.rival is None:
            return False
        before = (self.rival.waiting, len(self.rival.running))
        hurried = self.rival.hurry(int(self.x[L.X_STEPS]))
        started = self.place_clusters()
        return hurried or started or before != (self.rival.waiting, len(self.rival.running))
