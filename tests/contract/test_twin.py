"""Arrival-by-arrival agreement with naive float64 twins written from the pseudo-code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aflock import rng
from tests.contract import twins
from tests.contract.cases import Arrivals, Case, D, N, all_cases, start, vector
from tests.contract.twin import Twin

ARRIVALS = 2_000
TOLERANCE = 1e-5

# int8 rows draw random bits and SCAFFOLD's half is checked on its own (test_scaffold.py).
COMPARED = [case for case in all_cases() if case.params.get("cache") != "int8" and "+" not in case.name]


def explicit(case: Case) -> dict[str, Any]:
    """The parameters the rule really runs with, as the twin takes them."""
    s = case.create()
    taken = {name: getattr(s.p, name) for name in s.p.__dataclass_fields__}
    for name in ("cache", "cache_dir", "steps", "rounds", "sends", "reset"):
        taken.pop(name, None)
    if case.name in ("masfl", "adamasfl"):
        taken.pop("smoothness", None)
        taken |= {"beta": s.beta, "gamma": s.gamma}  # type: ignore[attr-defined]
        draws = rng.stream(s.seed, case.name, "selection")
        taken["choose"] = lambda clients, size: sorted(map(int, draws.choice(np.array(clients), size, replace=False)))
    if case.name == "delay-adaptive" and taken["tau_c"] is None:
        taken["tau_c"] = N
    if case.name == "afl":
        cohort = rng.stream(s.seed, "afl", "cohort")
        taken["size"] = lambda least, most: int(cohort.integers(least, most, endpoint=True))
        taken["buffer"] = taken["buffer"] or N
    return taken


def twin_of(case: Case, seed: int) -> Twin:
    draws = np.random.default_rng([seed, 1])
    w0 = vector(draws).astype(np.float64)
    first = {c: vector(draws).astype(np.float64) for c in range(N)} if case.create().first else None
    return twins.make(case.name, N, w0, first, **explicit(case))


def relative(a: Any, b: Any) -> float:
    return float(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-30))


@pytest.mark.parametrize("case", COMPARED, ids=str)
def test_every_arrival_agrees(case: Case) -> None:
    seed = 3
    s, twin = case.create(), twin_of(case, seed)
    start(s, seed)
    arrivals = Arrivals(seed)
    assert relative(s.model, twin.w) < TOLERANCE
    for position in range(ARRIVALS):
        update = arrivals.update(s, position)
        # the twins call what a rule averages its gradient, also where clients send directions
        wide = {"gradient" if name == s.sends else name: v.astype(np.float64) for name, v in update.vectors.items()}
        staleness = twin.t - update.version
        outcome = twin.receive(update.client, update.version, wide, update.examples)
        receipt = s.receive(update)
        assert (receipt.outcome, receipt.staleness, s.version) == (outcome, staleness, twin.t), f"arrival {position}"
        assert relative(s.model, twin.w) < TOLERANCE, f"arrival {position}"
        version, model = twin.job(update.client)
        job = s.job(update.client)
        assert job.version == version
        assert relative(job.model, model) < TOLERANCE
        extra = twin.extra()
        if extra is not None:
            assert relative(job.extras["momentum"], extra) < TOLERANCE


def test_every_registered_rule_has_a_twin() -> None:
    from aflock import strategies

    assert {case.name for case in COMPARED} == set(strategies.names())


def test_the_comparison_can_fail() -> None:
    """A twin with another step size must not pass."""
    case = Case("asgd", {"lr": 0.1})
    s = case.create()
    start(s, 0)
    twin = twins.make("asgd", N, s.model.astype(np.float64), None, lr=0.1001)
    for position in range(50):
        update = Arrivals(0).update(s, position)
        twin.receive(update.client, update.version, {"gradient": update.vectors["gradient"].astype(np.float64)}, 1)
        s.receive(update)
    assert relative(s.model, twin.w) > TOLERANCE
    assert s.model.size == D
