"""What ptxas makes of each edit of a tensor map: it compiles to a load, a replacement of bits and a store.

    python -m tests.tools.emulator.compiled_edits       # writes tests/data/tensor-map-edits.json

Needs ptxas (of CUDA 13.0 or newer) on PATH; the machine code is read by nvdisasm.  The record holds
[byte, mask, bits] of 32-bit words, for sm_90a and sm_100a, which must agree.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from mok.runtime.resources import disassemble
from tests.tools.emulator.tensor_maps import EDITS, HEAD, editing

RECORD = Path(__file__).parents[2] / "data" / "tensor-map-edits.json"
PARAMETER = {"sm_90a": "0x218", "sm_100a": "0x388"}  # of the map's address in the constant bank
Word = tuple[int, int, int]


def number(text: str) -> int:
    return int(text, 0) & 0xFFFFFFFF


def disassembled(arch: str, edits: str) -> list[str]:
    """Instructions of the program that edits a map in global memory, without their predicates."""
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder) / "edit.ptx", Path(folder) / "edit.cubin"
        source.write_text(HEAD.format(arch=arch) + editing(edits, "global"))
        subprocess.run(["ptxas", f"-arch={arch}", "-o", binary, source], check=True)
        text = disassemble(binary.read_bytes())
    lines = (re.sub(r"/\*.*?\*/", "", line).strip() for line in text.splitlines())
    return [re.sub(r"^@!?U?P\d ", "", line.rstrip(";").strip()) for line in lines]


def words(arch: str, edits: str) -> list[Word]:
    """The words that the edit stores, with the bits that it replaces."""
    base, out = "", []
    values: dict[str, Word] = {"RZ": (-1, 0xFFFFFFFF, 0)}  # byte (-1: a constant), mask, bits
    for line in disassembled(arch, edits):
        if m := re.match(rf"LDC.64 (R\d+), c\[0x0\]\[{PARAMETER[arch]}\]", line):
            base = m[1]
        elif m := re.match(r"(?:IMAD.MOV.U32|MOV) (R\d+), (?:RZ, RZ, )?(-?0x[0-9a-f]+)$", line):
            values[m[1]] = -1, 0xFFFFFFFF, number(m[2])
        elif m := re.match(r"LDG.E (R\d+), desc\[UR\d+\]\[(R\d+).64\+(0x[0-9a-f]+)\]", line):
            if m[2] == base:
                values[m[1]] = number(m[3]), 0, 0
        elif m := re.match(
            r"LOP3.LUT (R\d+), (R\d+), (-?0x[0-9a-f]+), (\w+), (0x[0-9a-f]+), !PT", line
        ):
            at, mask, bits = values.get(m[2], (-1, 0, 0))
            if at < 0:
                continue
            third, table = values[m[4]][2], number(m[5])
            # The first operand with the bits of a mask replaced: by the constant, or by the register.
            changed, new = (third, number(m[3])) if table == 0xD8 else (number(m[3]), third)
            assert table in (0xD8, 0xB8), line
            values[m[1]] = at, mask | changed, bits & ~changed | new & changed
        elif m := re.match(
            r"STG.E(.64)? desc\[UR\d+\]\[(R\d+).64(?:\+(0x[0-9a-f]+))?\], (R\d+|RZ)$", line
        ):
            if m[2] != base:
                continue
            first, at = m[4], number(m[3] or "0")
            both = [first] if not m[1] else [first, f"R{int(first[1:]) + 1}"]
            for i, register in enumerate(both):
                _, mask, bits = values[register]
                out.append((at + 4 * i, mask, bits))
    assert out, edits
    return sorted(out)


def main() -> int:
    found = {}
    for name, text in EDITS.items():
        if name in ("nothing", "two of a kind"):
            continue
        by_arch = [words(arch, text) for arch in PARAMETER]
        assert by_arch[0] == by_arch[1], name
        found[name] = [[hex(n) for n in word] for word in by_arch[0]]
    lines = (f" {json.dumps(name)}: {json.dumps(edits)}" for name, edits in found.items())
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(found)} edits in {RECORD}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
