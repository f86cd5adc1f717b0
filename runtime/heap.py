"""The symmetric heap: one address space in which rank r's memory lies at base + r * stride.

Every rank allocates the same things in the same order, so a tensor has one offset on all ranks, a
peer's address is arithmetic, and one TMA descriptor can span all ranks. Memory grows in chunks; the
address space for them is reserved at the start, so addresses never change.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mok.errors import (
    CapacityError,
    DeviceError,
    DtypeError,
    GroupError,
    ResourceError,
    ShapeError,
)
from mok.runtime.allocator import Allocator, align
from mok.runtime.group import Group
from mok.runtime.memory import CudaMemory, Memory
from mok.runtime.memory_host import HostMemory
from mok.runtime.rendezvous import agree, host_identity, together
from mok.runtime.views import tensor_at
from mok.scalars import check_timeout, index_of, whole

if TYPE_CHECKING:
    import torch

    from mok.runtime.barrier import Barrier, Waits
    from mok.runtime.watchdog import Records

MAX_STRIDE = 1 << 40  # limit of a TMA descriptor's strides


@dataclass(frozen=True)
class HeapOptions:
    """How to make a heap; sizes are bytes per rank.

    Attributes:
        size: memory to allocate at once; more is allocated as needed.
        max_size: address space per rank, the limit of growth and the stride between ranks
            (rounded up to the memory's granularity). Costs no memory. 0: 2^37, on the host 2^33.
        memory: "cuda", or "host" for the emulator and tests without a GPU.
        handle: how other processes get at the memory. "auto" takes "none" for virtual ranks,
            "posix_fd" where all ranks share a host, else "fabric".
    """

    size: int = 0
    max_size: int = 0
    memory: Literal["cuda", "host"] = "cuda"
    handle: Literal["auto", "fabric", "posix_fd", "none"] = "auto"

    def __post_init__(self) -> None:
        for name in ("size", "max_size"):
            value = whole(f"HeapOptions.{name}", getattr(self, name))
            if value < 0:
                raise ShapeError(f"HeapOptions.{name} must be at least 0", value)
            object.__setattr__(self, name, value)  # numpy's ints as Python's


@dataclass(frozen=True, eq=False)
class SymmetricTensor:
    """A contiguous tensor that exists on every rank, at the same offset.

    Addresses are bytes: rank r's copy lies at ``base_address + r * rank_stride``.
    """

    heap: Heap
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    number: int = 0  # of the allocation: another tensor may lie here after this one is freed

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def base_address(self) -> int:
        """Address of rank 0's copy."""
        return self.heap.base + self.offset

    @property
    def rank_stride(self) -> int:
        return self.heap.stride

    def address(self, rank: int) -> int:
        """Address of a rank's copy, valid in this process; ShapeError if the tensor was freed."""
        self.heap._check_own(self)
        return self.heap.address(rank, self.offset)

    @property
    def local(self) -> torch.Tensor:
        """This process' copy (of virtual ranks, the first one's), without copying."""
        return self.peer(self.heap.group.rank)

    def peer(self, rank: int) -> torch.Tensor:
        """A rank's copy as a torch tensor, without copying."""
        self.heap.check_open()
        self.heap._check_own(self)
        index = self.heap.memory.device_index()
        return tensor_at(self.heap.address(rank, self.offset), self.shape, self.dtype, index)

    def free(self) -> None:
        """Give the memory back to the heap. Collective, like ``heap.empty``."""
        self.heap.free(self)


class Heap:
    """Symmetric memory of a group.

    ``empty`` and ``free`` are collective: every rank makes the same calls in the same order. They
    wait for other processes only when memory grows. Close it when done (or use it in ``with``);
    ranks may close in any order. Tensors are invalid afterwards.

    Args:
        device: where this process' memory lies; by default the group's device, else the current.

    Attributes:
        base, stride: rank r's heap starts at base + r * stride (bytes).
        size: bytes of memory behind each rank's part now.
    """

    def __init__(
        self, group: Group, options: HeapOptions | None = None, device: Any = None
    ) -> None:
        options = HeapOptions() if options is None else options
        for name, value, kind in (("group", group, Group), ("options", options, HeapOptions)):
            if not isinstance(value, kind):
                raise DtypeError(f"{name} must be a {kind.__name__}", f"a {type(value).__name__}")
        self.group = group
        self.options = options
        agree(group.rendezvous, "the heap's options", dataclasses.asdict(options))
        with together(group.rendezvous, "Opening the device's memory"):
            self.memory: Memory = _memory(group.device if device is None else device, options)
        self.handle_kind = _handle_kind(group, options, self.memory)
        self.stride = _stride(options, self.memory.granularity)
        self.size = 0
        self.closed = False
        self._allocator = Allocator()
        self._made, self._live = 0, dict[int, int]()  # number of the tensor at each offset
        self._barrier: Barrier | None = None
        self._waits: Waits | None = None
        self._records: Records | None = None
        self._undo: list[Callable[[], None]] = []  # unmappings, newest last
        self._reserved = self.stride * group.size
        agree(group.rendezvous, "the heap's layout", [self.handle_kind, self.stride])
        self.base = 0
        try:
            with together(group.rendezvous, "Reserving address space"):
                self.base = self.memory.reserve(self._reserved)
            if options.size:
                self._grow(options.size)
        except BaseException:
            self.close()
            raise

    # -------------------------------------------------------------- allocating

    def empty(self, shape: Sequence[int] | int, dtype: torch.dtype) -> SymmetricTensor:
        """A new tensor on every rank; contents are zero in fresh memory, else undefined.

        Raises:
            CapacityError: it does not fit ``max_size`` or the memory; nothing has changed then.
            GroupError: ranks asked for different things (noticed when memory grows).
        """
        self.check_open()
        import torch

        if not isinstance(dtype, torch.dtype):
            raise DtypeError("dtype must be a torch.dtype", repr(dtype))
        sizes = tuple(whole("A size of a symmetric tensor", s) for s in _listed(shape))
        if any(s < 0 for s in sizes):
            raise ShapeError("Sizes of a symmetric tensor must not be negative", sizes)
        nbytes = max(math.prod(sizes) * dtype.itemsize, 1)
        if missing := self._allocator.missing(nbytes):
            self._grow(missing, [list(sizes), str(dtype)])
        offset = self._allocator.take(nbytes)
        self._made += 1
        self._live[offset] = self._made
        return SymmetricTensor(self, offset, sizes, dtype, self._made)

    def zeros(self, shape: Sequence[int] | int, dtype: torch.dtype) -> SymmetricTensor:
        """Like ``empty``, and zeroed on torch's current stream. Peers' copies are zero once they
        have come here too: put a barrier before writing to them."""
        tensor = self.empty(shape, dtype)
        for rank in self.group.local_ranks:
            if tensor.nbytes:
                self.memory.fill(tensor.address(rank), 0, tensor.nbytes, self.stream())
        return tensor

    def free(self, tensor: SymmetricTensor) -> None:
        """Give a tensor's memory back to the heap (not to the system). Work that uses it must come
        before whatever uses the memory next, on all ranks."""
        self.check_open()
        self._check_own(tensor)
        self._allocator.give(tensor.offset)
        del self._live[tensor.offset]

    def _check_own(self, tensor: Any) -> None:
        if not isinstance(tensor, SymmetricTensor):
            raise DtypeError("This takes what heap.empty returned", f"a {type(tensor).__name__}")
        if tensor.heap is not self:
            raise ShapeError(
                "A symmetric tensor must be of this heap",
                "one of another heap",
                "Call the heap that it came from: tensor.heap",
            )
        if self._live.get(tensor.offset) != tensor.number:
            raise ShapeError("A symmetric tensor must be in use", f"{tensor.shape}, freed before")

    @property
    def used(self) -> int:
        """Bytes per rank in use."""
        return self._allocator.used

    # -------------------------------------------------------------- addresses

    def address(self, rank: int, offset: int = 0) -> int:
        """Where a rank's byte ``offset`` is mapped in this process."""
        rank = whole("rank", rank)
        if not 0 <= rank < self.group.size:
            raise ShapeError(f"rank must be in 0…{self.group.size - 1}", rank)
        return self.base + rank * self.stride + offset

    def peer(self, tensor: SymmetricTensor | torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's copy of a tensor of this heap, without copying.

        A torch tensor (a slice or view of one of ours, contiguous or not) keeps its strides.

        Raises:
            ShapeError: the tensor does not lie in this heap.
        """
        import torch

        self.check_open()
        if isinstance(tensor, SymmetricTensor):
            self._check_own(tensor)
            return tensor.peer(rank)
        if not isinstance(tensor, torch.Tensor):
            raise DtypeError(
                "What lies in the heap is a SymmetricTensor or a torch tensor",
                f"a {type(tensor).__name__}",
            )
        offset = self._offset_of(tensor)
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        extent = 1 + sum((s - 1) * step for s, step in steps) if tensor.numel() else 0
        index = self.memory.device_index()
        flat = tensor_at(self.address(rank, offset), (extent,), tensor.dtype, index)
        return torch.as_strided(flat, tensor.shape, tensor.stride())

    def _offset_of(self, tensor: torch.Tensor) -> int:
        place = tensor.data_ptr() - self.base
        offset = place % self.stride
        if tensor.numel() and (not 0 <= place < self._reserved or offset >= self.size):
            raise ShapeError(
                "The tensor must lie in this symmetric heap",
                f"its data is at {tensor.data_ptr():#x}",
                "Make it with heap.empty, or slice one that was.",
            )
        return offset

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether a torch tensor's data lies in this process' own part of the heap."""
        place = tensor.data_ptr() - self.address(self.group.rank)
        return 0 <= place < self.size

    # -------------------------------------------------------------- moving data

    def put(
        self,
        target: SymmetricTensor | torch.Tensor,
        source: torch.Tensor,
        rank: int,
        stream: Any = None,
    ) -> None:
        """Copy ``source`` into a rank's ``target`` on a stream; shapes and dtypes are equal."""
        self._copy(self.peer(target, rank), source, stream)

    def get(
        self,
        target: torch.Tensor,
        source: SymmetricTensor | torch.Tensor,
        rank: int,
        stream: Any = None,
    ) -> None:
        """Copy a rank's ``source`` into ``target`` on a stream; shapes and dtypes are equal."""
        self._copy(target, self.peer(source, rank), stream)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        for side in (target, source):
            if not hasattr(side, "data_ptr"):
                raise DtypeError("put and get copy tensors", f"a {type(side).__name__}")
        if target.shape != source.shape or target.dtype != source.dtype:
            raise ShapeError(
                "put and get copy between equal shapes and dtypes",
                f"{tuple(source.shape)} {source.dtype} to {tuple(target.shape)} {target.dtype}",
            )
        if not (target.is_contiguous() and source.is_contiguous()):
            raise ShapeError(
                "put and get copy contiguous tensors", remedy="Use peer() and copy_()."
            )
        if source.device.type != target.device.type:
            raise DeviceError(
                "put and get copy within one kind of memory", f"{source.device} to {target.device}"
            )
        if source.numel():
            size = source.numel() * source.element_size()
            self.memory.copy(target.data_ptr(), source.data_ptr(), size, self.stream(stream))

    def signal(
        self, word: SymmetricTensor, value: int, rank: int, index: int = 0, stream: Any = None
    ) -> None:
        """Set a rank's 32-bit ``word[index]`` once all earlier work of the stream is visible."""
        address = self._word(word, rank, index)
        self.memory.write_word(address, whole("value", value), self.stream(stream))

    def wait(
        self,
        word: SymmetricTensor,
        value: int,
        index: int = 0,
        stream: Any = None,
        rank: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Hold a stream until this rank's ``word[index]`` is at least ``value`` (cyclically).

        On a GPU only the stream waits; after the time limit (by default the group's) it goes on, and
        ``check`` raises. On the host it waits here, and raises MokTimeoutError.
        """
        mine = self.group.rank if rank is None else rank
        limit = check_timeout(self.group.timeout_s if timeout_s is None else timeout_s)
        address, value = self._word(word, mine, index), whole("value", value)
        if self.memory.kind == "host":
            self.memory.wait_word(address, value, None, limit)
            return
        if self._waits is None:
            from mok.runtime.barrier import Waits

            self._waits = Waits(self, self._noted())
        self._waits(address, value, mine, limit, stream)

    def barrier(self, stream: Any = None, timeout_s: float | None = None) -> None:
        """A barrier of all ranks' streams, see ``runtime.barrier.Barrier``. ``check`` raises if it
        expired."""
        self.check_open()
        if timeout_s is not None:
            timeout_s = check_timeout(timeout_s)
        if self._barrier is None:
            from mok.runtime.barrier import Barrier

            self._barrier = Barrier(self, self._noted())
        self._barrier(stream, timeout_s)

    def check(self) -> None:
        """Raise what this heap's barriers and waits have noted: MokTimeoutError or GroupError."""
        if self._records is not None:
            self._records.check()

    def _noted(self) -> Records:
        """Where barriers and waits note their expiry."""
        if self._records is None:
            from mok.runtime.watchdog import Records

            self._records = Records(self.memory, self.group.size, self.group.local_ranks)
            self._undo.append(self._records.close)
        return self._records

    def _word(self, word: SymmetricTensor, rank: int, index: int) -> int:
        self.check_open()
        self._check_own(word)
        index = whole("index", index)
        if word.dtype.itemsize != 4 or not 0 <= index < math.prod(word.shape):
            raise ShapeError(
                "A signal is one element of a 32-bit symmetric tensor",
                f"[{index}] of {word.shape} {word.dtype}",
            )
        return word.address(rank) + 4 * index

    def stream(self, stream: Any = None) -> Any:
        """A stream as an int handle: an int, an object with ``cuda_stream``, or torch's current."""
        if self.memory.kind == "host":
            return None
        if stream is None:
            import torch

            stream = torch.cuda.current_stream(self.memory.device_index())
        return int(getattr(stream, "cuda_stream", stream))

    # -------------------------------------------------------------- growing and closing

    def _grow(self, needed: int, why: Any = None) -> None:
        """Add a chunk of at least ``needed`` bytes on every rank, the same everywhere."""
        chunk = align(needed, self.memory.granularity)
        if self.size + chunk > self.stride:
            raise CapacityError(
                f"The symmetric heap is limited to {self.stride / 2**20:g} MiB per rank",
                f"{(self.size + chunk) / 2**20:g} MiB needed",
                "Raise HeapOptions.max_size.",
            )
        rendezvous = self.group.rendezvous
        agree(rendezvous, "what to allocate", [self.size, chunk, why])
        undo: list[Callable[[], None]] = []
        try:
            # Handles are given up at the end: a mapping keeps its memory.
            with ExitStack() as handles:
                with together(rendezvous, "Allocating symmetric memory"):
                    token = self._map_own(chunk, handles, undo)
                if token is not None:
                    tokens = self._exchange(token)
                    with together(rendezvous, "Mapping the memory of peers"):
                        self._map_peers(chunk, tokens, handles, undo)
        except BaseException:
            _run_all(undo)
            raise
        self._undo += undo
        self.size += chunk
        self._allocator.grow(self.size)

    def _map_own(
        self, chunk: int, handles: ExitStack, undo: list[Callable[[], None]]
    ) -> int | bytes | None:
        """Allocate and map a chunk for each rank of this process; what to send to the others."""
        for rank in self.group.local_ranks:
            handle = self.memory.create(chunk, self.handle_kind)
            handles.callback(self.memory.release, handle)
            self._map(rank, chunk, handle, undo)
            self.memory.fill(self.address(rank, self.size), 0, chunk, None)
        if self.group.is_local:
            return None
        token = self.memory.export(handle, self.handle_kind)
        if isinstance(token, int):
            handles.callback(os.close, token)
        return token

    def _exchange(self, token: int | bytes) -> list[int] | list[bytes]:
        rendezvous = self.group.rendezvous
        if isinstance(token, int):
            return rendezvous.all_gather_fd("heap memory", token)
        return [bytes.fromhex(t) for t in rendezvous.all_gather("heap memory", token.hex())]

    def _map_peers(
        self,
        chunk: int,
        tokens: list[int] | list[bytes],
        handles: ExitStack,
        undo: list[Callable[[], None]],
    ) -> None:
        for descriptor in tokens:
            if isinstance(descriptor, int):
                handles.callback(os.close, descriptor)
        for rank, token in enumerate(tokens):
            if rank != self.group.rank:
                handle = self.memory.import_handle(token, self.handle_kind)
                handles.callback(self.memory.release, handle)
                self._map(rank, chunk, handle, undo)

    def _map(self, rank: int, chunk: int, handle: Any, undo: list[Callable[[], None]]) -> None:
        address = self.address(rank, self.size)
        self.memory.map(address, chunk, handle)
        undo.append(lambda: self.memory.unmap(address, chunk))

    def read(self, tensor: SymmetricTensor, rank: int | None = None) -> bytes:
        """A copy's bytes as they are now, even while a kernel runs or hangs."""
        self.check_open()
        self._check_own(tensor)
        mine = self.group.rank if rank is None else rank
        return self.memory.read(tensor.address(mine), tensor.nbytes)

    def check_open(self) -> None:
        if self.closed:
            raise ResourceError("The heap must be open", "it was closed")

    def close(self) -> None:
        """Unmap everything. Not collective: memory lives on while other ranks map it. Work that
        uses the heap must have ended on this process' streams."""
        if not self.closed:
            self.closed = True
            _run_all(self._undo)
            if self.base:
                self.memory.unreserve(self.base, self._reserved)
            self.memory.close()

    def __enter__(self) -> Heap:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.used} of {self.size} bytes in use"
        return f"<Heap of {self.group.size} ranks, {self.memory.kind}, {self.handle_kind}: {state}>"


def _listed(shape: Any) -> Sequence[Any]:
    """The sizes of a shape, a numpy array's too, or of a single number."""
    no_shape = isinstance(shape, str | bytes | bytearray | Mapping | Set)
    if index_of(shape) is None and isinstance(shape, Iterable) and not no_shape:
        with suppress(TypeError):  # an array without dimensions
            return tuple(shape)
    return (shape,)


def _run_all(undo: list[Callable[[], None]]) -> None:
    while undo:
        undo.pop()()


def _memory(device: Any, options: HeapOptions) -> Memory:
    if options.memory == "host":
        return HostMemory()
    from mok.runtime.device import ordinal_of

    return CudaMemory(ordinal_of(device))


def _handle_kind(group: Group, options: HeapOptions, memory: Memory) -> str:
    kind: str = options.handle
    if kind == "auto":
        if group.is_local:
            return "none"
        hosts = group.rendezvous.all_gather("hosts", host_identity())
        kind = "posix_fd" if len(set(hosts)) == 1 else "fabric"
    if kind not in memory.handle_kinds:
        raise ResourceError(
            f"Memory of kind {memory.kind} shares handles of kind {memory.handle_kinds}", kind
        )
    if kind == "none" and not group.is_local:
        raise GroupError("Ranks in several processes share memory by handles", 'handle="none"')
    return kind


def _stride(options: HeapOptions, granularity: int) -> int:
    most = options.max_size or (1 << 37 if options.memory == "cuda" else 1 << 33)
    stride = align(max(most, options.size), granularity)
    if stride > MAX_STRIDE:
        raise CapacityError(
            "A rank's part of the heap is at most 2^40 bytes (a TMA stride)",
            max(most, options.size),
        )
    return stride
