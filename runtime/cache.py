"""The compile cache on disk: one private folder, one sub-folder per compiled kernel.

An entry appears whole or not at all (built beside, then renamed), carries the SHA-256 of each of
its files, and is written by one process at a time. Object files are code: only files of this user,
that nobody else may write, are ever loaded.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

META = "meta.json"
LIMIT_BYTES = 2 << 30
"""What entries may take together; a kernel is 0.2 to 1 MB, and each change of a source makes new ones."""
_STALE_S = 3600.0


def default_folder() -> Path:
    """``$MOK_CACHE_DIR``, else ``$XDG_CACHE_HOME/mok``, else ``~/.cache/mok``."""
    if explicit := os.environ.get("MOK_CACHE_DIR"):
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "mok"


class Untrusted(Exception):
    """A file or folder that someone else owns or may write."""


def _check_owner(info: os.stat_result, path: Path) -> None:
    if info.st_uid != os.geteuid():
        raise Untrusted(f"{path} belongs to user {info.st_uid}, this process is {os.geteuid()}")
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Untrusted(f"{path} can be written by others (mode {stat.S_IMODE(info.st_mode):o})")


def _last_use(folder: Path) -> float:
    meta = folder / META
    return (meta if meta.exists() else folder).lstat().st_mtime


class CacheFolder:
    """Entries of named files under ``<base>/kernels``, readable and writable by this user only.

    Every problem of the folder itself (read-only, full, foreign) degrades to "not cached": reads
    return None, writes return False, and the reason is in ``problem`` and warned about once.

    Args:
        base: the user's cache folder; ``kernels`` inside it is created with mode 0700. The base
            itself keeps its mode: it may be a folder that the user shares with other things.
    """

    def __init__(self, base: Path) -> None:
        self.root = base / "kernels"
        self.problem = ""

    # -------------------------------------------------------------- reading

    def read(self, entry: str) -> tuple[dict[str, Any], dict[str, bytes]] | None:
        """(meta, {file name: bytes}) of an entry, or None if absent, damaged or untrusted."""
        folder = self.root / entry
        try:
            for path in (self.root, folder):
                info = os.lstat(path)
                if not stat.S_ISDIR(info.st_mode):
                    raise Untrusted(f"{path} is not a folder")
                _check_owner(info, path)
            meta = json.loads(self._read_file(folder / META))
            with contextlib.suppress(OSError):  # a read-only folder stays as it is
                os.utime(folder / META)  # the time of the last use, for ``_make_room``
            files: dict[str, bytes] = {}
            for name, digest in meta["sha256"].items():
                files[name] = self._read_file(folder / Path(name).name)
                if hashlib.sha256(files[name]).hexdigest() != digest:
                    return None
            return meta["data"], files
        except Untrusted as error:
            self._complain(str(error))
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None  # absent, or damaged in a way that rebuilding repairs

    def path(self, entry: str, name: str) -> Path:
        return self.root / entry / name

    @staticmethod
    def _read_file(path: Path) -> bytes:
        # Owner and mode are those of the opened file, so a link cannot be swapped in between.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode):
                raise Untrusted(f"{path} is not a regular file")
            _check_owner(info, path)
            return file.read()

    # -------------------------------------------------------------- writing

    def write(self, entry: str, data: Mapping[str, Any], files: Mapping[str, bytes]) -> bool:
        """Put an entry in place of whatever is there; False when the folder cannot be written.

        Call it inside ``lock(entry)``. Entries that were not used for longest go, once all together take
        more than ``LIMIT_BYTES``.
        """
        building = self.root / f".{entry}.{os.getpid()}.{secrets.token_hex(4)}"
        try:
            self._make_root()
            self._sweep(entry)
            building.mkdir(mode=0o700)
            digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
            meta = json.dumps({"sha256": digests, "data": data}, indent=1).encode()
            for name, content in {**files, META: meta}.items():
                target = building / name
                descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(content)
            final = self.root / entry
            if os.path.lexists(final):  # damaged, or it would have been read: make way
                final.rename(building.with_suffix(".old"))
            building.rename(final)
            with contextlib.suppress(OSError):  # the entry is there, room or no room
                self._make_room(entry)
            return True
        except (OSError, Untrusted) as error:
            self._complain(str(error))
            return False
        finally:
            for leftover in (building, building.with_suffix(".old")):
                if leftover.is_dir() and not leftover.is_symlink():
                    shutil.rmtree(leftover, ignore_errors=True)
                elif os.path.lexists(leftover):
                    leftover.unlink(missing_ok=True)

    def _sweep(self, entry: str) -> None:
        # Half-built folders of writers that were killed. Young ones may still be in use where
        # flock does not work.
        for folder in self.root.glob(f".{entry}.*"):
            with contextlib.suppress(OSError):
                if time.time() - folder.lstat().st_mtime > _STALE_S and not folder.is_symlink():
                    shutil.rmtree(folder, ignore_errors=True)

    def _make_room(self, newest: str) -> None:
        found: list[tuple[float, int, Path]] = []
        for folder in self.root.iterdir():
            if folder.suffix == ".lock" or folder.is_symlink():
                continue
            with contextlib.suppress(OSError):  # another process may be at the same
                if folder.name.startswith(
                    "."
                ):  # half built by a writer that was killed, or still at it
                    if time.time() - folder.lstat().st_mtime > _STALE_S:
                        shutil.rmtree(folder, ignore_errors=True)
                    continue
                size = sum(path.lstat().st_size for path in folder.iterdir())
                found.append((_last_use(folder), size, folder))
        total = sum(size for _, size, _ in found)
        for used, size, folder in sorted(found):
            if total <= LIMIT_BYTES:
                return
            if folder.name != newest and self._evict(folder, used):
                total -= size

    def _evict(self, folder: Path, used: float) -> bool:
        """Remove an entry that nobody writes and that was not used since; its lock file stays (see ``lock``)."""
        path = folder.with_name(folder.name + ".lock")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _last_use(folder) != used:
                return False
            shutil.rmtree(folder, ignore_errors=True)
            return True
        except OSError:  # held, without flock, or gone
            return False
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def lock(self, entry: str) -> Iterator[bool]:
        """Hold the entry's writer lock (across processes); yields False where there can be none.

        Without a lock (read-only folder, a file system without flock) entries stay correct, since
        they are renamed into place; two processes may then compile the same kernel.
        """
        try:
            self._make_root()
            path = self.root / f"{entry}.lock"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except (OSError, Untrusted) as error:
            self._complain(str(error))
            yield False
            return
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                locked = True
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL):
                    raise
                locked = False
            yield locked
        finally:
            os.close(descriptor)  # releases the lock; the file stays, so that all lock one inode

    def _make_root(self) -> None:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = os.lstat(self.root)
        if not stat.S_ISDIR(info.st_mode):
            raise Untrusted(f"{self.root} is not a folder")
        _check_owner(info, self.root)
        if stat.S_IMODE(info.st_mode) != 0o700:
            os.chmod(self.root, 0o700)

    def _complain(self, problem: str) -> None:
        if not self.problem:
            self.problem = problem
            warnings.warn(
                f"mok's compile cache is not used: {problem}. Kernels are compiled again in every "
                "process. Set MOK_CACHE_DIR to a folder that only you can write.",
                RuntimeWarning,
                stacklevel=3,
            )
