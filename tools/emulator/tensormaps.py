"""Tensor maps: the 128-byte object that bulk copies read, and its edits in memory.

The layout is what ``tensormap.replace`` compiles to (ptxas 13.0, sm_90a and sm_100a alike), and an
H200's edits are compared byte for byte in the tests.
"""

import ctypes
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mok.tools.emulator import layout as L
from mok.tools.emulator.errors import EmulatorError
from mok.tools.emulator.places import locate

if TYPE_CHECKING:
    from mok.tools.emulator.machine import Machine
    from mok.tools.emulator.resident import Warp

BYTES, USED = 128, 64  # of a map, and those of them that mean something
_OFFSET = (1 << L.RANK_SHIFT) - 1
# Element types of a tensor map, by its 4-bit code.
TYPES = {
    0: np.uint8,
    1: np.uint16,
    2: np.uint32,
    3: np.int32,
    4: np.uint64,
    5: np.int64,
    6: np.float16,
    7: np.float32,
    9: np.float64,
    10: np.uint16,
}
# What a map with NaN fill puts outside the tensor, of the types of which an H200 has shown it.
NANS = {9: 0x7FF77FF77FF77FF7}
# Fields: byte of the 32-bit word, lowest bit, bits.  Sizes and element strides are kept minus one,
# strides in units of 16 bytes: 32 bits each here, four more in the word at 0x1C.
_RANK = (0x08, 4, 3)
_CODE = (0x08, 7, 4)
_INTERLEAVE = (0x08, 11, 2)
_SWIZZLE = (0x08, 13, 2)
_FILL = (0x08, 15, 1)
_TF32 = (0x08, 16, 1)  # beside the code of F32, with or without denormals
_ATOMICITY = (0x08, 19, 2)  # bit 21 is set in the DSL's maps of stores, and changes no value
_SWIZZLE_96 = (0x08, 22, 1)
_STRIDE = [(0x0C + 4 * i, 0, 32) for i in range(4)]
_STRIDE_HIGH = [(0x1C, 4 * i, 4) for i in range(4)]
_DIM = [(0x20 + 4 * i, 0, 32) for i in range(5)]
_STEP = [(0x34, 3 * i, 3) for i in range(5)]
_NOT_TILED = (0x34, 15, 9)
_BOX = [(0x34, 24, 8), *((0x38, 8 * i, 8) for i in range(4))]
Field = tuple[int, int, int]


def get(raw: bytes | bytearray, field: Field) -> int:
    """A field's bits."""
    at, shift, width = field
    word: int = struct.unpack_from("<I", raw, at)[0]
    return word >> shift & (1 << width) - 1


def put(raw: bytearray, field: Field, value: int) -> None:
    """Writes a field's bits, as many as it has."""
    at, shift, width = field
    mask = (1 << width) - 1 << shift
    word: int = struct.unpack_from("<I", raw, at)[0]
    struct.pack_into("<I", raw, at, word & ~mask | value << shift & mask)


@dataclass(frozen=True)
class TensorMap:
    """A decoded tensor map.  Dimensions are listed innermost first."""

    address: int
    code: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]  # bytes, of dimensions 1 and up
    box: tuple[int, ...]
    swizzle: int  # 0 none, 1 32 B, 2 64 B, 3 128 B
    steps: tuple[int, ...] = ()  # element strides; that of dimension 0 has no effect
    fill: int = 0  # the bits of an element outside the tensor

    @property
    def dtype(self) -> Any:
        return TYPES[self.code]

    @property
    def itemsize(self) -> int:
        return int(np.dtype(TYPES[self.code]).itemsize)

    @property
    def count(self) -> tuple[int, ...]:
        """Elements that a copy moves, per dimension."""
        return tuple(-(-b // s) for b, s in zip(self.box, self.steps, strict=True))


def decode(raw: bytes) -> TensorMap:
    """Decodes a tensor map as the DSL's host code and cuTensorMapEncodeTiled lay it out."""
    rank, code = get(raw, _RANK) + 1, get(raw, _CODE)
    unknown = (_INTERLEAVE, _TF32, _ATOMICITY, _SWIZZLE_96, _NOT_TILED)
    odd, nan = [get(raw, f) for f in unknown], get(raw, _FILL)
    if rank > 5 or code not in TYPES or any(odd) or (nan and code not in NANS):
        raise EmulatorError(
            "a tensor map must be tiled, with a plain element type",
            f"flags {struct.unpack_from('<I', raw, 8)[0]:#x}, {get(raw, _NOT_TILED):#x}",
            "im2col, interleaved, TF32, denormal-flushing and sub-byte maps, NaN fill of other types than "
            "F64, and swizzles of 96 bytes or of other atoms than 16 bytes are not implemented",
        )
    strides = [
        (get(raw, low) | get(raw, high) << 32) * 16
        for low, high in zip(_STRIDE, _STRIDE_HIGH, strict=True)
    ]
    return TensorMap(
        struct.unpack_from("<Q", raw)[0],
        code,
        tuple(get(raw, f) + 1 for f in _DIM[:rank]),
        tuple(strides[: rank - 1]),
        tuple(get(raw, f) + 1 for f in _BOX[:rank]),
        get(raw, _SWIZZLE),
        (1, *(get(raw, f) + 1 for f in _STEP[1:rank])),
        NANS[code] if nan else 0,
    )


_CACHE: dict[bytes, TensorMap] = {}


def read_map(machine: "Machine", w: "Warp", address: int) -> TensorMap:
    """The tensor map of the copy that a warp issues, as its memory is now."""
    start = machine.params.ctypes.data
    if not start <= address <= start + machine.params.nbytes - USED:
        if address >> 56 or address & 63:
            raise EmulatorError(
                "a tensor map lies in global or parameter memory, at a multiple of 64 bytes",
                locate(machine, address),
            )
        machine.check_global(address, USED)
        if machine.checker is not None:
            machine.checker.maps.use(w, address)
    raw = ctypes.string_at(address, USED)
    found = _CACHE.get(raw)
    if found is None:
        if len(_CACHE) > 4096:
            _CACHE.clear()
        found = _CACHE[raw] = decode(raw)
    return found


# -- edits -----------------------------------------------------------------------------

# Of each field: the least and the largest value, and what they are a multiple of.
_RANGES = {
    "global_address": (0, (1 << 64) - 1, 16),
    "rank": (0, 4, 1),
    "box_dim": (1, 256, 1),
    "global_dim": (1, 0xFFFFFFFF, 1),
    "global_stride": (0, (1 << 40) - 16, 16),
    "element_stride": (1, 8, 1),
    "elemtype": (0, 12, 1),
    "interleave_layout": (0, 2, 1),
    "swizzle_mode": (0, 3, 1),
    "fill_mode": (0, 1, 1),
}
_PLAIN = {
    "rank": _RANK,
    "elemtype": _CODE,
    "interleave_layout": _INTERLEAVE,
    "swizzle_mode": _SWIZZLE,
    "fill_mode": _FILL,
}
_ORDINAL = {"box_dim": _BOX, "global_dim": _DIM, "element_stride": _STEP, "global_stride": _STRIDE}


def replace(raw: bytearray, field: str, ordinal: int, value: int) -> None:
    """Replaces one field of a map.  Raises EmulatorError for a value that the field cannot hold."""
    if field not in _RANGES:
        raise EmulatorError("this field of a tensor map is not implemented", field)
    low, high, unit = _RANGES[field]
    if not low <= value <= high or value % unit:
        rule = f"{field} of a tensor map is {low} to {high}"
        raise EmulatorError(rule + (f", a multiple of {unit}" if unit > 1 else ""), value)
    if field == "global_address":
        struct.pack_into("<Q", raw, 0, value)
    elif field in _PLAIN:
        tf32 = field == "elemtype" and value > 10
        put(raw, _PLAIN[field], value - 4 if tf32 else value)
        if tf32:
            put(raw, _TF32, 1)
        elif field == "swizzle_mode":
            put(raw, _SWIZZLE_96, 0)
    else:
        places = _ORDINAL[field]
        if ordinal >= len(places):
            raise EmulatorError(
                f"a tensor map has {len(places)} of {field}, counted from 0", ordinal
            )
        if field == "global_stride":
            put(raw, _STRIDE_HIGH[ordinal], value >> 36)
            value = (value >> 4) + 1
        put(raw, places[ordinal], value - 1)


class _Object:
    """128 bytes of shared or global memory that a warp touches through the generic proxy."""

    def __init__(self, machine: "Machine", w: "Warp", address: int, mods: tuple[str, ...]) -> None:
        self.machine, self.w = machine, w
        names = {m.split("::")[0] for m in mods[1:]}
        shared = "shared" in names or ("global" not in names and address >> 56 == 1)
        if address % BYTES:
            raise EmulatorError(
                f"a tensor map is aligned to {BYTES} bytes", locate(machine, address)
            )
        if shared:
            address &= 0xFFFFFFFF
            self.cta, self.offset = w.cta, address & _OFFSET
            if address >> L.RANK_SHIFT != w.cta.rank or self.offset + BYTES > w.cta.smem.size:
                raise EmulatorError("an edit stays in the CTA's own shared memory", hex(address))
            self.host = int(w.cta.smem.ctypes.data) + self.offset
        else:
            if address >> 56:
                raise EmulatorError("a tensor map lies in shared or global memory", address >> 56)
            machine.check_global(address, BYTES)
            self.host = address
        self.shared = shared

    def _track(self, size: int, write: bool) -> None:
        checker = self.machine.checker
        if checker is None:
            return
        if self.shared:
            checker.smem_by_warp(self.w, self.cta, self.offset, size, write)
        else:
            checker.global_by_warp(self.w, self.host, size, write)

    def read(self) -> bytearray:
        self._track(USED, False)  # the DSL initialises no more
        return bytearray(ctypes.string_at(self.host, BYTES))

    def write(self, raw: bytes | bytearray) -> None:
        self._track(BYTES, True)
        ctypes.memmove(self.host, bytes(raw), BYTES)
        self.machine.x[L.X_EV_MEM] += 1


def _address(w: "Warp", operand: Any, lane: int) -> int:
    return w.value(operand[1][0], lane) + int(operand[2])


def op_replace(machine: "Machine", w: "Warp", op: Any) -> None:
    """tensormap.replace: one field of a tensor map in shared or global memory"""
    mods, field = op.ins.mods, op.ins.mods[3]
    mask = (1 << (64 if mods[-1] == "b64" else 32)) - 1
    ordinal = int(op.ins.operands[1][1]) if len(op.operands) == 3 else 0
    for lane in w.lanes():
        target = _Object(machine, w, _address(w, op.operands[0], lane), mods)
        raw = target.read()
        replace(raw, field, ordinal, w.value(op.operands[-1], lane) & mask)
        target.write(raw)


def op_copy(machine: "Machine", w: "Warp", op: Any) -> None:
    """tensormap.cp_fenceproxy: copies a map to global memory and releases it to the tensor map proxy"""
    _check_size(op.ins.operands[2])
    pairs = {tuple(_address(w, o, lane) for o in op.operands[:2]) for lane in w.lanes()}
    if len(pairs) != 1:
        raise EmulatorError("all lanes copy the same tensor map", f"{len(pairs)} different ones")
    to, source = pairs.pop()
    raw = _Object(machine, w, source, ("", "shared::cta")).read()
    _Object(machine, w, to, ("", "global")).write(raw)
    if machine.checker is not None:
        machine.checker.maps.release(w, op.ins.mods)


def op_fence(machine: "Machine", w: "Warp", op: Any) -> None:
    """fence.proxy.tensormap: releases edits of maps, or acquires the map at an address for its CTA"""
    if "release" not in op.ins.mods:
        _check_size(op.ins.operands[1])
    if machine.checker is None:
        return
    if "release" in op.ins.mods:
        machine.checker.maps.release(w, op.ins.mods)
    else:
        for address in sorted({_address(w, op.operands[0], lane) for lane in w.lanes()}):
            machine.checker.maps.acquire(w, address, op.ins.mods)


def _check_size(operand: Any) -> None:
    if operand[0] != "i" or operand[1] != BYTES:
        raise EmulatorError(f"the size of a tensor map is {BYTES}", operand[1])


HANDLERS = {
    "tensormap.replace": op_replace,
    "tensormap.cp_fenceproxy": op_copy,
    "fence.proxy.tensormap::generic": op_fence,
}
