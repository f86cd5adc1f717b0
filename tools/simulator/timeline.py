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
        if is_comm:
            events.append(Event(name, "comm", worker, begin, end, minibatch, ticket))
            continue
        sm = work.comm_workers + worker * work.cluster
        tickets = work.tasks.tickets[ticket] if work.tasks.tickets else (ticket,)
        for cta, number in enumerate(tickets):  # of a pair, each has a task
            events.append(Event(name, "compute", sm + cta, begin, end, minibatch, number))
    s = result.scenario
    source = (
        f"simulator: {s.program}{' with push' * s.pushes}, {s.direction} on {s.machine.name}, "
        f"EP {s.shape.ep_size}, minibatch {s.config.minibatch_size}"
    )
    return Trace(source, events, notes={"ms": result.ms, "rank": result.rank})
