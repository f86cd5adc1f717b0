"""Device printf: the only function that a kernel may call, ``vprintf``."""

import ctypes
import re
import struct
import sys
from typing import Any

from mok.tools.emulator.errors import EmulatorError
from mok.tools.emulator.machine import Machine
from mok.tools.emulator.resident import Warp

_LOCAL = 2  # window of a generic address
_OFFSET = (1 << 56) - 1
_SPEC = re.compile(r"%([-+ #0]*)(\*|\d+)?(?:\.(\*|\d+)?)?(hh|h|ll|l|z|j|t)?([diouxXcsfFeEgGaAp%])")


class _Arguments:
    """The buffer of a call's arguments, each aligned to its own size."""

    def __init__(self, machine: Machine, w: Warp, lane: int, address: int) -> None:
        if address and address >> 56 != _LOCAL:
            raise EmulatorError("arguments of vprintf lie in local memory", hex(address))
        limit = machine.local.shape[1] // 32
        mine = machine.local[w.index][lane * limit : (lane + 1) * limit]
        self.raw = mine.tobytes()[address & _OFFSET :]
        self.at = self.count = 0

    def take(self, code: str) -> Any:
        """The next argument, of a type of ``struct``."""
        size = struct.calcsize(code)
        self.at = -(-self.at // size) * size
        if self.at + size > len(self.raw):
            raise EmulatorError("a format has as many conversions as arguments", self.count)
        (value,) = struct.unpack_from("<" + code, self.raw, self.at)
        self.at += size
        self.count += 1
        return value


def _text(machine: Machine, address: int) -> str:
    """A string in global memory, which ends with a zero byte."""
    out = bytearray()
    while True:
        machine.check_global(address + len(out), 1)
        byte = ctypes.string_at(address + len(out), 1)
        if byte == b"\0":
            return out.decode(errors="replace")
        out += byte


def formatted(machine: Machine, form: str, arguments: _Arguments) -> str:
    """What C's printf makes of a format and arguments."""

    def convert(m: re.Match[str]) -> str:
        flags, width, precision, length, kind = m.groups()
        if kind == "%":
            return "%"
        width, precision = (
            str(arguments.take("i")) if part == "*" else part for part in (width, precision)
        )
        if precision is None and "." in m[0]:
            precision = "0"
        spec = f"%{flags}{width or ''}{'' if precision is None else '.' + precision}"
        wide = length in ("l", "ll", "z", "j", "t")
        if kind in "di":
            bits = {"hh": 8, "h": 16}.get(length or "", 64)
            value = arguments.take("q" if wide else "i")
            return f"{spec}d" % ((value + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1))
        if kind in "ouxX":
            value = arguments.take("Q" if wide else "I")
            value &= (1 << {"hh": 8, "h": 16}.get(length or "", 64)) - 1
            if kind == "o" and "#" in flags:
                return f"{spec.replace('#', '')}s" % f"0{value:o}"
            return f"{spec}{kind.replace('u', 'd')}" % value
        if kind == "c":
            return f"%{flags}{width or ''}s" % chr(arguments.take("i") & 0xFF)
        if kind == "s":
            return f"{spec}s" % _text(machine, arguments.take("Q"))
        if kind == "p":
            return f"%{flags}{width or ''}s" % hex(arguments.take("Q"))
        value = arguments.take("d")
        return value.hex() if kind in "aA" else f"{spec}{kind}" % value

    return _SPEC.sub(convert, form)


def op_call(machine: Machine, w: Warp, op: Any) -> None:
    """call of vprintf: device printf, whose text goes to standard output at once"""
    form, arguments, result = op.operands
    counts = w.regs[result].copy()
    for lane in w.lanes():
        taken = _Arguments(machine, w, lane, w.value(arguments, lane))
        sys.stdout.write(formatted(machine, _text(machine, w.value(form, lane)), taken))
        counts[lane] = taken.count
    w.write(result, counts)


HANDLERS = {"call": op_call}
