"""The identities of the specification, by number."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from aflock import Job, Update, local, strategies
from aflock.models.quadratic import Quadratics
from aflock.strategies.base import Strategy
from aflock.types import Vector
from tests.contract.cases import Arrivals, Case, D, N, start, vector

ROUNDING = 2e-6


def same(a: Vector, b: Vector) -> None:
    np.testing.assert_allclose(a, b, rtol=ROUNDING, atol=ROUNDING)


def together(a: Strategy, b: Strategy, translate: Callable[[Update], Update], arrivals: int = 500) -> None:
    """Feeds both the same arrivals, the second one through `translate`, and compares after each."""
    source = Arrivals(11)
    for position in range(arrivals):
        update = source.update(a, position)
        a.receive(update)
        b.receive(translate(update))
        same(a.model, b.model)
        assert a.version == b.version


def test_1_fedbuff_with_buffer_one_is_asgd() -> None:
    e = 0.05
    asgd = strategies.create("asgd", clients=N, lr=e)
    fedbuff = strategies.create("fedbuff", clients=N, buffer=1, lr=1.0)
    start(asgd)
    start(fedbuff)

    def one_step(update: Update) -> Update:
        delta = (-e * update.vectors["gradient"].astype(np.float64)).astype(np.float32)
        return Update(update.client, update.version, {"delta": delta})

    together(asgd, fedbuff, one_step)


@pytest.mark.parametrize("cache", ["dense", "int8"])
def test_2_aced_with_an_infinite_threshold_is_ace(cache: str) -> None:
    """To the last bit: the same passes over the same numbers."""
    ace = strategies.create("ace", clients=N, cache=cache)
    aced = strategies.create("aced", clients=N, tau_algo=math.inf, cache=cache)
    start(ace)
    start(aced)
    source = Arrivals(11)
    for position in range(500):
        update = source.update(ace, position)
        ace.receive(update)
        aced.receive(update)
        assert np.array_equal(ace.model, aced.model)


def test_3_ace_is_ace_with_client_memory_is_ace_averaged_from_scratch() -> None:
    lr = 0.1
    server = strategies.create("ace", clients=N, lr=lr)
    client = strategies.create("ace", clients=N, lr=lr, memory="client")
    draws = np.random.default_rng(3)
    w0, first = vector(draws), {c: vector(draws) for c in range(N)}
    server.start(w0, first=first)
    client.start(w0, first=first)
    told = {c: g.astype(np.float64) for c, g in first.items()}
    rows = {c: g.astype(np.float64) for c, g in first.items()}
    w = w0 - lr * np.mean(list(rows.values()), axis=0)
    for position in range(500):
        c, g = int(draws.integers(N)), vector(draws)
        change = (g - told[c]).astype(np.float32)
        told[c] += change
        rows[c] = g.astype(np.float64)
        w -= lr * np.mean(list(rows.values()), axis=0)
        server.receive(Update(c, server.version, {"gradient": g}))
        client.receive(Update(c, client.version, {"gradient": change}))
        np.testing.assert_allclose(server.model, w, rtol=1e-6, atol=1e-6, err_msg=str(position))
        np.testing.assert_allclose(client.model, w, rtol=1e-5, atol=1e-6, err_msg=str(position))


def test_4_afa_cs_with_buffer_one_is_ace_once_both_hold_the_same_rows() -> None:
    """ace starts with its first gradients; afa-cs is given the same ones as its first arrivals, then the same model."""
    ace = strategies.create("ace", clients=N, lr=0.1)
    afa = strategies.create("afa-cs", clients=N, lr=0.1, buffer=1)
    draws = np.random.default_rng(4)
    w0, first = vector(draws), {c: vector(draws) for c in range(N)}
    ace.start(w0, first=first)
    afa.start(w0)
    for c in range(N):
        afa.receive(Update(c, 0, {"gradient": first[c]}))
    offset = ace.model.astype(np.float64) - afa.model
    for _ in range(300):
        c, g = int(draws.integers(N)), vector(draws)
        ace.receive(Update(c, 0, {"gradient": g}))
        afa.receive(Update(c, 0, {"gradient": g}))
        np.testing.assert_allclose(ace.model - afa.model, offset, rtol=1e-5, atol=1e-5)


def test_5_rolling_fedavg_is_twafl_without_decay() -> None:
    rolling = strategies.create("rolling-fedavg", clients=N)
    twafl = strategies.create("twafl", clients=N, decay=0.0)
    start(rolling)
    start(twafl)
    source = Arrivals(11)
    for position in range(300):
        update = source.update(rolling, position)
        rolling.receive(update)
        twafl.receive(update)
        assert np.array_equal(rolling.model, twafl.model)


@pytest.mark.parametrize("gamma", [0.1, 0.8, 0.999])
def test_6_mr_asyncfl_is_a_convex_combination_of_the_latest_models(gamma: float) -> None:
    s = strategies.create("mr-asyncfl", clients=N, gamma=gamma)
    start(s)
    latest = {c: s.model.astype(np.float64) for c in range(N)}
    source = Arrivals(11)
    for position in range(1500):  # far enough for the scale of the coefficients to be renewed
        update = source.update(s, position)
        s.receive(update)
        latest[update.client] = update.vectors["model"].astype(np.float64)
        c = s.coefficients  # type: ignore[attr-defined]
        assert sum(c.values()) == pytest.approx(1.0, abs=1e-12)
        same(s.model, sum(c[j] * latest[j] for j in range(N)).astype(np.float32))


def test_7_fedavg_with_all_clients_is_gradient_descent() -> None:
    problem, eta = Quadratics.random(N, D, seed=1), 0.1
    s = strategies.create("fedavg", clients=N)
    w0 = np.ones(D, np.float32)
    s.start(w0)
    rule = local.create("sgd", eta_l=eta)
    x = w0.astype(np.float64)
    for _ in range(20):
        for client in range(N):
            done = rule.train(s.job(client), _task(problem, client), 1, needs=s.needs)
            s.receive(Update(client, s.version, done.vectors, 1, 30))
        x -= eta * np.mean([problem.curvature[c] * (x - problem.centre[c]) for c in range(N)], axis=0)
        same(s.model, x.astype(np.float32))


ALONE = [
    Case("asgd", {"lr": 0.1}),
    Case("fedbuff", {"buffer": 1, "lr": 1.0}),
    Case("rolling-fedavg"),
    Case("twafl"),
    Case("mr-asyncfl", {"exchange": "after"}),
    Case("fedavg"),
    Case("afl"),
    Case("fedasync", {"staleness": "constant", "alpha": 1.0}),
]


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_8_one_client_without_delay_is_local_training(case: Case) -> None:
    problem, eta = Quadratics.random(1, D, seed=2), 0.1
    s = case.create(clients=1)
    w0 = np.full(D, 2.0, np.float32)
    s.start(w0)
    rule, steps = local.create("sgd", eta_l=eta), 1 if case.name == "asgd" else 3
    x = w0.copy()
    for _ in range(30):
        job = s.job(0)
        done = rule.train(job, _task(problem, 0), steps, needs=s.needs)
        s.receive(Update(0, job.version, done.vectors, steps))
        x = rule.train(Job(0, 0, x), _task(problem, 0), steps).vectors["model"]
        same(s.model, x)


def _task(problem: Quadratics, client: int) -> local.Task:
    return local.Task(lambda x, k: problem.gradient(client, x))
