"""How each integer, floating-point, move and control instruction is encoded."""

from collections.abc import Callable

from mok.tools.emulator import layout as L
from mok.tools.emulator.encode import Encoder
from mok.tools.emulator.ptx_parser import Instruction, type_size

HANDLERS: dict[str, Callable[[Encoder, Instruction], None]] = {}


def handles(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers the function as the encoder of these mnemonics."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        for name in names:
            HANDLERS[name] = function
        return function

    return add


_INT = {"s16", "u16", "b16", "s32", "u32", "b32", "s64", "u64", "b64"}
_PACKED = {"fma": 0, "add": 1, "sub": 2, "mul": 3, "min": 4, "max": 5}


def _bits(kind: str) -> str:
    return kind.lstrip("subf")


def _sources(e: Encoder, ins: Instruction, width: int, first: int = 1) -> list[int]:
    return [e.row(o, width) for o in ins.operands[first:]]


def _float(e: Encoder, ins: Instruction, name: str, d: int, sources: list[int]) -> None:
    """FP32 operation with the ftz, sat and relu modifiers; refuses other rounding modes."""
    mods = set(ins.mods)
    if mods & {"rz", "rm", "rp"}:
        raise e.unsupported("rounding mode")
    if "ftz" in mods:
        flushed = []
        for i, s in enumerate(sources):
            e.alu("ftz_f32", e.temp(i), s)
            flushed.append(e.temp(i))
        sources = flushed
    e.alu(name, d, *sources)
    if "ftz" in mods:
        e.alu("ftz_f32", d, d)
    if "sat" in mods:
        e.alu("sat_f32", d, d)
    if "relu" in mods:
        e.alu("relu_f32", d, d)


@handles("add", "sub", "mul", "mad", "fma", "div", "rem", "min", "max")
def _arithmetic(e: Encoder, ins: Instruction) -> None:
    kind, op = ins.mods[-1], ins.mods[0]
    mods = set(ins.mods)
    if "cc" in mods or (kind in _INT and "sat" in mods):
        raise e.unsupported()
    d = e.row(ins.operands[0])
    src = _sources(e, ins, type_size(kind) if kind[-1].isdigit() and "x2" not in kind else 8)
    if kind in ("bf16x2", "f16x2", "bf16", "f16"):
        if op not in _PACKED or mods & {"sat", "relu", "NaN"}:
            raise e.unsupported()
        src += [src[0]] * (3 - len(src))
        e.alu(kind, d, *src, x=_PACKED[op])
    elif kind == "f32x2":
        if op not in ("fma", "add", "sub", "mul") or mods & {"ftz", "rz", "rm", "rp"}:
            raise e.unsupported()
        src += [src[0]] * (3 - len(src))
        e.alu("f32x2", d, *src, x=_PACKED[op])
    elif kind == "f32":
        name = {"mad": "fma"}.get(op, op)
        if "NaN" in mods:
            name += "_nan"
        if "xorsign" in mods or "abs" in mods:
            raise e.unsupported()
        if op in ("min", "max") and len(src) == 3:
            e.alu(f"{name}_f32", e.temp(3), src[0], src[1])
            src = [e.temp(3), src[2]]
        _float(e, ins, f"{name}_f32", d, src)
    elif kind == "f64":
        if mods & {"rz", "rm", "rp"}:
            raise e.unsupported("rounding mode")
        e.alu(f"{op}_f64", d, *src)
    elif op in ("add", "sub"):
        e.alu(f"{op}{_bits(kind)}", d, *src)
    elif op in ("mul", "mad"):
        part = next((m for m in ins.mods if m in ("lo", "hi", "wide")), "lo")
        if part == "wide":
            src = _sources(e, ins, type_size(kind))
            if op == "mad":
                src[2] = e.row(ins.operands[3], 2 * type_size(kind))
        suffix = _bits(kind) if part == "lo" else kind.replace("b", "u")
        e.alu(f"{op}_{part}{'' if part == 'lo' else '_'}{suffix}", d, *src)
    else:
        e.alu(f"{op}_{kind.replace('b', 'u')}", d, *src)


@handles("neg", "abs", "not", "popc", "clz", "brev")
def _unary(e: Encoder, ins: Instruction) -> None:
    kind, op = ins.mods[-1], ins.mods[0]
    d, a = e.row(ins.operands[0]), e.row(ins.operands[1], 8)
    if kind == "pred":
        e.alu("not_pred", d, a)
    elif kind in ("f32", "f64"):
        e.alu(f"{op}_{kind}", d, a)
    elif kind in ("bf16x2", "f16x2", "bf16", "f16"):
        mask = {"x2": 0x80008000}.get(kind[-2:], 0x8000)
        if op == "neg":
            e.alu("xor", d, a, e.const(mask))
        else:
            e.alu("and", d, a, e.const(mask ^ (0xFFFFFFFF if "x2" in kind else 0xFFFF)))
    elif op == "popc":
        e.alu("popc", d, a)
    else:
        e.alu(f"{op}{_bits(kind)}", d, a)


@handles("and", "or", "xor")
def _logic(e: Encoder, ins: Instruction) -> None:
    kind = ins.mods[-1]
    width = 1 if kind == "pred" else type_size(kind)
    e.alu(ins.mods[0], e.row(ins.operands[0]), *_sources(e, ins, width))


@handles("shl", "shr")
def _shift(e: Encoder, ins: Instruction) -> None:
    kind = ins.mods[-1]
    d, a = e.row(ins.operands[0]), e.row(ins.operands[1], type_size(kind))
    b = e.row(ins.operands[2], 4)
    if ins.mods[0] == "shl":
        e.alu(f"shl{_bits(kind)}", d, a, b)
    elif kind[0] == "s":
        e.alu(f"shr_s{_bits(kind)}", d, a, b)
    else:
        e.alu("shr_u", d, a, b)


@handles("shf")
def _funnel(e: Encoder, ins: Instruction) -> None:
    e.alu(f"shf_{ins.mods[1]}_{ins.mods[2]}", e.row(ins.operands[0]), *_sources(e, ins, 4))


@handles("prmt")
def _prmt(e: Encoder, ins: Instruction) -> None:
    if len(ins.mods) != 2:
        raise e.unsupported("prmt mode")
    e.alu("prmt", e.row(ins.operands[0]), *_sources(e, ins, 4))


@handles("lop3")
def _lop3(e: Encoder, ins: Instruction) -> None:
    if len(ins.operands) != 5:
        raise e.unsupported()
    src = [e.row(o, 4) for o in ins.operands[1:4]]
    e.alu("lop3", e.row(ins.operands[0]), *src, x=ins.operands[4][1])


@handles("bfe")
def _bfe(e: Encoder, ins: Instruction) -> None:
    e.alu(f"bfe_{ins.mods[1]}", e.row(ins.operands[0]), *_sources(e, ins, type_size(ins.mods[1])))


@handles("bfi")
def _bfi(e: Encoder, ins: Instruction) -> None:
    width = type_size(ins.mods[1])
    d, a, b = (e.row(o, width) for o in ins.operands[:3])
    pos, length = e.row(ins.operands[3], 4), e.row(ins.operands[4], 4)
    e.alu("and", e.temp(0), pos, e.const(255))
    e.alu("pack", e.temp(0), e.temp(0), length, x=8)
    e.alu(f"bfi{8 * width}", d, a, b, e.temp(0))


@handles("bfind")
def _bfind(e: Encoder, ins: Instruction) -> None:
    kind = ins.mods[-1].replace("b", "u")
    d, a = e.row(ins.operands[0]), e.row(ins.operands[1])
    if kind == "s64":
        raise e.unsupported()
    e.alu(f"bfind_{kind}", d, a, x=int("shiftamt" in ins.mods))


@handles("rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh", "copysign")
def _special(e: Encoder, ins: Instruction) -> None:
    kind = ins.mods[-1]
    name = f"{ins.mods[0]}_{kind}"
    d, src = e.row(ins.operands[0]), _sources(e, ins, 8)
    if kind == "f64":
        if name not in ("rcp_f64", "sqrt_f64"):
            raise e.unsupported()
        e.alu(name, d, *src)
    elif kind == "f32":
        _float(e, ins, name, d, src)
    else:
        raise e.unsupported()


@handles("selp")
def _selp(e: Encoder, ins: Instruction) -> None:
    width = type_size(ins.mods[-1])
    d, a, b, p = ins.operands
    e.alu("selp", e.row(d), e.row(a, width), e.row(b, width), e.row(p))


_UNSIGNED_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


@handles("setp")
def _setp(e: Encoder, ins: Instruction) -> None:
    kind = ins.mods[-1]
    compare = _UNSIGNED_NAMES.get(ins.mods[1], ins.mods[1])
    combine = next((m for m in ins.mods[2:-1] if m in ("and", "or", "xor")), None)
    first, second = ins.operands[0], None
    if first[0] == "p":
        first, second = first[1], first[2]
    sources = []
    if kind in ("bf16", "f16"):
        for i, o in enumerate(ins.operands[1:3]):
            e.alu(f"{kind}_f32", e.temp(i), e.row(o, 2))
            sources.append(e.temp(i))
        kind = "f32"
    elif kind in ("f32", "f64"):
        sources = [e.row(o, type_size(kind)) for o in ins.operands[1:3]]
        if "ftz" in ins.mods:
            for i, s in enumerate(list(sources)):
                e.alu("ftz_f32", e.temp(i), s)
                sources[i] = e.temp(i)
    else:
        sources = [e.row(o, type_size(kind)) for o in ins.operands[1:3]]
        kind = kind if kind[0] == "s" else "u64"
    d = e.row(first)
    result = e.temp(2) if combine or second else d
    e.alu(f"setp_{compare}_{kind}", result, *sources)
    if not combine and not second:
        return
    inverse = e.temp(3)
    e.alu("not_pred", inverse, result)
    extra = None
    if combine:
        operand = ins.operands[3]
        extra = e.row(operand[1] if operand[0] == "n" else operand, 1)
        if operand[0] == "n":
            e.alu("not_pred", e.temp(4), extra)
            extra = e.temp(4)
    for target, value in ((first, result), (second, inverse)):
        if target is None or target[0] == "_":
            continue
        if combine and extra is not None:
            e.alu(combine, e.row(target), value, extra)
        else:
            e.alu("mov", e.row(target), value)


def _unpack(e: Encoder, vector: list, source: int, total: int) -> None:
    part = total // len(vector)
    if part == 8:
        for i, o in enumerate(vector):
            if o[0] != "_":
                e.alu("mov", e.row(o), source + i)
        return
    for i, o in enumerate(vector):
        if o[0] != "_":
            e.alu(f"unpack{8 * part}", e.row(o), source, x=8 * part * i)


_CLOCKS = {
    "%clock": 1,
    "%clock64": 0,
    "%clock_hi": 3,
    "%globaltimer": 0,
    "%globaltimer_lo": 1,
    "%globaltimer_hi": 3,
}


@handles("mov")
def _mov(e: Encoder, ins: Instruction) -> None:
    kind = ins.mods[-1]
    width = 1 if kind == "pred" else type_size(kind)
    d, a = ins.operands
    if a[0] == "r" and a[1] in _CLOCKS:
        e.emit(L.OP_CLOCK, d=e.row(d), x=_CLOCKS[a[1]])
    elif d[0] == "v" and a[0] == "v":
        for x, y in zip(d[1], a[1], strict=True):
            e.alu("mov", e.row(x), e.row(y, width // len(d[1])))
    elif d[0] == "v":
        _unpack(e, d[1], e.row(a, width), width)
    elif a[0] == "v":
        parts = a[1]
        part = width // len(parts)
        if part == 8:
            for i, o in enumerate(parts):
                e.alu("mov", e.row(d) + i, e.row(o, 8))
            return
        out = e.temp(0)
        e.alu("mov", out, e.row(parts[0], part))
        for i, o in enumerate(parts[1:], 1):
            e.alu("pack", out, out, e.row(o, part), x=8 * part * i)
        e.alu("mov", e.row(d), out)
    elif kind == "b128":
        for i in range(2):
            e.alu("mov", e.row(d) + i, e.row(a) + i)
    else:
        e.alu("mov", e.row(d), e.row(a, width))


@handles("cvta")
def _cvta(e: Encoder, ins: Instruction) -> None:
    to = ins.mods[1] == "to"
    space = ins.mods[2 if to else 1].split("::")[0]
    d, a = e.row(ins.operands[0]), e.row(ins.operands[1])
    if space in ("global", "const", "param"):
        e.alu("mov", d, a)
    elif to:
        e.alu("zext32", d, a)
    else:
        e.alu("or", d, a, e.const(L.SHARED_BASE if space == "shared" else L.LOCAL_BASE))


_ROUND = {"rni": 0, "rzi": 1, "rmi": 2, "rpi": 3}


@handles("cvt")
def _cvt(e: Encoder, ins: Instruction) -> None:
    dst, src = ins.mods[-2], ins.mods[-1]
    mods = set(ins.mods[1:-2])
    d = e.row(ins.operands[0])
    a = [e.row(o, 8) for o in ins.operands[1:]]
    rounding = next((_ROUND[m] for m in ins.mods if m in _ROUND), None)
    ints = {"s8", "u8", "b8", "s16", "u16", "b16", "s32", "u32", "b32", "s64", "u64", "b64"}
    if dst in ints and src in ints:
        if "sat" in mods:
            raise e.unsupported()
        narrow = min(type_size(src), type_size(dst))
        wide = 16 if dst[1:] == "8" else 8 * type_size(dst)
        if src[0] == "s" and narrow == type_size(src) and wide > 8 * narrow:
            e.alu(f"sext{8 * narrow}_{wide}", d, a[0])
        elif dst == "s8":
            e.alu("sext8_16", d, a[0])
        else:
            e.alu("mov" if narrow == 8 else f"zext{8 * narrow}", d, a[0])
    elif dst in ("f32", "f64") and src in ints:
        if mods & {"rz", "rm", "rp"}:
            raise e.unsupported("rounding mode")
        source = a[0]
        if type_size(src) < 4:
            e.alu("sext" + src[1:] + "_32" if src[0] == "s" else "zext" + src[1:], e.temp(0), a[0])
            source, src = e.temp(0), src[0] + "32"
        e.alu(f"{src}_{dst}", d, source)
    elif src in ("f32", "f64") and dst in ints:
        if rounding is None:
            raise e.unsupported("rounding mode")
        if dst[1:] in ("8", "16"):
            raise e.unsupported()
        e.alu(f"{src}_{dst}", d, a[0], x=rounding)
    elif src in ("bf16", "f16") and dst in ("f32", *ints, "f64"):
        if dst == "f32":
            e.alu(f"{src}_f32", d, a[0])
        elif dst == "f64":
            e.alu(f"{src}_f32", e.temp(0), a[0])
            e.alu("f32_f64", d, e.temp(0))
        else:
            if rounding is None:
                raise e.unsupported("rounding mode")
            e.alu(f"{src}_f32", e.temp(0), a[0])
            e.alu(f"f32_{dst}", d, e.temp(0), x=rounding)
    elif src in ints and dst in ("bf16", "f16"):
        e.alu(f"{src.replace('16', '32')}_f32", e.temp(0), a[0])
        e.alu(f"f32_{dst}", d, e.temp(0))
    elif src == dst == "f32" and rounding is not None:
        e.alu("round_f32", d, a[0], x=rounding)
    elif (src, dst) == ("f32", "f64") or (src, dst) == ("f64", "f32"):
        if mods & {"rz", "rm", "rp"}:
            raise e.unsupported("rounding mode")
        e.alu(f"{src}_{dst}", d, a[0])
    elif src == "f32" and dst in ("bf16", "f16", "bf16x2", "f16x2", "e4m3x2", "e5m2x2"):
        if "rn" not in mods or (dst in ("e4m3x2", "e5m2x2") and "satfinite" not in mods):
            raise e.unsupported("rounding mode")
        if dst in ("bf16", "f16", "bf16x2", "f16x2") and "satfinite" in mods:
            raise e.unsupported()
        if "relu" in mods:
            for i, s in enumerate(list(a)):
                e.alu("relu_f32", e.temp(i), s)
                a[i] = e.temp(i)
        e.alu(f"f32_{dst}", d, *a)
    elif src == "f32" and dst == "ue8m0x2":
        e.alu("f32_ue8m0x2_" + ("rp" if "rp" in mods else "rz"), d, *a)
    elif (src, dst) in (("e4m3x2", "f16x2"), ("e5m2x2", "f16x2"), ("ue8m0x2", "bf16x2")):
        e.alu(f"{src}_{dst}", d, a[0])
    elif (src, dst) == ("s2f6x2", "bf16x2"):
        ones = e.const(0x7F7F)
        e.alu("s2f6x2_bf16x2", d, a[0], a[1] if "scaled::n2::ue8m0" in mods else ones)
    elif src == dst and "sat" in mods and src == "f32":
        e.alu("sat_f32", d, a[0])
    elif (src, dst) in (("bf16", "f16"), ("f16", "bf16")):
        e.alu(f"{src}_f32", e.temp(0), a[0])
        e.alu(f"f32_{dst}", d, e.temp(0))
    else:
        raise e.unsupported()


@handles("bra")
def _bra(e: Encoder, ins: Instruction) -> None:
    e.emit(L.OP_BRA, target=ins.operands[-1][1])


@handles("ret", "exit")
def _exit(e: Encoder, ins: Instruction) -> None:
    e.emit(L.OP_EXIT)


@handles("trap", "brkpt")
def _trap(e: Encoder, ins: Instruction) -> None:
    e.emit(L.OP_TRAP)
