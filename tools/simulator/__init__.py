"""A discrete-event model of the megakernel on machines that need not be here.

``simulate(Scenario(...))`` predicts one call: our task program (``kernels_cute.program``) or
upstream's, on a machine described by a data file, for a routing. See docs/scaling.md.
"""

from mok.tools.simulator.machine import Machine, known_machines, load_machine
from mok.tools.simulator.routing import Routing, balanced, drawn, make_routing, recorded
from mok.tools.simulator.scenario import Scenario, Switches
from mok.tools.simulator.simulate import Result, simulate
from mok.tools.simulator.timeline import timeline

__all__ = [
    "Machine",
    "Result",
    "Routing",
    "Scenario",
    "Switches",
    "balanced",
    "drawn",
    "known_machines",
    "load_machine",
    "make_routing",
    "recorded",
    "simulate",
    "timeline",
]
