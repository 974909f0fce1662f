"""The server's core without input or output: who may pull, which version they got, what becomes of what they send.

    c = Coordinator(strategy, concurrency=20)
    c.start(w0, now=0.0)
    for job in c.dispatch(now=0.0): ...             # the server picks clients, or
    job = c.pull(client=3, now=1.5)                 # a client asks on its own
    receipt = c.push(update, now=7.2)

It never sleeps and never reads a clock: time is an argument and must not run backwards. It is the same object in
simulation, behind a network and in replay, and it emits one `Event` for everything that happens.

Where each client is (idle, working, resting, away) is kept in `client_states.py`.

One server step may answer several arrivals: `take` each of them, then `step`. With refill="step" a place that an
arrival has freed is given again only when the model has moved: the client rests and keeps the place until then.

The opening: where a rule needs every client's gradient first, each client's first job is marked `first`; the rule
starts when all are in. A client that joins such a rule later gets a first job and enters the mean with its answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice

from ..errors import (
    DuplicateClient,
    DuplicateUpdate,
    InputError,
    MissingVector,
    OrderError,
    ParameterError,
    StateError,
    UnknownClient,
    VersionError,
)
from ..events import Event, Kind, Ticket
from ..strategies.base import Strategy
from ..strategies.checks import index, mapping, positive
from ..types import Job, Receipt, State, Update, Vector
from . import selection as policies
from .client_states import ClientStates


class Coordinator:
    """Drives one strategy."""

    def __init__(
        self,
        strategy: Strategy,
        *,
        concurrency: int | None = None,
        selection: str | None = None,
        probabilities: Mapping[int, float] | None = None,
        max_staleness: int | None = None,
        refill: str = "arrival",
        seed: int = 0,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        """Takes charge of a strategy that has not been started.

        concurrency      open jobs at a time; None: no limit
        selection        "uniform", "biased" (with `probabilities`), "fair" or "all"; None: "biased" where probabilities
                         are given, else the rule's own ("fair" for afl, "uniform" for the others)
        max_staleness    older updates are discarded, whatever the rule; None: the rule's own bound, if it has one
        refill           "arrival": an arrival frees its place at once; "step": the next server step does. First jobs,
                         and jobs that are lost or rejected, free their place at once
        on_event         called with every event
        """
        if not isinstance(strategy, Strategy):
            raise ParameterError(f"expected a strategy (see strategies.create), got {type(strategy).__name__}")
        _check_bound("concurrency", concurrency, 1)
        _check_bound("max_staleness", max_staleness, 0)
        own: int | None = getattr(strategy.p, "max_staleness", None)
        default = "biased" if probabilities is not None else "fair" if strategy.fair else "uniform"
        self.strategy = strategy
        self.concurrency = concurrency
        self.max_staleness = own if max_staleness is None else max_staleness
        if refill not in ("arrival", "step"):
            raise ParameterError(f"refill={refill!r} is not valid; expected 'arrival' or 'step'")
        self._refill_at_step = refill == "step"
        if self._refill_at_step:
            _check_refill(strategy, concurrency)
        self.selection = selection or default
        self._at = ClientStates(policies.create(self.selection, seed, probabilities))
        self.open: Mapping[int, Ticket] = self._at.open
        """The open job of each client that has one, oldest first: not a copy, but the dictionary that changes."""
        if strategy.largest_cohort is not None and probabilities is not None:
            _check_cohort(strategy.largest_cohort, sum(weight > 0 for weight in probabilities.values()))
        self.in_rounds = strategy.largest_cohort is not None
        """Whether the rule works in rounds: each takes the clients of one cohort."""
        self._plain_places = None if self.in_rounds or self._refill_at_step else concurrency
        """The number of places, if open jobs are all that takes one; None otherwise."""
        self._emit = on_event
        self._next = 0
        self._now = math.nan  # no time is later: everything is refused until `start`
        self._begun = False

    # -- what can be asked ------------------------------------------------------------------------------------------

    @property
    def clients(self) -> set[int]:
        """Everyone registered, those on their way in included."""
        return self.strategy.clients | set(self._at.joining)

    def knows(self, client: object) -> bool:
        """Whether the client is registered, or on its way in."""
        return client in self.strategy.clients or client in self._at.joining

    @property
    def working(self) -> dict[int, Ticket]:
        """The open jobs, oldest first."""
        return dict(self._at.open)

    @property
    def open_jobs(self) -> int:
        """How many jobs are open."""
        return len(self._at.open)

    @property
    def free_places(self) -> float:
        """How many more jobs may be open now."""
        return self._slots()

    def ticket(self, client: int) -> Ticket:
        """The client's open job."""
        return self._at.open[self._require_open_job(client)]

    def works(self, client: int) -> bool:
        """Whether the client has an open job."""
        return client in self._at.open

    def is_idle(self, client: int) -> bool:
        """Whether the client could be given a job now."""
        return client in self._at.idle

    def can_pull(self, client: int) -> bool:
        """Whether the client would get a job if it asked now; one that has a job loses it and gets another."""
        return client in self._at.open or (client in self._at.idle and self._slots() >= 1)

    @property
    def idle(self) -> int:
        """How many clients could be picked now."""
        return len(self._at.idle)

    @property
    def opening(self) -> bool:
        """Whether first gradients are still missing."""
        return self._begun and not self.strategy.started

    # -- coming and going -------------------------------------------------------------------------------------------

    def start(self, w0: Vector, now: float = 0.0, examples: Mapping[int, int] | None = None) -> None:
        """Opens the federation with the strategy's clients, all of them idle."""
        if self._begun:
            raise OrderError("the coordinator was started before; create a new one to start again")
        _check_number(now, -math.inf)
        self.strategy.open(w0, examples)
        self._begun = True
        for client in sorted(self.strategy.clients):
            self._at.idle.add(client)
        self._at.first = dict.fromkeys(sorted(self.strategy.awaited))
        self._event("start", now)

    def join(self, client: int, now: float) -> None:
        """Registers a client; where the rule needs its first gradient, it enters with the answer to its first job."""
        with self._recorded(now, client):
            client = self.strategy.check_join(client)
            if client in self._at.joining:
                raise DuplicateClient(f"client {client} is on its way into the federation already")
            if self.strategy.first:
                if self.opening:
                    self.strategy.join(client)
                else:
                    self._at.joining[client] = None
                self._at.first[client] = None
            else:
                self.strategy.join(client)
        self._at.idle.add(client)
        self._event("join", now, client)

    def leave(self, client: int, now: float, reason: str = "", *, tell: bool = True) -> None:
        """Removes a client for good, its open job and what the rule holds of it included.

        Without `tell` the rule is not told, because it cannot be (it has failed at this): it goes on counting a client
        that gets no job any more.
        """
        with self._recorded(now, client):
            client = self._require(client)
        before = self._mark()
        if tell and client not in self._at.joining:
            self.strategy.leave(client)
        self._event("leave", now, client, self._at.forget(client), reason=reason)
        self._wake(before)

    def suspend(self, client: int, now: float) -> None:
        """The client is away: it gets no job until it is back. A job it has stays open."""
        with self._recorded(now, client):
            client = self._require(client)
        if client in self._at.idle:
            self._at.idle.remove(client)
        self._at.away[client] = None
        self._event("away", now, client)

    def resume(self, client: int, now: float) -> None:
        """The client is back."""
        with self._recorded(now, client):
            client = self._require(client)
        if self._at.away.pop(client, False) is None:
            self._at.settle(client)
        self._event("back", now, client)

    # -- jobs out ---------------------------------------------------------------------------------------------------

    def pull(self, client: int, now: float, *, waits: bool = True) -> Job | None:
        """A job for a client that asks; None if there is none now (no free slot, or its round is not over).

        A client that asks while it has an open job has lost it: the old one is dropped. One that `waits` is told of in
        an event; the other has only looked in passing.
        """
        if not (type(now) is float and self._now <= now < math.inf):
            self._check_time(now)
        if type(client) is not int or client not in self.strategy.clients:
            try:
                client = self._require(client)
            except InputError as error:
                self._refuse(error, now, client)
                raise
        if client in self._at.open:
            self._close(client, "drop", now, "the client pulled again")
        if client not in self._at.idle or self._slots() < 1:
            if waits:
                self._event("wait", now, client)
            return None
        self._at.idle.take(client)
        return self._hand_out(client, now)

    def assign(self, job: Job, now: float) -> Job:
        """Hands out a given job, of whatever version, to its idle client: for whoever has an order of his own."""
        with self._recorded(now, job.client):
            client = self._require(job.client)
            if client not in self._at.idle:
                raise DuplicateUpdate(f"client {client} is not idle; it cannot be given another job")
            if not 0 <= job.version <= self.strategy.version:
                raise VersionError(f"version {job.version} does not exist; expected 0 to {self.strategy.version}")
        self._at.idle.take(client)
        return self._open_ticket(replace(job, id=self._next), now)

    def dispatch(self, now: float) -> list[Job]:
        """Jobs for as many idle clients as there are slots: first those that owe a first gradient, then by policy."""
        if not (type(now) is float and self._now <= now < math.inf):
            self._check_time(now)
        at = self._at
        jobs = self.dispatch_first(now) if at.first else []
        # `_slots`, inlined for the usual case: this runs for every event of a simulation
        free = self._slots() if self._plain_places is None else self._plain_places - len(at.open)
        while free > 0 and (client := at.idle.draw()) is not None:
            jobs.append(self._hand_out(client, now))
            free -= 1
        return jobs

    def dispatch_first(self, now: float) -> list[Job]:
        """Jobs for those who owe a first gradient, as far as there are slots."""
        self._check_time(now)
        at, jobs = self._at, []
        owing = (client for client in at.first if client not in at.away)
        free = min(self._slots(), len(at.first))
        for client in list(islice(owing, max(0, int(free)))):
            at.idle.take(client)
            jobs.append(self._hand_out(client, now))
        return jobs

    def _slots(self) -> float:
        """How many more jobs may be open now."""
        if self.concurrency is None and not self.in_rounds:
            return math.inf
        free = math.inf if self.concurrency is None else self.concurrency - len(self._at.open)
        if self._refill_at_step and self.strategy.started:
            free -= len(self._at.resting)
        cohort = self.strategy.cohort if self.in_rounds else None
        return free if cohort is None else min(free, cohort - len(self._at.round))

    def _hand_out(self, client: int, now: float) -> Job:
        """A job for a client that has just been taken out of the idle ones."""
        strategy = self.strategy
        if strategy.first and (client in self._at.joining or client in strategy.awaited):
            return self._open_ticket(Job(client, strategy.version, strategy.model, {}, True, self._next), now)
        return self._open_ticket(strategy.job(client, self._next), now)

    def _open_ticket(self, job: Job, now: float) -> Job:
        client, at = job.client, self._at
        if at.first:
            at.first.pop(client, None)
        number, version, first = self._next, job.version, job.first
        at.open[client] = tuple.__new__(Ticket, (number, version, first, now))
        if self.in_rounds:
            at.round[client] = None
        self._next = number + 1
        self._now = now
        if self._emit is not None:
            fields = ("pull", now, self.strategy.version, client, version, number, None, None, None, "", "", first)
            self._emit(tuple.__new__(Event, fields))
        return job

    # -- answers in -------------------------------------------------------------------------------------------------

    def take(self, update: Update, now: float) -> Receipt:
        """Takes the answer to an open job as `push` does, but the rule makes no step with it: `step` does."""
        return self.push(update, now, step=False)

    def step(self, now: float) -> bool:
        """Lets the rule make one step with all that was taken; false if that was nothing, or too little."""
        self._check_time(now)
        before = self._mark()
        stepped = not self.opening and self.strategy.step()
        if stepped:
            self._event("step", now)
            self._wake(before)
        return stepped

    def push(self, update: Update, now: float, *, step: bool = True) -> Receipt:
        """Takes the answer to an open job. What cannot be one is refused: an error, an event, and nothing changes."""
        if not (type(now) is float and self._now <= now < math.inf):
            self._check_time(now)
        strategy, at = self.strategy, self._at
        version, started = strategy.version, strategy.started
        try:
            job, pulled, first, _ = self._match(update)
            if first:
                receipt = self._take_first(update, version - pulled)
            elif self.max_staleness is not None and version - pulled > self.max_staleness:
                receipt = self._discard(update, version - pulled)
            else:
                receipt = strategy.receive(update) if step else strategy.take(update)
        except InputError as error:
            self._refuse(error, now, getattr(update, "client", None))
            raise
        client = int(update.client)
        del at.open[client]
        same = strategy.version == version and started == strategy.started
        if (
            same  # neither the round nor the opening has ended, nor (with refill at steps) has the model moved
            and (self.in_rounds or not started or (self._refill_at_step and not first))
            and receipt.outcome != "rejected"
        ):
            at.resting[client] = None
        else:
            if self.in_rounds:
                at.round.pop(client, None)
            if client not in at.away:
                at.idle.add(client)
        self._now = now
        if self._emit is not None:
            server, steps, examples = strategy.version, int(update.steps), int(update.examples)
            outcome, staleness, reason = receipt.outcome, receipt.staleness, receipt.reason
            told = ("arrival", now, server, client, pulled, job, steps, examples, staleness, outcome, reason, first)
            self._emit(tuple.__new__(Event, told))
        if not same and (self.in_rounds or at.resting):
            at.wake(self.in_rounds)
        return receipt

    def _match(self, update: Update) -> Ticket:
        """The open job that an update answers."""
        if not isinstance(update, Update):
            raise InputError(f"expected an aflock.Update, got {type(update).__name__}")
        client = update.client
        if type(client) is not int:
            client = self._require(client)
        ticket = self._at.open.get(client)
        if ticket is None or (update.job is not None and update.job != ticket.job):
            self._require(client)
            job = "" if update.job is None else f" {update.job}"
            raise DuplicateUpdate(f"client {client} has no open job{job}: it was answered, dropped or never given")
        if update.version != ticket.version:
            raise VersionError(f"the update says version {update.version}; its job was of version {ticket.version}")
        return ticket

    def _discard(self, update: Update, staleness: int) -> Receipt:
        self.strategy.check_numbers(update)
        self.strategy.restart(update.client)
        reason = f"staleness {staleness} exceeds max_staleness={self.max_staleness}; the client restarts"
        return Receipt("rejected", staleness, reason)

    def _take_first(self, update: Update, staleness: int) -> Receipt:
        name = self.strategy.sends
        client, gradient = update.client, mapping(update.vectors, "vectors").get(name)
        if gradient is None:
            raise MissingVector(f"the answer to a first job lacks the vector {name!r}")
        positive(update.steps, "steps")
        positive(update.examples, "examples")
        if client in self._at.joining:
            self.strategy.join(client, gradient)
            del self._at.joining[client]
            return Receipt("buffered", staleness, "the client has joined")
        started = self.strategy.offer(client, gradient)
        return Receipt("applied" if started else "buffered", staleness)

    def reject(self, client: int, now: float, steps: int, examples: int, reason: str) -> Receipt:
        """Discards the answer to an open job without showing it to the rule; the client is idle again."""
        with self._recorded(now, client):
            client = self._require_open_job(client)
        job, pulled, first, _ = self._release(client)
        self._now, version = now, self.strategy.version
        receipt = Receipt("rejected", version - pulled, reason)
        if self._emit is not None:
            told = (version, client, pulled, job, steps, examples, receipt.staleness, "rejected", reason, first)
            self._emit(Event("arrival", now, *told))
        return receipt

    def undo(self, model: Vector, now: float, reason: str) -> None:
        """Undoes the rule's last step: the model is the one before it, under the new version."""
        self._check_time(now)
        self.strategy.put_back(model)
        self._event("undo", now, reason=reason)

    def refuse(self, client: int | None, now: float, reason: str) -> None:
        """Says that something was refused; nothing changes."""
        self._event("refuse", now, client, reason=reason)

    # -- lost and late ----------------------------------------------------------------------------------------------

    def drop(self, client: int, now: float, reason: str = "lost", *, tell: bool = True) -> None:
        """Gives up on an open job (a crash, a lease that ran out); the slot is free and the client idle again.

        Without `tell` the rule is not told.
        """
        with self._recorded(now, client):
            client = self._require_open_job(client)
        self._close(client, "drop", now, reason, tell=tell)

    def overdue(self) -> list[int]:
        """The clients whose open job is older than `max_staleness`: what they send would be discarded."""
        if self.max_staleness is None:
            return []
        oldest = self.strategy.version - self.max_staleness
        # All of them: a rule may hand out old models, so the jobs do not stand in the order of their versions.
        return [c for c, ticket in self._at.open.items() if ticket.version < oldest and not ticket.first]

    @property
    def resets_silent(self) -> bool:
        """Whether whoever drives the coordinator is to `reset` the clients that are `overdue`, after every step."""
        return self.max_staleness is not None and getattr(self.strategy.p, "reset", "") == "silent"

    def reset(self, client: int, now: float) -> Job:
        """Replaces an open job by a new one from the current model."""
        with self._recorded(now, client):
            client = self._require_open_job(client)
        self._close(client, "reset", now, "restarts from the current model")
        if client in self._at.idle:  # it is not while it is away
            self._at.idle.take(client)
        return self._hand_out(client, now)

    def skip_jobs(self, before: int) -> None:
        """Gives no job a number below that one any more: those were given in a past that is lost."""
        self._next = max(self._next, before)

    def note_loss(self, now: float, reason: str) -> None:
        """Tells in an event that something is lost."""
        self._event("loss", now, reason=reason)

    def finish(self, now: float) -> bool:
        """Lets the rule step with what it holds, so that a last partial buffer is not lost; false if there is none."""
        self._check_time(now)
        before = self._mark()
        flushed = not self.opening and self.strategy.flush()
        if flushed:
            self._event("flush", now)
            self._wake(before)
        return flushed

    def _close(self, client: int, kind: Kind, now: float, reason: str, *, tell: bool = True) -> None:
        ticket = self._release(client)
        if tell:
            self.strategy.restart(client)
        self._event(kind, now, client, ticket, reason=reason)

    def _release(self, client: int) -> Ticket:
        """Takes an open job from its client."""
        ticket = self._at.open.pop(client)
        self._at.round.pop(client, None)
        self._at.settle(client)
        if ticket.first:
            self._at.first[client] = None
        return ticket

    # -- inside -----------------------------------------------------------------------------------------------------

    def _mark(self) -> tuple[int, bool]:
        """What tells whether a round or the opening has ended."""
        return self.strategy.version, self.opening

    def _wake(self, before: tuple[int, bool]) -> None:
        """The round is over: everyone who rested is idle again."""
        if self._mark() != before:
            self._at.wake(self.in_rounds)

    @contextmanager
    def _recorded(self, now: float, client: object) -> Iterator[None]:
        """What raises inside is recorded as refused; the time is checked first."""
        self._check_time(now)
        try:
            yield
        except InputError as error:
            self._refuse(error, now, client)
            raise

    def _refuse(self, error: InputError, now: float, client: object) -> None:
        self._event("refuse", now, client if isinstance(client, int) else None, reason=str(error))

    def _check_time(self, now: float) -> None:
        if not self._begun:
            raise OrderError("the coordinator has not been started; call start(w0) first")
        _check_number(now, self._now)

    def _require(self, client: int) -> int:
        if type(client) is int and client in self.strategy.clients:
            return client
        number = index(client, "client", UnknownClient)
        if number not in self.strategy.clients and number not in self._at.joining:
            raise UnknownClient(f"client {number} is not in the federation of {len(self.clients)} clients")
        return number

    def _require_open_job(self, client: int) -> int:
        number = self._require(client)
        if number not in self._at.open:
            raise DuplicateUpdate(f"client {number} has no open job")
        return number

    def _event(
        self,
        kind: Kind,
        now: float,
        client: int | None = None,
        ticket: Ticket | None = None,
        *,
        reason: str = "",
    ) -> None:
        """Says what happened, other than the two things that happen all the time: they say so themselves."""
        if kind != "refuse":
            self._now = now
        if self._emit is None:
            return
        job, version, first, _ = ticket or (None, None, False, None)
        self._emit(Event(kind, now, self.strategy.version, client, version, job, reason=reason, first=first))

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self, *, detached: bool = True) -> State:
        """Everything: open jobs, idle pool, policy and its random stream, and the strategy's own state."""
        if not self._begun:
            raise OrderError("the coordinator has not been started; there is no state to save")
        head = {"selection": self.selection, "next": self._next, "now": self._now}
        return {"coordinator": head, **self._at.state_dict(), "strategy": self.strategy.state_dict(detached=detached)}

    def load_state_dict(self, state: State) -> None:
        """Takes over a saved state, all of it or nothing. Open jobs stay open: their clients may still answer."""
        if not isinstance(state, Mapping) or "coordinator" not in state:
            raise StateError("this is not a state of a coordinator; expected what `state_dict` returned")
        saved_with = state["coordinator"].get("selection")
        if saved_with != self.selection:
            raise StateError(f"the state was saved with selection {saved_with!r}; expected {self.selection!r}")
        head = state["coordinator"]
        try:
            places, following, now = self._at.loaded(state), int(head["next"]), float(head["now"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, StateError):
                raise
            raise StateError(f"the saved state of the coordinator is damaged ({error!r})") from None
        self.strategy.load_state_dict(state["strategy"])
        self._at, self._next, self._now, self._begun = places, following, now, True
        self.open = places.open


def _check_number(now: float, least: float) -> None:
    if type(now) is float and least <= now < math.inf:
        return
    if isinstance(now, bool) or not isinstance(now, int | float) or not math.isfinite(now) or now < least:
        raise InputError(f"time {now!r} is not valid; expected a finite number of at least {least}")


def _check_cohort(cohort: int, candidates: int) -> None:
    if candidates < cohort:
        raise ParameterError(
            f"only {candidates} clients have a probability above 0, but a round takes {cohort}; it could never fill"
        )


def _check_refill(strategy: Strategy, concurrency: int | None) -> None:
    places = strategy.n if concurrency is None else min(concurrency, strategy.n)
    wanted = strategy.largest_cohort or getattr(strategy.p, "buffer", None) or 1
    if places < wanted:
        raise ParameterError(
            f"refill='step' with {places} places could never fill a buffer of {wanted}; raise concurrency to at least "
            f"{wanted}, or lower buffer"
        )


def _check_bound(name: str, value: int | None, least: int) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise ParameterError(f"{name}={value!r} is not valid; expected an integer of at least {least}, or None")
