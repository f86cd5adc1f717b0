"""What is to be simulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from mok.config import Config, Shape
from mok.errors import MokError, ShapeError
from mok.kernels_cute.machine import forward_pushes, works_in_pairs
from mok.tools.simulator.machine import Machine
from mok.tools.simulator.routing import Routing, drawn

Direction = Literal["forward", "backward", "recompute"]
Precision = Literal["bf16", "mxfp8"]
Program = Literal["ours", "upstream"]


@dataclass(frozen=True)
class Switches:
    """Our differences from upstream, one by one; all off is upstream's program.

    Attributes:
        fused_swiglu: gate and up are one GEMM whose epilogue applies SwiGLU: no SwiGLU tasks, no
            second pass over gate and up.
        two_accumulators: the epilogue of a task overlaps the main loop of the next.
        prefix_search: the expert of a task comes from a table, not from a scan over all experts.
        grid_hint: the launch is sized for the rows expected, not for the capacity.
        slot_backward: backward frees ring slots one by one, not a macrobatch at a time.
    """

    fused_swiglu: bool = False
    two_accumulators: bool = False
    prefix_search: bool = False
    grid_hint: bool = False
    slot_backward: bool = False


@dataclass(frozen=True)
class Scenario:
    """One call of the layer on a machine.

    Attributes:
        shape: T is the tokens of the largest rank.
        routing: by default drawn at random, uniformly.
        virtual: all ranks share one GPU and run one after another; peers' rows are local.
        save_context: forward also stores gate and up of macrobatch 0.
        mxfp8_wire: dispatch pulls quantised rows.
        switches: only for the upstream program.
        overrides: other values for constants of the program's calibration, by name.
        pairs: whether Hopper's CTAs work in pairs; None: where our launch takes that build.
        push: whether tasks of our program send their results themselves (``kernels_cute.push``), where rows pass
            the ring (``pushes``). None: as the kernels do by default, forward's on Hopper; on machines whose
            kernels do not have it True is what it would do there.

    Raises MokError and its kinds where the parts do not fit each other.
    """

    shape: Shape
    config: Config
    machine: Machine
    direction: Direction = "forward"
    precision: Precision = "bf16"
    program: Program = "ours"
    routing: Routing | None = None
    virtual: bool = False
    save_context: bool = False
    mxfp8_wire: bool = False
    switches: Switches = field(default_factory=Switches)
    overrides: Mapping[str, float] = field(default_factory=dict)
    pairs: bool | None = None
    push: bool | None = None

    def __post_init__(self) -> None:
        choices = (("direction", Direction), ("precision", Precision), ("program", Program))
        for name, kind in choices:
            value = getattr(self, name)
            if value not in get_args(kind):
                raise MokError(f"{name} must be one of {', '.join(get_args(kind))}", repr(value))
        if self.routing is None:
            object.__setattr__(self, "routing", drawn(self.shape, 0.0))
        expected = (self.shape.ep_size, self.shape.num_experts)
        if self.routes.counts.shape != expected:
            raise ShapeError(
                f"the routing must be for EP, E = {expected}", self.routes.counts.shape
            )
        machine = self.machine
        self.config.check(machine.arch, machine.num_sms, self.comm_sms)
        if self.program == "upstream":
            if self.push:
                raise MokError("only our program pushes from shared memory", self.program)
            if machine.arch == "sm_90a":
                raise MokError("upstream's program runs on Blackwell only", machine.name)
            if self.direction == "recompute":
                raise MokError("upstream's recompute is not modelled", self.direction)

    @property
    def routes(self) -> Routing:
        assert self.routing is not None
        return self.routing

    @property
    def direct(self) -> bool:
        """Rows are gathered in place; nothing passes the ring."""
        return self.program == "ours" and self.shape.ep_size == 1 and self.precision == "bf16"

    @property
    def pushes(self) -> bool:
        """Down, in backward dgrad gate+up, sends its rows itself. Where rows pass the ring."""
        if self.program != "ours" or self.direct or self.direction == "recompute":
            return False
        if self.push is not None:
            return self.push
        return self.direction == "forward" and forward_pushes(
            self.machine.arch, self.direct, self.config.push
        )

    @property
    def comm_sms(self) -> int:
        if self.direct:
            return 0
        config = self.config
        backward = self.direction == "backward"
        return config.bwd_num_comm_sms if backward else config.fwd_num_comm_sms

    @property
    def in_pairs(self) -> bool:
        """Whether two CTAs take two tasks a ticket, in step."""
        wanted = self.config.pairs if self.pairs is None else self.pairs
        if self.program != "ours" or wanted is False:
            return False
        machine, config = self.machine, self.config
        sizes = (machine.num_sms, config.reserved_sms, self.comm_sms)
        return works_in_pairs(machine.arch, *sizes, self.precision == "mxfp8")
