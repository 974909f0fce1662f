"""A federation as a state machine: journal records in, answers out. It reads no clock, no socket and no file.

Everything that changes a federation is a journal record: a small JSON head and, for an update, its vectors as the
client sent them. What a record does depends on the state and the record alone, so that a replay of the journal ends
with the same bits. The server writes a record to the journal first and then calls `apply`; so do recovery and replay
(storage/applying.py). The kinds of records:

    open      the federation's id, its terms, and the checksum of the model it begins with
    hello     a client joins; when enough have, the first jobs may be pulled
    pull      a client asks for a job
    update    a client answers its job, and may ask for the next one with the same request
    drop      a job is given up: the client declined it, or its lease ran out
    leave     a client leaves for good
    suspend   a client gets no more jobs
    end       the federation is over
    terms     the terms have changed: the federation may go on, or be over
    loss      acknowledged updates are missing from the journal, and the operator goes on without them

A strategy may raise while `apply` applies a record that is in the journal already. `apply` then raises `RuleFailed`.
The strategy may have changed any part of its state by then, so the caller restores the state before the record and
calls `reject`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any, NamedTuple

from ... import kernels
from ...coordination.coordinator import Coordinator
from ...coordination.tally import Tally
from ...errors import InputError, StateError
from ...events import Event, Ticket
from ...strategies.base import Strategy
from ...strategies.checks import Sound, checked, positive
from ...types import Job, Receipt, State, Update, Vector
from ..protocol import wire
from ..protocol.refusals import Refused, ended, rule_failed, suspended, unknown_job, unusable
from ..protocol.wire import BytesLike, Headers, UpdateHead
from .client_record import ClientRecord
from .guard import Before, Guard
from .params import FederationParams
from .rule_failed import RuleFailed
from .terms import Terms

RecordHead = Mapping[str, Any]


_NO_TICKET = Ticket(-1, -1, False, 0.0)
"""The ticket of a client that has no open job: no job has its number."""


class Given(NamedTuple):
    """A job that a client was given."""

    id: int
    """The coordinator's number for the job."""
    job: Job
    number: int
    """How many jobs the client was given before."""
    staleness: int
    """The staleness of the client's last update."""


class UpdateAnswer(NamedTuple):
    """The answer to an update: its receipt, the version after it and, if the client asked for one, its next job."""

    receipt: Receipt
    version: int
    given: Given | None = None


RULES = 2
"""Grows when a strategy comes to do another thing with the same records. The first record of a journal says with which
of these a federation was begun, and it stays so: a replay of an old journal ends with the old model.

2: mr-asyncfl with exchange = "before" remembers the model before the aggregation of every client, not only of the last.
"""


class Federation:
    """Clients, their jobs and the model.

    The methods that ask and check change nothing; only `apply`, `reject` and the loading of a state do.
    """

    def __init__(
        self,
        make_strategy: Callable[[], Strategy],
        p: FederationParams,
        terms: Terms,
        w0: Vector,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        """A federation before its first record; `restore` calls `make_strategy` again."""
        self._make_strategy, self.p, self._first_terms, self._on_event = make_strategy, p, terms, on_event
        self.length = int(w0.size)
        self._w0_largest = kernels.largest(w0)
        self._start_over(w0)
        each = wire.size(p.encoding, self.length)
        self.expected = {
            True: ((self.strategy.sends,), each),
            False: (self.strategy.needs, each * len(self.strategy.needs)),
        }
        """Whether a job is a first job -> the names of the vectors its update must carry, and their bytes."""
        self._kinds: dict[str, Callable[[RecordHead, BytesLike], Any]] = {
            "open": self._on_open, "hello": self._on_hello, "pull": self._on_pull, "update": self._on_update,
            "drop": self._on_drop, "leave": self._on_leave, "suspend": self._on_suspend, "end": self._on_end,
            "terms": self._on_terms, "loss": self._on_loss,
        }  # fmt: skip

    def _start_over(self, w0: Vector | None) -> None:
        """Makes the state before the first record; without w^0, the caller loads a state next."""
        p = self.p
        self.terms = self._first_terms
        """Those of the last record that has terms; the federation file may have changed since."""
        self.strategy = self._make_strategy()
        self.coordinator = Coordinator(
            self.strategy,
            concurrency=p.concurrency,
            max_staleness=p.max_staleness,
            seed=p.seed,
            on_event=self._on_event,
        )
        self._w0 = w0
        self.id = ""
        self.epoch = 0.0
        """When the federation began, in seconds since 1970; the times of records count from there."""
        self.now = 0.0
        """The time of the newest record."""
        self.gathered: dict[str, int] = {}
        """The clients that have joined before the federation has begun: name -> generation of the token."""
        self.clients: dict[str, ClientRecord] = {}
        """The clients that take part, by name; filled when the federation begins."""
        self.counts = Tally()
        self.begun = False
        """Whether enough clients have joined: jobs can be pulled."""
        self.ended = ""
        """Why the federation has ended; "" if it has not."""
        self._spent = False
        """Whether it has ended because its budget of uploads or versions is spent."""
        self._reached: float | None = None
        """The accuracy that ended it, if it was that."""
        self._next_number = p.clients
        """The strategy's number for the next client that joins."""
        self.guard = Guard(self._w0_largest)
        self.lost = 0
        """How many acknowledged updates the journal has lost."""
        self._next_job = 0
        """No new job gets a number below this: a lost record may have given it to a client."""
        self._rules = RULES
        """The version of the rules with which the federation was begun."""

    # -- questions --------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """One of gathering (clients are missing), opening (first gradients are missing), running and ended."""
        if self.ended:
            return "ended"
        return "gathering" if not self.begun else "opening" if self.coordinator.opening else "running"

    @property
    def model(self) -> Vector:
        """The current model."""
        return self.strategy.model if self._w0 is None else self._w0

    @property
    def version(self) -> int:
        """The version of the current model."""
        return self.strategy.version

    @property
    def diverged(self) -> bool:
        """Whether a weight of the current model is not finite, or far larger than those of w^0."""
        return self._w0 is None and not self.strategy.largest <= self.guard.limit  # `not <=`: also true for NaN

    def has_joined(self, name: str, generation: int) -> bool:
        """Whether the client has joined with a token of that generation, so that a hello would change nothing."""
        client = self.clients.get(name)
        return self.gathered.get(name) == generation if client is None else client.generation == generation

    def active_client(self, name: str) -> ClientRecord:
        """The record of a client that may work; refuses all after the end, and who is suspended or has not joined."""
        client = self.clients.get(name)
        if self.ended:
            raise ended(self.ended)
        if client is None:
            if name in self.gathered:
                raise Refused(409, "unknown-job", "there are no jobs yet: other clients must join first")
            raise Refused(403, "not-a-member", "say hello first: POST /v1/hello")
        if client.suspended:
            raise suspended()
        return client

    def can_pull(self, name: str) -> bool:
        """Whether the client would get a job now."""
        client = self.clients.get(name)
        return client is not None and self.begun and not self.ended and self.coordinator.can_pull(client.number)

    @property
    def free_places(self) -> float:
        """How many more jobs may be open at the same time."""
        return self.coordinator.free_places if self.begun else 0

    def holds(self, client: ClientRecord, job: int) -> bool:
        """Whether `job` is the client's open job."""
        return self.coordinator.open.get(client.number, _NO_TICKET).job == job

    # -- checks before anything is written to the journal -------------------------------------------------------------

    def check_head(self, name: str, job: int, headers: Headers, length: int) -> tuple[ClientRecord, UpdateHead]:
        """Refuses an update that is not for the client's open job, or not of its form, before the body is read.

        Returns the record of the client that sends it, and what its headers say.
        """
        client, head = self.active_client(name), UpdateHead.parse(headers)
        number, pulled, first, _ = self.coordinator.open.get(client.number, _NO_TICKET)
        if number != job:
            raise unknown_job()
        version, steps, examples, vectors, encoding = head
        names, size = self.expected[first]
        if encoding != self.p.encoding:
            raise unusable(f"vectors are encoded as {encoding}; expected {self.p.encoding}")
        if vectors != names and sorted(vectors) != sorted(names):
            raise unusable(f"the update carries {', '.join(vectors) or 'nothing'}; expected {', '.join(names)}")
        if length != size:
            raise unusable(f"the body has {length} bytes; expected {size}")
        if steps < 1 or examples < 1:
            raise unusable("steps and examples must be at least 1")
        if examples > self.p.max_examples:
            raise unusable(
                f"the update claims {examples} examples; the limit is {self.p.max_examples} ([federation] max_examples)"
            )
        if steps > self.p.max_steps:
            raise unusable(f"the update claims {steps} steps; the limit is {self.p.max_steps} ([federation] max_steps)")
        if version != pulled:
            raise unusable(f"the update says version {version}; its job has another version")
        return client, head

    def check_vectors(self, client: ClientRecord, head: UpdateHead, body: BytesLike) -> list[float]:
        """Refuses vectors that no strategy can use, before they are written to the journal; returns their norms."""
        norms: list[float] = []
        for name, vector in wire.split(body, head.vectors, head.encoding, self.length).items():
            norm = kernels.norm(vector)
            if why := self.guard.objection(name, norm, most=self.p.max_norm, factor=self.terms.norm_factor):
                raise self.guard.refusal(client, why, finite=math.isfinite(norm))
            norms.append(norm)
        return norms

    def overdue(self) -> list[tuple[str, int]]:
        """The clients, and their jobs, that the rule wants to start again from the current model."""
        if self.ended or not self.begun or not self.coordinator.resets_silent:
            return []
        late = set(self.coordinator.overdue())
        return [(c.name, self.coordinator.ticket(c.number).job) for c in self.clients.values() if c.number in late]

    # -- records ----------------------------------------------------------------------------------------------------

    def apply(self, head: RecordHead, body: BytesLike) -> Any:
        """Applies a record; what it returns depends on the record's kind. `Refused` means that it changed nothing.

        After `RuleFailed` the state of the strategy is unknown: the caller must restore this object before it uses it.
        A MemoryError is no error of the strategy, and does not occur on every machine: it is raised as it is.
        """
        kind = self._kinds[head["k"]]
        if head["t"] > self.now:
            self.now = float(head["t"])
        try:
            return kind(head, body)
        except (Refused, MemoryError):
            raise
        except Exception as error:
            if head["k"] == "open":  # no strategy is called: the error is the operator's, who must see it
                raise
            raise RuleFailed(error) from error

    def reject(self, head: RecordHead, why: str, *, flush: bool) -> Any:
        """Applies a record at which the strategy has failed: as `apply`, but without calling the strategy.

        An update is rejected and its job closed. A drop drops the job. A client that leaves gets no more jobs, though
        the strategy still counts it. An end ends the federation. A hello or a pull is refused. With `flush`, an update
        that spends the budget lets the strategy make its last step, in which it may fail again; without `flush`, the
        strategy is not called at all.
        """
        self.now = max(self.now, float(head["t"]))
        kind = head["k"]
        if kind == "update":
            return self._reject_update(head, why, flush=flush)
        if kind in ("hello", "pull"):
            client = self.clients.get(head["name"])
            if self.begun:
                self.coordinator.refuse(None if client is None else client.number, self.now, why)
            raise rule_failed(why)
        without_rule: dict[str, Callable[[RecordHead, str], Any]] = {
            "drop": self._reject_drop, "leave": self._reject_leave, "suspend": self._reject_suspend,
            "end": self._reject_end, "terms": self._reject_terms,
        }  # fmt: skip
        return without_rule[kind](head, why)

    def _reject_update(self, head: RecordHead, why: str, *, flush: bool) -> UpdateAnswer:
        client = self.clients[head["name"]]
        receipt = self.coordinator.reject(client.number, self.now, head["s"], head["e"], why)
        self.counts.add(receipt)
        client.note(head["j"], receipt, self.strategy.version)
        try:
            self._end_when_spent(flush=flush)
        except MemoryError:
            raise
        except Exception as error:
            raise RuleFailed(error) from error
        return UpdateAnswer(receipt, client.version)

    def _reject_drop(self, head: RecordHead, why: str) -> bool:
        self.coordinator.drop(self.clients[head["name"]].number, self.now, f"{head['why']}; {why}", tell=False)
        self.counts.dropped += 1
        return True

    def _reject_leave(self, head: RecordHead, why: str) -> None:
        number = self.clients.pop(head["name"]).number
        self.coordinator.leave(number, self.now, why, tell=False)
        self.guard.remove(number)

    def _reject_suspend(self, head: RecordHead, why: str) -> None:
        client = self.clients[head["name"]]
        client.suspended = True
        self.coordinator.drop(client.number, self.now, f"the client was suspended; {why}", tell=False)

    def _reject_end(self, head: RecordHead, why: str) -> None:
        self._end(head["why"], flush=False)
        self._reached = head.get("accuracy")

    def _reject_terms(self, head: RecordHead, why: str) -> None:
        if self._change_terms(Terms.of(head["terms"])):
            self.ended, self._spent, self._reached = "", False, None
        if not self.ended:
            self._end_when_spent(flush=False)

    def _on_open(self, head: RecordHead, body: BytesLike) -> None:
        if self._w0 is not None and head["model"] != sha256(self._w0.data).hexdigest():
            raise StateError("the initial model is not the one this federation was begun with; put its file back")
        self.id, self.epoch, self.terms = head["id"], head["epoch"], Terms.of(head["terms"])
        self._follow_rules(head.get("rules", 1))

    def _follow_rules(self, rules: int) -> None:
        """Lets the strategy do as it did in the version of aflock that began the federation."""
        self._rules, self.strategy.older = rules, rules < RULES

    def _on_hello(self, head: RecordHead, body: BytesLike) -> None:
        name, generation = head["name"], head["gen"]
        client = self.clients.get(name)
        if self.ended or self.has_joined(name, generation):
            return
        if client is not None:  # the member was invited again
            client.generation, client.suspended = generation, False
        elif self.begun:
            self._join(name, generation)
        else:
            self.gathered[name] = generation
            if len(self.gathered) == self.p.clients:
                self._begin()

    def _begin(self) -> None:
        for number, (name, generation) in enumerate(self.gathered.items()):
            self.clients[name] = ClientRecord(name, number, generation)
        self.gathered.clear()
        assert self._w0 is not None
        self.coordinator.start(self._w0, self.now)
        self.begun, self._w0 = True, None  # the strategy has its own copy

    def _join(self, name: str, generation: int) -> None:
        self.coordinator.join(self._next_number, self.now)
        self.clients[name] = ClientRecord(name, self._next_number, generation)
        self._next_number += 1

    def _on_pull(self, head: RecordHead, body: BytesLike) -> Given | None:
        client = self.clients.get(head["name"])
        if client is None or not self.can_pull(client.name):
            return None
        return self._give_job(client)

    def _give_job(self, client: ClientRecord, *, waits: bool = True) -> Given | None:
        job = self.coordinator.pull(client.number, self.now, waits=waits)
        if job is None:
            return None
        assert job.id is not None
        self.guard.note_job(client.number, job, self.strategy)
        self.counts.pulls += 1
        number, client.jobs = client.jobs, client.jobs + 1
        return Given(job.id, job, number, client.staleness)

    def _on_update(self, head: RecordHead, body: BytesLike) -> UpdateAnswer:
        client = self.clients.get(head["name"])
        if self.ended:
            raise ended(self.ended)
        job, coordinator = head["j"], self.coordinator
        if client is None or coordinator.open.get(client.number, _NO_TICKET).job != job:
            raise unknown_job()
        vectors = Sound(
            wire.split(body, head["n"], head["enc"], self.length)
        )  # `check_vectors` has checked them before the record
        update = Update(client.number, head["v"], vectors, head["s"], head["e"], job)
        before = self._before_step()
        try:
            receipt = coordinator.push(update, self.now)
        except InputError as error:
            if self._passes_checks(update, coordinator.ticket(client.number)):
                raise  # the update is correct, so the strategy has failed
            raise unusable(str(error)) from None
        self.counts.add(receipt)
        if receipt.outcome != "rejected":
            self.guard.note_update(client.name, head["n"], head.get("norm", ()))
        version = self.strategy.version
        if version != before[0] and (undone := self._after_step(before)):
            receipt = Receipt(receipt.outcome, receipt.staleness, undone)
        client.note(job, receipt, version)
        self._end_when_spent()
        more = head.get("next") and not self.ended
        return UpdateAnswer(receipt, version, self._give_job(client, waits=False) if more else None)

    def _passes_checks(self, update: Update, ticket: Ticket) -> bool:
        """Whether an update passes every check that comes before the strategy's own code."""
        try:
            positive(update.steps, "steps")
            positive(update.examples, "examples")
            for name in self.expected[ticket.first][0]:
                checked(update.vectors.get(name), name, self.length)
        except InputError:
            return False
        return update.version == ticket.version

    def _before_step(self) -> Before:
        """Call it before an update, a leave or the end is applied, and give its result to `_after_step`."""
        guarded = self.terms.norm_factor is not None and self._w0 is None
        return self.strategy.version, self.strategy.model if guarded else None

    def _after_step(self, before: Before) -> str:
        undone = self.guard.after_step(before, self.coordinator, self.now)
        self.counts.undone += bool(undone)
        return undone

    def _end_when_spent(self, *, flush: bool = True) -> None:
        why = self.terms.budget.spent(self.counts.updates, self.strategy.version)
        if why:
            self._end(why, flush=flush)
            self._spent = True

    def _on_drop(self, head: RecordHead, body: BytesLike) -> bool:
        client = self.clients.get(head["name"])
        if client is None or not self.holds(client, head["j"]):
            return False
        self.coordinator.drop(client.number, self.now, head["why"])
        self.counts.dropped += 1
        return True

    def _on_leave(self, head: RecordHead, body: BytesLike) -> None:
        self.gathered.pop(head["name"], None)
        client = self.clients.pop(head["name"], None)
        if client is not None and not self.ended:
            self._remove(client.number)

    def _remove(self, number: int) -> None:
        before = self._before_step()
        self.coordinator.leave(number, self.now)
        self.guard.remove(number)
        self._after_step(before)

    def _on_suspend(self, head: RecordHead, body: BytesLike) -> None:
        client = self.clients.get(head["name"])
        if client is None or client.generation != head["gen"]:
            return
        client.suspended = True
        if self.coordinator.works(client.number):
            self.coordinator.drop(client.number, self.now, "the client was suspended")

    def _on_end(self, head: RecordHead, body: BytesLike) -> None:
        if not self.ended:
            self._end(head["why"])
            self._reached = head.get("accuracy")

    def _on_terms(self, head: RecordHead, body: BytesLike) -> None:
        if self._change_terms(Terms.of(head["terms"])):
            self.ended, self._spent, self._reached = "", False, None
            self._remove_those_who_left()
        if not self.ended:
            self._end_when_spent()

    def _on_loss(self, head: RecordHead, body: BytesLike) -> None:
        self.lost += head["count"]
        self._next_job = max(self._next_job, head["next"])
        self.coordinator.skip_jobs(self._next_job)
        self.coordinator.note_loss(self.now, f"{head['count']} acknowledged updates are lost")

    def _change_terms(self, terms: Terms) -> bool:
        """Takes new terms; returns whether the old ones ended the federation, so that it may go on.

        If the new budget is spent, too, `_end_when_spent` ends the federation again.
        """
        self.terms = terms
        missed = self._reached is not None and terms.budget.target > self._reached
        return self._spent or missed

    def _remove_those_who_left(self) -> None:
        """Removes the clients that left after the end: `_on_leave` does not call the strategy then."""
        if self.begun:
            present = {client.number for client in self.clients.values()}
            for number in sorted(self.coordinator.clients - present):
                self._remove(number)

    def _end(self, why: str, *, flush: bool = True) -> None:
        """Ends the federation; with `flush`, the strategy makes a last step with the updates that it has buffered."""
        if self.begun and flush:
            before = self._before_step()
            self.coordinator.finish(self.now)
            self._after_step(before)
        self.ended = why

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """Everything needed to go on with the same bits.

        The arrays are not copies: the caller saves them before the next record is applied.
        """
        state: State = {
            "federation": {
                "id": self.id,
                "epoch": self.epoch,
                "now": self.now,
                "gathered": list(self.gathered.items()),
                "seats": [client.saved() for client in self.clients.values()],  # the name is part of the format
                "counts": self.counts.state_dict(),
                "begun": self.begun,
                "ended": self.ended,
                "terms": self.terms.record(),
                "spent": self._spent,
                "reached": self._reached,
                "next": self._next_number,
                "lost": [self.lost, self._next_job],
                "rules": self._rules,
                **self.guard.state_dict(),
            }
        }
        return state | ({"coordinator": self.coordinator.state_dict(detached=False)} if self.begun else {})

    def restore(self, state: State | None, w0: Callable[[], Vector]) -> None:
        """Loads a saved state (None: the one before the first record), whatever state this object is in."""
        begun = state is not None and state["federation"]["begun"]
        self._start_over(None if begun else w0())
        if state is not None:
            self.load_state_dict(state)

    def load_state_dict(self, state: State) -> None:
        """Loads what `state_dict` returned into a federation before its first record."""
        try:
            saved = state["federation"]
            clients = {values[0]: ClientRecord.loaded(values) for values in saved["seats"]}
            counts = Tally.loaded(saved["counts"])
            terms, spent, reached = Terms.of(saved["terms"]), saved["spent"], saved["reached"]
            lost, next_job = saved.get("lost", (0, 0))  # states of earlier versions have no such key
            rules = int(saved.get("rules", 1))
            guard = Guard(self._w0_largest)
            guard.load_state_dict(saved)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise StateError(f"the saved state of the federation is damaged ({error!r})") from None
        if saved["begun"]:
            self.coordinator.load_state_dict(state["coordinator"])
            self._w0 = None
        self.id, self.epoch, self.now = saved["id"], saved["epoch"], saved["now"]
        self.begun, self.ended, self.terms = saved["begun"], saved["ended"], terms
        self._spent, self._reached = spent, reached
        self.lost, self._next_job = lost, next_job
        self._follow_rules(rules)
        self.coordinator.skip_jobs(next_job)
        self.gathered, self.clients = dict(saved["gathered"]), clients
        self.counts, self._next_number = counts, saved["next"]
        self.guard = guard
