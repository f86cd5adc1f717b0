"""The original MoK, in a Python of its own: it has this package's name.

The other interpreter runs ``upstream_worker.py``. Requests and answers are lines of JSON over a
pipe; tensors travel once, through files. Rounds interleave as with every other program: while the
worker measures, this process waits.
"""

from __future__ import annotations

import json
import select
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mok.tools.bench.programs.base import Options, Program, Unavailable
from mok.tools.bench.timing import Clock, Regime, Step, Window
from mok.tools.bench.work import Work

START_S = 600.0  # it may compile
ANSWER_S = 120.0
MULTIPLE = 256  # of T, H and I
SMALLEST_T = 512


class UpstreamProgram(Program):
    """Its functional layer at EP 1, with a shared expert of zeros, which it cannot do without."""

    passes = ("forward", "both")
    remote = True

    def __init__(self, name: str, work: Work, options: Options) -> None:
        super().__init__(name, work, options)
        interpreter = options.paths.get("upstream")
        if not interpreter:
            raise Unavailable("give an interpreter that has it: --peers upstream=PYTHON")
        s = work.bench.shape
        sizes = (s.num_tokens, s.hidden_size, s.intermediate_size)
        if any(size % MULTIPLE for size in sizes) or s.num_tokens < SMALLEST_T:
            raise Unavailable(
                f"T, H and I must be multiples of {MULTIPLE}, T at least {SMALLEST_T}"
            )
        self.folder = tempfile.TemporaryDirectory(prefix="mok-bench-")
        self._write_inputs()
        worker = Path(__file__).with_name("upstream_worker.py")
        try:
            self.process = subprocess.Popen(
                [interpreter, "-P", str(worker), self.folder.name, str(work.device)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=self.folder.name,  # away from this checkout's own package
            )
        except OSError as error:
            self.folder.cleanup()
            raise Unavailable(f"{interpreter}: {error}") from error
        try:
            answer = self._answer(START_S)
        except RuntimeError as error:
            self.close()
            raise Unavailable(str(error)) from error
        self.note = f"{answer['version']}, in its own process, with a shared expert of zeros"

    def _write_inputs(self) -> None:
        work = self.work
        tensors: dict[str, Any] = {
            "ids": work.ids,
            "gate": work.gate,
            "up": work.up,
            "down": work.down,
            "sets": [(s.x, s.router_weights, s.dy) for s in work.sets],
        }
        torch.save(tensors, Path(self.folder.name) / "inputs.pt")

    def _answer(self, seconds: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        if not ready:
            raise RuntimeError(f"no answer within {seconds:g} s")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"its process ended with code {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(str(answer["error"]))
        return answer

    def _ask(self, seconds: float = ANSWER_S, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._answer(seconds)

    def _run(self, pass_name: str, index: int) -> dict[str, Any]:
        file = str(Path(self.folder.name) / "result.pt")
        self._ask(do="run", pass_name=pass_name, index=index, file=file)
        found: dict[str, Any] = torch.load(file, map_location=self.work.device)
        return found

    def forward(self, index: int) -> Tensor:
        found: Tensor = self._run("forward", index)["output"]
        return found

    def forward_training(self, index: int) -> tuple[Tensor, Any]:
        found = self._run("both", index)
        return found["output"], found["gradients"]

    def backward(self, index: int, saved: Any, keep: bool = False) -> Any:
        return saved  # both were done at once

    def gradients(self, raw: Any) -> dict[str, Tensor]:
        names = ("x", "router_weights", "gate", "up", "down")
        return dict(zip(names, raw, strict=True))

    def window(self, pass_name: str, step: Step, clock: Clock, regime: Regime) -> Window:
        answer = self._ask(
            ANSWER_S + 1e-2 * (regime.warm_ms + regime.run_ms),
            do="measure",
            pass_name=pass_name,
            regime=vars(regime),
        )
        return Window(answer["calls_ms"], answer["calls"], answer["begin"], answer["end"])

    def close(self) -> None:
        if self.process.poll() is None:
            assert self.process.stdin is not None
            try:
                self.process.stdin.close()  # the worker ends where its input does
                self.process.wait(timeout=20)
            except (OSError, subprocess.TimeoutExpired):
                self.process.kill()
                self.process.wait()
        self.folder.cleanup()
