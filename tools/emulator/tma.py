"""Bulk copies: the swizzles, 1-D and tensor loads, stores and reductions."""

import ctypes
from typing import Any

import numpy as np

from mok.tools.emulator import layout as L
from mok.tools.emulator import race
from mok.tools.emulator.asyncops import complete_tx
from mok.tools.emulator.errors import EmulatorError
from mok.tools.emulator.machine import Machine
from mok.tools.emulator.ptx_parser import type_size
from mok.tools.emulator.resident import Cta, Warp
from mok.tools.emulator.tensormaps import TensorMap, read_map

_OFFSET = (1 << L.RANK_SHIFT) - 1


def swizzle_chunks(first: int, count: int, mode: int) -> np.ndarray:
    """Indices of ``count`` 16-byte chunks from chunk ``first`` on, after the swizzle."""
    i = np.arange(first, first + count)
    if mode == 3:
        return i ^ (i >> 3 & 7)
    if mode == 2:
        return i ^ (i >> 3 & 3)
    if mode == 1:
        return i ^ (i >> 3 & 1)
    return i


def host_bytes(address: int, size: int) -> np.ndarray:
    """Memory of this process as a writable array."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


class _Region:
    """The part of a box that lies inside the tensor."""

    def __init__(self, tm: TensorMap, coords: list[int]) -> None:
        self.tm = tm
        if len(coords) != len(tm.dims):
            raise EmulatorError(
                "a copy has as many coordinates as its tensor map has dimensions",
                f"{len(coords)} and {len(tm.dims)}",
            )
        if coords[0] * tm.itemsize % 16:
            raise EmulatorError(
                "the first coordinate of a tensor copy is a multiple of 16 bytes",
                f"{coords[0]} elements of {tm.itemsize}",
                "hardware ends the kernel with an illegal instruction",
            )
        lo = [-(min(0, c) // s) for c, s in zip(coords, tm.steps, strict=True)]
        hi = [
            min(n, -(-(d - c) // s))
            for n, c, d, s in zip(tm.count, coords, tm.dims, tm.steps, strict=True)
        ]
        self.empty = any(h <= low for low, h in zip(lo, hi, strict=True))
        strides = (tm.itemsize, *tm.strides)
        start = [c + low * s for c, low, s in zip(coords, lo, tm.steps, strict=True)]
        self.address = tm.address + sum(c * s for c, s in zip(start, strides, strict=True))
        self.shape = tuple(h - low for low, h in zip(lo, hi, strict=True))[::-1]
        self.strides = tuple(s * k for s, k in zip(strides, tm.steps, strict=True))[::-1]
        self.slices = tuple(slice(low, h) for low, h in zip(lo, hi, strict=True))[::-1]

    def track(self, machine: Machine, write: bool, atomic: bool = False) -> None:
        """Tells the checkers which bytes the running operation touches."""
        if machine.checker is None:
            return
        width = self.shape[-1] * self.tm.itemsize
        rows, pitch = (self.shape[-2], self.strides[-2]) if len(self.shape) > 1 else (1, 0)
        for index in np.ndindex(*self.shape[:-2]):
            at = sum(i * s for i, s in zip(index, self.strides, strict=False))
            machine.checker.global_memory(self.address + at, width, write, rows, pitch, atomic)

    def view(self, machine: Machine) -> np.ndarray:
        """The tensor's memory as an array, outermost dimension first."""
        extent = self.tm.itemsize + sum(
            (n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)
        )
        machine.check_global(self.address, extent)
        flat = host_bytes(self.address, extent)
        typed = flat[: self.tm.itemsize].view(self.tm.dtype)
        return np.lib.stride_tricks.as_strided(typed, self.shape, self.strides)


def _smem_chunks(cta: Cta, offset: int, size: int) -> np.ndarray:
    if offset & 15 or size & 15:
        raise EmulatorError("a bulk copy needs 16-byte alignment", f"{offset:#x}, {size} bytes")
    if offset + size > cta.smem.size:
        raise EmulatorError("a bulk copy must stay inside shared memory", f"{offset:#x}+{size}")
    return cta.smem.reshape(-1, 16)


def read_box(machine: Machine, tm: TensorMap, coords: list[int]) -> np.ndarray:
    """The box at ``coords`` as bytes, with the map's fill outside the tensor."""
    region = _Region(tm, coords)
    tile = np.zeros(tm.count[::-1], dtype=tm.dtype)
    if tm.fill:
        tile.view(f"u{tm.itemsize}")[...] = tm.fill
    if not region.empty:
        region.track(machine, False)
        tile[region.slices] = region.view(machine)
    return tile.reshape(-1).view(np.uint8)


def write_smem(cta: Cta, offset: int, data: np.ndarray, swizzle: int) -> None:
    chunks = _smem_chunks(cta, offset, data.size)
    if swizzle == 0:
        cta.smem[offset : offset + data.size] = data
    else:
        if offset & 127:
            raise EmulatorError("a swizzled box needs 128-byte alignment", f"{offset:#x}")
        chunks[swizzle_chunks(offset >> 4, data.size >> 4, swizzle)] = data.reshape(-1, 16)


def read_smem(cta: Cta, offset: int, size: int, swizzle: int) -> np.ndarray:
    chunks = _smem_chunks(cta, offset, size)
    return chunks[swizzle_chunks(offset >> 4, size >> 4, swizzle)].reshape(-1)


def write_box(
    machine: Machine, tm: TensorMap, coords: list[int], data: np.ndarray, op: str | None
) -> None:
    """Stores a tile, or combines it with what is there; elements outside are dropped."""
    if any(s != 1 for s in tm.steps):
        raise EmulatorError("stores with element strides are not implemented", tm.steps)
    region = _Region(tm, coords)
    if region.empty:
        return
    tile = data.view(tm.dtype).reshape(tm.box[::-1])[region.slices]
    target = region.view(machine)
    region.track(machine, True, op is not None)
    if op is None and machine.late.takes(region.address):
        for index in np.ndindex(*region.shape[:-1]):
            at = sum(i * s for i, s in zip(index, region.strides, strict=False))
            machine.late.add(region.address + at, tile[index])
    elif op is None:
        target[...] = tile
    else:
        kind = {10: "bf16"}.get(tm.code, "")
        target[...] = combine(op, target, tile, kind)


def _bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """FP32 array to BF16 bits, round to nearest even."""
    b = x.astype(np.float32).view(np.uint32)
    out = ((b.astype(np.uint64) + 0x7FFF + (b >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), out)


def combine(op: str, old: np.ndarray, new: np.ndarray, kind: str) -> np.ndarray:
    """Elementwise reduction of a bulk copy."""
    if kind == "bf16":
        return to_bf16(combine(op, _bf16(old), _bf16(new), ""))
    if op == "inc":
        return np.where(old >= new, 0, old + 1).astype(old.dtype)
    if op == "dec":
        return np.where((old == 0) | (old > new), new, old - 1).astype(old.dtype)
    table = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }
    if op not in table:
        raise EmulatorError("a bulk reduction must be known", op)
    result: np.ndarray = table[op](old, new)
    return result


# -- instruction handlers ------------------------------------------------------------


def _flat(operand: Any) -> list[Any]:
    return operand[1]


def _mem(w: Warp, operand: Any, lane: int) -> int:
    return w.value(operand[1][0], lane) + operand[2]


def generic_smem(address: int) -> int:
    """Shared-window address from a shared or generic one."""
    return address & 0xFFFFFFFF


def _coords(w: Warp, operand: Any, lane: int) -> list[int]:
    return [w.signed(r, lane) for r in operand[1]]


def signal_target(mods: tuple[str, ...], barrier: int, rank: int) -> tuple[int, int]:
    """CTA rank and offset of the mbarrier that a copy into CTA ``rank`` signals."""
    owner = barrier >> L.RANK_SHIFT
    if "cta_group::2" in mods:
        return (rank & ~1) | (owner & 1), barrier & _OFFSET
    return rank, barrier & _OFFSET


def op_tensor_load(machine: Machine, w: Warp, op: Any) -> None:
    """cp.async.bulk.tensor.Nd into shared memory, tile and gather4, with multicast."""
    mods = op.ins.mods
    multicast = "multicast::cluster" in mods
    gather = "tile::gather4" in mods
    if any(m.startswith("im2col") for m in mods):
        raise EmulatorError("im2col copies are not implemented", op.ins.text)
    for lane in w.lanes():
        dst = generic_smem(_mem(w, op.operands[0], lane))
        tm_row, coord = op.operands[1][1][:2]
        tm = read_map(machine, w, w.value(tm_row, lane) + op.operands[1][2])
        coords = _coords(w, coord, lane)
        barrier = generic_smem(_mem(w, op.operands[2], lane))
        rank = dst >> L.RANK_SHIFT
        targets = [rank]
        if multicast:
            mask = w.value(op.operands[3], lane) & 0xFFFF
            targets = [i for i in range(16) if mask >> i & 1]
        size = int(np.prod(tm.count)) * tm.itemsize * (4 if gather else 1)
        for target in targets:
            if target >= len(w.cta.cluster.ctas):
                raise EmulatorError("a multicast must stay in the cluster", f"CTA rank {target}")
            if "shared::cta" in mods or len(w.cta.cluster.ctas) == 1:
                where = (barrier >> L.RANK_SHIFT, barrier & _OFFSET)
            elif multicast:
                where = signal_target(mods, barrier, target)
            else:
                where = (barrier >> L.RANK_SHIFT, barrier & _OFFSET)
            machine.submit_load(
                w,
                target,
                dst & _OFFSET,
                size,
                lambda tm=tm, coords=coords: (
                    gather_box(machine, tm, coords) if gather else read_box(machine, tm, coords)
                ),
                tm.swizzle,
                where,
            )


def gather_box(machine: Machine, tm: TensorMap, coords: list[int]) -> np.ndarray:
    """tile::gather4: four rows of a 2-D tensor; ``coords`` is the column and four rows."""
    column, *rows = coords
    return np.concatenate([read_box(machine, tm, [column, r]) for r in rows])


def op_tensor_store(machine: Machine, w: Warp, op: Any) -> None:
    """cp.async.bulk.tensor.Nd and cp.reduce.async.bulk.tensor from shared to global memory."""
    mods = op.ins.mods
    reduce = next((m for m in mods if m in _REDUCE), None) if mods[1] == "reduce" else None
    scatter = "tile::scatter4" in mods
    # Lanes that store the same box count as one operation, as the uniform datapath issues it.
    boxes: dict[tuple[Any, ...], list[int]] = {}
    for lane in w.lanes():
        tm_row, coord = op.operands[0][1][:2]
        key = (
            w.value(tm_row, lane) + op.operands[0][2],
            tuple(_coords(w, coord, lane)),
            generic_smem(_mem(w, op.operands[1], lane)),
            lane if reduce else -1,
        )
        boxes.setdefault(key, []).append(lane)
    for (map_address, box, src, _), lanes in boxes.items():
        tm = read_map(machine, w, map_address)
        coords = list(box)
        size = int(np.prod(tm.box)) * tm.itemsize * (4 if scatter else 1)

        def write(data: np.ndarray, tm: TensorMap = tm, coords: list[int] = coords) -> None:
            if scatter:
                column, *rows = coords
                for part, row in zip(data.reshape(4, -1), rows, strict=True):
                    write_box(machine, tm, [column, row], part.copy(), reduce)
            else:
                write_box(machine, tm, coords, data, reduce)

        machine.submit_store(w, lanes, src, size, tm.swizzle, write)


_REDUCE = {"add", "min", "max", "and", "or", "xor", "inc", "dec"}
_REDUCE_TYPES: dict[str, tuple[Any, str]] = {
    "u32": (np.uint32, ""),
    "s32": (np.int32, ""),
    "u64": (np.uint64, ""),
    "s64": (np.int64, ""),
    "b32": (np.uint32, ""),
    "b64": (np.uint64, ""),
    "f16": (np.float16, ""),
    "bf16": (np.uint16, "bf16"),
    "f32": (np.float32, ""),
    "f64": (np.float64, ""),
}


def global_bytes(
    machine: Machine, address: int, size: int, write: bool = False, atomic: bool = False
) -> np.ndarray:
    machine.check_global(address, size)
    if machine.checker is not None:
        machine.checker.global_memory(address, size, write, atomic=atomic)
    return host_bytes(address, size)


def op_bulk(machine: Machine, w: Warp, op: Any) -> None:
    """1-D cp.async.bulk in its three directions, and cp.reduce.async.bulk."""
    mods = op.ins.mods
    names = [m for m in mods if m.split("::")[0] in ("shared", "global")]
    reduce = mods[1] == "reduce"
    for lane in w.lanes():
        dst, src = _mem(w, op.operands[0], lane), _mem(w, op.operands[1], lane)
        size = w.value(op.operands[2], lane) & 0xFFFFFFFF
        if size & 15:
            raise EmulatorError("a bulk copy moves multiples of 16 bytes", size)
        to_shared, from_shared = (n.startswith("shared") for n in names[:2])
        kind = next((m for m in mods if m in _REDUCE), None) if reduce else None
        types = _REDUCE_TYPES[mods[-1]] if reduce else None
        if not to_shared:

            def write(
                data: np.ndarray,
                dst: int = dst,
                size: int = size,
                types: Any = types,
                kind: str | None = kind,
            ) -> None:
                out = global_bytes(machine, dst, size, True, kind is not None)
                if machine.late.takes(dst) and kind is None:
                    machine.late.add(dst, data)
                elif kind is None or types is None:
                    out[:] = data
                else:
                    view = out.view(types[0])
                    view[:] = combine(kind, view, data.view(types[0]), types[1])

            machine.submit_store(w, [lane], generic_smem(src), size, 0, write)
            continue
        barrier = generic_smem(_mem(w, op.operands[3], lane))
        dst = generic_smem(dst)
        targets = [dst >> L.RANK_SHIFT]
        if "multicast::cluster" in mods:
            mask = w.value(op.operands[4], lane) & 0xFFFF
            targets = [i for i in range(16) if mask >> i & 1]
        for target in targets:
            owner = (
                target
                if len(targets) > 1 or "multicast::cluster" in mods
                else (barrier >> L.RANK_SHIFT)
            )
            if from_shared:
                source = generic_smem(src)
                cta = w.cta.cluster.ctas[source >> L.RANK_SHIFT]
                at = source & _OFFSET
                place = w.cta.cluster.ctas[target], dst & _OFFSET

                def read(
                    cta: Cta = cta,
                    at: int = at,
                    size: int = size,
                    place: tuple[Cta, int] = place,
                    types: Any = types,
                    kind: str | None = kind,
                ) -> np.ndarray:
                    if machine.checker is not None:
                        machine.checker.smem(cta, at, size, False)
                    data = read_smem(cta, at, size, 0)
                    if kind is None:
                        return data
                    if machine.checker is not None:
                        machine.checker.smem(*place, size, False, race.STRONG)
                    old = read_smem(*place, size, 0).view(types[0])
                    return combine(kind, old, data.view(types[0]), types[1]).view(np.uint8)
            else:

                def read(src: int = src, size: int = size) -> np.ndarray:  # type: ignore[misc]
                    return global_bytes(machine, src, size).copy()

            strong = race.STRONG if reduce else 0
            where = (owner, barrier & _OFFSET)
            machine.submit_load(w, target, dst & _OFFSET, size, read, 0, where, strong)


def op_commit(machine: Machine, w: Warp, op: Any) -> None:
    """cp.async.bulk.commit_group: a group of the thread's bulk stores since the last one."""
    machine.bulk_commit(w)


def op_wait(machine: Machine, w: Warp, op: Any) -> Any:
    """cp.async.bulk.wait_group N: until the thread's newest N groups are all that is left."""
    return machine.bulk_wait(w, op.ins.operands[0][1], "read" in op.ins.mods)


def op_nothing(machine: Machine, w: Warp, op: Any) -> None:
    """Prefetches have no effect here."""


def op_store_async(machine: Machine, w: Warp, op: Any) -> None:
    """st.async: a remote store of registers that signals an mbarrier beside it."""
    width = type_size(op.ins.mods[-1])
    rows = op.operands[1][1] if isinstance(op.operands[1], tuple) else [op.operands[1]]
    for lane in w.lanes():
        dst = generic_smem(_mem(w, op.operands[0], lane))
        barrier = generic_smem(_mem(w, op.operands[2], lane))
        mask = (1 << 8 * width) - 1
        raw = b"".join((w.value(r, lane) & mask).to_bytes(width, "little") for r in rows)
        data = np.frombuffer(raw, dtype=np.uint8)
        cluster, rank, at = w.cta.cluster, dst >> L.RANK_SHIFT, dst & _OFFSET
        if at % width or at + data.size > w.cta.smem.size or rank >= len(cluster.ctas):
            raise EmulatorError("a remote store must be aligned and inside the cluster", hex(dst))

        def run(
            data: np.ndarray = data,
            rank: int = rank,
            at: int = at,
            barrier: int = barrier,
            cluster: Any = cluster,
        ) -> None:
            cta = cluster.ctas[rank]
            if machine.checker is not None:
                machine.checker.smem(cta, at, data.size, True)
            cta.smem[at : at + data.size] = data
            complete_tx(machine, cluster, barrier >> L.RANK_SHIFT, barrier & _OFFSET, data.size)

        machine.engine.submit("st.async", w, [run])


HANDLERS = {
    "st.async": op_store_async,
    "cp.async.bulk.commit_group": op_commit,
    "cp.async.bulk.wait_group": op_wait,
    "cp.async.bulk.prefetch": op_nothing,
    "cp.async.bulk.global": op_bulk,
    "cp.async.bulk.shared::cta": op_bulk,
    "cp.async.bulk.shared::cluster": op_bulk,
    "cp.reduce.async.bulk": op_bulk,
    **{f"cp.reduce.async.bulk.tensor.{n}d": op_tensor_store for n in range(1, 6)},
    **{f"cp.async.bulk.tensor.{n}d.global": op_tensor_store for n in range(1, 6)},
    **{f"cp.async.bulk.tensor.{n}d.shared::cta": op_tensor_load for n in range(1, 6)},
    **{f"cp.async.bulk.tensor.{n}d.shared::cluster": op_tensor_load for n in range(1, 6)},
    **{f"cp.async.bulk.prefetch.tensor.{n}d": op_nothing for n in range(1, 6)},
}
