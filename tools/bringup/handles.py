"""The rungs of shared memory: a handle goes to another process, which maps the memory and writes into it."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from mok.errors import MokError
from mok.tools.bringup.context import NotHere

if TYPE_CHECKING:
    from mok.tools.bringup.context import Context

VALUE = 0x5A


def posix(ctx: Context) -> str:
    """A file descriptor."""
    return _shared(ctx, "posix_fd")


def fabric(ctx: Context) -> str:
    """A fabric handle; where this is one host without IMEX, nothing needs it."""
    from mok.commands.doctor_gpu import imex

    if not ctx.on_gpu:
        raise NotHere("the emulator's ranks share memory on one host only")
    found = imex()["found"]
    try:
        return f"{_shared(ctx, 'fabric')}; IMEX {found}"
    except MokError as error:
        if several_hosts() or "channel" in found:
            raise
        raise NotHere(f"one host, which needs none: {error.value}; IMEX {found}") from None


def several_hosts() -> bool:
    """Whether torchrun or Slurm has started ranks on more than this host."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    return size > here or (size > 1 and int(os.environ.get("SLURM_NNODES", "1")) > 1)


def _shared(ctx: Context, kind: str) -> str:
    """Map memory a second time through an exported handle, write there, read here."""
    memory = _memory(ctx)
    size = memory.granularity
    with contextlib.ExitStack() as undo:
        undo.callback(memory.close)
        owner = memory.create(size, kind)
        undo.callback(memory.release, owner)
        token = memory.export(owner, kind)
        if isinstance(token, int):
            undo.callback(os.close, token)
        other = memory.import_handle(token, kind)
        undo.callback(memory.release, other)
        places = []
        for handle in (owner, other):
            base = memory.reserve(size)
            undo.callback(memory.unreserve, base, size)
            memory.map(base, size, handle)
            undo.callback(memory.unmap, base, size)
            places.append(base)
        memory.fill(places[0], 0, size, None)
        memory.fill(places[1], VALUE, size, None)
        seen = set(memory.read(places[0], 4096))
    ctx.expect("what the owner reads of the other mapping's writes", seen, {VALUE})
    return f"{kind}: {size} bytes mapped twice, writes seen"


def _memory(ctx: Context) -> Any:
    if ctx.on_gpu:
        from mok.runtime.memory import CudaMemory

        return CudaMemory(ctx.backend.device.index or 0)
    from mok.runtime.memory_host import HostMemory

    return HostMemory()
