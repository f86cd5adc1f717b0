"""The engine: plays one rank's work through time.

Workers take their tasks in program order and every wait is on earlier work, so one pass in that
order fixes all times: a task's worker is the one that draws first, its begin the latest of that
worker, its counters and its operands. Resources that many workers share (links, HBM) are given out
in short slices of time, to whoever asks first in the pass, so requests may come in any order of
time. Where tasks push their rows, too, tasks and items go on in turns, so that both get what they
ask for first: items that wait for nothing would else take the links long before their time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from mok.errors import MokError
from mok.tools.simulator.work import Sent, Work

SLICE_S = 4e-6  # of a shared resource's time; a large task takes tens of microseconds


class Shared:
    """A resource with ``rate`` units a second, reserved in slices of time."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.full = rate * SLICE_S
        self.left: list[float] = []
        self.skip: list[int] = []  # the first slice at or after i that may have something left
        self.used = 0.0

    def reserve(self, begin: float, amount: float) -> float:
        """Take ``amount`` as early as possible from ``begin`` on; returns when it is done."""
        if amount <= 0:
            return begin
        self.used += amount
        left = self.left
        first = at = int(begin / SLICE_S)
        rest = amount
        while True:
            at = self._open(at)
            here = left[at]
            if here > rest:
                left[at] = here - rest
                # Where in the slice the request ends, if the slice is filled from its begin.
                end = (at + 1 - left[at] / self.full) * SLICE_S
                break
            rest -= here
            left[at] = 0.0
            self.skip[at] = at + 1
        if at > first:
            self.skip[first] = at if left[first] == 0.0 else first
        return max(end, begin + amount / self.rate)

    def _open(self, at: int) -> int:
        """The first slice at or after ``at`` with something left."""
        skip = self.skip
        while True:
            if at >= len(skip):
                self.left.extend([self.full] * (at + 64 - len(skip)))
                skip.extend(range(len(skip), at + 64))
            if skip[at] == at:
                return at
            hop = skip[at]
            if hop < len(skip):
                skip[at] = skip[hop]  # shorten the path
            at = hop


@dataclass
class Outcome:
    """What a rank's kernel took. Times in seconds from the kernel's begin.

    Attributes:
        compute_end, comm_end: when the last task and the last item were done.
        end: when the kernel ends.
        busy, tail: seconds of all compute workers in main loops, and in exposed epilogues.
        waits: seconds of all compute workers waiting, by class of counter; "operands" for HBM,
            "pipeline" for filling the main loop, "link" for staging buffers whose rows are not on
            their way yet, "end" after a worker's last main loop.
        comm_busy, comm_waits: the same for communication workers.
        first_routed: when the first task on routed rows began.
        events: (comm?, worker, kind, begin, end, minibatch, ticket) where asked for.
    """

    end: float = 0.0
    compute_end: float = 0.0
    comm_end: float = 0.0
    busy: float = 0.0
    tail: float = 0.0
    waits: dict[str, float] = field(default_factory=dict)
    comm_busy: float = 0.0
    comm_waits: dict[str, float] = field(default_factory=dict)
    first_routed: float = 0.0
    usage: dict[str, float] = field(default_factory=dict)
    events: list[tuple[bool, int, int, float, float, int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Rates:
    """Shared resources of a rank, in bytes a second; 0 where there is none."""

    hbm: float
    link: float
    network: float
    signal_s: float


class Engine:
    """Plays one ``Work``; see ``play``."""

    def __init__(self, work: Work, rates: Rates, record: bool = False) -> None:
        self.work = work
        self.rates = rates
        self.record = record
        self.out = Outcome()
        self.hbm = Shared(rates.hbm)
        self.rx = Shared(rates.link)
        self.tx = Shared(rates.link)
        self.net = Shared(rates.network)
        counters = work.counters
        self.remaining = list(counters.targets)
        self.ready = [0.0] * len(self.remaining)
        self.classes = counters.classes
        self.in_turns = bool(work.tasks.sent)
        self.now = {"compute": 0.0, "comm": 0.0}

    def play(self) -> Outcome:
        """Run everything.

        Raises:
            MokError: the program waits for something that comes later, or a counter's target is
                not what arrives: a bug of the program.
        """
        work, out = self.work, self.out
        compute, comm = self._compute(), self._comm()
        alive = {"compute": compute, "comm": comm}
        while alive:
            moved = False
            for name, run in self._turns(alive):
                state = next(run, None)
                if state is None:
                    del alive[name]
                    moved = True
                elif state:
                    moved = True
                if moved and self.in_turns:
                    break
            if alive and not moved:
                raise MokError("every wait must be on earlier work", "the program cannot go on")
        wrong = [i for i, n in enumerate(self.remaining) if n]
        if wrong:
            raise MokError(
                "a counter's target must be what arrives at it",
                f"{len(wrong)} are off; {self.remaining[wrong[0]]} left of "
                f"{self.classes[wrong[0]]}",
            )
        out.end = max(out.compute_end, out.comm_end, work.start_s) + work.surplus_s
        for resource in ("hbm", "rx", "tx", "net"):
            out.usage[resource] = getattr(self, resource).used
        return out

    def _turns(self, alive: dict[str, Iterator[bool]]) -> list[tuple[str, Iterator[bool]]]:
        """Who goes on: where both use the links, whoever is behind in time, for one task or item."""
        runs = list(alive.items())
        return sorted(runs, key=lambda pair: self.now[pair[0]]) if self.in_turns else runs

    def _arrive(self, ids: tuple[int, ...], when: float) -> None:
        remaining, ready = self.remaining, self.ready
        for i in ids:
            remaining[i] -= 1
            if when > ready[i]:
                ready[i] = when

    def _send(self, begin: float, amounts: Sent) -> tuple[float, float]:
        """Push a task's rows from ``begin`` on: when the worker can go on, and when all are on their way."""
        staged = self.work.pipeline.staged
        go_on = done = begin
        for resource, amount in zip((self.rx, self.tx, self.net), amounts, strict=True):
            most = resource.reserve(begin, (1 - staged) * amount)
            go_on = max(go_on, most)
            done = max(done, resource.reserve(most, staged * amount))
        return go_on, done

    # A generator runs as far as it can; it yields True after work, False when it made none.

    def _compute(self) -> Iterator[bool]:
        work, out = self.work, self.out
        t, pipe = work.tasks, work.pipeline
        remaining, ready, classes = self.remaining, self.ready, self.classes
        reserve, arrive, signal_s = self.hbm.reserve, self._arrive, self.rates.signal_s
        two, fill, store = pipe.accumulators == 2, pipe.fill_s, pipe.store_s
        kinds, busys, tails, holds, hbms = t.kind, t.busy, t.tail, t.hold, t.hbm
        all_waits, all_signals, all_early = t.waits, t.signals, t.early
        reasons = (*classes, "operands", "pipeline", "link", "end")
        waits: dict[str, float] = dict.fromkeys(reasons, 0.0)
        start, workers = work.start_s, work.workers
        # Per worker: when its main loop, its epilogue, the accumulator used last and the one before
        # are free, and when the loads of its last task were issued.
        mma_free, epi_free, newest, oldest, loaded = ([start] * workers for _ in range(5))
        # When the rows that it pushes have left its staging buffers, and for how long its last two
        # epilogues waited for that.
        sent, left, in_turns = t.sent, [start] * workers, self.in_turns
        new_stall, old_stall = ([0.0] * workers for _ in range(2))
        draws = [(start, w) for w in range(workers)]
        busy_sum = tail_sum = first_routed = 0.0
        end_all = start
        done, count = 0, len(t)
        while done < count:
            begun = done
            while done < count:
                needed = all_waits[done]
                late, by = 0.0, -1
                for i in needed:
                    if remaining[i]:
                        late = -1.0
                        break
                    if ready[i] > late:
                        late, by = ready[i], i
                if late < 0:
                    break
                # A worker draws its next ticket when it begins to load the task before.
                drawn, w = heapq.heappop(draws)
                load = loaded[w] if loaded[w] > drawn else drawn
                accumulator = oldest[w] if two else newest[w]
                free = mma_free[w]
                if accumulator > free:
                    stall = old_stall[w] if two else new_stall[w]
                    if stall > accumulator - free:
                        stall = accumulator - free
                    waits["link"] += stall
                    tail_sum += accumulator - free - stall
                    free = accumulator
                begin = load + fill
                if begin > free:
                    waits["pipeline"] += begin - free
                else:
                    begin = free
                issue = load
                if late > load:
                    issue = late
                    if late + fill > begin:
                        waits[classes[by]] += late + fill - begin
                        begin = late + fill
                busy = busys[done]
                end = begin + busy
                streamed = reserve(issue, hbms[done])
                if streamed > end:
                    waits["operands"] += streamed - end
                    end = streamed
                heapq.heappush(draws, (max(load, epi_free[w]) if pipe.draws_late else load, w))
                epilogue = end if end > epi_free[w] else epi_free[w]
                finish = epilogue + tails[done]
                stall = 0.0
                if sent:
                    go_on = left[w]  # every epilogue fills the same buffers
                    if any(sent[done]):
                        go_on, left[w] = self._send(max(epilogue, go_on), sent[done])
                        end_all = max(end_all, left[w] + store)
                    if go_on > finish:
                        stall = go_on - finish
                        finish = go_on
                mma_free[w], epi_free[w] = end, finish
                oldest[w], newest[w] = newest[w], epilogue + holds[done] + stall
                old_stall[w], new_stall[w] = new_stall[w], stall
                lead = pipe.lead_s if pipe.lead_s < busy else busy
                loaded[w] = issue if issue > end - lead else end - lead
                busy_sum += busy
                stored = finish + store
                if stored > end_all:
                    end_all = stored
                if all_early[done]:
                    arrive(all_early[done], end + signal_s)
                if all_signals[done]:
                    arrive(all_signals[done], stored + signal_s)
                if first_routed == 0.0 and t.minibatch[done] >= 0:
                    first_routed = begin
                if self.record:
                    event = (False, w, kinds[done], begin, finish, t.minibatch[done], done)
                    out.events.append(event)
                done += 1
                if in_turns:
                    self.now["compute"] = epilogue
                    break
            yield done > begun
        waits["end"] += sum(end_all - free for free in mma_free)
        out.compute_end, out.busy, out.tail = end_all, busy_sum, tail_sum
        out.waits = {name: seconds for name, seconds in waits.items() if seconds > 0}
        out.first_routed = first_routed

    def _comm(self) -> Iterator[bool]:
        work, out = self.work, self.out
        t = work.items
        if not len(t):
            return
        remaining, ready, classes = self.remaining, self.ready, self.classes
        signal_s = self.rates.signal_s
        workers = work.comm_workers
        start = work.start_s
        free = [start] * workers
        heap = [(start, w) for w in range(workers)]
        waits: dict[str, float] = {}
        busy_sum = end_all = 0.0
        step = t.step
        done, count = 0, len(t)
        while done < count:
            begun = done
            while done < count:
                late, by = 0.0, -1
                for i in t.waits[done]:
                    if remaining[i]:
                        late = -1.0
                        break
                    if ready[i] > late:
                        late, by = ready[i], i
                if late < 0:
                    break
                if step is None:
                    drawn, w = heapq.heappop(heap)
                else:
                    w = step[done] % workers
                    drawn = free[w]
                begin = drawn if drawn > late else late
                if begin > drawn:
                    waits[classes[by]] = waits.get(classes[by], 0.0) + begin - drawn
                end = begin + t.busy[done]
                for resource, amount in (
                    (self.rx, t.rx[done]),
                    (self.tx, t.tx[done]),
                    (self.net, t.net[done]),
                    (self.hbm, t.hbm[done]),
                ):
                    if amount > 0:
                        served = resource.reserve(begin, amount)
                        if served > end:
                            end = served
                busy_sum += end - begin
                if step is None:
                    heapq.heappush(heap, (end, w))
                else:
                    free[w] = end
                if end > end_all:
                    end_all = end
                if t.signals[done]:
                    self._arrive(t.signals[done], end + signal_s)
                if self.record:
                    out.events.append((True, w, t.kind[done], begin, end, t.minibatch[done], done))
                done += 1
                if self.in_turns:
                    self.now["comm"] = begin
                    break
            yield done > begun
        out.comm_end, out.comm_busy, out.comm_waits = end_all, busy_sum, waits
