"""What ``mok bench`` asks of a program. A new peer is one file with one such class."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from mok.config import Config
from mok.tools.bench.timing import Clock, Regime, Step, Window, measure
from mok.tools.bench.work import Work


class Unavailable(Exception):
    """A program cannot run here, or not this shape; the message is the reason that is printed."""


@dataclass(frozen=True)
class Options:
    """Settings of the adapters.

    Attributes:
        clock: for an adapter that chooses among its own variants.
        paths: where peers live, by program: a folder, or for upstream an interpreter.
        config: tunables of ours; ``Config.suggest`` by default.
        sonic_tune: let SonicMoE's own tuner run (minutes per shape).
        variants: how many of a peer's known-good variants are tried for each shape.
        reference: there is no kernel here: ours is the scheduled reference on the CPU.
        say: shows one line of progress.
    """

    clock: Clock
    paths: Mapping[str, str] = field(default_factory=dict)
    config: Config | None = None
    sonic_tune: bool = False
    variants: int = 3
    reference: bool = False
    say: Callable[[str], None] = lambda _: None


class Program:
    """One program, set up for one shape.

    The constructor raises ``Unavailable`` where it cannot be. Calls enqueue their work on torch's
    current stream and do not wait.

    Attributes:
        name: as in tables.
        passes: what it can do: "forward", "backward", "both", or "gemm" for a lone matrix product.
        persistent_bytes: memory it holds between calls, weights and inputs apart.
        note: which variant runs, for people.
        packages: distributions whose versions matter.
        needs_gpu: whether there is no use in trying on a CPU.
        remote: whether it runs in another process, whose memory this one cannot see.
    """

    passes: ClassVar[tuple[str, ...]] = ("forward", "backward", "both")
    packages: ClassVar[Sequence[str]] = ()
    needs_gpu: ClassVar[bool] = False
    remote: ClassVar[bool] = False

    def __init__(self, name: str, work: Work, options: Options) -> None:
        self.name = name
        self.work = work
        self.options = options
        self.persistent_bytes = 0
        self.note = ""

    def forward(self, index: int) -> Any:
        """The whole layer, from ids and weights to the combined output, nothing kept."""
        raise NotImplementedError

    def output(self, raw: Any) -> Tensor:
        """BF16 [T, H] of what ``forward`` returned."""
        found: Tensor = raw
        return found

    def forward_training(self, index: int) -> tuple[Any, Any]:
        """The same, and what backward needs of it."""
        raise NotImplementedError

    def backward(self, index: int, saved: Any, keep: bool = False) -> Any:
        """All gradients. ``keep``: ``saved`` is used again, else it may be freed on the way."""
        raise NotImplementedError

    def gradients(self, raw: Any) -> dict[str, Tensor]:
        """What ``backward`` returned, as ``oracle.GRADIENTS`` wants it."""
        raise NotImplementedError

    def flops(self, pass_name: str) -> int:
        """FLOP of a pass by the stated rule."""
        routes = int((self.work.ids >= 0).sum())
        return self.work.bench.flops(pass_name, routes)

    def window(self, pass_name: str, step: Step, clock: Clock, regime: Regime) -> Window:
        """One timed window of a pass; ``step`` is a call of it."""
        return measure(step, clock, regime)

    def check(self) -> None:
        """Raise what went wrong on the device without stopping it."""

    def close(self) -> None:
        """Give memory back; the program is not used again."""

    @classmethod
    def versions(cls) -> dict[str, str]:
        """Versions of ``packages`` that are installed."""
        return installed_versions(cls.packages)


def installed_versions(packages: Sequence[str]) -> dict[str, str]:
    """Version of each distribution that is installed."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def interleaved(gate: Tensor, up: Tensor, block: int) -> Tensor:
    """[E, 2I, H]: ``block`` rows of gate, ``block`` rows of up, and so on."""
    experts, inner, hidden = gate.shape
    shape = (experts, inner // block, block, hidden)
    both = torch.stack((gate.view(shape), up.view(shape)), dim=2)
    return both.view(experts, 2 * inner, hidden)
