"""Edits of tensor maps, and copies by maps that a kernel has made from nothing: PTX that runs alike on
an H200 and in the emulator, and the record of what the H200 made of it.

    python -m tests.tools.emulator.tensor_maps      # on a GPU: writes tests/data/h200-tensor-maps.json
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.tools.emulator.ptx import kernel

RECORD = Path(__file__).parents[2] / "data" / "h200-tensor-maps.json"
HEAD = ".version 8.6\n.target {arch}\n.address_size 64\n"
IMMEDIATE = ("elemtype", "interleave_layout", "swizzle_mode", "fill_mode")  # what PTX asks for
FILLED = bytes(range(1, 65)) + bytes(64)  # a template without an unset field, for edits only


def edit(field: str, value: int | str, ordinal: int | None = None) -> str:
    """One edit; ``{space}`` and ``{at}`` are the form and the address."""
    wide = field in ("global_address", "global_stride")
    kind, register = ("b64", "%d20") if wide else ("b32", "%r40")
    text, place = "", "" if ordinal is None else f"{ordinal}, "
    if isinstance(value, str) or field in IMMEDIATE:
        register = str(value)
    else:
        text = f"mov.{kind} {register}, {value};\n"
    return (
        text
        + f"tensormap.replace.tile.{field}{{space}}.b1024.{kind} [{{at}}], {place}{register};\n"
    )


EDITS: dict[str, str] = {
    "nothing": "",
    "global_address": edit("global_address", 0x7F12_3456_7890),
    **{f"rank {n}": edit("rank", n) for n in range(5)},
    **{f"box_dim {i}": edit("box_dim", 1 + 37 * i, i) for i in range(5)},
    "box_dim 0, the largest": edit("box_dim", 256, 0),
    **{f"global_dim {i}": edit("global_dim", 1 + 123457 * i, i) for i in range(5)},
    "global_dim 1, the largest": edit("global_dim", 0xFFFFFFFF, 1),
    **{f"global_stride {i}": edit("global_stride", 16 * (i + 1) + (i << 33), i) for i in range(4)},
    "global_stride 2, the largest": edit("global_stride", (1 << 40) - 16, 2),
    **{f"element_stride {i}": edit("element_stride", i + 1, i) for i in range(5)},
    "element_stride 1, the largest": edit("element_stride", 8, 1),
    **{f"elemtype {n}": edit("elemtype", n) for n in range(13)},
    **{f"interleave_layout {n}": edit("interleave_layout", n) for n in range(3)},
    **{f"swizzle_mode {n}": edit("swizzle_mode", n) for n in range(4)},
    **{f"fill_mode {n}": edit("fill_mode", n) for n in range(2)},
    "two of a kind": edit("global_dim", 5, 0) + edit("global_dim", 7, 0),
}
FORMS = {"shared": (".shared::cta", "%r1"), "global": (".global", "%d1"), "generic": ("", "%d5")}


def editing(edits: str, form: str) -> str:
    """Copies 32 words from p0, edits the copy, leaves it in p1."""
    space, at = FORMS[form]
    return kernel(
        "mov.u32 %r0, %tid.x;\nmov.u32 %r1, smem;\nmov.u64 %d5, smem;\ncvta.shared.u64 %d5, %d5;\n"
        "ld.param.u64 %d0, [p0];\nld.param.u64 %d1, [p1];\nshl.b32 %r2, %r0, 2;\n"
        "add.u32 %r3, %r1, %r2;\ncvt.u64.u32 %d2, %r2;\nadd.s64 %d3, %d0, %d2;\n"
        "add.s64 %d4, %d1, %d2;\nld.global.b32 %r4, [%d3];\nst.shared.b32 [%r3], %r4;\n"
        "st.global.b32 [%d4], %r4;\nbar.sync 0;\nsetp.ne.u32 %p0, %r0, 0;\n@%p0 bra EDITED;\n"
        + edits.format(space=space, at=at)
        + "EDITED:\nbar.sync 0;\n"
        + ("" if form == "global" else "ld.shared.b32 %r4, [%r3];\nst.global.b32 [%d4], %r4;"),
        ".param .u64 p0, .param .u64 p1",
        shared=128,
    )


@dataclass(frozen=True)
class Copy:
    """A bulk load by a map that is made from 128 zero bytes.  Dimensions are innermost first."""

    elemtype: int
    dims: Sequence[int]
    strides: Sequence[int]  # bytes, of dimensions 1 and up
    box: Sequence[int]
    at: Sequence[int]
    size: int  # bytes of the box
    swizzle: int = 0
    fill: int = 0
    steps: Sequence[int] = ()  # element strides other than 1

    @property
    def edits(self) -> str:
        rank = len(self.dims)
        steps = [*self.steps] or [1] * rank
        return "".join(
            [
                edit("global_address", "%d0"),
                edit("rank", rank - 1),
                *(edit("box_dim", n, i) for i, n in enumerate(self.box)),
                *(edit("global_dim", n, i) for i, n in enumerate(self.dims)),
                *(edit("global_stride", n, i) for i, n in enumerate(self.strides)),
                *(edit("element_stride", n, i) for i, n in enumerate(steps)),
                edit("elemtype", self.elemtype),
                edit("interleave_layout", 0),
                edit("swizzle_mode", self.swizzle),
                edit("fill_mode", self.fill),
            ]
        )


HALF = ((40, 24), (96,), (16, 8))  # of 16-bit elements: dims, strides, box
COPIES: dict[str, Copy] = {
    "one dimension": Copy(2, (100,), (), (32,), (17,), 128),
    "past the end": Copy(2, (100,), (), (32,), (84,), 128),
    "before the start": Copy(6, *HALF, (-3, -2), 256),
    "NaN, F16": Copy(6, *HALF, (30, 20), 256, fill=1),
    "NaN, BF16": Copy(10, *HALF, (-5, 20), 256, fill=1),
    "NaN, F32": Copy(7, (20, 24), (96,), (8, 8), (15, 19), 256, fill=1),
    "NaN, F32 to zero": Copy(8, (20, 24), (96,), (8, 8), (15, 19), 256, fill=1),
    "NaN, TF32": Copy(11, (20, 24), (96,), (8, 8), (15, 19), 256, fill=1),
    "NaN, TF32 to zero": Copy(12, (20, 24), (96,), (8, 8), (15, 19), 256, fill=1),
    "NaN, F64": Copy(9, (10, 24), (96,), (4, 8), (8, 19), 256, fill=1),
    "bytes": Copy(0, (90, 24), (96,), (32, 8), (61, 18), 256),
    "F32": Copy(7, (20, 24), (96,), (8, 8), (5, 9), 256),
    "F32, denormals to zero": Copy(8, (20, 24), (96,), (8, 8), (5, 9), 256),
    "TF32": Copy(11, (20, 24), (96,), (8, 8), (5, 9), 256),
    "TF32, denormals to zero": Copy(12, (20, 24), (96,), (8, 8), (5, 9), 256),
    **{
        f"swizzle {mode}": Copy(10, (40, 24), (96,), (8 << mode, 8), (3, 1), 128 << mode, mode)
        for mode in (1, 2, 3)
    },
    "three dimensions": Copy(1, (40, 6, 4), (96, 576), (16, 3, 2), (30, 4, 1), 192),
    "five dimensions": Copy(
        1, (8, 3, 3, 2, 2), (16, 48, 144, 288), (8, 2, 2, 1, 2), (1, 1, 2, 0, 1), 128
    ),
    "every second row": Copy(1, *HALF, (3, 1), 128, steps=(1, 2)),
    "every third row, past the end": Copy(1, *HALF, (3, 20), 96, steps=(1, 3)),
    "a step within rows": Copy(1, *HALF, (3, 1), 256, steps=(2, 1)),
}
SOURCE_WORDS, BOX_WORDS = 1024, 512


def source() -> np.ndarray:
    """Words of every kind, FP32 denormals among them."""
    i = np.arange(SOURCE_WORDS, dtype=np.uint64)
    words = (i * 2654435761 & 0xFFFFFFFF).astype(np.uint32)
    return np.where(i % 5 == 0, words & np.uint32(0x807FFFFF), words).astype(np.uint32)


PUBLISH = (
    "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned "
    "[%d1], [%r1], 128;\n"
)
ACQUIRE = "fence.proxy.tensormap::generic.acquire.gpu [%d1], 128;\n"


def copying(copy: Copy, publish: str = PUBLISH, acquire: str = ACQUIRE) -> str:
    """Makes a map in shared memory, publishes it at p1, loads a box of p0 by it and leaves it in p2.

    The wait gives up after a while: the box then holds what was there before.
    """
    rank = len(copy.dims)
    at = ", ".join(map(str, copy.at))
    return kernel(
        "mov.u32 %r0, %tid.x;\nmov.u32 %r1, smem;\nld.param.u64 %d0, [p0];\nld.param.u64 %d1, [p1];\n"
        "ld.param.u64 %d2, [p2];\nshl.b32 %r2, %r0, 2;\nadd.u32 %r3, %r1, %r2;\n"
        "st.shared.b32 [%r3], 0;\nadd.u32 %r4, %r3, 1024;\nmov.u32 %r5, 0;\n"
        "CLEAR: st.shared.b32 [%r4], 0xEEEEEEEE;\nadd.u32 %r4, %r4, 128;\nadd.u32 %r5, %r5, 1;\n"
        "setp.lt.u32 %p1, %r5, 16;\n@%p1 bra CLEAR;\nfence.proxy.async.shared::cta;\n"
        "bar.warp.sync -1;\nsetp.ne.u32 %p0, %r0, 0;\n@%p0 bra MADE;\n"
        "mbarrier.init.shared.b64 [%r1+128], 1;\nfence.mbarrier_init.release.cluster;\n"
        + copy.edits.format(space=".shared::cta", at="%r1")
        + "MADE:\nbar.warp.sync -1;\n"
        + publish
        + acquire
        + f"@%p0 bra ISSUED;\nmbarrier.arrive.expect_tx.shared.b64 %d9, [%r1+128], {copy.size};\n"
        f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        f"[%r1+1024], [%d1, {{{at}}}], [%r1+128];\nISSUED:\nbar.warp.sync -1;\nmov.u32 %r6, 0;\n"
        "WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r1+128], 0;\n@%p2 bra COPIED;\n"
        "add.u32 %r6, %r6, 1;\nsetp.lt.u32 %p3, %r6, 100000;\n@%p3 bra WAIT;\n"
        "COPIED:\nadd.u32 %r4, %r3, 1024;\ncvt.u64.u32 %d3, %r2;\nadd.s64 %d3, %d2, %d3;\n"
        "mov.u32 %r5, 0;\n"
        "OUT: ld.shared.b32 %r7, [%r4];\nst.global.b32 [%d3], %r7;\nadd.u32 %r4, %r4, 128;\n"
        "add.s64 %d3, %d3, 128;\nadd.u32 %r5, %r5, 1;\nsetp.lt.u32 %p1, %r5, 16;\n@%p1 bra OUT;",
        ".param .u64 p0, .param .u64 p1, .param .u64 p2",
        shared=4096,
    )


Launch = Callable[[str, list[np.ndarray]], None]  # runs a kernel of one warp on copies of arrays


def edits(launch: Launch) -> dict[str, str]:
    """What every edit makes of both templates, in every form, as hexadecimal text."""
    out = {}
    for name, text in EDITS.items():
        for form in FORMS:
            for label, template in (("zeros", bytes(128)), ("filled", FILLED)):
                before = np.frombuffer(template, dtype=np.uint8).copy()
                after = np.zeros(128, dtype=np.uint8)
                launch(editing(text, form), [before, after])
                out[f"{name}, {form}, {label}"] = after.tobytes().hex()
    return out


def box(launch: Launch, copy: Copy) -> str:
    """The box that a copy brings, as hexadecimal text."""
    out = np.zeros(BOX_WORDS, dtype=np.uint32)
    launch(copying(copy), [source(), np.zeros(128, dtype=np.uint8), out])
    return out.tobytes()[: copy.size].hex()


def must(found: tuple) -> Any:
    """The value of a driver call that has succeeded."""
    if int(found[0]):
        raise RuntimeError(f"the driver answers {found[0]!r}")
    return found[1] if len(found) > 1 else None


def on_the_gpu(text: str, arrays: list[np.ndarray]) -> None:
    """Runs kernel ``k`` of one warp through the driver, and reads every array back."""
    from cuda.bindings import driver

    module = must(driver.cuModuleLoadData((HEAD.format(arch="sm_90a") + text).encode() + b"\0"))
    function = must(driver.cuModuleGetFunction(module, b"k"))
    memory = [must(driver.cuMemAlloc(a.nbytes)) for a in arrays]
    for at, array in zip(memory, arrays, strict=True):
        must(driver.cuMemcpyHtoD(at, array.ctypes.data, array.nbytes))
    pointers = np.array([int(m) for m in memory], dtype=np.uint64)
    places = np.array([pointers.ctypes.data + 8 * i for i in range(len(arrays))], dtype=np.uint64)
    must(driver.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, 0, places.ctypes.data, 0))
    must(driver.cuCtxSynchronize())
    for at, array in zip(memory, arrays, strict=True):
        must(driver.cuMemcpyDtoH(array.ctypes.data, at, array.nbytes))
        must(driver.cuMemFree(at))
    must(driver.cuModuleUnload(module))


def use_the_gpu() -> str:
    """Makes a context on the first GPU; its name, or nothing when it is no Hopper GPU."""
    from cuda.bindings import driver

    must(driver.cuInit(0))
    device = must(driver.cuDeviceGet(0))
    kind = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    if must(driver.cuDeviceGetAttribute(kind, device)) != 9:
        return ""
    must(driver.cuCtxSetCurrent(must(driver.cuDevicePrimaryCtxRetain(device))))
    return must(driver.cuDeviceGetName(128, device)).split(b"\0")[0].decode()


def main() -> int:
    try:
        device = use_the_gpu()
    except RuntimeError:  # no driver
        device = ""
    if not device:
        print("This records what a Hopper GPU does, and there is none.", file=sys.stderr)
        return 2
    if len(sys.argv) > 1:  # one copy, in a process of its own: a wrong map ends the context
        print(box(on_the_gpu, COPIES[sys.argv[1]]))
        return 0
    found: dict[str, Any] = {"device": device, "edits": edits(on_the_gpu), "copies": {}}
    for name in COPIES:
        command = [sys.executable, "-m", "tests.tools.emulator.tensor_maps", name]
        done = subprocess.run(command, capture_output=True, text=True)
        right = done.returncode == 0
        found["copies"][name] = done.stdout.strip() if right else None
        print(f"{name}: {'copied' if right else done.stderr.strip().splitlines()[-1]}", flush=True)
        RECORD.write_text(json.dumps(found, indent=0) + "\n")
    print(f"{len(found['edits'])} edits and {len(found['copies'])} copies in {RECORD}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
