"""PTX instructions to the records that the compiled interpreter runs.

Every operand becomes a row of the warp's register file: registers, constants and special
registers alike.  Operations that need Python become OP_PY records that name a ``PyOp``.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mok.tools.emulator import layout as L
from mok.tools.emulator.alu_table import NUMBER
from mok.tools.emulator.errors import UnsupportedInstruction
from mok.tools.emulator.ptx_parser import Instruction, Kernel, Module, Operand, type_size

NONE = 0x7FFFFFFF
ROW = 256  # bytes of one register row: 32 lanes of 8 bytes


@dataclass
class PyOp:
    """An instruction executed by a Python handler.  Operands hold row numbers, not names."""

    ins: Instruction
    operands: list[Any]
    handler: Callable[..., Any] | None = None

    def bind(self, handlers: dict[str, Callable[..., Any]]) -> None:
        """Takes the handler with the longest mnemonic prefix that fits."""
        name = self.ins.name
        fits = (p for p in handlers if name == p or name.startswith((p + ".", p + "::")))
        best = max(fits, key=len, default="")
        if not best:
            raise UnsupportedInstruction(
                "the emulator must implement every instruction it runs",
                f"{self.ins.text[:200]!r} at PTX line {self.ins.line}",
            )
        self.handler = handlers[best]


@dataclass
class Program:
    """An encoded kernel."""

    kernel: Kernel
    module: Module
    code: np.ndarray  # int32 [n, 16]
    ext: np.ndarray  # int32
    num_rows: int
    constants: list[tuple[int, int]]  # (row, value), the same for every warp
    specials: list[tuple[int, str, int]]  # (row, special register or symbol, offset)
    pyops: list[PyOp]
    source: list[Instruction]  # instruction of each record
    param_bytes: int
    static_smem: int
    dynamic_smem_align: int
    local_bytes: int
    registers: dict[str, int] = field(default_factory=dict)
    moved: dict[str, int | None] | None = None  # see constant()

    @property
    def operations(self) -> set[int]:
        """Numbers of the register operations that it uses."""
        return {int(op) for op in np.unique(self.code[:, L.I_OP]) if op < L.ALU_END}

    def constant(self, op: Operand) -> int | None:
        """Value of an immediate, or of a register that only one ``mov`` of an immediate writes."""
        if op[0] == "i":
            return int(op[1])
        if self.moved is None:
            self.moved = {}
            for ins in self.kernel.code:
                for name in _registers(ins.operands[:1]):
                    one = name not in self.moved and ins.mods[0] == "mov" and not ins.guard
                    immediate = one and ins.operands[1][0] == "i"
                    self.moved[name] = ins.operands[1][1] if immediate else None
        return self.moved.get(op[1]) if op[0] == "r" else None


def _registers(operands: Iterable[Operand]) -> Iterator[str]:
    """Names of the registers that operands hold, but for those of addresses."""
    for op in operands:
        if op[0] == "r":
            yield op[1]
        elif op[0] == "v":
            yield from _registers(op[1])
        elif op[0] in ("n", "p"):
            yield from _registers(op[1:])


class Encoder:
    """Encodes one kernel.  ``handlers`` (see encode_ops) maps mnemonics to methods."""

    def __init__(self, module: Module, kernel: Kernel) -> None:
        self.module = module
        self.kernel = kernel
        self.rows: dict[str, int] = {}
        self.num_rows = 0
        self.constants: dict[int, int] = {}
        self.specials: dict[tuple[str, int], int] = {}
        self.records: list[list[int]] = []
        self.ext: list[int] = []
        self.pyops: list[PyOp] = []
        self.source: list[Instruction] = []
        self.starts: list[int] = []
        self.temps: dict[int, int] = {}
        self.ins: Instruction
        for name, kind in kernel.registers.items():
            self.rows[name] = self.new_row(2 if kind == "b128" else 1)
        self.symbols: dict[str, tuple[str, int]] = {}
        self._place_symbols()
        self.dummy = self.new_row()

    # -- rows -------------------------------------------------------------------------

    def new_row(self, count: int = 1) -> int:
        row = self.num_rows
        self.num_rows += count
        return row

    def temp(self, index: int) -> int:
        """Scratch row that no other instruction relies on."""
        if index not in self.temps:
            self.temps[index] = self.new_row()
        return self.temps[index]

    def const(self, value: int, width: int = 8) -> int:
        value &= (1 << (8 * width)) - 1
        if value not in self.constants:
            self.constants[value] = self.new_row()
        return self.constants[value]

    def special(self, name: str, offset: int = 0) -> int:
        key = (name, offset)
        if key not in self.specials:
            self.specials[key] = self.new_row()
        return self.specials[key]

    def _place_symbols(self) -> None:
        offset = 0
        for p in self.kernel.params:
            self.symbols[p.name] = ("param", p.offset)
        for var in self.kernel.shared + [v for v in self.module.extern_shared.values() if v.size]:
            offset = -(-offset // var.align) * var.align
            self.symbols[var.name] = ("shared", offset)
            offset += var.size
        dynamic = [v for v in self.module.extern_shared.values() if not v.size]
        align = max((v.align for v in dynamic), default=16)
        self.static_smem = -(-offset // align) * align if offset else 0
        self.dynamic_align = align
        for var in dynamic:
            self.symbols[var.name] = ("shared", self.static_smem)
        local = 0
        for var in self.kernel.local:
            local = -(-local // var.align) * var.align
            self.symbols[var.name] = ("local", local)
            local += var.size
        self.local_bytes = -(-local // 16) * 16
        for name in self.module.globals:
            self.symbols[name] = ("global:" + name, 0)

    def unsupported(self, why: str = "") -> UnsupportedInstruction:
        return UnsupportedInstruction(
            "the emulator must implement every instruction it runs",
            f"{self.ins.text!r} at PTX line {self.ins.line}{', ' + why if why else ''}",
            "report it, or rewrite the kernel without it",
        )

    def row(self, op: Operand, width: int = 8) -> int:
        """Row of a scalar operand."""
        kind = op[0]
        if kind == "r":
            name = op[1]
            if name in self.rows:
                return self.rows[name]
            if name.startswith("%"):
                return self.special(name)
        if kind == "i":
            return self.const(op[1], width)
        if kind == "s":
            if op[1] in self.symbols:
                space, offset = self.symbols[op[1]]
                return self.special("@" + space, offset + op[2])
            if op[1].startswith("WARP_SZ"):
                return self.const(32)
        if kind == "_":
            return self.dummy
        raise self.unsupported(f"operand {op!r}")

    def address(self, op: Operand, index: int = 0) -> tuple[int, int]:
        """Row and immediate offset of a memory operand's address."""
        if op[0] != "m":
            raise self.unsupported("an address was expected")
        base = op[1][index]
        offset = op[2] if index == 0 else 0
        if base[0] == "s":
            space, at = self.symbols.get(base[1], ("", 0))
            if not space:
                raise self.unsupported(f"symbol {base[1]}")
            return self.special("@" + space, at + base[2] + offset), 0
        if base[0] == "i":
            return self.const(base[1] + offset), 0
        return self.row(base), offset

    # -- records ----------------------------------------------------------------------

    def emit(
        self,
        op: int,
        d: int | None = None,
        a: int = 0,
        b: int | None = 0,
        c: int | None = 0,
        e: int | None = None,
        x: int = 0,
        y: int = 0,
        ext: list[int | None] | None = None,
        n: int = 0,
        target: int | None = None,
        z: int = 0,
        sync: int = 0,
        e_raw: bool = False,
    ) -> None:
        def at(row: int | None) -> int:
            return NONE if row is None else row * ROW

        guard, negate = NONE, 0
        if self.ins.guard:
            guard, negate = at(self.rows[self.ins.guard[0]]), int(self.ins.guard[1])
        start = len(self.ext)
        self.ext.extend(at(r) for r in ext or [])
        self.records.append(
            [
                op,
                guard,
                negate,
                at(d),
                at(a),
                at(b),
                at(c),
                (e or 0) if e_raw else at(e),
                x,
                y,
                start,
                n,
                NONE if target is None else target,
                z,
                sync,
                0,
            ]
        )
        self.source.append(self.ins)

    def alu(self, name: str, d: int, a: int, b: int = 0, c: int = 0, x: int = 0) -> None:
        self.emit(NUMBER[name], d=d, a=a, b=b, c=c, x=x)

    def python(self, handler: Callable[..., Any], operands: list[Any], sync: bool = False) -> None:
        self.pyops.append(PyOp(self.ins, operands, handler))
        self.emit(L.OP_PY, x=len(self.pyops) - 1, sync=int(sync))

    def py_operand(self, op: Operand) -> Any:
        """Operand with rows in place of names, for Python handlers."""
        kind = op[0]
        if kind == "v":
            return ("v", [self.py_operand(o) for o in op[1]])
        if kind == "m":
            parts = [self.py_operand(o) for o in op[1]]
            return ("m", parts, op[2])
        if kind in ("n", "p"):
            return (kind, *(self.py_operand(o) for o in op[1:]))
        if kind == "_":
            return None
        return self.row(op)

    # -- the whole kernel -------------------------------------------------------------

    def encode(self, handlers: dict[str, Callable[..., None]]) -> Program:
        for ins in self.kernel.code:
            self.ins = ins
            self.starts.append(len(self.records))
            handler = handlers.get(ins.mods[0])
            if handler is None:
                raise self.unsupported()
            handler(self, ins)
        self.ins = Instruction(("exit",), [], None, "exit", self.kernel.code[-1].line)
        self.starts.append(len(self.records))
        self.emit(L.OP_EXIT)
        code = np.array(self.records, dtype=np.int64)
        branches = code[:, L.I_OP] == L.OP_BRA
        code[branches, L.I_TARGET] = np.array(self.starts)[code[branches, L.I_TARGET]]
        size = max((p.offset + p.size for p in self.kernel.params), default=0)
        return Program(
            self.kernel,
            self.module,
            code.astype(np.uint32).astype(np.int32),
            np.array(self.ext or [0], dtype=np.int32),
            self.num_rows,
            [(row, value) for value, row in self.constants.items()],
            [(row, name, offset) for (name, offset), row in self.specials.items()],
            self.pyops,
            self.source,
            size,
            self.static_smem,
            self.dynamic_align,
            self.local_bytes,
            self.rows,
        )


def width_of(mods: tuple[str, ...]) -> int:
    """Bytes of the instruction's last type modifier."""
    return type_size(mods[-1])
