"""Global memory that is declared as not written: each kind of read before the write is reported, no other."""

import ctypes

import numpy as np
import pytest

from mok.tools.emulator import Emulator, EmulatorError, KernelFault
from mok.tools.emulator.intercept import LaunchRequest
from tests.tools.emulator.ptx import HEAD, kernel
from tests.tools.emulator.test_emulator_tcgen05 import tensor_map

pytestmark = pytest.mark.emulator
RULE = "read of global memory that nothing has written at tensor 0"

# One warp; p0: 64 rows of 64 words, p1: a tensor map of them. %d1: the thread's word of the first row.
START = (
    "mov.u32 %r0, %tid.x;\nmov.u32 %r1, smem;\nld.param.u64 %d0, [p0];\nld.param.u64 %d4, [p1];\n"
    "mul.wide.u32 %d2, %r0, 4;\nadd.s64 %d1, %d0, %d2;\nsetp.ne.u32 %p0, %r0, 0;\n"
    "cvt.u32.u64 %r2, %d2;\nadd.u32 %r2, %r1, %r2;\n"
)
BARRIER = "@%p0 bra I;\nmbarrier.init.shared.b64 [%r1+4096], 1;\nI:\nbar.sync 0;\n"
EXPECT = (
    BARRIER + "@%p0 bra W;\nmbarrier.arrive.expect_tx.shared.b64 %d9, [%r1+4096], 128;\n{copy}\n"
    "W: mbarrier.try_wait.parity.shared.b64 %p2, [%r1+4096], 0;\n@!%p2 bra W;\n"
)
FROM_SHARED = (
    "st.shared.b32 [%r2], %r0;\nfence.proxy.async.shared::cta;\nbar.sync 0;\n@%p0 bra E;\n{copy}\n"
    "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\nE:\n"
)
READS = {
    "load": "ld.global.b32 %r3, [%d1];",
    "vector": "@%p0 bra E;\nld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%d0];\nE:",
    "byte": "ld.global.u8 %r3, [%d1+2];",
    "generic": "ld.b32 %r3, [%d1];",
    "acquire": "ld.acquire.gpu.global.b32 %r3, [%d1];",
    "copy": "@%p0 bra E;\ncp.async.ca.shared.global [%r1], [%d0], 16;\ncp.async.wait_all;\nE:",
    "add": "red.global.add.u32 [%d1], 1;",
    "exchange": "atom.global.exch.b32 %r3, [%d1], 1;",
    "bulk": EXPECT.format(
        copy="cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%r1], [%d0], 128, [%r1+4096];"
    ),
    "tensor": EXPECT.format(
        copy="mov.u32 %r8, 0;\ncp.async.bulk.tensor.2d.shared::cluster.global.tile"
        ".mbarrier::complete_tx::bytes [%r1], [%d4, {%r8, %r8}], [%r1+4096];"
    ),
    "bulk reduction": FROM_SHARED.format(
        copy="cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%d0], [%r1], 128;"
    ),
}
WRITES = {
    "store": "st.global.b32 [%d1], %r0;",
    "exchanged": "atom.global.exch.b32 _, [%d1], 1;",
    "bulk store": FROM_SHARED.format(
        copy="cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r1], 128;"
    ),
    "tensor store": FROM_SHARED.format(
        copy="mov.u32 %r8, 0;\ncp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
        " [%d4, {%r8, %r8}], [%r1];"
    ),
}


class Machine:
    """An emulator, and 64 x 64 words that it knows."""

    def __init__(self, seed=None, **options):
        self.words = np.zeros((64, 64), dtype=np.uint32)
        self.map = tensor_map(self.words)
        self.emulator = Emulator("sm_90a", 2, seed=seed, **{"check": True} | options)
        self.emulator.register(self.words, self.map)

    def launch(self, *bodies):
        values = [ctypes.c_uint64(a.ctypes.data) for a in (self.words, self.map)]
        pointers = (ctypes.c_uint64 * 2)(*map(ctypes.addressof, values))
        request = LaunchRequest(
            "k", (1, 1, 1), (32, 1, 1), (1, 1, 1), 0, ctypes.addressof(pointers), None
        )
        text = kernel(START + "".join(bodies), ".param .u64 p0, .param .u64 p1", shared=8192)
        self.emulator.run_ptx(HEAD.format(arch="sm_90a") + text, request)


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("read", READS)
def test_every_read_before_the_write_is_reported(read, seed):
    machine = Machine(seed)
    machine.emulator.register(machine.words, written=False)
    with pytest.raises(KernelFault, match=RULE) as error:
        machine.launch(READS[read])
    (found,) = error.value.report.findings
    (reads,) = (line for line in READS[read].split("\n") if "[%d" in line)
    assert reads.split(" ")[0] in found.where and not found.other
    Machine(seed).launch(READS[read])  # nobody has said that it is not written


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("write", WRITES)
def test_no_read_after_a_write_is_reported(write, read):
    """By a launch before, of whatever kind the write was."""
    machine = Machine()
    machine.emulator.register(machine.words, written=False)
    machine.launch(WRITES[write])
    machine.launch(READS[read])


def test_a_write_of_the_launch_itself():
    machine = Machine(seed=1)
    machine.emulator.register(machine.words, written=False)
    machine.launch(WRITES["store"], READS["load"])
    with pytest.raises(KernelFault, match=r"tensor 0 \+ 0x100"):
        machine.launch(READS["load"].replace("[%d1]", "[%d1+256]"))


def test_a_tensor_map_that_nothing_has_written():
    machine = Machine()
    machine.emulator.register(machine.map, written=False)
    with pytest.raises(KernelFault, match=RULE.replace("tensor 0", "tensor 1")):
        machine.launch(READS["tensor"])


def test_bytes_count():
    machine = Machine()
    machine.emulator.register(machine.words, written=False)
    machine.launch("st.global.u8 [%d1+2], %r0;\n", READS["byte"])
    with pytest.raises(KernelFault, match=RULE):
        machine.launch(READS["load"])


def test_what_the_host_writes_it_says():
    """A part of an array, and the parts beside it; what is not written again; a launch without checkers."""
    torch = pytest.importorskip("torch")
    machine = Machine()
    rows = torch.from_numpy(machine.words.view(np.int32))
    machine.emulator.register(rows[0, :16], written=False)
    with pytest.raises(KernelFault, match=RULE):
        machine.launch(READS["load"])
    machine.launch("setp.lt.u32 %p1, %r0, 16;\n@!%p1 ld.global.b32 %r3, [%d1];")
    machine.emulator.register(rows)  # as every launch of a layer does: changes nothing
    with pytest.raises(KernelFault, match=RULE):
        machine.launch(READS["load"])
    machine.emulator.register(rows[0], written=True)
    machine.launch(READS["load"])
    machine.emulator.register(rows, written=False)
    with pytest.raises(KernelFault, match=RULE):
        machine.launch(READS["load"])
    machine.emulator.check = False
    machine.launch("")
    machine.emulator.check = True
    machine.launch(READS["load"])
    with pytest.raises(EmulatorError, match="contiguous"):
        machine.emulator.register(rows[:, 0], written=False)


@pytest.mark.parametrize("sender", [True, False])
def test_the_other_gpu_writes(sender):
    """Of launches at the same time: one knows what the other has written."""
    machine = Machine(num_gpus=2, seed=2)
    machine.emulator.register(machine.words, gpu=1)
    machine.emulator.register(machine.words[0], gpu=1, written=False)
    flag = "[%d0+256]"
    send = (
        f"st.global.b32 [%d1], %r0;\nbar.warp.sync -1;\n@!%p0 st.release.sys.global.b32 {flag}, 1;"
    )
    signal = f"@!%p0 st.relaxed.sys.global.b32 {flag}, 1;"
    receive = (
        f"P: ld.acquire.sys.global.b32 %r4, {flag};\nsetp.eq.u32 %p1, %r4, 0;\n@%p1 bra P;\n"
        "ld.global.b32 %r3, [%d1];"
    )

    def both():
        with machine.emulator.concurrent():
            for gpu, body in ((0, send if sender else signal), (1, receive)):
                with machine.emulator.device(gpu):
                    machine.launch(body)

    if sender:
        both()
    else:
        with pytest.raises(KernelFault, match=RULE):
            both()
