"""Two emulated GPUs at the same time: messages between them, stores that arrive late, deadlocks."""

import ctypes

import numpy as np
import pytest

from mok.tools.emulator import Emulator, KernelFault
from mok.tools.emulator.intercept import LaunchRequest
from tests.tools.emulator.ptx import HEAD, kernel

pytestmark = pytest.mark.emulator
# p0: data (32 words) and a flag behind it in the receiver's memory; p1: the receiver's result.
HEADER = (
    "mov.u32 %r0, %tid.x;\nld.param.u64 %d0, [p0];\nld.param.u64 %d1, [p1];\n"
    "mul.wide.u32 %d2, %r0, 4;\nadd.s64 %d3, %d0, %d2;\nadd.s64 %d4, %d1, %d2;\n"
    "setp.ne.u32 %p0, %r0, 0;\n"
)
RECEIVE = (
    HEADER + "POLL: ld.acquire.sys.global.b32 %r1, [%d0+128];\nsetp.eq.u32 %p1, %r1, 0;\n"
    "@%p1 bra POLL;\nld.global.b32 %r2, [%d3];\nst.global.b32 [%d4], %r2;"
)


def send(signal):
    return (
        HEADER + "add.u32 %r3, %r0, 100;\nst.global.b32 [%d3], %r3;\nbar.warp.sync -1;\n" + signal
    )


RELEASE = "@!%p0 st.release.sys.global.b32 [%d0+128], 1;"
FENCED = "fence.acq_rel.sys;\nbar.warp.sync -1;\n@!%p0 st.relaxed.sys.global.b32 [%d0+128], 1;"
ATOMIC = "@!%p0 red.release.sys.global.add.u32 [%d0+128], 1;"
RELAXED = "@!%p0 st.relaxed.sys.global.b32 [%d0+128], 1;"
RELAXED_ATOMIC = "@!%p0 red.relaxed.sys.global.add.u32 [%d0+128], 1;"
EXCHANGED = "@!%p0 atom.relaxed.sys.global.exch.b32 %r5, [%d0+128], 1;"


def exchange(signal, seed, sender=True, threads=32, **options):
    """What GPU 1 has read of the message that GPU 0 sends, and the report."""
    box, result = np.zeros(64, dtype=np.uint32), np.zeros(32, dtype=np.uint32)
    emulator = Emulator("sm_90a", 2, num_gpus=2, seed=seed, **options)
    emulator.register(box, result, gpu=1)
    values = [ctypes.c_uint64(a.ctypes.data) for a in (box, result)]
    pointers = (ctypes.c_uint64 * 2)(*map(ctypes.addressof, values))
    request = LaunchRequest(
        "k", (1, 1, 1), (threads, 1, 1), (1, 1, 1), 0, ctypes.addressof(pointers), None
    )
    params = ".param .u64 p0, .param .u64 p1"
    bodies = {1: RECEIVE} | ({0: send(signal)} if sender else {})
    with emulator.concurrent():
        for gpu, body in bodies.items():
            with emulator.device(gpu):
                emulator.run_ptx(HEAD.format(arch="sm_90a") + kernel(body, params), request)
    assert len(emulator.report.launches) == len(bodies)
    return result


@pytest.mark.parametrize("signal", [RELEASE, FENCED, ATOMIC])
def test_a_message_arrives_whole(signal):
    for seed in (None, *range(20)):
        np.testing.assert_array_equal(exchange(signal, seed), np.arange(100, 132))


def test_a_relaxed_signal_overtakes_what_it_announces():
    wrong = sum((exchange(RELAXED, seed) != np.arange(100, 132)).any() for seed in range(10))
    assert wrong >= 5
    np.testing.assert_array_equal(exchange(RELAXED, None), np.arange(100, 132))


@pytest.mark.parametrize("signal", [RELAXED_ATOMIC, EXCHANGED])
def test_a_relaxed_atomic_overtakes_what_it_announces(signal):
    wrong = sum((exchange(signal, seed) != np.arange(100, 132)).any() for seed in range(10))
    assert wrong >= 5
    np.testing.assert_array_equal(exchange(signal, None), np.arange(100, 132))


def count(signal):
    """Each lane adds to the word that announces it, then lane 0 signals."""
    return (
        HEADER + "add.u32 %r3, %r0, 100;\nred.relaxed.sys.global.add.u32 [%d3], %r3;\n"
        "bar.warp.sync -1;\n" + signal
    )


@pytest.mark.parametrize("signal,whole", [(RELEASE, True), (RELAXED, False)])
def test_atomics_on_another_gpu_arrive_late(monkeypatch, signal, whole):
    monkeypatch.setattr("tests.tools.emulator.test_emulator_gpus.send", count)
    wrong = sum((exchange(signal, seed) != np.arange(100, 132)).any() for seed in range(10))
    assert wrong == 0 if whole else wrong >= 5


def bulk(wait):
    """The message goes through shared memory and a bulk store."""

    def body(signal):
        return (
            ".shared .align 128 .b8 buffer[128];\nmov.u32 %r7, buffer;\n"
            + HEADER
            + "shl.b32 %r4, %r0, 2;\nadd.u32 %r4, %r4, %r7;\nadd.u32 %r3, %r0, 100;\n"
            "st.shared.b32 [%r4], %r3;\nfence.proxy.async.shared::cta;\nbar.warp.sync -1;\n"
            "mov.u32 %r6, 128;\n@%p0 bra SENT;\n"
            "cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r7], %r6;\n"
            f"cp.async.bulk.commit_group;\n{wait}\nSENT:\n" + signal
        )

    return body


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize(
    "wait,signal,whole",
    [
        ("cp.async.bulk.wait_group 0;", RELEASE, True),
        ("cp.async.bulk.wait_group 0;", ATOMIC, True),
        ("cp.async.bulk.wait_group 0;", RELAXED, False),
        ("cp.async.bulk.wait_group.read 0;", RELEASE, False),
    ],
)
def test_bulk_stores_arrive_late(monkeypatch, wait, signal, whole, check):
    monkeypatch.setattr("tests.tools.emulator.test_emulator_gpus.send", bulk(wait))
    results = [exchange(signal, seed, check=check) for seed in range(20)]
    wrong = sum((result != np.arange(100, 132)).any() for result in results)
    assert wrong == 0 if whole else wrong >= 4


@pytest.mark.parametrize("barrier,whole", [("bar.sync 0;", True), ("", False)])
def test_a_release_covers_only_what_happened_before_it(monkeypatch, barrier, whole):
    """Warp 1 writes the message; warp 0 signals."""

    def body(signal):
        return (
            "mov.u32 %r0, %tid.x;\nld.param.u64 %d0, [p0];\nsetp.lt.u32 %p2, %r0, 32;\n"
            "@%p2 bra HANDED;\nsub.u32 %r3, %r0, 32;\nmul.wide.u32 %d2, %r3, 4;\n"
            "add.s64 %d3, %d0, %d2;\nadd.u32 %r3, %r3, 100;\nst.global.b32 [%d3], %r3;\nHANDED:\n"
            f"{barrier}\nsetp.ne.u32 %p0, %r0, 0;\n@%p0 bra E;\nmov.u32 %r8, 200;\n"
            "LATER: sub.u32 %r8, %r8, 1;\nsetp.ne.u32 %p1, %r8, 0;\n@%p1 bra LATER;\n"
            "st.release.sys.global.b32 [%d0+128], 1;\nE:"
        )

    monkeypatch.setattr("tests.tools.emulator.test_emulator_gpus.send", body)
    monkeypatch.setattr(
        "tests.tools.emulator.test_emulator_gpus.RECEIVE",
        RECEIVE.replace(HEADER, HEADER + "setp.gt.u32 %p3, %r0, 31;\n@%p3 bra E;\n") + "\nE:",
    )
    results = [exchange("", seed, threads=64, check=True) for seed in range(10)]
    wrong = sum((result != np.arange(100, 132)).any() for result in results)
    assert wrong == 0 if whole else wrong >= 3


def test_waiting_for_a_gpu_that_sends_nothing_is_a_deadlock():
    with pytest.raises(KernelFault, match=r"every GPU waits(.|\n)*GPU 1(.|\n)*to change from 0"):
        exchange("", 0, sender=False)
    with pytest.raises(KernelFault, match=r"every GPU waits(.|\n)*GPU 1"):
        exchange("", 3)


def test_the_same_seed_gives_the_same_run():
    first, second = (exchange(RELAXED, 7) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_launches_of_one_gpu_follow_each_other():
    data = np.ones(32, dtype=np.uint32)
    emulator = Emulator("sm_90a", 2)
    emulator.register(data)
    value = ctypes.c_uint64(data.ctypes.data)
    pointers = (ctypes.c_uint64 * 1)(ctypes.addressof(value))
    request = LaunchRequest(
        "k", (1, 1, 1), (32, 1, 1), (1, 1, 1), 0, ctypes.addressof(pointers), None
    )
    double = (
        "mov.u32 %r0, %tid.x;\nld.param.u64 %d0, [p0];\nmul.wide.u32 %d2, %r0, 4;\n"
        "add.s64 %d3, %d0, %d2;\nld.global.b32 %r2, [%d3];\nshl.b32 %r2, %r2, 1;\n"
        "st.global.b32 [%d3], %r2;"
    )
    with emulator.concurrent():
        for _ in range(3):
            emulator.run_ptx(HEAD.format(arch="sm_90a") + kernel(double), request)
        assert (data == 1).all()
    assert (data == 8).all()
