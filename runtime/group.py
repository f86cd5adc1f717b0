"""Ranks of an expert-parallel group: within one process, or one per process."""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from mok.errors import GroupError, MissingDependencyError
from mok.runtime.rendezvous import LocalRendezvous, Rendezvous, StoreRendezvous, agree
from mok.scalars import check_timeout, index_of

DEFAULT_TIMEOUT_S = 300.0
MOST_VIRTUAL = 4096

_made: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)


class Group:
    """Who the ranks are. Make one with ``single``, ``virtual`` or ``from_process_group``.

    Attributes:
        size: number of ranks, EP.
        local_ranks: the ranks that this process runs: all of a virtual group, else one.
        device: torch device of this process' ranks, or None: the current one at each use.
        rendezvous: how this process talks to the others.
        timeout_s: limit of every exchange between processes.
    """

    def __init__(
        self,
        size: int,
        local_ranks: Sequence[int],
        rendezvous: Rendezvous,
        device: Any = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        process_group: Any = None,
    ) -> None:
        if size < 1:
            raise GroupError("A group has at least one rank", size)
        self.size = size
        self.local_ranks = tuple(local_ranks)
        self.device = device
        self.rendezvous = rendezvous
        self.timeout_s = check_timeout(timeout_s)
        self.process_group = process_group
        self.closed = False

    # -------------------------------------------------------------- making one

    @staticmethod
    def single(device: Any = None) -> Group:
        """One rank: no expert parallelism."""
        return Group(1, (0,), LocalRendezvous(), device)

    @staticmethod
    def virtual(size: int, device: Any = None) -> Group:
        """Several ranks in this process, on one device, launched one after another.

        Raises:
            GroupError: ``size`` is no whole number in 1…4096.
        """
        count = index_of(size)
        if count is None or not 1 <= count <= MOST_VIRTUAL:
            raise GroupError(f"a virtual group has 1…{MOST_VIRTUAL} ranks", repr(size))
        return Group(count, range(count), LocalRendezvous(), device)

    @staticmethod
    def from_process_group(
        process_group: Any = None, device: Any = None, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> Group:
        """One rank per process of a torch.distributed group (None: the default group).

        Collective: every process of the group calls it, and in the same order as other groups.

        Raises:
            DtypeError, ShapeError: ``timeout_s`` is no number, or not finite from 0 on.
            GroupError: torch.distributed is not initialised, or this process is not in the group.
            MokTimeoutError: some processes did not call it; they are named.
        """
        import torch.distributed as dist

        timeout_s = check_timeout(timeout_s)
        if not dist.is_available():
            raise MissingDependencyError(
                "Groups of processes need torch.distributed", "this torch was built without it"
            )
        if not dist.is_initialized():
            raise GroupError(
                "torch.distributed must be initialised first",
                remedy="Call torch.distributed.init_process_group() (torchrun sets what it needs).",
            )
        if process_group is None:
            process_group = dist.group.WORLD
        if process_group == dist.GroupMember.NON_GROUP_MEMBER:
            raise GroupError("This process must be a member of the process group")
        rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
        name = f"mok/{process_group.group_name}"
        store = process_group.get_group_store()
        rendezvous = StoreRendezvous(store, rank, size, f"{name}/{next(_made[name])}", timeout_s)
        agree(rendezvous, "the size of the group", size)
        return Group(size, (rank,), rendezvous, device, timeout_s, process_group)

    @staticmethod
    def from_store(
        store: Any,
        rank: int,
        size: int,
        device: Any = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        name: str = "mok",
    ) -> Group:
        """One rank per process that reaches a torch.distributed store, without a process group.

        Collective: every process calls it with its own rank, and groups of one store have different
        names.

        Raises:
            DtypeError, ShapeError: ``timeout_s`` is no number, or not finite from 0 on.
            GroupError: the processes name different sizes.
            MokTimeoutError: some processes did not call it; they are named.
        """
        timeout_s = check_timeout(timeout_s)
        if not 0 <= rank < size:
            raise GroupError(f"rank must be in 0…{size - 1}", rank)
        rendezvous = StoreRendezvous(store, rank, size, f"{name}/{next(_made[name])}", timeout_s)
        agree(rendezvous, "the size of the group", size)
        return Group(size, (rank,), rendezvous, device, timeout_s)

    def subgroup(self, ranks: Sequence[int]) -> Group | None:
        """The group of some of these ranks, numbered in the given order; None where not a member.

        Collective among the members only. Several disjoint subgroups, as for expert parallelism
        inside data parallelism, are made by every process with its own ranks.

        Raises:
            GroupError: a rank is absent or named twice.
        """
        found: list[int | None] = []
        with contextlib.suppress(TypeError):  # nothing to iterate over
            found = [index_of(r) for r in ranks]
        chosen = [r for r in found if r is not None]
        if not chosen or len(chosen) < len(found):
            raise GroupError("Ranks of a subgroup are ints in a list, one at least", repr(ranks))
        if len(set(chosen)) != len(chosen) or any(not 0 <= r < self.size for r in chosen):
            raise GroupError(f"Ranks of a subgroup are distinct and in 0…{self.size - 1}", chosen)
        if self.is_local:
            return Group.virtual(len(chosen), self.device)
        if self.rank not in chosen:
            return None
        outer = self.rendezvous
        assert isinstance(outer, StoreRendezvous)
        name = f"{outer.name}/sub-{'-'.join(map(str, chosen))}"
        mine = chosen.index(self.rank)
        rendezvous = outer.subset(mine, len(chosen), f"{name}/{next(_made[name])}")
        agree(rendezvous, "the ranks of the subgroup", chosen)
        return Group(len(chosen), (mine,), rendezvous, self.device, self.timeout_s)

    # -------------------------------------------------------------- looking at it

    @property
    def rank(self) -> int:
        """The first (in a group of processes: the only) rank of this process."""
        return self.local_ranks[0]

    @property
    def is_local(self) -> bool:
        """Whether this process runs all ranks, so that stream order is their barrier."""
        return len(self.local_ranks) == self.size

    def barrier(self, what: str = "barrier") -> None:
        """Wait on the host until every process has come here; does nothing in a local group."""
        self.rendezvous.all_gather(what, None)

    def close(self) -> None:
        """Forget the rendezvous. Not collective; the torch process group stays the caller's."""
        if not self.closed:
            self.closed = True
            self.rendezvous.close()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        where = f"ranks {self.local_ranks[0]}…{self.local_ranks[-1]} here"
        if len(self.local_ranks) == 1:
            where = f"rank {self.rank} here"
        return f"<Group of {self.size}, {where}>"
