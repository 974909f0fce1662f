"""Who gets the next job."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from aflock import errors, strategies
from aflock.coordination import selection
from aflock.coordination.coordinator import Coordinator
from aflock.errors import ParameterError
from tests.coordination.coordinators import answer, made


def pool_of(policy: str, clients: int, **options: object) -> selection.Selection:
    pool = selection.create(policy, 1, **options)  # type: ignore[arg-type]
    for client in range(clients):
        pool.add(client)
    return pool


def pick(pool: selection.Selection) -> int:
    client = pool.next()
    pool.take(client)
    return client


def chi_square(counts: Counter[int], expected: dict[int, float]) -> float:
    return sum((counts[c] - e) ** 2 / e for c, e in expected.items())


def test_uniform_is_uniform() -> None:
    pool, counts = pool_of("uniform", 10), Counter[int]()
    for _ in range(10_000):
        client = pick(pool)
        counts[client] += 1
        pool.add(client)
    assert chi_square(counts, dict.fromkeys(range(10), 1000.0)) < 28  # 0.999 quantile of chi-square with 9 degrees


def test_biased_follows_its_probabilities() -> None:
    weights = {c: float(c) for c in range(6)}
    pool, counts = pool_of("biased", 6, probabilities=weights), Counter[int]()
    for _ in range(15_000):
        client = pick(pool)
        counts[client] += 1
        pool.add(client)
    assert counts[0] == 0
    assert chi_square(counts, {c: 1000.0 * c for c in range(1, 6)}) < 18.5


def test_biased_among_those_that_are_idle() -> None:
    pool = pool_of("biased", 4, probabilities={0: 1e-30, 1: 1.0, 2: 1e30, 3: 0.0})
    assert len(pool) == 3
    pool.take(2)
    pool.take(1)
    assert pick(pool) == 0
    assert len(pool) == 0
    assert 3 in pool


def test_fair_picks_everyone_before_anyone_twice() -> None:
    pool, draws = pool_of("fair", 7), np.random.default_rng(0)
    busy: list[int] = []
    counts = Counter[int]()
    for _ in range(700):
        least = min(counts[c] for c in range(7) if c not in busy)
        busy.append(pick(pool))
        assert counts[busy[-1]] == least  # of those that could be picked, nobody had fewer
        counts[busy[-1]] += 1
        if len(busy) > 3:
            pool.add(busy.pop(int(draws.integers(len(busy)))))
    assert max(counts.values()) - min(counts.values()) < 10


def test_fair_orders_differ_between_rounds() -> None:
    pool, rounds = pool_of("fair", 6), []
    for _ in range(20):
        rounds.append(tuple(pick(pool) for _ in range(6)))
        assert sorted(rounds[-1]) == list(range(6))
        for client in range(6):
            pool.add(client)
    assert len(set(rounds)) > 15


def test_a_newcomer_is_neither_hammered_nor_ignored() -> None:
    pool = pool_of("fair", 3)
    for _ in range(30):
        pool.add(pick(pool))
    pool.add(99)
    picks = Counter(_cycle(pool, 40))
    assert abs(picks[99] - 10) <= 1


def _cycle(pool: selection.Selection, times: int) -> list[int]:
    seen = []
    for _ in range(times):
        seen.append(pick(pool))
        pool.add(seen[-1])
    return seen


def test_all_takes_the_lowest_first() -> None:
    pool = pool_of("all", 5)
    assert [pick(pool) for _ in range(3)] == [0, 1, 2]
    pool.add(1)
    pool.take(3)
    assert [pick(pool) for _ in range(2)] == [1, 4]
    pool.add(3)
    assert pick(pool) == 3
    assert len(pool) == 0


@pytest.mark.parametrize("policy", selection.POLICIES)
def test_the_departed_are_forgotten(policy: str) -> None:
    options = {"probabilities": dict.fromkeys(range(3), 1.0)} if policy == "biased" else {}
    pool = pool_of(policy, 3, **options)
    pool.forget(1)
    pool.forget(77)
    assert {pick(pool), pick(pool)} == {0, 2}
    assert len(pool) == 0


@pytest.mark.parametrize("policy", selection.POLICIES)
def test_state_goes_on_where_it_was(policy: str) -> None:
    options = {"probabilities": {c: c + 1.0 for c in range(9)}} if policy == "biased" else {}
    a, b = pool_of(policy, 9, **options), selection.create(policy, 2, **options)
    busy = [pick(a) for _ in range(5)]
    for client in busy[:2]:
        a.add(client)
    b.load_state_dict(a.state_dict())
    assert _cycle(a, 50) == _cycle(b, 50)


def test_bad_policies() -> None:
    with pytest.raises(ParameterError, match="expected one of uniform, biased, fair, all"):
        selection.create("random", 0)
    with pytest.raises(ParameterError, match="probabilities go with selection='biased'"):
        selection.create("biased", 0)
    with pytest.raises(ParameterError, match="probability of client 1 is -1"):
        selection.create("biased", 0, {0: 1.0, 1: -1.0})
    with pytest.raises(ParameterError, match="all probabilities are zero"):
        selection.create("biased", 0, {0: 0.0})


def test_afl_is_fair_by_default() -> None:
    c, _ = made("afl", 6, buffer=4, buffer_min=1)
    assert c.selection == "fair"
    counts: Counter[int] = Counter()
    for now in range(100):
        for job in c.dispatch(float(now)):
            counts[job.client] += 1
            c.push(answer(job), float(now))
    assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize(
    ("options", "clients"),
    [({"selection": "all"}, [0, 1, 2]), ({"selection": "all", "concurrency": 2}, [0, 1])],
)
def test_the_policy_all(options: dict[str, Any], clients: list[int]) -> None:
    c, _ = made("asgd", 3, options=options)
    assert [job.client for job in c.dispatch(0.0)] == clients


def test_biased_selection() -> None:
    c, _ = made("asgd", 3, options={"probabilities": {0: 1.0, 1: 0.0, 2: 0.0}})
    assert [job.client for job in c.dispatch(0.0)] == [0]
    assert c.pull(1, 0.0) is not None  # who comes on its own is served


def test_the_same_seed_gives_the_same_picks() -> None:
    def picks(seed: int) -> list[int]:
        c, _ = made("asgd", 50, options={"concurrency": 5, "seed": seed})
        return [job.client for job in c.dispatch(0.0)]

    assert picks(1) == picks(1)
    assert picks(1) != picks(2)


def test_clients_without_a_probability_still_answer_their_first_job() -> None:
    c, _ = made("ace", 2, options={"probabilities": {0: 1.0, 1: 0.0}})
    for job in c.dispatch(0.0):
        c.push(answer(job, "gradient"), 0.0)
    assert not c.opening
    c.join(5, 1.0)
    assert {job.client for job in c.dispatch(1.0)} == {0, 5}


def test_probabilities_that_can_never_fill_a_cohort_are_refused() -> None:
    with pytest.raises(errors.ParameterError, match="only 1 clients have a probability above 0, but a round takes 2"):
        Coordinator(strategies.create("fedavg", clients=2), probabilities={0: 1.0})
