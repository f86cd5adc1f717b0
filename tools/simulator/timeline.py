"""A simulated call as a trace."""

from __future__ import annotations

from mok.errors import MokError
from mok.runtime.trace import Event, Trace
from mok.tools.simulator.simulate import Result


def timeline(result: Result) -> Trace:
    """The kernel's tasks and items, in the format that kernels and emulator use too.

    Raises:
        MokError: the simulation was made without ``record=True``.
    """
    work, found = result.work, result.outcome.events
    if not found and len(work.tasks):
        raise MokError("a timeline needs a simulation that recorded", "no event", "record=True")
    events = []
    for is_comm, worker, kind, begin, end, minibatch, ticket in found:
        names = work.items.names if is_comm else work.tasks.names
        name = names[kind]
        if not is_comm and minibatch < 0 and not name.startswith("shared"):
            name = f"shared {name}"
        sm = worker if is_comm else work.comm_workers + worker * work.cluster
        role = "comm" if is_comm else "compute"
        events.append(Event(name, role, sm, begin, end, minibatch, ticket))
    s = result.scenario
    source = (
        f"simulator: {s.program}, {s.direction} on {s.machine.name}, EP {s.shape.ep_size}, "
        f"minibatch {s.config.minibatch_size}"
    )
    return Trace(source, events, notes={"ms": result.ms, "rank": result.rank})
