"""Hopper's pairs of CTAs: two consecutive tasks a ticket, in step (``kernels_cute.pairs``).

Where both are of one kind and minibatch (in backward: of one group), the pair works on them at once and is done
with the slower one; otherwise one after the other, and the other CTA passes the steps by.
"""

from __future__ import annotations

import dataclasses

from mok.tools.simulator.work import Ids, Sent, Tasks, Work


def paired(work: Work) -> Work:
    """The same work for clusters of two CTAs with a task each."""
    t = work.tasks
    count, at = len(t), 0
    groups = t.group or [0] * count
    columns: tuple[list, ...] = tuple([] for _ in range(9))  # type: ignore[type-arg]
    tickets: list[tuple[int, ...]] = []
    sent: list[Sent] = []
    while at < count:
        # A ticket stands for tasks 2n and 2n + 1.
        other = at + 1
        beside = (
            at % 2 == 0
            and other < count
            and t.kind[at] == t.kind[other]
            and t.minibatch[at] == t.minibatch[other]
            and groups[at] == groups[other]
        )
        last = other if beside else at
        values = (
            t.kind[at],
            max(t.busy[at], t.busy[last]),
            max(t.tail[at], t.tail[last]),
            max(t.hold[at], t.hold[last]),
            t.hbm[at] + (t.hbm[last] if beside else 0.0),
            _both(t.waits, at, last, once=True),
            _both(t.signals, at, last),
            _both(t.early, at, last),
            t.minibatch[at],
        )
        for column, value in zip(columns, values, strict=True):
            column.append(value)
        tickets.append(tuple(range(at, last + 1)))
        if t.sent:
            rx, tx, net = (sum(column) for column in zip(*t.sent[at : last + 1], strict=True))
            sent.append((rx, tx, net))
        at = last + 1
    tasks = Tasks(t.names, *columns, tickets=tickets, sent=sent)
    return dataclasses.replace(
        work,
        tasks=tasks,
        workers=max(1, work.workers // 2),
        cluster=2 * work.cluster,
        notes={**work.notes, "tasks": count},
    )


def _both(ids: list[Ids], at: int, last: int, once: bool = False) -> Ids:
    first = ids[at]
    if last == at or (once and ids[last] == first):
        return first
    return first + ids[last]
