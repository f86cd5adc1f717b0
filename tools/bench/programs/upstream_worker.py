"""Runs the original MoK for ``upstream.py``, under an interpreter that has it and not this package.

Arguments: a folder with inputs.pt, and a torch device. One line of JSON per request on standard
input, one per answer on standard output; whatever libraries print goes to standard error.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any


def load_timing() -> Any:
    """``timing.py`` of the bench by its path: its package's name is taken here."""
    path = Path(__file__).resolve().parents[1] / "timing.py"
    spec = importlib.util.spec_from_file_location("mok_bench_timing", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class Layer:
    """One layer with its inputs, and the two passes over it."""

    def __init__(self, folder: str, device: str) -> None:
        import torch
        import torch.distributed as dist

        from mok import functional

        self.functional: Any = functional
        on_gpu = device.startswith("cuda")
        if on_gpu:
            torch.cuda.set_device(torch.device(device))
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=0,
            world_size=1,
        )
        data = torch.load(Path(folder) / "inputs.pt", map_location=device)
        self.ids, self.sets = data["ids"], data["sets"]
        gate, down = data["gate"], data["down"]
        shared = (torch.zeros_like(gate[0]), torch.zeros_like(gate[0]), torch.zeros_like(down[0]))
        self.weights = (*shared, gate, data["up"], down)
        self.config = self.functional.MoKConfig()
        self.workspace = self.functional.create_workspace(
            self.config,
            dist.group.WORLD,
            device=torch.device(device),
            num_local_tokens=self.ids.shape[0],
            hidden_size=gate.shape[2],
            topk=self.ids.shape[1],
        )

    def forward(self, index: int) -> tuple[Any, Any, Any]:
        """(output, schedule, context)."""
        x, router_weights, _ = self.sets[index % len(self.sets)]
        schedule = self.functional.build_schedule(
            self.workspace, self.config, self.ids, num_local_experts=self.weights[3].shape[0]
        )
        output, context = self.functional.forward(
            self.config, self.workspace, schedule, x, router_weights, *self.weights
        )
        return output, schedule, context

    def both(self, index: int) -> tuple[Any, Any]:
        """(output, gradients of x, router weights, routed gate, up and down)."""
        output, schedule, context = self.forward(index)
        x, router_weights, dy = self.sets[index % len(self.sets)]
        gradients = self.functional.backward(
            self.config, self.workspace, schedule, context, dy, x, router_weights, *self.weights
        )
        return output, tuple(gradients[:5])


def serve(layer: Layer, device: str, answers: Any) -> None:
    """Answer requests until the input ends."""
    import torch

    timing = load_timing()
    clock = timing.CudaClock() if device.startswith("cuda") else timing.HostClock()
    for line in sys.stdin:
        request = json.loads(line)
        step = layer.forward if request["pass_name"] == "forward" else layer.both
        try:
            if request["do"] == "measure":
                regime = timing.Regime(**request["regime"])
                answer = vars(timing.measure(step, clock, regime))
            else:
                result = step(request["index"])
                clock.wait()
                found = {"output": result[0]}
                if request["pass_name"] == "both":
                    found["gradients"] = result[1]
                torch.save(found, request["file"])
                answer = {"ok": True}
        except Exception as error:
            answer = {"error": timing.reason_of(error)}
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    folder, device = sys.argv[1:3]
    try:
        layer = Layer(folder, device)
        version = importlib.metadata.version("mok")
    except importlib.metadata.PackageNotFoundError:
        version = "version unknown"
    except Exception as error:
        text = load_timing().reason_of(error)
        print(json.dumps({"error": text}), file=answers, flush=True)
        return
    print(json.dumps({"ready": True, "version": version}), file=answers, flush=True)
    serve(layer, device, answers)


if __name__ == "__main__":
    main()
