"""The buffers of a layer: symmetric memory, rings, counters, schedules, error words.

Made once for the most tokens a call may have, and used by one call after another on one stream;
all layers with equal sizes can share it. Virtual ranks run one after another, so they share the
local scratch; symmetric memory and schedules are one per rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mok.config import Config, Shape
from mok.errors import CapacityError, GroupError, ResourceError
from mok.kernels_cute.program import Forward
from mok.runtime.barrier import Barrier
from mok.runtime.group import Group
from mok.runtime.heap import Heap, HeapOptions, SymmetricTensor
from mok.runtime.plan import Buffer, WorkspacePlan, plan_workspace
from mok.runtime.rendezvous import agree, together
from mok.runtime.trace import Recorder
from mok.runtime.watchdog import Records

if TYPE_CHECKING:
    import torch


@dataclass
class ScheduleBuffers:
    """One rank's schedule, int32, sized for the worst routing; see ``ScheduleKernel``.

    peer_rank, peer_token_idx [capacity]; num_rows [1]; tokens_per_expert [El]; expert_offset
    [El + 1]; block_expert [capacity / tile]; route_row [max_tokens * K] (EP = 1 only).
    """

    rank: int
    peer_rank: torch.Tensor
    peer_token_idx: torch.Tensor
    num_rows: torch.Tensor
    tokens_per_expert: torch.Tensor
    expert_offset: torch.Tensor
    block_expert: torch.Tensor
    route_row: torch.Tensor | None = None

    @functools.cached_property
    def addresses(self) -> tuple[int, ...]:
        """Of what the megakernels read: peer_rank, peer_token_idx, block_expert, num_rows, expert_offset."""
        read = (
            self.peer_rank, self.peer_token_idx, self.block_expert, self.num_rows,
            self.expert_offset,
        )  # fmt: skip
        return tuple(t.data_ptr() for t in read)


@dataclass(frozen=True)
class BackwardBuffers:
    """Symmetric memory that only backward needs: dy BF16 [max_tokens, H]; weights FP32 [max_tokens, K];
    d_weights FP32 [max_tokens * K]. The slots of d_x are forward's."""

    dy: SymmetricTensor
    weights: SymmetricTensor
    d_weights: SymmetricTensor


@dataclass(frozen=True)
class MinibatchState:
    """Where a minibatch stands: arrivals at its counters, as (now, needed); needed is None unless
    the program is known. y_free stays 0 where down pushes its rows itself, forward's on Hopper."""

    minibatch: int
    slot: int
    x_ready: tuple[int, int | None]
    y_ready: tuple[int, int | None]
    y_free: tuple[int, int | None]


class CounterTurns:
    """Which set of counters a forward call uses, and who zeroes it.

    Two sets serve in turn: a call's last kernel zeroes the one that the next call takes, so that calls which
    follow each other need no fill. The third is filled before each use: by calls in a captured graph,
    whose replays do not pass here, and by all others that end otherwise.

    Attributes:
        size: words of a set that are counters.
        sets: addresses of the two.
        used: int32 words that the last call counts in, as the host knows it.
    """

    def __init__(
        self, words: torch.Tensor, size: int, fill: Callable[[int, int, int, int], None]
    ) -> None:
        self._words = tuple(words)
        self._fill = fill
        self.size = size
        self.sets = (self._words[0].data_ptr(), self._words[1].data_ptr())
        self.used = self._words[2]
        self._zero: int | None = None  # the set that is known to be zero

    def begin(self, stream: int) -> int:
        """Take a set, of zeros for kernels that come later on this stream; its number, 0 or 1."""
        turn = self._zero
        if turn is None:
            turn = 0
            self._fill(self.sets[0], 0, 4 * self.size, stream)
        self._zero = None  # until this call has queued the kernel that zeroes the other
        self.used = self._words[turn]
        return turn

    def end(self, turn: int) -> None:
        """The kernel that zeroes the other set is queued."""
        self._zero = 1 - turn

    def filled(self, stream: int) -> torch.Tensor:
        """The third set, filled on this stream."""
        self.used = words = self._words[2]
        self._fill(words.data_ptr(), 0, 4 * self.size, stream)
        return words

    def forget(self) -> None:
        """Take nothing for zero: somebody wrote to the sets."""
        self._zero = None


class Ring:
    """The ring's state, readable from the host while a kernel runs or hangs."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    @property
    def slots(self) -> int:
        """Minibatches that the ring holds at once."""
        return self._workspace.sizes.ring // self._workspace.config.minibatch_size

    def state(self, program: Forward | None = None) -> list[MinibatchState]:
        """Every minibatch that a counter has moved for, or all of a given program."""
        counters = self._workspace.counters()
        count = self._workspace.sizes.max_minibatches
        states = []
        for s in range(program.minibatches if program is not None else count):
            now = [counters[name][s] for name in ("x_ready", "y_ready", "y_free")]
            if program is None and not any(now):
                continue
            needed: list[int | None] = [None] * 3
            if program is not None:
                needed = [
                    program.x_ready_target(s),
                    program.y_ready_target(s),
                    program.y_free_target(s),
                ]
            pairs = list(zip(now, needed, strict=True))
            states.append(MinibatchState(s, s % self.slots, pairs[0], pairs[1], pairs[2]))
        return states


class Workspace:
    """Everything that calls of one shape need beyond their arguments.

    Collective to make: all ranks of the group pass the same sizes. ``close`` is not collective.

    Args:
        group: the ranks; ``shape.ep_size`` must be its size.
        shape: sizes of the layer; ``num_tokens`` is not used.
        config: the tunables.
        max_tokens: the most tokens of any rank in any call.
        device: torch device; by default the group's, else the current one.
        arch: what kernels are compiled for; by default the device's.
        precision: of the routed experts, "bf16" or "mxfp8".
        memory: "cuda", or "host" for the emulator.

    Attributes, beyond the arguments (all contiguous; None where the plan has no such buffer):
        sizes: the plan, with ``capacity``, ``y_rows`` and the counters' layout.
        heap: symmetric memory; ``heap.stride`` is the kernels' rank_stride.
        ids, num_tokens, x, slots: SymmetricTensor; ``.base_address`` is rank 0's, as kernels want.
        x_ring, hidden, y, shared_hidden, counter_sets, counts, totals, local_ids,
            rank_starts: torch tensors.
        turns: which of the counter sets calls use.
        schedules: {rank: ScheduleBuffers} of this process' ranks.
        records: error words; ``records.wait_address(rank)`` and so on go to kernels.
        barrier: the group's device barrier; ``barrier.gate_address(rank)`` goes to kernels.
        ring: ``ring.state()`` on the host.

    Raises:
        GroupError: sizes differ between ranks, or from the group's.
        CapacityError: not enough memory, or sizes beyond a limit; nothing stays allocated.
    """

    ids: SymmetricTensor
    num_tokens: SymmetricTensor
    x: SymmetricTensor | None
    x_wire_scales: SymmetricTensor | None
    slots: SymmetricTensor | None
    x_ring: torch.Tensor | None
    x_scales: torch.Tensor | None
    hidden_scales: torch.Tensor | None
    hidden: torch.Tensor
    y: torch.Tensor
    shared_hidden: torch.Tensor | None
    counts: torch.Tensor
    totals: torch.Tensor
    local_ids: torch.Tensor
    rank_starts: torch.Tensor

    def __init__(
        self,
        group: Group,
        shape: Shape,
        config: Config,
        max_tokens: int,
        device: Any = None,
        arch: str | None = None,
        memory: Literal["cuda", "host"] = "cuda",
        precision: str = "bf16",
    ) -> None:
        if shape.ep_size != group.size:
            raise GroupError(
                "ep_size must be the group's size", f"{shape.ep_size}, group of {group.size}"
            )
        self.group = group
        self.shape = shape
        self.config = config
        self.max_tokens = max_tokens
        self.device = _device(device if device is not None else group.device, memory)
        self.arch = arch or _arch(self.device)
        self.precision = precision
        self.closed = False
        self.call = 0
        self._backward: BackwardBuffers | None = None
        self.backward_words: tuple[Any, torch.Tensor] | None = None  # layout, int32 words
        self.recorder = Recorder(self)  # of calls with Config(trace=True)
        self.known_arguments: set[Any] = set()  # what mok.call need not check again
        self.plans: dict[Any, Any] = {}  # mok.call.Plan by kind of call
        self.steady: dict[Any, Any] = {}  # mok.steady.Steady by kinds of arguments
        self.last_launch: Any = None  # mok.functional.LaunchFacts of the last megakernel
        self.ring = Ring(self)
        self.sizes = plan_workspace(shape, config, max_tokens, self.arch, precision)
        sizes = [shape.hidden_size, shape.intermediate_size, shape.num_experts, shape.topk]
        sizes += [shape.shared_intermediate_size or 0, max_tokens]
        agree(
            group.rendezvous,
            "the workspace's sizes (H, I, E, K, shared I, max_tokens, minibatch, macrobatch, arch, "
            "precision, wire)",
            [
                *sizes,
                config.minibatch_size,
                config.macrobatch_size,
                self.arch,
                precision,
                self.sizes.wire,
            ],
        )
        with contextlib.ExitStack() as undo:
            self._allocate(memory, undo)
            self._close = undo.pop_all()

    def _allocate(self, memory: Literal["cuda", "host"], undo: contextlib.ExitStack) -> None:
        group, plan = self.group, self.sizes
        # One chunk for everything symmetric; each buffer may lose 255 bytes to alignment.
        size = plan.bytes_of("symmetric") + 256 * (len(plan.buffers) + group.size)
        options = HeapOptions(size=size, memory=memory)
        self.heap = undo.enter_context(Heap(group, options, self.device))
        self.records = Records(self.heap.memory, group.size, group.local_ranks)
        undo.callback(self.records.close)
        self.barrier = Barrier(self.heap, self.records, self.arch, self.config.timeout_s)
        absent = (
            "x", "x_wire_scales", "slots", "x_ring", "x_scales", "hidden_scales", "shared_hidden"
        )  # fmt: skip
        for name in absent:
            setattr(self, name, None)
        with together(group.rendezvous, "Making the workspace"):
            self._fill_in()

    def _fill_in(self) -> None:
        import torch

        try:
            for buffer in self.sizes:
                if buffer.place == "symmetric":
                    tensor = self.heap.empty(buffer.shape, getattr(torch, buffer.dtype))
                    setattr(self, buffer.name, tensor)
                elif buffer.place == "local":
                    setattr(self, buffer.name, self._empty(buffer))
            self.schedules = {rank: self.new_schedule(rank) for rank in self.group.local_ranks}
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                "The workspace must fit the GPU's free memory",
                f"{self.sizes.nbytes / 2**20:.0f} MiB: {str(error).splitlines()[0]}",
                "Lower max_tokens or macrobatch_size.",
            ) from error
        self._reset_counters()
        self.counters()  # makes the reader's stream and buffer now, not while a kernel hangs

    def _reset_counters(self) -> None:
        self.counter_sets.zero_()  # for a look at them; calls may come on another stream
        self.turns = CounterTurns(
            self.counter_sets, self.sizes.counters.size, self.heap.memory.fill
        )

    @property
    def counter_words(self) -> torch.Tensor:
        """int32: the counters of the first local rank's last forward call."""
        return self.turns.used

    counter_sets: torch.Tensor
    turns: CounterTurns
    schedules: dict[int, ScheduleBuffers]

    def _empty(self, buffer: Buffer) -> torch.Tensor:
        import torch

        # At least one element, so that every address is valid.
        shape: Sequence[int] = buffer.shape if 0 not in buffer.shape else (1,)
        return torch.empty(tuple(shape), dtype=getattr(torch, buffer.dtype), device=self.device)

    def fit(self, intermediate_size: int, shared_intermediate_size: int | None) -> None:
        """Take experts of other widths from now on (not collective: only local memory depends on them).

        Raises:
            ShapeError, CapacityError: as for a new workspace; nothing has changed then.
        """
        widths = (self.shape.intermediate_size, self.shape.shared_intermediate_size)
        if widths == (intermediate_size, shared_intermediate_size):
            return
        shape = dataclasses.replace(
            self.shape,
            intermediate_size=intermediate_size,
            shared_intermediate_size=shared_intermediate_size,
        )
        sizes = plan_workspace(shape, self.config, self.max_tokens, self.arch, self.precision)
        before = {b.name: b for b in self.sizes if b.place == "local"}
        made = {
            b.name: self._empty(b) for b in sizes if b.place == "local" and before.get(b.name) != b
        }
        for name in before:
            if all(b.name != name for b in sizes):
                setattr(self, name, None)
        for name, tensor in made.items():
            setattr(self, name, tensor)
        self.shape, self.sizes = shape, sizes
        self._reset_counters()
        self.plans.clear()
        self.steady.clear()
        self.known_arguments.clear()

    def new_schedule(self, rank: int) -> ScheduleBuffers:
        """Buffers for a schedule that must outlive the next call, as training needs."""
        self.check_open()
        buffers = {b.name: self._empty(b) for b in self.sizes if b.place == "schedule"}
        return ScheduleBuffers(rank=rank, **buffers)

    @property
    def backward(self) -> BackwardBuffers:
        """What backward needs beyond forward; made at its first use (collective)."""
        import torch

        self.check_open()
        if self._backward is None:
            tokens, topk = self.max_tokens, self.shape.topk
            self._backward = BackwardBuffers(
                self.heap.empty((tokens, self.shape.hidden_size), torch.bfloat16),
                self.heap.empty((tokens, topk), torch.float32),
                self.heap.empty((tokens * topk,), torch.float32),
            )
        return self._backward

    # -------------------------------------------------------------- calls

    def next_call(self) -> int:
        """Start a schedule exchange: which half (0 or 1) of ``ids`` and ``num_tokens`` it uses.

        Halves take turns: a rank stages the ids of the next call only after the barrier of this
        one, so a peer can at most be reading the other half.
        """
        half, self.call = self.call % 2, self.call + 1
        return half

    def ids_address(self, half: int, rank: int = 0) -> int:
        """Address of a rank's int32 ids [max_tokens, K] of a half."""
        return self.ids.address(rank) + half * self.max_tokens * self.shape.topk * 4

    def num_tokens_address(self, half: int, rank: int = 0) -> int:
        """Address of a rank's int32 token count of a half."""
        return self.num_tokens.address(rank) + half * 128

    @property
    def timeout_ns(self) -> int:
        """The time limit of every wait, as kernels want it."""
        return int(self.config.timeout_s * 1e9)

    @functools.cached_property
    def num_sms(self) -> int:
        """SMs of the GPU."""
        from mok.runtime.device import device_info

        return device_info(self.device).num_sms

    def check_tokens(self, num_tokens: int) -> None:
        """Refuse a call with more tokens than this workspace was made for."""
        if not 0 <= num_tokens <= self.max_tokens:
            raise CapacityError(
                f"A call has at most max_tokens = {self.max_tokens} tokens",
                num_tokens,
                "Make the workspace with a larger max_tokens.",
            )

    def check(self) -> None:
        """Raise what kernels have noted so far: expired waits, bad ids. Costs no driver call."""
        self.records.check(self.shape.num_experts)

    def check_group(self) -> None:
        """Before a call: raise if the group cannot work any more. A bad id waits for ``check_call``, so
        that this rank takes part in a call for which its peers wait."""
        if self.records.broken():
            self.check()

    def check_call(self) -> None:
        """After a call's last launch: raise what has been noted by now."""
        if self.records.any():
            self.check()

    # -------------------------------------------------------------- looking in

    def plan(self) -> WorkspacePlan:
        """Every buffer with its size; print it."""
        return self.sizes

    def counters(self, kernel: Literal["forward", "backward"] = "forward") -> dict[str, list[int]]:
        """The counters of a megakernel by name, as they are now, even while it runs or hangs: of the first
        local rank's last call (while a captured graph is replayed: of what was called last from the host).
        Backward's are empty before its first call."""
        import struct

        self.check_open()
        if kernel == "backward":
            return self._backward_counters()
        layout = self.sizes.counters
        data = self.heap.memory.read(self.counter_words.data_ptr(), 4 * layout.size)
        words = struct.unpack(f"<{layout.size}i", data)
        count, blocks = self.sizes.max_minibatches, self.sizes.max_blocks
        lengths = {
            "ticket": 1,
            "comm_ticket": 1,
            "x_ready": count,
            "y_ready": count,
            "y_free": count,
            "hidden_ready": blocks,
            "shared_hidden_ready": self.sizes.shared_blocks,
        }
        return {
            name: list(words[getattr(layout, name) : getattr(layout, name) + length])
            for name, length in lengths.items()
        }

    def _backward_counters(self) -> dict[str, list[int]]:
        import struct

        if self.backward_words is None:
            return {}
        layout, tensor = self.backward_words
        data = self.heap.memory.read(tensor.data_ptr(), 4 * layout.size)
        words = struct.unpack(f"<{layout.size}i", data)
        found = {name: [words[getattr(layout, name)]] for name in ("ticket", "comm_ticket")}
        starts = [*layout[2:]]  # the arrays lie one behind the other, and size is their end
        for name, start, end in zip(layout._fields[2:-1], starts, starts[1:], strict=False):
            found[name] = list(words[start:end])
        return found

    # -------------------------------------------------------------- closing

    def check_open(self) -> None:
        if self.closed:
            raise ResourceError("The workspace must be open", "it was closed")

    def close(self) -> None:
        """Give all memory back. Work that uses it must have ended on this process' streams."""
        if not self.closed:
            self.closed = True
            for buffer in self.sizes:
                if buffer.place == "local":
                    setattr(self, buffer.name, None)
            self.schedules = {}
            self.plans = {}
            self.steady = {}
            del self.turns
            self.recorder.buffers = {}
            self._close.close()

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _device(device: Any, memory: str) -> torch.device:
    import torch

    if memory == "host":
        return torch.device("cpu")
    from mok.runtime.device import ordinal_of

    return torch.device("cuda", ordinal_of(device))


def _arch(device: torch.device) -> str:
    if device.type == "cpu":
        return "sm_90a"
    from mok.runtime.device import require_arch

    arch = require_arch(device).arch
    assert arch is not None
    return arch


# ---------------------------------------------------------------------- sharing

_cache: dict[tuple[object, ...], Workspace] = {}


def get_workspace(
    group: Group,
    shape: Shape,
    config: Config,
    max_tokens: int,
    device: Any = None,
    arch: str | None = None,
    memory: Literal["cuda", "host"] = "cuda",
    precision: str = "bf16",
) -> Workspace:
    """A workspace for these sizes, made at the first call and shared by all later ones.

    Collective when it has to be made. Calls that share a workspace must share a stream.
    """
    where = _device(device if device is not None else group.device, memory)
    key = (
        id(group),
        where,
        shape.hidden_size,
        shape.intermediate_size,
        shape.num_experts,
        shape.topk,
        shape.shared_intermediate_size,
        config,
        max_tokens,
        arch,
        precision,
    )
    found = _cache.get(key)
    if found is None or found.closed or found.group is not group:
        found = Workspace(group, shape, config, max_tokens, where, arch, memory, precision)
        _cache[key] = found
    return found


def clear_workspace_cache() -> None:
    """Close all shared workspaces, once the work of all ranks that uses them has ended.

    Collective in groups of several processes: each waits for the others.
    """
    while _cache:
        _, workspace = _cache.popitem()
        if workspace.closed:
            continue
        if workspace.device.type == "cuda":
            import torch

            torch.cuda.synchronize(workspace.device)
        workspace.group.barrier("clear_workspace_cache")
        workspace.close()
