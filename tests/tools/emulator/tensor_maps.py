"""Edits of tensor maps, and copies by maps that a kernel has made from nothing or from a map that the driver
has encoded: PTX that runs alike on an H200 and in the emulator, and the record of what the H200 made of it.

    python -m tests.tools.emulator.tensor_maps      # on a GPU: writes tests/data/h200-tensor-maps.json
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
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
    """A bulk copy by a map with these fields.  Dimensions are innermost first."""

    elemtype: int
    dims: Sequence[int]
    strides: Sequence[int]  # bytes, of dimensions 1 and up
    box: Sequence[int]
    at: Sequence[int]
    size: int  # bytes of the box
    swizzle: int = 0
    fill: int = 0
    steps: Sequence[int] = ()  # element strides other than 1
    store: bool = False  # to global memory, instead of from there

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
    "one dimension": Copy(2, (100,), (), (32,), (20,), 128),
    "past the end": Copy(2, (100,), (), (32,), (84,), 128),
    "before the start": Copy(6, *HALF, (-8, -2), 256),
    "NaN, F16": Copy(6, *HALF, (32, 20), 256, fill=1),
    "NaN, BF16": Copy(10, *HALF, (-8, 20), 256, fill=1),
    "NaN, F32": Copy(7, (20, 24), (96,), (8, 8), (16, 19), 256, fill=1),
    "NaN, F32 to zero": Copy(8, (20, 24), (96,), (8, 8), (16, 19), 256, fill=1),
    "NaN, TF32": Copy(11, (20, 24), (96,), (8, 8), (16, 19), 256, fill=1),
    "NaN, TF32 to zero": Copy(12, (20, 24), (96,), (8, 8), (16, 19), 256, fill=1),
    "NaN, F64": Copy(9, (10, 24), (96,), (4, 8), (8, 19), 256, fill=1),
    "bytes": Copy(0, (90, 24), (96,), (32, 8), (64, 18), 256),
    "F32": Copy(7, (20, 24), (96,), (8, 8), (4, 9), 256),
    "F32, denormals to zero": Copy(8, (20, 24), (96,), (8, 8), (4, 9), 256),
    "TF32": Copy(11, (20, 24), (96,), (8, 8), (4, 9), 256),
    "TF32, denormals to zero": Copy(12, (20, 24), (96,), (8, 8), (4, 9), 256),
    **{
        f"swizzle {mode}": Copy(10, (40, 24), (96,), (8 << mode, 8), (8, 1), 128 << mode, mode)
        for mode in (1, 2, 3)
    },
    "three dimensions": Copy(1, (40, 6, 4), (96, 576), (16, 3, 2), (32, 4, 1), 192),
    "five dimensions": Copy(
        1, (8, 3, 3, 2, 2), (16, 48, 144, 288), (8, 2, 2, 1, 2), (0, 1, 2, 0, 1), 128
    ),
    "every second row": Copy(1, *HALF, (8, 1), 128, steps=(1, 2)),
    "every third row, past the end": Copy(1, *HALF, (8, 20), 96, steps=(1, 3)),
    "a step within rows": Copy(1, *HALF, (8, 1), 256, steps=(2, 1)),
    "a store": Copy(10, (40, 24), (96,), (32, 8), (16, 19), 512, 2, store=True),
}
# First coordinates that are no multiple of 16 bytes: an H200 ends the copy as an illegal instruction.
MISALIGNED: dict[str, Sequence[int]] = {
    "one dimension": (17,),
    "before the start": (-3, -2),
    "NaN, F16": (30, 20),
    "NaN, BF16": (-5, 20),
    "NaN, F32": (15, 19),
    "NaN, F32 to zero": (15, 19),
    "NaN, TF32": (15, 19),
    "NaN, TF32 to zero": (15, 19),
    "NaN, F64": (9, 19),
    "bytes": (61, 18),
    "F32": (5, 9),
    "F32, denormals to zero": (5, 9),
    "TF32": (5, 9),
    "TF32, denormals to zero": (5, 9),
    "swizzle 1": (3, 1),
    "swizzle 2": (3, 1),
    "a store": (12, 19),
}
REFUSED = {f"{name}, misaligned": replace(COPIES[name], at=at) for name, at in MISALIGNED.items()}
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
    """Edits the map at p1 in shared memory, publishes it there, loads a box of p0 by it and leaves it in p2.

    The wait gives up after a while: the box then holds what was there before.  A copy that is a store
    stores the box at p2 to p0.
    """
    rank = len(copy.dims)
    at = ", ".join(map(str, copy.at))
    issue = (
        f"mbarrier.arrive.expect_tx.shared.b64 %d9, [%r1+128], {copy.size};\n"
        f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        f"[%r1+1024], [%d1, {{{at}}}], [%r1+128];\n"
    )
    clear = "st.shared.b32 [%r4], 0xEEEEEEEE;\n"
    wait = "mbarrier.try_wait.parity.shared.b64 %p2, [%r1+128], 0;\n"
    if copy.store:
        issue = (
            f"cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group "
            f"[%d1, {{{at}}}], [%r1+1024];\ncp.async.bulk.commit_group;\n"
            "cp.async.bulk.wait_group 0;\n"
        )
        clear = "ld.global.b32 %r7, [%d3];\nst.shared.b32 [%r4], %r7;\nadd.s64 %d3, %d3, 128;\n"
        wait = "setp.eq.u32 %p2, %r6, %r6;\n"
    return kernel(
        "mov.u32 %r0, %tid.x;\nmov.u32 %r1, smem;\nld.param.u64 %d0, [p0];\nld.param.u64 %d1, [p1];\n"
        "ld.param.u64 %d2, [p2];\nshl.b32 %r2, %r0, 2;\nadd.u32 %r3, %r1, %r2;\n"
        "cvt.u64.u32 %d4, %r2;\nadd.s64 %d3, %d2, %d4;\nadd.s64 %d4, %d1, %d4;\n"
        "ld.global.b32 %r7, [%d4];\nst.shared.b32 [%r3], %r7;\nadd.u32 %r4, %r3, 1024;\n"
        "mov.u32 %r5, 0;\nCLEAR:\n" + clear + "add.u32 %r4, %r4, 128;\nadd.u32 %r5, %r5, 1;\n"
        "setp.lt.u32 %p1, %r5, 16;\n@%p1 bra CLEAR;\nfence.proxy.async.shared::cta;\n"
        "bar.warp.sync -1;\nsetp.ne.u32 %p0, %r0, 0;\n@%p0 bra MADE;\n"
        "mbarrier.init.shared.b64 [%r1+128], 1;\nfence.mbarrier_init.release.cluster;\n"
        + copy.edits.format(space=".shared::cta", at="%r1")
        + "MADE:\nbar.warp.sync -1;\n"
        + publish
        + acquire
        + f"@%p0 bra ISSUED;\n{issue}ISSUED:\nbar.warp.sync -1;\nmov.u32 %r6, 0;\nWAIT: {wait}"
        "@%p2 bra COPIED;\n"
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


def box(launch: Launch, copy: Copy, template: bytes = bytes(128)) -> str:
    """The box that a copy brings (of a store: the tensor behind it), as hexadecimal text.

    The map is made by editing every field of ``template``.
    """
    out = source()[::-1][:BOX_WORDS].copy() if copy.store else np.zeros(BOX_WORDS, dtype=np.uint32)
    memory = source()
    launch(copying(copy), [memory, np.frombuffer(template, dtype=np.uint8).copy(), out])
    return memory.tobytes().hex() if copy.store else out.tobytes()[: copy.size].hex()


# -- on a GPU --------------------------------------------------------------------------


class DriverError(RuntimeError):
    """A driver call has failed; the text is the error's name."""


def must(found: tuple) -> Any:
    """The value of a driver call that has succeeded."""
    if int(found[0]):
        raise DriverError(found[0].name)
    return found[1] if len(found) > 1 else None


@functools.lru_cache(maxsize=1)  # both templates of an edit are tried in a row
def loaded(text: str) -> Any:
    """The kernel of a PTX text."""
    from cuda.bindings import driver

    module = must(driver.cuModuleLoadData((HEAD.format(arch="sm_90a") + text).encode() + b"\0"))
    return must(driver.cuModuleGetFunction(module, b"k"))


def on_the_gpu(text: str, arrays: list[np.ndarray]) -> None:
    """Runs kernel ``k`` of one warp through the driver, and reads every array back."""
    from cuda.bindings import driver

    function = loaded(text)
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


def encoded(copy: Copy, address: int = 0x7F12_3456_7800, promotion: int = 0) -> bytes:
    """A copy's map as the driver encodes it."""
    from cuda.bindings import driver as d

    kind = {8: 10, 9: 8, 10: 9}.get(copy.elemtype, copy.elemtype)  # PTX numbers types otherwise
    found = d.cuTensorMapEncodeTiled(
        d.CUtensorMapDataType(kind),
        len(copy.dims),
        address,
        [d.cuuint64_t(n) for n in copy.dims],
        [d.cuuint64_t(n) for n in copy.strides or (16,)],  # the driver wants an array even of none
        [d.cuuint32_t(n) for n in copy.box],
        [d.cuuint32_t(n) for n in copy.steps or [1] * len(copy.dims)],
        d.CUtensorMapInterleave(0),
        d.CUtensorMapSwizzle(copy.swizzle),
        d.CUtensorMapL2promotion(promotion),
        d.CUtensorMapFloatOOBfill(copy.fill),
    )
    return b"".join(int(word).to_bytes(8, "little") for word in must(found).opaque)


TEMPLATE = Copy(10, (64, 64), (128,), (64, 8), (0, 0), 0, swizzle=3)  # what the driver encodes


def the_gpu() -> dict[str, str]:
    """The first GPU's name and the driver's version; nothing if it is no Hopper GPU."""
    from cuda.bindings import driver

    must(driver.cuInit(0))
    device = must(driver.cuDeviceGet(0))
    kind = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    if must(driver.cuDeviceGetAttribute(kind, device)) != 9:
        return {}
    name = must(driver.cuDeviceGetName(128, device)).split(b"\0")[0].decode()
    return {"device": name, "driver": str(must(driver.cuDriverGetVersion()))}


Job = tuple[str, str]  # a part of the record, and a name in it
# Whatever may end its context is a process of its own, and so are the edits, which take the longest.
JOBS: list[list[Job]] = [
    [("edits", "")],
    [
        *(("maps", name) for name in COPIES),
        *((part, name) for part in ("copies", "copies of a template") for name in COPIES),
    ],
    *([("copies", name)] for name in REFUSED),
]


def result(part: str, name: str) -> Any:
    """What the GPU makes of one job."""
    copy = {**COPIES, **REFUSED}.get(name)
    if part == "edits":
        return edits(on_the_gpu)
    assert copy is not None
    if part == "maps":
        return encoded(copy).hex()
    template = bytes(128) if part == "copies" else encoded(TEMPLATE, promotion=2)
    return {"box": box(on_the_gpu, copy, template)}


def child(jobs: Sequence[Job]) -> Iterator[dict[str, Any]]:
    """Results of jobs in their order; ends with the first that fails, whose context is gone."""
    from cuda.bindings import driver

    must(driver.cuInit(0))
    must(driver.cuCtxSetCurrent(must(driver.cuDevicePrimaryCtxRetain(0))))
    for part, name in jobs:
        try:
            yield {"part": part, "name": name, "result": result(part, name)}
        except DriverError as error:
            yield {"part": part, "name": name, "result": {"error": str(error)}}
            return


COMMAND = [sys.executable, "-m", "tests.tools.emulator.tensor_maps"]


def apart(jobs: Sequence[Job], done: Callable[[dict[str, Any]], None]) -> None:
    """Runs jobs in a process, and in another one what is left if that ends too soon."""
    left = list(jobs)
    while left:
        command = [*COMMAND, json.dumps(left)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            stop = threading.Timer(30, process.kill)
            stop.start()
            before = len(left)
            for line in process.stdout:
                done(json.loads(line))
                left.pop(0)
            stop.cancel()
        if len(left) == before:
            part, name = left.pop(0)
            text = f"the process ended with {process.returncode}"
            done({"part": part, "name": name, "result": {"error": text}})


def main() -> int:
    if len(sys.argv) > 1:
        for entry in child(json.loads(sys.argv[1])):
            print(json.dumps(entry), flush=True)
        return 0
    try:
        found: dict[str, Any] = dict(the_gpu())
    except RuntimeError:  # no driver
        found = {}
    if not found:
        print("This records what a Hopper GPU does, and there is none.", file=sys.stderr)
        return 2
    lock = threading.Lock()
    if RECORD.exists():  # a run that is cut off leaves what was known
        old = json.loads(RECORD.read_text())
        if old["device"] == found["device"]:
            found = old | found

    def done(entry: dict[str, Any]) -> None:
        part, name, value = entry["part"], entry["name"], entry["result"]
        with lock:
            if part == "edits":
                found[part] = value
            else:
                found.setdefault(part, {})[name] = value
                print(f"{part}, {name}: {str(value)[:60]}", flush=True)
            RECORD.write_text(json.dumps(found, indent=0) + "\n")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda jobs: apart(jobs, done), JOBS))
    print(", ".join(f"{len(v)} {k}" for k, v in found.items() if isinstance(v, dict)), RECORD)
    return 0


if __name__ == "__main__":
    sys.exit(main())
