"""The programs that ``mok bench`` knows, by name; each adapter is imported when it is asked for."""

from __future__ import annotations

import importlib

from mok.errors import MokError
from mok.tools.bench.programs.base import Options, Program, Unavailable
from mok.tools.bench.work import Work

PROGRAMS = {
    "mok": "ours:MokProgram",
    "mok-compact": "ours:MokProgram",
    "mok-mxfp8": "ours:MokProgram",
    "torch": "torch_grouped:TorchProgram",
    "sonic": "sonic:SonicProgram",
    "flashinfer": "flashinfer:FlashInferProgram",
    "upstream": "upstream:UpstreamProgram",
    "cublas": "cublas:CublasProgram",
}
DEFAULT_PEERS = ("torch", "sonic", "flashinfer", "cublas")


def program_class(name: str) -> type[Program]:
    """The adapter called ``name`` ("mok-ep4" and "mok-mxfp8-ep4" are ours on four virtual ranks).

    Raises:
        MokError: no such program.
    """
    place = PROGRAMS.get(name.partition("-ep")[0])
    if place is None:
        raise MokError("the program must be a known one", repr(name), f"Known: {list(PROGRAMS)}")
    module, _, attribute = place.partition(":")
    found: type[Program] = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    return found


def make_program(name: str, work: Work, options: Options) -> Program:
    """Set a program up for a shape.

    Raises:
        Unavailable: it is not installed, cannot run here, or not this shape; the message says why.
    """
    program = program_class(name)
    if program.needs_gpu and work.device.type != "cuda":
        raise Unavailable("needs a GPU")
    return program(name, work, options)


__all__ = ["DEFAULT_PEERS", "PROGRAMS", "Options", "Program", "Unavailable", "make_program"]
