"""How the processes of a group find each other: small values and file descriptors, all to all.

torch.distributed's store carries the values, as JSON; a Unix socket (SCM_RIGHTS) the descriptors.
Every exchange is collective, bounded in time, and names the ranks that did not come.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from mok.errors import GroupError, MokTimeoutError

JSON = Any  # what json.dumps takes: numbers, strings, lists, dicts, None


class Rendezvous(Protocol):
    """The processes of a group; ``rank`` counts processes here."""

    rank: int
    size: int

    def all_gather(self, what: str, value: JSON) -> list[JSON]:
        """Every process' value, in rank order. ``what`` names the step in errors."""

    def all_gather_fd(self, what: str, fd: int) -> list[int]:
        """Every process' file descriptor, valid here and owned by the caller (own one: a dup)."""

    def close(self) -> None: ...


class LocalRendezvous:
    """A group within one process."""

    rank = 0
    size = 1

    def all_gather(self, what: str, value: JSON) -> list[JSON]:
        return [json.loads(json.dumps(value))]

    def all_gather_fd(self, what: str, fd: int) -> list[int]:
        return [os.dup(fd)]

    def close(self) -> None:
        pass


class StoreRendezvous:
    """Processes that share a torch.distributed store.

    Args:
        store: any c10d Store that all processes reach.
        name: a prefix that no other rendezvous of this store uses, the same in all processes.
        timeout_s: limit of every exchange.

    Raises (from the exchanges):
        MokTimeoutError: some ranks did not come in time; they are named.
        GroupError: the store is gone.
    """

    def __init__(self, store: Any, rank: int, size: int, name: str, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self.name = name
        self._timeout_s = timeout_s
        self._step = 0

    def subset(self, rank: int, size: int, name: str) -> StoreRendezvous:
        """A rendezvous of some of the processes over the same store."""
        return StoreRendezvous(self._store, rank, size, name, self._timeout_s)

    def _key(self, step: int, rank: int) -> str:
        return f"{self.name}/{step}/{rank}"

    def all_gather(self, what: str, value: JSON) -> list[JSON]:
        step, self._step = self._step, self._step + 1
        keys = [self._key(step, r) for r in range(self.size)]
        try:
            self._store.set(keys[self.rank], json.dumps({"what": what, "value": value}))
            self._wait(what, keys)
            found = [json.loads(self._store.get(key)) for key in keys]
        except MokTimeoutError:
            raise
        except RuntimeError as error:  # torch.distributed.DistError and its kin
            raise GroupError(
                "The rendezvous store must stay reachable",
                f"{what}: {type(error).__name__}: {error}",
                "It lives in rank 0 or in torchrun's agent: see how that process ended.",
            ) from error
        if step > 0:
            # Everyone came to this step, so everyone has read the one before.
            self._store.delete_key(self._key(step - 1, self.rank))
        if strangers := [r for r, f in enumerate(found) if f["what"] != what]:
            raise GroupError(
                "All ranks of a group must make the same calls in the same order",
                f"rank {self.rank} is at {what!r}, rank {strangers[0]} at "
                f"{found[strangers[0]]['what']!r}",
            )
        return [f["value"] for f in found]

    def _wait(self, what: str, keys: list[str]) -> None:
        # Polled: a store's own wait cannot say which keys are missing, and not every kind of store
        # honours a short time limit.
        deadline = time.monotonic() + self._timeout_s
        pause = 0.0002
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                missing = [r for r, key in enumerate(keys) if not self._store.check([key])]
                if missing:
                    raise self._late(what, missing)
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    def _late(self, what: str, missing: list[int]) -> MokTimeoutError:
        names = ", ".join(map(str, missing))
        return MokTimeoutError(
            f"Every rank must come to {what!r} within {self._timeout_s:g} s",
            f"rank {self.rank} saw nothing of rank{'s' * (len(missing) > 1)} {names}",
            "See whether that process runs, failed earlier, or makes other calls.",
        )

    def all_gather_fd(self, what: str, fd: int) -> list[int]:
        if self.size == 1:
            return [os.dup(fd)]
        with ExitStack() as stack:
            server = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            # An abstract name leaves nothing in the file system, whatever happens to us.
            name, token = f"mok-{secrets.token_hex(16)}", secrets.token_hex(16)
            server.bind("\0" + name)
            server.listen(self.size)
            server.settimeout(self._timeout_s)
            peers = self.all_gather(f"{what}: sockets", [name, token])
            received = self._swap(what, fd, server, token, peers, stack)
        # Nobody may close its server before all have connected.
        self.all_gather(f"{what}: descriptors", None)
        return received

    def _swap(
        self, what: str, fd: int, server: socket.socket, token: str, peers: Any, stack: ExitStack
    ) -> list[int]:
        received = {self.rank: os.dup(fd)}
        try:
            links = {}
            for rank, (name, peer_token) in enumerate(peers):
                if rank != self.rank:  # never blocks: every peer listens with room for all
                    link = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                    link.settimeout(self._timeout_s)
                    link.connect("\0" + name)
                    link.sendall(bytes.fromhex(peer_token))
                    links[rank] = link
            served = 0
            while served < self.size - 1:
                link, _ = server.accept()
                stack.enter_context(link)
                link.settimeout(self._timeout_s)
                if _peer_uid(link) == os.geteuid() and _read(link, 16) == bytes.fromhex(token):
                    socket.send_fds(link, [struct.pack("<i", self.rank)], [fd])
                    served += 1
            for rank, link in links.items():
                data, fds, _, _ = socket.recv_fds(link, 4, 1)
                if len(fds) != 1 or struct.unpack("<i", data)[0] != rank:
                    raise OSError(f"rank {rank} sent no descriptor")
                received[rank] = fds[0]
        except OSError as error:
            for taken in received.values():
                os.close(taken)
            raise GroupError(
                f"Ranks of one host hand over file descriptors ({what})",
                f"rank {self.rank}: {error}",
                "They must run as one user in one network namespace; across hosts or containers "
                'use HeapOptions(handle="fabric").',
            ) from error
        return [received[r] for r in range(self.size)]

    def close(self) -> None:
        # The last step's key stays: a slower rank may still have to read it.
        self._store = None


def _peer_uid(link: socket.socket) -> int:
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1]


def _read(link: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = link.recv(length - len(data))
        if not more:
            break
        data += more
    return data


def host_identity() -> str:
    """Equal for processes that can hand each other descriptors: one boot, one network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def agree(rendezvous: Rendezvous, what: str, value: JSON) -> None:
    """Check that all processes hold the same value.

    Raises:
        GroupError: they differ; the message lists who holds what.
    """
    values = rendezvous.all_gather(what, value)
    if any(v != values[0] for v in values):
        shown = "; ".join(f"rank {r}: {v}" for r, v in enumerate(values))
        raise GroupError(f"All ranks of a group must agree on {what}", shown)


@contextmanager
def together(rendezvous: Rendezvous, what: str) -> Iterator[None]:
    """Run a step on every rank and raise on all if it failed on any, so that none goes on alone.

    Raises:
        the step's own error where it failed; GroupError, naming the ranks and why, on the others.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as problem:
        error = problem
    try:
        results = rendezvous.all_gather(what, None if error is None else str(error))
    except (MokTimeoutError, GroupError):
        if error is None:
            raise
        raise error from None
    if error is not None:
        raise error
    failed = {r: text for r, text in enumerate(results) if text is not None}
    if failed:
        shown = "; ".join(f"rank {r}: {text}" for r, text in failed.items())
        raise GroupError(f"{what} must succeed on every rank", shown)
