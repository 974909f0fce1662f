"""What every server rule is: the contract, the checks of what comes in, and the state it saves.

A rule is driven by hand, by the simulator or by a server in the same way:

    s.start(w0)                        # or s.start(w0, first={client: gradient, ...}) where s.first is true
    job = s.job(client=3)
    receipt = s.receive(Update(client=3, version=job.version, vectors={"gradient": g}))

`receive` is `take` and `step` in one: a simulation in which one server step answers several arrivals calls
`take(update)` for each and then `step()` once.

A new rule writes `_receive` (one arrival), and, where it holds more than the model, `_allocate` (make the buffers),
`_enter` (take a first gradient), `_begin` (the first step) and `keeps` (the names of the attributes to save). One that
can take arrivals without a step says so (`can_take`) and writes `_take`, `_step_with_taken` and `takes`, too. It knows
no clock, no socket, no torch and no other rule.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import copy
from dataclasses import asdict, fields, replace
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from .. import kernels, rows
from ..errors import (
    DuplicateClient,
    FirstGradients,
    InputError,
    MissingVector,
    OrderError,
    ParameterError,
    StateError,
    UnknownClient,
    VersionError,
)
from ..params import Params
from ..rows import RowMaker
from ..types import Job, Receipt, State, Update, Vector
from ..weights import Weights
from .checks import MOST, Sound, checked, index, mapping, positive
from .kept import restored, saved

_INTEGERS = (int, int, int, int)


class Strategy(ABC):
    """One server rule and everything it remembers."""

    name: ClassVar[str]
    """The registered name."""
    needs: tuple[str, ...] = ()
    """The vectors every update must carry, out of gradient, delta, model, direction (and control, for SCAFFOLD).

    An instance has its own: with sends="direction" it needs `direction` where its class says `gradient`.
    """
    sends: str = "gradient"
    """The vector that the rule averages as a gradient, and that answers a first job: gradient or direction."""
    first: bool = False
    """Whether the rule needs every client's gradient at w^0 before it can start."""
    fair: ClassVar[bool] = False
    """Whether the rule asks for fair selection without replacement (the coordinator's default policy for it)."""
    keeps: ClassVar[tuple[str, ...]] = ()
    """The attributes that make up the state, beside the model, its version and the clients."""
    can_take: ClassVar[bool] = False
    """Whether the rule can take arrivals without a step (`take`, `step`)."""
    takes: ClassVar[tuple[str, ...]] = ()
    """The attributes that hold what was taken and not stepped with; a state has them only where there is any."""

    older = False
    """Whether the rule goes on with what an earlier version of aflock began, and must do as that version did."""
    version: int
    """t, the number of server updates so far."""
    make_rows: RowMaker = staticmethod(rows.create)
    """Makes one vector per client; `strategies.create` hands in one that can also keep them on disk."""

    def __init__(self, clients: int, params: Params, seed: int = 0) -> None:
        count = index(clients, "clients", ParameterError)
        if count < 1:
            raise ParameterError(f"clients is {clients}; expected a positive integer")
        self.p = params
        self.seed = index(seed, "seed", ParameterError)
        self.clients: set[int] = set(range(count))
        self.awaited: set[int] = set()
        self.version = 0
        self._opened = self._can_hold_taken = False
        self.taken = 0
        """How many arrivals were taken since the last step, by a rule that otherwise steps at every arrival."""
        if "sends" in params.__dataclass_fields__:
            self.sends = params.sends  # type: ignore[attr-defined]
            self.needs = tuple(self.sends if name == "gradient" else name for name in type(self).needs)
        self.started = False
        """Whether the rule takes updates: `start` was called and every first gradient is in."""
        self._published: Vector | None = None
        self._largest: float | None = None
        self._extras: Mapping[str, Vector] | None = None

    # -- the contract -----------------------------------------------------------------------------------------------

    @property
    def model(self) -> Vector:
        """w^t: a read-only vector that stays as it is when the next version comes."""
        if self._published is None:
            self._require_open()
            self._published, self._largest = _frozen(self.w.high.copy()), None
        return self._published

    @property
    def largest(self) -> float:
        """The largest absolute weight of the model; infinity or NaN if one is not finite."""
        if self._published is None or self._largest is None:
            self._largest = kernels.largest(self.model)
        return self._largest

    @property
    def nbytes(self) -> int:
        """What the rule keeps, in bytes: the model, its buffers and its rows (those on disk included)."""
        return sum(int(getattr(getattr(self, name), "nbytes", 0)) for name in ("w", *self.keeps))

    @property
    def cohort(self) -> int | None:
        """How many clients the current round takes, for rules that wait for a cohort; None for those that do not."""
        return None

    @property
    def largest_cohort(self) -> int | None:
        """The most clients any round takes."""
        return self.cohort

    @property
    def changes(self) -> tuple[str, ...]:
        """The vectors that travel as their change since the client's last report (see `local.base`)."""
        return ()

    @property
    def client_half(self) -> tuple[str, dict[str, Any]]:
        """The local rule this one is made for, and the parameters they must share."""
        return "sgd", {}

    @property
    def pending(self) -> int:
        """How many arrivals are held and not yet part of the model."""
        return self.taken

    def start(
        self, w0: Vector, first: Mapping[int, Vector] | None = None, examples: Mapping[int, int] | None = None
    ) -> None:
        """Takes the initial model and, where `self.first`, every client's gradient at it.

        `examples` optionally says how many examples each client has; rules that weigh clients before they have
        reported (twafl, rolling-fedavg) otherwise take the mean of those that have.
        """
        self._require_new()
        w0 = checked(w0, "w0", None)
        gradients = self._check_first(first, w0.size)
        self.open(w0, examples)
        for client, gradient in gradients.items():
            self.offer(client, gradient)

    def open(self, w0: Vector, examples: Mapping[int, int] | None = None) -> None:
        """`start` in instalments: where `self.first`, the rule starts when every client's gradient was offered."""
        self._require_new()
        w0 = checked(w0, "w0", None)
        counts = self._check_examples(examples)
        self._prepare(w0)
        self._told(counts)
        self.awaited = set(self.clients) if self.first else set()
        self._start_when_complete()

    def offer(self, client: int, gradient: Vector) -> bool:
        """One client's gradient at w0, after `open`; true once all are in and the rule has started."""
        self._require_open()
        client = self._require_client(client)
        if client not in self.awaited:
            raise FirstGradients(f"{self.name} waits for no first gradient of client {client}")
        self._enter(client, checked(gradient, f"first gradient of client {client}", self.w.size))
        self.awaited.remove(client)
        self._start_when_complete()
        return self.started

    def _start_when_complete(self) -> None:
        if not self.awaited and self.clients:
            self._begin()
            self.started = True

    def job(self, client: int, id: int | None = None) -> Job:
        """What the client works on if it pulls now; `id` is the number the coordinator gives it."""
        if not self.started:
            self._require_start()
        if type(client) is not int or client not in self.clients:
            client = self._require_client(client)
        model, extras = self._published, self._extras
        if model is None or extras is None:
            model, extras = self.model, self.extras
        return Job(client, self.version, model, extras, False, id)

    @property
    def extras(self) -> Mapping[str, Vector]:
        """The extra vectors of a job at the current version."""
        if self._extras is None:
            made = {name: _frozen(vector) for name, vector in self._make_extras().items()}
            self._extras = MappingProxyType(made)
        return self._extras

    def receive(self, update: Update) -> Receipt:
        """Takes one arrival. Bad input raises and changes nothing; what is kept is copied; the cost is O(d)."""
        if not self.started:  # `_checked`, inlined: this runs for every arrival
            self._require_start()
        update, version = self.check_numbers(update), self.version
        staleness = version - update.version
        if not 0 <= staleness <= version:
            self._checked(update)  # raises
        if type(update.vectors) is not Sound:
            update = self._check_vectors(update)
        if not self.taken:
            return self._receive(update, staleness)
        receipt = self._take(update, staleness)
        if not receipt.rejected and self.step():
            return Receipt("applied", staleness)
        return receipt

    def take(self, update: Update) -> Receipt:
        """Takes one arrival without a step: it is buffered (or rejected), and `step` moves the model."""
        return self._take(*self._checked(update))

    def step(self) -> bool:
        """One server step with all that was taken; False if that is nothing, or too little for the rule to step."""
        self._require_start()
        version = self.version
        self._step_if_due()
        return self.version > version

    def flush(self) -> bool:
        """Steps with whatever is held, as the end of a run asks for; False if nothing was held."""
        self._require_start()
        if not self.taken:
            return False
        self._step_if_due()
        return True

    def join(self, client: int, first: Vector | None = None) -> None:
        """Adds a client; where `self.first`, with its gradient at the current model (during the opening: without)."""
        client = self.check_join(client)
        if self.first and self.started and first is None:
            raise FirstGradients(f"{self.name} needs client {client}'s gradient at the current model to let it in")
        if first is not None and not (self.first and self.started):
            raise FirstGradients(f"{self.name} takes no first gradient here; leave `first` out")
        gradient = None if first is None else checked(first, f"first gradient of client {client}", self.w.size)
        self._join(client)
        if gradient is not None:
            self._enter(client, gradient)
        self.clients.add(client)
        if not self.started:
            self.awaited.add(client)
        self._extras = None

    def check_join(self, client: int) -> int:
        """The number of a client that may join, or an error."""
        self._require_open()
        number = index(client, "client", UnknownClient)
        if number < 0:
            raise UnknownClient(f"client {number} cannot join; expected a number of at least 0")
        if number in self.clients:
            raise DuplicateClient(f"client {number} is in the federation already")
        return number

    def leave(self, client: int) -> None:
        """Removes a client and what the rule holds of it; during the opening, the rule no longer waits for it."""
        self._require_open()
        client = self._require_client(client)
        self.restart(client)
        self._leave(client)
        self.clients.remove(client)
        self._extras = None
        if self.started:
            self._left()
        else:
            self.awaited.discard(client)
            self._start_when_complete()

    def put_back(self, model: Vector) -> None:
        """The last step is undone: the model is that of the version before. The version and all else stay."""
        self.w.put_back(model)
        self._published = self._extras = None

    def restart(self, client: int) -> None:
        """What the client had been promised is void: its next job starts from the current model."""

    # -- what a rule writes -----------------------------------------------------------------------------------------

    @abstractmethod
    def _receive(self, update: Update, staleness: int) -> Receipt:
        """One arrival whose input has been checked; its vectors are finite, contiguous and of length d."""

    def _take(self, update: Update, staleness: int) -> Receipt:
        """Stores a checked arrival and makes no step; a rule that cannot says so."""
        raise OrderError(f"{self.name} makes a step with every arrival; it cannot take one without a step")

    def _step_if_due(self) -> None:
        """Steps with what was taken, if there is enough of it."""
        if self.taken:
            self._step_with_taken()
            self.taken = 0
            self._advance()

    def _step_with_taken(self) -> None:
        """Moves the model with the `taken` arrivals, and empties what held them."""

    def _allocate_taken(self, length: int) -> None:
        """Makes the attributes in `takes`, all zero: before the first `take`, or before a state has them loaded."""

    def _allocate(self, length: int) -> None:
        """Makes the buffers, all zero. Runs before `_begin` and before a state is loaded."""

    def _told(self, examples: Mapping[int, int]) -> None:
        """Some clients' numbers of examples are known before they report."""

    def _enter(self, client: int, gradient: Vector) -> None:
        """Takes a client's first gradient; room for it has been made."""

    def _begin(self) -> None:
        """The first step, with the model and all first gradients in place."""

    def _make_extras(self) -> dict[str, Vector]:
        """The extra vectors of a job at the current version."""
        return {}

    def _join(self, client: int) -> None:
        """Makes room for a client."""

    def _leave(self, client: int) -> None:
        """Forgets a client."""

    def _left(self) -> None:
        """Called once the client is out of `self.clients`."""

    # -- what a rule uses -------------------------------------------------------------------------------------------

    @property
    def n(self) -> int:
        """The number of clients present."""
        return len(self.clients)

    def _advance(self) -> None:
        """The model has moved: one more version; what was published of the old one no longer stands."""
        self.version += 1
        self._published = None
        self._extras = None

    def _applied(self, staleness: int) -> Receipt:
        self._advance()
        return Receipt("applied", staleness)

    def _count_taken(self, staleness: int) -> Receipt:
        self.taken += 1
        return Receipt("buffered", staleness)

    def _prepare_to_take(self) -> None:
        """Allocates what holds taken arrivals: at the first of them, because most runs never take without a step."""
        if not self._can_hold_taken:
            self._allocate_taken(self.w.size)
            self._can_hold_taken = True

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self, *, detached: bool = True) -> State:
        """Everything needed to go on with the same bits: model, version, clients, buffers, rows, random streams.

        Unless it is to be `detached`, its arrays are the rule's own: good until the next arrival, and no second copy.
        """
        self._require_open()
        state: State = {"strategy": self.name, "params": asdict(self.p), "seed": self.seed, "version": self.version}
        state["started"] = self.started
        state |= {
            "w": saved(self.w.high, detached),
            "low": saved(self.w.low, detached),
            "clients": _ids(self.clients),
            "awaited": _ids(self.awaited),
        }
        state["keeps"] = {name: saved(getattr(self, name), detached) for name in self.keeps}
        if self.taken:
            held = {name: saved(getattr(self, name), detached) for name in self.takes}
            state["taken"] = {"count": self.taken, **held}
        return state

    def load_state_dict(self, state: State) -> None:
        """Takes over a saved state, all of it or (if it does not fit) nothing."""
        try:
            self._check_state(state)
            self.__dict__ = self._loaded(state).__dict__
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, StateError):
                raise
            raise StateError(f"the saved state of {self.name} is damaged ({error!r})") from None

    def _loaded(self, state: State) -> Strategy:
        """A rule with this one's parameters and the saved state."""
        fresh = copy(self)
        fresh.seed, fresh.version = int(state["seed"]), int(state["version"])
        fresh.clients = {int(client) for client in state["clients"]}
        fresh.awaited = {int(client) for client in state["awaited"]}
        fresh._prepare(np.asarray(state["w"]))
        restored(fresh.w.low, state["low"], "low")
        for name in self.keeps:
            setattr(fresh, name, restored(getattr(fresh, name), state["keeps"][name], name))
        held = state.get("taken", {})
        fresh.taken = int(held.get("count", 0))
        if fresh.taken:
            fresh._prepare_to_take()
            for name in self.takes:
                setattr(fresh, name, restored(getattr(fresh, name), held[name], name))
        fresh.started = bool(state["started"])
        return fresh

    def _check_state(self, state: State) -> None:
        if not isinstance(state, Mapping) or "strategy" not in state:
            raise StateError("this is not a state of a strategy; expected what `state_dict` returned")
        if state["strategy"] != self.name:
            raise StateError(f"the state was saved by {state['strategy']}; expected {self.name}")
        # A state of an earlier version lacks the parameters that came since: their defaults are what it did then.
        defaults = {item.name: item.default for item in fields(self.p)}
        mine, saved_with = _identity(asdict(self.p)), _identity(defaults | state["params"])
        if mine != saved_with:
            wrong = [f"{name}={value!r}" for name, value in saved_with.items() if mine.get(name) != value]
            raise StateError(f"the state was saved with {', '.join(wrong)}; expected the parameters {mine}")

    # -- checks of what comes in ---------------------------------------------------------------------------------------

    def _prepare(self, w0: Vector) -> None:
        self._allocate(w0.size)
        self.w = Weights(w0)
        self._opened = True
        self._can_hold_taken = False
        self._published = self._extras = None

    def _checked(self, update: Update) -> tuple[Update, int]:
        """An update that the rule can use, and its staleness, or an error."""
        if not self.started:
            self._require_start()
        update, version = self.check_numbers(update), self.version
        staleness = version - update.version
        if not 0 <= staleness <= version:
            raise VersionError(f"version {update.version} does not exist; expected one of 0 to {version}")
        if type(update.vectors) is not Sound:  # the server has checked those of a `Sound` already: no second pass
            update = self._check_vectors(update)
        return update, staleness

    def check_numbers(self, update: Update) -> Update:
        """An update whose client is here and whose numbers are plain integers in their range, or an error."""
        if not isinstance(update, Update):
            raise InputError(f"expected an aflock.Update, got {type(update).__name__}")
        client, version, steps, examples = update.client, update.version, update.steps, update.examples
        kinds = type(client), type(version), type(steps), type(examples)
        if kinds == _INTEGERS and client in self.clients and 0 < steps <= MOST and 0 < examples <= MOST:
            return update
        client = self._require_client(client)
        version = index(version, "version", VersionError)
        steps, examples = positive(steps, "steps"), positive(examples, "examples")
        return Update(client, version, update.vectors, steps, examples, update.job)

    def _check_vectors(self, update: Update) -> Update:
        """An update with all vectors the rule needs, each of them sound, or an error."""
        vectors, length = update.vectors, self.w.size
        if type(vectors) is not dict:
            mapping(vectors, "vectors")
        for name in self.needs:
            vector = vectors.get(name)
            if vector is None:
                raise MissingVector(self._missing(name, vectors))
            sound = checked(vector, name, length)
            if sound is not vector:
                update = replace(update, vectors={**update.vectors, name: sound})
        return update

    def _missing(self, name: str, vectors: Mapping[str, Vector]) -> str:
        got = ", ".join(vectors) or "none"
        return f"{self.name} needs the vector {name!r}; the update carries {got}"

    def _require_new(self) -> None:
        if self._opened:
            raise OrderError(f"{self.name} was started before; create a new one to start again")

    def _require_open(self) -> None:
        if not self._opened:
            self._require_start()

    def _require_start(self) -> None:
        if not self.started:
            raise OrderError(f"{self.name} has not been started; call start(w0{', first' if self.first else ''}) first")

    def _require_client(self, client: int) -> int:
        if type(client) is int and client in self.clients:
            return client
        number = index(client, "client", UnknownClient)
        if number not in self.clients:
            raise UnknownClient(f"client {number} is not in the federation of {self.n} clients")
        return number

    def _check_first(self, first: Mapping[int, Vector] | None, length: int) -> dict[int, Vector]:
        if not self.first:
            if first:
                raise FirstGradients(f"{self.name} takes no first gradients; leave `first` out")
            return {}
        first = mapping({} if first is None else first, "first")
        missing = sorted(self.clients - set(first))
        if missing:
            raise FirstGradients(
                f"{self.name} needs every client's gradient at w0; missing: {', '.join(map(str, missing[:10]))}"
                f"{' ...' if len(missing) > 10 else ''} ({len(missing)} of {self.n})"
            )
        for client in first:
            self._require_client(client)
        return {c: checked(first[c], f"first gradient of client {c}", length) for c in sorted(first)}

    def _check_examples(self, examples: Mapping[int, int] | None) -> dict[int, int]:
        given = mapping({} if examples is None else examples, "examples")
        return {self._require_client(c): positive(count, f"examples of client {c}") for c, count in given.items()}


def _identity(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that make a rule what it is: where it keeps its files is not one of them."""
    return {name: value for name, value in params.items() if name != "cache_dir"}


def _ids(clients: set[int]) -> Any:
    return np.array(sorted(clients), np.int64)


def _frozen(vector: Vector) -> Vector:
    vector.flags.writeable = False
    return vector
