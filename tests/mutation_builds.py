"""The megakernels that ``tests.kernel_mutations`` damages, and the cases that each is tried on.

Few stages, so that each is filled again and again. The cases of a build differ in what they exercise:

    small    one cluster computes; a ring of one block is refilled twice
    wide     several tiles and more K steps than stages in every kind of task, one after the other in one
             cluster; the last columns of a tile exist, so that a store that was not waited for is missed
    shared   the same in several clusters, a ring of two
    halves   blocks with rows in both CTAs of a pair, a ring of two
    idle     nothing for the comm workers, more clusters than tasks
    late     comm workers so slow that what they wait for is there at the first look
    many     eight row blocks of a minibatch, so that the rows of a down task are there at the first look
    queued   six row blocks of own tokens, so that those of a shared down task are
    odd      five row blocks in a minibatch and two clusters: whoever reads a block is not who wrote it
    comm     more comm workers than items of a minibatch: who pushes it does not fetch the next
    crossing experts of several macrobatches, more clusters than tasks of one
    mates    several row blocks of an expert in a minibatch: the CTAs of a pair share the B of routed tasks
    slots    three minibatches in a macrobatch, experts of two row blocks: a slot is free, and kept
             accumulators have been read, long before another cluster overwrites them
    long     rows of 4 KB: a comm worker's slots serve twice for one item
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from mok.config import Shape
from mok.kernels_cute.machine import machine_of
from mok.reference import random_case
from mok.runtime.compile import get_kernel
from mok.tools.emulator.mutations import Mutation
from tests.backward_cases import Layer
from tests.backward_runs import BackwardRun, _Rank
from tests.forward_runs import ForwardRun, emulated, forward_kernel

Outcome = list[torch.Tensor]
Rewrite = Callable[[str], str] | None
# Undamaged runs take less than 2 million warp instructions, backward's ``slots`` more.
MAX_STEPS = 4_000_000
STAGES = {"sm_90a": 3, "sm_100a": 2}  # Hopper's main loops need three


def config_of(arch: str, pair: bool) -> dict[str, Any]:
    """Arguments of a build's kernel; ``pair``: the build for pairs of Hopper's CTAs."""
    return {"stages": STAGES[arch]} | ({"pair": True} if pair else {})


class Forward(NamedTuple):
    """A forward case: sizes, and the launch; macrobatch and minibatch in tiles of rows."""

    shape: Shape
    macrobatch: int
    grid: int
    num_sms: int
    num_comm_ctas: int = 0
    kind: str = "random"
    minibatch: int = 1


class Build:
    """A kernel, and its cases."""

    cases: tuple

    def ptx(self) -> str:
        """The kernel's text."""
        raise NotImplementedError

    def prepare_all(self) -> None:
        """What the processes of a run have in common, before they fork."""

    def run(self, case: Any, rewrite: Rewrite, seed: int | None) -> tuple[Outcome, set[int]]:
        """What the kernel leaves behind, and the PTX lines it ran.

        Raises:
            EmulatorError: a checker's report.
        """
        raise NotImplementedError

    def damage(self, ptx: str, mutation: Mutation) -> Callable[[str], str]:
        """Damages the build's kernel, and leaves others that the case launches alone."""
        damaged = mutation.apply(ptx)
        return lambda text: damaged if text == ptx else text


class ForwardBuild(Build):
    """The forward kernel in one rank's launch."""

    def __init__(self, arch: str, direct: bool, *cases: Forward, pair: bool = False):
        self.arch, self.direct, self.cases = arch, direct, cases
        self.config = config_of(arch, pair)

    def ptx(self) -> str:
        return forward_kernel(self.arch, direct=self.direct, mxfp8=False, **self.config).ptx

    def run(self, case: Forward, rewrite: Rewrite, seed: int | None) -> tuple[Outcome, set[int]]:
        tile = machine_of(self.arch).tile_m
        with emulated(self.arch, case.num_sms, seed, check=True) as emu:
            emu.rewrite, emu.max_steps = rewrite, MAX_STEPS
            run = ForwardRun(
                random_case(case.shape, kind=case.kind),
                self.arch,
                1 if self.direct else 2,
                minibatch=case.minibatch * tile,
                macrobatch=case.macrobatch * tile,
                grid=case.grid,
                num_comm_ctas=case.num_comm_ctas,
                num_sms=case.num_sms,
                **self.config,
            )
            # The rank with fewer rows: with all routes to one expert, it has none.
            rows = [schedule.num_tokens for schedule in run.schedules]
            run.launch(rows.index(min(rows)), emu.register)
            lines = emu.report.lines
        saved = run.saved[0]
        y = [saved["y"]] if run.direct else []
        return [t.view(torch.int16).clone() for t in (run.heap, saved["shared_y"], *y)], lines


class Backward(NamedTuple):
    """A backward case: the layer call, and the launch."""

    layer: Layer
    grid: int
    num_sms: int
    num_comm_ctas: int = 0


class BackwardBuild(Build):
    """The backward kernel in rank 0's launch; forward and the plan have run before, undamaged."""

    def __init__(self, arch: str, *cases: Backward, pair: bool = False):
        self.arch, self.cases = arch, cases
        self.config = config_of(arch, pair)
        self.ready: dict[Backward, tuple[BackwardRun, _Rank, torch.Tensor]] = {}

    def prepare(self, case: Backward) -> tuple[BackwardRun, _Rank, torch.Tensor]:
        """The run and its rank before the backward kernel, and a copy of the heap."""
        if case not in self.ready:
            run = case.layer.make_run(
                *case.layer.inputs(False, "cpu"),
                self.arch,
                grid=case.grid,
                num_comm_ctas=case.num_comm_ctas,
                **self.config,
            )
            rank = _Rank(run, 0)
            with emulated(self.arch, case.num_sms) as emu:
                emu.register(run.heap, run.record)
                rank.forward()
                plan = rank.plan()
            rank.plan = lambda: {name: t.clone() for name, t in plan.items()}  # type: ignore
            self.ready[case] = run, rank, run.heap.clone()
        return self.ready[case]

    def prepare_all(self) -> None:
        for case in self.cases:
            self.prepare(case)

    def ptx(self) -> str:
        return get_kernel(self.prepare(self.cases[0])[0].spec).ptx

    def run(self, case: Backward, rewrite: Rewrite, seed: int | None) -> tuple[Outcome, set[int]]:
        run, rank, heap = self.prepare(case)
        run.heap.copy_(heap)
        rank.keep.clear()
        rank.outputs = rank.make_outputs()
        results = [rank.dx, rank.dw_partial, rank.shared_dx, rank.shared_dw_partial]
        for tensor in results:
            tensor.fill_(torch.nan)
        with emulated(self.arch, case.num_sms, seed, check=True) as emu:
            emu.rewrite, emu.max_steps = rewrite, MAX_STEPS
            emu.register(run.heap, run.record)
            rank.backward()
            lines = emu.report.lines
        results += [run.heap, *rank.outputs.values()]
        return [t.view(torch.uint8).clone() for t in results], lines


SMALL = Shape(16, 128, 64, 6, 2, shared_intermediate_size=64)
WIDE = Shape(520, 512, 256, 2, 1, shared_intermediate_size=256)
SHARED = Shape(520, 512, 256, 4, 2, shared_intermediate_size=256)
HALVES = Shape(440, 64, 128, 4, 2, shared_intermediate_size=64)
IDLE = Shape(32, 64, 64, 2, 1, shared_intermediate_size=64)
LATE = Shape(1200, 256, 64, 4, 1, shared_intermediate_size=64)
MANY = Shape(64, 64, 128, 16, 2, shared_intermediate_size=64)
BACKWARD_WIDE = Shape(520, 512, 512, 2, 1, 1, 256)  # several tiles of each kind in one pair
HALF_BACKWARD_WIDE = Shape(260, 512, 512, 2, 1, 1, 256)  # the same on Hopper
BACKWARD_LATE = Shape(1200, 64, 64, 4, 1, 1, 64)  # also crossing
BACKWARD_QUEUED = Shape(2600, 64, 64, 2, 1, 1, 64)
ODD = Shape(64, 64, 128, 20, 2, 1, 64)
DIRECT_ODD = Shape(64, 64, 128, 10, 2, 1, 64)
QUEUED = Shape(2600, 64, 64, 2, 1, shared_intermediate_size=64)
DIRECT_MANY = Shape(700, 64, 128, 8, 2, shared_intermediate_size=64)
# With all rows on one rank; on Hopper, whose tile has half the rows.
DIRECT_WIDE = Shape(300, 512, 256, 2, 1, shared_intermediate_size=256)
DIRECT_SHARED = Shape(300, 512, 256, 2, 2, shared_intermediate_size=256)
HALF_WIDE = Shape(260, 512, 256, 2, 1, shared_intermediate_size=256)
HALF_SHARED = Shape(260, 512, 256, 4, 2, shared_intermediate_size=256)
LONG = Shape(140, 2112, 64, 2, 2, shared_intermediate_size=64)

BUILDS: dict[str, Build] = {
    "ring": ForwardBuild(
        "sm_100a",
        False,
        Forward(SMALL, 1, 16, 4, 2),
        Forward(WIDE, 1, 12, 4, 2),
        Forward(SHARED, 2, 12, 8, 4),
        Forward(HALVES, 2, 12, 8, 4),
        Forward(IDLE, 1, 24, 8, 4, "one_expert"),
        Forward(LATE, 2, 16, 12, 2),
        Forward(MANY, 8, 16, 8, 2, minibatch=8),
        Forward(QUEUED, 2, 16, 10, 4),
    ),
    "direct": ForwardBuild(
        "sm_100a",
        True,
        Forward(SMALL, 1, 16, 2),
        Forward(DIRECT_WIDE, 1, 12, 2),
        Forward(DIRECT_SHARED, 2, 12, 6),
        Forward(HALVES, 2, 12, 6),
        Forward(IDLE, 1, 24, 4, 0, "one_expert"),
        Forward(DIRECT_MANY, 8, 16, 6, minibatch=8),
    ),
    "hopper-ring": ForwardBuild(
        "sm_90a",
        False,
        Forward(SMALL, 1, 2, 2, 1),
        Forward(HALF_WIDE, 1, 3, 3, 1),
        Forward(HALF_SHARED, 2, 6, 6, 2),
        Forward(HALVES, 2, 6, 6, 2),
        Forward(IDLE, 1, 8, 8, 4, "one_expert"),
        Forward(LATE, 2, 8, 8, 1),
        Forward(MANY, 8, 4, 4, 1, minibatch=8),
        Forward(LONG, 1, 3, 3, 1),
    ),
    "hopper-direct": ForwardBuild(
        "sm_90a",
        True,
        Forward(SMALL, 1, 1, 1),
        Forward(HALF_WIDE, 1, 1, 1),
        Forward(HALF_SHARED, 2, 4, 4),
        Forward(HALVES, 2, 4, 4),
        Forward(IDLE, 1, 8, 8, 0, "one_expert"),
        Forward(DIRECT_MANY, 8, 4, 4, minibatch=8),
    ),
    "backward-ring": BackwardBuild(
        "sm_100a",
        Backward(Layer(Shape(300, 64, 64, 3, 2, 1, 64), "random", 2, False, 1, 1), 8, 4, 2),
        Backward(Layer(BACKWARD_WIDE, "random", 2, False, 1, 1), 6, 4, 2),
        Backward(Layer(Shape(300, 256, 256, 2, 2, 1, 256), "random", 2, False, 1, 1), 12, 8, 4),
        Backward(Layer(Shape(32, 64, 64, 2, 1, 1, 64), "one_expert", 2, False, 1, 1), 64, 8, 4),
        Backward(Layer(BACKWARD_LATE, "random", 2, False, 1, 2), 14, 12, 2),
        Backward(Layer(BACKWARD_QUEUED, "random", 2, False, 2, 2), 8, 6, 2),
        Backward(Layer(ODD, "random", 2, False, 5, 5), 10, 8, 4),
        Backward(Layer(Shape(300, 64, 64, 3, 2, 1, 64), "random", 2, False, 1, 1), 24, 22, 16),
        Backward(Layer(BACKWARD_LATE, "random", 2, False, 1, 1), 14, 12, 4),
        Backward(Layer(Shape(768, 64, 64, 10, 5, 1, 64), "random", 2, False, 1, 3), 36, 32, 16),
    ),
    "backward-direct": BackwardBuild(
        "sm_100a",
        Backward(Layer(Shape(300, 64, 64, 3, 2, 1, 64), "few_experts", macrobatch=1), 8, 2),
        Backward(Layer(BACKWARD_WIDE, macrobatch=1), 4, 2),
        Backward(Layer(Shape(300, 256, 256, 2, 2, 1, 256), macrobatch=1), 12, 6),
        Backward(Layer(Shape(32, 64, 64, 2, 1, 1, 64), "one_expert", macrobatch=1), 64, 4),
        Backward(Layer(Shape(1300, 64, 64, 2, 1, 1, 64), minibatch=2, macrobatch=2), 6, 4),
        Backward(Layer(DIRECT_ODD, minibatch=5, macrobatch=5), 6, 4),
        Backward(Layer(Shape(600, 64, 64, 2, 1, 1, 64), macrobatch=1), 14, 10),
        Backward(Layer(Shape(384, 64, 64, 5, 5, 1, 64), macrobatch=3), 20, 16),
    ),
    "hopper-pair-ring": ForwardBuild(
        "sm_90a",
        False,
        Forward(SMALL, 1, 4, 4, 2),
        Forward(HALF_WIDE, 1, 6, 6, 2),
        Forward(HALF_SHARED, 2, 8, 8, 4),
        Forward(HALVES, 2, 8, 8, 4),
        Forward(IDLE, 1, 12, 12, 4, "one_expert"),
        Forward(LATE, 2, 10, 10, 2),
        Forward(MANY, 8, 8, 8, 2, minibatch=8),
        Forward(HALF_SHARED, 4, 8, 8, 4, minibatch=4),
        Forward(LONG, 1, 4, 4, 2),
        pair=True,
    ),
    "hopper-pair-direct": ForwardBuild(
        "sm_90a",
        True,
        Forward(SMALL, 1, 2, 2),
        Forward(HALF_WIDE, 1, 2, 2),
        Forward(HALF_SHARED, 2, 6, 6),
        Forward(HALVES, 2, 6, 6),
        Forward(IDLE, 1, 12, 12, 0, "one_expert"),
        Forward(DIRECT_MANY, 8, 6, 6, minibatch=8),
        pair=True,
    ),
    # Of Hopper's backward builds those that layers launch.
    "hopper-backward-ring": BackwardBuild(
        "sm_90a",
        Backward(Layer(Shape(300, 64, 64, 3, 2, 1, 64), "random", 2, False, 1, 1), 4, 4, 2),
        Backward(Layer(HALF_BACKWARD_WIDE, "random", 2, False, 1, 1), 4, 4, 2),
        Backward(Layer(Shape(300, 256, 256, 2, 2, 1, 256), "random", 2, False, 1, 1), 8, 8, 4),
        Backward(Layer(Shape(32, 64, 64, 2, 1, 1, 64), "one_expert", 2, False, 1, 1), 12, 12, 4),
        Backward(Layer(Shape(600, 64, 64, 4, 1, 1, 64), "random", 2, False, 1, 2), 12, 12, 2),
        Backward(Layer(Shape(1300, 64, 64, 2, 1, 1, 64), "random", 2, False, 2, 2), 6, 6, 2),
        Backward(Layer(ODD, "random", 2, False, 5, 5), 8, 8, 4),
        Backward(Layer(Shape(300, 64, 64, 3, 2, 1, 64), "random", 2, False, 1, 1), 14, 14, 8),
        Backward(Layer(Shape(600, 64, 64, 4, 1, 1, 64), "random", 2, False, 1, 1), 12, 12, 4),
        Backward(Layer(Shape(140, 2112, 64, 2, 2, 1, 64), "random", 2, False, 1, 1), 4, 4, 2),
        pair=True,
    ),
    "hopper-backward-direct": BackwardBuild(
        "sm_90a",
        Backward(Layer(Shape(300, 64, 64, 3, 2, 1, 64), "few_experts", macrobatch=1), 2, 2),
        Backward(Layer(HALF_BACKWARD_WIDE, macrobatch=1), 2, 2),
        Backward(Layer(Shape(300, 256, 256, 2, 2, 1, 256), macrobatch=1), 6, 6),
        Backward(Layer(Shape(32, 64, 64, 2, 1, 1, 64), "one_expert", macrobatch=1), 12, 12),
        Backward(Layer(Shape(650, 64, 64, 2, 1, 1, 64), minibatch=2, macrobatch=2), 4, 4),
        Backward(Layer(DIRECT_ODD, minibatch=5, macrobatch=5), 4, 4),
        Backward(Layer(Shape(300, 64, 64, 2, 1, 1, 64), macrobatch=1), 10, 10),
        Backward(Layer(Shape(192, 64, 64, 5, 5, 1, 64), macrobatch=3), 12, 12),
        pair=True,
    ),
}
