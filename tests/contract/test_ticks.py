"""One server step that answers several arrivals: `take` each, then `step`."""

from __future__ import annotations

import numpy as np
import pytest

from aflock import Update, strategies
from aflock.errors import OrderError
from aflock.strategies.base import Strategy
from tests.contract.cases import Arrivals, Case, N, all_cases, start
from tests.contract.continuation import digest
from tests.contract.test_twin import TOLERANCE, relative, twin_of
from tests.contract.tick_twins import TICKS, Arrival

CASES = [case for case in all_cases() if case.create().can_take]
COMPARED = [
    case
    for case in CASES
    if case.name in TICKS and case.params.get("cache") != "int8" and case.params.get("selection") != "random"
]
SIZES = np.random.default_rng(11).integers(0, 7, 300)
"""Arrivals of each tick; some ticks are empty."""


def tick(s: Strategy, seed: int, number: int) -> bool:
    """Takes the arrivals of a tick, then steps; whether the model moved."""
    for k in range(SIZES[number]):
        assert not s.take(Arrivals(seed).update(s, 10 * number + k)).applied
    return s.step()


@pytest.mark.parametrize("case", COMPARED, ids=str)
def test_every_tick_agrees_with_the_twin(case: Case) -> None:
    seed = 4
    s, twin = case.create(), twin_of(case, seed)
    start(s, seed)
    for number, size in enumerate(SIZES):
        arrivals = []
        for k in range(size):
            update = Arrivals(seed).update(s, 10 * number + k)
            receipt = s.take(update)
            assert receipt.staleness == twin.t - update.version
            wide = {"gradient" if name == s.sends else name: v.astype(np.float64) for name, v in update.vectors.items()}
            arrivals.append(Arrival(update.client, update.version, wide, update.examples))
        version = s.version
        if arrivals:
            TICKS[case.name](twin, arrivals)
        assert s.step() == (s.version > version)
        assert s.version == twin.t, f"tick {number}"
        assert relative(s.model, twin.w) < TOLERANCE, f"tick {number}"


def test_every_rule_is_compared_or_steps_as_with_arrivals() -> None:
    """Ca2fl and fadas are hand-checked below; fedavg and afl step as with arrivals; mr-asyncfl takes none."""
    rest = set(strategies.names()) - {case.name for case in COMPARED}
    assert rest == {"ca2fl", "fadas", "fedavg", "afl", "mr-asyncfl"}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_arrival_per_tick_is_one_step_per_arrival(case: Case) -> None:
    a, b = case.create(), case.create()
    start(a, 6)
    start(b, 6)
    for position in range(200):
        update = Arrivals(6).update(a, position)
        received, taken = a.receive(update), b.take(update)
        assert received.rejected == taken.rejected
        assert b.step() == received.applied
        assert a.version == b.version
    assert digest(a.state_dict()) == digest(b.state_dict())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_receive_after_takes_is_a_take_and_a_step(case: Case) -> None:
    a, b = case.create(), case.create()
    start(a, 7)
    start(b, 7)
    for position in range(0, 60, 3):
        updates = [Arrivals(7).update(a, position + k) for k in range(3)]
        for update in updates[:2]:
            assert a.take(update) == b.take(update)
        receipt = a.receive(updates[2])
        taken = b.take(updates[2])
        stepped = b.step() if not taken.rejected else False
        assert receipt.applied == stepped
    assert digest(a.state_dict()) == digest(b.state_dict())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_state_in_the_middle_of_a_tick_continues_with_the_same_bits(case: Case) -> None:
    a = case.create()
    start(a, 8)
    for number in range(20):
        tick(a, 8, number)
    a.take(Arrivals(8).update(a, 1000))
    a.take(Arrivals(8).update(a, 1001))
    b = case.create()
    b.load_state_dict(a.state_dict())
    assert b.pending == a.pending
    for s in (a, b):
        s.take(Arrivals(8).update(s, 1002))
        s.step()
        for number in range(20, 40):
            tick(s, 8, number)
    assert digest(a.state_dict()) == digest(b.state_dict())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_flush_uses_what_was_taken(case: Case) -> None:
    s = case.create()
    start(s, 9)
    taken = sum(not s.take(Arrivals(9).update(s, k)).rejected for k in range(2))
    version = s.version
    assert s.pending == taken
    assert s.flush() == bool(taken)
    assert (s.version - version, s.pending) == (int(taken > 0), 0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_clients_come_and_go_in_the_middle_of_a_tick(case: Case) -> None:
    s = case.create()
    start(s, 10)
    for number in range(40):
        s.take(Arrivals(10).update(s, 20 * number))
        if number % 4 == 1 and s.n > 2:
            s.leave(max(s.clients))
        if number % 4 == 3:
            s.join(100 + number, first=np.ones(s.model.size, np.float32) if s.first else None)
        s.take(Arrivals(10).update(s, 20 * number + 1))
        s.step()
        assert np.isfinite(s.model).all()
        again = case.create()
        again.load_state_dict(s.state_dict())
    assert s.version > 1


def test_a_tick_that_loads_another_state_forgets_what_was_taken() -> None:
    s = Case("asgd").create()
    start(s, 1)
    before = s.state_dict()
    s.take(Arrivals(1).update(s, 0))
    s.load_state_dict(before)
    assert not s.step()
    s.take(Arrivals(1).update(s, 1))
    t = Case("asgd").create()
    start(t, 1)
    t.take(Arrivals(1).update(t, 1))
    assert s.step()
    assert t.step()
    assert np.array_equal(s.model, t.model)


def test_mr_asyncfl_aggregates_one_by_one() -> None:
    s = Case("mr-asyncfl").create()
    start(s)
    before = digest(s.state_dict())
    with pytest.raises(OrderError, match="makes a step with every arrival"):
        s.take(Arrivals(0).update(s, 0))
    assert digest(s.state_dict()) == before


def test_ca2fl_and_fadas_divide_by_all_that_are_held() -> None:
    """Three numbers: m = 2, deltas 3, 6 and 9 in one tick."""
    ca2fl = strategies.create("ca2fl", clients=3, buffer=2, lr=1.0)
    fadas = strategies.create("fadas", clients=3, buffer=2, lr=1.0, beta1=0.0, beta2=0.0, eps=1.0)
    for s in (ca2fl, fadas):
        s.start(np.zeros(1, np.float32))
        for client, delta in enumerate((3.0, 6.0, 9.0)):
            assert s.take(Update(client, 0, {"delta": np.array([delta], np.float32)})).buffered
        assert s.step()
        assert s.version == 1
    assert ca2fl.model.tolist() == [6.0]  # h = 0, acc/|S| = 18/3
    assert fadas.model.tolist() == [np.float32(6.0 / 7.0)]  # D = 6, mom = 6, sqrt(vh) = 6


@pytest.mark.parametrize("name", ["fedavg", "afl"])
def test_cohorts_step_as_with_arrivals(name: str) -> None:
    a, b = (strategies.create(name, clients=N, seed=3, buffer=3) for _ in range(2))
    start(a, 2)
    start(b, 2)
    for position in range(0, 80, 2):
        updates = [Arrivals(2).update(a, position + k) for k in range(2)]
        for update in updates:
            a.receive(update)
        for update in updates:
            b.take(update)
            b.step()
        assert np.array_equal(a.model, b.model)
