"""Train a byte-level MoE language model on real text, with MoK's layer in BF16 and MXFP8 and with torch's.

    python -m mok.tools.train_tiny_lm --seeds 0 1 2 --repeat --jobs 8 --out results/

Writes ``curves.json``, ``curves.png`` and a checkpoint per run. A call that is started again goes on where
the last one stopped. The exit code is 0 if every comparison that the runs allow holds:

* the mean of the last losses of "mok" differs from torch's by no more than torch's own spread over its seeds;
* that of "mxfp8" is within 2 % of that of "mok", over the same seeds;
* a run with frozen experts ends at least 3 % worse than "torch" with the same seed;
* with ``--repeat``, a second run of a seed has the same loss bits at every step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mok.errors import DeviceError, MissingDependencyError, MokError
from mok.tools.train.model import LAYERS, OURS, ByteLM, Size, corpus

LAST = 50  # steps whose mean loss is compared
FROZEN_WORSE = 1.03
MXFP8_AWAY = 0.02
COLORS = {"mok": "#1b6ca8", "mxfp8": "#2f9e6e", "torch": "#8a8a8a", "frozen": "#c94f4f"}
SAVE_EVERY = 100


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run. ``repeat`` numbers runs that must have the same bits."""

    layer: str
    seed: int
    steps: int
    size: Size = Size()  # noqa: RUF009 (frozen)
    rate: float = 1e-3
    repeat: int = 0

    @property
    def name(self) -> str:
        return f"{self.layer}-{self.seed}" + (f"-again{self.repeat}" if self.repeat else "")


def windows(text: Tensor, run: Run, step: int, device: torch.device) -> Tensor:
    """The batch of a step, a function of seed and step alone: int64 [batch, context + 1]."""
    rng = torch.Generator().manual_seed(run.seed * 1_000_003 + step)
    length = run.size.context + 1
    starts = torch.randint(len(text) - length, (run.size.batch, 1), generator=rng)
    return text[starts + torch.arange(length)].long().to(device)


def train(
    run: Run, device: torch.device, folder: Path, tell: Callable[[int, float], None]
) -> list[float]:
    """Loss of every step. Goes on from the run's checkpoint in ``folder``, if there is one."""
    torch.manual_seed(run.seed)
    text = corpus()
    model = ByteLM(run.size, run.layer, device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=run.rate, betas=(0.9, 0.95))
    losses: list[float] = []
    path = folder / f"{run.name}.pt"
    facts = json.dumps(dataclasses.asdict(dataclasses.replace(run, steps=0)), sort_keys=True)
    if path.exists():
        saved = torch.load(path, map_location=device, weights_only=True)
        if saved["run"] == facts:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            losses = saved["losses"]
    for step in range(len(losses), run.steps):
        for group in optimizer.param_groups:
            group["lr"] = run.rate * min(1.0, (step + 1) / 50)
        loss = model.loss(windows(text, run, step, device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(loss.item())
        tell(step + 1, losses[-1])
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == run.steps:
            _save(
                path,
                {
                    "run": facts,
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "losses": losses,
                },
            )
    return losses[: run.steps]


def _save(path: Path, state: dict[str, Any]) -> None:
    """Replace a checkpoint in one step, so that a stop leaves the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    torch.save(state, part)
    os.replace(part, path)


def end(losses: Sequence[float]) -> float:
    """Mean of the last losses."""
    last = losses[-LAST:]
    return sum(last) / len(last)


def compare(runs: Sequence[tuple[Run, Sequence[float]]]) -> list[dict[str, Any]]:
    """The comparisons of the module's first lines, as far as these runs allow them."""
    ends: dict[str, dict[int, float]] = {}
    for run, losses in runs:
        if not run.repeat:
            ends.setdefault(run.layer, {})[run.seed] = end(losses)
    found: list[dict[str, Any]] = []

    def check(name: str, value: float, limit: float, ok: bool) -> None:
        found.append({"name": name, "value": value, "limit": limit, "ok": ok})

    def means(one: str, other: str) -> tuple[float, float] | None:
        """Of both layers, over the seeds that both have."""
        mine, theirs = ends.get(one, {}), ends.get(other, {})
        seeds = sorted(mine.keys() & theirs.keys())
        if not seeds:
            return None
        sums = sum(mine[seed] for seed in seeds), sum(theirs[seed] for seed in seeds)
        return sums[0] / len(seeds), sums[1] / len(seeds)

    if len(ends.get("torch", {})) > 1 and (pair := means("mok", "torch")):
        spread = max(ends["torch"].values()) - min(ends["torch"].values())
        away = abs(pair[0] - pair[1])
        name = "mok's distance from torch, in losses; limit: torch's spread"
        check(name, away, spread, away <= spread)
    if pair := means("mxfp8", "mok"):
        away = abs(pair[0] / pair[1] - 1)
        name = "MXFP8's distance from BF16, as a share of the loss"
        check(name, away, MXFP8_AWAY, away <= MXFP8_AWAY)
    if pair := means("frozen", "torch"):
        ratio = pair[0] / pair[1]
        check("frozen experts' loss over torch's", ratio, FROZEN_WORSE, ratio >= FROZEN_WORSE)
    first = {(run.layer, run.seed): losses for run, losses in runs if not run.repeat}
    for run, losses in runs:
        if run.repeat:
            before = first[run.layer, run.seed]
            different = sum(a != b for a, b in zip(losses, before, strict=True))
            check(f"steps of {run.name} with other bits", different, 0, different == 0)
    return found


def draw(runs: Sequence[tuple[Run, Sequence[float]]], title: str, path: Path) -> Path:
    """The loss curves, means over 20 steps.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingDependencyError(
            "loss curves need matplotlib", str(error), "pip install 'mok-cutedsl[plot]'"
        ) from error
    figure, panel = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    labelled = set()
    for run, losses in runs:
        smooth = torch.tensor(losses).unfold(0, min(20, len(losses)), 1).mean(-1)
        first = len(losses) - len(smooth) + 1
        label = None if run.layer in labelled else run.layer
        labelled.add(run.layer)
        steps = range(first, first + len(smooth))
        panel.plot(steps, smooth, color=COLORS[run.layer], label=label, lw=1)
    panel.set(xlabel="step", ylabel="loss, nats per byte", title=title)
    panel.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def runs_of(args: argparse.Namespace) -> list[Run]:
    """What the arguments ask for, the slowest first. One seed shows what frozen experts cost."""
    size = Size(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Size)})
    runs = [
        Run(layer, seed, args.steps, size)
        for layer in sorted(args.layers, key=lambda name: name in OURS)
        for seed in args.seeds[: 1 if layer == "frozen" else None]
    ]
    if args.repeat:
        layers = [layer for layer in args.layers if layer in OURS] or args.layers[:1]
        runs += [Run(layer, args.seeds[0], args.steps, size, repeat=1) for layer in layers]
    return runs


def train_beside(
    runs: Sequence[Run], argv: Sequence[str], jobs: int, say: Callable[[str], None]
) -> None:
    """Train every run in a process of its own, ``jobs`` at once; their checkpoints have the losses."""

    def one(run: Run) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mok.tools.train_tiny_lm", *argv, "--only", run.name]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    with ThreadPoolExecutor(jobs) as pool:
        started = {pool.submit(one, run): run for run in runs}
        for future in as_completed(started):
            done, name = future.result(), started[future].name
            words = (done.stderr.strip().splitlines() or ["no word"])[-1]
            say(f"{name}: " + (f"code {done.returncode}: {words}" if done.returncode else "done"))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--repeat", action="store_true", help="run our layers' first seed twice")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, each in its own process")
    parser.add_argument("--only", metavar="RUN", help="train this run, such as mok-0, and no more")
    parser.add_argument("--out", type=Path, required=True, help="folder for curves and checkpoints")
    for field in dataclasses.fields(Size):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    from rich.console import Console
    from rich.progress import Progress

    args, console = parse(argv), Console()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS with the same bits
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch's own layer adds with atomics
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and any(layer in OURS for layer in args.layers):
        raise DeviceError("training with MoK's layer needs a GPU", "none", "Use --layers torch")
    todo = runs_of(args)
    if args.only:
        todo = [run for run in todo if run.name == args.only]
        if not todo:
            raise MokError("--only needs the name of a run", args.only)
    elif args.jobs > 1:
        given = sys.argv[1:] if argv is None else argv
        train_beside(todo, given, args.jobs, console.print)
    done: list[tuple[Run, list[float]]] = []
    with Progress(console=console) as progress:
        for run in todo:
            bar = progress.add_task(run.name, total=run.steps)

            def tell(step: int, loss: float, bar: Any = bar, name: str = run.name) -> None:
                progress.update(bar, completed=step, description=f"{name} {loss:.3f}")

            done.append((run, train(run, device, args.out, tell)))
            progress.update(bar, completed=run.steps)
    return 0 if args.only else report(done, device, args.out, console)


def report(
    done: Sequence[tuple[Run, list[float]]], device: torch.device, out: Path, console: Any
) -> int:
    """Write curves and verdicts, print them; 0 if all hold."""
    from rich.table import Table

    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    run = done[0][0]
    checks = compare(done)
    document = {
        "device": name,
        "torch": torch.__version__,
        "steps": run.steps,
        "size": dataclasses.asdict(run.size),
        "runs": [
            {"layer": r.layer, "seed": r.seed, "repeat": r.repeat, "end": end(l), "losses": l}
            for r, l in done
        ],
        "checks": checks,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "curves.json").write_text(json.dumps(document) + "\n")
    draw(done, f"Byte-level MoE language model, {name}", out / "curves.png")
    table = Table("run", "loss at the end")
    for run, losses in done:
        table.add_row(run.name, f"{end(losses):.4f}")
    console.print(table)
    for check in checks:
        mark = "[green]ok[/]" if check["ok"] else "[red]WRONG[/]"
        console.print(f"{check['name']}: {check['value']:.4g} (limit {check['limit']:.4g}) {mark}")
    return 0 if all(check["ok"] for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
