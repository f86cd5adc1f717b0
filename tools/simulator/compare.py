"""The model against recorded times, and our program against upstream's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mok.config import Config, Shape
from mok.errors import MokError
from mok.tools.simulator.constants import HERE, read_toml
from mok.tools.simulator.machine import load_machine
from mok.tools.simulator.scenario import Scenario, Switches
from mok.tools.simulator.simulate import simulate


@dataclass(frozen=True)
class Record:
    """One recorded time and what was timed.

    Attributes:
        kind: "measured" by this project, or "published".
        use: "fit" where constants were chosen on it, else "check".
        limit: the largest relative error allowed, 0 for none.
        kernel_only: the time is that of the kernel, not of the whole call.
        both: the time is that of a forward call that saves its context, and backward.
        off: why the model cannot be held to it, if so.
    """

    name: str
    kind: str
    source: str
    use: str
    ms: float
    limit: float
    scenario: Scenario
    kernel_only: bool
    both: bool
    off: str

    def predict(self) -> float:
        """The model's milliseconds."""
        found = simulate(self.scenario)
        ms = found.kernel_ms if self.kernel_only else found.ms
        if self.both:
            ms += simulate(dataclasses.replace(self.scenario, direction="backward")).ms
        return ms


def records() -> Iterator[Record]:
    """All records of ``records.toml``."""
    for entry in read_toml(HERE / "records.toml")["record"]:
        tokens, hidden, inner, experts, topk, shared, ep = entry["shape"]
        shape = Shape(tokens, hidden, inner, experts, topk, ep, shared or None)
        comm, minibatch = entry["comm_sms"], entry["minibatch"]
        config = Config(comm, comm, minibatch, minibatch * entry["ring"], entry["multiplier"])
        both = entry["direction"] == "both"
        scenario = Scenario(
            shape,
            config,
            load_machine(entry["machine"]),
            "forward" if both else entry["direction"],
            entry["precision"],
            entry["program"],
            save_context=both or entry["save_context"],
            pairs=entry.get("pairs", False),
            push=entry.get("push", False),  # recorded before it was the default
            overrides=entry.get("overrides", {}),
        )
        plain = {
            name: entry[name]
            for name in ("name", "kind", "source", "use", "ms", "limit", "kernel_only")
        }
        yield Record(**plain, scenario=scenario, both=both, off=entry.get("off", ""))


def compare(report: Callable[[str], Any] = lambda text: None) -> list[dict[str, Any]]:
    """Every record beside the model's prediction; ``ok`` is false beyond a record's limit."""
    rows = []
    for record in records():
        model = record.predict()
        error = model / record.ms - 1
        rows.append(
            {
                "name": record.name,
                "kind": record.kind,
                "source": record.source,
                "use": record.use,
                "ms": record.ms,
                "model_ms": model,
                "error": error,
                "limit": record.limit,
                "ok": bool(not record.limit or abs(error) <= record.limit),
                "off": record.off,
            }
        )
        report(f"{record.name}: {record.ms:.3f} ms, model {model:.3f} ms ({error:+.1%})")
    return rows


SWITCH_NAMES = {
    "fused_swiglu": "fused SwiGLU",
    "two_accumulators": "two accumulators",
    "prefix_search": "prefix search",
    "grid_hint": "grid as a hint",
    "slot_backward": "slot-grain backward",
}


def gains(scenario: Scenario) -> list[dict[str, Any]]:
    """Upstream's program, the same with each of our differences alone, with all, and our program.

    All with the scenario's tunables; ``gain`` is the time saved, as a share of upstream's.

    Raises:
        MokError: upstream's program does not run on this machine.
    """
    upstream = dataclasses.replace(scenario, program="upstream", switches=Switches(), push=False)
    steps = [("upstream", upstream)]
    for name, title in SWITCH_NAMES.items():
        if name == "slot_backward" and scenario.direction != "backward":
            continue
        steps.append(
            (f"+ {title}", dataclasses.replace(upstream, switches=Switches(**{name: True})))
        )
    every = Switches(**dict.fromkeys(SWITCH_NAMES, True))
    steps.append(("upstream with all of these", dataclasses.replace(upstream, switches=every)))
    steps.append(("ours", dataclasses.replace(scenario, program="ours")))
    rows: list[dict[str, Any]] = []
    for title, step in steps:
        ms = simulate(step).ms
        rows.append({"program": title, "ms": ms, "gain": 1 - ms / (rows[0]["ms"] if rows else ms)})
    if not rows:
        raise MokError("there must be something to compare")
    return rows
