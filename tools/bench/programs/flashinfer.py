"""FlashInfer's Hopper BF16 megakernel (``Sm90MegaMoEBf16Kernel`` of its ``moe_ep`` folder) at EP 1.

Only that folder is imported: FlashInfer's own ``__init__`` would import and build everything else.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mok.tools.bench.programs.base import Options, Program, Unavailable, interleaved
from mok.tools.bench.timing import best_of, reason_of
from mok.tools.bench.work import Work

PACKAGE = "flashinfer.moe_ep.kernel_src.sm90.pull_style_cutedsl_megakernel"
GATE_UP_BLOCK = 8  # rows of gate, then of up, in FC1's weights
HIDDEN_MULTIPLE = 256

_PLAIN = {"swap_ab": False, "cluster_shape_mnk": (2, 1, 1)}
# Its tuner's knobs, on top of the table that it ships; {} is the table as shipped.
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"group_hint": 264},
    {"group_hint": 1 << 20},
    {**_PLAIN, "pingpong": False, "mma_tiler_mnk": (64, 256, 64)},
    {**_PLAIN, "pingpong": True, "mma_tiler_mnk": (64, 128, 64)},
)


def find_folder(path: str | None) -> Path:
    """The folder ``flashinfer`` that holds ``moe_ep``.

    Args:
        path: that folder, the one above it, or ``moe_ep`` itself; None: it is installed.

    Raises:
        Unavailable: it is not there.
    """
    candidates: list[Path] = []
    if path:
        given = Path(path).expanduser().resolve()
        candidates = [given, given / "flashinfer", given.parent]
    else:
        spec = importlib.util.find_spec("flashinfer")  # finds it without importing it
        for place in (spec.submodule_search_locations or []) if spec else []:
            candidates.append(Path(place))
    inside = Path(*PACKAGE.split(".")[1:]) / "__init__.py"
    for folder in candidates:
        if (folder / inside).is_file():
            return folder
    where = f"in {path}" if path else "installed: give its folder with --peers flashinfer=PATH"
    raise Unavailable(f"flashinfer/{inside.parent} is not {where}")


def load(path: str | None) -> Any:
    """Import the megakernel's package past FlashInfer's own ``__init__``.

    Raises:
        Unavailable: it cannot be imported, with the reason.
    """
    if PACKAGE in sys.modules:
        return sys.modules[PACKAGE]
    folder = find_folder(path)
    os.environ["MEGA_NO_DIST"] = "1"  # one rank: plain memory instead of NVSHMEM
    for name, place in (("flashinfer", folder), ("flashinfer.moe_ep", folder / "moe_ep")):
        if name not in sys.modules:
            stub = types.ModuleType(name)
            stub.__path__ = [str(place)]
            sys.modules[name] = stub
    try:
        return importlib.import_module(PACKAGE)
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        raise Unavailable(reason_of(error)) from error


class FlashInferProgram(Program):
    """One launch: dispatch, both projections, combine; the sum over k in its own tail kernel."""

    passes = ("forward",)
    packages = ("flashinfer-python",)
    needs_gpu = True

    def __init__(self, name: str, work: Work, options: Options) -> None:
        super().__init__(name, work, options)
        shape = work.bench.shape
        if shape.hidden_size % HIDDEN_MULTIPLE:
            raise Unavailable(f"H must be a multiple of {HIDDEN_MULTIPLE}")
        self.library = load(options.paths.get("flashinfer"))
        # Contraction contiguous: [E, H, 2I] and [E, I, H] as transposed views.
        self.fc1 = interleaved(work.gate, work.up, GATE_UP_BLOCK).transpose(1, 2)
        self.fc2 = work.down.transpose(1, 2)
        self.buffers: list[Any] = []
        before = torch.cuda.memory_allocated(work.device) if work.device.type == "cuda" else 0
        try:
            self._choose()
        except (RuntimeError, ValueError, TypeError, ImportError, AttributeError) as error:
            raise Unavailable(reason_of(error)) from error
        if work.device.type == "cuda":
            self.persistent_bytes = torch.cuda.memory_allocated(work.device) - before

    def _choose(self) -> None:
        """Build the variants, time each once, keep the fastest."""
        built: list[tuple[dict[str, Any], Any, list[Callable[[], None]]]] = []
        configs: list[Any] = []
        for knobs in VARIANTS[: max(self.options.variants - 1, 1)]:
            buffer = self._buffer(knobs)
            config = getattr(buffer._frontend, "config", knobs)
            if config in configs:  # the table already says so for this T
                buffer.destroy()
                continue
            self.options.say(f"flashinfer: compiling {knobs or 'as shipped'}")
            configs.append(config)
            try:
                built.append((knobs, buffer, self._thunks(buffer)))
            except Exception as error:
                buffer.destroy()
                if not knobs:
                    raise RuntimeError(reason_of(error)) from error
        fastest, _ = best_of([thunks[0] for _, _, thunks in built], self.options.clock)
        for number, (_, buffer, _) in enumerate(built):
            if number != fastest:
                buffer.destroy()
        knobs, buffer, self.thunks = built[fastest]
        self.buffers = [buffer]
        self.result: Tensor = buffer.output_activation
        self.note = "as shipped" if not knobs else ", ".join(f"{k} {v}" for k, v in knobs.items())

    def _buffer(self, knobs: dict[str, Any]) -> Any:
        s = self.work.bench.shape
        return self.library.get_symm_buffer_for_hopper_bf16_mega_moe(
            s.num_experts,
            s.num_tokens,
            s.topk,
            s.hidden_size,
            s.intermediate_size,
            0,
            1,
            knobs=dict(knobs) or None,
        )

    def _thunks(self, buffer: Any) -> list[Callable[[], None]]:
        """A prepared launch for each input set; x is read where it lies."""
        return [
            buffer._frontend.make_launch_thunk(
                self.library.MegaMoEHopperBf16Inputs(
                    activation=s.x,
                    topk_idx=self.work.ids,
                    topk_weights=s.router_weights,
                    fc1_weight=self.fc1,
                    fc2_weight=self.fc2,
                    output_activation=buffer.output_activation,
                )
            )
            for s in self.work.sets
        ]

    def forward(self, index: int) -> Tensor:
        self.thunks[index % len(self.thunks)]()
        return self.result

    def close(self) -> None:
        for buffer in self.buffers:
            buffer.destroy()
        self.buffers, self.thunks = [], []
