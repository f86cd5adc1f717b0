"""PTX text to instructions.  One pass, no semantics: names are resolved, nothing is interpreted."""

import re
import struct
from dataclasses import dataclass, field

from mok.tools.emulator.errors import EmulatorError

# An operand is a tuple whose first item says what it is:
#   ("r", name)          register (block-local names are made unique)
#   ("i", bits)          immediate as a Python int (floats as their bit pattern)
#   ("s", symbol, off)   address of a variable or parameter
#   ("v", [operands])    vector {a, b, ...}, or a call's parameters (a, b, ...)
#   ("m", [operands], off)   memory [a + off, ...]
#   ("n", operand)       negated predicate
#   ("p", a, b)          pair a|b
#   ("_",)               sink
Operand = tuple


@dataclass
class Instruction:
    """One PTX instruction: ``mods`` are the dot-separated parts of the mnemonic."""

    mods: tuple[str, ...]
    operands: list[Operand]
    guard: tuple[str, bool] | None
    text: str
    line: int
    loc: tuple[int, int] = (0, 0)

    @property
    def name(self) -> str:
        return ".".join(self.mods)


@dataclass
class Variable:
    name: str
    space: str
    size: int
    align: int
    offset: int = 0
    init: bytes = b""


@dataclass
class Param:
    name: str
    size: int
    align: int
    offset: int = 0


@dataclass
class Kernel:
    name: str
    params: list[Param]
    registers: dict[str, str] = field(default_factory=dict)  # name -> type (pred, b32, ...)
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    shared: list[Variable] = field(default_factory=list)
    local: list[Variable] = field(default_factory=list)
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    call_params: set[str] = field(
        default_factory=set
    )  # registers that stand for a call's parameters


@dataclass
class Module:
    target: str
    version: str
    kernels: dict[str, Kernel]
    globals: dict[str, Variable]
    extern_shared: dict[str, Variable]
    files: dict[int, str]
    text: str


_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}
_DIRECTIVE = re.compile(r"\.(\w+)\s+([\d,\s]+)$")
_VARIABLE = re.compile(
    r"(?:\.(?:visible|extern|weak)\s+)*\.(shared|local|global|const|param)\s+"
    r"(?:\.align\s+(\d+)\s+)?(?:\.v([248])\s+)?\.(\w+)\s+([\w$%]+)\s*(?:\[(\d*)\])?\s*(?:=\s*(.*))?$",
    re.S,
)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\((.*?)\))?\s*((?:\.\w+[^{]*)?)\{", re.S)


def type_size(name: str) -> int:
    """Bytes of a PTX type name such as ``b32``."""
    return _SIZES[name.lstrip("abcdefghijklmnopqrstuvwxyz")]


def _initial(kind: str, text: str | None, size: int) -> bytes:
    if not text:
        return b""
    width = type_size(kind)
    values = [v.strip() for v in text.strip().strip("{}").split(",") if v.strip()]
    out = b"".join((int(v, 0) & (1 << 8 * width) - 1).to_bytes(width, "little") for v in values)
    return out.ljust(size, b"\0")


def _variable(text: str, line: int) -> Variable:
    m = _VARIABLE.match(text)
    if not m:
        raise EmulatorError("a declaration must be readable", f"{text!r} (PTX line {line})")
    space, align, vec, kind, name, count, init = m.groups()
    width = type_size(kind) * int(vec or 1)
    size = width * int(count) if count else (0 if count == "" else width)
    return Variable(name, space, size, int(align or width), 0, _initial(kind, init, size))


class _Body:
    """Splits a kernel's body into statements and resolves block-local names."""

    def __init__(self, kernel: Kernel, text: str, first_line: int) -> None:
        self.kernel = kernel
        self.scopes: list[dict[str, str]] = [{}]
        self.labels: list[dict[str, str]] = [{}]
        self.unique = 0
        self.loc = (0, 0)
        self.pending: list[tuple[Instruction, list[dict[str, str]]]] = []
        self._scan(text, first_line)

    def _scan(self, text: str, line: int) -> None:
        start, start_line = 0, line
        for m in re.finditer(r"[\n;{}:]", text):
            pos, ch = m.start(), m.group()
            pending = text[start:pos].strip()
            if ch == "\n":
                line += 1
                if pending.startswith((".loc", ".pragma", ".file")):
                    self._directive(pending)
                    pending = ""
                if not pending:
                    start, start_line = pos + 1, line
                continue
            if ch in "{}" and not pending:
                if ch == "{":
                    self.scopes.append({})
                    self.labels.append({})
                elif len(self.scopes) == 1:
                    return
                else:
                    self.scopes.pop()
                    self.labels.pop()
            elif ch == ";":
                self._statement(pending, start_line)
            elif ch == ":" and re.fullmatch(r"[\w$%]+", pending):
                self._label(pending)
            else:
                continue  # braces of an operand, colons of a modifier
            start, start_line = pos + 1, line

    def _directive(self, text: str) -> None:
        if text.startswith(".loc"):
            parts = text.replace(",", " ").split()
            self.loc = (int(parts[1]), int(parts[2]))

    def _label(self, name: str) -> None:
        self.unique += 1
        unique = name if len(self.labels) == 1 else f"{name}@{self.unique}"
        self.labels[-1][name] = unique
        self.kernel.labels[unique] = len(self.kernel.code)

    def _statement(self, text: str, line: int) -> None:
        if not text:
            return
        if text.startswith("."):
            self._declaration(text, line)
            return
        guard = None
        if text.startswith("@"):
            head, text = text[1:].split(None, 1)
            guard = (self._name(head.lstrip("!")), head.startswith("!"))
        parts = text.split(None, 1)
        mods = tuple(parts[0].split("."))
        operands = [self._operand(o) for o in _split(parts[1])] if len(parts) > 1 else []
        ins = Instruction(mods, operands, guard, " ".join(text.split()), line, self.loc)
        if mods[0] == "bra":
            self.pending.append((ins, list(self.labels)))
        self.kernel.code.append(ins)

    def _declaration(self, text: str, line: int) -> None:
        if text.startswith(".reg"):
            kind, names = text.split(None, 2)[1:]
            kind = kind.lstrip(".")
            parts = ""
            if kind in ("v2", "v4"):
                parts = "xyzw"[: int(kind[1])]
                kind, names = names.split(None, 1)
                kind = kind.lstrip(".")
            for item in names.split(","):
                item = item.strip()
                if parts:
                    for part in parts:
                        self._declare(f"{item}.{part}", kind)
                    continue
                m = re.fullmatch(r"([\w$%]+)<(\d+)>", item)
                if m:
                    for i in range(int(m.group(2))):
                        self._declare(f"{m.group(1)}{i}", kind)
                else:
                    self._declare(item, kind)
        elif text.startswith((".shared", ".local")):
            var = _variable(text, line)
            (self.kernel.shared if var.space == "shared" else self.kernel.local).append(var)
        elif m := re.fullmatch(r"\.param\s+\.(\w+)\s+([\w$%]+)", text):
            self._declare(m.group(2), m.group(1))
            self.kernel.call_params.add(self._name(m.group(2)))
        elif not text.startswith((".loc", ".pragma", ".branchtargets")):
            raise EmulatorError("a declaration must be known", f"{text!r} (PTX line {line})")

    def _declare(self, name: str, kind: str) -> None:
        self.unique += 1
        unique = name if len(self.scopes) == 1 else f"{name}@{self.unique}"
        self.scopes[-1][name] = unique
        self.kernel.registers[unique] = kind

    def _name(self, name: str) -> str:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return name

    def _operand(self, text: str) -> Operand:
        text = text.strip()
        if text == "_":
            return ("_",)
        if text.startswith(("{", "(")):
            return ("v", [self._operand(o) for o in _split(text[1:-1])])
        if text.startswith("["):
            parts = _split(text[1:-1])
            base, offset = _base_offset(parts[0])
            return ("m", [self._operand(base), *(self._operand(p) for p in parts[1:])], offset)
        if text.startswith("!"):
            return ("n", self._operand(text[1:]))
        if "|" in text:
            a, b = text.split("|")
            return ("p", self._operand(a), self._operand(b))
        value = immediate(text)
        if value is not None:
            return ("i", value)
        parts = [self._name(f"{text}.{p}") for p in "xyzw"]
        if parts[0] in self.kernel.registers:
            return ("v", [("r", p) for p in parts if p in self.kernel.registers])
        name = self._name(text)
        if name in self.kernel.registers or name.startswith("%"):
            return ("r", name)
        base, offset = _base_offset(text)
        return ("s", base, offset)

    def resolve_branches(self) -> None:
        for ins, scopes in self.pending:
            name = ins.operands[-1][1]
            for scope in reversed(scopes):
                if name in scope:
                    ins.operands[-1] = ("l", self.kernel.labels[scope[name]])
                    break
            else:
                raise EmulatorError("a branch target must exist", ins.text)


def immediate(text: str) -> int | None:
    """Bit pattern of a PTX constant, or None when ``text`` is not one."""
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text) or re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
        return int(text[2:], 16)
    body = text.rstrip("U")
    if re.fullmatch(r"[-+]?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)", body):
        octal = re.fullmatch(r"([-+]?)0(\d+)", body)
        return int(octal.group(1) + octal.group(2), 8) if octal else int(body, 0)
    if re.fullmatch(r"[-+]?\d+\.\d*(e[-+]?\d+)?", text):
        return int.from_bytes(struct.pack("<d", float(text)), "little")
    return None


def _base_offset(text: str) -> tuple[str, int]:
    m = re.fullmatch(r"\s*([\w$%@.]+)\s*([-+])\s*([-+]?\w+)\s*", text)
    if m and immediate(m.group(3)) is not None:
        value = immediate(m.group(3)) or 0
        return m.group(1), -value if m.group(2) == "-" else value
    return text.strip(), 0


def _split(text: str) -> list[str]:
    out, depth, start = [], 0, 0
    for i, ch in enumerate(text):
        if ch in "{[(":
            depth += 1
        elif ch in "}])":
            depth -= 1
        elif ch == "," and depth == 0:
            out.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    if last:
        out.append(last)
    return out


def _params(text: str | None, line: int) -> list[Param]:
    out, offset = [], 0
    for item in _split(text or ""):
        item = re.sub(r"\.ptr(\s+\.\w+)?(\s+\.align\s+\d+)?", "", item)
        var = _variable(" ".join(item.split()), line)
        offset = (offset + var.align - 1) // var.align * var.align
        out.append(Param(var.name, var.size, var.align, offset))
        offset += var.size
    return out


def parse(text: str) -> Module:
    """Parses a PTX module.  Raises EmulatorError with the line that cannot be read."""
    clean = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), text, flags=re.S)
    clean = re.sub(r"//[^\n]*", "", clean)
    target = re.search(r"\.target\s+(\w+)", clean)
    version = re.search(r"\.version\s+([\d.]+)", clean)
    if not target or not version:
        raise EmulatorError("PTX must name its target and version", text[:80])
    files = {int(m.group(1)): m.group(2) for m in re.finditer(r'\.file\s+(\d+)\s+"([^"]*)"', clean)}
    module = Module(target.group(1), version.group(1), {}, {}, {}, files, text)
    outside, last = [], 0
    for m in _ENTRY.finditer(clean):
        outside.append(clean[last : m.start()])
        line = clean.count("\n", 0, m.end()) + 1
        kernel = Kernel(m.group(1), _params(m.group(2), line))
        for directive in re.finditer(r"\.(\w+)\s+([\d,\s]+)", m.group(3) or ""):
            numbers = tuple(int(v) for v in directive.group(2).replace(",", " ").split())
            kernel.directives[directive.group(1)] = numbers
        body = _Body(kernel, clean[m.end() :], line)
        body.resolve_branches()
        module.kernels[kernel.name] = kernel
        last = m.end()
    outside.append(clean[last:] if not module.kernels else "")
    head = "\n".join(re.sub(r".*\n\}", "", o, flags=re.S) for o in outside)
    for m in re.finditer(
        r"^\s*((?:\.(?:visible|extern|weak)\s+)*\.(?:shared|global|const)\s[^;]*);", head, re.M
    ):
        var = _variable(" ".join(m.group(1).split()), 0)
        if var.space == "shared":
            module.extern_shared[var.name] = var
        else:
            module.globals[var.name] = var
    return module
