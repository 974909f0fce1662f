"""SCAFFOLD's two halves together, under afa-cd and fedbuff."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aflock import Receipt, Update, local, strategies
from aflock.models.quadratic import Quadratics

N, D, ETA, STEPS = 5, 4, 0.05, 3


@pytest.mark.parametrize(("name", "params"), [("afa-cd", {"lr": 0.1}), ("fedbuff", {"lr": 1.0})])
def test_the_server_holds_the_mean_of_the_clients_control_variates(name: str, params: dict[str, Any]) -> None:
    problem = Quadratics.random(N, D, seed=0)
    s = strategies.create(f"{name}+scaffold", clients=N, buffer=2, **params)
    assert s.needs[-1] == "control"
    s.start(np.full(D, 2.0, np.float32))
    rule, memories = local.create("scaffold", eta_l=ETA), [local_memory() for _ in range(N)]
    draws = np.random.default_rng(1)
    for _ in range(60):
        client = int(draws.integers(N))
        job = s.job(client)
        task = local.Task(lambda x, k, c=client: problem.gradient(c, x))  # type: ignore[misc]
        done = rule.train(job, task, STEPS, needs=s.needs, memory=memories[client])
        done.keep(memories[client], s.receive(Update(client, job.version, done.vectors, done.steps)))
        if not s.pending:
            mean = sum(m.get("control", np.zeros(D)) for m in memories) / N
            np.testing.assert_allclose(s.job(0).extras["control"], mean, rtol=1e-5, atol=1e-6)


def local_memory() -> local.Memory:
    return {}


def test_the_clients_half_by_hand() -> None:
    """One weight, gradient x: w = 1, c = 0.5, c_i = 0.25, eta 0.1, two steps."""
    rule = local.create("scaffold", eta_l=0.1)
    from aflock import Job

    job = Job(0, 0, np.array([1.0], np.float32), {"control": np.array([0.5], np.float32)})
    memory: local.Memory = {"control": np.array([0.25], np.float32)}
    done = rule.train(job, local.Task(lambda x, k: x.copy()), 2, memory=memory)
    x1 = 1 - 0.1 * (1 - 0.25 + 0.5)  # 0.875
    x2 = x1 - 0.1 * (x1 - 0.25 + 0.5)  # 0.7625
    assert done.vectors["model"][0] == pytest.approx(x2, rel=1e-6)
    change = -0.5 + (1 - x2) / (2 * 0.1)
    assert done.vectors["control"][0] == pytest.approx(change, rel=1e-5)
    assert memory["control"][0] == 0.25  # until the server has taken the update
    done.keep(memory, Receipt("rejected", 0))
    assert memory["control"][0] == 0.25
    done.keep(memory, Receipt("buffered", 0))
    assert memory["control"][0] == pytest.approx(0.25 + change, rel=1e-5)


def test_scaffold_removes_the_drift_of_many_local_steps() -> None:
    """All clients at every step: with 20 local steps fedbuff ends off the optimum, with scaffold at it."""
    problem = Quadratics.random(N, D, seed=3)

    def final(name: str, rule_name: str) -> float:
        s = strategies.create(name, clients=N, buffer=N, lr=1.0)
        s.start(np.full(D, 2.0, np.float32))
        rule, memories = local.create(rule_name, eta_l=ETA), [local_memory() for _ in range(N)]
        for _ in range(400):
            for client in range(N):
                task = local.Task(lambda x, k, c=client: problem.gradient(c, x))  # type: ignore[misc]
                done = rule.train(s.job(client), task, 20, needs=s.needs, memory=memories[client])
                done.keep(memories[client], s.receive(Update(client, s.version, done.vectors, done.steps)))
        return float(np.linalg.norm(s.model - problem.optimum))

    assert final("fedbuff", "sgd") > 0.01
    assert final("fedbuff+scaffold", "scaffold") < 1e-4
