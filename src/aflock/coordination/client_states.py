"""The state of every client of a federation: between two jobs, or during one.

    idle      may be picked, or may pull
    open      has an open job; at most one, and an update is taken only for it
    resting   has done its part of a round that waits for others (rules with a cohort, and the opening)
    away      has said that it will be absent; it may still finish the job it has

and, across these,

    first     owes a first gradient and is served before any policy
    joining   has joined a rule that needs its first gradient, which has not arrived yet
    round     has been given a job of the current cohort
"""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import numpy.typing as npt

from ..events import Ticket
from ..types import State
from .selection import Selection

_SETS = ("resting", "joining", "first", "round", "away")
_COLUMNS = ("jobs", "versions", "firsts", "times")


class ClientStates:
    """Ordered sets (dictionaries without values): the order is part of the state, so that a run repeats."""

    def __init__(self, idle: Selection) -> None:
        self.idle = idle
        self.open: dict[int, Ticket] = {}
        self.resting: dict[int, None] = {}
        self.joining: dict[int, None] = {}
        self.first: dict[int, None] = {}
        self.round: dict[int, None] = {}
        self.away: dict[int, None] = {}

    def settle(self, client: int) -> None:
        """Makes a client idle that has no job and need not rest, unless it is away."""
        if client in self.away or client in self.open or client in self.resting or client in self.idle:
            return
        self.idle.add(client)

    def forget(self, client: int) -> Ticket | None:
        """Removes a client from everywhere; returns the job it had."""
        for state in (self.resting, self.joining, self.first, self.round, self.away):
            state.pop(client, None)
        self.idle.forget(client)
        return self.open.pop(client, None)

    def wake(self, cohort: bool) -> None:
        """A round is over: everyone who rested is idle again, and open jobs count for the next."""
        if self.resting:
            rested, self.resting = self.resting, {}
            for client in rested:
                self.settle(client)
        self.round = dict.fromkeys(self.open) if cohort else {}

    def state_dict(self) -> State:
        """All states, with the selection policy of the idle clients and its random stream."""
        opened: State = {"clients": _ids(self.open)}
        for k, name in enumerate(_COLUMNS):
            kind = np.float64 if name == "times" else np.int64
            opened[name] = np.array([ticket[k] for ticket in self.open.values()], kind)
        sets = {name: _ids(getattr(self, name)) for name in _SETS}
        return {"open": opened, "selection": self.idle.state_dict()} | sets

    def loaded(self, state: State) -> ClientStates:
        """New client states with this one's policy and the saved content."""
        fresh = ClientStates(deepcopy(self.idle))
        fresh.idle.load_state_dict(state["selection"])
        columns = [state["open"][name].tolist() for name in ("clients", *_COLUMNS)]
        fresh.open = {c: Ticket(j, v, bool(f), t) for c, j, v, f, t in zip(*columns, strict=True)}
        for name in _SETS:
            setattr(fresh, name, dict.fromkeys(state[name].tolist()))
        return fresh


def _ids(clients: dict[int, Ticket] | dict[int, None]) -> npt.NDArray[np.int64]:
    return np.array(list(clients), np.int64)
