"""The ladder: which rungs there are, in which order, what each proves and how long it may take.

This module is cheap to import: a rung's work lies in the module that ``work`` names, and runs in a process
of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from mok.errors import MokError

BLACKWELL = ("sm_100a", "sm_103a")
EVERYWHERE = ("sm_90a", *BLACKWELL)
HERE = "mok.tools.bringup"


@dataclass(frozen=True)
class Rung:
    """One step.

    Attributes:
        name: for the command line.
        title: for people.
        proves: what works once it has passed.
        work: "module:function" taking a ``Context`` and returning what was found, for people.
        limit_s: seconds it may take on a GPU, compilation included; emulated: ``emulated_limit_s``.
        archs: where it exists.
        ranks: how it starts: "one" process, "host" (a process per GPU of this host), or "rack" (only
            where torchrun or Slurm has started ``mok bringup`` itself).
    """

    name: str
    title: str
    proves: str
    work: str
    limit_s: int = 120
    emulated_limit_s: int = 300
    archs: tuple[str, ...] = EVERYWHERE
    ranks: str = "one"


def _work(module: str, function: str) -> str:
    return f"{HERE}.{module}:{function}"


RUNGS = (
    Rung(
        "driver",
        "driver and kernel language",
        "the pinned packages are here, the driver is new enough, and a kernel compiles for this GPU",
        _work("single", "driver"),
    ),
    Rung(
        "copy",
        "one copy kernel",
        "our cubins load and run; memory is where we think it is",
        _work("single", "copy"),
    ),
    Rung(
        "wgmma",
        "one wgmma tile",
        "TMA loads, mbarriers and wgmma descriptors",
        _work("single", "wgmma"),
        archs=("sm_90a",),
    ),
    Rung(
        "tile-1cta",
        "one tcgen05 tile, cta_group::1",
        "TMA loads, mbarriers, tensor memory, tcgen05 descriptors",
        _work("single", "tile_1cta"),
        archs=BLACKWELL,
    ),
    Rung(
        "tile-2cta",
        "one tcgen05 tile, cta_group::2",
        "CTA pairs: both CTAs' shared memory in one MMA, multicast commits, cluster barriers",
        _work("single", "tile_2cta"),
        archs=BLACKWELL,
    ),
    Rung(
        "accumulator",
        "an accumulator stored and reloaded",
        "tcgen05.ld and tcgen05.st (Hopper: registers); the products go on where they ended",
        _work("single", "accumulator"),
    ),
    Rung(
        "block-scaled",
        "one block-scaled tile",
        "scales by tcgen05.cp and the MXFP8 MMA (Hopper: quantised and expanded in software)",
        _work("single", "block_scaled"),
    ),
    Rung(
        "loop",
        "the task loop",
        "launch control gives every cluster's right to draw away once (Hopper: tickets)",
        _work("single", "loop"),
    ),
    Rung(
        "loop-competing",
        "the task loop beside another grid",
        "clusters give way to a grid of higher priority, and the rest of the work is done later",
        _work("single", "loop_competing"),
    ),
    Rung(
        "assumptions",
        "what we assume of the tensor cores",
        "accumulation has the same bits for every tile, cta_group, row order and reload",
        _work("single", "assumptions"),
        limit_s=240,
    ),
    Rung(
        "forward",
        "EP 1 forward, BF16",
        "the forward kernel: exact on integers, and within the limit on a model's shape",
        _work("layer", "forward"),
        limit_s=300,
        emulated_limit_s=600,
    ),
    Rung(
        "backward",
        "EP 1 backward, BF16",
        "the backward kernel: every gradient exact on integers, and within the limit",
        _work("layer", "backward"),
        limit_s=300,
        emulated_limit_s=900,
    ),
    Rung(
        "bits",
        "the same bits whatever the tuning",
        "no tunable, and no number of virtual ranks, changes a bit of output or gradients",
        _work("layer", "bits"),
        limit_s=300,
        emulated_limit_s=900,
    ),
    Rung(
        "forward-mxfp8",
        "EP 1 forward, MXFP8",
        "quantised dispatch and block-scaled GEMMs in the kernel",
        _work("layer", "forward_mxfp8"),
        limit_s=300,
        emulated_limit_s=600,
    ),
    Rung(
        "backward-mxfp8",
        "EP 1 backward, MXFP8",
        "every gradient of the MXFP8 layer against the quantised reference",
        _work("layer", "backward_mxfp8"),
        limit_s=300,
        emulated_limit_s=900,
    ),
    Rung(
        "posix-handle",
        "memory shared by file descriptor",
        "ranks in several processes of this host can map each other's memory",
        _work("handles", "posix"),
    ),
    Rung(
        "fabric-handle",
        "memory shared by fabric handle",
        "ranks on several hosts can map each other's memory: IMEX works",
        _work("handles", "fabric"),
    ),
    Rung(
        "tray",
        "EP over the GPUs of this host",
        "forward and backward with a process per GPU: exact, and with the bits of one rank",
        _work("ranks", "layer"),
        limit_s=420,
        emulated_limit_s=900,
        ranks="host",
    ),
    Rung(
        "rack",
        "EP over all hosts",
        "the same over NVLink between hosts, through fabric handles",
        _work("ranks", "layer"),
        limit_s=600,
        emulated_limit_s=900,
        ranks="rack",
    ),
)


def ladder(arch: str, launched: bool) -> list[Rung]:
    """The rungs of an architecture, bottom first.

    ``launched``: torchrun started this process, one per GPU; then only what needs all of them is left.
    """
    here = [rung for rung in RUNGS if arch in rung.archs]
    if launched:
        return [rung for rung in here if rung.ranks == "rack" or rung.name == "fabric-handle"]
    return [rung for rung in here if rung.ranks != "rack"]


def part(rungs: list[Rung], first: str | None, last: str | None) -> list[Rung]:
    """The rungs from ``first`` to ``last``, by name.

    Raises:
        MokError: no such rung here.
    """
    names = [rung.name for rung in rungs]
    for name in (first, last):
        if name is not None and name not in names:
            raise MokError("the rung must be one of this ladder", repr(name), ", ".join(names))
    begin = names.index(first) if first else 0
    end = names.index(last) + 1 if last else len(names)
    if begin >= end:
        raise MokError("the first rung must not be above the last", f"{first} to {last}")
    return rungs[begin:end]
