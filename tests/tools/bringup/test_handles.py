"""The rung of fabric handles, with memory that stands in for a rack's."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("cutlass")

from mok.backends import choose_backend
from mok.commands import doctor_gpu
from mok.errors import DriverError
from mok.runtime.memory_host import HostMemory
from mok.tools.bringup import handles
from mok.tools.bringup.context import Context, NotHere, WrongError
from mok.tools.bringup.notes import Notes


class FabricMemory(HostMemory):
    """Host memory whose fabric handles are file descriptors."""

    permitted = True

    def create(self, size, kind):
        assert kind == "fabric"
        if not self.permitted:
            raise DriverError("cuMemCreate must succeed", "CUDA_ERROR_NOT_PERMITTED")
        return super().create(size, "posix_fd")

    def export(self, handle, kind):
        return super().export(handle, "posix_fd")

    def import_handle(self, token, kind):
        return super().import_handle(token, "posix_fd")


@pytest.fixture
def climb(tmp_path, monkeypatch):
    """The rung on a GPU that is none."""

    def run(permitted=True, channels="channel0", fault=""):
        backend = dataclasses.replace(choose_backend("sm_100a", emulate=True), kind="kernel")
        memory = FabricMemory()
        monkeypatch.setattr(memory, "permitted", permitted)
        monkeypatch.setattr(handles, "_memory", lambda ctx: memory)
        monkeypatch.setattr(doctor_gpu, "imex", lambda: {"found": channels})
        return handles.fabric(Context(backend, Notes(tmp_path / "n.jsonl", tmp_path), fault))

    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NNODES"):
        monkeypatch.delenv(name, raising=False)
    return run


def test_a_fabric_that_works(climb):
    assert "mapped twice, writes seen; IMEX channel0" in climb()


def test_writes_that_are_not_seen(climb):
    with pytest.raises(WrongError, match="the other mapping's writes"):
        climb(fault="wrong")


def test_one_host_without_imex_needs_none(climb):
    with pytest.raises(NotHere, match=r"one host, which needs none.*NOT_PERMITTED"):
        climb(permitted=False, channels="none: ranks on one host only")


def test_with_channels_it_must_work(climb):
    with pytest.raises(DriverError, match="NOT_PERMITTED"):
        climb(permitted=False)


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "72", "LOCAL_WORLD_SIZE": "4"},  # torchrun
        {"WORLD_SIZE": "72", "SLURM_NNODES": "18"},  # srun alone
    ],
)
def test_between_hosts_it_must_work(variables, climb, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DriverError, match="NOT_PERMITTED"):
        climb(permitted=False, channels="none: ranks on one host only")
