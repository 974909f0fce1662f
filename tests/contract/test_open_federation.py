"""Clients join and leave at any time; what a rule holds of them follows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aflock import errors, strategies
from aflock.strategies.base import Strategy

from .cases import Arrivals, Case, D, N, all_cases, start, vector
from .continuation import digest


def wander(s: Strategy, seed: int, arrivals: int = 300) -> None:
    """Arrivals with a join or a departure every now and then; never fewer than two clients."""
    draws = np.random.default_rng([seed, 3])
    source, newcomer = Arrivals(seed), N
    for position in range(arrivals):
        chance = draws.random()
        if chance < 0.05:
            s.join(newcomer, first=vector(draws) if s.first else None)
            newcomer += 1
        elif chance < 0.1 and s.n > 2:
            s.leave(int(draws.choice(sorted(s.clients))))
        s.receive(source.update(s, position))


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_coming_and_going_keeps_every_rule_alive(case: Case) -> None:
    s = case.create()
    start(s)
    wander(s, 1)
    assert np.isfinite(s.model).all()
    other = case.create()
    other.load_state_dict(s.state_dict())
    assert other.clients == s.clients
    assert digest(other.state_dict()) == digest(s.state_dict())


SUMS = ["ace", "afa-cs", "ca2fl", "masfl", "adamasfl", "aced"]


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("seed", range(5))
def test_the_running_sum_is_the_sum_of_the_rows_present(name: str, seed: int) -> None:
    """After the open buffer has been released, `total` is exactly the rows that are (still) there."""
    params: dict[str, Any] = {"tau_algo": 6} if name == "aced" else {} if name == "ace" else {"buffer": 3}
    s: Any = strategies.create(name, clients=N, **params)
    start(s, seed)
    wander(s, seed)
    s.flush()
    counted = s.starts if name == "aced" else s.clients
    total = sum((s.rows.read(c).astype(np.float64) for c in counted), np.zeros(D))
    np.testing.assert_allclose(s.total, total, rtol=0, atol=1e-10)
    assert set(s.rows) == s.clients


def test_ace_averages_over_the_clients_present() -> None:
    """Three numbers by hand: lr 1, gradients 1, 2, 3, then client 3 joins with 6, then client 0 leaves."""
    s = strategies.create("ace", clients=3, lr=1.0)
    one = np.ones(1, np.float32)
    s.start(0 * one, first={0: 1 * one, 1: 2 * one, 2: 3 * one})
    assert s.model[0] == -2  # minus the mean of 1, 2, 3
    s.join(3, first=6 * one)
    assert s.model[0] == -2  # joining changes the mean, not the model
    from aflock import Update

    s.receive(Update(1, 1, {"gradient": 2 * one}))
    assert s.model[0] == -5  # minus the mean of 1, 2, 3, 6
    s.leave(0)
    s.receive(Update(2, 1, {"gradient": 4 * one}))
    assert s.model[0] == -9  # minus the mean of 2, 4, 6
    with pytest.raises(errors.UnknownClient, match="client 0 is not in the federation of 3 clients"):
        s.receive(Update(0, 1, {"gradient": one}))


@pytest.mark.parametrize("decay", [0.0, 0.3, 5.0])
def test_latest_models_without_the_departed(decay: float) -> None:
    """The heaviest client leaves: what remains must keep its digits."""
    s: Any = strategies.create("twafl", clients=4, decay=decay)
    s.start(np.zeros(2, np.float32), examples={0: 1, 1: 2, 2: 3, 3: 4})
    from aflock import Update

    models = {c: np.array([c + 1.0, -c], np.float32) for c in range(4)}
    for c in range(4):
        s.receive(Update(c, 0, {"model": models[c]}, 1, c + 1))
    s.leave(3)
    s.receive(Update(0, 0, {"model": models[0]}, 1, 1))
    ages = {0: 0, 1: 3, 2: 2}
    weights = {c: (c + 1) * np.exp(-decay * ages[c]) for c in ages}
    exact = sum(weights[c] * models[c].astype(np.float64) for c in ages) / sum(weights.values())
    np.testing.assert_allclose(s.model, exact, rtol=1e-6)


def test_twafl_survives_a_million_arrivals_without_overflow() -> None:
    from aflock import Update

    s = strategies.create("twafl", clients=3, decay=0.5)
    s.start(np.zeros(1, np.float32))
    x = np.ones(1, np.float32)
    for position in range(100_000):  # exp(0.5 * 100,000) is far beyond any float
        s.receive(Update(position % 3, s.version, {"model": x}))
    assert s.model[0] == 1.0


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_bad_joins_and_departures(case: Case) -> None:
    s = case.create()
    start(s)
    before = digest(s.state_dict())
    g = np.ones(D, np.float32)
    with pytest.raises(errors.DuplicateClient, match="client 3 is in the federation already"):
        s.join(3, first=g if s.first else None)
    with pytest.raises(errors.UnknownClient, match="client 99"):
        s.leave(99)
    if s.first:
        with pytest.raises(errors.FirstGradients, match="needs client 9's gradient"):
            s.join(9)
        with pytest.raises(errors.VectorError, match="first gradient of client 9 has 3 weights"):
            s.join(9, first=g[:3])
    else:
        with pytest.raises(errors.FirstGradients, match="takes no first gradient"):
            s.join(9, first=g)
    assert digest(s.state_dict()) == before


def test_a_cohort_does_not_wait_for_the_departed() -> None:
    from aflock import Update

    s = strategies.create("fedavg", clients=3)
    s.start(np.zeros(1, np.float32))
    for c, x in ((0, 2.0), (1, 4.0)):
        assert s.receive(Update(c, 0, {"model": np.array([x], np.float32)})).buffered
    s.leave(2)
    assert (s.version, s.model[0]) == (1, 3.0)


def test_leaving_during_the_opening() -> None:
    s = strategies.create("ace", clients=3, lr=1.0)
    one = np.ones(1, np.float32)
    s.open(0 * one)
    s.offer(0, 2 * one)
    s.offer(1, 4 * one)
    assert not s.started
    s.leave(2)
    assert s.started
    assert s.model[0] == -3
