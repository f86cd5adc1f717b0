"""The device barrier: its memory operations in PTX, and its behaviour in the emulator."""

import re

import pytest

pytest.importorskip("cutlass")

import torch

from mok.kernels_cute import records as R
from mok.runtime.compile import KernelSpec, get_kernel
from mok.runtime.launch import launch

ARCHS = ("sm_90a", "sm_100a", "sm_103a")


def kernel(name, arch="sm_90a"):
    factory = f"mok.kernels_cute.barrier:{'BarrierKernel' if name == 'barrier' else 'WaitKernel'}"
    return get_kernel(KernelSpec.of(name, arch, factory))


@pytest.mark.parametrize("arch", ARCHS)
def test_signals_release_and_waits_acquire_at_system_scope(arch):
    ptx = kernel("barrier", arch).ptx
    release = ptx.index("st.release.sys.global.b32")
    assert ptx.index("fence.acq_rel.sys") < release < ptx.index("ld.acquire.sys.global.b32")
    # Nothing weaker touches the words, and both arguments of the loop's exit are read in the loop.
    assert not re.search(r"(ld|st)\.(relaxed|acquire|release)\.(cta|cluster|gpu)", ptx)
    loop = re.search(r"nanosleep(.*?)@%p\d+ bra", ptx, re.S).group(1)
    assert loop.count("ld.relaxed.sys.global.b32") == 2 and "globaltimer" in loop


@pytest.mark.parametrize("name", ["barrier", "wait"])
@pytest.mark.parametrize("arch", ARCHS)
def test_no_spills(name, arch):
    resources = kernel(name, arch).resources
    assert resources.spill_bytes == 0 and resources.warnings == () and resources.registers <= 32


# ---------------------------------------------------------------- in the emulator


class Ranks:
    """Symmetric words of some ranks, of which each test runs one."""

    def __init__(self, ranks):
        self.ranks = ranks
        # Per rank: arrival words, then its poison, its epoch, its gate; records apart.
        self.memory = torch.zeros(ranks, ranks + 3, dtype=torch.int32)
        self.record = torch.zeros(R.BARRIER_MISSING + ranks, dtype=torch.int32)
        self.stride = 4 * (ranks + 3)

    @property
    def words(self):
        return self.memory[:, : self.ranks]

    @property
    def poison(self):
        return self.memory[:, self.ranks]

    @property
    def gate(self):
        return self.memory[:, self.ranks + 2]

    def barrier(self, rank, timeout_ns=20_000):
        base = self.memory.data_ptr()
        launch(
            kernel("barrier"),
            base,
            base + 4 * self.ranks,
            base + rank * self.stride + 4 * (self.ranks + 1),
            self.record.data_ptr(),
            self.stride,
            timeout_ns,
            rank,
            self.ranks,
            0,
        )

    def wait(self, rank, word, target, timeout_ns=20_000):
        base = self.memory.data_ptr()
        launch(
            kernel("wait"),
            base + rank * self.stride + 4 * word,
            base + 4 * self.ranks,
            self.record.data_ptr(),
            self.stride,
            timeout_ns,
            target,
            rank,
            self.ranks,
            0,
        )


@pytest.fixture
def emulator():
    module = pytest.importorskip("mok.tools.emulator")
    with module.Emulator("sm_90a") as emulator:
        yield emulator


@pytest.mark.emulator
@pytest.mark.parametrize("start", [0, 41, 2**31 - 1])
def test_a_barrier_passes_when_all_have_come(emulator, start):
    ranks = Ranks(5)
    ranks.memory[2, 6] = start
    now = (start + 1) if start < 2**31 - 1 else -(2**31)  # the epoch wraps
    ranks.words[2] = now
    ranks.words[2, 4] = now + 1  # a rank that is one ahead
    ranks.barrier(2)
    assert ranks.memory[2, 6] == now  # counted on the device
    assert ranks.words[:, 2].tolist() == [now] * 5  # announced to all
    assert not ranks.poison.any() and not ranks.record.any() and not ranks.gate.any()


@pytest.mark.emulator
def test_missing_ranks_are_noted_and_the_group_is_poisoned(emulator):
    ranks = Ranks(40)
    ranks.memory[39, 41] = 7
    ranks.words[39, :32] = torch.arange(32) - 24  # a warp of ranks that are behind
    ranks.words[39, 32:] = 8
    ranks.barrier(39)
    assert ranks.record[: R.BARRIER_MISSING].tolist() == [R.EXPIRED, 8, 0, 0, 0, 0, 0, 0]
    assert ranks.record[R.BARRIER_MISSING :].tolist() == [*range(-23, 9), *[0] * 8]
    (poison,) = set(ranks.poison.tolist())  # by one of the threads whose rank is missing
    who, missing = R.poisoner(poison)
    assert who == 39 and 0 <= missing < 32
    assert ranks.gate.nonzero().tolist() == [[39]]  # its own only: a peer's may be in use


@pytest.mark.emulator
def test_a_poisoned_group_returns_at_once_and_says_who(emulator):
    ranks = Ranks(4)
    ranks.poison[1] = 1 + 3
    ranks.barrier(1, timeout_ns=10**15)
    assert ranks.record[:3].tolist() == [R.POISONED, 1, 4]
    assert ranks.gate.tolist() == [0, 4, 0, 0]
    assert not ranks.words.any() and ranks.memory[1, 5] == 0


@pytest.mark.emulator
def test_a_wait_for_a_signal(emulator):
    ranks = Ranks(3)
    ranks.words[1, 2] = 6
    ranks.wait(1, 2, 5)
    assert not ranks.record.any() and not ranks.poison.any()
    ranks.wait(1, 2, 7)
    assert ranks.record[:2].tolist() == [R.EXPIRED, 7]
    assert ranks.poison.tolist() == [R.poison_value(1)] * 3
    ranks.record.zero_()
    ranks.wait(2, 0, 1, timeout_ns=10**15)
    assert ranks.record[:3].tolist() == [R.POISONED, 1, 2]
