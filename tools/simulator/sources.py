"""Every constant that a prediction stands on, with its origin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mok.tools.simulator.constants import calibration
from mok.tools.simulator.scenario import Scenario
from mok.tools.simulator.tilecost import ours_calibration


def constants_of(scenario: Scenario, programs: Sequence[str]) -> list[dict[str, Any]]:
    """The constants of the scenario's machine and of ``programs``."""
    machine = scenario.machine
    tables = [(machine.name, machine.constants), (f"{machine.name}, main loop", machine.tiles)]
    for program in programs:
        name = ours_calibration(machine.arch) if program == "ours" else "upstream_sm100"
        tables.append((name, calibration(name)))
    return [{"of": of, **c} for of, table in tables for c in table.as_list()]
