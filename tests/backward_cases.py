"""Layer calls for the tests of the backward kernel, and how one is checked."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from mok.config import Shape
from mok.kernels_cute.machine import machine_of
from mok.reference import (
    ROUTINGS,
    Case,
    Gradients,
    backward_reference,
    integer_case,
    integer_gradient,
    random_case,
    random_gradient,
)
from mok.tools.emulator import Emulator
from tests.backward_runs import BackwardRun


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer call: sizes, routing, and how it is run; minibatch and macrobatch in tiles of rows."""

    shape: Shape
    kind: str = "random"
    ep_size: int = 1
    direct: bool = True
    minibatch: int = 1
    macrobatch: int = 2
    lengths: tuple[int, ...] | None = None
    limit: float | None = None
    gated: bool = False
    seed: int | None = None  # of the emulator

    def __str__(self) -> str:
        s, where = self.shape, "direct" if self.direct else f"EP{self.ep_size}"
        sizes = f"T{s.num_tokens}-H{s.hidden_size}-I{s.intermediate_size}-K{s.topk}"
        return f"{where}-{sizes}-{self.kind}" + ("-gated" if self.gated else "")

    def inputs(self, integer: bool, device: torch.device | str) -> tuple[Case, Tensor]:
        """The case and the gradient of its output."""
        make, gradient = (
            (integer_case, integer_gradient) if integer else (random_case, random_gradient)
        )
        given = self.kind in ROUTINGS
        case = make(
            self.shape, kind=self.kind if given else "random", seed=1, device=device,
            swiglu_limit=self.limit, gated=self.gated,
        )  # fmt: skip
        if not given:
            case = dataclasses.replace(case, top_experts=self._routes(self.kind).to(device))
        return case, gradient(case, seed=1)

    def _routes(self, kind: str) -> Tensor:
        """Two routings beside those of ``mok.reference``; every route has an expert."""
        shape = dataclasses.replace(self.shape, ep_size=self.ep_size)
        experts = {
            "balanced": range(shape.num_experts),
            "all to one rank": shape.experts_on(min(1, self.ep_size - 1)),
        }[kind]
        slots = torch.arange(shape.num_tokens * shape.topk).view(-1, shape.topk)
        return experts.start + slots % len(experts)

    def make_run(self, case: Case, dy: Tensor, arch: str, **options) -> BackwardRun:
        """The run of a case; ``options`` of ``BackwardRun``."""
        tile = machine_of(arch).tile_m
        return BackwardRun(
            case,
            dy,
            self.ep_size,
            arch=arch,
            direct=self.direct,
            minibatch=self.minibatch * tile,
            macrobatch=self.macrobatch * tile,
            tokens_per_rank=self.lengths,
            **options,
        )


LARGE_DIRECT = Layer(Shape(3000, 512, 320, 8, 4, 1, 192), kind="skewed", macrobatch=4, gated=True)
LARGE_RING = Layer(
    Shape(3000, 512, 320, 10, 4, 1, 192), kind="dropped", ep_size=3, direct=False, macrobatch=4,
    lengths=(2000, 0, 1000),
)  # fmt: skip


def emulated(run: BackwardRun, num_sms: int, seed: int | None = None) -> Gradients:
    """The run in an emulator. With a seed on the adversarial machine, whose checkers must be silent."""
    with Emulator(run.arch, num_sms=num_sms, seed=seed) as emulator:
        run.launch()
        assert not emulator.report.findings, "\n".join(map(str, emulator.report.findings))
    with Emulator(run.arch, num_sms=num_sms):
        return run.sums()


def exact_run(
    layer: Layer, arch: str, device: torch.device | str, grad_mode: str = "bf16", **options
) -> tuple[BackwardRun, Gradients]:
    """The run of the layer's integer case and its exact gradients."""
    case, dy = layer.inputs(True, device)
    adding: dict[str, Gradients] = {}
    if grad_mode.endswith("_add"):
        into = backward_reference(
            case, dy, layer.ep_size, tokens_per_rank=layer.lengths, grad_mode=grad_mode[:4]
        )
        adding = {"into": into}
    run = layer.make_run(case, dy, arch, grad_mode=grad_mode, **adding, **options)
    want = backward_reference(
        case, dy, layer.ep_size, tokens_per_rank=layer.lengths, grad_mode=grad_mode, **adding
    )
    return run, want


def assert_same(found: Gradients, want: Gradients) -> None:
    """All gradients, bit for bit."""
    got, expected = found.named(), want.named()
    assert got.keys() == expected.keys()
    for name, value in got.items():
        assert value.dtype == expected[name].dtype
        assert torch.equal(value, expected[name]), name
