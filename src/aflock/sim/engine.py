"""The engine: feeds a coordinator with arrivals in the order of the clock, and knows no rule by name.

Three ways to simulate asynchrony (the papers use all of them):

    events     every client has a clock; a job takes compute plus network time; the server acts on each arrival
    ticks      delays count server ticks; all jobs that come due in a tick are delivered in it, in client order; each is
               a server step (step = "arrival"), or the tick ends with one step for all of them (step = "tick")
    sampled    every server step draws clients from an arrival process, and each starts from a model of the past

The first two differ in the clock alone: in ticks a delay is rounded down to whole ticks, at least one. The third is in
`sampled.py`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ..coordination.budget import Budget
from ..coordination.coordinator import Coordinator
from ..coordination.tally import Tally
from ..errors import AflockError, VectorError
from ..local import Memory
from ..types import Job, Receipt, Update
from .client_training import ClientTraining
from .clock import Clock
from .executors import Executor, Order
from .fleet import Fleet


@dataclass(slots=True)
class SimulatedClient:
    """What is known of a client that has had a job: one record, because every job needs all of it."""

    memory: Memory = field(default_factory=dict)
    number: int = -1
    """Of its latest job."""
    delay: float = 0
    """The staleness of its last answer, or the time its job took, as the local rule counts it."""
    since: float = 0.0
    """When it got its latest job."""
    order: Order | None = None
    """The job it has now."""
    uploads: int = 0


class Stalled(AflockError):
    """Nothing is under way and nobody can be given a job: the run cannot go on."""


class Item(NamedTuple):
    """Something on the clock: a job that comes back or runs out of time, a client that comes or goes."""

    kind: str  # "job", "lease", "join", "leave", "away" or "back"
    client: int
    number: int = 0


_TICK_ORDER = {"job": 1, "lease": 2}
"""Within a tick: comings and goings, then arrivals, then what has not arrived by its end."""

PATIENCE = 100
"""Things that may happen per client without a single arrival before a run counts as stalled."""


class Diverged(AflockError):
    """Training has left the numbers: an update is infinite or not a number."""


class Engine:
    """One run in virtual time, in the protocols `events` and `ticks`."""

    def __init__(
        self,
        coordinator: Coordinator,
        fleet: Fleet,
        client_training: ClientTraining,
        executor: Executor,
        *,
        budget: Budget,
        ticks: bool = False,
        step_per_tick: bool = False,
        on_upload: Callable[[Engine, Receipt], None] | None = None,
        on_tick: Callable[[Engine], None] | None = None,
    ) -> None:
        self.coordinator = coordinator
        self.fleet = fleet
        self.client_training = client_training
        self.executor = executor
        self.budget = budget
        self.ticks = ticks
        self.step_per_tick = step_per_tick
        self.clock: Clock[Item | Order] = Clock()
        self.tally = Tally()
        self.records: defaultdict[int, SimulatedClient] = defaultdict(SimulatedClient)
        self._push = coordinator.take if step_per_tick else coordinator.push
        self._resets_silent = coordinator.resets_silent
        self._delay_is_time = client_training.delay_unit == "time"
        self._vectors = len(client_training.needs)
        self._on_upload, self._on_tick = on_upload, on_tick
        self._fruitless = 0
        self.replaying = False
        """Whether a trace says what happens; it then also says which clients are reset."""
        self.opened_at: float | None = None
        """When the rule had started; None: it has not."""
        self._last_tick = math.inf

    @property
    def by_client(self) -> dict[int, int]:
        """How many uploads came from each client that made any."""
        return {client: record.uploads for client, record in self.records.items() if record.uploads}

    @property
    def largest_share(self) -> float:
        """The part of the uploads that came from the busiest client."""
        return max(self.by_client.values(), default=0) / self.tally.updates if self.tally.updates else 0.0

    # -- the run ----------------------------------------------------------------------------------------------------

    def plan(self) -> None:
        """Puts all comings and goings on the clock that are known beforehand."""
        self._note_opening()
        for change in self.fleet.planned():
            at = float(math.floor(change.time)) if self.ticks else change.time
            self.clock.at(at, Item(change.kind, change.client))
        if self.fleet.p.on is not None:
            for client in self.fleet.initial():
                self._expect_leave(client, 0)

    def run(self, stop: Callable[[], bool] | None = None) -> bool:
        """To the end of the budget, or until `stop` says so between two steps; whether the end was reached."""
        # `finished`, with its limits in local variables: it is asked for every event
        step, budget, tally, clock, strategy = self.step, self.budget, self.tally, self.clock, self.coordinator.strategy
        uploads, versions, time = budget.uploads, budget.versions, budget.time
        by_ticks = budget.ticks < math.inf
        while tally.updates < uploads and clock.now < time and strategy.version < versions:
            if by_ticks and self.ticks_done >= budget.ticks:
                break
            if stop is not None and stop():
                return False
            step()
        return True

    @property
    def finished(self) -> bool:
        """Whether the budget is spent."""
        budget = self.budget
        return (
            self.tally.updates >= budget.uploads
            or self.clock.now >= budget.time
            or self.coordinator.strategy.version >= budget.versions
            or self.ticks_done >= budget.ticks
        )

    @property
    def ticks_done(self) -> float:
        """Ticks since the rule has started, empty ones included; 0 before."""
        return 0.0 if self.opened_at is None else self.clock.now - self.opened_at

    def step(self) -> None:
        """Hands out what can be handed out, then lets the next thing happen (in ticks: all of the next tick)."""
        clock, heap = self.clock, self.clock.heap
        for job in self.coordinator.dispatch(clock.now):
            self.send(job)
        if not heap:
            raise Stalled(self._why_stalled())
        due = heap[0][0]
        if due >= self.budget.time:
            clock.now = self.budget.time
        elif due > self._last_tick:
            clock.now = self._last_tick  # the last ticks are empty
        elif not self.ticks:
            item = clock.next()
            if type(item) is Order and (record := self.records[item.job.client]).order is item:
                self._arrive(item, record)  # the usual case of `deliver`
            else:
                self.deliver(item)
        else:
            self._tick(due)

    def _tick(self, due: float) -> None:
        """All that is due at once: comings and goings first, then arrivals in client order."""
        items = []
        while self.clock.heap and self.clock.upcoming == due:
            items.append(self.clock.next())
        for item in sorted(items, key=lambda item: (_TICK_ORDER.get(item.kind, 0), item.client)):
            if self.tally.updates < self.budget.uploads and self.coordinator.strategy.version < self.budget.versions:
                self.deliver(item)
        self.end_tick()

    def end_tick(self) -> None:
        """All that was due in this tick has happened: makes the server step, if the tick has one."""
        if self.step_per_tick and self.coordinator.step(self.clock.now) and self._resets_silent:
            self._reset_overdue()
        self._note_opening()
        if self._on_tick is not None:
            self._on_tick(self)

    def _note_opening(self) -> None:
        if self.opened_at is None and self.coordinator.strategy.started:
            self.open_at(self.clock.now)

    def open_at(self, time: float) -> None:
        """The rule has started, its first gradients in: ticks are counted from this time on."""
        self.opened_at, self._last_tick = time, time + self.budget.ticks

    def _reset_overdue(self) -> None:
        """Clients whose job has become too old start again from the current model, where the rule wants that."""
        if self.replaying:
            return
        for client in self.coordinator.overdue():
            self.withdraw(client)
            self.send(self.coordinator.reset(client, self.clock.now))

    def _why_stalled(self) -> str:
        waiting, there = len(self.coordinator.working), len(self.coordinator.clients)
        if not there:
            return f"at time {self.clock.now:g} no client is left; lower fleet.dropout_share or let it come later"
        return (
            f"at time {self.clock.now:g} nothing comes back: {waiting} of {there} clients have jobs that never return, "
            "or whose lease ends before they do; lengthen or set fleet.lease, raise concurrency, or lower "
            "fleet.silent_share"
        )

    # -- what can happen --------------------------------------------------------------------------------------------

    def send(self, job: Job, *, on_clock: bool = True) -> None:
        """A job has been handed out: puts its return on the clock."""
        client, clock, fleet = job.client, self.clock, self.fleet
        record, now = self.records[client], clock.now
        number = record.number = record.number + 1
        record.since = due = now
        steps = self.client_training.steps_of(client, number)
        length = job.model.nbytes
        down = length * (1 + len(job.extras))
        self.tally.bytes_down += down
        if on_clock:
            duration = fleet.duration(client, number, steps, down + length * self._vectors)
            due = now + (self._whole(duration) if self.ticks else duration)
        order = record.order = tuple.__new__(Order, (job, number, steps, record.memory, record.delay, due))
        if on_clock:
            if due < math.inf:
                clock.at(due, order)
            if fleet.p.lease is not None:
                clock.at(now + self._whole(fleet.p.lease), Item("lease", client, number))
        self.executor.submit(order)

    def _whole(self, duration: float) -> float:
        """In ticks, a duration is rounded down to whole ticks, at least one."""
        return max(1.0, math.floor(duration)) if self.ticks and duration < math.inf else duration

    def deliver(self, item: Item | Order) -> None:
        """Lets it happen now."""
        if type(item) is Order:
            record = self.records[item.job.client]
            if record.order is item:  # else it was dropped meanwhile, or its client is gone
                self._arrive(item, record)
            return
        self._fruitless += 1
        if self._fruitless > PATIENCE * (self.fleet.clients + 100):
            raise Stalled(self._why_stalled())
        if item.kind != "job":  # "job" is one that was dropped before the run was saved
            getattr(self, f"_on_{item.kind}")(item)

    def withdraw(self, client: int) -> None:
        """Nobody waits for the client's job any more."""
        order = self.order(client)
        if order is not None:
            self.records[client].order = None
            self.executor.cancel(order)

    def order(self, client: int) -> Order | None:
        """The job the client has now."""
        return self.records[client].order if client in self.records else None

    def _arrive(self, order: Order, record: SimulatedClient) -> None:
        job, now = order.job, self.clock.now
        client = job.client
        done = self.executor.result(order)
        update = Update(client, job.version, done.vectors, done.steps, self.client_training.examples(client), job.id)
        try:
            receipt = self._push(update, now)
        except VectorError as error:
            raise Diverged(
                f"training diverges: at version {self.coordinator.strategy.version} the update of client {client} is "
                f"of no use ({error}); lower local.eta_l or strategy.lr"
            ) from None
        record.order = None
        record.delay = now - record.since if self._delay_is_time else receipt.staleness
        record.uploads += 1
        self._fruitless = 0
        if done.memory:
            done.keep(order.memory, receipt)
        self.tally.add(receipt, done.steps, job.model.nbytes * len(done.vectors))
        if self._on_upload is not None:
            self._on_upload(self, receipt)
        if self._resets_silent:
            self._reset_overdue()

    def _on_lease(self, item: Item) -> None:
        order = self.order(item.client)
        if order is None or order.number != item.number:
            return
        self.withdraw(item.client)
        if order.job.first:  # a rule that waits for everybody must not wait for this one
            self.coordinator.leave(item.client, self.clock.now)
        else:
            self.coordinator.drop(item.client, self.clock.now, "lease ran out")

    def _on_leave(self, item: Item) -> None:
        coordinator, client, now = self.coordinator, item.client, self.clock.now
        if not coordinator.knows(client):
            return
        self.withdraw(client)
        if self.fleet.p.dropout == "leave" or not coordinator.strategy.started:
            coordinator.leave(client, now)
            return
        if coordinator.works(client):  # without a word: its job is lost, what the rule holds of it stays
            coordinator.drop(client, now, "the client vanished")
        coordinator.suspend(client, now)

    def _vanished(self, client: int) -> bool:
        fleet = self.fleet
        return fleet.p.dropout == "vanish" and fleet.roles[client] == "leaver" and self.clock.now >= fleet.p.dropout_at

    def _on_join(self, item: Item) -> None:
        self.coordinator.join(item.client, self.clock.now)
        if self.fleet.p.on is not None:
            self._expect_leave(item.client, 0)

    def _expect_leave(self, client: int, count: int) -> None:
        """A stretch of presence begins: puts its end on the clock; one of no length has ended before any job."""
        stretch, item = self.fleet.stretch(client, count), Item("away", client, count)
        if stretch > 0:
            self.clock.at(self.clock.now + self._whole(stretch), item)
        else:
            self.deliver(item)

    def _on_away(self, item: Item) -> None:
        if self.coordinator.knows(item.client):
            self.coordinator.suspend(item.client, self.clock.now)
            stretch = self._whole(self.fleet.stretch(item.client, item.number + 1))
            self.clock.at(self.clock.now + stretch, Item("back", item.client, item.number + 1))

    def _on_back(self, item: Item) -> None:
        if self.coordinator.knows(item.client) and not self._vanished(item.client):
            self.coordinator.resume(item.client, self.clock.now)
            self._expect_leave(item.client, item.number + 1)
