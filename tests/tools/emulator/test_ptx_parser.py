"""PTX text to instructions."""

import pytest

from mok.tools.emulator.errors import EmulatorError
from mok.tools.emulator.ptx_parser import immediate, parse

HEAD = ".version 9.0\n.target sm_90a\n.address_size 64\n"


def body_of(text):
    module = parse(HEAD + f".visible .entry k(.param .u64 a)\n{{\n{text}\n}}\n")
    return module.kernels["k"]


def test_operands_guards_and_lines():
    k = body_of(
        ".reg .pred %p<2>;\n.reg .b32 %r<4>;\n"
        "@!%p1 ld.global.v2.b32 {%r1, _}, [%r2+-8];\nshfl.sync.idx.b32 %r3|%p0, %r1, 0, 31, -1;"
    )
    load, shuffle = k.code
    assert load.mods == ("ld", "global", "v2", "b32") and load.guard == ("%p1", True)
    assert load.operands == [("v", [("r", "%r1"), ("_",)]), ("m", [("r", "%r2")], -8)]
    assert shuffle.operands[0] == ("p", ("r", "%r3"), ("r", "%p0"))
    assert load.line == 8 and shuffle.line == 9


def test_block_scopes_hide_registers_and_labels():
    k = body_of(
        ".reg .pred %p<2>;\n"
        "{ .reg .pred P;\nL: mov.pred P, %p0;\n@P bra L;\n}\n"
        "{ .reg .pred P;\nL: mov.pred P, %p1;\n@P bra D;\nbra L;\nD:\n}\nret;"
    )
    names = {i.operands[0][1] for i in k.code if i.mods[0] == "mov"}
    assert len(names) == 2
    targets = [i.operands[-1] for i in k.code if i.mods[0] == "bra"]
    assert targets == [("l", 0), ("l", 5), ("l", 2)]


def test_parameters_are_laid_out_by_alignment():
    module = parse(
        HEAD + ".entry k(.param .b32 a, .param .align 64 .b8 t[128], .param .u8 c)\n{\nret;\n}\n"
    )
    assert [(p.offset, p.size) for p in module.kernels["k"].params] == [(0, 4), (64, 128), (192, 1)]


@pytest.mark.parametrize(
    "text,value",
    [
        ("0f3F800000", 0x3F800000),
        ("-1", -1),
        ("0x10", 16),
        ("017", 15),
        ("0d3FF0000000000000", 0x3FF0 << 48),
    ],
)
def test_immediates(text, value):
    assert immediate(text) == value


def test_a_missing_label_is_an_error():
    with pytest.raises(EmulatorError, match="branch target"):
        body_of("bra NOWHERE;")


def test_vector_registers_are_their_parts():
    k = body_of("{\n.reg .v2 .b32 v;\nmov.s32 v.x, 1;\nmov.s32 v.y, 2;\nst.b64 [%rd1], v;\n}")
    store = k.code[2]
    assert store.operands[1] == ("v", [k.code[0].operands[0], k.code[1].operands[0]])
