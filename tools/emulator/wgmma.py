"""wgmma: warpgroup MMA on shared-memory descriptors, as whole-matrix arithmetic."""

import functools
import re
from typing import Any

import numpy as np

from mok.tools.emulator import layout as L
from mok.tools.emulator.errors import EmulatorError
from mok.tools.emulator.machine import Machine
from mok.tools.emulator.resident import Cta, Warp

_SHAPE = re.compile(r"m64n(\d+)k(\d+)")


@functools.cache
def chunk_offsets(
    rows: int, k_bytes: int, swizzle: int, lbo: int, sbo: int, mn_major: bool
) -> np.ndarray:
    """Byte offsets of a canonical operand tile's 16-byte chunks, before the swizzle.

    K-major: [rows, k_bytes / 16], each chunk holds consecutive k of one row.  MN-major (2-byte
    types): [rows / 8, k], each chunk holds 8 rows of one k.
    """
    span = {0: 16, 1: 32, 2: 64, 3: 128}[swizzle]  # bytes of one row of the swizzle atom
    if not mn_major:
        r = np.arange(rows)[:, None]
        c = np.arange(k_bytes // 16)[None, :]
        if swizzle == 0:
            return (r // 8) * sbo + (r % 8) * 16 + c * lbo
        return (r // 8) * sbo + (r % 8) * span + c * 16
    m = np.arange(rows // 8)[:, None]
    k = np.arange(k_bytes // 2)[None, :]
    if swizzle == 0:
        return m * sbo + (k % 8) * 16 + (k // 8) * lbo
    per = span // 16
    return (m % per) * 16 + (m // per) * lbo + (k % 8) * span + (k // 8) * sbo


def swizzle_bytes(addr: np.ndarray, mode: int) -> np.ndarray:
    """Applies the 32-, 64- or 128-byte swizzle to shared-memory byte addresses."""
    bits = {0: 0, 1: 0x10, 2: 0x30, 3: 0x70}[mode]
    return addr ^ (addr >> 3 & bits)


def read_operand(
    cta: Cta, start: int, rows: int, k_bytes: int, swizzle: int, lbo: int, sbo: int, mn_major: bool
) -> np.ndarray:
    """An operand tile as uint8 [rows, k_bytes], from its descriptor's fields."""
    addr = start + chunk_offsets(rows, k_bytes, swizzle, lbo, sbo, mn_major)
    addr = swizzle_bytes(addr, swizzle)
    if addr.max() + 16 > cta.smem.size or addr.min() < 0:
        raise EmulatorError(
            "an MMA operand must lie inside shared memory", f"start {start:#x}, {rows} rows"
        )
    if cta.on_read is not None:
        cta.on_read(cta, addr >> 4)
    chunks = cta.smem.reshape(-1, 16)[addr >> 4]
    if not mn_major:
        return chunks.reshape(rows, k_bytes)
    k = k_bytes // 2
    tile = chunks.reshape(rows // 8, k, 8, 2).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(tile).reshape(rows, k_bytes)


@functools.cache
def fp8_table(kind: str) -> np.ndarray:
    from mok.tools.emulator.numerics import e4m3_f32, e5m2_f32

    convert = e4m3_f32 if kind == "e4m3" else e5m2_f32
    return np.array([convert(np.int64(i)) for i in range(256)], dtype=np.float32)


def to_float(raw: np.ndarray, kind: str) -> np.ndarray:
    """Raw operand bytes [rows, bytes] to numbers [rows, k]."""
    if kind == "bf16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if kind == "f16":
        return raw.view(np.float16).astype(np.float32)
    if kind == "tf32":
        return (raw.view(np.uint32) & 0xFFFFE000).view(np.float32)
    if kind in ("e4m3", "e5m2"):
        return fp8_table(kind)[raw]
    if kind == "s8":
        return raw.view(np.int8).astype(np.float64)
    if kind == "u8":
        return raw.astype(np.float64)
    raise EmulatorError("an MMA type must be known", kind)


BYTES = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}


class Descriptor:
    """Fields of a 64-bit shared-memory matrix descriptor of wgmma."""

    def __init__(self, word: int) -> None:
        word &= (1 << 64) - 1
        self.start = (word & 0x3FFF) << 4
        self.lbo = (word >> 16 & 0x3FFF) << 4
        self.sbo = (word >> 32 & 0x3FFF) << 4
        self.swizzle = {0: 0, 1: 3, 2: 2, 3: 1}[word >> 62 & 3]
        if word >> 49 & 7:
            raise EmulatorError("a matrix descriptor's base offset must be 0", hex(word))


def _fragment(rows: list[int], w: Warp, n: int) -> np.ndarray:
    """Accumulator registers to the warp's 16 x n slice."""
    raw = w.regs[rows]  # [n / 2, 32]
    values = raw.astype(np.uint32).view(np.float32)
    # register 4 j + 2 h + p, lane 4 r + c  ->  row 8 h + r, column 8 j + 2 c + p
    grid = values.reshape(n // 8, 2, 2, 8, 4)  # j h p r c
    return np.ascontiguousarray(grid.transpose(1, 3, 0, 4, 2)).reshape(16, n)


def _scatter(rows: list[int], w: Warp, n: int, tile: np.ndarray) -> None:
    grid = tile.astype(np.float32).reshape(2, 8, n // 8, 4, 2).transpose(2, 0, 4, 1, 3)
    bits = np.ascontiguousarray(grid).reshape(n // 2, 32).view(np.uint32)
    w.regs[rows] = bits.astype(np.int64)


def _register_a(rows: list[int], w: Warp, kind: str) -> np.ndarray:
    """A from registers: the warp's 16 rows."""
    raw = w.regs[rows].astype(np.uint32)  # [4, 32]: 32-bit words
    per = 4 // BYTES[kind]
    words = raw.reshape(2, 2, 8, 4)  # k half, row half, r, c
    order = np.ascontiguousarray(words.transpose(1, 2, 0, 3))  # row half, r, k half, c
    return to_float(order.reshape(16, 8).view(np.uint8), kind).reshape(16, 8 * per)


def op_mma(machine: Machine, w: Warp, op: Any) -> None:
    """wgmma.mma_async: the warp's 16 rows of D = A B (+ D)."""
    mods = op.ins.mods
    match = next(m for m in map(_SHAPE.fullmatch, mods) if m)
    n, k = int(match.group(1)), int(match.group(2))
    d_type, a_type, b_type = [m for m in mods if m in ("f32", "f16", "s32", *BYTES)][:3]
    if d_type != "f32" or "sp" in mods:
        raise EmulatorError("wgmma accumulates in f32 here", op.ins.name)
    lane = w.lanes()[0]
    d_rows = op.operands[0][1]
    rest = op.operands[2:]
    b_word = w.value(rest[0], lane)
    scale_d = bool(w.value(rest[1], lane)) if len(rest) > 1 else True
    imm = [w.signed(r, lane) for r in rest[2:]]
    scale_a, scale_b = [*imm, 1, 1][:2]
    registers = isinstance(op.operands[1], tuple)
    trans_b = bool(imm[-1]) if len(imm) > 2 else False
    trans_a = bool(imm[2]) if not registers and len(imm) > 3 else False
    bd = Descriptor(b_word)
    k_bytes_a, k_bytes_b = k * BYTES[a_type], k * BYTES[b_type]
    index = int(w.state[L.W_INDEX]) & 3
    ad = None if registers else Descriptor(w.value(op.operands[1], lane))

    def run() -> None:
        b = to_float(
            read_operand(w.cta, bd.start, n, k_bytes_b, bd.swizzle, bd.lbo, bd.sbo, trans_b),
            b_type,
        )
        if ad is None:
            a = _register_a(op.operands[1][1], w, a_type)
        else:
            tile = read_operand(w.cta, ad.start, 64, k_bytes_a, ad.swizzle, ad.lbo, ad.sbo, trans_a)
            a = to_float(np.ascontiguousarray(tile[16 * index : 16 * index + 16]), a_type)
        product = a @ b.T
        if scale_a * scale_b < 0:
            product = -product
        if scale_d:
            product += _fragment(d_rows, w, n)
        _scatter(d_rows, w, n, product)

    w.open_ops.append(machine.engine.submit("wgmma", w, [run], queue=w.groups))


def op_commit(machine: Machine, w: Warp, op: Any) -> None:
    """wgmma.commit_group: a group of the warp's MMAs since the last one."""
    w.groups.append(w.open_ops)
    w.open_ops = []


def op_wait(machine: Machine, w: Warp, op: Any) -> Any:
    """wgmma.wait_group N: completes all but the newest N groups of the warp."""
    keep = op.ins.operands[0][1]
    while len(w.groups) > keep:
        for p in w.groups.pop(0):
            while not p.finished:
                machine.engine.step(p)
            if machine.checker is not None:
                machine.checker.observe(w, p.agent)
    return None


def op_fence(machine: Machine, w: Warp, op: Any) -> None:
    """wgmma.fence orders register and shared accesses before the next MMAs: nothing to do."""


HANDLERS = {
    "wgmma.mma_async": op_mma,
    "wgmma.commit_group": op_commit,
    "wgmma.wait_group": op_wait,
    "wgmma.fence": op_fence,
}
