"""The kernels of ``mok bench links`` move the right rows and signal when they should."""

import pytest
import torch

from mok.runtime.compile import KernelSpec, get_kernel
from mok.runtime.launch import launch

MODULE = "mok.tools.bench.links.kernels"
ROWS, BYTES, RANKS = 192, 384, 2  # rows of each rank, bytes of a row


def spec(name: str, kernel: str, **config: bool) -> KernelSpec:
    return KernelSpec.of(name, "sm_90a", f"{MODULE}:{kernel}", **config)


@pytest.fixture(scope="module")
def emulator():
    with pytest.importorskip("mok.tools.emulator").Emulator("sm_90a", num_sms=2, seed=1) as found:
        yield found


def transfer(push: bool, signals: bool = True, carry: bool = False) -> tuple[torch.Tensor, ...]:
    """Both ranks' transfers of random rows: (near, far, ranks, rows, counters, ends), rank first."""
    made = torch.Generator().manual_seed(int(push))
    far = torch.randint(0, 256, (RANKS, ROWS, BYTES), dtype=torch.uint8, generator=made)
    near = torch.randint(0, 256, (RANKS, ROWS, BYTES), dtype=torch.uint8, generator=made)
    # Each of the far rows once, so that pushes do not collide.
    places = torch.randperm(RANKS * ROWS, generator=made).view(RANKS, ROWS)
    ranks, rows = (places // ROWS).int(), (places % ROWS).int()
    if not push:
        ranks[:, -40:] = -1  # padding
    counters = torch.zeros(RANKS, RANKS, dtype=torch.int32)
    padded = torch.zeros(RANKS, far[0].numel(), dtype=torch.uint8)  # counters a heap away, too
    padded[:, : 4 * RANKS] = counters.view(torch.uint8)
    ends = torch.zeros(RANKS, 2, dtype=torch.int64)
    before = near.clone(), far.clone()
    kernel = get_kernel(
        spec("link_transfer", "TransferKernel", push=push, signals=signals, carry=carry)
    )
    for rank in range(RANKS):
        launch(
            kernel,
            ranks[rank].data_ptr(),
            rows[rank].data_ptr(),
            near[rank].data_ptr(),
            far.data_ptr(),
            padded.data_ptr(),
            ends[rank].data_ptr(),
            far[0].numel(),
            BYTES,
            ROWS // 64,
            rank,
            RANKS,
            2,
            0,
        )
    counters = padded[:, : 4 * RANKS].contiguous().view(torch.int32)
    return near, far, ranks, rows, counters, ends, *before


@pytest.mark.emulator
@pytest.mark.parametrize("carry", [False, True])
def test_pull_gathers_and_counts_at_home(emulator, carry):
    near, far, ranks, rows, counters, ends, _, far_before = transfer(push=False, carry=carry)
    want = far_before[ranks.long().clamp(min=0), rows.long()]
    want[ranks < 0] = 0
    assert torch.equal(near, want) and torch.equal(far, far_before)
    assert torch.equal(counters, 3 * torch.eye(RANKS, dtype=torch.int32))
    assert bool((ends > 0).all())


@pytest.mark.emulator
@pytest.mark.parametrize("carry", [False, True])
def test_push_scatters_and_tells_every_rank(emulator, carry):
    near, far, ranks, rows, counters, _, near_before, far_before = transfer(push=True, carry=carry)
    want = far_before.clone()
    want[ranks.long(), rows.long()] = near_before
    assert torch.equal(far, want) and torch.equal(near, near_before)
    assert torch.equal(counters, torch.full((RANKS, RANKS), 3, dtype=torch.int32))


@pytest.mark.emulator
def test_without_signals_nobody_is_told(emulator):
    assert not transfer(push=True, signals=False)[4].any()


@pytest.mark.emulator
def test_ready_waits_and_gives_up(emulator):
    kernel = get_kernel(spec("link_ready", "ReadyKernel"))
    counters = torch.tensor([3, 3, 2], dtype=torch.int32)
    came = torch.full((2,), -1, dtype=torch.int64)
    launch(kernel, counters.data_ptr(), 3, 0, 2, came.data_ptr(), 10**6, 0)
    assert bool((came > 0).all())
    launch(kernel, counters.data_ptr(), 3, 1, 2, came.data_ptr(), 1000, 0)
    assert came[0] > 0 and came[1] == 0


@pytest.mark.emulator
def test_ping_goes_to_and_fro(emulator):
    kernel = get_kernel(spec("link_ping", "PingKernel"))
    words = torch.zeros(64, dtype=torch.int32)
    rounds = 3
    times = torch.zeros(2, rounds, 2, dtype=torch.int64)
    base = words.data_ptr()
    launch(kernel, base, base + 128, 128, 1, rounds, times.data_ptr(), 10**9, 2, 0)
    assert words[0] == rounds and words[32] == rounds
    (sent, seen), (answered, asked) = times[0].T, times[1].T
    assert bool((sent <= seen).all()) and bool((asked <= answered).all())
    assert bool((sent[1:] >= seen[:-1]).all())


@pytest.mark.emulator
def test_a_ping_nobody_answers_ends(emulator):
    kernel = get_kernel(spec("link_ping", "PingKernel"))
    words = torch.zeros(64, dtype=torch.int32)
    times = torch.zeros(1, 2, 2, dtype=torch.int64)
    base = words.data_ptr()
    launch(kernel, base, base + 128, 0, 1, 2, times.data_ptr(), 1000, 1, 0)
    assert words[32] == 1 and times[0, 1].tolist() == [0, 0]
