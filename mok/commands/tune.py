"""``mok tune``: search the tunables of a shape on this GPU and remember the fastest."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mok.errors import DeviceError, MokError
from mok.models import MODELS

if TYPE_CHECKING:
    from mok.config import Config, Shape
    from mok.tools.bench.shapes import BenchShape
    from mok.tools.bench.timing import Clock, Deadline, Regime

NAME = "tune"
HELP = "search the tunables of a shape on this GPU within a time budget, and remember the fastest"

PASSES = ("forward", "both")


def configure(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--shape", metavar="T,H,I,E,K", help="T tokens of all ranks together")
    what.add_argument("--model", choices=MODELS, help="a public model's layer")
    parser.add_argument("--tokens", type=int, default=16384, help="T, with --model")
    parser.add_argument("--ep", type=int, default=1, help="virtual ranks")
    parser.add_argument(
        "--pass", dest="pass_name", choices=PASSES, default="both", help="what is made fast"
    )
    parser.add_argument("--budget-s", type=float, default=120.0, help="seconds of search")
    parser.add_argument("--warm-ms", type=float, default=60.0, help="run before each window")
    parser.add_argument("--run-ms", type=float, default=120.0, help="length of a window")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry-run", action="store_true", help="do not remember the result")
    parser.add_argument(
        "--exhaustive",
        metavar="FILE",
        help="time a grid of all tunables on six layers, at one rank and on a virtual ring, and what "
        "mok plan recommends beside it; every time is a line of FILE",
    )
    parser.add_argument("--forget", action="store_true", help="forget this shape's result instead")


def run(args: argparse.Namespace, progress: Console) -> dict[str, Any]:
    from mok.backends import choose_backend
    from mok.tools.bench.timing import CudaClock, Deadline, Regime
    from mok.tune import Device, cache_path, forget

    backend = choose_backend()
    backend.announce(progress.out)
    if backend.info is None or backend.arch is None:
        raise DeviceError(
            "tuning needs a GPU with kernels", backend.note or backend.name, "Run it where one is"
        )
    if args.exhaustive:
        return exhaustive(args, backend, progress)
    bench = wanted_shape(args)
    shape = per_rank_shape(bench, args.ep)
    device = Device(backend.info.name, backend.info.num_sms, backend.arch, virtual=args.ep > 1)
    if args.forget:
        found = forget(shape, device)
        return {"device": device.name, "forgotten": found, "path": str(cache_path()), "rows": []}
    regime = Regime(args.warm_ms, args.run_ms)
    trial = Trials(
        bench, backend.device, args.ep, args.pass_name, CudaClock(backend.device), regime, args.seed
    )
    try:
        return tune(args, trial, shape, device, Deadline(args.budget_s), progress)
    finally:
        trial.close()


def exhaustive(args: argparse.Namespace, backend: Any, progress: Console) -> dict[str, Any]:
    """``mok plan``'s tunables against the best of a grid, within the budget."""
    import os
    from pathlib import Path

    from mok.tools.bench.grid import Plans, all_cases, run_grid
    from mok.tools.bench.timing import CudaClock
    from mok.tools.bench.versions import today
    from mok.tools.bench.warm import Compilation, layer_specs
    from mok.tools.simulator.suggest import machine_for

    info = backend.info
    machine = machine_for(backend.arch, info.num_sms)
    if machine is None:
        raise DeviceError("the plan needs a known machine", f"{info.name}, {info.num_sms} SMs")
    plans = Plans(all_cases(), machine.name, max(1, min(12, (os.cpu_count() or 2) - 2)))
    try:
        specs = [s for direct in (True, False) for s in layer_specs(backend.arch, direct, True)]
        Compilation(specs).wait()
        cases = run_grid(
            backend.device, info.num_sms, backend.arch, CudaClock(backend.device), plans,
            args.budget_s, Path(args.exhaustive),
            lambda text: progress.print(text, markup=False, highlight=False, soft_wrap=True),
        )  # fmt: skip
    finally:
        plans.close()
    return {"device": info.name, "date": today(), "exhaustive": args.exhaustive, "rows": cases}


def wanted_shape(args: argparse.Namespace) -> BenchShape:
    """The shape asked for, by default Qwen3-30B-A3B's layer."""
    from mok.config import Shape
    from mok.models import get_model
    from mok.tools.bench.shapes import BenchShape, parse_shape

    if args.shape:
        return parse_shape(args.shape)
    model = get_model(args.model or "qwen3-30b-a3b")
    # The shared expert runs beside the routed ones and has no tunable of its own.
    sizes = (model.hidden_size, model.intermediate_size, model.num_experts, model.topk)
    return BenchShape(Shape(args.tokens, *sizes), model.name)


def per_rank_shape(bench: BenchShape, ep: int) -> Shape:
    """The shape as one rank sees it, which is what ``Config.suggest`` is asked for."""
    import dataclasses

    if ep < 1:
        raise MokError("--ep is at least 1", ep)
    tokens = -(-bench.shape.num_tokens // ep)
    return dataclasses.replace(bench.shape, num_tokens=tokens, ep_size=ep)


class Trials:
    """Times configurations against one another, and checks that they give the same bits."""

    def __init__(
        self,
        bench: BenchShape,
        device: Any,
        ep: int,
        pass_name: str,
        clock: Clock,
        regime: Regime,
        seed: int,
    ) -> None:
        from mok.tools.bench.work import make_work

        self.work = make_work(bench, device, seed=seed)
        self.name = f"mok-ep{ep}" if ep > 1 else "mok"
        self.pass_name, self.clock, self.regime = pass_name, clock, regime
        self.programs: dict[Config, Any] = {}
        self.digests: dict[str, int] = {}

    def evaluate(self, candidate: Config, incumbent: Config) -> tuple[float, float]:
        """Milliseconds of candidate and incumbent, in turns; the incumbent stays set up."""
        from mok.tools.bench.timing import measure

        for config in [c for c in self.programs if c not in (candidate, incumbent)]:
            self.programs.pop(config).close()
        steps = [self.step(config) for config in (incumbent, candidate)]
        first, second = (measure(step, self.clock, self.regime).median for step in steps)
        return second, first

    def milliseconds(self, config: Config, rounds: int = 1) -> list[float]:
        """Medians of windows of one configuration."""
        from mok.tools.bench.timing import measure

        step = self.step(config)
        return [measure(step, self.clock, self.regime).median for _ in range(rounds)]

    def step(self, config: Config) -> Any:
        """One call under a configuration; its first one is compared bit by bit.

        Raises:
            BitsDiffer: it gives other bits than the configurations before it.
            MokError: it does not fit.
        """
        program = self.programs.get(config)
        if program is None:
            program = self._set_up(config)
            self.programs[config] = program
        if self.pass_name == "forward":
            return program.forward

        def both(index: int) -> Any:
            _, saved = program.forward_training(index)
            return program.backward(index, saved)

        return both

    def _set_up(self, config: Config) -> Any:
        from mok.tools.bench.bits import digest
        from mok.tools.bench.programs import Options, Unavailable, make_program
        from mok.tune import BitsDiffer

        try:
            program = make_program(self.name, self.work, Options(self.clock, config=config))
        except Unavailable as error:
            raise MokError("the configuration must fit", str(error)) from error
        try:
            found = {"output": digest(program.output(program.forward(0)))}
            if self.pass_name == "both":
                _, saved = program.forward_training(0)
                gradients = program.gradients(program.backward(0, saved))
                found |= {name: digest(value) for name, value in gradients.items()}
            program.check()
            different = [n for n, v in found.items() if self.digests.setdefault(n, v) != v]
            if different:
                raise BitsDiffer(
                    "tunables must not change a bit",
                    f"{', '.join(different)} differ under {config}",
                    "This is a bug: please report it with this line",
                )
        except BaseException:
            program.close()
            raise
        return program

    def close(self) -> None:
        for program in self.programs.values():
            program.close()
        self.programs = {}


def tune(
    args: argparse.Namespace,
    trials: Any,
    shape: Shape,
    device: Any,
    deadline: Deadline,
    progress: Console,
) -> dict[str, Any]:
    """Search, confirm the winner against the suggestion, remember it."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from mok.config import Config
    from mok.models import Machine
    from mok.tools.bench.versions import today
    from mok.tune import GAIN, Search, record, search

    machine = Machine(device.name, device.num_sms, device.arch, "this GPU")
    start = Config.suggest(shape, machine)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=progress) as bar:
        task = bar.add_task("searching", total=args.budget_s)

        def show_trial(found: Search) -> None:
            spent = args.budget_s - max(deadline.left, 0.0)
            text = f"{len(found.trials)} tried, best {found.ratio:.3f} of the suggestion's time"
            bar.update(task, completed=spent, description=text)

        found = search(
            start,
            shape,
            device.num_sms,
            device.arch,
            trials.evaluate,
            over=lambda: deadline.over,
            on_trial=show_trial,
        )
    # Steps were small and each one noisy: only a direct comparison counts.
    rounds = [(trials.milliseconds(start)[0], trials.milliseconds(found.best)[0]) for _ in range(3)]
    suggested, best = (sorted(column)[1] for column in zip(*rounds, strict=True))
    config = found.best if best < (1 - GAIN) * suggested else start
    facts = {
        "date": today(),
        "pass": args.pass_name,
        "ms": min(best, suggested) if config is found.best else suggested,
        "suggested_ms": suggested,
        "tried": len(found.trials),
    }
    path = None if args.dry_run else record(shape, device, config, facts)
    return {
        "device": device.name,
        "shape": trials.work.bench.as_dict(),
        "ep": shape.ep_size,
        "pass": args.pass_name,
        "finished": found.finished,
        "suggested": tunables_of(start),
        "best": tunables_of(config),
        "suggested_ms": suggested,
        "best_ms": facts["ms"],
        "path": str(path) if path else None,
        "rows": [
            {
                "config": tunables_of(t.config),
                "ms": t.ms,
                "bound": None,
                "ratio": t.ratio if t.ms is not None else None,
                "note": t.note,
            }
            for t in found.trials
        ],
    }


def tunables_of(config: Config) -> dict[str, Any]:
    """The tunables of a configuration."""
    from mok.tune import TUNABLES

    return {name: getattr(config, name) for name in TUNABLES}


def text_of(value: float | bool | None) -> str:
    """A tunable's value; None leaves it to the shape."""
    if value is None:
        return "by shape"
    return str(value) if isinstance(value, bool) else f"{value:g}"


def passed(document: dict[str, Any]) -> bool:
    """The search ran; a wrong bit would have raised. Of a grid: the plan reached what is promised."""
    if "exhaustive" in document:
        from mok.tools.simulator.measured import REACHED

        return bool(document["rows"]) and all(r["reached"] >= REACHED for r in document["rows"])
    return True


def show(document: dict[str, Any], console: Console) -> None:
    from rich.table import Table

    if "exhaustive" in document:
        from mok.tools.simulator.measured import show_cases

        show_cases(document["rows"], console)
        return
    if "forgotten" in document:
        console.print("forgotten" if document["forgotten"] else "nothing was remembered")
        return
    table = Table(title=f"Tunables on {document['device']}", title_justify="left")
    for column in ("tunable", "suggested", "best"):
        table.add_column(column, justify="left" if column == "tunable" else "right")
    for name, value in document["suggested"].items():
        table.add_row(name, text_of(value), text_of(document["best"][name]))
    table.add_row("ms", f"{document['suggested_ms']:.3f}", f"{document['best_ms']:.3f}")
    console.print(table)
    ended = "nothing near is faster" if document["finished"] else "the budget ended the search"
    kept = f"kept in {document['path']}" if document["path"] else "not kept"
    console.print(f"{len(document['rows'])} configurations tried, {ended}; {kept}")
