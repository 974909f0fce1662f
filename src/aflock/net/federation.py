"""A federation as a state machine: journal records in, answers out. It knows no clock, no socket and no file.

Everything that changes it is a `Record` (a small JSON head and, for an update, the vectors as they came). What a record
does depends on the state and the record alone, so that replaying a journal ends with the same bits:

    open      the federation's name
    hello     a client comes; with enough of them the first jobs are given; later ones join
    pull      a client asks for a job
    update    a client reports, and may ask for the next job in the same breath
    drop      a job is given up (declined, or its lease ran out)
    leave     a client goes for good
    suspend   a client is shut out
    end       the federation is over
    terms     when it ends has been changed: it may go on, or be over
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np

from .. import kernels
from ..coordinator import Coordinator
from ..errors import InputError, StateError
from ..events import Event
from ..strategies.checks import Sound
from ..types import Job, Receipt, State, Update, Vector
from . import wire
from .refusals import Refused, ended, unknown_job, unusable
from .seats import Counts, Seat, Terms
from .settings import FederationParams, Settings
from .wire import Buffer, UpdateHead

Head = Mapping[str, Any]


class Given(NamedTuple):
    """A job that was handed out."""

    id: int
    """The coordinator's number for it."""
    job: Job
    number: int
    """How many jobs the client was given before."""
    staleness: int
    """Of the client's last update."""


class Answer(NamedTuple):
    """What an update is answered with."""

    receipt: Receipt
    version: int
    given: Given | None = None


class Federation:
    """Members, jobs and the model."""

    def __init__(self, settings: Settings, w0: Vector, on_event: Callable[[Event], None] | None = None) -> None:
        p: FederationParams = settings.section("federation")
        self.settings, self.p = settings, p
        self.terms = settings.terms()
        """As the journal has them: the past stays what it was when the file is changed."""
        self.strategy = settings.strategy()
        self.coordinator = Coordinator(
            self.strategy,
            concurrency=p.concurrency,
            max_staleness=p.max_staleness,
            seed=p.seed,
            on_event=on_event,
        )
        self.length = int(w0.size)
        each = wire.size(p.encoding, self.length)
        self.expected = {True: (("gradient",), each), False: (self.strategy.needs, each * len(self.strategy.needs))}
        """The names and bytes of the vectors in an answer to a first job, and to others."""
        self._w0: Vector | None = w0
        self.id = ""
        self.epoch = 0.0
        """When it began, in seconds since 1970: what its own time counts from."""
        self.now = 0.0
        self.gathered: dict[str, int] = {}
        self.seats: dict[str, Seat] = {}
        self.counts = Counts()
        self.begun = False
        self.ended = ""
        """Why it is over, if it is."""
        self._spent = False
        """Whether by its terms, other than the target."""
        self._reached: float | None = None
        """The accuracy that ended it."""
        self._next = p.clients
        self._kinds: dict[str, Callable[[Head, Buffer], Any]] = {
            "open": self._on_open, "hello": self._on_hello, "pull": self._on_pull, "update": self._on_update,
            "drop": self._on_drop, "leave": self._on_leave, "suspend": self._on_suspend, "end": self._on_end,
            "terms": self._on_terms,
        }  # fmt: skip

    # -- what can be asked ------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """Where the federation stands, in a word."""
        if self.ended:
            return "ended"
        return "gathering" if not self.begun else "opening" if self.coordinator.opening else "running"

    @property
    def model(self) -> Vector:
        """The current model."""
        return self.strategy.model if self._w0 is None else self._w0

    @property
    def version(self) -> int:
        """Of the current model."""
        return self.strategy.version

    def is_member(self, name: str, generation: int) -> bool:
        """Whether a hello would change nothing."""
        seat = self.seats.get(name)
        return self.gathered.get(name) == generation if seat is None else seat.generation == generation

    def seat(self, name: str) -> Seat:
        """The client's own, or a refusal."""
        seat = self.seats.get(name)
        if self.ended:
            raise ended(self.ended)
        if seat is None:
            if name in self.gathered:
                raise Refused(409, "unknown-job", "jobs have not begun: other clients are still to come")
            raise Refused(403, "not-a-member", "say hello first: POST /v1/hello")
        if seat.suspended:
            raise Refused(403, "suspended", "you are suspended for unusable updates; ask for a new invitation")
        return seat

    def can_pull(self, name: str) -> bool:
        """Whether the client would get a job now."""
        seat = self.seats.get(name)
        return seat is not None and self.begun and not self.ended and self.coordinator.can_pull(seat.number)

    @property
    def free_places(self) -> float:
        """How many more jobs may be open."""
        return self.coordinator.free_places if self.begun else 0

    def holds(self, seat: Seat, job: int) -> bool:
        """Whether that is the client's open job."""
        return self.coordinator.holds(seat.number, job)

    # -- at the door ------------------------------------------------------------------------------------------------

    def known(self, name: str, job: int) -> Answer | None:
        """What an update that was taken before was answered with, also after the end."""
        seat = self.seats.get(name)
        return Answer(seat.receipt, seat.version) if seat is not None and seat.answered == job else None

    def check_head(self, seat: Seat, job: int, head: UpdateHead, length: int) -> None:
        """Refuses an update that cannot be one, before its body is read."""
        ticket = self.coordinator.open_job(seat.number)
        if ticket is None or ticket[0] != job:
            raise unknown_job()
        _, pulled, first, _ = ticket
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
        if version != pulled:
            raise unusable(f"the update says version {version}; its job was of another")

    def check_vectors(self, head: UpdateHead, body: Buffer) -> None:
        """Refuses vectors no rule can use; none of them gets into the journal."""
        for name, vector in wire.split(body, head.vectors, head.encoding, self.length).items():
            if not kernels.all_finite(vector):
                raise unusable(f"the vector {name} holds numbers that are not finite")
            if self.p.max_norm is not None:
                norm = float(np.linalg.norm(vector.astype(np.float64)))
                if norm > self.p.max_norm:
                    raise unusable(f"the vector {name} has the norm {norm:.4g}; at most {self.p.max_norm:g} is taken")

    # -- what happens -----------------------------------------------------------------------------------------------

    def apply(self, head: Head, body: Buffer) -> Any:
        """Lets a record happen; what it returns depends on its kind. An error changes nothing."""
        if head["t"] > self.now:
            self.now = float(head["t"])
        return self._kinds[head["k"]](head, body)

    def _on_open(self, head: Head, body: Buffer) -> None:
        if self._w0 is not None and head["model"] != sha256(self._w0.data).hexdigest():
            raise StateError("the model to begin with is not the one this federation began with; put its file back")
        self.id, self.epoch, self.terms = head["id"], head["epoch"], Terms(*head["terms"])

    def _on_hello(self, head: Head, body: Buffer) -> None:
        name, generation = head["name"], head["gen"]
        seat = self.seats.get(name)
        if self.ended or self.is_member(name, generation):
            return
        if seat is not None:  # invited again
            seat.generation, seat.suspended = generation, False
        elif self.begun:
            self._take_in(name, generation)
        else:
            self.gathered[name] = generation
            if len(self.gathered) == self.p.clients:
                self._begin()

    def _begin(self) -> None:
        for number, (name, generation) in enumerate(self.gathered.items()):
            self.seats[name] = Seat(name, number, generation)
        self.gathered.clear()
        assert self._w0 is not None
        self.coordinator.start(self._w0, self.now)
        self.begun, self._w0 = True, None  # the rule has its own

    def _take_in(self, name: str, generation: int) -> None:
        self.coordinator.join(self._next, self.now)
        self.seats[name] = Seat(name, self._next, generation)
        self._next += 1

    def _on_pull(self, head: Head, body: Buffer) -> Given | None:
        seat = self.seats.get(head["name"])
        if seat is None or not self.can_pull(seat.name):
            return None
        return self._give(seat)

    def _give(self, seat: Seat, *, waits: bool = True) -> Given | None:
        job = self.coordinator.pull(seat.number, self.now, waits=waits)
        if job is None:
            return None
        assert job.id is not None
        self.counts.pulls += 1
        number, seat.jobs = seat.jobs, seat.jobs + 1
        return Given(job.id, job, number, seat.staleness)

    def _on_update(self, head: Head, body: Buffer) -> Answer:
        seat = self.seats.get(head["name"])
        if self.ended:
            raise ended(self.ended)
        job, coordinator = head["j"], self.coordinator
        if seat is None or not coordinator.holds(seat.number, job):
            raise unknown_job()
        vectors = Sound(wire.split(body, head["n"], head["enc"], self.length))  # see `check_vectors`
        update = Update(seat.number, head["v"], vectors, head["s"], head["e"], job)
        try:
            receipt = coordinator.push(update, self.now)
        except InputError as error:
            raise unusable(str(error)) from None
        self.counts.add(receipt)
        version = self.strategy.version
        seat.note(job, receipt, version)
        self._end_when_spent()
        more = head.get("next") and not self.ended
        return Answer(receipt, version, self._give(seat, waits=False) if more else None)

    def _end_when_spent(self) -> None:
        uploads, versions, _ = self.terms
        if uploads is None and versions is None:
            return
        why = self.terms.spent(self.counts.updates, self.strategy.version)
        if why:
            self._end(why)
            self._spent = True

    def _on_drop(self, head: Head, body: Buffer) -> bool:
        seat = self.seats.get(head["name"])
        if seat is None or not self.holds(seat, head["j"]):
            return False
        self.coordinator.drop(seat.number, self.now, head["why"])
        self.counts.dropped += 1
        return True

    def _on_leave(self, head: Head, body: Buffer) -> None:
        self.gathered.pop(head["name"], None)
        seat = self.seats.pop(head["name"], None)
        if seat is not None and not self.ended:
            self.coordinator.leave(seat.number, self.now)

    def _on_suspend(self, head: Head, body: Buffer) -> None:
        seat = self.seats.get(head["name"])
        if seat is None or seat.generation != head["gen"]:
            return
        seat.suspended = True
        if self.coordinator.works(seat.number):
            self.coordinator.drop(seat.number, self.now, "the client was suspended")

    def _on_end(self, head: Head, body: Buffer) -> None:
        if not self.ended:
            self._end(head["why"])
            self._reached = head.get("accuracy")

    def _on_terms(self, head: Head, body: Buffer) -> None:
        self.terms = terms = Terms(*head["terms"])
        missed = self._reached is not None and (terms.target is None or terms.target > self._reached)
        if self._spent or missed:
            self.ended, self._spent, self._reached = "", False, None
            self._let_go_who_has_left()
        if not self.ended:
            self._end_when_spent()

    def _let_go_who_has_left(self) -> None:
        """Whoever went after the end: the rule had no use for hearing of it then."""
        if self.begun:
            seated = {seat.number for seat in self.seats.values()}
            for number in sorted(self.coordinator.clients - seated):
                self.coordinator.leave(number, self.now)

    def _end(self, why: str) -> None:
        if self.begun:
            self.coordinator.finish(self.now)
        self.ended = why

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """Everything needed to go on with the same bits; its arrays are good until something happens."""
        state: State = {
            "federation": {
                "id": self.id,
                "epoch": self.epoch,
                "now": self.now,
                "gathered": list(self.gathered.items()),
                "seats": [seat.saved() for seat in self.seats.values()],
                "counts": {name: getattr(self.counts, name) for name in Counts.__dataclass_fields__},
                "begun": self.begun,
                "ended": self.ended,
                "terms": list(self.terms),
                "spent": self._spent,
                "reached": self._reached,
                "next": self._next,
            }
        }
        return state | ({"coordinator": self.coordinator.state_dict(detached=False)} if self.begun else {})

    def load_state_dict(self, state: State) -> None:
        """Takes over a saved state."""
        try:
            saved = state["federation"]
            seats = {values[0]: Seat.loaded(values) for values in saved["seats"]}
            counts = Counts(**saved["counts"])
            terms, spent, reached = Terms(*saved["terms"]), saved["spent"], saved["reached"]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise StateError(f"the saved state of the federation is damaged ({error!r})") from None
        if saved["begun"]:
            self.coordinator.load_state_dict(state["coordinator"])
            self._w0 = None
        self.id, self.epoch, self.now = saved["id"], saved["epoch"], saved["now"]
        self.begun, self.ended, self.terms = saved["begun"], saved["ended"], terms
        self._spent, self._reached = spent, reached
        self.gathered, self.seats, self.counts, self._next = dict(saved["gathered"]), seats, counts, saved["next"]
