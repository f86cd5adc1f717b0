"""The cache folder: whole entries, one writer, nothing foreign."""

import multiprocessing
import os
import stat
import time
import warnings

import pytest

from mok.runtime import cache
from mok.runtime.cache import META, CacheFolder, default_folder


@pytest.fixture
def folder(tmp_path):
    return CacheFolder(tmp_path / "cache")


FILES = {"kernel.o": b"\x7fELF", "kernel.ptx": b"ret;"}


def test_write_then_read(folder):
    assert folder.read("a") is None
    assert folder.write("a", {"n": 1}, FILES)
    assert folder.read("a") == ({"n": 1}, FILES)
    assert stat.S_IMODE(folder.root.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.path("a", "kernel.o").stat().st_mode) == 0o600
    assert sorted(p.name for p in folder.root.iterdir()) == ["a"]  # nothing half-built


@pytest.mark.parametrize("damage", ["truncate", "flip", "meta", "missing", "empty"])
def test_a_damaged_entry_is_absent_and_can_be_rewritten(folder, damage):
    folder.write("a", {}, FILES)
    path = folder.path("a", "meta.json" if damage == "meta" else "kernel.o")
    if damage == "missing":
        path.unlink()
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "truncate":
        path.write_bytes(path.read_bytes()[:2])
    else:
        content = bytearray(path.read_bytes())
        content[1] ^= 0xFF
        path.write_bytes(content)
    assert folder.read("a") is None
    assert folder.write("a", {}, FILES)
    assert folder.read("a") == ({}, FILES)


@pytest.mark.parametrize("which", ["root", "entry", "file"])
def test_what_others_may_write_is_refused(folder, which):
    folder.write("a", {}, FILES)
    target = {
        "root": folder.root,
        "entry": folder.path("a", ""),
        "file": folder.path("a", "kernel.o"),
    }[which]
    os.chmod(target, 0o777)
    with pytest.warns(RuntimeWarning, match="written by others"):
        assert folder.read("a") is None
    if which == "root":
        assert not folder.write("b", {}, FILES)


@pytest.mark.parametrize("which", ["root", "entry", "file"])
def test_what_another_user_owns_is_refused(folder, which, monkeypatch):
    folder.write("a", {}, FILES)
    if os.geteuid() == 0:
        target = {
            "root": folder.root,
            "entry": folder.path("a", ""),
            "file": folder.path("a", "kernel.o"),
        }[which]
        os.chown(target, 65534, 65534)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 65534)
    with pytest.warns(RuntimeWarning, match="belongs to user"):
        assert folder.read("a") is None


def test_links_are_refused(folder, tmp_path):
    folder.write("a", {}, FILES)
    path = folder.path("a", "kernel.o")
    elsewhere = tmp_path / "elsewhere.o"
    elsewhere.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(elsewhere)
    assert folder.read("a") is None


def test_read_only_folder_reads_and_warns_once(folder, monkeypatch):
    folder.write("a", {}, FILES)
    real_open = os.open

    def read_only(path, flags, *rest, **keywords):
        if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
            raise OSError(30, "Read-only file system", str(path))
        return real_open(path, flags, *rest, **keywords)

    monkeypatch.setattr(os, "open", read_only)
    assert folder.read("a") == ({}, FILES)
    with pytest.warns(RuntimeWarning, match="Read-only file system"), folder.lock("b") as locked:
        assert not locked
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not folder.write("b", {}, FILES)
    assert folder.read("b") is None


def test_unusable_base_is_not_fatal(tmp_path):
    (tmp_path / "file").write_text("")
    folder = CacheFolder(tmp_path / "file")  # a file where the folder should be
    with pytest.warns(RuntimeWarning, match="not used"), folder.lock("a") as locked:
        assert not locked
    assert folder.read("a") is None
    assert not folder.write("a", {}, FILES)


def _hold_lock(base, entered, order):
    folder = CacheFolder(base)
    with folder.lock("a"):
        order.append("in")
        entered.set()
        time.sleep(0.2)
        order.append("out")


def test_one_writer_at_a_time(tmp_path):
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        order, entered = manager.list(), context.Event()
        workers = [
            context.Process(target=_hold_lock, args=(tmp_path, entered, order)) for _ in range(3)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(30)
            assert worker.exitcode == 0
        assert list(order) == ["in", "out"] * 3


def test_killed_writers_leave_nothing_for_long(folder):
    folder.write("a", {}, FILES)
    leftover = folder.root / ".a.1.abcd"
    leftover.mkdir()
    folder.write("a", {}, FILES)
    assert leftover.exists()  # might belong to a living writer
    os.utime(leftover, (1, 1))
    folder.write("a", {}, FILES)
    assert not leftover.exists()


@pytest.fixture
def aged(folder):
    """Entries d, c, b, a of 1000 bytes, each used 1000 s before the one in front."""
    for age, name in enumerate("dcba"):
        with folder.lock(name):
            assert folder.write(name, {}, {"k.o": bytes(1000)})
        os.utime(folder.root / name / META, (1e9 - 1000 * age,) * 2)
    return folder


def entries(folder):
    return {path.name for path in folder.root.iterdir() if path.is_dir()}


def write_large(folder):
    with folder.lock("e"):
        assert folder.write("e", {}, {"k.o": bytes(5000)})


def test_what_was_not_used_for_longest_makes_room(aged, monkeypatch):
    """Reading counts as use; the entry just written stays, however large it is, and is counted."""
    assert aged.read("a") is not None  # the oldest, until now
    monkeypatch.setattr(cache, "LIMIT_BYTES", 8000)
    write_large(aged)
    assert entries(aged) == {"a", "d", "e"}
    assert (aged.root / "b.lock").exists()  # so that all who wait for it lock one inode
    assert aged.read("b") is None and aged.read("e") is not None
    monkeypatch.setattr(cache, "LIMIT_BYTES", 10)
    write_large(aged)
    assert entries(aged) == {"e"}


def test_what_is_being_written_or_was_just_used_is_not_evicted(aged, monkeypatch):
    monkeypatch.setattr(cache, "LIMIT_BYTES", 10)
    with aged.lock("a"):
        write_large(aged)
        assert entries(aged) == {"a", "e"}
    used = (aged.root / "a" / META).stat().st_mtime
    assert aged.read("a") is not None
    assert not aged._evict(aged.root / "a", used) and aged.read("a") is not None


def test_leftovers_of_killed_processes_go(aged, monkeypatch):
    """A half-removed entry without its META counts and goes; half-built ones go when they are old."""
    (aged.root / "a" / META).unlink()
    os.utime(aged.root / "a", (1e9, 1e9))
    old, young = aged.root / ".x.1.ab", aged.root / ".y.1.ab"
    for path in (old, young):
        path.mkdir()
    os.utime(old, (1e9, 1e9))
    monkeypatch.setattr(cache, "LIMIT_BYTES", 10)
    write_large(aged)
    assert entries(aged) == {young.name, "e"}


def test_default_folder(monkeypatch):
    monkeypatch.setenv("MOK_CACHE_DIR", "/x/y")
    assert str(default_folder()) == "/x/y"
    monkeypatch.delenv("MOK_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert str(default_folder()) == "/xdg/mok"
