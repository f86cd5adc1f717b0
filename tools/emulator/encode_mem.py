"""How memory, synchronisation and warp-wide instructions are encoded."""

from mok.tools.emulator import atomics as M
from mok.tools.emulator import layout as L
from mok.tools.emulator.encode import Encoder
from mok.tools.emulator.encode_ops import handles
from mok.tools.emulator.ptx_parser import Instruction, Operand, type_size

_SPACES = {
    "global": L.SP_GLOBAL,
    "shared": L.SP_SHARED,
    "local": L.SP_LOCAL,
    "param": L.SP_RAW,
    "const": L.SP_RAW,
}
_ORDERED = {"volatile", "relaxed", "acquire", "mmio"}
_SCOPES = {"cta": 0, "cluster": 1, "gpu": 2, "gl": 2, "sys": 3}  # gl: of membar


def scope_of(ins: Instruction, default: int) -> int:
    """Scope of an ordered instruction: 0 CTA, 1 cluster, 2 GPU, 3 system."""
    return next((_SCOPES[m] for m in ins.mods if m in _SCOPES), default)


_HINT = "L2::cache_hint"


def space_of(ins: Instruction) -> int:
    """State space that the mnemonic names; generic without one."""
    for mod in ins.mods[1:]:
        name = mod.split("::")[0]
        if name in _SPACES and mod not in ("param::func",):
            return _SPACES[name]
    return L.SP_GENERIC


def _log2(n: int) -> int:
    return n.bit_length() - 1


def _reg_bytes(e: Encoder, op: Operand) -> int:
    kind = e.kernel.registers.get(op[1], "b64") if op[0] == "r" else "b64"
    return 1 if kind == "pred" else type_size(kind)


def _vector(e: Encoder, op: Operand, size: int) -> tuple[list[int | None], int]:
    """Rows of a scalar or vector operand, and the element size."""
    items = op[1] if op[0] == "v" else [op]
    rows: list[int | None] = []
    for item in items:
        if item[0] == "_":
            rows.extend([None] * (2 if size == 16 else 1))
            continue
        row = e.row(item, min(size, 8))
        rows.extend([row, row + 1] if size == 16 else [row])
    return rows, min(size, 8)


def _call_param(e: Encoder, ins: Instruction, op: Operand) -> int | None:
    """Row of a call's parameter that a load or store names."""
    base = op[1][0] if op[0] == "m" else op
    if ins.mods[1] != "param" or base[0] != "r" or base[1] not in e.kernel.call_params:
        return None
    return e.row(base)


@handles("call")
def _call(e: Encoder, ins: Instruction) -> None:
    from mok.tools.emulator.encode import PyOp

    name = next((o[1] for o in ins.operands if o[0] == "s"), "an address")
    if name != "vprintf":
        raise e.unsupported(f"a call of {name}")
    *result, (form, arguments) = (o[1] for o in ins.operands if o[0] == "v")
    row = e.row(result[0][0]) if result else e.dummy
    e.pyops.append(PyOp(ins, [e.row(form), e.row(arguments), row]))
    e.emit(L.OP_PY, x=len(e.pyops) - 1)


@handles("ld", "ldu")
def _ld(e: Encoder, ins: Instruction) -> None:
    kind = ins.mods[-1]
    dst, src = ins.operands[:2]
    if (param := _call_param(e, ins, src)) is not None:
        e.alu("mov", e.row(dst), param)
        return
    rows, size = _vector(e, dst, type_size(kind))
    a, offset = e.address(src)
    item = dst[1][0] if dst[0] == "v" else dst
    x = space_of(ins) | _log2(size) << 3 | int(kind[0] == "s") << 8
    x |= _log2(_reg_bytes(e, item)) << 9 if kind[0] == "s" else 3 << 9
    x |= int(bool(_ORDERED & set(ins.mods))) << 16 | int("acquire" in ins.mods) << 17
    x |= scope_of(ins, 3) << 20
    e.emit(L.OP_LD, a=a, y=offset, x=x, ext=rows, n=len(rows))


@handles("st")
def _st(e: Encoder, ins: Instruction) -> None:
    if "async" in ins.mods:
        python_op(e, ins)
        return
    dst, src = ins.operands[:2]
    if (param := _call_param(e, ins, dst)) is not None:
        e.alu("mov", param, e.row(src, type_size(ins.mods[-1])))
        return
    rows, size = _vector(e, src, type_size(ins.mods[-1]))
    a, offset = e.address(dst)
    strong = bool((_ORDERED | {"release"}) & set(ins.mods))
    x = space_of(ins) | _log2(size) << 3 | int(strong) << 16 | int("release" in ins.mods) << 17
    x |= scope_of(ins, 3) << 20
    e.emit(L.OP_ST, a=a, y=offset, x=x, ext=rows, n=len(rows))


_ATOMIC = {
    "add": M.A_ADD,
    "min": M.A_MIN,
    "max": M.A_MAX,
    "and": M.A_AND,
    "or": M.A_OR,
    "xor": M.A_XOR,
    "exch": M.A_EXCH,
    "cas": M.A_CAS,
    "inc": M.A_INC,
    "dec": M.A_DEC,
}
_ATOMIC_TYPE = {
    "f32": M.T_F32,
    "f64": M.T_F64,
    "bf16x2": M.T_BF16X2,
    "f16x2": M.T_F16X2,
    "bf16": M.T_BF16,
    "f16": M.T_F16,
}


@handles("atom", "red")
def _atom(e: Encoder, ins: Instruction) -> None:
    if "async" in ins.mods:
        python_op(e, ins)
        return
    kind = ins.mods[-1]
    if kind == "b128":
        raise e.unsupported()
    op = next((m for m in ins.mods[1:] if m in _ATOMIC), None)
    if op is None:
        raise e.unsupported()
    operands = list(ins.operands)
    dst = operands.pop(0) if ins.mods[0] == "atom" else None
    address = operands.pop(0)
    compare = operands.pop(0) if op == "cas" else None
    size = 4 if kind.endswith("x2") else type_size(kind)
    rows, size = _vector(e, operands[0], size)
    n = len(rows)
    d = None
    if dst is not None and dst[0] != "_":
        out, _ = _vector(e, dst, size)
        d = out[0]
        rows = rows + out
    number = _ATOMIC_TYPE.get(kind, M.T_S if kind[0] == "s" else M.T_U)
    a, offset = e.address(address)
    mods = set(ins.mods)
    order = int(bool(mods & {"acquire", "acq_rel"})) << 17
    order |= int(bool(mods & {"release", "acq_rel"})) << 18 | scope_of(ins, 2) << 20
    e.emit(
        L.OP_ATOM,
        d=d,
        a=a,
        y=offset,
        x=space_of(ins) | _log2(size) << 3 | order,
        c=None if compare is None else e.row(compare, size),
        e=_ATOMIC[op] | number << 8,
        e_raw=True,
        ext=rows,
        n=n,
    )


# -- warp-wide -----------------------------------------------------------------------


def _pair(e: Encoder, op: Operand) -> tuple[int | None, int | None]:
    parts = op[1:] if op[0] == "p" else (op, ("_",))
    first, second = (None if p[0] == "_" else e.row(p) for p in parts)
    return first, second


def _member_mask(e: Encoder, op: Operand) -> int:
    from mok.tools.emulator.encode import ROW

    return e.row(op, 4) * ROW


@handles("shfl")
def _shfl(e: Encoder, ins: Instruction) -> None:
    d, p = _pair(e, ins.operands[0])
    mode = {"idx": 0, "up": 1, "down": 2, "bfly": 3}[ins.mods[2]]
    a, b, c = (e.row(o, 4) for o in ins.operands[1:4])
    e.emit(
        L.OP_SHFL, d=d, e=p, a=a, b=b, c=c, x=mode, sync=1, target=_member_mask(e, ins.operands[4])
    )


@handles("vote")
def _vote(e: Encoder, ins: Instruction) -> None:
    mode = {"any": 0, "all": 1, "uni": 2, "ballot": 3}[ins.mods[2]]
    a = ins.operands[1]
    negate = int(a[0] == "n")
    row = e.row(a[1] if negate else a, 1)
    e.emit(
        L.OP_VOTE,
        d=e.row(ins.operands[0]),
        a=row,
        x=mode,
        e=negate,
        e_raw=True,
        sync=1,
        target=_member_mask(e, ins.operands[2]),
    )


@handles("match")
def _match(e: Encoder, ins: Instruction) -> None:
    d, p = _pair(e, ins.operands[0])
    e.emit(
        L.OP_MATCH,
        d=e.dummy if d is None else d,
        e=p,
        a=e.row(ins.operands[1], type_size(ins.mods[-1])),
        x=int(ins.mods[1] == "all"),
        sync=1,
        target=_member_mask(e, ins.operands[2]),
    )


@handles("redux")
def _redux(e: Encoder, ins: Instruction) -> None:
    kind = ins.mods[-1]
    if kind not in ("s32", "u32", "b32"):
        raise e.unsupported()
    mode = {"add": 0, "min": 1, "max": 2, "and": 3, "or": 4, "xor": 5}[ins.mods[2]]
    e.emit(
        L.OP_REDUX,
        d=e.row(ins.operands[0]),
        a=e.row(ins.operands[1], 4),
        x=mode,
        z=int(kind == "s32"),
        sync=1,
        target=_member_mask(e, ins.operands[2]),
    )


@handles("elect")
def _elect(e: Encoder, ins: Instruction) -> None:
    d, p = _pair(e, ins.operands[0])
    e.emit(L.OP_ELECT, d=d, e=p, sync=1, target=_member_mask(e, ins.operands[1]))


@handles("activemask")
def _activemask(e: Encoder, ins: Instruction) -> None:
    e.emit(L.OP_ACTIVEMASK, d=e.row(ins.operands[0]))


# -- barriers ------------------------------------------------------------------------


@handles("bar", "barrier")
def _bar(e: Encoder, ins: Instruction) -> None:
    mods = [m for m in ins.mods[1:] if m not in ("cta", "aligned")]
    if mods[0] == "warp":
        e.emit(L.OP_SYNCWARP, sync=1, target=_member_mask(e, ins.operands[0]))
    elif mods[0] == "cluster":
        aligned = int("aligned" in ins.mods)
        op = L.OP_CLUSTER_ARRIVE if mods[1] == "arrive" else L.OP_CLUSTER_WAIT
        e.emit(op, x=int("relaxed" in mods), sync=aligned)
    elif mods[0] in ("sync", "arrive"):
        aligned = ins.mods[0] == "bar" or "aligned" in ins.mods
        b = e.row(ins.operands[1], 4) if len(ins.operands) > 1 else None
        e.emit(
            L.OP_BAR,
            a=e.row(ins.operands[0], 4),
            b=b,
            x=int(mods[0] == "arrive"),
            sync=int(aligned),
        )
    elif mods[0] == "red":
        d, a, *rest = ins.operands
        p = rest[-1]
        negate = int(p[0] == "n")
        e.emit(
            L.OP_BAR,
            d=e.row(d),
            a=e.row(a, 4),
            b=e.row(rest[0], 4) if len(rest) > 1 else None,
            c=e.row(p[1] if negate else p, 1),
            e=negate,
            e_raw=True,
            x={"popc": 2, "and": 3, "or": 4}[mods[1]],
            sync=1,
        )
    else:
        raise e.unsupported()


@handles("mbarrier")
def _mbarrier(e: Encoder, ins: Instruction) -> None:
    op = ins.mods[1]
    z = space_of(ins)
    if op in ("test_wait", "try_wait"):
        d = ins.operands[0]
        a, offset = e.address(ins.operands[1])
        e.emit(
            L.OP_MBAR_WAIT,
            d=None if d[0] == "_" else e.row(d),
            a=a,
            y=offset,
            b=e.row(ins.operands[2]),
            x=int("parity" not in ins.mods),
            z=z,
            e=int(op == "test_wait") | 2 * int("relaxed" in ins.mods),
            e_raw=True,
        )
        return
    if "noComplete" in ins.mods or op in ("arrive_drop", "pending_count"):
        raise e.unsupported()
    mode = {"init": 0, "inval": 1, "arrive": 2, "expect_tx": 3, "complete_tx": 5}[op]
    if op == "arrive" and "expect_tx" in ins.mods:
        mode = 4
    operands = list(ins.operands)
    d = None
    if operands[0][0] != "m":
        first = operands.pop(0)
        d = None if first[0] == "_" else e.row(first)
    a, offset = e.address(operands[0])
    b = e.row(operands[1], 4) if len(operands) > 1 else None
    flags = 2 * int("relaxed" in ins.mods) | 8 * int("cluster" not in ins.mods)
    e.emit(
        L.OP_MBAR_ARRIVE,
        d=d,
        a=a,
        b=b,
        y=offset,
        x=mode,
        z=z,
        e=flags,
        e_raw=True,
    )


@handles("mapa")
def _mapa(e: Encoder, ins: Instruction) -> None:
    e.emit(L.OP_MAPA, d=e.row(ins.operands[0]), a=e.row(ins.operands[1]), b=e.row(ins.operands[2]))


@handles("getctarank")
def _getctarank(e: Encoder, ins: Instruction) -> None:
    d = e.row(ins.operands[0])
    e.alu("unpack8", d, e.row(ins.operands[1]), x=L.RANK_SHIFT)


@handles("isspacep")
def _isspacep(e: Encoder, ins: Instruction) -> None:
    window = {"global": 0, "shared": 1, "local": 2}[ins.mods[1].split("::")[0]]
    own = int(ins.mods[1] in ("shared", "shared::cta"))
    e.emit(L.OP_ISSPACE, d=e.row(ins.operands[0]), a=e.row(ins.operands[1]), x=window)
    e.records[-1][L.I_B] = own


@handles("fence", "membar")
def _fence(e: Encoder, ins: Instruction) -> None:
    if any("tensormap" in m for m in ins.mods):
        python_op(e, ins)
        return
    kind = 0
    if "mbarrier_init" in ins.mods or "alias" in ins.mods:
        kind = 2
    elif "proxy" in ins.mods:
        kind = 1
    e.emit(L.OP_FENCE, x=kind, y=scope_of(ins, 3))


@handles("nanosleep")
def _nanosleep(e: Encoder, ins: Instruction) -> None:
    e.emit(L.OP_NANOSLEEP)


@handles("griddepcontrol", "prefetch", "prefetchu", "discard", "applypriority", "pmevent")
def _nothing(e: Encoder, ins: Instruction) -> None:
    e.emit(L.OP_NOP)


@handles("createpolicy")
def _createpolicy(e: Encoder, ins: Instruction) -> None:
    e.alu("mov", e.row(ins.operands[0]), e.const(0))


@handles("ldmatrix", "stmatrix")
def _matrix(e: Encoder, ins: Instruction) -> None:
    load = ins.mods[0] == "ldmatrix"
    shape = next(m for m in ins.mods if m.startswith("m"))
    trans = int("trans" in ins.mods)
    if shape not in ("m8n8", "m16n8") or (load and (shape != "m8n8" or ins.mods[-1] != "b16")):
        raise e.unsupported()
    mode = trans | (2 if shape == "m16n8" else 0)
    reg, mem = ins.operands if load else reversed(ins.operands)
    rows, _ = _vector(e, reg, 4)
    a, offset = e.address(mem)
    e.emit(
        L.OP_LDMATRIX if load else L.OP_STMATRIX,
        a=a,
        y=offset,
        x=mode,
        z=space_of(ins),
        ext=rows,
        n=len(rows),
        sync=1,
    )


# -- asynchronous operations, executed by Python handlers ----------------------------


def python_op(e: Encoder, ins: Instruction) -> None:
    """Encodes an instruction whose handler is looked up by mnemonic when the machine starts."""
    sync = int("sync" in ins.mods and "aligned" in ins.mods)
    e.pyops.append(_pyop(e, ins))
    e.emit(L.OP_PY, x=len(e.pyops) - 1, sync=sync)


def _pyop(e: Encoder, ins: Instruction):  # type: ignore[no-untyped-def]
    from mok.tools.emulator.encode import PyOp

    return PyOp(ins, [e.py_operand(o) for o in ins.operands])


@handles("cp")
def _cp(e: Encoder, ins: Instruction) -> None:
    name = ins.name
    if name.startswith(("cp.async.bulk", "cp.reduce.async.bulk")):
        python_op(e, ins)
    elif name.startswith("cp.async.mbarrier.arrive"):
        if "noinc" in ins.mods:
            a, offset = e.address(ins.operands[0])
            e.emit(L.OP_MBAR_ARRIVE, a=a, b=None, y=offset, x=2, z=space_of(ins), e=4, e_raw=True)
        else:
            e.emit(L.OP_NOP)  # raises the pending count, then arrives: no change
    elif name == "cp.async.commit_group":
        e.emit(L.OP_CPA, x=0)
    elif name == "cp.async.wait_group":
        e.emit(L.OP_CPA, x=1, y=ins.operands[0][1])
    elif name == "cp.async.wait_all":
        e.emit(L.OP_CPA, x=2)
    elif name.startswith("cp.async.c"):
        operands = [o for o in ins.operands]
        if _HINT in ins.mods:
            operands.pop()
        a, offset = e.address(operands[0])
        b, source_offset = e.address(operands[1])
        size = operands[2][1]
        c = None
        if len(operands) > 3:
            if e.kernel.registers.get(operands[3][1]) == "pred":
                raise e.unsupported("ignore-src")
            c = e.row(operands[3], 4)
        e.emit(L.OP_CP_ASYNC, a=a, b=b, c=c, x=size, y=offset, z=source_offset)
    else:
        raise e.unsupported()


for _name in ("wgmma", "tcgen05", "clusterlaunchcontrol", "tensormap", "multimem", "setmaxnreg"):
    handles(_name)(python_op)
