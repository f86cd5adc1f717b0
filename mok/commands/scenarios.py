"""The arguments that ``simulate``, ``plan`` and ``trace`` share, and what they mean."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mok.config import Config, Shape
from mok.errors import MokError, ShapeError
from mok.models import MODELS, get_model

if TYPE_CHECKING:
    from mok.tools.simulator.machine import Machine
    from mok.tools.simulator.routing import Routing
    from mok.tools.simulator.scenario import Scenario

PASSES = ("forward", "backward", "recompute")


def add_shape(parser: argparse.ArgumentParser) -> None:
    """What is computed, and on which machine."""
    parser.add_argument("--machine", default="h200", help="a known machine, or a .toml file")
    parser.add_argument("--model", default="kimi-k2.5", choices=MODELS)
    parser.add_argument(
        "--shape", metavar="T,H,I,E,K[,SHARED]", help="instead of --model, --tokens"
    )
    parser.add_argument("--tokens", type=int, default=8192, help="T of every rank (default 8192)")
    parser.add_argument("--ep", type=int, default=8, help="ranks (default 8)")
    parser.add_argument("--precision", default="bf16", choices=("bf16", "mxfp8"))
    parser.add_argument(
        "--routing",
        default="uniform",
        help="balanced, uniform (drawn), zipf:EXPONENT, or a .npy of expert ids [EP, T, K]",
    )
    parser.add_argument("--virtual", action="store_true", help="all ranks on one GPU, in turn")
    parser.add_argument(
        "--push", action=argparse.BooleanOptionalAction, default=None,
        help="tasks of our kernels send their results themselves, and comm SMs only dispatch, or not "
        "(default: as the kernels do, forward's on Hopper)",
    )  # fmt: skip


def add_config(parser: argparse.ArgumentParser) -> None:
    """The tunables; what is not given comes from ``Config.suggest``."""
    parser.add_argument("--minibatch", type=int, nargs="+", help="rows; several are a sweep")
    parser.add_argument("--macrobatch", type=int, help="rows of the ring")
    parser.add_argument("--comm-sms", type=int, nargs="+", help="several are a sweep")
    parser.add_argument("--multiplier", type=float, help="schedule_capacity_multiplier")


def shape_of(args: argparse.Namespace) -> Shape:
    if args.shape is None:
        return Shape.of_model(get_model(args.model), args.tokens, args.ep)
    try:
        sizes = [int(s) for s in args.shape.split(",")]
    except ValueError:
        sizes = []
    if len(sizes) not in (5, 6):
        raise ShapeError("--shape must be T,H,I,E,K or T,H,I,E,K,SHARED", repr(args.shape))
    tokens, hidden, inner, experts, topk = sizes[:5]
    shared = sizes[5] if len(sizes) == 6 and sizes[5] else None
    return Shape(tokens, hidden, inner, experts, topk, args.ep, shared)


def machine_of(args: argparse.Namespace) -> Machine:
    from mok.tools.simulator import load_machine

    return load_machine(args.machine)


def routing_of(args: argparse.Namespace, shape: Shape) -> Routing:
    from mok.tools.simulator import make_routing

    return make_routing(args.routing, shape)


def configs_of(args: argparse.Namespace, shape: Shape, machine: Machine) -> list[Config]:
    """One per combination of the values given."""
    suggested = Config.suggest(shape, machine, args.precision, args.push)
    ring = suggested.macrobatch_size // suggested.minibatch_size
    found = []
    for minibatch in args.minibatch or [suggested.minibatch_size]:
        if minibatch < 1:
            raise ShapeError("minibatch must be at least 1", minibatch)
        macrobatch = args.macrobatch
        if macrobatch is None:
            # The suggested ring's rows, in whole minibatches.
            macrobatch = minibatch * max(1, ring * suggested.minibatch_size // minibatch)
        for comm in args.comm_sms or [None]:
            # A zero is given, too: Config says that it is too small.
            forward = suggested.fwd_num_comm_sms if comm is None else comm
            backward = suggested.bwd_num_comm_sms if comm is None else comm
            multiplier = args.multiplier
            if multiplier is None:
                multiplier = suggested.schedule_capacity_multiplier
            found.append(Config(forward, backward, minibatch, macrobatch, multiplier))
    return found


def scenario(
    args: argparse.Namespace, shape: Shape, config: Config, machine: Machine, routing: Routing,
    direction: str, program: str,
) -> Scenario:  # fmt: skip
    from mok.tools.simulator import Scenario

    return Scenario(
        shape, config, machine, direction, args.precision, program,  # type: ignore[arg-type]
        routing=routing, virtual=args.virtual, save_context=direction == "forward",
        push=args.push if program == "ours" else None,
    )  # fmt: skip


def pushed(passes: Iterable[str]) -> str:
    """For a title: which passes of ours push their results."""
    names = " and ".join(dict.fromkeys(passes))
    return f", results of {names} pushed by tasks of ours" if names else ""


def described(shape: Shape, machine: Machine, routing: Routing) -> dict[str, Any]:
    """The head of a document."""
    return {
        "machine": machine.name,
        "machine_title": machine.title,
        "shape": {
            "tokens": shape.num_tokens,
            "hidden": shape.hidden_size,
            "intermediate": shape.intermediate_size,
            "experts": shape.num_experts,
            "topk": shape.topk,
            "ep": shape.ep_size,
            "shared_intermediate": shape.shared_intermediate_size,
        },
        "routing": routing.name,
    }


def passes_of(name: str) -> tuple[str, ...]:
    """The passes that ``--pass`` names."""
    if name == "all":
        return PASSES
    if name not in PASSES:
        raise MokError(f"the pass must be all or one of {', '.join(PASSES)}", repr(name))
    return (name,)
