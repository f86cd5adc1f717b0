"""Run the whole layer in tests: the same code on a GPU and in the emulator."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from mok import functional
from mok.config import Config, Shape
from mok.errors import MokError
from mok.mxfp8 import mxfp8_quantize
from mok.reference import Case, Experts
from mok.runtime.group import Group
from tests.helpers import POISON

if TYPE_CHECKING:
    from mok.tools.emulator import Emulator

SMALL = Config(fwd_num_comm_sms=2, bwd_num_comm_sms=2, minibatch_size=128, macrobatch_size=256)


@dataclass
class Result:
    """What a call returned and recorded.

    Attributes:
        output: BF16 [N, H], the ranks' outputs one after the other.
        outputs: the same, one per rank.
        context: with ``save_context``.
        facts: grid, comm CTAs, ring of the last rank's launch.
        counters: the last rank's counters once everything has run; empty unless asked for.
    """

    output: Tensor
    outputs: list[Tensor]
    schedule: functional.Schedule
    context: functional.ForwardContext | None
    facts: functional.LaunchFacts
    counters: dict[str, list[int]]

    @property
    def tasks_drawn(self) -> int:
        """Tasks whose tickets were drawn; a pair's ticket stands for two."""
        return self.counters["ticket"][0] * (2 if self.facts.pair else 1)

    @property
    def minibatches(self) -> int:
        """Minibatches of the last rank that were computed."""
        return sum(count > 0 for count in self.counters["y_ready"])

    @property
    def ring_wraps(self) -> int:
        """How often the last rank's ring was filled anew after its first filling."""
        return -(-self.minibatches // self.facts.ring_slots) - 1


class Layer:
    """A workspace for cases of one size; calling it runs one of them.

    Args:
        case: gives the sizes, and is what a call runs by default.
        ep_size: virtual ranks.
        device: "cpu" inside an emulator, else a GPU.
        tokens_per_rank: how tokens are split; evenly by default.
        max_tokens: of the workspace; by default what the case needs.
        group: instead of ``ep_size`` virtual ranks.
        precision: of the routed experts.
    """

    def __init__(
        self,
        case: Case,
        ep_size: int = 1,
        config: Config = SMALL,
        device: torch.device | str = "cpu",
        *,
        tokens_per_rank: Sequence[int] | None = None,
        max_tokens: int | None = None,
        group: Group | None = None,
        precision: str = "bf16",
    ) -> None:
        self.precision = precision
        self.case, self.config = case, config
        self.device = torch.device(device)
        self.lengths = list(tokens_per_rank or case.tokens_per_rank(ep_size))
        self.shape: Shape = dataclasses.replace(case.shape, ep_size=ep_size)
        if group is None:
            group = Group.virtual(ep_size, device) if ep_size > 1 else Group.single(device)
        self.ranks = list(group.local_ranks)
        self.workspace = functional.create_workspace(
            config,
            group,
            device=device,
            max_tokens=max(self.lengths) if max_tokens is None else max_tokens,
            hidden_size=self.shape.hidden_size,
            intermediate_size=self.shape.intermediate_size,
            num_experts=self.shape.num_experts,
            topk=self.shape.topk,
            shared_intermediate_size=self.shape.shared_intermediate_size,
            precision=precision,
        )

    def each(self, values: Sequence[Any]) -> Any:
        """Values of all ranks as the functions take them: those of the local ranks, or the one."""
        return [values[r] for r in self.ranks] if len(self.ranks) > 1 else values[self.ranks[0]]

    def split(self, tensor: Tensor) -> list[Tensor]:
        """The rows of each rank, in memory of their own as in separate processes."""
        return [part.clone() for part in tensor.split(self.lengths)]

    def placement(self) -> list[range]:
        return [self.shape.experts_on(r) for r in range(self.shape.ep_size)]

    def arguments(self, case: Case) -> list[Any]:
        """Those of ``forward`` from ``x`` to ``routed_down``, for a case of this layer's sizes."""
        part = [case.routed[p.start : p.stop] for p in self.placement()]
        shared = case.shared
        routed: list[list[Any]] = [[p.gate, p.up, p.down] for p in part]
        if self.precision == "mxfp8":
            routed = [[mxfp8_quantize(weight) for weight in of_rank] for of_rank in routed]
        return [
            self.each(self.split(case.x)),
            self.each(self.split(case.router_weights)),
            *((shared.gate[0], shared.up[0], shared.down[0]) if shared else (None, None, None)),
            *(self.each([of_rank[i] for of_rank in routed]) for i in range(3)),
        ]

    def build_schedule(
        self, case: Case | None = None, config: Config | None = None
    ) -> functional.Schedule:
        return functional.build_schedule(
            self.workspace,
            config or self.config,
            self.each(self.split((case or self.case).top_experts)),
            num_local_experts=self.each([len(p) for p in self.placement()]),
        )

    def queue(
        self,
        case: Case | None = None,
        *,
        config: Config | None = None,
        schedule: functional.Schedule | None = None,
        save_context: bool = False,
    ) -> Result:
        """Queue one call, without waiting for it."""
        case, config = case or self.case, config or self.config
        schedule = schedule or self.build_schedule(case, config)
        output, context = functional.forward(
            config,
            self.workspace,
            schedule,
            *self.arguments(case),
            swiglu_limit=case.swiglu_limit,
            save_context=save_context,
        )
        outputs = list(output) if isinstance(output, list | tuple) else [output]
        joined = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return Result(joined, outputs, schedule, context, self.workspace.last_launch, {})

    def __call__(self, case: Case | None = None, **options: Any) -> Result:
        """Run one call to its end; raises what kernels noted."""
        result = self.queue(case, **options)
        self.finish()
        result.counters = self.workspace.counters()
        return result

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.workspace.check()

    def spoil(self) -> None:
        """Fill all memory of the workspace with NaN, or nonsense where it holds integers."""
        w = self.workspace
        w.turns.forget()
        for buffer in w.sizes:
            held = getattr(w, buffer.name, None)
            if buffer.place == "local":
                _spoil(held)
            elif buffer.place == "symmetric":
                for rank in w.group.local_ranks:
                    _spoil(held.peer(rank))

    def close(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.workspace.close()

    def __enter__(self) -> Layer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _spoil(tensor: Tensor) -> None:
    tensor.fill_(torch.nan if tensor.is_floating_point() else POISON % 2**15)


@contextlib.contextmanager
def empty_holds_nan() -> Iterator[None]:
    """``torch.empty`` gives NaN, or the largest integer, instead of whatever was there."""
    before = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3).isnan().all()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("mok.call._EMPTY", {})  # nothing fills what it allocates with otherwise
            yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fill


@contextlib.contextmanager
def watched(machine: Emulator, layer: Layer) -> Iterator[None]:
    """Tell the emulator of all memory that the layer's kernels may touch while the block runs.

    Any other access is then an error, and data races in that memory are looked for.
    """
    w = layer.workspace
    for buffer in w.sizes:
        if buffer.place == "local":
            machine.register(getattr(w, buffer.name))
        elif buffer.place == "symmetric":
            machine.register(*(getattr(w, buffer.name).peer(r) for r in w.group.local_ranks))
    for rank in w.group.local_ranks:
        machine.register(_Words(w.records.wait_address(rank), 16))
        machine.register(_Words(w.records.route_address(rank), 8))
    for experts in (layer.case.routed, layer.case.shared):
        if experts is not None:
            machine.register(experts.gate, experts.up, experts.down)

    def declared(make: Any) -> Any:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            machine.register(tensor)
            return tensor

        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mok.call._EMPTY", {})  # what it allocates with otherwise
        patch.setattr(torch, "empty", declared(torch.empty))
        patch.setattr(Tensor, "clone", declared(Tensor.clone))  # the layer's inputs
        yield


class _Words:
    """int32 words at an address, for ``Emulator.register``."""

    def __init__(self, address: int, count: int) -> None:
        self.nbytes = 4 * count
        self.__array_interface__ = {"data": (address, False)}


def run_layer(
    case: Case,
    ep_size: int = 1,
    config: Config = SMALL,
    device: torch.device | str = "cpu",
    *,
    tokens_per_rank: Sequence[int] | None = None,
    max_tokens: int | None = None,
    save_context: bool = False,
    spoiled: bool = False,
    machine: Emulator | None = None,
) -> Result:
    """One call in a workspace of its own.

    Args:
        spoiled: all memory holds NaN before the call.
        machine: an emulator that is told of all memory.
    """
    with (
        empty_holds_nan() if spoiled else contextlib.nullcontext(),
        Layer(
            case, ep_size, config, device, tokens_per_rank=tokens_per_rank, max_tokens=max_tokens
        ) as layer,
        watched(machine, layer) if machine is not None else contextlib.nullcontext(),
    ):
        if spoiled:
            layer.spoil()
        return layer(save_context=save_context)


def to_device(case: Case, device: torch.device | str) -> Case:
    """The same values elsewhere."""

    def moved(experts: Experts | None) -> Experts | None:
        if experts is None:
            return None
        return Experts(*(w.to(device) for w in (experts.gate, experts.up, experts.down)))

    routed = moved(case.routed)
    assert routed is not None
    return dataclasses.replace(
        case,
        x=case.x.to(device),
        top_experts=case.top_experts.to(device),
        router_weights=case.router_weights.to(device),
        routed=routed,
        shared=moved(case.shared),
    )


def sensitive(case: Case) -> Case:
    """The case with large terms that cancel, in every sum: rounding then shows its order.

    Of random values, BF16 results hide nearly every change of an FP32 sum's order. Here each gate,
    up and y has two opposite terms about 2^10 times its value at the ends of its sum, and the
    first two routes of a token, to one expert, have opposite weights.
    """
    hidden, inner = case.shape.hidden_size, case.shape.intermediate_size
    x, ids, weights = case.x.clone(), case.top_experts.clone(), case.router_weights.clone()
    first, last = 1, -2
    x[:, first] = x[:, last] = 64.0

    def opposed(experts: Experts | None) -> Experts | None:
        if experts is None:
            return None
        gate, up, down = experts.gate.clone(), experts.up.clone(), experts.down.clone()
        for weight in (gate, up):
            weight[:, last] = weight[:, first]  # two equal columns of hidden
            weight[..., first] = weight[..., 3] * (16 * hidden**0.5)
            weight[..., last] = -weight[..., first]
        down[..., first] = down[..., 3] * (1024 * inner**0.5)
        down[..., last] = -down[..., first]
        return Experts(gate, up, down)

    routed = opposed(case.routed)
    assert routed is not None
    if ids.shape[1] > 2:
        ids[:, 1] = ids[:, 0]
        weights[:, 0] += 700.0
        weights[:, 1] = -weights[:, 0]
    return dataclasses.replace(
        case,
        x=x,
        top_experts=ids,
        router_weights=weights,
        routed=routed,
        shared=opposed(case.shared),
    )


@contextlib.contextmanager
def refused(error: type[MokError], *words: str) -> Iterator[None]:
    """The block raises this error; its text has all the words, and no part of it is missing."""
    with pytest.raises(error) as caught:
        yield
    found = caught.value
    for word in words:
        assert word.lower() in str(found).lower(), f"{word!r} is not in: {found}"
    assert found.rule, "no rule"
    assert str(found.value), f"no value: {found}"
    assert found.remedy, f"no remedy: {found}"


def first_tokens(case: Case, count: int) -> Case:
    return dataclasses.replace(
        case,
        x=case.x[:count],
        top_experts=case.top_experts[:count],
        router_weights=case.router_weights[:count],
    )


def with_routes(case: Case, top_experts: Tensor) -> Case:
    """The case with other expert ids."""
    return dataclasses.replace(case, top_experts=top_experts.to(case.top_experts))
