"""Device printf: its text goes to standard output."""

import ctypes
import struct

import numpy as np
import pytest

from mok.tools.emulator import KernelFault, UnsupportedInstruction
from tests.tools.emulator.ptx import kernel, run

pytestmark = pytest.mark.emulator


def printing(form: bytes, arguments: bytes, call="call.uni (ret0), vprintf, (par0, par1);"):
    """Lanes 1 and 3 print a format; p0 holds it, and behind it, at 256, the arguments."""
    copy = "".join(
        f"ld.global.b64 %d2, [%d0+{256 + at}];\nst.local.b64 [%d4+{at}], %d2;\n"
        for at in range(0, len(arguments), 8)
    )
    body = (
        ".local .align 16 .b8 depot[64];\nld.param.u64 %d0, [p0];\nmov.b64 %d4, depot;\n"
        "cvta.local.u64 %d5, %d4;\nmov.u32 %r0, %tid.x;\nand.b32 %r1, %r0, 29;\n"
        "setp.ne.u32 %p0, %r1, 1;\n@%p0 bra DONE;\n" + copy + "{\n.param .b64 par0;\n"
        ".param .b64 par1;\n.param .b32 ret0;\nst.param.b64 [par0], %d0;\n"
        f"st.param.b64 [par1+0], %d5;\n{call}\nld.param.b32 %r2, [ret0];\n}}\n"
        "st.global.b32 [%d0+508], %r2;\nDONE:\n"
    )
    memory = np.zeros(512, dtype=np.uint8)
    memory[: len(form)] = np.frombuffer(form, dtype=np.uint8)
    memory[256 : 256 + len(arguments)] = np.frombuffer(arguments, dtype=np.uint8)
    run(kernel(body), memory)
    return int(memory[508:].view(np.uint32)[0])


DOUBLE, LONG = ctypes.c_double, ctypes.c_longlong


@pytest.mark.parametrize(
    "form,types,values",
    [
        ("plain 100%%\n", "", []),
        ("%d %i|%5d|%-5d|%05d|%+d\n", "iiiiii", [1, -2, 33, 44, -55, 6]),
        ("%u %x %#X %o %#o\n", "IIIII", [4000000000, 255, 48879, 8, 9]),
        ("%d %ld %d %llu\n", "iqiQ", [1, -(1 << 40), 2, (1 << 64) - 1]),
        ("%hd %hhu %hx\n", "iII", [70000, 300, 0x12345]),
        ("%f %.2e %8.3g|%G %a\n", "ddddd", [1.5, -12345.678, 0.00012345, 1e20, 0.0]),
        ("%*d|%.*f\n", "iiid", [6, 7, 2, 2.71828]),
        ("%.0f %5.f|%c%c\n", "ddii", [2.5, 3.5, 72, 105]),
    ],
)
def test_the_text_is_that_of_c(form, types, values, capsys):
    made = {"d": DOUBLE, "q": LONG, "Q": LONG, "i": ctypes.c_int, "I": ctypes.c_uint}
    want = ctypes.create_string_buffer(256)
    arguments = [made[t](v) for t, v in zip(types, values, strict=True)]
    ctypes.CDLL(None).snprintf(want, ctypes.c_size_t(256), form.encode(), *arguments)
    text = want.value.decode()
    if "%a" in form:
        text = text.replace("0x0p+0", (0.0).hex())
    raw = b""
    for code, value in zip(types, values, strict=True):
        size = struct.calcsize(code)
        raw = raw.ljust(-(-len(raw) // size) * size, b"\0") + struct.pack("<" + code, value)
    assert printing(form.encode() + b"\0", raw.ljust(-(-len(raw) // 8) * 8, b"\0")) == len(values)
    assert capsys.readouterr().out == 2 * text


def test_a_string_and_a_missing_argument(capsys):
    form = b"<%s>\n\0"
    text = ctypes.create_string_buffer(b"text")
    with pytest.raises(KernelFault, match=r"inside registered(.|\n)*call\.uni"):
        printing(form, struct.pack("<Q", ctypes.addressof(text)))
    with pytest.raises(KernelFault, match="as many conversions as arguments"):
        printing(b"%ld" * 9 + b"\0", bytes(64))


def test_other_functions_are_named():
    with pytest.raises(UnsupportedInstruction, match="a call of malloc"):
        printing(b"\0", b"", "call.uni (ret0), malloc, (par0);")


def test_the_dsl_prints(capsys):
    pytest.importorskip("cutlass")
    import torch

    from mok.tools.emulator import Emulator
    from tests.tools.emulator import printf_example

    x = torch.arange(32, dtype=torch.float32) / 4
    with Emulator("sm_90a", num_sms=2) as emulator:
        emulator.register(x)
        printf_example.build()(x.data_ptr(), 32, 0)
    assert capsys.readouterr().out == "thread 3 of 32: 0.750000, 100%\n"
