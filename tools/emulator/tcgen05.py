"""tcgen05: tensor memory, its loads, stores and copies, and the Blackwell MMAs."""

import functools
import re
from typing import Any

import numpy as np

from mok.tools.emulator import layout as L
from mok.tools.emulator.asyncops import complete_tx
from mok.tools.emulator.encode import Program
from mok.tools.emulator.errors import EmulatorError, LaunchError
from mok.tools.emulator.machine import Machine
from mok.tools.emulator.resident import WAIT, Cta, Warp
from mok.tools.emulator.tma import generic_smem
from mok.tools.emulator.wgmma import BYTES, read_operand, to_float

LANES, COLUMNS = 128, 512
_OFFSET = (1 << L.RANK_SHIFT) - 1
TMEM_POISON = 0x7FC0BAD0


class TensorMemory:
    """One SM's 128 x 512 words, with the columns' owners."""

    def __init__(self) -> None:
        self.words = np.full((LANES, COLUMNS), TMEM_POISON, dtype=np.uint32)
        self.owner: list[Cta | None] = [None] * COLUMNS

    def find(self, columns: int) -> int | None:
        """First column of a free aligned run, or None."""
        for start in range(0, COLUMNS - columns + 1, columns):
            if all(self.owner[c] is None for c in range(start, start + columns)):
                return start
        return None

    def take(self, cta: Cta, start: int, columns: int) -> None:
        """Gives columns to a CTA, with unknown contents."""
        for c in range(start, start + columns):
            self.owner[c] = cta
        self.words[:, start : start + columns] = TMEM_POISON

    def check(self, cta: Cta, first: int, count: int) -> None:
        if first < 0 or first + count > COLUMNS:
            raise EmulatorError("a TMEM access must lie inside the 512 columns", (first, count))
        for c in range(first, first + count):
            if self.owner[c] is not cta:
                raise EmulatorError(
                    "a TMEM access must lie in columns that the CTA has allocated",
                    f"column {c}, owned by {self.owner[c] and self.owner[c].coords}",  # type: ignore[union-attr]
                )


def tmem_of(machine: Machine, cta: Cta) -> TensorMemory:
    """TMEM of the SM that a CTA runs on."""
    if machine.limits.tmem_columns == 0:
        raise EmulatorError("tensor memory exists on sm_100a and later", machine.limits.arch)
    table: dict[int, TensorMemory] = machine.__dict__.setdefault("tmem_table", {})
    return table.setdefault(sm_of(machine, cta), TensorMemory())


def sm_of(machine: Machine, cta: Cta) -> int:
    return cta.index % machine.num_sms


def pair_of(op: Any, cta: Cta) -> list[Cta]:
    """CTAs of the instruction's group: itself, or the even and odd CTA of its pair."""
    if "cta_group::2" not in op.ins.mods:
        return [cta]
    even = cta.rank & ~1
    if even + 1 >= len(cta.cluster.ctas):
        raise EmulatorError("cta_group::2 needs a CTA pair", f"cluster of {len(cta.cluster.ctas)}")
    return cta.cluster.ctas[even : even + 2]


def split(address: int) -> tuple[int, int]:
    """Lane and column of a TMEM address."""
    return address >> 16 & 0xFFFF, address & 0xFFFF


# -- allocation ----------------------------------------------------------------------

_ALLOCATION = "TMEM is allocated in powers of two from 32 to 512 columns"


def _fits(columns: int) -> bool:
    return 32 <= columns <= COLUMNS and columns & (columns - 1) == 0


def check_allocations(program: Program) -> None:
    """Raises LaunchError for an allocation that no launch of the kernel can get: of a number of columns, in
    the PTX, that does not exist, or of any on a target without tensor memory."""
    for op in program.pyops:
        if not op.ins.name.startswith("tcgen05.alloc"):
            continue
        at = f"{op.ins.text[:120]!r} at PTX line {op.ins.line}"
        if program.module.target.startswith("sm_9"):
            raise LaunchError("tensor memory exists on sm_100a and later", at)
        columns = program.constant(op.ins.operands[1])
        if columns is not None and not _fits(columns):
            raise LaunchError(_ALLOCATION, f"{columns}, {at}", "allocate less, or the next power")


def op_alloc(machine: Machine, w: Warp, op: Any) -> Any:
    """tcgen05.alloc: columns for the CTA, or for both of a pair; waits until they are free."""
    lane = w.lanes()[0]
    columns = w.value(op.operands[1], lane) & 0xFFFFFFFF
    if not _fits(columns):
        raise EmulatorError(_ALLOCATION, columns)
    if w.cta.extra.get("relinquished"):
        raise EmulatorError("no allocation may follow relinquish_alloc_permit", w.cta.coords)
    start = _allocate(machine, w, columns, "cta_group::2" in op.ins.mods)
    if start is None:
        return WAIT
    dst = generic_smem(w.value(op.operands[0][1][0], lane) + op.operands[0][2]) & _OFFSET
    if machine.checker is not None:
        machine.checker.smem_by_warp(w, w.cta, dst, 4, True)
    w.cta.smem[dst : dst + 4] = np.frombuffer(int(start).to_bytes(4, "little"), np.uint8)
    machine.x[L.X_EV_MEM] += 1
    return None


def _allocate(machine: Machine, w: Warp, columns: int, pair: bool) -> int | None:
    """First column of an allocation.  None: the warp must wait, for columns or for the peer CTA.

    Of a pair of CTAs one warp each takes part, and both get their columns at the same moment.
    """
    granted: dict[int, int] = w.cta.extra.setdefault("tmem granted", {})
    if w.index in granted:
        return granted.pop(w.index)
    takers = [w]
    if pair:
        asked: dict[int, tuple[Warp, int]] = w.cta.cluster.extra.setdefault("tmem asked", {})
        asked[w.cta.rank] = w, columns
        peer, number = asked.get(w.cta.rank ^ 1, (None, 0))
        if peer is None:
            w.wait = "the peer CTA to allocate tensor memory, too"
            return None
        if number != columns:
            raise EmulatorError("a pair of CTAs allocates the same columns", (columns, number))
        takers.append(peer)
    starts = [tmem_of(machine, t.cta).find(columns) for t in takers]
    if None in starts:
        taken = sum(o is not None for o in tmem_of(machine, w.cta).owner)
        w.wait = f"{columns} columns of tensor memory: {taken} of {COLUMNS} columns are taken"
        return None
    for taker, start in zip(takers, starts, strict=True):
        assert start is not None
        tmem_of(machine, taker.cta).take(taker.cta, start, columns)
        if machine.checker is not None:
            machine.checker.tmem_clear(sm_of(machine, taker.cta), start, columns)
        taker.cta.extra.setdefault("tmem", {})[start] = columns
        if taker is not w:
            taker.cta.extra.setdefault("tmem granted", {})[taker.index] = start
    if pair:
        w.cta.cluster.extra["tmem asked"].clear()
        machine.sync_event()
    return starts[0]


def op_dealloc(machine: Machine, w: Warp, op: Any) -> None:
    """tcgen05.dealloc: frees what one allocation has got."""
    lane = w.lanes()[0]
    _, start = split(w.value(op.operands[0], lane))
    columns = w.value(op.operands[1], lane) & 0xFFFFFFFF
    if w.cta.extra.get("tmem", {}).pop(start, None) != columns:
        raise EmulatorError("a TMEM deallocation must match its allocation", (start, columns))
    tm = tmem_of(machine, w.cta)
    for c in range(start, start + columns):
        tm.owner[c] = None
    machine.sync_event()


def op_relinquish(machine: Machine, w: Warp, op: Any) -> None:
    """tcgen05.relinquish_alloc_permit: no allocation of the CTA may follow."""
    w.cta.extra["relinquished"] = True


# -- load and store ------------------------------------------------------------------

_NUM = re.compile(r"x(\d+)")


@functools.cache
def fragment(shape: str, num: int) -> tuple[np.ndarray, np.ndarray]:
    """Lane and column offsets [registers, 32] of a tcgen05.ld or st."""
    t = np.arange(32)[None, :]
    if shape == "32x32b":
        r = np.arange(num)[:, None]
        return np.broadcast_to(t, (num, 32)), np.broadcast_to(r, (num, 32))
    if shape == "16x64b":
        r = np.arange(num)[:, None]
        return np.broadcast_to(t // 4 + 8 * (t % 2), (num, 32)), 2 * r + t // 2 % 2
    if shape == "16x128b":
        r = np.arange(2 * num)[:, None]
        return t // 4 + 8 * (r % 2), 4 * (r // 2) + t % 4
    if shape == "16x256b":
        r = np.arange(4 * num)[:, None]
        return t // 4 + 8 * (r // 2 % 2), 8 * (r // 4) + 2 * (t % 4) + r % 2
    raise EmulatorError("a TMEM load shape must be known", shape)


def _place(op: Any, address: int, count: int, w: Warp) -> tuple[np.ndarray, np.ndarray]:
    mods = op.ins.mods
    shape = next(m for m in mods if re.fullmatch(r"\d+x\d+b(x2)?", m))
    num = int(next(m for m in map(_NUM.fullmatch, mods) if m).group(1))
    lane0, col0 = split(address)
    if shape == "16x32bx2":
        half = op.operands[-1] if "ld" in mods else op.operands[1]
        t = np.arange(32)[None, :]
        r = np.arange(num)[:, None]
        offset = w.value(half, w.lanes()[0])
        lanes, cols = np.broadcast_to(t % 16, (num, 32)), r + (t // 16) * offset
    else:
        lanes, cols = fragment(shape, num)
    if lanes.shape[0] != count * (2 if "pack::16b" in mods or "unpack::16b" in mods else 1):
        raise EmulatorError("a TMEM load's register count must fit its shape", op.ins.name)
    quarter = int(w.state[L.W_INDEX]) & 3
    lanes = lanes + lane0
    if lanes.min() < 32 * quarter or lanes.max() >= 32 * quarter + 32:
        raise EmulatorError(
            "a warp may only access its own quarter of the TMEM lanes",
            f"warp {int(w.state[L.W_INDEX])}, lanes {lanes.min()} to {lanes.max()}",
        )
    return lanes, cols + col0


def _track(machine: Machine, w: Warp, lanes: np.ndarray, cols: np.ndarray, write: bool) -> None:
    if machine.checker is not None:
        first = int(cols.min())
        machine.checker.tmem_by_warp(
            w, sm_of(machine, w.cta), lanes, first, int(cols.max()) - first + 1, write
        )


def op_ld(machine: Machine, w: Warp, op: Any) -> None:
    """tcgen05.ld of 32-bit words, in every shape."""
    rows = op.operands[0][1] if isinstance(op.operands[0], tuple) else [op.operands[0]]
    if "red" in op.ins.mods:
        raise EmulatorError("tcgen05.ld.red is not implemented", op.ins.name)
    address = w.value(op.operands[1][1][0], w.lanes()[0]) + op.operands[1][2]
    lanes, cols = _place(op, address, len(rows), w)
    tm = tmem_of(machine, w.cta)
    tm.check(w.cta, int(cols.min()), int(cols.max() - cols.min() + 1))
    _track(machine, w, lanes, cols, False)
    values = tm.words[lanes, cols].astype(np.int64)
    if "pack::16b" in op.ins.mods:
        values = (values[0::2] & 0xFFFF) | (values[1::2] & 0xFFFF) << 16
    for row, value in zip(rows, values, strict=True):
        if row is not None:
            w.regs[row] = value


def op_st(machine: Machine, w: Warp, op: Any) -> None:
    """tcgen05.st of 32-bit words, in every shape."""
    source = op.operands[-1]
    rows = source[1] if isinstance(source, tuple) else [source]
    address = w.value(op.operands[0][1][0], w.lanes()[0]) + op.operands[0][2]
    lanes, cols = _place(op, address, len(rows), w)
    tm = tmem_of(machine, w.cta)
    tm.check(w.cta, int(cols.min()), int(cols.max() - cols.min() + 1))
    _track(machine, w, lanes, cols, True)
    values = w.regs[rows].astype(np.uint32)
    if "unpack::16b" in op.ins.mods:
        wide = np.empty((2 * len(rows), 32), np.uint32)
        wide[0::2], wide[1::2] = values & 0xFFFF, values >> 16
        values = wide
    tm.words[lanes, cols] = values


# -- MMA -----------------------------------------------------------------------------


class Descriptor:
    """Fields of a 64-bit tcgen05 shared-memory descriptor."""

    def __init__(self, word: int) -> None:
        word &= (1 << 64) - 1
        self.start = (word & 0x3FFF) << 4
        self.lbo = (word >> 16 & 0x3FFF) << 4
        self.sbo = (word >> 32 & 0x3FFF) << 4
        mode = word >> 61 & 7
        if mode not in (0, 2, 4, 6):
            raise EmulatorError("a descriptor's swizzle must be implemented", mode)
        self.swizzle = {0: 0, 2: 3, 4: 2, 6: 1}[mode]
        if word >> 49 & 7 or word >> 52 & 1 or word >> 46 & 7 != 1:
            raise EmulatorError(
                "a tcgen05 descriptor needs version 1, base offset 0 and relative strides",
                hex(word),
            )


_F16 = {0: "f16", 1: "bf16"}
_F8 = {0: "e4m3", 1: "e5m2"}


class MmaShape:
    """The decoded instruction descriptor."""

    def __init__(self, kind: str, idesc: int) -> None:
        scaled = kind.startswith("mx")
        a, b = idesc >> 7 & 7, idesc >> 10 & 7
        table = {"f16": _F16, "tf32": {2: "tf32"}, "f8f6f4": _F8, "mxf8f6f4": _F8}.get(kind)
        if table is None or a not in table or b not in table or idesc >> 2 & 1:
            raise EmulatorError(
                "an MMA kind and its types must be implemented", f"{kind}, idesc {idesc:#x}"
            )
        self.a, self.b = table[a], table[b]
        self.negate = bool(idesc >> 13 & 1) != bool(idesc >> 14 & 1)
        self.trans_a, self.trans_b = bool(idesc >> 15 & 1), bool(idesc >> 16 & 1)
        wide = BYTES[self.a] if self.trans_a else BYTES[self.b] if self.trans_b else 2
        if wide != 2:
            raise EmulatorError("here a transposed MMA operand is an operand of two bytes", wide)
        self.n = (idesc >> 17 & 63) << 3
        self.m = (idesc >> 27 & 3) << 7 if scaled else (idesc >> 24 & 31) << 4
        self.half = not scaled and idesc >> 4 & 3 == 0
        if scaled and not idesc >> 23 & 1:
            raise EmulatorError("MMA scales are E8M0 here", hex(idesc))
        if not scaled and idesc >> 4 & 3 > 1:
            raise EmulatorError("an MMA accumulates in f32 or f16 here", hex(idesc))
        self.k = 32 // BYTES[self.a]
        self.sfa, self.sfb = idesc >> 29 & 3, idesc >> 4 & 3


def accumulator_place(m: int, n: int, group: int) -> tuple[np.ndarray, np.ndarray]:
    """TMEM lane and column offset [rows of one CTA, n] of the accumulator."""
    r, c = np.arange(m // group)[:, None], np.arange(n)[None, :]
    if m // group == 128:
        return np.broadcast_to(r, (128, n)), np.broadcast_to(c, (128, n))
    if group == 2:  # M = 128 over a pair: the upper lanes hold the upper half of the columns
        return r + 64 * (c // (n // 2)), np.broadcast_to(c % (n // 2), (64, n))
    return np.broadcast_to(r % 16 + 32 * (r // 16), (64, n)), np.broadcast_to(c, (64, n))


def _scales(machine: Machine, cta: Cta, address: int, rows: int, byte: int) -> np.ndarray:
    """Scale of each operand row: lane row % 32, column row / 32, one byte of the word.

    Each quarter of the lanes reads its own copy, so all four must hold the same.
    """
    _, col = split(address)
    tm, count = tmem_of(machine, cta), -(-rows // 32)
    tm.check(cta, col, count)
    if machine.checker is not None:
        machine.checker.tmem(sm_of(machine, cta), np.arange(LANES), col, count, False)
    quarters = tm.words[:, col : col + count].reshape(4, 32, count)
    if (quarters != quarters[0]).any():
        raise EmulatorError(
            "an MMA's scales must be the same in all four quarters of the TMEM lanes",
            f"columns {col} to {col + count - 1}",
            "copy them with tcgen05.cp 32x128b.warpx4",
        )
    r = np.arange(rows)
    word = tm.words[r % 32, col + r // 32]
    code = word >> (8 * byte) & 255
    return np.where(code == 255, np.nan, np.exp2(code.astype(np.float64) - 127.0))


def op_mma(machine: Machine, w: Warp, op: Any) -> None:
    """tcgen05.mma, dense, of the kinds f16, tf32, f8f6f4 and mxf8f6f4.block_scale."""
    mods = op.ins.mods
    if "ws" in mods or "sp" in mods:
        raise EmulatorError("this form of tcgen05.mma is not implemented", op.ins.name)
    kind = next(m for m in mods if m.startswith("kind::"))[6:]
    if any(m in mods for m in ("scale_vec::2X", "scale_vec::4X", "block16")):
        raise EmulatorError("MMA scales cover 32 elements here", op.ins.name)
    ctas = pair_of(op, w.cta)
    group = len(ctas)
    for lane in w.lanes():
        ops = op.operands
        d_addr = w.value(ops[0][1][0], lane) + ops[0][2]
        a_memory = isinstance(ops[1], tuple)
        a_word = w.value(ops[1][1][0] if a_memory else ops[1], lane)
        b_word = w.value(ops[2], lane)
        shape = MmaShape(kind, w.value(ops[3], lane) & 0xFFFFFFFF)
        rest = list(ops[4:])
        scales: list[int] = []
        if "block_scale" in mods:
            scales = [w.value(r[1][0], lane) + r[2] for r in rest[:2]]
            rest = rest[2:]
        if rest and isinstance(rest[0], tuple) and rest[0][0] == "v":
            if any(w.value(r, lane) for r in rest[0][1]):
                raise EmulatorError("output lanes may not be disabled here", op.ins.name)
            rest = rest[1:]
        accumulate = bool(w.value(rest[0], lane)) if rest else True
        if len(rest) > 1:
            raise EmulatorError("scale-input-d is not implemented", op.ins.name)
        run = functools.partial(
            _mma, machine, ctas, group, d_addr, a_memory, a_word, b_word, shape, scales, accumulate
        )
        _submit(machine, w, "tcgen05.mma", run)


def _submit(machine: Machine, w: Warp, what: str, run: Any) -> None:
    """tcgen05 operations of one CTA run, and are ordered, as they are issued."""
    queue = w.cta.extra.setdefault("tcgen05", [])  # holds the newest operation, as their clock

    def ordered() -> None:
        checker = machine.checker
        if checker is not None and checker.agent is not None:
            if queue:
                np.maximum(checker.agent.clock, queue[0].clock, out=checker.agent.clock)
                np.maximum(checker.agent.proxy, queue[0].proxy, out=checker.agent.proxy)
            queue[:] = [checker.agent]
        run()

    machine.engine.submit(what, w, [ordered], queue=queue)


def _mma(
    machine: Machine,
    ctas: list[Cta],
    group: int,
    d_addr: int,
    a_memory: bool,
    a_word: int,
    b_word: int,
    s: MmaShape,
    scales: list[int],
    accumulate: bool,
) -> None:
    bytes_k = 32
    bd = Descriptor(b_word)
    if s.m not in ((64, 128) if group == 1 else (128, 256)) or not 8 <= s.n <= 256:
        raise EmulatorError("an MMA shape must exist", f"M {s.m}, N {s.n}, cta_group::{group}")
    parts = [
        read_operand(c, bd.start, s.n // group, bytes_k, bd.swizzle, bd.lbo, bd.sbo, s.trans_b)
        for c in ctas
    ]
    b = to_float(np.concatenate(parts), s.b).astype(np.float64 if scales else np.float32)
    rows = s.m // group
    for cta in ctas:
        tm = tmem_of(machine, cta)
        if a_memory:
            lane, col = split(a_word)
            if rows != 128:
                raise EmulatorError("A in TMEM needs 128 rows per CTA", rows)
            tm.check(cta, col, bytes_k // 4)
            if machine.checker is not None:
                span = lane + np.arange(rows)
                machine.checker.tmem(sm_of(machine, cta), span, col, bytes_k // 4, False)
            words = np.ascontiguousarray(tm.words[lane : lane + rows, col : col + bytes_k // 4])
            raw = words.view(np.uint8)
        else:
            ad = Descriptor(a_word)
            raw = read_operand(cta, ad.start, rows, bytes_k, ad.swizzle, ad.lbo, ad.sbo, s.trans_a)
        a = to_float(raw, s.a)
        right = b
        if scales:
            a = a * _scales(machine, cta, scales[0], rows, s.sfa)[:, None]
            right = b * _scales(machine, cta, scales[1], s.n, s.sfb)[:, None]
        product = (a @ right.T).astype(np.float32)
        if s.negate:
            product = -product
        lane0, col0 = split(d_addr)
        lanes, cols = accumulator_place(s.m, s.n, group)
        lanes, cols = lanes + lane0, cols + col0
        tm.check(cta, int(cols.min()), int(cols.max() - cols.min() + 1))
        if machine.checker is not None:
            machine.checker.tmem(
                sm_of(machine, cta),
                lanes,
                int(cols.min()),
                int(cols.max() - cols.min() + 1),
                True,
            )
        if s.half:
            if accumulate:
                old = (tm.words[lanes, cols] & 0xFFFF).astype(np.uint16).view(np.float16)
                product = product + old.astype(np.float32)
            tm.words[lanes, cols] = product.astype(np.float16).view(np.uint16)
            continue
        if accumulate:
            product += tm.words[lanes, cols].view(np.float32)
        tm.words[lanes, cols] = product.view(np.uint32)


def op_cp(machine: Machine, w: Warp, op: Any) -> None:
    """tcgen05.cp from shared memory, without format conversion."""
    mods = op.ins.mods
    shape = next(m for m in mods if re.fullmatch(r"\d+x\d+b", m))
    ctas = pair_of(op, w.cta)
    if any(m.startswith(("b8x16", "b6x16", "b4x16")) for m in mods):
        raise EmulatorError("tcgen05.cp with decompression is not implemented", op.ins.name)
    for lane in w.lanes():
        address = w.value(op.operands[0][1][0], lane) + op.operands[0][2]
        d = Descriptor(w.value(op.operands[1], lane))

        def run(address: int = address, d: Descriptor = d) -> None:
            lanes_n, bits = (int(v) for v in shape[:-1].split("x"))
            for cta in ctas:
                raw = read_operand(cta, d.start, lanes_n, bits // 8, d.swizzle, d.lbo, d.sbo, False)
                words = np.ascontiguousarray(raw).view(np.uint32)
                tm = tmem_of(machine, cta)
                lane0, col = split(address)
                tm.check(cta, col, words.shape[1])
                if machine.checker is not None:
                    reached = np.arange(LANES) if lane0 == 0 else lane0 + np.arange(lanes_n)
                    sm, width = sm_of(machine, cta), words.shape[1]
                    machine.checker.tmem(sm, reached, col, width, True)
                span = slice(col, col + words.shape[1])
                if "warpx4" in mods:
                    for q in range(4):
                        tm.words[32 * q : 32 * q + 32, span] = words
                elif lanes_n == 128:
                    tm.words[:, span] = words
                elif "warpx2::02_13" in mods:
                    tm.words[0:64, span] = words
                    tm.words[64:128, span] = words
                elif "warpx2::01_23" in mods:
                    for q in range(4):
                        tm.words[32 * q : 32 * q + 32, span] = words[32 * (q // 2) :][:32]
                else:
                    tm.words[lane0 : lane0 + lanes_n, span] = words

        _submit(machine, w, "tcgen05.cp", run)


def op_commit(machine: Machine, w: Warp, op: Any) -> None:
    """tcgen05.commit: an arrival when the CTA's earlier operations are complete.

    The arrival in another CTA is a message of its own: it may come after later operations.
    """
    for lane in w.lanes():
        barrier = generic_smem(w.value(op.operands[0][1][0], lane) + op.operands[0][2])
        ranks = [barrier >> L.RANK_SHIFT]
        if "multicast::cluster" in op.ins.mods:
            mask = w.value(op.operands[1], lane) & 0xFFFF
            ranks = [i for i in range(16) if mask >> i & 1]
        run = functools.partial(_commit, machine, w.cta, ranks, barrier & _OFFSET)
        _submit(machine, w, "tcgen05.commit", run)


def _commit(machine: Machine, cta: Cta, ranks: list[int], at: int) -> None:
    for rank in ranks:
        arrive = functools.partial(complete_tx, machine, cta.cluster, rank, at, 0, arrivals=1)
        if rank == cta.rank:
            arrive()
        else:
            machine.engine.follow(arrive)


def op_nothing(machine: Machine, w: Warp, op: Any) -> None:
    """Waits and fences of TMEM accesses: loads and stores complete when issued."""


HANDLERS = {
    "tcgen05.alloc": op_alloc,
    "tcgen05.dealloc": op_dealloc,
    "tcgen05.relinquish_alloc_permit": op_relinquish,
    "tcgen05.ld": op_ld,
    "tcgen05.st": op_st,
    "tcgen05.cp": op_cp,
    "tcgen05.mma": op_mma,
    "tcgen05.commit": op_commit,
    "tcgen05.wait::ld": op_nothing,
    "tcgen05.wait::st": op_nothing,
    "tcgen05.fence::before_thread_sync": op_nothing,
    "tcgen05.fence::after_thread_sync": op_nothing,
}
