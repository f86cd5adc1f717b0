"""Tensor maps that a kernel edits: the bytes, the copies by them, and who may use an edit when."""

import json
import math
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from mok.tools.emulator import KernelFault
from mok.tools.emulator.mutations import INVISIBLE, mutations
from tests.tools.emulator import tensor_maps
from tests.tools.emulator.ptx import kernel, run
from tests.tools.emulator.tensor_maps import (
    ACQUIRE,
    COPIES,
    EDITS,
    FILLED,
    FORMS,
    PUBLISH,
    REFUSED,
    copying,
    edit,
    editing,
    source,
)

pytestmark = pytest.mark.emulator
# What ptxas 13.0 makes of each edit, for sm_90a and sm_100a alike: see compiled_edits.py.
COMPILED = json.loads((Path(__file__).parents[2] / "data" / "tensor-map-edits.json").read_text())
# Of these no H200 has shown what they mean: refused, not guessed.
UNKNOWN = {
    *(name for name in COPIES if name.startswith(("NaN", "TF32")) and name != "NaN, F64"),
    "F32, denormals to zero",
}


def aligned(size, dtype=np.uint8):
    """An array of zeros at a multiple of 128 bytes."""
    raw = np.zeros(size * np.dtype(dtype).itemsize + 128, dtype=np.uint8)
    shift = -raw.ctypes.data % 128
    return raw[shift : shift + size * np.dtype(dtype).itemsize].view(dtype)


def edited(text, form, template, **options):
    before, after = aligned(128), aligned(128)
    before[:] = np.frombuffer(template, dtype=np.uint8)
    run(editing(text, form), before, after, check=True, **options)
    return after.tobytes()


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", COMPILED)
def test_an_edit_changes_the_bits_that_the_compiler_changes(name, form, arch):
    for template in (bytes(128), FILLED, b"\xff" * 128):
        want = bytearray(template)
        for at, mask, bits in COMPILED[name]:
            (word,) = struct.unpack_from("<I", want, int(at, 16))
            word = word & ~int(mask, 16) | int(bits, 16)
            struct.pack_into("<I", want, int(at, 16), word)
        assert edited(EDITS[name], form, template, arch=arch) == bytes(want)


def test_every_edit_was_compiled():
    assert set(EDITS) - set(COMPILED) == {"nothing", "two of a kind"}


def expected(copy):
    """What ``copied`` gives, element by element, each at its swizzled place."""
    width = {0: 1, 1: 2, 6: 2, 10: 2, 2: 4, 7: 4, 9: 8}[copy.elemtype]
    memory, out = bytearray(source().tobytes()), bytearray(b"\xf7\x7f" * (copy.size // 2))
    if copy.store:
        out[:] = source()[::-1].tobytes()[: copy.size]
    elif not copy.fill:
        out[:] = bytes(copy.size)
    steps = [1, *copy.steps[1:]] if copy.steps else [1] * len(copy.box)
    counts = [-(-b // s) for b, s in zip(copy.box, steps, strict=True)]
    strides = [width, *copy.strides]
    for n, index in enumerate(np.ndindex(*counts[::-1])):
        place = [a + i * s for a, i, s in zip(copy.at, index[::-1], steps, strict=True)]
        if all(0 <= p < d for p, d in zip(place, copy.dims, strict=True)):
            at = sum(p * s for p, s in zip(place, strides, strict=True))
            to = n * width
            row = to >> 7 & ((1 << copy.swizzle) - 1)
            to ^= row << 4
            if copy.store:
                memory[at : at + width] = out[to : to + width]
            else:
                out[to : to + width] = memory[at : at + width]
    return bytes(memory if copy.store else out)


def copied(copy, publish=PUBLISH, acquire=ACQUIRE, template=bytes(128), **options):
    """The box that a load brings, the tensor's memory after a store."""
    words, made, out = aligned(tensor_maps.SOURCE_WORDS, "u4"), aligned(128), aligned(512, "u4")
    words[:] = source()
    made[:] = np.frombuffer(template, dtype=np.uint8)
    out[:] = words[::-1][:512] * copy.store
    text = copying(copy, publish, acquire)
    run(text, words, made, out, check=True, **options)
    return words.tobytes() if copy.store else out.tobytes()[: copy.size]


KNOWN = {name: copy for name, copy in COPIES.items() if name not in UNKNOWN}


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("name", KNOWN)
def test_a_map_made_in_the_kernel(name, seed):
    arch = "sm_90a" if seed is None else "sm_100a"
    assert copied(KNOWN[name], seed=seed, arch=arch) == expected(KNOWN[name])


@pytest.mark.parametrize("name", KNOWN)
def test_every_field_of_a_template_is_replaced(name):
    template = edited(COPIES["five dimensions"].edits, "shared", b"\xff" * 8 + bytes(120))
    template = edited(edit("swizzle_mode", 3) + edit("fill_mode", 1), "shared", template)
    assert copied(KNOWN[name], template=template) == expected(KNOWN[name])


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("name", [n for n in REFUSED if n.split(", misal")[0] in KNOWN])
def test_a_first_coordinate_that_is_no_multiple_of_16_bytes(name, seed):
    with pytest.raises(KernelFault, match=r"multiple of 16 bytes(.|\n)*cp\.async\.bulk\.tensor"):
        copied(REFUSED[name], seed=seed)


@pytest.mark.parametrize("name", sorted(UNKNOWN))
def test_a_map_whose_meaning_is_not_known_is_refused(name):
    with pytest.raises(KernelFault, match=r"must be tiled(.|\n)*cp\.async\.bulk\.tensor"):
        copied(COPIES[name])


PLAIN = COPIES["swizzle 2"]
WEAK = "fence.proxy.tensormap::generic.release.gpu;\n"
BY_HAND = (  # copies the map with ordinary stores: lane i the word i
    "ld.shared.b32 %r8, [%r3];\ncvt.u64.u32 %d6, %r2;\nadd.s64 %d6, %d1, %d6;\n"
    "st.global.b32 [%d6], %r8;\nbar.warp.sync -1;\n"
)


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize(
    "publish,acquire,right",
    [
        (PUBLISH, ACQUIRE, True),
        (PUBLISH, "", False),
        (BY_HAND + WEAK, ACQUIRE, True),
        (BY_HAND, ACQUIRE, False),
        (BY_HAND + "fence.proxy.async.global;\n", ACQUIRE, False),
        (WEAK + BY_HAND, ACQUIRE, False),
        (PUBLISH, ACQUIRE.replace("[%d1]", "[%d1+128]"), False),
        (ACQUIRE + PUBLISH, "", False),
        (PUBLISH.replace("gpu", "cta"), ACQUIRE.replace("gpu", "cta"), True),
    ],
)
def test_an_edit_is_released_to_the_proxy_then_acquired(publish, acquire, right, seed):
    copy = PLAIN
    if "+128" in acquire:
        acquire = acquire.replace("[%d1+128]", "[%d0]")  # another address of registered memory
    if right:
        assert copied(copy, publish, acquire, seed=seed) == expected(copy)
    else:
        with pytest.raises(KernelFault, match=r"edited tensor map(.|\n)*against CTA"):
            copied(copy, publish, acquire, seed=seed)


ONE = COPIES["one dimension"]
IN_SHARED = (  # the same edits, in shared memory, by the whole of warp 0
    "st.shared.v4.b32 [%r1], {%r50, %r50, %r50, %r50};\n"
    + "".join(f"st.shared.v4.b32 [%r1+{at}], {{%r50, %r50, %r50, %r50}};\n" for at in (16, 32, 48))
    + ONE.edits.format(space=".shared::cta", at="%r1")
    + PUBLISH
)


def two_ctas(release, signal, acquire, by_another=False):
    """CTA 0 points a map at p0 and raises a flag; CTA 1 polls it and loads 32 words by the map.

    p1: the map, and the flag behind it; p2: what CTA 1 has loaded.  Warp 1 of CTA 1 acquires the map
    instead of warp 0, which loads, when ``by_another`` names the barrier between them.
    """
    return kernel(
        "mov.u32 %r0, %tid.x;\nmov.u32 %r1, smem;\nld.param.u64 %d0, [p0];\nld.param.u64 %d1, [p1];\n"
        "ld.param.u64 %d2, [p2];\nmov.u32 %r9, %ctaid.x;\nsetp.ne.u32 %p0, %r0, 0;\n"
        "setp.ne.u32 %p4, %r9, 0;\n@%p4 bra USE;\n@%p0 bra DONE;\n"
        + ONE.edits.format(space=".global", at="%d1")
        + f"{release}\n{signal}\nbra DONE;\nUSE:\n@%p0 bra READY;\n"
        "mbarrier.init.shared.b64 [%r1+128], 1;\nfence.mbarrier_init.release.cluster;\nREADY:\n"
        "POLL: ld.acquire.gpu.global.b32 %r5, [%d1+128];\nsetp.eq.u32 %p1, %r5, 0;\n@%p1 bra POLL;\n"
        + (
            "setp.lt.u32 %p5, %r0, 32;\n@%p5 bra LATER;\n" + acquire + f"LATER:\n{by_another}\n"
            if by_another is not False
            else acquire
        )
        + "@%p0 bra DONE;\nmbarrier.arrive.expect_tx.shared.b64 %d9, [%r1+128], 128;\n"
        "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%r1+1024], [%d1, {20}], [%r1+128];\n"
        "WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r1+128], 0;\n@!%p2 bra WAIT;\n"
        "mov.u32 %r6, 0;\nadd.u32 %r4, %r1, 1024;\n"
        "OUT: ld.shared.b32 %r7, [%r4];\nst.global.b32 [%d2], %r7;\nadd.u32 %r4, %r4, 4;\n"
        "add.s64 %d2, %d2, 4;\nadd.u32 %r6, %r6, 1;\nsetp.lt.u32 %p3, %r6, 32;\n@%p3 bra OUT;\nDONE:",
        ".param .u64 p0, .param .u64 p1, .param .u64 p2",
        shared=2048,
    )


def loaded(text, **options):
    words, made, out = aligned(tensor_maps.SOURCE_WORDS, "u4"), aligned(256), aligned(32, "u4")
    words[:] = source()
    run(text, words, made, out, grid=2, check=True, **options)
    np.testing.assert_array_equal(out, words[20:52])


FLAG = "st.release.gpu.global.b32 [%d1+128], 1;"


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize(
    "release,acquire,barrier,right",
    [
        (WEAK, ACQUIRE, False, True),
        (WEAK, "", False, False),
        ("", ACQUIRE, False, False),
        (WEAK.replace("gpu", "cta"), ACQUIRE, False, False),
        (WEAK, ACQUIRE.replace("gpu", "cta"), False, False),
        (WEAK.replace("gpu", "sys"), ACQUIRE.replace("gpu", "sys"), False, True),
        (WEAK, ACQUIRE, "bar.sync 0;", True),
        (WEAK, ACQUIRE, "", False),
    ],
)
def test_an_edit_of_another_cta(release, acquire, barrier, right, seed):
    """Release, flag, acquire in the CTA that loads; by any of its threads, with a barrier between."""
    text = two_ctas(release, FLAG, acquire, barrier)
    options = {"threads": 32 if barrier is False else 64, "seed": seed}
    if right:
        loaded(text, **options)
    else:
        with pytest.raises(KernelFault, match=r"edited tensor map"):
            loaded(text, **options)


def test_an_edit_and_its_use_are_ordered_as_any_write_and_read():
    """A relaxed flag hands over nothing: the edit races with the copy."""
    text = two_ctas(WEAK, FLAG.replace("release", "relaxed"), ACQUIRE)
    with pytest.raises(KernelFault, match="data race"):
        loaded(text, seed=0)


LATE = edit("global_dim", 20, 0).format(space=".global", at="%d1")


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_a_copy_reads_its_map_when_it_is_issued(seed):
    """As NVIDIA's grouped GEMMs expect: the issuing thread may edit the map at once."""
    copy = COPIES["one dimension"]
    text = copying(copy)
    arrays = aligned(tensor_maps.SOURCE_WORDS, "u4"), aligned(128), aligned(512, "u4")
    arrays[0][:] = source()
    run(text.replace("ISSUED:", LATE + "ISSUED:"), *arrays, check=True, seed=seed)
    assert arrays[2].tobytes()[: copy.size] == expected(copy)


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_an_edit_that_nothing_orders_after_a_copy_by_the_map(seed):
    text = two_ctas(WEAK, FLAG + "\n" + LATE, ACQUIRE)
    with pytest.raises(
        KernelFault, match=r"(data race|edited tensor map)(.|\n)*tensormap\.replace"
    ):
        loaded(text, seed=seed)


@pytest.mark.parametrize(
    "field,value,ordinal,rule",
    [
        ("global_address", 8, None, "a multiple of 16"),
        ("rank", 5, None, "rank of a tensor map is 0 to 4"),
        ("box_dim", 0, 0, "box_dim of a tensor map is 1 to 256"),
        ("box_dim", 257, 1, "box_dim of a tensor map is 1 to 256"),
        ("global_dim", 0, 2, "global_dim of a tensor map is 1 to"),
        ("global_stride", 24, 0, "a multiple of 16"),
        ("global_stride", 1 << 40, 0, "global_stride of a tensor map is 0 to"),
        ("global_stride", 16, 4, "has 4 of global_stride"),
        ("element_stride", 9, 0, "element_stride of a tensor map is 1 to 8"),
        ("swizzle_mode", 4, None, "swizzle_mode of a tensor map is 0 to 3"),
        ("swizzle_atomicity", 1, None, "field of a tensor map is not implemented"),
    ],
)
def test_values_that_a_field_cannot_hold(field, value, ordinal, rule):
    with pytest.raises(KernelFault, match=rule + r"(.|\n)*tensormap\.replace"):
        edited(edit(field, value, ordinal), "shared", bytes(128))


@pytest.mark.parametrize(
    "body,rule",
    [
        (edit("rank", 0).format(space=".global", at="%d0+64"), "aligned to 128 bytes"),
        (edit("rank", 0).format(space=".global", at="%d0+128"), "inside registered memory"),
        (edit("rank", 0).format(space=".shared::cta", at="%r1+2048"), "own shared memory"),
        (PUBLISH.replace("128;", "64;").replace("%d1", "%d0"), "size of a tensor map is 128"),
        (PUBLISH.replace("%d1", "%d0+128"), "inside registered memory"),
        (PUBLISH.replace("%d1", "%d0"), "nothing has written"),
        (ACQUIRE.replace("128;", "64;").replace("%d1", "%d0"), "size of a tensor map is 128"),
    ],
)
def test_edits_out_of_place(body, rule):
    text = kernel("ld.param.u64 %d0, [p0];\nmov.u32 %r1, smem;\n" + body, shared=1024)
    with pytest.raises(KernelFault, match=rule):
        run(text, aligned(128), check=True)


@pytest.mark.parametrize(
    "address,rule",
    [("%d1+32", "at a multiple of 64"), ("%d5", "lies in global or parameter"), ("%d4", "inside")],
)
def test_a_copy_by_something_that_is_no_map(address, rule):
    text = copying(PLAIN).replace("[%d1, {", f"[{address}, {{")
    text = text.replace("MADE:", "MADE: mov.u64 %d5, smem;\ncvta.shared.u64 %d5, %d5;\n", 1)
    text = text.replace("MADE:", "MADE: mov.b64 %d4, 4096;\n", 1)
    arrays = aligned(tensor_maps.SOURCE_WORDS, "u4"), aligned(128), aligned(512, "u4")
    with pytest.raises(KernelFault, match=rule):
        run(text, *arrays)


def test_coordinates_that_the_map_has_not():
    text = copying(PLAIN).replace("bulk.tensor.2d", "bulk.tensor.1d").replace("{8, 1}", "{8}")
    arrays = aligned(tensor_maps.SOURCE_WORDS, "u4"), aligned(128), aligned(512, "u4")
    with pytest.raises(KernelFault, match="as many coordinates"):
        run(text, *arrays)


@pytest.mark.parametrize("hand_over", ["in global memory", "by a copy"])
def test_every_damage_to_the_hand_over_of_a_map_is_noticed(hand_over):
    """Deletes and weakens each synchronising line, one at a time."""
    release = WEAK
    text = two_ctas(release, FLAG, ACQUIRE)
    if hand_over == "by a copy":
        text = two_ctas("", "@!%p0 " + FLAG, ACQUIRE)
        text = text.replace(ONE.edits.format(space=".global", at="%d1"), IN_SHARED)
        text = text.replace("@%p0 bra DONE;\n", "", 1)  # the whole warp copies
    loaded(text)
    damages = list(mutations(text))
    assert {"delete tensor map fence", "weaken scope"} <= {m.kind for m in damages}
    lost = []
    for m in damages:
        for seed in (None, 0, 1, 2):
            try:
                loaded(m.apply(text), seed=seed, max_steps=50_000)
            except (KernelFault, AssertionError):
                break
        else:
            lost.append(m)
    assert {m.kind for m in lost} <= INVISIBLE.keys()


RECORD = json.loads(tensor_maps.RECORD.read_text())
RECORDED = [
    (part, name) for part in ("copies", "copies of a template") for name in RECORD.get(part, {})
]


def test_the_h200_has_been_asked_everything():
    jobs = [job for jobs in tensor_maps.JOBS for job in jobs if job != ("edits", "")]
    missing = [job for job in jobs if job[1] not in RECORD.get(job[0], {})]
    if missing:
        pytest.skip(
            f"{len(missing)} not recorded: python -m tests.tools.emulator.tensor_maps on an H200"
        )


@pytest.mark.parametrize("form", FORMS)
def test_edits_are_those_of_the_h200(form):
    for name, text in EDITS.items():
        for label, template in (("zeros", bytes(128)), ("filled", FILLED)):
            want = RECORD["edits"][f"{name}, {form}, {label}"]
            assert edited(text, form, template).hex() == want, name


@pytest.mark.parametrize("part,name", RECORDED)
def test_copies_are_those_of_the_h200(part, name):
    """What the H200 refuses, the emulator refuses; what it copies, the emulator copies or does not know."""
    found = RECORD[part][name]
    assert "box" in found or found == {"error": "CUDA_ERROR_ILLEGAL_INSTRUCTION"}
    copy = {**COPIES, **REFUSED}[name]
    if "error" in found or name in UNKNOWN:
        with pytest.raises(KernelFault):
            copied(copy)
    else:
        assert copied(copy).hex() == found["box"]


@pytest.mark.parametrize("name", RECORD.get("maps", {}))
def test_maps_are_those_of_the_driver(name):
    """What edits make of zero bytes is what cuTensorMapEncodeTiled makes of the same fields.

    Behind what edits can reach it notes the box's bytes, a box that steps do not divide rounded down, and the
    alignment in shared memory.
    """
    copy = COPIES[name]
    made = edited(f"mov.b64 %d0, {0x7F12_3456_7800};\n{copy.edits}", "shared", bytes(128))
    steps = [*copy.steps] or [1] * len(copy.box)
    moved = copy.box[0] * math.prod(
        -(-b // s) for b, s in zip(copy.box[1:], steps[1:], strict=True)
    )
    noted = math.prod(b // s for b, s in zip(copy.box, steps, strict=True))
    alignment = 128 << copy.swizzle if copy.swizzle else 16
    notes = struct.pack("<QQ", copy.size // moved * noted, alignment)
    assert (made[:64] + notes + bytes(48)).hex() == RECORD["maps"][name]
    assert not any(made[64:])


def test_what_ends_a_recording_process_is_recorded(monkeypatch, tmp_path):
    """The name at which it ended is lost, and another process goes on behind it."""
    script = tmp_path / "child.py"
    script.write_text(
        "import json, sys, time\n"
        "for part, name in json.loads(sys.argv[1]):\n"
        "    if name == 'ends':\n"
        "        sys.exit(7)\n"
        "    wrong = name == 'wrong'\n"
        "    found = {'error': 'X'} if wrong else {'box': name}\n"
        "    print(json.dumps({'part': part, 'name': name, 'result': found}), flush=True)\n"
        "    if wrong:\n"
        "        break\n"
    )
    monkeypatch.setattr(tensor_maps, "COMMAND", [sys.executable, str(script)])
    found = []
    tensor_maps.apart([("p", n) for n in ("a", "ends", "b", "wrong", "c")], found.append)
    assert [(e["name"], e["result"]) for e in found] == [
        ("a", {"box": "a"}),
        ("ends", {"error": "the process ended with 7"}),
        ("b", {"box": "b"}),
        ("wrong", {"error": "X"}),
        ("c", {"box": "c"}),
    ]
