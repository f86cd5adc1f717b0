"""Runs the original MoK for ``upstream.py``, under an interpreter that has it and not this package.

Argument: a folder with request.json and inputs.pt. Leaves answer.json and output.pt there.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any


def load_beside(name: str) -> Any:
    """A module of this folder by its path: its package's name is taken here."""
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"mok_bench_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Upstream:
    """One rank of its functional layer."""

    def __init__(self, request: dict[str, Any], data: dict[str, Any]) -> None:
        import torch
        import torch.distributed as dist

        from mok import functional

        device = torch.device(request["device"])
        if device.type == "cuda":
            torch.cuda.set_device(device)
        address = f"tcp://{request['host']}:{request['port']}"
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=address, rank=request["rank"], world_size=request["size"],
        )  # fmt: skip
        self.functional: Any = functional
        self.data = data
        self.config = self.functional.MoKConfig()
        self.workspace = self.functional.create_workspace(
            self.config, dist.group.WORLD, device=device, num_local_tokens=len(data["x"]),
            hidden_size=data["x"].shape[1], topk=data["ids"].shape[1],
        )  # fmt: skip
        gate, up, down = data["gate"], data["up"], data["down"]
        self.for_forward: tuple[Any, ...] = (gate, up, down)
        self.for_backward: tuple[Any, ...] = (gate, up, down)
        if request["precision"] == "mxfp8":
            ops: Any = importlib.import_module("mok.ops")
            both = [ops.mxfp8_quantize(w, True, True) for w in (gate, up, down)]
            self.for_forward = tuple(q[:2] for q in both)
            self.for_backward = (both[0], both[1], both[2][2:])
        self.kept: Any = None

    def forward(self) -> Any:
        d = self.data
        schedule = self.functional.build_schedule(
            self.workspace, self.config, d["ids"], num_local_experts=len(d["gate"])
        )
        output, context = self.functional.forward(
            self.config, self.workspace, schedule, d["x"], d["router"], *d["shared"],
            *self.for_forward,
        )  # fmt: skip
        self.kept = schedule, context
        return output

    def backward(self) -> Any:
        d = self.data
        schedule, context = self.kept
        return self.functional.backward(
            self.config, self.workspace, schedule, context, d["dy"], d["x"], d["router"],
            *d["shared"], *self.for_backward,
        )  # fmt: skip


def main() -> None:
    folder = Path(sys.argv[1])
    request = json.loads((folder / "request.json").read_text())
    try:
        import torch

        data = torch.load(folder / "inputs.pt", map_location=request["device"])
        program = Upstream(request, data)
        timing = load_beside("iterations")
        found = timing.measure(program, request["warmup"], request["iterations"], request["device"])
        torch.save(program.forward(), folder / "output.pt")
        answer = {**found, "version": version()}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"[:500]}
    (folder / "answer.json").write_text(json.dumps(answer))


def version() -> str:
    try:
        return importlib.metadata.version("mok")
    except importlib.metadata.PackageNotFoundError:
        return "version unknown"


if __name__ == "__main__":
    main()
