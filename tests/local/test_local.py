"""The client rules, with numbers a reader can check."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from aflock import Job, Receipt, Update, errors, local, strategies
from aflock.types import Vector


def v(*numbers: float) -> Vector:
    return np.array(numbers, np.float32)


def job(model: Vector, **extras: Vector) -> Job:
    return Job(0, 0, model, extras)


TAKEN = Receipt("applied", 0)
QUADRATIC = local.Task(lambda x, k: x.copy())  # F(x) = x^2/2
SLOPE = local.Task(lambda x, k: np.full_like(x, k + 1.0))  # gradient 1, 2, 3 ... whatever x


def test_the_four_vectors_by_hand() -> None:
    """Three steps of 0.1 along 1, 2, 3 from (1, 5): x_K = (0.4, 4.4)."""
    done = local.create("sgd", eta_l=0.1).train(job(v(1, 5)), SLOPE, 3)
    assert done.steps == 3
    np.testing.assert_allclose(done.vectors["gradient"], [2, 2])
    np.testing.assert_allclose(done.vectors["model"], [0.4, 4.4], rtol=1e-6)
    np.testing.assert_allclose(done.vectors["delta"], [-0.6, -0.6], rtol=1e-6)
    np.testing.assert_allclose(done.vectors["direction"], [2, 2], rtol=1e-6)


def test_only_what_is_needed_is_made() -> None:
    done = local.create("sgd").train(job(v(1)), SLOPE, 1, needs=("delta",))
    assert set(done.vectors) == {"delta"}


def test_the_job_is_not_touched() -> None:
    model = v(1, 2)
    model.flags.writeable = False
    local.create("sgd").train(job(model), QUADRATIC, 5)
    assert model.tolist() == [1, 2]


def test_momentum_and_weight_decay_by_hand() -> None:
    """momentum 0.5, decay 0.1, eta 0.1 from 1 with gradients 1, 2: v = 1.1, then 0.55 + 2 + 0.089."""
    rule = local.create("sgd", eta_l=0.1, momentum=0.5, weight_decay=0.1)
    done = rule.train(job(v(1)), SLOPE, 2)
    x1 = 1 - 0.1 * (1 + 0.1 * 1)
    x2 = x1 - 0.1 * (0.5 * (1 + 0.1 * 1) + 2 + 0.1 * x1)
    assert done.vectors["model"][0] == pytest.approx(x2, rel=1e-6)
    assert done.vectors["gradient"][0] == 1.5  # the raw gradients, without decay


def test_momentum_starts_anew_in_every_job() -> None:
    rule = local.create("sgd", eta_l=0.1, momentum=0.9)
    first = rule.train(job(v(1)), SLOPE, 3).vectors["model"]
    assert np.array_equal(first, rule.train(job(v(1)), SLOPE, 3).vectors["model"])


def test_fedprox_by_hand() -> None:
    """mu 0.5, eta 0.1, from 1: x1 = 0.9, x2 = 0.9 - 0.1*(2 + 0.5*(0.9 - 1)) = 0.705."""
    done = local.create("fedprox", eta_l=0.1, mu=0.5).train(job(v(1)), SLOPE, 2)
    assert done.vectors["model"][0] == pytest.approx(0.705, rel=1e-6)


def test_fedprox_without_mu_is_sgd() -> None:
    a = local.create("fedprox", eta_l=0.1, mu=0.0).train(job(v(1, 2)), QUADRATIC, 4)
    b = local.create("sgd", eta_l=0.1).train(job(v(1, 2)), QUADRATIC, 4)
    assert np.array_equal(a.vectors["model"], b.vectors["model"])


def test_masfl_by_hand() -> None:
    """beta 0.5, ct = 4, extra = 10: directions 0.5*(1-4)+10 = 8.5 and 9; afterwards ct is the mean gradient 1.5."""
    memory: local.Memory = {"gradient": v(4)}
    rule = local.create("masfl", beta=0.5, eta_l=0.1)
    done = rule.train(job(v(1), momentum=v(10)), SLOPE, 2, memory=memory)
    assert done.vectors["model"][0] == pytest.approx(1 - 0.1 * 8.5 - 0.1 * 9, rel=1e-6)
    done.keep(memory, TAKEN)
    assert memory["gradient"][0] == 1.5


def test_adamasfl_steps_have_unit_length() -> None:
    """(3, 4)/5 along each step: eta 0.1, two steps."""
    memory: local.Memory = {"gradient": v(0, 0)}
    task = local.Task(lambda x, k: v(0, 0))
    rule = local.create("adamasfl", beta=0.5, eta_l=0.1)
    done = rule.train(job(v(1, 1), momentum=v(3, 4)), task, 2, memory=memory)
    np.testing.assert_allclose(done.vectors["model"], [1 - 0.12, 1 - 0.16], rtol=1e-6)
    np.testing.assert_allclose(done.vectors["direction"], [0.6, 0.8], rtol=1e-5)


def test_a_zero_norm_moves_nothing() -> None:
    memory: local.Memory = {"gradient": v(0, 0)}
    task = local.Task(lambda x, k: v(0, 0))
    done = local.create("adamasfl", beta=0.5).train(job(v(1, 1), momentum=v(0, 0)), task, 2, memory=memory)
    assert done.vectors["model"].tolist() == [1, 1]
    assert done.vectors["direction"].tolist() == [0, 0]


def test_the_theorems_defaults() -> None:
    """S = 10, K = 5, T = 200: beta = 0.5, gamma = 50^0.25 / 200^0.75, eta = 1/(5 sqrt 200)."""
    shared: dict[str, Any] = {"buffer": 10, "steps": 5, "rounds": 200}
    server: Any = strategies.create("adamasfl", clients=20, **shared)
    assert server.beta == 0.5
    assert server.gamma == pytest.approx(50**0.25 / 200**0.75)
    assert server.eta_l == pytest.approx(1 / (5 * math.sqrt(200)))
    client: Any = local.create("adamasfl", **shared)
    assert (client.beta, client.eta_l) == (server.beta, server.eta_l)
    plain: Any = strategies.create("masfl", clients=20, smoothness=2.0, **shared)
    assert (plain.beta, plain.gamma) == (0.5, 0.5 / 8)
    assert local.create("masfl", **shared).beta == 0.5  # type: ignore[attr-defined]


def test_the_first_job_samples_without_moving() -> None:
    """K gradients at w^s, their mean, and nothing else; masfl remembers it."""
    memory: local.Memory = {}
    opening = Job(0, 0, v(3), first=True)
    done = local.create("masfl", beta=0.5).train(opening, local.Task(lambda x, k: x + k), 3, memory=memory)
    assert (done.vectors["gradient"][0], done.steps) == (4.0, 3)
    assert set(done.vectors) == {"gradient"}
    assert memory == {}
    done.keep(memory, TAKEN)
    assert memory["gradient"][0] == 4.0


def test_client_memory_sends_changes_that_never_drift() -> None:
    """What the server adds up is the client's gradient, after a thousand roundings."""
    rule, draws = local.create("sgd"), np.random.default_rng(0)
    memory: local.Memory = {}
    gradients = (1e4 * draws.standard_normal((1000, 3))).astype(np.float32)
    opening = Job(0, 0, v(0, 0, 0), first=True)
    done = rule.train(opening, local.Task(lambda x, k: gradients[0]), changes=("gradient",), memory=memory)
    done.keep(memory, TAKEN)
    told = done.vectors["gradient"].astype(np.float64)
    for g in gradients[1:]:
        task = local.Task(lambda x, k, g=g: g)  # type: ignore[misc]
        done = rule.train(job(v(0, 0, 0)), task, needs=("gradient",), changes=("gradient",), memory=memory)
        done.keep(memory, TAKEN)
        told += done.vectors["gradient"]
        np.testing.assert_allclose(told, g, rtol=1e-6, atol=2e-3)
    np.testing.assert_allclose(told, gradients[-1], rtol=1e-6, atol=2e-3)


def test_ace_with_client_memory_through_the_local_rule_is_ace() -> None:
    n = 4
    a = strategies.create("ace", clients=n)
    b = strategies.create("ace", clients=n, memory="client")
    rule, memories = local.create("sgd"), [dict[str, Any]() for _ in range(n)]
    draws = np.random.default_rng(0)
    first = {c: v(*draws.standard_normal(3)) for c in range(n)}
    a.start(v(0, 0, 0), first=first)
    opening = {}
    for c in range(n):
        task = local.Task(lambda x, k, c=c: first[c])  # type: ignore[misc]
        done = rule.train(Job(c, 0, v(0, 0, 0), first=True), task, changes=b.changes, memory=memories[c])
        done.keep(memories[c], TAKEN)
        opening[c] = done.vectors["gradient"]
    b.start(v(0, 0, 0), first=opening)
    for _ in range(200):
        c, g = int(draws.integers(n)), v(*draws.standard_normal(3))
        task = local.Task(lambda x, k, g=g: g)  # type: ignore[misc]
        done = rule.train(b.job(c), task, needs=b.needs, changes=b.changes, memory=memories[c])
        a.receive(Update(c, a.version, {"gradient": g}))
        done.keep(memories[c], b.receive(Update(c, b.version, done.vectors)))
        np.testing.assert_allclose(a.model, b.model, rtol=1e-5, atol=1e-6)


def test_adam_by_hand() -> None:
    """One step of Adam from zero moments has the length of the rate, whatever the gradient."""
    done = local.create("adam", gamma_0=0.01).train(job(v(1, 1)), local.Task(lambda x, k: v(5, -0.002)), 1)
    np.testing.assert_allclose(done.vectors["model"], [0.99, 1.01], rtol=1e-5)


def test_adam_against_a_plain_loop() -> None:
    p = {"gamma_0": 0.05, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1}
    for name in ("adam", "adamw"):
        done = local.create(name, decay_epochs=False, **p).train(job(v(1, -2)), QUADRATIC, 30)
        x, m, s = np.array([1.0, -2.0]), np.zeros(2), np.zeros(2)
        for k in range(1, 31):
            g = x.copy()
            if name == "adam":
                g += 0.1 * x
            else:
                x = x * (1 - 0.05 * 0.1)
            m, s = 0.8 * m + 0.2 * g, 0.95 * s + 0.05 * g * g
            x = x - 0.05 * (m / (1 - 0.8**k)) / (np.sqrt(s / (1 - 0.95**k)) + 1e-6)
        np.testing.assert_allclose(done.vectors["model"], x, rtol=1e-4)


def test_the_delay_aware_rate() -> None:
    """gamma_0/(sqrt(e+1)*(1+alpha*tau)), times the cosine of the round."""
    rule: Any = local.create("adam", gamma_0=0.01, alpha=0.5, rounds=10)
    assert rule.rate(0, 0, 0) == pytest.approx(0.01)
    assert rule.rate(3, 0, 0) == pytest.approx(0.005)
    assert rule.rate(0, 2, 0) == pytest.approx(0.005)
    assert rule.rate(3, 2, 0) == pytest.approx(0.0025)
    assert rule.rate(0, 0, 5) == pytest.approx(0.005)
    assert rule.rate(0, 0, 10) == pytest.approx(0, abs=1e-12)
    assert rule.rate(0, 0, 99) == pytest.approx(0, abs=1e-12)


def test_the_rate_falls_by_epoch_not_by_step() -> None:
    """Two batches per epoch, constant gradient: both steps of an epoch have its rate."""
    rule = local.create("adam", gamma_0=0.01, eps=1e-12)
    done = rule.train(job(v(0)), local.Task(lambda x, k: v(1), batches=2), 4)
    assert done.vectors["model"][0] == pytest.approx(-2 * 0.01 - 2 * 0.01 / math.sqrt(2), rel=1e-4)


def test_a_delay_shortens_the_steps() -> None:
    rule = local.create("adam", gamma_0=0.01, alpha=1.0)
    near = rule.train(job(v(0)), local.Task(lambda x, k: v(1)), 1, delay=0).vectors["model"][0]
    far = rule.train(job(v(0)), local.Task(lambda x, k: v(1)), 1, delay=3).vectors["model"][0]
    assert far == pytest.approx(near / 4, rel=1e-5)


def test_early_stopping_returns_the_best_epoch() -> None:
    """Losses 5, 3, 4, 4, 4: the third epoch without improvement ends the job after five, with the second epoch's x."""
    losses, seen = [5.0, 3.0, 4.0, 4.0, 4.0, 0.0], []

    def validation(x: Vector) -> float:
        seen.append(x.copy())
        return losses[len(seen) - 1]

    task = local.Task(lambda x, k: v(1), batches=3, validation=validation)
    done = local.create("adam", patience=3).train(job(v(0)), task, 18)
    assert (len(seen), done.steps) == (5, 15)
    assert np.array_equal(done.vectors["model"], seen[1])


@pytest.mark.parametrize("epochs", [5, 4], ids=["stopped early", "out of steps"])
@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_a_direction_is_divided_by_the_rates_up_to_the_best_epoch(name: str, epochs: int) -> None:
    """A gradient of 1 makes every step as long as its rate: the direction is 1, whichever epoch was the best."""
    losses = iter([5.0, 3.0, 4.0, 4.0, 4.0])
    task = local.Task(lambda x, k: v(1), batches=3, validation=lambda x: next(losses))
    done = local.create(name, patience=3).train(job(v(0)), task, 3 * epochs, needs=("direction",))
    assert done.steps == 3 * epochs
    assert done.vectors["direction"] == pytest.approx(1.0, rel=1e-5)


def test_without_early_stopping_validation_is_not_asked() -> None:
    def never(x: Vector) -> float:
        raise AssertionError

    done = local.create("adam").train(job(v(0)), local.Task(lambda x, k: v(1), validation=never), 5)
    assert done.steps == 5


def test_a_job_that_improves_to_the_end_keeps_its_last_epoch() -> None:
    task = local.Task(lambda x, k: v(1), validation=lambda x: float(x[0]))
    done = local.create("adamw", patience=1).train(job(v(0)), task, 5)
    assert done.steps == 5
    assert done.vectors["model"][0] < -0.003


def test_steps() -> None:
    draws = np.random.default_rng(0)
    assert local.Fixed(5).draw(draws.random(), 7) == 5
    assert local.Epochs(3).draw(draws.random(), 7) == 21
    seen = [local.Dynamic(4).draw(draws.random(), 7) for _ in range(4000)]
    assert (min(seen), max(seen)) == (1, 8)
    counts = np.bincount(seen, minlength=9)[1:]
    assert np.all(np.abs(counts - 500) < 5 * math.sqrt(500))
    for wrong in (lambda: local.Fixed(0), lambda: local.Dynamic(0), lambda: local.Epochs(-1)):
        with pytest.raises(errors.CountError, match="expected an integer of at least 1"):
            wrong()


def test_bad_input() -> None:
    with pytest.raises(errors.CountError, match="steps is 0; expected an integer of at least 1"):
        local.create("sgd").train(job(v(1)), QUADRATIC, 0)
    with pytest.raises(errors.MissingVector, match="scaffold needs the job's extra vector 'control'"):
        local.create("scaffold").train(job(v(1)), QUADRATIC, memory={})
    with pytest.raises(errors.MissingVector, match="must answer a first job"):
        local.create("masfl", beta=0.5).train(job(v(1), momentum=v(1)), QUADRATIC, memory={})
    with pytest.raises(errors.MissingVector, match="must answer a first job"):
        local.create("sgd").train(job(v(1)), QUADRATIC, changes=("gradient",), memory={})
    for forgetful in ({"changes": ("gradient",)}, {}):
        with pytest.raises(errors.MissingVector, match="pass memory=, a dictionary that stays with the client"):
            local.create("sgd" if forgetful else "scaffold").train(job(v(1), control=v(1)), QUADRATIC, **forgetful)  # type: ignore[arg-type]
    for wrong in (v(1, 2), None, 3.0):
        with pytest.raises(errors.VectorError, match="the task's gradient has shape"):
            local.create("sgd").train(job(v(1)), local.Task(lambda x, k, w=wrong: w))  # type: ignore[misc]
    with pytest.raises(errors.CountError, match=r"steps is 1\.5"):
        local.create("sgd").train(job(v(1)), QUADRATIC, 1.5)  # type: ignore[arg-type]
    with pytest.raises(errors.UnknownName, match="did you mean 'fedprox'"):
        local.create("fedprx")
    with pytest.raises(errors.UnknownParameter, match="did you mean 'eta_l'"):
        local.create("sgd", etal=1)
