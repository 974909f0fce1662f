"""The server's core without input or output: who may pull, which version they got, what becomes of what they send.

    c = Coordinator(strategy, concurrency=20)
    c.start(w0, now=0.0)
    for job in c.dispatch(now=0.0): ...             # the server picks clients, or
    job = c.pull(client=3, now=1.5)                 # a client asks on its own
    receipt = c.push(update, now=7.2)

It never sleeps and never reads a clock: time is an argument and must not run backwards. It is the same object in
simulation, behind a network and in replay, and it emits one `Event` for everything that happens.

A client is in one of these places:

    idle      may be picked, or may pull
    working   has an open job; at most one, and an update is taken only for it
    resting   has done its part of a round that waits for others (rules with a cohort, and the opening)

The opening: where a rule needs every client's gradient first, each client's first job is marked `first`; the rule
starts when all are in. A client that joins such a rule later gets a first job and enters the mean with its answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from . import selection
from .errors import (
    DuplicateClient,
    DuplicateUpdate,
    InputError,
    OrderError,
    ParameterError,
    StateError,
    UnknownClient,
    VersionError,
)
from .events import Event, Kind, Ticket
from .strategies.base import Strategy
from .types import Job, Receipt, State, Update, Vector


class Coordinator:
    """Drives one strategy."""

    def __init__(
        self,
        strategy: Strategy,
        *,
        concurrency: int | None = None,
        policy: str | None = None,
        probabilities: Mapping[int, float] | None = None,
        max_staleness: int | None = None,
        seed: int = 0,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        """Takes charge of a strategy that has not been started.

        concurrency      open jobs at a time; None: no limit
        policy           "uniform", "biased" (with `probabilities`), "fair" or "all"; None: "biased" where probabilities
                         are given, else the rule's own ("fair" for afl, "uniform" for the others)
        max_staleness    older updates are discarded, whatever the rule; None: the rule's own bound, if it has one
        on_event         called with every event
        """
        _check_bound("concurrency", concurrency, 1)
        _check_bound("max_staleness", max_staleness, 0)
        own: int | None = getattr(strategy.p, "max_staleness", None)
        default = "biased" if probabilities is not None else "fair" if strategy.fair else "uniform"
        self.strategy = strategy
        self.concurrency = concurrency
        self.max_staleness = own if max_staleness is None else max_staleness
        self.policy = policy or default
        self._idle = selection.create(self.policy, seed, probabilities)
        self._emit = on_event
        self._open: dict[int, Ticket] = {}
        self._resting: dict[int, None] = {}
        self._joining: dict[int, int | None] = {}
        self._round: dict[int, None] = {}
        self._next = 0
        self._now = -math.inf
        self._begun = False

    # -- what can be asked ------------------------------------------------------------------------------------------

    @property
    def clients(self) -> set[int]:
        """Everyone registered, those on their way in included."""
        return self.strategy.clients | set(self._joining)

    @property
    def working(self) -> dict[int, Ticket]:
        """The open jobs, oldest first."""
        return dict(self._open)

    @property
    def idle(self) -> int:
        """How many clients could be picked now."""
        return len(self._idle)

    @property
    def opening(self) -> bool:
        """Whether first gradients are still missing."""
        return self._begun and not self.strategy.started

    # -- coming and going -------------------------------------------------------------------------------------------

    def start(self, w0: Vector, now: float = 0.0, examples: Mapping[int, int] | None = None) -> None:
        """Opens the federation with the strategy's clients, all of them idle."""
        if self._begun:
            raise OrderError("the coordinator was started before; create a new one to start again")
        self._check_time(now)
        self.strategy.open(w0, examples)
        self._begun, self._now = True, now
        for client in sorted(self.strategy.clients):
            self._idle.add(client)
        self._event("start", now)

    def join(self, client: int, now: float, examples: int | None = None) -> None:
        """Registers a client; where the rule needs its first gradient, it enters with the answer to its first job."""
        self._tick(now)
        if client in self._joining:
            raise DuplicateClient(f"client {client} is on its way into the federation already")
        if self.strategy.first and not self.opening:
            if client in self.strategy.clients:
                raise DuplicateClient(f"client {client} is in the federation already")
            self._joining[client] = examples
        else:
            self.strategy.join(client, examples=examples)
        self._idle.add(client)
        self._event("join", now, client, examples=examples)

    def leave(self, client: int, now: float) -> None:
        """Removes a client for good, its open job and what the rule holds of it included."""
        self._tick(now)
        self._require(client)
        before = self._mark()
        if client in self._joining:
            del self._joining[client]
        else:
            self.strategy.leave(client)
        ticket = self._open.pop(client, None)
        self._resting.pop(client, None)
        self._round.pop(client, None)
        self._idle.forget(client)
        self._event("leave", now, client, ticket=ticket)
        self._wake(before)

    # -- jobs out ---------------------------------------------------------------------------------------------------

    def pull(self, client: int, now: float) -> Job | None:
        """A job for a client that asks; None if it has to wait (no free slot, or its round is not over).

        A client that asks while it has an open job has lost it: the old one is dropped.
        """
        self._tick(now)
        self._require(client)
        if client in self._open:
            self._close(client, "drop", now, "the client pulled again")
        if client not in self._idle or self._slots() < 1:
            return None
        return self._hand_out(client, now)

    def dispatch(self, now: float) -> list[Job]:
        """Jobs for as many idle clients as there are slots, picked by the policy."""
        self._tick(now)
        jobs = []
        while len(self._idle) and self._slots() > 0:
            jobs.append(self._hand_out(self._idle.next(), now))
        return jobs

    def _slots(self) -> float:
        """How many more jobs may be open now."""
        free = math.inf if self.concurrency is None else self.concurrency - len(self._open)
        cohort = self.strategy.cohort
        return free if cohort is None else min(free, cohort - len(self._round))

    def _hand_out(self, client: int, now: float) -> Job:
        job = self._make_job(client)
        self._idle.take(client)
        self._open[client] = Ticket(self._next, job.version, job.first, now)
        if self.strategy.cohort is not None:
            self._round[client] = None
        self._next += 1
        self._event("pull", now, client, ticket=self._open[client])
        return replace(job, id=self._open[client].job)

    def _make_job(self, client: int) -> Job:
        if client in self._joining or client in self.strategy.awaited:
            return Job(client=client, version=self.strategy.version, model=self.strategy.model, first=True)
        return self.strategy.job(client)

    # -- answers in -------------------------------------------------------------------------------------------------

    def push(self, update: Update, now: float) -> Receipt:
        """Takes the answer to an open job. What cannot be one is refused: an error, an event, and nothing changes."""
        self._tick(now)
        try:
            ticket = self._match(update)
            before = self._mark()
            receipt = self._take(update, ticket)
        except InputError as error:
            client = update.client if isinstance(update, Update) else None
            self._event("refuse", now, client, reason=str(error))
            raise
        del self._open[update.client]
        moved = self._mark() != before
        waits = (self.strategy.cohort is not None or self.opening) and not moved and not receipt.rejected
        if waits:
            self._resting[update.client] = None
        else:
            self._idle.add(update.client)
            self._round.pop(update.client, None)
        self._event("arrival", now, update.client, ticket=ticket, update=update, receipt=receipt)
        self._wake(before)
        return receipt

    def _match(self, update: Update) -> Ticket:
        if not isinstance(update, Update):
            raise InputError(f"expected an aflock.Update, got {type(update).__name__}")
        self._require(update.client)
        ticket = self._open.get(update.client)
        if ticket is None or update.job not in (None, ticket.job):
            job = "" if update.job is None else f" {update.job}"
            raise DuplicateUpdate(
                f"client {update.client} has no open job{job}: it was answered, dropped or never given"
            )
        if update.version != ticket.version:
            raise VersionError(f"the update says version {update.version}; its job was of version {ticket.version}")
        return ticket

    def _take(self, update: Update, ticket: Ticket) -> Receipt:
        staleness = self.strategy.version - ticket.version
        if ticket.first:
            return self._take_first(update, staleness)
        if self.max_staleness is not None and staleness > self.max_staleness:
            reason = f"staleness {staleness} exceeds max_staleness={self.max_staleness}; the client restarts"
            return Receipt("rejected", staleness, reason)
        return self.strategy.receive(update)

    def _take_first(self, update: Update, staleness: int) -> Receipt:
        gradient = update.vectors.get("gradient")
        if gradient is None:
            raise InputError("the answer to a first job lacks the vector 'gradient'")
        if update.client in self._joining:
            if self.opening:
                raise InputError(f"client {update.client} cannot join while first gradients are missing")
            self.strategy.join(update.client, gradient, self._joining[update.client])
            del self._joining[update.client]
            return Receipt("buffered", staleness, "the client has joined")
        started = self.strategy.offer(update.client, gradient)
        return Receipt("applied" if started else "buffered", staleness)

    # -- lost and late ----------------------------------------------------------------------------------------------

    def drop(self, client: int, now: float, reason: str = "lost") -> None:
        """Gives up on an open job (a crash, a lease that ran out); the slot is free and the client idle again."""
        self._tick(now)
        self._require(client)
        if client not in self._open:
            raise DuplicateUpdate(f"client {client} has no open job to drop")
        self._close(client, "drop", now, reason)

    def overdue(self) -> list[int]:
        """The clients whose open job is older than `max_staleness`: what they send would be discarded."""
        if self.max_staleness is None:
            return []
        oldest, late = self.strategy.version - self.max_staleness, []
        for client, ticket in self._open.items():
            if ticket.version > oldest:  # jobs stand in the order they were given: none older follows
                break
            if ticket.version < oldest and not ticket.first:
                late.append(client)
        return late

    def reset(self, client: int, now: float) -> Job:
        """Replaces an open job by a new one from the current model."""
        self._tick(now)
        self._require(client)
        if client not in self._open:
            raise DuplicateUpdate(f"client {client} has no open job to reset")
        self._close(client, "reset", now, "restarted from the current model")
        return self._hand_out(client, now)

    def finish(self, now: float) -> bool:
        """Lets the rule step with what it holds, so that a last partial buffer is not lost; false if there is none."""
        self._tick(now)
        before = self._mark()
        flushed = not self.opening and self.strategy.flush()
        if flushed:
            self._event("flush", now)
            self._wake(before)
        return flushed

    def _close(self, client: int, kind: Kind, now: float, reason: str) -> None:
        ticket = self._open.pop(client)
        self._round.pop(client, None)
        self._idle.add(client)
        self._event(kind, now, client, ticket=ticket, reason=reason)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _mark(self) -> tuple[int, bool]:
        """What tells whether a round or the opening has ended."""
        return self.strategy.version, self.opening

    def _wake(self, before: tuple[int, bool]) -> None:
        """The round is over: everyone who rested is idle again."""
        if self._mark() == before:
            return
        for client in self._resting:
            self._idle.add(client)
        self._resting.clear()
        self._round = dict.fromkeys(self._open) if self.strategy.cohort is not None else {}

    def _tick(self, now: float) -> None:
        if not self._begun:
            raise OrderError("the coordinator has not been started; call start(w0) first")
        self._check_time(now)
        self._now = now

    def _check_time(self, now: float) -> None:
        if not math.isfinite(now) or now < self._now:
            raise InputError(f"time {now} is not valid; expected a finite number of at least {self._now}")

    def _require(self, client: int) -> None:
        if client not in self.strategy.clients and client not in self._joining:
            raise UnknownClient(f"client {client!r} is not in the federation of {len(self.clients)} clients")

    def _event(
        self,
        kind: Kind,
        now: float,
        client: int | None = None,
        *,
        ticket: Ticket | None = None,
        update: Update | None = None,
        receipt: Receipt | None = None,
        reason: str = "",
        examples: int | None = None,
    ) -> None:
        if self._emit is None:
            return
        self._emit(
            Event(
                kind=kind,
                time=now,
                server=self.strategy.version,
                client=client,
                version=ticket.version if ticket else None,
                job=ticket.job if ticket else None,
                first=ticket.first if ticket else False,
                steps=update.steps if update else None,
                examples=update.examples if update else examples,
                staleness=receipt.staleness if receipt else None,
                outcome=receipt.outcome if receipt else "",
                reason=receipt.reason if receipt else reason,
            )
        )

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """Everything: open jobs, idle pool, policy and its random stream, and the strategy's own state."""
        if not self._begun:
            raise OrderError("the coordinator has not been started; there is no state to save")
        tickets = list(self._open.values())
        return {
            "coordinator": {"policy": self.policy, "next": self._next, "now": self._now},
            "open": {
                "clients": np.array(list(self._open), np.int64),
                "jobs": np.array([ticket.job for ticket in tickets], np.int64),
                "versions": np.array([ticket.version for ticket in tickets], np.int64),
                "firsts": np.array([ticket.first for ticket in tickets], np.int64),
                "times": np.array([ticket.time for ticket in tickets], np.float64),
            },
            "resting": np.array(list(self._resting), np.int64),
            "round": np.array(list(self._round), np.int64),
            "joining": [[client, examples] for client, examples in self._joining.items()],
            "selection": self._idle.state_dict(),
            "strategy": self.strategy.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Takes over a saved state. Open jobs stay open: their clients may still answer."""
        if not isinstance(state, Mapping) or "coordinator" not in state:
            raise StateError("this is not a state of a coordinator; expected what `state_dict` returned")
        head = state["coordinator"]
        if head["policy"] != self.policy:
            raise StateError(f"the state was saved with policy {head['policy']!r}; expected {self.policy!r}")
        self.strategy.load_state_dict(state["strategy"])
        self._idle.load_state_dict(state["selection"])
        columns = [state["open"][name].tolist() for name in ("clients", "jobs", "versions", "firsts", "times")]
        self._open = {c: Ticket(j, v, bool(f), t) for c, j, v, f, t in zip(*columns, strict=True)}
        self._resting = dict.fromkeys(state["resting"].tolist())
        self._round = dict.fromkeys(state["round"].tolist())
        self._joining = dict(state["joining"])
        self._next, self._now, self._begun = head["next"], head["now"], True


def _check_bound(name: str, value: int | None, least: int) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise ParameterError(f"{name}={value!r} is not valid; expected an integer of at least {least}, or None")
