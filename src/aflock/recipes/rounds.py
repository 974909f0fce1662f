"""Round by round: who took part, and how long the server waited for the last of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..events import Event
from ..types import Accumulator


@dataclass(frozen=True)
class Round:
    """The arrivals that made one server step."""

    clients: tuple[int, ...]
    delay: float
    """The longest time from a pull to its arrival."""


def record(events: Sequence[Event]) -> list[Round]:
    """The rounds of a run, from everything that happened in it."""
    pulled: dict[int | None, float] = {}
    rounds: list[Round] = []
    clients: list[int] = []
    delay, version = 0.0, 0
    for event in events:
        if event.kind == "pull":
            pulled[event.client] = event.time
        elif event.kind == "arrival" and event.client is not None and event.outcome != "rejected":
            clients.append(event.client)
            delay = max(delay, event.time - pulled[event.client])
        if event.server > version:
            rounds.append(Round(tuple(clients), delay))
            clients, delay, version = [], 0.0, event.server
    return rounds


def saved(rounds: Sequence[Round]) -> list[list[Any]]:
    """JSON values."""
    return [[list(one.clients), round(one.delay, 4)] for one in rounds]


def loaded(values: Sequence[Sequence[Any]]) -> list[Round]:
    """What `saved` gave."""
    return [Round(tuple(clients), float(delay)) for clients, delay in values]


def busiest(rounds: Sequence[Round]) -> int:
    """How many rounds the client took part in that took part most often."""
    counts: dict[int, int] = {}
    for one in rounds:
        for client in set(one.clients):
            counts[client] = counts.get(client, 0) + 1
    return max(counts.values(), default=0)


def delay_by_size(rounds: Sequence[Round]) -> dict[int, float]:
    """The mean longest delay of rounds of 1, 2, ... clients, where there are any."""
    found: dict[int, list[float]] = {}
    for one in rounds:
        found.setdefault(len(one.clients), []).append(one.delay)
    return {size: sum(delays) / len(delays) for size, delays in sorted(found.items())}


def replacement_weights(rounds: Sequence[Round], clients: int, gamma: float) -> Accumulator:
    """MR.AsyncFL's c^(j)_t, one row per round, the start first: equation 12 of the paper.

    c^(j)_0 = 1/N;    c^(j)_t = gamma*c^(j)_{t-1}, and (1-gamma) more for the client i whose update made round t
    """
    weights = np.full((len(rounds) + 1, clients), 1.0 / clients)
    for t, one in enumerate(rounds, 1):
        weights[t] = gamma * weights[t - 1]
        weights[t, list(one.clients)] += 1.0 - gamma
    return weights
