"""Clients join and leave at any time; what a rule holds of them follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aflock import Update, errors, state, strategies
from aflock.strategies.base import Strategy
from tests.contract.cases import Arrivals, Case, D, N, all_cases, start, vector
from tests.contract.continuation import digest


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
    _same_as_reloaded(case, s)


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_a_state_loads_whoever_has_left_and_its_jobs_are_the_same(case: Case) -> None:
    """Down to one client, far below any buffer; with jobs handed out before and after every departure."""
    s = case.create()
    start(s)
    for client in range(N - 1):
        s.receive(Arrivals(3).update(s, client))
        s.job(N - 1)
        s.leave(client)
        _same_as_reloaded(case, s)


def _same_as_reloaded(case: Case, s: Strategy) -> None:
    other = case.create()
    other.load_state_dict(s.state_dict())
    assert other.clients == s.clients
    assert digest(other.state_dict()) == digest(s.state_dict())
    for client in s.clients:
        mine, theirs = s.job(client), other.job(client)
        assert mine.version == theirs.version
        assert np.array_equal(mine.model, theirs.model)
        assert mine.extras.keys() == theirs.extras.keys()
        assert all(np.array_equal(mine.extras[name], theirs.extras[name]) for name in mine.extras)


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
    models = {c: np.array([c + 1.0, -c], np.float32) for c in range(4)}
    for c in range(4):
        s.receive(Update(c, 0, {"model": models[c]}, 1, c + 1))
    s.leave(3)
    s.receive(Update(0, 0, {"model": models[0]}, 1, 1))
    ages = {0: 0, 1: 3, 2: 2}
    weights = {c: (c + 1) * np.exp(-decay * ages[c]) for c in ages}
    exact = sum(weights[c] * models[c].astype(np.float64) for c in ages) / sum(weights.values())
    np.testing.assert_allclose(s.model, exact, rtol=1e-6)


def test_twafl_survives_many_arrivals_without_overflow() -> None:
    """Clients 0, 1, 2 in turn with models 1, 2, 4 and ages 2, 1, 0; exp(0.5 * 30,000) is far beyond any float."""
    s = strategies.create("twafl", clients=3, decay=0.5)
    s.start(np.zeros(1, np.float32))
    models = [np.full(1, x, np.float32) for x in (1, 2, 4)]
    for position in range(30_000):
        s.receive(Update(position % 3, s.version, {"model": models[position % 3]}))
    weights = np.exp([-1.0, -0.5, 0.0])
    assert s.model[0] == pytest.approx(weights @ [1, 2, 4] / weights.sum(), rel=1e-6)


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_bad_joins_and_departures(case: Case) -> None:
    s = case.create()
    start(s)
    before = digest(s.state_dict())
    g = np.ones(D, np.float32)
    with pytest.raises(errors.DuplicateClient, match="client 3 is in the federation already"):
        s.join(3, first=g if s.first else None)
    with pytest.raises(errors.UnknownClient, match="client 99 is not"):
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


def test_masfl_without_a_client_that_leaves_in_the_middle_of_a_round() -> None:
    """First 0, 1, 3; client 0 sends 12 and leaves: c is the mean of 1 and 3, and the 12 goes with its sender."""
    s = strategies.create("masfl", clients=3, buffer=2, beta=0.5, gamma=1.0)
    one = np.ones(1, np.float32)
    s.start(0 * one, first={0: 0 * one, 1: 1 * one, 2: 3 * one})
    s.receive(Update(0, 0, {"gradient": 12 * one}))
    s.leave(0)
    assert s.job(1).extras["momentum"][0] == pytest.approx(0.5 * 2 + 0.5 * 4 / 3)
    s.receive(Update(1, 0, {"gradient": 5 * one}))  # diff = 5 - 1; g = 0.5*(4/2 + 2) + 0.5*4/3
    assert s.model[0] == pytest.approx(-(0.5 * 4 + 0.5 * 4 / 3))


def test_a_newcomer_does_not_drag_the_mean_of_models_back_to_the_start() -> None:
    s = strategies.create("rolling-fedavg", clients=1)
    x = np.full(1, 10, np.float32)
    s.start(0 * x)
    s.receive(Update(0, 0, {"model": x}))
    s.join(1)
    s.receive(Update(0, 1, {"model": x}))
    assert s.model[0] == 10
    s.receive(Update(1, 1, {"model": 2 * x}))
    assert s.model[0] == 15


def test_a_departure_with_client_memory_during_the_opening() -> None:
    """Its gradient and its place in n stay: -(10 + 2)/2."""
    s = strategies.create("ace", clients=2, lr=1.0, memory="client")
    one = np.ones(1, np.float32)
    s.open(0 * one)
    s.offer(0, 10 * one)
    s.leave(0)
    s.offer(1, 2 * one)
    assert s.model[0] == -6


def test_the_departed_do_not_fill_a_seat_in_the_cohort() -> None:
    """Client 0 reports and leaves; its model counts, but the round still waits for 1 and 2."""
    s = strategies.create("fedavg", clients=3)
    one = np.ones(1, np.float32)
    s.start(0 * one)
    s.receive(Update(0, 0, {"model": 3 * one}))
    s.leave(0)
    assert s.receive(Update(1, 0, {"model": 6 * one})).buffered
    assert s.receive(Update(2, 0, {"model": 9 * one})).applied
    assert s.model[0] == 6


def test_scaffold_keeps_the_departed_in_its_mean() -> None:
    s = strategies.create("afa-cd+scaffold", clients=2, buffer=1)
    one = np.ones(1, np.float32)
    s.start(0 * one)
    for client in (0, 1):
        s.receive(Update(client, 0, {"gradient": one, "control": one}))
    assert s.job(1).extras["control"][0] == 1
    s.leave(0)
    assert s.job(1).extras["control"][0] == 1


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_numpys_numbers_do_not_enter_the_state(case: Case, tmp_path: Path) -> None:
    """Clients, versions and counts as NumPy integers: the same bits, and a state that can be saved."""
    a, b = case.create(), case.create()
    start(a)
    start(b)
    for position in range(30):
        u = Arrivals(4).update(a, position)
        a.receive(u)
        b.receive(Update(np.int64(u.client), np.int32(u.version), u.vectors, np.int16(u.steps), np.int32(u.examples)))  # type: ignore[arg-type]
    state.save(tmp_path / "s", b.state_dict())
    assert digest(a.state_dict()) == digest(b.state_dict())


def test_examples_do_not_overflow() -> None:
    s = strategies.create("fedavg", clients=2)
    one = np.ones(1, np.float32)
    s.start(0 * one)
    for client in (0, 1):
        s.receive(Update(client, 0, {"model": one}, 1, np.int32(2**31 - 1)))  # type: ignore[arg-type]
    assert s.model[0] == 1
