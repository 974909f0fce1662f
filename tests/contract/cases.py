"""The cases of the contract suite: every registered rule with its defaults, and variants worth a case of their own."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aflock import Update, strategies
from aflock.strategies.base import Strategy
from aflock.types import Vector

N, D = 7, 11


@dataclass(frozen=True)
class Case:
    """A rule and its hyper-parameters."""

    name: str
    params: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.params.items())])

    def create(self, clients: int = N, seed: int = 5) -> Strategy:
        return strategies.create(self.name, clients=clients, seed=seed, **self.params)


_VARIANTS = [
    Case("asgd", {"sends": "direction"}),
    Case("delay-adaptive", {"tau_c": 2, "sends": "direction"}),
    Case("delay-adaptive", {"tau_c": 2}),
    Case("delay-adaptive", {"tau_c": 2, "smoothness": 0.5, "lr": 0.3}),
    Case("delay-adaptive", {"tau_c": 3, "mode": "drop"}),
    Case("fedbuff", {"buffer": 1}),
    Case("fedbuff", {"buffer": 3, "staleness_exponent": 0.5, "lr": 0.7}),
    Case("ca2fl", {"buffer": 1}),
    Case("ca2fl", {"buffer": 4, "lr": 0.3}),
    Case("ca2fl", {"buffer": 4, "cache": "disk"}),
    Case("ace", {"memory": "client"}),
    Case("ace", {"memory": "client", "sends": "direction"}),
    Case("ace", {"sends": "direction"}),
    Case("aced", {"tau_algo": 3, "sends": "direction"}),
    Case("ace", {"cache": "int8"}),
    Case("ace", {"cache": "disk"}),
    Case("aced", {"tau_algo": 1}),
    Case("aced", {"tau_algo": 5, "lr": 0.2}),
    Case("aced", {"tau_algo": math.inf}),
    Case("aced", {"tau_algo": 4, "cache": "int8"}),
    Case("aced", {"tau_algo": 4, "cache": "disk"}),
    Case("mr-asyncfl", {"gamma": 0.5, "exchange": "after"}),
    Case("mr-asyncfl", {"gamma": 0.9, "max_staleness": 6, "reset": "silent"}),
    Case("mr-asyncfl", {"gamma": 0.9, "max_staleness": 6, "exchange": "after"}),
    Case("mr-asyncfl", {"cache": "disk"}),
    Case("fedasync", {"staleness": "constant"}),
    Case("fedasync", {"staleness": "polynomial", "a": 0.8}),
    Case("fedasync", {"staleness": "hinge", "a": 0.5, "b": 3, "alpha": 0.9}),
    Case("twafl", {"decay": 0.05}),
    Case("twafl", {"decay": 3.0}),
    Case("twafl", {"cache": "disk"}),
    Case("afa-cd", {"buffer": 3}),
    Case("afa-cd", {"buffer": 3, "sends": "direction"}),
    Case("afa-cs", {"buffer": 3, "sends": "direction"}),
    Case("afa-cs", {"buffer": 1}),
    Case("afa-cs", {"buffer": 3, "cache": "disk"}),
    Case("masfl", {"buffer": 3, "beta": 0.3, "gamma": 0.2}),
    Case("masfl", {"buffer": 3, "beta": 0.3, "gamma": 0.2, "selection": "random"}),
    Case("adamasfl", {"buffer": 3, "beta": 0.3, "gamma": 0.2}),
    Case("adamasfl", {"buffer": 3, "beta": 0.3, "gamma": 0.2, "selection": "random"}),
    Case("adamasfl", {"buffer": 3, "beta": 0.3, "selection": "random", "cache": "disk"}),
    Case("fadas", {"buffer": 3, "lr": 0.01}),
    Case("fadas", {"buffer": 3, "lr": 0.9, "tau_c": 2, "beta1": 0.5}),
    Case("afl", {"buffer": 4, "buffer_min": 2}),
    Case("fedavg", {"buffer": 3}),
    Case("afa-cd+scaffold", {"buffer": 3}),
    Case("afa-cd+scaffold", {"buffer": 3, "sends": "direction"}),
    Case("ace+scaffold", {"sends": "direction"}),
    Case("fedbuff+scaffold", {"buffer": 3}),
]


def all_cases() -> list[Case]:
    """Every registered rule with its defaults, then the variants."""
    return [*(Case(name) for name in strategies.names()), *_VARIANTS]


def vector(draws: np.random.Generator, length: int = D) -> Vector:
    return draws.standard_normal(length).astype(np.float32)


def start(s: Strategy, seed: int = 0, length: int = D) -> None:
    """Starts a rule with random vectors."""
    draws = np.random.default_rng([seed, 1])
    w0 = vector(draws, length)
    s.start(w0, first={client: vector(draws, length) for client in sorted(s.clients)} if s.first else None)


class Arrivals:
    """Random arrivals that depend on the seed, the position and the rule's version alone.

    Clients come unevenly (client 0 most often), often from very old versions and out of order, with duplicates inside a
    buffer and examples that differ.
    """

    def __init__(self, seed: int, length: int = D) -> None:
        self.seed = seed
        self.length = length

    def update(self, s: Strategy, position: int) -> Update:
        draws = np.random.default_rng([self.seed, 2, position])
        present = sorted(s.clients)
        client = present[min(int(draws.geometric(0.3)) - 1, len(present) - 1)]
        age = int(draws.choice([0, 1, 2, 5, 20, 1000]))
        vectors = {name: vector(draws, self.length) for name in s.needs}
        steps, examples = int(draws.integers(1, 6)), 10 * (client + 1)
        return Update(client, max(0, s.version - age), vectors, steps, examples)

    def feed(self, s: Strategy, begin: int, end: int) -> None:
        for position in range(begin, end):
            s.receive(self.update(s, position))
