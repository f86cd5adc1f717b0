"""What cannot run is refused before it does, with the rule and the value."""

import ctypes
import json

import numpy as np
import pytest

from mok.tools.emulator import Emulator, EmulatorError, KernelFault, LaunchError
from mok.tools.emulator.intercept import LaunchRequest
from tests.tools.emulator.ptx import HEAD, kernel, run

pytestmark = pytest.mark.emulator


def words():
    return np.zeros(64, dtype=np.uint32)


def test_more_shared_memory_than_a_block_has():
    with pytest.raises(LaunchError, match="at most 232448 bytes of shared memory: 240000"):
        run(kernel("", shared=240_000), words())


def test_a_cluster_that_is_too_large():
    with pytest.raises(LaunchError, match="at most 16 CTAs"):
        run(kernel(""), words(), grid=32, cluster=32, num_sms=32)


def test_a_cluster_that_finds_no_room():
    with pytest.raises(LaunchError, match="must fit the emulated SMs"):
        run(kernel("", shared=200_000), words(), grid=8, cluster=8, num_sms=4)


def test_more_ctas_than_this_machine_holds():
    with pytest.raises(LaunchError, match="must fit this machine's memory"):
        run(kernel("", shared=200_000), words(), grid=2**24, num_sms=2**24)


def test_tensors_of_another_device():
    torch = pytest.importorskip("torch")
    with pytest.raises(LaunchError, match="need CPU tensors"):
        Emulator("sm_90a").register(torch.empty(4, device="meta"))


def test_an_architecture_that_is_not_emulated():
    with pytest.raises(EmulatorError, match="must be emulated"):
        Emulator("sm_80")


ALLOC = (
    "mov.u32 %r1, smem;\n"
    "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], {first};\n"
    "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1+4], {second};\n"
)


def launch_allocations(first, second, before="", arch="sm_100a"):
    text = before + ALLOC.format(first=first, second=second)
    run(kernel(text, shared=64), words(), arch=arch)


@pytest.mark.parametrize(
    "first,second,rule",
    [
        (512, 32, r"deadlock(.|\n)*512 of 512 columns"),
        (256, 128, "must free its TMEM"),
    ],
)
def test_more_tensor_memory_than_there_is(first, second, rule):
    with pytest.raises(KernelFault, match=rule):
        launch_allocations(first, second)


@pytest.mark.parametrize("columns", [1024, 48, 16, 0])
def test_tensor_memory_that_no_launch_can_get(columns):
    """Refused before the launch, whether the PTX says it in place or, as the DSL, through a register."""
    rule = f"powers of two from 32 to 512 columns: {columns}, 'tcgen05.alloc"
    with pytest.raises(LaunchError, match=rule):
        launch_allocations(32, columns)
    with pytest.raises(LaunchError, match=rule):
        launch_allocations("%r9", 32, f"mov.b32 %r9, {columns};\n")


def test_a_number_of_columns_that_only_the_run_knows():
    with pytest.raises(KernelFault, match="powers of two from 32 to 512 columns: 1024"):
        launch_allocations("%r9", 32, "mov.b32 %r9, 512;\nadd.u32 %r9, %r9, 512;\n")
    with pytest.raises(KernelFault, match="must free its TMEM"):  # 64: the guard leaves the 48 out
        launch_allocations(
            "%r9", 32, "setp.eq.u32 %p1, 0, 1;\nmov.b32 %r9, 64;\n@%p1 mov.b32 %r9, 48;\n"
        )


PAIR = (
    "mov.u32 %r1, smem;\nmov.u32 %r2, %cluster_ctarank;\nsetp.ne.u32 %p0, %r2, 0;\n"
    "add.u32 %r4, %r2, 1;\nshl.b32 %r4, %r4, 5;\n{guard} bra E;\n"
    "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r1], {columns};\n"
    "ld.shared.b32 %r3, [%r1];\n"
    "tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r3, {columns};\nE:\n"
)


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_a_pair_of_ctas_allocates_tensor_memory_together(seed):
    def go(guard, columns):
        text = kernel(PAIR.format(guard=guard, columns=columns), shared=64)
        pair = {"arch": "sm_100a", "grid": 2, "cluster": 2, "check": True, "seed": seed}
        run(text, words(), **pair)

    go("@%p15", 64)
    with pytest.raises(KernelFault, match=r"deadlock(.|\n)*the peer CTA to allocate"):
        go("@%p0", 64)
    with pytest.raises(KernelFault, match="allocates the same columns"):
        go("@%p15", "%r4")


def test_tensor_memory_on_hopper():
    with pytest.raises(LaunchError, match="sm_100a and later"):
        launch_allocations(32, 32, arch="sm_90a")


def test_a_launch_of_a_kernel_that_is_not_in_the_ptx():
    pointers = (ctypes.c_uint64 * 1)()
    request = LaunchRequest(
        "other", (1, 1, 1), (32, 1, 1), (1, 1, 1), 0, ctypes.addressof(pointers), None
    )
    with pytest.raises(LaunchError, match="must hold the launched kernel: other"):
        Emulator("sm_90a").run_ptx(HEAD.format(arch="sm_90a") + kernel(""), request)


SIGNAL = "ld.param.u64 %d0, [p0];\n{op}.{scope}.global{rest} [%d0], 1;"


@pytest.mark.parametrize("op,rest", [("st.release", ".b32"), ("red.relaxed", ".add.u32")])
def test_a_signal_to_another_gpu_needs_scope_sys(op, rest):
    def signal(scope, of, on):
        flag = words()
        emulator = Emulator("sm_90a", 2, num_gpus=2)
        emulator.register(flag, gpu=of)
        value = ctypes.c_uint64(flag.ctypes.data)
        pointers = (ctypes.c_uint64 * 1)(ctypes.addressof(value))
        request = LaunchRequest(
            "k", (1, 1, 1), (32, 1, 1), (1, 1, 1), 0, ctypes.addressof(pointers), None
        )
        body = SIGNAL.format(op=op, scope=scope, rest=rest)
        with emulator.device(on):
            emulator.run_ptx(HEAD.format(arch="sm_90a") + kernel(body), request)

    signal("sys", of=1, on=0)
    signal("gpu", of=1, on=1)
    with pytest.raises(KernelFault, match="needs scope sys"):
        signal("gpu", of=1, on=0)


def test_gpus_that_do_not_exist():
    emulator = Emulator("sm_90a", num_gpus=2)
    with pytest.raises(EmulatorError, match="has 2 GPUs"):
        emulator.register(words(), gpu=2)
    with pytest.raises(EmulatorError, match="has 2 GPUs"), emulator.device(-1):
        pass


def test_a_timeline_names_the_operations(tmp_path):
    from tests.tools.emulator.mutated import CHUNKS, pipeline

    source = np.arange(32 * CHUNKS, dtype=np.uint32)
    report = run(pipeline(), source, np.zeros_like(source), threads=64, seed=3, timeline=True)
    path = tmp_path / "run.json"
    report.write_timeline(path)
    events = json.loads(path.read_text())["traceEvents"]
    assert {e["name"] for e in events} == {"bulk load", "bulk store"}
    assert len(events) == 2 * CHUNKS
    for event in events:
        assert event["ph"] == "X" and event["dur"] >= 1
        assert event["pid"] == "(0, 0, 0)" and event["tid"].startswith("warp ")
        assert "cp.async.bulk" in event["args"]["at"]
