"""Upstream MoK over ranks: each rank's share goes to another interpreter, since the package has our name.

The worker of a rank joins the others' in a process group of its own, runs all iterations at once, and
answers with their times. Limits: mixture-of-kittens' own checks (EP sizes, multiples of 256, one shared expert
as wide as the routed ones).
"""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mok.tools.bench.published.share import Share, Unavailable

EP_SIZES = (1, 4, 8, 16, 32, 64)
MULTIPLE, SMALLEST_T = 256, 512
LIMIT_S = 900.0  # of everything: it may compile


def why_not(share: Share, interpreter: str | None) -> str:
    """What keeps upstream from this layer; "" for nothing."""
    layer = share.layer
    if not interpreter:
        return "give an interpreter that has it: --peers upstream=PYTHON"
    sizes = (layer.tokens, layer.hidden, layer.intermediate)
    if layer.ep not in EP_SIZES:
        return f"it has kernels for EP {', '.join(map(str, EP_SIZES))}, not {layer.ep}"
    if any(size % MULTIPLE for size in sizes) or layer.tokens < SMALLEST_T:
        return f"T, H and I must be multiples of {MULTIPLE}, T at least {SMALLEST_T}"
    if layer.shared != layer.intermediate:
        return "it needs one shared expert as wide as the routed ones"
    return ""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])


def times(
    share: Share, precision: str, warmup: int, iterations: int, interpreter: str | None,
    host: str, everyone: Any = None,
) -> tuple[dict[str, list[float]], torch.Tensor, str]:  # fmt: skip
    """(milliseconds of each iteration by pass, output, version); collective.

    Args:
        host: of rank 0, as other ranks reach it.
        everyone: the torch group whose ranks take part, on the host (gloo).

    Raises:
        Unavailable: it cannot do this layer, or did not answer.
    """
    reason = why_not(share, interpreter)
    if reason:
        raise Unavailable(reason)
    assert interpreter is not None
    port: list[Any] = [free_port()]
    if dist.is_initialized() and share.layer.ep > 1:
        dist.broadcast_object_list(port, src=0, group=everyone)
    with tempfile.TemporaryDirectory(prefix="mok-bench-") as name:
        folder = Path(name)
        request = {
            "rank": share.rank, "size": share.layer.ep, "host": host, "port": port[0],
            "device": str(share.device), "precision": precision, "warmup": warmup,
            "iterations": iterations,
        }  # fmt: skip
        (folder / "request.json").write_text(json.dumps(request))
        torch.save(
            {
                name: getattr(share, name)
                for name in ("x", "dy", "ids", "router", "gate", "up", "down", "shared")
            },
            folder / "inputs.pt",
        )
        worker = Path(__file__).with_name("upstream_worker.py")
        try:
            done = subprocess.run(
                [interpreter, "-P", str(worker), name], cwd=name, capture_output=True, text=True,
                timeout=LIMIT_S,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unavailable(f"{interpreter}: {error}") from error
        answer = folder / "answer.json"
        if not answer.exists():
            raise Unavailable(
                f"its process ended with code {done.returncode}: {done.stderr[-300:]}"
            )
        found = json.loads(answer.read_text())
        if "error" in found:
            raise Unavailable(found["error"])
        output = torch.load(folder / "output.pt", map_location=share.device)
    return {p: found[p] for p in ("forward", "backward")}, output, found["version"]
